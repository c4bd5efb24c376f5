"""What programs need of a Python installation: its standard library and some packages, found and copied.

On a disk, a name that somebody has looked up is found faster from then on, and so is a page that somebody has read. A
file system in memory has no such memory of its own: there everything takes the same time. Loaded by path; standard
library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import os
import re
import stat

# Of the standard library, what no graded program needs and takes half of the space.
PACKAGES = ('site-packages', 'dist-packages')  # Directories of packages within it.
LEFT_OUT = (*PACKAGES, 'test', 'idlelib', 'ensurepip')
STATIC_LIBRARY = 'config-'
PAGE = 4096
# A requirement that is not one of an extra alone; see the core metadata specifications of Python packages.
_REQUIREMENT = re.compile(r'^Requires-Dist: *([\w.-]+)(?!.*\bextra\b)', re.MULTILINE)

File = tuple[str, os.stat_result]


def files(standard: Sequence[str], packages: Sequence[str], names: set[str]) -> list[File]:
  """Return the files and directories to copy, every one after the directory it lies in.

  Args:
    standard: directories of the standard library.
    packages: directories of packages.
    names: of the modules that are wanted from these; what their distributions require comes along.
  """
  found: list[str] = []
  for directory in standard:
    found += [os.path.join(directory, name) for name in sorted(os.listdir(directory)) if not _left_out(name)]
  for directory in packages:
    found += [os.path.join(directory, entry) for entry in sorted(entries(directory, names))]
  return list(_below(found))


def size(found: Iterable[File]) -> int:
  """Bytes that copies take in memory."""
  return sum(-(-status.st_size // PAGE) * PAGE for _, status in found if stat.S_ISREG(status.st_mode))


def copy(found: Iterable[File], to: str) -> None:
  """Copy files, directories and links, under their paths, below the directory `to`; not what cannot be read."""
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
  # Compiled modules are those of a source of that time.
  os.utime(to, ns=(status.st_mtime_ns, status.st_mtime_ns))


def _below(paths: Iterable[str]) -> Iterator[File]:
  for path in paths:
    try:
      status = os.lstat(path)
    except FileNotFoundError:  # A record may name what has been removed.
      continue
    yield path, status
    if stat.S_ISDIR(status.st_mode):
      with contextlib.suppress(PermissionError):
        yield from _below(sorted(os.path.join(path, name) for name in os.listdir(path)))


def entries(directory: str, names: set[str]) -> set[str]:
  """Return what is to be copied of a directory of packages, relative to it."""
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
  return found | {name for name in here if _module(name) in names}  # Also what no record lists.


def _record(info: str) -> tuple[set[str], list[str]]:
  """Return the entries of a distribution, and the names of those that it requires."""
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


def _left_out(name: str) -> bool:
  return name in LEFT_OUT or name.startswith(STATIC_LIBRARY)


def _module(entry: str) -> str:
  """Return the name that an entry of a directory of packages is imported by, if it is a module."""
  return entry.partition('.')[0]


def _normalized(name: str) -> str:
  """Return the name of a distribution as names are compared."""
  return re.sub(r'[-_.]+', '-', name).lower()
