"""Grading during sampling: finished completions are graded on the host while the devices draw the others."""

from __future__ import annotations

from collections.abc import Sequence
import threading
import time
from typing import TYPE_CHECKING

import jax

from sdpo_jax import liveness
from sdpo_jax.distributed.collectives import divided
from sdpo_jax.distributed.stopping import NEVER, Stop, StoppedError
from sdpo_jax.rollout.results import Completion
from sdpo_jax.types import Example, Outcome

STOP_S = 0.5  # Seconds between checks for a request to stop, while waiting for graders.

if TYPE_CHECKING:  # A step need not know how answers are graded.
  from sdpo_jax.environments.grading import Graders


class GradingThread:
  """A thread that grades the completions of a batch as they are added, with the graders of their examples.

  Graders work on many completions at once, so each call gets all that have finished since the previous one.

  In a run of several processes each grades its share: no completion is graded twice, and graders that are not
  deterministic (a judge, a time limit) give all processes the same result. Which process grades a completion depends on
  its number.
  """

  def __init__(self, graders: Graders, examples: Sequence[Example], n: int, stop: Stop = NEVER):
    """Make the thread; enter it as a context before sampling.

    Leaving it early gives up completions that are not graded yet, without waiting for a grader.

    Args:
      graders: graders of the run.
      examples: G questions.
      n: completions of each; completion number i belongs to question i // n.
      stop: tells whether the run should stop; if so, graders are not waited for.

    Raises:
      UserError: a grader does not exist, or cannot work with the settings.
    """
    # In this thread, because processes that a grader starts may end with the thread that started them.
    graders.prepare({example.environment for example in examples})
    self._graders, self._examples, self._n = graders, examples, n
    self._stop = stop
    self._changed = threading.Condition()
    self._waiting: list[Completion] = []
    self._complete = False  # Whether no more completions will be added.
    self._given_up = False  # Whether outcomes of completions that are not graded yet are no longer needed.
    self._outcomes: dict[int, Outcome] = {}  # By number of the completion.
    self._error: BaseException | None = None
    self.busy_s = 0.0  # Seconds in which this process's graders were at work.
    # A grader that hangs must not keep a run from ending.
    self._thread = threading.Thread(target=self._work, name='grading', daemon=True)

  def __enter__(self) -> GradingThread:
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    with self._changed:
      self._waiting.clear()
      self._given_up = True
    self._close()

  def add(self, completion: Completion) -> None:
    """Add a finished completion, whether or not it belongs to this process's share.

    Raises:
      UserError: a grader's error, in a run of one process. (Several processes raise it together in `outcomes`, since
        one process alone must not leave a loop that all are in.)
    """
    count = jax.process_count()
    if self._error is not None and count == 1:
      raise self._error
    if completion.sample % count == jax.process_index():
      with self._changed:
        self._waiting.append(completion)
        self._changed.notify()

  def outcomes(self) -> list[Outcome]:
    """Wait until all completions are graded; return their outcomes in order.

    Raises:
      UserError: a grader's error on any process; raised on every process.
      StoppedError: a process was told to stop before its graders were done; raised on every process.
    """
    self._close()
    while self._thread.is_alive() and not self._stop.asked():
      self._thread.join(STOP_S)
    return divided(len(self._examples) * self._n, self._graded, 'the end of grading')

  def _graded(self, samples: range) -> list[Outcome]:
    if self._thread.is_alive():
      raise StoppedError
    if self._error is not None:
      raise self._error
    return [self._outcomes[sample] for sample in samples]

  def _close(self) -> None:
    with self._changed:
      self._complete = True
      self._changed.notify()

  def _work(self) -> None:
    try:
      while finished := self._next():
        start = time.monotonic()
        graded = self._graders.grade_part(
          [self._examples[completion.sample // self._n] for completion in finished],
          [completion.text for completion in finished],
          truncated=[not completion.stopped for completion in finished],
        )
        self.busy_s += time.monotonic() - start
        liveness.progress()
        self._outcomes.update(zip((completion.sample for completion in finished), graded, strict=True))
      if not self._given_up:
        self._graders.end_batch()
    except BaseException as error:  # Every error, even one that ends a process, is raised in the waiting thread.
      self._error = error

  def _next(self) -> list[Completion]:
    """Wait for finished, ungraded completions and return them; return an empty list when no more will come."""
    with self._changed:
      self._changed.wait_for(lambda: self._waiting or self._complete)
      finished, self._waiting = self._waiting, []
      return finished
