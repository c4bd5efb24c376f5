"""The only code that touches the vocabulary axis: products with the unembedding, normalisers, top-K, gathers.

Everything works on one chunk of C tokens at a time. On CPUs it scans the vocabulary in blocks, so that a block of
logits is used while it is in cache; accelerators take a device's whole part at once. Per-token results (maximum,
normaliser, gathered values, candidates for the top K) merge by associative operations, over blocks and, where the
vocabulary is split over devices (`VocabShard`), over devices. An entry is one row of the unembedding. C tokens of a
chunk, R entries on this device, W entries of a block, D model width, M gathered ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective.sharded import VocabShard
from sdpo_jax.objective.top_k import BlockwiseTopK, Largest, top_k

CPU_BLOCK = 2048  # Approximate number of entries handled at a time on a CPU.
ALL = 1 << 30  # More entries than any vocabulary has.
TOKENS_AT_A_TIME = 8  # Tokens whose K entries of the unembedding are gathered at once.

# (first entry, number of entries) -> [C, W], the logits of that block or values of their shape.
OfBlock = Callable[[jax.Array | int, int], jax.Array]


# ---------------------------------------------------------------------------------------------------------------------
# Softmax statistics
# ---------------------------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class SoftmaxStatistics:
  """Statistics of each token's softmax over a part of the vocabulary; those of disjoint parts can be merged."""

  maximum: jax.Array  # [C] largest logit.
  mass: jax.Array  # [C] Σ exp(logit − maximum).
  moment: jax.Array  # [C] Σ exp(logit − maximum)·(logit − maximum).

  @property
  def log_normaliser(self) -> jax.Array:
    """[C] logarithm of Σ exp(logit); 0 where all logits are −inf, so that nothing becomes NaN."""
    empty = self.mass == 0
    return jnp.where(empty, 0.0, self.maximum + jnp.log(jnp.where(empty, 1.0, self.mass)))

  @property
  def entropy(self) -> jax.Array:
    """[C] entropy in nats."""
    mass = jnp.where(self.mass == 0, 1.0, self.mass)
    return jnp.maximum(jnp.log(mass) - self.moment / mass, 0.0)


def empty_statistics(tokens: int, dtype: jnp.dtype) -> SoftmaxStatistics:
  """Return the statistics of no logits at all, for C tokens."""
  zeros = jnp.zeros((tokens,), dtype)
  # Finite, so that differences of maxima stay finite for tokens whose first logits are −inf.
  return SoftmaxStatistics(zeros + float(jnp.finfo(dtype).min) / 4, zeros, zeros)


def block_statistics(logits: jax.Array) -> SoftmaxStatistics:
  """Return the statistics of a block of logits [C, W]."""
  chex.assert_rank(logits, 2)
  chex.assert_type(logits, float)
  maximum = jnp.maximum(logits.max(-1), float(jnp.finfo(logits.dtype).min) / 4)
  shifted = _shifted(logits, maximum)
  masses = jnp.exp(shifted)
  return SoftmaxStatistics(maximum, masses.sum(-1), (masses * shifted).sum(-1))


def merge_statistics(a: SoftmaxStatistics, b: SoftmaxStatistics) -> SoftmaxStatistics:
  """Return the statistics of two disjoint parts of the vocabulary together."""
  chex.assert_trees_all_equal_shapes_and_dtypes(a, b)
  maximum = jnp.maximum(a.maximum, b.maximum)
  (mass, moment), (other_mass, other_moment) = _rescaled(a, maximum), _rescaled(b, maximum)
  return SoftmaxStatistics(maximum, mass + other_mass, moment + other_moment)


def _merge_shards(part: SoftmaxStatistics, shard: VocabShard) -> SoftmaxStatistics:
  """Return the statistics of the whole vocabulary from those of each device's part."""
  if shard.axis is None:
    return part
  maximum = lax.pmax(part.maximum, shard.axis)
  mass, moment = _rescaled(part, maximum)
  return SoftmaxStatistics(maximum, lax.psum(mass, shard.axis), lax.psum(moment, shard.axis))


def _shifted(logits: jax.Array, maximum: jax.Array) -> jax.Array:
  """Return logits − maximum, at least −1e30 instead of −inf: its exponential is 0, and so is 0 times it."""
  return jnp.maximum(logits - maximum[:, None], -1e30)


def _rescaled(part: SoftmaxStatistics, maximum: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return mass and moment of `part` relative to another maximum."""
  shift = part.maximum - maximum
  scale = jnp.exp(shift)
  return scale * part.mass, scale * (part.moment + jnp.where(part.mass > 0, shift, 0.0) * part.mass)


# ---------------------------------------------------------------------------------------------------------------------
# Products with the unembedding
# ---------------------------------------------------------------------------------------------------------------------


def logits_dtype(hidden: jax.Array) -> jnp.dtype:
  """Return the type of the logits: at least float32; float64 stays float64."""
  return jnp.promote_types(hidden.dtype, jnp.float32)


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
  """Return a·b over axis contract[0] of a and contract[1] of b, in at least float32.

  Products of float32 are exact, as in the model and the sampler; accelerators would round them to bfloat16.
  """
  return lax.dot_general(
    a,
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=None if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
    preferred_element_type=logits_dtype(a),
  )


def project(hidden: jax.Array, unembedding: jax.Array) -> jax.Array:
  """Return logits [C, W] of hidden states [C, D] for entries [W, D] of the unembedding, in at least float32."""
  chex.assert_rank([hidden, unembedding], 2)
  chex.assert_equal_shape_suffix([hidden, unembedding], 1)
  chex.assert_type([hidden, unembedding], float)
  return _product(hidden, unembedding, (1, 1))


def logits_of_blocks(hidden: jax.Array, unembedding: jax.Array, temperature: jax.Array) -> OfBlock:
  """Return a function from a block of entries to its logits [C, W], divided by the temperature [] or [C, 1]."""
  chex.assert_rank([hidden, unembedding], 2)
  chex.assert_shape(temperature, (len(hidden), 1) if jnp.ndim(temperature) else ())
  chex.assert_type([hidden, unembedding], float)

  def logits_of(start: jax.Array | int, size: int) -> jax.Array:
    return project(hidden, take_entries(unembedding, start, size)) / temperature

  return logits_of


def take_entries(unembedding: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
  """Return entries start … start + size − 1 of an array [R, D]."""
  chex.assert_rank(unembedding, 2)
  return lax.dynamic_slice_in_dim(unembedding, start, size, axis=0)


def weighted_entries(unembedding: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
  """Return Σ_m weights[c, m]·unembedding[ids[c, m]] as [C, D], in the type of `weights`.

  Ids outside [0, R) count as 0.
  """
  chex.assert_rank([unembedding, ids, weights], 2)
  chex.assert_equal_shape([ids, weights])
  chex.assert_type([ids, weights], [int, float])
  inside = (ids >= 0) & (ids < unembedding.shape[0])
  weights = jnp.where(inside, weights, 0)
  ids = jnp.where(inside, ids, 0)

  def of_token(operands):
    ids, weights = operands
    return _product(weights.astype(unembedding.dtype), unembedding[ids], (0, 0)).astype(weights.dtype)

  return lax.map(of_token, (ids, weights), batch_size=min(TOKENS_AT_A_TIME, ids.shape[0]))


def scatter_add(values: jax.Array, ids: jax.Array, updates: jax.Array) -> jax.Array:
  """Return `values` [C, W] with `updates` [C, M] added at `ids` [C, M]; ids outside [0, W) are dropped."""
  chex.assert_rank([values, ids, updates], 2)
  chex.assert_equal_shape([ids, updates])
  chex.assert_equal_shape_prefix([values, ids], 1)
  chex.assert_type(ids, int)
  width = values.shape[1]
  ids = jnp.where((ids < 0) | (ids >= width), width, ids)
  return values.at[jnp.arange(values.shape[0])[:, None], ids].add(updates, mode='drop')


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of the vocabulary
# ---------------------------------------------------------------------------------------------------------------------


def default_block(platform: str | None = None) -> int:
  """Return how many entries to handle at a time on `platform` (None: JAX's default).

  CPUs take as many as stay in cache, accelerators all.
  """
  return CPU_BLOCK if (platform or jax.default_backend()) == 'cpu' else ALL


def blocks(entries: int, block: int) -> tuple[int, int]:
  """Return (number, size) of the blocks that cover R entries.

  A block has about `block` entries at most, and blocks do not overlap if a nearby number of them divides R.
  """
  count = max(1, -(-entries // block))
  even = next((n for n in range(count, min(2 * count, entries + 1)) if entries % n == 0), None)
  if even is not None:
    return even, entries // even
  size = -(-entries // count)
  if size > 128:
    size += -size % 128  # Whole vector lanes; the overlap is less than one block in total.
  return (1, entries) if size >= entries else (-(-entries // size), size)


def fold_blocks(entries: int, block: int, limit: jax.Array | None, carry: Any, step: Callable[..., Any]) -> Any:
  """Fold `step(carry, index, start, size, fresh)` over `blocks` that cover R entries.

  Blocks have one static `size`. `fresh` [size] is false for entries that an earlier block held and for entries from
  `limit` on; it is None if no block has such entries.
  """
  count, size = blocks(entries, block)

  def body(index, carry):
    begin = index * size
    start = jnp.minimum(begin, entries - size)
    fresh = None
    if count * size != entries or limit is not None:
      position = start + jnp.arange(size)
      fresh = position >= begin
      if limit is not None:
        fresh &= position < limit
    return step(carry, index, start, size, fresh)

  return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


class VocabScan(NamedTuple):
  """Results of a scan of this device's entries for the group's tokens; None for results that were not requested."""

  statistics: SoftmaxStatistics  # Statistics of the whole vocabulary.
  gathered: jax.Array | None  # [C, M] logits at the ids, this device's part of a sum over the devices.
  largest: Largest | None  # [C, K] the largest logits on this device and their ids in the whole vocabulary.
  logits: jax.Array | None  # [C, R]; −inf at padding.
  mean_entry: jax.Array | None  # [C, D] Σ_v p_v·unembedding_v over this device's entries.


class _Scanned(NamedTuple):
  """The state of a scan: as `VocabScan`, for the blocks scanned so far."""

  statistics: SoftmaxStatistics
  gathered: jax.Array | None
  running_top: tuple[Largest, jax.Array] | None  # The state of a `BlockwiseTopK`.
  logits: jax.Array | None
  mean_entry: jax.Array | None  # Σ_v exp(logit_v − maximum)·unembedding_v.


def scan_vocabulary(
  shard: VocabShard,
  logits_of: OfBlock,
  tokens: int,
  entries: int,
  block: int,
  dtype: jnp.dtype,
  *,
  ids: jax.Array | None = None,
  keep_logits: bool = False,
  topk: int | None = None,
  topk_method: str = 'exact',
  averaged: jax.Array | None = None,
) -> VocabScan:
  """Scan this device's part of the vocabulary once.

  Args:
    shard: how the vocabulary is split.
    logits_of: (start, size) -> logits [C, size] of that block of entries.
    tokens: C.
    entries: R.
    block: approximate number of entries of a block.
    dtype: dtype of the logits.
    ids: [C, M] int32 in the whole vocabulary, whose logits to gather (any value for ids outside it).
    keep_logits: whether to return the logits.
    topk: K, how many of the largest logits to return, at most R; None: none.
    topk_method: as in `top_k`.
    averaged: [R, D], entries to average with the probabilities; None: none.
  """
  if ids is not None:
    chex.assert_shape(ids, (tokens, None))
    chex.assert_type(ids, int)
  if averaged is not None:
    chex.assert_shape(averaged, (entries, None))
  limit, offset = shard.limit(entries), shard.offset(entries)
  count, size = blocks(entries, block)
  topk = None if topk is None else min(topk, entries)
  blockwise = None
  if topk is not None and not keep_logits:
    blockwise = BlockwiseTopK(topk, entries, count, size, topk_method)

  def step(scanned: _Scanned, index, start, size, fresh) -> _Scanned:
    logits = logits_of(start, size)
    if fresh is not None:
      logits = jnp.where(fresh[None, :], logits, -jnp.inf)
    part = block_statistics(logits)
    total = merge_statistics(scanned.statistics, part)
    kept = gathered = running_top = mean_entry = None
    if keep_logits:
      kept = logits if count == 1 else _store(scanned.logits, logits, start, fresh)
    if ids is not None:
      gathered = _gather(scanned.gathered, logits, ids - offset - start, fresh)
    if averaged is not None:
      masses = jnp.exp(_shifted(logits, part.maximum)).astype(averaged.dtype)
      block_mean = _product(masses, take_entries(averaged, start, size), (1, 0))
      earlier_scale = jnp.exp(scanned.statistics.maximum - total.maximum)[:, None]
      mean_entry = earlier_scale * scanned.mean_entry + jnp.exp(part.maximum - total.maximum)[:, None] * block_mean
    if blockwise is not None:
      running_top = blockwise.add(scanned.running_top, index, logits, fresh)
    return _Scanned(total, gathered, running_top, kept, mean_entry)

  nothing = _Scanned(
    statistics=empty_statistics(tokens, dtype),
    gathered=None if ids is None else jnp.zeros(ids.shape, dtype),
    running_top=None if blockwise is None else blockwise.start(tokens, dtype),
    logits=jnp.full((tokens, entries), -jnp.inf, dtype) if keep_logits else None,
    mean_entry=None if averaged is None else jnp.zeros((tokens, averaged.shape[1]), dtype),
  )
  scanned = fold_blocks(entries, block, limit, nothing, step)
  statistics = _merge_shards(scanned.statistics, shard)
  largest, mean_entry = None, scanned.mean_entry
  if topk is not None:
    values, places = scanned.running_top[0] if blockwise is not None else top_k(scanned.logits, topk, topk_method)
    largest = jnp.where(values <= float(jnp.finfo(dtype).min), -jnp.inf, values), places + offset
  if mean_entry is not None:
    mean_entry = mean_entry * jnp.exp(scanned.statistics.maximum - statistics.log_normaliser)[:, None]
  return VocabScan(statistics, scanned.gathered, largest, scanned.logits, mean_entry)


def largest_of_all(shard: VocabShard, largest: Largest, k: int) -> Largest:
  """Return the top K [c, K] of own tokens from the top K [C, ≤ K] of each part of the vocabulary; K is at most V."""
  values, ids = (shard.candidates(part) for part in largest)
  if shard.axis is None:
    return values, ids
  values, order = top_k(values, k)
  return values, jnp.take_along_axis(ids, order, axis=1)


def _store(kept: jax.Array, logits: jax.Array, start: jax.Array, fresh: jax.Array | None) -> jax.Array:
  """Return `kept` [C, R] with a block of logits [C, size] at `start`."""
  if fresh is not None:
    # An overlapping block must not wipe out what an earlier one has written.
    written = lax.dynamic_slice_in_dim(kept, start, logits.shape[1], axis=1)
    logits = jnp.where(fresh[None, :], logits, written)
  return lax.dynamic_update_slice_in_dim(kept, logits, start, axis=1)


def _gather(gathered: jax.Array, logits: jax.Array, places: jax.Array, fresh: jax.Array | None) -> jax.Array:
  """Return `gathered` [C, M], updated at those `places` [C, M] that are in the block of logits [C, size]."""
  size = logits.shape[1]
  inside = (places >= 0) & (places < size)
  if fresh is not None:
    inside &= fresh[jnp.clip(places, 0, size - 1)]
  return jnp.where(inside, jnp.take_along_axis(logits, jnp.clip(places, 0, size - 1), axis=1), gathered)


def pull_back(
  gradients_of: OfBlock,
  hidden: jax.Array,
  unembedding: jax.Array,
  block: int,
  limit: jax.Array | None,
  hidden_gradient: bool,
  unembedding_gradient: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
  """Return the gradients by hidden states and unembedding, given the gradient by the logits.

  Args:
    gradients_of: (start, size) -> gradient [C, size] by the logits of that block of entries.
    hidden: [C, D].
    unembedding: [R, D].
    block: approximate number of entries of a block.
    limit: [] number of entries that are not padding; None: all.
    hidden_gradient: whether to compute the gradient by the hidden states.
    unembedding_gradient: [R, D] accumulator in at least float32, or None if it is not wanted.

  Returns:
    gradient by the hidden states [C, D] in the logits' type, and the accumulator with this chunk's part added.
  """

  chex.assert_rank([hidden, unembedding], 2)
  chex.assert_equal_shape_suffix([hidden, unembedding], 1)
  if unembedding_gradient is not None:
    chex.assert_equal_shape([unembedding, unembedding_gradient])

  def step(carry, index, start, size, fresh):
    by_hidden, by_unembedding = carry
    gradients = gradients_of(start, size)
    if fresh is not None:
      gradients = jnp.where(fresh[None, :], gradients, 0.0)
    gradients = gradients.astype(hidden.dtype)
    if by_hidden is not None:
      by_hidden += _product(gradients, take_entries(unembedding, start, size), (1, 0))
    if by_unembedding is not None:
      part = _product(gradients, hidden, (0, 0))
      by_unembedding = lax.dynamic_update_slice_in_dim(
        by_unembedding, take_entries(by_unembedding, start, size) + part, start, axis=0
      )
    return by_hidden, by_unembedding

  carry = (jnp.zeros(hidden.shape, logits_dtype(hidden)) if hidden_gradient else None, unembedding_gradient)
  return fold_blocks(unembedding.shape[0], block, limit, carry, step)
