"""Weights next to an induction circuit (arXiv 2209.11895): looking up where the current token stood before, and what
came next.

Models learn it by themselves, suddenly and after thousands of steps; from here they take a few dozen.
"""

from __future__ import annotations

import jax
import numpy as np

from models.architecture import Architecture
from models.rope import frequencies
from sdpo_jax.types import Tree

NEAR_PAIRS, NEAR = 7, 4.0  # Pairs of a head's numbers, fastest first, that find the token before; size of their biases.
FAR, MATCH = 1e-3, 1.7  # Pairs that turn by less than this per token find a token by its predecessor; size of weights.
COPY, READ = 2.0, 0.1  # How much louder than the token here what was found is; size of weights that read it out.


def with_circuit(params: Tree, config: Architecture, seed: int) -> Tree:
  """Return random parameters of a model of two layers to which those of an induction circuit are added, as NumPy.

  The first half of the stream's numbers says which token is here, and the first layer copies that of the token before
  into the second half. The second layer looks for tokens whose second half is the first half here, and adds their first
  half to it.

  Args:
    params: of two layers with biases of queries and keys, and with an unembedding of its own.
    config: of the model; hidden_size is twice kv_heads · head_dim.
    seed: of the names of tokens and of what is compared.
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
    # Of its numbers of a half; the first query head of its group. The others stay as they are, free to learn.
    own, query = slice(dim * head, dim * (head + 1)), head * (config.heads // config.kv_heads)
    # The score of a key d tokens before is the sum over pairs of cos(angle · (d − 1)), which is largest at d = 1.
    attention['query_bias'][0, query] += NEAR * np.concatenate([near * np.cos(angles), -near * np.sin(angles)])
    attention['key_bias'][0, head] += NEAR * np.concatenate([near, np.zeros_like(near)])
    attention['value'][:, own, head] += same
    attention['output'][0, query, :, half:][:, own] += same
    attention['output'][1, query, :, :half][:, own] += COPY * same
    match = MATCH * np.linalg.qr(rng.standard_normal((half, len(slow))))[0]
    attention['key'][1, half:, head, slow] += match.T
    attention['query'][1, :half, query, slow] += match.T
  return params
