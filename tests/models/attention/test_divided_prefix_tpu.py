"""The TPU compiler on documents that are sharded over a slice: kernels are used, and slots are never gathered."""

import dataclasses
import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from sdpo_jax.config import ModelConfig
from sdpo_jax.distributed.mesh import compiler_options
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import kv_prefix
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.rollout.functions import sampler_functions
from tests.tpu_programs import FORWARD, PREFIXED, abstract_cache, abstract_parameters, kernels, over_rows, slice_mesh

pytestmark = pytest.mark.tpu_compiler

DOCUMENT, CHIPS = 98304, 8
LAYER = 2 * 8 * DOCUMENT * 128 * 2  # Bytes of keys and values of a layer, 8 heads of 128 numbers.
MESHES = pytest.mark.parametrize(
  'sizes',
  [
    pytest.param((8, 1), id='fsdp', marks=pytest.mark.campaign),
    pytest.param((1, 8), id='tensor', marks=pytest.mark.campaign),
    pytest.param((4, 2), id='both', marks=pytest.mark.slow),
  ],
)


def described(sizes, prefix):
  mesh = slice_mesh('v5e:2x4', *sizes)
  policy = huggingface.describe(PREFIXED, ModelConfig()).on(mesh)
  return mesh, dataclasses.replace(policy, adapter=prefix)


def prepared(policy, mesh):
  """Return the parameters as a sampler gets them: gathered over `fsdp`, except for the slots."""

  def place(parameter, leaf):
    if 'slots' in parameter.axes:
      return leaf
    spec = PartitionSpec(*(None if axis == 'fsdp' else axis for axis in leaf.sharding.spec))
    dtype = jnp.bfloat16 if parameter.compute else leaf.dtype
    return leaf.update(dtype=dtype, sharding=NamedSharding(mesh, spec))

  table = policy.parameter_table()
  return parameters.map_tree(place, table, abstract_parameters(policy, mesh))


def split(tree, mesh):
  """Return (parameters of the model, slots); a chip holds DOCUMENT / CHIPS slots of a head."""
  slots = {'layers': {'prefix': tree['layers']['prefix']}}
  model = tree | {'layers': {name: held for name, held in tree['layers'].items() if name != 'prefix'}}
  share = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * 2 for leaf in jax.tree.leaves(slots))
  assert share == PREFIXED['num_hidden_layers'] * LAYER / CHIPS
  return model, slots, share


def bytes_of(tree):
  return sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@MESHES
def test_a_document_is_read_into_the_chips_parts(sizes):
  mesh, policy = described(sizes, kv_prefix.filling(DOCUMENT, sizes[0]))
  model, slots, share = split(prepared(policy, mesh), mesh)
  whole = NamedSharding(mesh, PartitionSpec())
  tokens, start = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in ((1, kv_prefix.PART), ()))
  compiled = kv_prefix.reader(policy).lower(model, slots, tokens, start).compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= share  # The new slots are written in place.
  assert memory.argument_size_in_bytes < share + bytes_of(model) + 2**20
  # Results of every chip for 2 048 tokens, 100 MB, come together; of the document not as much as a layer.
  assert memory.temp_size_in_bytes < LAYER
  text = compiled.as_text()
  assert kernels(text) == 2 * FORWARD
  gathered = re.findall(r'= \w+\[([\d,]*)\][^ ]* all-gather\(', text)
  assert all(str(kv_prefix.PART) in shape.split(',') for shape in gathered)  # No weights.


@MESHES
def test_texts_are_scored_behind_a_document_that_stays_where_it_is(sizes):
  mesh, policy = described(sizes, KVPrefix(DOCUMENT, DOCUMENT, within_windows=True, parts=sizes[0]))
  tree = abstract_parameters(policy, mesh)
  _, _, share = split(tree, mesh)
  row = (jax.ShapeDtypeStruct((8, 512), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names))),) * 3
  score = jax.jit(lambda base, *row: policy.apply(base, {}, *row)[0], compiler_options=compiler_options(mesh))
  compiled = score.lower(tree, *row).compile()
  memory = compiled.memory_analysis()
  assert memory.argument_size_in_bytes < bytes_of(tree) + 2**20 and bytes_of(tree) > share
  assert memory.temp_size_in_bytes < LAYER / 2
  assert kernels(compiled.as_text()) == 2 * FORWARD


@MESHES
def test_decoding_reads_a_document_where_it_is(sizes):
  mesh, policy = described(sizes, KVPrefix(DOCUMENT, DOCUMENT, within_windows=True, parts=sizes[0]))
  tree = prepared(policy, mesh)
  cache = abstract_cache(sampler_functions(policy, mesh, False), mesh, 64, 512)
  token = (over_rows(mesh, (64, 1), jnp.int32),) * 3

  @functools.partial(jax.jit, donate_argnums=1)
  def steps(base, cache, *row):
    with_room = policy.with_recent(cache, 32)
    return lax.fori_loop(0, 4, lambda _, cache: policy.apply(base, {}, *row, cache)[2], with_room)

  compiled = steps.lower(tree, cache, *token).compile()
  assert sorted(kernels(compiled.as_text())) == sorted([*FORWARD, *2 * ['cache_attention']])
  assert compiled.memory_analysis().temp_size_in_bytes < LAYER / 2
