"""Attention to a prefix that is sharded over a mesh: the heads over `tensor`, the slots of a head over `fsdp`.

A long document would fill a chip's memory, and its keys and values would take longer to gather than to use. So they
stay in place, and the queries are sent to them. Per layer, queries and results of all rows are 4 · B · S · H · head_dim
bytes in bfloat16, divided by the size of `tensor`, instead of the 4 · N · KV · head_dim bytes of a document of N slots.
That is less by orders of magnitude for a decode step, and less for scoring texts while B · S · H / KV is below
tensor · N. Beyond that it does not matter: a chip's matrix units do N / fsdp operations for every byte, which for
N = 98 304 and fsdp = 8 takes a v5e six times as long as sending the byte.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.distributed.mesh import FSDP, TENSOR
from sdpo_jax.models.attention.prefix import Prefix, SoftmaxPart, of_rows


@dataclasses.dataclass(frozen=True)
class Travel:
  """How the queries of a device are sent to the slots of a prefix."""

  rows: tuple[str, ...]  # Mesh axes over which rows are sharded.
  heads: bool  # Whether the heads of the slots are sharded over `tensor`, but those of the queries are not.


def attention(
  query: jax.Array, prefix: Prefix, attend: Callable[[jax.Array, Prefix], SoftmaxPart], travel: Travel
) -> SoftmaxPart:
  """Return the attention of this device's rows to the whole prefix; called on every device, under `shard_map`.

  Args:
    query: [B, S, H, head_dim] of this device, scaled.
    prefix: this device's slots; `filled` and `first` are indices among the slots of all devices. It is frozen:
      differentiating raises ValueError.
    attend: function that computes the attention to slots of one device.
    travel: how the queries are sent.
  """
  given = query, prefix.key, prefix.value
  query, prefix = lax.stop_gradient((query, prefix))  # Kernels have no gradient here; `_refuse` raises a clearer error.
  start = lax.axis_index(FSDP) * prefix.key.shape[-2]

  def of_all_rows(array: jax.Array | None) -> jax.Array | None:
    for axis in [TENSOR] * travel.heads + [FSDP] * (FSDP in travel.rows):
      array = array if array is None or not array.ndim else lax.all_gather(array, axis, axis=0, tiled=True)
    return array

  first, filled, index = map(of_all_rows, (prefix.first, prefix.filled, prefix.index))
  first = None if first is None else jnp.maximum(first - start, 0)
  if travel.heads:
    query = lax.all_to_all(query, TENSOR, 2, 0, tiled=True)
  if FSDP in travel.rows:
    query = lax.all_gather(query, FSDP, axis=0, tiled=True)
  filled = None if filled is None else filled - start
  everywhere = attend(query, of_rows(prefix.replace(first=first, filled=filled, index=index)))
  parts = [_of_own_rows(array, FSDP in travel.rows) for array in everywhere]
  mixed, total = _joined(*parts)
  if travel.heads:
    mixed, total = (lax.all_to_all(array, TENSOR, 0, 2, tiled=True) for array in (mixed, total))
  return _without_gradient((mixed, total), given)


def _of_own_rows(array: jax.Array, are_divided: bool) -> jax.Array:
  """Return the results [parts, B, …] for this device's rows, from its part's results for all rows [rows, …]."""
  if not are_divided:
    return lax.all_gather(array, FSDP)
  apart = array.reshape(lax.axis_size(FSDP), -1, *array.shape[1:])
  return lax.all_to_all(apart, FSDP, 0, 0)


def _joined(mixed: jax.Array, total: jax.Array) -> SoftmaxPart:
  """Return the softmax over the keys of all parts, from [parts, B, S, H, head_dim] and normalisers [parts, B, S, H]."""
  top = jnp.max(total, axis=0, keepdims=True)
  weights = jnp.exp(total - top)
  sums = jnp.sum(weights, axis=0)
  whole = jnp.sum(weights[..., None] * mixed.astype(jnp.float32), axis=0) / sums[..., None]
  return whole.astype(mixed.dtype), top[0] + jnp.log(sums)


def gathered(prefix: Prefix, begin: jax.Array, count: int, travel: Travel) -> tuple[jax.Array, jax.Array]:
  """Return keys and values [KV, count, head_dim] of the slots from `begin` [] on; zeros where there is no slot.

  Their heads are those of this device's queries. Other arguments as in `attention`.
  """
  each = prefix.key.shape[1]
  own = begin + jnp.arange(count, dtype=jnp.int32) - lax.axis_index(FSDP) * each
  is_here = ((own >= 0) & (own < each))[None, :, None]

  def gather(array: jax.Array) -> jax.Array:
    here = jnp.where(is_here, jnp.take(array, jnp.clip(own, 0, each - 1), axis=1), 0)
    # One device has the values, and the others have zeros.
    whole = lax.psum(here, FSDP)
    return lax.all_gather(whole, TENSOR, axis=0, tiled=True) if travel.heads else whole

  return gather(prefix.key), gather(prefix.value)


@jax.custom_vjp
def _without_gradient(results: SoftmaxPart, given: tuple[jax.Array, ...]) -> SoftmaxPart:
  """Return `results`, computed from `given`; differentiating them raises ValueError."""
  del given
  return results


def _refuse(kept: None, gradients: SoftmaxPart) -> None:
  raise ValueError('Slots that a mesh divides are frozen, so that there is no gradient through attention to them.')


_without_gradient.defvjp(lambda results, given: (results, None), _refuse)
