"""A resident sampler: requests are admitted into free slots while others are decoded (continuous batching).

One thread, the one that owns the devices, calls `turn`; any thread may submit, cancel and read.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator, Sequence
import dataclasses
import queue
import threading
from typing import Unpack

import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.models.policy import NO_MEMBER
from sdpo_jax.rollout.fair_queue import SERVICE, FairQueue, Payer
from sdpo_jax.rollout.queue import Samples
from sdpo_jax.rollout.results import Completion, Draft
from sdpo_jax.rollout.sampler import Sampler, SamplingOptions
from sdpo_jax.rollout.slots import Finished
from sdpo_jax.rollout.stops import StopStrings
from sdpo_jax.types import Tree

# Option of a request → (types, description of the allowed values, test for them).
_WHOLE, _NUMBER = np.integer, (np.integer, np.floating)
_ALLOWED = {
  'n': (_WHOLE, 'a whole number of 1 or more', lambda value: value >= 1),
  'seed': (_WHOLE, 'a whole number of 64 bits', lambda value: (value >= -(2**63)) & (value < 2**63)),
  'step': (_WHOLE, 'a whole number from 0 to 2³¹ − 1', lambda value: (value >= 0) & (value < 2**31)),
  'max_tokens': (_WHOLE, 'a whole number of 1 or more', lambda value: value >= 1),
  'temperature': (_NUMBER, '0 or a positive number', lambda value: (value >= 0) & np.isfinite(value)),
  'top_p': (_NUMBER, 'more than 0 and at most 1', lambda value: (value > 0) & (value <= 1)),
  'top_k': (_WHOLE, '−1 for all, or 1 or more', lambda value: (value == -1) | (value >= 1)),
  'min_p': (_NUMBER, 'between 0 and 1', lambda value: (value >= 0) & (value <= 1)),
}


class CancelledError(Exception):
  """A request was cancelled before all of its samples were done."""


@dataclasses.dataclass(frozen=True)
class Weights:
  """Which parameters the rows of a request use: a pooled adapter, and its version."""

  member: int = NO_MEMBER  # Index in the pool of adapters, whose factors must not change during the request.
  version: Hashable = None  # Equal if the member's factors are equal; then equal prompts are prefilled once.
  cartridge: int = NO_MEMBER  # Likewise, a pooled cartridge, in a pool that has any.
  slots: Hashable = None  # Equal if the cartridge's slots are equal.


class Handle:
  """A request under way: a blocking iterator of its results.

  Every sample is yielded once as a `Completion`, when it is done, and before that, if drafts were requested, as a
  `Draft` after every turn.
  """

  def __init__(self, samples: Samples, stops: StopStrings, drafts: bool, payer: Payer):
    self.samples, self.stops, self.wants_drafts, self.payer = samples, stops, drafts, payer
    self.left = len(samples)  # Samples that are not done.
    self.drawn = 0  # Tokens of all samples so far.
    self.done = False  # Whether all samples are done, the request was cancelled, or the sampler has ended.
    # Tokens of the prompt whose keys and values came from an earlier one, the maximum over finished samples.
    self.reused = 0
    self._events: queue.SimpleQueue[Draft | Completion | BaseException | None] = queue.SimpleQueue()

  def __iter__(self) -> Iterator[Draft | Completion]:
    """Yield drafts and completions until all samples of the request are done.

    Raises:
      CancelledError: the request was cancelled.
      BaseException: the error that ended the sampler.
    """
    while True:
      event = self._events.get()
      if isinstance(event, (Draft, Completion)):
        yield event
        continue
      self._events.put(event)  # For the next iteration.
      if event is None:
        return
      raise event

  def tell(self, event: Draft | Completion | BaseException | None) -> None:
    """Pass an event to the thread that iterates, None after the last one; called by the sampler only."""
    self.done = self.done or not isinstance(event, (Draft, Completion))
    self.left -= isinstance(event, Completion)
    self._events.put(event)

  def result(self) -> list[Completion]:
    """Wait for all samples and return them in order; raises as iterating does."""
    return sorted((event for event in self if isinstance(event, Completion)), key=lambda done: done.sample)


def check_options(options: SamplingOptions) -> None:
  """Raise UserError for invalid sampling options, which would otherwise end the sampler for all requests."""
  for name, value in options.items():
    types, allowed, is_allowed = _ALLOWED[name]
    values = np.asarray(value)
    if not (issubclass(values.dtype.type, types) and values.size and np.all(is_allowed(values))):
      raise UserError(f'{name} must be {allowed}, not {value}.')


class Resident:
  """Slots shared by any number of requests, each with its own options, stop conditions and weights.

  A request gets the samples that a `Sampler` draws for it alone with the same seed, step and weights. Free slots go to
  payers in turns, see `FairQueue`.
  """

  def __init__(self, sampler: Sampler, base: Tree, trainable: Tree, *, stop_ids: int = 8, kept_prefixes: int = 0):
    """Make a resident sampler.

    Args:
      sampler: provides buckets, rows, chunk and functions; it may sample by itself between two turns.
      base: frozen parameters.
      trainable: trainable parameters, for instance those of a pool of adapters.
      stop_ids: maximum number of tokens that end a sample, those of the sampler included.
      kept_prefixes: see `Sampler.open_slots`. Kept prefixes change samples only by rounding.

    Raises:
      ValueError: the sampler has more stop tokens than `stop_ids`, or no buckets.
    """
    self._sampler, self._stop_ids = sampler, stop_ids
    if stop_ids < sampler.stop_ids:
      raise ValueError(f'{sampler.stop_ids} tokens end every sample, more than stop_ids={stop_ids}.')
    self._base = base
    self._slots = sampler.open_slots(sampler.prepare(base, trainable), FairQueue, stop_ids, kept_prefixes)
    self._queue: FairQueue = self._slots.queue
    self.shares = self._queue.shares  # What was done for payers; the one who has had least gets the next slots.
    self.stats = self._slots.stats  # Counts over all requests.
    self._lock = threading.Lock()
    self._new: collections.deque[Handle] = collections.deque()
    self._cancelled: list[Handle] = []
    self._handles: dict[Samples, Handle] = {}  # Requests under way, including new ones.
    self._ended: list[Finished] = []
    self._drafts: list[tuple[Handle, Draft]] = []
    self._failure: BaseException | None = None

  def submit(
    self,
    prompt: Sequence[int],
    *,
    weights: Weights = Weights(),
    owner: Hashable = None,
    payer: Payer = SERVICE,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    drafts: bool = False,
    **options: Unpack[SamplingOptions],
  ) -> Handle:
    """Queue samples of a prompt for free slots; may be called from any thread.

    Args:
      prompt: token ids, at least one.
      weights: weights to sample with.
      owner: owner of the prompt, who only reuses keys and values kept for the same owner. None: none are reused, and
        none are kept.
      payer: on whose account the samples are drawn; payers take turns.
      stop: strings that end a sample. The token that completes one is the last.
      stop_token_ids: tokens that end a sample, in addition to those of the sampler.
      drafts: whether the handle also yields drafts.
      **options: `SamplingOptions`.

    Raises:
      UserError: the prompt is empty or too long, an option is not allowed, a stop string is empty, or there are too
        many stop tokens.
      BaseException: the error that ended the sampler.
    """
    check_options(options)
    [samples] = self._sampler.request([prompt], **options).samples
    ends = np.unique(np.concatenate([samples.stop_ids, np.asarray(stop_token_ids, np.int32)]))
    if len(ends) > self._stop_ids:
      raise UserError(f'{len(ends)} stop tokens are more than the limit of {self._stop_ids}: name fewer.')
    if not all(isinstance(text, str) for text in stop):
      raise UserError('A stop string must be a string.')
    if any(not text for text in stop):
      raise UserError('A stop string is empty, which would end every completion at once: remove it.')
    whose = weights, owner
    samples = dataclasses.replace(
      samples,
      stop_ids=ends,
      prefix=(whose, samples.prompt.tobytes()),
      member=self._sampler.members_of(weights.member, weights.cartridge),
      cartridge=weights.cartridge,
      weights=None if owner is None else whose,
    )
    handle = Handle(samples, StopStrings(self._sampler.tokenizer, stop), drafts, payer)
    with self._lock:
      if self._failure is not None:
        raise self._failure
      self._new.append(handle)
      self._handles[samples] = handle
    return handle

  def cancel(self, handle: Handle) -> None:
    """Cancel a request, from any thread; its handle then raises CancelledError, unless the request is done."""
    with self._lock:
      self._cancelled.append(handle)

  def release(self, gone: Callable[[Weights], bool]) -> None:
    """Drop the kept keys and values of weights for which `gone` returns True; call it between two turns.

    It must be called before a member of the pool gets other factors or slots.
    """
    self._slots.release(lambda whose: gone(whose[0]))

  @property
  def kept_bytes(self) -> int:
    """Bytes of the kept keys and values."""
    return self._slots.kept_bytes

  def use(self, trainable: Tree) -> None:
    """Use another trainable tree from the next turn on; it must hold the same weights for requests under way."""
    self._slots.parameters = self._sampler.prepare(self._base, trainable)

  def turn(self) -> bool:
    """Admit waiting samples, draw some tokens in every slot and notify the handles; return whether any slot is live.

    Raises:
      BaseException: any error; every handle raises it too, and so does `submit` from then on.
    """
    try:
      return self._turn()
    except BaseException as error:
      self.end(error)
      raise

  def end(self, error: BaseException) -> None:
    """End the sampler: every handle raises this error, and so does `submit` from now on."""
    with self._lock:
      self._failure, handles = error, list(self._handles.values())
      self._handles.clear()
    for handle in handles:
      handle.tell(error)

  def _turn(self) -> bool:
    self._hear()
    if not self._slots.admit():
      self.tell()
      return False
    drawn = self._slots.advance()
    # The device works while these are decoded to text and handled.
    self.tell()
    self._ended = self._slots.collect(drawn, self._end)
    for done in self._ended:
      self._queue.done(done.samples, done.number)
    self._drafts = [
      (self._handles[samples], Draft(number, tokens))
      for samples, number, tokens in self._slots.running()
      if self._handles[samples].wants_drafts
    ]
    return True

  def _hear(self) -> None:
    """Add requests submitted, and remove those cancelled, since the last turn."""
    with self._lock:
      while self._new:
        handle = self._new.popleft()
        self._queue.add(handle.samples, handle.payer)
      gone = {handle.samples: handle for handle in self._cancelled if handle.samples in self._handles}
      self._cancelled.clear()
      for samples in gone:
        del self._handles[samples]
    if gone:
      self._slots.remove(lambda samples: samples in gone)
      self._ended = [done for done in self._ended if done.samples not in gone]
      self._drafts = [(handle, draft) for handle, draft in self._drafts if handle.samples not in gone]
    for handle in gone.values():
      handle.tell(CancelledError('The request was cancelled.'))

  def tell(self) -> None:
    """Pass the results of the last turn to the handles; otherwise the next one does, while the device works."""
    for done in self._ended:
      handle = self._handles[done.samples]
      handle.reused = max(handle.reused, done.reused)
      handle.tell(done.completion(self._sampler.tokenizer))
      if not handle.left:
        with self._lock:
          del self._handles[done.samples]
        handle.tell(None)
    for handle, draft in self._drafts:
      handle.tell(draft)
    self._ended, self._drafts = [], []

  def _end(self, samples: Samples, tokens: np.ndarray, checked: int, done: bool) -> int | None:
    handle = self._handles[samples]
    end = handle.stops.end(tokens, checked, done)
    drawn = (len(tokens) if end is None else end) - checked
    handle.drawn += drawn
    self._queue.drawn(samples, drawn)
    return end
