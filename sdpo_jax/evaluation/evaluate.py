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
from sdpo_jax.evaluation.completions import describe, metric_names, metric_values, samples_by_source
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
    """Return the metrics by name, `eval/<task>/<metric>`."""
    return {f'eval/{task}/{name}': value for task, values in self.metrics.items() for name, value in values.items()}


def reported_ks(n: int) -> list[int]:
  """Return the k of best@k, worst@k and maj@k for n samples: 2, 4, 8, … and n itself, as the reference reports."""
  ks = []
  k = 2
  while k < n:
    ks.append(k)
    k *= 2
  return [*ks, n] if n > 1 else []


@functools.cache
def bootstrap_draws(n: int, k: int) -> np.ndarray:
  """Return [BOOTSTRAPS, k] sample numbers below n, drawn with replacement as the reference does for every question."""
  return np.random.RandomState(BOOTSTRAP_SEED).choice(n, size=(BOOTSTRAPS, k), replace=True)


def best_at_k(values: np.ndarray, k: int) -> float:
  """Return the expected maximum of k of the n values [G, n] of a question, averaged over questions."""
  draws = bootstrap_draws(values.shape[1], k)
  return float(np.mean([of_question[draws].max(1).mean() for of_question in values]))


def worst_at_k(values: np.ndarray, k: int) -> float:
  """Return the expected minimum of k of the n values [G, n] of a question, averaged over questions."""
  return -best_at_k(-values, k)


def majority_sample(predictions: Sequence[str], k: int) -> np.ndarray:
  """Return the [BOOTSTRAPS] samples that gave the most frequent of k of the n predictions of a question.

  Of predictions that are equally frequent the one drawn first wins, and of the samples that gave it the first drawn.
  """
  known: dict[str, int] = {}
  labels = np.asarray([known.setdefault(prediction, len(known)) for prediction in predictions])
  draws = bootstrap_draws(len(predictions), k)
  votes = (labels[draws][:, :, None] == labels[draws][:, None, :]).sum(2)
  return draws[np.arange(BOOTSTRAPS), votes.argmax(1)]


def majority_samples(predictions: Sequence[Sequence[str]]) -> dict[int, np.ndarray]:
  """Return k → [G, BOOTSTRAPS] `majority_sample` of G questions, for every reported k."""
  ks = reported_ks(len(predictions[0]))
  return {k: np.stack([majority_sample(of_question, k) for of_question in predictions]) for k in ks}


def maj_at_k(values: np.ndarray, winners: np.ndarray) -> float:
  """Return the expected value of the majority's answer, averaged over questions.

  Args:
    values: [G, n].
    winners: [G, BOOTSTRAPS], of `majority_samples`.
  """
  return float(np.take_along_axis(values, winners, axis=1).mean())


def summarize(values: np.ndarray, winners: Mapping[int, np.ndarray] | None = None) -> dict[str, float]:
  """Return mean@n, std@n, and best@k, worst@k and maj@k for k = 2, 4, … n (reference metric_utils.py:511).

  Args:
    values: [G, n], scores or another metric.
    winners: of `majority_samples`; None where the environment extracts no answers: no maj@k.
  """
  n = values.shape[1]
  metrics = {f'mean@{n}': float(values.mean())}
  if n > 1:
    metrics[f'std@{n}'] = float(values.std(axis=1).mean())
  for k in reported_ks(n):
    metrics[f'best@{k}'] = best_at_k(values, k)
    metrics[f'worst@{k}'] = worst_at_k(values, k)
    if winners is not None:
      metrics[f'maj@{k}'] = maj_at_k(values, winners[k])
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
  """Sample `val_kwargs.n` completions for every question and grade them as they finish.

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
    metrics=metrics_by_source(examples, rollouts, outcomes, kwargs.n, config.alarms.epistemic_words),
    samples=_samples(examples, rollouts, outcomes),
  )


def metrics_by_source(
  examples: Sequence[Example], rollouts: Rollouts, outcomes: Sequence[Outcome], n: int, words: Sequence[str]
) -> dict[str, dict[str, float]]:
  """Return the metrics of each data source: `summarize` of the score and, under `<metric>/`, of every other number.

  Args:
    examples: G questions.
    rollouts: N = G · n samples, the n of a question next to each other.
    outcomes: N.
    n: samples per question.
    words: of doubt, to be counted.
  """
  metrics = {}
  for source, samples in samples_by_source(examples, rollouts.group).items():
    chosen = [outcomes[sample] for sample in samples]
    scores = np.array([outcome.score for outcome in chosen], np.float64).reshape(-1, n)
    winners = None
    if all('pred' in outcome.metrics for outcome in chosen):
      predictions = [str(outcome.metrics['pred']) for outcome in chosen]
      winners = majority_samples([predictions[first : first + n] for first in range(0, len(predictions), n)])
    found = summarize(scores, winners)
    for name in metric_names(chosen):
      values = metric_values(chosen, name).reshape(-1, n)
      found.update({f'{name}/{key}': value for key, value in summarize(values, winners).items()})
    found.update(describe(rollouts, outcomes, samples, words))
    found['questions'] = float(len(scores))
    metrics[source] = found
  return metrics


def _samples(examples: Sequence[Example], rollouts: Rollouts, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
  """Return every sample as the JSON object that is written."""
  samples = []
  for number, (question, outcome) in enumerate(zip(rollouts.group, outcomes, strict=True)):
    sample = {
      'id': examples[question].id,
      'data_source': examples[question].data_source,
      'prompt': examples[question].messages,
      'completion': rollouts.text[number],
      'finish_reason': rollouts.finish_reason[number],
      'tokens': int(rollouts.completion_mask[number].sum()),
      'score': jsonable(outcome.score),
      'feedback': outcome.feedback,
    }
    # A metric of the same name as a field above gives way to it.
    metrics = {key: value for key, value in outcome.metrics.items() if key not in sample}
    samples.append(sample | {key: jsonable(value) for key, value in metrics.items() if isinstance(value, WRITTEN)})
  return samples
