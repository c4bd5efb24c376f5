"""The protocol through which everything above `models/` sees a language model."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax

from models.cache import KVCache

Tree = Any


@runtime_checkable
class Policy(Protocol):
  """A language model as pure functions of a frozen base and a trainable tree.

  Full fine-tuning: `base` is an empty dict and `trainable` holds every parameter. LoRA: `base` holds the parameters,
  `trainable` the factors. Cartridge: `trainable` is a key-value prefix. Optimizer, teacher, checkpoint and export know
  only the trainable tree. Implementations are hashable (static under `jit`).
  """

  vocab_size: int
  # Whether a step over a cache reads no more of it than rows hold, so that a large one costs memory only.
  reads_filled: bool
  # Whether segments may have parents; if not, `apply` is never handed any.
  shares_prefixes: bool

  def apply(
    self,
    base: Tree,
    trainable: Tree,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    cache: KVCache | None = None,
    parents: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array, KVCache | None]:
    """Final hidden states and the matrix that turns them into logits.

    Args:
      base: frozen parameters.
      trainable: trainable parameters.
      tokens: [B, S] int32.
      positions: [B, S] int32, the position of each token within its segment, counted on from that of a parent.
      segment_ids: [B, S] int32, 0 = padding. A token attends to tokens of its own segment that stand before it. Tokens
        of a segment stand in consecutive slots, in the order of their positions.
      cache: from `init_cache`, to be filled by these tokens, one segment from slot 0 on in every row, which attend to
        themselves; or from `with_recent`: every row gets S more tokens, which attend to all that the row holds. A row
        whose new tokens are padding is not in use, and what comes of it means nothing.
      parents: [B, S] int32, the segment whose tokens, which stand before it, a token attends to beside its own; 0:
        none. So several completions share a prompt. None: there are none. Without a cache; the kernels of a TPU have no
        gradient then.

    Returns:
      hidden [B, S, D] (after the final norm), unembedding [V, D] such that logits = hidden @ unembedding.T,
      and the updated cache (None without one).
    """
    ...

  def init_cache(self, batch_size: int, length: int, quantized: bool = False) -> KVCache:
    """An empty cache of `length` slots for each of `batch_size` rows, in compute dtype or (`quantized`) int8."""
    ...

  def with_recent(self, cache: KVCache, length: int) -> KVCache:
    """The cache with room for `length` more tokens in every row; `models.cache.commit` moves them where they belong."""
    ...
