"""Values of --cartridge and model.cartridge.path: either format, on a disk, in an object store or on the hub."""

import hashlib
import logging
import shutil

import numpy as np
import pytest
import torch

from sdpo_jax.config import CartridgeConfig, ModelConfig
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.models.adapters import cartridge_files, named_cartridges, published_cartridges
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from tests import tiny
from tests.models.adapters import cartridges
from tests.models.adapters.cartridges import assert_equal, config_of, make, origin_of


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """Return a model directory with 2 layers and 2 key-value heads of 8."""
  return tiny.make_model(tmp_path_factory.mktemp('named') / 'model')


def read(path, model):
  return named_cartridges.read(path, model, config_of(model))


def policy_with(path, model):
  return huggingface.read_policy(model, ModelConfig(cartridge=CartridgeConfig(path=str(path))))


def test_both_formats_are_taken_and_only_of_one_the_weights_are_known(model, tmp_path, caplog):
  cartridge_files.write(tmp_path / 'ours', make(frozen=3), origin_of(model))
  published_cartridges.write(tmp_path / 'theirs', make(frozen=3), 'some/model', dtype='float32')
  shutil.copy(tmp_path / 'theirs' / 'cartridge.pt', tmp_path / 'alone.pt')
  for path in ('ours', 'theirs', 'alone.pt'):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
      assert_equal(read(tmp_path / path, model), make(frozen=3))
    assert policy_with(tmp_path / path, model).adapter == KVPrefix(16, 3)
    said = 'does not say which weights it belongs to' in caplog.text
    assert said == (path != 'ours') and ('names some/model' in caplog.text) == (path == 'theirs')
    slots = next(tmp_path.glob(f'{path}/*.safetensors'), next(tmp_path.glob(f'{path}/*.pt'), tmp_path / path))
    assert named_cartridges.describe(tmp_path / path).sha256 == hashlib.sha256(slots.read_bytes()).hexdigest()


def test_a_file_that_was_replaced_is_described_anew(model, tmp_path):
  published_cartridges.write(tmp_path / 'a', make(), 'some/model')
  assert policy_with(tmp_path / 'a', model).adapter == KVPrefix(16, 1)
  published_cartridges.write(tmp_path / 'b', make(slots=32, frozen=0), 'some/model')
  for name in ('cartridge.pt', 'config.yaml'):
    (tmp_path / 'b' / name).replace(tmp_path / 'a' / name)
  assert policy_with(tmp_path / 'a', model).adapter == KVPrefix(32, 0)


def test_what_others_have_published_is_taken_from_buckets_and_the_hub(bucket, model, tmp_path, monkeypatch):
  made = bucket / 'models' / 'theirs'
  published_cartridges.write(made, make(), 'some/model', dtype='float32')
  (made / 'cartridge.pt').rename(made / 'cache-step64.pt')
  assert_equal(read('gs://here/models/theirs', model), make())
  cartridge_files.write(bucket / 'models' / 'ours', make(), origin_of(model))
  assert_equal(read('gs://here/models/ours', model), make())
  with pytest.raises(UserError, match='gs://here/models/none'):
    read('gs://here/models/none', model)

  def download(name, allow_patterns):
    assert name == 'someone/cartridge' and {'*.pt', 'config.yaml', 'cartridge.json'} <= set(allow_patterns)
    return str(made)

  monkeypatch.setattr('huggingface_hub.snapshot_download', download)
  assert_equal(read('someone/cartridge', model), make())
  assert policy_with('someone/cartridge', model).adapter == KVPrefix(16, 1)


@pytest.mark.parametrize('open_', [read, policy_with])
def test_what_is_no_cartridge_of_the_model_is_refused_before_the_model_is_read(open_, model, tmp_path):
  (tmp_path / 'foreign').mkdir()
  (tmp_path / 'foreign' / 'README.md').write_text('Nothing.')
  with pytest.raises(UserError, match=r'foreign holds no cartridge: it has neither cartridge\.json nor a \.pt file'):
    open_(tmp_path / 'foreign', model)
  with pytest.raises(
    UserError, match=r'The cartridge directory .*gone does not exist: set model\.cartridge\.path to one that does'
  ):
    open_(tmp_path / 'gone', model)
  golden = cartridges.GOLDEN / 'L2_H2_P16_F1_D16_fixed.pt'
  with pytest.raises(UserError, match='key-value heads of 16, but this model has 2 layers and 2 key-value heads of 8'):
    open_(golden, model)
  with pytest.raises(UserError, match=r'unknown://bucket/a cannot be read'):
    open_('unknown://bucket/a', model)
  (tmp_path / 'short.pt').write_bytes(golden.read_bytes()[:4000])
  with pytest.raises(UserError, match=r'short\.pt is damaged or not a file of torch\.save'):
    open_(tmp_path / 'short.pt', model)
  two = tmp_path / 'two'
  two.mkdir()
  for name in ('a.pt', 'b.pt'):
    shutil.copy(golden, two / name)
  with pytest.raises(UserError, match=r'or a single \.pt file, but holds a\.pt, b\.pt'):
    open_(two, model)


def test_numbers_that_are_none_are_refused(model, tmp_path):
  published_cartridges.write(tmp_path / 'a', make(), 'some/model', dtype='float32')
  lists = torch.load(tmp_path / 'a' / 'cartridge.pt', weights_only=False)
  with torch.no_grad():
    lists['trainable_values'][1][0, 1, 4, 2] = np.nan
  torch.save(lists, tmp_path / 'a' / 'cartridge.pt')
  with pytest.raises(UserError, match=r'layer 1 of its values holds 1 values of \d+ that are not finite'):
    policy_with(tmp_path / 'a', model)
