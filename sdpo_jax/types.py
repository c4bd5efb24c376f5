"""The data that flow through the program: Examples → Rollouts → Outcomes → Batch + TeacherSignal → TrainState.

Host-side values hold NumPy arrays and strings; device-side values are `flax.struct` dataclasses of arrays.
Shape letters: N samples (completions) of a generation batch, G groups (questions), n = N / G samples a group,
B rows of one update, S tokens of a row, T completion tokens, P prompt tokens, D model width, V vocabulary, K support
size.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import flax.struct
import jax
import numpy as np

Messages = list[dict[str, str]]
Tree = Any  # A nested dict of arrays.


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


@flax.struct.dataclass
class TokenRows:
  """Token sequences for one forward pass, right-padded."""

  tokens: jax.Array  # [B, S] int32.
  positions: jax.Array  # [B, S] int32, restarted at 0 for each segment without a parent.
  segment_ids: jax.Array  # [B, S] int32, 0 = padding; tokens attend only within their segment and to its parent.
  # [B, T] int32, position in the row whose hidden state predicts completion token t (0 where masked).
  target_index: jax.Array
  parents: jax.Array | None = None  # [B, S] int32, parent of the token's segment, 0: none; None: no segment has one.
  members: jax.Array | None = None  # [B] int32, the pooled adapter that each row uses, negative: none; None: no pool.


@flax.struct.dataclass
class TeacherSignal:
  """The input of the objective from a teacher, per completion token.

  An in-mesh teacher gives `hidden` and `unembedding`, and for the trust region also those of the student in the
  teacher's context with their mixing weight. An external teacher gives token ids with log-probs (the tail bucket holds
  the remaining probability).
  """

  hidden: jax.Array | None = None  # [B, T, D].
  unembedding: jax.Array | None = None  # [V, D].
  mix_hidden: jax.Array | None = None  # [B, T, D] of the student's weights on the teacher's prompt (trust region).
  mix_unembedding: jax.Array | None = None  # [V, D].
  mix_rate: float | jax.Array | None = None  # logits = (1 − rate)·teacher + rate·mix (the trust region, float32).
  token_ids: jax.Array | None = None  # [B, T, K] int32.
  log_probs: jax.Array | None = None  # [B, T, K].


@flax.struct.dataclass
class RowNumbers:
  """Per-row numbers of the loss, each replacing the number that all rows share; None: the shared number applies.

  They are data: one compiled program serves rows, and requests, with different numbers. Where a row holds several
  samples, arrays may be [B, T], one number per token. `objective.row_numbers.check` checks the allowed values.
  """

  alpha: jax.Array | None = None  # [B] float, of the divergence.
  is_clip: jax.Array | None = None  # [B] float, upper clip of the ratio; 0: the divergence is not weighted by it.
  rollout_is_threshold: jax.Array | None = None  # [B] float.
  temperature: jax.Array | None = None  # [B] float.
  clip_ratio_low: jax.Array | None = None  # [B] float.
  clip_ratio_high: jax.Array | None = None  # [B] float.
  clip_ratio_c: jax.Array | None = None  # [B] float; infinity: no dual clip.
  topk: jax.Array | None = None  # [B] int32, how many leading entries of the support count.
  # [B] float, 1: a tail bucket holds the probability outside the support; 0: the divergence has no tail bucket.
  tail: jax.Array | None = None


# Fields of `Batch` that hold the weights of the terms of the loss.
COEFFICIENTS = ('distill_coef', 'policy_coef', 'entropy_coef', 'kl_coef')
# Coefficient → what its term reads of each token besides what all terms read.
READS = {'policy_coef': 'advantages', 'kl_coef': 'initial_log_probs'}
# Fields of `Batch` that are numbers [B, T] and that `objective` takes by the same names.
NUMBERS = (*COEFFICIENTS, 'old_log_probs', 'sampling_log_probs', *READS.values())


@flax.struct.dataclass
class Batch:
  """Device arrays of one update (or of one micro-batch of it)."""

  student: TokenRows
  teacher: TokenRows | None  # Input of an in-mesh teacher; None: there is none (GRPO, an external teacher).
  targets: jax.Array  # [B, T] int32, completion tokens (0 where masked).
  mask: jax.Array  # [B, T] float32, 1 on completion tokens.
  # Weights of the tokens in the terms of the loss, mask × weight ÷ denominator; None: the loss lacks the term.
  distill_coef: jax.Array | None  # [B, T] float32, of the divergence.
  policy_coef: jax.Array | None  # [B, T] float32, of the policy gradient.
  entropy_coef: jax.Array | None  # [B, T] float32, of the entropy bonus.
  # [B, T], of the policy before the update; None: the current ones, detached (on-policy).
  old_log_probs: jax.Array | None
  advantages: jax.Array | None  # [B, T] float32; None: no term reads them.
  # [B, T] under the distribution that the targets were drawn from, for weights of tokens; None: the loss applies none.
  sampling_log_probs: jax.Array | None = None
  # [B, T] float32, of the KL divergence from the initial policy; a weight like those above.
  kl_coef: jax.Array | None = None
  initial_log_probs: jax.Array | None = None  # [B, T] of the initial policy; None: no term reads them.
  signal: TeacherSignal | None = None  # From an external teacher: `token_ids` and `log_probs` [B, T, K].
  numbers: RowNumbers | None = None  # Per-row numbers, replacing the run's; None: all rows use the run's.


@flax.struct.dataclass
class TrainState:
  """The device state that an update changes and that a checkpoint must hold."""

  step: jax.Array  # [] int32, generation batches finished.
  optimizer_step: jax.Array  # [] int32, optimizer updates applied (skipped ones not counted).
  trainable: Tree  # float32.
  opt_state: Tree
  teacher: Tree  # float32, in the layout of `trainable`; an empty dict for a teacher without parameters of its own.
  rng: jax.Array  # typed PRNG key.
