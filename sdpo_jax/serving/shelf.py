"""The places of versions: their arrays on the host, and their indices in pools on the devices.

On the host, arrays are in memory up to a limit, and in files beyond it. On the devices, a pool has a fixed number of
places; `Places` keeps track of which version has which place, and evicts the least recently used one.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator, Mapping
import contextlib
import dataclasses
import hashlib
import pathlib
import threading

import numpy as np
import safetensors
import safetensors.numpy

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import make_directory, remove_partials, write_atomically

Arrays = Mapping[str, np.ndarray]
SUFFIX = '.safetensors'


class Shelf:
  """Arrays of versions on the host; the least recently used ones are moved to files. Any thread may call.

  The files are a swap space of this process: the next shelf in the folder removes them.
  """

  def __init__(self, folder: pathlib.Path, memory_bytes: int):
    """Make an empty shelf.

    Args:
      folder: the folder for files, used by nothing else; files of an earlier shelf are removed.
      memory_bytes: the most bytes of arrays in memory.
    """
    make_directory(folder)
    remove_partials(folder)
    for left in folder.glob(f'*{SUFFIX}'):
      left.unlink()
    self._folder, self._limit = folder, memory_bytes
    self._memory: collections.OrderedDict[str, Arrays] = collections.OrderedDict()  # Least recently used first.
    self._digests: dict[str, str] = {}  # The digest of each file, by version.
    self._bytes = 0  # In memory.
    self._sizes: dict[str, int] = {}  # Bytes by version, in memory or in files.
    self._held = 0  # Their sum, which the engine's thread asks for between any two chunks of tokens.
    self._lock = threading.Lock()

  def __contains__(self, version: str) -> bool:
    with self._lock:
      return version in self._sizes

  @property
  def memory_bytes(self) -> int:
    """The size of all arrays in memory, in bytes."""
    with self._lock:
      return self._bytes

  @property
  def held_bytes(self) -> int:
    """The size of all arrays in memory and in files, in bytes."""
    with self._lock:
      return self._held

  @property
  def names(self) -> list[str]:
    """The names of all versions."""
    with self._lock:
      return list(self._sizes)

  def put(self, version: str, arrays: Arrays) -> None:
    """Store the arrays of a version, and make them read-only.

    Raises:
      ValueError: the shelf has a version of that name.
      UserError: there is no room in memory, and no file can be written; nothing has changed.
    """
    with self._lock:
      if version in self._sizes:
        raise ValueError(f'The version {version} exists already.')
      self._admit(version, arrays)
      self._sizes[version] = _size(arrays)
      self._held += self._sizes[version]

  def get(self, version: str) -> Arrays:
    """Return the arrays of a version, which are read-only.

    Raises:
      KeyError: the shelf has no such version.
      UserError: its file is damaged or cannot be read; or as `put`, to make room for it.
    """
    with self._lock:
      if version in self._memory:
        self._memory.move_to_end(version)
        return self._memory[version]
      arrays = self._read(version)
      self._admit(version, arrays)
      return arrays

  def drop(self, version: str) -> None:
    """Drop a version and erase its file; a missing version is ignored."""
    with self._lock:
      self._held -= self._sizes.pop(version, 0)
      if version in self._memory:
        self._bytes -= _size(self._memory.pop(version))
      if self._digests.pop(version, None) is not None:
        self._file(version).unlink(missing_ok=True)

  def rename(self, version: str, new: str) -> None:
    """Give a version a name that no version has; its arrays stay where they are."""
    with self._lock:
      self._sizes[new] = self._sizes.pop(version)
      if version in self._memory:
        self._memory[new] = self._memory.pop(version)
      if version in self._digests:
        self._digests[new] = self._digests.pop(version)
        with contextlib.suppress(OSError):  # Who needs the file hears of it.
          self._file(version).rename(self._file(new))

  def _admit(self, version: str, arrays: Arrays) -> None:
    """Add a version to memory, read-only, after moving others to files (unless they have one) as far as necessary."""
    size = _size(arrays)
    while self._memory and self._bytes + size > self._limit:
      oldest, old = next(iter(self._memory.items()))
      if oldest not in self._digests:
        content = safetensors.numpy.save({name: np.asarray(array, order='C') for name, array in old.items()})
        try:
          write_atomically(self._file(oldest), content)
        except OSError as error:
          raise UserError(
            f'{self._folder} cannot be written ({first_line(error)}), so there is no room for more adapters: make room '
            'on its disk, or name another folder (serve.store.database).'
          ) from error
        self._digests[oldest] = hashlib.sha256(content).hexdigest()
      del self._memory[oldest]
      self._bytes -= _size(old)
    for array in arrays.values():
      array.setflags(write=False)
    self._memory[version] = arrays
    self._bytes += size

  def _read(self, version: str) -> Arrays:
    digest, file = self._digests[version], self._file(version)
    way_out = 'import the adapter again, or restart the service, which reads it from its store'
    try:
      content = file.read_bytes()
    except OSError as error:
      raise UserError(f'{file} cannot be read ({first_line(error)}): {way_out}.') from error
    if hashlib.sha256(content).hexdigest() != digest:
      raise UserError(f'{file} is damaged: {way_out}.')
    return safetensors.numpy.load(content)

  def _file(self, version: str) -> pathlib.Path:
    return self._folder / f'{hashlib.sha256(version.encode()).hexdigest()[:32]}{SUFFIX}'


def _size(arrays: Arrays) -> int:
  return sum(array.nbytes for array in arrays.values())


class NoPlaceError(Exception):
  """All places of a pool are in use; a request must wait until one is released."""


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of a version in a pool."""

  index: int  # The index in the pool.
  filled: bool  # Whether the place already holds the version; otherwise the caller of `take` must copy it there.


class Places:
  """A fixed number of places for versions in a pool; the least recently released one is reused first.

  Call `take` before each use of a version and `let_go` after it; a place in use is never reused. All calls must come
  from one thread.
  """

  def __init__(self, count: int):
    self._free = list(range(count))[::-1]
    self._index: dict[Hashable, int] = {}
    self._users: collections.Counter[Hashable] = collections.Counter()
    self._idle: collections.OrderedDict[Hashable, None] = collections.OrderedDict()  # Least recently released first.

  def __contains__(self, version: Hashable) -> bool:
    return version in self._index

  def __iter__(self) -> Iterator[Hashable]:
    return iter(self._index)

  def index(self, version: Hashable) -> int | None:
    """Return the index of a version in the pool; None: it has no place."""
    return self._index.get(version)

  @property
  def full(self) -> bool:
    """Whether every place is in use, so that no further version can get one."""
    return not self._free and not self._idle

  def take(self, version: Hashable) -> Place:
    """Return the place of a version for one use; a version without a place gets one.

    Raises:
      NoPlaceError: every place is in use.
    """
    filled = version in self._index
    if not filled:
      if self._free:
        self._index[version] = self._free.pop()
      elif self._idle:
        longest, _ = self._idle.popitem(last=False)
        self._index[version] = self._index.pop(longest)
      else:
        raise NoPlaceError(f'All {len(self._index)} places are in use.')
    self._users[version] += 1
    self._idle.pop(version, None)
    return Place(self._index[version], filled)

  def let_go(self, version: Hashable) -> None:
    """End one use of a version, which keeps its place until another version needs it.

    Raises:
      ValueError: the version is not in use.
    """
    if not self._users[version]:
      raise ValueError(f'{version!r} is not in use.')
    self._users[version] -= 1
    if not self._users[version]:
      del self._users[version]
      self._idle[version] = None

  def forget(self, version: Hashable) -> None:
    """Free the place of a version, which was not filled or is not needed any more; without a place, do nothing.

    Raises:
      ValueError: the version is in use.
    """
    if self._users[version]:
      raise ValueError(f'{version!r} is in use.')
    self._idle.pop(version, None)
    if version in self._index:
      self._free.append(self._index.pop(version))

  def rename(self, version: Hashable, new: Hashable) -> None:
    """Transfer the place of a version, with its uses, to a new version.

    Raises:
      ValueError: the version has no place, or the new one has a place.
    """
    if version not in self._index or new in self._index:
      raise ValueError(f'The place of {version!r} cannot be transferred to {new!r}.')
    self._index[new] = self._index.pop(version)
    if version in self._users:
      self._users[new] = self._users.pop(version)
    else:
      self._idle.pop(version)
      self._idle[new] = None
