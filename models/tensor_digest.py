"""A digest of the weights of a model that does not depend on how its files are laid out, nor on their dtype."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib

import ml_dtypes
import numpy as np

from models.tensor_files import Tensor

SPOTS, SPOT_VALUES = 4, 2048  # Places of a tensor that are read, and values at each.


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
  """Return 16 hexadecimal digits that tell tensors of these names and values from others.

  Of each tensor, values at `SPOTS` places are read and rounded to bfloat16. So a model is the same in float32 and in
  bfloat16, in one file and in several, whoever wrote them. In float16 it is, too, unless it has values that float16
  cannot hold. Training moves so many values by more than half a step of bfloat16 that other weights differ; a single
  flipped bit need not. It costs some 30 KB of reading per tensor.
  """
  digest = hashlib.sha256()
  for name in sorted(tensors):
    tensor = tensors[name]
    digest.update(f'{name} {tensor.shape}\n'.encode())
    for first in _starts(tensor.size):
      values = tensor.values((first, min(first + SPOT_VALUES, tensor.size)))
      # A zero has a sign that some writers drop.
      digest.update((values.astype(np.float32) + np.float32(0)).astype(ml_dtypes.bfloat16).tobytes())
  return digest.hexdigest()[:16]


def _starts(size: int) -> list[int]:
  """Return where the spots of a tensor of so many values begin."""
  last = max(size - SPOT_VALUES, 0)
  return sorted({last * spot // (SPOTS - 1) for spot in range(SPOTS)})
