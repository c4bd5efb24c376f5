"""Keys and values that are kept after a request, so that prompts with the same beginning are not prefilled again.

A row holds the prompt and completion that a finished sample had in its slot; the next turn of a conversation begins
with them. Rows are found by the weights that they were computed with and by their tokens. The least recently used row
is evicted first.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import NamedTuple

import jax
import numpy as np

from sdpo_jax.models.cache import KVCache
from sdpo_jax.rollout.functions import SamplerFunctions
from sdpo_jax.rollout.queue import Samples
from sdpo_jax.rollout.sizes import SamplerSizes
from sdpo_jax.types import Tree


class Match(NamedTuple):
  """A row that begins with the same tokens as a prompt."""

  row: int  # Index in its shard.
  length: int  # Number of common leading tokens; 0: there is no such row.


class KeptPrefix(NamedTuple):
  """Where a prompt's keys and values are: a cache, and a row of it."""

  cache: KVCache
  row: int  # Index in its shard.
  reused: int = 0  # Number of tokens taken from a kept row.


NO_MATCH = Match(0, 0)
Key = tuple[int, Hashable]  # (shard, prefix of samples).


@dataclasses.dataclass(frozen=True)
class _Row:
  weights: Hashable
  tokens: np.ndarray  # [length] int32.
  used: int  # Time of its last use, counted by the clock.


class KeptRows:
  """The host's record of what each kept row of one shard holds."""

  def __init__(self, count: int, clock: Iterator[int]):
    """Make a record of empty rows.

    Args:
      count: number of rows.
      clock: counter of the uses of the rows of all shards.
    """
    self._clock = clock
    self._free = list(range(count))[::-1]
    self._rows: collections.OrderedDict[int, _Row] = collections.OrderedDict()  # Least recently used first.

  def __len__(self) -> int:
    return len(self._rows)

  def match(self, weights: Hashable, tokens: np.ndarray) -> Match:
    """Return the row with the same weights that shares the longest beginning with `tokens`."""
    found = (Match(row, _common(held.tokens, tokens)) for row, held in self._rows.items() if held.weights == weights)
    return max(found, key=lambda match: match.length, default=NO_MATCH)

  def use(self, row: int) -> None:
    """Make a row the most recently used one."""
    self._rows[row] = dataclasses.replace(self._rows[row], used=next(self._clock))
    self._rows.move_to_end(row)

  @property
  def displaced(self) -> int:
    """Time of the last use of the row that would be evicted next; −1: there is a free row."""
    return -1 if self._free else next(iter(self._rows.values())).used

  def take(self, weights: Hashable, tokens: np.ndarray) -> int | None:
    """Return the row to store these tokens in; None if a row begins with them already.

    Rows that hold a beginning of these tokens are freed first; the row is a free one or the least recently used.
    """
    own = {row: held.tokens for row, held in self._rows.items() if held.weights == weights}
    for row, held in own.items():
      if _common(held, tokens) == len(tokens):
        self.use(row)
        return None
    for row, held in own.items():
      if _common(held, tokens) == len(held):
        self._drop(row)
    row = self._free.pop() if self._free else self._rows.popitem(last=False)[0]
    self._rows[row] = _Row(weights, tokens, next(self._clock))
    return row

  def release(self, gone: Callable[[Hashable], bool]) -> None:
    """Free the rows with weights for which `gone` returns True."""
    for row in [row for row, held in self._rows.items() if gone(held.weights)]:
      self._drop(row)

  def _drop(self, row: int) -> None:
    del self._rows[row]
    self._free.append(row)


def _common(one: np.ndarray, other: np.ndarray) -> int:
  """Return the number of common leading tokens."""
  length = min(len(one), len(other))
  different = np.flatnonzero(one[:length] != other[:length])
  return int(different[0]) if len(different) else length


class KeptPrefixes:
  """Rows of kept keys and values, separate from the sampler's cache, and prompts that are extended from them.

  When a prompt is prefilled, a row is copied into a cache of its own, so the row may be overwritten afterwards.
  """

  def __init__(self, functions: SamplerFunctions, sizes: SamplerSizes, rows: int):
    """Make empty rows.

    Args:
      functions: the sampler's functions.
      sizes: sizes of the sampler's arrays; a row is as long as the longest prompt.
      rows: number of rows of each shard, at least one.
    """
    self._functions, self._sizes, self._count = functions, sizes, rows
    clock = itertools.count()
    self._rows = [KeptRows(rows, clock) for _ in range(functions.shards)]
    self._cache: KVCache | None = None

  def __len__(self) -> int:
    return sum(map(len, self._rows))

  @property
  def cache(self) -> KVCache:
    """The cache that holds all rows, allocated on first use."""
    if self._cache is None:
      self._cache = self._functions.empty(rows=self._functions.shards * self._count, slots=self._sizes.prefix)
    return self._cache

  def match(self, shard: int, samples: Samples) -> Match:
    """Return the row of a shard from which extending a prompt takes less work than prefilling it; else `NO_MATCH`."""
    if samples.weights is None:
      return NO_MATCH
    found = self._rows[shard].match(samples.weights, samples.prompt[:-1])
    piece = self._sizes.piece
    left = -(-(len(samples.prompt) - 1 - found.length) // piece) * piece
    return found if found.length and left < samples.width else NO_MATCH

  def shard_of(self, samples: Samples, shards: Sequence[int]) -> int:
    """Return the best shard to begin a prompt in.

    It is the one with the longest match; among several, the one with most free slots; and among these, one with a free
    row, or else the one whose next row to be evicted was used longest ago.

    Args:
      samples: samples of the prompt.
      shards: the shard of every free slot.
    """
    free = collections.Counter(shards)
    return max(free, key=lambda at: (self.match(at, samples).length, free[at], -self._rows[at].displaced))

  def extended(self, parameters: tuple[Tree, Tree], missing: Mapping[Key, Samples]) -> dict[Key, KeptPrefix]:
    """Return the prefixes of those prompts that can be extended from a kept row.

    Args:
      parameters: base and trainable tree, prepared.
      missing: the prompts.
    """
    of_shard: list[list[tuple[Key, Match]]] = [[] for _ in self._rows]
    for key, samples in missing.items():
      match = self.match(key[0], samples)
      if match != NO_MATCH:
        of_shard[key[0]].append((key, match))
    size, found = self._sizes.prompts(self._sizes.prefix), {}
    for first in range(0, max(map(len, of_shard)), size):
      chosen = [some[first : first + size] for some in of_shard]
      cache = self._extend(parameters, [[(missing[key], match) for key, match in some] for some in chosen], size)
      for some in chosen:
        found |= {key: KeptPrefix(cache, row, match.length) for row, (key, match) in enumerate(some)}
    return found

  def _extend(
    self, parameters: tuple[Tree, Tree], chosen: Sequence[Sequence[tuple[Samples, Match]]], size: int
  ) -> KVCache:
    """Return a cache with `size` rows per shard, the first of which hold the chosen prompts."""
    rows = len(chosen) * size
    tokens = np.zeros((rows, self._sizes.prefix), np.int32)
    source, held, new = (np.zeros(rows, np.int32) for _ in range(3))
    members = self._functions.no_members(rows)
    for shard, of_rows in enumerate(chosen):
      for at, (samples, match) in enumerate(of_rows, shard * size):
        behind = samples.prompt[match.length : -1]
        tokens[at, : len(behind)], new[at] = behind, len(behind)
        source[at], held[at], members[at] = match.row, match.length, samples.member
        self._rows[shard].use(match.row)
    arrays = source, tokens, held, new, *([members] if self._functions.pooled else [])
    return self._functions.extend(*parameters, self.cache, *self._functions.put(arrays), piece=self._sizes.piece)

  def keep(self, cache: KVCache, left: Sequence[tuple[int, int, Samples, np.ndarray]], most: int) -> None:
    """Keep the keys and values of finished samples.

    Args:
      cache: cache with the slots.
      left: (shard, slot in the shard, samples, tokens in the slot) of each sample.
      most: number of slots of a shard.
    """
    moves = []
    for shard, slot, samples, tokens in left:
      # Which of a prompt's samples a conversation continues is not known: one of them is kept, for its prompt.
      if samples.weights is None or not len(tokens) or (len(samples) > 1 and self._covers(shard, samples)):
        continue
      row = self._rows[shard].take(samples.weights, tokens[: self._sizes.prefix])
      if row is not None:
        moves.append((shard, slot, row))
    if moves:
      self._cache = self._functions.copied(self.cache, cache, moves, most)

  def release(self, gone: Callable[[Hashable], bool]) -> None:
    """Free the rows with weights for which `gone` returns True."""
    for rows in self._rows:
      rows.release(gone)

  def _covers(self, shard: int, samples: Samples) -> bool:
    """Return whether a row holds a whole prompt."""
    tokens = samples.prompt[:-1]
    return self._rows[shard].match(samples.weights, tokens).length == len(tokens)

  @property
  def bytes(self) -> int:
    """Memory of all rows in bytes; 0 before a row is used."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache))
