"""Detection of directories that a killed process left behind.

A process holds a lock on each of its directories, which the kernel releases when the process ends for any reason.
Unlike a process id, a lock is never reused by another process, and it works between processes that cannot see each
other, such as those in two containers with the same directory.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import fcntl
import os
import pathlib
import time

PREFIX = 'sdpo-sandbox-'  # Only directories with this prefix are removed.
STALE_S = 60.0  # A younger directory may not be locked yet.


def hold(directory: str | pathlib.Path) -> int:
  """Return a descriptor that protects a directory from being removed as abandoned until it is closed.

  On a file system without locks, no directory counts as abandoned.

  Raises:
    OSError: the directory does not exist.
  """
  descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
  with contextlib.suppress(OSError):
    fcntl.flock(descriptor, fcntl.LOCK_SH)
  return descriptor


def remove_abandoned(parent: str | pathlib.Path, remove: Callable[[str], object]) -> None:
  """Remove this user's sandbox directories in `parent` that no process holds.

  Args:
    parent: a directory, which may be missing.
    remove: removes a directory, given its path; if it raises OSError, the directory stays.
  """
  with contextlib.suppress(OSError):
    names = [entry.name for entry in os.scandir(parent) if entry.name.startswith(PREFIX)]
    for name in names:
      _remove_if_abandoned(os.path.join(parent, name), remove)


def _remove_if_abandoned(directory: str, remove: Callable[[str], object]) -> None:
  # It has just been removed, is held, belongs to another user, or is not a directory.
  with contextlib.suppress(OSError):
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
      status = os.fstat(descriptor)
      if status.st_uid == os.geteuid() and time.time() - status.st_mtime > STALE_S:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(directory)
    finally:
      os.close(descriptor)
