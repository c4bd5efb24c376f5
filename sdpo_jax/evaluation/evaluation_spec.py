"""The settings of a run that an evaluation depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from sdpo_jax.data.prompts import PromptSpec


@dataclasses.dataclass(frozen=True)
class EvaluationSpec:
  """How held-out questions are answered and measured."""

  prompts: PromptSpec
  n: int  # Completions per question.
  method: Mapping[str, Any]  # Arguments of `Sampler.sample`, from `SamplingConfig.method`.
  max_tokens: int  # Maximum tokens per completion.
  max_ungraded_fraction: float  # Maximum fraction of completions that may be ungraded.
  epistemic_words: Sequence[str]  # Words of doubt to count.
