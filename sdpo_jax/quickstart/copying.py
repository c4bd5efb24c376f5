"""Initial weights from which a small model soon learns to copy names.

Tokens with similar uses have similar embeddings, and heads copy the tokens to which they attend. A model learns both
from random weights, too, but one kind of names after the other, each after hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from sdpo_jax.models.architecture import Architecture
from sdpo_jax.types import Tree

ALIKE = 0.08  # Standard deviation of the component that the tokens of a group share.
COPY = 1.0  # Scale of a head's copy of the tokens to which it attends.


def with_copying(params: Tree, config: Architecture, groups: Sequence[Sequence[int]], seed: int) -> Tree:
  """Return random parameters as NumPy, with groups of similar tokens and with copying heads in the last layer.

  The first query head of each group of heads copies as many numbers of the residual stream as it has dimensions;
  together they suffice to tell tokens apart.

  Args:
    params: parameters whose unembedding is tied to the embedding.
    config: the model's architecture.
    groups: groups of token ids.
    seed: seed of each group's shared component.
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
