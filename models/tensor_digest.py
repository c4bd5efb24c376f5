"""A digest of a model's weights, which does not depend on the layout of its files or their dtype."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib

import ml_dtypes
import numpy as np

from sdpo_jax.models.tensor_files import Tensor

SPOTS, SPOT_VALUES = 4, 2048  # Number of places of a tensor that are read, and of values at each.


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
  """Return a digest, 16 hexadecimal digits, of the names and values of tensors.

  Values at `SPOTS` places of each tensor are read, some 30 KB, and rounded to bfloat16. So the digest is the same in
  float32, bfloat16 and, unless values overflow, float16, and in one file or several. Training changes so many values by
  more than the precision of bfloat16 that the digest changes; a single flipped bit may not change it.
  """
  digest = hashlib.sha256()
  for name in sorted(tensors):
    tensor = tensors[name]
    digest.update(f'{name} {tensor.shape}\n'.encode())
    for first in _starts(tensor.size):
      values = tensor.values((first, min(first + SPOT_VALUES, tensor.size)))
      # Adding 0 makes all zeros positive, since some writers drop their signs.
      digest.update((values.astype(np.float32) + np.float32(0)).astype(ml_dtypes.bfloat16).tobytes())
  return digest.hexdigest()[:16]


def _starts(size: int) -> list[int]:
  """Return the indices of the first values of the spots in a tensor with `size` values."""
  last = max(size - SPOT_VALUES, 0)
  return sorted({last * spot // (SPOTS - 1) for spot in range(SPOTS)})
