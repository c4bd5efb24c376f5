"""Advantages of sampled completions."""

from __future__ import annotations

import chex
import numpy as np


def grpo_advantages(
  scores: chex.Array,
  group: chex.Array,
  norm_by_std: bool = False,
  epsilon: float = 1e-6,
  graded: chex.Array | None = None,
) -> chex.Array:
  """Return scores relative to the mean of their group: scores [N] float, group ids [N] int -> [N], of NumPy or JAX.

  With `norm_by_std`, they are also divided by the group's sample standard deviation (n − 1) plus `epsilon` (GRPO);
  without, this is Dr. GRPO. A group of one keeps its score (mean 0, deviation 1). Source: core_algos.py:265-332.

  Equal scores have advantage exactly 0; otherwise their rounding errors would be divided by a deviation as small. NumPy
  arrays are computed in float64, JAX arrays in their own dtype; the result has the dtype of `scores`.

  Args:
    scores: [N]; entries where `graded` is false are ignored.
    group: [N].
    norm_by_std: as above.
    epsilon: as above.
    graded: [N] bool, samples that have a score; None: all. The others have advantage 0 and count in no mean. A group
      of several samples with fewer than two graded ones has nothing to compare: its advantages are 0.
  """
  chex.assert_rank([scores, group], 1)
  chex.assert_equal_shape([scores, group])
  chex.assert_type([scores, group], [float, int])
  xp = scores.__array_namespace__()
  graded = xp.ones(scores.shape, bool) if graded is None else graded
  chex.assert_shape(graded, scores.shape)
  chex.assert_type(graded, bool)
  values = xp.where(graded, scores, xp.zeros_like(scores))
  if xp is np:
    values = values.astype(np.float64)

  same = group[:, None] == group[None, :]
  compared = same & graded[None, :]
  count = compared.sum(1).astype(values.dtype)
  at_least_one = xp.maximum(count, xp.ones_like(count))
  infinity = xp.full_like(values, xp.inf)
  lowest = xp.where(compared, values[None, :], infinity).min(1)
  highest = xp.where(compared, values[None, :], -infinity).max(1)

  # First subtract the group's lowest score: a common offset then costs no digits, and equal scores give zeros.
  def mean(of_pair: chex.Array) -> chex.Array:
    return xp.where(compared, of_pair, xp.zeros_like(of_pair)).sum(1) / at_least_one

  above = xp.where(compared, values[None, :] - lowest[:, None], xp.zeros_like(values))
  centred = values - lowest - mean(above)
  if norm_by_std:
    squares = mean((above - mean(above)[:, None]) ** 2) * count
    centred = centred / (xp.sqrt(squares / xp.maximum(count - 1, xp.ones_like(count))) + epsilon)
  centred = xp.where((count > 1) & (highest > lowest), centred, xp.zeros_like(centred))
  alone = values / (1 + epsilon) if norm_by_std else values
  advantages = xp.where(same.sum(1) == 1, alone, centred)
  return xp.where(graded, advantages, xp.zeros_like(advantages)).astype(scores.dtype)
