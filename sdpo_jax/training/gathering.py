"""Completions that wait until enough of them have a signal for an update (`algorithm.min_sdpo_examples`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.data import pipeline
from sdpo_jax.data.prompts import Tokenizer, prompt_tokens
from sdpo_jax.teacher.context import TeacherContext
from sdpo_jax.training.ahead import Drawn
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.types import Outcome, Rollouts

GATHERED = 'gathered'  # In the host's state of a checkpoint: the batches with completions that wait.
PADDING = Outcome.ungraded('no completion: fewer have gathered than an update holds')


@dataclasses.dataclass(frozen=True)
class Waiting:
  """The completions of one generation batch that wait for an update."""

  drawn: Drawn
  context: TeacherContext  # N.
  advantages: np.ndarray | None  # [N], of whole groups; None: no term reads them.
  rows: tuple[int, ...]  # In the batch.

  @property
  def examples(self) -> int:
    """How many of them the teacher knows more about."""
    return int((self.context.mask[list(self.rows)] > 0).sum())


@dataclasses.dataclass(frozen=True)
class Lesson:
  """What an update learns from, as one generation batch of the usual size; places that nothing fills hold no tokens."""

  graded: GradedRollouts  # N.
  context: TeacherContext | None  # N; None: there is no teacher.
  steps: np.ndarray  # [N] of which generation batch each is; 0: of none.
  rows: np.ndarray  # [N] where it stands there.

  def of_batch(self, step: int, values: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Return what per-token values [N, T] of this say of a generation batch's own completions, [count, T]; NaN:
    nothing.
    """
    own = self.steps == step
    found = {}
    for name, of_all in values.items():
      found[name] = np.full((count, of_all.shape[1]), np.nan, of_all.dtype)
      found[name][self.rows[own]] = of_all[own]
    return found


class Gathering:
  """The completions that wait, oldest first; those that teach nothing are not among them."""

  def __init__(self, config: Config):
    """Hold none yet."""
    self._least = config.algorithm.min_sdpo_examples
    self._room = config.data.train_batch_size * config.rollout.n
    self._step_rows = config.actor.ppo_mini_batch_size * config.rollout.n
    self._waiting: list[Waiting] = []

  def add(self, drawn: Drawn, context: TeacherContext, advantages: np.ndarray | None) -> None:
    """Keep what can be learned from of a generation batch: where the teacher knows more, or the advantage is not 0."""
    learned = context.mask > 0
    if advantages is not None:
      learned = learned | (advantages != 0)
    rows = tuple(np.flatnonzero(learned).tolist())
    if rows:
      self._waiting.append(Waiting(drawn, context, advantages, rows))

  @property
  def examples(self) -> int:
    """How many wait that the teacher knows more about."""
    return sum(each.examples for each in self._waiting)

  @property
  def rows(self) -> int:
    """How many wait."""
    return sum(len(each.rows) for each in self._waiting)

  def rows_of(self, step: int) -> tuple[int, ...]:
    """Return which completions of a generation batch wait."""
    return next((each.rows for each in self._waiting if each.drawn.step == step), ())

  def take(self) -> Lesson | None:
    """Return what the next update learns from, the oldest first; None if too few wait.

    Enough are `min_sdpo_examples` of which the teacher knows more, or as many as an update holds. What it does not hold
    goes on waiting.
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
    """Forget all: other weights have drawn them."""
    self._waiting = []

  def saved(self) -> tuple[Waiting, ...]:
    """Return what waits."""
    return tuple(self._waiting)

  def restore(
    self,
    host: Mapping[str, Any],
    config: Config,
    iterator: pipeline.TrainIterator,
    tokenizer: Tokenizer,
    prepared: Callable[[Drawn], tuple[TeacherContext, np.ndarray | None]],
    *,
    other_rows: bool,
  ) -> str | None:
    """Go on from what a checkpoint holds; the iterator is left anywhere.

    Args:
      host: the host's state in it.
      config: settings.
      iterator: from which the questions are taken again.
      tokenizer: for their prompts.
      prepared: returns the teacher's prompts and the advantages of a batch, as when it was drawn.
      other_rows: whether there may be other questions than when it was saved.

    Returns:
      A sentence for the user where completions that waited are of no use, as they answer other questions.
    """
    self.clear()
    lost = 0
    for saved in host.get(GATHERED, ()):
      iterator.set_state(saved['position'], other_rows=other_rows)
      examples = next(iterator)
      prompts = [prompt_tokens(tokenizer, example, config) for example in examples]
      drawn = Drawn.from_json(saved['drawn'], saved['position'], examples, prompts)
      if drawn is None:
        lost += len(saved['rows'])
      else:
        self._waiting.append(Waiting(drawn, *prepared(drawn), tuple(saved['rows'])))
    if not lost:
      return None
    return f'{lost} completions that waited for an update answer other questions than there are now; they are left out.'


def to_json(waiting: Sequence[Waiting]) -> list[dict[str, Any]]:
  """Return what `Gathering.restore` needs of completions that wait."""
  return [{'position': each.drawn.position, 'rows': list(each.rows), 'drawn': each.drawn.to_json()} for each in waiting]


def lesson_of(taken: Sequence[Waiting], room: int, step_rows: int) -> Lesson:
  """Return completions of several generation batches as one, dealt out evenly over as few optimizer steps as hold them.

  Args:
    taken: what is learned from; at least one completion.
    room: N.
    step_rows: completions of an optimizer step at most.
  """
  count = sum(len(each.rows) for each in taken)
  steps = -(-count // step_rows)
  order = np.arange(count)
  places = order % steps * step_rows + order // steps
  groups = np.cumsum([0, *(len(each.drawn.graded.examples) for each in taken)])
  graded = [each.drawn.graded for each in taken]
  chosen = [np.asarray(each.rows) for each in taken]
  parts = [each.rollouts.take(rows) for each, rows in zip(graded, chosen, strict=True)]
  pairs = [(each, int(row)) for each in taken for row in each.rows]

  def placed(values: Sequence[Any], filler: Any) -> list[Any]:
    found = [filler] * room
    for place, value in zip(places.tolist(), values, strict=True):
      found[place] = value
    return found

  def numbers(values: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays [rows, …] of all parts in their places, padded with zeros."""
    width = max(each.shape[1:] for each in values)
    found = np.zeros((room, *width), values[0].dtype)
    at = 0
    for each in values:
      found[(places[at : at + len(each)], *(slice(size) for size in each.shape[1:]))] = each
      at += len(each)
    return found

  rollouts = {
    field.name: numbers([getattr(part, field.name) for part in parts])
    for field in dataclasses.fields(Rollouts)
    if field.name not in ('group', 'finish_reason', 'text')
  }
  rollouts['group'] = numbers(
    [part.group + np.asarray(first, part.group.dtype) for part, first in zip(parts, groups[:-1], strict=True)]
  )
  rollouts['finish_reason'] = placed([reason for part in parts for reason in part.finish_reason], 'stop')
  rollouts['text'] = placed([text for part in parts for text in part.text], '')
  advantages = None
  if taken[0].advantages is not None:
    advantages = numbers([each.advantages[rows] for each, rows in zip(taken, chosen, strict=True)])
  merged = GradedRollouts(
    examples=[example for each in graded for example in each.examples],
    prompts=[prompt for each in graded for prompt in each.prompts],
    rollouts=Rollouts(**rollouts),
    outcomes=placed([each.drawn.graded.outcomes[row] for each, row in pairs], PADDING),
    sample_ids=numbers([each.sample_ids[rows] for each, rows in zip(graded, chosen, strict=True)]),
    graders_busy_s=0.0,
    advantages=advantages,
    present=numbers([np.ones(len(rows), bool) for rows in chosen]),
  )

  def of_context(name: str, filler: Any) -> list[Any]:
    return placed([getattr(each.context, name)[row] for each, row in pairs], filler)

  context = TeacherContext(
    messages=of_context('messages', []),
    prompt_tokens=of_context('prompt_tokens', []),
    mask=np.asarray(of_context('mask', 0), np.float32),
    solutions=of_context('solutions', None),
    feedback=of_context('feedback', None),
    truncated=np.asarray(of_context('truncated', False), bool),
    metrics={},
  )
  return Lesson(
    merged,
    context,
    steps=numbers([np.full(len(rows), each.drawn.step) for each, rows in zip(taken, chosen, strict=True)]),
    rows=numbers(chosen),
  )
