"""Models in a bucket are copied once, as a whole or not at all. The bucket is a folder that epath takes for gs://."""

import concurrent.futures
import os
import pathlib
import shutil
import types

import chex
from etils.epath import backend
import pytest

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, model_files, remote_files
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.adapters import peft_files
from tests import tiny
from tests.models.exported_models import export_adapter

ADDRESS = 'gs://here/models/tiny'


def test_a_model_in_a_bucket_is_read_from_a_copy(bucket, tmp_path):
  folder = tiny.make_model(bucket / 'models' / 'tiny')
  (folder / 'training_args.bin').write_bytes(b'not wanted')
  _, expected = huggingface.load(folder, ModelConfig())
  _, found = huggingface.load(ADDRESS, ModelConfig())
  chex.assert_trees_all_equal(found, expected)
  assert tokenizers.load(ADDRESS).encode('a') == tokenizers.load(folder).encode('a')
  (bucket / 'bare.jinja').write_text('{{ messages[0].content }}')
  assert tokenizers.load(ADDRESS, chat_template='gs://here/bare.jinja').chat_template == '{{ messages[0].content }}'
  with pytest.raises(UserError, match=r'model\.chat_template=gs://here/none\.jinja cannot be read'):
    tokenizers.load(ADDRESS, chat_template='gs://here/none.jinja')
  [copy] = (tmp_path / 'copies').iterdir()
  copied = {path.name for path in folder.iterdir()} - {'training_args.bin'}
  assert {path.name for path in copy.iterdir()} == copied | {remote_files.RECORD}


def test_an_adapter_in_a_bucket_is_read_from_a_copy(bucket, tmp_path):
  model = tiny.make_model(tmp_path / 'model')
  export_adapter(bucket / 'models' / 'tiny', model)

  def load(path):
    return huggingface.load(model, ModelConfig(lora=LoraConfig(path=str(path))))

  (expected_policy, expected), (policy, found) = load(bucket / 'models' / 'tiny_adapter'), load(f'{ADDRESS}_adapter')
  assert policy == expected_policy
  chex.assert_trees_all_equal(found, expected)
  assert (tmp_path / 'copies' / 'gs_here_models_tiny_adapter' / peft_files.WEIGHTS).exists()
  with pytest.raises(UserError, match=r'model\.lora\.path=gs://here/models/none (cannot be read|holds no adapter)'):
    load('gs://here/models/none')


def resolved(**settings):
  """Resolve the model as another process would."""
  remote_files.fetch.cache_clear()
  return model_files.resolve(ADDRESS, **settings)


@pytest.fixture
def copied(monkeypatch):
  """Record the names of the files that are copied."""
  names, copy = [], backend.fsspec_backend.copy

  def note(path, target, overwrite):
    names.append(pathlib.PurePosixPath(path).name)
    copy(path, target, overwrite)

  monkeypatch.setattr(backend.fsspec_backend, 'copy', note)
  return names


def test_only_what_has_changed_is_copied_again(bucket, copied):
  """Even if the size is the same, as for all weights of an architecture."""
  folder = tiny.make_model(bucket / 'models' / 'tiny')
  copy = resolved()
  assert sorted(copied) == sorted(path.name for path in folder.iterdir())
  copied.clear()
  assert resolved(weights=False) == resolved() == copy and copied == []
  weights = folder / 'model.safetensors'
  content = bytes(reversed(weights.read_bytes()))
  weights.write_bytes(content)
  os.utime(weights, (0, 2e9))
  (folder / 'README.txt').write_text('new')
  (folder / 'SHA256SUMS').unlink()
  assert resolved(weights=False) == copy
  assert copied == ['README.txt'] and not (copy / 'SHA256SUMS').exists()
  assert resolved() == copy
  assert copied == ['README.txt', 'model.safetensors'] and (copy / 'model.safetensors').read_bytes() == content


def test_weights_that_the_index_does_not_name_are_not_copied(bucket, copied):
  folder = tiny.make_model(bucket / 'models' / 'tiny')
  (folder / 'model.safetensors').rename(folder / 'model-1.safetensors')
  (folder / 'consolidated.safetensors').write_bytes(b'the same weights a second time')
  (folder / 'model.safetensors.index.json').write_text('{"weight_map": {"a": "model-1.safetensors"}}')
  resolved()
  assert 'model-1.safetensors' in copied and 'consolidated.safetensors' not in copied


def test_a_model_that_cannot_be_used_is_not_copied(bucket, copied):
  folder = tiny.make_model(bucket / 'models' / 'tiny')
  (folder / 'config.json').write_text('{"model_type": "unheard_of"}')
  with pytest.raises(UserError, match=rf"{ADDRESS}/config\.json: model_type 'unheard_of' is not supported"):
    resolved()
  assert 'config.json' in copied and 'model.safetensors' not in copied


def test_a_copy_is_on_the_disk_before_it_has_its_name(bucket, tmp_path, monkeypatch):
  tiny.make_model(bucket / 'models' / 'tiny')
  synced, copy = [], tmp_path / 'copies' / 'gs_here_models_tiny'

  def note(descriptor):
    path = pathlib.Path(os.readlink(f'/proc/self/fd/{descriptor}'))
    synced.append((path.name, path.with_name(path.name.removesuffix(remote_files.PARTIAL)).exists()))

  monkeypatch.setattr(os, 'fsync', note)
  assert resolved() == copy
  files = {path.name for path in copy.iterdir()} - {remote_files.RECORD}
  assert {(name + remote_files.PARTIAL, False) for name in files} <= set(synced)
  assert synced[-1] == (copy.name, True)


def test_a_copy_that_was_interrupted_goes_on(bucket, tmp_path, monkeypatch, copied):
  """Complete files are kept and others copied again, even if a killed process has left half a file."""
  folder = tiny.make_model(bucket / 'models' / 'tiny')
  copy = backend.fsspec_backend.copy

  def fail(path, target, overwrite):
    if pathlib.PurePosixPath(path).name == 'model.safetensors':
      pathlib.Path(target).write_text('half')
      raise OSError('No space left on device')
    copy(path, target, overwrite)

  with monkeypatch.context() as patch:
    patch.setattr(backend.fsspec_backend, 'copy', fail)
    with pytest.raises(UserError, match=r'could not be copied .* \(No space left on device\): make room .* is kept'):
      resolved()
  target = tmp_path / 'copies' / 'gs_here_models_tiny'
  assert not (target / 'model.safetensors').exists() and (target / 'config.json').exists()
  copied.clear()
  assert resolved() == target and copied == ['model.safetensors']
  assert {path.name for path in target.iterdir()} == {path.name for path in folder.iterdir()} | {remote_files.RECORD}
  assert (target / 'model.safetensors').read_bytes() == (folder / 'model.safetensors').read_bytes()


def test_a_file_that_changes_while_it_is_copied_is_not_taken_for_either_version(bucket, tmp_path, monkeypatch):
  folder = tiny.make_model(bucket / 'models' / 'tiny')
  weights, copy = folder / 'model.safetensors', backend.fsspec_backend.copy

  def change(path, target, overwrite):
    copy(path, target, overwrite)
    if pathlib.PurePosixPath(path).name == weights.name:
      os.utime(weights, (0, 2e9))  # Of the same size, as all weights of an architecture are.

  with monkeypatch.context() as patch:
    patch.setattr(backend.fsspec_backend, 'copy', change)
    with pytest.raises(UserError, match=r'model\.safetensors was changed while it was copied: start again'):
      resolved()
  assert not (tmp_path / 'copies' / 'gs_here_models_tiny' / weights.name).exists()
  assert (resolved() / weights.name).read_bytes() == weights.read_bytes()


def test_a_copy_for_which_there_is_no_room_is_not_begun(bucket, monkeypatch, copied):
  tiny.make_model(bucket / 'models' / 'tiny')
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=5000))
  with pytest.raises(UserError, match=r'needs 0\.0 GB more in .*copies, where 0\.0 GB are free: make room'):
    resolved()
  assert copied == []


def test_processes_that_want_it_at_once_make_one_copy(bucket, copied, caplog):
  folder = tiny.make_model(bucket / 'models' / 'tiny')
  with concurrent.futures.ThreadPoolExecutor(4) as processes:  # A lock is of an open file, so that threads will do.
    [copy] = set(processes.map(lambda _: remote_files.fetch.__wrapped__(ADDRESS, ('*',)), range(4)))
  assert sorted(copied) == sorted(path.name for path in folder.iterdir())
  assert (copy / 'model.safetensors').read_bytes() == (folder / 'model.safetensors').read_bytes()


@pytest.mark.parametrize('address', ['gs://here/models/none', 'gs://here/models'])
def test_what_is_no_model_is_named(bucket, address):
  with pytest.raises(UserError, match=rf'model\.path={address} (cannot be read|holds no model)'):
    model_files.resolve(address)
