"""The only code that touches the vocabulary axis: products with the unembedding, normalisers, top-K, gathers.

Everything works on one chunk of C tokens at a time and walks the vocabulary in blocks, so that a block of logits is
used while it is in cache and updates of the unembedding's gradient are made in place. Per-token results (running
maximum, normaliser, gathered values, candidates for the top K) merge by associative operations, which is also what a
vocabulary split over devices needs. C tokens of a chunk, V vocabulary, D model width, M gathered ids.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

GROUP = 32  # Entries per group of the two-stage top-K.
ROWS_AT_A_TIME = 1 << 21  # Entries of the rows that `map_rows` handles at once.


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


def block_statistics(logits: jax.Array) -> Statistics:
  """Statistics of a block of logits [C, W]."""
  maximum = jnp.maximum(logits.max(-1), float(jnp.finfo(logits.dtype).min) / 4)
  # A large negative number instead of −inf: its exponential is 0 and 0 × it is 0.
  shifted = jnp.maximum(logits - maximum[:, None], -1e30)
  weights = jnp.exp(shifted)
  return Statistics(maximum, weights.sum(-1), (weights * shifted).sum(-1))


def merge(a: Statistics, b: Statistics) -> Statistics:
  """Statistics of two disjoint parts of the vocabulary together."""
  maximum = jnp.maximum(a.maximum, b.maximum)
  parts = []
  for part in (a, b):
    shift = part.maximum - maximum
    scale = jnp.exp(shift)
    parts.append((scale * part.mass, scale * (part.moment + jnp.where(part.mass > 0, shift, 0.0) * part.mass)))
  return Statistics(maximum, parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])


def logits_dtype(hidden: jax.Array) -> jnp.dtype:
  """At least float32; float64 stays float64."""
  return jnp.promote_types(hidden.dtype, jnp.float32)


def project(hidden: jax.Array, unembedding: jax.Array) -> jax.Array:
  """Logits [C, W] of hidden states [C, D] for rows [W, D] of the unembedding, in at least float32."""
  return lax.dot_general(
    hidden,
    unembedding,
    (((1,), (1,)), ((), ())),
    precision=_precision(hidden),
    preferred_element_type=logits_dtype(hidden),
  )


def _precision(values: jax.Array) -> lax.Precision | None:
  """Exact products of float32, as in the model and the sampler; accelerators would round them to bfloat16."""
  return None if values.dtype == jnp.bfloat16 else lax.Precision.HIGHEST


def fold_blocks(vocab: int, block: int, carry, step: Callable):
  """Folds `step(carry, start, size, fresh)` over blocks of at most about `block` entries that cover the vocabulary.

  Blocks have one static `size`; where they overlap, `fresh` [size] is false for entries that an earlier block held.
  """
  count = -(-vocab // block)
  size = -(-vocab // count)
  if count > 1 and size % 128 and size > 128:
    size += 128 - size % 128  # Whole vector lanes; the overlap is less than one block in total.
  if size >= vocab:
    return step(carry, 0, vocab, jnp.ones((vocab,), bool))
  count = -(-vocab // size)

  def body(index, carry):
    begin = index * size
    start = jnp.minimum(begin, vocab - size)
    return step(carry, start, size, jnp.arange(size) >= begin - start)

  return lax.fori_loop(0, count, body, carry)


def take_rows(matrix: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
  """Rows start … start + size − 1."""
  return lax.dynamic_slice_in_dim(matrix, start, size, axis=0)


def scan_logits(
  logits_of: Callable[[jax.Array | int, int], jax.Array],
  tokens: int,
  vocab: int,
  block: int,
  dtype: jnp.dtype,
  *,
  ids: jax.Array | None = None,
  keep: bool = False,
) -> tuple[Statistics, jax.Array | None, jax.Array | None]:
  """One walk over the vocabulary.

  Args:
    logits_of: (start, size) -> logits [C, size] of that block.
    tokens: C.
    vocab: V.
    block: entries of a block, about.
    dtype: of the logits.
    ids: [C, M] int32, entries to gather (any value for ids outside the vocabulary).
    keep: whether to keep the logits.

  Returns:
    statistics, the gathered logits [C, M] (None without ids) and the logits [C, V] (None unless kept).
  """

  def step(carry, start, size, fresh):
    statistics, gathered, kept = carry
    logits = logits_of(start, size)
    if kept is not None:
      kept = logits if size == vocab else lax.dynamic_update_slice_in_dim(kept, logits, start, axis=1)
    if ids is not None:
      local = ids - start
      inside = (local >= 0) & (local < size)
      found = jnp.take_along_axis(logits, jnp.clip(local, 0, size - 1), axis=1)
      gathered = jnp.where(inside, found, gathered)
    if size != vocab:
      logits = jnp.where(fresh[None, :], logits, -jnp.inf)
    return merge(statistics, block_statistics(logits)), gathered, kept

  carry = (
    empty_statistics(tokens, dtype),
    None if ids is None else jnp.zeros(ids.shape, dtype),
    jnp.zeros((tokens, vocab), dtype) if keep else None,
  )
  return fold_blocks(vocab, block, carry, step)


def top_k_indices(logits: jax.Array, k: int) -> jax.Array:
  """Indices [C, k] of the k largest of each row [C, V], exactly, in no promised order.

  Two stages: the top k groups by their maximum hold the top k entries, since a group left out has k groups whose
  maxima are no smaller. Among equal entries at the boundary any may be chosen.
  """
  tokens, vocab = logits.shape
  groups = vocab // GROUP
  if vocab < 4096 or 2 * k > groups:
    return lax.top_k(logits, k)[1]
  # Groups are strided, {j, j + groups, …}, so that their maxima are elementwise maxima of whole vectors.
  maxima = logits[:, : groups * GROUP].reshape(tokens, GROUP, groups).max(1)
  best = lax.top_k(maxima, k)[1]
  candidates = (best[:, :, None] + groups * jnp.arange(GROUP)[None, None, :]).reshape(tokens, k * GROUP)
  rest = jnp.broadcast_to(jnp.arange(groups * GROUP, vocab)[None, :], (tokens, vocab - groups * GROUP))
  candidates = jnp.concatenate([candidates, rest.astype(candidates.dtype)], axis=1)
  chosen = lax.top_k(jnp.take_along_axis(logits, candidates, axis=1), k)[1]
  return jnp.take_along_axis(candidates, chosen, axis=1)


def scatter_add(values: jax.Array, ids: jax.Array, updates: jax.Array) -> jax.Array:
  """`values` [C, V] with `updates` [C, M] added at `ids` [C, M]; ids outside the vocabulary are dropped."""
  vocab = values.shape[1]
  ids = jnp.where((ids < 0) | (ids >= vocab), vocab, ids)
  return values.at[jnp.arange(values.shape[0])[:, None], ids].add(updates, mode='drop')


def map_rows(matrix: jax.Array, operands, function: Callable) -> jax.Array:
  """`function(rows of matrix [R, V], rows of operands)` -> [R, V] for all rows, in place.

  A few rows at a time, so that no second [C, V] array exists. Operands are a tree of arrays [C, …].
  """
  tokens, vocab = matrix.shape
  limit = max(1, ROWS_AT_A_TIME // vocab)
  rows = next(size for size in range(min(limit, tokens), 0, -1) if tokens % size == 0)
  if rows == tokens:
    return function(matrix, operands)

  def step(index, matrix):
    part = jax.tree.map(lambda x: take_rows(x, index * rows, rows), (matrix, operands))
    return lax.dynamic_update_slice_in_dim(matrix, function(*part), index * rows, axis=0)

  return lax.fori_loop(0, tokens // rows, step, matrix)


def pull_back(
  logit_gradients: jax.Array,
  hidden: jax.Array,
  unembedding: jax.Array,
  block: int,
  hidden_gradient: bool,
  unembedding_gradient: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
  """Turns the gradient by the logits into those by hidden states and unembedding.

  Args:
    logit_gradients: [C, V].
    hidden: [C, D].
    unembedding: [V, D].
    block: entries of a block, about.
    hidden_gradient: whether it is wanted.
    unembedding_gradient: [V, D] accumulator in at least float32, or None if it is not wanted.

  Returns:
    gradient by the hidden states [C, D] in the logits' type, and the accumulator with this chunk's part added.
  """
  dtype = logit_gradients.dtype
  vocab = unembedding.shape[0]

  def step(carry, start, size, fresh):
    by_hidden, by_unembedding = carry
    gradients = logit_gradients
    if size != vocab:
      gradients = lax.dynamic_slice_in_dim(logit_gradients, start, size, axis=1)
      gradients = jnp.where(fresh[None, :], gradients, 0.0)
    gradients = gradients.astype(hidden.dtype)
    if by_hidden is not None:
      rows = take_rows(unembedding, start, size)
      by_hidden += lax.dot_general(
        gradients, rows, (((1,), (0,)), ((), ())), precision=_precision(rows), preferred_element_type=dtype
      )
    if by_unembedding is not None:
      part = lax.dot_general(
        gradients, hidden, (((0,), (0,)), ((), ())), precision=_precision(hidden), preferred_element_type=dtype
      )
      by_unembedding = lax.dynamic_update_slice_in_dim(
        by_unembedding, take_rows(by_unembedding, start, size) + part, start, axis=0
      )
    return by_hidden, by_unembedding

  carry = (jnp.zeros(hidden.shape, dtype) if hidden_gradient else None, unembedding_gradient)
  return fold_blocks(vocab, block, carry, step)
