"""The six-line model of the golden end-to-end runs, behind the policy protocol."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ToyPolicy:
  """h_t = 0.8·h_{t−1} + mask_t·(E[token_t] + P[position_t]); logits_t = tanh(h_t)·W."""

  vocab_size: int

  def apply(self, base, trainable, tokens, positions, segment_ids, cache=None):
    """See `models.policy.Policy`; trainable holds E [V, D], P [positions, D], W [D, V]."""
    inputs = trainable['E'][tokens] + trainable['P'][positions]
    inputs = jnp.where((segment_ids > 0)[..., None], inputs, 0)

    def step(state, x):
      state = 0.8 * state + x
      return state, state

    _, states = jax.lax.scan(step, jnp.zeros_like(inputs[:, 0]), inputs.swapaxes(0, 1))
    return jnp.tanh(states).swapaxes(0, 1), trainable['W'].T, None
