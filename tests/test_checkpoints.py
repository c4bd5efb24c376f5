"""Checkpoints: everything comes back bit for bit; damage and a full disk lose nothing that was written."""

import os
import pathlib
import subprocess
import sys
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore

from models import huggingface
from sdpo_jax.config import Config, MeshConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.errors import UserError
from sdpo_jax.training import checkpoints as checkpoint_module
from sdpo_jax.training.checkpoints import DAMAGED, SKIPPED, Checkpoints, only
from sdpo_jax.training.update import abstract_state, place_state
from sdpo_jax.types import TrainState
from tests import tiny


def make_state(step: int, size: int = 64) -> TrainState:
  noise = jax.random.normal(jax.random.key(step), (size, 4))  # Does not compress.
  params = {'layer': {'w': noise, 'b': jnp.arange(4.0)}}
  return TrainState(
    step=jnp.int32(step),
    optimizer_step=jnp.int32(2 * step),
    trainable=params,
    opt_state=optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1)).init(params),
    teacher=jax.tree.map(lambda leaf: leaf * 0.1, params),
    rng=jax.random.key(7),
  )


def assert_same(left: TrainState, right: TrainState) -> None:
  chex.assert_trees_all_equal(left.replace(rng=None), right.replace(rng=None))
  np.testing.assert_array_equal(jax.random.key_data(left.rng), jax.random.key_data(right.rng))


def save_steps(folder: pathlib.Path, steps: dict[int, dict[str, float]], **options) -> Checkpoints:
  checkpoints = Checkpoints(folder, **options)
  for step, metrics in steps.items():
    checkpoints.save(step, make_state(step), {'iterator': {'position': step}}, metrics)
  checkpoints.wait()
  return checkpoints


def largest_file(folder: pathlib.Path) -> pathlib.Path:
  return max((path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)


def test_everything_comes_back_bit_for_bit(tmp_path):
  save_steps(tmp_path, {3: {}}).close()
  step, state, host = Checkpoints(tmp_path).restore(make_state(0))
  assert step == 3
  assert host == {'iterator': {'position': 3}}
  assert_same(state, make_state(3))


def noisy(state: TrainState) -> TrainState:
  """The state with random numbers in every float leaf, where they were."""

  def fill(place: int, leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return leaf
    return jax.device_put(np.random.default_rng(place).normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding)

  leaves, structure = jax.tree.flatten(state)
  return structure.unflatten([fill(place, leaf) for place, leaf in enumerate(leaves)])


def bytes_read() -> int:
  """From files, by Orbax's storage library, since this process began."""
  [metric] = tensorstore.experimental_collect_matching_metrics('/tensorstore/kvstore/file/bytes_read')
  return metric['values'][0]['value']


def test_one_field_is_read_without_the_others(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, noisy(make_state(1, size=20_000)), {'a': 1}, {})
  checkpoints.wait()
  like = make_state(0, size=20_000)
  before = bytes_read()
  whole = checkpoints.restore_step(1, like)
  everything = bytes_read() - before
  assert everything > 3 * whole.trainable['layer']['w'].nbytes  # Student, teacher and two moments; random numbers.
  for field in ('trainable', 'teacher'):
    before = bytes_read()
    step, state, host = checkpoints.restore(only(field, like))
    assert bytes_read() - before < 0.3 * everything
    assert (step, host) == (1, {'a': 1})
    chex.assert_trees_all_equal(getattr(state, field), getattr(whole, field))
    assert all(leaf is SKIPPED for leaf in jax.tree.leaves(state.replace(**{field: {}})))
    chex.assert_trees_all_equal(getattr(checkpoints.restore_step(1, only(field, like)), field), getattr(whole, field))
  checkpoints.save(2, whole.replace(step=jnp.int32(2)), {}, {})  # Reading parts does not get in the way of a run.
  checkpoints.wait()
  assert_same(checkpoints.restore_step(2, like), whole.replace(step=jnp.int32(2)))


def test_one_field_of_another_model_is_not_restored(tmp_path):
  checkpoints = save_steps(tmp_path, {1: {}})
  like = make_state(0)
  other = {'layer': {**like.trainable['layer'], 'more': jnp.zeros(3)}}
  for trainable, reason in ((other, 'structures do not match'), (make_state(0, size=32).trainable, 'shape')):
    with pytest.raises(UserError, match=f'step 1 in .* cannot be read .*{reason}'):
      checkpoints.restore_step(1, only('trainable', like.replace(trainable=trainable)))


def test_of_a_damaged_checkpoint_no_field_is_taken(tmp_path):
  save_steps(tmp_path, {1: {}, 2: {}}).close()
  largest_file(tmp_path / 'checkpoints' / '2').write_bytes(b'')
  reader = Checkpoints(tmp_path, read_only=True)
  step, state, _ = reader.restore(only('trainable', make_state(0)))
  assert step == 1
  chex.assert_trees_all_equal(state.trainable, make_state(1).trainable)
  with pytest.raises(UserError, match='checkpoint of step 2 in .* cannot be read'):
    reader.restore_step(2, only('teacher', make_state(0)))


@pytest.fixture(scope='module')
def layouts(tmp_path_factory):
  """Mesh shape -> (mesh, parameters on it) of one model, whose vocabulary is padded so that each mesh divides it."""
  config = Config()
  config.model.path = str(tiny.make_model(tmp_path_factory.mktemp('layouts') / 'model', num_key_value_heads=4))
  config.model.vocab_multiple = 16

  def make(shape: tuple[int, int]):
    mesh = make_mesh(MeshConfig(*shape), jax.devices()[: shape[0] * shape[1]])
    return mesh, huggingface.load(config.model.path, config.model, mesh=mesh)[1]

  return config, {shape: make(shape) for shape in ((8, 1), (2, 4), (1, 1))}


def test_a_state_of_one_mesh_is_the_same_on_another(layouts, tmp_path):
  config, places = layouts
  mesh, parameters = places[8, 1]
  state = noisy(place_state(config, parameters, mesh))
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state, {}, {})
  checkpoints.wait()
  for shape in ((8, 1), (2, 4), (1, 1)):
    mesh, parameters = places[shape]
    like = abstract_state(config, parameters, mesh)
    for found in (checkpoints.restore_step(1, like), checkpoints.restore_step(1, only('teacher', like))):
      read = [leaf is not SKIPPED for leaf in jax.tree.leaves(found)]
      assert all(read) or sum(read) == len(jax.tree.leaves(parameters))
      for there, here, layout in zip(*map(jax.tree.leaves, (state, found, like)), strict=True):
        if here is not SKIPPED:
          assert here.sharding == layout.sharding and here.dtype == there.dtype
          if jax.dtypes.issubdtype(here.dtype, jax.dtypes.prng_key):
            there, here = jax.random.key_data(there), jax.random.key_data(here)
          np.testing.assert_array_equal(there, here)
    assert len(found.teacher['embedding'].sharding.device_set) == mesh.size


def test_a_relative_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  save_steps(pathlib.Path('runs/mine'), {1: {}}).close()
  assert Checkpoints('runs/mine', read_only=True).restore(make_state(0))[0] == 1
  assert (tmp_path / 'runs' / 'mine' / 'checkpoints' / '1').is_dir()


def test_an_empty_teacher_and_no_checkpoint(tmp_path):
  assert Checkpoints(tmp_path / 'empty').restore(make_state(0)) is None
  state = make_state(1).replace(teacher={})
  checkpoints = Checkpoints(tmp_path / 'live')
  checkpoints.save(1, state, {}, {})
  checkpoints.wait()
  _, restored, _ = checkpoints.restore(make_state(0).replace(teacher={}))
  assert_same(restored, state)


def test_state_may_change_as_soon_as_save_returns(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  state = make_state(1, size=4096)
  advance = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
  checkpoints.save(1, state, {}, {})
  trainable = state.trainable
  for _ in range(20):
    trainable = advance(trainable)
  jax.block_until_ready(trainable)
  checkpoints.wait()
  _, restored, _ = checkpoints.restore(make_state(0, size=4096))
  chex.assert_trees_all_equal(restored.trainable, make_state(1, size=4096).trainable)


def test_last_n_and_best_are_kept(tmp_path):
  scores = {1: {'eval/a/mean@2': 0.1}, 2: {'eval/a/mean@2': 0.9}, 3: {}, 4: {'eval/a/mean@2': 0.3}, 5: {}, 6: {}}
  assert save_steps(tmp_path / 'best', scores, keep=2, best_metric='eval/a/mean@2').steps() == [2, 5, 6]
  assert save_steps(tmp_path / 'last', scores, keep=2).steps() == [5, 6]


def test_the_best_is_kept_and_known_after_a_restart(tmp_path):
  def score(value):
    return {'eval/a/mean@2': value}

  first = save_steps(
    tmp_path, {1: score(0.1), 2: score(0.9), 3: score(float('nan'))}, keep=2, best_metric='eval/a/mean@2'
  )
  assert first.best(before=4) == 2 and first.best(before=2) is None
  first.close()
  again = save_steps(tmp_path, {4: score(0.3), 5: {}, 6: {}}, keep=2, best_metric='eval/a/mean@2')
  assert again.steps() == [2, 5, 6]
  assert again.best(before=7) == 2
  assert_same(again.restore_step(2, make_state(0)), make_state(2))
  again.save(7, make_state(7), {}, score(0.9))
  assert again.best(before=8) == 7  # Of equals the one that is kept.
  again.save(8, make_state(8), {}, score(0.9))
  assert again.best(before=9) == 8  # Of equals that are kept the latest.
  again.close()


def test_another_best_metric_after_a_restart_ranks_earlier_checkpoints_too(tmp_path):
  metrics = {step: {'eval/a/mean@2': step / 10, 'eval/b/mean@2': -step / 10} for step in range(1, 4)}
  save_steps(tmp_path, metrics, keep=3, best_metric='eval/a/mean@2').close()
  other = save_steps(tmp_path, {4: {'eval/b/mean@2': -0.9}, 5: {}}, keep=2, best_metric='eval/b/mean@2')
  assert other.steps() == [1, 4, 5] and other.best(before=9) == 1
  other.close()


def test_a_step_that_cannot_be_read_is_named(tmp_path):
  checkpoints = save_steps(tmp_path, {1: {'a': 1.0}, 2: {}})
  largest_file(tmp_path / 'checkpoints' / '1').write_bytes(b'')
  with pytest.raises(UserError, match='checkpoint of step 1 in .* cannot be read'):
    checkpoints.restore_step(1, make_state(0))


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path, caplog):
  checkpoints = save_steps(tmp_path, {1: {}, 2: {}})
  checkpoints.close()
  victim = largest_file(tmp_path / 'checkpoints' / '2')
  victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
  reopened = Checkpoints(tmp_path)
  step, state, _ = reopened.restore(make_state(0))
  assert step == 1
  assert_same(state, make_state(1))
  assert 'Checkpoint of step 2 cannot be read' in caplog.text
  assert (tmp_path / DAMAGED / '2').is_dir()
  reopened.save(2, make_state(2), {}, {})
  reopened.wait()
  assert reopened.restore(make_state(0))[0] == 2


def test_what_another_process_cannot_read_nobody_takes(tmp_path, caplog, monkeypatch):
  reading = save_steps(tmp_path, {1: {}, 2: {}})
  theirs = {'the end of reading the checkpoint of step 2': 'the bucket did not answer'}
  monkeypatch.setattr(checkpoint_module, 'gathered', lambda value, what: [value, theirs.get(what)])
  step, state, _ = reading.restore(make_state(0))
  assert step == 1
  assert_same(state, make_state(1))
  assert 'Checkpoint of step 2 cannot be read (the bucket did not answer)' in caplog.text


def test_reading_a_run_that_goes_on_touches_nothing(tmp_path):
  writer = save_steps(tmp_path, {1: {}, 2: {}})
  victim = largest_file(tmp_path / 'checkpoints' / '2')
  victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
  writer.save(3, make_state(3, size=200_000), {}, {})  # Still being written while the reader comes and goes.
  reader = Checkpoints(tmp_path, read_only=True)
  assert reader.restore(make_state(0))[0] == 1
  reader.close()
  writer.wait()
  assert writer.steps() == [2, 3]
  assert not (tmp_path / DAMAGED).exists()


def test_a_best_metric_that_is_not_measured_is_named(tmp_path):
  checkpoints = Checkpoints(tmp_path, best_metric='eval/a/mean@3')
  with pytest.raises(UserError, match='best_metric=eval/a/mean@3 is not among .*eval/a/mean@2'):
    checkpoints.save(1, make_state(1), {}, {'eval/a/mean@2': 0.5})


def test_only_damaged_checkpoints_end_with_a_sentence(tmp_path):
  save_steps(tmp_path, {1: {}}).close()
  largest_file(tmp_path / 'checkpoints' / '1').write_bytes(b'')
  with pytest.raises(UserError, match='None of the checkpoints'):
    Checkpoints(tmp_path).restore(make_state(0))
  assert (tmp_path / 'checkpoints' / '1').is_dir()


def test_a_full_disk_ends_with_a_sentence_and_earlier_checkpoints_stay(tmp_path):
  """A limit on file size makes every larger write fail, as a full disk would, in the writer's own threads."""
  script = textwrap.dedent("""
    import resource, signal, sys
    from tests.test_checkpoints import Checkpoints, UserError, make_state
    checkpoints = Checkpoints(sys.argv[1])
    checkpoints.save(1, make_state(1), {}, {})
    checkpoints.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
      checkpoints.save(2, make_state(2, size=50_000), {}, {})
      checkpoints.wait()
    except UserError as error:
      print('SENTENCE', error)
  """)
  done = subprocess.run(
    [sys.executable, '-c', script, str(tmp_path)],
    capture_output=True,
    text=True,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    check=False,
  )
  assert 'SENTENCE A checkpoint could not be written' in done.stdout, done.stdout + done.stderr
  assert 'resumes from step 1' in done.stdout
  step, state, _ = Checkpoints(tmp_path).restore(make_state(0))
  assert step == 1
  assert_same(state, make_state(1))
