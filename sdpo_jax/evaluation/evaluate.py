"""Held-out evaluation: mean@n, best@k, worst@k, maj@k per data source, as the reference computes them.

For every question and k the reference reseeds NumPy's legacy generator with 42 and draws k of the n samples with
replacement, 1000 times. This module does the same, draw for draw: the same samples give the same numbers.

Only graded samples count. A question with fewer than n of them is measured by those (k are drawn from them) and has the
same weight as any other; a question without any is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.outcomes import check_graded, graded_of, scores_of
from sdpo_jax.evaluation.completions import (
  describe,
  metric_names,
  metric_values,
  reward_names,
  reward_values,
  samples_by_source,
)
from sdpo_jax.evaluation.evaluation_spec import EvaluationSpec
from sdpo_jax.evaluation.excerpts import excerpt, excerpt_messages
from sdpo_jax.files import jsonable
from sdpo_jax.rollout.grading_thread import GradingThread
from sdpo_jax.types import Example, Outcome, Rollouts, Tree

BOOTSTRAPS = 1000  # Resamples and their seed: reference metric_utils.py:511.
BOOTSTRAP_SEED = 42
QUESTIONS = 'questions'  # The metric that counts the questions of a data source.
WRITTEN = (str, int, float, bool, np.generic, type(None))  # Types of metrics that are written to a sample's record.


@dataclasses.dataclass
class Evaluation:
  """The result of an evaluation: metrics by data source, and the samples that they were computed from."""

  metrics: dict[str, dict[str, float]]
  samples: list[dict[str, Any]]

  def with_metrics(self, more: Mapping[str, Mapping[str, float]]) -> Evaluation:
    """Return this evaluation with more metrics, by data source."""
    metrics = {task: {**values, **more.get(task, {})} for task, values in self.metrics.items()}
    return dataclasses.replace(self, metrics=metrics)

  def flat(self) -> dict[str, float]:
    """Return the metrics by name, `eval/<task>/<metric>`."""
    return {f'eval/{task}/{name}': value for task, values in self.metrics.items() for name, value in values.items()}


def reported_ks(n: int) -> list[int]:
  """Return the k of best@k, worst@k and maj@k for n samples: 2, 4, 8, … and n itself, as the reference reports."""
  return [*(2**power for power in range(1, (n - 1).bit_length())), n] if n > 1 else []


@functools.cache
def bootstrap_draws(n: int, k: int) -> np.ndarray:
  """Return [BOOTSTRAPS, k] sample indices below n, drawn with replacement as the reference does for every question."""
  return np.random.RandomState(BOOTSTRAP_SEED).choice(n, size=(BOOTSTRAPS, k), replace=True)


Samples = Sequence[np.ndarray]  # For each question, the values of its graded samples: n of them, or fewer.


def best_at_k(values: Samples, k: int) -> float:
  """Return the expected maximum over k samples of a question, averaged over questions."""
  return float(np.mean([of_question[bootstrap_draws(len(of_question), k)].max(1).mean() for of_question in values]))


def worst_at_k(values: Samples, k: int) -> float:
  """Return the expected minimum over k samples of a question, averaged over questions."""
  return float(np.mean([of_question[bootstrap_draws(len(of_question), k)].min(1).mean() for of_question in values]))


def majority_sample(predictions: Sequence[str], k: int) -> np.ndarray:
  """Return [BOOTSTRAPS] samples, each the first drawn with the most frequent prediction among k draws for a question.

  Among equally frequent predictions, the one drawn first wins.
  """
  known: dict[str, int] = {}
  labels = np.asarray([known.setdefault(prediction, len(known)) for prediction in predictions])
  draws = bootstrap_draws(len(predictions), k)
  votes = (labels[draws][:, :, None] == labels[draws][:, None, :]).sum(2)
  return draws[np.arange(BOOTSTRAPS), votes.argmax(1)]


def majority_samples(predictions: Sequence[Sequence[str]], n: int) -> dict[int, np.ndarray]:
  """Return k → [G, BOOTSTRAPS] results of `majority_sample` for G questions, for every reported k of n samples."""
  return {k: np.stack([majority_sample(of_question, k) for of_question in predictions]) for k in reported_ks(n)}


def maj_at_k(values: Samples, winners: np.ndarray) -> float:
  """Return the expected value of the most frequent answer among k samples, averaged over questions.

  Args:
    values: values of G questions.
    winners: [G, BOOTSTRAPS], from `majority_samples`.
  """
  return float(np.stack([of_question[won] for of_question, won in zip(values, winners, strict=True)]).mean())


def mean_over_questions(values: Samples) -> float:
  """Return the mean over questions of the means over their samples."""
  if len({len(of_question) for of_question in values}) == 1:
    return float(np.stack(values).mean())  # The reference's order of summation.
  return float(np.mean([of_question.mean() for of_question in values]))


def summarize(values: Samples, n: int, winners: Mapping[int, np.ndarray] | None = None) -> dict[str, float]:
  """Return mean@n, std@n, and best@k, worst@k and maj@k for k = 2, 4, … n (reference metric_utils.py:511).

  Args:
    values: scores or another metric, for at least one sample of each question.
    n: number of samples drawn for each question.
    winners: results of `majority_samples`; None: the environment extracts no answers, and maj@k is left out.
  """
  metrics = {f'mean@{n}': mean_over_questions(values)}
  if n > 1:
    metrics[f'std@{n}'] = float(np.mean([of_question.std() for of_question in values]))
  for k in reported_ks(n):
    metrics[f'best@{k}'] = best_at_k(values, k)
    metrics[f'worst@{k}'] = worst_at_k(values, k)
    if winners is not None:
      metrics[f'maj@{k}'] = maj_at_k(values, winners[k])
  return metrics


def evaluate(
  sampler: Any,
  base: Tree,
  trainable: Tree,
  examples: Sequence[Example],
  spec: EvaluationSpec,
  tokenizer: Any,
  graders: Graders,
  *,
  seed: int,
  stop: Stop = NEVER,
) -> Evaluation:
  """Sample `val_kwargs.n` completions for every question and grade them as they finish.

  Args:
    sampler: what draws the samples, with the method `sample` of `rollout.sampler.Sampler`.
    base: frozen parameters.
    trainable: parameters to evaluate.
    examples: held-out questions.
    spec: prompts, sampling, and what is measured.
    tokenizer: a tokenizer with a chat template.
    graders: graders of the run.
    seed: seed of the sampling noise; the same seed gives the same samples.
    stop: tells whether the run should stop; checked before every `rollout.decode_chunk` tokens and while graders work.

  Raises:
    UserError: a grader cannot work, or too few samples could be graded (`environments.max_ungraded_fraction`).
    StoppedError: the run was told to stop.
  """
  with GradingThread(graders, examples, spec.n, stop) as grading:
    rollouts = sampler.sample(
      base,
      trainable,
      [prompt_tokens(tokenizer, example, spec.prompts) for example in examples],
      n=spec.n,
      **spec.method,
      max_tokens=spec.max_tokens,
      seed=seed,
      step=0,
      on_finished=grading.add,
      between=stop.check,
    )
    outcomes = grading.outcomes()
  check_graded(outcomes, spec.max_ungraded_fraction)
  return Evaluation(
    metrics=metrics_by_source(examples, rollouts, outcomes, spec.n, spec.epistemic_words),
    samples=written(examples, rollouts, outcomes),
  )


def metrics_by_source(
  examples: Sequence[Example], rollouts: Rollouts, outcomes: Sequence[Outcome], n: int, words: Sequence[str]
) -> dict[str, dict[str, float]]:
  """Return the metrics of each data source: `summarize` of the score and, under `<metric>/`, of every other number.

  If several graders judge a question, `reward/<grader>/` summarizes each grader's reward before weighting, over the
  samples to which it applies. A source without a graded sample has mean@n NaN and no other metrics from graders.

  Args:
    examples: G questions.
    rollouts: N = G · n samples, those of a question consecutive.
    outcomes: N outcomes.
    n: number of samples per question.
    words: words of doubt to count.
  """
  metrics = {}
  for source, samples in samples_by_source(examples, rollouts.group).items():
    chosen = [outcomes[sample] for sample in samples]
    graded = graded_of(chosen)
    found = _summaries(chosen, n) if graded.any() else {f'mean@{n}': float('nan')}
    found.update(describe(rollouts, outcomes, samples, words))
    found[QUESTIONS] = float(len(chosen) // n)
    metrics[source] = found
  return metrics


def _summaries(outcomes: Sequence[Outcome], n: int) -> dict[str, float]:
  """Return `summarize` of score and metrics for outcomes of consecutive questions, at least one of them graded."""
  questions = [range(first, first + n) for first in range(0, len(outcomes), n)]
  graded = [[row for row in question if outcomes[row].graded] for question in questions]
  graded = [rows for rows in graded if rows]

  def of_questions(values: np.ndarray) -> Samples:
    return [values[rows] for rows in graded]

  winners = None
  if all('pred' in outcomes[row].metrics for rows in graded for row in rows):
    winners = majority_samples([[str(outcomes[row].metrics['pred']) for row in rows] for rows in graded], n)
  found = summarize(of_questions(scores_of(outcomes)), n, winners)
  for name in metric_names(outcomes):
    summary = summarize(of_questions(metric_values(outcomes, name)), n, winners)
    found.update({f'{name}/{key}': value for key, value in summary.items()})
  for grader in reward_names(outcomes):
    given = [values[~np.isnan(values)] for values in of_questions(reward_values(outcomes, grader))]
    summary = summarize([values for values in given if values.size], n)
    found.update({f'reward/{grader}/{key}': value for key, value in summary.items()})
  return found


def summary_names(n: int) -> list[str]:
  """Return the names of the metrics that `summarize` returns, including maj@k."""
  values = [np.zeros(n)]
  return [*summarize(values, n), *(f'maj@{k}' for k in reported_ks(n))]


def sample_record(example: Example, rollouts: Rollouts, number: int, outcome: Outcome) -> dict[str, Any]:
  """Return what all files of samples say about one, with the `excerpt` of every text.

  If a question has several graders, `rewards` holds the reward of each, unweighted.
  """
  return {
    'id': example.id,
    'prompt': excerpt_messages(example.messages),
    'completion': excerpt(rollouts.text[number]),
    'finish_reason': rollouts.finish_reason[number],
    'score': jsonable(outcome.score),
    'ungraded': outcome.reason,
    'feedback': None if outcome.feedback is None else excerpt(outcome.feedback),
    **({'rewards': jsonable(outcome.rewards)} if outcome.rewards else {}),
  }


def written(examples: Sequence[Example], rollouts: Rollouts, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
  """Return every sample as the JSON object to be written, with the `excerpt` of every text."""
  samples = []
  for number, (question, outcome) in enumerate(zip(rollouts.group, outcomes, strict=True)):
    sample = {
      **sample_record(examples[question], rollouts, number, outcome),
      'data_source': examples[question].data_source,
      'tokens': int(rollouts.completion_mask[number].sum()),
    }
    # A field above takes precedence over a metric of the same name.
    metrics = {
      key: excerpt(value) if isinstance(value, str) else jsonable(value)
      for key, value in outcome.metrics.items()
      if key not in sample and isinstance(value, WRITTEN)
    }
    samples.append(sample | metrics)
  return samples
