"""Which sample is next, and in which shard: the order in which samples wait for a slot."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses


@dataclasses.dataclass
class _Unit:
  """Consecutive samples of a prompt that wait in one shard."""

  prompt: int
  first: int
  end: int


class Queue:
  """Prompts × n samples, handed out to shards prompt by prompt, so that few of them prefill the same prompt.

  A shard that finds no more prompts takes half of what another has left of one.
  """

  def __init__(self, prompts: Sequence[int], n: int, shards: int):
    """Makes a queue of n samples each of `prompts`, in this order."""
    self._waiting = collections.deque(_Unit(prompt, 0, n) for prompt in prompts)
    self._units: list[_Unit | None] = [None] * shards
    self._n = n
    self.left = len(self._waiting) * n

  def take(self, shard: int) -> tuple[int, int] | None:
    """Returns (prompt, sample = prompt · n + completion) for a free slot of the shard, None if no sample is left."""
    if not self.left:
      return None
    unit = self._units[shard]
    if unit is None:
      unit = self._units[shard] = self._waiting.popleft() if self._waiting else self._steal()
    sample = unit.prompt * self._n + unit.first
    unit.first += 1
    self.left -= 1
    self._units = [other if other is not None and other.first < other.end else None for other in self._units]
    return unit.prompt, sample

  def holds(self, shard: int, prompt: int) -> bool:
    """Says whether samples of the prompt wait in the shard."""
    unit = self._units[shard]
    return unit is not None and unit.prompt == prompt

  def _steal(self) -> _Unit:
    most = max((unit for unit in self._units if unit is not None), key=lambda unit: unit.end - unit.first)
    middle = (most.first + most.end) // 2
    stolen = _Unit(most.prompt, middle, most.end)
    most.end = middle
    return stolen
