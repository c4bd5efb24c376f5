"""Held-out evaluation: mean@n, best@k, worst@k, maj@k per data source, as the reference computes them.

For every question and k the reference seeds NumPy's legacy generator anew with 42 and draws k of the n samples with
replacement, 1000 times. So do we, draw for draw: the same samples give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.environments.grading import Graders
from sdpo_jax.evaluation.completions import describe, metric_names, numbers, rows_by_source
from sdpo_jax.files import jsonable
from sdpo_jax.rollout.engine import Sampler
from sdpo_jax.rollout.grading_thread import GradingThread
from sdpo_jax.types import Example, Outcome, Rollouts, Tree

BOOTSTRAPS = 1000  # Resamples and their seed: reference metric_utils.py:511.
BOOTSTRAP_SEED = 42
WRITTEN = (str, int, float, bool, np.generic, type(None))  # Types of metrics that are written with a sample.


@dataclasses.dataclass
class Evaluation:
  """Metrics by data source, and every sample behind them."""

  metrics: dict[str, dict[str, float]]
  samples: list[dict[str, Any]]

  def flat(self) -> dict[str, float]:
    """`eval/<task>/<metric>`."""
    return {f'eval/{task}/{name}': value for task, values in self.metrics.items() for name, value in values.items()}


def budget(n: int) -> list[int]:
  """k = 2, 4, 8, … and n itself, as the reference reports."""
  ks = []
  k = 2
  while k < n:
    ks.append(k)
    k *= 2
  return [*ks, n] if n > 1 else []


@functools.cache
def draws(n: int, k: int) -> np.ndarray:
  """[BOOTSTRAPS, k] sample numbers below n, with replacement: the reference's own, the same for every question."""
  return np.random.RandomState(BOOTSTRAP_SEED).choice(n, size=(BOOTSTRAPS, k), replace=True)


def best_at_k(scores: np.ndarray, k: int) -> float:
  """Expected maximum of k of the n scores of a question, mean over questions; `scores` [G, n]."""
  drawn = draws(scores.shape[1], k)
  return float(np.mean([row[drawn].max(1).mean() for row in scores]))


def worst_at_k(scores: np.ndarray, k: int) -> float:
  """Expected minimum of k of the n scores of a question, mean over questions; `scores` [G, n]."""
  return -best_at_k(-scores, k)


def elected(predictions: Sequence[str], k: int) -> np.ndarray:
  """[BOOTSTRAPS] sample that speaks for the most frequent of k of the n predictions of a question.

  Of predictions that are equally frequent the one drawn first wins, and of the samples that gave it the first drawn.
  """
  known: dict[str, int] = {}
  labels = np.asarray([known.setdefault(prediction, len(known)) for prediction in predictions])
  drawn = draws(len(predictions), k)
  votes = (labels[drawn][:, :, None] == labels[drawn][:, None, :]).sum(2)
  return drawn[np.arange(BOOTSTRAPS), votes.argmax(1)]


def elections(predictions: Sequence[Sequence[str]]) -> dict[int, np.ndarray]:
  """k → [G, BOOTSTRAPS] `elected` samples of G questions."""
  return {k: np.stack([elected(answers, k) for answers in predictions]) for k in budget(len(predictions[0]))}


def maj_at_k(scores: np.ndarray, winners: np.ndarray) -> float:
  """Expected score of the majority's answer, mean over questions; `scores` [G, n], `winners` [G, BOOTSTRAPS]."""
  return float(np.take_along_axis(scores, winners, axis=1).mean())


def summarize(scores: np.ndarray, winners: Mapping[int, np.ndarray] | None = None) -> dict[str, float]:
  """mean@n, std@n, and best@k, worst@k and maj@k for k = 2, 4, … n (reference metric_utils.py:511).

  Args:
    scores: [G, n].
    winners: of `elections`; None where the environment extracts no answers: no maj@k.
  """
  n = scores.shape[1]
  metrics = {f'mean@{n}': float(scores.mean())}
  if n > 1:
    metrics[f'std@{n}'] = float(scores.std(axis=1).mean())
  for k in budget(n):
    metrics[f'best@{k}'] = best_at_k(scores, k)
    metrics[f'worst@{k}'] = worst_at_k(scores, k)
    if winners is not None:
      metrics[f'maj@{k}'] = maj_at_k(scores, winners[k])
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
  """Samples `val_kwargs.n` completions for every question and grades them as they finish.

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
  with GradingThread(graders, examples, kwargs.n) as grading:
    rollouts = sampler.sample(
      base,
      trainable,
      [prompt_tokens(tokenizer, example, config) for example in examples],
      n=kwargs.n,
      **kwargs.method(),
      max_tokens=config.data.max_response_length,
      seed=seed,
      step=0,
      on_finished=grading.add,
    )
    outcomes = grading.outcomes()
  return Evaluation(
    metrics=by_source(examples, rollouts, outcomes, kwargs.n, config.alarms.epistemic_words),
    samples=_samples(examples, rollouts, outcomes),
  )


def by_source(
  examples: Sequence[Example], rollouts: Rollouts, outcomes: Sequence[Outcome], n: int, words: Sequence[str]
) -> dict[str, dict[str, float]]:
  """Metrics of each data source: `summarize` of the score and, under `<metric>/`, of every other number.

  Args:
    examples: G questions.
    rollouts: N = G · n completions, the n of a question next to each other.
    outcomes: N.
    n: completions a question.
    words: of doubt, to be counted.
  """
  metrics = {}
  for source, rows in rows_by_source(examples, rollouts.group).items():
    chosen = [outcomes[row] for row in rows]
    scores = np.array([outcome.score for outcome in chosen], np.float64).reshape(-1, n)
    winners = None
    if all('pred' in outcome.metrics for outcome in chosen):
      answers = [str(outcome.metrics['pred']) for outcome in chosen]
      winners = elections([answers[first : first + n] for first in range(0, len(answers), n)])
    found = summarize(scores, winners)
    for name in metric_names(chosen):
      values = numbers(chosen, name).reshape(-1, n)
      found.update({f'{name}/{key}': value for key, value in summarize(values, winners).items()})
    found.update(describe(rollouts, outcomes, rows, words))
    found['questions'] = float(len(scores))
    metrics[source] = found
  return metrics


def _samples(examples: Sequence[Example], rollouts: Rollouts, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
  samples = []
  for row, group in enumerate(rollouts.group):
    sample = {
      'id': examples[group].id,
      'data_source': examples[group].data_source,
      'prompt': examples[group].messages,
      'completion': rollouts.text[row],
      'finish_reason': rollouts.finish_reason[row],
      'tokens': int(rollouts.completion_mask[row].sum()),
      'score': jsonable(outcomes[row].score),
      'feedback': outcomes[row].feedback,
    }
    # A metric of the same name as a field above gives way to it.
    metrics = {key: value for key, value in outcomes[row].metrics.items() if key not in sample}
    samples.append(sample | {key: jsonable(value) for key, value in metrics.items() if isinstance(value, WRITTEN)})
  return samples
