"""The outcome of a completion with several graders: the weighted sum of their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from sdpo_jax.environments.outcomes import checked, ungraded
from sdpo_jax.types import Outcome

# Metrics that a run uses; the completion takes them from the first grader that reports them.
MEANINGFUL = ('acc', 'pred', 'format_valid')


def weighted_sum(
  weights: Mapping[str, float], outcomes: Mapping[str, Outcome], score_range: Sequence[float]
) -> Outcome:
  """Return Σ weight · score over the graders that apply, or the reason why there is none.

  A single grader of weight 1 is left as it is. A grader that does not apply is left out of the sum, as TRL's
  GRPOTrainer does for a reward function that returns None. If a grader with a weight could not grade, the completion is
  ungraded. A grader of weight 0 contributes only feedback and metrics, and may fail. The sum is rounded once, so that
  rewards of 1 with weights of 0.7, 0.2 and 0.1 give 1.

  Args:
    weights: weights of a question's graders by name, in its order; at least one is not 0.
    outcomes: outcomes by the same names, each already `checked`.
    score_range: as for `checked`.
  """
  if list(weights.values()) == [1.0]:
    return next(iter(outcomes.values()))
  counting = [name for name, weight in weights.items() if weight]
  for name in counting:
    if not outcomes[name].graded and outcomes[name].applicable:
      return ungraded(f'{name}: {outcomes[name].reason}')
  if not any(outcomes[name].wanted for name in counting):
    return Outcome.unwanted(f'none of its graders gives scores ({", ".join(counting)})')
  if not any(outcomes[name].graded for name in counting):
    return Outcome.not_applicable(f'none of its rewards applies ({", ".join(counting)})')
  applied = {name: outcomes[name] for name in weights if outcomes[name].graded}
  said = [outcome.feedback for outcome in applied.values() if outcome.feedback and outcome.feedback.strip()]
  total = Outcome(
    score=_exact_sum([weights[name] * outcome.score for name, outcome in applied.items()]),
    feedback='\n\n'.join(dict.fromkeys(said)) or None,
    metrics=_metrics(applied) if len(weights) > 1 else next(iter(applied.values())).metrics,
  )
  found = checked(total, score_range)
  given = {name: outcome.score for name, outcome in applied.items()}
  return dataclasses.replace(found, rewards=given) if found.graded else found


def _exact_sum(terms: Sequence[float]) -> float:
  """Return the sum, rounded once; infinite or NaN if a term or the sum is."""
  try:
    return math.fsum(terms)
  except (OverflowError, ValueError):  # Finite terms whose sum overflows, or infinities of both signs.
    return sum(terms)


def _metrics(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
  """Return the metrics of several graders as `<grader>/<metric>`, and `MEANINGFUL` ones also under their own name."""
  found = {f'{name}/{key}': value for name, outcome in outcomes.items() for key, value in outcome.metrics.items()}
  for key in MEANINGFUL:
    given = [outcome.metrics[key] for outcome in outcomes.values() if key in outcome.metrics]
    if given:
      found[key] = given[0]
  return found
