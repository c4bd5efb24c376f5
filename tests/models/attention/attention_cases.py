"""Rows, tensors and backends for tests of attention, and the plain formula with a prefix in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.models.attention import dispatch
from sdpo_jax.models.attention.backend import AttentionBackend

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
# Segment ids of rows of 40 slots: packed with padding between and behind, one segment, nothing at all, full.
PACKED = np.stack(
  [
    np.repeat([1, 2, 0, 7, 0], [5, 11, 2, 14, 8]),
    np.repeat([1, 0], [33, 7]),
    np.repeat([0], [40]),
    np.repeat([1, 2, 3], [1, 20, 19]),
  ]
).astype(np.int32)
SINGLE = np.stack([np.repeat([1, 0], [n, 40 - n]) for n in (33, 40, 1, 0)]).astype(np.int32)
XLA = {
  'one tile': AttentionBackend(tile_bytes=2**30),
  'several rows a tile': AttentionBackend(tile_bytes=2 * HEADS * 40 * 40 * 4),
  'chunks of queries': AttentionBackend(tile_bytes=HEADS * 40 * 10 * 4),
  'chunks that do not divide the sequence': AttentionBackend(tile_bytes=HEADS * 40 * 16 * 4),
}
KERNELS = {'splash': AttentionBackend('splash', interpret=True), 'cudnn': AttentionBackend('cudnn', interpret=True)}
SLOTS = 21


def tensors(rows, length, seed=0, heads=HEADS, kv_heads=KV_HEADS):
  """Return random queries, keys and values [B, S, heads, head_dim]."""
  generator = np.random.default_rng(seed)

  def draw(count):
    return generator.standard_normal((rows, length, count, HEAD_DIM)).astype(np.float32)

  return draw(heads), draw(kv_heads), draw(kv_heads)


def whole(backend, query, key, value, segment_ids, windows=(0,), window_index=0, **options):
  """Return the attention of whole sequences by a backend."""
  starts = dispatch.segment_starts(segment_ids)
  return dispatch.attend_whole(
    backend, query, key, value, segment_ids, starts, windows=windows, window_index=window_index, **options
  )


def shared(seed=5):
  """Return random keys and values [KV, P, head_dim] of a prefix."""
  draw = np.random.default_rng(seed)
  return [draw.standard_normal((KV_HEADS, SLOTS, HEAD_DIM)).astype(np.float32) for _ in range(2)]


def starts(segments):
  """Return the first slot of each slot's segment, as a NumPy array."""
  with jax.ensure_compile_time_eval():
    return np.asarray(dispatch.segment_starts(jnp.asarray(segments)))


def first_slots(segments, window):
  """Return [B, S]: the first slot of the prefix within each token's window; positions continue after the prefix."""
  positions = np.arange(segments.shape[1]) - starts(segments)
  return np.maximum(SLOTS + positions - window + 1, 0).astype(np.int32)


def plain(query, key, value, shared_key, shared_value, segments, window, within):
  """Return the formula in float64, token by token; 0 for padding."""
  out = np.zeros(query.shape)
  group = query.shape[2] // key.shape[2]
  for row, slot in np.argwhere(segments > 0):
    own = [i for i in range(slot + 1) if segments[row, i] == segments[row, slot]]
    position = len(own) - 1
    own = own[-window:] if window else own
    before = [p for p in range(SLOTS) if not (window and within) or SLOTS + position - p < window]
    for head in range(query.shape[2]):
      at = head // group
      keys = np.concatenate([shared_key[at, before], key[row, own, at]]).astype(np.float64)
      values = np.concatenate([shared_value[at, before], value[row, own, at]]).astype(np.float64)
      scores = keys @ np.float64(query[row, slot, head])
      weights = np.exp(scores - scores.max())
      out[row, slot, head] = weights @ values / weights.sum()
  return out
