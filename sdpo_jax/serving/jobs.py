"""Jobs in the queue of the worker, and the choice of those that run together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
from typing import Any

import numpy as np

from sdpo_jax.learning.requests import Lesson
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.rollout.fair_queue import SERVICE, Payer, Shares
from sdpo_jax.rollout.resident import CancelledError
from sdpo_jax.rollout.resident import Handle as Drawing
from sdpo_jax.rollout.results import Completion, Draft
from sdpo_jax.serving.engine import Feedback
from sdpo_jax.serving.errors import Cancelled, NotReady, ServiceError
from sdpo_jax.serving.records import Composition


@dataclasses.dataclass(eq=False)
class Job:
  """A request in the queue of the worker."""

  needs: frozenset[str] = frozenset()  # The versions that the engine must have to run it.
  deadline: float | None = None  # A time on the worker's clock; None: no limit.
  payer: Payer = SERVICE  # On whose account it is done.
  _: dataclasses.KW_ONLY
  began: float = 0.0  # When it was queued, on the same clock.
  ended: str | None = None  # The counter that counts it, once it has ended with an error.

  @property
  def cancelled(self) -> bool:
    """Whether the job was cancelled by those who waited for it."""
    raise NotImplementedError

  @property
  def work(self) -> int:
    """The tokens that go through the model in the next batch with the whole job."""
    return 0

  def fail(self, error: ServiceError) -> None:
    """End the job with an error, which is raised where its result is awaited."""
    raise NotImplementedError


@dataclasses.dataclass(eq=False, kw_only=True)
class SampleJob(Job):
  """A request for samples of one prompt; any thread may iterate over them, even before sampling has begun."""

  version: str
  cartridge: Composition | None = None
  prompt: Sequence[int]
  options: Mapping[str, Any]
  cancelled: bool = False
  drawing: Drawing | None = None
  _begun: concurrent.futures.Future[Drawing] = dataclasses.field(default_factory=concurrent.futures.Future)
  _why: ServiceError | None = None  # The error that ended it.

  @property
  def work(self) -> int:
    left = self.options.get('n', 1) if self.drawing is None else self.drawing.left  # Samples.
    return len(self.prompt) + left * self.options.get('max_tokens', 1)

  @property
  def drawn(self) -> int:
    """The tokens drawn so far, also of samples that were cancelled; 0 if the engine has failed."""
    return 0 if self.drawing is None or isinstance(self._why, NotReady) else self.drawing.drawn

  def __iter__(self) -> Iterator[Draft | Completion]:
    """Yield drafts and completions until all samples are done.

    Raises:
      ServiceError: the request was cancelled or refused, its deadline has passed, or the engine has failed.
    """
    drawing = self._begun.result()
    try:
      yield from drawing
    except CancelledError:
      raise self._why or Cancelled('The completions were cancelled.') from None
    except Exception as error:
      raise self._why or NotReady('The engine failed while it sampled: retry.') from error

  def result(self) -> list[Completion]:
    """Wait for all samples, and return them in order; raises as `__iter__`."""
    return sorted((event for event in self if isinstance(event, Completion)), key=lambda done: done.sample)

  def begin(self, drawing: Drawing) -> None:
    """Note that sampling has begun, and let readers iterate over its events."""
    self.drawing = drawing
    self._begun.set_result(drawing)

  def fail(self, error: ServiceError) -> None:
    """End the job with an error; if sampling has begun, the caller must cancel it, too."""
    self._why = error
    if not self._begun.done():
      self._begun.set_exception(error)


@dataclasses.dataclass(eq=False, kw_only=True)
class _FutureJob(Job):
  future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)
  alone: bool = False  # Whether to run it alone, since a batch with it has failed.
  claimed: bool = False  # Whether it has begun, so that it cannot be cancelled.

  @property
  def cancelled(self) -> bool:
    return self.future.cancelled()

  def fail(self, error: ServiceError) -> None:
    if self.claimed or self.future.set_running_or_notify_cancel():
      self.future.set_exception(error)


@dataclasses.dataclass(eq=False, kw_only=True)
class ScoreJob(_FutureJob):
  """A request to score rows with a version, possibly in several batches."""

  version: str
  rows: Sequence[tuple[Sequence[int], Sequence[int]]]
  topk: int
  ids: Sequence[np.ndarray] | None
  found: list[Scored] = dataclasses.field(default_factory=list)

  @property
  def left(self) -> int:
    """The number of rows that are not scored yet."""
    return len(self.rows) - len(self.found)

  @property
  def work(self) -> int:
    return tokens_scored(self.rows[len(self.found) :])


@dataclasses.dataclass(eq=False, kw_only=True)
class LearnJob(_FutureJob):
  """A request to learn from the feedback on one version."""

  feedback: Feedback

  @property
  def work(self) -> int:
    return tokens_learned(self.feedback.lessons, self.feedback.update.steps)


@dataclasses.dataclass(eq=False, kw_only=True)
class ForgetJob(_FutureJob):
  """A request to erase a version as soon as nothing uses it."""

  version: str


def runnable(jobs: Sequence[Job], present: Any) -> list[Job]:
  """Return the jobs that can run now, in order.

  Args:
    jobs: all jobs in the queue.
    present: a container of the versions that the engine has.

  Returns:
    The jobs whose versions are present, and those that forget a version that no earlier job needs. Later jobs that need
    such a version must wait.
  """
  found: list[Job] = []
  wanted: set[str] = set()
  forgotten: set[str] = set()
  # Many jobs need the same versions.
  is_there = functools.cache(lambda needs: all(version in present for version in needs))
  for job in jobs:
    if isinstance(job, ForgetJob):
      if job.version not in wanted:
        found.append(job)
      forgotten.add(job.version)
    elif not job.needs & forgotten:
      if is_there(job.needs):
        found.append(job)
      wanted |= job.needs
  return found


def tokens_scored(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
  """Return the number of tokens of rows to score."""
  return sum(len(prompt) + len(tokens) for prompt, tokens in rows)


def tokens_learned(lessons: Sequence[Lesson], steps: int) -> int:
  """Return the tokens of the passes over lessons: the teacher's, the student's per step, and one after the last."""
  return sum(
    len(each.teacher_prompt or ()) + steps * len(each.prompt) + (1 + steps) * len(each.completion) for each in lessons
  )


def fair_order(jobs: Sequence[Job], shares: Shares, begun: Sequence[Job] = ()) -> list[Job]:
  """Return jobs in the order in which their payers take turns; those of one payer stay in order.

  What `begun` jobs have left to do counts as done, since a payer who has just come would be no further than others.
  """
  numbers = {payer: number for number, payer in enumerate(dict.fromkeys(job.payer for job in jobs))}
  if len(numbers) < 2:
    return list(jobs)
  done = {
    payer: shares.of(payer) + sum(job.work for job in begun if job.payer == payer) / payer.weight for payer in numbers
  }
  turns = []
  for index, job in enumerate(jobs):
    turns.append((done[job.payer], numbers[job.payer], index))
    done[job.payer] += job.work / job.payer.weight
  return [jobs[index] for *_, index in sorted(turns)]


def learn_batch(jobs: Sequence[Job], *, slots: int, teachers: int, rows: int) -> list[LearnJob]:
  """Return the first job that learns, and later ones that can learn in the same batch.

  Args:
    jobs: the runnable jobs.
    slots: the most versions that learn in one batch.
    teachers: the most versions that teach in one batch.
    rows: the most lessons in one batch, unless the first job alone has more.
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
  """Return the first job that scores, and later ones of the same version, each with its number of rows in this batch.

  Args:
    jobs: the runnable jobs.
    rows: the most rows in one batch.
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
  """Return M, the number of further ids that a job scores at every position; None: none."""
  return job.ids[0].shape[1] if job.ids else None
