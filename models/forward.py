"""The forward pass of a language model to the hidden states that predict given tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sdpo_jax.models.policy import Policy
from sdpo_jax.types import TokenRows, Tree


def target_states(hidden: jax.Array, rows: TokenRows) -> jax.Array:
  """Return the states that predict the completion tokens: [B, S, D] -> [B, T, D]."""
  return jnp.take_along_axis(hidden, rows.target_index[:, :, None], axis=1)


def forward(policy: Policy, base: Tree, trainable: Tree, rows: TokenRows) -> tuple[jax.Array, jax.Array]:
  """Run a policy on token rows without a cache.

  Args:
    policy: the model.
    base: frozen parameters.
    trainable: trainable parameters.
    rows: [B, S] tokens with T targets each.

  Returns:
    The states [B, T, D] that predict the completion tokens, and the unembedding [R, D], whose entries from
    `policy.vocab_size` on are not tokens.
  """
  arguments = rows.tokens, rows.positions, rows.segment_ids
  # Policies that do not share prefixes need not accept `parents`, nor those without a pool of adapters `members`.
  known = {name: value for name in ('parents', 'members') if (value := getattr(rows, name)) is not None}
  hidden, unembedding, _ = policy.apply(base, trainable, *arguments, **known)
  return target_states(hidden, rows), unembedding
