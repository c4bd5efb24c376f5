"""What graders that judge each completion by itself have in common."""

from __future__ import annotations

from collections.abc import Callable

from sdpo_jax.environments.registry import Grader
from sdpo_jax.types import Example, Outcome

Rule = Callable[[Example, str, bool], Outcome]  # Question, completion, whether it was truncated.

TRUNCATED = 'Your response was cut off at the length limit'


def grader(rule: Rule) -> Grader:
  """Return a grader that judges each completion by itself."""

  def grade(examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
    return [rule(*parts) for parts in zip(examples, completions, truncated, strict=True)]

  return grade


def outcome(
  right: bool, pred: str, format_valid: bool, feedback: str = '', *, incorrect_format: int | None = None
) -> Outcome:
  """Return a verdict of right or wrong in the reference's metrics, and `format_valid`.

  Args:
    right: the score, and `acc`.
    pred: the extracted answer, for a majority vote.
    format_valid: whether an answer could be extracted as the question asks.
    feedback: '' if there is nothing to say.
    incorrect_format: the reference's metric of that name; None: that the format is not valid.
  """
  score = float(right)
  incorrect = int(not format_valid) if incorrect_format is None else incorrect_format
  metrics = {'acc': score, 'pred': pred, 'incorrect_format': incorrect, 'format_valid': float(format_valid)}
  return Outcome(score, feedback, metrics)


def after_thinking(completion: str) -> str:
  """Return the completion without what comes before the last </think>."""
  return completion.rpartition('</think>')[2]
