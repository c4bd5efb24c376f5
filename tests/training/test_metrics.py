"""metrics.jsonl: one line a step, none twice after a resume, local and on stores that cannot append."""

import contextlib
import errno
import json
import os
import types

from etils import epath
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.training import metrics, saving
from sdpo_jax.training.directory.lines import history, read_metrics
from sdpo_jax.training.joint_errors import JointErrors
from sdpo_jax.training.resuming import compared


def quiet() -> Config:
  config = Config()
  config.trainer.tensorboard = False
  return config


def steps(folder) -> list[int]:
  return [json.loads(line)['step'] for line in (epath.Path(folder) / 'metrics.jsonl').read_text().splitlines()]


@pytest.mark.parametrize('local', [True, False])
def test_resume_drops_the_lines_after_the_checkpoint(tmp_path, monkeypatch, local):
  monkeypatch.setattr(metrics, 'is_local', lambda path: local)
  writer = metrics.MetricsWriter(tmp_path, quiet())
  for step in range(5):
    writer.write(step, {'train/loss': step / 2})
  writer.close()
  assert steps(tmp_path) == [0, 1, 2, 3, 4]
  with open(tmp_path / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 5, "train/lo')  # Cut off by a crash.
  writer = metrics.MetricsWriter(tmp_path, quiet(), resume_step=3)
  writer.write(4, {'train/loss': 7.0})
  assert steps(tmp_path) == [0, 1, 2, 3, 4]
  assert read_metrics(tmp_path)[-1] == {'step': 4, 'train/loss': 7.0}


def test_the_lines_are_on_the_disk_after_a_sync_and_a_link_is_not_followed(tmp_path, monkeypatch):
  synced = []
  fsync = os.fsync
  monkeypatch.setattr(
    os, 'fsync', lambda fd: (synced.append((os.readlink(f'/proc/self/fd/{fd}'), size(fd))), fsync(fd))
  )

  def size(fd):
    return os.fstat(fd).st_size

  writer = metrics.MetricsWriter(tmp_path, Config())
  writer.write(1, {'train/loss': 1.0})
  synced.clear()
  writer.sync()
  path = tmp_path / 'metrics.jsonl'
  [events] = (tmp_path / 'tensorboard').iterdir()
  assert synced[:2] == [(str(file), file.stat().st_size) for file in (path, events)] and path.stat().st_size > 10
  writer.write(2, {'train/loss': 2.0})
  writer.close()
  assert synced[-3:-1] == [(str(file), file.stat().st_size) for file in (path, events)]
  path.rename(tmp_path / 'elsewhere')
  path.symlink_to(tmp_path / 'elsewhere')
  with pytest.raises(OSError, match='symbolic link'):
    writer.write(3, {})
  assert steps(tmp_path) == [1, 2]


def test_lines_that_could_not_be_synced_are_written_anew(tmp_path, monkeypatch):
  """The system reports a failure once, and may have dropped the data."""
  writer = metrics.MetricsWriter(tmp_path, quiet())
  writer.write(1, {})
  path = tmp_path / 'metrics.jsonl'
  lost, fsync = path.stat().st_ino, os.fsync

  def fail(descriptor):
    raise OSError(errno.EIO, 'Input/output error')

  monkeypatch.setattr(os, 'fsync', fail)
  with pytest.raises(OSError, match='Input/output'):
    writer.sync()
  with pytest.raises(OSError, match='Input/output'):
    writer.sync()
  synced = []
  monkeypatch.setattr(os, 'fsync', lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
  writer.sync()
  assert path.stat().st_ino in synced and path.stat().st_ino != lost and steps(tmp_path) == [1]


def test_a_checkpoint_is_begun_when_its_lines_are_on_the_disk():
  calls = []
  checkpoints = types.SimpleNamespace(steps=list, save=lambda *_: calls.append('save'))
  failing = []

  def sync():
    calls.append('sync')
    if failing:
      raise OSError('Input/output error')

  saver = saving.Saving(None, checkpoints, None, JointErrors(), sync, print)
  for step in (1, 2):
    state = types.SimpleNamespace(take=lambda: 'state')
    saver.whole = saving.Whole(step, state, dict, {}, None)
    with pytest.raises(OSError, match='Input/output') if failing else contextlib.nullcontext():
      saver.save()
    failing.append(True)
  assert calls == ['sync', 'save', 'sync']


def test_a_start_from_nothing_begins_a_new_file(tmp_path):
  for _ in range(2):
    writer = metrics.MetricsWriter(tmp_path, quiet())
    writer.write(0, {'a': 1})
  assert steps(tmp_path) == [0]


def test_numbers_that_are_not_finite_are_null(tmp_path):
  metrics.MetricsWriter(tmp_path, quiet()).write(1, {'a': float('nan'), 'b': float('inf'), 'c': 2})
  assert read_metrics(tmp_path) == [{'step': 1, 'a': None, 'b': None, 'c': 2.0}]


def test_a_line_that_is_not_json_is_named(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\nhello\n{"step": 1}\n')
  with pytest.raises(UserError, match='line 2 is not JSON'):
    read_metrics(tmp_path)


def test_a_block_that_did_not_reach_the_disk_does_not_keep_a_run_from_going_on(tmp_path):
  lines = [json.dumps({'step': step, 'text': 'x' * 2000}).encode() + b'\n' for step in range(1, 7)]
  content = b''.join(lines)
  content = content[:4096] + bytes(4096) + content[8192:]  # A file system need not write blocks in their order.
  (tmp_path / 'metrics.jsonl').write_bytes(content)
  assert [line['step'] for line in read_metrics(tmp_path)] == [1, 2, 6]
  assert [line['step'] for line in history(tmp_path, 2).kept] == [1, 2]


def test_a_line_that_names_another_state_than_the_checkpoint_stops_the_run(tmp_path):
  records = [{'step': 1, 'state_digest': 'a' * 64}, {'step': 2}, {'step': 3, 'state_digest': 'b' * 64}]
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
  lines = history(tmp_path, 3)
  assert compared(1, {}, 'a' * 64, lines) == (1, True)
  assert compared(2, {}, 'a' * 64, lines) == (2, False)
  assert compared(1, {}, 'a' * 64, history(tmp_path / 'none', 1)) == (1, False)
  with pytest.raises(
    UserError, match=r'metrics.jsonl and the checkpoint of step 3 are not of the same run: .*bbb.* aaa'
  ):
    compared(3, {}, 'a' * 64, lines)
