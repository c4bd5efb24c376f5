"""The only code that touches the vocabulary axis: products with the unembedding, normalisers, top-K, gathers.

Everything works on one chunk of C tokens at a time. On CPUs it walks the vocabulary in blocks, so that a block of
logits is used while it is in cache; accelerators take a device's whole part at once. Per-token results (maximum,
normaliser, gathered values, candidates for the top K) merge by associative operations, over blocks and, where the
vocabulary is split over devices (`Shard`), over devices. C tokens of a chunk, c of them a device's own, V vocabulary,
R rows of the unembedding here, D model width, M gathered ids.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

CPU_BLOCK = 2048  # Entries handled at a time on a CPU, about.
ALL = 1 << 30  # More entries than any vocabulary has.
GROUP = 32  # Entries per group of the two-stage top-K.
SPAN = 16384  # Entries of which the top K is taken at once where logits are not kept, about.
TOKENS_AT_A_TIME = 8  # Tokens whose K rows of the unembedding are gathered at once.
APPROXIMATE_RECALL = 0.95  # Expected share of the top K that `approx` finds on a TPU.


@dataclasses.dataclass(frozen=True)
class Shard:
  """How the vocabulary is split: over `parts` devices along mesh axis `axis`, in order, R rows each.

  Rows from `entries` on, at the end of the last devices, are padding. In a group of devices that differ only in `axis`
  each owns c tokens of a chunk of C = parts·c, and each computes its part of the vocabulary for all C. Without an axis
  all methods leave their argument as it is.
  """

  entries: int  # V.
  axis: str | None = None
  parts: int = 1

  def offset(self, rows: int) -> jax.Array | int:
    """Index of this device's first row."""
    return 0 if self.axis is None else lax.axis_index(self.axis) * rows

  def limit(self, rows: int) -> jax.Array | None:
    """[] how many of this device's rows are no padding; None if all are on every device."""
    if rows * self.parts == self.entries:
      return None
    return jnp.clip(self.entries - self.offset(rows), 0, rows)

  def gather(self, own: jax.Array) -> jax.Array:
    """Own tokens [c, …] → the group's [C, …]."""
    return own if self.axis is None else lax.all_gather(own, self.axis, tiled=True)

  def own(self, everyone: jax.Array) -> jax.Array:
    """The group's tokens [C, …] → own ones [c, …]."""
    if self.axis is None:
      return everyone
    count = everyone.shape[0] // self.parts
    return lax.dynamic_slice_in_dim(everyone, lax.axis_index(self.axis) * count, count)

  def total(self, part: jax.Array) -> jax.Array:
    """Sum over the parts."""
    return part if self.axis is None else lax.psum(part, self.axis)

  def own_total(self, part: jax.Array) -> jax.Array:
    """Sum over the parts [C, …] → own tokens [c, …]."""
    if self.axis is None:
      return part
    # Untiled: on large slices the TPU compiler makes an all-reduce and a slice of a tiled one.
    return lax.psum_scatter(part.reshape(self.parts, -1, *part.shape[1:]), self.axis, scatter_dimension=0)

  def candidates(self, part: jax.Array) -> jax.Array:
    """Candidates of each part [C, K] → of all parts, in their order, for own tokens [c, parts·K]."""
    if self.axis is None:
      return part
    parts = part.reshape(self.parts, -1, part.shape[1])
    parts = lax.all_to_all(parts, self.axis, split_axis=0, concat_axis=0)
    return parts.transpose(1, 0, 2).reshape(parts.shape[1], -1)

  def statistics(self, part: Statistics) -> Statistics:
    """Of the whole vocabulary, for the group's tokens."""
    if self.axis is None:
      return part
    maximum = lax.pmax(part.maximum, self.axis)
    mass, moment = _rescaled(part, maximum)
    return Statistics(maximum, lax.psum(mass, self.axis), lax.psum(moment, self.axis))


@flax.struct.dataclass
class Statistics:
  """What is known of each token's distribution after some blocks of its logits."""

  maximum: jax.Array  # [C] largest logit.
  mass: jax.Array  # [C] Σ exp(logit − maximum).
  moment: jax.Array  # [C] Σ exp(logit − maximum)·(logit − maximum).

  @property
  def log_normaliser(self) -> jax.Array:
    """[C] logarithm of Σ exp(logit); 0 for a row of −inf, so that nothing becomes NaN."""
    empty = self.mass == 0
    return jnp.where(empty, 0.0, self.maximum + jnp.log(jnp.where(empty, 1.0, self.mass)))

  @property
  def entropy(self) -> jax.Array:
    """[C] entropy in nats."""
    mass = jnp.where(self.mass == 0, 1.0, self.mass)
    return jnp.maximum(jnp.log(mass) - self.moment / mass, 0.0)


def empty_statistics(tokens: int, dtype: jnp.dtype) -> Statistics:
  """Statistics of no logits at all."""
  zeros = jnp.zeros((tokens,), dtype)
  # Finite, so that differences of maxima stay finite for rows that begin with −inf.
  return Statistics(zeros + float(jnp.finfo(dtype).min) / 4, zeros, zeros)


def _block_maximum(logits: jax.Array) -> jax.Array:
  return jnp.maximum(logits.max(-1), float(jnp.finfo(logits.dtype).min) / 4)


def _shifted(logits: jax.Array, maximum: jax.Array) -> jax.Array:
  """Differences to the maximum; a large negative number in place of −inf: its exponential is 0 and 0 × it is 0."""
  return jnp.maximum(logits - maximum[:, None], -1e30)


def block_statistics(logits: jax.Array) -> Statistics:
  """Statistics of a block of logits [C, W]."""
  maximum = _block_maximum(logits)
  shifted = _shifted(logits, maximum)
  weights = jnp.exp(shifted)
  return Statistics(maximum, weights.sum(-1), (weights * shifted).sum(-1))


def _rescaled(part: Statistics, maximum: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Mass and moment of `part` about another maximum."""
  shift = part.maximum - maximum
  scale = jnp.exp(shift)
  return scale * part.mass, scale * (part.moment + jnp.where(part.mass > 0, shift, 0.0) * part.mass)


def merge(a: Statistics, b: Statistics) -> Statistics:
  """Statistics of two disjoint parts of the vocabulary together."""
  maximum = jnp.maximum(a.maximum, b.maximum)
  (mass, moment), (other_mass, other_moment) = _rescaled(a, maximum), _rescaled(b, maximum)
  return Statistics(maximum, mass + other_mass, moment + other_moment)


def logits_dtype(hidden: jax.Array) -> jnp.dtype:
  """At least float32; float64 stays float64."""
  return jnp.promote_types(hidden.dtype, jnp.float32)


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
  """a·b over axis contract[0] of a and contract[1] of b, in at least float32.

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
  """Logits [C, W] of hidden states [C, D] for rows [W, D] of the unembedding, in at least float32."""
  return _product(hidden, unembedding, (1, 1))


def default_block(platform: str | None = None) -> int:
  """Entries handled at a time on `platform` (None: JAX's default): on CPUs what stays in cache, elsewhere all."""
  return CPU_BLOCK if (platform or jax.default_backend()) == 'cpu' else ALL


def take_rows(matrix: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
  """Rows start … start + size − 1."""
  return lax.dynamic_slice_in_dim(matrix, start, size, axis=0)


def blocks(rows: int, block: int) -> tuple[int, int]:
  """(number, size) of the blocks that cover `rows`: of at most about `block`, without overlap where rows divide so."""
  count = max(1, -(-rows // block))
  even = next((n for n in range(count, min(2 * count, rows + 1)) if rows % n == 0), None)
  if even is not None:
    return even, rows // even
  size = -(-rows // count)
  if size > 128:
    size += -size % 128  # Whole vector lanes; the overlap is less than one block in total.
  return (1, rows) if size >= rows else (-(-rows // size), size)


def fold_blocks(rows: int, block: int, limit: jax.Array | None, carry, step: Callable):
  """Folds `step(carry, index, start, size, fresh)` over `blocks` that cover the rows.

  Blocks have one static `size`. `fresh` [size] is false for entries that an earlier block held and for entries from
  `limit` on; None if there are none such in any block.
  """
  count, size = blocks(rows, block)

  def body(index, carry):
    begin = index * size
    start = jnp.minimum(begin, rows - size)
    fresh = None
    if count * size != rows or limit is not None:
      position = start + jnp.arange(size)
      fresh = position >= begin
      if limit is not None:
        fresh &= position < limit
    return step(carry, index, start, size, fresh)

  return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


@flax.struct.dataclass
class View:
  """What one walk over this device's rows found; everything for the group's tokens."""

  statistics: Statistics  # Of the whole vocabulary.
  found: jax.Array | None  # [C, M] logits at the ids, this device's part of a sum over the devices.
  top: tuple[jax.Array, jax.Array] | None  # [C, K] logits and ids of the largest here.
  logits: jax.Array | None  # [C, R]; −inf at padding.
  mean_row: jax.Array | None  # [C, D] Σ_v p_v·row_v over the rows here.


def walk(
  shard: Shard,
  logits_of: Callable[[jax.Array | int, int], jax.Array],
  tokens: int,
  rows: int,
  block: int,
  dtype: jnp.dtype,
  *,
  ids: jax.Array | None = None,
  keep: bool = False,
  topk: int | None = None,
  method: str = 'exact',
  average: jax.Array | None = None,
) -> View:
  """One walk over this device's part of the vocabulary.

  Args:
    shard: how the vocabulary is split.
    logits_of: (start, size) -> logits [C, size] of that block of rows.
    tokens: C.
    rows: R.
    block: entries of a block, about.
    dtype: of the logits.
    ids: [C, M] int32 of the whole vocabulary, to gather (any value for ids outside it).
    keep: whether to keep the logits.
    topk: how many of the largest are wanted; None: none.
    method: 'exact' or 'approx'.
    average: [R, D], rows to average with the probabilities; None: none.
  """
  limit, offset = shard.limit(rows), shard.offset(rows)
  count, size = blocks(rows, block)
  collect = topk is not None and not keep
  topk = None if topk is None else min(topk, rows)
  slots = max(1, min(count, max(SPAN, topk or 0) // size))
  slots = next((n for n in range(slots, slots // 2, -1) if count % n == 0), slots)  # Then all spans are full.
  lowest = float(jnp.finfo(dtype).min)

  def step(carry, index, start, size, fresh):
    statistics, found, kept, mean_row, best, span = carry
    logits = logits_of(start, size)
    if fresh is not None:
      logits = jnp.where(fresh[None, :], logits, -jnp.inf)
    if keep:
      # An overlapping block must not wipe out what an earlier one has written.
      if fresh is not None and count > 1:
        written = lax.dynamic_slice_in_dim(kept, start, size, axis=1)
        kept = lax.dynamic_update_slice_in_dim(kept, jnp.where(fresh[None, :], logits, written), start, axis=1)
      else:
        kept = logits if count == 1 else lax.dynamic_update_slice_in_dim(kept, logits, start, axis=1)
    if ids is not None:
      local = ids - offset - start
      inside = (local >= 0) & (local < size)
      if fresh is not None:
        inside &= fresh[jnp.clip(local, 0, size - 1)]
      here = jnp.take_along_axis(logits, jnp.clip(local, 0, size - 1), axis=1)
      found = jnp.where(inside, here, found)
    part = block_statistics(logits)
    total = merge(statistics, part)
    if average is not None:
      weights = jnp.exp(_shifted(logits, part.maximum)).astype(average.dtype)
      here = _product(weights, take_rows(average, start, size), (1, 0))
      scale = lambda part: jnp.exp(part.maximum - total.maximum)[:, None]
      mean_row = scale(statistics) * mean_row + scale(part) * here
    if collect:
      slot = index % slots
      # Real entries stay above the places that hold none, even where they are −inf.
      reachable = jnp.maximum(logits, lowest)
      if fresh is not None:
        reachable = jnp.where(fresh[None, :], reachable, -jnp.inf)
      span = lax.dynamic_update_slice_in_dim(span, best[0], 0, axis=1)
      span = lax.dynamic_update_slice_in_dim(span, reachable, topk + slot * size, axis=1)
      filled = None if count % slots == 0 else slot + 1
      flush = lambda best, span: _better(best[1], span, index - slot, filled, size, rows, method)
      due = (slot == slots - 1) | (index == count - 1)
      best = flush(best, span) if slots == 1 else lax.cond(due, flush, lambda best, _: best, best, span)
    return total, found, kept, mean_row, best, span

  nothing = jnp.full((tokens, topk or 0), -jnp.inf, dtype), jnp.zeros((tokens, topk or 0), jnp.int32)
  carry = (
    empty_statistics(tokens, dtype),
    None if ids is None else jnp.zeros(ids.shape, dtype),
    jnp.full((tokens, rows), -jnp.inf, dtype) if keep else None,
    None if average is None else jnp.zeros((tokens, average.shape[1]), dtype),
    nothing if collect else None,
    jnp.zeros((tokens, topk + slots * size), dtype) if collect else None,
  )
  part, found, kept, mean_row, best, _ = fold_blocks(rows, block, limit, carry, step)
  statistics = shard.statistics(part)
  if topk is not None:
    values, places = best if collect else top_k(kept, topk, method)
    best = jnp.where(values <= lowest, -jnp.inf, values), places + offset
  if mean_row is not None:
    mean_row = mean_row * jnp.exp(part.maximum - statistics.log_normaliser)[:, None]
  return View(statistics, found, best, kept, mean_row)


def _better(places, span, first, filled, size, rows, method):
  """The k largest of a span [C, k + entries] and their rows.

  It begins with the k largest so far, whose rows are `places` [C, k]; then come blocks of `size`, the first of them
  number `first`, in the order of rows, so that equal entries are ranked by them. Only `filled` hold anything; None: all.
  """
  k = places.shape[1]
  if filled is not None:
    span = jnp.where(jnp.arange(span.shape[1])[None, :] < k + filled * size, span, -jnp.inf)
  values, order = top_k(span, k, method)
  block, lane = jnp.maximum(order - k, 0) // size, jnp.maximum(order - k, 0) % size
  # The last block starts earlier where blocks overlap.
  ids = jnp.minimum((first + block) * size, rows - size) + lane
  return values, jnp.where(order < k, jnp.take_along_axis(places, jnp.minimum(order, k - 1), axis=1), ids)


def top_k(values: jax.Array, k: int, method: str = 'exact') -> tuple[jax.Array, jax.Array]:
  """The k largest of each row [C, W] and their places [C, k], largest first and equal ones in the order of places.

  'approx' is `lax.approx_max_k`: on a TPU it finds `APPROXIMATE_RECALL` of them in expectation, elsewhere all.
  """
  if method == 'approx':
    return lax.approx_max_k(values, k, recall_target=APPROXIMATE_RECALL)
  if values.shape[1] < 4096 or values.shape[1] < 4 * k * GROUP:
    return lax.top_k(values, k)
  # On a CPU the cost is k·log k comparisons a row, on accelerators k passes over what is chosen from.
  return lax.platform_dependent(
    values, cpu=lambda values: tuple(lax.top_k(values, k)), default=lambda values: two_stage_top_k(values, k)
  )


def two_stage_top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """`top_k` from the k groups of neighbours with the largest maxima.

  These groups hold the k largest: for an entry of another group there are k groups whose maximum is larger, or equal
  and, groups being in order, of a smaller place.
  """
  tokens, width = values.shape
  padded = jnp.pad(values, ((0, 0), (0, -width % GROUP)), constant_values=-jnp.inf)
  groups = padded.reshape(tokens, -1, GROUP)
  best = jnp.sort(lax.top_k(groups.max(-1), k)[1], axis=-1)
  candidates = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(tokens, k * GROUP)
  found, order = lax.top_k(candidates, k)
  return found, jnp.take_along_axis(best, order // GROUP, axis=1) * GROUP + order % GROUP


def scatter_add(values: jax.Array, ids: jax.Array, updates: jax.Array) -> jax.Array:
  """`values` [C, V] with `updates` [C, M] added at `ids` [C, M]; ids outside the vocabulary are dropped."""
  vocab = values.shape[1]
  ids = jnp.where((ids < 0) | (ids >= vocab), vocab, ids)
  return values.at[jnp.arange(values.shape[0])[:, None], ids].add(updates, mode='drop')


def weighted_rows(matrix: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
  """Σ_m weights[c, m]·matrix[ids[c, m]] as [C, D], in the type of `weights`; ids outside [0, R) count as 0."""
  inside = (ids >= 0) & (ids < matrix.shape[0])
  weights = jnp.where(inside, weights, 0)
  ids = jnp.where(inside, ids, 0)

  def of_token(operands):
    ids, weights = operands
    return _product(weights.astype(matrix.dtype), matrix[ids], (0, 0)).astype(weights.dtype)

  return lax.map(of_token, (ids, weights), batch_size=min(TOKENS_AT_A_TIME, ids.shape[0]))


def pull_back(
  gradients_of: Callable[[jax.Array | int, int], jax.Array],
  hidden: jax.Array,
  unembedding: jax.Array,
  block: int,
  limit: jax.Array | None,
  hidden_gradient: bool,
  unembedding_gradient: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
  """Turns the gradient by the logits into those by hidden states and unembedding.

  Args:
    gradients_of: (start, size) -> gradient [C, size] by the logits of that block of rows.
    hidden: [C, D].
    unembedding: [R, D].
    block: entries of a block, about.
    limit: [] rows that are no padding; None: all.
    hidden_gradient: whether it is wanted.
    unembedding_gradient: [R, D] accumulator in at least float32, or None if it is not wanted.

  Returns:
    gradient by the hidden states [C, D] in the logits' type, and the accumulator with this chunk's part added.
  """
  rows = unembedding.shape[0]

  def step(carry, index, start, size, fresh):
    by_hidden, by_unembedding = carry
    gradients = gradients_of(start, size)
    if fresh is not None:
      gradients = jnp.where(fresh[None, :], gradients, 0.0)
    gradients = gradients.astype(hidden.dtype)
    if by_hidden is not None:
      by_hidden += _product(gradients, take_rows(unembedding, start, size), (1, 0))
    if by_unembedding is not None:
      part = _product(gradients, hidden, (0, 0))
      by_unembedding = lax.dynamic_update_slice_in_dim(
        by_unembedding, take_rows(by_unembedding, start, size) + part, start, axis=0
      )
    return by_hidden, by_unembedding

  carry = (jnp.zeros(hidden.shape, logits_dtype(hidden)) if hidden_gradient else None, unembedding_gradient)
  return fold_blocks(rows, block, limit, carry, step)
