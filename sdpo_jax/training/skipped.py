"""Skipped steps: generation batches of which no optimizer step was taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import math
from typing import Any, NamedTuple

from sdpo_jax.config import TrainerConfig
from sdpo_jax.evaluation.alarms import ROLLBACK

NOT_FINITE = 'no gradient was finite (NaN or infinite)'
EMPTY = 'every gradient was 0, as without advantages and without a teacher that knows better'
_REMEDIES = {
  NOT_FINITE: 'start again in another --workdir with a lower optimizer.lr or model.dtype=float32',
  EMPTY: 'see there whether the graders answer, and whether some completions succeed and others do not',
}


class Skipped(NamedTuple):
  """The skipped batches at the end of a run."""

  count: int = 0
  why: str = ''  # `NOT_FINITE` if that was so in any of them, else `EMPTY`; '' if there are none.


def taught_nothing(line: Mapping[str, Any]) -> bool:
  """Return whether all optimizer steps of a generation batch were skipped, according to its metrics."""
  steps = line.get('train/optimizer_steps')
  return bool(steps) and line['train/skipped_steps'] == steps


def cause(line: Mapping[str, Any]) -> str:
  """Return why steps of a generation batch were skipped: the mean norm of its gradients is finite or it is not."""
  norm = line.get('train/grad_norm')
  return EMPTY if isinstance(norm, int | float) and math.isfinite(norm) else NOT_FINITE


def after(skipped: Skipped, line: Mapping[str, Any]) -> Skipped:
  """Return the consecutive skipped batches after one with these metrics, given those before it.

  A batch without an optimizer step, whose completions wait for others, does not change them.
  """
  if line.get('train/optimizer_steps') == 0:
    return skipped
  if not taught_nothing(line):
    return Skipped()
  return Skipped(skipped.count + 1, NOT_FINITE if skipped.why == NOT_FINITE else cause(line))


def in_a_row(lines: Iterable[Mapping[str, Any]]) -> Skipped:
  """Return the skipped batches at the end of a run's metrics (lines oldest first).

  Batches before a rollback do not count, since the weights are different after it.
  """
  skipped = Skipped()
  for line in lines:
    skipped = after(skipped, line) if line.get(ROLLBACK) is None else Skipped()
  return skipped


def too_many(skipped: Skipped, trainer: TrainerConfig) -> bool:
  """Return whether consecutive skipped batches end a run: `trainer.max_skipped_steps` of them.

  So do fewer, if the run has no more steps, and its gradients were not finite.
  """
  limit = trainer.max_skipped_steps
  if skipped.why == NOT_FINITE:
    limit = min(limit, trainer.total_training_steps)
  return bool(limit) and skipped.count >= limit


def complaint(skipped: Skipped, step: int, trainer: TrainerConfig) -> str:
  """Return the sentence with which a run ends after consecutive skipped batches, the last at `step`."""
  first = step - skipped.count + 1
  steps = f'step {step}' if skipped.count == 1 else f'{skipped.count} steps in a row, {first} to {step},'
  return (
    f'Nothing was learned in {steps} because {skipped.why}; the weights are those of step {first - 1}. Look at the '
    f'rollouts of step {first}; {_REMEDIES[skipped.why]}; or raise '
    f'trainer.max_skipped_steps={trainer.max_skipped_steps} (0: never stop) to continue from the checkpoint of step '
    f'{step}, which is saved.'
  )
