"""A run directory has one owner: a second start is refused by name, a stale owner replaced, a fenced one stopped."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading

from etils import epath
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.training import metrics
from sdpo_jax.training.directory import epochs, lock_owner, locks, ownership, sealed, starts
from sdpo_jax.training.directory.lines import history, read_lines, read_metrics

# Owns a directory until it is told to end, or checks whether it still does.
HOLD = """
import sys
from etils import epath
from sdpo_jax.training.directory import ownership
with ownership.sole_user(epath.Path(sys.argv[1])) as mine:
  print('held', mine.epoch, flush=True)
  for line in sys.stdin:
    try:
      mine.check()
      print('mine', flush=True)
    except ownership.RunLostError as error:
      print(error, flush=True)
"""


@pytest.fixture
def folder(tmp_path):
  return epath.Path(tmp_path / 'run')


@contextlib.contextmanager
def holder(folder, code=HOLD):
  """Yield a process that owns a directory."""
  line = [sys.executable, '-c', code, str(folder)]
  with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
    try:
      assert process.stdout.readline().startswith('held')
      yield process
    finally:
      process.kill()


class Hours:
  """A clock that passes as fast as somebody sleeps, and what happens meanwhile."""

  def __init__(self, then=None):
    self.seconds, self.then = 0.0, then

  def sleep(self, seconds):
    self.seconds += seconds
    if self.then is not None:
      self.then(self.seconds)

  def clock(self):
    return ownership.Clock(now=lambda: self.seconds, sleep=self.sleep)


def take(folder, said=None, then=None):
  return ownership.take(folder, (said if said is not None else []).append, Hours(then).clock())


def written(folder, **changes):
  """Leave a lock as another process would have, and return what it says."""
  folder.mkdir(parents=True, exist_ok=True)
  other = dataclasses.replace(lock_owner.this_process(7), token='another', **changes)
  (folder / locks.LOCK).write_text(other.to_json())
  return other


ELSEWHERE = {'host': 'elsewhere', 'boot': 'another', 'pid': 123}


def lockless(monkeypatch):
  """Stand for a file system without locks, where the lock's content alone speaks."""

  def none(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(locks.fcntl, 'lockf', none)


def test_a_second_process_does_not_train_in_the_same_directory(folder):
  with holder(folder) as other:
    lock = json.loads((folder / locks.LOCK).read_text())
    assert lock['pid'] == other.pid and lock['host'] == socket.gethostname() and lock['fencing_epoch'] == 1
    named = rf'Another process is training in .*/run \(host .*, process {other.pid}, since \d.* UTC\): '
    named += 'wait .* another --workdir'
    with pytest.raises(UserError, match=named):
      take(folder)
    os.kill(other.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(UserError, match=rf'process {other.pid}, .*, but is suspended: continue it \(kill -CONT'):
      take(folder)
    os.kill(other.pid, signal.SIGCONT)
  said = []
  mine = take(folder, said)  # Nothing is left of a process that was killed.
  assert mine.epoch == 2 and f'process {other.pid}' in said[0] and 'this one takes over' in said[0]
  mine.release()
  said = []
  again = take(folder, said)
  assert again.epoch == 3 and said == []  # It had ended in good order.
  again.release()


def test_a_process_does_not_train_twice_in_a_directory(folder):
  """Its own locks do not keep it out, and would be gone with the second try."""
  ask = 'import fcntl, sys; fcntl.lockf(open(sys.argv[1], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)'
  with ownership.sole_user(folder):
    with pytest.raises(UserError, match='This process is already training in'):
      take(folder)
    lock = str(folder / locks.LOCK)
    assert b'BlockingIOError' in subprocess.run([sys.executable, '-c', ask, lock], capture_output=True).stderr
  take(folder).release()


@pytest.mark.parametrize('number', [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_is_named(folder, monkeypatch, number):
  def refuse(path, *more, opened=os.open, **named):
    if str(path).endswith(locks.LOCK):
      raise OSError(number, os.strerror(number))
    return opened(path, *more, **named)

  folder.mkdir()
  monkeypatch.setattr(os, 'open', refuse)
  with pytest.raises(
    UserError, match=f'The run directory .* cannot be written .*{os.strerror(number)}.* choose another'
  ):
    take(folder)


def test_a_lock_that_names_nobody_is_a_lock_all_the_same(folder):
  hold = 'import fcntl, sys; file = open(sys.argv[1] + "/.lock", "a"); fcntl.lockf(file, fcntl.LOCK_EX)'
  hold += '; print("held", flush=True); input()'
  folder.mkdir()
  with holder(folder, hold):
    with pytest.raises(UserError, match=r'Another process is training in .*/run: wait .* another --workdir'):
      take(folder)


@pytest.mark.parametrize('content', ['', 'x' * 5000, '[1]', '{"pid": "1"}', '{"a": 1}', '\x00' * 100])
def test_a_damaged_lock_of_a_dead_process_is_taken(folder, content):
  folder.mkdir()
  (folder / locks.LOCK).write_text(content)
  mine = take(folder)
  assert lock_owner.parse((folder / locks.LOCK).read_bytes()).token == mine.record().epochs[-1].token
  mine.release()


def test_a_link_in_the_place_of_a_lock_is_not_followed(folder, tmp_path):
  folder.mkdir()
  (tmp_path / 'else').write_text('kept')
  os.symlink(tmp_path / 'else', folder / locks.LOCK)
  with pytest.raises(UserError, match='.lock is a link'):
    take(folder)
  assert (tmp_path / 'else').read_text() == 'kept'
  (folder / locks.LOCK).unlink()
  (folder / locks.LOCK).mkdir()
  with pytest.raises(UserError, match='.lock is a folder'):
    take(folder)


def test_a_process_of_another_host_is_waited_for(folder):
  """Its clock may be hours off: only whether its lock changes counts."""
  other = written(folder, **ELSEWHERE, since='2099-01-01 00:00:00 UTC')
  hours, said = Hours(), []
  mine = ownership.take(folder, said.append, hours.clock())
  assert hours.seconds == pytest.approx(ownership.LEASE_S, rel=0.05)
  assert 'host elsewhere, process 123' in said[0] and 'waiting 60 seconds' in said[0] and 'takes over' in said[1]
  assert mine.epoch == other.fencing_epoch + 1
  mine.release()

  def beat(seconds):
    if seconds > 50:
      written(folder, **ELSEWHERE, beat=1)

  written(folder, **ELSEWHERE)
  with pytest.raises(UserError, match=r'is training in .* \(host elsewhere, process 123'):
    take(folder, then=beat)

  def end(seconds):
    if seconds > 5:
      written(folder, **ELSEWHERE, released=True)

  written(folder, **ELSEWHERE)
  hours = Hours(end)
  ownership.take(folder, print, hours.clock()).release()
  assert hours.seconds < 7


def test_without_locks_the_process_itself_is_looked_at(folder, monkeypatch):
  lockless(monkeypatch)
  monkeypatch.setattr(lock_owner, 'machine_digest', lambda: 'this')
  said = []
  written(folder)  # This very process, as it were another run.
  with pytest.raises(UserError, match=f'process {os.getpid()},'):
    take(folder, said)
  assert 'cannot be locked' in said[0]
  for changes in (
    {'started': 1},  # Its number has been used again.
    {'pid': subprocess.Popen(['true']).wait() or 2**22 + 1},  # No process has this number.
    {'boot': 'before', 'machine': 'this'},  # The machine was started again.
  ):
    written(folder, **changes)
    hours = Hours()
    ownership.take(folder, said.append, hours.clock()).release()
    assert hours.seconds == 0 and 'takes over' in said[-1]
  for changes in (
    {'namespace': 'pid:[1]'},  # In another container: its number says nothing here.
    {'boot': 'before', 'machine': 'that'},  # Two machines have one name.
    {'boot': 'before', 'machine': ''},
  ):
    written(folder, **changes)
    hours = Hours()
    ownership.take(folder, said.append, hours.clock()).release()
    assert hours.seconds >= ownership.LEASE_S


def test_whoever_lost_the_run_notices_and_leaves_everything_as_it_is(folder, monkeypatch):
  lockless(monkeypatch)
  former = take(folder)
  former.check()
  former.renew()
  beat = lock_owner.parse((folder / locks.LOCK).read_bytes())
  assert beat.beat == 1
  config = Config()
  config.trainer.tensorboard = False
  writer = metrics.MetricsWriter(folder, config, ownership=former)
  writer.write(1, {'a': 1.0})
  (folder / locks.LOCK).write_text(dataclasses.replace(beat, **ELSEWHERE).to_json())  # As seen from another host.
  locks.FileLock._held.clear()  # noqa: SLF001 (That host does not know what this process has locked.)
  newer = take(folder)
  before = {path.name: path.read_bytes() for path in folder.iterdir()}
  sentence = (
    r'has taken over the run in .* \(host .*, process .*; fencing epoch 2, this one has 1\): .* writes nothing more'
  )
  for attempt in (
    former.check,
    former.renew,
    lambda: former.resumed(3),
    lambda: former.published(3),
    lambda: writer.write(2, {'a': 1.0}),
    lambda: metrics.MetricsWriter(folder, config, ownership=former),
  ):
    with pytest.raises(ownership.RunLostError, match=sentence):
      attempt()
  former.release()
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
  newer.check()
  newer.release()


def test_a_stopped_and_continued_process_writes_nothing_more(folder):
  """The lock file is removed while it is stopped, as on a file server that has forgotten its lock."""
  with holder(folder) as other:
    os.kill(other.pid, signal.SIGSTOP)
    (folder / locks.LOCK).unlink()
    newer = take(folder)
    os.kill(other.pid, signal.SIGCONT)
    print(file=other.stdin, flush=True)
    assert f'process {os.getpid()}' in other.stdout.readline()
    other.stdin.close()
    assert other.wait() == 0
    newer.check()
    newer.release()


def test_an_older_epoch_does_not_get_the_lock_back(folder, monkeypatch):
  """Stopped between its last look and its write it may overwrite the lock once; the newer one takes that back."""
  lockless(monkeypatch)
  written(folder, released=True)
  mine = take(folder)
  written(folder, fencing_epoch=3)
  mine.renew()
  assert lock_owner.parse((folder / locks.LOCK).read_bytes()).fencing_epoch == mine.epoch == 8
  written(folder, fencing_epoch=9)  # A newer start, which has not written its epoch yet.
  with pytest.raises(ownership.RunLostError, match='is taking over'):
    mine.renew()
  assert lock_owner.parse((folder / locks.LOCK).read_bytes()).fencing_epoch == 9


def test_epochs_grow_whatever_is_removed(folder):
  for number in (1, 2, 3):
    mine = take(folder)
    assert mine.epoch == number == epochs.read_epochs(folder).newest
    mine.release()
  assert len(epochs.read_epochs(folder).epochs) == 1  # The others never went on from anywhere.
  (folder / epochs.EPOCHS).unlink()
  mine = take(folder)
  assert mine.epoch == 4
  mine.release()
  (folder / epochs.EPOCHS).unlink()
  (folder / locks.LOCK).unlink()
  (folder / 'metrics.jsonl').write_text('{"step": 1, "fencing_epoch": 6}\n{"step": 2}\n')
  mine = take(folder)
  assert mine.epoch == 7
  (folder / epochs.EPOCHS).unlink()
  with pytest.raises(ownership.RunLostError, match='epochs.json was removed while the run was going on'):
    mine.check()
  mine.release()


def with_epochs(folder, *begun, **values):
  """Write an `epochs.json` with starts (fencing epoch, step from which it went on)."""
  folder.mkdir(exist_ok=True)
  record = epochs.Epochs(tuple(epochs.Epoch(number, 'h', 1, 's', str(number), at) for number, at in begun), **values)
  (folder / epochs.EPOCHS).write_text(record.to_json())


def test_any_flipped_bit_in_the_epochs_is_noticed(folder):
  with_epochs(folder, (1, 0), (5, 3), published=4)
  good = (folder / epochs.EPOCHS).read_bytes()
  assert epochs.parse(good, '').newest == 5
  for bit in random.Random(0).sample(range(8 * len(good)), 200):
    flipped = bytearray(good)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(epochs.DamagedEpochsError, match='epochs.json is damaged'):
      epochs.parse(bytes(flipped), folder / epochs.EPOCHS)


@pytest.mark.parametrize('damage', ['emptied', 'cut', 'another', 'no text', 'a number', 'removed'])
def test_damaged_epochs_are_said_and_written_anew_and_no_number_is_used_again(folder, caplog, damage):
  """Epoch 6 went on from step 4 while 5 still ran; what each number was is known by what bears it."""
  with_epochs(folder, (1, 0), (5, 3), published=4)
  good = (folder / epochs.EPOCHS).read_bytes()
  history = [{'step': at, 'fencing_epoch': number, 'time': 'then'} for number, at in ((1, 0), (5, 3), (6, 4))]
  starts.write(folder, history)
  (folder / 'metrics.jsonl').write_text('{"step": 1, "fencing_epoch": 2}\n')
  (folder / 'checkpoints' / '4').mkdir(parents=True)
  (folder / 'checkpoints' / '4' / 'manifest.json').write_text(sealed.seal({'fencing_epoch': 7}))
  (folder / 'checkpoints' / '5.unfinished.8').mkdir()
  left = {
    'emptied': b'',
    'cut': good[:-20],
    'another': b'[]',
    'no text': b'\xff' + good,
    'a number': good.replace(b'"published": 4', b'"published": 3'),
  }
  said = []
  if damage == 'removed':
    (folder / epochs.EPOCHS).unlink()
  else:
    (folder / epochs.EPOCHS).write_bytes(left[damage])
    assert epochs.read_epochs(folder).fenced(5, 5).fencing_epoch == 6  # Of commands that only read.
    assert 'epochs.json is damaged' in caplog.text
  mine = take(folder, said)
  record = mine.record()
  assert mine.epoch == 9 and record.published == 4
  assert record.fenced(5, 5).fencing_epoch == 6 and record.fenced(6, 5) is None
  assert [text.startswith(f'{folder}/epochs.json is damaged (') for text in said] == [True] * (damage != 'removed')
  mine.release()
  again = take(folder, said)
  assert again.epoch == 10 and len(said) < 2  # It is whole.
  again.release()


@pytest.mark.parametrize('step', [-1, True, '1'])
def test_what_is_no_history_of_starts_is_not_written_into_the_epochs(folder, step):
  folder.mkdir()
  (folder / epochs.EPOCHS).write_text('damaged')
  starts.write(folder, [{'step': step, 'fencing_epoch': 3, 'time': 'then'}])
  with pytest.raises(UserError, match='fingerprint.json is not a history of starts'):
    starts.read(folder)
  mine = take(folder)
  mine.check()
  mine.release()


def test_epochs_that_are_damaged_while_the_run_goes_on_end_it(folder):
  mine = take(folder)
  content = (folder / epochs.EPOCHS).read_bytes()
  (folder / epochs.EPOCHS).write_bytes(content[:-1])
  with pytest.raises(ownership.RunLostError, match='epochs.json is damaged .* nothing more is written'):
    mine.check()
  mine.release()


def test_epochs_of_other_versions_are_read_or_named(folder):
  with_epochs(folder, (3, 0), published=4)
  values = json.loads((folder / epochs.EPOCHS).read_text())
  (folder / epochs.EPOCHS).write_text(sealed.seal(values | {'format': 3}))
  with pytest.raises(UserError, match='epochs.json has the format 3 of a later version'):
    take(folder)
  del values['sha256']
  (folder / epochs.EPOCHS).write_text(json.dumps(values | {'format': 1}))  # It had no seal.
  mine = take(folder)  # A refused start keeps nobody out.
  assert mine.epoch == 4 and mine.record().published == 4
  mine.release()


@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir])
@pytest.mark.parametrize('name', [locks.LOCK, epochs.EPOCHS])
def test_what_is_no_file_is_a_sentence_and_nobody_waits_for_it(folder, make, name):
  folder.mkdir()
  make(folder / name)
  with pytest.raises(UserError, match=rf'{name} is a (pipe|folder)'):
    take(folder)


@pytest.mark.parametrize('name', [locks.LOCK, epochs.EPOCHS])
def test_a_full_disk_at_the_start_is_a_sentence_and_keeps_nobody_out(folder, monkeypatch, name):
  def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    if name == locks.LOCK:
      patch.setattr(locks.os, 'pwrite', full)
    else:
      patch.setattr(ownership.guarded_files, 'write_atomically', full)
    with pytest.raises(UserError, match='cannot be written .*No space left.*: make room'):
      take(folder)
  mine = take(folder)
  mine.release()


def test_what_a_fenced_process_wrote_is_left_out_and_named(folder, caplog):
  """Epoch 1 went on to step 9 while epoch 2 resumed from 6 and epoch 4 from 8; lines of earlier versions have none."""
  folder.mkdir()
  begun = [epochs.Epoch(number, 'h', 1, 's', str(number), at) for number, at in ((1, 0), (2, 6), (3, None), (4, 8))]
  (folder / epochs.EPOCHS).write_text(epochs.Epochs(tuple(begun)).to_json())
  lines = [(5, None), (6, 1), (7, 1), (7, 2), (8, 2), (9, 2), (9, 1), (9, 4), (10, 3), (10, 4)]
  text = [{'step': step} | ({} if epoch is None else {'fencing_epoch': epoch}) for step, epoch in lines]
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in text))
  kept = [(line['step'], line.get('fencing_epoch')) for line in read_metrics(folder)]
  # Step 5 was written by nobody's epoch, but before step 0 of epoch 1: an earlier version's run began anew there.
  assert kept == [(6, 1), (7, 2), (8, 2), (9, 4), (10, 4)]
  assert '5 lines (steps 5, 7, 9–10) of a process that had lost the run' in caplog.text
  caplog.clear()
  assert [line['step'] for line in history(folder, 8).kept] == [6, 7, 8] and not caplog.text  # A resume says it once.
  # Of what comes after, a resume at 8 has no need anyway.
  assert f'{folder}/metrics.jsonl: 2 lines (steps 5, 7) of a process' in ' '.join(history(folder, 8).remarks(8))
  assert not any('another' in remark for remark in read_lines(folder, 4).remarks(4))


def test_starts_that_are_forgotten_fence_nothing_more(folder):
  """However often a run is started from one checkpoint; by all epochs and steps, beside a record that forgets none."""
  rng = random.Random(0)
  for _ in range(50):
    whole, short = [], epochs.Epochs()
    for number in range(1, rng.randint(2, 12)):
      short = short.begun(epochs.Epoch(number, 'h', 1, 's', str(number)))
      if rng.random() < 0.8:
        whole.append((number, rng.randrange(5)))
        short = short.resumed(whole[-1][1])
    for number in range(13):
      for step in range(7):
        fenced = any(other > number and step > at for other, at in whole)
        assert (short.fenced(number, step) is not None) == fenced
    assert len(short.epochs) <= 6


def test_a_run_of_an_earlier_version_is_read_and_resumed(folder):
  folder.mkdir()
  (folder / 'metrics.jsonl').write_text(''.join(f'{{"step": {step}}}\n' for step in range(4)))
  assert [line['step'] for line in read_metrics(folder)] == [0, 1, 2, 3]
  config = Config()
  config.trainer.tensorboard = False
  with ownership.sole_user(folder) as mine:
    mine.resumed(2)
    writer = metrics.MetricsWriter(folder, config, resume_step=2, ownership=mine)
    writer.write(3, {'a': 1.0, 'state_digest': 'f00'})
    assert mine.record().epochs[-1].resumed_from == 2
  lines = read_metrics(folder)
  assert lines[-1] == {'step': 3, 'fencing_epoch': 1, 'a': 1.0, 'state_digest': 'f00'}
  assert [line['step'] for line in lines] == [0, 1, 2, 3]


def test_the_lock_is_renewed_while_the_process_lives(folder, monkeypatch):
  monkeypatch.setattr(ownership, 'LEASE_S', 0.02)
  beaten = threading.Event()
  renew = ownership.Ownership.renew

  def noted(self):
    renew(self)
    beaten.set()

  monkeypatch.setattr(ownership.Ownership, 'renew', noted)
  with ownership.sole_user(folder):
    assert beaten.wait(30)
  end = lock_owner.parse((folder / locks.LOCK).read_bytes())
  assert end.released and end.beat >= 1
