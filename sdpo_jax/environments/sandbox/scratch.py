"""Counts and removes what programs leave in their scratch directories. Loaded by path; standard library only."""

from __future__ import annotations

import os
import stat

MAX_DEPTH = 64  # Directories within directories; trees of thousands take seconds to remove, and others wait meanwhile.


def used(scratch: str, pid: int, limit: int, max_entries: int) -> bool:
  """Whether the files of a program take more than `limit` bytes or `max_entries` names; unlinked open ones count too.

  A directory that cannot be listed, by its mode, or that lies deeper than `MAX_DEPTH`, counts as too much.
  """
  total = entries = 0
  directories = [(scratch, 0)]
  while directories:
    path, depth = directories.pop()
    if depth > MAX_DEPTH:
      return True
    try:
      with os.scandir(path) as listing:
        for entry in listing:
          entries += 1
          total += entry.stat(follow_symlinks=False).st_blocks * 512
          if entries > max_entries or total > limit:
            return True
          if entry.is_dir(follow_symlinks=False):
            directories.append((entry.path, depth + 1))
    except FileNotFoundError:
      continue  # Removed meanwhile.
    except OSError:
      return True
  try:
    for name in os.listdir(f'/proc/{pid}/fd'):
      status = os.stat(f'/proc/{pid}/fd/{name}')
      if stat.S_ISREG(status.st_mode) and not status.st_nlink:
        total += status.st_blocks * 512
  except OSError:
    pass  # It has ended, or there is no /proc, where a tmpfs of that size bounds the files.
  return total > limit


def remove(path: str) -> None:
  """Removes a tree whatever its depth and modes, without following links; nobody may be using it any more."""
  parent, name = os.path.split(path)
  here = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
  levels = [[(name, False)]]  # Names to remove in a directory, and whether they were emptied.
  while levels:
    if not levels[-1]:
      levels.pop()
      if levels:
        here = enter('..', here)
      continue
    name, emptied = levels[-1].pop()
    try:
      os.rmdir(name, dir_fd=here)
    except FileNotFoundError:
      continue
    except OSError:
      if not emptied:
        levels[-1].append((name, True))
        here = enter(name, here)
        levels.append([(inner, False) for inner in empty(here)])
  os.close(here)


def enter(name: str, here: int) -> int:
  """Descriptor of the directory `name` in `here`, which is closed; gives the owner all rights to it."""
  flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
  try:
    inner = os.open(name, flags, dir_fd=here)
  except PermissionError:
    os.chmod(name, 0o700, dir_fd=here)
    inner = os.open(name, flags, dir_fd=here)
  if name != '..':
    os.fchmod(inner, 0o700)
  os.close(here)
  return inner


def empty(here: int) -> list[str]:
  """Unlinks all but directories in the open directory `here`; the names of these."""
  inner = []
  with os.scandir(here) as listing:
    for entry in listing:
      if entry.is_dir(follow_symlinks=False):
        inner.append(entry.name)
      else:
        os.unlink(entry.name, dir_fd=here)
  return inner
