"""What a disk may hold after the machine fails: file operations of a real process, recorded, and replayed to any point.

`Recorder` compiles tests/file_operations.c and preloads it into a process. `Disk` replays the operations on a model of
a file system that promises no more than POSIX does: the data of a file are there after an fsync of the file, its name
after an fsync of the directory. Of what was not synced anything may be there or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import ctypes
import dataclasses
import functools
import os
import pathlib
import posixpath
import shutil
import signal
import struct
import subprocess

SOURCE = pathlib.Path(__file__).with_suffix('.c')
KINDS = (
  'start create mkdir write truncate fsync rename link unlink rmdir mark unsupported'
).split()  # As in the enum of the source.
_HEADER = struct.Struct('=IIQQQQQ')
# A tree of files: path below the root → content, None for a directory.
Tree = Mapping[str, bytes | None]


class Recorder:
  """The library that records what the processes do in which it is preloaded."""

  def __init__(self, folder: pathlib.Path):
    """Compiles the library into `folder`.

    Raises:
      OSError, subprocess.CalledProcessError: there is no C compiler, or not one for this system.
    """
    self._library = folder / 'file_operations.so'
    compiler = shutil.which('cc') or shutil.which('gcc') or shutil.which('clang')
    if compiler is None:
      raise FileNotFoundError('no C compiler')
    command = [compiler, '-O1', '-shared', '-fPIC', '-o', self._library, SOURCE, '-ldl', '-lpthread']
    subprocess.run(command, check=True, capture_output=True)

  def environment(self, root: pathlib.Path, log: pathlib.Path) -> dict[str, str]:
    """Return what a process needs in its environment, so that its operations below `root` are appended to `log`."""
    return {
      'LD_PRELOAD': str(self._library),
      'FILE_OPERATIONS_ROOT': str(root),
      'FILE_OPERATIONS_LOG': str(log),
    }


def signal_at(operation: str) -> None:
  """Let this process, which is recorded, get a signal after the first operation that is like this: 'SIGNAL KIND TEXT'.

  One of its paths contains the text, or ends with it if the text ends with a '$'.
  """
  number, kind, text = operation.split(' ', 2)
  ctypes.CDLL(None).file_operations_signal_at(int(signal.Signals[number]), KINDS.index(kind), text.encode())


def mark(text: str) -> None:
  """Note in the log of this process, which is recorded, what it knows at this point."""
  ctypes.CDLL(None).file_operations_mark(text.encode())


@dataclasses.dataclass(frozen=True)
class Operation:
  """A call that changed, named, unnamed or synced a file, or a mark."""

  kind: str
  process: int
  inode: int
  path: str  # Below the root, '' for the root itself; of a mark its text.
  target: str  # The new name.
  offset: int  # Of a write; the size of a truncation.
  data: bytes

  def __str__(self) -> str:
    arrow = f' -> {self.target}' if self.target else ''
    return f'{self.kind} {self.path}{arrow}' + (f' {self.offset}+{len(self.data)}' if self.data else '')


def read_log(log: pathlib.Path) -> list[Operation]:
  """Return what was recorded, in order.

  Raises:
    ValueError: an operation that the model does not know.
  """
  content, place, operations, root = log.read_bytes(), 0, [], ''
  while place < len(content):
    kind, process, inode, offset, *lengths = _HEADER.unpack_from(content, place)
    place += _HEADER.size
    parts = []
    for length in lengths:
      parts.append(content[place : place + length])
      place += length
    path, target = (os.fsdecode(part) for part in parts[:2])
    name = KINDS[kind]
    if name == 'start':
      root, path = path, ''
    elif name != 'mark':
      path, target = (posixpath.relpath(text, root) if text.startswith('/') else text for text in (path, target))
      path = '' if path == '.' else path
    if name == 'unsupported':
      raise ValueError(f'{target} of {path} cannot be replayed')
    operations.append(
      Operation(name, process, inode, path, target if name in ('rename', 'link') else '', offset, parts[2])
    )
  return operations


class _File:
  """The data of a file, those that are synced and those that are not."""

  def __init__(self):
    self._synced = b''
    self._since: list[tuple[int, bytes | None]] = []  # Writes, and truncations to a size, after the last sync.

  def change(self, offset: int, data: bytes | None) -> None:
    self._since.append((offset, data))
    self.__dict__.pop('versions', None)

  def sync(self) -> None:
    self._synced = self.versions['all']
    self._since = []
    self.__dict__.pop('versions', None)

  @functools.cached_property
  def versions(self) -> dict[str, bytes]:
    """What may be there: none of what was not synced, all of it, the first half of it, zeros in its place."""
    if not self._since:
      return dict.fromkeys(DATA, self._synced)
    half = sum(len(data or b'') for _, data in self._since) // 2
    torn = []
    for offset, data in self._since:
      torn.append((offset, data if data is None else data[:half]))
      half -= len(data or b'')
      if half <= 0:
        break
    zeros = [(offset, data if data is None else bytes(len(data))) for offset, data in self._since]
    return {
      'synced': self._synced,
      'all': _changed(self._synced, self._since),
      'torn': _changed(self._synced, torn),
      'zeros': _changed(self._synced, zeros),
    }


DATA = ('synced', 'all', 'torn', 'zeros')


def _changed(content: bytes, changes: list[tuple[int, bytes | None]]) -> bytes:
  content = bytearray(content)
  for offset, data in changes:
    end = offset + len(data or b'')
    content.extend(bytes(max(0, end - len(content))))
    if data is None:
      del content[offset:]
    else:
      content[offset:end] = data
  return bytes(content)


@dataclasses.dataclass
class _Naming:
  """An operation on the names in directories; it is there or not as one, and surely once all of them are synced."""

  entries: list[tuple[_Directory, str, _File | _Directory | None]]
  unsynced: list[_Directory]


class _Directory:
  def __init__(self):
    self.now: dict[str, _File | _Directory] = {}
    self.base: dict[str, _File | _Directory] = {}  # Before the first naming that may be lost.


class Disk:
  """A file system on which operations are replayed, and what of it survives a failure of the machine."""

  def __init__(self):
    self._root = _Directory()
    self._inodes: dict[int, _File | _Directory] = {}
    self._namings: list[_Naming] = []  # From the first one that may be lost on.

  def apply(self, operation: Operation) -> None:
    """Do what was recorded."""
    match operation.kind:
      case 'start':
        self._inodes[operation.inode] = self._root
      case 'create' | 'mkdir':
        made = _File() if operation.kind == 'create' else _Directory()
        self._inodes[operation.inode] = made
        self._name(operation.path, made)
      case 'write':
        self._inodes[operation.inode].change(operation.offset, operation.data)
      case 'truncate':
        self._inodes[operation.inode].change(operation.offset, None)
      case 'fsync':
        self._sync(self._inodes[operation.inode])
      case 'link':
        self._name(operation.target, self._inodes[operation.inode])
      case 'rename':
        self._name(operation.target, self._inodes[operation.inode], instead_of=operation.path)
      case 'unlink' | 'rmdir':
        self._name(operation.path, None)
      case 'mark':
        pass
      case kind:
        raise ValueError(f'{kind} cannot be replayed')

  def _name(self, path: str, node: _File | _Directory | None, instead_of: str | None = None) -> None:
    paths = [(path, node)] if instead_of is None else [(instead_of, None), (path, node)]
    entries = [(self._parent(where), posixpath.basename(where), what) for where, what in paths]
    for directory, name, what in entries:
      _set(directory.now, name, what)
    unsynced = list({id(directory): directory for directory, _, _ in entries}.values())
    self._namings.append(_Naming(entries, unsynced))

  def _parent(self, path: str) -> _Directory:
    directory = self._root
    for name in posixpath.dirname(path).split('/'):
      directory = directory.now[name] if name else directory
    return directory

  def _sync(self, node: _File | _Directory) -> None:
    if isinstance(node, _File):
      node.sync()
      return
    for naming in self._namings:
      naming.unsynced = [directory for directory in naming.unsynced if directory is not node]
    while self._namings and not self._namings[0].unsynced:
      for directory, name, what in self._namings.pop(0).entries:
        _set(directory.base, name, what)

  def now(self) -> Tree:
    """Return what processes see while the machine works."""
    return _flat(self._root, lambda directory: directory.now, 'all')

  def survivors(self) -> Iterator[tuple[str, Tree]]:
    """Yield what may be there after a failure of the machine, each with its name.

    Of the namings that are not synced: none, all, those before any one, all but one, one alone. Of data: `DATA`.
    """
    lost = [place for place, naming in enumerate(self._namings) if naming.unsynced]
    choices = {'no name': set(), 'all names': set(lost)}
    for number, place in enumerate(lost):
      choices[f'names before {number}'] = set(lost[:number])
      choices[f'all names but {number}'] = set(lost) - {place}
      choices[f'only name {number}'] = {place}
    seen = set()
    for chosen, kept in choices.items():
      if frozenset(kept) in seen:
        continue
      seen.add(frozenset(kept))
      entries = self._entries(kept)
      for data in DATA:
        yield (
          f'{chosen}, data {data}',
          _flat(self._root, lambda node, held=entries: held.get(id(node), node.base), data),
        )

  def _entries(self, kept: set[int]) -> dict[int, dict[str, _File | _Directory]]:
    held: dict[int, dict[str, _File | _Directory]] = {}
    for place, naming in enumerate(self._namings):
      if place in kept or not naming.unsynced:
        for directory, name, what in naming.entries:
          _set(held.setdefault(id(directory), dict(directory.base)), name, what)
    return held


def after(operations: Iterable[Operation]) -> Disk:
  """Return a disk on which these operations were done."""
  disk = Disk()
  for operation in operations:
    disk.apply(operation)
  return disk


def _set(entries: dict[str, _File | _Directory], name: str, what: _File | _Directory | None) -> None:
  if what is None:
    entries.pop(name, None)
  else:
    entries[name] = what


def _flat(root: _Directory, entries_of, data: str) -> dict[str, bytes | None]:
  tree: dict[str, bytes | None] = {}
  waiting = [('', root)]
  while waiting:
    path, directory = waiting.pop()
    for name, node in entries_of(directory).items():
      where = f'{path}/{name}' if path else name
      if isinstance(node, _File):
        tree[where] = node.versions[data]
      else:
        tree[where] = None
        waiting.append((where, node))
  return tree


def key(tree: Tree) -> int:
  """Return a number that is the same for trees that hold the same, in this process, and quickly."""
  return hash(frozenset(tree.items()))


def below(tree: Tree, folder: str) -> dict[str, bytes | None]:
  """Return what a tree holds below a folder, with paths from there on."""
  return {path[len(folder) + 1 :]: content for path, content in tree.items() if path.startswith(folder + '/')}


def write_tree(tree: Tree, folder: pathlib.Path) -> None:
  """Make a directory that holds a tree."""
  folder.mkdir(parents=True)
  for path, content in sorted(tree.items()):
    if content is None:
      (folder / path).mkdir()
    else:
      (folder / path).write_bytes(content)


def read_tree(folder: pathlib.Path) -> dict[str, bytes | None]:
  """Return what a directory holds."""
  paths = sorted(folder.rglob('*'))
  return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in paths}
