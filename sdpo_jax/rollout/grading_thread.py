"""Grading beside sampling: what has finished is graded on the host while the devices draw the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import threading
import time
from typing import Protocol

import jax

from sdpo_jax import liveness
from sdpo_jax.distributed.collectives import gathered
from sdpo_jax.distributed.stopping import NEVER, Stop, StoppedError
from sdpo_jax.errors import UserError
from sdpo_jax.rollout.results import Completion
from sdpo_jax.types import Example, Outcome

STOP_S = 0.5  # Between two questions whether the process was told to stop, while it waits for graders.


class BatchGrader(Protocol):
  """Whoever grades the completions of a batch, part by part, such as `environments.grading.Graders`."""

  def prepare(self, environments: Iterable[str]) -> None:
    """Make ready for questions of these environments; raises UserError where it cannot grade them."""
    ...

  def grade_part(
    self, examples: Sequence[Example], completions: Sequence[str], *, truncated: Sequence[bool]
  ) -> list[Outcome]:
    """Return the outcomes [M] of some completions of a batch; raises UserError where no part of it can be graded."""
    ...

  def end_batch(self) -> None:
    """Hear that all parts of a batch were graded; raises UserError where none of it could be."""
    ...


class GradingThread:
  """Grades the completions of a batch in a thread of its own, from `add` on, by the environments of their examples.

  Graders work on many completions at once, so each call gets all that have finished since the one before.

  In a run of several processes each grades its share: no completion is graded twice, and a grader that would not say
  the same twice (a judge, a time limit) says the same to all. Which process grades a completion depends on its number.
  """

  def __init__(self, graders: BatchGrader, examples: Sequence[Example], n: int, stop: Stop = NEVER):
    """Make the thread, to be entered before sampling.

    Leaving it early gives up what is not graded yet, without waiting for a grader.

    Args:
      graders: of the run.
      examples: G questions.
      n: completions of each; completion number i is one of question i // n.
      stop: whether the run is to stop, which does not wait for a grader.

    Raises:
      UserError: there is no grader of that name, or it cannot work with the settings.
    """
    # Here, because what a grader starts may end with the thread that started it.
    graders.prepare({example.environment for example in examples})
    self._graders, self._examples, self._n = graders, examples, n
    self._stop = stop
    self._changed = threading.Condition()
    self._waiting: list[Completion] = []
    self._complete = False  # No more will be added.
    self._given_up = False  # What is not graded yet is wanted no more.
    self._outcomes: dict[int, Outcome] = {}  # By number of the completion.
    self._error: BaseException | None = None
    self._busy_s = 0.0
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

  @property
  def busy_s(self) -> float:
    """Seconds in which this process's graders were at work."""
    return self._busy_s

  def add(self, completion: Completion) -> None:
    """Hands over a finished completion, of this process's share or not.

    Raises:
      UserError: what a grader has raised, in a run of one process. (Several hear of it together in `outcomes`: alone a
        process must not leave a loop that all are in.)
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
      UserError: on every process, what a grader raised on one.
      StoppedError: on every process, one was told to stop before its graders were done.
    """
    self._close()
    while self._thread.is_alive() and not self._stop.asked():
      self._thread.join(STOP_S)
    total, count = len(self._examples) * self._n, jax.process_count()
    shares = [range(first, total, count) for first in range(count)]
    outcomes: list[Outcome | None] = [None] * total
    for samples, graded in zip(shares, gathered(self._share(shares), 'the end of grading'), strict=True):
      if isinstance(graded, UserError | StoppedError):
        raise graded
      for sample, outcome in zip(samples, graded, strict=True):
        outcomes[sample] = outcome
    return outcomes

  def _share(self, shares: Sequence[range]) -> list[Outcome] | UserError | StoppedError:
    if self._thread.is_alive():
      return StoppedError()
    try:
      if self._error is not None:
        raise self._error
    except UserError as error:
      if jax.process_count() == 1:
        raise
      return error  # The others wait for this share: they must hear of it.
    return [self._outcomes[sample] for sample in shares[jax.process_index()]]

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
        self._busy_s += time.monotonic() - start
        liveness.progress()
        self._outcomes.update(zip((completion.sample for completion in finished), graded, strict=True))
      if not self._given_up:
        self._graders.end_batch()
    except BaseException as error:  # Whatever it is, also what ends a process, belongs to the thread that waits.
      self._error = error

  def _next(self) -> list[Completion]:
    """Return the finished, ungraded completions, at least one; an empty list when no more will come."""
    with self._changed:
      self._changed.wait_for(lambda: self._waiting or self._complete)
      finished, self._waiting = self._waiting, []
      return finished
