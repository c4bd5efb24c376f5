"""What a set of graded completions looks like, in training as in evaluation: lengths, format, entropy, words of doubt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
import functools
import re
from typing import Any

import numpy as np

from sdpo_jax.environments.grading import FAILED
from sdpo_jax.types import Example, Outcome, Rollouts

FORMAT_VALID = 'format_valid'  # A metric of outcomes, 1.0 or 0.0. `incorrect_format` is not read: see `describe`.


def rows_by_source(examples: Sequence[Example], group: np.ndarray) -> dict[str, np.ndarray]:
  """Row numbers of the completions of each data source, by its name in alphabetical order.

  Args:
    examples: G questions.
    group: [N] index of the question of each completion.
  """
  rows: dict[str, list[int]] = defaultdict(list)
  for row, question in enumerate(group):
    rows[examples[question].data_source].append(row)
  return {source: np.asarray(rows[source]) for source in sorted(rows)}


def describe(
  rollouts: Rollouts, outcomes: Sequence[Outcome], rows: np.ndarray, words: Sequence[str]
) -> dict[str, float]:
  """Numbers that tell a collapse, over the completions `rows` [M].

  The format-valid rate is read from the metric `format_valid` alone, because the reference's multiple-choice grader,
  and so ours in that profile, reports `incorrect_format` the wrong way round.

  Args:
    rollouts: N completions.
    outcomes: N.
    rows: which of them, at least one.
    words: words of doubt to count; none: not counted.

  Returns:
    completion_length_mean, _p50, _p95, _max (tokens), truncated_fraction, grader_failed_fraction; entropy (nats, mean
    over tokens, of the plain model distribution) where there is a token; epistemic_words_mean (a completion);
    format_valid_fraction where graders report it (of the completions that could be graded).
  """
  mask = rollouts.completion_mask[rows]
  lengths = mask.sum(1)
  chosen = [outcomes[row] for row in rows]
  metrics = {
    'completion_length_mean': float(lengths.mean()),
    'completion_length_p50': float(np.percentile(lengths, 50)),
    'completion_length_p95': float(np.percentile(lengths, 95)),
    'completion_length_max': float(lengths.max()),
    'truncated_fraction': float(np.mean([rollouts.finish_reason[row] == 'length' for row in rows])),
    'grader_failed_fraction': float(np.mean([failed(outcome) for outcome in chosen])),
  }
  if mask.any():
    metrics['entropy'] = float(rollouts.entropy[rows][mask].mean())
  if words:
    metrics['epistemic_words_mean'] = float(np.mean([count_words(rollouts.text[row], tuple(words)) for row in rows]))
  formats = numbers(chosen, FORMAT_VALID)
  if formats is not None:
    graded = [value for value, outcome in zip(formats, chosen, strict=True) if not failed(outcome)]
    metrics['format_valid_fraction'] = float(np.mean(graded))
  return metrics


def failed(outcome: Outcome) -> bool:
  """Whether the grader raised instead of grading."""
  return bool(outcome.metrics.get(FAILED, 0))


def number(value: Any) -> float | None:
  """A metric as a float; None for what is no number."""
  return float(value) if isinstance(value, bool | int | float | np.number | np.bool_) else None


def numbers(outcomes: Sequence[Outcome], name: str) -> np.ndarray | None:
  """[M] float64 values of a metric that every graded outcome has, 0 where the grader failed; None if there is none."""
  values = [0.0 if failed(outcome) else number(outcome.metrics.get(name)) for outcome in outcomes]
  if any(value is None for value in values) or all(failed(outcome) for outcome in outcomes):
    return None
  return np.asarray(values, np.float64)


def metric_names(outcomes: Sequence[Outcome]) -> list[str]:
  """Names of the numeric metrics that `numbers` finds, sorted; without the two that are reported as fractions."""
  names = {name for outcome in outcomes for name in outcome.metrics} - {FORMAT_VALID, FAILED, 'score'}
  return sorted(name for name in names if numbers(outcomes, name) is not None)


def count_words(text: str, words: tuple[str, ...]) -> int:
  """How often the words or phrases occur in a text, as whole words, in upper or lower case."""
  return sum(1 for _ in _pattern(words).finditer(text))


@functools.cache
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
  longest_first = sorted(words, key=len, reverse=True)
  return re.compile(rf'(?<!\w)(?:{"|".join(map(re.escape, longest_first))})(?!\w)', re.IGNORECASE)
