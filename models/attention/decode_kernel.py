"""A TPU kernel for attention to the key-value cache of a decode loop, which reads the stack of all layers in place.

XLA copies a layer out of the stack, and often the whole cache into another layout, before it multiplies (about 28 of 38
ms per decode step for 8B parameters, 256 rows and 10 240 slots). Here the layer's index selects blocks of the stack in
place, and blocks after the last filled slot of a row are neither read nor computed. Partial results of several caches
are merged by their log-normalisers, as in FlashDecoding.

A row is a row of the batch. The grid runs over rows, key-value heads and blocks of slots, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from sdpo_jax.models.attention.blockwise import MASKED, product
from sdpo_jax.models.attention.prefix import Prefix, SoftmaxPart, by_group
from sdpo_jax.models.cache import Stores

BLOCK = 1024  # Slots per block; the keys and values of two blocks in flight are 1 MiB in bfloat16.

# (stacked stores, start, filled [B] int32): the first `filled` slots of a row hold the positions from `start` on.
Part = tuple[Stores, jax.Array, jax.Array]


def attention(
  query: jax.Array,
  positions: jax.Array,
  parts: Sequence[Part],
  layer: jax.Array,
  window: jax.Array,
  prefix: Prefix | None = None,
  *,
  beside: SoftmaxPart | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Compute grouped-query softmax attention to one layer's keys and values in caches, with float32 scores.

  A query sees the keys of its row at its own and earlier positions.

  Args:
    query: [B, S, H, head_dim], rotated and scaled.
    positions: [B, S] int32 of the queries.
    parts: caches of the same rows; the softmax runs over all of them.
    layer: [] int32.
    window: [] int32, number of visible positions; 0: all.
    prefix: further keys and values, included in the softmax and read once for all rows that share them.
    beside: attention computed before over other keys, which are included in the softmax, too.
    interpret: run without a TPU.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`; 0 where nothing is seen.
  """
  batch, length, heads, head_dim = query.shape
  kv_heads = parts[0][0].keys.shape[2]
  count = length * heads // kv_heads
  room = -count % (16 if query.dtype == jnp.bfloat16 else 8)

  def by_head(array: jax.Array) -> jax.Array:
    """Return [B, S, H, width] as [B, KV, M, width]: all queries that see the same keys form one matrix."""
    by_head = array.reshape(batch, length, kv_heads, -1, array.shape[-1]).swapaxes(1, 2)
    return jnp.pad(by_head.reshape(batch, kv_heads, count, -1), ((0, 0), (0, 0), (0, room), (0, 0)))

  matrix = by_head(query)
  places = jnp.pad(jnp.repeat(positions, count // length, axis=1), ((0, 0), (0, room)), constant_values=-1)[:, :, None]
  scalars = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32)])
  results = [_part(matrix, places, part, scalars, interpret) for part in parts]
  if prefix is not None:
    results.append(_shared(matrix, prefix, count, heads // kv_heads))
  if beside is not None:
    mixed, total = by_head(beside[0]), by_head(beside[1][..., None])
    results.append((mixed.astype(jnp.float32), total, jnp.ones_like(total)))
  top = functools.reduce(jnp.maximum, [top for _, top, _ in results])
  scales = [jnp.exp(part - top) for _, part, _ in results]
  total = sum(scale * part for scale, (_, _, part) in zip(scales, results, strict=True))
  mixed = sum(scale * part for scale, (part, _, _) in zip(scales, results, strict=True))
  mixed = (mixed / jnp.where(total > 0, total, 1.0)).astype(query.dtype)[:, :, :count]
  return mixed.reshape(batch, kv_heads, length, -1, head_dim).swapaxes(1, 2).reshape(query.shape)


def _part(matrix, places, part, scalars, interpret):
  """Return (weighted sum [B, KV, M, head_dim], largest score, sum of weights [B, KV, M, 1]) over one cache, float32."""
  stores, start, filled = part
  rows, kv_heads, queries, head_dim = matrix.shape
  slots = stores.keys.shape[3]
  block = min(BLOCK, slots)

  # A block that no query sees repeats the index of the last visible one, so that nothing is fetched for it.
  def clamped(row, block_index, filled):
    return jnp.minimum(block_index, jnp.maximum((filled[row] + block - 1) // block - 1, 0))

  stack = pl.BlockSpec(
    (None, None, None, block, head_dim),
    lambda row, head, index, scalars, start, filled: (scalars[0], row, head, clamped(row, index, filled), 0),
  )
  scales = pl.BlockSpec(
    (None, None, None, 1, block),
    lambda row, head, index, scalars, start, filled: (scalars[0], row, head, 0, clamped(row, index, filled)),
  )
  held = [stores.keys, stores.values]
  if stores.key_scales is not None:
    held += [stores.key_scales, stores.value_scales]

  def per_head(width):
    return pl.BlockSpec((None, None, queries, width), lambda row, head, *_: (row, head, 0, 0))

  widths = (head_dim, 1, 1)
  return pl.pallas_call(
    functools.partial(_kernel, slots=slots),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(rows, kv_heads, pl.cdiv(slots, block)),
      in_specs=[
        per_head(head_dim),
        pl.BlockSpec((None, queries, 1), lambda row, *_: (row, 0, 0)),
        stack,
        stack,
        *[scales] * (len(held) - 2),
      ],
      out_specs=[per_head(width) for width in widths],
    ),
    out_shape=[jax.ShapeDtypeStruct((rows, kv_heads, queries, width), jnp.float32) for width in widths],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
    interpret=interpret,
    name='cache_attention',
  )(scalars, start, filled, matrix, places, *held)


def _shared(matrix, prefix, count, group):
  """Return results as `_part` does, over a prefix.

  Only the first `count` queries of a row are not padding, `group` of each token. Rows see the same slots, so these
  queries form one matrix per head; the padding of each row would be most of it for groups of few heads.
  """
  if prefix.key.ndim == 4:
    return by_group(functools.partial(_shared, count=count, group=group), matrix, prefix)
  batch, kv_heads, queries, head_dim = matrix.shape
  real = matrix[:, :, :count].swapaxes(0, 1).reshape(kv_heads, batch * count, head_dim)
  scores = product('kqd,kpd->kqp', real, prefix.key.astype(matrix.dtype))
  slot, seen = lax.broadcasted_iota(jnp.int32, scores.shape, 2), True
  if prefix.first is not None:
    seen = slot >= jnp.repeat(prefix.first.reshape(-1), group)[None, :, None]
  if prefix.filled is not None:
    rows = jnp.repeat(jnp.broadcast_to(jnp.atleast_1d(prefix.filled), (batch,)), count)
    seen &= slot < rows[None, :, None]
  top = jnp.max(jnp.where(seen, scores, MASKED), axis=-1, keepdims=True)
  weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
  mixed = product('kqp,kpd->kqd', weights.astype(matrix.dtype), prefix.value.astype(matrix.dtype))

  def by_row(array: jax.Array) -> jax.Array:
    array = array.reshape(kv_heads, batch, count, -1).swapaxes(0, 1)
    return jnp.pad(array, ((0, 0), (0, 0), (0, queries - count), (0, 0)))

  return by_row(mixed), by_row(top), by_row(jnp.sum(weights, axis=-1, keepdims=True))


def _kernel(scalars, start, filled, query, places, keys, values, *others, slots):
  """Add a block of slots to the sums of all queries [M, head_dim] of a row and head, which are in the output blocks."""
  *scales, mixed, top, total = others
  row, block_index = pl.program_id(0), pl.program_id(2)
  block = keys.shape[0]
  first = block_index * block

  @pl.when(block_index == 0)
  def _():
    mixed[...] = jnp.zeros_like(mixed)
    top[...] = jnp.full_like(top, MASKED)
    total[...] = jnp.zeros_like(total)

  @pl.when(first < filled[row])
  def _():
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    scores = product(query[...], keys[...].astype(query.dtype), (((1,), (1,)), ((), ())))
    if scales:
      scores *= scales[0][...]
    slot = first + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    distance = places[...] - (start[row] + slot)
    seen = (slot < filled[row]) & (distance >= 0) & ((distance < scalars[1]) | (scalars[1] == 0))
    value = values[...].astype(query.dtype)
    if slots % block:
      # Values after the end of the last block are undefined, and 0 times them need not be 0.
      value = jnp.where(first + lax.broadcasted_iota(jnp.int32, value.shape, 0) < slots, value, 0)
    before = top[...]
    highest = jnp.maximum(before, jnp.max(jnp.where(seen, scores, MASKED), axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - highest), 0.0)
    scale = jnp.exp(before - highest)
    top[...] = highest
    total[...] = scale * total[...] + jnp.sum(weights, axis=1, keepdims=True)
    if scales:
      weights = jnp.where(seen, weights * scales[1][...], 0.0)
    added = product(weights.astype(value.dtype), value, (((1,), (0,)), ((), ())))
    mixed[...] = scale * mixed[...] + added
