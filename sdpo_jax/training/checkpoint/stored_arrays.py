"""Reading of a checkpoint's arrays as they are stored, chunk by chunk, without a model, devices or a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import itertools
import json
import pathlib

from etils import epath
import numpy as np
import tensorstore

from sdpo_jax.files import is_local
from sdpo_jax.training.checkpoint import digests

_METADATA = '_METADATA'  # Orbax's description of the tree.


def stored_digest(folder: epath.Path, name: str) -> str:
  """Return the digest of an array in a checkpoint, reading one stored chunk at a time.

  Args:
    folder: folder of the checkpoint.
    name: path of the array in the state.

  Raises:
    Exception: of various types, if the array cannot be read.
  """
  array = tensorstore.open(_specification(folder / 'state', name), open=True, read=True).result()
  sums = np.zeros(digests.LANES, np.uint32)
  for origin, end in _chunks(array.shape, array.chunk_layout.read_chunk.shape or ()):  # An array without axes has none.
    block = array[tuple(map(slice, origin, end))] if origin else array
    sums += digests.block_sums(np.asarray(block.read().result()), origin, array.shape)
  return digests.leaf_digest(array.shape, array.dtype.numpy_dtype, sums)


def _specification(state: epath.Path, name: str) -> dict:
  described = json.loads((state / _METADATA).read_text())
  # TensorStore refuses local paths with '..' in them.
  base = {'driver': 'file', 'path': f'{pathlib.Path(state).resolve()}/'} if is_local(state) else f'{state}/'
  return {
    'driver': 'zarr3' if described.get('use_zarr3') else 'zarr',
    'kvstore': {'driver': 'ocdbt', 'base': base, 'path': f'{name}/'},
    'recheck_cached_data': False,
    'recheck_cached_metadata': False,
  }


def _chunks(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
  """Yield the begin and end indices of each chunk of an array."""
  for origin in itertools.product(*(range(0, length, size) for length, size in zip(shape, chunk, strict=True))):
    yield origin, tuple(min(begin + size, length) for begin, size, length in zip(origin, chunk, shape, strict=True))
