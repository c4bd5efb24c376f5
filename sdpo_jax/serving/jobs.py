"""The jobs of the worker's queue: requests, how each ends, and which of them can run together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
from typing import Any

import numpy as np

from sdpo_jax.learning.scoring import Scored
from sdpo_jax.rollout.resident import CancelledError
from sdpo_jax.rollout.resident import Handle as Drawing
from sdpo_jax.rollout.results import Completion, Draft
from sdpo_jax.serving.engine import Feedback
from sdpo_jax.serving.errors import Cancelled, NotReady, ServiceError


@dataclasses.dataclass(eq=False)
class Job:
  """A request in the queue."""

  needs: frozenset[str] = frozenset()  # Versions that the engine must have.
  deadline: float | None = None  # On the worker's clock.
  _: dataclasses.KW_ONLY
  began: float = 0.0  # The time at which it was queued, on the same clock.
  ended: str | None = None  # The name of the counter for a job that ended without an answer.

  @property
  def cancelled(self) -> bool:
    """Whether nobody waits for the job any more."""
    raise NotImplementedError

  def fail(self, error: ServiceError) -> None:
    """Pass an error to whoever waits for the job."""
    raise NotImplementedError


@dataclasses.dataclass(eq=False, kw_only=True)
class SampleJob(Job):
  """A request for samples of one prompt; any thread may read them, also before the version that draws them is there."""

  version: str
  prompt: Sequence[int]
  options: Mapping[str, Any]
  cancelled: bool = False
  drawing: Drawing | None = None
  passed: int = 0  # How many later jobs started first because all places were in use.
  _begun: concurrent.futures.Future[Drawing] = dataclasses.field(default_factory=concurrent.futures.Future)
  _why: ServiceError | None = None  # Why it was ended.

  def __iter__(self) -> Iterator[Draft | Completion]:
    """Yield drafts and completions until all samples are done.

    Raises:
      ServiceError: why there are no more: the request was cancelled or refused, its time is over, or the engine failed.
    """
    drawing = self._begun.result()
    try:
      yield from drawing
    except CancelledError:
      raise self._why or Cancelled('The completions were cancelled.') from None
    except Exception as error:
      raise self._why or NotReady('The engine failed while it sampled: send the request again.') from error

  def result(self) -> list[Completion]:
    """Wait for all samples and return them in order; raise the errors of `__iter__`."""
    return sorted((event for event in self if isinstance(event, Completion)), key=lambda done: done.sample)

  def begin(self, drawing: Drawing) -> None:
    """Hand over the samples that have started."""
    self.drawing = drawing
    self._begun.set_result(drawing)

  def fail(self, error: ServiceError) -> None:
    """End the samples with an error; those that have started must be cancelled, too."""
    self._why = error
    if not self._begun.done():
      self._begun.set_exception(error)


@dataclasses.dataclass(eq=False, kw_only=True)
class _FutureJob(Job):
  future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)
  alone: bool = False  # Run it alone, since it failed together with others.
  claimed: bool = False  # Whether it has begun and cannot be cancelled any more.

  @property
  def cancelled(self) -> bool:
    return self.future.cancelled()

  def fail(self, error: ServiceError) -> None:
    if self.claimed or self.future.set_running_or_notify_cancel():
      self.future.set_exception(error)


@dataclasses.dataclass(eq=False, kw_only=True)
class ScoreJob(_FutureJob):
  """Rows to be scored by a version, possibly in several parts."""

  version: str
  rows: Sequence[tuple[Sequence[int], Sequence[int]]]
  topk: int
  ids: Sequence[np.ndarray] | None
  found: list[Scored] = dataclasses.field(default_factory=list)

  @property
  def left(self) -> int:
    """The number of rows still to be scored."""
    return len(self.rows) - len(self.found)


@dataclasses.dataclass(eq=False, kw_only=True)
class LearnJob(_FutureJob):
  """The feedback of one version."""

  feedback: Feedback


@dataclasses.dataclass(eq=False, kw_only=True)
class ForgetJob(_FutureJob):
  """A version to be erased as soon as nothing uses it."""

  version: str


def runnable(jobs: Sequence[Job], present: Any) -> list[Job]:
  """Return the jobs that can run now, in order.

  Args:
    jobs: all jobs in the queue.
    present: container of the versions that the engine has.

  Returns:
    The jobs whose versions are present, and the requests to forget a version that no
    earlier job needs. A later job that needs such a version waits.
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
      if all(version in present for version in job.needs):
        found.append(job)
      wanted |= job.needs
  return found


def learn_batch(jobs: Sequence[Job], *, slots: int, teachers: int, rows: int) -> list[LearnJob]:
  """Return the first job, which learns, and later ones that can learn in the same steps.

  Args:
    jobs: the runnable jobs.
    slots: the most versions that learn at once.
    teachers: the most versions that teach at once.
    rows: the most lessons of all jobs together, unless one job alone has more.
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
      and all(each.update.steps == feedback.update.steps for each in others)
      and not {feedback.version, feedback.new} & {name for each in others for name in (each.version, each.new)}
    ):
      picked.append(job)
  return picked


def score_batch(jobs: Sequence[Job], *, rows: int) -> list[tuple[ScoreJob, int]]:
  """Return the first job, which scores, and later ones of the same version, each with its number of rows to score now.

  Args:
    jobs: the runnable jobs.
    rows: the most rows of all jobs together.
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
  """Return how many further ids a job scores at every position; None: none."""
  return job.ids[0].shape[1] if job.ids else None
