"""Attention of queries to keys of the same segment that stand before them: one function, several lowerings to come."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

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
    key_positions: [B, C] int32. key_segments: [B, C] int32, 0 = padding.
    window: number of positions that are seen, the query's own included; None: all.

  Returns:
    [B, S, C] bool.
  """
  distance = query_positions[:, :, None] - key_positions[:, None, :]
  seen = (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments > 0)[:, None, :] & (distance >= 0)
  return seen if window is None else seen & (distance < window)


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
  """Grouped-query softmax attention; scores and softmax in float32.

  Args:
    query: [B, S, H, head_dim], rotated. H is a multiple of KV; consecutive heads share keys.
    keys: [B, KV, C, head_dim], rotated.
    values: [B, KV, C, head_dim].
    mask: [B, S, C] bool from `visible`.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`.
  """
  batch, length, heads, head_dim = query.shape
  kv_heads = keys.shape[1]
  group = heads // kv_heads
  precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
  # Queries that share keys become rows of one matrix, so that the products are plain batched matrix products.
  rows = query.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
  rows = rows.reshape(batch, kv_heads, group * length, head_dim)
  scores = jnp.einsum('bkrd,bkcd->bkrc', rows, keys, precision=precision, preferred_element_type=jnp.float32)
  scores = scores.reshape(batch, kv_heads, group, length, -1) * head_dim**-0.5
  weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1).astype(query.dtype)
  weights = weights.reshape(batch, kv_heads, group * length, -1)
  mixed = jnp.einsum('bkrc,bkcd->bkrd', weights, values, precision=precision, preferred_element_type=jnp.float32)
  mixed = mixed.astype(query.dtype).reshape(batch, kv_heads, group, length, head_dim)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)
