"""The frozen base is prepared for the sampler once, and no array of it is copied that the sampler can read as it is."""

from __future__ import annotations

import concurrent.futures
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed import programs as registry
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.models import parameters
from sdpo_jax.planner.plan import resident_bytes
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.rollout.weights import PreparedBase
from sdpo_jax.training.run_programs import abstract_parameters, run_programs
from tests.models.small_policies import DEPTHS, NoText, make
from tests.updates import settings

FROZEN = ('embedding', 'layers')
MESHES = {
  'one device': None,
  'a mesh of one device': MeshConfig(1, 1),
  'tensor parallel': MeshConfig(1, 2),
  'gathered': MeshConfig(4, 2),
}


def mesh_of(name):
  mesh = MESHES[name]
  return mesh and make_mesh(mesh, jax.devices()[: mesh.fsdp * mesh.tensor])


def make_sampler(policy, mesh, keep=None):
  return Sampler(policy, NoText(), prompt_buckets=(8,), response_buckets=(12,), mesh=mesh, resized=False, keep=keep)


def of_base(policy, base):
  """Return the base with matrices in the dtype of the policy and norm weights in float32."""
  return parameters.in_compute_dtype(parameters.frozen(policy.parameter_table()), base, policy.dtype)


def pointers(tree):
  return [{shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards} for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize('where', MESHES)
def test_arrays_that_agree_are_the_bases_own(where):
  """By the addresses of their buffers, on every device."""
  mesh = mesh_of(where)
  policy, base, trainable = make(DEPTHS['deep'], FROZEN, mesh, 'bfloat16')
  base = of_base(policy, base)
  prepared, _ = make_sampler(policy, mesh).prepare(base, trainable)
  flat = jax.tree_util.tree_leaves_with_path(prepared)
  assert [path for path, _ in flat] == [path for path, _ in jax.tree_util.tree_leaves_with_path(base)]
  same = [one == other for one, other in zip(pointers(base), pointers(prepared), strict=True)]
  whole = [leaf.sharding.is_fully_replicated or 'fsdp' not in leaf.sharding.spec for leaf in jax.tree.leaves(base)]
  assert same == whole if where == 'gathered' else all(same)
  assert where != 'gathered' or not all(same)
  for (path, leaf), given in zip(flat, jax.tree.leaves(base), strict=True):
    np.testing.assert_array_equal(leaf, given, err_msg=str(path))
    assert leaf.dtype == given.dtype
    assert where != 'gathered' or leaf.sharding.is_fully_replicated or 'fsdp' not in leaf.sharding.spec


def test_other_dtypes_and_other_trees_are_copied():
  policy, base, trainable = make(DEPTHS['deep'], FROZEN, dtype='bfloat16')
  prepared, _ = make_sampler(policy, None).prepare(base, trainable)
  for one, other in zip(jax.tree.leaves(base), jax.tree.leaves(prepared), strict=True):
    assert (one is other) == (one.dtype == other.dtype), one.shape  # float32 matrices are cast, norm weights stay.
  policy, base, trainable = make(DEPTHS['shallow'], FROZEN, dtype='bfloat16')
  prepared, _ = make_sampler(policy, None).prepare(of_base(policy, base), trainable)
  assert set(prepared['layers']) == {0, 1}
  np.testing.assert_array_equal(prepared['layers'][1]['mlp']['up'], base['layers']['mlp']['up'][1].astype('bfloat16'))


def request(sampler, base, trainable, step=0):
  rollouts = sampler.sample(base, trainable, [[3, 4, 5], [7] * 8], n=4, seed=1, step=step, max_tokens=12)
  return rollouts.completion_tokens, rollouts.sampling_log_probs


@pytest.mark.parametrize('layers', [DEPTHS['shallow'], pytest.param(DEPTHS['deep'], marks=pytest.mark.slow)])
def test_a_base_is_prepared_once_and_another_anew(layers):
  policy, base, trainable = make(layers, FROZEN, dtype='bfloat16')
  prepared = []

  def noting(name, function):
    if name != 'prepare_base':
      return function
    return lambda base: prepared.append(base) or function(base)

  sampler = make_sampler(policy, None, noting)
  first = request(sampler, base, trainable)
  moved = jax.tree.map(lambda leaf: leaf + 1, trainable)
  assert not np.array_equal(request(sampler, base, moved)[1], first[1])  # The trainable tree is prepared every time.
  # Another dict of the same arrays is the same base.
  np.testing.assert_array_equal(request(sampler, {**base}, trainable), first)
  assert len(prepared) == 1
  other = base | {'embedding': base['embedding'][::-1] * 1.5}
  expected = request(make_sampler(policy, None), other, trainable)
  assert not np.array_equal(expected[1], first[1])
  np.testing.assert_array_equal(request(sampler, other, trainable), expected)
  np.testing.assert_array_equal(request(sampler, base, trainable), first)
  assert len(prepared) == 3


def live_bytes():
  gc.collect()
  return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
def test_a_copy_goes_with_the_sampler_and_when_another_base_comes():
  policy, base, trainable = make(DEPTHS['shallow'], FROZEN, dtype='bfloat16')
  others = [jax.tree.map(lambda leaf, by=by: leaf * by, base) for by in (2, 3)]
  sampler = make_sampler(policy, None)
  before = live_bytes()
  sampler.prepare(base, trainable)
  copy = live_bytes() - before
  # All of the base in half the bytes, and the embedding turned beside it; norm weights are as large as they were.
  shapes = jax.eval_shape(lambda tree: policy.cast(tree, {})[0], base)
  assert copy == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)) > 0
  for other in others:
    sampler.prepare(other, trainable)
    assert live_bytes() - before == copy
  del sampler
  assert live_bytes() == before


def test_a_failure_leaves_no_half_prepared_base():
  """And of two requests at once one prepares it."""
  calls = []

  def prepare(base):
    calls.append(base)
    if len(calls) == 2:
      raise RuntimeError('out of memory')
    return type('Preparation', (), {'run': lambda _, tree: jax.tree.map(jnp.copy, tree)})()

  one, other = {'weight': jnp.ones(3)}, {'weight': jnp.zeros(3)}
  prepared = PreparedBase(prepare)
  kept = prepared(one)
  assert prepared(one) is kept
  with pytest.raises(RuntimeError, match='out of memory'):
    prepared(other)
  np.testing.assert_array_equal(prepared(one)['weight'], np.ones(3))
  assert len(calls) == 3
  with concurrent.futures.ThreadPoolExecutor() as pool:
    assert len({id(tree) for tree in pool.map(prepared, [other] * 8)}) == 1
  assert len(calls) == 4


def test_arrays_of_the_host_are_prepared_every_time():
  """They could change without another array in their place."""
  policy, base, trainable = make(DEPTHS['shallow'], FROZEN, dtype='bfloat16')
  sampler, base = make_sampler(policy, None), jax.tree.map(np.array, base)
  first = request(sampler, base, trainable)
  base['embedding'] *= -1.5
  expected = request(make_sampler(policy, None), jax.tree.map(jnp.asarray, base), trainable)
  np.testing.assert_array_equal(request(sampler, base, trainable), expected)
  assert not np.array_equal(first, expected)


def registered(layers, frozen, where, dtype='bfloat16'):
  mesh = mesh_of(where)
  policy, *_ = make(layers, frozen, mesh, dtype)
  # As a run of a frozen base loads it.
  table = policy.parameter_table()
  base, trainable = abstract_parameters(policy, mesh)
  dtypes = {parameter.path: dtype if parameter.compute else 'float32' for parameter in table}
  cast = jax.tree_util.tree_map_with_path(
    lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes[tuple(key.key for key in path)], sharding=leaf.sharding),
    base,
  )
  config = settings(trainer__test_freq=0)
  return run_programs(config, policy, cast, trainable, mesh), cast


def test_programs_of_the_base_are_registered_where_there_is_something_to_prepare():
  full, _ = registered(DEPTHS['deep'], (), 'a mesh of one device')
  assert 'prepare' in full and 'prepare_base' not in full
  aliased, base = registered(DEPTHS['deep'], FROZEN, 'tensor parallel')
  assert 'prepare' in aliased and 'prepare_base' not in aliased
  loop = aliased['decode/8×6']
  assert set(loop.holds[0]) == {'base'} and loop.inherits == {1: ('prepare', None)}
  assert jax.tree.map(lambda leaf: leaf.sharding, loop.arguments[0]) == jax.tree.map(lambda leaf: leaf.sharding, base)
  gathered, _ = registered(DEPTHS['deep'], FROZEN, 'gathered')
  assert set(gathered['decode/8×6'].holds[0]) == {'base', 'sampling base'}
  whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(base))
  for found, parts in ((full, 0), (aliased, 2), (gathered, 8)):
    size = resident_bytes(found).get('base', 0)
    assert whole / 8 <= size <= whole if parts else size == 0


@pytest.mark.slow
def test_the_sampler_is_compiled_for_the_bases_own_arrays_and_for_those_that_are_made():
  found, base = registered(DEPTHS['deep'], FROZEN, 'gathered')
  compiled = dict(registry.compile_programs(found, ['decode/8×6']))
  assert list(compiled) == ['prepare_base', 'prepare', 'decode/8×6']
  given = compiled['decode/8×6'].input_shardings[0][0]
  made = compiled['prepare_base'].output_shardings
  stays = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(base):
    keys = tuple(key.key for key in path)
    own = parameters.get(made, keys)
    stays += own is None
    expected = leaf.sharding if own is None else own
    assert parameters.get(given, keys).is_equivalent_to(expected, leaf.ndim), keys
  assert 0 < stays < len(jax.tree.leaves(base))
