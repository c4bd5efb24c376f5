"""Advantages of sampled completions."""

from __future__ import annotations

import chex


def grpo_advantages(
  scores: chex.Array, group: chex.Array, norm_by_std: bool = False, epsilon: float = 1e-6
) -> chex.Array:
  """Return scores relative to the mean of their group: scores [N] float, group ids [N] int -> [N], NumPy's or JAX's.

  With `norm_by_std` also divided by the group's sample standard deviation (n − 1) plus `epsilon` (GRPO); without, it
  is Dr. GRPO. A group of one keeps its score (mean 0, deviation 1). Source: core_algos.py:265-332.
  """
  chex.assert_rank([scores, group], 1)
  chex.assert_equal_shape([scores, group])
  chex.assert_type([scores, group], [float, int])
  xp = scores.__array_namespace__()
  same = (group[:, None] == group[None, :]).astype(scores.dtype)
  count = same.sum(1)
  alone = count == 1
  mean = (same * scores[None, :]).sum(1) / count
  centred = scores - xp.where(alone, xp.zeros_like(mean), mean)
  if not norm_by_std:
    return centred
  squares = (same * (scores[None, :] - mean[:, None]) ** 2).sum(1)
  deviation = xp.sqrt(squares / xp.maximum(count - 1, xp.ones_like(count)))
  return centred / (xp.where(alone, xp.ones_like(deviation), deviation) + epsilon)
