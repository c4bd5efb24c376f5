"""The K largest logits of each token, from whole logits or from blocks that are not kept.

C tokens, W logits of each, K largest.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
from jax import lax
import jax.numpy as jnp

GROUP = 32  # Entries per group of the two-stage top-K.
SPAN = 40960  # Approximate number of entries whose top K is taken at once if logits are not kept.
APPROXIMATE_RECALL = 0.95  # Expected share of the top K that `approx` finds on a TPU.

Largest = tuple[jax.Array, jax.Array]  # [C, K] the largest values, and their indices, int32.


def top_k(values: jax.Array, k: int, method: str = 'exact') -> Largest:
  """Return the K largest of each token's values [C, W] and their indices, ties in the order of their indices.

  'approx' is `lax.approx_max_k`: on a TPU it finds `APPROXIMATE_RECALL` of them in expectation, elsewhere all.
  """
  chex.assert_rank(values, 2)
  chex.assert_axis_dimension_gteq(values, 1, k)
  if method == 'approx':
    return lax.approx_max_k(values, k, recall_target=APPROXIMATE_RECALL)
  if values.shape[1] < 4096 or values.shape[1] < 4 * k * GROUP:
    return lax.top_k(values, k)
  # `lax.top_k` costs k passes over the values on accelerators, and on a CPU up to log k comparisons for each of them:
  # forty times as much for values that ascend as for those that descend.
  return two_stage_top_k(values, k)


def two_stage_top_k(values: jax.Array, k: int) -> Largest:
  """Return `top_k` of values [C, W], taken from the K groups of neighbours with the largest maxima.

  These groups hold the K largest: for an entry of another group there are K groups whose maximum is larger, or equal
  and, groups being in order, of a smaller index.
  """
  chex.assert_rank(values, 2)
  chex.assert_axis_dimension_gteq(values, 1, k)
  tokens, width = values.shape
  padded = jnp.pad(values, ((0, 0), (0, -width % GROUP)), constant_values=-jnp.inf)
  groups = padded.reshape(tokens, -1, GROUP)
  best = jnp.sort(lax.top_k(groups.max(-1), k)[1], axis=-1)
  candidates = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(tokens, k * GROUP)
  largest, order = lax.top_k(candidates, k)
  return largest, jnp.take_along_axis(best, order // GROUP, axis=1) * GROUP + order % GROUP


@dataclasses.dataclass(frozen=True)
class BlockwiseTopK:
  """The top K of logits that are computed in blocks and not kept.

  Blocks are collected in a span, after the K largest of all earlier blocks and in the order of their entries; a full
  span, and the last one, is reduced to its K largest. The state is (the largest so far, the span).
  """

  k: int
  entries: int  # R, over all blocks.
  count: int  # Number of blocks.
  size: int  # Entries of a block; the last block starts earlier where `count` · `size` exceeds `entries`.
  method: str  # As in `top_k`.

  @property
  def blocks_per_span(self) -> int:
    """Number of blocks that are collected before their K largest are taken."""
    most = max(1, min(self.count, max(SPAN, self.k) // self.size))
    # A divisor of the number of blocks, if there is one nearby: then all spans are full.
    return next((n for n in range(most, most // 2, -1) if self.count % n == 0), most)

  def start(self, tokens: int, dtype: jnp.dtype) -> tuple[Largest, jax.Array]:
    """Return the state before the first block, for C tokens."""
    largest = jnp.full((tokens, self.k), -jnp.inf, dtype), jnp.zeros((tokens, self.k), jnp.int32)
    # Whole groups, so that the two-stage top K needs no padding; the places after the blocks stay empty.
    width = self.k + self.blocks_per_span * self.size
    return largest, jnp.full((tokens, width + -width % GROUP), -jnp.inf, dtype)

  def add(
    self, state: tuple[Largest, jax.Array], index: jax.Array | int, logits: jax.Array, fresh: jax.Array | None
  ) -> tuple[Largest, jax.Array]:
    """Return the state after block number `index`.

    Args:
      state: before it.
      index: [] int32, from 0.
      logits: [C, size].
      fresh: [size] bool, false for entries that do not count; None: all count.
    """
    chex.assert_axis_dimension(logits, 1, self.size)
    largest, span = state
    slot = index % self.blocks_per_span
    # Entries that count must exceed empty places, even if their logits are −inf.
    reachable = jnp.maximum(logits, float(jnp.finfo(logits.dtype).min))
    if fresh is not None:
      reachable = jnp.where(fresh[None, :], reachable, -jnp.inf)
    span = lax.dynamic_update_slice_in_dim(span, largest[0], 0, axis=1)
    span = lax.dynamic_update_slice_in_dim(span, reachable, self.k + slot * self.size, axis=1)

    def largest_of_span(largest: Largest, span: jax.Array) -> Largest:
      filled = None if self.count % self.blocks_per_span == 0 else slot + 1
      return self._largest(largest[1], span, index - slot, filled)

    if self.blocks_per_span == 1:
      return largest_of_span(largest, span), span
    due = (slot == self.blocks_per_span - 1) | (index == self.count - 1)
    return lax.cond(due, largest_of_span, lambda largest, _: largest, largest, span), span

  def _largest(self, earlier: jax.Array, span: jax.Array, first: jax.Array, filled: jax.Array | None) -> Largest:
    """Return the K largest of a span [C, ≥ K + blocks·size] and their entries.

    The span begins with the K largest so far, whose entries are `earlier` [C, K]; then come blocks, from block number
    `first`. Only the first `filled` blocks hold logits; None: all.
    """
    k, size = self.k, self.size
    if filled is not None:
      span = jnp.where(jnp.arange(span.shape[1])[None, :] < k + filled * size, span, -jnp.inf)
    values, order = top_k(span, k, self.method)
    block, lane = jnp.maximum(order - k, 0) // size, jnp.maximum(order - k, 0) % size
    entries = jnp.minimum((first + block) * size, self.entries - size) + lane
    return values, jnp.where(order < k, jnp.take_along_axis(earlier, jnp.minimum(order, k - 1), axis=1), entries)
