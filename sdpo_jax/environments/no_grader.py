"""The environment of questions that nobody grades: a teacher that knows more by itself needs no scores."""

from __future__ import annotations

from sdpo_jax.environments.registry import register
from sdpo_jax.types import Example, Outcome

NAME = 'none'


@register(NAME)
def grade(examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
  """Return outcomes without scores, of which none is missing."""
  return [Outcome.unwanted(f'the environment {NAME!r} gives no scores') for _ in completions]
