"""Import and export of Hugging Face model directories: nothing is lost, and errors name what is wrong."""

import collections
import gc
import inspect
import json
import math
import shutil
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
import torch
import transformers

from sdpo_jax.config import MeshConfig, ModelConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, parameters, placing, stored_tensors, tensor_files
from sdpo_jax.models.checksums import SUMS
from tests.models.exported_models import CONFIG

torch.set_num_threads(1)

FLOAT32 = ModelConfig(dtype='float32', remat='none')


def equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def logits(policy, params, tokens):
  batch, length = tokens.shape
  positions = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
  hidden, unembedding, _ = jax.jit(policy.apply)({}, params, tokens, positions, np.ones_like(positions))
  return np.asarray(hidden @ unembedding.T)


@pytest.fixture(scope='module')
def made():
  return huggingface.init(CONFIG, jax.random.key(0))


@pytest.fixture(scope='module')
def original(made, tmp_path_factory):
  """Return a model directory with a config of its own, a tokenizer's files and a licence."""
  directory = tmp_path_factory.mktemp('original') / 'model'
  huggingface.save(directory, *made, dtype='float32')
  (directory / 'config.json').write_text(json.dumps(CONFIG))
  (directory / 'generation_config.json').write_text('{"eos_token_id": [3, 4]}')
  (directory / 'tokenizer.json').write_text('{}')
  (directory / 'chat_template.jinja').write_text('{{ messages }}')
  return directory


@pytest.fixture
def broken(original, tmp_path):
  """Return a copy that may be damaged, without known digests."""
  return shutil.copytree(original, tmp_path / 'broken', ignore=shutil.ignore_patterns(SUMS))


def edit_config(directory, **changes):
  values = json.loads((directory / 'config.json').read_text()) | changes
  (directory / 'config.json').write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_weights(directory, change):
  (directory / SUMS).unlink(missing_ok=True)
  tensors = load_file(directory / 'model.safetensors')
  change(tensors)
  save_file(tensors, directory / 'model.safetensors')


@pytest.mark.parametrize('shard_bytes', [10**9, 3000], ids=['one file', 'many files'])
@pytest.mark.parametrize('tied', [False, True], ids=['untied', 'tied'])
def test_export_and_import_are_inverse_and_transformers_reads_the_export(tied, shard_bytes, tmp_path):
  policy, params = huggingface.init(CONFIG | {'tie_word_embeddings': tied}, jax.random.key(1))
  target = tmp_path / 'export'
  huggingface.save(target, policy, params, dtype='float32', max_shard_bytes=shard_bytes)
  files = sorted(file.name for file in target.glob('*.safetensors'))
  assert (len(files) > 3) == (target / 'model.safetensors.index.json').exists() == (shard_bytes == 3000)
  again, loaded = huggingface.load(target, FLOAT32)
  assert again == policy
  equal(loaded, params)
  model, report = transformers.Qwen3ForCausalLM.from_pretrained(target, output_loading_info=True)
  assert not report['missing_keys'] and not report['unexpected_keys'] and not report['mismatched_keys']
  tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
  with torch.no_grad():
    expected = model.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  assert np.abs(logits(policy, loaded, tokens) - expected).max() <= 1e-4


def test_shards_keep_their_size_and_the_index_is_complete(made, tmp_path):
  policy, params = made
  huggingface.save(tmp_path / 'export', policy, params, dtype='bfloat16', max_shard_bytes=2000)
  index = json.loads((tmp_path / 'export' / 'model.safetensors.index.json').read_text())
  assert index['metadata']['total_size'] == 2 * parameters.count(policy.parameter_table())
  held = {}
  for file in (tmp_path / 'export').glob('*.safetensors'):
    with safe_open(file, framework='numpy') as shard:
      held.update(dict.fromkeys(shard.keys(), file.name))
      sizes = [shard.get_tensor(name).nbytes for name in shard.keys()]
      assert sum(sizes) <= 2000 or len(sizes) == 1
  assert held == index['weight_map']
  # Without being asked, as large as transformers 4 made them, which others can take.
  assert inspect.signature(huggingface.save).parameters['max_shard_bytes'].default == 5 * 10**9


def test_an_export_keeps_what_belongs_to_the_original(original, tmp_path):
  policy, params = huggingface.load(original, FLOAT32)
  huggingface.save(tmp_path / 'export', policy, params, source=original, dtype='bfloat16')
  values = json.loads((tmp_path / 'export' / 'config.json').read_text())
  assert values == CONFIG | {'dtype': 'bfloat16'}
  for name in ('generation_config.json', 'tokenizer.json', 'chat_template.jinja'):
    assert (tmp_path / 'export' / name).read_bytes() == (original / name).read_bytes()
  assert not (tmp_path / 'export.partial').exists()


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_stored_half_precision_is_read_exactly(made, dtype, tmp_path):
  policy, params = made
  huggingface.save(tmp_path / 'export', policy, params, dtype=dtype)
  with safe_open(tmp_path / 'export' / 'model.safetensors', framework='numpy') as file:
    assert str(file.get_tensor('model.norm.weight').dtype) == dtype
  _, loaded = huggingface.load(tmp_path / 'export', FLOAT32)
  equal(loaded, jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)).astype(jnp.float32), params))
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(loaded))


MESHES = [(8, 1), (4, 2), (2, 4)]
PADDED = ModelConfig(dtype='float32', remat='none', vocab_multiple=64)  # 40 tokens become 64 rows.


def mesh_of(shape):
  return make_mesh(MeshConfig(*shape), jax.devices()[:8])


@pytest.fixture
def read(monkeypatch):
  """Record the number of elements read, by tensor name."""
  counts, lock, fill = collections.Counter(), threading.Lock(), tensor_files.TensorFile.read

  def note(file, buffer, offset):
    fill(file, buffer, offset)
    names = [tensor.name for tensor in getattr(file, 'tensors', {}).values() if tensor.begin <= offset < tensor.end]
    with lock:  # Several threads read.
      counts.update(dict.fromkeys(names, buffer.size))

  monkeypatch.setattr(tensor_files.TensorFile, 'read', note)
  return counts


@pytest.fixture(scope='module', params=['float32', 'bfloat16', 'float16'])
def stored(request, tmp_path_factory):
  """Return a model with biases and four key-value heads, its matrices stored in one of the dtypes."""
  changes = {'attention_bias': True, 'num_key_value_heads': 4}
  policy, params = huggingface.init(CONFIG | changes, jax.random.key(3))
  rng = np.random.default_rng(0)  # Norms and biases that differ.
  params = jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape).astype(np.float32), params)
  directory = tmp_path_factory.mktemp('stored') / 'model'
  huggingface.save(directory, policy, params, dtype=request.param)
  return directory


@pytest.mark.parametrize('config', [FLOAT32, PADDED], ids=['exact', 'padded'])
@pytest.mark.parametrize('shape', MESHES, ids=str)
def test_a_mesh_holds_what_one_device_does_and_reads_it_once(stored, shape, config, read):
  policy, expected = huggingface.load(stored, config)
  read.clear()
  _, loaded = huggingface.load(stored, config, mesh=mesh_of(shape))
  equal(loaded, expected)
  assert (policy.config.padded_vocab_size == 64) == (config is PADDED)
  assert len(loaded['unembedding'].sharding.device_set) == 8 and not loaded['unembedding'].is_fully_replicated
  table = policy.parameter_table()
  assert read == {p.huggingface_name(i): math.prod(p.huggingface_shape) for p in table for i in range(p.layers)}


@pytest.mark.parametrize('shape', MESHES, ids=str)
def test_a_process_reads_the_share_of_its_devices(stored, shape, read, monkeypatch):
  """As if this process had one of eight devices, and rows were long enough to skip the parts that it does not need."""
  monkeypatch.setattr(tensor_files, 'GAP', 0)
  policy, whole = huggingface.load(stored, PADDED)
  index_map = jax.sharding.NamedSharding.devices_indices_map
  monkeypatch.setattr(jax, 'make_array_from_single_device_arrays', lambda shape, sharding, pieces: pieces)
  total = collections.Counter()
  for device in jax.devices()[:8]:
    monkeypatch.setattr(
      jax.sharding.NamedSharding,
      'addressable_devices_indices_map',
      lambda sharding, shape, device=device: {device: index_map(sharding, shape)[device]},
    )
    read.clear()
    _, pieces = huggingface.load(stored, PADDED, mesh=mesh_of(shape))
    for parameter in policy.parameter_table():
      [piece] = parameters.get(pieces, parameter.path)
      sharding = placing.parameter_sharding(mesh_of(shape), parameter.axes, parameter.shape)
      np.testing.assert_array_equal(
        piece, parameters.get(whole, parameter.path)[index_map(sharding, parameter.shape)[device]]
      )
      if len(parameter.huggingface_shape) == 2:
        assert 8 * piece.size == math.prod(parameter.shape)
      asked = [read[parameter.huggingface_name(layer)] for layer in range(parameter.layers)]
      if parameter.padding:
        total[parameter.name] += asked[0]
      else:
        assert asked == [piece.size // parameter.layers] * parameter.layers
  assert total == {'embedding': 40 * 16, 'unembedding': 40 * 16}  # Rows that pad the vocabulary are not read.


def test_any_block_is_cut_out_of_its_tensor(stored):
  policy = huggingface.read_policy(stored, PADDED)
  rng = np.random.default_rng(1)
  for parameter in policy.parameter_table():
    shape = parameter.shape[1:] if parameter.stacked else parameter.shape
    array = 1 + np.arange(math.prod(shape)).reshape(shape)
    if parameter.padding:
      array[-parameter.padding :] = 0
    tensor = parameter.to_huggingface(array)
    np.testing.assert_array_equal(parameter.from_huggingface(tensor, tuple((0, size) for size in shape)), array)
    for _ in range(50):
      block = tuple(tuple(sorted(rng.choice(size + 1, 2, replace=False))) for size in shape)
      part = parameter.from_huggingface(tensor, block)
      np.testing.assert_array_equal(part, array[tuple(slice(*bounds) for bounds in block)])


def test_a_block_of_layers_reads_no_other(original, read):
  policy, params = huggingface.load(original, FLOAT32)
  read.clear()
  parameter = next(p for p in policy.parameter_table() if p.name == 'layers.mlp.up')
  with stored_tensors.open_tensors(original) as tensors:
    [part] = placing.read_blocks(parameter, tensors, [((1, 2), (0, 16), (6, 12))])
  np.testing.assert_array_equal(part, params['layers']['mlp']['up'][1:2, :, 6:12])
  assert read == {'model.layers.1.mlp.up_proj.weight': 16 * 6}


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [None, (2, 4)], ids=str)
def test_loading_and_exporting_hold_little_of_a_model(mesh, tmp_path):
  """NumPy allocates a parameter and some bands, and a tensor; neither the model nor two parameters."""
  sizes = {'hidden_size': 256, 'intermediate_size': 2048, 'num_hidden_layers': 8, 'vocab_size': 512}
  policy, params = huggingface.init(CONFIG | sizes, jax.random.key(0))
  huggingface.save(tmp_path / 'model', policy, params, dtype='bfloat16')
  largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
  mesh = mesh and mesh_of(mesh)
  peaks = []
  tracemalloc.start()
  try:
    for act in (
      lambda: huggingface.load(tmp_path / 'model', FLOAT32, mesh=mesh),
      lambda: huggingface.save(tmp_path / 'again', policy, params, dtype='bfloat16'),
    ):
      gc.collect()
      tracemalloc.reset_peak()
      result = act()
      peak = tracemalloc.get_traced_memory()[1]
      gc.collect()
      # On a CPU, an array that happens to be aligned becomes the device's: it has been placed, and does not count.
      peaks.append(peak - tracemalloc.get_traced_memory()[0])
      del result
  finally:
    tracemalloc.stop()
  assert largest == 8 * 256 * 2048 * 4
  assert peaks[0] < largest + placing.READERS * 2 * 2**20
  assert peaks[1] < largest / 2


def test_a_config_that_python_cannot_parse_is_named(broken):
  for text in ('[' * 100_000, '{"vocab_size": ' + '1' * 5000 + '}'):
    (broken / 'config.json').write_text(text)
    with pytest.raises(UserError, match='config.json is not JSON'):
      huggingface.load(broken, FLOAT32)


def test_a_tied_model_may_store_its_head_too(tmp_path):
  policy, params = huggingface.init(CONFIG | {'tie_word_embeddings': True}, jax.random.key(2))
  huggingface.save(tmp_path / 'model', policy, params, dtype='float32')
  edit_weights(
    tmp_path / 'model', lambda tensors: tensors.update({'lm_head.weight': tensors['model.embed_tokens.weight'].copy()})
  )
  equal(huggingface.load(tmp_path / 'model', FLOAT32)[1], params)


def test_a_head_that_is_not_the_embedding_contradicts_a_tied_model(made, tmp_path):
  """transformers 5 uses such a head, whatever config.json says; users must not train another model unknowingly."""
  huggingface.save(tmp_path / 'model', *made, dtype='bfloat16')
  edit_config(tmp_path / 'model', tie_word_embeddings=True)
  with pytest.raises(UserError, match=r"'lm_head.weight' is another matrix than 'model.embed_tokens.weight'.*to false"):
    huggingface.load(tmp_path / 'model', FLOAT32)


def test_random_parameters_repeat_and_differ(made):
  _, params = made
  equal(huggingface.init(CONFIG, jax.random.key(0))[1], params)
  attention = params['layers']['attention']
  assert float(jnp.std(params['embedding'])) == pytest.approx(0.3, rel=0.1)
  assert not np.allclose(attention['key'], attention['value'])
  assert not np.allclose(attention['key'][0], attention['key'][1])
  assert (params['final_norm'] == 1).all()


def test_an_export_never_overwrites(original, made):
  with pytest.raises(UserError, match='already exists and is not empty'):
    huggingface.save(original, *made)


CONFIG_MISTAKES = {
  'architecture': (
    {'model_type': 'gpt2'},
    r"config\.json: model_type 'gpt2' is not supported; supported: 'qwen3', 'qwen2', 'llama'",
  ),
  'mixture of experts': ({'model_type': 'qwen3_moe'}, "'qwen3_moe' is not supported"),
  'no architecture': ({'model_type': ...}, 'model_type None is not supported'),
  'missing size': ({'hidden_size': ...}, 'hidden_size must be a positive integer, not None'),
  'bad size': ({'vocab_size': '40'}, "vocab_size must be a positive integer, not '40'"),
  'heads': ({'num_key_value_heads': 3}, 'num_attention_heads=4 is not a multiple of num_key_value_heads=3'),
  'odd head': ({'head_dim': 7}, 'head_dim=7 is odd'),
  'activation': ({'hidden_act': 'gelu'}, "hidden_act 'gelu' is not supported"),
  'rope, transformers 4': ({'rope_scaling': {'type': 'dynamic', 'factor': 4}}, "rope type 'dynamic' is not supported"),
  'rope, transformers 5': (
    {'rope_parameters': {'rope_type': 'longrope', 'rope_theta': 1e4}},
    "rope type 'longrope' is not supported; supported: 'default', 'linear', 'llama3', 'yarn'",
  ),
  'rope base': ({'rope_theta': -1}, 'rope_theta must be a positive number, not -1'),
  'layer types': ({'layer_types': ['full_attention', 'linear_attention']}, 'layer_types must name'),
  'window': (
    {'layer_types': ['full_attention', 'sliding_attention'], 'use_sliding_window': True, 'sliding_window': None},
    'needs use_sliding_window=true and a positive sliding_window',
  ),
}


@pytest.mark.parametrize('changes, message', CONFIG_MISTAKES.values(), ids=CONFIG_MISTAKES)
def test_an_unsupported_config_is_named(broken, changes, message):
  edit_config(broken, **changes)
  with pytest.raises(UserError, match=message):
    huggingface.load(broken, FLOAT32)


def truncate(directory):
  data = (directory / 'model.safetensors').read_bytes()
  (directory / 'model.safetensors').write_bytes(data[: len(data) // 2])


def index_of_missing_file(directory):
  (directory / 'model.safetensors').unlink()
  (directory / 'model.safetensors.index.json').write_text(
    '{"weight_map": {"model.norm.weight": "model-7.safetensors"}}'
  )


def drop(name):
  return lambda directory: edit_weights(directory, lambda tensors: tensors.pop(name))


def put(name, array):
  return lambda directory: edit_weights(directory, lambda tensors: tensors.update({name: array}))


WEIGHT_MISTAKES = {
  'no config': (lambda directory: (directory / 'config.json').unlink(), r'has no config\.json'),
  'config is not JSON': (lambda directory: (directory / 'config.json').write_text('{'), r'config\.json is not JSON'),
  'config is a list': (lambda directory: (directory / 'config.json').write_text('[]'), 'does not hold a JSON object'),
  'no weights': (lambda directory: (directory / 'model.safetensors').unlink(), r'has neither model\.safetensors nor'),
  'truncated': (truncate, r'model\.safetensors is damaged'),
  'index of a missing file': (index_of_missing_file, r'names model-7\.safetensors, which is missing'),
  'empty index': (
    lambda directory: (directory / 'model.safetensors.index.json').write_text('{}'),
    r'index\.json has no weight_map',
  ),
  'missing tensor': (
    drop('model.layers.1.mlp.up_proj.weight'),
    r"1 tensors are missing, first 'model\.layers\.1\.mlp\.up_proj\.weight'",
  ),
  'unexpected tensor': (
    put('model.layers.0.self_attn.q_proj.bias', np.zeros(32, np.float32)),
    r"1 tensors do not belong .* 'model\.layers\.0\.self_attn\.q_proj\.bias'",
  ),
  'both': (
    lambda directory: edit_weights(
      directory, lambda tensors: tensors.update({'model.normal.weight': tensors.pop('model.norm.weight')})
    ),
    r"1 tensors are missing, first 'model\.norm\.weight', and 1 tensors do not .* first 'model\.normal\.weight': get ",
  ),
  'shape': (
    put('model.norm.weight', np.zeros(17, np.float32)),
    r"'model\.norm\.weight' has shape \(17,\); config\.json says \(16,\)",
  ),
  'dtype': (put('model.norm.weight', np.zeros(16, np.int8)), r"'model\.norm\.weight' is stored as I8; supported: F32"),
}


@pytest.mark.parametrize('damage, message', WEIGHT_MISTAKES.values(), ids=WEIGHT_MISTAKES)
def test_damaged_directories_are_named(broken, damage, message):
  damage(broken)
  with pytest.raises(UserError, match=message):
    huggingface.load(broken, FLOAT32)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_with_tensor_file_and_number(made, value, dtype, tmp_path):
  """On one device and on a mesh whose devices hold none, one or two of them; the message counts those of the tensor."""
  huggingface.save(tmp_path / 'model', *made, dtype=dtype, max_shard_bytes=3000)
  name = 'model.layers.1.mlp.down_proj.weight'
  index = json.loads((tmp_path / 'model' / 'model.safetensors.index.json').read_text())
  file = tmp_path / 'model' / index['weight_map'][name]
  (tmp_path / 'model' / SUMS).unlink()  # They would be refused for that alone.
  tensors = load_file(file)
  tensors[name] = tensors[name].copy()
  tensors[name][[0, 15, 15], [1, 0, 23]] = value
  save_file(tensors, file)
  for mesh in (None, mesh_of((2, 4))):
    with pytest.raises(UserError) as error:
      huggingface.load(tmp_path / 'model', FLOAT32, mesh=mesh)
    assert f'{file}: tensor {name!r} holds 3 values of 384 that are not finite' in str(error.value)


def test_the_largest_values_of_a_type_are_finite(broken):
  """Their sum, or that of their squares, would not be finite."""
  largest = np.finfo(np.float32).max
  put('model.norm.weight', np.array([largest, -largest] * 8, np.float32))(broken)
  _, params = huggingface.load(broken, FLOAT32)
  np.testing.assert_array_equal(params['final_norm'], [largest, -largest] * 8)


@pytest.mark.parametrize('name', ['/nowhere/at all', './nowhere', 'tests/nowhere', 'nowhere'])
def test_a_missing_directory_is_named(name):
  with pytest.raises(UserError, match=r'model directory .*nowhere.* does not exist: set model\.path'):
    huggingface.load(name, FLOAT32)


def test_a_hub_name_that_cannot_be_fetched_is_named(monkeypatch):
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  with pytest.raises(
    UserError, match="'no-such/model' is not a directory here, and it cannot be loaded from the Hugging Face hub"
  ):
    huggingface.load('no-such/model', FLOAT32)


def test_a_tree_of_other_shapes_is_not_exported(made, tmp_path):
  policy, params = made
  with pytest.raises(ValueError, match=r'final_norm has shape \(3,\), not \(16,\)'):
    huggingface.save(tmp_path / 'export', policy, params | {'final_norm': np.ones(3)})
  assert not (tmp_path / 'export').exists()
