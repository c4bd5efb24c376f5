"""Slots: the samples in them, which sample is admitted next, and when their cache grows and shrinks.

A slot is a row of the batch that a decode step advances, and holds one sample at a time or none. All shards of a mesh
have the same number of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
import dataclasses

import jax
import numpy as np

from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models.cache import KVCache
from sdpo_jax.models.policy import NO_MEMBER
from sdpo_jax.rollout import decode
from sdpo_jax.rollout.functions import SamplerFunctions
from sdpo_jax.rollout.kept_prefixes import KeptPrefix, KeptPrefixes
from sdpo_jax.rollout.queue import KNOBS, Queue, Samples
from sdpo_jax.rollout.results import Completion, SamplingStats
from sdpo_jax.rollout.sampling import SamplingParams
from sdpo_jax.rollout.sizes import SamplerSizes, Size
from sdpo_jax.rollout.slot_groups import SlotGroups
from sdpo_jax.rollout.stops import Tokenizer, to_text
from sdpo_jax.types import Tree

NO_TOKEN = -1  # Padding of the ids that end a sample.
RECORDS = ('sampling_log_probs', 'model_log_probs', 'entropy')


def closed_up(held: np.ndarray, rows: int) -> np.ndarray:
  """Return [rows]: the slot whose sample moves to each of the first `rows` slots, so that all `held` samples stay."""
  source = np.arange(rows)
  behind = held[held >= rows]
  source[np.setdiff1d(source, held)[: len(behind)]] = behind
  return source


@dataclasses.dataclass(frozen=True)
class Finished:
  """A finished sample as it leaves its slot, without its text."""

  samples: Samples
  number: int  # Number of the sample in its generation batch.
  tokens: np.ndarray  # [length] int32.
  records: dict[str, np.ndarray]  # [length] float32 each: the values of `RECORDS`.
  stopped: bool  # Whether a stop id or stop string ended it.
  new: int  # How many of the tokens the last decode steps drew.
  reused: int  # Tokens of the prompt whose keys and values were reused from an earlier one.

  def completion(self, tokenizer: Tokenizer) -> Completion:
    """Return the sample as a `Completion`, with its text."""
    text = to_text(tokenizer, self.tokens.tolist())
    return Completion(self.number, self.tokens, **self.records, stopped=self.stopped, text=text, reused=self.reused)


@dataclasses.dataclass(frozen=True)
class Carried:
  """A sample under way between two steps of a run, without its keys and values."""

  samples: Samples
  number: int  # Number of the sample in its generation batch.
  shard: int
  slot: int  # Index in its shard.
  tokens: np.ndarray  # [length] int32.
  records: dict[str, np.ndarray]  # [length] float32 each: the values of `RECORDS`.


class Slots:
  """The samples under way: call `admit`, `advance` and `collect` in turn until `admit` returns False.

  Samples may be added and removed between two turns. All processes of a run make the same decisions, from the same
  values.
  """

  def __init__(
    self,
    functions: SamplerFunctions,
    parameters: tuple[Tree, Tree],
    sizes: SamplerSizes,
    queue: Queue,
    *,
    stop_ids: int,
    closed: bool = True,
    kept: int = 0,
  ):
    """Make slots.

    Args:
      functions: the sampler's functions.
      parameters: base and trainable tree, prepared. Between two turns they may be replaced by assignment, with trees
        that hold the same weights for all samples under way.
      sizes: sizes of the arrays.
      queue: the samples that wait, in the order in which they get slots; more may be added between two turns.
      stop_ids: M, maximum number of tokens that end a sample.
      closed: no other samples will come; False: the decode loop is interrupted for free slots even if no sample waits.
        It may be changed by assignment.
      kept: rows of each shard that keep the keys and values of finished samples, for prompts that begin with them.
    """
    self.stats, self.parameters = SamplingStats(), parameters
    self._functions, self._sizes = functions, sizes
    self.queue = queue
    self._size: Size | None = None  # Size of the cache.
    rows, room = functions.shards * sizes.rows, sizes.room
    self.closed = closed
    self._cache: KVCache | None = None
    self._prefixes: dict[tuple[int, Hashable], KeptPrefix] = {}  # By (shard, prefix).
    self._kept = KeptPrefixes(functions, sizes, kept) if kept else None
    if closed and functions.rows_alike is not None:
      raise ValueError('Samples that read cartridges of a pool need a resident sampler, which groups them.')
    self._groups = None if functions.rows_alike is None else SlotGroups(functions.rows_alike)
    self._of: list[Samples | None] = [None] * rows  # None: free.
    self._live = np.zeros(rows, bool)
    self._number = np.full(rows, -1, np.int32)
    self._seed, self._step = np.zeros(rows, np.uint32), np.zeros(rows, np.int32)
    self._member = functions.no_members(rows)  # Those of free slots use none.
    self._cartridge = np.full(rows, NO_MEMBER, np.int32)
    self._knobs = {name: np.zeros(rows, kind) for name, kind in KNOBS.items()}
    self._stop_ids = np.full((rows, stop_ids), NO_TOKEN, np.int32)
    self._held = np.zeros(rows, np.int32)  # Tokens in the cache.
    self._reused = np.zeros(rows, np.int32)  # Tokens of the prompt reused from an earlier one.
    self._token = np.zeros(rows, np.int32)
    self._drawn = np.zeros(rows, np.int32)
    self._carried = np.zeros(rows, np.int32)  # Tokens drawn before `resume`.
    self._tokens = np.zeros((rows, room), np.int32)
    self._records = {name: np.zeros((rows, room), np.float32) for name in RECORDS}

  def remove(self, gone: Callable[[Samples], bool]) -> None:
    """Remove the samples for which `gone` returns True, also from slots; call it between `collect` and `admit`."""
    self.queue.remove(gone)
    leaving = [slot for slot in np.flatnonzero(self._live).tolist() if gone(self._of[slot])]
    self._leave(leaving)

  def release(self, gone: Callable[[Hashable], bool]) -> None:
    """Drop the kept keys and values of weights for which `gone` returns True."""
    if self._kept is not None:
      self._kept.release(gone)

  @property
  def kept_bytes(self) -> int:
    """Bytes of the keys and values kept of finished samples."""
    return 0 if self._kept is None else self._kept.bytes

  def admit(self) -> bool:
    """Give free slots to waiting samples and resize the cache for the live ones; return whether any sample is live."""
    per_shard, admitted = self._per_shard, []
    free = np.flatnonzero(~self._live).tolist()
    if self._groups is not None:
      self._groups.update(self._cartridge, self.queue.waits)
      self.queue.fits = lambda cartridge: bool(self._groups.best(free, cartridge))
    while free and (at := self._next_slot(free)) is not None:
      taken = self.queue.take(free[at] // per_shard)
      if taken is None:
        break
      slot = free.pop(at)
      self._take(slot, *taken)
      admitted.append((slot, taken[0]))
    if self._groups is not None and (blocked := self.queue.passed_over) is not None:
      self._groups.reserve(blocked)
    if not self._live.any():
      return False
    self._prefill({(slot // per_shard, samples.prefix): samples for slot, samples in admitted})
    self._fit(ending=self.closed and not admitted and not self.queue.left)
    self._copy([(slot // per_shard, slot % per_shard, samples.prefix) for slot, samples in admitted])
    for slot, samples in admitted:
      self._reused[slot] = self._prefixes[slot // per_shard, samples.prefix].reused
    self._count_bytes()
    self._prefixes = {key: prefix for key, prefix in self._prefixes.items() if self.queue.holds(*key)}
    return True

  def advance(self) -> decode.Drawn:
    """Start some decode steps of all rows; return their result, still on the devices."""
    live = np.flatnonzero(self._live)
    # A free row copies the parameters of a live one, so that it triggers no work that live rows do not need.
    like = np.where(self._live, np.arange(len(self._live)), live[0])
    params = SamplingParams(
      **{name: values[like] for name, values in self._knobs.items()},
      seed=self._seed[like],
      sample_id=self._number,
      step=self._step[like],
      stop_ids=self._stop_ids[like],
    )
    state = decode.DecodeState(params=params, token=self._token, drawn=self._drawn, active=self._live)
    if self._functions.pooled:
      state = state.replace(members=self._member)
    if self.queue.left or not self.closed:
      enough = self.queue.refill(len(like))
    else:
      enough = self._sizes.enough(len(live), self._functions.shards)
    # Copies, since the host changes its arrays while the steps run.
    state = self._functions.put(jax.tree.map(np.copy, state))
    self._cache, drawn = self._functions.advance(
      *self.parameters, self._cache, state, np.int32(enough), steps=self._sizes.chunk
    )
    return drawn

  def collect(self, drawn: decode.Drawn, end: Callable[[Samples, np.ndarray, int, bool], int | None]) -> list[Finished]:
    """Wait for the steps and free the slots of samples that are done.

    Args:
      drawn: result of `advance`.
      end: maps (samples, tokens of one of them, number of tokens that are not new, whether it is done) to the number of
        tokens up to and including its first stop string; None if there is none.

    Returns:
      The finished samples.
    """
    drawn = self._functions.fetch(drawn)
    active = self._live.copy()
    self._held += np.where(active, drawn.steps, 0)
    self._count_steps(drawn, active)
    finished, leaving = [], []
    step, row = np.nonzero(active & (np.arange(len(drawn.tokens))[:, None] < drawn.count))
    new = row, self._drawn[row] + step
    self._tokens[new] = drawn.tokens[step, row]
    for name, records in self._records.items():
      records[new] = getattr(drawn, name)[step, row]
    for slot in np.flatnonzero(active).tolist():
      before = int(self._drawn[slot])
      length = before + int(drawn.count[slot])
      self._drawn[slot], self._token[slot] = length, self._tokens[slot, length - 1]
      stopped = bool(drawn.stopped[slot])
      done = stopped or length >= self._knobs['max_tokens'][slot]
      cut = end(self._of[slot], self._tokens[slot, :length], before, done)
      if cut is not None:
        length, stopped, done = cut, True, True
      if done:
        records = {name: records[slot, :length].copy() for name, records in self._records.items()}
        tokens = self._tokens[slot, :length].copy()
        number, reused = int(self._number[slot]), int(self._reused[slot])
        finished.append(Finished(self._of[slot], number, tokens, records, stopped, length - before, reused))
        leaving.append(slot)
        self.stats.tokens += length - int(self._carried[slot])
    self._leave(leaving)
    return finished

  @property
  def free(self) -> int:
    """Number of slots without a sample."""
    return int((~self._live).sum())

  def carried(self) -> list[Carried]:
    """Return the samples that have a slot, for `resume` of slots with other parameters; these here are then over."""
    found = []
    for slot in np.flatnonzero(self._live).tolist():
      length = int(self._drawn[slot])
      records = {name: values[slot, :length].copy() for name, values in self._records.items()}
      tokens = self._tokens[slot, :length].copy()
      found.append(Carried(self._of[slot], int(self._number[slot]), *divmod(slot, self._per_shard), tokens, records))
      self.stats.tokens += length - int(self._carried[slot])
    return found

  def parked(self) -> KVCache:
    """Return the keys and values of the samples under way, in rows with the numbers of their slots, for `resume`.

    All else is 0, so that a checkpoint compresses it. The slots, which are then over, hold no second cache.
    """
    functions, per_shard, most = self._functions, self._per_shard, Size(self._sizes.rows, self._sizes.stages[-1].slots)
    live = [(*divmod(slot, per_shard), slot) for slot in np.flatnonzero(self._live).tolist()]
    filled = np.zeros((functions.shards, most.rows), np.int32)
    for shard, row, slot in live:
      filled[shard, row] = self._held[slot]
    if self._cache is None or not (functions.keeps_size or self._size == most):
      empty = functions.empty(rows=functions.shards * most.rows, slots=most.slots)
      moves = [(shard, row, row) for shard, row, _ in live]
      self._cache = empty if self._cache is None else functions.copied(empty, self._cache, moves, most.rows)
    cache, self._cache = self._cache, None
    return functions.clear(cache.stores, functions.put(filled.reshape(-1)))

  def resume(self, carried: Sequence[Carried], parked: KVCache | None = None) -> None:
    """Give samples under way the slots that they had; call it before `admit`.

    Args:
      carried: the samples.
      parked: their keys and values; None: they are computed from the tokens.
    """
    for each in carried:
      slot, length = each.shard * self._per_shard + each.slot, len(each.tokens)
      self._take(slot, each.samples, each.number - each.samples.first)
      self._drawn[slot] = self._carried[slot] = length
      self._held[slot] += length
      self._token[slot], self._tokens[slot, :length] = each.tokens[-1], each.tokens
      for name, values in self._records.items():
        values[slot, :length] = each.records[name]
    if not carried:
      return
    self._fit(ending=False)
    if parked is not None:
      moves = [(each.shard, each.slot, each.slot) for each in carried]
      self._cache = self._functions.copied(self._cache, parked, moves, self._per_shard)
      return
    # Rows of about the same length together, since a call takes as many steps as its longest row.
    by_length = sorted(np.flatnonzero(self._live).tolist(), key=lambda slot: (self._held[slot], slot))
    of_shard = [
      [slot for slot in by_length if slot // self._per_shard == shard] for shard in range(self._functions.shards)
    ]
    size = self._sizes.recomputed
    for first in range(0, max(map(len, of_shard)), size):
      self._recompute([of_rows[first : first + size] for of_rows in of_shard], size)
    self.stats.recomputed += int(self._held[self._live].sum())

  def _recompute(self, chosen: Sequence[Sequence[int]], size: int) -> None:
    """Compute the keys and values of at most `size` slots of each shard from their tokens."""
    functions, rows, slots = self._functions, len(chosen) * size, self._sizes.stages[-1].slots
    tokens = np.zeros((rows, slots - self._sizes.chunk), np.int32)
    new, none = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    members, moves = functions.no_members(rows), []
    for shard, of_rows in enumerate(chosen):
      for row, slot in enumerate(of_rows):
        at = shard * size + row
        # The newest token is not in the cache.
        own = np.append(self._of[slot].prompt, self._tokens[slot, : self._drawn[slot] - 1])
        tokens[at, : len(own)], new[at], members[at] = own, len(own), self._member[slot]
        moves.append((shard, row, slot % self._per_shard))
    arrays = none, tokens, none, new, *([members] if functions.pooled else [])
    empty = functions.empty(rows=rows, slots=slots)
    cache = functions.extend(*self.parameters, empty, *functions.put(arrays), piece=self._sizes.recomputed_piece)
    self._cache = functions.copied(self._cache, cache, moves, self._per_shard)

  def running(self) -> list[tuple[Samples, int, np.ndarray]]:
    """Return (samples, number of the sample, tokens so far) of each sample that has a slot."""
    live = np.flatnonzero(self._live).tolist()
    return [(self._of[slot], int(self._number[slot]), self._tokens[slot, : self._drawn[slot]].copy()) for slot in live]

  def _take(self, slot: int, samples: Samples, index: int) -> None:
    """Give a slot to sample number `index` of a prompt."""
    self._of[slot], self._live[slot], self._number[slot] = samples, True, samples.first + index
    self._seed[slot], self._step[slot], self._member[slot] = samples.seed % 2**32, samples.step, samples.member
    self._cartridge[slot] = samples.cartridge
    if self._groups is not None:
      self._groups.give(slot, samples.cartridge)
    for name, values in self._knobs.items():
      values[slot] = samples.knobs[name][index]
    self._stop_ids[slot], self._stop_ids[slot, : len(samples.stop_ids)] = NO_TOKEN, samples.stop_ids
    self._held[slot], self._token[slot] = len(samples.prompt) - 1, samples.prompt[-1]
    self._drawn[slot] = self._carried[slot] = 0

  def _next_slot(self, free: list[int]) -> int | None:
    """Return the index in `free` of the next slot to fill, the first that fits or one in the best shard for the prompt.

    None: no slot fits any sample.
    """
    fitting = range(len(free))
    if self._groups is not None:
      cartridge = self.queue.cartridge
      if cartridge is None:
        return None
      fitting = self._groups.best(free, cartridge)
    if self._kept is None or self._functions.shards == 1:
      return fitting[0]
    shards = [free[at] // self._per_shard for at in fitting]
    begun = [at for at, shard in zip(fitting, shards, strict=True) if self.queue.begun(shard)]
    samples = self.queue.head
    if begun or samples is None:  # Samples that wait in a shard come first.
      return begun[0] if begun else fitting[0]
    return fitting[shards.index(self._kept.shard_of(samples, shards))]

  def _leave(self, leaving: list[int]) -> None:
    """Free slots, after keeping their keys and values if configured."""
    if self._kept is not None and leaving:
      per_shard = self._per_shard
      # The newest token is not in the slot yet.
      tokens = [np.append(self._of[slot].prompt, self._tokens[slot, : self._drawn[slot] - 1]) for slot in leaving]
      left = [(*divmod(slot, per_shard), self._of[slot], own) for slot, own in zip(leaving, tokens, strict=True)]
      self._kept.keep(self._cache, left, per_shard)
    for slot in leaving:
      self._of[slot], self._live[slot], self._number[slot] = None, False, -1
      self._member[slot] = self._cartridge[slot] = NO_MEMBER

  @property
  def _per_shard(self) -> int:
    return len(self._of) // self._functions.shards

  def _prefill(self, wanted: dict[tuple[int, Hashable], Samples]) -> None:
    """Compute the missing prefixes of (shard, prefix) pairs."""
    shards = self._functions.shards
    new = missing = {key: samples for key, samples in wanted.items() if key not in self._prefixes}
    if self._kept is not None:
      extended = self._kept.extended(self.parameters, missing)
      self._prefixes |= extended
      missing = {key: samples for key, samples in missing.items() if key not in extended}
    for width in sorted({samples.width for samples in missing.values()}):
      of_shard = [
        [samples for (at, _), samples in missing.items() if at == shard and samples.width == width]
        for shard in range(shards)
      ]
      size = self._sizes.prompts(width)
      for first in range(0, max(map(len, of_shard)), size):
        rows = shards * size
        tokens, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
        members = self._functions.no_members(rows)
        chosen = [samples[first : first + size] for samples in of_shard]
        for shard, of_rows in enumerate(chosen):
          for row, samples in enumerate(of_rows, shard * size):
            tokens[row, : len(samples.prompt)], lengths[row] = samples.prompt, len(samples.prompt)
            members[row] = samples.member
        placed = self._functions.put((tokens, lengths, *([members] if self._functions.pooled else [])))
        cache = self._functions.prefill(*self.parameters, *placed, slots=self._sizes.prefix)
        for shard, of_rows in enumerate(chosen):
          self._prefixes |= {(shard, samples.prefix): KeptPrefix(cache, row) for row, samples in enumerate(of_rows)}
    reused = sum(self._prefixes[key].reused for key in new)
    self.stats.prompts += len(new)
    self.stats.prefilled += sum(len(samples.prompt) - 1 for samples in new.values()) - reused
    self.stats.reused += reused

  def _fit(self, ending: bool) -> None:
    """Give the cache the slots that live samples need for the next steps and, if `ending`, fewer rows."""
    live = self._live
    needed = int(self._held[live].max()) + self._sizes.chunk
    rows = self._per_shard
    if ending:
      left = int((self._knobs['max_tokens'] - self._drawn)[live].max())
      # If all samples end within the next steps, shrinking does not pay, unless the cache must be resized anyway.
      if left > self._sizes.chunk or needed > self._size.slots:
        rows = int(live.reshape(self._functions.shards, -1).sum(1).max())
    for size in self._sizes.path(self._size, needed, rows):
      if self._cache is None:
        self._cache = self._functions.empty(rows=self._functions.shards * size.rows, slots=size.slots)
        self._size = size
      else:
        self._move(size)

  def _move(self, size: Size) -> None:
    """Resize the cache; if it loses rows, live samples move to the front of their shard."""
    functions, shards, before = self._functions, self._functions.shards, self._per_shard
    held = [np.flatnonzero(slots) for slots in self._live.reshape(shards, before)]
    order = np.concatenate([shard * before + closed_up(held[shard], size.rows) for shard in range(shards)])
    source = functions.put((order % before).astype(np.int32))
    if functions.keeps_size:
      self._cache = functions.compact(self._cache.stores, self._cache.lengths, source)
    else:
      self._cache = functions.resize(self._cache, source, slots=size.slots)
    self._size = size
    self._of = [self._of[slot] for slot in order.tolist()]
    for name, values in vars(self).items():
      if isinstance(values, np.ndarray):  # All have an entry for every slot.
        setattr(self, name, values[order])
    for kept in (self._knobs, self._records):
      kept |= {name: values[order] for name, values in kept.items()}

  def _copy(self, admitted: list[tuple[int, int, Hashable]]) -> None:
    """Copy the prefixes of admitted samples (shard, slot in the shard, prefix) into their slots."""
    of_cache: dict[int, list[tuple[int, int, int]]] = {}
    for shard, slot, prefix in admitted:
      cache, row, _ = self._prefixes[shard, prefix]
      of_cache.setdefault(id(cache), [cache]).append((shard, row, slot))
    for cache, *moves in of_cache.values():
      self._cache = self._functions.copied(self._cache, cache, moves, self._per_shard)

  def _count_bytes(self) -> None:
    caches = {id(prefix.cache): prefix.cache for prefix in self._prefixes.values()}.values()
    held = sum(leaf.nbytes for cache in (self._cache, *caches) for leaf in jax.tree.leaves(cache))
    held += self.kept_bytes
    # The recent tokens of every row are held in addition to the cache.
    held += self._sizes.chunk * len(self._of) * self._slot_bytes()
    self.stats.cache_bytes = max(self.stats.cache_bytes, held)

  def _slot_bytes(self) -> int:
    stores = jax.tree.leaves(self._cache.stores)
    return sum(store.nbytes for store in stores) // (kv_cache.store_rows(self._cache) * self._size.slots)

  def _count_steps(self, drawn: decode.Drawn, active: np.ndarray) -> None:
    stats = self.stats
    stats.dispatches += 1
    stats.decode_steps += int(drawn.steps)
    stats.row_steps += int(drawn.steps) * len(active)
    stats.live_row_steps += int(drawn.count.sum())
    stats.live_bytes = max(stats.live_bytes, int(self._held[active].sum()) * self._slot_bytes())
