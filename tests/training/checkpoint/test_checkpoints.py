"""Checkpoints: everything comes back bit for bit; damage and a full disk lose nothing that was written."""

from concurrent import futures
import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import pathlib
import resource
import shutil
import sys
import tempfile
import threading
import types

import chex
from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from sdpo_jax import files
from sdpo_jax.config import Config, MeshConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.errors import UserError
from sdpo_jax.learning.update import abstract_state, place_state
from sdpo_jax.models import huggingface
from sdpo_jax.training.checkpoint import checkpoints as checkpoint_module
from sdpo_jax.training.checkpoint import digests, manifest, unreadable
from sdpo_jax.training.checkpoint.checkpoints import SKIPPED, Checkpoints, only
from sdpo_jax.training.checkpoint.manifest import DamagedError
from sdpo_jax.training.checkpoint.unreadable import is_out_of_reach
from sdpo_jax.training.directory import epochs
from sdpo_jax.training.directory.published_checkpoints import DAMAGED, newest
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import TrainState
from tests import tiers, tiny
from tests.training_states import assert_same, files_below, flipped, make_state


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
  """Return the state with random numbers in every float leaf, where they were."""

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


@pytest.mark.slow
def test_a_state_of_one_mesh_is_the_same_on_another(layouts, tmp_path):
  config, places = layouts
  mesh, parameters = places[8, 1]
  state = noisy(place_state(update_spec(config), parameters, mesh))
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state, {}, {})
  checkpoints.wait()
  for shape in ((8, 1), (2, 4), (1, 1)):
    mesh, parameters = places[shape]
    like = abstract_state(update_spec(config), parameters, mesh)
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


def test_digests_that_are_known_are_not_computed_again(tmp_path, monkeypatch):
  checkpoints, state = Checkpoints(tmp_path), make_state(1)
  leaves = digests.leaf_digests(state)
  with monkeypatch.context() as patch:
    patch.setattr(digests, 'leaf_digests', None)
    checkpoints.save(1, state, {}, {}, leaves)
    checkpoints.wait()
  assert_same(checkpoints.restore(make_state(0))[1], state)
  assert checkpoints.state_digest(1) == digests.state_digest(leaves)


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
  said = []
  reopened = Checkpoints(tmp_path, say=said.append)
  step, state, _ = reopened.restore(make_state(0))
  assert step == 1
  assert_same(state, make_state(1))
  assert said[0].startswith('The checkpoint of step 2 cannot be read (')
  assert said[1:] == [f'The checkpoint of step 2 is now in {tmp_path / "checkpoints_damaged" / "2"}.']
  assert caplog.text == ''  # Sentences for the user are no lines of a log.
  assert (tmp_path / DAMAGED / '2').is_dir()
  reopened.save(2, make_state(2), {}, {})
  reopened.wait()
  assert reopened.restore(make_state(0))[0] == 2


def test_what_another_process_cannot_read_nobody_takes(tmp_path, caplog, monkeypatch):
  reading = save_steps(tmp_path, {1: {}, 2: {}})
  problem = types.SimpleNamespace(reason='the bucket lost a part', out_of_reach=False)
  theirs = {'the end of reading the checkpoint of step 2': problem}
  monkeypatch.setattr(checkpoint_module, 'gathered', lambda value, what: [value, theirs.get(what, value)])
  step, state, _ = reading.restore(make_state(0))
  assert step == 1
  assert_same(state, make_state(1))
  assert 'The checkpoint of step 2 cannot be read (the bucket lost a part)' in caplog.text


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


def test_a_checkpoint_without_the_best_metric_is_saved_and_is_not_the_best(tmp_path):
  checkpoints = save_steps(tmp_path, {1: {'eval/a/mean@2': 0.5}}, best_metric='eval/a/acc/mean@2')
  assert checkpoints.steps() == [1] and checkpoints.best(before=2) is None


def test_a_folder_that_cannot_be_made_ends_with_a_sentence(tmp_path):
  (tmp_path / 'checkpoints').write_text('a file')
  with pytest.raises(UserError, match='A checkpoint could not be written to .*; it resumes from step 0'):
    Checkpoints(tmp_path)


def test_a_folder_that_cannot_be_listed_ends_with_a_sentence(readable_folder):
  save_steps(readable_folder, {1: {}}).close()
  user, folder = os.geteuid(), readable_folder / 'checkpoints'
  try:
    folder.chmod(0o311)
    os.seteuid(user or 65534)
    for read_only in (False, True):
      with pytest.raises(UserError, match='(cannot be read|could not be written to) .*Permission denied'):
        Checkpoints(readable_folder, read_only=read_only)
  finally:
    os.seteuid(user)
    folder.chmod(0o755)


def test_only_damaged_checkpoints_end_with_a_sentence(tmp_path):
  save_steps(tmp_path, {1: {}}).close()
  largest_file(tmp_path / 'checkpoints' / '1').write_bytes(b'')
  with pytest.raises(UserError, match='None of the checkpoints'):
    Checkpoints(tmp_path).restore(make_state(0))
  assert (tmp_path / 'checkpoints' / '1').is_dir()


def test_a_full_disk_ends_with_a_sentence_and_earlier_checkpoints_stay(tmp_path):
  """A limit on file size makes every larger write fail, as a full disk would, in the writer's own threads."""
  first, large = make_state(1), jax.block_until_ready(make_state(2, size=50_000))
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, first, {}, {})
  checkpoints.wait()
  limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
  try:
    with pytest.raises(UserError, match='A checkpoint could not be written.*resumes from step 1'):
      checkpoints.save(2, large, {}, {})
      checkpoints.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
  step, state, _ = Checkpoints(tmp_path).restore(make_state(0))
  assert step == 1
  assert_same(state, make_state(1))


def test_a_left_over_that_is_still_written_to_is_removed(tmp_path):
  """Threads of a failed write add files to its folder for a while."""
  folder = tmp_path / 'checkpoints' / '2.unfinished.0'
  folder.mkdir(parents=True)
  began = threading.Event()

  def write() -> None:
    for i in range(2_000):
      with contextlib.suppress(FileNotFoundError):  # Once the folder is removed.
        (folder / str(i)).touch()
      if i == 200:
        began.set()

  with futures.ThreadPoolExecutor(1) as threads:
    written = threads.submit(write)
    began.wait()
    Checkpoints(tmp_path).close()
    written.result()
  assert not folder.exists()


def check_flips(tmp_path: pathlib.Path, bits_per_file: int) -> dict[str, int]:
  """Flip bits of every file of the newest of two checkpoints; return how many of each file did no harm."""
  save_steps(tmp_path, {1: {'eval/a/mean@2': 0.5}, 2: {'eval/a/mean@2': 0.25}}).close()
  like, generator, harmless = make_state(0), np.random.default_rng(0), {}
  files = files_below(tmp_path / 'checkpoints' / '2')
  assert {'manifest.json', '_METADATA', 'manifest.ocdbt', 'metadata'} <= {path.name for path in files}
  for path in files:
    content = path.read_bytes()
    for bit in generator.choice(8 * len(content), min(bits_per_file, 8 * len(content)), replace=False):
      path.write_bytes(flipped(content, int(bit)))
      step, state, host = Checkpoints(tmp_path, read_only=True).restore(like)
      assert_same(state, make_state(step))
      assert host == {'iterator': {'position': step}}
      if step == 2:
        harmless[path.name] = harmless.get(path.name, 0) + 1
    path.write_bytes(content)
  assert Checkpoints(tmp_path, read_only=True).restore(like)[0] == 2
  return harmless


def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path):
  assert not {'manifest.json', '_METADATA', 'metadata'} & set(check_flips(tmp_path, bits_per_file=1))


@pytest.mark.parametrize('bits', tiers.cases((20, 60), slow=(20,)))
def test_many_flipped_bits_are_found_or_change_nothing(tmp_path, bits):
  assert not {'manifest.json', '_METADATA', 'metadata'} & set(check_flips(tmp_path, bits_per_file=bits))


@pytest.mark.parametrize('leaf', ['trainable.layer.w', 'rng', 'opt_state.0.count'])
def test_an_array_that_changed_and_can_be_read_is_damage(tmp_path, caplog, leaf):
  """Written anew by the storage library, so that everything about the file is in order but its contents."""
  save_steps(tmp_path, {1: {}, 2: {}}).close()
  store = {'driver': 'ocdbt', 'base': f'file://{tmp_path}/checkpoints/2/state/', 'path': f'{leaf}/'}
  array = tensorstore.open({'driver': 'zarr', 'kvstore': store}).result()
  values = np.array(array.read().result())
  values.reshape(-1)[-1:] = values.reshape(-1)[-1:] + 1
  array.write(values).result()
  folder = epath.Path(tmp_path / 'checkpoints' / '2')
  expected = manifest.read_manifest(folder)
  files = {name: described for name, described in expected.files.items() if 'ocdbt' not in name}
  (folder / 'manifest.json').write_text(dataclasses.replace(expected, files=files).to_json())
  reader = Checkpoints(tmp_path, read_only=True)
  with pytest.raises(UserError, match=f'the array {leaf} is not as it was written'):
    reader.restore_step(2, make_state(0))
  if leaf.startswith('trainable'):
    with pytest.raises(UserError, match=f'the array {leaf} is not as it was written'):
      reader.restore_step(2, only('trainable', make_state(0)))
  else:  # What is not read is not judged.
    assert reader.restore_step(2, only('trainable', make_state(0)))
  reopened = Checkpoints(tmp_path)
  step, state, _ = reopened.restore(make_state(0))
  assert step == 1 and reopened.steps() == [1]
  assert_same(state, make_state(1))
  assert f'step 2 cannot be read (the array {leaf} is not as it was written)' in caplog.text


def test_the_manifest_names_everything_that_was_written(tmp_path):
  state = make_state(3)
  save_steps(tmp_path, {3: {'eval/a/mean@2': 0.5, 'train/loss': float('nan')}}).close()
  folder = tmp_path / 'checkpoints' / '3'
  values = json.loads((folder / 'manifest.json').read_text())
  assert (values['format'], values['step'], values['fencing_epoch']) == (1, 3, 0)
  assert values['metrics'] == {'eval/a/mean@2': 0.5}
  arrays = {name for path in files_below(folder) if 'd' in path.parts for name in [str(path.relative_to(folder))]}
  described = {str(path.relative_to(folder)) for path in files_below(folder)} - arrays - {'manifest.json'}
  assert arrays and values['files'].keys() == described
  for name in described:
    content = (folder / name).read_bytes()
    assert values['files'][name] == {'bytes': len(content), 'sha256': hashlib.sha256(content).hexdigest()}
  weights = np.asarray(state.trainable['layer']['w'])
  expected = digests.leaf_digest(weights.shape, weights.dtype, digests.block_sums(weights, (0, 0), weights.shape))
  assert values['leaves']['trainable.layer.w'] == expected
  assert len(values['leaves']) == len(jax.tree.leaves(state))
  assert values['state_digest'] == digests.state_digest(values['leaves'])


def test_a_checkpoint_under_the_name_of_another_step_is_damage(tmp_path, caplog):
  save_steps(tmp_path, {1: {}, 2: {}}).close()
  shutil.copytree(tmp_path / 'checkpoints' / '1', tmp_path / 'checkpoints' / '5')
  assert Checkpoints(tmp_path).restore(make_state(0))[0] == 2
  assert 'The checkpoint of step 5 cannot be read (its manifest.json is that of step 1)' in caplog.text


def test_without_a_manifest_nothing_is_resumed_but_a_reader_may_look(tmp_path, caplog):
  save_steps(tmp_path, {1: {}}).close()
  (tmp_path / 'checkpoints' / '1' / 'manifest.json').unlink()
  with pytest.raises(
    UserError,
    match=r'None of the checkpoints .* is whole .*has no manifest\.json, .* as does the version that wrote it\.',
  ):
    Checkpoints(tmp_path).restore(make_state(0))
  assert (tmp_path / 'checkpoints' / '1').is_dir()
  step, state, _ = Checkpoints(tmp_path, read_only=True).restore(make_state(0))
  assert step == 1
  assert_same(state, make_state(1))
  assert 'The checkpoint of step 1 is not verified' in caplog.text


class Owner:
  """An owner of a run that loses it after some checks."""

  def __init__(self, epoch: int, checks: int = 10**6):
    self.epoch, self.checks, self.known = epoch, checks, []

  def check(self) -> None:
    self.checks -= 1
    if self.checks < 0:
      raise UserError('Another process has taken the run over.')

  def published(self, step: int) -> None:
    self.known.append(step)


def test_who_has_lost_the_run_publishes_nothing(tmp_path):
  owner = Owner(1)
  first = save_steps(tmp_path, {1: {}}, ownership=owner)
  owner.checks = 1  # It is lost while the checkpoint is written.
  first.save(2, make_state(2), {}, {})
  with pytest.raises(UserError, match='taken the run over'):
    first.wait()
  assert first.steps() == [1] and owner.known == [1]
  again = save_steps(tmp_path, {2: {}}, ownership=Owner(2))
  with pytest.raises(UserError, match='taken the run over'):
    first.save(2, make_state(2), {}, {})
  assert [
    json.loads((again.directory / str(step) / 'manifest.json').read_text())['fencing_epoch'] for step in (1, 2)
  ] == [1, 2]
  assert_same(again.restore(make_state(0))[1], make_state(2))


@pytest.mark.parametrize('name', ['07', '\u0667', '7.copy'])
def test_a_folder_that_is_not_named_as_a_step_is_none_of_the_runs(tmp_path, name):
  save_steps(tmp_path, {3: {}}).close()
  (tmp_path / 'checkpoints' / name).mkdir()
  assert newest(tmp_path) == 3
  assert Checkpoints(tmp_path).restore(make_state(0))[0] == 3
  assert (tmp_path / 'checkpoints' / name).is_dir()


def test_what_was_published_without_the_run_is_set_aside(tmp_path, caplog):
  """A process is stopped between its last check and the rename, and goes on when another one owns the run."""
  save_steps(tmp_path, {1: {}, 3: {}}, ownership=Owner(1)).close()
  starts = [epochs.Epoch(number, 'host', number, 'now', str(number), 1) for number in (1, 2)]
  (tmp_path / epochs.EPOCHS).write_text(epochs.Epochs(tuple(starts), published=1).to_json())
  second = Checkpoints(tmp_path, ownership=Owner(2))
  assert second.restore(make_state(0))[0] == 1
  assert 'The checkpoint of step 3 cannot be read (a process that had lost the run' in caplog.text
  assert (tmp_path / DAMAGED / '3').is_dir() and second.steps() == [1]
  (tmp_path / DAMAGED / '3').rename(tmp_path / 'checkpoints' / '2')  # One more, just before the other one's.
  second.save(2, make_state(2), {}, {})
  second.wait()
  assert_same(second.restore_step(2, make_state(0)), make_state(2))
  assert (tmp_path / DAMAGED / '2').is_dir()


@pytest.mark.parametrize('failing', ['sync_tree', 'write_atomically', 'sync_directory'])
def test_nothing_is_removed_before_the_new_checkpoint_is_on_the_disk(tmp_path, monkeypatch, failing):
  checkpoints = save_steps(tmp_path, {1: {}}, keep=1)

  def fail(path, *_):
    raise OSError(errno.EIO, 'Input/output error', str(path))

  monkeypatch.setattr(checkpoint_module, failing, fail)
  checkpoints.save(2, make_state(2), {}, {})
  with pytest.raises(
    UserError,
    match='could not be written .*Input/output error.*: see that its file system works, .* resumes from step 1',
  ):
    checkpoints.wait()
  monkeypatch.undo()
  assert (tmp_path / 'checkpoints' / '1').is_dir() and checkpoints.steps() == [1]
  again = Checkpoints(tmp_path, keep=1)
  step, state, _ = again.restore(make_state(0))
  assert step == (2 if failing == 'sync_directory' else 1)  # Whole, though nobody could know that it was on the disk.
  assert_same(state, make_state(step))


def test_no_thread_goes_on_before_everything_is_written(tmp_path, monkeypatch):
  checkpoints, go_on, there = Checkpoints(tmp_path), threading.Event(), []
  sync_tree = checkpoint_module.sync_tree
  monkeypatch.setattr(checkpoint_module, 'sync_tree', lambda path: go_on.wait(60) and sync_tree(path))
  checkpoints.save(1, make_state(1), {}, {})

  def wait():
    checkpoints.wait()
    there.append((tmp_path / 'checkpoints' / '1').is_dir())

  threads = [threading.Thread(target=wait) for _ in range(2)]
  for thread in threads:
    thread.start()
  threads[1].join(0.2)
  go_on.set()
  for thread in threads:
    thread.join(60)
  assert there == [True, True]


def test_what_a_failed_attempt_has_left_makes_room_for_the_next_one(tmp_path, monkeypatch):
  checkpoints = save_steps(tmp_path, {1: {}})
  full = OSError(errno.ENOSPC, 'No space left on device')
  monkeypatch.setattr(checkpoint_module, 'sync_tree', lambda path: (_ for _ in ()).throw(full))
  checkpoints.save(2, make_state(2), {}, {})
  with pytest.raises(UserError, match='could not be written .*No space left'):
    checkpoints.wait()
  checkpoints.measured(2, {})  # Another thread than the one that hears of the failure may have waited for it.
  monkeypatch.undo()
  checkpoints.save(2, make_state(2), {}, {})
  checkpoints.wait()
  assert sorted(path.name for path in checkpoints.directory.iterdir()) == ['1', '2']
  assert not (tmp_path / DAMAGED).exists()
  monkeypatch.setattr(checkpoint_module, 'sync_tree', lambda path: (_ for _ in ()).throw(full))
  checkpoints.save(3, make_state(3), {}, {})
  (checkpoints.directory / '3.unfinished.00').mkdir()  # Of another epoch.
  with pytest.raises(UserError, match='could not be written .*No space left'):
    checkpoints.close()
  assert sorted(path.name for path in checkpoints.directory.iterdir()) == ['1', '2', '3.unfinished.00']


def test_what_a_killed_process_leaves_is_no_checkpoint_and_is_removed(tmp_path):
  save_steps(tmp_path, {1: {}, 2: {}, 3: {}}, keep=3).close()
  folder = tmp_path / 'checkpoints'
  (folder / '3').rename(folder / '3.unfinished.7')
  (folder / '2').rename(folder / '2.deleted.7')
  (folder / '4.orbax-checkpoint-tmp').mkdir()
  (folder / 'notes.txt').write_text('of the user')
  assert Checkpoints(tmp_path, read_only=True).steps() == [1]
  assert len(list(folder.iterdir())) == 5
  assert Checkpoints(tmp_path).restore(make_state(0))[0] == 1
  assert {path.name for path in folder.iterdir()} == {'1', 'notes.txt'}


def test_a_checkpoint_that_cannot_be_removed_is_named_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
  local = type(epath.Path(tmp_path))
  rename = local.rename

  def fail(path, target):
    if path.name == '1':
      raise PermissionError(errno.EACCES, 'Permission denied')
    return rename(path, target)

  monkeypatch.setattr(local, 'rename', fail)
  save_steps(tmp_path, {1: {}, 2: {}}, keep=1)
  assert 'old checkpoint of step 1 cannot be removed' in caplog.text
  assert Checkpoints(tmp_path, read_only=True).restore(make_state(0))[0] == 2


@pytest.mark.parametrize('content', [b'', b'{"format": 1', b'[]', b'{}', b'\xff'])
def test_a_damaged_manifest_of_an_older_checkpoint_ends_nothing(tmp_path, caplog, content):
  score = {'eval/a/mean@2': 0.5}
  save_steps(tmp_path, {1: {'eval/a/mean@2': 0.9}, 2: score, 3: {}}, keep=3, best_metric='eval/a/mean@2').close()
  (tmp_path / 'checkpoints' / '1' / 'manifest.json').write_bytes(content)
  checkpoints = Checkpoints(tmp_path, keep=2, best_metric='eval/a/mean@2')
  assert checkpoints.best(before=9) == 2
  assert checkpoints.restore(make_state(0))[0] == 3
  assert caplog.text.count('The checkpoint of step 1 is not ranked (its manifest.json is damaged)') == 1
  assert (tmp_path / DAMAGED / '1').is_dir()
  checkpoints.save(4, make_state(4), {}, {})
  checkpoints.wait()
  assert checkpoints.steps() == [2, 3, 4]


def test_what_is_out_of_reach_is_tried_again_and_nothing_is_moved(tmp_path, monkeypatch, caplog):
  save_steps(tmp_path, {1: {}, 2: {}}).close()
  before = files_below(tmp_path)
  pauses, read, left = [], checkpoint_module.manifest.check_files, [2]

  def busy(folder, expected):
    if left[0]:
      left[0] -= 1
      raise OSError(errno.EIO, 'Input/output error', str(folder))
    return read(folder, expected)

  monkeypatch.setattr(checkpoint_module.manifest, 'check_files', busy)
  monkeypatch.setattr(checkpoint_module.time, 'sleep', pauses.append)
  assert Checkpoints(tmp_path).restore(make_state(0))[0] == 2
  assert pauses == list(checkpoint_module.PAUSES[:2]) and caplog.text.count('trying again') == 2
  left[0] = 100
  with pytest.raises(UserError, match='step 2 in .* cannot be read for now, after 4 attempts .*Input/output error'):
    Checkpoints(tmp_path).restore(make_state(0))
  assert files_below(tmp_path) == before


@pytest.fixture
def readable_folder():
  """Yield a folder that any user may enter, which pytest's are not."""
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)
    yield pathlib.Path(folder)


@pytest.mark.parametrize('pattern', ['2/manifest.json', '2/state', '2/state/manifest.ocdbt', '2/state/**/d/*'])
def test_permissions_are_not_damage(readable_folder, monkeypatch, pattern):
  """Denied by the operating system, in the code of Python and of the storage library."""
  save_steps(readable_folder, {1: {}, 2: {}}).close()
  monkeypatch.setattr(checkpoint_module, 'PAUSES', ())
  user = os.geteuid()
  paths = list((readable_folder / 'checkpoints').glob(pattern))
  modes = [path.stat().st_mode for path in paths]
  assert paths
  try:
    for path in paths:
      path.chmod(0)
    os.seteuid(user or 65534)  # Permissions do not bind the superuser.
    with pytest.raises(UserError, match='step 2 in .* cannot be read for now'):
      Checkpoints(readable_folder, read_only=True).restore(make_state(0))
  finally:
    os.seteuid(user)
    for path, mode in zip(paths, modes, strict=True):
      path.chmod(mode)
  assert Checkpoints(readable_folder, read_only=True).restore(make_state(0))[0] == 2


@pytest.mark.parametrize(
  ('error', 'out_of_reach'),
  [
    (OSError(errno.EIO, 'Input/output error'), True),
    (OSError(errno.ESTALE, 'Stale file handle'), True),
    (FileNotFoundError(errno.ENOENT, 'No such file'), False),
    (IsADirectoryError(errno.EISDIR, 'Is a directory'), False),
    (OSError('Forbidden: https://storage.googleapis.com/download/storage/v1/b/runs'), True),
    (FileNotFoundError('https://storage.googleapis.com/download/storage/v1/b/runs'), False),
    (MemoryError(), True),
    (ValueError('UNAVAILABLE: Error reading gs://runs/1/state: HTTP response code: 503'), True),
    (ValueError('DEADLINE_EXCEEDED: Error reading gs://runs/1/state'), True),
    (ValueError("UNKNOWN: Error reading local file: Input/output error [os_error_code='5']"), True),
    (ValueError("NOT_FOUND: Error opening local file: No such file [os_error_code='2']"), False),
    (ValueError('OUT_OF_RANGE: Requested byte range [0, 59136) is not valid for value of size 0'), False),
    (ValueError('FAILED_PRECONDITION: Truncated Zstd-compressed stream; at byte 0'), False),
    (DamagedError('its file host/metadata is missing'), False),
  ],
  ids=str,
)
def test_damage_and_what_is_out_of_reach_are_told_apart(error, out_of_reach):
  assert is_out_of_reach(error) == out_of_reach
  wrapped = Exception('Encountered error while reading array index')
  wrapped.__cause__ = error
  assert is_out_of_reach(wrapped) == out_of_reach
  assert is_out_of_reach(ExceptionGroup('reads', [ValueError('x'), error])) == out_of_reach


def test_setting_aside_finds_a_free_name_and_goes_on_after_an_interruption(tmp_path, monkeypatch):
  save_steps(tmp_path, {1: {}, 2: {}, 3: {}}, keep=3).close()
  for step in (2, 3):
    largest_file(tmp_path / 'checkpoints' / str(step)).write_bytes(b'')
  for name in ('2', '2.2'):
    (tmp_path / DAMAGED / name).mkdir(parents=True)
  made, make = [], files.make_directory

  def interrupted(folder):
    if made.count(DAMAGED) == 1:  # One was set aside.
      raise OSError(errno.EIO, 'Input/output error')
    made.append(folder.name)
    make(folder)

  monkeypatch.setattr(checkpoint_module, 'make_directory', interrupted)
  with pytest.raises(UserError, match='damaged checkpoint .*3 cannot be moved'):
    Checkpoints(tmp_path).restore(make_state(0))
  monkeypatch.undo()
  assert Checkpoints(tmp_path).restore(make_state(0))[0] == 1
  assert {path.name for path in (tmp_path / DAMAGED).iterdir()} == {'2', '2.1', '2.2', '3'}


def test_checkpoints_that_cannot_be_opened_are_those_from_which_a_run_resumes(tmp_path, monkeypatch):
  save_steps(tmp_path, {1: {}, 2: {}}).close()

  def fail(path):
    raise OSError(5, 'Input/output error')

  monkeypatch.setattr(checkpoint_module, 'make_directory', fail)
  with pytest.raises(UserError, match=r'Input/output error.* resumes from step 2\.'):
    Checkpoints(tmp_path)


def test_what_is_printed_of_reads_that_were_given_up_is_left_out_and_nothing_else(monkeypatch, caplog):
  printed: list[str] = []
  monkeypatch.setattr(sys, 'unraisablehook', lambda unraisable: printed.append(str(unraisable.exc_value)))
  logger = logging.getLogger('asyncio')
  monkeypatch.setattr(logger, 'filters', [])
  unreadable.ignore_given_up_reads.__wrapped__()
  for error, place in (
    (RuntimeError('Event loop is closed'), None),
    (Exception('Encountered'), '<coroutine object _read_array_index_and_device_put at 0x7f>'),
    (RuntimeError('another'), None),
    (ValueError('of a user'), '<coroutine object main at 0x7f>'),
  ):
    sys.unraisablehook(types.SimpleNamespace(exc_value=error, object=place))
  assert printed == ['another', 'of a user']
  for coroutine in ('async_deserialize', '_read_array_index_and_device_put', 'main'):
    logger.error('Task exception was never retrieved\nfuture: <Task finished coro=<%s() done>>', coroutine)
  error = Exception('Encountered error while reading array index: (slice(0, 3, 1),)')
  logger.error('_GatheringFuture exception was never retrieved\nfuture: <_GatheringFuture exception=%r>', error)
  assert len(caplog.records) == 1 and 'coro=<main()' in caplog.text
