"""Rows of parquet files, whose sizes are checked first: a few kilobytes may stand for any number of bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from sdpo_jax.data import rows
from sdpo_jax.errors import UserError, first_line

# Bytes that all rows of a file may have, and bytes per byte of the file; the larger counts.
_LARGEST, _RATIO = 2**32, 1000
_REPEATING = 16  # Rows of texts that repeat the one before which are read at once.
_VALUE = 8  # Bytes of a number, and the least that an element of a list takes.


def read(source: str, content: bytes, arrays: bool = False) -> list[dict[str, Any]]:
  """Return all rows of a parquet file; with `arrays`, lists of numbers are NumPy arrays, which take less memory.

  Raises:
    UserError: it is not a parquet file, a row has more than `rows.LARGEST_ROW` bytes, all have more than such a
      file may stand for, or pyarrow is not installed.
  """
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError as error:
    raise UserError(f'{source!r} is a parquet file, and reading it needs pyarrow: pip install pyarrow.') from error
  try:
    _check(source, content)
    table = pyarrow.parquet.read_table(io.BytesIO(content))
    return sum(map(_with_arrays, table.to_struct_array().chunks), []) if arrays else table.to_pylist()
  except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # The last two for texts and dates.
    raise UserError(f'{source!r} is not a readable parquet file: {first_line(error).rstrip(".")}.') from error


def _check(source: str, content: bytes) -> None:
  """Check what a file says of itself, then its rows, of which texts are still kept once each."""
  from pyarrow import parquet

  described = parquet.read_metadata(io.BytesIO(content))
  columns = [described.schema.column(number) for number in range(described.num_columns)]
  groups = [described.row_group(index) for index in range(described.num_row_groups)]
  parts = [[group.column(number) for number in range(len(columns))] for group in groups]
  widths = [column.length if column.physical_type == 'FIXED_LEN_BYTE_ARRAY' else _VALUE for column in columns]
  said = [
    sum(max(part.total_uncompressed_size, width * part.num_values) for part, width in zip(held, widths, strict=True))
    for held in parts
  ]
  _check_total(source, content, sum(said))
  # Texts in an encoding of differences cannot be kept once each; those that repeat the one before are read in pieces.
  encodings = {part.path_in_schema: set(part.encodings) for held in parts for part in held}
  delta = {path for path, names in encodings.items() if any('DELTA' in name for name in names)}
  texts = [column.path for column in columns if column.physical_type == 'BYTE_ARRAY' and column.path not in delta]
  at_once = _REPEATING if any('DELTA_BYTE_ARRAY' in names for names in encodings.values()) else None
  file, first, total = parquet.ParquetFile(io.BytesIO(content), read_dictionary=texts), 1, 0
  for index, group in enumerate(groups):
    if said[index] > rows.LARGEST_ROW * max(group.num_rows, 1):
      raise rows.too_large(f'{source}, row {first} or later', said[index] // max(group.num_rows, 1))
    for batch in file.iter_batches(at_once or max(group.num_rows, 1), row_groups=[index], use_threads=False):
      sizes = sum(map(_sizes, batch.columns), np.zeros(len(batch), np.int64))
      if np.max(sizes, initial=0) > rows.LARGEST_ROW:
        raise rows.too_large(f'{source}, row {first + int(np.argmax(sizes > rows.LARGEST_ROW))}', int(sizes.max()))
      first, total = first + len(batch), total + int(np.sum(sizes))
      _check_total(source, content, total)


def _check_total(source: str, content: bytes, total: int) -> None:
  if total > max(_LARGEST, _RATIO * len(content)):
    raise UserError(
      f'{source}: the rows of this file of {len(content)} bytes have {total / 2**30:.1f} GiB, and only '
      f'{max(_LARGEST, _RATIO * len(content)) / 2**30:.1f} GiB are read: split the file.'
    )


def _sizes(array: Any) -> np.ndarray:
  """Return the bytes of each element of an arrow array [N]."""
  import pyarrow
  from pyarrow import compute, types

  kind = array.type
  if isinstance(kind, pyarrow.BaseExtensionType):
    return _sizes(array.storage)
  if types.is_dictionary(kind):
    return np.append(_sizes(array.dictionary), 0)[array.indices.fill_null(len(array.dictionary)).to_numpy()]
  if types.is_struct(kind):
    return sum(map(_sizes, array.flatten()), np.zeros(len(array), np.int64))
  if types.is_map(kind):
    entries = pyarrow.StructArray.from_arrays([array.keys, array.items], ['key', 'value'])
    array = pyarrow.ListArray.from_arrays(array.offsets, entries)
  if types.is_nested(kind):  # Lists and maps.
    ends = np.cumsum(lengths := _numbers(compute.list_value_length(array)))
    inner = np.concatenate([[0], np.cumsum(_sizes(compute.list_flatten(array)))])
    return inner[ends] - inner[ends - lengths] + _VALUE * lengths
  if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
    return _numbers(compute.binary_length(array))
  return np.full(len(array), kind.byte_width if types.is_fixed_size_binary(kind) else _VALUE)


def _with_arrays(array: Any) -> list[Any]:
  """Return the elements of an arrow array as Python's values, lists of numbers as NumPy arrays with NaN for null."""
  from pyarrow import types

  kind = array.type
  if types.is_struct(kind):
    found = [dict(zip(kind.names, row, strict=True)) for row in zip(*map(_with_arrays, array.flatten()), strict=True)]
  elif types.is_list(kind) or types.is_large_list(kind):
    plain = types.is_primitive(kind.value_type)
    inner = array.values.to_numpy(zero_copy_only=False) if plain else _with_arrays(array.values)
    ends = array.offsets.to_pylist()
    found = [inner[start:end] for start, end in zip(ends, ends[1:], strict=False)]
  else:
    return array.to_pylist()
  return [value if there else None for value, there in zip(found, array.is_valid().to_pylist(), strict=True)]


def _numbers(array: Any) -> np.ndarray:
  return array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
