"""Grading during sampling: finished completions are graded on the host while the devices draw the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
  """A thread that grades completions as they are added, with the graders of their examples.

  Graders work on many completions at once, so each call gets all that have finished since the previous one, or those of
  them that `outcomes` waits for.

  In a run of several processes each grades its share: no completion is graded twice, and graders that are not
  deterministic (a judge, a time limit) give all processes the same result. Which process grades a completion depends on
  its number.
  """

  def __init__(self, graders: Graders, examples: Sequence[Example] | Mapping[int, Example], n: int, stop: Stop = NEVER):
    """Make the thread; enter it as a context before sampling.

    Leaving it gives up completions that are not graded yet, without waiting for a grader.

    Args:
      graders: graders of the run.
      examples: questions, or those under way by number, to which more may be added.
      n: completions of each; completion number i belongs to question i // n.
      stop: tells whether the run should stop; if so, graders are not waited for.

    Raises:
      UserError: a grader does not exist, or cannot work with the settings.
    """
    # In this thread, because processes that a grader starts may end with the thread that started them.
    asked = examples.values() if isinstance(examples, Mapping) else examples
    graders.prepare({example.environment for example in asked})
    self._graders, self._examples, self._n = graders, examples, n
    self._stop = stop
    self._changed = threading.Condition()
    self._waiting: list[Completion] = []
    self._given_up = False  # Whether outcomes of completions that are not graded yet are no longer needed.
    self._awaited: set[int] | None = None  # Completions of this process's share that `outcomes` waits for.
    self._ending = False  # Whether the thread ends after these.
    self._outcomes: dict[int, Outcome] = {}  # By number of the completion.
    self._since = 0  # Completions that were graded since graders were told of the end of a batch.
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
      self._changed.notify_all()

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

  def outcomes(self, samples: Sequence[int] | None = None) -> list[Outcome]:
    """Wait until completions that were added are graded, and return their outcomes in order.

    Args:
      samples: numbers of the completions, the same on every process; others are graded on. None: all, and the thread
        ends.

    Raises:
      UserError: a grader's error on any process; raised on every process.
      StoppedError: a process was told to stop before its graders were done; raised on every process.
    """
    numbers = range(len(self._examples) * self._n) if samples is None else samples
    with self._changed:
      self._ending = samples is None
      self._awaited = {sample for sample in numbers if sample % jax.process_count() == jax.process_index()}
      self._changed.notify_all()
    while self._thread.is_alive() and not self._stop.asked():
      with self._changed:
        if self._changed.wait_for(lambda: self._awaited is None or self._error is not None, STOP_S):
          break
    if self._ending and self._awaited is None:
      self._thread.join()
    return divided(numbers, self._graded, 'the end of grading')

  def _graded(self, samples: Sequence[int]) -> list[Outcome]:
    if self._error is not None:
      raise self._error
    if self._awaited is not None:
      raise StoppedError
    return [self._outcomes.pop(sample) for sample in samples]

  def _work(self) -> None:
    try:
      while (finished := self._next()) is not None:
        if finished:
          self._grade(finished)
        else:
          # What was awaited may have been graded long ago: a few completions since then say little of a grader.
          if self._ending or self._since >= len(self._awaited):
            self._graders.end_batch()
            self._since = 0
          with self._changed:
            self._awaited = None
            self._changed.notify_all()
          if self._ending:
            return
    except BaseException as error:  # Every error, even one that ends a process, is raised in the waiting thread.
      with self._changed:
        self._error = error
        self._changed.notify_all()

  def _grade(self, finished: Sequence[Completion]) -> None:
    start = time.monotonic()
    graded = self._graders.grade_part(
      [self._examples[completion.sample // self._n] for completion in finished],
      [completion.text for completion in finished],
      truncated=[not completion.stopped for completion in finished],
    )
    self.busy_s += time.monotonic() - start
    liveness.progress()
    self._outcomes.update(zip((completion.sample for completion in finished), graded, strict=True))
    self._since += len(finished)

  def _next(self) -> list[Completion] | None:
    """Wait for ungraded completions and return them; none: those awaited are graded; None: no more will come."""

    def done() -> bool:
      return self._awaited is not None and self._awaited <= self._outcomes.keys()

    with self._changed:
      self._changed.wait_for(lambda: self._waiting or self._given_up or done())
      if done() and not self._given_up:
        return []
      parts: dict[bool, list[Completion]] = {True: [], False: []}
      for completion in self._waiting:
        parts[completion.sample in (self._awaited or ())].append(completion)
      finished = parts[True] or parts[False]
      self._waiting = parts[False] if parts[True] else []
      return finished or None
