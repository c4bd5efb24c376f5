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

  2 per weight of a layer and token; attention of every query to the keys that it sees; the unembedding of the tokens
  that are scored.

  Args:
    policy: whose table says the weights, base and trainable, and whose config the heads.
    rows: B.
    tokens: of each row.
    scored: tokens of each row whose logits are computed.
  """
  config = policy.config
  weights = sum(math.prod(p.shape) for p in policy.parameter_table() if p.stacked and p.compute)
  # Twice the pairs of a query and a key: half of all are not masked, fewer where windows are shorter than the row.
  windows = [min(window or tokens, tokens) for window in config.windows or (0,) * config.layers]
  pairs = sum(window * (2 * tokens - window) for window in windows)
  attention = 2 * pairs * config.heads * config.head_dim
  return float(rows) * (2 * weights * tokens + attention + 2 * config.vocab_size * config.hidden_size * scored)
