"""A digest of a model's weights that depends neither on the layout of its files nor on their dtype."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib

import ml_dtypes
import numpy as np

from sdpo_jax.models.tensor_files import Tensor

SPOTS, SPOT_VALUES = 4, 2048  # Places of a tensor that are read, and values at each.


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
  """Return a digest, 16 hexadecimal digits, of the names and values of tensors.

  Values at `SPOTS` places of each tensor are read and rounded to bfloat16. So a model has the same digest in float32
  and in bfloat16, in one file or in several, and in float16, too, unless it has values that float16 cannot hold.
  Training moves so many values by more than half a step of bfloat16 that the digest changes; a single flipped bit may
  not change it. Some 30 KB are read per tensor.
  """
  digest = hashlib.sha256()
  for name in sorted(tensors):
    tensor = tensors[name]
    digest.update(f'{name} {tensor.shape}\n'.encode())
    for first in _starts(tensor.size):
      values = tensor.values((first, min(first + SPOT_VALUES, tensor.size)))
      # Some writers drop the sign of zeros.
      digest.update((values.astype(np.float32) + np.float32(0)).astype(ml_dtypes.bfloat16).tobytes())
  return digest.hexdigest()[:16]


def _starts(size: int) -> list[int]:
  """Return the first values of the spots of a tensor with `size` values."""
  last = max(size - SPOT_VALUES, 0)
  return sorted({last * spot // (SPOTS - 1) for spot in range(SPOTS)})
