"""The decoder compiled for TPUs, which needs no TPU: the kernels it uses, the copies it makes, what fits a chip."""

import dataclasses
import functools
import math

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.attention import dispatch
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.models.attention.prefix import Prefix
from sdpo_jax.planner import hlo
from sdpo_jax.rollout import decode
from sdpo_jax.rollout.functions import sampler_functions
from sdpo_jax.rollout.sampling import SamplingParams
from tests import tiers
from tests.tpu_programs import (
  BACKWARD,
  FORWARD,
  PREFIXED,
  SMALL,
  abstract_cache,
  abstract_parameters,
  kernels,
  over_rows,
  slice_mesh,
)

pytestmark = pytest.mark.tpu_compiler

QWEN3_8B = dict(
  model_type='qwen3',
  vocab_size=151936,
  hidden_size=4096,
  intermediate_size=12288,
  num_hidden_layers=36,
  num_attention_heads=32,
  num_key_value_heads=8,
  head_dim=128,
)


def compile_update(values, mesh, rows, length, remat='full', **settings):
  """Return the compiled forward and backward pass of the decoder, with rows sharded over the whole mesh."""
  policy = huggingface.describe(values, ModelConfig(remat=remat, **settings)).on(mesh)
  base, trainable = parameters.split(policy.parameter_table(), abstract_parameters(policy, mesh))
  sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  row = (jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding),) * 3
  weights = jax.ShapeDtypeStruct((rows, length, policy.config.hidden_size), jnp.bfloat16, sharding=sharding)

  def loss(trainable, base, weights, *row):
    return jnp.sum(policy.apply(base, trainable, *row)[0].astype(jnp.float32) * weights.astype(jnp.float32))

  shardings = jax.tree.map(lambda leaf: leaf.sharding, trainable)
  return jax.jit(jax.grad(loss), out_shardings=shardings).lower(trainable, base, weights, *row).compile()


def compile_decode(values, mesh, rows, slots, quantized=False, left=None, **settings):
  """Return the sampler's loop of 32 steps: rows over fsdp, heads and vocabulary over tensor, the cache donated.

  `left` of the rows are still in use.
  """
  policy = huggingface.describe(values, ModelConfig(**settings)).on(mesh)
  trees = parameters.split(policy.parameter_table(), abstract_parameters(policy, mesh))
  functions = sampler_functions(policy, mesh, quantized)

  def without_fsdp(given, leaf):
    spec = PartitionSpec(*(None if axis == 'fsdp' else axis for axis in given.sharding.spec))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

  cast = jax.tree.map(without_fsdp, trees, jax.eval_shape(policy.cast, *trees))
  array = functools.partial(over_rows, mesh)
  cache = abstract_cache(functions, mesh, rows, slots)
  rows = left or rows
  cache = cache.replace(lengths=array((rows,), jnp.int32))
  sampling = SamplingParams(
    **{name: array((rows,), jnp.float32) for name in ('temperature', 'top_p', 'min_p')},
    **{name: array((rows,), jnp.int32) for name in ('top_k', 'sample_id', 'max_tokens')},
    seed=array((rows,), jnp.uint32),
    step=array((rows,), jnp.int32),
    stop_ids=array((rows, 1), jnp.int32),
  )
  state = decode.DecodeState(sampling, array((rows,), jnp.int32), array((rows,), jnp.int32), array((rows,), jnp.bool_))
  return cache, functions.advance.lower(*cast, cache, state, array((), jnp.int32), steps=32).compile()


def compile_admission(values, mesh, rows, slots, prompts, width, quantized=False):
  """Return the program that copies the caches of prompts into rows."""
  policy = huggingface.describe(values, ModelConfig()).on(mesh)
  functions = sampler_functions(policy, mesh, quantized)
  caches = abstract_cache(functions, mesh, rows, slots), abstract_cache(functions, mesh, prompts, width)
  index, count = (over_rows(mesh, (size,), jnp.int32) for size in (rows, functions.shards))
  return caches[0], functions.copy.lower(*caches, index, index, count).compile()


def compile_compaction(values, mesh, rows, slots, left, quantized=False):
  """Return the program that compacts a cache to `left` rows."""
  functions = sampler_functions(huggingface.describe(values, ModelConfig()).on(mesh), mesh, quantized)
  cache = abstract_cache(functions, mesh, rows, slots)
  return cache, functions.compact.lower(cache.stores, cache.lengths, over_rows(mesh, (left,), jnp.int32)).compile()


def total(compiled):
  """Return the bytes of a chip's memory that a program takes."""
  memory = compiled.memory_analysis()
  return (
    memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
  )


def largest_copy(text):
  """Return the bytes of the largest array in HBM that is made by a copy."""
  copies = hlo.copies(hlo.trace(hlo.parse(text), unknown_trips=1), limit=1)
  return max((copy.bytes for copy in copies), default=0)


def assert_cache_stays(cache, compiled):
  """Check that the cache is donated and aliased, and nothing of half its size is copied."""
  stacks = cache.stores.keys, cache.stores.values
  sizes = [int(np.prod(stack.sharding.shard_shape(stack.shape))) * stack.dtype.itemsize for stack in stacks]
  assert compiled.memory_analysis().alias_size_in_bytes >= sum(sizes)
  assert largest_copy(compiled.as_text()) < max(sizes) / 2


# Scales of an int8 cache lie as the cache does, and a shard knows nothing of how many there are.
SLICES = [
  pytest.param('v5e:2x2', (2, 2), True, id='v5e:2x2-int8', marks=pytest.mark.slow),
  pytest.param('v5e:8x8', (32, 2), False, id='v5e:8x8-bfloat16'),
  pytest.param('v5e:2x2', (2, 2), False, id='v5e:2x2-bfloat16', marks=pytest.mark.campaign),
  pytest.param('v5e:8x8', (32, 2), True, id='v5e:8x8-int8', marks=pytest.mark.campaign),
]
LENGTH = 256  # Of rows of which kernels are counted: what is chosen does not depend on it.
WINDOWS = dict(use_sliding_window=True, sliding_window=64, max_window_layers=4)


@pytest.mark.parametrize(
  ('sizes', 'remat', 'expected'),
  [
    pytest.param(SMALL, 'save_attention', FORWARD + BACKWARD, marks=pytest.mark.slow),
    pytest.param(SMALL, 'full', 2 * FORWARD + BACKWARD, marks=pytest.mark.slow),
    # Layers with a window and layers without one: a kernel for either.
    pytest.param(SMALL | WINDOWS, 'save_attention', 2 * (FORWARD + BACKWARD), marks=pytest.mark.slow),
  ],
  ids=['saved', 'computed again', 'windows'],
)
def test_training_runs_splash_and_may_save_its_output(sizes, remat, expected):
  text = compile_update(sizes, slice_mesh('v5e:2x2', 2, 2), 4, LENGTH, remat).as_text()
  assert sorted(kernels(text)) == sorted(expected)


@pytest.mark.slow
def test_prompts_that_are_shared_take_two_kernels_where_there_are_any():
  mesh = slice_mesh('v5e:2x2', 2, 2)
  policy = huggingface.describe(SMALL, ModelConfig()).on(mesh)
  sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  row = (jax.ShapeDtypeStruct((4, LENGTH), jnp.int32, sharding=sharding),) * 4

  def forward(params, *row, parents):
    return policy.apply({}, params, *row, parents=parents)[0]

  lowered = jax.jit(forward).lower(abstract_parameters(policy, mesh), *row[:3], parents=row[3])
  assert kernels(lowered.compile().as_text()) == 3 * ['splash_mha_fwd']  # Two to be merged, or the one of before.


@pytest.mark.campaign  # Half of the rows, of which a slice is a test below, are decoded by the same program.
@pytest.mark.parametrize(('name', 'shape', 'quantized'), SLICES)
def test_decoding_reads_the_cache_where_it_lies(name, shape, quantized):
  mesh = slice_mesh(name, *shape)
  cache, compiled = compile_decode(SMALL, mesh, 128, 1312, quantized)
  assert kernels(compiled.as_text()) == 2 * ['cache_attention']  # What was there before these steps, and since.
  assert_cache_stays(cache, compiled)


def test_prompts_are_copied_into_the_cache_where_it_lies():
  mesh = slice_mesh('v5e:2x2', 2, 2)
  cache, compiled = compile_admission(SMALL, mesh, 128, 1312, 8, 256)
  assert_cache_stays(cache, compiled)
  assert compiled.memory_analysis().temp_size_in_bytes < 2**20
  assert 'all-' not in compiled.as_text()


@pytest.mark.parametrize(('name', 'shape', 'quantized'), SLICES)
def test_rows_that_run_out_are_left_behind_in_the_cache_where_it_lies(name, shape, quantized):
  """A cache is compacted to half of its rows, and a decode step then multiplies only these by every weight."""
  mesh = slice_mesh(name, *shape)
  cache, compiled = compile_compaction(SMALL, mesh, 128, 1312, 64, quantized)
  assert_cache_stays(cache, compiled)
  assert compiled.memory_analysis().temp_size_in_bytes < 2**20
  assert 'all-' not in compiled.as_text()
  cache, compiled = compile_decode(SMALL, mesh, 128, 1312, quantized, left=64)
  assert kernels(compiled.as_text()) == 2 * ['cache_attention']  # What was there before these steps, and since.
  assert_cache_stays(cache, compiled)
  policy = huggingface.describe(SMALL, ModelConfig())
  weights = sum(math.prod(p.shape) for p in policy.parameter_table() if p.compute and p.name != 'embedding')
  flops = hlo.matmul_flops(hlo.trace(hlo.parse(compiled.as_text()), unknown_trips=1))
  assert flops == 2 * 64 * weights / mesh.size


YARN = dict(rope_type='yarn', factor=8.0, original_max_position_embeddings=64)
FAMILIES = {  # Changes of SMALL. Heads narrower than the 128 lanes of a TPU, and twice as wide, of which one has keys.
  'olmo3': dict(head_dim=64, sliding_window=64, rope_scaling=YARN),
  'gemma3_text': dict(
    head_dim=256, num_attention_heads=4, num_key_value_heads=1, sliding_window=64, sliding_window_pattern=3
  ),
  'llama': dict(head_dim=64, attention_bias=True, mlp_bias=True),
  'mistral': dict(sliding_window=64),
  'qwen2': dict(rope_scaling=YARN),
}


@pytest.mark.parametrize(
  'family',
  [
    pytest.param(f, marks=pytest.mark.slow if f in ('olmo3', 'gemma3_text') else pytest.mark.campaign) for f in FAMILIES
  ],
)
def test_every_family_runs_the_kernels_and_leaves_the_cache_where_it_lies(family):
  mesh = slice_mesh('v5e:2x2', 2, 2)
  policy = huggingface.describe(SMALL | FAMILIES[family] | {'model_type': family}, ModelConfig()).on(mesh)
  params = abstract_parameters(policy, mesh)
  sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  row = (jax.ShapeDtypeStruct((4, 128), jnp.int32, sharding=sharding),) * 3
  whole = jax.jit(lambda params, *row: policy.apply({}, params, *row)[0]).lower(params, *row).compile()
  assert kernels(whole.as_text()) == len(set(policy.config.windows or [0])) * FORWARD

  def steps(params, cache, *row):
    return lax.fori_loop(0, 4, lambda _, cache: policy.apply({}, params, *row, cache)[2], policy.with_recent(cache, 32))

  cache = abstract_cache(sampler_functions(policy, mesh, False), mesh, 128, 512)
  token = (over_rows(mesh, (128, 1), jnp.int32),) * 3
  half = parameters.map_tree(
    lambda p, leaf: leaf.update(dtype=jnp.bfloat16) if p.compute else leaf, policy.parameter_table(), params
  )
  compiled = jax.jit(steps, donate_argnums=1).lower(half, cache, *token).compile()
  assert kernels(compiled.as_text()) == 2 * ['cache_attention']
  assert_cache_stays(cache, compiled)


def matrix_sizes(values, **settings):
  """Return the number of elements of the layers' matrices, and of their factors."""
  table = huggingface.describe(values, ModelConfig(**settings)).parameter_table()
  matrices, factors = ([p for p in table if p.frozen == frozen and p.stacked and p.compute] for frozen in (True, False))
  return parameters.count(matrices), parameters.count(factors)


@pytest.mark.slow
def test_an_update_of_factors_multiplies_by_no_frozen_matrix_for_its_gradient():
  lora = LoraConfig(rank=16)
  compiled = compile_update(SMALL, slice_mesh('v5e:2x2', 2, 2), 4, 512, 'none', lora=lora)
  assert sorted(kernels(compiled.as_text())) == sorted(FORWARD + BACKWARD)
  matrices, factors = matrix_sizes(SMALL, lora=lora)
  flops = hlo.matmul_flops(hlo.trace(hlo.parse(compiled.as_text()), unknown_trips=1))
  assert flops == 2 * 512 * (2 * matrices + 3 * factors)  # A row per chip: forward, the states' gradient, the factors'.


@pytest.mark.slow
def test_decoding_with_factors_leaves_the_cache_where_it_lies():
  mesh, lora = slice_mesh('v5e:2x2', 2, 2), LoraConfig(rank=16)
  cache, compiled = compile_decode(SMALL, mesh, 128, 1312, lora=lora)
  assert kernels(compiled.as_text()) == 2 * ['cache_attention']
  assert_cache_stays(cache, compiled)
  matrices, factors = matrix_sizes(SMALL, lora=lora)
  head = SMALL['vocab_size'] * SMALL['hidden_size']
  flops = hlo.matmul_flops(hlo.trace(hlo.parse(compiled.as_text()), unknown_trips=1))
  # What is narrow is not divided over `tensor`, so that both chips of a row compute it.
  assert 0 < flops - 2 * 64 * (matrices + factors + head) / 2 < 2 * 64 * factors / 2


SLOTS = 2048


@pytest.mark.slow
@pytest.mark.parametrize('sampling', [False, True], ids=['update', 'prefill'])
def test_a_shared_prefix_takes_the_kernels(sampling):
  """2 048 queries per row, 24 heads of which 3 share keys; in the update they meet 4 096 keys, with gradients."""
  mesh, heads, head_dim = slice_mesh('v5e:2x2', 2, 2), (24, 8), 128
  backend = AttentionBackend('splash', mesh)
  by_row, shared = (('fsdp', None, 'tensor'), ('tensor',)) if sampling else ((mesh.axis_names,), ())

  def array(shape, spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

  query, key = (array((4, 2048, count, head_dim), by_row) for count in heads)
  slots, segments = array((heads[1], SLOTS, head_dim), shared), array((4, 2048), by_row[:1], jnp.int32)

  def attend(query, key, value, slots_key, slots_value, segments):
    prefix, starts = Prefix(slots_key, slots_value, trained=True), dispatch.segment_starts(segments)
    return dispatch.attend_whole(backend, query, key, value, segments, starts, prefix=prefix, sampling=sampling)

  def loss(*arrays):
    return jnp.sum(attend(*arrays).astype(jnp.float32))

  arrays = query, key, key, slots, slots, segments
  compiled = jax.jit(attend if sampling else jax.grad(loss, range(5))).lower(*arrays).compile()
  # Of the prefix and of what is a row's own, to be merged; or of both, one behind the other.
  assert sorted(kernels(compiled.as_text())) == sorted(2 * FORWARD if sampling else FORWARD + BACKWARD)
  if sampling:  # A chip has two rows and half of the heads; no row has a copy of the prefix.
    assert largest_copy(compiled.as_text()) < 2 * heads[1] / 2 * SLOTS * head_dim * 2


@pytest.mark.slow
def test_decoding_with_a_shared_prefix_multiplies_it_once_for_all_rows():
  mesh = slice_mesh('v5e:2x2', 2, 2)
  policy = dataclasses.replace(huggingface.describe(PREFIXED, ModelConfig()), adapter=KVPrefix(SLOTS, 1)).on(mesh)
  table = policy.parameter_table()

  def cast(parameter, leaf):
    spec = PartitionSpec(*(None if axis == 'fsdp' else axis for axis in leaf.sharding.spec))
    dtype = jnp.bfloat16 if parameter.compute else leaf.dtype
    return leaf.update(dtype=dtype, sharding=NamedSharding(mesh, spec))

  trees = parameters.split(table, parameters.map_tree(cast, table, abstract_parameters(policy, mesh)))
  cache = abstract_cache(sampler_functions(policy, mesh, False), mesh, 128, 512)
  token = (over_rows(mesh, (128, 1), jnp.int32),) * 3

  def steps(base, trainable, cache, *row):
    with_room = policy.with_recent(cache, 32)
    return lax.fori_loop(0, 4, lambda _, cache: policy.apply(base, trainable, *row, cache)[2], with_room)

  compiled = jax.jit(steps, donate_argnums=2).lower(*trees, cache, *token).compile()
  assert kernels(compiled.as_text()) == 2 * ['cache_attention']
  assert_cache_stays(cache, compiled)
  assert compiled.memory_analysis().temp_size_in_bytes < 2**23
  flops = hlo.matmul_flops(hlo.trace(hlo.parse(compiled.as_text()), unknown_trips=1))
  matrices, _ = matrix_sizes(PREFIXED, lora=LoraConfig(rank=1))
  to_prefix = 9 * 24 * SLOTS * 128 * 2
  assert flops == 4 * 2 * 64 * (matrices + to_prefix) / 2  # Four steps of 64 rows per chip, heads over two.


@pytest.mark.parametrize(
  ('rows', 'context', 'gib', 'quantized'),
  tiers.cases(
    [
      (rows, context, gib, quantized)
      for rows, context, gib in ((256, 10240, 8), (384, 10240, 11), (1024, 4096, 11.5))
      for quantized in (False, True)
    ],
    slow=[(256, 10240, 8, False)],
  ),
)
def test_qwen3_8b_decodes_on_64_chips(rows, context, gib, quantized):
  mesh = slice_mesh('v5e:8x8', 8, 8)
  cache, compiled = compile_decode(QWEN3_8B, mesh, rows, context + 32, quantized)
  assert_cache_stays(cache, compiled)
  assert total(compiled) <= (0.7 if quantized else 1.0) * gib * 2**30
  cache, compiled = compile_admission(QWEN3_8B, mesh, rows, context + 32, 32, 2048, quantized)
  assert_cache_stays(cache, compiled)
  cache, compiled = compile_compaction(QWEN3_8B, mesh, rows, context + 32, rows // 2, quantized)
  assert_cache_stays(cache, compiled)
