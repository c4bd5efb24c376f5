"""What waits for the engine or is under way in it: requests, how each ends, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
from typing import Any

import numpy as np

from sdpo_jax.distributed.stopping import StoppedError
from sdpo_jax.rollout.resident import CancelledError
from sdpo_jax.rollout.resident import Handle as Drawing
from sdpo_jax.rollout.results import Completion, Draft
from sdpo_jax.serving.engine import BASE, Feedback
from sdpo_jax.serving.errors import Cancelled, NotReady, ServiceError
from sdpo_jax.serving.learning import Learned, Lesson
from sdpo_jax.serving.scoring import Scored

VERSION = 'version:'  # Before the name of a version that teaches.
ENDPOINT = 'endpoint'  # In the place of one: a teacher elsewhere.


class Handle:
  """Samples under way, as those of `rollout.resident.Handle`; they may still wait for the version that draws them."""

  def __init__(self) -> None:
    self._begun: concurrent.futures.Future[Drawing] = concurrent.futures.Future()
    self.cancelled = False  # Somebody does not want them any more.
    self._why: ServiceError | None = None

  def __iter__(self) -> Iterator[Draft | Completion]:
    """Yield what comes of the request until all of its samples are done.

    Raises:
      ServiceError: why there is no more: it was cancelled, its time is over, it was refused, or the engine failed.
    """
    drawing = self._begun.result()
    try:
      yield from drawing
    except CancelledError:
      raise self._why or Cancelled('The completions were cancelled.') from None
    except Exception as error:
      raise self._why or NotReady('The engine failed while it sampled: send the request again.') from error

  @property
  def done(self) -> bool:
    """Whether all samples are done, or there will be no more."""
    return self._begun.done() and (self._begun.exception() is not None or self._begun.result().done)

  @property
  def reused(self) -> int:
    """Tokens of the prompt whose keys and values were kept of an earlier one, as the samples that are done found
    them.
    """
    return self._begun.result().reused if self._begun.done() and self._begun.exception() is None else 0

  def result(self) -> list[Completion]:
    """Wait for all samples and return them in order; raise what iterating raises."""
    return sorted((event for event in self if isinstance(event, Completion)), key=lambda done: done.sample)

  def begin(self, drawing: Drawing) -> None:
    """Says that the samples are being drawn now."""
    self._begun.set_result(drawing)

  def end(self, why: ServiceError) -> None:
    """Says why there are no more; what is being drawn already has to be ended, too."""
    self._why = why
    if not self._begun.done():
      self._begun.set_exception(why)


@dataclasses.dataclass(eq=False, kw_only=True)
class Job:
  """A request that waits for its turn."""

  needs: frozenset[str]  # Versions that the engine must have.
  began: float  # When it came, on the worker's clock.
  deadline: float | None = None  # On the same clock.
  ended: str | None = None  # Why it has got no answer, in a word.

  @property
  def cancelled(self) -> bool:
    """Whether nobody waits for it any more."""
    raise NotImplementedError

  def fail(self, error: ServiceError) -> None:
    """Tells whoever waits why there is no answer."""
    raise NotImplementedError


@dataclasses.dataclass(eq=False, kw_only=True)
class SampleJob(Job):
  """Samples of one prompt."""

  version: str
  prompt: Sequence[int]
  options: Mapping[str, Any]
  handle: Handle
  drawing: Drawing | None = None
  passed: int = 0  # Later ones that were begun before it, for all places were in use.

  @property
  def cancelled(self) -> bool:
    return self.handle.cancelled

  def fail(self, error: ServiceError) -> None:
    self.handle.end(error)


@dataclasses.dataclass(eq=False, kw_only=True)
class _FutureJob(Job):
  future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)
  alone: bool = False  # It goes with no others any more, for one of them was refused.
  _claimed: bool = False

  @property
  def cancelled(self) -> bool:
    return self.future.cancelled()

  def claim(self) -> bool:
    """Return whether it is still wanted; from now on it cannot be cancelled."""
    self._claimed = self._claimed or self.future.set_running_or_notify_cancel()
    return self._claimed

  def fail(self, error: ServiceError) -> None:
    if self._claimed or self.future.set_running_or_notify_cancel():
      self.future.set_exception(error)


@dataclasses.dataclass(eq=False, kw_only=True)
class ScoreJob(_FutureJob):
  """Rows that a version scores, some of them at a time."""

  version: str
  rows: Sequence[tuple[Sequence[int], Sequence[int]]]
  topk: int
  ids: Sequence[np.ndarray] | None
  found: list[Scored] = dataclasses.field(default_factory=list)

  @property
  def left(self) -> int:
    """Rows that are to be scored yet."""
    return len(self.rows) - len(self.found)


@dataclasses.dataclass(eq=False, kw_only=True)
class LearnJob(_FutureJob):
  """Feedback of one version."""

  feedback: Feedback
  asked: concurrent.futures.Future[list[Lesson]] | None = None  # Lessons of which a teacher elsewhere is still asked.

  def answer(self, learned: Learned) -> None:
    """Tells whoever waits what came of it."""
    self.future.set_result(learned)


@dataclasses.dataclass(eq=False, kw_only=True)
class ForgetJob(_FutureJob):
  """A version that is to be erased as soon as nothing uses it."""

  version: str


class Unwanted:
  """A `Stop` for who asks a teacher elsewhere, when nobody waits for the feedback any more."""

  def __init__(self, future: concurrent.futures.Future):
    self._future = future

  def asked(self) -> bool:
    """See `Stop`."""
    return self._future.done()

  def check(self) -> None:
    """See `Stop`."""
    if self._future.done():
      raise StoppedError('Nobody waits for the feedback any more.')


def needed(feedback: Feedback) -> frozenset[str]:
  """Return the versions that feedback is learned with."""
  names = {feedback.version}
  if feedback.teacher.startswith(VERSION):
    names.add(feedback.teacher.removeprefix(VERSION))
  return frozenset(names - {BASE})


def runnable(jobs: Sequence[Job], present: Any) -> list[Job]:
  """Return the jobs whose turn may come, in their order.

  Args:
    jobs: all that wait.
    present: container of the versions that the engine has.

  Returns:
    Those with all of their versions and of what a teacher elsewhere says, and requests to forget that no earlier job is
    in the way of; what came after such a request and needs that version waits for it.
  """
  found: list[Job] = []
  wanted: set[str] = set()
  forgotten: set[str] = set()
  for job in jobs:
    if isinstance(job, ForgetJob):
      if job.version not in wanted:
        found.append(job)
      forgotten.add(job.version)
    elif not job.needs & forgotten:
      if all(version in present for version in job.needs) and not (isinstance(job, LearnJob) and job.asked):
        found.append(job)
      wanted |= job.needs
  return found


def learned_together(jobs: Sequence[Job], *, slots: int, teachers: int, rows: int) -> list[LearnJob]:
  """Return the first job of a list, which learns, and later ones that can learn in the same steps.

  Args:
    jobs: whose turn may come.
    slots: versions that learn at once.
    teachers: versions that teach at once.
    rows: lessons of all together, unless those of one are more.
  """
  first, *later = (job for job in jobs if isinstance(job, LearnJob))
  picked = [first]
  for job in later:
    feedback, others = job.feedback, [each.feedback for each in picked]
    teaching = {(each.teacher, each.version) for each in (feedback, *others)}
    if (
      not first.alone
      and not job.alone
      and len(picked) < slots
      and len(teaching) <= teachers
      and sum(len(each.lessons) for each in (feedback, *others)) <= rows
      and all(each.steps == feedback.steps for each in others)
      and not {feedback.version, feedback.new} & {name for each in others for name in (each.version, each.new)}
    ):
      picked.append(job)
  return picked


def scored_together(jobs: Sequence[Job], *, rows: int) -> list[tuple[ScoreJob, int]]:
  """Return the first job of a list, which scores, and later ones of the same version, each with how many of its rows.

  Args:
    jobs: whose turn may come.
    rows: of all together.
  """
  first, *later = (job for job in jobs if isinstance(job, ScoreJob))
  picked = [(first, min(rows, first.left))]
  left = rows - picked[0][1]
  for job in later:
    same = job.version == first.version and _ids(job) == _ids(first)
    if left and same and not first.alone and not job.alone:
      picked.append((job, min(left, job.left)))
      left -= picked[-1][1]
  return picked


def _ids(job: ScoreJob) -> int | None:
  """Return how many ids are asked for at every position; None: none."""
  return job.ids[0].shape[1] if job.ids else None
