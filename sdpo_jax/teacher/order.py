"""The reference's order of a generation batch: length-balanced partitions, each a zig-zag of lengths.

Reference: ray_trainer.py:1348-1416 and utils/seqlen_balancing.py. The order determines which success is the *first* of
a group and which sequences share an optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
import heapq

import numpy as np

LINEAR_COST = 24576  # Cost of a token outside attention, in units of one attended pair.


def workload(lengths: Sequence[int]) -> list[int]:
  """Return the estimated cost 24576·L + L² of sequences with L valid tokens (prompt and completion together)."""
  return [LINEAR_COST * int(length) + int(length) ** 2 for length in lengths]


def balanced_order(lengths: Sequence[int], partitions: int = 1) -> np.ndarray:
  """Return the permutation [N] int32 that the reference applies to a generation batch before anything reads it.

  The sequences are split into `partitions` sets of equal size and nearly equal workload; each set is sorted by
  workload and laid out as `sorted[::2] + sorted[1::2][::-1]` (short → long → short); the sets follow each other.

  Args:
    lengths: [N] valid tokens of each whole sequence: prompt and completion together, padding left out.
    partitions: number of sets (the reference's data-parallel ranks).

  Raises:
    ValueError: `partitions` does not divide N.
  """
  cost = workload(lengths)
  order: list[int] = []
  for members in _equal_partitions(cost, partitions):
    ranked = sorted(members, key=lambda i: (cost[i], i))
    order += ranked[::2] + ranked[1::2][::-1]
  return np.array(order, np.int32)


class _Differences:
  """One node of the largest-differencing method: k disjoint sets in descending order of cost."""

  def __init__(self, sets: list[tuple[int, list[tuple[int, int]]]]):
    # A set is (total cost, [(index, cost), …]), ordered by total cost, size, members, as in the reference.
    self.sets = sorted(sets, key=lambda s: (s[0], len(s[1]), s[1]), reverse=True)

  @property
  def spread(self) -> int:
    return self.sets[0][0] - self.sets[-1][0]

  def __lt__(self, other: _Differences) -> bool:
    """Return whether this node is popped before the other: the larger spread first, then the larger leading set."""

    def rank(node: _Differences) -> tuple:
      return node.spread, node.sets[0][0], len(node.sets[0][1]), node.sets[0][1]

    return rank(self) > rank(other)

  def merged(self, other: _Differences) -> _Differences:
    """Return a node that joins the heaviest set with the lightest, the second heaviest with the second lightest, …"""
    pairs = zip(self.sets, reversed(other.sets), strict=True)
    return _Differences([(a[0] + b[0], a[1] + b[1]) for a, b in pairs])


def _equal_partitions(cost: list[int], partitions: int) -> list[list[int]]:
  """Partition by Karmarkar–Karp with equal set sizes: k sequences of neighbouring cost form a node; merge nodes."""
  if partitions < 1 or len(cost) % partitions:
    raise ValueError(f'{len(cost)} sequences do not split into {partitions} sets of equal size.')
  if not cost:
    return [[] for _ in range(partitions)]
  ranked = sorted((c, i) for i, c in enumerate(cost))
  nodes = [
    _Differences([(c, [(i, c)]) for c, i in ranked[start : start + partitions]])
    for start in range(0, len(ranked), partitions)
  ]
  heapq.heapify(nodes)
  while len(nodes) > 1:
    first = heapq.heappop(nodes)
    heapq.heappush(nodes, first.merged(heapq.heappop(nodes)))
  return [[i for i, _ in members] for _, members in nodes[0].sets]
