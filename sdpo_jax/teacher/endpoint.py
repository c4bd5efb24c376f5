"""A teacher behind an endpoint: a server that returns log-probs of a completion's tokens and of the most likely ones.

A batch is scored as a whole or not at all: a fault of the server ends the call with one sentence, and no step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import logging
import random
import threading
import time

import numpy as np

from sdpo_jax import liveness
from sdpo_jax.config import TeacherEndpointConfig
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.environments import json_server
from sdpo_jax.environments.json_server import Fault
from sdpo_jax.errors import UserError
from sdpo_jax.models import identity, same_tokenizer
from sdpo_jax.models.control_tokens import Tokenizer
from sdpo_jax.teacher import dialects
from sdpo_jax.teacher.asking import STOP_S, EndpointClient, ask_all
from sdpo_jax.teacher.dialects import EndpointScores

SECTION = 'actor.self_distillation.teacher_endpoint'
SAME_TEXTS = 0.9  # Minimum fraction of the tokens of a test text that the server must decode to the same text.
MUCH_TAIL = 0.01  # Mean probability outside the K tokens above which a warning is logged.


@dataclasses.dataclass(frozen=True)
class EndpointQuery:
  """A completion for the teacher to score, after its prompt, as token ids."""

  prompt: Sequence[int]  # [P] tokens before it; at least one.
  completion: Sequence[int]  # [T].


class EndpointError(UserError):
  """The teacher has not scored a text, because of `fault`."""

  def __init__(self, message: str, fault: Fault):
    super().__init__(message)
    self.fault = fault


class Endpoint(EndpointClient):
  """Client of the configured teacher endpoint."""

  def __init__(
    self,
    settings: TeacherEndpointConfig,
    vocab_size: int,
    on_attempt: Callable[[float, Fault | None], None] = lambda began, fault: None,
    gives_up: Callable[[], bool] = lambda: False,
  ):
    """Prepare the client; no connection is made yet.

    Args:
      settings: settings of the endpoint.
      vocab_size: vocabulary size of the student.
      on_attempt: called after every request, by the thread that made it, with the value of `time.monotonic()` when it
        began, and what was wrong (None: nothing).
      gives_up: returns whether failed requests should not be repeated at the moment; any thread may call.

    Raises:
      UserError: as in `EndpointClient`.
    """
    super().__init__(settings, f'{SECTION}.', '/completions')
    self._vocab_size, self._on_attempt, self._gives_up = vocab_size, on_attempt, gives_up
    self._dialect = dialects.DIALECTS[settings.dialect]
    self._told_tail = False

  def check(self, model: str, tokenizer: Tokenizer, longest: int, stop: Stop = NEVER) -> None:
    """Check with a short and a longest request that the server is the teacher that the settings describe.

    Args:
      model: the student's directory or hub name.
      tokenizer: tokenizer of the student.
      longest: maximum number of tokens of a prompt with its completion.
      stop: as in `score`.

    Raises:
      EndpointError: it does not answer, returns no log-probs or fewer than `top_k`, or rejects a text of that length.
      UserError: it has another tokenizer.
    """
    same_tokenizer.check_teacher(model, self._settings.tokenizer, f'{SECTION}.tokenizer')
    tokens = [token for text in identity.TEXTS for token in tokenizer.encode(text, add_special_tokens=False)]
    first, *rest = tokens[:longest]
    [scored] = self._score([EndpointQuery([first], rest)], stop, 'the first, short text')
    self._check_texts(tokenizer, rest, scored)
    filler = ([first, *rest] * (-(-longest // (1 + len(rest)))))[:longest]
    what = f'a text of {longest} tokens, which is the longest prompt with the longest completion'
    self._score([EndpointQuery(filler[:-1], filler[-1:])], stop, what, k=1)

  def score(self, asked: Sequence[EndpointQuery], stop: Stop = NEVER) -> list[EndpointScores]:
    """Return the teacher's scores of all completions, in order.

    Args:
      asked: [N]; for completions without tokens no request is sent.
      stop: tells whether the run should stop; if so, this method stops waiting for responses.

    Raises:
      EndpointError: there is no usable response for one of them.
      StoppedError: the run should stop.
    """
    scored = self._score(asked, stop)
    self._tell_tail(scored)
    return scored

  def _score(
    self, asked: Sequence[EndpointQuery], stop: Stop, what: str | None = None, k: int | None = None
  ) -> list[EndpointScores]:
    """Return the scores; error messages call the text `what`, or, if None, by its number among the completions."""
    deadline, given_up = time.monotonic() + self._settings.batch_timeout_s, threading.Event()

    def ask(place: int) -> EndpointScores:
      try:
        return self._ask(asked[place], deadline, k or self._settings.top_k, given_up)
      except Fault as fault:
        raise self._error(what or f'completion {place + 1} of {len(asked)}', fault) from fault

    threads = self._settings.concurrency
    return ask_all(ask, len(asked), threads=threads, name='teacher-endpoint', stop=stop, given_up=given_up)

  def _ask(self, asked: EndpointQuery, deadline: float, k: int, given_up: threading.Event) -> EndpointScores:
    """Return the scores of one completion; raise Fault once retries cannot help or the time is over."""
    settings, prompt, completion = self._settings, list(map(int, asked.prompt)), list(map(int, asked.completion))
    if not completion:
      return EndpointScores(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32), np.zeros(0, np.float32))
    if not prompt:
      raise ValueError('A completion to score needs a prompt of at least one token.')
    positions = len(prompt) + len(completion) + 1
    body = self._dialect.request(settings.model, prompt, completion, k)
    before = ''
    for attempt in range(settings.retries + 1):
      left = deadline - time.monotonic()
      if left <= 0 or given_up.is_set() or self._closing.is_set():
        raise Fault(f'the batch took more than {settings.batch_timeout_s:g} s ({SECTION}.batch_timeout_s){before}')
      began = time.monotonic()
      try:
        answer = self._server.ask(
          body,
          min(settings.timeout_s, left),
          name='teacher-endpoint-post',
          most_bytes=dialects.most_bytes(positions, k),
          most_values=dialects.most_values(positions, k),
        )
        scored = self._dialect.read(answer, prompt, completion, k, self._vocab_size)
        liveness.progress()
        self._on_attempt(began, None)
        return scored
      except Fault as fault:
        self._on_attempt(began, fault)
        before = f'; at the previous attempt, {fault}'
        ends = min(time.monotonic() + json_server.pause_s(attempt, fault.after_s, random.random()), deadline)
        while True:
          if not fault.again or attempt == settings.retries or self._gives_up():
            raise
          if given_up.wait(max(min(ends - time.monotonic(), STOP_S), 0.0)) or time.monotonic() >= ends:
            break
    raise AssertionError('The last attempt returns or raises.')

  def _error(self, what: str, fault: Fault) -> EndpointError:
    hint = ''
    if 'max allowed' in str(fault) or 'limits them' in str(fault):
      hint = f', lower {SECTION}.top_k={self._settings.top_k} or raise the limit of the server (vLLM: --max-logprobs)'
    return EndpointError(
      f'The teacher at {self.public_url} ({SECTION}.url) has not scored {what}: '
      f'{self._server.redacted(str(fault))}. Check that it serves {self._settings.model!r} in dialect='
      f'{self._settings.dialect!r}{hint}, then start the same command again.',
      fault,
    )

  def _check_texts(self, tokenizer: Tokenizer, tokens: Sequence[int], scored: EndpointScores) -> None:
    """Raise UserError if the server decodes token ids to other texts, whatever tokenizer the settings name."""
    pairs = [(tokenizer.decode([token]).strip(), text) for token, text in zip(tokens, scored.texts, strict=True)]
    # Not all servers decode a token's bytes to whole characters, or keep its spaces.
    known = [(own, text.strip()) for own, text in pairs if text is not None and own and own.isascii()]
    same = sum(own == text for own, text in known)
    if known and same < SAME_TEXTS * len(known):
      own, text = next(pair for pair in known if pair[0] != pair[1])
      raise UserError(
        f'The teacher at {self.public_url} ({SECTION}.url) has another tokenizer than the student: a token '
        f'that is {own!r} here is {json_server.quoted(text)} there; use a teacher with the same tokenizer.'
      )

  def _tell_tail(self, scored: Sequence[EndpointScores]) -> None:
    """Warn once if the K tokens leave out much of the teacher's distribution."""
    tails = np.concatenate([each.tail_mass for each in scored]) if scored else np.zeros(0)
    if self._told_tail or not len(tails) or tails.mean() <= MUCH_TAIL:
      return
    self._told_tail = True
    logging.warning(
      "The teacher's %d most likely tokens leave out %.1f %% of its probability on average; the student learns only "
      'how much this is, not which tokens it belongs to: raise %s.top_k%s.',
      self._settings.top_k,
      100 * tails.mean(),
      SECTION,
      ' with a server that returns more' if self._settings.dialect == 'fireworks' else '',
    )
