"""Calls of graders, and checks of outcomes: scores must be finite and in range, and metrics numbers or texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
import decimal
import math
import numbers
import pathlib
import sysconfig
from traceback import extract_tb
from typing import Any

import numpy as np

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.types import Outcome

NO_REASON = 'the grader gave no score'
REASON_CHARACTERS = 500  # Maximum length of a reason.
LIBRARIES = (sysconfig.get_path('stdlib'), sysconfig.get_path('purelib'))  # Not where a user mends a grader.


def scores_of(outcomes: Sequence[Outcome]) -> np.ndarray:
  """Return the scores, [N] float64, NaN for ungraded completions."""
  return np.array([math.nan if outcome.score is None else outcome.score for outcome in outcomes], np.float64)


def graded_of(outcomes: Sequence[Outcome]) -> np.ndarray:
  """Return a mask of the completions that have a score, [N] bool."""
  return np.array([outcome.graded for outcome in outcomes], bool)


def missing_of(outcomes: Sequence[Outcome]) -> np.ndarray:
  """Return a mask of the completions whose score is missing, [N] bool."""
  return np.array([outcome.wanted and not outcome.graded for outcome in outcomes], bool)


def encodable(text: str) -> str:
  """Replace lone surrogates in a text, which JSON escapes can produce and which files and tokenizers reject."""
  return text.encode('utf-8', 'replace').decode()


def checked(outcome: Outcome, score_range: Sequence[float]) -> Outcome:
  """Return an outcome whose score is a finite float in range, or an ungraded one that says what was wrong.

  Any real number is a valid score: Python numbers (also bool, Decimal or Fraction), NumPy numbers, and arrays of no
  dimension. Texts are made encodable. Metric names become strings; values that are neither numbers nor strings are
  dropped.

  Args:
    outcome: the outcome from a grader, which may be user code.
    score_range: the smallest and the largest valid score.
  """
  if outcome.score is None:
    reason = ungraded(outcome.reason if isinstance(outcome.reason, str) else NO_REASON)
    if not outcome.wanted:
      return Outcome.unwanted(reason.reason)
    return reason if outcome.applicable else Outcome.not_applicable(reason.reason)
  score = as_float(outcome.score)
  if score is None or not math.isfinite(score):
    return ungraded(f'the score is not a finite number: {short_repr(outcome.score if score is None else score)}')
  lowest, highest = score_range
  if not lowest <= score <= highest:
    return ungraded(f'the score {score:g} is outside environments.score_range={lowest:g},{highest:g}')
  if not isinstance(outcome.feedback, str | None):
    return ungraded(f'the feedback is not text: {short_repr(outcome.feedback)}')
  if not isinstance(outcome.metrics, Mapping):
    return ungraded(f'the metrics are not a mapping: {short_repr(outcome.metrics)}')
  feedback = None if outcome.feedback is None else encodable(outcome.feedback)
  metrics = {encodable(str(name)): _metric(value) for name, value in outcome.metrics.items()}
  return Outcome(score, feedback, {name: value for name, value in metrics.items() if value is not ...})


def called(
  grader: Any, method: str, asked: Sequence[list[Any]], name: str, score_range: Sequence[float]
) -> list[Outcome]:
  """Call a method of a grader; return its outcomes, `checked`.

  Args:
    grader: user code, which may change its arguments.
    method: '__call__', or one without arguments, whose result is dropped.
    asked: questions, completions, and whether these were cut off; empty for other methods.
    name: of the grader, for messages.
    score_range: as for `checked`.

  Raises:
    UserError: it returned anything but an outcome for each completion.
  """
  if not asked:
    getattr(grader, method)()
    return []
  examples, completions, truncated = asked
  count = len(completions)
  outcomes = grader(examples, completions, truncated=truncated)
  if not isinstance(outcomes, Sequence) or not all(isinstance(outcome, Outcome) for outcome in outcomes):
    raise UserError(
      f'The grader {name!r} must return a list with one sdpo_jax.types.Outcome for each completion, not '
      f'{short_repr(outcomes)}.'
    )
  if len(outcomes) != count:
    raise UserError(
      f'The grader {name!r} returned {len(outcomes)} outcomes for {count} completions: it must return one for each, '
      'in order.'
    )
  return [checked(outcome, score_range) for outcome in outcomes]


def described(error: BaseException) -> str:
  """Say what a grader raised and where in the user's code, to go on after the grader's name."""
  lines = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(LIBRARIES)]
  place = f' in {pathlib.Path(lines[-1].filename).name}, line {lines[-1].lineno}' if lines else ''
  return f'raised {short_repr(error, 200)}{place}'


def ungraded(reason: str) -> Outcome:
  """Return `Outcome.ungraded` with the reason made encodable and cut to a limit."""
  return Outcome.ungraded(encodable(reason.strip() or NO_REASON)[:REASON_CHARACTERS])


def as_float(value: Any) -> float | None:
  """Convert a real number, or an array of no dimension that holds one, to float; None for anything else.

  A whole number too large for a float becomes infinite.
  """
  if getattr(value, 'ndim', None) == 0 and callable(getattr(value, 'item', None)):
    value = value.item()
  if not isinstance(value, numbers.Real | decimal.Decimal):
    return None
  try:
    return float(value)
  except OverflowError:
    return math.inf if value > 0 else -math.inf
  except ValueError:  # A signalling NaN of `decimal`.
    return math.nan


def _metric(value: Any) -> Any:
  """Return a metric that can be averaged or written; `...` for other values."""
  if isinstance(value, str):
    return encodable(value)
  number = as_float(value)
  if number is None:
    return None if value is None else ...
  return value if isinstance(value, bool | int) and math.isfinite(number) else number


def reasons_of(outcomes: Sequence[Outcome]) -> list[tuple[str, int]]:
  """Return the reasons why scores are missing, the most frequent first, with the number of completions."""
  return Counter(outcomes[row].reason or NO_REASON for row in np.flatnonzero(missing_of(outcomes))).most_common()


def check_graded(outcomes: Sequence[Outcome], limit: float) -> None:
  """Raise UserError with the most frequent reason if more than the fraction `limit` of the outcomes is ungraded."""
  reasons, total = reasons_of(outcomes), int(missing_of(outcomes).sum())
  if not outcomes or total <= limit * len(outcomes):
    return
  reason, times = reasons[0]
  often = '' if len(reasons) == 1 else f' ({times} times)'
  raise UserError(
    f'{total} of {len(outcomes)} completions could not be graded, more than the fraction '
    f'environments.max_ungraded_fraction={limit:g} of a batch, most often because{often}: {reason.rstrip(".")}. Fix '
    'the grader (a run with a checkpoint then needs trainer.accept_changes=graders), or raise that setting, and start '
    'the same command again.'
  )
