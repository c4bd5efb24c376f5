"""The key-value cache of a decode loop: rows of their own lengths, and what a few steps in a row have added to them."""

from __future__ import annotations

from collections.abc import Callable

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
class Recent:
  """Keys and values of the last few tokens of all rows, laid out as in `KVCache`, with R slots instead of C.

  All rows append at the same slot, which is one contiguous write a layer; where a row's own tokens end is looked up
  only once for all of them, by `settle`.
  """

  keys: Store
  values: Store
  length: jax.Array  # [] int32, slots filled, in every row.


@flax.struct.dataclass
class KVCache:
  """Keys (rotated) and values of the tokens seen so far, in compute dtype: C slots, L layers.

  The token at position p of a row lies in its slot p: rows are left-aligned and hold no padding. The tokens in `recent`
  follow those here.
  """

  keys: Store  # [L, B, KV, C, head_dim]; unstacked: L of [B, KV, head_dim, C], as a CPU's products read them best.
  values: Store  # [L, B, KV, C, head_dim]; unstacked: L of [B, KV, C, head_dim].
  lengths: jax.Array  # [B] int32, slots filled.
  recent: Recent | None = None


def init(
  layers: int, batch_size: int, kv_heads: int, length: int, head_dim: int, dtype: jnp.dtype, *, stacked: bool
) -> KVCache:
  """An empty cache of `length` slots for each of `batch_size` rows; `stacked`: one array for all layers."""
  if not stacked:
    keys = tuple(jnp.zeros((batch_size, kv_heads, head_dim, length), dtype) for _ in range(layers))
    values = tuple(jnp.zeros((batch_size, kv_heads, length, head_dim), dtype) for _ in range(layers))
  else:
    keys, values = (jnp.zeros((layers, batch_size, kv_heads, length, head_dim), dtype) for _ in range(2))
  return KVCache(keys=keys, values=values, lengths=jnp.zeros((batch_size,), jnp.int32))


def slots(cache: KVCache | Recent) -> int:
  """Slots of a row."""
  return jax.tree.leaves(cache.values)[0].shape[-2]


def axes(cache: KVCache) -> KVCache:
  """For every array the logical axes of its dimensions ('rows', 'kv_heads' or None), in the form of the cache."""
  name = lambda leaf: {1: ('rows',), 4: ('rows', 'kv_heads'), 5: (None, 'rows', 'kv_heads')}.get(leaf.ndim, ())
  return jax.tree.map(lambda leaf: name(leaf) + (None,) * (leaf.ndim - len(name(leaf))), cache)


def settle(cache: KVCache, live: jax.Array) -> KVCache:
  """The cache with its recent tokens behind those of each row, and no `recent`; rows that are not `live` are empty.

  Args:
    cache: with at least as many slots left in every live row as `recent` has.
    live: [B] bool.
  """
  recent = cache.recent

  def move(row: jax.Array, stores: tuple[Store, Store]) -> tuple[Store, Store]:
    put = lambda axis: lambda into, new: _put_row(into, _row(into, new, row), row, cache.lengths[row], axis)
    return _by_slots(put, stores, (recent.keys, recent.values))

  keys, values = lax.fori_loop(0, live.shape[0], move, (cache.keys, cache.values))
  return KVCache(keys=keys, values=values, lengths=jnp.where(live, cache.lengths + recent.length, 0))


def copy_rows(into: KVCache, rows: KVCache, source: jax.Array, target: jax.Array, count: jax.Array | int) -> KVCache:
  """Row source[i] of `rows` becomes row target[i] of `into`, for i below `count`; slots that `into` has not are left out.

  Args:
    into: updated in place where its buffers may be reused.
    rows: of as many layers and heads.
    source: [K] int32.
    target: [K] int32.
    count: [] int32, at most K.
  """
  width = min(slots(into), slots(rows))

  def move(i: jax.Array, stores: tuple[Store, Store]) -> tuple[Store, Store]:
    def put(axis: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
      cut = lambda row: lax.slice_in_dim(row, 0, width, axis=axis + row.ndim)
      return lambda into, new: _put_row(into, cut(_row(into, new, source[i])), target[i], 0, axis)

    return _by_slots(put, stores, (rows.keys, rows.values))

  source, target = jnp.asarray(source), jnp.asarray(target)
  keys, values = lax.fori_loop(0, count, move, (into.keys, into.values))
  lengths = lax.fori_loop(0, count, lambda i, lengths: lengths.at[target[i]].set(rows.lengths[source[i]]), into.lengths)
  return into.replace(keys=keys, values=values, lengths=lengths)


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


def _by_slots(function: Callable, into: tuple[Store, Store], new: tuple[Store, Store]) -> tuple[Store, Store]:
  """`function(axis of the slots, from the end)` of every array of keys and values in `into` and `new`."""
  key_axis = -1 if isinstance(into[0], tuple) else -2
  return (
    jax.tree.map(function(key_axis), into[0], new[0]),
    jax.tree.map(function(-2), into[1], new[1]),
  )


def _row_axis(store: jax.Array) -> int:
  return store.ndim - 4


def _row(into: jax.Array, store: jax.Array, row: jax.Array) -> jax.Array:
  return lax.dynamic_slice_in_dim(store, row, 1, axis=_row_axis(store)).astype(into.dtype)


def _put_row(store: jax.Array, new: jax.Array, row: jax.Array, slot: jax.Array | int, axis: int) -> jax.Array:
  zero = jnp.zeros((), jnp.int32)
  start = [zero] * store.ndim
  start[_row_axis(store)], start[axis] = row.astype(jnp.int32), jnp.asarray(slot, jnp.int32)
  return lax.dynamic_update_slice(store, new, start)
