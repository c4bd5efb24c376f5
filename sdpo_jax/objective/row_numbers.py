"""Per-row numbers of the loss: their allowed values, and their expansion to per-token numbers."""

from __future__ import annotations

import dataclasses

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.types import RowNumbers

_POSITIVE = 'positive and finite', lambda value: (value > 0) & np.isfinite(value)
# Field → (description of the allowed values, test for them).
ALLOWED = {
  'alpha': ('between 0 and 1', lambda value: (value >= 0) & (value <= 1)),
  'is_clip': ('positive, or 0 for no ratio', lambda value: value >= 0),
  'rollout_is_threshold': _POSITIVE,
  'temperature': _POSITIVE,
  'clip_ratio_low': ('between 0 and 1', lambda value: (value >= 0) & (value <= 1)),
  'clip_ratio_high': ('0 or more', lambda value: value >= 0),
  'clip_ratio_c': ('greater than 1, or infinite for no dual clip', lambda value: value > 1),
  'topk': ('1 or more', lambda value: value >= 1),
  'tail': ('0 or 1', lambda value: (value == 0) | (value == 1)),
}


def check(numbers: RowNumbers, largest_topk: int | None = None) -> None:
  """Check the values of NumPy arrays [B] or [B, T], on the host.

  Args:
    numbers: per-row or per-token numbers.
    largest_topk: the K that the program is compiled for; None: no upper limit is checked.

  Raises:
    UserError: a value is not allowed; the message names the number, the row and the allowed values.
  """
  for name, (allowed, is_allowed) in ALLOWED.items():
    values = getattr(numbers, name)
    if values is None:
      continue
    values = np.asarray(values)
    chex.assert_rank(values, {1, 2})
    chex.assert_type(values, int if name == 'topk' else float)
    fine = is_allowed(values)
    if name == 'topk' and largest_topk is not None:
      allowed, fine = f'{allowed} and at most {largest_topk}', fine & (values <= largest_topk)
    if not fine.all():
      where = tuple(int(place) for place in np.argwhere(~fine)[0])
      raise UserError(f'{name} of row {where[0]} is {values[where]}: it must be {allowed}.')


def of_tokens(numbers: RowNumbers, shape: tuple[int, int]) -> RowNumbers:
  """Return per-row numbers [B] as per-token numbers [B, T], for `shape` (B, T); arrays [B, T] are kept as they are."""
  for field in dataclasses.fields(numbers):
    value = getattr(numbers, field.name)
    if value is not None:
      chex.assert_shape(value, shape if jnp.ndim(value) == 2 else shape[:1])
      chex.assert_type(value, int if field.name == 'topk' else float)

  def each(value: jax.Array) -> jax.Array:
    value = jnp.asarray(value)
    return value if value.ndim == 2 else jnp.broadcast_to(value[:, None], shape)

  return jax.tree.map(each, numbers)


def first_entries(ids: jax.Array, count: jax.Array) -> jax.Array:
  """Return the ids [..., K] of a support with −1 (none) in all entries after the first `count` [...]."""
  chex.assert_equal_shape_prefix([ids, count], count.ndim)
  chex.assert_type([ids, count], int)
  return jnp.where(lax.broadcasted_iota(count.dtype, ids.shape, ids.ndim - 1) < count[..., None], ids, -1)
