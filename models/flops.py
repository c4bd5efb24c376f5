"""Counts of the floating-point operations of a model: matrix products, a multiplication and an addition each."""

from __future__ import annotations

import math

from models import parameters
from models.policy import Policy


def forward_flops_per_token(table: parameters.Table) -> float:
  """Returns the operations of a forward pass per token by the rule of thumb: 2 per parameter, no attention scores."""
  return 2.0 * parameters.count(table)


def forward_flops(policy: Policy, rows: int, tokens: int, scored: int) -> float:
  """Returns the operations of a forward pass over whole rows of one segment each.

  2 per weight of a layer and token; causal attention at the half that is not masked, as if no layer had a window; the
  unembedding of the tokens that are scored.

  Args:
    policy: whose table says the weights, base and trainable, and whose config the heads.
    rows: B.
    tokens: of each row.
    scored: tokens of each row whose logits are computed.
  """
  config = policy.config
  weights = sum(math.prod(p.shape) for p in policy.parameter_table() if p.stacked and p.compute)
  attention = 2 * tokens**2 * config.layers * config.heads * config.head_dim
  return float(rows) * (2 * weights * tokens + attention + 2 * config.vocab_size * config.hidden_size * scored)
