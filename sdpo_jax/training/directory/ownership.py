"""The ownership of a run directory: only one process at a time writes to it, and one that lost it stops writing.

Three things keep two starts apart:

* `.lock` names the owner. On a disk the file is locked as long as the process lives (lockf); in gs:// it is replaced
  only if no other process has replaced it. The owner renews it every `LEASE_S / BEATS` seconds. A process that is not
  visible from here (on another host, in another container) counts as gone if its lock has not changed for `LEASE_S`
  seconds by the watcher's clock; clocks of two hosts are never compared.
* `epochs.json` holds the fencing epoch, which grows with every start. It is authoritative: a process that is not its
  newest entry has lost the run. `Ownership.check` reads it before anything is published.
* Between that check and the write a process may still be suspended for so long that another one takes over. What it
  then publishes carries an older epoch and a later step than the one from which the newer epoch resumed, and readers
  leave it out (`epochs.Epochs.fenced`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import logging
import threading
import time

from etils import epath
import jax

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import is_local
from sdpo_jax.training.directory import epochs, guarded_files, lock_owner, reconstructed_starts
from sdpo_jax.training.directory.lock_owner import Owner
from sdpo_jax.training.directory.locks import LOCK, FileLock, Lock, ObjectLock, Say, occupied, unwritable

LEASE_S = 60.0  # Seconds without a renewal of its lock after which a process that is not visible counts as gone.
BEATS = 4  # Number of renewals within a lease.

_logger = logging.getLogger('sdpo_jax.ownership')


class RunLostError(UserError):
  """Another process has taken over the run; nothing more may be written."""


@dataclasses.dataclass(frozen=True)
class Clock:
  """The clock and the lease time with which a lock is watched; replaced in tests."""

  now: Callable[[], float] = time.monotonic
  sleep: Callable[[float], None] = time.sleep
  lease_s: float = LEASE_S


class Ownership:
  """The right of a process to write to a run directory; created by `take`."""

  def __init__(
    self, workdir: epath.Path, records: guarded_files.Records, lock: Lock, mine: Owner, seen: guarded_files.Seen
  ):
    self.workdir = workdir
    self._records, self._lock, self._mine, self._seen = records, lock, mine, seen
    self._mutex = threading.RLock()  # Another thread publishes checkpoints.
    self._ending = threading.Event()
    self._beating = threading.Thread(target=self._beat, daemon=True, name='lock')

  @property
  def epoch(self) -> int:
    """The fencing epoch, larger than those of all starts before."""
    return self._mine.fencing_epoch

  def record(self) -> epochs.Epochs:
    """Return the record of the run's starts, of which this one is the newest.

    Raises:
      RunLostError: this start is no longer the newest.
      UserError: `epochs.json` cannot be read.
    """
    with self._mutex:
      self._seen = self._records.read(epochs.EPOCHS)
      if self._seen.content is None:
        raise RunLostError(
          f'{self.workdir / epochs.EPOCHS} was removed while the run was going on, so that another process may have '
          'taken it over: nothing more is written; start the same command again.'
        )
      try:
        record = epochs.parse(self._seen.content, self.workdir / epochs.EPOCHS)
      except epochs.DamagedEpochsError as error:
        raise RunLostError(
          f'{error} It was damaged while the run was going on, so that another process may have taken it over: nothing '
          'more is written; start the same command again.'
        ) from error
      newest = record.epochs[-1] if record.epochs else None
      if newest is None or newest.token != self._mine.token:
        raise RunLostError(
          f'Another process has taken over the run in {self.workdir} ({newest or "unknown"}; fencing epoch '
          f'{record.newest}, this one has {self.epoch}): this one ends and writes nothing more.'
        )
      return record

  def check(self) -> None:
    """Check that this process still owns the run; call this right before publishing anything.

    Raises:
      RunLostError: another process has taken it over.
      UserError: `epochs.json` cannot be read.
    """
    self.record()

  def resumed(self, step: int) -> None:
    """Record the step from which this epoch resumes (0: it begins a run); call this before publishing anything.

    Raises:
      RunLostError: as in `check`.
      UserError: the record cannot be written.
    """
    self._update(lambda record: record.resumed(step))

  def published(self, step: int) -> None:
    """Record that the checkpoint of a step is published, so that a later start notices if it is lost.

    Raises:
      RunLostError: as in `check`.
      UserError: the record cannot be written.
    """
    self._update(lambda record: dataclasses.replace(record, published=step))

  def restarting(self, number: int | None, published: int) -> None:
    """Record that results are being moved to `before_restart/<number>` (None: no longer); errors as in `published`."""
    self._update(lambda record: dataclasses.replace(record, restarting=number, published=published))

  def _update(self, change: Callable[[epochs.Epochs], epochs.Epochs]) -> None:
    with self._mutex:
      while True:
        content = change(self.record()).to_json().encode()
        if content == self._seen.content or _written(self._records, self.workdir, content, self._seen):
          return

  def start(self) -> None:
    """Start the thread that renews the lock."""
    self._beating.start()

  def _beat(self) -> None:
    while not self._ending.wait(LEASE_S / BEATS):
      try:
        self.renew()
      except RunLostError:
        return  # The main thread notices before it publishes anything.
      except (OSError, UserError) as error:  # Try again: a file server may recover before the lease is over.
        _logger.warning('%s cannot be renewed: %s', self.workdir / LOCK, first_line(error))

  def renew(self) -> None:
    """Renew the lock, to show that this process lives.

    Raises:
      RunLostError: another process has taken the run over.
      OSError: the lock cannot be written.
      UserError: the lock, or `epochs.json`, cannot be read.
    """
    self._write_lock(dataclasses.replace(self._mine, beat=self._mine.beat + 1))

  def release(self) -> None:
    """Mark the lock as released, so that no other process waits for this one, and close it."""
    self._ending.set()
    if self._beating.is_alive():
      self._beating.join(timeout=5.0)
    if not self._beating.is_alive():  # Otherwise it hangs in a file system or network, as this thread would, too.
      with contextlib.suppress(OSError, UserError):  # A lock that is not released is later found to be stale.
        self._write_lock(dataclasses.replace(self._mine, released=True))
    self._lock.close()

  def _write_lock(self, mine: Owner) -> None:
    with self._mutex:
      found = lock_owner.parse(self._lock.read())
      self.check()  # If another process takes over after this, the object has another generation and the write fails.
      if found is not None and found.fencing_epoch > mine.fencing_epoch:
        raise RunLostError(f'Another process is taking over the run in {self.workdir} ({found}).')
      if self._lock.write(mine.to_json().encode()):
        self._mine = mine


@contextlib.contextmanager
def sole_user(workdir: epath.Path, say: Say = _logger.warning) -> Iterator[Ownership | None]:
  """Provide the ownership of a run directory on process 0, and None on other processes, while the context lasts.

  The directory is created if needed. Other starts are kept out, since they would mix their lines and checkpoints in.

  Args:
    workdir: directory of the run.
    say: receives sentences for the user.

  Raises:
    UserError: another process trains there, or the directory cannot be written.
  """
  if jax.process_index() != 0:
    yield None
    return
  ownership = take(workdir, say)
  try:
    ownership.start()
    yield ownership
  finally:
    ownership.release()


def take(workdir: epath.Path, say: Say, clock: Clock = Clock()) -> Ownership:
  """Return the ownership of a run directory, taken over from its former owner if that process is gone.

  Raises:
    UserError: another process trains there, or the directory cannot be written.
  """
  records = guarded_files.open_records(workdir)
  lock = FileLock(workdir, say) if is_local(workdir) else ObjectLock(records, workdir, say)
  try:
    content = lock.read()
    former = lock_owner.parse(content)
    if content:
      _await_end(workdir, lock, content, former, say, clock)
    mine = lock_owner.this_process(
      max(reconstructed_starts.largest_epoch(workdir), former.fencing_epoch if former else 0) + 1
    )
    if not lock.write(mine.to_json().encode()):
      raise occupied(workdir, lock_owner.parse(lock.read()))
    mine, seen = _begin(workdir, records, lock, mine, say)
    return Ownership(workdir, records, lock, mine, seen)
  except OSError as error:
    lock.close()
    raise unwritable(workdir, error) from error
  except BaseException:
    lock.close()
    raise


def _await_end(workdir: epath.Path, lock: Lock, content: bytes, former: Owner | None, say: Say, clock: Clock) -> None:
  """Block until the process that the lock names is known to be gone.

  Raises:
    UserError: that process is alive.
  """
  if former is None:
    what, found = 'a process that its lock does not name', lock_owner.ELSEWHERE
  else:
    what, found = str(former), lock_owner.state(former)
  if isinstance(lock, FileLock) and lock.exclusive and (former is None or lock_owner.same_kernel(former)):
    found = lock_owner.GONE  # It held the file lock, which this process holds now.
  if former is not None and former.released:
    return
  if found in (lock_owner.RUNNING, lock_owner.STOPPED):
    raise occupied(workdir, former)
  if found == lock_owner.ELSEWHERE:
    say(f'{workdir} was last used by {what}: waiting {clock.lease_s:g} seconds for a sign of life …')
    start = clock.now()
    while clock.now() - start < clock.lease_s:
      clock.sleep(min(1.0, clock.lease_s / 20))
      now = lock.read()
      if now != content:
        former = lock_owner.parse(now)
        if former is not None and former.released:
          return
        raise occupied(workdir, former)
  say(f'The process that last trained in {workdir} ended without releasing it ({what}): this one takes over.')


def _begin(
  workdir: epath.Path, records: guarded_files.Records, lock: Lock, mine: Owner, say: Say
) -> tuple[Owner, guarded_files.Seen]:
  """Write a new epoch to `epochs.json`; return this process with that epoch, and the new content of the file."""
  while True:
    seen = records.read(epochs.EPOCHS)
    record = reconstructed_starts.recorded(workdir, seen.content, say)
    found = lock_owner.parse(lock.read())
    if found is None or found.token != mine.token:  # Another start took the lock after this one's lease had expired.
      raise occupied(workdir, found)
    number = max(record.newest + 1, mine.fencing_epoch)
    begun = record.begun(epochs.Epoch(number, mine.host, mine.pid, mine.since, mine.token))
    written = _written(records, workdir, begun.to_json().encode(), seen)
    if written is not None:
      return dataclasses.replace(mine, fencing_epoch=number), written


def _written(
  records: guarded_files.Records, workdir: epath.Path, content: bytes, seen: guarded_files.Seen
) -> guarded_files.Seen | None:
  try:
    return records.replace(epochs.EPOCHS, content, seen)
  except OSError as error:
    raise unwritable(workdir, error) from error
