"""The protocol through which everything above `models/` sees a language model."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax

Tree = Any


@runtime_checkable
class Policy(Protocol):
  """A language model as pure functions of a frozen base and a trainable tree.

  Full fine-tuning: `base` is an empty dict and `trainable` holds every parameter. LoRA: `base` holds the parameters,
  `trainable` the factors. Cartridge: `trainable` is a key-value prefix. Optimizer, teacher, checkpoint and export know
  only the trainable tree. Implementations are hashable (static under `jit`).
  """

  vocab_size: int

  def apply(
    self,
    base: Tree,
    trainable: Tree,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    cache: Tree | None = None,
  ) -> tuple[jax.Array, jax.Array, Tree | None]:
    """Final hidden states and the matrix that turns them into logits.

    Args:
      base: frozen parameters.
      trainable: trainable parameters.
      tokens: [B, S] int32.
      positions: [B, S] int32, the position of each token within its segment.
      segment_ids: [B, S] int32, 0 = padding. A token attends to tokens of its own segment that stand before it. Tokens
        of a segment stand in consecutive slots, in the order of their positions.
      cache: from `init_cache`; the tokens are appended to it in the next S slots and attend to what it holds of
        the same segment.

    Returns:
      hidden [B, S, D] (after the final norm), unembedding [V, D] such that logits = hidden @ unembedding.T,
      and the updated cache (None without one).
    """
    ...

  def init_cache(self, batch_size: int, length: int) -> Tree:
    """An empty cache of `length` slots for each of `batch_size` rows; `repeat_cache` copies rows for a group."""
    ...

  def repeat_cache(self, cache: Tree, repeats: int, length: int | None = None) -> Tree:
    """A cache with every row of `cache` repeated `repeats` times: rows 0,0,…,1,1,…

    `length`: slots that the result shall have, those of `cache` included; prompts are then prefilled in a cache of
    their own length, which the repeated rows may share. None: as many as `cache` has.
    """
    ...
