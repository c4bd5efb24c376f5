"""Attention of queries to keys of the same segment that stand before them: whole sequences, and onto a cache."""

from __future__ import annotations

from collections.abc import Sequence
import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from models.attention import blockwise, decode_kernel, splash
from models.attention.backend import AttentionBackend
from models.cache import Stores

# Finite, so that a row of padding (which attends to nothing) has finite outputs and gradients.
MASKED = blockwise.MASKED
RESIDUALS = 'attention_residuals'  # What the rematerialisation policy 'save_attention' keeps.


def visible(
  query_positions: jax.Array,
  query_segments: jax.Array,
  key_positions: jax.Array,
  key_segments: jax.Array,
  window: jax.Array | int | None = None,
) -> jax.Array:
  """Says which keys a query sees: its own segment, not padding, not after it, at most `window` − 1 before it.

  Args:
    query_positions: [B, S] int32. query_segments: [B, S] int32.
    key_positions: [B, C] int32. key_segments: [B, C] int32, 0 = padding.
    window: number of positions that are seen, the query's own included; None: all.

  Returns:
    [B, S, C] bool.
  """
  distance = query_positions[:, :, None] - key_positions[:, None, :]
  seen = (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments > 0)[:, None, :] & (distance >= 0)
  return seen if window is None else seen & (distance < window)


def segment_starts(segment_ids: jax.Array) -> jax.Array:
  """Returns [B, S] int32: the slot in which the run of equal `segment_ids` [B, S] around each slot begins."""
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
) -> jax.Array:
  """Grouped-query softmax attention of whole sequences, their keys included; scores and softmax in float32.

  Tokens of a segment stand in consecutive slots in the order of their positions. States of padding are finite.

  Args:
    backend: the kernel, and the mesh whose devices share the rows.
    query: [B, S, H, head_dim], rotated and scaled. H is a multiple of KV; consecutive heads share keys.
    key: [B, S, KV, head_dim], rotated.
    value: [B, S, KV, head_dim].
    segment_ids: [B, S] int32, 0 = padding.
    starts: [B, S] int32 from `segment_starts`.
    windows: static choices of how many positions are seen, the query's own included; 0: all.
    window_index: [] int32, which of them applies here.
    sampling: rows and heads lie as the sampler has them.
    parents: [B, S] int32, the segment that a token sees beside its own, all of which stands before it; 0: none. None:
      there are none. With parents, there are no windows, and kernels have no gradient.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`.

  Raises:
    ValueError: parents with windows, which are distances in slots here.
  """
  if parents is not None and tuple(windows) != (0,):
    raise ValueError(f'Segments with parents are for layers that see all positions, not windows of {tuple(windows)}.')
  rows, heads = backend.axes(query.shape[0], key.shape[2], sampling)
  by_head, by_row = (rows, None, heads, None), (rows, None)
  function = {'xla': _xla, 'splash': _splash, 'cudnn': _cudnn}[backend.kind]
  run = functools.partial(function, backend, tuple(windows))
  more = () if parents is None else (parents,)
  placed = backend.shard(run, (by_head, by_head, by_head, by_row, by_row, (), *(by_row for _ in more)), by_head)
  return placed(query, key, value, segment_ids, starts, jnp.asarray(window_index, jnp.int32), *more)


def _xla(backend, windows, query, key, value, segment_ids, starts, window_index, parents=None):
  if windows != (0,):
    slots = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    window = jnp.asarray(windows, jnp.int32)[window_index]
    starts = jnp.where(window > 0, jnp.maximum(starts, slots - window + 1), starts)
  above = None if parents is None else (jnp.where(parents > 0, parents, -1), segment_ids)
  return blockwise.attention(query, key, value, starts, backend.tile_bytes, RESIDUALS, above)


def _splash(backend, windows, query, key, value, segment_ids, starts, window_index, parents=None):
  del starts
  attention = functools.partial(splash.attention, residuals=RESIDUALS, interpret=backend.interpret, parents=parents)
  branches = [functools.partial(attention, window=window) for window in windows]
  return _choose(branches, window_index, query, key, value, segment_ids)


def _cudnn(backend, windows, query, key, value, segment_ids, starts, window_index, parents=None):
  """cuDNN's flash attention knows one length per row and no segments: packed rows go through the XLA path."""
  slots = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
  lengths = jnp.sum((segment_ids > 0).astype(jnp.int32), axis=1)
  within = slots < lengths[:, None]
  single = jnp.all((segment_ids > 0) == within) & jnp.all(jnp.where(within, starts, 0) == 0)

  def fused(window, query, key, value):
    # A row of padding alone gets one key, so that its softmax is defined.
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
    return _xla(backend, windows, *arrays, segment_ids, starts, window_index, parents)

  return lax.cond(single, rows_of_one, packed, query, key, value)


def _choose(branches, index, *arrays):
  return branches[0](*arrays) if len(branches) == 1 else lax.switch(index, branches, *arrays)


def in_slots(start: jax.Array, filled: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
  """Returns (positions, segment ids), each [B, C] int32, of the keys in a cache, for `visible`.

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
) -> jax.Array:
  """Attention to stacked caches by `models.attention.decode_kernel`, each device with its own rows and heads."""
  rows, heads = backend.axes(query.shape[0], parts[0][0].keys.shape[2], sampling=True)
  head_dim, width = query.shape[-1], parts[0][0].keys.shape[-1]
  query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))  # With as many zeros as the cache has.
  by_head, stack = (rows, None, heads, None), (None, rows, heads, None, None)
  leaves, tree = jax.tree.flatten(parts)

  def run(query, positions, layer, window, *leaves):
    parts = tree.unflatten(leaves)
    return decode_kernel.attention(query, positions, parts, layer, window, interpret=backend.interpret)

  specs = [(rows,) if leaf.ndim == 1 else stack for leaf in leaves]
  placed = backend.shard(run, (by_head, (rows, None), (), (), *specs), by_head)
  mixed = placed(query, positions, jnp.asarray(layer, jnp.int32), jnp.asarray(window, jnp.int32), *leaves)
  return mixed[..., :head_dim]


def attend(query: jax.Array, *parts: tuple[Stores, jax.Array]) -> jax.Array:
  """Grouped-query softmax attention by the plain formula; scores and softmax in float32.

  Args:
    query: [B, S, H, head_dim], rotated and scaled. H is a multiple of KV; consecutive heads share keys.
    *parts: (a layer's stores from `models.cache.layer_of`, mask [B, S, C] bool from `visible`); the softmax runs over
      the keys of all parts.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`.
  """
  batch, length, heads, head_dim = query.shape
  kv_heads = parts[0][0].keys.shape[1]
  group = heads // kv_heads
  precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

  # All queries that meet the same keys make up one matrix, so that these are plain batched matrix products.
  def product(left: jax.Array, right: jax.Array) -> jax.Array:
    right = right.astype(left.dtype)
    return jnp.einsum('bkmi,bkin->bkmn', left, right, precision=precision, preferred_element_type=jnp.float32)

  # The scale of a key is a factor of its score, that of a value of its weight.
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
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
  ends = np.cumsum([mask.shape[2] for _, mask in parts])[:-1]
  mixed = sum(
    product(scaled(part, held.value_scales).astype(query.dtype), held.values)
    for part, (held, _) in zip(jnp.split(weights, ends, axis=-1), parts, strict=True)
  )
  mixed = mixed.astype(query.dtype).reshape(batch, kv_heads, group, length, head_dim)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)
