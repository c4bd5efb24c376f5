"""Shared code of graders that judge each completion on its own."""

from __future__ import annotations

from collections.abc import Callable

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments.registry import Grader, GraderFactory
from sdpo_jax.types import Example, Outcome

Rule = Callable[[Example, str, bool], Outcome]  # (question, completion, whether it was truncated) → outcome.

TRUNCATED = 'Your response was cut off at the length limit'


def grader(rule: Rule) -> Grader:
  """Return a grader that applies a rule to each completion on its own."""

  def grade(examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
    return [rule(*parts) for parts in zip(examples, completions, truncated, strict=True)]

  return grade


def by_profile(reference: Rule, clean: Callable[..., Outcome]) -> GraderFactory:
  """Return a factory of graders that apply the rule of the settings' profile to each completion on its own.

  Args:
    reference: the rule of the reference profile.
    clean: the rule of the clean profile; its fourth argument says whether the feedback may reveal the answer.
  """

  def make(settings: EnvironmentsConfig) -> Grader:
    if settings.profile == 'reference':
      return grader(reference)
    return grader(lambda *parts: clean(*parts, settings.reveal_answer))

  return make


def outcome(
  right: float, pred: str, format_valid: bool, feedback: str = '', *, incorrect_format: float | None = None
) -> Outcome:
  """Return an outcome with the reference's metrics and `format_valid`.

  Args:
    right: how right the answer is, mostly 1 or 0: the score and `acc`.
    pred: the extracted answer, for a majority vote.
    format_valid: whether an answer in the requested format could be extracted.
    feedback: the feedback; '' if there is none.
    incorrect_format: the reference's metric of that name; None: 1 where the format is not valid.
  """
  score = float(right)
  incorrect = int(not format_valid) if incorrect_format is None else incorrect_format
  metrics = {'acc': score, 'pred': pred, 'incorrect_format': incorrect, 'format_valid': float(format_valid)}
  return Outcome(score, feedback, metrics)


def unanswered(truncated: bool, wanted: str) -> Outcome:
  """Return the outcome of a completion without an answer; `wanted` describes the expected format."""
  cut = f'{TRUNCATED} before it answered: be shorter, and {wanted}'
  return outcome(False, '', False, cut if truncated else f'Your answer had the wrong format: {wanted}')


def after_thinking(completion: str) -> str:
  """Return the part of a completion after the last </think>."""
  return completion.rpartition('</think>')[2]
