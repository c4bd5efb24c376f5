"""Samples of prompts, and the queue that assigns them to the free slots of shards."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math

import numpy as np

from sdpo_jax.models.policy import NO_MEMBER

REFILLS = 16  # The decode loop is interrupted for a refill when one slot in this many is done.
KNOBS = {  # Fields of `SamplingParams` that may differ between the samples of a prompt, with their dtypes.
  'max_tokens': np.int32,
  'temperature': np.float32,
  'top_p': np.float32,
  'top_k': np.int32,
  'min_p': np.float32,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
  """n samples of one prompt, with everything that determines them except the parameters."""

  prompt: np.ndarray  # [length] int32, of at least one token.
  width: int  # The bucket of the prompt.
  first: int  # The number of the first sample; the others have the next ones.
  knobs: Mapping[str, np.ndarray]  # [n] each: the values of `KNOBS`.
  stop_ids: np.ndarray  # [M] int32.
  seed: int
  step: int  # Number of the generation batch.
  prefix: Hashable  # Equal for samples whose prompts have the same tokens and are read with the same weights.
  member: int | Sequence[int] = NO_MEMBER  # What their rows use, see `Policy.apply`.
  cartridge: int = NO_MEMBER  # The one of these that is a cartridge of a pool, see `rollout.slot_groups`.
  # Equal for prompts that may reuse each other's keys and values, however old; None: the prompt reuses none.
  weights: Hashable = None

  def __len__(self) -> int:
    return len(self.knobs['max_tokens'])

  def parts(self, indices: Iterable[int]) -> Iterator[Samples]:
    """Yield those of the samples at `indices`, in order; each part is a run of consecutive ones."""
    for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
      at = [index for _, index in run]
      knobs = {name: values[at] for name, values in self.knobs.items()}
      yield dataclasses.replace(self, first=self.first + at[0], knobs=knobs)


@dataclasses.dataclass
class _Unit:
  """Consecutive samples of a prompt that wait in one shard."""

  samples: Samples
  first: int
  end: int


class Queue:
  """A queue of samples, handed to shards prompt by prompt, so that few shards prefill the same prompt.

  A shard that finds no more prompts takes half of the samples that another shard has left of its prompt.
  """

  def __init__(self, shards: int, waiting: Iterable[Samples] = ()):
    """Make a queue for `shards` shards, in which the samples `waiting` wait in this order."""
    self._waiting: collections.deque[_Unit] = collections.deque()
    self._prefixes: collections.Counter[Hashable] = collections.Counter()  # Prefixes of prompts without a shard.
    self._units: list[_Unit | None] = [None] * shards
    self.left = 0  # Number of samples.
    for samples in waiting:
      self.add(samples)

  def add(self, samples: Samples) -> None:
    """Append the samples of a prompt, at least one."""
    self._waiting.append(_Unit(samples, 0, len(samples)))
    self._prefixes[samples.prefix] += 1
    self.left += len(samples)

  def refill(self, rows: int) -> int:
    """Return how many of so many slots must be free before they are given to waiting samples."""
    return math.ceil(rows / REFILLS)

  def remove(self, gone: Callable[[Samples], bool]) -> None:
    """Remove the waiting samples for which `gone` returns True."""
    waiting = [unit for unit in self._waiting if not gone(unit.samples)]
    self._waiting = collections.deque(waiting)
    self._prefixes = collections.Counter(unit.samples.prefix for unit in waiting)
    self._units = [None if unit is None or gone(unit.samples) else unit for unit in self._units]
    self.left = sum(unit.end - unit.first for unit in (*self._waiting, *self._units) if unit is not None)

  def take(self, shard: int) -> tuple[Samples, int] | None:
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
  def head(self) -> Samples | None:
    """The first samples that were not handed to a shard yet; None if there are none."""
    return self._waiting[0].samples if self._waiting else None

  def begun(self, shard: int) -> bool:
    """Return whether the shard has a prompt with samples that still wait."""
    return self._units[shard] is not None

  def holds(self, shard: int, prefix: Hashable) -> bool:
    """Return whether samples with that prefix wait in the shard, or for any shard."""
    unit = self._units[shard]
    return (unit is not None and unit.samples.prefix == prefix) or self._prefixes[prefix] > 0

  def _next(self) -> _Unit:
    unit = self._waiting.popleft()
    self._prefixes[unit.samples.prefix] -= 1
    if not self._prefixes[unit.samples.prefix]:
      del self._prefixes[unit.samples.prefix]
    return unit

  def _steal(self) -> _Unit:
    most = max((unit for unit in self._units if unit is not None), key=lambda unit: unit.end - unit.first)
    middle = (most.first + most.end) // 2
    stolen = _Unit(most.samples, middle, most.end)
    most.end = middle
    return stolen
