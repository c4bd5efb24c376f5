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

  A group of rows may share what stands before their own tokens: `shared` is a cache of B / n rows, each attended to by
  n consecutive rows, held once and read once for all of them.
  """

  keys: Store  # [L, B, KV, C, head_dim]; unstacked: L of [B, KV, head_dim, C], as a CPU's products read them best.
  values: Store  # [L, B, KV, C, head_dim]; unstacked: L of [B, KV, C, head_dim].
  positions: jax.Array  # [B, C] int32.
  segment_ids: jax.Array  # [B, C] int32, 0 = empty or padding.
  length: jax.Array  # [] int32, the next slot.
  shared: KVCache | None = None  # Only read.


def init(
  layers: int, batch_size: int, kv_heads: int, length: int, head_dim: int, dtype: jnp.dtype, *, stacked: bool
) -> KVCache:
  """An empty cache of `length` slots for each of `batch_size` rows; `stacked`: one array for all layers."""
  if not stacked:
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
  """Every row `repeats` times: rows 0,0,…,1,1,…

  Args:
    cache: what the repeated rows begin with.
    repeats: rows made of one.
    length: slots in all. With it, the rows share `cache` as it is and get slots of their own for the rest; None: they
      get copies, with as many slots as before.

  Raises:
    ValueError: if `length` is less than the cache already has.
  """
  have = slots(cache)
  if length is not None and length < have:
    raise ValueError(f'A cache of {have} slots cannot shrink to {length}.')
  if length is not None and length > have:
    layers, kv_heads, head_dim, dtype = _sizes(cache)
    rows = cache.positions.shape[0] * repeats
    stacked = not isinstance(cache.keys, tuple)
    own = init(layers, rows, kv_heads, length - have, head_dim, dtype, stacked=stacked)
    return own.replace(shared=cache)
  axis = 0 if isinstance(cache.keys, tuple) else 1
  copy = lambda array, axis=0: jnp.repeat(array, repeats, axis=axis)
  return cache.replace(
    keys=jax.tree.map(lambda array: copy(array, axis), cache.keys),
    values=jax.tree.map(lambda array: copy(array, axis), cache.values),
    positions=copy(cache.positions),
    segment_ids=copy(cache.segment_ids),
  )


def slots(cache: KVCache) -> int:
  """Slots of a row, the shared ones included."""
  return sum(part.positions.shape[1] for part in chain(cache))


def chain(cache: KVCache | None) -> list[KVCache]:
  """The cache and those that it shares."""
  return [] if cache is None else [cache, *chain(cache.shared)]


def _sizes(cache: KVCache) -> tuple[int, int, int, jnp.dtype]:
  """(layers, key heads, head_dim, dtype)"""
  if isinstance(cache.values, tuple):
    return len(cache.values), cache.values[0].shape[1], cache.values[0].shape[3], cache.values[0].dtype
  return cache.values.shape[0], cache.values.shape[2], cache.values.shape[4], cache.values.dtype


def append_tokens(cache: KVCache, positions: jax.Array, segment_ids: jax.Array) -> KVCache:
  """Positions and segments of the next S tokens ([B, S] int32) written; keys and values follow layer by layer."""
  return cache.replace(
    positions=lax.dynamic_update_slice_in_dim(cache.positions, positions, cache.length, axis=1),
    segment_ids=lax.dynamic_update_slice_in_dim(cache.segment_ids, segment_ids, cache.length, axis=1),
    length=cache.length + positions.shape[1],
  )


def append_layer(
  keys: Store, values: Store, key: jax.Array, value: jax.Array, layer: jax.Array | int, slot: jax.Array
) -> tuple[Store, Store]:
  """The stores with one layer's new keys and values written, in place where the buffers may be reused.

  Args:
    keys: as in `KVCache`.
    values: as in `KVCache`.
    key: [B, S, KV, head_dim] of the new tokens.
    value: [B, S, KV, head_dim].
    layer: index of the layer; a Python integer where stores are not stacked.
    slot: [] int32, where the first token goes.
  """
  if isinstance(keys, tuple):
    key, value = key.transpose(0, 2, 3, 1).astype(keys[layer].dtype), value.swapaxes(1, 2).astype(values[layer].dtype)
    put = lambda store, new, axis: (
      *store[:layer],
      lax.dynamic_update_slice_in_dim(store[layer], new, slot, axis),
      *store[layer + 1 :],
    )
    return put(keys, key, 3), put(values, value, 2)
  zero = jnp.zeros((), jnp.int32)
  put = lambda store, new: lax.dynamic_update_slice(
    store, new.swapaxes(1, 2)[None].astype(store.dtype), (layer, zero, zero, slot, zero)
  )
  return put(keys, key), put(values, value)


def layer_of(keys: Store, values: Store, layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
  """One layer's keys and values, each [B, KV, C, head_dim]."""
  if isinstance(keys, tuple):
    return keys[layer].swapaxes(2, 3), values[layer]
  take = lambda store: lax.dynamic_index_in_dim(store, layer, axis=0, keepdims=False)
  return take(keys), take(values)
