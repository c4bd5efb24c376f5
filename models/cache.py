"""The key-value cache of a decode loop: rows of different lengths, and the tokens of the last few decode steps.

A row is a row of the batch; a slot is the place of one token in it.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

# Models with up to this many layers have an array per layer and an unrolled decode step, which need not copy layers out
# of a stack: that would take half of a small model's step. Deeper models are scanned, so that compile time does not
# grow with depth.
SHALLOW = 8

Store = jax.Array | tuple[jax.Array, ...]


@flax.struct.dataclass
class Stores:
  """Keys (rotated) and values of L layers, in compute dtype or as int8 with scales."""

  # Heads may be padded with zeros (`AttentionBackend.cached_dim`).
  keys: Store  # [L, B, KV, C, head_dim]; unstacked: L of [B, KV, head_dim, C], as a CPU's products read them best.
  values: Store  # [L, B, KV, C, head_dim]; unstacked: L of [B, KV, C, head_dim].
  # Scales of int8 keys and values, one per token and head: [L, B, KV, 1, C] float32; unstacked: L of [B, KV, 1, C].
  key_scales: Store | None = None
  value_scales: Store | None = None

  @property
  def stacked(self) -> bool:
    """Whether all layers share one array."""
    return not isinstance(self.keys, tuple)


@flax.struct.dataclass
class Recent:
  """The R slots that the last few decode steps have added to all rows.

  All rows append at the same slot, which is one contiguous write per layer; `commit` later moves the tokens to the ends
  of their rows.
  """

  stores: Stores
  length: jax.Array  # [] int32, slots filled, in every row.


@flax.struct.dataclass
class KVCache:
  """Keys and values of the tokens seen so far, in C slots of each of B rows.

  The token at position p of a row is in its slot p: rows are left-aligned and hold no padding. The tokens in `recent`
  come after these. The stores may have more than B rows, which are unused after `compact`.
  """

  stores: Stores
  lengths: jax.Array  # [B] int32, slots filled.
  recent: Recent | None = None


def init(
  layers: int, batch_size: int, kv_heads: int, length: int, head_dim: int, dtype: jnp.dtype, *, stacked: bool
) -> KVCache:
  """Return an empty cache of `length` slots for each of `batch_size` rows.

  Args:
    layers: L.
    batch_size: B.
    kv_heads: KV.
    length: C.
    head_dim: width of keys and values.
    dtype: dtype of keys and values; int8 adds scales.
    stacked: whether all layers share one array.
  """
  shape = batch_size, kv_heads, length, head_dim
  turned = batch_size, kv_heads, head_dim, length
  scales = batch_size, kv_heads, 1, length

  def make(shape: tuple[int, ...], dtype: jnp.dtype) -> Store:
    return jnp.zeros((layers, *shape), dtype) if stacked else tuple(jnp.zeros(shape, dtype) for _ in range(layers))

  stores = Stores(make(shape if stacked else turned, dtype), make(shape, dtype))
  if dtype == jnp.int8:
    stores = stores.replace(key_scales=make(scales, jnp.float32), value_scales=make(scales, jnp.float32))
  return KVCache(stores, jnp.zeros((batch_size,), jnp.int32))


def slots(cache: KVCache | Recent) -> int:
  """Return the number of slots of a row."""
  return jax.tree.leaves(cache.stores.values)[0].shape[-2]


def store_rows(cache: KVCache) -> int:
  """Return the number of rows of the stores, including unused ones."""
  return jax.tree.leaves(cache.stores.values)[0].shape[-4]


def axes(cache: KVCache) -> KVCache:
  """Return a tree like the cache, with each array's logical axes: 'rows', 'kv_heads' or None."""

  def names(leaf: jax.Array) -> tuple[str | None, ...]:
    leading = {1: ('rows',), 4: ('rows', 'kv_heads'), 5: (None, 'rows', 'kv_heads')}.get(leaf.ndim, ())
    return leading + (None,) * (leaf.ndim - len(leading))

  return jax.tree.map(names, cache)


def commit(cache: KVCache, live: jax.Array) -> KVCache:
  """Return the cache with the recent tokens moved to the ends of their rows; rows that are not `live` become empty.

  Args:
    cache: cache with at least as many free slots in every live row as `recent` has.
    live: [B] bool.
  """
  recent = cache.recent

  def move(row: jax.Array, stores: Stores) -> Stores:
    def put(axis: int, into: jax.Array, new: jax.Array) -> jax.Array:
      return _put_row(into, _row(new, row), row, cache.lengths[row], axis)

    return _by_slots(put, stores, recent.stores)

  # libtpu 0.0.42 confuses the results of a loop here with those of the decode loop before it.
  stores = lax.fori_loop(0, live.shape[0], move, cache.stores, unroll=cache.stores.stacked)
  return KVCache(stores, jnp.where(live, cache.lengths + recent.length, 0))


def copy_rows(into: KVCache, rows: KVCache, source: jax.Array, target: jax.Array, count: jax.Array | int) -> KVCache:
  """Copy row source[i] of `rows` to row target[i] of `into` for i < `count`, as many slots as both caches have.

  Args:
    into: cache to copy to; updated in place if it is donated.
    rows: a cache with the same layers and heads.
    source: [K] int32.
    target: [K] int32.
    count: [] int32, at most K.
  """
  width = min(slots(into), slots(rows))
  source, target = jnp.asarray(source), jnp.asarray(target)

  def move(i: jax.Array, stores: Stores) -> Stores:
    def put(axis: int, into: jax.Array, new: jax.Array) -> jax.Array:
      row = lax.slice_in_dim(_row(new, source[i]), 0, width, axis=axis)
      return _put_row(into, row, target[i], 0, axis)

    return _by_slots(put, stores, rows.stores)

  def put_length(i: jax.Array, lengths: jax.Array) -> jax.Array:
    return lengths.at[target[i]].set(rows.lengths[source[i]])

  return into.replace(
    stores=lax.fori_loop(0, count, move, into.stores), lengths=lax.fori_loop(0, count, put_length, into.lengths)
  )


def compact(cache: KVCache, source: jax.Array) -> KVCache:
  """Return the cache with K rows, row i being the former row source[i]; the stores keep their size.

  Args:
    cache: cache without recent tokens, which should be donated.
    source: [K] int32, each entry its own index or an index from K on.
  """
  source = jnp.asarray(source)

  def move(i: jax.Array, stores: Stores) -> Stores:
    def put(store: jax.Array) -> jax.Array:
      return lax.dynamic_update_slice_in_dim(store, _row(store, source[i]), i, axis=_row_axis(store))

    return jax.tree.map(put, stores)

  return KVCache(lax.fori_loop(0, source.shape[0], move, cache.stores), cache.lengths[source])


def clear(stores: Stores, filled: jax.Array) -> KVCache:
  """Return a cache of what the first slots of each row hold; all others hold zeros.

  Args:
    stores: stores of B rows, updated in place if they are donated.
    filled: [B] int32, slots of each row.
  """

  def cleared(axis: int, store: jax.Array, _: jax.Array) -> jax.Array:
    shape = [1] * store.ndim
    shape[_row_axis(store)], shape[axis] = store.shape[_row_axis(store)], store.shape[axis]
    taken = jnp.arange(store.shape[axis])[None] < filled[:, None]
    return jnp.where(taken.reshape(shape), store, jnp.zeros((), store.dtype))

  return KVCache(_by_slots(cleared, stores, stores), filled)


def with_slots(cache: KVCache, length: int) -> KVCache:
  """Return the cache with `length` slots in every row: padded with empty ones, or cut; no row may hold more."""
  more = length - slots(cache)

  def fit(axis: int, store: jax.Array, _: jax.Array) -> jax.Array:
    if more < 0:
      return lax.slice_in_dim(store, 0, length, axis=axis)
    width = [(0, 0)] * store.ndim
    width[axis] = (0, more)
    return jnp.pad(store, width)

  return cache.replace(stores=_by_slots(fit, cache.stores, cache.stores)) if more else cache


def append_layer(stores: Stores, key: jax.Array, value: jax.Array, layer: jax.Array | int, slot: jax.Array) -> Stores:
  """Return the stores with one layer's new keys and values written, in place if they are donated.

  Args:
    stores: stores of all layers.
    key: [B, S, KV, head_dim] of the new tokens.
    value: [B, S, KV, head_dim].
    layer: index of the layer; a Python integer if the stores are not stacked.
    slot: [] int32, slot of the first token.
  """
  key, value = _widened(key.swapaxes(1, 2), stores), _widened(value.swapaxes(1, 2), stores)
  new = Stores(key, value)
  if stores.key_scales is not None:
    (key, key_scale), (value, value_scale) = quantize(key), quantize(value)
    new = Stores(key, value, key_scale, value_scale)
  if not stores.stacked:
    new = new.replace(keys=new.keys.swapaxes(2, 3))

  def put(axis: int, store: jax.Array, new: jax.Array) -> jax.Array:
    zero = jnp.zeros((), jnp.int32)
    start = [zero] * store.ndim
    start[axis] = slot
    if stores.stacked:
      start[0], new = layer, new[None]
    return lax.dynamic_update_slice(store, new.astype(store.dtype), start)

  if stores.stacked:
    return _by_slots(put, stores, new)
  written = _by_slots(put, _unstacked_layer(stores, layer), new, stacked=False)
  return jax.tree.map(
    lambda store, part: (*store[:layer], part, *store[layer + 1 :]), stores, written, is_leaf=_is_unstacked
  )


def _widened(numbers: jax.Array, stores: Stores) -> jax.Array:
  """Return [..., head_dim] padded with zeros to the width of the stores."""
  room = jax.tree.leaves(stores.values)[0].shape[-1] - numbers.shape[-1]
  return jnp.pad(numbers, ((0, 0),) * (numbers.ndim - 1) + ((0, room),)) if room else numbers


def quantize(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return numbers [B, KV, S, head_dim] as int8, and their scales [B, KV, 1, S] float32, one per token and head."""
  wide = numbers.astype(jnp.float32)
  scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / 127
  whole = jnp.round(wide / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
  return whole, scale.swapaxes(2, 3)


def layer_of(stores: Stores, layer: jax.Array | int) -> Stores:
  """Return one layer's keys and values, each [B, KV, C, head_dim], and scales [B, KV, 1, C]."""
  if stores.stacked:
    return jax.tree.map(lambda store: lax.dynamic_index_in_dim(store, layer, axis=0, keepdims=False), stores)
  only = _unstacked_layer(stores, layer)
  return only.replace(keys=only.keys.swapaxes(2, 3))


def _unstacked_layer(stores: Stores, layer: int) -> Stores:
  return jax.tree.map(lambda store: store[layer], stores, is_leaf=_is_unstacked)


def _is_unstacked(node: object) -> bool:
  return isinstance(node, tuple)


def _by_slots(
  function: Callable[[int, jax.Array, jax.Array], jax.Array], into: Stores, new: Stores, stacked: bool | None = None
) -> Stores:
  """Return stores whose arrays are function(axis of the slots, array of `into`, array of `new`)."""
  stacked = into.stacked if stacked is None else stacked
  at = {'keys': -2 if stacked else -1, 'values': -2, 'key_scales': -1, 'value_scales': -1}

  def apply(name: str) -> Store | None:
    return jax.tree.map(
      lambda one, other: function(one.ndim + at[name], one, other), getattr(into, name), getattr(new, name)
    )

  return Stores(*map(apply, at))


def _row_axis(store: jax.Array) -> int:
  return store.ndim - 4


def _row(store: jax.Array, row: jax.Array) -> jax.Array:
  return lax.dynamic_slice_in_dim(store, row, 1, axis=_row_axis(store))


def _put_row(store: jax.Array, new: jax.Array, row: jax.Array, slot: jax.Array | int, axis: int) -> jax.Array:
  start = [jnp.zeros((), jnp.int32)] * store.ndim
  start[_row_axis(store)], start[axis] = row.astype(jnp.int32), jnp.asarray(slot, jnp.int32)
  return lax.dynamic_update_slice(store, new, start)
