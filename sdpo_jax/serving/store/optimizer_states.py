"""Optimizer state of versions, stored apart from the factors: what learning goes on from, and sampling never reads.

A version is acknowledged before its state is written. Learning goes on from a version's own state, or else from that of
its closest stored ancestor that has one, or else from zero moments; an average that is missing starts from the factors.
An average is written before the moments, which complete a state: behind those no average is looked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import hashlib
import logging
from typing import Literal

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from sdpo_jax.errors import first_line
from sdpo_jax.serving.records import OptimizerState, Version
from sdpo_jax.serving.store import versions
from sdpo_jax.serving.store.blobs import Blobs
from sdpo_jax.serving.store.versions import AVERAGE, MOMENTS, Arrays, Base

_KINDS = {MOMENTS: ('mu', 'nu'), AVERAGE: ('average',)}  # The kinds of arrays in each file, named KIND/….
_COUNT, _SEAL = 'count', 'sha256'  # The number of steps, in `MOMENTS`; and the digest in each file.
_logger = logging.getLogger('sdpo_jax.serving')


def write(
  blobs: Blobs, folder: str, version: Version, arrays: Arrays, dtype: Literal['float32', 'bfloat16', 'none']
) -> int:
  """Store the state of a version, and return its bytes; a reader sees each of its files whole or not at all.

  Args:
    blobs: the blobs of the root.
    folder: the folder of the adapter.
    version: the version, whose folder exists.
    arrays: mu/…, nu/… and count, or none of these if they are 0; and average/…, if there is an average.
    dtype: how moments are stored; 'none': not at all.
  """
  files = {}
  if average := _of(AVERAGE, arrays):
    files[AVERAGE] = _sealed(version, average)
  if _COUNT in arrays and dtype != 'none':
    moments = _of(MOMENTS, arrays)
    if dtype == 'bfloat16':  # Their bits, since NumPy has no type of that name for safetensors.
      moments = {name: array.astype(ml_dtypes.bfloat16).view(np.uint16) for name, array in moments.items()}
    files[MOMENTS] = _sealed(version, {**moments, _COUNT: arrays[_COUNT]})
  for name, content in files.items():
    blobs.put(f'{folder}/versions/{versions.version_folder(version.number, version.digest)}/{name}', content)
  return sum(map(len, files.values()))


def read(blobs: Blobs, base: Base, folder: str, lineage: Sequence[Version]) -> OptimizerState:
  """Read the state from which a version's learning goes on.

  Args:
    blobs: the blobs of the root.
    base: the shape of the adapters.
    folder: the folder of the adapter.
    lineage: the version, its parent, and so on, as far as they are stored.
  """
  stored = {entry.key for entry in blobs.list(f'{folder}/versions')}
  arrays: dict[str, np.ndarray] = {}
  found: dict[str, int | None] = {}
  for file in (MOMENTS, AVERAGE):
    found[file] = None
    for version in lineage:
      key = f'{folder}/versions/{versions.version_folder(version.number, version.digest)}/{file}'
      if key not in stored:
        continue
      try:
        arrays |= _unsealed(base, version, file, blobs.get(key))
        found[file] = version.number
        lineage = lineage[: lineage.index(version) + 1]
        break
      except (ValueError, FileNotFoundError) as error:  # The next one is as good as if this had not been written.
        _logger.warning('%s/%s cannot be used: %s', blobs.name, key, error)
  return OptimizerState(arrays, found[MOMENTS], found[AVERAGE])


def own(version: Version, arrays: Arrays) -> OptimizerState:
  """Return the state of a version whose arrays are at hand."""
  moments, average = (version.number if there else None for there in (_COUNT in arrays, _of(AVERAGE, arrays)))
  return OptimizerState(arrays, moments, average)


def _of(file: str, arrays: Arrays) -> dict[str, np.ndarray]:
  return {name: array for name, array in arrays.items() if name.partition('/')[0] in _KINDS[file]}


def _sealed(version: Version, arrays: Arrays) -> bytes:
  ordered = {name: np.asarray(array, order='C') for name, array in arrays.items()}
  return safetensors.numpy.save({**ordered, _SEAL: _seal(version, ordered)})


def _unsealed(base: Base, version: Version, file: str, content: bytes) -> dict[str, np.ndarray]:
  """Return the arrays of a file; raises ValueError if it is damaged, or of another version or base."""
  try:
    arrays = safetensors.numpy.load(content)
  except safetensors.SafetensorError as error:
    raise ValueError(first_line(error)) from error
  seal = arrays.pop(_SEAL, None)
  if seal is None or seal.tobytes() != _seal(version, arrays).tobytes():
    raise ValueError('its digest is another one')
  for name, array in arrays.items():
    if array.dtype == np.uint16:
      arrays[name] = array.view(ml_dtypes.bfloat16).astype(np.float32)
  rows = {f'{kind}/{row.name}': row.shape for kind in _KINDS[file] for row in base.rows}
  versions.check_arrays(rows, {name: array for name, array in arrays.items() if name != _COUNT})
  return arrays


def _seal(version: Version, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """Return a digest of a version and of the names, types, shapes and numbers of arrays, [32] uint8."""
  found = hashlib.sha256(version.digest.encode())
  for name, array in sorted(arrays.items()):
    found.update(f'\n{name} {array.dtype} {array.shape}\n'.encode())
    found.update(array.tobytes() if array.ndim == 0 else array.data)
  return np.frombuffer(found.digest(), np.uint8)
