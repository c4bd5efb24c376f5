"""Causal attention of whole sequences and to a cache, dispatched to the kernels of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from sdpo_jax.distributed.mesh import FSDP, TENSOR
from sdpo_jax.models.attention import blockwise, decode_kernel, divided, splash
from sdpo_jax.models.attention import prefix as shared_prefix
from sdpo_jax.models.attention.backend import AttentionBackend
from sdpo_jax.models.attention.prefix import Prefix, SoftmaxPart
from sdpo_jax.models.cache import Stores

# Finite, so that a row of padding, which attends to nothing, has finite outputs and gradients.
MASKED = blockwise.MASKED
RESIDUALS = 'attention_residuals'  # Name of the arrays that the rematerialisation policy 'save_attention' saves.


def visible(
  query_positions: jax.Array,
  query_segments: jax.Array,
  key_positions: jax.Array,
  key_segments: jax.Array,
  window: jax.Array | int | None = None,
) -> jax.Array:
  """Return which keys a query sees: those of its segment, up to itself and at most `window` − 1 positions before it.

  Args:
    query_positions: [B, S] int32. query_segments: [B, S] int32.
    key_positions: [B, C] int32. key_segments: [B, C] int32, 0 = padding.
    window: number of visible positions, including the query's own; None: all.

  Returns:
    [B, S, C] bool.
  """
  distance = query_positions[:, :, None] - key_positions[:, None, :]
  seen = (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments > 0)[:, None, :] & (distance >= 0)
  return seen if window is None else seen & (distance < window)


def segment_starts(segment_ids: jax.Array) -> jax.Array:
  """Return [B, S] int32: the first slot of each slot's run of equal `segment_ids` [B, S]."""
  slots = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
  before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  return lax.cummax(jnp.where(segment_ids != before, slots, 0), axis=1)


def attend_whole(
  backend: AttentionBackend,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array,
  starts: jax.Array,
  *,
  windows: Sequence[int] = (0,),
  window_index: jax.Array | int = 0,
  sampling: bool = False,
  parents: jax.Array | None = None,
  prefix: Prefix | None = None,
) -> jax.Array:
  """Compute grouped-query softmax attention of whole sequences to themselves, with float32 scores.

  Tokens of a segment must be in consecutive slots, in the order of their positions. Results for padding are finite.

  Args:
    backend: the kernel, and the mesh over which rows and heads are sharded.
    query: [B, S, H, head_dim], rotated and scaled. H is a multiple of KV; consecutive heads share keys.
    key: [B, S, KV, head_dim], rotated.
    value: [B, S, KV, head_dim].
    segment_ids: [B, S] int32, 0 = padding.
    starts: [B, S] int32 from `segment_starts`.
    windows: static choices of the number of visible positions, including the query's own; 0: all.
    window_index: [] int32, index of the window that applies.
    sampling: whether rows and heads are sharded as in the sampler.
    parents: [B, S] int32, another, earlier segment that a token sees; 0: none. None: no token has one. With parents,
      there are no windows, and the TPU kernel has no gradient.
    prefix: further keys and values to which all tokens attend; None: there are none.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`.

  Raises:
    ValueError: parents with windows, which are distances in slots here, or with a prefix.
  """
  if parents is not None and prefix is not None:
    raise ValueError('Segments with parents are not supported together with a prefix.')
  if parents is not None and tuple(windows) != (0,):
    raise ValueError(f'Segments with parents need layers that see all positions, not windows of {tuple(windows)}.')
  rows, heads = backend.axes(query.shape[0], key.shape[2], sampling)
  by_head, by_row = (rows, None, heads, None), (rows, None)
  function = {'xla': _xla, 'splash': _splash, 'cudnn': _cudnn}[backend.kind]
  more, tree = jax.tree.flatten((parents, prefix))
  travel, axes = _travel(backend, prefix, rows, heads), _prefix_axes(backend, prefix, rows, heads)
  placing = [({2: by_row} | axes)[leaf.ndim] for leaf in more]

  def run(query, key, value, segment_ids, starts, window_index, *more):
    arrays = query, key, value, segment_ids, starts, window_index
    parents, prefix = tree.unflatten(more)
    prefix = prefix if travel else shared_prefix.of_rows(prefix)
    return function(backend, tuple(windows), *arrays, parents, prefix, sampling, travel)

  placed = backend.shard(run, (by_head, by_head, by_head, by_row, by_row, (), *placing), by_head)
  return placed(query, key, value, segment_ids, starts, jnp.asarray(window_index, jnp.int32), *more)


def _prefix_axes(
  backend: AttentionBackend, prefix: Prefix | None, rows: tuple[str, ...] | str | None, heads: str | None
) -> dict[int, tuple[Any, ...]]:
  """Return the mesh axes of a prefix's arrays by their rank, for queries whose rows and heads are sharded like this."""
  if prefix is None:
    return {}
  slots = heads, None, None
  if _travel(backend, prefix, rows, heads) is not None:
    slots = TENSOR if prefix.key.shape[-3] % backend.mesh.shape[TENSOR] == 0 else None, FSDP, None
  return {0: (), 1: (rows,), 2: (rows, None), 3: slots, 4: (None if prefix.index is not None else rows, *slots)}


def _travel(
  backend: AttentionBackend, prefix: Prefix | None, rows: tuple[str, ...] | str | None, heads: str | None
) -> divided.Travel | None:
  """Return how queries are sent to a sharded prefix; None if every device holds the slots that it needs."""
  if prefix is None or not prefix.divided or not backend.divided:
    return None
  axes = (rows,) if isinstance(rows, str) else rows or ()
  return divided.Travel(axes, TENSOR in axes and prefix.key.shape[-3] % backend.mesh.shape[TENSOR] == 0)


def _to_prefix(
  attend: Callable[[jax.Array, Prefix], SoftmaxPart], query: jax.Array, prefix: Prefix, travel: divided.Travel | None
) -> SoftmaxPart:
  return attend(query, prefix) if travel is None else divided.attention(query, prefix, attend, travel)


def _xla(backend, windows, query, key, value, segment_ids, starts, window_index, parents, prefix, sampling, travel):
  del sampling
  if windows != (0,):
    slots = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    window = jnp.asarray(windows, jnp.int32)[window_index]
    starts = jnp.where(window > 0, jnp.maximum(starts, slots - window + 1), starts)
  above = None if parents is None else (jnp.where(parents > 0, parents, -1), segment_ids)
  arguments = query, key, value, starts, backend.tile_bytes, RESIDUALS, above
  if prefix is None:
    return blockwise.attention(*arguments)
  to_prefix = _to_prefix(_plainly(backend), query, prefix, travel)
  return shared_prefix.merged(blockwise.attention(*arguments, normaliser=True), to_prefix)


def _plainly(backend: AttentionBackend) -> Callable[[jax.Array, Prefix], SoftmaxPart]:
  return functools.partial(shared_prefix.attention, tile_bytes=backend.tile_bytes, residuals=RESIDUALS)


def _splash(backend, windows, query, key, value, segment_ids, starts, window_index, parents, prefix, sampling, travel):
  options = dict(residuals=RESIDUALS, interpret=backend.interpret)
  if prefix is None:
    branches = [functools.partial(splash.attention, window=window, parents=parents, **options) for window in windows]
    return _choose(branches, window_index, query, key, value, segment_ids)
  if prefix.trained and not sampling:
    branches = [functools.partial(splash.attention_after, window=window, **options) for window in windows]
    return _choose(branches, window_index, query, key, value, starts, prefix)

  def beside(window, query, key, value, segment_ids, prefix):
    own = splash.attention(query, key, value, segment_ids, window, normaliser=True, **options)
    near = window and prefix.first is not None
    if near and prefix.key.ndim == 3:  # Prefixes of several lengths have no tail in common.
      to_prefix = _plainly(backend)(query, _tail(prefix, window, travel))
    else:
      attend = _plainly(backend) if near else functools.partial(splash.to_prefix, **options)
      to_prefix = _to_prefix(attend, query, prefix, travel)
    return shared_prefix.merged(own, to_prefix)

  branches = [functools.partial(beside, window) for window in windows]
  return _choose(branches, window_index, query, key, value, segment_ids, prefix)


def _tail(prefix: Prefix, window: int, travel: divided.Travel | None) -> Prefix:
  """Return the last slots of a prefix, those that later tokens can see within a window of `window` positions."""
  slots = prefix.key.shape[1] * (1 if travel is None else lax.axis_size(FSDP))
  count = min(max(window - 1, 1), slots)
  begin = (slots if prefix.filled is None else prefix.filled) - count
  first = jnp.maximum(prefix.first - begin, 0)
  if travel is not None:
    return Prefix(*divided.gathered(prefix, begin, count, travel), first)
  if prefix.filled is None:
    return Prefix(prefix.key[:, begin:], prefix.value[:, begin:], first)
  # If fewer than `count` slots are filled, `first` excludes the places before them.
  places = jnp.maximum(begin + jnp.arange(count, dtype=jnp.int32), 0)
  return Prefix(*(jnp.take(array, places, axis=1) for array in (prefix.key, prefix.value)), first)


def _cudnn(backend, windows, query, key, value, segment_ids, starts, window_index, parents, prefix, sampling, travel):
  """Use cuDNN's flash attention for rows of one segment; packed rows, which it does not support, use the XLA path."""
  slots = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
  lengths = jnp.sum((segment_ids > 0).astype(jnp.int32), axis=1)
  within = slots < lengths[:, None]
  single = jnp.all((segment_ids > 0) == within) & jnp.all(jnp.where(within, starts, 0) == 0)

  def fused(window, query, key, value):
    # A row of padding only gets one key, so that its softmax is defined.
    mixed = jax.nn.dot_product_attention(
      query,
      key,
      value,
      scale=1.0,
      is_causal=True,
      query_seq_lengths=jnp.maximum(lengths, 1),
      key_value_seq_lengths=jnp.maximum(lengths, 1),
      local_window_size=(window - 1, 0) if window else None,
      implementation='xla' if backend.interpret else 'cudnn',
    )
    return checkpoint_name(mixed, RESIDUALS)

  def rows_of_one(*arrays):
    return _choose([functools.partial(fused, window) for window in windows], window_index, *arrays)

  def packed(*arrays):
    return _xla(backend, windows, *arrays, segment_ids, starts, window_index, parents, prefix, sampling, travel)

  if prefix is not None:  # cuDNN does not give normalisers with a gradient.
    return packed(query, key, value)
  return lax.cond(single, rows_of_one, packed, query, key, value)


def _choose(branches, index, *arrays):
  return branches[0](*arrays) if len(branches) == 1 else lax.switch(index, branches, *arrays)


def in_slots(start: jax.Array, filled: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
  """Return (positions, segment ids), each [B, C] int32, of the keys in a cache, for `visible`.

  The first `filled` [B] int32 of the `slots` slots of a row hold the positions from `start` [B] int32 on.
  """
  index = jnp.arange(slots, dtype=jnp.int32)[None]
  return start[:, None] + index, (index < filled[:, None]).astype(jnp.int32)


def attend_stacks(
  backend: AttentionBackend,
  query: jax.Array,
  positions: jax.Array,
  parts: Sequence[decode_kernel.Part],
  layer: jax.Array | int,
  window: jax.Array | int,
  prefix: Prefix | None = None,
) -> jax.Array:
  """Compute attention to stacked caches with `decode_kernel`, on each device's shard of rows and heads."""
  rows, heads = backend.axes(query.shape[0], parts[0][0].keys.shape[2], sampling=True)
  head_dim, width = query.shape[-1], parts[0][0].keys.shape[-1]
  travel = _travel(backend, prefix, rows, heads)

  def padded(array: jax.Array) -> jax.Array:  # Like the cache.
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - head_dim)])

  def padded_prefix(prefix: Prefix | None) -> Prefix | None:
    return None if prefix is None else prefix.replace(key=padded(prefix.key), value=padded(prefix.value))

  query = padded(query)
  if travel is not None:
    prefix = padded_prefix(prefix)
  by_head, stack = (rows, None, heads, None), (None, rows, heads, None, None)
  leaves, tree = jax.tree.flatten((parts, prefix))

  def run(query, positions, layer, window, *leaves):
    parts, prefix = tree.unflatten(leaves)
    if travel is None:
      prefix = padded_prefix(shared_prefix.of_rows(prefix))  # Not all that a bank holds.
      return decode_kernel.attention(query, positions, parts, layer, window, prefix, interpret=backend.interpret)
    if prefix.first is None:
      attend = functools.partial(splash.to_prefix, residuals=RESIDUALS, interpret=backend.interpret)
    else:
      attend = _plainly(backend)
    beside = divided.attention(query, prefix, attend, travel)
    return decode_kernel.attention(query, positions, parts, layer, window, beside=beside, interpret=backend.interpret)

  by_rank = {0: (), 1: (rows,), 5: stack} | _prefix_axes(backend, prefix, rows, heads)
  specs = [by_rank[leaf.ndim] for leaf in leaves]
  placed = backend.shard(run, (by_head, (rows, None), (), (), *specs), by_head)
  mixed = placed(query, positions, jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32), *leaves)
  return mixed[..., :head_dim]


def attend(query: jax.Array, *parts: tuple[Stores, jax.Array], prefix: Prefix | None = None) -> jax.Array:
  """Compute grouped-query softmax attention by the plain formula, with float32 scores.

  Args:
    query: [B, S, H, head_dim], rotated and scaled. H is a multiple of KV; consecutive heads share keys.
    *parts: (a layer's stores from `cache.layer_of`, mask [B, S, C] bool from `visible`); the softmax runs
      over the keys of all parts.
    prefix: further keys and values, included in the softmax; None: there are none.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`.
  """
  prefix = shared_prefix.of_rows(prefix)
  batch, length, heads, head_dim = query.shape
  kv_heads = parts[0][0].keys.shape[1]
  group = heads // kv_heads

  # All queries of a row and key head form one matrix, so that these are plain batched matrix products.
  def product(left: jax.Array, right: jax.Array) -> jax.Array:
    right = right.astype(left.dtype)
    if right.ndim == 3 or len(right) == batch:
      return blockwise.product('bkmi,bkin->bkmn' if right.ndim == 4 else 'bkmi,kin->bkmn', left, right)
    # The rows that share a part of `right` form one matrix.
    apart = left.reshape(len(right), -1, *left.shape[1:]).swapaxes(1, 2)
    products = blockwise.product('gkmi,gkin->gkmn', apart.reshape(*right.shape[:2], -1, left.shape[-1]), right)
    return products.reshape(*apart.shape[:-1], -1).swapaxes(1, 2).reshape(*left.shape[:-1], -1)

  # The scale of an int8 key is a factor of its score, and that of a value a factor of its weight.
  def scaled(numbers: jax.Array, scales: jax.Array | None) -> jax.Array:
    return numbers if scales is None else numbers * scales

  by_key = query.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
  by_key = by_key.reshape(batch, kv_heads, group * length, head_dim)
  scores = [
    jnp.where(
      jnp.tile(mask, (1, group, 1))[:, None], scaled(product(by_key, held.keys.swapaxes(2, 3)), held.key_scales), MASKED
    )
    for held, mask in parts
  ]
  values = [(held.values, held.value_scales) for held, _ in parts]
  if prefix is not None:
    to_prefix = product(by_key, prefix.key.swapaxes(-2, -1))
    slot = lax.broadcasted_iota(jnp.int32, to_prefix.shape, 3)
    if prefix.first is not None:
      to_prefix = jnp.where(slot >= jnp.tile(prefix.first, (1, group))[:, None, :, None], to_prefix, MASKED)
    if prefix.filled is not None:
      to_prefix = jnp.where(slot < prefix.filled.reshape(-1, 1, 1, 1), to_prefix, MASKED)
    scores.append(to_prefix)
    values.append((prefix.value, None))
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
  ends = np.cumsum([part.shape[-1] for part in scores])[:-1]
  mixed = sum(
    product(scaled(part, scales).astype(query.dtype), value)
    for part, (value, scales) in zip(jnp.split(weights, ends, axis=-1), values, strict=True)
  )
  mixed = mixed.astype(query.dtype).reshape(batch, kv_heads, group, length, head_dim)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)
