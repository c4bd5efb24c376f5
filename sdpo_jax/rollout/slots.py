"""Slots and the samples in them: which cache each has, which sample is next, when the cache grows and shrinks.

A slot is a row of the batch that a decode step advances, and holds one sample at a time or none. Each shard of a mesh
has as many slots as every other.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math

import jax
import numpy as np

from models import cache as kv_cache
from models.cache import KVCache
from sdpo_jax.rollout import decode
from sdpo_jax.rollout.functions import SamplerFunctions
from sdpo_jax.rollout.queue import Queue
from sdpo_jax.rollout.sampling import SamplingParams
from sdpo_jax.rollout.sizes import Size, Sizes
from sdpo_jax.types import Tree

REFILLS = 16  # The decode loop is interrupted for a refill when one slot in so many is free.
RECORDS = ('sampling_log_probs', 'model_log_probs', 'entropy')


def closed_up(held: np.ndarray, rows: int) -> np.ndarray:
  """Returns [rows] the slot that each of the first `rows` takes over: its own or, where free, one of `held` behind."""
  source = np.arange(rows)
  behind = held[held >= rows]
  source[np.setdiff1d(source, held)[: len(behind)]] = behind
  return source


@dataclasses.dataclass(frozen=True)
class Request:
  """G prompts and N = G · n samples of them."""

  prompts: np.ndarray  # [G, P] int32, right-padded.
  lengths: np.ndarray  # [G] int32.
  widths: np.ndarray  # [G] the bucket of each prompt.
  n: int
  knobs: dict[str, np.ndarray]  # [N] each: those of `SamplingParams` that differ from sample to sample.
  stop_ids: np.ndarray  # [M] int32.
  room: int  # Tokens of a completion at most.
  seed: int
  step: int  # Number of the generation batch.


@dataclasses.dataclass
class SamplingStats:
  """Counts of what sampling a request took."""

  tokens: int = 0  # Drawn and kept.
  prompts: int = 0  # Prefilled; one that several shards need counts once for each.
  dispatches: int = 0  # Calls of the decode loop.
  decode_steps: int = 0  # Of the decode loop; one draws a token in every slot.
  row_steps: int = 0  # Decode steps × slots, slots without a sample included.
  cache_bytes: int = 0  # Largest total of all caches, those of prompts whose samples wait included.
  live_bytes: int = 0  # Largest total of what live samples filled: the least that any cache could do with.


class Slots:
  """A request under way: `admit`, `advance` and `collect` in turns until nothing is admitted any more.

  Every process of a run decides the same, from the same values.
  """

  def __init__(
    self,
    functions: SamplerFunctions,
    parameters: tuple[Tree, Tree],
    request: Request,
    sizes: Sizes,
    chunk: int,
  ):
    """Makes slots for samples, which draw at most `chunk` tokens between two looks."""
    self.stats = SamplingStats()
    self._functions, self._parameters, self._request, self._chunk = functions, parameters, request, chunk
    shards = functions.shards
    # Prompts of the same bucket next to each other, so that they are prefilled together.
    self._queue = Queue(np.argsort(request.widths, kind='stable').tolist(), request.n, shards)
    self._sizes = sizes
    self._size: Size | None = None  # Of the cache.
    rows = shards * sizes.rows
    self._cache: KVCache | None = None
    self._prefixes: dict[tuple[int, int], tuple[KVCache, int]] = {}  # (shard, prompt) → a cache, its row in the shard.
    self._sample = np.full(rows, -1, np.int32)  # -1: free.
    self._held = np.zeros(rows, np.int32)  # Tokens in the cache.
    self._token = np.zeros(rows, np.int32)
    self._drawn = np.zeros(rows, np.int32)
    self._tokens = np.zeros((rows, request.room), np.int32)
    self._records = {name: np.zeros((rows, request.room), np.float32) for name in RECORDS}

  def admit(self) -> bool:
    """Gives free slots to samples that wait, and the cache the size that the live ones need; False if there is none."""
    per_shard, request = self._per_shard, self._request
    admitted = []
    for slot in np.flatnonzero(self._sample < 0).tolist():
      taken = self._queue.take(slot // per_shard)
      if taken is None:
        break
      prompt, self._sample[slot] = taken
      admitted.append((slot, prompt))
      self._held[slot], self._drawn[slot] = request.lengths[prompt] - 1, 0
      self._token[slot] = request.prompts[prompt, request.lengths[prompt] - 1]
    if not (self._sample >= 0).any():
      return False
    self._prefill(dict.fromkeys((slot // per_shard, prompt) for slot, prompt in admitted))
    self._fit(ending=not admitted and not self._queue.left)
    self._copy([(slot // per_shard, slot % per_shard, prompt) for slot, prompt in admitted])
    self._count_bytes()
    self._prefixes = {key: prefix for key, prefix in self._prefixes.items() if self._queue.holds(*key)}
    return True

  def advance(self) -> decode.Drawn:
    """Starts some decode steps of all rows; returns what they draw, still on the devices."""
    request, at = self._request, np.maximum(self._sample, 0)
    rows = len(at)
    params = SamplingParams(
      **{name: values[at] for name, values in request.knobs.items()},
      seed=np.full(rows, request.seed % 2**32, np.uint32),
      sample_id=self._sample,
      step=np.int32(request.step),
      stop_ids=np.broadcast_to(request.stop_ids, (rows, len(request.stop_ids))),
    )
    state = decode.DecodeState(params=params, token=self._token, drawn=self._drawn, active=self._sample >= 0)
    if self._queue.left:
      enough = math.ceil(rows / REFILLS)
    else:
      enough = self._sizes.enough(int((self._sample >= 0).sum()), self._functions.shards)
    # The host goes on with its own arrays while these are under way.
    state = self._functions.put(jax.tree.map(np.copy, state))
    self._cache, drawn = self._functions.advance(
      *self._parameters, self._cache, state, np.int32(enough), steps=self._chunk
    )
    return drawn

  def collect(
    self, drawn: decode.Drawn, end: Callable[[np.ndarray, int, bool], int | None]
  ) -> list[tuple[int, np.ndarray, dict[str, np.ndarray], bool]]:
    """Waits for the steps and frees the slots of the samples that they have finished.

    Args:
      drawn: from `advance`.
      end: maps (tokens of a sample, number of them that are not new, whether the sample is done) to the number of
        tokens that a stop string leaves, None if there is none.

    Returns:
      (sample, tokens, records, whether a stop id or string ended it) of each finished sample.
    """
    drawn = self._functions.fetch(drawn)
    active = self._sample >= 0
    self._held += np.where(active, drawn.steps, 0)
    self._count_steps(drawn, active)
    finished = []
    for slot in np.flatnonzero(active).tolist():
      before, count = int(self._drawn[slot]), int(drawn.count[slot])
      length, new = before + count, slice(before, before + count)
      self._tokens[slot, new] = drawn.tokens[:count, slot]
      for name, records in self._records.items():
        records[slot, new] = getattr(drawn, name)[:count, slot]
      self._drawn[slot], self._token[slot] = length, self._tokens[slot, length - 1]
      sample, stopped = int(self._sample[slot]), bool(drawn.stopped[slot])
      done = stopped or length >= self._request.knobs['max_tokens'][sample]
      cut = end(self._tokens[slot, :length], before, done)
      if cut is not None:
        length, stopped, done = cut, True, True
      if done:
        records = {name: records[slot, :length].copy() for name, records in self._records.items()}
        finished.append((sample, self._tokens[slot, :length].copy(), records, stopped))
        self._sample[slot] = -1
        self.stats.tokens += length
    return finished

  def running(self) -> list[tuple[int, np.ndarray]]:
    """Returns (sample, tokens so far) of each sample that has a slot."""
    live = np.flatnonzero(self._sample >= 0).tolist()
    return [(int(self._sample[slot]), self._tokens[slot, : self._drawn[slot]].copy()) for slot in live]

  @property
  def _per_shard(self) -> int:
    return len(self._sample) // self._functions.shards

  def _prefill(self, wanted: dict[tuple[int, int], None]) -> None:
    """Makes the prefixes of (shard, prompt) pairs that are not there yet."""
    shards, request = self._functions.shards, self._request
    missing = [pair for pair in wanted if pair not in self._prefixes]
    for width in sorted({int(request.widths[prompt]) for _, prompt in missing}):
      of_shard = [
        [prompt for at, prompt in missing if at == shard and request.widths[prompt] == width] for shard in range(shards)
      ]
      size = self._sizes.prompts(width)
      for first in range(0, max(map(len, of_shard)), size):
        tokens, lengths = np.zeros((shards * size, width), np.int32), np.ones(shards * size, np.int32)
        chosen = [prompts[first : first + size] for prompts in of_shard]
        for shard, prompts in enumerate(chosen):
          rows = slice(shard * size, shard * size + len(prompts))
          tokens[rows], lengths[rows] = request.prompts[prompts, :width], request.lengths[prompts]
        placed = self._functions.put((tokens, lengths))
        cache = self._functions.prefill(*self._parameters, *placed, slots=self._sizes.prefix)
        for shard, prompts in enumerate(chosen):
          self._prefixes |= {(shard, prompt): (cache, row) for row, prompt in enumerate(prompts)}
    self.stats.prompts += len(missing)

  def _fit(self, ending: bool) -> None:
    """Gives the cache the slots that live samples need until the next look and, where it is `ending`, fewer rows."""
    live = self._sample >= 0
    needed = int(self._held[live].max()) + self._chunk
    rows = self._per_shard
    if ending:
      left = int((self._request.knobs['max_tokens'][self._sample[live]] - self._drawn[live]).max())
      # What is over at the next look anyhow is not worth a move, unless there must be one.
      if left > self._chunk or needed > self._size.slots:
        rows = int(live.reshape(self._functions.shards, -1).sum(1).max())
    for size in self._sizes.path(self._size, needed, rows):
      if self._cache is None:
        self._cache = self._functions.empty(rows=self._functions.shards * size.rows, slots=size.slots)
        self._size = size
      else:
        self._move(size)

  def _move(self, size: Size) -> None:
    """Gives the cache another size; live samples move to the front of their shard where rows go."""
    functions, shards, before = self._functions, self._functions.shards, self._per_shard
    held = [np.flatnonzero(slots) for slots in (self._sample >= 0).reshape(shards, before)]
    order = np.concatenate([shard * before + closed_up(held[shard], size.rows) for shard in range(shards)])
    source = functions.put((order % before).astype(np.int32))
    if functions.keeps_size:
      self._cache = functions.compact(self._cache.stores, self._cache.lengths, source)
    else:
      self._cache = functions.resize(self._cache, source, slots=size.slots)
    self._size = size
    for name in ('_sample', '_held', '_token', '_drawn', '_tokens'):
      setattr(self, name, getattr(self, name)[order])
    self._records = {name: records[order] for name, records in self._records.items()}

  def _copy(self, admitted: list[tuple[int, int, int]]) -> None:
    """Puts the prefixes of samples (shard, slot in the shard, prompt) where they belong."""
    of_cache: dict[int, list[tuple[int, int, int]]] = {}
    for shard, slot, prompt in admitted:
      cache, row = self._prefixes[shard, prompt]
      of_cache.setdefault(id(cache), [cache]).append((shard, slot, row))
    for cache, *places in of_cache.values():
      source, target = (np.zeros((self._functions.shards, self._per_shard), np.int32) for _ in range(2))
      count = np.zeros(self._functions.shards, np.int32)
      for shard, slot, row in places:
        source[shard, count[shard]], target[shard, count[shard]] = row, slot
        count[shard] += 1
      indices = self._functions.put((source.reshape(-1), target.reshape(-1), count))
      self._cache = self._functions.copy(self._cache, cache, *indices)

  def _count_bytes(self) -> None:
    caches = {id(cache): cache for cache, _ in self._prefixes.values()}.values()
    held = sum(leaf.nbytes for cache in (self._cache, *caches) for leaf in jax.tree.leaves(cache))
    # Beside the cache there are the recent tokens of every row.
    held += self._chunk * len(self._sample) * self._slot_bytes()
    self.stats.cache_bytes = max(self.stats.cache_bytes, held)

  def _slot_bytes(self) -> int:
    stores = jax.tree.leaves(self._cache.stores)
    return sum(store.nbytes for store in stores) // (kv_cache.store_rows(self._cache) * self._size.slots)

  def _count_steps(self, drawn: decode.Drawn, active: np.ndarray) -> None:
    stats = self.stats
    stats.dispatches += 1
    stats.decode_steps += int(drawn.steps)
    stats.row_steps += int(drawn.steps) * len(active)
    stats.live_bytes = max(stats.live_bytes, int(self._held[active].sum()) * self._slot_bytes())
