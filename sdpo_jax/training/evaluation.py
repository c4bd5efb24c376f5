"""Held-out evaluation: mean@k, best@k, maj@k per data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.environments.grading import Graders
from sdpo_jax.rollout.engine import Sampler
from sdpo_jax.types import Example, Outcome, Rollouts, Tree

BOOTSTRAPS = 1000  # Resamples and their seed: reference metric_utils.py:511.
BOOTSTRAP_SEED = 42


@dataclasses.dataclass
class Evaluation:
  """Metrics by data source, and every sample behind them."""

  metrics: dict[str, dict[str, float]]
  samples: list[dict[str, Any]]

  def flat(self) -> dict[str, float]:
    """`eval/<task>/<metric>`."""
    return {f'eval/{task}/{name}': value for task, values in self.metrics.items() for name, value in values.items()}


def grade(graders: Graders, examples: Sequence[Example], rollouts: Rollouts) -> list[Outcome]:
  """An outcome for every completion, by the environment that its example names; N rows.

  Args:
    graders: of the run.
    examples: G questions.
    rollouts: N completions whose `group` indexes them.
  """
  return graders.grade(
    [examples[group] for group in rollouts.group],
    rollouts.text,
    truncated=[reason == 'length' for reason in rollouts.finish_reason],
  )


def budget(n: int) -> list[int]:
  """k = 2, 4, 8, … and n itself, as the reference reports."""
  ks = []
  k = 2
  while k < n:
    ks.append(k)
    k *= 2
  return [*ks, n] if n > 1 else []


def best_at_k(scores: np.ndarray, k: int, rng: np.random.Generator) -> float:
  """Expected maximum of k of the n `scores` [n], drawn with replacement (bootstrap)."""
  return float(scores[rng.integers(len(scores), size=(BOOTSTRAPS, k))].max(1).mean())


def maj_at_k(scores: np.ndarray, predictions: Sequence[str], k: int, rng: np.random.Generator) -> float:
  """Expected score of the most frequent of k predictions drawn with replacement; ties go to the first drawn."""
  _, labels = np.unique(np.asarray(predictions, dtype=object).astype(str), return_inverse=True)
  draws = rng.integers(len(scores), size=(BOOTSTRAPS, k))
  drawn = labels[draws]
  votes = (drawn[:, :, None] == drawn[:, None, :]).sum(2)
  winner = draws[np.arange(BOOTSTRAPS), votes.argmax(1)]
  return float(scores[winner].mean())


def summarize(scores: np.ndarray, predictions: Sequence[Sequence[str]] | None) -> dict[str, float]:
  """mean@n, and best@k and maj@k for k = 2, 4, … n (bootstrap of 1000, seed 42).

  Args:
    scores: [G, n].
    predictions: G lists of n extracted answers, or None where the environment extracts none.
  """
  n = scores.shape[1]
  metrics = {f'mean@{n}': float(scores.mean())}
  for k in budget(n):
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    metrics[f'best@{k}'] = float(np.mean([best_at_k(row, k, rng) for row in scores]))
    if predictions is not None:
      rng = np.random.default_rng(BOOTSTRAP_SEED)
      metrics[f'maj@{k}'] = float(
        np.mean([maj_at_k(row, preds, k, rng) for row, preds in zip(scores, predictions, strict=True)])
      )
  return metrics


def evaluate(
  sampler: Sampler,
  base: Tree,
  trainable: Tree,
  examples: Sequence[Example],
  config: Config,
  tokenizer: Any,
  graders: Graders,
  *,
  seed: int,
) -> Evaluation:
  """Samples `val_kwargs.n` completions for every question and grades them.

  Args:
    sampler: the rollout engine.
    base: frozen parameters.
    trainable: parameters to evaluate.
    examples: held-out questions.
    config: settings (`val_kwargs`, prompt limits).
    tokenizer: with a chat template.
    graders: of the run.
    seed: of the sampling noise; the same seed gives the same samples.
  """
  kwargs = config.val_kwargs
  rollouts = sampler.sample(
    base,
    trainable,
    [prompt_tokens(tokenizer, example, config) for example in examples],
    n=kwargs.n,
    temperature=kwargs.temperature,
    top_p=kwargs.top_p,
    top_k=kwargs.top_k,
    min_p=kwargs.min_p,
    max_tokens=config.data.max_response_length,
    seed=seed,
    step=0,
  )
  outcomes = grade(graders, examples, rollouts)
  return Evaluation(
    metrics=_by_source(examples, rollouts, outcomes, kwargs.n), samples=_samples(examples, rollouts, outcomes)
  )


def _by_source(
  examples: Sequence[Example], rollouts: Rollouts, outcomes: Sequence[Outcome], n: int
) -> dict[str, dict[str, float]]:
  rows_of: Mapping[str, list[int]] = defaultdict(list)
  for row, group in enumerate(rollouts.group):
    rows_of[examples[group].data_source].append(row)
  lengths = rollouts.completion_mask.sum(1)
  metrics = {}
  for source, rows in sorted(rows_of.items()):
    outcome_rows = [outcomes[row] for row in rows]
    scores = np.array([outcome.score for outcome in outcome_rows], np.float64).reshape(-1, n)
    has_pred = all('pred' in outcome.metrics for outcome in outcome_rows)
    predictions = (
      np.array([str(outcome.metrics['pred']) for outcome in outcome_rows], dtype=object).reshape(-1, n).tolist()
      if has_pred
      else None
    )
    metrics[source] = summarize(scores, predictions)
    if all('acc' in outcome.metrics for outcome in outcome_rows):
      metrics[source][f'acc/mean@{n}'] = float(np.mean([outcome.metrics['acc'] for outcome in outcome_rows]))
    metrics[source]['completion_length_mean'] = float(lengths[rows].mean())
    metrics[source]['truncated_fraction'] = float(np.mean([rollouts.finish_reason[row] == 'length' for row in rows]))
    metrics[source]['questions'] = float(len(scores))
  return metrics


def _samples(examples: Sequence[Example], rollouts: Rollouts, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
  return [
    {
      'id': examples[group].id,
      'data_source': examples[group].data_source,
      'prompt': examples[group].messages,
      'completion': rollouts.text[row],
      'finish_reason': rollouts.finish_reason[row],
      'score': outcomes[row].score,
      'feedback': outcomes[row].feedback,
      **{key: value for key, value in outcomes[row].metrics.items() if isinstance(value, str | int | float | bool)},
    }
    for row, group in enumerate(rollouts.group)
  ]
