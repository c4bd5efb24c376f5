"""Cartridge files: what is read equals what was written, and all other files are refused with a sentence."""

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
import yaml

from sdpo_jax.config import ModelConfig
from sdpo_jax.errors import UserError
from sdpo_jax.models import checksums, huggingface
from sdpo_jax.models.adapters import cartridge, cartridge_files, cartridge_pt, kv_prefix, published_cartridges
from sdpo_jax.models.adapters.cartridge import Cartridge
from tests import tiny
from tests.golden import __main__ as golden
from tests.golden import cartridges as golden_cartridges
from tests.models.adapters import prefixed_models
from tests.models.adapters.cartridges import (
  GOLDEN,
  assert_equal,
  config_of,
  loaded_as_published,
  make,
  origin_of,
  past_of,
)
from tests.training_states import flipped


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """Return a model directory with 2 layers and 2 key-value heads of 8."""
  return tiny.make_model(tmp_path_factory.mktemp('cartridges') / 'model')


@pytest.fixture
def written(model, tmp_path):
  cartridge_files.write(tmp_path / 'made', make(), origin_of(model), about={'document': 'a.txt'})
  return tmp_path / 'made'


def read(path, model):
  return cartridge_files.read(path, origin_of(model), config_of(model))


# The project's own format.


def test_what_is_read_is_what_was_written(written, model, tmp_path):
  assert_equal(read(written, model), make())
  found = safetensors.numpy.load_file(written / 'cartridge.safetensors')
  assert set(found) == {f'layers.{layer}.{what}' for layer in range(2) for what in ('key', 'value')}
  np.testing.assert_array_equal(found['layers.1.value'], make().values[1])
  manifest = json.loads((written / 'cartridge.json').read_text())
  assert (manifest['slots'], manifest['frozen'], manifest['text_position']) == (16, 1, 16)
  assert manifest['sha256'] == hashlib.sha256((written / 'cartridge.safetensors').read_bytes()).hexdigest()
  assert manifest['model']['name'] == str(model) and manifest['model']['attention']['ropes'][0]['theta'] == 10000.0
  assert cartridge_files.read_manifest(written).about == {'document': 'a.txt'}
  other = make(frozen=0, within_windows=True)
  cartridge_files.write(tmp_path / 'other', other, origin_of(model))
  assert_equal(read(tmp_path / 'other', model), other)


def test_bfloat16_halves_the_file_and_rounds_once(written, model, tmp_path):
  cartridge_files.write(tmp_path / 'half', make(), origin_of(model), 'bfloat16')
  expected = torch.tensor(make().keys).to(torch.bfloat16).float().numpy()
  np.testing.assert_array_equal(read(tmp_path / 'half', model).keys, expected)
  sizes = [(path / 'cartridge.safetensors').stat().st_size for path in (written, tmp_path / 'half')]
  assert sizes[0] - sizes[1] == pytest.approx(2 * make().keys.size * 2, abs=16)
  loud = dataclasses.replace(make(), values=np.full(make().values.shape, 3.4e38, np.float32))
  with pytest.raises(UserError, match=r'layers\.0\.value of the cartridge holds values up to 3\.4e\+38.*in float32'):
    cartridge_files.write(tmp_path / 'loud', loud, origin_of(model), 'bfloat16')
  assert not (tmp_path / 'loud').exists()


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(written, model, monkeypatch, tmp_path):
  with pytest.raises(UserError, match='already exists and is not empty'):
    cartridge_files.write(written, make(), origin_of(model))
  monkeypatch.setattr(cartridge_files.json, 'dumps', lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
  with pytest.raises(KeyboardInterrupt):
    cartridge_files.write(tmp_path / 'new', make(), dataclasses.replace(origin_of(model)))
  assert {path.name for path in tmp_path.iterdir()} == {'made'}


def test_every_flipped_bit_is_noticed(written, model):
  assert {path.name for path in written.iterdir()} == {
    cartridge_files.TENSORS,
    cartridge_files.MANIFEST,
    checksums.SUMS,
  }
  for path in (written / cartridge_files.TENSORS, written / cartridge_files.MANIFEST):
    content = path.read_bytes()
    for bit in np.random.default_rng(1).choice(8 * len(content), 60, replace=False):
      changed = flipped(content, int(bit))
      path.write_bytes(changed)
      if path.suffix == '.json' and _same_json(changed, content):
        continue  # A blank that became another one, say.
      with pytest.raises(UserError, match=path.name):
        read(written, model)
    path.write_bytes(content)
  assert_equal(read(written, model), make())


def _same_json(left, right):
  try:
    return json.loads(left.decode()) == json.loads(right.decode())
  except ValueError:
    return False


def test_a_cartridge_of_another_model_is_refused(written, model, tmp_path):
  other = tiny.make_model(tmp_path / 'other', seed=1)
  with pytest.raises(UserError, match=rf'is a cartridge of {model}, but {other} has other weights'):
    read(written, other)
  stretched = tmp_path / 'stretched'
  shutil.copytree(model, stretched)
  values = json.loads((stretched / 'config.json').read_text())
  (stretched / 'config.json').write_text(json.dumps(values | {'rope_theta': 1e6}))
  with pytest.raises(UserError, match='has other rotary embeddings or windows of attention: use the model'):
    read(written, stretched)
  moved = tmp_path / 'moved'
  shutil.copytree(model, moved)
  assert_equal(read(written, moved), make())
  cartridge_files.write(tmp_path / 'deeper', make(layers=3), origin_of(model))
  with pytest.raises(
    UserError, match='of a model with 3 layers and 2 key-value heads of 8, but this model has 2 layers'
  ):
    read(tmp_path / 'deeper', model)


def rewritten(folder, **changes):
  """Change entries of a manifest, and correct its digest."""
  file = folder / 'cartridge.json'
  values = json.loads(file.read_text()) | changes
  values = {name: value for name, value in values.items() if value != 'removed' and name != 'digest'}
  text = json.dumps(values, sort_keys=True, ensure_ascii=False)
  file.write_text(json.dumps(values | {'digest': hashlib.sha256(text.encode()).hexdigest()[:16]}))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'format': 'peft'}, "its format is 'peft'"),
    ({'version': 2}, 'of version 2, but this program reads version 1'),
    ({'slots': '16'}, 'slots is missing'),
    ({'slots': True}, 'slots is missing'),
    ({'frozen': -1}, 'frozen is missing'),
    ({'frozen': 16}, '16 of its 16 slots are frozen'),
    ({'text_position': 17}, 'text_position is missing'),
    ({'within_windows': 0}, 'within_windows is missing'),
    ({'model': 'removed'}, 'model.name is missing'),
    ({'about': {'step': 3}}, 'about is missing'),
    ({'frozen': 99}, '99 of its 16 slots are frozen'),
    ({'layers': 10**12}, 'holds 4 tensors, but 1000000000000 layers'),
    ({'layers': 3}, 'holds 4 tensors, but 3 layers have two each'),
    ({'head_dim': 16}, r"'layers.0.key' is F32 \(2, 16, 8\), but cartridge.json says \(2, 16, 16\)"),
  ],
)
def test_a_manifest_that_says_something_else_is_refused(written, model, changes, message):
  changes = changes | ({'text_position': changes['slots']} if 'slots' in changes else {})
  rewritten(written, **changes)
  with pytest.raises(UserError, match=message):
    cartridge_files.read(
      written, cartridge_files.read_manifest(written).origin if 'model' not in changes else None, config_of(model)
    )


def test_what_is_no_file_is_not_waited_for(written, model):
  file = written / 'cartridge.safetensors'
  for create in (lambda: os.mkfifo(file), lambda: file.symlink_to('/dev/zero')):
    file.unlink()
    create()
    with pytest.raises(UserError, match=r'cartridge\.safetensors is a pipe or a device where a file belongs: get the'):
      read(written, model)


def test_names_in_a_manifest_are_written_on_one_line(written, model):
  manifest = json.loads((written / 'cartridge.json').read_text())
  rewritten(written, model=manifest['model'] | {'name': 'a\n\x1b[31m' * 99, 'weights': {'values': 'others'}})
  with pytest.raises(UserError, match=r'is a cartridge of a\\n\\x1b\[31m.*… *, but .* has other weights') as raised:
    read(written, model)
  assert str(raised.value).isprintable() and len(str(raised.value)) < 600


def test_what_is_missing_is_named(written, model, tmp_path):
  with pytest.raises(UserError, match=r'nowhere holds no cartridge, since it has no cartridge\.json'):
    read(tmp_path / 'nowhere', model)
  (written / 'cartridge.safetensors').unlink()
  with pytest.raises(UserError, match=r'cartridge\.safetensors cannot be read'):
    read(written, model)
  published_cartridges.write(tmp_path / 'published', make(), 'some/model')
  with pytest.raises(UserError, match=r'holds a cartridge as PyTorch writes it \(\.pt\)'):
    read(tmp_path / 'published', model)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'keys': np.zeros((2, 2, 16, 8), np.float64)}, 'keys are float64'),
    ({'values': np.zeros((2, 2, 15, 8), np.float32)}, r'values are float32 \(2, 2, 15, 8\)'),
    ({'keys': np.zeros((2, 2, 0, 8), np.float32)}, r'keys are float32 \(2, 2, 0, 8\)'),
    ({'frozen': 16}, '16 of its 16 slots are frozen'),
    ({'frozen': -1}, '-1 of its 16 slots are frozen'),
    (
      {'values': np.where(np.arange(16)[:, None] == 3, np.nan, make().values)},
      'layer 0 of its values holds 16 values of',
    ),
    ({'keys': np.full((2, 2, 16, 8), -np.inf, np.float32)}, 'that are not finite'),
  ],
)
def test_arrays_that_are_no_cartridge_are_not_written(model, tmp_path, changes, message):
  with pytest.raises(UserError, match=message):
    cartridge_files.write(tmp_path / 'new', dataclasses.replace(make(), **changes), origin_of(model))
  assert not list(tmp_path.iterdir())


def test_a_cartridge_in_a_bucket_is_read_and_not_written(bucket, model, tmp_path):
  cartridge_files.write(bucket / 'models' / 'made', make(), origin_of(model))
  assert_equal(read('gs://here/models/made', model), make())
  assert cartridge_files.read_manifest('gs://here/models/made').prefix.slots == 16
  (bucket / 'models' / 'made' / 'cartridge.safetensors').unlink()
  with pytest.raises(UserError, match=r'gs://here/models/made/cartridge\.safetensors could not be copied'):
    read('gs://here/models/made', model)
  with pytest.raises(UserError, match='gs://here/models/none holds no cartridge'):
    read('gs://here/models/none', model)
  with pytest.raises(UserError, match='gs://here/new: models are written to local directories'):
    cartridge_files.write('gs://here/new', make(), origin_of(model))


# The published format.


@pytest.mark.parametrize('name', ['L2_H2_P16_F1_D16', 'L3_H1_P32_F0_D8'])
@pytest.mark.parametrize('spelling', ['fixed', 'frozen'])
def test_files_of_the_published_classes_are_read(name, spelling):
  with np.load(GOLDEN / f'{name}.npz') as arrays:
    expected = Cartridge(arrays['keys'], arrays['values'], int(arrays['frozen']))
  assert_equal(cartridge_pt.read(GOLDEN / f'{name}_{spelling}.pt'), expected)


def test_the_golden_kind_passes_and_notices_differences(tmp_path, capsys):
  assert golden.main([str(GOLDEN)]) == 0
  assert capsys.readouterr().out == 'cartridges: 2 cases, 0 failed, worst 0.0e+00\n'
  folder = tmp_path / 'cartridges'
  shutil.copytree(GOLDEN, folder)
  with np.load(folder / 'L2_H2_P16_F1_D16.npz') as archive:
    arrays = dict(archive)
  for changes in ({'frozen': np.int32(2)}, {'values': arrays['values'] + np.float32(1e-6)}):
    np.savez(folder / 'L2_H2_P16_F1_D16.npz', **arrays | changes)
    report = golden_cartridges.check(folder)
    assert (report.cases, report.failed) == (2, 1) and len(report.messages) == 4
  np.savez(folder / 'L2_H2_P16_F1_D16.npz', **arrays)
  lists = torch.load(folder / 'L2_H2_P16_F1_D16_fixed.pt', weights_only=False)
  lists['fixed_keys'][0].requires_grad_(True)
  torch.save(lists, folder / 'L2_H2_P16_F1_D16_fixed.pt')
  report = golden_cartridges.check(folder)
  assert report.messages == ['L2_H2_P16_F1_D16: what is written as fixed differs from L2_H2_P16_F1_D16_fixed.pt']
  for file in folder.glob('*.pt'):
    file.write_bytes(file.read_bytes()[:1000])
  assert golden_cartridges.check(folder).failed == 2
  for file in folder.glob('*.pt'):
    file.unlink()
  assert golden_cartridges.check(folder).failed == 2


def lists_of(made, spelling='frozen', kind=list):
  """Return the content of a cartridge file as a plain PyTorch program would write it, with lists of tensors."""
  part = made.frozen
  return {
    f'{name}_{what}': kind([torch.tensor(layer[None, :, first:last]) for layer in array])
    for name, first, last in (('trainable', part, None), (spelling, 0, part))
    for what, array in (('keys', made.keys), ('values', made.values))
  }


@pytest.mark.parametrize('kind', [list, tuple, torch.nn.ParameterList])
@pytest.mark.parametrize('frozen', [0, 3])
def test_plain_lists_and_tensors_of_no_width_are_read(tmp_path, kind, frozen):
  for dtype in (torch.float32, torch.bfloat16, torch.float16):
    lists = {name: kind([t.to(dtype) for t in tensors]) for name, tensors in lists_of(make(frozen=frozen)).items()}
    torch.save(lists, tmp_path / 'a.pt')
    found = cartridge_pt.read(tmp_path / 'a.pt')
    assert found.frozen == frozen
    np.testing.assert_array_equal(found.keys, torch.tensor(make().keys).to(dtype).float().numpy())


def test_views_of_larger_tensors_are_read(tmp_path):
  whole = torch.tensor(make().keys)
  lists = lists_of(make(frozen=0))
  lists['trainable_keys'] = [layer[None].transpose(2, 3).contiguous().transpose(2, 3) for layer in whole]
  torch.save(lists, tmp_path / 'a.pt')
  assert_equal(cartridge_pt.read(tmp_path / 'a.pt'), make(frozen=0))


class Runs:
  """An object whose pickle is a call of a function."""

  def __init__(self, function, *arguments):
    self.call = function, arguments

  def __reduce__(self):
    return self.call


def test_a_file_that_would_run_something_is_refused_and_does_not(tmp_path):
  for call in (
    Runs(os.system, f'touch {tmp_path}/ran'),
    Runs(eval, f'open({str(tmp_path / "ran")!r}, "w")'),
    Runs(subprocess.Popen, ['touch', str(tmp_path / 'ran')]),
    Runs(torch.hub.load_state_dict_from_url, 'http://127.0.0.1:9/a.pt'),
  ):
    for content in (call, lists_of(make()) | {'trainable_keys': [call]}, {**lists_of(make()), 'more': call}):
      torch.save(content, tmp_path / 'a.pt')
      with pytest.raises(
        UserError, match=r'is refused, and no code in it was run: it asks for [\w.]+, which is not part'
      ):
        cartridge_pt.read(tmp_path / 'a.pt')
  # Within the state of a list, and as its state.
  parameters = torch.nn.ParameterList(lists_of(make())['trainable_keys'])
  parameters.__dict__['_forward_hooks'] = Runs(os.system, f'touch {tmp_path}/ran')
  torch.save(lists_of(make()) | {'trainable_keys': parameters}, tmp_path / 'a.pt')
  with pytest.raises(UserError, match='no code in it was run'):
    cartridge_pt.read(tmp_path / 'a.pt')
  assert not (tmp_path / 'ran').exists()
  # The files do what they look like where nobody guards against it.
  torch.save(Runs(os.system, f'touch {tmp_path}/ran'), tmp_path / 'a.pt')
  torch.load(tmp_path / 'a.pt', weights_only=False)
  assert (tmp_path / 'ran').exists()


def test_a_list_is_read_without_its_own_code(tmp_path, monkeypatch):
  monkeypatch.setattr(torch.nn.ParameterList, '__setstate__', lambda *_: pytest.fail('was called'), raising=False)
  cartridge_pt.read(GOLDEN / 'L2_H2_P16_F1_D16_fixed.pt')
  # What was allowed is not any more.
  with pytest.raises(pickle.UnpicklingError):
    torch.load(GOLDEN / 'L2_H2_P16_F1_D16_fixed.pt', weights_only=True)


def test_damaged_files_are_refused(tmp_path):
  content = (GOLDEN / 'L2_H2_P16_F1_D16_frozen.pt').read_bytes()
  file = tmp_path / 'a.pt'
  for end in (0, 1, 100, 4000, len(content) - 30, len(content) - 1):
    file.write_bytes(content[:end])
    with pytest.raises(UserError, match=r'a\.pt is damaged or not a file of torch\.save'):
      cartridge_pt.read(file)
  expected = cartridge_pt.read(GOLDEN / 'L2_H2_P16_F1_D16_frozen.pt')
  refused = 0
  for bit in np.random.default_rng(2).choice(8 * len(content), 300, replace=False):
    file.write_bytes(flipped(content, int(bit)))
    try:
      assert_equal(cartridge_pt.read(file), expected)  # The bit was of a date or a padding.
    except UserError:
      refused += 1
  assert refused > 150
  with zipfile.ZipFile(GOLDEN / 'L2_H2_P16_F1_D16_frozen.pt') as old, zipfile.ZipFile(file, 'w', 8) as new:
    for entry in old.namelist():
      new.writestr(entry, old.read(entry))
  with pytest.raises(UserError, match='it is compressed'):
    cartridge_pt.read(file)
  with pytest.raises(UserError, match='is not a file'):
    cartridge_pt.read(tmp_path)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda d: [1, 2], 'holds no cartridge but a list'),
    (lambda d: {'state_dict': {}}, "holds \\['state_dict'\\], but a cartridge holds trainable_keys"),
    (lambda d: d | {'more': 1}, 'nothing else'),
    (lambda d: d | lists_of(make(), 'fixed'), 'is not a cartridge'),
    (lambda d: {name: d[name] for name in list(d)[1:]}, 'is not a cartridge'),
    (lambda d: d | {'frozen_keys': d['frozen_keys'][:1]}, 'frozen_keys: 1'),
    (lambda d: d | {'frozen_keys': []}, 'frozen_keys: 0'),
    (lambda d: d | {'trainable_values': d['trainable_values'] * 2}, 'trainable_values: 4'),
    (lambda d: {name: [] for name in d}, 'different numbers of layers, or none'),
    (lambda d: d | {'frozen_keys': {}}, 'frozen_keys is a dict'),
    (lambda d: d | {'frozen_keys': [1, 2]}, 'layer 0 of frozen_keys is no tensor with values but 1'),
    (lambda d: each(d, 'values', lambda t: t.to_sparse()), 'is no tensor with values but'),
    (lambda d: each(d, 'values', lambda t: t.to('meta')), 'is no tensor with values but'),
    (lambda d: each(d, 'values', lambda t: t.double()), r'is torch\.float64; supported: float32'),
    (lambda d: each(d, 'values', lambda t: t.long()), r'is torch\.int64'),
    (
      lambda d: each(d, 'frozen', lambda t: t[0, 0, 0, 0].expand(1, 2, 2**40, 8)),
      'claims more values than the file holds',
    ),
    (lambda d: each(d, 'values', lambda t: t[..., :4]), 'all must be'),
    (lambda d: each(d, '', lambda t: t[0]), 'all must be'),
    (lambda d: each(d, '', lambda t: torch.cat([t, t])), 'all must be'),
    (lambda d: each(d, 'frozen', lambda t: t[..., :4]), 'frozen_keys have 2 heads of 4, but trainable_keys 2 of 8'),
    (lambda d: each(d, 'frozen', lambda t: t[:, :1]), 'frozen_keys have 1 heads of 8, but trainable_keys 2 of 8'),
    (lambda d: d | {'trainable_keys': [d['trainable_keys'][0], d['trainable_keys'][0][:, :, 1:]]}, 'all must be'),
    (lambda d: each(d, 'trainable', lambda t: t[:, :, :0]), '3 of its 3 slots are frozen'),
    (lambda d: each(d, 'trainable_keys', lambda t: t / 0), 'layer 0 of its keys holds'),
  ],
)
def test_what_is_no_cartridge_is_refused(tmp_path, change, message):
  torch.save(change(lists_of(make(frozen=3))), tmp_path / 'a.pt')
  with pytest.raises(UserError, match=message):
    cartridge_pt.read(tmp_path / 'a.pt')


def each(lists, part, change):
  return {name: [change(t) if part in name else t for t in tensors] for name, tensors in lists.items()}


def test_a_cartridge_of_other_sizes_is_refused(model, tmp_path):
  made = cartridge_pt.read(GOLDEN / 'L2_H2_P16_F1_D16_frozen.pt')
  with pytest.raises(
    UserError, match='2 layers and 2 key-value heads of 16, but this model has 2 layers and 2 .* of 8'
  ):
    cartridge.check_fits(made, config_of(model), 'a.pt')
  cartridge.check_fits(make(), config_of(model), 'a.pt')


def test_without_pytorch_it_is_asked_for(monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  with pytest.raises(UserError, match='files of PyTorch need PyTorch, which is not installed: pip install torch'):
    cartridge_pt.read(GOLDEN / 'L2_H2_P16_F1_D16_frozen.pt')
  monkeypatch.undo()
  monkeypatch.setattr(torch, '__version__', '2.4.1+cpu')
  with pytest.raises(UserError, match=r'PyTorch 2\.4\.1\+cpu cannot read it safely; 2\.7 and newer can'):
    cartridge_pt.read(GOLDEN / 'L2_H2_P16_F1_D16_frozen.pt')


def test_slots_of_a_text_continue_it_in_transformers(tmp_path):
  """Slots that our model reads from a text, written to a file, give transformers the logits of the whole text."""
  folder = tiny.make_model(tmp_path / 'model', rope_theta=300.0)
  policy, params = huggingface.load(folder, ModelConfig(dtype='float32', remat='none'))
  tokens = np.random.default_rng(3).integers(0, 200, (1, 40)).astype(np.int32)
  keys, values = map(np.asarray, kv_prefix.read_text(policy, params, tokens[0, :32]))
  made = Cartridge(keys, values, 1)
  published_cartridges.write(tmp_path / 'out', made, 'some/model', dtype='float32')
  reference = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
  with torch.no_grad():
    ids = torch.tensor(tokens, dtype=torch.long)
    expected = reference(ids).logits[:, 32:]
    found = reference(ids[:, 32:], past_key_values=past_of(tmp_path / 'out' / 'cartridge.pt')).logits
  np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize('name', ['llama', 'qwen2, no windows', 'qwen3'])
def test_transformers_computes_the_same_with_any_slots(tmp_path, name):
  """Slots are random numbers, as training may make them, and models have every kind of rotary embedding."""
  policy, params = prefixed_models.model(name)
  sizes = policy.config
  made = make(sizes.layers, sizes.kv_heads, 16, sizes.head_dim)
  student, base, slots = prefixed_models.with_prefix(policy, params, made.prefix, made.keys, made.values)
  huggingface.save(tmp_path / 'model', policy, params, dtype='float32')
  published_cartridges.write(tmp_path / 'out', made, 'some/model', dtype='float32')
  reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'model').eval()
  tokens, positions, segments = prefixed_models.rows(count=1)
  length = int(segments.sum())
  with torch.no_grad():
    ids = torch.tensor(tokens[:, :length], dtype=torch.long)
    expected = reference(ids, past_key_values=past_of(tmp_path / 'out' / 'cartridge.pt')).logits.numpy()
    without = reference(ids).logits.numpy()
  found = prefixed_models.logits(student, base, slots, (tokens, positions, segments))[:, :length]
  np.testing.assert_allclose(found, expected, atol=1e-4)
  assert np.abs(expected - without).max() > 0.1


# Directories for servers.


@pytest.mark.parametrize('frozen', [0, 1])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_an_export_is_what_servers_load(tmp_path, frozen, dtype):
  published_cartridges.write(tmp_path / 'out', make(frozen=frozen), 'meta-llama/Llama-3.2-3B-Instruct', dtype=dtype)
  keys, values = loaded_as_published(tmp_path / 'out' / 'cartridge.pt')
  assert str(keys.dtype) == f'torch.{dtype}'
  np.testing.assert_array_equal(keys.detach().float(), torch.tensor(make().keys).to(keys.dtype).float())
  np.testing.assert_array_equal(values.detach().float(), torch.tensor(make().values).to(keys.dtype).float())
  settings = yaml.safe_load((tmp_path / 'out' / 'config.yaml').read_text())
  assert settings['kv_cache_initializer'] == {'max_tokens': 16, 'num_frozen_tokens': frozen}
  assert settings['model'] == {'pretrained_model_name_or_path': 'meta-llama/Llama-3.2-3B-Instruct'}
  found = published_cartridges.read(tmp_path / 'out')
  assert found.model == 'meta-llama/Llama-3.2-3B-Instruct' and found.cartridge.frozen == frozen
  np.testing.assert_array_equal(found.cartridge.keys, keys.detach().float())


@pytest.mark.parametrize(
  ('made', 'message'),
  [
    (make(slots=15), 'cuts 15 slots to a multiple of 16: make a cartridge of 16 slots'),
    (make(kv_heads=16), 'load 16 slots of this format as frozen'),
    (make(within_windows=True), 'show all slots to layers with a sliding window'),
  ],
)
def test_what_the_format_cannot_hold_is_refused(tmp_path, made, message):
  with pytest.raises(UserError, match=message):
    published_cartridges.write(tmp_path / 'out', made, 'some/model')
  assert not list(tmp_path.iterdir())


TAGGED = """
_config_type: {_is_type: true, _module: cartridges.train, _qualname: TrainConfig}
betas: !!python/tuple [0.9, 0.95]
output_dir: !!python/object/apply:pathlib.PosixPath [/, tmp]
kv_cache_initializer: {max_tokens: 16}
model: &m {pretrained_model_name_or_path: some/model}
teacher: *m
"""


@pytest.mark.parametrize(
  ('text', 'model'),
  [
    ('kv_cache_initializer: {max_tokens: 16}\nmodel: {pretrained_model_name_or_path: a/b}\n', 'a/b'),
    ('kv_cache_initializer: {value: {max_tokens: 16}}\nmodel: {value: {pretrained_model_name_or_path: a/b}}\n', 'a/b'),
    ('kv_cache_initializer: {max_tokens: null}\n', None),
    (TAGGED, 'some/model'),
    ('kv_cache_initializer: {max_tokens: 16}\na: !!int ""\nb: !!timestamp some\nc: 1' + ':59' * 400 + '.5', None),
  ],
)
def test_config_yaml_of_publishers_is_read(tmp_path, text, model):
  shutil.copy(GOLDEN / 'L2_H2_P16_F1_D16_fixed.pt', tmp_path / 'cache-step64.pt')
  (tmp_path / 'config.yaml').write_text(text)
  found = published_cartridges.read(tmp_path)
  assert (found.model, found.cartridge.slots) == (model, 16)


def test_config_yaml_runs_nothing(tmp_path):
  shutil.copy(GOLDEN / 'L2_H2_P16_F1_D16_fixed.pt', tmp_path / 'cartridge.pt')
  call = f'!!python/object/apply:os.system ["touch {tmp_path}/ran"]'
  (tmp_path / 'config.yaml').write_text(f'a: {call}\nkv_cache_initializer: {{max_tokens: 16}}\n')
  assert published_cartridges.read(tmp_path).cartridge.slots == 16
  assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('kv_cache_initializer: {max_tokens: 8}', 'holds 16 slots, but .* says at most 8'),
    ('kv_cache_initializer: {max_tokens: many}', "max_tokens is 'many'"),
    ('kv_cache_initializer: {max_tokens: true}', "max_tokens is 'true'"),
    ('kv_cache_initializer: {max_tokens: -16}', "max_tokens is '-16'"),
    ('kv_cache_initializer: {max_tokens: 0}', "max_tokens is '0'"),
    ('kv_cache_initializer: {max_tokens: 4294967296}', "max_tokens is '4294967296'"),
    ('model: {pretrained_model_name_or_path: [1]}', r"pretrained_model_name_or_path is \['1'\]"),
    ('a: [', 'is not YAML'),
    ('[' * 800 + ']' * 800, 'is not YAML'),
    ('? [1]\n: 2', 'is not YAML'),
    ('a: &a {b: 1}\nc: {<<: *a}', 'is not YAML'),
    ('kv_cache_initializer: {max_tokens: 1' + ':59' * 4000 + '}', 'max_tokens is '),
    ('a: "\xff"'.encode('latin-1'), 'is not UTF-8'),
    ('#' * (2**20 + 1), 'is larger than 1 MB'),
  ],
)
def test_a_wrong_config_yaml_is_refused(tmp_path, text, message):
  shutil.copy(GOLDEN / 'L2_H2_P16_F1_D16_fixed.pt', tmp_path / 'cartridge.pt')
  (tmp_path / 'config.yaml').write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(UserError, match=message):
    published_cartridges.read(tmp_path)


def test_a_published_directory_holds_one_cartridge(tmp_path, caplog):
  with pytest.raises(UserError, match=r'or a single \.pt file, but holds none'):
    published_cartridges.read(tmp_path)
  for name in ('a.pt', 'b.pt'):
    shutil.copy(GOLDEN / 'L2_H2_P16_F1_D16_fixed.pt', tmp_path / name)
  with pytest.raises(UserError, match=r'but holds a\.pt, b\.pt'):
    published_cartridges.read(tmp_path)
  shutil.copy(GOLDEN / 'L2_H2_P16_F1_D16_fixed.pt', tmp_path / 'cartridge.pt')
  with pytest.raises(UserError, match=r'config\.yaml is missing: get it too, or name the \.pt file itself'):
    published_cartridges.read(tmp_path)
  assert published_cartridges.read(tmp_path / 'a.pt').model is None
  (tmp_path / 'config.yaml').write_text('kv_cache_initializer: {max_tokens: 32}')
  assert published_cartridges.read(tmp_path).cartridge.slots == 16
  assert 'holds 16 slots; config.yaml allows 32' in caplog.text
  with pytest.raises(UserError, match='are read from local disks'):
    published_cartridges.read('gs://bucket/cartridge')
