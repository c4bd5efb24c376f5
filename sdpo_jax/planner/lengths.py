"""Distributions of prompt and completion lengths, and the resulting occupancy of a sampler's cache."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import math
import statistics

from etils import epath
import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.training.directory.lines import read_metrics

COMPLETION_SPREAD = 1.0  # Default standard deviation of the logarithm of completion lengths.
PROMPT_SPREAD = 0.3  # The same for prompts.
_STEPS = 20  # Number of last steps of a run over which metrics are averaged.


def quantiles(mean: float, longest: float, count: int, spread: float) -> np.ndarray:
  """Return quantiles of log-normal lengths, [count] int, that are cut off at `longest` and have this mean.

  Args:
    mean: tokens, at most `longest`.
    longest: tokens.
    count: number of lengths.
    spread: standard deviation of the logarithm before the cut.
  """
  normal = statistics.NormalDist()
  shape = np.exp(spread * np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)]))

  def cut(scale: float) -> np.ndarray:
    return np.minimum(scale * shape, longest)

  low, high = 0.0, longest / shape[0]
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if cut(middle).mean() < mean else (low, middle)
  return np.clip(np.rint(cut(high)), 1, math.ceil(longest)).astype(int)


def of_run(source: epath.PathLike) -> dict[str, float]:
  """Return a run's lengths from its metrics, as settings of the section `plan` and `completion_spread`.

  Args:
    source: a run's directory or its metrics.jsonl.

  Raises:
    UserError: there are no metrics, or they lack lengths.
  """
  path = epath.Path(source)
  folder = path.parent if path.name == 'metrics.jsonl' else path
  lines = [line for line in read_metrics(folder) if line.get('rollout/completion_length_mean') is not None]
  if not lines:
    raise UserError(
      f'--lengths={source}: there is no metrics.jsonl with rollout/completion_length_mean; name the directory of a run '
      'that has done at least one step.'
    )
  sums: dict[str, list[float]] = collections.defaultdict(list)
  for line in lines[-_STEPS:]:
    for name, value in line.items():
      if isinstance(value, int | float):
        sums[name].append(value)
  mean = {name: statistics.fmean(values) for name, values in sums.items()}
  found = {
    'mean_completion': mean['rollout/completion_length_mean'],
    'mean_prompt': mean.get('rollout/prompt_length_mean'),
    'mean_reprompt': mean.get('teacher/prompt_length_mean'),
    'longest_completion': max(sums['rollout/completion_length_max'], default=None),
    'trained_fraction': mean.get('self_distillation/reprompt_sample_fraction') or None,
  }
  middle, high = mean.get('rollout/completion_length_p50'), mean.get('rollout/completion_length_p95')
  if middle and high and high > middle:
    found['completion_spread'] = math.log(high / middle) / statistics.NormalDist().inv_cdf(0.95)
  return {name: value for name, value in found.items() if value is not None}


def live_blocks(completions: Sequence[int] | np.ndarray, prompt: float, block: int, blocks: int) -> float:
  """Return the average number of blocks that decode attention fetches per row and step, if no row is ever free.

  Args:
    completions: tokens of each completion.
    prompt: tokens that a row holds before the first step.
    block: tokens of a block.
    blocks: blocks per row.
  """
  completions = np.asarray(completions)
  fetched = np.minimum(np.ceil((prompt + np.arange(completions.max())) / block), blocks)
  return float(np.cumsum(fetched)[completions - 1].sum() / completions.sum())
