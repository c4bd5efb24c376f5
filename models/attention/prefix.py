"""Attention to a prefix: keys and values that all rows share, without a copy per row.

A softmax over two sets of keys is the mean of the softmaxes over each, weighted by their normalisers. So attention to a
prefix is computed separately, with all queries of all rows in one matrix, and merged with the attention of each row to
its own keys (`merged`).
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import flax.struct
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from sdpo_jax.models.attention.blockwise import MASKED, product

# (output [B, S, H, head_dim], log-normaliser [B, S, H] float32) of a softmax over some keys.
SoftmaxPart = tuple[jax.Array, jax.Array]


@flax.struct.dataclass
class Prefix:
  """The keys and values of a layer that all rows share."""

  key: jax.Array  # [KV, P, head_dim].
  value: jax.Array  # [KV, P, head_dim].
  # [B, S] int32, the first slot that a query sees; None: each sees all.
  first: jax.Array | None = None
  # Whether the slots are trained; then every kernel that reads them must have a gradient.
  trained: bool = flax.struct.field(pytree_node=False, default=False)
  # [] int32, the number of leading slots that are filled; None: all.
  filled: jax.Array | None = None
  # Whether the slots are sharded, so that queries are sent to them (`sdpo_jax.models.attention.divided`).
  divided: bool = flax.struct.field(pytree_node=False, default=False)


def merged(one: SoftmaxPart, other: SoftmaxPart) -> jax.Array:
  """Return the output of the softmax over the keys of both parts, in the dtype of the first."""
  (left, total), (right, total_right) = one, other
  share = jax.nn.sigmoid(total - total_right)[..., None]
  return (share * left.astype(jnp.float32) + (1 - share) * right.astype(jnp.float32)).astype(left.dtype)


def attention(query: jax.Array, prefix: Prefix, tile_bytes: int, residuals: str) -> SoftmaxPart:
  """Compute grouped-query softmax attention to a prefix, with float32 scores.

  The log-normaliser of a query that sees no slot is so small that its output has no weight in `merged`.

  Args:
    query: [B, S, H, head_dim], scaled. H is a multiple of KV; consecutive heads share keys.
    prefix: keys and values to attend to.
    tile_bytes: approximate bytes of float32 scores held at once.
    residuals: name under which a rematerialisation policy may save output and log-normalisers.
  """
  batch, length, heads, head_dim = query.shape
  kv_heads, slots = prefix.key.shape[:2]
  rows = query.reshape(batch, length, kv_heads, -1, head_dim).transpose(2, 0, 1, 3, 4).reshape(kv_heads, -1, head_dim)
  count = rows.shape[1]
  first = None if prefix.first is None else jnp.repeat(prefix.first.reshape(-1), heads // kv_heads)
  chunk = count
  while chunk > 16 and chunk * 4 * kv_heads * slots > tile_bytes:
    chunk = -(-chunk // 2)
  rows = jnp.pad(rows, ((0, 0), (0, -count % chunk), (0, 0)))
  first = None if first is None else jnp.pad(first, (0, -count % chunk))[None]
  mixed, normaliser = _attention(chunk, residuals, rows, prefix.key, prefix.value, first, prefix.filled)

  def by_row(array: jax.Array) -> jax.Array:
    array = array[:, :count].reshape(kv_heads, batch, length, heads // kv_heads, *array.shape[2:])
    return jnp.moveaxis(array, 0, 2).reshape(batch, length, heads, *array.shape[4:])

  return by_row(mixed), by_row(normaliser)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(chunk, residuals, query, key, value, first, filled):
  """Return output [KV, Q, head_dim] and log-normaliser [KV, Q].

  Arguments: query [KV, Q, head_dim], key and value [KV, P, head_dim], first [1, Q] and filled [].
  """
  return _forward(chunk, residuals, query, key, value, first, filled)[0]


def _forward(chunk, residuals, query, key, value, first, filled):
  def tile(query, first):
    scores = _seen(product('kqd,kpd->kqp', query, key), first, filled, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = product('kqp,kpd->kqd', weights.astype(value.dtype), value) / total
    return mixed.astype(query.dtype), (top + jnp.log(total))[..., 0]

  done = _by_chunks(lambda nothing, part: (nothing, tile(*part)), None, chunk, query, first)[1]
  mixed, normaliser = (checkpoint_name(array, residuals) for array in done)
  return (mixed, normaliser), (query, key, value, first, filled, mixed, normaliser)


def _backward(chunk, residuals, kept, gradients):
  del residuals
  query, key, value, first, filled, mixed, normaliser = kept

  def tile(query, first, mixed, normaliser, gradient, to_normaliser):
    weights = _seen(jnp.exp(product('kqd,kpd->kqp', query, key) - normaliser[..., None]), first, filled, 0.0)
    towards = product('kqd,kpd->kqp', gradient, value)
    mean = jnp.sum(mixed.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
    to_scores = (weights * (towards - (mean - to_normaliser)[..., None])).astype(query.dtype)
    to_query = product('kqp,kpd->kqd', to_scores, key).astype(query.dtype)
    return (
      to_query,
      product('kqp,kqd->kpd', to_scores, query),
      product('kqp,kqd->kpd', weights.astype(value.dtype), gradient),
    )

  def step(sums, part):
    to_query, *more = tile(*part)
    return [old + new for old, new in zip(sums, more, strict=True)], to_query

  empty = [jnp.zeros(array.shape, jnp.float32) for array in (key, value)]
  (to_key, to_value), to_query = _by_chunks(step, empty, chunk, query, first, mixed, normaliser, *gradients)
  return to_query, to_key.astype(key.dtype), to_value.astype(value.dtype), None, None


_attention.defvjp(_forward, _backward)


def _seen(scores: jax.Array, first: jax.Array | None, filled: jax.Array | None, unseen: float) -> jax.Array:
  """Return scores [KV, Q, P] with `unseen` for slots before `first` [1, Q] and for slots that are not `filled` []."""
  slot = lax.broadcasted_iota(jnp.int32, scores.shape, 2)
  if first is not None:
    scores = jnp.where(slot >= first[..., None], scores, unseen)
  return scores if filled is None else jnp.where(slot < filled, scores, unseen)


def _by_chunks(
  step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunk: int, *arrays: jax.Array | None
) -> tuple[Any, Any]:
  """Return lax.scan of step(carry, parts) over chunks of axis 1, with its outputs joined along that axis."""
  if chunk == arrays[0].shape[1]:
    return step(carry, arrays)
  parts = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0), arrays)
  carry, out = lax.scan(step, carry, parts)
  return carry, jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:]), out)
