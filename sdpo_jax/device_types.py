"""The device-side values of types.py, `flax.struct` dataclasses of arrays; shape letters as there."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

Tree = Any  # A nested dict of arrays.


@flax.struct.dataclass
class TokenRows:
  """Token sequences for one forward pass, right-padded."""

  tokens: jax.Array  # [B, S] int32.
  positions: jax.Array  # [B, S] int32, restarted at 0 for each segment without a parent.
  segment_ids: jax.Array  # [B, S] int32, 0 = padding; tokens attend only within their segment and to its parent.
  # [B, T] int32, position in the row whose hidden state predicts completion token t (0 where masked).
  target_index: jax.Array
  parents: jax.Array | None = None  # [B, S] int32, parent of the token's segment, 0: none; None: no segment has one.
  members: jax.Array | None = None  # [B] int32, see `Policy.apply`; None: there is neither a pool nor a bank.


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
