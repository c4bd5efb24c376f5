"""The six-line model of the golden end-to-end runs, behind the policy protocol."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sdpo_jax.models.parameters import Parameter, Table, merge


@dataclasses.dataclass(frozen=True)
class ToyPolicy:
  """h_t = 0.8·h_{t−1} + mask_t·(E[token_t] + P[position_t]); logits_t = tanh(h_t)·W.

  It runs on any mesh unchanged, casts nothing and does not sample.
  """

  vocab_size: int
  hidden_size: int = 6
  positions: int = 23

  # It has neither attention nor MLP.
  intermediate_size = layers = heads = kv_heads = head_dim = 0
  windows = None
  reads_filled = shares_prefixes = pooled = False
  members_at_once = rows_alike = None

  @property
  def config(self) -> ToyPolicy:
    """The policy itself, which holds its sizes."""
    return self

  def parameter_table(self) -> Table:
    """Return E [V, D], P [positions, D] and W [D, V]."""
    tall, wide = (self.vocab_size, self.hidden_size), (self.hidden_size, self.vocab_size)
    shapes = {'E': tall, 'P': (self.positions, self.hidden_size), 'W': wide}
    return tuple(Parameter((name,), shape, (None, None), 'normal', name, shape) for name, shape in shapes.items())

  def apply(self, base, trainable, tokens, positions, segment_ids, cache=None, parents=None):
    """See `sdpo_jax.models.policy.Policy`."""
    params = merge(base, trainable)
    inputs = params['E'][tokens] + params['P'][positions]
    inputs = jnp.where((segment_ids > 0)[..., None], inputs, 0)

    def step(state, x):
      state = 0.8 * state + x
      return state, state

    _, states = jax.lax.scan(step, jnp.zeros_like(inputs[:, 0]), inputs.swapaxes(0, 1))
    return jnp.tanh(states).swapaxes(0, 1), params['W'].T, None

  def on(self, mesh, attention_setting='auto'):
    """See `sdpo_jax.models.policy.Policy`."""
    del mesh, attention_setting
    return self

  def in_any_order(self):
    """See `sdpo_jax.models.policy.Policy`."""
    return self

  def with_remat(self, remat):
    """See `sdpo_jax.models.policy.Policy`."""
    del remat
    return self

  def cast(self, base, trainable):
    """See `sdpo_jax.models.policy.Policy`."""
    return base, trainable

  def init_cache(self, batch_size, length, quantized=False):
    """See `sdpo_jax.models.policy.Policy`."""
    raise NotImplementedError('ToyPolicy has no cache to sample with.')

  with_recent = init_cache
