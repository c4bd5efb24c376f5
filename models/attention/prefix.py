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
  """The keys and values of a layer that all rows share, or G of them, each shared by B / G consecutive rows."""

  key: jax.Array  # [KV, P, head_dim], or [G, KV, P, head_dim].
  value: jax.Array  # Likewise.
  # [B, S] int32, the first slot that a query sees; None: each sees all.
  first: jax.Array | None = None
  # Whether the slots are trained; then every kernel that reads them must have a gradient.
  trained: bool = flax.struct.field(pytree_node=False, default=False)
  # [] or [B] int32, the number of leading slots that are filled, or that a row sees; None: all.
  filled: jax.Array | None = None
  # [B] int32, the prefix that each row reads, of any number N in `key` and `value` [N, KV, P, head_dim]; or [B, K], all
  # that it reads, one after the other. See `of_rows`.
  index: jax.Array | None = None
  # Keys and values [KV, slots, head_dim] before those of the index, for all rows.
  before: tuple[jax.Array, jax.Array] | None = None
  # Whether the slots are sharded, so that queries are sent to them (`sdpo_jax.models.attention.divided`).
  divided: bool = flax.struct.field(pytree_node=False, default=False)


def of_rows(prefix: Prefix | None) -> Prefix | None:
  """Return the prefix without an `index`: with a copy for each row of what it reads, [B, KV, P, head_dim]."""
  if prefix is None or prefix.index is None:
    return prefix

  def read(index: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tuple(lax.dynamic_index_in_dim(array, index, keepdims=False) for array in (prefix.key, prefix.value))

  # One row after the other: for a gather, a TPU first copies all N prefixes.
  parts = [lax.map(read, index) for index in (prefix.index.T if prefix.index.ndim == 2 else prefix.index[None])]
  if prefix.before is not None:
    parts.insert(0, tuple(jnp.broadcast_to(array, (len(prefix.index), *array.shape)) for array in prefix.before))
  key, value = (jnp.concatenate(arrays, axis=-2) for arrays in zip(*parts, strict=True))
  return prefix.replace(key=key, value=value, index=None, before=None)


def by_group(attend: Callable[..., Any], query: jax.Array, prefix: Prefix) -> Any:
  """Return attend(query [B / G, …], prefix [KV, P, head_dim]) of all G prefixes, with the rows in one axis again."""

  def apart(array: jax.Array | None) -> jax.Array | None:
    return None if array is None else array.reshape(prefix.key.shape[0], -1, *array.shape[1:])

  grouped = prefix.replace(first=apart(prefix.first), filled=apart(prefix.filled))
  results = jax.vmap(attend)(apart(query), grouped)
  return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), results)


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
  if prefix.key.ndim == 4:
    tile = functools.partial(attention, tile_bytes=tile_bytes // prefix.key.shape[0], residuals=residuals)
    return by_group(tile, query, prefix)
  batch, length, heads, head_dim = query.shape
  kv_heads, slots = prefix.key.shape[:2]
  rows = query.reshape(batch, length, kv_heads, -1, head_dim).transpose(2, 0, 1, 3, 4).reshape(kv_heads, -1, head_dim)
  count = rows.shape[1]
  first = None if prefix.first is None else jnp.repeat(prefix.first.reshape(-1), heads // kv_heads)
  filled = None if prefix.filled is None else jnp.broadcast_to(jnp.atleast_1d(prefix.filled), (batch,))
  filled = None if filled is None else jnp.repeat(filled, count // batch)
  chunk = count
  while chunk > 16 and chunk * 4 * kv_heads * slots > tile_bytes:
    chunk = -(-chunk // 2)
  rows = jnp.pad(rows, ((0, 0), (0, -count % chunk), (0, 0)))
  first, filled = (None if seen is None else jnp.pad(seen, (0, -count % chunk))[None] for seen in (first, filled))
  mixed, normaliser = _attention(chunk, residuals, rows, prefix.key, prefix.value, first, filled)

  def by_row(array: jax.Array) -> jax.Array:
    array = array[:, :count].reshape(kv_heads, batch, length, heads // kv_heads, *array.shape[2:])
    return jnp.moveaxis(array, 0, 2).reshape(batch, length, heads, *array.shape[4:])

  return by_row(mixed), by_row(normaliser)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(chunk, residuals, query, key, value, first, filled):
  """Return output [KV, Q, head_dim] and log-normaliser [KV, Q].

  Arguments: query [KV, Q, head_dim], key and value [KV, P, head_dim], first and filled [1, Q].
  """
  return _forward(chunk, residuals, query, key, value, first, filled)[0]


def _forward(chunk, residuals, query, key, value, first, filled):
  def tile(query, first, filled):
    scores = _seen(product('kqd,kpd->kqp', query, key), first, filled, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = product('kqp,kpd->kqd', weights.astype(value.dtype), value) / total
    return mixed.astype(query.dtype), (top + jnp.log(total))[..., 0]

  done = _by_chunks(lambda nothing, part: (nothing, tile(*part)), None, chunk, query, first, filled)[1]
  mixed, normaliser = (checkpoint_name(array, residuals) for array in done)
  return (mixed, normaliser), (query, key, value, first, filled, mixed, normaliser)


def _backward(chunk, residuals, kept, gradients):
  del residuals
  query, key, value, first, filled, mixed, normaliser = kept

  def tile(query, first, filled, mixed, normaliser, gradient, to_normaliser):
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
  (to_key, to_value), to_query = _by_chunks(step, empty, chunk, query, first, filled, mixed, normaliser, *gradients)
  return to_query, to_key.astype(key.dtype), to_value.astype(value.dtype), None, None


_attention.defvjp(_forward, _backward)


def _seen(scores: jax.Array, first: jax.Array | None, filled: jax.Array | None, unseen: float) -> jax.Array:
  """Return scores [KV, Q, P] with `unseen` for slots before `first` or from `filled` on, [1, Q] each."""
  slot = lax.broadcasted_iota(jnp.int32, scores.shape, 2)
  if first is not None:
    scores = jnp.where(slot >= first[..., None], scores, unseen)
  return scores if filled is None else jnp.where(slot < filled[..., None], scores, unseen)


def _by_chunks(
  step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunk: int, *arrays: jax.Array | None
) -> tuple[Any, Any]:
  """Return lax.scan of step(carry, parts) over chunks of axis 1, with its outputs joined along that axis."""
  if chunk == arrays[0].shape[1]:
    return step(carry, arrays)
  parts = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0), arrays)
  carry, out = lax.scan(step, carry, parts)
  return carry, jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:]), out)
