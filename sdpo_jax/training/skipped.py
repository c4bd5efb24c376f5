"""Skipped steps: generation batches of which no optimizer step had a finite gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sdpo_jax.config import TrainerConfig
from sdpo_jax.evaluation.alarms import ROLLBACK


def taught_nothing(line: Mapping[str, Any]) -> bool:
  """Return whether all optimizer steps of a generation batch were skipped, according to its metrics."""
  steps = line.get('train/optimizer_steps')
  return bool(steps) and line['train/skipped_steps'] == steps


def after(count: int, line: Mapping[str, Any]) -> int:
  """Return the number of consecutive skipped batches after one with these metrics, given the `count` before it.

  A batch without an optimizer step, whose completions wait for others, does not change the count.
  """
  if line.get('train/optimizer_steps') == 0:
    return count
  return count + 1 if taught_nothing(line) else 0


def in_a_row(lines: Iterable[Mapping[str, Any]]) -> int:
  """Return the number of skipped batches at the end of a run's metrics (lines oldest first).

  Batches before a rollback do not count, since the weights are different after it.
  """
  count = 0
  for line in lines:
    count = after(count, line)
    if line.get(ROLLBACK) is not None:
      count = 0
  return count


def too_many(count: int, trainer: TrainerConfig) -> bool:
  """Return whether `count` consecutive skipped batches end a run: `trainer.max_skipped_steps`, or all its steps."""
  limit = trainer.max_skipped_steps
  return bool(limit) and count >= min(limit, trainer.total_training_steps)


def complaint(count: int, step: int, trainer: TrainerConfig) -> str:
  """Return the sentence with which a run ends after `count` consecutive skipped batches, the last at `step`."""
  steps = f'step {step}' if count == 1 else f'{count} steps in a row, {step - count + 1} to {step},'
  return (
    f'Nothing was learned in {steps} because no gradient was finite (NaN or infinite): the weights are those of step '
    f'{step - count}. Look at the rollouts of step {step - count + 1}; start again in another --workdir with a lower '
    f'optimizer.lr or model.dtype=float32; or raise trainer.max_skipped_steps={trainer.max_skipped_steps} (0: never '
    f'stop) to continue from the checkpoint of step {step}, which is saved.'
  )
