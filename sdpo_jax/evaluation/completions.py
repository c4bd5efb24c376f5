"""Metrics of graded completions, in training and in evaluation: lengths, format, entropy, words of doubt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
import functools
import re

import numpy as np

from sdpo_jax.environments.outcomes import as_float, graded_of, missing_of
from sdpo_jax.types import Example, Outcome, Rollouts

WORDS = 'epistemic_words_mean'
# All names that `describe` may return.
DESCRIBED = (
  'completion_length_mean',
  'completion_length_p50',
  'completion_length_p95',
  'completion_length_max',
  'truncated_fraction',
  'ungraded_fraction',
  'entropy',
  WORDS,
  'format_valid_fraction',
)
FORMAT_VALID = 'format_valid'  # A metric of outcomes, 1.0 or 0.0. `incorrect_format` is ignored: see `describe`.


def samples_by_source(examples: Sequence[Example], group: np.ndarray) -> dict[str, np.ndarray]:
  """Return the sample indices of each data source, with the sources in alphabetical order.

  Args:
    examples: G questions.
    group: [N] index of the question of each sample.
  """
  samples: dict[str, list[int]] = defaultdict(list)
  for sample, question in enumerate(group):
    samples[examples[question].data_source].append(sample)
  return {source: np.asarray(samples[source]) for source in sorted(samples)}


def describe(
  rollouts: Rollouts, outcomes: Sequence[Outcome], samples: np.ndarray, words: Sequence[str]
) -> dict[str, float]:
  """Return the metrics that reveal a collapse of the policy, over the completions of `samples` [M].

  The format-valid rate is read from the metric `format_valid` alone, because the reference's multiple-choice grader,
  and so ours in that profile, reports `incorrect_format` inverted.

  Args:
    rollouts: N samples.
    outcomes: N outcomes.
    samples: indices of some samples, at least one.
    words: words of doubt to count, such as "wait"; empty: they are not counted.

  Returns:
    completion_length_mean, _p50, _p95, _max (tokens), truncated_fraction, ungraded_fraction; entropy (nats, mean over
    tokens, of the unmodified model distribution) if there is a token; epistemic_words_mean (per completion);
    format_valid_fraction (of the graded completions) if graders report it.
  """
  mask = rollouts.completion_mask[samples]
  lengths = mask.sum(1)
  chosen = [outcomes[sample] for sample in samples]
  metrics = {
    **describe_lengths('completion_length', lengths),
    'truncated_fraction': float(np.mean([rollouts.finish_reason[sample] == 'length' for sample in samples])),
    'ungraded_fraction': float(np.mean(missing_of(chosen))),
  }
  if mask.any():
    metrics['entropy'] = float(rollouts.entropy[samples][mask].mean())
  if words:
    counts = [count_words(rollouts.text[sample], tuple(words)) for sample in samples]
    metrics[WORDS] = float(np.mean(counts))
  formats = metric_values(chosen, FORMAT_VALID)
  if formats is not None:
    metrics['format_valid_fraction'] = float(formats[graded_of(chosen)].mean())
  return metrics


def describe_lengths(name: str, lengths: np.ndarray) -> dict[str, float]:
  """Return the mean, median, 95th percentile and maximum of lengths, as `<name>_mean`, `_p50`, `_p95` and `_max`."""
  p50, p95 = np.percentile(lengths, [50, 95])
  values = {'mean': lengths.mean(), 'p50': p50, 'p95': p95, 'max': lengths.max()}
  return {f'{name}_{part}': float(value) for part, value in values.items()}


def metric_values(outcomes: Sequence[Outcome], name: str) -> np.ndarray | None:
  """Return a metric's values, [M] float64, NaN if ungraded; None unless every graded outcome has a number."""
  values = [as_float(outcome.metrics.get(name)) if outcome.graded else np.nan for outcome in outcomes]
  if any(value is None for value in values) or not any(outcome.graded for outcome in outcomes):
    return None
  return np.asarray(values, np.float64)


def metric_names(outcomes: Sequence[Outcome]) -> list[str]:
  """Return the sorted names of numeric metrics, except the score and the one that is reported as a fraction."""
  names = {name for outcome in outcomes for name in outcome.metrics} - {FORMAT_VALID, 'score'}
  return sorted(name for name in names if metric_values(outcomes, name) is not None)


def reward_names(outcomes: Sequence[Outcome]) -> list[str]:
  """Return the sorted names of graders with a value in `Outcome.rewards`."""
  return sorted({name for outcome in outcomes for name in outcome.rewards})


def reward_values(outcomes: Sequence[Outcome], grader: str) -> np.ndarray:
  """Return a grader's reward of each completion before weighting, [M] float64; NaN if it does not apply."""
  return np.asarray([outcome.rewards.get(grader, np.nan) for outcome in outcomes], np.float64)


def count_words(text: str, words: tuple[str, ...]) -> int:
  """Return how often any of the words or phrases occurs in a text, as whole words, ignoring case."""
  return sum(1 for _ in _pattern(words).finditer(text))


@functools.cache
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
  longest_first = sorted(words, key=len, reverse=True)
  return re.compile(rf'(?<!\w)(?:{"|".join(map(re.escape, longest_first))})(?!\w)', re.IGNORECASE)
