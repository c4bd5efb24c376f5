"""What an evaluation needs to know of a run's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from sdpo_jax.data.prompts import PromptSpec


@dataclasses.dataclass(frozen=True)
class EvaluationSpec:
  """How held-out questions are answered and measured."""

  prompts: PromptSpec
  n: int  # Completions of a question.
  method: Mapping[str, Any]  # Of sampling: `SamplingConfig.method`.
  max_tokens: int  # Of a completion.
  max_ungraded_fraction: float  # Largest share of completions that may stay ungraded.
  epistemic_words: Sequence[str]  # Words of doubt to count.
