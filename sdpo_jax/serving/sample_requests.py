"""Completions on request: the sampling options, and the events while they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import secrets

from sdpo_jax.config import is_number
from sdpo_jax.errors import short_repr
from sdpo_jax.rollout.results import Completion, Draft
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.draft_texts import DraftText
from sdpo_jax.serving.errors import Cancelled, InvalidRequest
from sdpo_jax.serving.records import SampleRecord

MOST_STOPS, LONGEST_STOP = 16, 256  # The most stop strings of a request, and the most characters of one.


@dataclasses.dataclass(frozen=True)
class SampleOptions:
  """Sampling options of a request."""

  max_tokens: int | None = None  # The most tokens of a completion; None: as many as the service allows.
  temperature: float = 1.0  # 0 is greedy.
  top_p: float = 1.0  # 1 keeps all.
  top_k: int = -1  # −1 and 0 keep all.
  min_p: float = 0.0  # 0 keeps all.
  seed: int | None = None  # None: a random one.
  stop: Sequence[str] = ()  # Strings that end a completion and are not part of its text.
  stop_token_ids: Sequence[int] = ()  # Tokens that end it, beside the model's own.

  def checked(self, *, max_completion: int, vocab_size: int) -> SampleOptions:
    """Return the options with all defaults filled in.

    Args:
      max_completion: the most tokens of a completion.
      vocab_size: number of tokens in the model's vocabulary.

    Raises:
      InvalidRequest: an option is not allowed; the error names it.
    """
    most = max_completion if self.max_tokens is None else self.max_tokens
    _number('max_tokens', most, whole=True, least=1)
    if most > max_completion:
      raise InvalidRequest(
        f'max_tokens={short_repr(most)} is more than the {max_completion} tokens that a completion has at most.',
        field='max_tokens',
      )
    _number('temperature', self.temperature, least=0, most=100)
    _number('top_p', self.top_p, least=0, most=1)
    if self.top_p == 0:
      raise InvalidRequest('top_p must be above 0; temperature=0 takes the most likely token.', field='top_p')
    _number('top_k', self.top_k, whole=True, least=-1, most=2**31 - 1)
    _number('min_p', self.min_p, least=0, most=1)
    seed = secrets.randbits(31) if self.seed is None else self.seed
    _number('seed', seed, whole=True, least=-(2**63), most=2**63 - 1)
    if len(self.stop) > MOST_STOPS or any(
      not isinstance(text, str) or not 0 < len(text) <= LONGEST_STOP for text in self.stop
    ):
      raise InvalidRequest(f'stop must be up to {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters.', field='stop')
    for token in self.stop_token_ids:
      _number('stop_token_ids', token, whole=True, least=0, most=vocab_size - 1)
    return dataclasses.replace(self, max_tokens=most, top_k=self.top_k or -1, seed=seed % 2**32)


def _number(field: str, value: object, *, least: float, most: float | None = None, whole: bool = False) -> None:
  bounds = f'at least {least}' if most is None else f'between {least} and {most}'
  if (
    not is_number(value)
    or (whole and not isinstance(value, int))
    or value < least
    or (most is not None and value > most)
  ):
    kind = 'a whole number' if whole else 'a number'
    raise InvalidRequest(f'{field} must be {kind} {bounds}, not {short_repr(value)}.', field=field)


@dataclasses.dataclass(frozen=True)
class SampleDraft:
  """A completion under way."""

  index: int  # Index of the completion among the n of the request.
  delta: str  # The text added since the draft before.
  tokens: Sequence[int]  # All tokens drawn so far.


@dataclasses.dataclass(frozen=True)
class SampleDone:
  """A finished completion, which has been stored."""

  index: int
  delta: str  # The text added since the last draft.
  sample: SampleRecord


class Sampling:
  """Completions of one prompt under way: an iterator over their events."""

  def __init__(
    self,
    handle: Iterable[Draft | Completion],
    cancel: Callable[[], None],
    keep: Callable[[Completion], SampleRecord],
    make_text: Callable[[], DraftText],
    call: Call,
  ):
    """Wrap the completions that the worker draws.

    Args:
      handle: the worker's handle.
      cancel: cancels the completions.
      keep: stores a completion and returns it as a sample.
      make_text: makes the text of a completion of which nothing is shown yet.
      call: the request; when it ends, the completions are cancelled.
    """
    self._handle, self.cancel, self._keep, self._make_text, self._call = handle, cancel, keep, make_text, call
    self._texts: dict[int, DraftText] = {}
    self.reused = 0  # The most prompt tokens of a finished completion that came from a cached prefix.

  def __iter__(self) -> Iterator[SampleDraft | SampleDone]:
    """Yield drafts, if requested, and every completion once; the rest is cancelled when the reader stops.

    Raises:
      Cancelled: the sender ended the request.
      Deadline: its time is over.
      ServiceError: as the worker.
    """
    with contextlib.ExitStack() as stack:
      stack.callback(self.cancel)
      stack.enter_context(self._call.on_end(self.cancel))
      try:
        for event in self._handle:
          found = self._seen(event)
          if found is not None:
            yield found
      except Cancelled:
        self._call.check()  # Says why.
        raise

  def _seen(self, event: Draft | Completion) -> SampleDraft | SampleDone | None:
    text = self._texts.setdefault(event.sample, self._make_text())
    if isinstance(event, Completion):
      self.reused = max(self.reused, event.reused)
      sample = self._keep(event)
      return SampleDone(event.sample, text.finish(sample.text), sample)
    delta = text.draft(event.tokens.tolist())
    return SampleDraft(event.sample, delta, event.tokens.tolist()) if delta else None

  def result(self) -> list[SampleRecord]:
    """Wait for all completions and return them in order; raise the errors of `__iter__`."""
    found = [event for event in self if isinstance(event, SampleDone)]
    return [done.sample for done in sorted(found, key=lambda done: done.index)]
