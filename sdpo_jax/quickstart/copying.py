"""Weights from which a small model soon copies names: tokens that are used alike look alike, and a head hands on what
it sees.

Models learn both by themselves, one kind of names after the other, and each only after hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from models.architecture import Architecture
from sdpo_jax.types import Tree

ALIKE = 0.08  # Standard deviation of what the tokens of a group have in common.
COPY = 1.0  # How loud what a head sees is in what it writes.


def with_copying(params: Tree, config: Architecture, groups: Sequence[Sequence[int]], seed: int) -> Tree:
  """Return random parameters with groups of tokens that look alike, and with heads in the last layer that copy, as
  NumPy.

  The first query head of each group of heads copies as many of the stream's numbers as it has of its own; together they
  are enough to tell tokens apart.

  Args:
    params: with an unembedding that is the embedding.
    config: of the model.
    groups: of tokens.
    seed: of what each group has in common.
  """
  params = jax.tree.map(np.array, params)
  rng, dim = np.random.default_rng([seed, 1]), config.head_dim
  for group in groups:
    params['embedding'][list(group)] += ALIKE * rng.standard_normal(config.hidden_size).astype(np.float32)
  attention, same = params['layers']['attention'], np.eye(dim, dtype=np.float32)
  for head in range(config.kv_heads):
    own, query = slice(dim * head, dim * (head + 1)), head * (config.heads // config.kv_heads)
    attention['value'][-1, own, head] += same
    attention['output'][-1, query, :, own] += COPY * same
  return params
