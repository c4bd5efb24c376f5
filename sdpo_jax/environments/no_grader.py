"""The environment of questions without a grader, for a teacher with privileged context that needs no scores."""

from __future__ import annotations

from sdpo_jax.environments.registry import register
from sdpo_jax.types import Example, Outcome

NAME = 'none'


@register(NAME)
def grade(examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
  """Return outcomes without scores; none of them counts as missing."""
  return [Outcome.unwanted(f'the environment {NAME!r} gives no scores') for _ in completions]
