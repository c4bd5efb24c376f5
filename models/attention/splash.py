"""Splash attention, JAX's block-sparse flash attention for TPUs, on rows with segments, windows and prefixes."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, ClassVar

import jax
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
import jax.numpy as jnp
import numpy as np

from sdpo_jax.models.attention.prefix import Prefix, SoftmaxPart, by_group, merged

LANES = 128
# Larger blocks are faster (1024: 6.2 ms forward, 18.6 backward for S = 10 240 and 32 heads, by compiled schedules).
BLOCKS = (1024, 512, 256, 128)
COMPUTE_BLOCK = 512
TO_PREFIX = 'to_prefix'  # Scope in a compiled program that marks the kernels whose queries see all keys.


def attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array,
  window: int,
  *,
  residuals: str,
  interpret: bool = False,
  parents: jax.Array | None = None,
  normaliser: bool = False,
) -> jax.Array | SoftmaxPart:
  """Compute causal grouped-query softmax attention within segments, with float32 scores.

  Args:
    query: [B, S, H, head_dim], scaled.
    key: [B, S, KV, head_dim].
    value: [B, S, KV, head_dim].
    segment_ids: [B, S] int32; tokens of a segment occupy consecutive slots.
    window: number of visible slots, including the query's own; 0: all. Static.
    residuals: name under which a rematerialisation policy may save output and log-normalisers.
    interpret: run without a TPU.
    parents: [B, S] int32, another, earlier segment that a query sees; 0: none. It excludes gradients and a window.
    normaliser: whether to also return the log-normalisers; it excludes gradients and parents.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`, or that and the log-normalisers [B, S, H].
  """
  length, heads = query.shape[1:3]
  block = block_size(length)
  room = -length % block
  arrays = [_widened(array, room) for array in (query, key, value)]
  segment_ids, parents = jax.tree.map(lambda ids: jnp.pad(ids, ((0, 0), (0, room))), (segment_ids, parents))
  mask = masks.LocalMask((length + room,) * 2, (window - 1, 0), 0) if window else masks.CausalMask((length + room,) * 2)
  splash = _splash(mask, heads, (block, block), residuals, interpret)

  def to_segments(query_segments, **options):
    """Return the kernel's results with queries that see the segment `query_segments`."""
    return _by_row(splash(**options), *arrays, query_segments, segment_ids)

  if normaliser:
    mixed, (total,) = to_segments(segment_ids, save_residuals=True)
    return _narrowed(mixed, query), total.swapaxes(1, 2)[:, :length]

  def to_parents_too():
    own, (total,) = to_segments(segment_ids, save_residuals=True)
    # No key has segment −1: without a parent the log-normaliser is so small that this result has no weight.
    above, (total_above,) = to_segments(jnp.where(parents > 0, parents, -1), save_residuals=True)
    return merged((own, total), (above, total_above))

  to_own = functools.partial(to_segments, segment_ids)
  # Most batches have no parents, and then need only one pass.
  mixed = to_own() if parents is None else lax.cond(jnp.any(parents > 0), to_parents_too, to_own)
  return _narrowed(mixed, query)


def attention_after(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  starts: jax.Array,
  prefix: Prefix,
  *,
  window: int,
  residuals: str,
  interpret: bool = False,
) -> jax.Array:
  """Compute causal attention of segments to themselves and to a prefix, with gradients to both.

  The kernel reads one array of keys per row, so that the prefix is copied before the keys of each row.

  Args:
    query: as in `attention`.
    key: [B, S, KV, head_dim].
    value: [B, S, KV, head_dim].
    starts: [B, S] int32, the slot in which each token's segment begins.
    prefix: the prefix, of which all filled slots are visible, or only those within the window if it has `first`; then
      all are filled.
    window: number of visible slots; 0: all.
    residuals: as in `attention`.
    interpret: run without a TPU.

  Raises:
    ValueError: the slots of prefix and row are more than a mask can tell apart.
  """
  rows, length, heads = query.shape[:3]
  slots = prefix.key.shape[-2]
  if slots + length > 1 << _After.BITS:
    raise ValueError(f'{slots} slots before rows of {length} tokens exceed {1 << _After.BITS}, the most of a mask.')
  block, key_block = block_size(length), block_size(slots + length)
  room, key_room = -length % block, -(slots + length) % key_block

  def behind(shared: jax.Array, own: jax.Array) -> jax.Array:
    shared = (shared if shared.ndim == 4 else shared[None]).swapaxes(1, 2).astype(own.dtype)
    laid = jnp.repeat(shared, rows // len(shared), axis=0)
    return _widened(jnp.concatenate([laid, own], axis=1), key_room)

  seen = None
  if prefix.filled is not None:
    place = jnp.arange(slots + length + key_room, dtype=jnp.int32)[None]
    seen = (place < jnp.reshape(prefix.filled, (-1, 1))) | (place >= slots)
    seen = jnp.broadcast_to(seen, (rows, place.shape[1])).astype(jnp.int32)
  mask = _After((length + room, slots + length + key_room), slots, window, prefix.first is not None)
  sights = jnp.pad(mask.sight(starts, lax.broadcasted_iota(jnp.int32, starts.shape, 1)), ((0, 0), (0, room)))
  made = _splash(mask, heads, (block, key_block), residuals, interpret)()

  def of_row(query, key, value, sight, seen):
    infos = (info._replace(q_sequence=sight) for info in (made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info))
    segments = None if seen is None else kernel.SegmentIds(jnp.ones_like(sight), seen)
    return kernel.SplashAttentionKernel(*infos, **made.kwargs)(query, key, value, segments)

  arrays = _widened(query, room), behind(prefix.key, key), behind(prefix.value, value)
  return _narrowed(jax.vmap(of_row)(*arrays, sights, seen), query)


@dataclasses.dataclass(frozen=True)
class _After(masks.Mask):
  """The mask of segments after a prefix: queries see all of its slots, or only those in the window.

  The kernel knows of a query one number, its `sight`; where segments begin is known only when it runs. The mask itself
  is what queries of any segments can see.
  """

  BITS: ClassVar[int] = 16

  size: tuple[int, int]
  slots: int
  window: int
  within: bool

  @property
  def shape(self) -> tuple[int, int]:
    return self.size

  @property
  def q_sequence(self) -> np.ndarray:
    return self.sight(0, np.arange(self.size[0], dtype=np.int32))

  def sight(self, start: Any, slot: Any) -> Any:
    """Return the number of queries in the slots `slot` of a row, of segments that begin in `start`."""
    return ((self.slots + start) << self.BITS) | (self.slots + slot)

  def mask_function(self, sight: Any, column: Any) -> Any:
    """Return whether queries see the keys in `column`; called in the kernel."""
    first, last = (sight >> self.BITS) & ((1 << self.BITS) - 1), sight & ((1 << self.BITS) - 1)
    own, before = (column >= first) & (column <= last), column < self.slots
    if self.window:
      own &= column > last - self.window
    if self.window and self.within:
      before &= column > last - first + self.slots - self.window
    return own | before

  def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
    rows, columns = (np.arange(size)[part] for size, part in zip(self.size, index, strict=True))
    distance = rows[:, None] + self.slots - columns[None]
    seen = (distance >= 0) & ((distance < self.window) | (self.window == 0))
    return seen | (columns < self.slots)[None]


def to_prefix(query: jax.Array, prefix: Prefix, *, residuals: str, interpret: bool = False) -> SoftmaxPart:
  """Compute attention of all tokens of all rows to the whole prefix, without a gradient.

  Args:
    query: [B, S, H, head_dim], scaled.
    prefix: the prefix, of which all filled slots are visible to a row, or none.
    residuals: as in `attention`.
    interpret: run without a TPU.
  """
  if prefix.key.ndim == 4:
    return by_group(functools.partial(to_prefix, residuals=residuals, interpret=interpret), query, prefix)
  rows, length, heads, head_dim = query.shape
  slots = prefix.key.shape[1]
  block, key_block = block_size(rows * length), block_size(slots)
  room, key_room = -(rows * length) % block, -slots % key_block
  one_row = query.reshape(1, rows * length, heads, head_dim)
  arrays = (
    _widened(one_row, room),
    *(_widened(array.swapaxes(0, 1)[None].astype(query.dtype), key_room) for array in (prefix.key, prefix.value)),
  )
  mask = masks.FullMask((rows * length + room, slots + key_room))
  splash = _splash(mask, heads, (block, key_block), residuals, interpret)
  filled = jnp.asarray(slots if prefix.filled is None else jnp.minimum(prefix.filled, slots))
  key_segments = (jnp.arange(slots + key_room, dtype=jnp.int32) < jnp.max(filled)).astype(jnp.int32)[None]
  # No key has segment 2.
  of_rows = jnp.broadcast_to(jnp.where(filled > 0, 1, 2), (rows,)).astype(jnp.int32)
  query_segments = jnp.pad(jnp.repeat(of_rows, length)[None], ((0, 0), (0, room)))
  with jax.named_scope(TO_PREFIX):
    mixed, (total,) = _by_row(splash(save_residuals=True), *arrays, query_segments, key_segments)
  total = total.swapaxes(1, 2)[:, : rows * length].reshape(rows, length, heads)
  return _narrowed(mixed, one_row).reshape(query.shape), total


def _splash(
  mask: masks.Mask, heads: int, blocks: tuple[int, int], residuals: str, interpret: bool
) -> Callable[..., Callable[..., Any]]:
  """Return a factory of kernels, which takes `save_residuals`; `blocks` are the block sizes of queries and keys."""
  block, key_block = blocks
  compute = min(key_block, COMPUTE_BLOCK)
  return functools.partial(
    kernel.make_splash_mha_single_device,
    masks.MultiHeadMask([mask] * heads),
    block_sizes=kernel.BlockSizes(
      block_q=block,
      block_kv=key_block,
      block_kv_compute=compute,
      block_q_dkv=block,
      block_kv_dkv=key_block,
      block_kv_dkv_compute=compute,
      block_q_dq=block,
      block_kv_dq=key_block,
    ),
    residual_checkpoint_name=residuals,
    interpret=interpret,
  )


def _by_row(run: Callable[..., Any], query, key, value, query_segments, key_segments):
  """Return the kernel's results, mapped over the rows."""

  def of_row(query, key, value, *segments):
    return run(query, key, value, kernel.SegmentIds(*segments))

  return jax.vmap(of_row)(query, key, value, query_segments, key_segments)


def _widened(array: jax.Array, room: int) -> jax.Array:
  """Return [B, S, heads, head_dim] as [B, heads, S + room, whole lanes].

  Slots are added at the end, and heads are padded with zeros; neither changes the other results.
  """
  return jnp.pad(array, ((0, 0), (0, room), (0, 0), (0, -array.shape[-1] % LANES))).swapaxes(1, 2)


def _narrowed(mixed: jax.Array, query: jax.Array) -> jax.Array:
  """Return [B, heads, S + room, whole lanes] in the shape and dtype of the query [B, S, heads, head_dim]."""
  return mixed.swapaxes(1, 2)[:, : query.shape[1], :, : query.shape[3]].astype(query.dtype)


def block_size(length: int) -> int:
  """Return the largest block size that pads `length` slots by at most an eighth, or else the smallest."""
  fits = [block for block in BLOCKS if -length % block <= length // 8]
  return fits[0] if fits else BLOCKS[-1]
