"""The parts of a Python installation that programs need: the standard library and some packages, found and copied.

On a disk, a name that was looked up once is found faster afterwards, and so is a page that was read. A file system in
memory has no such cache: there all accesses take the same time. Loaded by path; standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import os
import re
import stat

# Parts of the standard library that no graded program needs and that take half of its space.
PACKAGES = ('site-packages', 'dist-packages')  # Package directories within it.
LEFT_OUT = (*PACKAGES, 'test', 'idlelib', 'ensurepip')
STATIC_LIBRARY = 'config-'
PAGE = 4096
# Matches requirements that do not belong to an extra; see the core metadata specifications of Python packages.
_REQUIREMENT = re.compile(r'^Requires-Dist: *([\w.-]+)(?!.*\bextra\b)', re.MULTILINE)

File = tuple[str, os.stat_result]


def files(standard: Sequence[str], packages: Sequence[str], names: set[str]) -> list[File]:
  """Return the files and directories to copy; every entry follows its parent directory.

  Args:
    standard: directories of the standard library.
    packages: package directories.
    names: modules to copy from the package directories, together with all that their distributions require.
  """
  found: list[str] = []
  for directory in standard:
    names_here = [
      name for name in os.listdir(directory) if name not in LEFT_OUT and not name.startswith(STATIC_LIBRARY)
    ]
    found += [os.path.join(directory, name) for name in sorted(names_here)]
  for directory in packages:
    found += [os.path.join(directory, entry) for entry in sorted(entries(directory, names))]
  return list(_below(found))


def size(found: Iterable[File]) -> int:
  """Return the bytes of memory that the copies take."""
  return sum(-(-status.st_size // PAGE) * PAGE for _, status in found if stat.S_ISREG(status.st_mode))


def copy(found: Iterable[File], to: str) -> None:
  """Copy files, directories and links, with their paths, below the directory `to`; skips unreadable ones."""
  for path, status in found:
    os.makedirs(os.path.dirname(to + path), exist_ok=True)
    if stat.S_ISDIR(status.st_mode):
      os.makedirs(to + path, exist_ok=True)
    elif stat.S_ISLNK(status.st_mode):
      os.symlink(os.readlink(path), to + path)
    elif stat.S_ISREG(status.st_mode):
      with contextlib.suppress(PermissionError):
        _copy_file(path, status, to + path)


def _copy_file(path: str, status: os.stat_result, to: str) -> None:
  with open(path, 'rb', 0) as source, open(to, 'wb', 0) as target:
    done = 0
    while copied := os.sendfile(target.fileno(), source.fileno(), done, status.st_size - done):
      done += copied
  os.chmod(to, stat.S_IMODE(status.st_mode) & 0o555)
  # Compiled modules depend on their source's time.
  os.utime(to, ns=(status.st_mtime_ns, status.st_mtime_ns))


def _below(paths: Iterable[str]) -> Iterator[File]:
  for path in paths:
    try:
      status = os.lstat(path)
    except FileNotFoundError:  # A record may list removed files.
      continue
    yield path, status
    if stat.S_ISDIR(status.st_mode):
      with contextlib.suppress(PermissionError):
        yield from _below(sorted(os.path.join(path, name) for name in os.listdir(path)))


def entries(directory: str, names: set[str]) -> set[str]:
  """Return the entries to copy from a package directory, relative to it."""
  here = os.listdir(directory)
  records = {name: _record(os.path.join(directory, name)) for name in here if name.endswith('.dist-info')}
  by_name = {_normalized(info.partition('-')[0]): info for info in records}
  todo = [info for info, (own, _) in records.items() if names & {_module(entry) for entry in own}]
  chosen: set[str] = set()
  while todo:
    info = todo.pop()
    if info not in chosen:
      chosen.add(info)
      todo += [by_name[name] for name in map(_normalized, records[info][1]) if name in by_name]
  found = {entry for info in chosen for entry in records[info][0]}
  return found | {name for name in here if _module(name) in names}  # Includes modules without a record.


def _record(info: str) -> tuple[set[str], list[str]]:
  """Return the entries of a distribution and the names of the distributions that it requires."""
  texts = {}
  for name in ('RECORD', 'METADATA'):
    try:
      with open(os.path.join(info, name), encoding='utf-8', errors='replace') as file:
        texts[name] = file.read()
    except OSError:
      texts[name] = ''
  found = set()
  for line in texts['RECORD'].splitlines():
    path = line.rpartition(',')[0].rpartition(',')[0].strip('"')
    top, _, rest = path.partition('/')
    if top == '__pycache__' and rest:
      found.add(path)
    elif top not in ('', '.', '..'):
      found.add(top)
  return found, _REQUIREMENT.findall(texts['METADATA'])


def _module(entry: str) -> str:
  """Return the import name of an entry in a package directory if it is a module."""
  return entry.partition('.')[0]


def _normalized(name: str) -> str:
  """Return a distribution's name in the normalized form that is used for comparison."""
  return re.sub(r'[-_.]+', '-', name).lower()
