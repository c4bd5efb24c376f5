"""Skipped steps: generation batches of which no optimizer step was taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sdpo_jax.config import TrainerConfig
from sdpo_jax.config.fields import is_number
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation.alarms import ROLLBACK
from sdpo_jax.tables import counted
from sdpo_jax.training.directory.lines import UNGRADED_REASON

NOT_FINITE = 'no gradient was finite (NaN or infinite)'
UNGRADED = 'no completion was graded'
EMPTY = 'every gradient was 0, as where the scores of each group are alike, or the teacher has no demonstration'
_REMEDIES = {
  NOT_FINITE: 'start again in another --workdir with a lower optimizer.lr or model.dtype=float32; or',
  UNGRADED: 'mend the graders, and',
  EMPTY: 'if all succeed, questions are too easy; if none does, too hard, or rollout.n is too small. The run goes on.',
}


class SkippedError(UserError):
  """The end of a run by skipped batches, at which the same command would end again."""


class Skipped(NamedTuple):
  """Batches at the end of a run from which nothing was learned, for reasons that end it or for `EMPTY`."""

  count: int = 0  # Without those that tell nothing about the reason: completions that waited, or were all alike.
  why: str = ''  # `NOT_FINITE` if that was so in any of them, else the reason of the last; '' if there are none.
  first: int = 0  # The step of the first.
  reason: str = ''  # Why completions were ungraded, most often, in the last.
  moved: bool = False  # Whether optimizer steps were taken all the same (`optimizer.skip_empty_steps`).

  def __str__(self) -> str:
    """Return the reason as text for users."""
    return f'{UNGRADED} ({self.reason.rstrip(".")})' if self.why == UNGRADED and self.reason else self.why


def cause(line: Mapping[str, Any]) -> str:
  """Return why steps of a generation batch were skipped, or none was due, according to its metrics."""
  if line.get('train/optimizer_steps') and not is_number(line.get('train/grad_norm')):
    return NOT_FINITE
  return UNGRADED if line.get('rollout/ungraded_fraction') and not is_number(line['rollout/score_mean']) else EMPTY


def note(line: Mapping[str, Any]) -> str:
  """Return a note on what a step lacks (an update, optimizer steps, grades), shown with its progress; '' if nothing."""
  left_out, why = int(line.get('train/skipped_steps', 0)), cause(line)
  gradient = 'not finite' if why == NOT_FINITE else '0'
  said = f'  {counted(left_out, "optimizer step")} skipped: gradient {gradient}' if left_out else ''
  if line.get('train/optimizer_steps') == 0:
    said = f'  no update: {int(line["gathering/examples"])} examples wait'
  return f'{said}  {UNGRADED}' if why == UNGRADED else said


def after(skipped: Skipped, line: Mapping[str, Any]) -> Skipped:
  """Return the skipped batches at the end of a run after a batch with these metrics, given those before it.

  Graded completions that wait for others are no skipped batch, and they show that the graders work; if none waits, none
  had anything to teach. A gradient of 0 does not show that others are finite, as the weights are the same. Ungraded
  completions teach nothing if it is 0, whether the optimizer steps or not; else others had waited, or the teacher needs
  no grades.
  """
  steps, why = line.get('train/optimizer_steps'), cause(line)
  moved = bool(steps) and line['train/skipped_steps'] < steps
  if steps is None or (moved and (why != UNGRADED or line['train/grad_norm'])):
    return Skipped()
  if why == EMPTY and ((not steps and line.get('gathering/rows', 1)) or skipped.why == NOT_FINITE):
    return skipped if skipped.why != UNGRADED else Skipped()
  if (why == EMPTY) != (skipped.why == EMPTY):
    skipped = Skipped()
  why = NOT_FINITE if skipped.why == NOT_FINITE else why
  first, reason = skipped.first or line['step'], line.get(UNGRADED_REASON, '')
  return Skipped(skipped.count + 1, why, first, reason, skipped.moved or moved)


def in_a_row(lines: Iterable[Mapping[str, Any]]) -> Skipped:
  """Return the skipped batches at the end of a run's metrics (lines oldest first).

  Batches before a rollback do not count, since the weights are different after it.
  """
  skipped = Skipped()
  for line in lines:
    skipped = after(skipped, line) if line.get(ROLLBACK) is None else Skipped()
  return skipped


def too_many(skipped: Skipped, trainer: TrainerConfig) -> bool:
  """Return whether skipped batches end a run: `trainer.max_skipped_steps` of them, or all that it has if fewer.

  Those with completions that were graded, but taught nothing, do not.
  """
  limit = min(trainer.max_skipped_steps, trainer.total_training_steps)
  return bool(limit) and skipped.why != EMPTY and skipped.count >= limit


def warns(before: Skipped, skipped: Skipped, trainer: TrainerConfig) -> bool:
  """Return whether the last batch was the `trainer.max_skipped_steps`th in a row that was graded and taught nothing."""
  return skipped != before and skipped.why == EMPTY and skipped.count == trainer.max_skipped_steps


def sentence(skipped: Skipped, step: int) -> str:
  """Return the beginning of a sentence about skipped batches, the last at `step`."""
  first, count = skipped.first, step - skipped.first + 1
  steps = f'step {step}' if count == 1 else f'{count} steps in a row, {first} to {step},'
  weights = 'only momentum and weight decay moved the weights after' if skipped.moved else 'the weights are those of'
  return f'Nothing was learned in {steps} because {skipped}; {weights} step {first - 1}'


def complaint(skipped: Skipped, step: int, trainer: TrainerConfig) -> str:
  """Return what is said of skipped batches that end a run or are warned of, the last at `step`."""
  said = f'{sentence(skipped, step)}. Look at the rollouts of step {skipped.first}; {_REMEDIES[skipped.why]}'
  limit = f'trainer.max_skipped_steps={trainer.max_skipped_steps} (0: never stop)'
  if step >= trainer.total_training_steps:  # No step is left, and fewer than the limit would end the run too.
    limit += f' and trainer.total_training_steps={trainer.total_training_steps}'
  raised = f' raise {limit} to continue from the checkpoint of step {step}, which is saved.'
  return said if skipped.why == EMPTY else said + raised
