"""Aggregation of token losses by coefficients, so that any split of a batch gives the same gradient."""

from __future__ import annotations

import chex

from sdpo_jax.objective_settings import AGGREGATIONS


def loss_coefficients(
  mask: chex.Array,
  mode: str,
  *,
  group_size: int | None = None,
  scale: float | None = None,
  num_tokens: float | None = None,
  num_sequences: float | None = None,
  counted: chex.Array | None = None,
) -> chex.Array:
  """Return the coefficients c [N, T] with which loss = Σ c·(token losses) is the aggregate `mode`.

  `group_size` consecutive sequences share a denominator and the losses of the groups are averaged, groups without a
  single token counting as 0; None: all N sequences are one group. 1 reproduces the reference's runs, whose
  denominators are per micro-batch of one sequence (dp_actor.py:769-772, 900-908).

  - token-mean: Σ ℓ·m / max(Σ m, 1)
  - seq-mean-token-sum: Σ ℓ·m / (number of sequences with a token)
  - seq-mean-token-mean: Σ_i (Σ_t ℓ·m / (Σ_t m + 1e-8)) / (number of sequences with a token)
  - seq-mean-token-sum-norm: Σ ℓ·m / scale

  Where the reference divides 0 by 0 (a group that is all masked, in the seq-mean modes), the coefficients are 0.

  Args:
    mask: [N, T], of NumPy or JAX, response mask × self-distillation mask; float32 and float64 keep their dtype, others
      give float32.
    mode: one of `sdpo_jax.objective_settings.AGGREGATIONS`.
    group_size: sequences that share a denominator; must divide N.
    scale: divisor of seq-mean-token-sum-norm; None: T, as in the reference.
    num_tokens: denominator of token-mean in place of the group's own count.
    num_sequences: denominator of the seq-mean modes in place of the group's own count.
    counted: [N] bool, sequences that count at all; None: all. Groups without any are left out of the average. The
      `mask` of sequences that do not count must be 0.

  Raises:
    ValueError: unknown mode, or a group size that does not divide N.

  Source: core_algos.py:1027-1082 (`agg_loss`).
  """
  chex.assert_rank(mask, 2)
  if mode not in AGGREGATIONS:
    raise ValueError(f'Unknown loss_agg_mode {mode!r}: choose one of {", ".join(AGGREGATIONS)}.')
  sequences, length = mask.shape
  group_size = sequences if group_size is None else group_size
  if group_size <= 0 or sequences % group_size:
    raise ValueError(f'loss_group_size={group_size} does not divide {sequences} sequences.')
  xp = mask.__array_namespace__()
  if mask.dtype not in (xp.float32, xp.float64):
    mask = mask.astype(xp.float32)
  groups = sequences // group_size

  def count_in_group(per_sequence):
    """Return the sum over each sequence's group, at least 1: [N] -> [N, 1]."""
    count = xp.repeat(per_sequence.reshape(groups, group_size).sum(1), group_size)[:, None]
    return xp.maximum(count, xp.ones_like(count))

  tokens = mask.sum(1)
  if mode == 'token-mean':
    coefficients = mask / (count_in_group(tokens) if num_tokens is None else num_tokens)
  elif mode == 'seq-mean-token-sum-norm':
    coefficients = mask / (length if scale is None else scale)
  else:
    present = count_in_group((tokens > 0).astype(mask.dtype))
    coefficients = mask / (present if num_sequences is None else num_sequences)
    if mode == 'seq-mean-token-mean':
      coefficients = coefficients / (tokens + 1e-8 * (tokens > 0) + (tokens == 0))[:, None]
  if counted is not None:
    chex.assert_shape(counted, (sequences,))
    present = counted.reshape(groups, group_size).any(1).sum().astype(mask.dtype)
    groups = xp.maximum(present, xp.ones_like(present))
  return (coefficients / groups).astype(mask.dtype)
