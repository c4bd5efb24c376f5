"""The architecture of a decoder: all that its forward pass depends on, whatever the format of its config.json."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sdpo_jax.models.rope import Rope

Activation = Literal['silu', 'gelu_tanh']


@dataclasses.dataclass(frozen=True)
class Architecture:
  """The sizes and constants of a decoder-only transformer; static under `jit`."""

  family: str  # Name in `sdpo_jax.models.families`, which determines its config.json and the names of its tensors.
  vocab_size: int  # V, the number of tokens; the embedding may have more entries.
  hidden_size: int  # D.
  intermediate_size: int  # Width of the MLP.
  layers: int
  heads: int  # Query heads.
  kv_heads: int  # Key and value heads.
  head_dim: int
  norm_eps: float
  tied: bool  # Whether the embedding is also the unembedding.
  ropes: tuple[Rope, ...] = (Rope(),)
  layer_ropes: tuple[int, ...] | None = None  # Per layer, index into `ropes`; None: all layers use the only one.
  windows: tuple[int, ...] | None = None  # Per layer, number of visible positions (0: all); None: all in all layers.
  # Whether attention and MLP normalise their inputs, their outputs (before the residual sum), or both.
  norm_placement: Literal['pre', 'post', 'both'] = 'pre'
  norm_offset: float = 0.0  # Added to the weights of all norms.
  query_key_norm: Literal['head', 'projection'] | None = None  # Over each head, or over all heads together.
  query_pre_attn_scalar: int | None = None  # Queries are divided by its square root; None: head_dim.
  embedding_scale: float | None = None  # Factor of embedded tokens, rounded to compute dtype; None: 1.
  activation: Activation = 'silu'  # Activation of the MLP's gate.
  qkv_bias: bool = False
  output_bias: bool = False
  mlp_bias: bool = False
  initializer_range: float = 0.02  # Standard deviation of random parameters.
  vocab_multiple: int = 1  # The embedding and the unembedding are padded with zeros to a multiple of this.

  @property
  def padded_vocab_size(self) -> int:
    """Entries of the embedding and the unembedding, including padding."""
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

  @property
  def query_scale(self) -> float:
    """The factor by which attention scores are multiplied."""
    return (self.head_dim if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar) ** -0.5
