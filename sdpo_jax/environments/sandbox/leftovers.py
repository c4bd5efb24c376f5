"""Directories that outlive the process that made them if that is killed, and how the next start knows them.

A process holds a lock on each of its directories, which the kernel lets go of when the process ends, however it ends.
Unlike a process id it is never taken for that of another, and it is there for processes that do not see one another,
such as those in two containers with the same directory.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import fcntl
import os
import pathlib
import time

PREFIX = 'sdpo-sandbox-'  # Of the names of directories that are removed.
STALE_S = 60.0  # A directory that is younger may not have its lock yet.


def hold(directory: str | pathlib.Path) -> int:
  """Return a descriptor that keeps a directory from being removed as abandoned until it is closed.

  Where a file system has no locks, nothing is found to be abandoned either.

  Raises:
    OSError: there is no such directory.
  """
  descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
  with contextlib.suppress(OSError):
    fcntl.flock(descriptor, fcntl.LOCK_SH)
  return descriptor


def remove_abandoned(parent: str | pathlib.Path, remove: Callable[[str], object]) -> None:
  """Remove the directories of sandboxes of this user in `parent` that nobody holds.

  Args:
    parent: may be missing.
    remove: removes a directory, given its path; one that it raises OSError for stays.
  """
  with contextlib.suppress(OSError):
    names = [entry.name for entry in os.scandir(parent) if entry.name.startswith(PREFIX)]
    for name in names:
      _remove_if_abandoned(os.path.join(parent, name), remove)


def _remove_if_abandoned(directory: str, remove: Callable[[str], object]) -> None:
  try:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
  except OSError:  # It has just been removed, is somebody else's, or is no directory.
    return
  try:
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and time.time() - status.st_mtime > STALE_S:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      remove(directory)
  except OSError:
    return
  finally:
    os.close(descriptor)
