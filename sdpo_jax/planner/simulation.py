"""A run's sampling without a model: its slots, its queue and its choice of batches, on samples of given lengths.

Everything that decides when a sample gets a slot, when the cache shrinks and which samples a step learns from is that
of `rollout` and `training.carry_over`; only what a device would compute is replaced by counts.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from sdpo_jax.models.attention.decode_kernel import BLOCK
from sdpo_jax.models.cache import KVCache, Stores
from sdpo_jax.rollout import sizes
from sdpo_jax.rollout.buckets import smallest_bucket
from sdpo_jax.rollout.decode import Drawn
from sdpo_jax.rollout.functions import SamplerFunctions
from sdpo_jax.rollout.queue import KNOBS, Queue, Samples
from sdpo_jax.rollout.results import SamplingStats
from sdpo_jax.rollout.slots import Carried, Slots
from sdpo_jax.training.carry_over import learned_next

HELD_OUT = 2**30  # Number of the first sample of evaluations.

Program = tuple[str, int, int]  # Kind, rows of all shards, and slots of the cache (of a prefill: of the prompts).


@dataclasses.dataclass(frozen=True)
class SamplingSpec:
  """Whatever the work of a sampler depends on, but its model."""

  shards: int
  max_rows: int  # Slots of all shards, at most.
  widths: tuple[int, ...]  # Buckets of prompts.
  room: int  # Maximum tokens of a completion.
  chunk: int  # Maximum tokens drawn per call of the decode loop.
  keeps_size: bool  # As in `SamplerFunctions`.
  questions: int  # Of a step.
  n: int  # Samples of each.
  max_staleness: int  # `rollout.max_staleness`.
  keeps_carried: bool  # Whether `rollout.carried_cache` is 'kept'.
  held_out: int  # Questions of an evaluation; 0: there are none.
  held_out_n: int  # Samples of each.
  test_freq: int  # Steps from one evaluation to the next.
  prompts: tuple[int, ...]  # Tokens of the questions' prompts, in turn.
  completions: tuple[int, ...]  # Tokens of the samples, in turn, question by question.
  steps: int  # To simulate, at least.


@dataclasses.dataclass
class Work:
  """Calls of a program, and turns of its loop: decode steps, pieces of prompts, rows that are copied."""

  calls: float = 0.0
  turns: float = 0.0
  blocks: float = 0.0  # Sum over turns: blocks of the cache of a row that attention reads, averaged over rows.
  live: float = 0.0  # Sum over turns: rows with a sample.

  def over(self, steps: int) -> Work:
    """Return a step's share of the work of `steps` steps."""
    return Work(*(value / steps for value in vars(self).values()))


@dataclasses.dataclass(frozen=True)
class SimulatedSampling:
  """The work of sampling, averaged over simulated steps."""

  steps: int  # Simulated.
  training: dict[Program, Work]  # Per step.
  evaluation: dict[Program, Work]  # Per step; with carry-over training samples decode beside those of evaluations.
  decode_steps: float  # Per step, those of evaluations included.
  error: float  # Standard error of `decode_steps`.
  tokens: float  # Drawn per step, those of evaluations included.
  recomputed: float  # Tokens per step.
  staleness_mean: float  # Updates since the first token of the samples that are learned from.
  staleness_p95: float
  staleness_max: int
  chosen: list[list[int]]  # Numbers of the questions that each simulated step learns from.


class _Counter:
  """In place of the functions of a sampler: counts the work instead of doing it, and ends samples at their lengths."""

  pooled = False
  members_at_once = rows_alike = None
  no_members, copied = SamplerFunctions.no_members, SamplerFunctions.copied
  put = fetch = staticmethod(lambda tree: tree)

  def __init__(self, spec: SamplingSpec):
    self.shards, self.keeps_size = spec.shards, spec.keeps_size
    self._lengths, self._prompt = np.asarray(spec.completions), float(np.mean(spec.prompts))
    self.work: dict[Program, Work] = collections.defaultdict(Work)  # May be replaced by assignment.
    self.copies = 'admit'  # Likewise; what a copy is for, unless it readmits.

  def _count(self, kind: str, rows: int, slots: int, turns: float = 0, blocks: float = 0, live: float = 0) -> None:
    work = self.work[kind, rows, slots]
    work.calls, work.turns = work.calls + 1, work.turns + turns
    work.blocks, work.live = work.blocks + turns * blocks, work.live + turns * live

  def prefill(self, base: Any, trainable: Any, tokens: np.ndarray, prompts: Any, *, slots: int) -> KVCache:
    self._count('prefill', *tokens.shape)
    return _cache(len(tokens), slots)

  def empty(self, *, rows: int, slots: int) -> KVCache:
    self._count('empty', rows, slots)
    return _cache(rows, slots)

  def copy(self, into: KVCache, rows: KVCache, source: Any, target: Any, count: np.ndarray) -> KVCache:
    self._count('readmit' if rows.recent else self.copies, len(into.lengths), _slots(into), turns=int(count.max()))
    return into

  def resize(self, cache: KVCache, source: np.ndarray, *, slots: int) -> KVCache:
    self._count('compact' if self.keeps_size else 'resize', len(source), slots)
    return _cache(len(source), slots)

  def compact(self, stores: Stores, held: np.ndarray, source: np.ndarray) -> KVCache:
    return self.resize(KVCache(stores, held), source, slots=stores.values.shape[3])

  def clear(self, stores: Stores, filled: np.ndarray) -> KVCache:
    self._count('clear', len(filled), stores.values.shape[3])
    return _cache(len(filled), stores.values.shape[3])

  def extend(
    self, base: Any, trainable: Any, cache: KVCache, source: Any, tokens: Any, held: Any, new: np.ndarray, *, piece: int
  ) -> KVCache:
    pieces = math.ceil(new.max() / piece)
    read = np.minimum(new[:, None], piece * np.arange(pieces))
    self._count('recompute', len(new), _slots(cache), pieces, _blocks(read))
    return cache.replace(recent=True)

  def advance(
    self, base: Any, trainable: Any, cache: KVCache, state: Any, enough: int, *, steps: int
  ) -> tuple[KVCache, Drawn]:
    live = state.active
    left = np.where(live, self._lengths[state.params.sample_id % len(self._lengths)] - state.drawn, 0)
    taken = int(min(steps, np.sort(left[live])[:enough][-1]))
    count, none = np.minimum(left, taken), np.zeros((steps, len(live)), np.float32)
    filled = np.where(live, self._prompt + state.drawn, 0)
    self._count('decode', len(live), _slots(cache), taken, _blocks(filled), int(count.sum()) / taken)
    return cache, Drawn(taken, count, live & (left == count), none.astype(np.int32), none, none, none)


def _cache(rows: int, slots: int) -> KVCache:
  """Return a cache whose arrays have shapes but no memory of their own."""
  view = np.broadcast_to(np.int8(0), (1, rows, 1, slots, 1))
  return KVCache(Stores(view, view), np.zeros(rows, np.int32))


def _slots(cache: KVCache) -> int:
  return cache.stores.values.shape[3]


def _blocks(filled: np.ndarray) -> float:
  """Return the average number of blocks that attention to rows with so many tokens reads; an empty row has one."""
  return float(np.maximum(np.ceil(filled / BLOCK), 1).mean())


@dataclasses.dataclass(eq=False)
class _Group:
  """What `learned_next` reads of an open group, and what its samples have drawn."""

  number: int
  request: Samples
  begun: int
  last: int = 0
  first: dict[int, int] = dataclasses.field(default_factory=dict)  # Sample → the step whose weights began it.
  ended: set[int] = dataclasses.field(default_factory=set)
  complete: bool = False


class SimulatedRun:
  """The sampling of a run, step by step, as in `training.carry_over` or, if no sample may be old, in `Sampler`."""

  def __init__(self, spec: SamplingSpec):
    self._spec, self.counter = spec, _Counter(spec)
    self._groups: dict[int, _Group] = {}
    self._carried: list[Carried] = []
    self._parked: KVCache | None = None
    self._admitted = 0
    self.total = SamplingStats()  # Its steps and tokens.
    self.stats = SamplingStats()  # Of what was drawn last.

  def step(self, step: int) -> dict[int, list[int]]:
    """Draw the batch of a step, and return the staleness of each sample by the number of its question."""
    spec = self._spec
    if not spec.max_staleness:
      numbers = range((step - 1) * spec.questions, step * spec.questions)
      self._draw(step - 1, [self._request(number, number * spec.n, spec.n) for number in numbers])
      return {number: [0] * spec.n for number in numbers}
    self.stats = SamplingStats()
    if self._chosen(step) is None:
      self._draw(step - 1)
    chosen = self._chosen(step)
    for group in chosen:
      del self._groups[group.number]
    return {group.number: [step - 1 - first for first in group.first.values()] for group in chosen}

  def evaluate(self, after: int) -> None:
    """Draw the samples of an evaluation after a step."""
    n, questions = self._spec.held_out_n, self._spec.held_out
    numbers = range(after * questions, (after + 1) * questions)
    self._draw(after, [self._request(-1 - number, HELD_OUT + number * n, n) for number in numbers])

  def _request(self, prefix: int, first: int, n: int) -> Samples:
    spec = self._spec
    prompt = np.zeros(spec.prompts[first // n % len(spec.prompts)], np.int32)
    knobs = {name: np.full(n, spec.room, kind) for name, kind in KNOBS.items()}
    width = smallest_bucket(spec.widths, len(prompt))
    return Samples(prompt, width, first, knobs, stop_ids=prompt[:0], seed=0, step=1, prefix=prefix)

  def _slots(self, most: int, asked: Sequence[Samples]) -> Slots:
    spec = self._spec
    samples = max(most * spec.n, spec.held_out * spec.held_out_n) if most else sum(map(len, asked))
    rows = sizes.shard_rows(max(samples, spec.questions * spec.n), spec.max_rows, spec.shards)
    refilled, chunk = most > 0 or samples > rows * spec.shards, spec.chunk
    size = dict(widths=spec.widths, room=spec.room, chunk=chunk, keeps_size=spec.keeps_size)
    queue = Queue(spec.shards, sorted(asked, key=lambda samples: samples.width))
    taken = sizes.sizes(rows=rows, refilled=refilled, **size)
    return Slots(self.counter, ((), ()), taken, queue, stop_ids=0, closed=not most)

  def _chosen(self, step: int) -> list[_Group] | None:
    return learned_next([*self._groups.values()], step, self._spec.max_staleness, self._spec.questions)

  def _draw(self, after: int, asked: Sequence[Samples] = ()) -> None:
    """Draw what is asked for after a step, or else the next step's batch, both beside the samples of open groups."""
    spec = self._spec
    most = (spec.max_staleness + 1) * spec.questions if spec.max_staleness else 0  # Open groups.
    slots, left = self._slots(most, asked), {each.first + at for each in asked for at in range(len(each))}
    has_slot = {each.number for each in self._carried}
    for group in self._groups.values():
      waiting = [at for at in range(spec.n) if at not in group.ended and group.request.first + at not in has_slot]
      for part in group.request.parts(waiting):
        slots.queue.add(part)
    slots.resume(self._carried, self._parked)
    while left or (not asked and self._chosen(after + 1) is None):
      while slots.queue.left < slots.free and len(self._groups) < most:
        request = self._request(self._admitted, self._admitted * spec.n, spec.n)
        self._groups[self._admitted] = _Group(self._admitted, request, after)
        slots.queue.add(request)
        self._admitted += 1
      slots.closed = len(self._groups) == most
      slots.admit()
      clock = self.total.decode_steps + slots.stats.decode_steps
      for done in slots.collect(slots.advance(), lambda *_: None):
        if done.number in left:
          left.remove(done.number)
          continue
        group, index = self._at(done.number, after)
        group.ended.add(index)
        group.last, group.complete = max(group.last, clock + done.new), len(group.ended) == spec.n
    self._carried, self.stats = slots.carried(), slots.stats
    if most and spec.keeps_carried:
      self.counter.copies = 'park'
      self._parked = slots.parked().replace(recent=True)
      self.counter.copies = 'admit'
    for each in self._carried:
      self._at(each.number, after)
    for name in ('decode_steps', 'tokens', 'recomputed'):
      setattr(self.total, name, getattr(self.total, name) + getattr(self.stats, name))

  def _at(self, number: int, after: int) -> tuple[_Group, int]:
    """Return the group of a sample, of which something was drawn, and its index in it."""
    group, index = divmod(number, self._spec.n)
    self._groups[group].first.setdefault(index, after)
    return self._groups[group], index


def simulate(spec: SamplingSpec) -> SimulatedSampling:
  """Return the work of sampling per step, averaged over whole periods of evaluations once the first groups are over."""
  run, period = SimulatedRun(spec), spec.test_freq if spec.held_out else 1
  steps = period * math.ceil(spec.steps / period)
  begin = period * math.ceil(4 * spec.max_staleness / period)
  training, evaluation = run.counter.work, collections.defaultdict(Work)
  learned, clocks = [], [0]
  for step in range(1, begin + steps + 1):
    if step == begin + 1:
      training.clear()
      evaluation.clear()
      run.total.tokens = run.total.recomputed = 0
    run.counter.work = training
    learned.append(run.step(step))
    if spec.held_out and not step % period:
      run.counter.work = evaluation
      run.evaluate(step)
    if not step % period:
      clocks.append(run.total.decode_steps)
  taken, learned = np.diff(clocks[begin // period :]) / period, learned[begin:]
  stale = [age for batch in learned for ages in batch.values() for age in ages]
  return SimulatedSampling(
    steps=steps,
    training={program: work.over(steps) for program, work in training.items()},
    evaluation={program: work.over(steps) for program, work in evaluation.items()},
    decode_steps=float(taken.mean()),
    error=float(taken.std(ddof=1) / math.sqrt(len(taken))) if len(taken) > 1 else math.nan,
    tokens=run.total.tokens / steps,
    recomputed=run.total.recomputed / steps,
    staleness_mean=float(np.mean(stale)),
    staleness_p95=float(np.quantile(stale, 0.95)),
    staleness_max=max(stale),
    chosen=[[*batch] for batch in learned],
  )
