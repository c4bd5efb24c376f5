"""Splash attention, JAX's block-sparse flash attention kernel for TPUs, on rows with segments and grouped heads."""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
import jax.numpy as jnp

LANES = 128
# The largest is the fastest (6.2 ms forward and 18.6 backward at S = 10 240 and 32 heads, by the compiled schedules).
BLOCKS = (1024, 512, 256, 128)
COMPUTE_BLOCK = 512


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
) -> jax.Array:
  """Causal grouped-query softmax attention within segments; scores and softmax in float32.

  Args:
    query: [B, S, H, head_dim], scaled.
    key: [B, S, KV, head_dim].
    value: [B, S, KV, head_dim].
    segment_ids: [B, S] int32; tokens of a segment stand in consecutive slots.
    window: number of slots that are seen, the query's own included; 0: all. Static.
    residuals: name under which a rematerialisation policy may save output and log-normalisers.
    interpret: run without a TPU.
    parents: [B, S] int32, the segment that a query sees beside its own, which stands before it; 0: none. Without a
      gradient and a window.

  Returns:
    [B, S, H, head_dim] in the dtype of `query`.
  """
  length, heads, head_dim = query.shape[1:]
  block = block_size(length)
  room = -length % block
  wider = -head_dim % LANES

  # Added slots are padding at the end, added numbers of a head are zeros: neither changes what the others get.
  def widen(array: jax.Array) -> jax.Array:
    return jnp.pad(array, ((0, 0), (0, room), (0, 0), (0, wider))).swapaxes(1, 2)

  segment_ids, parents = jax.tree.map(lambda ids: jnp.pad(ids, ((0, 0), (0, room))), (segment_ids, parents))
  size = (length + room, length + room)
  mask = masks.LocalMask(size, (window - 1, 0), 0) if window else masks.CausalMask(size)
  compute = min(block, COMPUTE_BLOCK)
  splash = functools.partial(
    kernel.make_splash_mha_single_device,
    masks.MultiHeadMask([mask] * heads),
    block_sizes=kernel.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=compute,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_kv_dkv_compute=compute,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    residual_checkpoint_name=residuals,
    interpret=interpret,
  )
  arrays = widen(query), widen(key), widen(value)

  def to_segments(query_segments, **options):
    run = splash(**options)

    def of_row(query, key, value, *segments):
      return run(query, key, value, kernel.SegmentIds(*segments))

    return jax.vmap(of_row)(*arrays, query_segments, segment_ids)

  def to_parents_too():
    own, (total,) = to_segments(segment_ids, save_residuals=True)
    # Where there is no parent, no key has this segment: the total of nothing is next to nothing.
    above, (total_above,) = to_segments(jnp.where(parents > 0, parents, -1), save_residuals=True)
    share = jax.nn.sigmoid(total - total_above)[..., None]
    return (share * own + (1 - share) * above).astype(own.dtype)

  to_own = functools.partial(to_segments, segment_ids)
  # Rows without parents, which are most, are not looked at twice.
  mixed = to_own() if parents is None else lax.cond(jnp.any(parents > 0), to_parents_too, to_own)
  return mixed.swapaxes(1, 2)[:, :length, :, :head_dim].astype(query.dtype)


def block_size(length: int) -> int:
  """Returns the largest block that adds at most an eighth to the slots, or the smallest."""
  fits = [block for block in BLOCKS if -length % block <= length // 8]
  return fits[0] if fits else BLOCKS[-1]
