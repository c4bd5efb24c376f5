"""Places in a pool of adapters on the devices: which version has which place, and which place is given away next."""

from __future__ import annotations

import collections
from collections.abc import Hashable
import dataclasses


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
      self._index[version] = self._next()
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

  def _next(self) -> int:
    if self._free:
      return self._free.pop()
    if not self._idle:
      raise NoPlaceError(f'All {len(self._index)} places are in use.')
    version, _ = self._idle.popitem(last=False)
    return self._index.pop(version)
