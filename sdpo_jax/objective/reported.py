"""Metrics of an optimizer step in the response to a request, from the numbers that the step itself was computed with.

Rows are summed first and means taken later, so that a batch can hold rows of several requests, and a request can span
several batches. B rows, T completion tokens. Source: `jsd_pg`, and the same names for the other losses.
"""

from __future__ import annotations

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.objective.policy_gradient import dual_clip_ppo
from sdpo_jax.types import Batch

READ = ('log_prob', 'ppo_ratio', 'ratio', 'divergence')  # Per-token results of the loss that `row_sums` reads.


def row_sums(batch: Batch, per_token: Mapping[str, jax.Array], floored: jax.Array) -> dict[str, jax.Array]:
  """Return sums over the tokens of each row, [B] each, from which `means` computes means.

  Args:
    batch: the batch that the loss was given, with a policy term, a divergence, and per-row `numbers`.
    per_token: [B, T] each, the results of the loss named in `READ`.
    floored: [B, T] bool, tokens for which the teacher gave no log-prob.
  """
  numbers, counts = batch.numbers, batch.mask > 0
  chex.assert_equal_shape([counts, batch.advantages, batch.old_log_probs, floored, *(per_token[name] for name in READ)])
  low, high, dual, is_clip = (
    jnp.broadcast_to(jnp.asarray(value)[:, None], counts.shape)
    for value in (numbers.clip_ratio_low, numbers.clip_ratio_high, numbers.clip_ratio_c, numbers.is_clip)
  )
  advantages = jnp.where(counts, batch.advantages, 0)
  policy, _ = dual_clip_ppo(per_token['log_prob'], batch.old_log_probs, advantages, low, high, dual)
  ratio, divergence = per_token['ppo_ratio'], per_token['ratio'] * per_token['divergence']
  beyond = jnp.where(is_clip > 0, ratio > is_clip, (ratio - 1.0 > high) | (1.0 - ratio > low))

  def total(values: jax.Array) -> jax.Array:
    return jnp.where(counts, values, 0).astype(policy.dtype).sum(1)

  return {
    'loss': total(batch.policy_coef * policy + batch.distill_coef * divergence),
    'pg_loss': total(policy),
    'jsd_reg': total(divergence),
    'mean_advantage': total(jnp.abs(advantages)),
    'frac_positive_advantage': total(advantages > 0),
    'mean_is_ratio': total(ratio),
    'clip_fraction': total(beyond),
    'floored_fraction': total(floored),
    'tokens_processed': total(counts),
  }


def means(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
  """Return the reported metrics of one request, on the host.

  Args:
    sums: [R] each, results of `row_sums` for the request's R rows.

  Returns:
    `loss`; the means over the tokens of the policy term, `pg_loss`, and of the divergence, `jsd_reg`, each without its
    weight in the loss; `mean_advantage` (of absolute values), `frac_positive_advantage`, `mean_is_ratio`,
    `clip_fraction` (of tokens whose ratio exceeds the clip: the divergence's clip if its ratio is used, else the policy
    term's), `floored_fraction`; and `tokens_processed`.
  """
  totals = {name: float(np.sum(values, dtype=np.float64)) for name, values in sums.items()}
  tokens = totals.pop('tokens_processed')
  loss = totals.pop('loss')
  return {
    'loss': loss,
    **{name: value / max(tokens, 1.0) for name, value in totals.items()},
    'tokens_processed': int(tokens),
  }
