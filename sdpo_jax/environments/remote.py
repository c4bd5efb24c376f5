"""Graders that ask a server: one POST a completion, some at a time, each tried again where that may help.

What a server does wrong costs the completions that it concerns (they are ungraded), not the run. A server that grades
nothing at all ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import logging
import random
import threading
from typing import Any

from sdpo_jax import liveness
from sdpo_jax.environments.json_server import Fault, JsonServer, pause_s, quoted
from sdpo_jax.environments.outcomes import ungraded
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Outcome

_LARGEST = 1e38  # Scores become float32.

Body = Callable[[], Mapping[str, Any]]  # Called anew for every attempt.
Reader = Callable[[Any], Outcome]  # From the JSON of an answer; raises Fault where it is none.


def number(value: Any, name: str) -> float:
  """Return a finite number of an answer; raises Fault naming the field."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise Fault(f'{name!r} of its answer must be a number, not {quoted(value)}')
  if not abs(value) < _LARGEST:
    raise Fault(f'{name!r} of its answer must be a finite number, not {quoted(value)}')
  return float(value)


class Remote:
  """A server that grades; holds its connections and threads until `close()`."""

  def __init__(
    self,
    name: str,
    url: str,
    *,
    authorization: str,
    secrets: Sequence[str],
    timeout_s: float,
    retries: int,
    concurrency: int,
    setting: str,
  ):
    """Connect to nothing yet.

    Args:
      name: of the environment, for messages.
      url: to which bodies are posted.
      authorization: the Authorization header; '': none. Never shown.
      secrets: what else is never shown, such as parts of `url`.
      timeout_s: seconds from request to end of answer.
      retries: attempts after the first.
      concurrency: requests under way at once.
      setting: name of the setting with the address, for messages.
    """
    self._name, self._setting = name, setting
    self._timeout_s, self._retries, self._concurrency = timeout_s, retries, concurrency
    self._server = JsonServer(
      url, authorization=authorization, secrets=secrets, connections=concurrency, setting=setting
    )
    self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix=f'grader-{name}')
    self._closing = threading.Event()
    self._worked = False  # It has graded something in a batch before.
    self._batch = _Batch(concurrency)

  def grade(self, examples: Sequence[Example], bodies: Sequence[Body], read: Reader) -> list[Outcome]:
    """One outcome for each body, in order; those that cannot be had are ungraded, and in `end_batch`'s warning.

    Args:
      examples: [N] the question of each.
      bodies: [N] what to post.
      read: makes the outcome of an answer.

    Raises:
      UserError: as `end_batch`, as soon as the server is given up.
    """
    batch = self._batch
    asked = [self._threads.submit(self._ask, body, read, batch) for body in bodies]
    outcomes, reasons = [], []
    for waiting in asked:
      try:
        outcomes.append(self._without_secrets(waiting.result()))
      except Fault as fault:
        reasons.append(self._server.redacted(str(fault)))
        outcomes.append(ungraded(f'{self._name}: {reasons[-1]}'))
    batch.asked += len(bodies)
    batch.reasons += reasons
    batch.questions.update(example.id for example in examples)
    if batch.given_up:
      self._check(batch)
    return outcomes

  def end_batch(self) -> None:
    """Says how many completions since the last call could not be graded.

    Raises:
      UserError: not one of them could. (But one question of a server that has worked before in this run is taken to be
        the question's fault: it would otherwise end the run again after every resume.)
    """
    batch, self._batch = self._batch, _Batch(self._concurrency)
    self._check(batch)
    self._worked |= len(batch.reasons) < batch.asked
    if batch.reasons:
      logging.warning(
        'The environment %r could not grade %d of %d completions; the first: %s.',
        self._name,
        len(batch.reasons),
        batch.asked,
        batch.reasons[0],
      )

  def close(self) -> None:
    """Lets go of connections and threads; what is under way is not tried again."""
    self._closing.set()
    self._threads.shutdown(wait=False, cancel_futures=True)
    self._server.close()

  def _check(self, batch: _Batch) -> None:
    failed = batch.asked > 0 and len(batch.reasons) == batch.asked
    if failed and not (self._worked and len(batch.questions) == 1):
      raise UserError(
        f'The environment {self._name!r} graded none of {batch.asked} completions: {batch.reasons[0]}. See that '
        f'{self._server.public_url} ({self._setting}) answers, then start the same command again.'
      )

  def _ask(self, body: Body, read: Reader, batch: _Batch) -> Outcome:
    for attempt in range(self._retries + 1):
      if batch.given_up:
        raise Fault(f'there was no answer to any of {batch.failed} requests before it')
      try:
        outcome = read(self._post(body(), batch))
        liveness.progress()
        return outcome
      except Fault as fault:
        last = not fault.again or attempt == self._retries
        if last or self._closing.wait(pause_s(attempt, fault.after_s, random.random())):
          batch.count_failed()
          raise
    raise AssertionError('The last attempt returns or raises.')

  def _post(self, body: Mapping[str, Any], batch: _Batch) -> Any:
    """Return the JSON of the answer; raises Fault."""

    def answered() -> None:
      batch.answered = True

    return self._server.ask(body, self._timeout_s, name=f'grader-{self._name}', on_answer=answered)

  def _without_secrets(self, outcome: Outcome) -> Outcome:
    """Return an outcome that repeats no key, as a server does that answers with what it was asked."""
    if not self._server.has_secrets:
      return outcome
    metrics = {
      self._server.redacted(name): self._server.redacted(value) if isinstance(value, str) else value
      for name, value in outcome.metrics.items()
    }
    feedback = None if outcome.feedback is None else self._server.redacted(outcome.feedback)
    return dataclasses.replace(outcome, feedback=feedback, metrics=metrics)


class _Batch:
  """What has become of the completions of a batch, which come in parts.

  A server that has answered nothing is given up, so that a batch does not wait for it hundreds of times.
  """

  def __init__(self, patience: int):
    self.asked = 0  # Completions.
    self.questions: set[str] = set()
    self.reasons: list[str] = []  # Why those that could not be graded could not.
    self.answered = False  # There was an answer of any kind.
    self.failed = 0  # Completions that have used all attempts, or as many as made sense.
    self._patience = patience
    self._lock = threading.Lock()

  def count_failed(self) -> None:
    with self._lock:
      self.failed += 1

  @property
  def given_up(self) -> bool:
    """Whether as many completions as are asked for at once had no answer of any kind."""
    return not self.answered and self.failed >= self._patience
