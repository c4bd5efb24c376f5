"""Counts of the floating-point operations (FLOPs) in a model's matrix products; a multiply-add counts as two."""

from __future__ import annotations

import math

from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import slot_names
from sdpo_jax.models.policy import Policy


def forward_flops_per_token(table: parameters.Table) -> float:
  """Return the FLOPs of a forward pass per token by the rule of thumb: 2 per parameter, without attention scores.

  So slots of a prefix, whose keys only give scores, count for nothing.
  """
  return 2.0 * parameters.count(tuple(p for p in table if not slot_names.is_slots(p)))


def update_flops_per_token(table: parameters.Table) -> float:
  """Return the FLOPs of a forward and a backward pass per token by the same rule of thumb.

  A backward pass multiplies by every matrix once for the gradient of its input, and once for that of a trained matrix.
  """
  return 2 * forward_flops_per_token(table) + forward_flops_per_token(parameters.trainable(table))


def forward_flops(policy: Policy, rows: int, tokens: int, scored: int) -> float:
  """Return the FLOPs of a forward pass over whole rows of one segment each.

  They are 2 per weight of a layer and token, the attention of every query to the keys that it sees, and the unembedding
  of the tokens that are scored.

  Args:
    policy: policy that gives the parameter table and the architecture.
    rows: B.
    tokens: number of tokens of each row.
    scored: number of tokens of each row whose logits are computed.
  """
  table = policy.parameter_table()
  return float(rows) * (_products(table, tokens) + _attention(policy, tokens) + _logits(policy, scored))


def update_flops(policy: Policy, rows: int, tokens: int, scored: int) -> float:
  """Return the FLOPs of a forward and a backward pass over rows as in `forward_flops`.

  The backward pass computes the gradient of the input of every product, and of the matrix if it is trained; in
  attention both operands of a product have gradients.
  """
  table = policy.parameter_table()
  trained = parameters.trainable(table)
  unembedding = 'embedding' if all(p.name != 'unembedding' for p in table) else 'unembedding'
  passes = 3 if any(p.name == unembedding for p in trained) else 2
  products = 2 * _products(table, tokens) + _products(trained, tokens)
  return float(rows) * (products + 3 * _attention(policy, tokens) + passes * _logits(policy, scored))


def _products(table: parameters.Table, tokens: int) -> float:
  return 2.0 * tokens * sum(math.prod(p.shape) for p in table if p.stacked and p.compute and not slot_names.is_slots(p))


_SLOTS = tuple(f'layers.{name}' for name in (slot_names.KEY, slot_names.FROZEN_KEY))


def _attention(policy: Policy, tokens: int) -> float:
  config = policy.config
  # Twice the number of visible pairs of query and key, which is half of all pairs, or less with short windows.
  windows = [min(window or tokens, tokens) for window in config.windows or (0,) * config.layers]
  pairs = sum(window * (2 * tokens - window) for window in windows)
  pairs += 2 * tokens * sum(p.shape[0] * p.shape[2] for p in policy.parameter_table() if p.name in _SLOTS)
  return 2.0 * pairs * config.heads * config.head_dim


def _logits(policy: Policy, scored: int) -> float:
  return 2.0 * policy.config.vocab_size * policy.config.hidden_size * scored
