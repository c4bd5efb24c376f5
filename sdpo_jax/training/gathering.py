"""Gathering of completions over several steps until an update has enough of them (`algorithm.min_sdpo_examples`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.teacher.context import TeacherContext
from sdpo_jax.training.ahead import Ahead, SampledBatch
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.types import Outcome, Rollouts

GATHERED = 'gathered'  # Key in a checkpoint's host state: the batches with waiting completions.
PADDING = Outcome.ungraded('no completion: fewer have gathered than an update holds')


@dataclasses.dataclass(frozen=True)
class Waiting:
  """The completions of one generation batch that wait for an update."""

  drawn: SampledBatch
  context: TeacherContext  # Of all N completions of the batch.
  advantages: np.ndarray | None  # [N], computed over whole groups; None: no term reads them.
  rows: tuple[int, ...]  # Their indices in the batch.

  @property
  def examples(self) -> int:
    """The number of waiting completions for which the teacher has extra context."""
    return int((self.context.mask[list(self.rows)] > 0).sum())


@dataclasses.dataclass(frozen=True)
class GatheredBatch:
  """The completions that an update learns from, as a batch of the usual size; empty places hold no tokens."""

  graded: GradedRollouts  # Of N completions.
  context: TeacherContext | None  # Of N completions; None: there is no teacher.
  steps: np.ndarray  # [N], the step of each completion's generation batch; 0: an empty place.
  rows: np.ndarray  # [N], the completion's index in that batch.

  def of_batch(self, step: int, values: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Return the part of per-token values [N, T] that belongs to the batch of `step`, [count, T]; NaN elsewhere."""
    own = self.steps == step
    found = {}
    for name, of_all in values.items():
      found[name] = np.full((count, of_all.shape[1]), np.nan, of_all.dtype)
      found[name][self.rows[own]] = of_all[own]
    return found


class Gathering:
  """A queue of waiting completions, oldest first; completions without a signal are never added."""

  def __init__(self, config: Config):
    """Make an empty queue."""
    self._least = config.algorithm.min_sdpo_examples
    self._room = config.data.train_batch_size * config.rollout.n
    self._step_rows = config.actor.ppo_mini_batch_size * config.rollout.n
    self._waiting: list[Waiting] = []

  def add(self, drawn: SampledBatch, context: TeacherContext, advantages: np.ndarray | None) -> None:
    """Add the completions of a batch that have a signal: extra context of the teacher, or an advantage other than 0."""
    learned = context.mask > 0
    if advantages is not None:
      learned = learned | (advantages != 0)
    rows = tuple(np.flatnonzero(learned).tolist())
    if rows:
      self._waiting.append(Waiting(drawn, context, advantages, rows))

  @property
  def examples(self) -> int:
    """The number of waiting completions for which the teacher has extra context."""
    return sum(each.examples for each in self._waiting)

  @property
  def rows(self) -> int:
    """The number of waiting completions."""
    return sum(len(each.rows) for each in self._waiting)

  def rows_of(self, step: int) -> tuple[int, ...]:
    """Return the rows of the waiting completions of a step's generation batch."""
    return next((each.rows for each in self._waiting if each.drawn.step == step), ())

  def take(self) -> GatheredBatch | None:
    """Remove and return the completions of the next update, the oldest first; None if too few wait.

    An update needs `min_sdpo_examples` completions for which the teacher has extra context, or as many completions as
    it has room for. Completions beyond that room keep waiting.
    """
    if self.examples < self._least and self.rows < self._room:
      return None
    taken, left, room = [], [], self._room
    for each in self._waiting:
      now, later = each.rows[:room], each.rows[room:]
      room -= len(now)
      taken += [dataclasses.replace(each, rows=now)] if now else []
      left += [dataclasses.replace(each, rows=later)] if later else []
    self._waiting = left
    return lesson_of(taken, self._room, self._step_rows)

  def clear(self) -> None:
    """Drop all waiting completions, as they were sampled with weights that a rollback has undone."""
    self._waiting = []

  def saved(self) -> tuple[Waiting, ...]:
    """Return the waiting completions."""
    return tuple(self._waiting)

  def restore(
    self,
    host: Mapping[str, Any],
    ahead: Ahead,
    prepared: Callable[[SampledBatch], tuple[TeacherContext, np.ndarray | None]],
    *,
    other_rows: bool,
  ) -> str | None:
    """Restore the waiting completions from a checkpoint; the iterator's position is unspecified afterwards.

    Args:
      host: host state in the checkpoint.
      ahead: queue through whose iterator the questions are read again.
      prepared: returns the teacher's prompts and the advantages of a batch, as they were when it was sampled.
      other_rows: whether the questions may have changed since the checkpoint was saved.

    Returns:
      A sentence for the user if waiting completions are dropped because they answer other questions; else None.
    """
    self.clear()
    lost = 0
    for saved in host.get(GATHERED, ()):
      ahead.seek(saved['position'], other_rows=other_rows)
      drawn = ahead.read(saved['drawn'])
      if drawn is None:
        lost += len(saved['rows'])
      else:
        self._waiting.append(Waiting(drawn, *prepared(drawn), tuple(saved['rows'])))
    if not lost:
      return None
    return f'The questions of {lost} completions that waited for an update have changed; the completions are left out.'


def to_json(waiting: Sequence[Waiting]) -> list[dict[str, Any]]:
  """Return the JSON values from which `Gathering.restore` restores waiting completions."""
  return [{'position': each.drawn.position, 'rows': list(each.rows), 'drawn': each.drawn.to_json()} for each in waiting]


def lesson_of(taken: Sequence[Waiting], room: int, step_rows: int) -> GatheredBatch:
  """Merge completions of several generation batches into one, dealt evenly over as few optimizer steps as possible.

  Args:
    taken: completions to learn from; at least one.
    room: N, the number of places.
    step_rows: maximum number of completions of an optimizer step.
  """
  count = sum(len(each.rows) for each in taken)
  steps = -(-count // step_rows)
  order = np.arange(count)
  places = order % steps * step_rows + order // steps

  def merged(values: Sequence[Any], filler: Any = 0) -> Any:
    """Return the taken rows of each batch's values, put at their places.

    Values are lists, whose empty places get `filler`, or arrays [rows, …], which are padded with zeros.
    """
    if not isinstance(values[0], np.ndarray):
      picked = [own[row] for own, each in zip(values, taken, strict=True) for row in each.rows]
      found = [filler] * room
      for place, value in zip(places.tolist(), picked, strict=True):
        found[place] = value
      return found
    width = max(own.shape[1:] for own in values)
    found = np.zeros((room, *width), values[0].dtype)
    at = 0
    for own, each in zip(values, taken, strict=True):
      here = places[at : at + len(each.rows)]
      found[(here, *(slice(size) for size in own.shape[1:]))] = own[list(each.rows)]
      at += len(each.rows)
    return found

  def merged_fields(records: Sequence[Any], **fillers: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(records[0]) if field.name != 'metrics']
    return {name: merged([getattr(each, name) for each in records], fillers.get(name, 0)) for name in names}

  graded = [each.drawn.graded for each in taken]
  counts = [len(each.rollouts) for each in graded]
  rollouts, groups = [], 0
  for each in graded:
    rollouts.append(dataclasses.replace(each.rollouts, group=each.rollouts.group + groups))
    groups += len(each.examples)
  whole = GradedRollouts(
    examples=[example for each in graded for example in each.examples],
    prompts=[prompt for each in graded for prompt in each.prompts],
    rollouts=Rollouts(**merged_fields(rollouts, finish_reason='stop', text='')),
    outcomes=merged([each.outcomes for each in graded], PADDING),
    sample_ids=merged([each.sample_ids for each in graded]),
    graders_busy_s=0.0,
    drawn_by=None if graded[0].drawn_by is None else merged([each.drawn_by for each in graded], ()),
    advantages=None if taken[0].advantages is None else merged([each.advantages for each in taken]),
    present=merged([np.ones(size, bool) for size in counts]),
  )
  contexts = [each.context for each in taken]
  empty = dict(messages=[], prompt_tokens=[], solutions=None, feedback=None)
  return GatheredBatch(
    whole,
    TeacherContext(**merged_fields(contexts, **empty), metrics={}),
    steps=merged([np.full(size, each.drawn.step) for each, size in zip(taken, counts, strict=True)]),
    rows=merged([np.arange(size) for size in counts]),
  )
