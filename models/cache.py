"""The key-value cache of a decode loop: a carry that is updated in place."""

from __future__ import annotations

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp


@flax.struct.dataclass
class KVCache:
  """Keys and values of the tokens seen so far; all rows append at the same slot.

  Rows of different lengths are told apart by `segment_ids`: slots of padding and slots not yet written hold 0 and are
  never attended to.
  """

  keys: jax.Array  # [L, B, KV, C, head_dim], compute dtype, rotated.
  values: jax.Array  # [L, B, KV, C, head_dim].
  positions: jax.Array  # [B, C] int32.
  segment_ids: jax.Array  # [B, C] int32, 0 = empty or padding.
  length: jax.Array  # [] int32, the next slot.


def init(layers: int, batch_size: int, kv_heads: int, length: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
  """An empty cache of `length` slots for each of `batch_size` rows."""
  shape = (layers, batch_size, kv_heads, length, head_dim)
  return KVCache(
    keys=jnp.zeros(shape, dtype),
    values=jnp.zeros(shape, dtype),
    positions=jnp.zeros((batch_size, length), jnp.int32),
    segment_ids=jnp.zeros((batch_size, length), jnp.int32),
    length=jnp.zeros((), jnp.int32),
  )


def repeat(cache: KVCache, repeats: int, length: int | None = None) -> KVCache:
  """Every row `repeats` times (rows 0,0,…,1,1,…), with room for `length` slots in all (None: as many as before).

  Raises:
    ValueError: if `length` is less than the cache already has.
  """
  grow = 0 if length is None else length - cache.positions.shape[1]
  if grow < 0:
    raise ValueError(f'A cache of {cache.positions.shape[1]} slots cannot shrink to {length}.')

  def copy(array: jax.Array, rows: int, slots: int) -> jax.Array:
    widths = [(0, grow if axis == slots else 0) for axis in range(array.ndim)]
    return jnp.pad(jnp.repeat(array, repeats, axis=rows), widths)

  return KVCache(
    keys=copy(cache.keys, 1, 3),
    values=copy(cache.values, 1, 3),
    positions=copy(cache.positions, 0, 1),
    segment_ids=copy(cache.segment_ids, 0, 1),
    length=cache.length,
  )


def append_tokens(cache: KVCache, positions: jax.Array, segment_ids: jax.Array) -> KVCache:
  """Positions and segments of the next S tokens ([B, S] int32) written; keys and values follow layer by layer."""
  return cache.replace(
    positions=lax.dynamic_update_slice_in_dim(cache.positions, positions, cache.length, axis=1),
    segment_ids=lax.dynamic_update_slice_in_dim(cache.segment_ids, segment_ids, cache.length, axis=1),
    length=cache.length + positions.shape[1],
  )


def append_layer(store: jax.Array, new: jax.Array, layer: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
  """One layer's keys or values written.

  Args:
    store: [L, B, KV, C, head_dim].
    new: [B, KV, S, head_dim].
    layer: [] int32.
    slot: [] int32, where the first token goes.

  Returns:
    The store, updated in place where its buffer may be reused, and this layer's part of it [B, KV, C, head_dim].
  """
  zero = jnp.zeros((), jnp.int32)
  store = lax.dynamic_update_slice(store, new[None].astype(store.dtype), (layer, zero, zero, slot, zero))
  return store, lax.dynamic_index_in_dim(store, layer, axis=0, keepdims=False)
