"""Keys and values that outlive their request, so that a prompt that begins as an earlier one is not read again.

A row holds what a sample had in its slot when it left, prompt and completion; the next turn of a conversation begins
with it. Rows are found by the weights that they were computed with and by their tokens. Those that were used longest
ago go first.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import NamedTuple, Protocol

import jax
import numpy as np

from models.cache import KVCache
from models.policy import NO_MEMBER
from sdpo_jax.rollout.functions import SamplerFunctions
from sdpo_jax.rollout.sizes import Sizes
from sdpo_jax.types import Tree


class Prompt(Protocol):
  """What is read of samples here."""

  @property
  def prompt(self) -> np.ndarray:
    """[length] int32."""
    ...

  @property
  def width(self) -> int:
    """The bucket of the prompt."""
    ...

  @property
  def weights(self) -> Hashable:
    """What is equal of prompts of which one may read the keys and values of another; None: it reads none."""
    ...

  @property
  def member(self) -> int:
    """Of a pool of adapters, which one reads the prompt."""
    ...

  def __len__(self) -> int: ...


class Match(NamedTuple):
  """A row that begins as a prompt does."""

  row: int  # In its shard.
  length: int  # Tokens that both begin with; 0: there is no such row.


class Prefix(NamedTuple):
  """Where the keys and values of a prompt are."""

  cache: KVCache
  row: int  # In its shard.
  reused: int = 0  # Tokens of them that were kept of an earlier prompt.


NO_MATCH = Match(0, 0)
Key = tuple[int, Hashable]  # (shard, prefix of samples).


@dataclasses.dataclass(frozen=True)
class _Row:
  weights: Hashable
  tokens: np.ndarray  # [length] int32.
  used: int  # When it was used last.


class KeptRows:
  """Which rows of one shard hold what, as the host knows it."""

  def __init__(self, count: int, clock: Iterator[int]):
    """Make rows that hold nothing.

    Args:
      count: of rows.
      clock: counts what is done with the rows of all shards.
    """
    self._clock = clock
    self._free = list(range(count))[::-1]
    self._rows: collections.OrderedDict[int, _Row] = collections.OrderedDict()  # The one used longest ago first.

  def __len__(self) -> int:
    return len(self._rows)

  def match(self, weights: Hashable, tokens: np.ndarray) -> Match:
    """Return the row of the same weights that has the most tokens in common with the beginning of these."""
    found = (Match(row, _common(held.tokens, tokens)) for row, held in self._rows.items() if held.weights == weights)
    return max(found, key=lambda match: match.length, default=NO_MATCH)

  def use(self, row: int) -> None:
    """Note that a row was used now."""
    self._rows[row] = dataclasses.replace(self._rows[row], used=next(self._clock))
    self._rows.move_to_end(row)

  @property
  def displaced(self) -> int:
    """When the row was used last that other tokens would take; −1: there is a free one."""
    return -1 if self._free else next(iter(self._rows.values())).used

  def take(self, weights: Hashable, tokens: np.ndarray) -> int | None:
    """Return the row that these tokens are to be put into; None: there is one that begins with them already.

    It is that of tokens which these begin with and thereby replace, a free one, or the one used longest ago.
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
    """Frees the rows of weights that are `gone`."""
    for row in [row for row, held in self._rows.items() if gone(held.weights)]:
      self._drop(row)

  def _drop(self, row: int) -> None:
    del self._rows[row]
    self._free.append(row)


def _common(one: np.ndarray, other: np.ndarray) -> int:
  """Return how many tokens both begin with."""
  length = min(len(one), len(other))
  different = np.flatnonzero(one[:length] != other[:length])
  return int(different[0]) if len(different) else length


class KeptPrefixes:
  """Rows of keys and values that stay, beside the cache of a sampler, and the prompts that are continued from them.

  A row is read when a prompt is prefilled, into a cache of its own: what becomes of the row afterwards does not matter.
  """

  def __init__(self, functions: SamplerFunctions, sizes: Sizes, rows: int):
    """Make rows that hold nothing.

    Args:
      functions: of the sampler.
      sizes: of its arrays; a row is as long as a prompt can be.
      rows: of each shard, at least one.
    """
    self._functions, self._sizes, self._count = functions, sizes, rows
    clock = itertools.count()
    self._rows = [KeptRows(rows, clock) for _ in range(functions.shards)]
    self._cache: KVCache | None = None

  def __len__(self) -> int:
    return sum(map(len, self._rows))

  @property
  def cache(self) -> KVCache:
    """Of all rows."""
    if self._cache is None:
      self._cache = self._functions.empty(rows=self._functions.shards * self._count, slots=self._sizes.prefix)
    return self._cache

  def match(self, shard: int, samples: Prompt) -> Match:
    """Return the row of a shard that is worth continuing for a prompt: what is left of it takes less than all of it."""
    if samples.weights is None:
      return NO_MATCH
    found = self._rows[shard].match(samples.weights, samples.prompt[:-1])
    piece = self._sizes.piece
    left = -(-(len(samples.prompt) - 1 - found.length) // piece) * piece
    return found if found.length and left < samples.width else NO_MATCH

  def shard_of(self, samples: Prompt, shards: Sequence[int]) -> int:
    """Return the shard in which a prompt is begun best.

    It is the one that has most of it; of several, the one with most free slots; and of these, the one that loses least
    by keeping it.

    Args:
      samples: with the prompt.
      shards: those of all free slots.
    """
    free = collections.Counter(shards)
    return max(free, key=lambda at: (self.match(at, samples).length, free[at], -self._rows[at].displaced))

  def extended(self, parameters: tuple[Tree, Tree], missing: Mapping[Key, Prompt]) -> dict[Key, Prefix]:
    """Return those of the prompts that begin as something that was kept: that, and the tokens behind it.

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
        found |= {key: Prefix(cache, row, match.length) for row, (key, match) in enumerate(some)}
    return found

  def _extend(
    self, parameters: tuple[Tree, Tree], chosen: Sequence[Sequence[tuple[Prompt, Match]]], size: int
  ) -> KVCache:
    """Return a cache with `size` rows for each shard, the first of them the chosen prompts'."""
    rows = len(chosen) * size
    tokens = np.zeros((rows, self._sizes.prefix), np.int32)
    source, held, new = (np.zeros(rows, np.int32) for _ in range(3))
    members = np.full(rows, NO_MEMBER, np.int32)
    for shard, of_rows in enumerate(chosen):
      for at, (samples, match) in enumerate(of_rows, shard * size):
        behind = samples.prompt[match.length : -1]
        tokens[at, : len(behind)], new[at] = behind, len(behind)
        source[at], held[at], members[at] = match.row, match.length, samples.member
        self._rows[shard].use(match.row)
    arrays = source, tokens, held, new, *([members] if self._functions.pooled else [])
    return self._functions.extend(*parameters, self.cache, *self._functions.put(arrays), piece=self._sizes.piece)

  def keep(self, cache: KVCache, left: Sequence[tuple[int, int, Prompt, np.ndarray]], most: int) -> None:
    """Keep what samples have in their slots.

    Args:
      cache: in which they have them.
      left: (shard, slot in the shard, samples, tokens in the slot) of each.
      most: slots of a shard.
    """
    source, target = (np.zeros((self._functions.shards, most), np.int32) for _ in range(2))
    count = np.zeros(self._functions.shards, np.int32)
    for shard, slot, samples, tokens in left:
      # Of several samples of a prompt, which one is gone on with cannot be known: one of them is kept, for the prompt.
      if samples.weights is None or not len(tokens) or (len(samples) > 1 and self._covers(shard, samples)):
        continue
      row = self._rows[shard].take(samples.weights, tokens[: self._sizes.prefix])
      if row is not None:
        source[shard, count[shard]], target[shard, count[shard]] = slot, row
        count[shard] += 1
    if count.any():
      indices = self._functions.put((source.reshape(-1), target.reshape(-1), count))
      self._cache = self._functions.copy(self.cache, cache, *indices)

  def release(self, gone: Callable[[Hashable], bool]) -> None:
    """Frees the rows of weights that are `gone`."""
    for rows in self._rows:
      rows.release(gone)

  def _covers(self, shard: int, samples: Prompt) -> bool:
    """Says whether a whole prompt is there."""
    tokens = samples.prompt[:-1]
    return self._rows[shard].match(samples.weights, tokens).length == len(tokens)

  @property
  def bytes(self) -> int:
    """Of all rows."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache))
