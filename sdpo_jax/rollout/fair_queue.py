"""A queue of samples of several payers: whoever has had the least work done for them gets the next free slot.

The order is that of virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). With
one payer it is first come, first served, and samples that read different cartridges take turns.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Hashable, Iterable
import dataclasses
import math
from typing import NamedTuple

from sdpo_jax.rollout.queue import REFILLS, Queue, Samples


class Payer(NamedTuple):
  """On whose account work is done; a tuple, since the engine looks payers up for every request in every turn."""

  id: str = ''  # Of an API key; empty: the service itself.
  weight: float = 1.0  # Share of the work relative to that of other payers.


SERVICE = Payer()


class Shares:
  """The work done for each payer, by which they take turns.

  Payers for whom work waits all the time get shares in proportion to their weights, up to the largest pieces of work
  that are under way. A payer who was idle gets no credit for that time.
  """

  def __init__(self):
    """Begin with no work done."""
    self._done: dict[Payer, float] = {}
    self._present = collections.Counter[Payer]()  # By payer: how often it has entered and not left.

  def __len__(self) -> int:
    """Return the number of payers whose work is remembered."""
    return len(self._done)

  def of(self, payer: Payer) -> float:
    """Return the work done for a payer, over its weight, since some time in the past."""
    return self._done.get(payer, 0.0)

  def enter(self, payer: Payer) -> None:
    """Note that work waits for a payer, until as many calls of `leave`."""
    if not self._present:
      self._done.clear()
    elif payer not in self._present:
      least = min(map(self.of, self._present))
      # Payers that have left are forgotten once entering again would lift them anyway.
      self._done = {other: done for other, done in self._done.items() if other in self._present or done > least}
      self._done[payer] = max(least, self.of(payer))
    self._present[payer] += 1

  def leave(self, payer: Payer) -> None:
    """Note that some work of a payer waits no longer."""
    self._present[payer] -= 1
    if not self._present[payer]:
      del self._present[payer]

  def charge(self, payer: Payer, work: float) -> None:
    """Count work that was done for a payer, in tokens or any other unit."""
    self._done[payer] = self.of(payer) + work / payer.weight

  def first(self, payers: Iterable[Payer], under_way: Callable[[Payer], float] = lambda payer: 0.0) -> Payer:
    """Return the payer who is next; `under_way` is work that has begun for a payer and was not charged yet."""
    return min(payers, key=lambda payer: self.of(payer) + under_way(payer) / payer.weight)


@dataclasses.dataclass
class _Request:
  payer: Payer
  left: int  # Samples that are not done.
  reserved: int = 0  # The most tokens of those that have slots.


_Key = tuple[Payer, int]  # A payer and a cartridge.


class FairQueue:
  """A `Queue` for each payer and cartridge, and the order in which they are served."""

  def __init__(self, shards: int):
    """Make an empty queue for `shards` shards."""
    self._shards = shards
    self.shares = Shares()  # To which other work of the same payers may be charged, too.
    # Whether a slot is free for samples that read a cartridge; those for which there is none are passed over.
    self.fits: Callable[[int], bool] = lambda cartridge: True
    self._queues: dict[_Key, Queue] = {}  # With waiting samples; of a payer's, the first is the next.
    self._requests: dict[Samples, _Request] = {}  # Those with samples that are not done.

  def add(self, samples: Samples, payer: Payer) -> None:
    """Append the samples of a prompt, at least one, to those of their payer."""
    key = payer, samples.cartridge
    if key not in self._queues:
      self.shares.enter(payer)
      self._queues[key] = Queue(self._shards)
    self._queues[key].add(samples)
    self._requests[samples] = _Request(payer, len(samples))

  def remove(self, gone: Callable[[Samples], bool]) -> None:
    """Remove the samples for which `gone` returns True, also those that have slots."""
    for key, queue in list(self._queues.items()):
      queue.remove(gone)
      self._drop_empty(key)
    self._requests = {samples: request for samples, request in self._requests.items() if not gone(samples)}

  def refill(self, rows: int) -> int:
    """Return how many of so many slots must be free before they are given to waiting samples.

    While several payers have slots, fewer interruptions let all of them go on; one that has none gets the next slot.
    """
    served = {request.payer for request in self._requests.values() if request.reserved}
    at_once = len(served) < 2 or {payer for payer, _ in self._queues} - served
    return math.ceil(rows / (REFILLS if at_once else 2))

  def take(self, shard: int) -> tuple[Samples, int] | None:
    """Return (samples of a prompt, index among them) for a free slot of the shard; None if no sample is left."""
    key = self._next()
    if key is None:
      return None
    queue = self._queues[key] = self._queues.pop(key)  # The last of its payer now.
    samples, index = queue.take(shard)
    self._drop_empty(key)
    self._requests[samples].reserved += int(samples.knobs['max_tokens'][index])
    if index == 0:
      self.shares.charge(key[0], len(samples.prompt))
    return samples, index

  def drawn(self, samples: Samples, tokens: int) -> None:
    """Charge the payer of samples for tokens that were drawn."""
    self.shares.charge(self._requests[samples].payer, tokens)

  def done(self, samples: Samples, number: int) -> None:
    """Note that a sample, by its number in the generation batch, has left its slot."""
    request = self._requests[samples]
    request.reserved -= int(samples.knobs['max_tokens'][number - samples.first])
    request.left -= 1
    if not request.left:
      del self._requests[samples]

  @property
  def left(self) -> int:
    """Number of samples that wait."""
    return sum(queue.left for queue in self._queues.values())

  @property
  def head(self) -> Samples | None:
    """The first samples of those who are next that were not handed to a shard yet; None if there are none."""
    key = self._next()
    return None if key is None else self._queues[key].head

  @property
  def cartridge(self) -> int | None:
    """The cartridge that the next samples read; None: there are no samples, or no slots for them."""
    key = self._next()
    return None if key is None else key[1]

  @property
  def passed_over(self) -> int | None:
    """The cartridge for which no slot fits although its samples would be next; None: there is none."""
    if not self._queues:
      return None
    cartridge = self._first(self._queues)[1]
    return None if self.fits(cartridge) else cartridge

  def waits(self, cartridge: int) -> bool:
    """Return whether samples that read a cartridge wait."""
    return any(cartridge == other for _, other in self._queues)

  def begun(self, shard: int) -> bool:
    """Return whether the shard has a prompt of those who are next with samples that still wait."""
    key = self._next()
    return key is not None and self._queues[key].begun(shard)

  def holds(self, shard: int, prefix: Hashable) -> bool:
    """Return whether samples with that prefix wait in the shard, or for any shard."""
    return any(queue.holds(shard, prefix) for queue in self._queues.values())

  def _drop_empty(self, key: _Key) -> None:
    if not self._queues[key].left:
      del self._queues[key]
      self.shares.leave(key[0])

  def _next(self) -> _Key | None:
    fitting = [key for key in self._queues if self.fits(key[1])]
    return self._first(fitting) if fitting else None

  def _first(self, keys: Collection[_Key]) -> _Key:
    payers = dict.fromkeys(payer for payer, _ in keys)  # In order, which is the same in all processes.
    if len(payers) > 1:
      reserved = collections.Counter[Payer]()
      for request in self._requests.values():
        reserved[request.payer] += request.reserved
      payers = [self.shares.first(payers, reserved.__getitem__)]
    return next(key for key in keys if key[0] in payers)
