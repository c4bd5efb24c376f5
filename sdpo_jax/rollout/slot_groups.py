"""Groups of consecutive slots whose samples read the same cartridge, which a decode step then reads once for all."""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np

from sdpo_jax.models.policy import NO_MEMBER


class SlotGroups:
  """Which cartridge the samples in each group of slots read; samples without one fit everywhere.

  A cartridge may have several groups. If samples are next that read one for which there is no group, a group is
  reserved: its samples end, and no others that read their cartridge begin in it.
  """

  def __init__(self, size: int):
    """Make groups of `size` slots."""
    self._size = size
    self._reads = np.zeros(0, np.int32)  # By group.
    self._readers = np.zeros(0, np.int32)  # Samples that read it.
    self._reserved: dict[int, int] = {}  # The next cartridge of a group.

  def update(self, cartridges: np.ndarray, waits: Callable[[int], bool]) -> None:
    """Note the cartridge [slots] of each slot, and drop reservations that were used or are not needed any more.

    Args:
      cartridges: `NO_MEMBER` in free slots, too.
      waits: whether samples that read a cartridge wait for slots.
    """
    groups = cartridges.reshape(-1, self._size)
    self._reads, self._readers = groups.max(1), np.sum(groups != NO_MEMBER, 1)
    self._reserved = {
      group: cartridge
      for group, cartridge in self._reserved.items()
      if self._reads[group] != cartridge and waits(cartridge)
    }

  def best(self, free: list[int], cartridge: int) -> list[int]:
    """Return the indices in `free` of the slots for a sample that reads a cartridge, the best ones in order.

    These are in groups that read it already or, if there are none, in those with most room. Samples without a cartridge
    get the last slots first, so that they leave whole groups.
    """
    if cartridge == NO_MEMBER:
      return list(range(len(free)))[::-1]
    groups = [slot // self._size for slot in free]
    room = collections.Counter(groups)
    fitting = [
      ((self._reads[group] != cartridge) * (1 + self._size - room[group]), at)
      for at, group in enumerate(groups)
      if self._reads[group] in (NO_MEMBER, cartridge) and self._reserved.get(group, cartridge) == cartridge
    ]
    least = min((badness for badness, _ in fitting), default=0)
    return [at for badness, at in fitting if badness == least]

  def give(self, slot: int, cartridge: int) -> None:
    """Note that a sample that reads a cartridge gets a slot."""
    if cartridge != NO_MEMBER:
      self._reads[slot // self._size] = cartridge
      self._readers[slot // self._size] += 1

  def reserve(self, cartridge: int) -> None:
    """Reserve the group with the fewest readers for a cartridge, unless it has a group or will get one."""
    groups = [group for group in range(len(self._reads)) if group not in self._reserved]
    there = NO_MEMBER in self._reads or cartridge in self._reads or cartridge in self._reserved.values()
    if cartridge != NO_MEMBER and groups and not there:
      self._reserved[min(groups, key=lambda group: self._readers[group])] = cartridge
