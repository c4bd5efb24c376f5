"""What a run directory has lost is said before the first step; nothing is trained over it unless asked for."""

import contextlib
import errno
import json
import os
import pathlib

from etils import epath
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.training.directory import epochs, locks, lost_checkpoints, ownership, published_checkpoints, workdir


@pytest.fixture
def folder(tmp_path):
  return epath.Path(tmp_path / 'run')


def leave(folder, *, steps=4, published=0, kept=(), save_freq=10, recorded=True):
  """Make what a run leaves that has gone `steps` steps; of an earlier version if nothing is `recorded`."""
  config = Config()
  config.trainer.save_freq = save_freq
  config.optimizer.lr = 0.5
  if recorded:
    with ownership.sole_user(folder) as mine:
      mine.resumed(0)
      mine.published(published)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(config.to_json())
  epoch = {'fencing_epoch': 1} if recorded else {}
  lines = [json.dumps({'step': step, **epoch}) + '\n' for step in range(1, steps + 1)]
  (folder / 'metrics.jsonl').write_text(''.join(lines))
  for name in ('rollouts', 'eval', 'checkpoints'):
    (folder / name).mkdir()
  (folder / 'rollouts' / f'{steps}.jsonl').write_text('rollouts')
  (folder / 'eval' / 'notes.txt').write_text('mine')
  for step in kept:
    (folder / 'checkpoints' / str(step)).mkdir()


def settle(folder, *, restart=False):
  said = []
  with ownership.sole_user(folder) as mine:
    lost_checkpoints.settle(folder, mine, restart=restart, say=said.append)
    return said, mine.record()


def content(folder):
  """Files below a directory, without those of its owner."""
  own = (locks.LOCK, epochs.EPOCHS)
  files = [path for path in pathlib.Path(folder).rglob('*') if path.is_file() and path.name not in own]
  return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again_by_itself(folder):
  leave(folder)
  before = content(folder)
  lost_checkpoints.check_not_lost(folder)
  for _ in range(3):  # As often as it is preempted.
    assert settle(folder)[0] == []
  assert content(folder) == before


def test_checkpoints_that_are_gone_are_missed(folder):
  leave(folder, published=2)
  (folder / 'checkpoints').rmdir()
  before = content(folder)
  sentence = (
    'has no checkpoint to resume from, although that of step 2 .* up to step 4: mount the disk .* or add --restart'
  )
  with pytest.raises(UserError, match=sentence):
    lost_checkpoints.check_not_lost(folder)
  for _ in range(2):  # A refused start forgets nothing.
    with pytest.raises(UserError, match=sentence):
      settle(folder)
  assert content(folder) == before


def test_whoever_resumed_has_had_a_checkpoint(folder):
  """The record is written after the checkpoint; a kill between them leaves a checkpoint that the next start knows."""
  leave(folder, kept=[2])
  with ownership.sole_user(folder) as mine:
    lost_checkpoints.settle(folder, mine, restart=False, say=print)
    mine.resumed(2)
  (folder / 'checkpoints' / '2').rmdir()
  with pytest.raises(UserError, match='that of step 2 was published'):
    settle(folder)


@pytest.mark.parametrize('steps, save_freq, refused', [(21, 10, True), (20, 10, False), (50, 0, False), (3, 1, True)])
def test_a_run_of_an_earlier_version_is_judged_by_what_was_due(folder, steps, save_freq, refused):
  """Its second checkpoint was begun when the first was whole, and its line written before that."""
  leave(folder, steps=steps, save_freq=save_freq, recorded=False)
  with pytest.raises(UserError, match='was published') if refused else contextlib.nullcontext():
    lost_checkpoints.check_not_lost(folder)
  for _ in range(2):
    if refused:
      with pytest.raises(UserError, match=f'that of step {save_freq} was published'):
        settle(folder)
    else:
      settle(folder)


@pytest.mark.parametrize('damage', ['', None])
def test_a_check_refuses_what_a_start_refuses_though_the_epochs_are_lost(folder, damage):
  leave(folder, steps=21, published=20)
  if damage is None:
    (folder / epochs.EPOCHS).unlink()
  else:
    (folder / epochs.EPOCHS).write_text(damage)
  for act in (lost_checkpoints.check_not_lost, settle):
    with pytest.raises(UserError, match='that of step 10 was published'):
      act(folder)


@pytest.mark.parametrize('damage', ['', None])
@pytest.mark.parametrize('steps, refused', [(4, True), (0, False)])
def test_checkpoints_that_are_lost_with_the_epochs_are_missed_once_a_step_has_ended(folder, damage, steps, refused):
  leave(folder, steps=steps, published=2, save_freq=0)
  (folder / epochs.EPOCHS).unlink() if damage is None else (folder / epochs.EPOCHS).write_text(damage)
  before = content(folder)
  for act in (lost_checkpoints.check_not_lost, settle, settle):  # Also after the epochs were written anew.
    with pytest.raises(UserError, match='mount the disk .* or add --restart') if refused else contextlib.nullcontext():
      act(folder)
  assert content(folder) == before
  assert 'begins again at step 0' in settle(folder, restart=True)[0][0]
  assert settle(folder)[0] == []


def test_a_check_lets_a_restart_be_completed(folder):
  leave(folder, published=2)
  with ownership.sole_user(folder) as mine:
    mine.restarting(1, 2)
  lost_checkpoints.check_not_lost(folder)
  assert 'was interrupted' in settle(folder)[0][0]


def test_restart_moves_everything_away_and_loses_nothing(folder):
  leave(folder, published=2)
  before = content(folder)
  workdir.check_workdir(Config(), folder, restart=True)  # Other settings may follow.
  with pytest.raises(UserError, match='holds a run with other settings: optimizer.lr was 0.5'):
    workdir.check_workdir(Config(), folder)
  said, record = settle(folder, restart=True)
  assert content(folder) == {f'before_restart/1/{name}': text for name, text in before.items()}
  assert 'begins again at step 0; what was there is in' in said[0] and record.published == 0
  assert settle(folder, restart=True)[0] == [] and not (folder / 'before_restart' / '2').exists()
  leave(folder, steps=1)
  settle(folder, restart=True)
  assert content(folder / 'before_restart' / '1') == before and (folder / 'before_restart' / '2').exists()


def test_restart_does_not_leave_a_checkpoint_behind(folder):
  leave(folder, published=2, kept=[2])
  before = content(folder)
  said, _ = settle(folder, restart=True)
  assert '--restart does nothing here: the checkpoint of step 2 is there' in said[0] and content(folder) == before
  (folder / 'checkpoints' / '2').rename(folder / 'checkpoints' / '1')
  said, _ = settle(folder)
  assert 'the checkpoint of step 2 was published and is no longer there; the newest is that of step 1' in said[0]


def test_a_restart_that_is_interrupted_anywhere_is_completed(folder, monkeypatch):
  leave(folder, published=2)
  before = content(folder)
  rename, moves, limit = os.rename, [], [0]

  def interrupted(source, target):
    moves.append(source)
    if len(moves) > limit[0]:
      raise KeyboardInterrupt
    rename(source, target)

  monkeypatch.setattr(os, 'rename', interrupted)
  for limit[0] in range(3):  # More are moved each time, of five.
    moves.clear()
    with pytest.raises(KeyboardInterrupt):
      settle(folder, restart=limit[0] == 0)
    left = {
      **content(folder / 'before_restart' / '1'),
      **{name: text for name, text in content(folder).items() if 'before' not in name},
    }
    assert left == before
  monkeypatch.undo()
  said, record = settle(folder)
  assert 'was interrupted' in said[0] and record.restarting is None and record.published == 0
  assert content(folder) == {f'before_restart/1/{name}': text for name, text in before.items()}


def test_an_interrupted_restart_goes_on_though_the_checkpoints_are_back_and_overwrites_nothing(folder, monkeypatch):
  """Their disk was mounted again meanwhile, and the user has restored a file that was moved already."""
  leave(folder, published=4)
  rename, moves = os.rename, []

  def interrupted(source, target):
    moves.append(source)
    if len(moves) == 5:
      raise KeyboardInterrupt
    rename(source, target)

  with monkeypatch.context() as patch:
    patch.setattr(os, 'rename', interrupted)
    with pytest.raises(KeyboardInterrupt):
      settle(folder, restart=True)
  moved = folder / 'before_restart' / '1'
  assert sorted(path.name for path in moved.iterdir()) == ['checkpoints', 'eval', 'metrics.jsonl', 'rollouts']
  (folder / 'checkpoints' / '4').mkdir(parents=True)
  (folder / 'checkpoints' / '4' / 'manifest.json').write_text('whole')
  (folder / 'metrics.jsonl').write_text('{"step": 1}\n')
  before = {**content(folder), 'config.json': (folder / 'config.json').read_text()}
  said, record = settle(folder)
  assert 'was interrupted: the rest of the old results, including checkpoints (step 4), is moved to' in said[0]
  assert 'the run begins again at step 0' in said[0] and record.restarting is None and record.published == 0
  after = content(folder)
  assert sorted(before.values()) == sorted(after.values()) and all(name.startswith('before_') for name in after)
  assert after['before_restart/1/checkpoints.1/4/manifest.json'] == 'whole'


def test_checkpoints_that_are_a_mount_point_stay_where_they_are_if_nothing_is_in_them(folder, monkeypatch):
  leave(folder, published=2)
  (folder / 'checkpoints' / 'lost+found').mkdir()
  (folder / 'checkpoints' / '3.unfinished.1').mkdir()
  rename = os.rename

  def busy(source, target):
    if source == folder / 'checkpoints':
      raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    rename(source, target)

  monkeypatch.setattr(os, 'rename', busy)
  for _ in range(2):  # It is an interrupted restart then.
    with pytest.raises(UserError, match='checkpoints is a mount point, which --restart cannot move away: unmount it'):
      settle(folder, restart=True)
  (folder / 'checkpoints' / '3.unfinished.1').rmdir()
  _, record = settle(folder)
  assert record.restarting is None and (folder / 'checkpoints').is_dir() and not (folder / 'config.json').exists()


def test_in_a_store_without_folders_each_object_is_moved_for_itself(folder, monkeypatch):
  leave(folder, published=2, kept=[2])
  (folder / 'checkpoints' / '2' / 'array').write_text('of a checkpoint without its manifest')
  before = content(folder)
  for module in (published_checkpoints, lost_checkpoints):
    monkeypatch.setattr(module, 'is_local', lambda path: False)
  kind = type(folder)
  copy, unlink, moves = kind.copy, kind.unlink, []

  def copied(path, target, overwrite=False):
    target.parent.mkdir(parents=True, exist_ok=True)  # Which a store does not need.
    copy(path, target, overwrite)

  monkeypatch.setattr(kind, 'copy', copied)

  def interrupted(path, missing_ok=False):
    moves.append(path)
    if len(moves) == 2:
      raise KeyboardInterrupt  # Copied and not yet removed.
    unlink(path, missing_ok)

  with monkeypatch.context() as patch:
    patch.setattr(kind, 'unlink', interrupted)
    with pytest.raises(KeyboardInterrupt):
      settle(folder, restart=True)
  _, record = settle(folder)
  assert content(folder) == {f'before_restart/1/{name}': text for name, text in before.items()}
  assert record.restarting is None and record.published == 0
