"""A TPU kernel for attention over the key-value cache of a decode loop, which reads the stack of all layers in place.

XLA copies a layer out of the stack, and often the whole cache into another layout, before it multiplies (about 28 of 38
ms a step for 8B parameters, 256 rows and 10 240 slots). Here the layer is a number that chooses blocks of the stack as
it lies; blocks beyond the last slot that a row sees are neither read nor computed; and rows that share a prompt read
its blocks once for all of them. Partial results of several caches are merged by their log-normalisers, as in
FlashDecoding.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from models.blockwise import MASKED

BLOCK = 1024  # Slots a grid step; keys and values of two blocks are in flight, 1 MiB in bfloat16.
MOST_QUERIES = 512  # Queries that meet one row of a cache in one grid step: float32 scores of 2 MiB.

# (keys, values [L, R, KV, C, head_dim], positions, segment_ids [R, C] int32, used [R] int32 from `used`)
Part = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def used(segment_ids: jax.Array) -> jax.Array:
  """[R] int32: slots of each row up to the last that is not empty, of segment ids [R, C]."""
  ends = jnp.arange(1, segment_ids.shape[1] + 1, dtype=jnp.int32)[None]
  return jnp.max(jnp.where(segment_ids > 0, ends, 0), axis=1)


def attention(
  query: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  parts: Sequence[Part],
  layer: jax.Array,
  window: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Grouped-query softmax attention to what caches hold of a layer; scores and softmax in float32.

  A query sees keys of its own segment that do not stand after it, as `models.attention.visible` has it.

  Args:
    query: [B, S, H, head_dim], rotated and scaled.
    positions: [B, S] int32 of the queries.
    segment_ids: [B, S] int32.
    parts: keys and values [L, R, KV, C, head_dim], positions and segment ids [R, C] and used slots [R] of each cache;
      the softmax runs over all. B is a multiple of R, of each its own; B / R consecutive rows share a row.
    layer: [] int32.
    window: [] int32, number of positions that are seen; 0: all.
    interpret: run without a TPU.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`; 0 where nothing is seen.
  """
  scalars = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32)])
  results = [_part(query, positions, segment_ids, part, scalars, interpret) for part in parts]
  top = functools.reduce(jnp.maximum, [top for _, top, _ in results])
  scales = [jnp.exp(part - top) for _, part, _ in results]
  total = sum(scale * part for scale, (_, _, part) in zip(scales, results, strict=True))
  mixed = sum(scale * part for scale, (part, _, _) in zip(scales, results, strict=True))
  return (mixed / jnp.where(total > 0, total, 1.0)).astype(query.dtype)


def _part(query, positions, segment_ids, part, scalars, interpret):
  """Weighted sum [B, S, H, head_dim], largest score and sum of weights [B, S, H, 1] over one cache, float32."""
  keys, values, key_positions, key_segments, filled = part
  batch, length, heads, head_dim = query.shape
  _, rows, kv_heads, slots, _ = keys.shape
  shape = (rows, batch // rows, length, kv_heads, heads // kv_heads)
  count = shape[1] * shape[2] * shape[4]
  room = -count % (16 if query.dtype == jnp.bfloat16 else 8)
  # All queries that meet the same keys are rows of one matrix: [R, KV, M, …].
  gather = lambda array: array.reshape(*shape, -1).transpose(0, 3, 1, 2, 4, 5).reshape(rows, kv_heads, count, -1)
  matrix = jnp.pad(gather(query), ((0, 0), (0, 0), (0, room), (0, 0)))
  of_query = lambda array: jnp.pad(
    jnp.repeat(array.reshape(rows, -1), shape[4], axis=1), ((0, 0), (0, room)), constant_values=-1
  )[:, :, None]
  block = min(BLOCK, slots)
  blocks = (filled + block - 1) // block

  # A block that no query sees repeats the last one that is: nothing is fetched for it.
  at = lambda row, step, blocks: jnp.minimum(step, jnp.maximum(blocks[row] - 1, 0))
  stack = pl.BlockSpec(
    (None, None, None, block, head_dim),
    lambda row, head, step, scalars, blocks: (scalars[0], row, head, at(row, step, blocks), 0),
  )
  of_slot = pl.BlockSpec((None, 1, block), lambda row, head, step, scalars, blocks: (row, 0, at(row, step, blocks)))
  per_row = pl.BlockSpec((None, count + room, 1), lambda row, head, step, *_: (row, 0, 0))
  per_head = lambda width: pl.BlockSpec(
    (None, None, count + room, width), lambda row, head, step, *_: (row, head, 0, 0)
  )
  result = lambda width: jax.ShapeDtypeStruct((rows, kv_heads, count + room, width), jnp.float32)
  done = pl.pallas_call(
    functools.partial(_kernel, slots=slots),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(rows, kv_heads, pl.cdiv(slots, block)),
      in_specs=[per_head(head_dim), per_row, per_row, stack, stack, of_slot, of_slot],
      out_specs=[per_head(head_dim), per_head(1), per_head(1)],
    ),
    out_shape=[result(head_dim), result(1), result(1)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
    interpret=interpret,
    name='cache_attention',
  )(
    scalars,
    blocks,
    matrix,
    of_query(positions),
    of_query(segment_ids),
    keys,
    values,
    key_positions[:, None],
    key_segments[:, None],
  )

  def scatter(array: jax.Array) -> jax.Array:
    array = array[:, :, :count].reshape(rows, kv_heads, *shape[1:3], shape[4], -1)
    return array.transpose(0, 2, 3, 1, 4, 5).reshape(batch, length, heads, -1)

  return tuple(map(scatter, done))


def _kernel(
  scalars, blocks, query, positions, segments, keys, values, key_positions, key_segments, mixed, top, total, *, slots
):
  """One block of slots for all queries [M, head_dim] of a row and head; sums stay in the output blocks."""
  row, step = pl.program_id(0), pl.program_id(2)
  block = keys.shape[0]

  @pl.when(step == 0)
  def _():
    mixed[...] = jnp.zeros_like(mixed)
    top[...] = jnp.full_like(top, MASKED)
    total[...] = jnp.zeros_like(total)

  @pl.when(step < blocks[row])
  def _():
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    scores = product(query[...], keys[...], (((1,), (1,)), ((), ())))
    distance = positions[...] - key_positions[...]
    near = (distance < scalars[1]) | (scalars[1] == 0)
    seen = (segments[...] == key_segments[...]) & (key_segments[...] > 0) & (distance >= 0) & near
    value = values[...]
    if slots % block:
      # What stands beyond the end of the last block is undefined, and 0 times it need not be 0.
      inside = slots - step * block
      seen &= lax.broadcasted_iota(jnp.int32, seen.shape, 1) < inside
      value = jnp.where(lax.broadcasted_iota(jnp.int32, value.shape, 0) < inside, value, 0)
    before = top[...]
    highest = jnp.maximum(before, jnp.max(jnp.where(seen, scores, MASKED), axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - highest), 0.0)
    scale = jnp.exp(before - highest)
    top[...] = highest
    total[...] = scale * total[...] + jnp.sum(weights, axis=1, keepdims=True)
    added = product(weights.astype(value.dtype), value, (((1,), (0,)), ((), ())))
    mixed[...] = scale * mixed[...] + added
