"""A batch whose rows use different adapters computes the same as each adapter alone, without mixing them up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.models.adapters import lora_pool
from sdpo_jax.models.policy import NO_MEMBER
from tests.models.adapters.lora_pools import LENGTH, MEMBERS, ROWS, make_pool, pooled, stacked

ROW_MEMBERS = np.array([2, 0, NO_MEMBER, 2, 1], np.int32)


@pytest.fixture(scope='module', params=[2, pytest.param(10, marks=pytest.mark.slow)], ids=['shallow', 'deep'])
def adapters(request):
  return make_pool(request.param)


@pytest.fixture(scope='module')
def tokens():
  return np.random.default_rng(2).integers(1, 60, (ROWS, LENGTH)).astype(np.int32)


@jax.jit(static_argnums=0)
def run(policy, base, trainable, tokens, members=None):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  more = {} if members is None else {'members': members}
  return policy.apply(base, trainable, tokens, positions, jnp.ones_like(tokens), **more)[0]


def alone(policy, base, factors, tokens):
  """Return the hidden states of every row from a policy with only its adapter, or with none."""
  rows = []
  for row, member in enumerate(ROW_MEMBERS):
    its, own = (policy, factors[member]) if member >= 0 else (policy.base_policy(), {})
    rows.append(run(its, base, own, tokens[row : row + 1])[0])
  return np.stack(rows)


@pytest.mark.parametrize('product', ['gather', 'masked'])
def test_rows_compute_what_their_adapters_compute_alone(adapters, tokens, product):
  policy, base, factors = adapters
  expected = alone(policy, base, factors, tokens)
  assert np.ptp(expected[:, -1], axis=0).max() > 0.1  # The adapters change something.
  found = run(pooled(policy, product), base, stacked(policy, factors), tokens, ROW_MEMBERS)
  np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize('product', ['gather', 'masked'])
def test_a_row_has_the_gradient_of_its_adapter_and_no_other(adapters, tokens, product):
  policy, base, factors = adapters
  pool, weigh = stacked(policy, factors), np.random.default_rng(3).standard_normal((ROWS, LENGTH, 1), np.float32)

  def loss(pool, policy, tokens, members, weigh):
    return jnp.sum(jnp.square(run(policy, base, pool, tokens, members)) * weigh)

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  members = np.where(ROW_MEMBERS == 1, NO_MEMBER, ROW_MEMBERS)  # Nobody has the second.
  found = gradient(pool, pooled(policy, product), tokens, members, weigh)
  for member in range(MEMBERS):
    rows = (members == member)[:, None, None]
    own = lora_pool.member(found, member)
    if not rows.any():
      assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(own))
      continue
    expected = gradient(factors[member], policy, tokens, None, np.where(rows, weigh, 0))
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(one, other, atol=2e-5 * max(1.0, float(np.abs(other).max())))


@pytest.mark.parametrize('product', ['gather', 'masked'])
def test_what_others_hold_changes_no_bit_of_a_row(adapters, tokens, product):
  policy, base, factors = adapters
  one = run(pooled(policy, product), base, stacked(policy, factors), tokens, ROW_MEMBERS)
  others = [jax.tree.map(lambda leaf: 1e3 * leaf + 7, own) for own in factors]
  changed = stacked(policy, [others[0], factors[1], others[2]])
  again = run(pooled(policy, product), base, changed, tokens, ROW_MEMBERS)
  kept = np.isin(ROW_MEMBERS, [1, NO_MEMBER])
  np.testing.assert_array_equal(np.asarray(one)[kept], np.asarray(again)[kept])
  assert (np.asarray(one)[~kept] != np.asarray(again)[~kept]).any()


def test_a_row_without_an_adapter_is_the_model_itself_to_the_last_bit(adapters, tokens):
  policy, base, factors = adapters
  nobody = np.full(ROWS, NO_MEMBER, np.int32)
  broken = [jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), own) for own in factors]
  found = run(pooled(policy), base, stacked(policy, broken), tokens, nobody)
  np.testing.assert_array_equal(found, run(policy.base_policy(), base, {}, tokens))


def test_adapters_go_in_and_come_out_as_they_were(adapters):
  policy, _, factors = adapters
  pool = stacked(policy, factors)
  for index, own in enumerate(factors):
    for one, other in zip(jax.tree.leaves(lora_pool.member(pool, index)), jax.tree.leaves(own), strict=True):
      np.testing.assert_array_equal(one, other)
  table = {row.name: row for row in pooled(policy).parameter_table()}
  single = {row.name: row for row in policy.parameter_table()}
  assert table.keys() == single.keys()
  for name, row in single.items():
    assert table[name].frozen == row.frozen
    assert table[name].shape == (row.shape if row.frozen else (row.shape[0], MEMBERS, *row.shape[1:]))


def test_a_mesh_gives_what_one_device_gives(adapters, tokens):
  policy, base, factors = adapters
  tokens, members = np.tile(tokens, (2, 1))[:8], np.tile(ROW_MEMBERS, 2)[:8]
  expected = run(pooled(policy), base, stacked(policy, factors), tokens, members)
  mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
  for product in ('gather', 'masked'):
    divided = pooled(policy.on(mesh), product)
    found = run(divided, base, stacked(policy, factors), tokens, members)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(np.abs(expected).max()))
