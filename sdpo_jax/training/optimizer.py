"""Learning rate, gradient clipping and the optimizer, as in the reference (torch AdamW, clip by global norm)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from sdpo_jax.config import OptimizerConfig
from sdpo_jax.types import Tree

# `torch.nn.utils.clip_grad_norm_` divides by norm + 1e-6.
CLIP_EPS = 1e-6


def learning_rate(config: OptimizerConfig, step: jax.Array) -> jax.Array:
  """The rate for generation batch `step` (0-based): linear from 0 over the warm-up, then constant.

  lr · min(1, step / lr_warmup_steps); the first batch of a warm-up has rate 0 (reference torch_functional.py:752-774,
  stepped once per generation batch).
  """
  factor = jnp.minimum(1.0, step / config.lr_warmup_steps) if config.lr_warmup_steps else 1.0
  return jnp.asarray(config.lr * factor)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Return the optimizer without its learning rate: AdamW with decoupled decay on all parameters, or plain SGD."""
  if config.name == 'sgd':
    return optax.identity()
  b1, b2 = config.betas
  return optax.chain(
    optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps, mu_dtype=jnp.dtype(config.mu_dtype)),
    optax.add_decayed_weights(config.weight_decay),
  )


def clip_by_global_norm(grads: Tree, max_norm: float) -> tuple[Tree, jax.Array]:
  """Gradients scaled so that their global L2 norm is at most `max_norm`, and the norm before."""
  norm = optax.tree.norm(grads)
  scale = jnp.minimum(1.0, max_norm / (norm + CLIP_EPS))
  return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads), norm
