"""The key-value cache of a decode loop: a carry that is updated in place."""

from __future__ import annotations

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

# A model with at most so many layers is decoded layer by layer from one array each, which saves copying a layer out of
# the stack at every step: half of a step's time where the model is small. Deeper ones are scanned, so that compile time
# does not grow with depth.
SHALLOW = 8

Store = jax.Array | tuple[jax.Array, ...]


@flax.struct.dataclass
class KVCache:
  """Keys (rotated) and values of the tokens seen so far, in compute dtype; all rows append at the same slot.

  Rows of different lengths are told apart by `segment_ids`: slots of padding and slots not yet written hold 0 and are
  never attended to. C slots, L layers.
  """

  keys: Store  # [L, B, KV, C, head_dim]; shallow models: L of [B, KV, head_dim, C], as a CPU's products read them best.
  values: Store  # [L, B, KV, C, head_dim]; shallow models: L of [B, KV, C, head_dim].
  positions: jax.Array  # [B, C] int32.
  segment_ids: jax.Array  # [B, C] int32, 0 = empty or padding.
  length: jax.Array  # [] int32, the next slot.


def init(layers: int, batch_size: int, kv_heads: int, length: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
  """An empty cache of `length` slots for each of `batch_size` rows."""
  if layers <= SHALLOW:
    keys = tuple(jnp.zeros((batch_size, kv_heads, head_dim, length), dtype) for _ in range(layers))
    values = tuple(jnp.zeros((batch_size, kv_heads, length, head_dim), dtype) for _ in range(layers))
  else:
    keys, values = (jnp.zeros((layers, batch_size, kv_heads, length, head_dim), dtype) for _ in range(2))
  return KVCache(
    keys=keys,
    values=values,
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

  shallow = isinstance(cache.keys, tuple)
  return KVCache(
    keys=jax.tree.map(lambda array: copy(array, 0, 3) if shallow else copy(array, 1, 3), cache.keys),
    values=jax.tree.map(lambda array: copy(array, 0, 2) if shallow else copy(array, 1, 3), cache.values),
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


def append_layer(
  keys: Store, values: Store, key: jax.Array, value: jax.Array, layer: jax.Array | int, slot: jax.Array
) -> tuple[Store, Store, jax.Array, jax.Array]:
  """One layer's keys and values written, in place where the buffers may be reused.

  Args:
    keys: as in `KVCache`.
    values: as in `KVCache`.
    key: [B, S, KV, head_dim] of the new tokens.
    value: [B, S, KV, head_dim].
    layer: index of the layer; a Python integer for a shallow model.
    slot: [] int32, where the first token goes.

  Returns:
    The stores, and this layer's keys and values [B, KV, C, head_dim].
  """
  if isinstance(keys, tuple):
    new = key.transpose(0, 2, 3, 1).astype(keys[layer].dtype)
    layer_keys = lax.dynamic_update_slice_in_dim(keys[layer], new, slot, axis=3)
    new = value.swapaxes(1, 2).astype(values[layer].dtype)
    layer_values = lax.dynamic_update_slice_in_dim(values[layer], new, slot, axis=2)
    put = lambda store, array: (*store[:layer], array, *store[layer + 1 :])
    return put(keys, layer_keys), put(values, layer_values), layer_keys.swapaxes(2, 3), layer_values
  zero = jnp.zeros((), jnp.int32)
  put = lambda store, new: lax.dynamic_update_slice(
    store, new.swapaxes(1, 2)[None].astype(store.dtype), (layer, zero, zero, slot, zero)
  )
  keys, values = put(keys, key), put(values, value)
  take = lambda store: lax.dynamic_index_in_dim(store, layer, axis=0, keepdims=False)
  return keys, values, take(keys), take(values)
