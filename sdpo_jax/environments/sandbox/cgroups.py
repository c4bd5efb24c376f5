"""Control groups: kernel limits on the memory and processes of a zygote and all its programs together.

Every program has its own limits (zygote.py). These cover what such limits do not count, such as page tables and inodes,
and are the last resort if one of them fails: then the kernel kills a process in the group, not the training process.
Uses version 2 of the interface where this process may create a group, else version 1; see `man 7 cgroups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import os
import pathlib
import secrets
import time

from sdpo_jax.environments.sandbox import leftovers

CONTROLLERS = ('memory', 'pids')
REMOVAL_S = 2.0  # Seconds to wait for killed processes to leave a group.
MOUNTS, OWN = pathlib.Path('/proc/self/mountinfo'), pathlib.Path('/proc/self/cgroup')


@dataclasses.dataclass(frozen=True)
class Group:
  """A control group: one directory under version 2, one for each controller under version 1."""

  version: int
  memory_bytes: int  # The limit with which it was made.
  controllers: tuple[str, ...]
  directories: tuple[pathlib.Path, ...]
  held: tuple[int, ...]  # Descriptors whose locks show other processes that the directories are in use.

  @contextlib.contextmanager
  def doors(self) -> Iterator[list[int]]:
    """Provide descriptors to which a process writes '0' to enter, even one that cannot see the directories."""
    opened: list[int] = []
    try:
      with contextlib.suppress(FileNotFoundError):  # The group has been removed.
        for directory in self.directories:
          opened.append(os.open(directory / 'cgroup.procs', os.O_WRONLY))
      yield opened
    finally:
      for descriptor in opened:
        os.close(descriptor)

  def allow(self, memory_bytes: int) -> None:
    """Allow the group this much memory beyond the limit with which it was made."""
    for directory in self.directories:
      # Version 1 rejects a memory limit above the limit of memory and swap.
      for name in ('memory.max', 'memory.memsw.limit_in_bytes', 'memory.limit_in_bytes'):
        if (directory / name).exists():
          (directory / name).write_text(str(self.memory_bytes + memory_bytes))

  def remove(self) -> None:
    """Remove the group.

    Under version 2, processes in it are killed; under version 1, the group stays if there are any.
    """
    deadline = time.monotonic() + REMOVAL_S
    for directory in self.directories:
      with contextlib.suppress(OSError):  # Linux before 5.14 has no such file.
        (directory / 'cgroup.kill').write_text('1')
      while not _removed(directory) and time.monotonic() < deadline:
        time.sleep(0.01)
    for descriptor in self.held:
      os.close(descriptor)


def create(memory_bytes: int, processes: int) -> Group | None:
  """Create a group with these limits; return None if this process may not."""
  limits = {'memory': memory_bytes, 'pids': processes}
  for make, parents in ((_create_unified, _unified()), (_create_split, _split())):
    if parents and (group := make(parents, limits)) is not None:
      return group
  return None


def _create_unified(parents: Sequence[pathlib.Path], limits: dict[str, int]) -> Group | None:
  """Create a group of version 2 in the first of `parents` that allows it and has both controllers."""
  required = {'memory.max': str(limits['memory']), 'pids.max': str(limits['pids'])}
  optional = {'memory.swap.max': '0', 'memory.oom.group': '0', 'io.weight': 'default 10'}
  for parent in parents:
    if (directory := _make(parent, required, optional)) is not None:
      return _group(2, limits, {name: directory for name in CONTROLLERS})
  return None


def _create_split(parents: dict[str, pathlib.Path], limits: dict[str, int]) -> Group | None:
  """Create a group of version 1 with the available controllers; return None if there are none."""
  files = {'memory': ('memory.limit_in_bytes', 'memory.memsw.limit_in_bytes'), 'pids': ('pids.max',)}
  made: dict[str, pathlib.Path] = {}
  for name, parent in parents.items():
    first, *others = files[name]
    limit = str(limits[name])
    if (directory := _make(parent, {first: limit}, dict.fromkeys(others, limit))) is not None:
      made[name] = directory
  return _group(1, limits, made) if made else None


def _make(parent: pathlib.Path, required: dict[str, str], optional: dict[str, str]) -> pathlib.Path | None:
  """Make a directory in `parent` with these contents of its files, the optional ones where they exist.

  Returns None, and undoes the attempt, if that is not allowed.
  """
  with contextlib.suppress(OSError):
    leftovers.remove_abandoned(parent, lambda path: _removed(pathlib.Path(path)))
    directory = parent / f'{leftovers.PREFIX}{os.getpid()}-{secrets.token_hex(4)}'
    directory.mkdir()
    try:
      # Version 2 alone has this file. A parent that holds processes must not have groups with controllers.
      with contextlib.suppress(OSError):
        if set(CONTROLLERS) - set((directory / 'cgroup.controllers').read_text().split()):
          (parent / 'cgroup.subtree_control').write_text(' '.join(f'+{name}' for name in CONTROLLERS))
      for name, value in {**required, **optional}.items():
        if name in required or (directory / name).exists():
          (directory / name).write_text(value)
    except OSError:
      _removed(directory)
    else:
      return directory
  return None


def _unified() -> list[pathlib.Path]:
  """Return this process's own group of version 2 and its parent group; empty if version 2 is not mounted."""
  own = _own().get('')
  for root, point, kind, _ in _mounts():
    if kind == 'cgroup2' and own is not None:
      directory = _below(point, root, own)
      return [directory] if directory == point else [directory, directory.parent]
  return []


def _split() -> dict[str, pathlib.Path]:
  """Return this process's own group for each controller of version 1."""
  own, found = _own(), {}
  for root, point, kind, options in _mounts():
    for name in CONTROLLERS:
      if kind == 'cgroup' and name in options and name in own:
        found[name] = _below(point, root, own[name])
  return found


def _mounts() -> Iterator[tuple[str, pathlib.Path, str, list[str]]]:
  """Yield root, mount point, file system type and options of every mount; see proc_pid_mountinfo(5)."""
  with contextlib.suppress(OSError):
    for line in MOUNTS.read_text().splitlines():
      before, _, after = line.partition(' - ')
      fields, (kind, _, options) = before.split(), after.split(' ', 2)
      yield fields[3], pathlib.Path(fields[4]), kind, options.split(',')


def _own() -> dict[str, str]:
  """Return this process's group path by controller; the key of version 2 is ''."""
  found: dict[str, str] = {}
  with contextlib.suppress(OSError):
    for line in OWN.read_text().splitlines():
      _, names, path = line.split(':', 2)
      found |= dict.fromkeys(names.split(','), path)
  return found


def _below(point: pathlib.Path, root: str, path: str) -> pathlib.Path:
  """Return the directory of the group `path` in a hierarchy whose `root` is mounted at `point`."""
  relative = os.path.relpath(path, root)
  return point if relative.startswith('..') else point / relative


def _group(version: int, limits: dict[str, int], directories: dict[str, pathlib.Path]) -> Group:
  """Return a group with these directories by controller, and lock them."""
  different = tuple(dict.fromkeys(directories.values()))
  return Group(version, limits['memory'], tuple(directories), different, tuple(map(leftovers.hold, different)))


def _removed(directory: pathlib.Path) -> bool:
  """Remove a group without processes; return whether it is gone."""
  try:
    directory.rmdir()
  except OSError as error:
    return isinstance(error, FileNotFoundError)
  return True
