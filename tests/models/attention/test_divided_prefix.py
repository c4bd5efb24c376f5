"""A prefix that is sharded over a mesh: results equal those of one device that holds all slots."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from sdpo_jax.config import CartridgeConfig, Config, MeshConfig, ModelConfig
from sdpo_jax.distributed import accelerators
from sdpo_jax.distributed.mesh import make_mesh, parameter_sharding, put_rows
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import kv_prefix, slot_names
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.attention import dispatch
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.models.attention.prefix import Prefix
from sdpo_jax.models.cache import SHALLOW, Stores
from sdpo_jax.rollout import weights
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.training import documents
from tests import tiers
from tests.models.adapters.prefixed_models import DOCUMENT, after_document, model, rows
from tests.models.attention.attention_cases import (
  HEAD_DIM,
  HEADS,
  KV_HEADS,
  PACKED,
  SINGLE,
  SLOTS,
  first_slots,
  plain,
  shared,
  tensors,
  whole,
)
from tests.models.family_models import MODELS, MORE, SIZES, TOKENIZER

MESH = (4, 2)
ROWS = np.concatenate([PACKED, SINGLE])


def padded(slots):
  """Return slots padded to four parts of eight: the 21 slots fill two parts, and five places of the third."""
  return jnp.pad(slots, ((0, 0), (0, 32 - SLOTS), (0, 0)), constant_values=7.0)  # What is not filled may be anything.


def divided(kind):
  return AttentionBackend(kind, make_mesh(MeshConfig(*MESH)), tile_bytes=2**10, interpret=True)


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


def campaign(*values):
  return pytest.param(*values, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
  ('kind', 'count', 'window', 'within', 'sampling'),
  [
    ('xla', 8, 6, True, False),
    ('splash', 8, 0, False, False),  # Queries change their heads for rows.
    slow('splash', 8, 30, True, False),  # The window reaches over several parts.
    campaign('splash', 4, 0, False, True),
    slow('splash', 3, 6, True, False),  # No mesh axis divides the rows.
    campaign('xla', 4, 0, False, True),
    campaign('xla', 3, 0, False, False),
    campaign('splash', 3, 0, False, True),
    campaign('splash', 8, 6, True, True),
    campaign('splash', 8, 6, False, False),
    slow('cudnn', 8, 6, True, False),
  ],
)
def test_whole_rows_attend_to_all_parts(kind, count, window, within, sampling):
  segments = ROWS[:count]
  query, key, value = tensors(*segments.shape)
  slots = shared()
  first = first_slots(segments, window) if window and within else None
  windows = (0, window) if window else (0,)

  def attend(query, key, value, *slots):
    prefix = Prefix(*map(padded, slots), first, filled=jnp.int32(SLOTS), divided=True)
    return whole(
      divided(kind), query, key, value, segments, windows, len(windows) - 1, prefix=prefix, sampling=sampling
    )

  found = jax.jit(attend)(query, key, value, *slots) * (segments > 0)[:, :, None, None]
  np.testing.assert_allclose(found, plain(query, key, value, *slots, segments, window, within), atol=2e-6)


@pytest.mark.parametrize(('count', 'first'), [(4, None), campaign(4, 15), campaign(3, None), slow(3, 15)])
def test_decoding_attends_to_all_parts(count, first):
  draw, layer = np.random.default_rng(3), 1
  query = draw.standard_normal((count, 1, HEADS, HEAD_DIM)).astype(np.float32)
  stores = Stores(*(draw.standard_normal((2, count, KV_HEADS, 9, HEAD_DIM)).astype(np.float32) for _ in range(2)))
  filled = np.array([9, 1, 4, 2], np.int32)[:count]
  key, value = shared()
  firsts = None if first is None else first + np.arange(count, dtype=np.int32)[:, None]
  expected = np.zeros(query.shape)
  for row, head in np.ndindex(count, HEADS):
    at, start = head // (HEADS // KV_HEADS), 0 if first is None else firsts[row, 0]
    keys = np.concatenate([key[at, start:], stores.keys[layer, row, at, : filled[row]]]).astype(np.float64)
    values = np.concatenate([value[at, start:], stores.values[layer, row, at, : filled[row]]])
    scores = np.exp(keys @ query[row, 0, head])
    expected[row, 0, head] = scores @ values / scores.sum()

  def decode(query, *slots):
    prefix = Prefix(*map(padded, slots), firsts, filled=jnp.int32(SLOTS), divided=True)
    part = stores, np.zeros_like(filled), filled
    return dispatch.attend_stacks(divided('splash'), query, filled[:, None] - 1, [part], layer, 0, prefix)

  np.testing.assert_allclose(jax.jit(decode)(query, key, value), expected, atol=2e-6)


@pytest.mark.parametrize(('kind', 'error'), [('xla', ValueError), slow('splash', NotImplementedError)])
def test_there_is_no_gradient_to_be_had(kind, error):
  """Neither has splash attention to a row's own keys, if it returns log-normalisers."""
  arrays = *tensors(*ROWS.shape), *shared()

  def loss(*arrays):
    prefix = Prefix(*map(padded, arrays[3:]), filled=jnp.int32(SLOTS), divided=True)
    return jnp.sum(whole(divided(kind), *arrays[:3], ROWS, prefix=prefix))

  assert jax.eval_shape(loss, *arrays).shape == ()
  with pytest.raises(error, match='no gradient' if error is ValueError else None):
    jax.eval_shape(jax.grad(loss), *arrays)


def test_slots_that_are_trained_are_not_divided():
  with pytest.raises(ValueError, match='trained slots cannot be sharded'):
    KVPrefix(8, 1, parts=4)


def read_divided(name, monkeypatch, part, backend=None):
  """Return (policy with the document, its base on a mesh, keys and values), read on the mesh in parts of given size."""
  monkeypatch.setattr(kv_prefix, 'PART', part)
  monkeypatch.setattr(
    kv_prefix, 'block_size', lambda length: 4
  )  # Devices get eight slots each, of which 21 are filled.
  policy, params = model(name)
  mesh = make_mesh(MeshConfig(*MESH))
  there = policy.on(mesh)
  if backend is not None:
    there = dataclasses.replace(there, backend=dataclasses.replace(there.backend, kind=backend, interpret=True))
  prefix = KVPrefix(len(DOCUMENT), len(DOCUMENT), within_windows=True, parts=MESH[0])
  on_mesh = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  slots = kv_prefix.read_slots(there, on_mesh, DOCUMENT, MESH[0])
  read = [
    parameters.get(slots, ('layers', *name.split('.'))) for name in (slot_names.FROZEN_KEY, slot_names.FROZEN_VALUE)
  ]
  for array in read:
    assert array.shape[2] == prefix.room == 32
    assert array.sharding.shard_shape(array.shape)[1:3] == (max(policy.config.kv_heads // 2, 1), 8)
  held = [np.asarray(array)[:, :, : len(DOCUMENT)] for array in read]
  return dataclasses.replace(there, adapter=prefix), parameters.merge(on_mesh, slots), held


def prefilled(policy, params):
  """Return keys and values [L, KV, N, head_dim] of the document, from one pass on one device with plain attention."""
  count = len(DOCUMENT)
  row = np.array([DOCUMENT]), np.arange(count)[None], np.ones((1, count), np.int32)
  stores = jax.jit(lambda params: policy.apply({}, params, *row, policy.init_cache(1, count))[2].stores)(params)
  # Which order of axes a store has is its own affair.
  layers = [kv_cache.layer_of(stores, layer) for layer in range(policy.config.layers)]
  return tuple(np.stack([np.asarray(getattr(layer, name))[0] for layer in layers]) for name in ('keys', 'values'))


NAMES = (*MODELS, *MORE)


@pytest.mark.parametrize(
  ('name', 'part', 'backend'),
  [
    ('gemma3', 5, None),
    slow('gemma3', 5, 'splash'),
    slow('gemma3', 1, None),
    campaign('gemma3', 8, None),
    *(campaign(name, 5, kind) for name in NAMES for kind in (None, 'splash') if name != 'gemma3'),
  ],
)
def test_a_document_is_read_where_it_lies_and_says_what_its_text_says(name, part, backend, monkeypatch):
  """Two of the three parts of five tokens are on two devices each."""
  policy, base, held = read_divided(name, monkeypatch, part, backend)
  plain_policy, params = model(name)
  for mine, theirs in zip(held, prefilled(plain_policy, params), strict=True):
    np.testing.assert_allclose(mine, theirs, atol=4e-5, rtol=1e-5)  # Keys of the ninth layer are of the order of 10.
  row = rows()
  real = row[2] > 0
  expected = after_document(plain_policy, params, row)[real]

  @jax.jit
  def score(*row):
    hidden, unembedding, _ = policy.apply(base, {}, *row)
    return hidden @ unembedding.T

  np.testing.assert_allclose(np.asarray(score(*put_rows(policy.backend.mesh, row)))[real], expected, atol=5e-5)


@pytest.mark.parametrize(
  ('name', 'backend'),
  tiers.cases(itertools.product(('gemma3', 'qwen3'), (None, 'splash')), slow=[('gemma3', None), ('qwen3', 'splash')]),
)
def test_a_sampler_goes_on_after_the_document_where_it_lies(name, backend, monkeypatch):
  policy, base, _ = read_divided(name, monkeypatch, 8, backend)
  plain_policy, params = model(name)
  prompts = [[5, 9, 13], [7] * 12, [3]]
  request = dict(n=4, seed=0, step=0, max_tokens=8, temperature=0.0)

  def sample(policy, base, trainable, prompts, buckets, mesh=None):
    sampler = Sampler(policy, TOKENIZER, prompt_buckets=buckets, response_buckets=(8,), decode_chunk=4, mesh=mesh)
    return sampler.sample(base, trainable, prompts, **request)

  expected = sample(plain_policy, {}, params, [DOCUMENT + prompt for prompt in prompts], (36,))
  found = sample(policy, base, {}, prompts, (12,), policy.backend.mesh)
  np.testing.assert_array_equal(found.completion_tokens, expected.completion_tokens)
  np.testing.assert_allclose(found.model_log_probs, expected.model_log_probs, atol=5e-5)


@pytest.mark.parametrize('layers', [SHALLOW, SHALLOW + 1], ids=['unrolled', 'scanned'])
def test_what_a_sampler_makes_of_its_base_leaves_slots_where_they_lie(layers):
  mesh = make_mesh(MeshConfig(*MESH))
  values = SIZES | MODELS['qwen3'][1] | dict(model_type='qwen3', num_hidden_layers=layers)
  policy = huggingface.describe(values, ModelConfig(dtype='float32')).on(mesh)
  policy = dataclasses.replace(policy, adapter=KVPrefix(21, 21, parts=MESH[0]))

  def place(row):
    return jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=parameter_sharding(mesh, row.axes, row.shape))

  base = parameters.map_table(place, policy.parameter_table())
  prepared = weights.base_preparation(policy, mesh, base)
  made = prepared.program.lower(base).compile().output_shardings['layers']
  if layers == SHALLOW:
    assert made[0]['prefix']['frozen_key'].spec[:2] == ('tensor', 'fsdp')
    assert 'fsdp' not in made[0]['mlp']['up'].spec
  else:
    assert made['prefix'] == dict(frozen_key=None, frozen_value=None)  # They are read as they are.
    assert 'fsdp' not in made['mlp']['up'].spec


@pytest.mark.parametrize(
  ('chosen', 'gib', 'parts'),
  [(None, 2.0, None), (None, 1.0, 4), (None, None, None), (False, 1.0, None), (True, None, 4)],
)
def test_a_document_is_divided_where_it_would_take_an_eighth_of_a_chip(chosen, gib, parts, monkeypatch):
  """The model has 2 layers of 2 heads of 16 elements in float32, so that 2^19 tokens take 2^28 bytes."""
  chip = accelerators.Accelerator('chip', 1.0, memory_gib=gib)
  monkeypatch.setattr(accelerators, 'find', lambda kind: chip)
  config = Config()
  config.model.cartridge = CartridgeConfig(tokens=16, document='text', divide_document=chosen)
  policy = huggingface.describe(SIZES | MODELS['qwen3'][1] | dict(model_type='qwen3'), ModelConfig(dtype='float32'))
  sizes = policy.config
  assert (sizes.layers, sizes.kv_heads, sizes.head_dim) == (2, 2, 16)
  on_mesh = policy.on(make_mesh(MeshConfig(*MESH)))
  assert documents.prefix_of(config, on_mesh, 2**19) == KVPrefix(2**19, 2**19, within_windows=True, parts=parts)
  assert documents.prefix_of(config, policy, 2**19).parts is None  # There is one device.
