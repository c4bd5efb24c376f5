"""Loading of parameters from model files onto devices: each process reads the parts of its devices, band by band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import functools
import gc
import math
import os

import jax
import numpy as np

from sdpo_jax.distributed.mesh import parameter_sharding
from sdpo_jax.errors import UserError
from sdpo_jax.models import parameters
from sdpo_jax.models.tensor_files import Tensor, is_finite

READERS = 4  # Maximum number of threads.
BAND_ROWS = 128  # Rows of a tensor read and converted at once, so that cache lines of our layout are written whole.
BAND_BYTES = 2**23  # Maximum bytes of float32 in a band, unless a single row is longer.


def place(parameter: parameters.Parameter, tensors: Mapping[str, Tensor], mesh: jax.sharding.Mesh | None) -> jax.Array:
  """Return a parameter on the devices; the host has freed its copy when this returns.

  Raises:
    UserError: a tensor holds values that are not finite, or cannot be read.
  """
  array = jax.block_until_ready(_send(parameter, tensors, mesh))
  # JAX frees what it has sent only at its next call or at a garbage collection, when the arrays of the next parameter
  # would exist, too.
  gc.collect(0)
  return array


def _send(parameter: parameters.Parameter, tensors: Mapping[str, Tensor], mesh: jax.sharding.Mesh | None) -> jax.Array:
  if mesh is None:
    return jax.device_put(read_whole(parameter, tensors))
  sharding = parameter_sharding(mesh, parameter.axes, parameter.shape)
  blocks = {
    device: tuple(part.indices(size)[:2] for part, size in zip(index, parameter.shape, strict=True))
    for device, index in sharding.addressable_devices_indices_map(parameter.shape).items()
  }
  distinct = list(dict.fromkeys(blocks.values()))
  arrays = dict(zip(distinct, read_blocks(parameter, tensors, distinct), strict=True))
  pieces = [jax.device_put(arrays[block], device) for device, block in blocks.items()]
  return jax.make_array_from_single_device_arrays(parameter.shape, sharding, pieces)


def put(mesh: jax.sharding.Mesh | None, parameter: parameters.Parameter, values: np.ndarray) -> jax.Array:
  """Return a parameter on the devices from its whole value on the host."""
  if mesh is None:
    return jax.device_put(values)
  sharding = parameter_sharding(mesh, parameter.axes, parameter.shape)
  return jax.make_array_from_callback(parameter.shape, sharding, lambda index: values[index])


def read_whole(parameter: parameters.Parameter, tensors: Mapping[str, Tensor]) -> np.ndarray:
  """Return a whole parameter on the host; arguments and errors as in `read_blocks`."""
  [whole] = read_blocks(parameter, tensors, [tuple((0, size) for size in parameter.shape)])
  return whole


def read_blocks(
  parameter: parameters.Parameter, tensors: Mapping[str, Tensor], blocks: Sequence[parameters.Bounds]
) -> list[np.ndarray]:
  """Return blocks of a parameter; each row of a tensor is read at most once for all of them.

  Args:
    parameter: the parameter.
    tensors: tensors by name, including those of the parameter.
    blocks: bounds on every axis, for each block.

  Raises:
    UserError: a tensor holds values there that are not finite, or cannot be read.
  """
  outputs = [np.empty([stop - start for start, stop in block], parameter.dtype) for block in blocks]
  layout = _Layout.of(parameter)
  within = [block[1:] if parameter.stacked else block for block in blocks]
  jobs = []
  for layer in range(parameter.layers):
    wanted = [
      (bounds, output[layer - block[0][0]] if parameter.stacked else output)
      for block, bounds, output in zip(blocks, within, outputs, strict=True)
      if not parameter.stacked or block[0][0] <= layer < block[0][1]
    ]
    if wanted:
      first, last = _hull([bounds[layout.row_axis] for bounds, _ in wanted])
      step = layout.band
      tensor = tensors[parameter.huggingface_name(layer)]
      jobs += [(tensor, wanted, (at, min(at + step, last))) for at in range(first, last, step)]
  fill = functools.partial(_fill, parameter, layout)
  with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1, len(jobs) or 1)) as readers:
    list(readers.map(fill, jobs))  # Raises the first error.
  return outputs


@dataclasses.dataclass(frozen=True)
class _Layout:
  """How the axes of a parameter, without the layers axis, map to the rows and columns of its tensors."""

  row_axis: int  # The axis of which each entry corresponds to one or several rows.
  rows: int  # Number of rows per entry of that axis.
  column_axis: int | None  # The same for columns; None: the tensor is a vector.
  columns: int
  band: int  # Number of entries of the row axis that are read at once.

  @classmethod
  def of(cls, parameter: parameters.Parameter) -> _Layout:
    shape = parameter.shape[1:] if parameter.stacked else parameter.shape
    # For every axis of the tensor, in our order: our first axis for it, and its entries per entry of that axis.
    groups = [(axis, math.prod(shape[axis + 1 : end])) for _, axis, end in parameter.groups()]
    (row_axis, rows), *rest = groups[::-1] if parameter.transpose else groups
    column_axis, columns = rest[0] if rest else (None, 1)
    row_bytes = 4 * math.prod(parameter.huggingface_shape[1:])
    limit = max(min(BAND_ROWS, BAND_BYTES // row_bytes), 1) if rest else BAND_BYTES // 4
    return cls(row_axis, rows, column_axis, columns, max(limit // rows, 1))


# A tensor, (bounds, array to fill) of blocks that overlap with it, and bounds on the row axis.
_Job = tuple[Tensor, list[tuple[parameters.Bounds, np.ndarray]], tuple[int, int]]


def _fill(parameter: parameters.Parameter, layout: _Layout, job: _Job) -> None:
  """Read a band of rows and copy it into the arrays."""
  tensor, blocks, (first, last) = job
  parts = []
  for bounds, output in blocks:
    start, stop = bounds[layout.row_axis]
    low, high = max(start, first), min(stop, last)
    if low < high:
      inner = (*bounds[: layout.row_axis], (low, high), *bounds[layout.row_axis + 1 :])
      places = [slice(None)] * len(bounds)
      places[layout.row_axis] = slice(low - start, high - start)
      parts.append((inner, output[tuple(places)]))
  if not parts:
    return
  window = _Window.read(tensor, layout, [bounds for bounds, _ in parts], parameter.dtype)
  for bounds, output in parts:
    output[...] = parameter.from_huggingface(window, bounds)


class _Window:
  """Some rows and columns of a tensor in memory, which are indexed like the whole tensor."""

  def __init__(self, values: np.ndarray, *origin: int):
    self._values, self._origin = values, origin

  @classmethod
  def read(cls, tensor: Tensor, layout: _Layout, blocks: Sequence[parameters.Bounds], dtype: str) -> _Window:
    """Return the part of a tensor that the blocks need."""

    def needed(axis: int, each: int, size: int) -> tuple[int, int]:
      low, high = _hull([bounds[axis] for bounds in blocks])
      return min(low * each, size), min(high * each, size)  # Entries beyond `size` pad the vocabulary.

    rows = needed(layout.row_axis, layout.rows, tensor.shape[0])
    columns = None if layout.column_axis is None else needed(layout.column_axis, layout.columns, tensor.shape[1])
    values = tensor.rows(rows, columns)
    _check_finite(tensor, values)
    if columns is None:
      return cls(values.astype(dtype), rows[0])
    # Without padding, rows at distances of a power of two would map to the same few cache sets when transposed.
    apart = np.empty((len(values), values.shape[1] + 16), dtype)[:, : values.shape[1]]
    apart[...] = values
    return cls(apart, rows[0], columns[0])

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    return self._values[
      tuple(
        slice(part.start - origin, part.stop - origin) if part.start < part.stop else slice(0, 0)
        for part, origin in zip(index, self._origin, strict=True)
      )
    ]


def _check_finite(tensor: Tensor, values: np.ndarray) -> None:
  if not is_finite(values):
    wrong = sum(
      len(part) and int(np.count_nonzero(~np.isfinite(part)))
      for part in (
        tensor.rows((row, min(row + BAND_ROWS, tensor.shape[0]))) for row in range(0, tensor.shape[0], BAND_ROWS)
      )
    )
    raise UserError(
      f'{tensor.file.path}: tensor {tensor.name!r} holds {wrong} values of {math.prod(tensor.shape)} that are not '
      'finite (NaN or infinite), so that the model is useless: get the file again, or export the model again from '
      'another checkpoint.'
    )


def _hull(bounds: Sequence[tuple[int, int]]) -> tuple[int, int]:
  return min(start for start, _ in bounds), max(stop for _, stop in bounds)
