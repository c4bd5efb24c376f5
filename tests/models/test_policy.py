"""The policy protocol: its implementations, and a frozen base, which changes no states, samples or gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh, put_rows
from sdpo_jax.models import flops, parameters
from sdpo_jax.models.policy import Policy
from sdpo_jax.rollout.sampler import Sampler
from tests import tiers
from tests.compiling import users_options
from tests.golden.toy_policy import ToyPolicy
from tests.models.small_policies import DEPTHS, NoText, make

FROZEN = {
  'embedding and MLP': ('embedding', 'layers.mlp'),
  'all but the final norm': ('embedding', 'layers', 'unembedding'),
}


def assert_equal(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def states_and_gradients(policy, base, trainable, row):
  """Return final states, and the gradient of a loss of them and the unembedding for the trainable tree."""

  def loss(trainable, base):
    hidden, unembedding, _ = policy.apply(base, trainable, *row)
    return jnp.sum(jnp.sin(hidden @ unembedding.T).astype(jnp.float32)), hidden

  # Bit for bit, which the flags of the test process do not give.
  return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=users_options())(trainable, base)


CELLS = [(what, depth, devices) for what in FROZEN for depth in DEPTHS for devices in ('one device', 'eight devices')]
QUICK = (('embedding and MLP', 'shallow', 'eight devices'),)  # The others are slow.


def mesh_of(devices):
  return make_mesh(MeshConfig(4, 2)) if devices == 'eight devices' else None


def rows_on(mesh):
  row = (
    np.random.default_rng(0).integers(1, 61, (8, 12), dtype=np.int32),
    np.tile(np.arange(12, dtype=np.int32), (8, 1)),
    np.ones((8, 12), np.int32),
  )
  return row if mesh is None else put_rows(mesh, row)


@functools.cache
def nothing_frozen(depth, devices):
  """Return (loss, states) and gradients of the model in full fine-tuning."""
  mesh = mesh_of(devices)
  policy, nothing, params = make(DEPTHS[depth], (), mesh)
  assert nothing == {}
  return jax.device_get(states_and_gradients(policy, {}, params, rows_on(mesh)))


@pytest.mark.parametrize(('what', 'depth', 'devices'), tiers.cases(CELLS, default=QUICK, slow=CELLS))
def test_what_is_frozen_changes_no_state_and_no_gradient(what, depth, devices):
  mesh = mesh_of(devices)
  expected, expected_gradient = nothing_frozen(depth, devices)
  policy, base, trainable = make(DEPTHS[depth], FROZEN[what], mesh)
  found, gradient = states_and_gradients(policy, base, trainable, rows_on(mesh))
  assert_equal(found, expected)
  wanted = parameters.trainable(policy.parameter_table())
  assert_equal(gradient, parameters.map_tree(lambda _, leaf: leaf, wanted, expected_gradient))
  assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def sampled(layers, frozen, mesh):
  mesh = mesh and make_mesh(mesh)
  policy, base, trainable = make(layers, frozen, mesh, 'bfloat16')
  sampler = Sampler(policy, NoText(), prompt_buckets=(8,), response_buckets=(12,), mesh=mesh, resized=False)
  return sampler.sample(base, trainable, [[3, 4, 5], [7] * 8], n=4, seed=1, step=0, max_tokens=12)


@pytest.mark.slow  # By default test_kv_prefix.py draws samples beside a frozen model.
@pytest.mark.parametrize(
  ('layers', 'mesh'),
  [
    (DEPTHS['shallow'], None),
    (DEPTHS['shallow'], MeshConfig(4, 2)),
    (DEPTHS['deep'], MeshConfig(4, 2)),
  ],
  ids=['shallow, one device', 'shallow, eight devices', 'deep, eight devices'],
)
def test_what_is_frozen_changes_no_sample(layers, mesh):
  """In prefill and decode loop, with parameters that are cast before both."""
  expected, rollouts = (sampled(layers, frozen, mesh) for frozen in ((), FROZEN['embedding and MLP']))
  for name in ('completion_tokens', 'sampling_log_probs', 'model_log_probs', 'entropy'):
    np.testing.assert_array_equal(getattr(rollouts, name), getattr(expected, name))


@pytest.mark.parametrize('layers', DEPTHS.values(), ids=DEPTHS)
def test_either_tree_may_be_cast(layers):
  """Either tree alone, once or twice: states equal those of uncast parameters, with and without a cache."""
  policy, base, trainable = make(layers, FROZEN['embedding and MLP'])
  row = np.arange(1, 9, dtype=np.int32)[None], np.arange(8, dtype=np.int32)[None], np.ones((1, 8), np.int32)
  cast = policy.cast(base, trainable)
  assert_equal(policy.cast(*cast), cast)
  assert_equal((policy.cast(base, {})[0], policy.cast({}, trainable)[1]), cast)
  half = jax.eval_shape(dataclasses.replace(policy, dtype='bfloat16').cast, base, trainable)
  assert {leaf.dtype for leaf in jax.tree.leaves(half[0])} == {jnp.dtype('bfloat16')}
  assert jax.tree.structure(half) == jax.tree.structure(cast)
  run = jax.jit(lambda base, trainable, cache: policy.apply(base, trainable, *row, cache)[:2])
  for cache in (None, policy.init_cache(1, 8)):
    expected = run(base, trainable, cache)
    for trees in (cast, (cast[0], trainable), (base, cast[1])):
      jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), run(*trees, cache), expected)


def test_the_table_says_which_tree_holds_a_parameter():
  policy, _, _ = make(2, ('layers.mlp', 'embedding'))
  table = policy.parameter_table()
  base, trainable = (
    [parameter.name for parameter in part] for part in (parameters.frozen(table), parameters.trainable(table))
  )
  assert base == ['embedding', 'layers.mlp.gate', 'layers.mlp.up', 'layers.mlp.down']
  assert sorted(base + trainable) == sorted(parameter.name for parameter in table)
  assert 'layers.mlp_norm' in trainable  # A prefix ends where a name's part does.
  with pytest.raises(ValueError, match="begins with 'layers.ml'; there are embedding, "):
    dataclasses.replace(policy, frozen=('layers.ml',)).parameter_table()


def test_trees_are_merged_by_path():
  base, trainable = {'a': 1, 'layers': {'x': {'p': 2}, 'y': 3}}, {'b': 4, 'layers': {'x': {'q': 5}, 'z': 6}}
  merged = {'a': 1, 'b': 4, 'layers': {'x': {'p': 2, 'q': 5}, 'y': 3, 'z': 6}}
  assert parameters.merge(base, trainable) == parameters.merge(trainable, base) == merged
  assert base == {'a': 1, 'layers': {'x': {'p': 2}, 'y': 3}}
  for more in ({'x': {'p': 7}}, {'x': {'p': {'deeper': 7}}}):
    with pytest.raises(ValueError, match=r'both hold layers\.x\.p'):
      parameters.merge(base, {'layers': more})
  with pytest.raises(ValueError, match=r'both hold layers\.x,'):
    parameters.merge(base, {'layers': {'x': 7}})


def test_the_decoder_and_the_toy_fit_the_protocol():
  toy = ToyPolicy(32)
  for policy in (toy, make(2, ())[0]):
    assert isinstance(policy, Policy) and hash(policy) == hash(dataclasses.replace(policy))
    assert policy.vocab_size == policy.config.vocab_size and policy.with_remat('none').on(None) is not None
  generator = np.random.default_rng(0)
  params = parameters.map_table(lambda p: generator.standard_normal(p.shape), toy.parameter_table())
  row = np.ones((2, 3), np.int32), np.tile(np.arange(3, dtype=np.int32), (2, 1)), np.ones((2, 3), np.int32)
  hidden, unembedding, _ = toy.apply({'E': params['E']}, {name: params[name] for name in 'PW'}, *row)
  assert hidden.shape == (2, 3, toy.config.hidden_size) and unembedding.shape == (32, 6)
  with pytest.raises(NotImplementedError, match='ToyPolicy has no cache'):
    toy.init_cache(1, 1)


def test_operations_are_counted_from_the_table():
  policy, base, trainable = make(3, ('embedding', 'layers.mlp'))
  table, everything = policy.parameter_table(), parameters.merge(base, trainable)
  assert flops.forward_flops_per_token(table) == 2 * sum(leaf.size for leaf in jax.tree.leaves(everything))
  # Two rows of ten tokens, four scored: projections of 4 + 2 · 2 heads and back, three MLP matrices, scores and mixing.
  layer = 32 * 16 * (4 + 2 + 2 + 4) + 3 * 32 * 48
  expected = 2 * (10 * 2 * 3 * layer + 2 * 2 * 3 * 4 * 16 * 10 * 10 / 2 + 4 * 2 * 61 * 32)
  assert flops.forward_flops(policy, 2, 10, 4) == expected


def test_windows_are_counted_as_pairs_of_positions():
  policy, *_ = make(3, ())

  def attention(windows, tokens):
    seen = dataclasses.replace(policy, config=dataclasses.replace(policy.config, windows=windows))
    return flops.forward_flops(seen, 1, tokens, 0) - tokens * flops.forward_flops(seen, 1, 1, 0)

  slots = np.arange(100)
  distance = slots[:, None] - slots[None]
  pairs = sum(np.count_nonzero((distance >= 0) & (distance < window)) for window in (100, 7, 7))
  # Scores and mixing: a multiplication and an addition for each of 4 heads of 16.
  assert attention((0, 7, 7), 100) == pytest.approx(2 * 2 * 4 * 16 * pairs, rel=0.1)
  assert attention((200, 100, 0), 100) == attention(None, 100)
