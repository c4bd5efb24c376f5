"""Statistical tests of whether two groups of runs differ by more than the noise over their seeds."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
import math

import numpy as np
from scipy import special

LEVEL = 0.05  # Significance level.
LISTED = 200_000  # Maximum number of assignments to enumerate; if there are more, Welch's interval decides.
# Minimum number of values per group with which the p-value of an exact permutation test can reach LEVEL.
ENOUGH = next(n for n in itertools.count(2) if 2 / math.comb(2 * n, n) <= LEVEL)


@dataclasses.dataclass(frozen=True)
class SeedNoise:
  """The difference between the means of two groups, and its significance; None where there are too few values."""

  difference: float  # Mean of the first group minus that of the second.
  interval: tuple[float, float] | None = None  # Welch's t interval, at 1 − LEVEL.
  p: float | None = None  # p-value of the exact two-sided permutation test of the difference.
  least_p: float | None = None  # The smallest p that this number of values allows.
  test: str | None = None  # The test that decides, 'permutation' or 'Welch'.
  real: bool | None = None  # Whether the difference is more than noise.


def compare_groups(first: Sequence[float], second: Sequence[float]) -> SeedNoise:
  """Compare the values of two groups, one for each seed.

  The permutation test assumes only that values are exchangeable if there is no difference. It decides if its p-value
  can reach LEVEL. With fewer values Welch's interval decides, which assumes normally distributed values in each group.
  """
  a, b = np.asarray(first, float), np.asarray(second, float)
  difference = float(a.mean() - b.mean())
  if min(len(a), len(b)) < 2:
    return SeedNoise(difference)
  x, y = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
  interval, apart = None, None
  if x + y > 0:
    freedom = (x + y) ** 2 / (x**2 / (len(a) - 1) + y**2 / (len(b) - 1))
    half = float(special.stdtrit(freedom, 1 - LEVEL / 2) * math.sqrt(x + y))
    interval, apart = (difference - half, difference + half), abs(difference) > half
  p, least = permutation_p(a, b)
  if least is not None and least <= LEVEL:
    return SeedNoise(difference, interval, p, least, 'permutation', p <= LEVEL)
  return SeedNoise(difference, interval, p, least, 'Welch' if interval else None, apart)


def permutation_p(a: np.ndarray, b: np.ndarray) -> tuple[float | None, float | None]:
  """Return the p-value over all assignments of the values to two groups of these sizes, and the smallest possible one.

  Both are None if there are more than LISTED assignments.
  """
  values, count = np.concatenate([a, b]), math.comb(len(a) + len(b), len(a))
  if count > LISTED:
    return None, None
  sums = values[list(itertools.combinations(range(len(values)), len(a)))].sum(1)
  differences = abs(sums / len(a) - (values.sum() - sums) / len(b))
  observed = abs(a.mean() - b.mean())
  # If the groups have equal sizes, the assignment with the two exchanged is as extreme.
  return float(np.mean(differences >= observed - 1e-12 * (1 + observed))), (1 + (len(a) == len(b))) / count
