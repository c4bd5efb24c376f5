"""The data that flow through the program: Examples → Rollouts → Outcomes → Batch + TeacherSignal → TrainState.

Host-side values hold NumPy arrays and strings; device-side values (device_types.py, also found here) are `flax.struct`
dataclasses of arrays. JAX is imported with the latter, on first use: the processes of graders need none.
Shape letters: N samples (completions) of a generation batch, G groups (questions), n = N / G samples a group,
B rows of one update, S tokens of a row, T completion tokens, P prompt tokens, D model width, V vocabulary, K support
size.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
  from sdpo_jax.device_types import *  # noqa: F403

DEVICE_TYPES = tuple('COEFFICIENTS NUMBERS READS Batch RowNumbers TeacherSignal TokenRows TrainState Tree'.split())
Messages = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Example:
  """One question with everything that its graders need."""

  id: str
  messages: Messages  # Chat messages; the last one is the user turn that re-prompting extends.
  environment: str  # Registered name of the grader, or of several whose scores are added up: 'exact,0.2*format'.
  ground_truth: Any  # Whatever the grader needs; never shown to the student.
  data_source: str  # Evaluation results are reported per data source.
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # The row as it was read, for reward functions.
  columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass
class Rollouts:
  """N sampled completions, `n` consecutive rows per question."""

  group: np.ndarray  # [N] int32, index of the question in the generation batch.
  prompt_tokens: np.ndarray  # [N, P] int32, right-padded.
  prompt_mask: np.ndarray  # [N, P] bool.
  completion_tokens: np.ndarray  # [N, T] int32, right-padded; the stop token, where one was drawn, is part of it.
  completion_mask: np.ndarray  # [N, T] bool.
  sampling_log_probs: np.ndarray  # [N, T] float32, under the distribution drawn from (temperature, truncation).
  model_log_probs: np.ndarray  # [N, T] float32, under the plain model distribution (temperature 1, no truncation).
  entropy: np.ndarray  # [N, T] float32, nats, of the plain model distribution.
  finish_reason: list[str]  # [N] 'stop' (a stop id or stop string) or 'length'.
  text: list[str]  # [N] decoded completion without special tokens.

  @classmethod
  def of_completions(cls, group: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> Rollouts:
    """Return rollouts of completions [N, T] with placeholders in all other fields, for planning and measuring."""
    count, zeros = len(group), np.zeros(mask.shape, np.float32)
    return cls(
      group=group,
      prompt_tokens=np.zeros((count, 1), np.int32),
      prompt_mask=np.ones((count, 1), bool),
      completion_tokens=tokens,
      completion_mask=mask,
      sampling_log_probs=zeros,
      model_log_probs=zeros,
      entropy=zeros,
      finish_reason=['stop'] * count,
      text=[''] * count,
    )

  def __len__(self) -> int:
    return len(self.group)

  def take(self, rows: np.ndarray) -> Rollouts:
    """Return the rollouts restricted to (or reordered by) `rows` [M] int."""

    def take(values: list[Any] | np.ndarray) -> list[Any] | np.ndarray:
      return [values[int(row)] for row in rows] if isinstance(values, list) else values[rows]

    return Rollouts(**{field.name: take(getattr(self, field.name)) for field in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A grader's result for one completion: a score, or, as `Outcome.ungraded`, the reason why there is none.

  An ungraded completion is treated as if it had not been sampled: it is in no mean, mask, denominator or demonstration.
  """

  score: float | None  # Compared with `success_reward_threshold`; None: ungraded.
  feedback: str | None = None  # What was wrong, in words; None or blank: nothing to say.
  # For example acc, pred (str, for maj@k), incorrect_format.
  metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reason: str | None = None  # Why there is no score, as text for users; never shown to a model.
  applicable: bool = True  # False: no score, because the grader is not meant for such questions.
  # With several graders, or a weighted one: the reward of each that applies, by grader name, before weighting.
  rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
  wanted: bool = True  # False: no score, because none was requested; then nothing is missing.
  # Feedback that a model wrote (`actor.self_distillation.feedback_model`), or why it wrote none.
  written: str | None = None
  unwritten: str | None = None

  @classmethod
  def ungraded(cls, reason: str) -> Outcome:
    """Return the outcome of a completion that could not be graded, for example because a server did not answer."""
    return cls(score=None, reason=reason)

  @classmethod
  def not_applicable(cls, reason: str) -> Outcome:
    """Return the outcome of a grader that is not meant for this question; other graders of the question still count."""
    return cls(score=None, reason=reason, applicable=False)

  @classmethod
  def unwanted(cls, reason: str) -> Outcome:
    """Return the outcome of a completion that need not be graded; other graders of the question still count."""
    return cls(score=None, reason=reason, applicable=False, wanted=False)

  @property
  def graded(self) -> bool:
    return self.score is not None


def __getattr__(name: str) -> Any:
  if name in DEVICE_TYPES:
    return getattr(importlib.import_module('sdpo_jax.device_types'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
