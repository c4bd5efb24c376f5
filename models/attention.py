"""Attention of queries to keys of the same segment that stand before them: one function, several lowerings to come."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# Finite, so that a row of padding (which attends to nothing) has finite outputs and gradients.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def visible(
  query_positions: jax.Array,
  query_segments: jax.Array,
  key_positions: jax.Array,
  key_segments: jax.Array,
  window: jax.Array | int | None = None,
) -> jax.Array:
  """Which keys a query sees: its own segment, not padding, not after it, at most `window` − 1 before it.

  Args:
    query_positions: [B, S] int32. query_segments: [B, S] int32.
    key_positions: [R, C] int32. key_segments: [R, C] int32, 0 = padding. B / R consecutive rows look at the same keys.
    window: number of positions that are seen, the query's own included; None: all.

  Returns:
    [B, S, C] bool.
  """
  repeats = query_positions.shape[0] // key_positions.shape[0]
  if repeats > 1:
    key_positions, key_segments = (jnp.repeat(array, repeats, axis=0) for array in (key_positions, key_segments))
  distance = query_positions[:, :, None] - key_positions[:, None, :]
  seen = (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments > 0)[:, None, :] & (distance >= 0)
  return seen if window is None else seen & (distance < window)


def attend(query: jax.Array, *parts: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
  """Grouped-query softmax attention; scores and softmax in float32.

  Args:
    query: [B, S, H, head_dim], rotated. H is a multiple of KV; consecutive heads share keys.
    *parts: (keys [R, KV, C, head_dim], values [R, KV, C, head_dim], mask [B, S, C] bool from `visible`); the softmax
      runs over the keys of all parts. B is a multiple of R; B / R consecutive rows share the keys of a row.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`.
  """
  batch, length, heads, head_dim = query.shape
  kv_heads = parts[0][0].shape[1]
  group = heads // kv_heads
  by_key = query.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
  scores = [
    jnp.where(mask[:, None, None], _per_row(by_key, keys.swapaxes(2, 3)) * head_dim**-0.5, MASKED)
    for keys, _, mask in parts
  ]
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(query.dtype)
  ends = np.cumsum([keys.shape[2] for keys, _, _ in parts])[:-1]
  mixed = sum(
    _per_row(part, values) for part, (_, values, _) in zip(jnp.split(weights, ends, axis=-1), parts, strict=True)
  )
  return mixed.astype(query.dtype).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)


def _per_row(left: jax.Array, right: jax.Array) -> jax.Array:
  """[B, KV, G, S, M] times [R, KV, M, N], B / R consecutive rows with the same matrix: [B, KV, G, S, N] float32."""
  batch, kv_heads, group, length, inner = left.shape
  shared = right.shape[0]
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  # All that meets the same matrix becomes rows of one, so that these are plain batched matrix products.
  rows = left.reshape(shared, batch // shared, kv_heads, group * length, inner).swapaxes(1, 2)
  rows = rows.reshape(shared, kv_heads, -1, inner)
  product = jnp.einsum('rkmi,rkin->rkmn', rows, right, precision=precision, preferred_element_type=jnp.float32)
  product = product.reshape(shared, kv_heads, batch // shared, group, length, -1).swapaxes(1, 2)
  return product.reshape(batch, kv_heads, group, length, -1)
