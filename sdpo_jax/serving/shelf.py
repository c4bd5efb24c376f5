"""Where versions are: their arrays on the host, and their places in pools of adapters on the devices.

On the host, arrays are in memory up to a limit, and in files beyond it. A pool has a fixed number of places, and says
which version has which place, and which place is given away next.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Mapping
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
  """Arrays by version; the least recently used ones go to files first. Any thread may call.

  The files belong to this process alone and are removed when another shelf is made in their folder: anything that must
  outlive it is stored elsewhere.
  """

  def __init__(self, folder: pathlib.Path, memory_bytes: int):
    """Make an empty shelf.

    Args:
      folder: for files, used by nothing else; the files of an earlier shelf are removed.
      memory_bytes: limit of the arrays in memory.
    """
    make_directory(folder)
    remove_partials(folder)
    for left in folder.glob(f'*{SUFFIX}'):
      left.unlink()
    self._folder, self._limit = folder, memory_bytes
    self._memory: collections.OrderedDict[str, Arrays] = collections.OrderedDict()  # Least recently used first.
    self._digests: dict[str, str] = {}  # Digests of the files.
    self._bytes = 0
    self._lock = threading.Lock()

  def __contains__(self, version: str) -> bool:
    with self._lock:
      return version in self._memory or version in self._digests

  @property
  def memory_bytes(self) -> int:
    """The size of the arrays in memory, in bytes."""
    with self._lock:
      return self._bytes

  def put(self, version: str, arrays: Arrays) -> None:
    """Store the arrays of a version, which must not be changed any more.

    Raises:
      ValueError: the shelf has that version, which never changes.
      UserError: other versions must move to a file, which cannot be written; nothing has changed.
    """
    with self._lock:
      if version in self._memory or version in self._digests:
        raise ValueError(f'The version {version} is there already.')
      for array in arrays.values():
        array.setflags(write=False)
      self._admit(version, arrays)

  def get(self, version: str) -> Arrays:
    """Return the arrays of a version; they cannot be changed.

    Raises:
      KeyError: the shelf has no such version.
      UserError: its file is damaged or cannot be read; or as `put`, for versions that must make room.
    """
    with self._lock:
      if version in self._memory:
        self._memory.move_to_end(version)
        return self._memory[version]
      arrays = self._read(version)
      self._admit(version, arrays)
      return arrays

  def drop(self, version: str) -> None:
    """Drop a version and erase its file; a missing version is no error."""
    with self._lock:
      if version in self._memory:
        self._bytes -= _size(self._memory.pop(version))
      if self._digests.pop(version, None) is not None:
        self._file(version).unlink(missing_ok=True)

  def _admit(self, version: str, arrays: Arrays) -> None:
    """Take a version into memory, after making as much room as possible; others that have a file are not written."""
    size = _size(arrays)
    while self._memory and self._bytes + size > self._limit:
      oldest, old = next(iter(self._memory.items()))
      if oldest not in self._digests:
        content = safetensors.numpy.save({name: np.asarray(array, order='C') for name, array in old.items()})
        try:
          write_atomically(self._file(oldest), content)
        except OSError as error:
          raise UserError(
            f'{self._folder} cannot be written ({first_line(error)}), so that there is no place for more adapters: '
            'make room there, or name another folder.'
          ) from error
        self._digests[oldest] = hashlib.sha256(content).hexdigest()
      del self._memory[oldest]
      self._bytes -= _size(old)
    self._memory[version] = arrays
    self._bytes += size

  def _read(self, version: str) -> Arrays:
    digest, file = self._digests[version], self._file(version)
    way_out = 'take the adapter from its last saved version'
    try:
      content = file.read_bytes()
    except OSError as error:
      raise UserError(f'{file} cannot be read ({first_line(error)}): {way_out}.') from error
    if hashlib.sha256(content).hexdigest() != digest:
      raise UserError(f'{file} is not as it was written: {way_out}.')
    arrays = safetensors.numpy.load(content)
    for array in arrays.values():
      array.setflags(write=False)
    return arrays

  def _file(self, version: str) -> pathlib.Path:
    return self._folder / f'{hashlib.sha256(version.encode()).hexdigest()[:32]}{SUFFIX}'


def _size(arrays: Arrays) -> int:
  return sum(array.nbytes for array in arrays.values())


class NoPlaceError(Exception):
  """All places are in use; the request has to wait until one is released."""


@dataclasses.dataclass(frozen=True)
class Place:
  """A place that a version has taken."""

  index: int  # In the pool.
  filled: bool  # Whether it holds the version already; if not, the caller of `take` must fill it.


class Places:
  """A fixed number of places for versions; the one released longest ago is given away first.

  A version is taken before each use and released after it; while it has users, its place cannot be given away. Calls
  come from one thread.
  """

  def __init__(self, count: int):
    self._free = list(range(count))[::-1]
    self._index: dict[Hashable, int] = {}
    self._users: collections.Counter[Hashable] = collections.Counter()
    self._idle: collections.OrderedDict[Hashable, None] = collections.OrderedDict()  # Least recently released first.

  def __contains__(self, version: Hashable) -> bool:
    return version in self._index

  def take(self, version: Hashable) -> Place:
    """Return the place of a version, giving it one if it has none.

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
    """Release one use of a version; it keeps its place until another version needs it.

    Raises:
      ValueError: nobody uses it.
    """
    if not self._users[version]:
      raise ValueError(f'{version!r} is not in use.')
    self._users[version] -= 1
    if not self._users[version]:
      del self._users[version]
      self._idle[version] = None

  def forget(self, version: Hashable) -> None:
    """Free the place of a version that was never filled or is not wanted any more.

    A version without a place is no error.

    Raises:
      ValueError: somebody uses it.
    """
    if self._users[version]:
      raise ValueError(f'{version!r} is in use.')
    self._idle.pop(version, None)
    if version in self._index:
      self._free.append(self._index.pop(version))

  def rename(self, version: Hashable, new: Hashable) -> None:
    """Transfer the place of a version, with its uses, to another version, which has none.

    Raises:
      ValueError: the version has no place, or the other one has a place.
    """
    if version not in self._index or new in self._index:
      raise ValueError(f'{version!r} cannot become {new!r}.')
    self._index[new] = self._index.pop(version)
    if version in self._users:
      self._users[new] = self._users.pop(version)
    else:
      self._idle.pop(version)
      self._idle[new] = None
