"""Graders that ask a server: one POST per completion, several at a time, with retries if they may help.

A server's fault affects only the completions concerned (they are ungraded), not the run. A server that grades nothing
at all ends the run. In a run of several processes each grades its share of a batch and judges the server by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import functools
import random
import threading
from typing import Any

from sdpo_jax import liveness
from sdpo_jax.config import HttpGraderConfig, JudgeConfig
from sdpo_jax.environments.json_server import Fault, JsonServer, pause_s, quoted
from sdpo_jax.environments.outcomes import ungraded
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Outcome

_LARGEST = 1e38  # Scores become float32.
UNSCORED = 8  # Answers without a score, before the first one with a score, after which no more are asked for.

# (question, completion, whether it was cut off) → what to post; called again for every attempt.
Body = Callable[[Example, str, bool], Mapping[str, Any]]
Reader = Callable[[Any], Outcome]  # From the JSON of an answer; raises Fault if it is not valid.


def number(value: Any, name: str) -> float:
  """Return a finite number from an answer; raises Fault naming the field."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise Fault(f'{name!r} of its answer must be a number, not {quoted(value)}')
  if not abs(value) < _LARGEST:
    raise Fault(f'{name!r} of its answer must be a finite number, not {quoted(value)}')
  return float(value)


class RemoteGrader:
  """A `registry.Grader` that asks a server; holds connections and threads until `close()`."""

  limits_itself = True

  def __init__(
    self, name: str, server: JsonServer, settings: HttpGraderConfig | JudgeConfig, *, body: Body, read: Reader
  ):
    """Prepare the threads; nothing is asked yet.

    Args:
      name: name of the environment, for messages.
      server: answers all requests; closed with the grader.
      settings: time limit, retries and concurrency.
      body: makes the body to post for a completion.
      read: converts an answer to an outcome, in the thread in which `body` has made what was posted.
    """
    self._name, self._server, self._body, self._read = name, server, body, read
    self._timeout_s, self._retries, self._concurrency = settings.timeout_s, settings.retries, settings.concurrency
    self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix=f'grader-{name}')
    self._closing = threading.Event()
    self._worked = False  # Whether it has graded a completion.
    self._batch = _Batch()

  def __call__(
    self, examples: Sequence[Example], completions: Sequence[str], *, truncated: Sequence[bool]
  ) -> list[Outcome]:
    """Grade completions; failed requests give ungraded outcomes.

    Raises:
      UserError: as `end_batch`, as soon as the server is given up.
    """
    batch = self._batch
    parts = zip(examples, completions, truncated, strict=True)
    asked = [self._threads.submit(self._ask, functools.partial(self._body, *part), batch) for part in parts]
    outcomes, reasons = [], []
    for waiting in asked:
      try:
        outcomes.append(self._without_secrets(waiting.result()))
      except Fault as fault:
        reasons.append(self._server.redacted(str(fault)))
        outcomes.append(ungraded(f'{self._name}: {reasons[-1]}'))
    batch.asked += len(asked)
    batch.reasons += reasons
    batch.questions.update(example.id for example in examples)
    if self._given_up(batch):
      self._check(batch)
    return outcomes

  def end_batch(self) -> None:
    """Begin a new batch.

    Raises:
      UserError: none of the completions since the last call could be graded. (A single question of a server that has
        worked earlier in this run is considered the question's fault: otherwise it would end the run again after every
        resume.)
    """
    batch, self._batch = self._batch, _Batch()
    self._check(batch)

  def close(self) -> None:
    """Close connections and end threads; pending requests are not retried."""
    self._closing.set()
    self._threads.shutdown(wait=False, cancel_futures=True)
    self._server.close()

  def _check(self, batch: _Batch) -> None:
    failed = batch.asked > 0 and len(batch.reasons) == batch.asked
    if failed and not (self._worked and len(batch.questions) == 1):
      advice = f'Check that {self._server.public_url} ({self._server.setting}) answers'
      raise UserError(
        f'The environment {self._name!r} graded none of {batch.asked} completions: {batch.reasons[0]}. '
        f'{batch.unscored[0].advice if batch.unscored else advice}, then start the same command again.'
      )

  def _given_up(self, batch: _Batch) -> str:
    """Return why the rest of a batch is not asked for; '' if it is.

    A server that has answered nothing is given up, so that a batch does not wait for hundreds of time-outs: after as
    many completions as may be requested at once. So is one that has answered, but never with a score, which costs as
    much as if it had: after `UNSCORED` answers, or those to one completion. One that fails at random, even half of the
    time, has given a score by then.
    """
    if not batch.answered.is_set() and len(batch.causes) >= self._concurrency:
      return f'there was no answer to any of {len(batch.causes)} requests before it ({batch.causes[-1]})'
    if not self._worked and len(batch.unscored) >= max(UNSCORED, self._retries + 1):
      return f'none of the first {len(batch.unscored)} answers had a score: {batch.unscored[-1]}'
    return ''

  def _ask(self, body: Callable[[], Mapping[str, Any]], batch: _Batch) -> Outcome:
    for attempt in range(self._retries + 1):
      if why := self._given_up(batch):
        raise Fault(why)
      try:
        outcome = self._read(
          self._server.ask(body(), self._timeout_s, name=f'grader-{self._name}', on_answer=batch.answered.set)
        )
        liveness.progress()
        self._worked = True
        return outcome
      except Fault as fault:
        if fault.advice:
          batch.unscored.append(fault)
        last = not fault.again or attempt == self._retries
        if last or self._closing.wait(pause_s(attempt, fault.after_s, random.random())):
          batch.causes.append(str(fault))
          raise
    raise AssertionError('The last attempt returns or raises.')

  def _without_secrets(self, outcome: Outcome) -> Outcome:
    """Remove keys from an outcome, which a server may have repeated from the request."""
    metrics = {
      self._server.redacted(name): self._server.redacted(value) if isinstance(value, str) else value
      for name, value in outcome.metrics.items()
    }
    feedback = None if outcome.feedback is None else self._server.redacted(outcome.feedback)
    return dataclasses.replace(outcome, feedback=feedback, metrics=metrics)


class _Batch:
  """Counts of the completions of a batch, which comes in parts."""

  def __init__(self):
    self.asked = 0  # Number of completions.
    self.questions: set[str] = set()
    self.reasons: list[str] = []  # Reasons for the completions that could not be graded.
    self.answered = threading.Event()  # Set by an answer of any kind.
    self.causes: list[str] = []  # Last faults of completions for which all attempts failed.
    self.unscored: list[Fault] = []  # Faults of answers in which no score could be read.
