"""A lock that goes with the process that holds it, however that ends."""

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
  """Hold the lock that a file stands for, which is made, and removed at the end.

  On a file system without locks nothing is held: two that do the same at once are not noticed there.

  Args:
    path: of the file, in a local directory that is there.
    busy: called if another process holds it; it is waited for if this returns.

  Raises:
    OSError: the file cannot be made.
  """
  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
      _lock(descriptor, busy)
      if not _is_at(descriptor, path):  # The one before has just removed it.
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


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
  try:
    return os.path.samestat(os.fstat(descriptor), os.lstat(path))
  except FileNotFoundError:
    return False
