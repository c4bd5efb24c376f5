"""Requests for completions: sampling options, and events and texts while completions are sampled.

Streamed text is never taken back, and stop strings never appear in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import math
import secrets
from typing import Any

from sdpo_jax.config.fields import is_number
from sdpo_jax.errors import short_repr
from sdpo_jax.rollout.results import Completion
from sdpo_jax.rollout.stops import StopStrings, Tokenizer, to_text
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Cancelled, InvalidRequest
from sdpo_jax.serving.jobs import SampleJob
from sdpo_jax.serving.records import SampleRecord

MOST_STOPS, LONGEST_STOP = 16, 256  # The most stop strings of a request, and the most characters of one.
_UNFINISHED = '\ufffd'  # The replacement character, to which incomplete characters are decoded.


@dataclasses.dataclass(frozen=True)
class SampleOptions:
  """Sampling options of a request for completions."""

  max_tokens: int | None = None  # The most tokens of a completion; None: the limit of the service.
  temperature: float = 1.0  # 0 is greedy.
  top_p: float = 1.0  # 1 keeps all.
  top_k: int = -1  # −1 and 0 keep all.
  min_p: float = 0.0  # 0 keeps all.
  seed: int | None = None  # None: a random one.
  stop: Sequence[str] = ()  # Strings that end a completion and are not part of its text.
  stop_token_ids: Sequence[int] = ()  # Tokens that end a completion, besides those of the model.

  @classmethod
  def of(cls, body: Any) -> SampleOptions:
    """Return the options that the body of a request has as fields of the same names."""
    return cls(**{field.name: getattr(body, field.name) for field in dataclasses.fields(cls)})

  def checked(self, *, max_completion: int, vocab_size: int) -> SampleOptions:
    """Validate the options, and return them with defaults filled in.

    Args:
      max_completion: the most tokens of a completion.
      vocab_size: the number of tokens in the vocabulary of the model.

    Raises:
      InvalidRequest: an option is invalid; the error names it.
    """
    most = max_completion if self.max_tokens is None else self.max_tokens
    _number('max_tokens', most, whole=True, least=1)
    if most > max_completion:
      raise InvalidRequest(
        f'max_tokens={short_repr(most)} is more than the limit of {max_completion} (serve.response_buckets).',
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


def _number(field: str, value: object, *, least: float, most: float = math.inf, whole: bool = False) -> None:
  bounds = f'at least {least}' if most == math.inf else f'between {least} and {most}'
  if not is_number(value) or (whole and not isinstance(value, int)) or not least <= value <= most:
    kind = 'a whole number' if whole else 'a number'
    raise InvalidRequest(f'{field} must be {kind} {bounds}, not {short_repr(value)}.', field=field)


@dataclasses.dataclass(frozen=True)
class SampleDraft:
  """New text of a completion in progress."""

  index: int  # Index of the completion among the n of the request.
  delta: str  # The text since the previous draft.
  tokens: Sequence[int]  # All tokens sampled so far.


@dataclasses.dataclass(frozen=True)
class SampleDone:
  """A finished completion, stored as a sample."""

  index: int  # Index of the completion among the n of the request.
  delta: str  # The text since the last draft.
  sample: SampleRecord


class Sampling:
  """Completions of one prompt in progress; iterating yields their events."""

  def __init__(
    self,
    drawn: SampleJob,
    cancel: Callable[[], None],
    keep: Callable[[Sequence[Completion]], list[SampleRecord]],
    make_text: Callable[[], DraftText],
    call: Call,
  ):
    """Wrap a sampling job of the worker.

    Args:
      drawn: the job.
      cancel: cancels the job.
      keep: stores completions, and returns the samples.
      make_text: makes a `DraftText` for a new completion.
      call: the request; if it ends, the job is cancelled.
    """
    self._drawn, self.cancel, self._keep, self._make_text, self._call = drawn, cancel, keep, make_text, call

  @property
  def reused(self) -> int:
    """Prompt tokens from a cached prefix, the most of any finished completion."""
    return self._drawn.drawing.reused

  def __iter__(self) -> Iterator[SampleDraft | SampleDone]:
    """Yield drafts, if requested, and each completion when it is finished; closing the iterator cancels the rest.

    Raises:
      Cancelled: the client has disconnected.
      Deadline: the deadline has passed.
      ServiceError: an error of the worker.
    """
    texts: dict[int, DraftText] = {}
    with self._ending():
      for event in self._drawn:
        text = texts.setdefault(event.sample, self._make_text())
        if isinstance(event, Completion):
          [sample] = self._keep([event])
          yield SampleDone(event.sample, text.finish(sample.text), sample)
        elif delta := text.draft(event.tokens.tolist()):
          yield SampleDraft(event.sample, delta, event.tokens.tolist())

  def result(self) -> list[SampleRecord]:
    """Wait for all completions, and return them in order; raises as `__iter__`."""
    with self._ending():
      return self._keep(self._drawn.result())

  def unkept(self) -> list[Completion]:
    """Wait for all completions, and return them in order as they were drawn, without storing any; raises likewise."""
    with self._ending():
      return self._drawn.result()

  @contextlib.contextmanager
  def _ending(self) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
      stack.callback(self.cancel)
      stack.enter_context(self._call.on_end(self.cancel))
      try:
        yield
      except Cancelled:
        self._call.check()  # Raises the error that ended the request.
        raise


# Texts.


def finished_text(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> str:
  """Return the text of a completion up to its first stop string, without special tokens.

  Args:
    tokenizer: the tokenizer of the model.
    tokens: the token ids of the completion.
    stop: the strings that end it, which may include the text of special tokens.
  """
  text = to_text(tokenizer, tokens)
  end = _first(text, stop)
  if end is not None:
    return text[:end]
  count = StopStrings(tokenizer, stop).find(list(tokens))
  if count is None:
    return text
  # The stop string includes a special token, which the text does not show.
  end = _first(to_text(tokenizer, tokens[:count], special=True), stop)
  while count and len(to_text(tokenizer, tokens[:count], special=True)) > (end or 0):
    count -= 1
  return to_text(tokenizer, tokens[:count])


class DraftText:
  """The text of a completion in progress, of which a part was streamed already."""

  def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
    """Start with an empty completion."""
    self.shown = ''
    self._tokenizer, self._stop = tokenizer, tuple(stop)

  def draft(self, tokens: Sequence[int]) -> str:
    """Return the new text that can be streamed: no incomplete character, nothing that may begin a stop string.

    Args:
      tokens: all tokens sampled so far.
    """
    text = to_text(self._tokenizer, tokens).rstrip(_UNFINISHED)
    end = _first(text, self._stop)
    text = text[:end] if end is not None else text[: len(text) - _held_back(text, self._stop)]
    return self.finish(text)

  def finish(self, text: str) -> str:
    """Return the part of the final text that was not streamed yet."""
    if not text.startswith(self.shown):
      return ''  # The tokenizer has rewritten earlier text, and what was streamed cannot be taken back.
    more, self.shown = text[len(self.shown) :], text
    return more


def _first(text: str, stop: Sequence[str]) -> int | None:
  """Return the position of the first stop string; None: there is none."""
  return min((at for at in (text.find(each) for each in stop) if at >= 0), default=None)


def _held_back(text: str, stop: Sequence[str]) -> int:
  """Return how many characters at the end of a text may be the beginning of a stop string."""
  longest = max((len(each) - 1 for each in stop), default=0)
  for length in range(min(longest, len(text)), 0, -1):
    if any(each.startswith(text[-length:]) for each in stop):
      return length
  return 0
