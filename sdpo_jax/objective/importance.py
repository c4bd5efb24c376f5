"""Importance weights: of the update against the policy that sampled, and of the trainer against the sampler."""

from __future__ import annotations

import chex
import jax
import numpy as np

LOG_RATIO_BOUND = 20.0  # Log-ratios are clipped to ±20 before the exponential (core_algos.py:1168).


def importance_ratio(log_probs: jax.Array, old_log_probs: jax.Array) -> jax.Array:
  """Return exp(log π − log π_old) of the sampled token, without gradient: arrays [...] -> [...].

  The log-ratio is first clipped to ±20. `terms.clipped_ratio` applies the upper clip `is_clip`.
  Source: core_algos.py:1160-1172.
  """
  chex.assert_equal_shape([log_probs, old_log_probs])
  chex.assert_type([log_probs, old_log_probs], float)
  return _bounded_ratio(jax.lax.stop_gradient(log_probs - old_log_probs))


def _bounded_ratio(log_ratio: chex.Array) -> chex.Array:
  """Return exp(log_ratio) with the log-ratio clipped to ±20: [...] -> [...]."""
  xp = log_ratio.__array_namespace__()
  return xp.exp(xp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def _mean(values: chex.Array, mask: chex.Array, axis: int | None = None) -> chex.Array:
  return (values * mask).sum(axis) / (mask.sum(axis) + 1e-8)


def rollout_is_weights(
  old_log_probs: chex.Array,
  rollout_log_probs: chex.Array,
  mask: chex.Array,
  threshold: float = 2.0,
  batch_normalize: bool = False,
  level: str | None = 'token',
) -> tuple[chex.Array | None, dict[str, chex.Array]]:
  """Return importance weights that correct for the difference between the sampler's and the trainer's distribution.

  They are computed once per generation batch, with NumPy or JAX depending on the arguments.

  w = min(exp(clip(old − rollout, ±20))·mask, threshold), with the log-ratio of the token or (level 'sequence') summed
  over the sequence.

  Args:
    old_log_probs: [N, T] of the sampled tokens under the trainer before the update.
    rollout_log_probs: [N, T] under the distribution that they were drawn from.
    mask: [N, T], 1 on completion tokens.
    threshold: upper clip.
    batch_normalize: divide by the mean weight of the batch.
    level: 'token', 'sequence' or None (no weights, only the metrics of the difference).

  Returns:
    weights [N, T] (0 where masked; None with level None) and `rollout_corr/*` scalars, the reference's names.

  Raises:
    ValueError: unknown level.

  Source: rollout_corr_helper.py:530-566, 779, 943-997.
  """
  chex.assert_rank([old_log_probs, rollout_log_probs, mask], 2)
  chex.assert_equal_shape([old_log_probs, rollout_log_probs, mask])
  chex.assert_type([old_log_probs, rollout_log_probs], float)
  if level not in ('token', 'sequence', None):
    raise ValueError(f"rollout_is must be 'token', 'sequence' or None, not {level!r}.")
  xp = old_log_probs.__array_namespace__()
  mask = mask.astype(old_log_probs.dtype)
  # Padding may hold anything, NaN included.
  old = xp.where(mask > 0, old_log_probs, xp.zeros_like(old_log_probs))
  rollout = xp.where(mask > 0, rollout_log_probs, xp.zeros_like(old_log_probs))
  log_ratio = old - rollout
  metrics = _off_policy_metrics(old, rollout, mask)
  weights = None
  if level is not None:
    log_weights = log_ratio if level == 'token' else (log_ratio * mask).sum(-1, keepdims=True) + 0 * log_ratio
    raw = _bounded_ratio(log_weights) * mask
    metrics |= _weight_metrics(raw, log_weights, mask, threshold, level)
    weights = xp.minimum(raw, xp.full_like(raw, threshold))
    if batch_normalize:
      if level == 'token':
        mean = _mean(weights, mask)
      else:
        present = (mask.sum(-1) > 0).astype(mask.dtype)
        mean = (_mean(weights, mask, -1) * present).sum() / xp.maximum(present.sum(), xp.ones_like(present.sum()))
      mean = xp.where(mean > 1e-8, mean, xp.ones_like(mean))
      weights = weights / mean
      metrics['rollout_is_batch_norm_factor'] = mean
  return weights, {f'rollout_corr/{name}': value for name, value in metrics.items()}


def mismatch(trainer: np.ndarray, sampler: np.ndarray, mask: np.ndarray) -> dict[str, float]:
  """Return how much the trainer's and the sampler's log-probs of the sampled tokens differ.

  Args:
    trainer: [N, T] nats; NaN where the trainer computed none.
    sampler: [N, T] nats, under the distribution that the tokens were drawn from.
    mask: [N, T], nonzero on completion tokens.

  Returns:
    `rollout_corr/log_prob_difference_mean` and `_max` (absolute, nats) and `rollout_corr/log_prob_correlation`
    (Pearson; missing if one side is constant, as in greedy sampling). Empty if the trainer computed none.
  """
  chex.assert_rank([trainer, sampler, mask], 2)
  chex.assert_equal_shape([trainer, sampler, mask])
  chex.assert_type([trainer, sampler], float)
  known = (mask > 0) & np.isfinite(trainer)
  if not known.any():
    return {}
  ours, theirs = np.asarray(trainer, np.float64)[known], np.asarray(sampler, np.float64)[known]
  difference = np.abs(ours - theirs)
  metrics = {'log_prob_difference_mean': difference.mean(), 'log_prob_difference_max': difference.max()}
  if ours.std() > 0 and theirs.std() > 0:
    metrics['log_prob_correlation'] = np.corrcoef(ours, theirs)[0, 1]
  return {f'rollout_corr/{name}': float(value) for name, value in metrics.items()}


def _off_policy_metrics(old: chex.Array, rollout: chex.Array, mask: chex.Array) -> dict[str, chex.Array]:
  """Return distances between the sampler's and the trainer's distribution.

  Source: rollout_corr_helper.py, `compute_offpolicy_metrics`.
  """
  xp = old.__array_namespace__()
  log_ratio = old - rollout
  training, sampling = -_mean(old, mask, -1), -_mean(rollout, mask, -1)
  gap = training - sampling
  return {
    'training_ppl': xp.exp(training).mean(),
    'training_log_ppl': training.mean(),
    'rollout_ppl': xp.exp(sampling).mean(),
    'rollout_log_ppl': sampling.mean(),
    'kl': -_mean(log_ratio, mask),
    'k3_kl': _mean(xp.exp(log_ratio) - log_ratio - 1, mask),
    'log_ppl_diff': gap.mean(),
    'log_ppl_abs_diff': abs(gap).mean(),
    'log_ppl_diff_max': gap.max(),
    'log_ppl_diff_min': gap.min(),
    'ppl_ratio': xp.exp(gap).mean(),
    'chi2_token': _mean(_bounded_ratio(log_ratio) ** 2, mask) - 1,
    'chi2_seq': (_bounded_ratio((log_ratio * mask).sum(-1)) ** 2).mean() - 1,
  }


def _weight_metrics(
  weights: chex.Array, log_weights: chex.Array, mask: chex.Array, threshold: float, level: str
) -> dict[str, chex.Array]:
  """Return statistics of the weights before the upper clip (rollout_corr_helper.py, `compute_is_metrics`)."""
  xp = weights.__array_namespace__()
  low = 1.0 / threshold
  inside = mask > 0
  infinite = xp.full_like(weights, xp.inf)

  def share(condition):
    """Return the fraction of the [N] sequences, or of the [N, T] tokens in the mask, that meet a condition."""
    condition = condition.astype(weights.dtype)
    return condition.mean() if condition.ndim == 1 else _mean(condition, mask)

  if level == 'token':
    too_high, too_low = weights > threshold, weights < low
  else:
    bound = float(np.log(threshold))
    too_high, too_low = log_weights[:, 0] > bound, log_weights[:, 0] < -bound
  none = weights.sum() * 0
  metrics = {
    'rollout_is_mean': _mean(weights, mask),
    'rollout_is_max': xp.where(inside.any(), xp.where(inside, weights, -infinite).max(), none),
    'rollout_is_min': xp.where(inside.any(), xp.where(inside, weights, infinite).min(), none),
    'rollout_is_ratio_fraction_high': share(too_high),
    'rollout_is_ratio_fraction_low': share(too_low),
  }
  bounded = xp.clip(weights, low, threshold)
  mean = _mean(bounded, mask)
  variance = _mean(bounded**2, mask) - mean**2
  metrics['rollout_is_std'] = xp.sqrt(xp.maximum(variance, xp.zeros_like(variance)))
  squares = _mean((bounded / (mean + 1e-8)) ** 2, mask)
  metrics['rollout_is_eff_sample_size'] = xp.where(squares > 0, 1.0 / (squares + (squares == 0)), squares)
  per_sequence = _mean(weights, mask, -1)
  metrics |= {
    'rollout_is_seq_mean': per_sequence.mean(),
    'rollout_is_seq_std': per_sequence.std(ddof=1) if len(per_sequence) > 1 else xp.zeros_like(per_sequence.mean()),
    'rollout_is_seq_max': per_sequence.max(),
    'rollout_is_seq_min': per_sequence.min(),
    'rollout_is_seq_max_deviation': abs(per_sequence - 1.0).max(),
    'rollout_is_seq_fraction_high': share(per_sequence > threshold),
    'rollout_is_seq_fraction_low': share(per_sequence < low),
  }
  return metrics
