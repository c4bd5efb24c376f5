"""Which sample is next, and in which shard: the order in which samples wait for a slot."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable
import dataclasses
from typing import Generic, Protocol, TypeVar


class Samples(Protocol):
  """Samples of one prompt."""

  @property
  def prefix(self) -> Hashable:
    """What is equal of samples that begin with the same keys and values."""
    ...

  def __len__(self) -> int: ...


S = TypeVar('S', bound=Samples)


@dataclasses.dataclass
class _Unit(Generic[S]):
  """Consecutive samples of a prompt that wait in one shard."""

  samples: S
  first: int
  end: int


class Queue(Generic[S]):
  """Prompts with samples of each, handed out to shards prompt by prompt, so that few of them prefill the same prompt.

  A shard that finds no more prompts takes half of what another has left of one.
  """

  def __init__(self, shards: int, waiting: Iterable[S] = ()):
    """Make a queue for so many shards, in which some samples wait, in this order."""
    self._waiting: collections.deque[_Unit[S]] = collections.deque()
    self._prefixes: collections.Counter[Hashable] = collections.Counter()  # Of prompts that are no shard's yet.
    self._units: list[_Unit[S] | None] = [None] * shards
    self.left = 0  # Samples.
    for samples in waiting:
      self.add(samples)

  def add(self, samples: S) -> None:
    """Lets the samples of a prompt, at least one, wait behind all others."""
    self._waiting.append(_Unit(samples, 0, len(samples)))
    self._prefixes[samples.prefix] += 1
    self.left += len(samples)

  def remove(self, gone: Callable[[S], bool]) -> None:
    """Take the samples that are `gone` out, which no shard is to get any more."""
    waiting = [unit for unit in self._waiting if not gone(unit.samples)]
    self._waiting = collections.deque(waiting)
    self._prefixes = collections.Counter(unit.samples.prefix for unit in waiting)
    self._units = [None if unit is None or gone(unit.samples) else unit for unit in self._units]
    self.left = sum(unit.end - unit.first for unit in (*self._waiting, *self._units) if unit is not None)

  def take(self, shard: int) -> tuple[S, int] | None:
    """Return (samples of a prompt, which of them) for a free slot of the shard, None if no sample is left."""
    if not self.left:
      return None
    unit = self._units[shard]
    if unit is None:
      unit = self._units[shard] = self._next() if self._waiting else self._steal()
    taken = unit.samples, unit.first
    unit.first += 1
    self.left -= 1
    self._units = [other if other is not None and other.first < other.end else None for other in self._units]
    return taken

  @property
  def head(self) -> S | None:
    """The samples that wait longest of those that are no shard's yet; None: there are none."""
    return self._waiting[0].samples if self._waiting else None

  def begun(self, shard: int) -> bool:
    """Says whether samples wait in the shard."""
    return self._units[shard] is not None

  def holds(self, shard: int, prefix: Hashable) -> bool:
    """Says whether samples with that prefix wait in the shard, or for any shard."""
    unit = self._units[shard]
    return (unit is not None and unit.samples.prefix == prefix) or self._prefixes[prefix] > 0

  def _next(self) -> _Unit[S]:
    unit = self._waiting.popleft()
    self._prefixes[unit.samples.prefix] -= 1
    if not self._prefixes[unit.samples.prefix]:
      del self._prefixes[unit.samples.prefix]
    return unit

  def _steal(self) -> _Unit[S]:
    most = max((unit for unit in self._units if unit is not None), key=lambda unit: unit.end - unit.first)
    middle = (most.first + most.end) // 2
    stolen = _Unit(most.samples, middle, most.end)
    most.end = middle
    return stolen
