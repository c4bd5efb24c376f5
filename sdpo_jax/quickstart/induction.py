"""Initial weights close to an induction circuit (arXiv 2209.11895).

The circuit finds an earlier occurrence of the current token and predicts the token after it.

Models learn it by themselves suddenly, after thousands of steps; from here it takes a few dozen.
"""

from __future__ import annotations

import jax
import numpy as np

from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.rope import frequencies
from sdpo_jax.types import Tree

NEAR_PAIRS, NEAR = 7, 4.0  # Fastest rotary pairs of a head, which find the token before; scale of their biases.
FAR, MATCH = 1e-3, 1.7  # Pairs that turn by less per token find a token by its predecessor; scale of weights.
COPY, READ = 2.0, 0.1  # Scale of the found token relative to the current one; scale of the weights that read it out.


def with_circuit(params: Tree, config: Architecture, seed: int) -> Tree:
  """Return random parameters of a two-layer model, plus those of an induction circuit, as NumPy.

  The first half of the residual stream identifies the current token, and the first layer copies the previous token's
  first half into the second half. The second layer attends to tokens whose second half matches the current first half,
  and adds their first half.

  Args:
    params: parameters of two layers with biases of queries and keys, and with a separate unembedding.
    config: the model's architecture; hidden_size is twice kv_heads · head_dim.
    seed: seed of the tokens' codes and of the compared projection.
  """
  params = jax.tree.map(np.array, params)
  rng = np.random.default_rng([seed, 1])
  half, dim = config.hidden_size // 2, config.head_dim
  names = rng.standard_normal((config.padded_vocab_size, half)).astype(np.float32)
  params['embedding'][:, :half] += names
  params['unembedding'][:, :half] += READ * names
  attention = params['layers']['attention']
  angles = frequencies(config.ropes[0], dim)
  near = (np.arange(dim // 2) < NEAR_PAIRS).astype(np.float32)
  slow = np.flatnonzero(angles < FAR)
  slow = np.concatenate([slow, slow + dim // 2])
  same = np.eye(dim, dtype=np.float32)
  for head in range(config.kv_heads):
    # The head's part of a half, and the first query head of its group. The other heads stay free to learn.
    own, query = slice(dim * head, dim * (head + 1)), head * (config.heads // config.kv_heads)
    # The score of a key d tokens back is the sum over pairs of cos(angle · (d − 1)), which is largest at d = 1.
    attention['query_bias'][0, query] += NEAR * np.concatenate([near * np.cos(angles), -near * np.sin(angles)])
    attention['key_bias'][0, head] += NEAR * np.concatenate([near, np.zeros_like(near)])
    attention['value'][:, own, head] += same
    attention['output'][0, query, :, half:][:, own] += same
    attention['output'][1, query, :, :half][:, own] += COPY * same
    match = MATCH * np.linalg.qr(rng.standard_normal((half, len(slow))))[0]
    attention['key'][1, half:, head, slow] += match.T
    attention['query'][1, :half, query, slow] += match.T
  return params
