"""The safetensors format: checked headers, reading of rows, and writing one tensor at a time.

A file holds the length of the header (8 bytes), the header (JSON: name → dtype, shape, offsets of the data), and data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from sdpo_jax.errors import UserError, first_line, short_repr

LARGEST_HEADER = 2**24  # Maximum bytes of a header: 100,000 tensors. As JSON it takes twenty times the memory.
LARGEST_RANK = 8  # Maximum number of axes of a tensor.
# The types that weights may have, as NumPy dtypes and unsigned integers of the same width.
DTYPES = {
  'F32': (np.dtype(np.float32), np.uint32),
  'F16': (np.dtype(np.float16), np.uint16),
  'BF16': (np.dtype(ml_dtypes.bfloat16), np.uint16),
}
_NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}
# Bits per element of the types in the format; lengths of tensors of other types are not checked.
_BITS = {
  **{name: 8 * dtype.itemsize for name, (dtype, _) in DTYPES.items()},
  **{'BOOL': 8, 'U8': 8, 'I8': 8, 'F8_E4M3': 8, 'F8_E5M2': 8, 'F8_E8M0': 8, 'F8_E4M3FNUZ': 8, 'F8_E5M2FNUZ': 8},
  **{'F4': 4, 'F6_E2M3': 6, 'F6_E3M2': 6, 'U16': 16, 'I16': 16, 'U32': 32, 'I32': 32, 'U64': 64, 'I64': 64},
  **{'F64': 64, 'C64': 64},
}
# Gap in bytes between the wanted parts of two rows up to which reading on is cheaper than seeking: disk and page cache
# read at least this much, and a call per row costs about as much as copying it.
GAP = 2**16
COMPARED_BYTES = 2**23  # Bytes of two matrices that are compared at once.


class TensorFile:
  """An open safetensors file. Threads may share it, since every read has its own position; it is not memory-mapped."""

  def __init__(self, path: pathlib.Path):
    """Open a file and check its header.

    Raises:
      UserError: it cannot be read, is not a safetensors file, or is shorter or longer than its header says.
    """
    self.path = path
    try:
      self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
      raise UserError(f'{path} cannot be opened ({first_line(error)}): make it readable, or get it again.') from error
    try:
      self.tensors = self._read_header()
    except BaseException:
      self.close()
      raise

  def close(self) -> None:
    """Close the file; its tensors can no longer be read."""
    os.close(self._descriptor)

  def __enter__(self) -> TensorFile:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def read(self, buffer: np.ndarray, offset: int) -> None:
    """Fill a contiguous array with bytes of the file, from `offset` on.

    Raises:
      UserError: reading failed, or the file has become shorter.
    """
    view, done = memoryview(buffer.reshape(-1).view(np.uint8)), 0
    while done < len(view):
      try:
        count = os.preadv(self._descriptor, [view[done:]], offset + done)
      except OSError as error:
        raise UserError(
          f'{self.path} cannot be read at byte {offset + done} ({first_line(error)}): see that its disk works, and get '
          'the file again.'
        ) from error
      if not count:
        raise UserError(f'{self.path} became shorter while it was read: load it again when nothing writes to it.')
      done += count

  def _read_header(self) -> dict[str, Tensor]:
    size = os.fstat(self._descriptor).st_size
    if size < 8:
      raise self._damaged(f'it has {size} bytes')
    number = np.empty(1, '<u8')
    self.read(number, 0)
    length = int(number[0])
    if length > LARGEST_HEADER or 8 + length > size:
      raise self._damaged(
        f'its header should have {length} bytes, but the file has {size}, and at most {LARGEST_HEADER} are read'
      )
    text = np.empty(length, np.uint8)
    self.read(text, 8)
    try:
      header = json.loads(text.tobytes().decode('utf-8'), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
      raise self._damaged(f'its header is not JSON: {first_line(error)}') from error
    if not isinstance(header, dict):
      raise self._damaged('its header is not a JSON object')
    header.pop('__metadata__', None)
    start = 8 + length
    tensors = {name: self._tensor(name, entry, start) for name, entry in header.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
      if tensor.begin != end:
        raise self._damaged(f'tensor {tensor.name!r} begins at byte {tensor.begin}, but the one before ends at {end}')
      end = tensor.end
    if end > size:
      raise self._damaged(f'it has {size} bytes and should have {end}: it was cut off')
    if end < size:
      raise self._damaged(f'it has {size} bytes, but its tensors end at byte {end}')
    return tensors

  def _tensor(self, name: str, entry: Any, start: int) -> Tensor:
    shape, dtype, offsets = (
      entry.get(key) if isinstance(entry, dict) else None for key in ('shape', 'dtype', 'data_offsets')
    )
    if not (_counts(shape) and _counts(offsets) and len(offsets) == 2 and isinstance(dtype, str)):
      raise self._damaged(f'its header describes tensor {name!r} as {short_repr(entry)}')
    begin, end = offsets
    bits = _BITS.get(dtype)
    if begin > end or (bits is not None and 8 * (end - begin) != bits * math.prod(shape)):
      raise self._damaged(f'tensor {name!r} of {dtype} {tuple(shape)} cannot have {end - begin} bytes')
    return Tensor(self, name, dtype, tuple(shape), start + begin, start + end)

  def _damaged(self, why: str) -> UserError:
    return UserError(f'{self.path} is damaged or not a safetensors file ({why}): get the file again.')


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor in an open file, which is read on demand."""

  file: TensorFile
  name: str
  dtype: str  # As the format names it.
  shape: tuple[int, ...]
  begin: int  # Offset of its first byte in the file.
  end: int  # Offset after its last byte.

  @property
  def width(self) -> int:
    """Number of elements of a row, that is of an entry of the first axis."""
    return math.prod(self.shape[1:])

  @property
  def size(self) -> int:
    """Number of elements of the tensor."""
    return math.prod(self.shape)

  def values(self, bounds: tuple[int, int]) -> np.ndarray:
    """Return elements bounds[0] … bounds[1] − 1, in row-major order; the dtype must be one of `DTYPES`."""
    dtype, _ = DTYPES[self.dtype]
    found = np.empty(bounds[1] - bounds[0], dtype)
    self.file.read(found, self.begin + bounds[0] * dtype.itemsize)
    return found

  def rows(self, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> np.ndarray:
    """Return rows [rows, columns], or elements [rows] of a vector; the dtype must be one of `DTYPES`.

    Args:
      rows: bounds on the first axis.
      columns: bounds on the second axis; None: all columns.
    """
    dtype, _ = DTYPES[self.dtype]
    (first, last), width = rows, self.width
    left, right = columns or (0, width)
    offset = self.begin + first * width * dtype.itemsize
    if columns is not None and (width - (right - left)) * dtype.itemsize > GAP:
      part = np.empty((last - first, right - left), dtype)
      for row in range(last - first):
        self.file.read(part[row], offset + (row * width + left) * dtype.itemsize)
      return part
    whole = np.empty((last - first, *self.shape[1:]), dtype)
    self.file.read(whole, offset)
    return whole if columns is None else whole[:, left:right]


def are_equal(left: Tensor, right: Tensor) -> bool:
  """Return whether two tensors have the same shape, dtype and bits, reading a few megabytes at a time."""
  if (left.dtype, left.shape) != (right.dtype, right.shape):
    return False
  bits = DTYPES[left.dtype][1]
  band = max(COMPARED_BYTES // (4 * left.width), 1)
  for first in range(0, left.shape[0], band):
    rows = first, min(first + band, left.shape[0])
    if not np.array_equal(left.rows(rows).view(bits), right.rows(rows).view(bits)):
      return False
  return True


def is_finite(values: np.ndarray) -> bool:
  """Return whether all values of an array of one of `DTYPES` are finite, judged by the bits of their exponents."""
  integers = DTYPES[_NAMES[values.dtype]][1]
  exponent = np.array(np.inf, values.dtype).view(integers)
  return not ((values.view(integers) & exponent) == exponent).any()


class TensorPart(NamedTuple):
  """A tensor that will be written."""

  name: str
  shape: tuple[int, ...]
  make: Callable[[], np.ndarray]  # Returns its values, in the dtype of the file.


def write(path: pathlib.Path, parts: Sequence[TensorPart], dtype: np.dtype) -> str:
  """Write a file, making one tensor at a time; return its SHA-256 in hex.

  Raises:
    OSError: the file could not be written.
  """
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for part in parts:
    size = math.prod(part.shape) * dtype.itemsize
    header[part.name] = {'dtype': _NAMES[dtype], 'shape': part.shape, 'data_offsets': [offset, offset + size]}
    offset += size
  text = json.dumps(header, separators=(',', ':')).encode('utf-8')
  text += b' ' * (-len(text) % 8)  # The data begin at a multiple of 8 bytes.
  digest = hashlib.sha256()
  with path.open('xb') as file:

    def put(content: bytes | memoryview) -> None:
      digest.update(content)
      file.write(content)

    put(len(text).to_bytes(8, 'little') + text)
    for part in parts:
      put(_content(part, dtype))  # Not bound to a name, so that it is freed before the next one is made.
  return digest.hexdigest()


def _content(part: TensorPart, dtype: np.dtype) -> memoryview:
  array = part.make()
  if array.shape != part.shape or array.dtype != dtype:
    raise ValueError(f'{part.name} is {array.dtype} {array.shape}, not {dtype} {part.shape}.')
  return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _counts(value: Any) -> bool:
  return (
    isinstance(value, list) and len(value) <= LARGEST_RANK and all(type(n) is int and 0 <= n < 2**63 for n in value)
  )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) != len(pairs):
    raise ValueError('a name occurs twice')
  return values
