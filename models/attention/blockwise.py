"""Exact attention of whole sequences in tiles that fit fast memory, with a backward pass that recomputes them.

The plain formula writes the scores [B, H, S, S] several times, and its backward pass stores them. Here a tile of rows
and queries is finished before the next begins, the backward pass needs only the output and the log-normaliser of each
query (Dao et al., FlashAttention, arXiv 2205.14135, §3), and most keys that no query of a tile sees are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
SPANS = 4  # Number of ranges of queries that skip later keys, each compiled separately; four leave 5/8 of the work.


def attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  first: jax.Array,
  tile_bytes: int,
  residuals: str,
  parents: tuple[jax.Array, jax.Array] | None = None,
  *,
  normaliser: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Compute grouped-query softmax attention, where query i sees the slots first[i] … i; scores are float32.

  Args:
    query: [B, S, H, head_dim], scaled. H is a multiple of KV; consecutive heads share keys.
    key: [B, S, KV, head_dim].
    value: [B, S, KV, head_dim].
    first: [B, S] int32, at most the query's own slot.
    tile_bytes: approximate bytes of float32 scores held at once.
    residuals: name under which a rematerialisation policy may save output and log-normalisers.
    parents: (parent of each query, segment of each key), both [B, S] int32: a query also sees the earlier keys whose
      segment is its parent. A parent that is no key's segment means none.
    normaliser: whether to also return the log-normalisers.

  Returns:
    Output [B, S, H, head_dim] in the dtype of `query`, or that and the log-normalisers [B, S, H] float32 of the scores.
  """
  batch, length, heads, head_dim = query.shape
  kv_heads = key.shape[2]
  rows, chunk = _tile(batch, length, heads, tile_bytes)
  padding = -length % chunk
  if padding:
    query, key, value = (jnp.pad(array, ((0, 0), (0, padding), (0, 0), (0, 0))) for array in (query, key, value))
    first, parents = jax.tree.map(lambda array: jnp.pad(array, ((0, 0), (0, padding))), (first, parents))
  by_key = query.reshape(batch, length + padding, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
  parent, segment = parents or (None, None)
  arrays = by_key, key.swapaxes(1, 2), value.swapaxes(1, 2), segment, (first, parent)

  def by_row(array: jax.Array) -> jax.Array:
    return jnp.moveaxis(array, 3, 1).reshape(batch, length + padding, heads, *array.shape[4:])[:, :length]

  function = _attention_and_normaliser if normaliser else _attention
  results = jax.tree.map(by_row, function(rows, chunk, residuals, *arrays))
  return results if normaliser else results[0]


def _tile(batch: int, length: int, heads: int, tile_bytes: int) -> tuple[int, int]:
  """Return (rows, queries) of a tile."""
  per_query = 4 * heads * length
  chunk = length
  while chunk > 16 and chunk * per_query > tile_bytes:
    chunk = -(-chunk // 2)
  most = max(tile_bytes // (chunk * per_query), 1) if chunk == length else 1
  return max(rows for rows in range(1, min(most, batch) + 1) if batch % rows == 0), chunk


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(rows, chunk, residuals, query, key, value, segment, sight):
  """Return ([B, KV, G, S, head_dim],) from query [B, KV, G, S, head_dim], key and value [B, KV, S, head_dim].

  What is visible is given by `segment` [B, S] of the keys, and by `sight` of the queries, (first slot, parent), each
  [B, S]; segments and parents may be None.
  """
  return _forward(rows, chunk, residuals, query, key, value, segment, sight)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention_and_normaliser(rows, chunk, residuals, query, key, value, segment, sight):
  """Return the result of `_attention`, and the log-normalisers [B, KV, G, S]."""
  return _forward_of_both(rows, chunk, residuals, query, key, value, segment, sight)[0]


def _forward(rows, chunk, residuals, query, key, value, segment, sight):
  (mixed, _), kept = _forward_of_both(rows, chunk, residuals, query, key, value, segment, sight)
  return (mixed,), kept


def _forward_of_both(rows, chunk, residuals, query, key, value, segment, sight):
  def tile(key, value, segment, query, sight, slot):
    scores = jnp.where(_seen(sight, segment, slot, query, key), _product('bkqd,bkcd->bkqc', query, key), MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = _product('bkqc,bkcd->bkqd', weights.astype(value.dtype), value) / total
    return mixed.astype(query.dtype).reshape(query.shape), (top + jnp.log(total)).reshape(query.shape[:-1])

  def some_rows(query, key, value, segment, sight):
    pieces = []
    for span in _spans(query.shape[3], chunk):
      keys = _up_to(span[1], key, value, segment)

      def step(nothing, parts, keys=keys):
        return nothing, tile(*keys, *parts)

      pieces.append(_scan(step, None, span, chunk, query, sight)[1])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=3), *pieces)

  done = _by_rows(some_rows, rows, query, key, value, segment, sight)
  mixed, normaliser = (checkpoint_name(array, residuals) for array in done)
  return (mixed, normaliser), (query, key, value, segment, sight, mixed, normaliser)


def _backward(rows, chunk, residuals, kept, gradients):
  del residuals
  query, key, value, segment, sight, mixed, normaliser = kept

  def tile(key, value, segment, query, sight, slot, mixed, normaliser, gradient, to_normaliser=None):
    scores = _product('bkqd,bkcd->bkqc', query, key)
    weights = jnp.exp(scores - _flatten(normaliser[..., None]))
    weights = jnp.where(_seen(sight, segment, slot, query, key), weights, 0.0)
    towards = _product('bkqd,bkcd->bkqc', gradient, value)
    mean = jnp.sum(_flatten(mixed).astype(jnp.float32) * _flatten(gradient).astype(jnp.float32), axis=-1, keepdims=True)
    if to_normaliser is not None:
      mean = mean - _flatten(to_normaliser[..., None])
    to_scores = (weights * (towards - mean)).astype(query.dtype)
    to_query = _product('bkqc,bkcd->bkqd', to_scores, key).astype(query.dtype).reshape(query.shape)
    to_key = _product('bkqc,bkqd->bkcd', to_scores, query)
    to_value = _product('bkqc,bkqd->bkcd', weights.astype(value.dtype), gradient)
    return to_query, to_key, to_value

  def some_rows(query, key, value, segment, *parts):
    to_query, sums = [], []
    for span in _spans(query.shape[3], chunk):
      keys = _up_to(span[1], key, value, segment)

      def step(sums, parts, keys=keys):
        to_query, *more = tile(*keys, *parts)
        return more if sums is None else [old + new for old, new in zip(sums, more, strict=True)], to_query

      empty = None if span[1] - span[0] == chunk else [jnp.zeros(array.shape, jnp.float32) for array in keys[:2]]
      more, part = _scan(step, empty, span, chunk, query, *parts)
      to_query.append(part)
      sums = [
        new if old is None else new.at[:, :, : old.shape[2]].add(old)
        for old, new in zip(sums or (None, None), more, strict=True)
      ]
    return jnp.concatenate(to_query, axis=3), sums[0].astype(key.dtype), sums[1].astype(value.dtype)

  return *_by_rows(some_rows, rows, query, key, value, segment, sight, mixed, normaliser, *gradients), None, None


_attention.defvjp(_forward, _backward)
_attention_and_normaliser.defvjp(_forward_of_both, _backward)


def _up_to(end: int, key: jax.Array, value: jax.Array, segment: jax.Array | None) -> list[jax.Array | None]:
  """Return the keys, values and segments of the slots before `end`."""
  return [key[:, :, :end], value[:, :, :end], None if segment is None else segment[:, :end]]


def _seen(
  sight: tuple[jax.Array, jax.Array | None],
  segment: jax.Array | None,
  slot: jax.Array,
  query: jax.Array,
  key: jax.Array,
) -> jax.Array:
  """Return [B, 1, G · Q, C] bool: which key slots each query sees.

  They are the slots from first [B, Q] to slot [Q], and those whose segment [B, C] is the query's parent [B, Q].
  """
  first, parent = sight
  # A single unsigned comparison checks both ends: this runs for every score.
  reach = (slot[None] - first).astype(jnp.uint32)

  def grouped(array: jax.Array) -> jax.Array:
    return jnp.tile(array, (1, query.shape[2]))[:, None, :, None]

  place = lax.broadcasted_iota(jnp.int32, (1, 1, 1, key.shape[2]), 3)
  own = (place - grouped(first)).astype(jnp.uint32) <= grouped(reach)
  return own if segment is None else own | (grouped(parent) == segment[:, None, None, :])


def _product(formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
  """Return an einsum accumulated in float32, whose operands have their group and query axes joined (`_flatten`)."""
  return product(formula, _flatten(left), _flatten(right))


def product(formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
  """Return a product accumulated in float32."""
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  return jnp.einsum(formula, left, right, precision=precision, preferred_element_type=jnp.float32)


def _flatten(array: jax.Array) -> jax.Array:
  """Join the axes between the first two and the last: [B, KV, G, S, D] to [B, KV, G · S, D]."""
  return array.reshape(*array.shape[:2], -1, array.shape[-1])


def _spans(length: int, chunk: int) -> list[tuple[int, int]]:
  """Return (first query, end) of at most SPANS ranges of about equal length."""
  chunks = length // chunk
  edges = sorted({chunks * i // SPANS * chunk for i in range(SPANS + 1)})
  return list(zip(edges, edges[1:], strict=False))


def _scan(
  step: Callable, carry: Any, span: tuple[int, int], chunk: int, query: jax.Array, sight: Any, *more: jax.Array
) -> tuple[Any, Any]:
  """Scan step(carry, (query, sight, slot, *more)) over the chunks of a span, and join its outputs along axis 3."""
  start, end = span
  parts = [query[:, :, :, start:end], jax.tree.map(lambda array: array[:, start:end], sight)]
  parts += [jnp.arange(start, end, dtype=jnp.int32), *(array[:, :, :, start:end] for array in more)]
  if end - start == chunk:
    return step(carry, parts)
  axes = [3, 1, 0, *(3 for _ in more)]

  def cut(array: jax.Array, axis: int) -> jax.Array:
    chunks = array.reshape(*array.shape[:axis], -1, chunk, *array.shape[axis + 1 :])
    return jnp.moveaxis(chunks, axis, 0)

  def join(chunks: jax.Array) -> jax.Array:
    array = jnp.moveaxis(chunks, 0, 3)
    return array.reshape(*array.shape[:3], -1, *array.shape[5:])

  chunks = [jax.tree.map(functools.partial(cut, axis=axis), part) for part, axis in zip(parts, axes, strict=True)]
  carry, out = lax.scan(step, carry, chunks)
  return carry, jax.tree.map(join, out)


def _by_rows(function: Callable, rows: int, *arrays: Any) -> Sequence[jax.Array]:
  """Return function(*arrays), computed `rows` rows of the batch at a time."""
  if rows == arrays[0].shape[0]:
    return function(*arrays)
  tiles = jax.tree.map(lambda array: array.reshape(-1, rows, *array.shape[1:]), arrays)
  done = lax.map(lambda tile: function(*tile), tiles)
  return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), done)
