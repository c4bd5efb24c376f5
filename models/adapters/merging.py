"""Merging of an adapter into its model: W + scale · A B in float32, tensor by tensor from the model's files."""

from __future__ import annotations

from collections.abc import Mapping
import functools

import jax
import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.models import exporting, parameters, tensor_files
from sdpo_jax.models.adapters import lora
from sdpo_jax.models.tensor_files import Tensor, is_finite
from sdpo_jax.types import Tree

BAND_BYTES = 2**24  # Maximum bytes of float32 that are read and added at once.


def merged(
  table: parameters.Table, adapter: lora.Adapter, factors: Tree, tensors: Mapping[str, Tensor], dtype: str
) -> list[tensor_files.TensorPart]:
  """Return the Hugging Face tensors of a model with an adapter merged into it, to be written.

  Factors that are sharded over processes are gathered when a tensor is made, so that all processes must make it; only
  process 0 reads the model.

  Args:
    table: table of the model without factors.
    adapter: the adapter, which says which matrices have factors.
    factors: nested dict of arrays.
    tensors: tensors of the model's files, by the names in the table; the files must stay open until all are made.
    dtype: dtype of the stored tensors.
  """
  rows = {row.name: row for row in lora.factors(adapter.extended(table, 'float32'))}
  found = []
  for parameter in table:
    target = adapter.by_name.get(parameter.name)
    for layer in range(parameter.layers):
      pair, scale = None, 0.0 if target is None else target.scales[layer]
      if scale:
        pair = tuple(
          exporting.part(row, parameters.get(factors, row.path), layer, 'float32')
          for row in (rows[f'{parameter.name}_{lora.A}'], rows[f'{parameter.name}_{lora.B}'])
        )
      name = parameter.huggingface_name(layer)
      make = functools.partial(_sum, tensors[name], pair, scale, exporting.stored_dtype(dtype))
      found.append(tensor_files.TensorPart(name, parameter.huggingface_shape, make))
  return found


def _sum(
  tensor: Tensor, pair: tuple[tensor_files.TensorPart, tensor_files.TensorPart] | None, scale: float, dtype: np.dtype
) -> np.ndarray:
  """Return a tensor of the model plus `scale` times the product of its factors."""
  a, b = (None, None) if pair is None else (part.make() for part in pair)
  whole = np.empty(tensor.shape, dtype)
  if jax.process_index() != 0:
    return whole  # Only process 0 writes it.
  band = max(BAND_BYTES // (4 * tensor.width), 1)
  for first in range(0, tensor.shape[0], band):
    rows = first, min(first + band, tensor.shape[0])
    values = tensor.rows(rows)
    if not is_finite(values):
      raise UserError(
        f'{tensor.file.path}: tensor {tensor.name!r} holds values that are not finite (NaN or infinite): get the file '
        'again.'
      )
    values = values.astype(np.float32)
    if a is not None and b is not None:
      values += np.float32(scale) * (b[slice(*rows)] @ a)
    whole[slice(*rows)] = exporting.converted(tensor.name, values, dtype)
  return whole
