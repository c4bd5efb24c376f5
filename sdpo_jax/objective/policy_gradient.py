"""Functions of the log-probs of sampled tokens: GRPO's dual-clip PPO loss and estimates of a KL divergence."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from sdpo_jax.objective.importance import LOG_RATIO_BOUND


def dual_clip_ppo(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  clip_ratio_low: float | jax.Array = 0.2,
  clip_ratio_high: float | jax.Array = 0.28,
  clip_ratio_c: float | jax.Array = 3.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Return the per-token loss of dual-clip PPO, differentiable by `log_probs`: arrays [...] -> [...].

  ℓ = max(−A·r, −A·clip(r, 1 − low, 1 + high)), and for A < 0 at most −A·c, with r = exp(log π − log π_old). The clips
  are scalars, or arrays [...] with one per token; with an infinite c only the single clip remains.

  Returns:
    the loss and, per token: `ratio`, `clipped` and `clipped_lower` (1 where the clip, or the dual clip, is active)
    and `approx_kl` = log π_old − log π. Source: core_algos.py:1267-1358; dual clip arXiv 1912.09729.
  """
  chex.assert_equal_shape([log_probs, old_log_probs, advantages])
  chex.assert_type([log_probs, old_log_probs, advantages], float)
  for clip in (clip_ratio_low, clip_ratio_high, clip_ratio_c):
    chex.assert_shape(clip, log_probs.shape if jnp.ndim(clip) else ())
  log_ratio = jnp.clip(log_probs - old_log_probs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
  ratio = jnp.exp(log_ratio)
  plain = -advantages * ratio
  clipped = -advantages * jnp.clip(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
  upper = jnp.maximum(plain, clipped)
  # Avoids 0 × ∞: a per-token c may be infinite.
  lowered = jnp.where(advantages < 0, advantages, -1.0) if jnp.ndim(clip_ratio_c) else advantages
  bound = -lowered * clip_ratio_c
  loss = jnp.where(advantages < 0, jnp.minimum(bound, upper), upper)
  metrics = {
    'ratio': ratio,
    'clipped': (clipped > plain).astype(loss.dtype),
    'clipped_lower': ((upper > bound) & (advantages < 0)).astype(loss.dtype),
    'approx_kl': -log_ratio,
  }
  return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def kl_penalty(log_probs: jax.Array, reference_log_probs: jax.Array, kind: str) -> jax.Array:
  """Return a per-token estimate of KL(π‖reference) from log-probabilities of the sampled token: [...] -> [...].

  'k1' ('kl'): log-ratio x = log π − log reference; 'abs': its magnitude; 'k2' ('mse'): half its square; 'k3'
  ('low_var_kl'): exp(−x) + x − 1, non-negative, clipped to ±10.

  Over tokens drawn from π, k1 and k3 have the mean KL(π‖reference), and k2 nearly so if the two are close. As a loss,
  only the gradient of the estimate by log π counts: 1 for k1, whose mean is no gradient at all; x for k2, the gradient
  of KL(π‖reference) without its effect on later tokens; 1 − exp(−x) for k3, the gradient of KL(reference‖π), which
  agrees with k2's to first order in x (Tang & Munos, arXiv 2506.09477).

  Raises:
    ValueError: unknown kind.

  Source: core_algos.py, `kl_penalty`; http://joschu.net/blog/kl-approx.html.
  """
  chex.assert_equal_shape([log_probs, reference_log_probs])
  chex.assert_type([log_probs, reference_log_probs], float)
  difference = log_probs - reference_log_probs
  if kind in ('kl', 'k1'):
    return difference
  if kind == 'abs':
    return jnp.abs(difference)
  if kind in ('mse', 'k2'):
    return 0.5 * jnp.square(difference)
  if kind in ('low_var_kl', 'k3'):
    bounded = jnp.clip(-difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.clip(jnp.exp(bounded) - bounded - 1.0, -10.0, 10.0)
  raise ValueError(f'Unknown KL estimate {kind!r}: choose k1, abs, k2 or k3.')
