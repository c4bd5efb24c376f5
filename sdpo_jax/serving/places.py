"""Places in a pool of adapters on the devices: which version has which, and whose place the next one gets."""

from __future__ import annotations

import collections
from collections.abc import Hashable
import dataclasses


class NoPlaceError(Exception):
  """All places are in use: the request has to wait until one is let go."""


@dataclasses.dataclass(frozen=True)
class Place:
  """A place that was taken."""

  index: int  # In the pool.
  filled: bool  # It holds the version already; if not, whoever took it has to put it there.


class Places:
  """A fixed number of places, handed out to versions; the one that was let go longest ago is given away first.

  A version is taken before it is used and let go afterwards, by each of those who use it at once; while anyone uses it,
  its place is its own. Calls come from one thread.
  """

  def __init__(self, count: int):
    self._free = list(range(count))[::-1]
    self._index: dict[Hashable, int] = {}
    self._users: collections.Counter[Hashable] = collections.Counter()
    self._idle: collections.OrderedDict[Hashable, None] = collections.OrderedDict()  # The longest ago first.

  def __contains__(self, version: Hashable) -> bool:
    return version in self._index

  def take(self, version: Hashable) -> Place:
    """Give a version a place, the one that it has if it has one.

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
    """End one use of a version, which keeps its place until another needs it.

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
    """Take the place of a version away, for it was never filled or is not wanted any more; none is no error.

    Raises:
      ValueError: somebody uses it.
    """
    if self._users[version]:
      raise ValueError(f'{version!r} is in use.')
    self._idle.pop(version, None)
    if version in self._index:
      self._free.append(self._index.pop(version))

  def rename(self, version: Hashable, new: Hashable) -> None:
    """Says that the place of a version holds another one now, which has none; its users use that.

    Raises:
      ValueError: the version has no place, or the other has one.
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
