"""The lock of a run directory, which names its owner and keeps others out: a locked file, or an object in a store."""

from __future__ import annotations

from collections.abc import Callable
import errno
import fcntl
import os
import stat
from typing import ClassVar

from etils import epath

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import is_full, make_directory
from sdpo_jax.models import file_lock
from sdpo_jax.training.directory import guarded_files, lock_owner
from sdpo_jax.training.directory.lock_owner import Owner

LOCK = '.lock'  # The file is not removed at the end of the run.
_LOCK_BYTES = 1024
WAY_OUT = 'wait until it ends, or choose another --workdir'

Say = Callable[[str], None]


class FileLock:
  """A file that is locked as long as this process has it open; it is written in place, to keep the lock.

  This process must not close another descriptor of the file meanwhile, which would release the lock.
  """

  _held: ClassVar[set[str]] = set()  # Directories locked by this process; file locks do not exclude their own process.

  def __init__(self, workdir: epath.Path, say: Say):
    """Lock the file.

    Raises:
      UserError: another process holds the lock, or the file cannot be opened.
    """
    self._path = workdir / LOCK
    self._descriptor = -1
    self._directory = os.path.realpath(workdir)
    if self._directory in FileLock._held:
      raise UserError(f'This process is already training in {workdir}: {WAY_OUT}.')
    try:
      make_directory(workdir)
      self._open()
      while not self._lock(workdir, say):  # The file was replaced between open and lock.
        self.close()
        self._open()
    except OSError as error:
      self.close()
      if error.errno == errno.ELOOP:
        raise UserError(f'{self._path} is a link, which a run does not write through: remove it.') from error
      if isinstance(error, IsADirectoryError):
        raise UserError(f'{self._path} is a folder where the run needs a file: remove it.') from error
      raise unwritable(workdir, error) from error
    except UserError:
      self.close()
      raise
    FileLock._held.add(self._directory)

  def _open(self) -> None:
    # O_NONBLOCK: if the path is a pipe, do not wait for its other end.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    self._descriptor = os.open(self._path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
      raise UserError(f'{self._path} is a pipe or a device where the run needs a file: remove it.')

  def _lock(self, workdir: epath.Path, say: Say) -> bool:
    """Lock the file; return False if the path has meanwhile become another file."""
    self.exclusive = True
    try:
      # Unlike a lock of flock, this one is not inherited and kept by child processes.
      fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
      raise occupied(workdir, lock_owner.parse(self.read())) from error
    except OSError as error:
      self.exclusive = False
      say(f'{workdir} cannot be locked ({first_line(error)}): see that no second process trains there.')
    return file_lock.is_at(self._descriptor, self._path)

  def read(self) -> bytes | None:
    """Return the content of the lock."""
    return os.pread(self._descriptor, 1 << 16, 0)

  def write(self, content: bytes) -> bool:
    """Replace the content; return True, since no other process can have replaced it."""
    padded = content.ljust(_LOCK_BYTES)  # Of constant length and within a page: readers never see half of it.
    os.pwrite(self._descriptor, padded, 0)
    os.ftruncate(self._descriptor, len(padded))
    os.fsync(self._descriptor)  # So that other hosts see it on a file server.
    return True

  def close(self) -> None:
    """Release the lock by closing the file."""
    if self._descriptor >= 0:
      os.close(self._descriptor)
      self._descriptor = -1
      FileLock._held.discard(self._directory)


class ObjectLock:
  """An object in a store; it excludes nobody (`exclusive` is false) if the store has no conditional writes."""

  def __init__(self, records: guarded_files.Records, workdir: epath.Path, say: Say):
    self._records, self._seen = records, guarded_files.Seen(None)
    self.exclusive = records.exclusive
    if not self.exclusive:
      say(f'{workdir} cannot be locked: see that no second process trains there.')

  def read(self) -> bytes | None:
    """Return the content of the lock; None if there is no such object."""
    self._seen = self._records.read(LOCK)
    return self._seen.content

  def write(self, content: bytes) -> bool:
    """Replace the content last read or written; return False if another process has replaced it."""
    seen = self._records.replace(LOCK, content, self._seen)
    self._seen = seen or self._seen
    return seen is not None

  def close(self) -> None:
    """Do nothing: the object stays, and `Ownership.release` has marked it as released."""


Lock = FileLock | ObjectLock


def occupied(workdir: epath.Path, other: Owner | None) -> UserError:
  """Return the error about another process that trains in a directory, described if it is known."""
  if other is None or other.released:
    return UserError(f'Another process is training in {workdir}: {WAY_OUT}.')
  if lock_owner.state(other) == lock_owner.STOPPED:
    return UserError(
      f'Another process is training in {workdir} ({other}), but is suspended: continue it (kill -CONT {other.pid}) or '
      f'end it (kill -KILL {other.pid}), or choose another --workdir.'
    )
  return UserError(f'Another process is training in {workdir} ({other}): {WAY_OUT}.')


def unwritable(workdir: epath.Path, error: OSError | ValueError) -> UserError:
  """Return the error for a run directory that cannot be written."""
  way_out = 'make room, then start the same command again' if is_full(error) else 'choose another --workdir'
  return UserError(f'The run directory {workdir} cannot be written ({first_line(error)}): {way_out}.')
