"""Accounting and removal of what programs leave in scratch directories on a shared file system.

Where namespaces are allowed, programs have a file system of their own and none of this is needed (view.py). Both tasks
are generators that yield after every small step, so that urgent work can run in between. Loaded by path; standard
library only.
"""

from __future__ import annotations

from collections.abc import Generator
import contextlib
import os
import stat

MAX_DEPTH = 64  # Nested directories; trees of thousands take seconds to remove.
DELETED = ' (deleted)'


def survey(directory: str, pid: int, proc: int | None, limit: int, max_entries: int) -> Generator[None, None, bool]:
  """Return whether a program has more than `limit` bytes or `max_entries` files, including files without a name.

  A directory that cannot be listed because of its mode, or is deeper than `MAX_DEPTH`, counts as too much; a file that
  is only mapped counts as `limit` bytes, since its size is unknown.

  Args:
    directory: the program's scratch directory.
    pid: the program's process id.
    proc: descriptor of /proc; None: there is none.
    limit: bytes in total; no single file is larger (RLIMIT_FSIZE).
    max_entries: limit of files and directories.
  """
  total = entries = 0
  directories = [(directory, 0)]
  while directories:
    path, depth = directories.pop()
    if depth > MAX_DEPTH:
      return True
    try:
      with os.scandir(path) as listing:
        for entry in listing:
          yield
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
  if proc is not None:
    files = yield from held(directory, pid, proc)
    total += sum(limit if size is None else size for size in files.values())
    entries += len(files)
  return total > limit or entries > max_entries


def held(directory: str, pid: int, proc: int) -> Generator[None, None, dict[tuple[int, int], int | None]]:
  """Find the files of a program that no longer have a name but are open or mapped.

  The first thread may have ended and then shows no descriptors or memory: any other thread shows the same.

  Returns:
    bytes by (device, inode); None where unknown.
  """
  files: dict[tuple[int, int], int | None] = {}
  for task in _names(f'{pid}/task', proc):
    try:
      with open(os.open(f'{pid}/task/{task}/maps', os.O_RDONLY, dir_fd=proc), errors='replace') as file:
        maps = file.read()
    except OSError:
      continue
    if not maps:
      continue
    for line in maps.splitlines():
      yield
      fields = line.split(None, 5)
      if len(fields) == 6 and fields[5].endswith(DELETED) and fields[5].startswith(directory + '/'):
        major, minor = (int(part, 16) for part in fields[3].split(':'))
        files[os.makedev(major, minor), int(fields[4])] = None
    for name in _names(f'{pid}/task/{task}/fd', proc):
      yield
      try:
        status = os.stat(f'{pid}/task/{task}/fd/{name}', dir_fd=proc)
      except OSError:
        continue  # Closed meanwhile.
      if stat.S_ISREG(status.st_mode) and not status.st_nlink:
        files[status.st_dev, status.st_ino] = status.st_blocks * 512
    break
  return files


def _names(path: str, here: int) -> list[str]:
  """Return the names in a directory below the open one `here`; none if it is gone."""
  with contextlib.suppress(OSError):
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
    try:
      return os.listdir(opened)
    finally:
      os.close(opened)
  return []


def remove(path: str) -> None:
  """Remove a tree as `removal` does, in one go."""
  for _ in removal(path):
    pass


def removal(path: str) -> Generator[None, None, bool]:
  """Remove a tree of any depth and modes without following links; nothing may use it any more."""
  parent, name = os.path.split(path)
  here = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
  levels = [[(name, False)]]  # Names to remove in each directory, and whether they were emptied.
  try:
    while levels:
      yield
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
          levels.append([(inner, False) for inner in (yield from empty(here))])
  finally:
    os.close(here)
  return True


def enter(name: str, here: int) -> int:
  """Return a descriptor of the directory `name` in `here`; closes `here` and gives the owner all rights to `name`."""
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


def empty(here: int) -> Generator[None, None, list[str]]:
  """Unlink everything but directories in the open directory `here`; return the names of the directories."""
  inner = []
  with os.scandir(here) as listing:
    for entry in listing:
      yield
      if entry.is_dir(follow_symlinks=False):
        inner.append(entry.name)
      else:
        os.unlink(entry.name, dir_fd=here)
  return inner
