"""The queue of samples that wait for a slot: which sample is next, and in which shard."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable
import dataclasses
from typing import Generic, Protocol, TypeVar


class QueuedSamples(Protocol):
  """Samples of one prompt."""

  @property
  def prefix(self) -> Hashable:
    """Key shared by samples that begin with the same keys and values."""
    ...

  def __len__(self) -> int: ...


S = TypeVar('S', bound=QueuedSamples)


@dataclasses.dataclass
class _Unit(Generic[S]):
  """Consecutive samples of a prompt that wait in one shard."""

  samples: S
  first: int
  end: int


class Queue(Generic[S]):
  """A queue of samples, handed to shards prompt by prompt, so that few shards prefill the same prompt.

  A shard that finds no more prompts takes half of the samples that another shard has left of its prompt.
  """

  def __init__(self, shards: int, waiting: Iterable[S] = ()):
    """Make a queue for `shards` shards, in which the samples `waiting` wait in this order."""
    self._waiting: collections.deque[_Unit[S]] = collections.deque()
    self._prefixes: collections.Counter[Hashable] = collections.Counter()  # Prefixes of prompts without a shard.
    self._units: list[_Unit[S] | None] = [None] * shards
    self.left = 0  # Number of samples.
    for samples in waiting:
      self.add(samples)

  def add(self, samples: S) -> None:
    """Append the samples of a prompt, at least one."""
    self._waiting.append(_Unit(samples, 0, len(samples)))
    self._prefixes[samples.prefix] += 1
    self.left += len(samples)

  def remove(self, gone: Callable[[S], bool]) -> None:
    """Remove the samples that are `gone`."""
    waiting = [unit for unit in self._waiting if not gone(unit.samples)]
    self._waiting = collections.deque(waiting)
    self._prefixes = collections.Counter(unit.samples.prefix for unit in waiting)
    self._units = [None if unit is None or gone(unit.samples) else unit for unit in self._units]
    self.left = sum(unit.end - unit.first for unit in (*self._waiting, *self._units) if unit is not None)

  def take(self, shard: int) -> tuple[S, int] | None:
    """Return (samples of a prompt, index among them) for a free slot of the shard; None if no sample is left."""
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
    """The first samples that were not handed to a shard yet; None if there are none."""
    return self._waiting[0].samples if self._waiting else None

  def begun(self, shard: int) -> bool:
    """Return whether samples wait in the shard."""
    return self._units[shard] is not None

  def holds(self, shard: int, prefix: Hashable) -> bool:
    """Return whether samples with that prefix wait in the shard, or for any shard."""
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
