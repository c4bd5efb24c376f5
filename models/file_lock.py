"""A file lock that is released when its process ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import errno
import fcntl
import os
import pathlib

_CANNOT_LOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def held(path: pathlib.Path, busy: Callable[[], None]) -> Iterator[None]:
  """Hold a lock on a file, which is created if needed and removed at the end.

  On a file system without locks, processes do not exclude each other.

  Args:
    path: path of the file, in an existing local directory.
    busy: called if another process holds the lock; unless it raises, the lock is then waited for.

  Raises:
    OSError: the file cannot be created.
  """
  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
      _lock(descriptor, busy)
      if not is_at(descriptor, path):  # The previous holder has just removed it.
        continue
      try:
        yield
      finally:
        path.unlink(missing_ok=True)
      return
    finally:
      os.close(descriptor)


def _lock(descriptor: int, busy: Callable[[], None]) -> None:
  try:
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      busy()
      fcntl.flock(descriptor, fcntl.LOCK_EX)
  except OSError as error:
    if error.errno not in _CANNOT_LOCK:
      raise


def is_at(descriptor: int, path: os.PathLike) -> bool:
  """Return whether an open file is still the one at a path."""
  try:
    return os.path.samestat(os.fstat(descriptor), os.lstat(path))
  except FileNotFoundError:
    return False
