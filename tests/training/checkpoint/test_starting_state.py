"""The copy of a batch's starting state is that state: values, layouts, keys; and it does not change with the
original.
"""

import json
import threading

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.training.checkpoint.starting_state import StartingState
from sdpo_jax.training.checkpoint.unfinished import Unfinished
from sdpo_jax.training.joint_errors import JointErrors
from sdpo_jax.training.saving import Saving
from sdpo_jax.types import TrainState


def make_state(mesh: jax.sharding.Mesh) -> TrainState:
  def put(value, *axes):
    return jax.device_put(value, jax.NamedSharding(mesh, jax.P(*axes)))

  weights = np.arange(64, dtype=np.float32).reshape(8, 8)
  return TrainState(
    step=put(jnp.int32(3)),
    optimizer_step=put(jnp.int32(5)),
    trainable={
      'both': put(weights, 'a', 'b'),
      'one': put(weights, None, 'b'),
      'half': put(jnp.asarray(weights, jnp.bfloat16)),
    },
    opt_state=(put(jnp.float32(0.5)), {}),
    teacher={},
    rng=put(jax.random.key(7)),
  )


@pytest.fixture
def mesh():
  return jax.make_mesh((4, 2), ('a', 'b'))


def test_the_copy_outlives_what_it_was_made_of(mesh):
  state = make_state(mesh)
  starting = StartingState(state, keep=True)
  starting.donate(others_follow=True)
  assert starting.there and not starting.on_devices
  for leaf in jax.tree.leaves(state):
    leaf.delete()
  found, expected = starting.take(), make_state(mesh)
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert ours.dtype == theirs.dtype and ours.sharding == theirs.sharding
    ours, theirs = (jax.random.key_data(leaf) if leaf.dtype == expected.rng.dtype else leaf for leaf in (ours, theirs))
    np.testing.assert_array_equal(ours, theirs)
  assert starting.take() is found


def test_it_is_not_that_of_a_program_that_writes_in_the_same_place():
  state = make_state(jax.make_mesh((1, 1), ('a', 'b'), devices=jax.devices()[:1]))
  starting = StartingState(state, keep=True)
  starting.donate(others_follow=True)
  jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(state.trainable)
  np.testing.assert_array_equal(starting.take().trainable['both'], np.arange(64).reshape(8, 8))


def test_a_state_that_is_being_saved_is_not_donated_whatever_is_noted_of_it_meanwhile(mesh):
  state, donated = make_state(mesh), threading.Event()

  class Slow:
    """Checkpoints, one of which takes its time."""

    def steps(self):
      return []

    def wait(self):
      pass

    def save(self, step, saved, host, metrics, leaves, line_digest):
      assert saved is state and metrics == {}
      saving.hold(1, state, dict, {'loss': 1.0}, None, keep=False)  # As the thread that trains does.
      threading.Thread(target=donate).start()
      assert not donated.wait(0.05)

  def donate():
    saving.whole.starting.donate(others_follow=False)
    donated.set()

  saving = Saving(epath.Path('run'), Slow(), None, JointErrors(), lambda: None, print)
  saving.hold(1, state, dict, {}, None, keep=False)
  saving.save_meanwhile()
  assert donated.wait(10) and not saving.whole.starting.there
  saving.hold(2, make_state(mesh), dict, {}, None, keep=False)
  assert saving.whole.starting.there


@pytest.mark.parametrize('keep, others_follow', [(False, True), (True, False)])
def test_nothing_is_copied_where_nobody_asks_or_the_batch_is_as_good_as_done(mesh, keep, others_follow):
  state = make_state(mesh)
  starting = StartingState(state, keep=keep)
  assert starting.there and starting.on_devices and starting.take() is state
  starting.donate(others_follow=others_follow)
  assert not starting.there and starting.take() is None


def test_each_part_is_on_the_host_once(mesh):
  starting = StartingState(make_state(mesh), keep=True)
  starting.donate(others_follow=True)
  copies = starting._copy  # noqa: SLF001 (Nothing else tells what is on the host.)
  held = sum(part.nbytes for copy in copies for part in copy.parts.values())
  assert held == 4 + 4 + 64 * 4 + 64 * 4 + 64 * 2 + 4 + 8


def test_what_is_unfinished_comes_back_from_a_checkpoint_as_it_was():
  values = {'a': 0.1, 'b': float('inf'), 'c': float('-inf'), 'd': float(np.float32(1e-45)), 'e': float('nan')}
  saved = json.dumps(Unfinished(values, {'source': float('nan')}, 'No key.').to_json(), allow_nan=False)
  found = Unfinished.from_json(json.loads(saved))
  np.testing.assert_array_equal([found.line[name] for name in values], list(values.values()))
  assert np.isnan(found.success['source']) and found.reason == 'No key.'
  assert Unfinished.from_json({'line': {}, 'success': {}}) == Unfinished()  # Of an earlier version.
