"""Writing of model directories, tensor by tensor, under a temporary name until the directory is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import json
import math
import os
import pathlib
import shutil
from types import MappingProxyType
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils
import ml_dtypes
import numpy as np

from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import is_full, is_local, make_directory, sync_directory, sync_tree
from sdpo_jax.models import checksums, file_lock, parameters, tensor_files
from sdpo_jax.models.stored_tensors import INDEX, WEIGHTS
from sdpo_jax.types import Tree

BAND_BYTES = 2**24  # Bytes of float32 that are fetched at once from a parameter that is one tensor.


@contextlib.contextmanager
def new_directory(path: str | os.PathLike, size: int) -> Iterator[pathlib.Path]:
  """Provide an empty directory next to `path`, which is synced and renamed to `path` when the block succeeds.

  If the block fails, nothing remains. If the process is killed, the temporary directory remains, and the next process
  that makes `path` removes it first. If several processes make `path` at once, all but one are refused.

  Args:
    path: local directory that does not exist, or is empty.
    size: bytes that will be written; less room than that is an error.

  Raises:
    UserError: `path` holds files, cannot be made, is being made by another process, or there is no room.
  """
  target = check_target(path)
  partial = target.with_name(target.name + '.partial')
  try:
    make_directory(target.parent)
    with file_lock.held(target.with_name(target.name + '.partial.lock'), functools.partial(_refuse, target)):
      check_target(path)  # Another process may just have made it.
      shutil.rmtree(partial, ignore_errors=True)
      partial.mkdir()
      try:
        _check_room(target, size)
        yield partial
        sync_tree(partial)
        partial.rename(target)  # An empty directory there is replaced.
        sync_directory(target.parent)
      except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
  except OSError as error:
    way_out = f'make room for {_gigabytes(size)}' if is_full(error) else 'name another directory'
    raise UserError(
      f'{target} could not be written ({first_line(error)}): {way_out}; nothing was left there.'
    ) from error


def check_target(path: str | os.PathLike) -> pathlib.Path:
  """Return the path of a directory to be made, with links resolved.

  Raises:
    UserError: it holds files, is not a directory, is in an object store, is a mount point, or cannot be accessed.
  """
  if not is_local(path):
    raise UserError(f'{path}: models are written to local directories: name one, and copy it there afterwards.')
  target = pathlib.Path(os.path.realpath(pathlib.Path(path).expanduser()))
  try:
    if target.exists() and not target.is_dir():
      raise UserError(f'{path} is a file: name a new directory, nothing is overwritten.')
    if target.exists() and any(target.iterdir()):
      raise UserError(f'{path} already exists and is not empty: name a new directory, nothing is overwritten.')
    if os.path.ismount(target):
      raise UserError(f'{path} is a mount point, which cannot be replaced by a directory: name a directory in it.')
  except OSError as error:
    raise UserError(f'{path} cannot be accessed ({first_line(error)}): name another directory.') from error
  return target


def write_directory(
  path: str | os.PathLike,
  parts: Sequence[tensor_files.TensorPart],
  dtype: str,
  *,
  weights: str = WEIGHTS,
  max_shard_bytes: float = math.inf,
  companions: Iterable[pathlib.Path] = (),
  texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
  """Write a directory of tensors, copied files and texts, with the SHA-256 of all of them.

  It gets its name only when it is complete and on the disk. In a run of several processes all call this, and process 0
  writes.

  Args:
    path: directory to make; it must not hold files.
    parts: the tensors.
    dtype: dtype of the tensors.
    weights: name of the file of the tensors, if one file is enough.
    max_shard_bytes: maximum bytes of tensors in a file, unless it holds only one; several files get an index.
    companions: files to copy.
    texts: files to write, name → content, in place of copies of the same name.

  Raises:
    UserError: `path` already holds files or cannot be written, or a parameter holds values that are not finite or too
      large for the dtype.
  """
  if jax.process_index() != 0:
    _write_weights(None, parts, dtype, weights, max_shard_bytes)
  else:
    with new_directory(path, _bytes_of(parts, dtype)) as partial:
      for file in companions:
        shutil.copyfile(file, partial / file.name)
      write_texts(partial, texts, _write_weights(partial, parts, dtype, weights, max_shard_bytes))
  barrier('the end of the export')


def write_texts(root: pathlib.Path, texts: Mapping[str, str], known: Mapping[str, str] = MappingProxyType({})) -> None:
  """Write the last files of a directory, name → content, and SHA256SUMS; `known` sums are not computed again."""
  for name, text in texts.items():
    (root / name).write_text(text, encoding='utf-8')
  checksums.write(root, known)


def _bytes_of(parts: Iterable[tensor_files.TensorPart], dtype: str) -> int:
  """Return the number of bytes of tensors in a dtype."""
  return sum(math.prod(part.shape) for part in parts) * stored_dtype(dtype).itemsize


def _write_weights(
  root: pathlib.Path | None,
  parts: Sequence[tensor_files.TensorPart],
  dtype: str,
  only: str,
  max_shard_bytes: float,
) -> dict[str, str]:
  """Write safetensors files, and their index if there are several; return their SHA-256 by name.

  One tensor is in memory at a time. Parameters that are sharded over processes are gathered tensor by tensor, so all
  processes must call this together; `root` is None in those that write nothing.
  """
  shards: list[list[tensor_files.TensorPart]] = [[]]
  held = 0  # Bytes of tensors in the last shard.
  for part in parts:
    size = _bytes_of([part], dtype)
    if shards[-1] and held + size > max_shard_bytes:
      shards.append([])
      held = 0
    shards[-1].append(part)
    held += size
  count = len(shards)
  names = [only] if count == 1 else [f'model-{i + 1:05d}-of-{count:05d}.safetensors' for i in range(count)]
  files = zip(names, shards, strict=True)
  sums = {name: _write_file(None if root is None else root / name, shard, dtype) for name, shard in files}
  if count > 1 and root is not None:
    index = {
      'metadata': {'total_size': _bytes_of(parts, dtype)},
      'weight_map': {part.name: name for name, shard in zip(names, shards, strict=True) for part in shard},
    }
    (root / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + '\n', encoding='utf-8')
  return sums


def _write_file(path: pathlib.Path | None, parts: Sequence[tensor_files.TensorPart], dtype: str) -> str:
  """Write a safetensors file and return its SHA-256 in hex; without a path, only make the tensors."""
  if path is not None:
    return tensor_files.write(path, parts, stored_dtype(dtype))
  for part in parts:
    part.make()
  return ''


def companions(source: pathlib.Path) -> list[pathlib.Path]:
  """Return the files of a model directory except weights: tokenizer, chat template, generation config, licence …"""
  weights = ('.safetensors', '.safetensors.index.json', '.bin', '.bin.index.json', '.pt', '.pth', '.gguf', '.onnx')
  files = (file for file in source.iterdir() if file.is_file() and not file.name.startswith('.'))
  return [file for file in files if not file.name.endswith((*weights, checksums.SUMS))]


def stored_dtype(name: str) -> np.dtype:
  """Return the NumPy dtype of a name, which may be bfloat16."""
  return np.dtype(getattr(ml_dtypes, name, name))


def parts(table: parameters.Table, params: Tree, dtype: str) -> list[tensor_files.TensorPart]:
  """Return the Hugging Face tensors of parameters, to be written.

  Args:
    table: table of all parameters.
    params: nested dict of arrays, jax or numpy.
    dtype: dtype in which they are stored.

  Raises:
    ValueError: a parameter has another shape than the table says.
  """
  leaves = [(parameter, parameters.get(params, parameter.path)) for parameter in table]
  return [part(parameter, leaf, layer, dtype) for parameter, leaf in leaves for layer in range(parameter.layers)]


def part(parameter: parameters.Parameter, leaf: Any, layer: int, dtype: str) -> tensor_files.TensorPart:
  """Return one Hugging Face tensor of a parameter with the array `leaf`; other arguments and errors as in `parts`."""
  if tuple(leaf.shape) != parameter.shape:
    raise ValueError(f'{parameter.name} has shape {leaf.shape}, not {parameter.shape}.')
  make: Callable[[], np.ndarray] = functools.partial(_tensor, parameter, leaf, layer, stored_dtype(dtype))
  return tensor_files.TensorPart(parameter.huggingface_name(layer), parameter.huggingface_shape, make)


def _tensor(parameter: parameters.Parameter, leaf: Any, layer: int, dtype: np.dtype) -> np.ndarray:
  name = parameter.huggingface_name(layer)
  if parameter.stacked:
    return parameter.to_huggingface(converted(name, _on_host(leaf[layer]), dtype))
  whole = np.empty(parameter.shape, dtype)
  for place, values in _parts_on_host(leaf):
    whole[place] = converted(name, values, dtype)
  return parameter.to_huggingface(whole)


def _parts_on_host(array: Any) -> Iterator[tuple[Any, np.ndarray]]:
  """Yield (index, values) of parts of an array, a few MB each, since JAX would cache a host copy of a whole array."""
  if not isinstance(array, jax.Array) or not array.is_fully_addressable:
    yield ..., _on_host(array)
    return
  for shard in array.addressable_shards:
    if shard.replica_id:
      continue
    rows, *others = shard.index
    offset, size = rows.start or 0, len(shard.data)
    count = min(size, max(1, BAND_BYTES // (4 * math.prod(shard.data.shape[1:]))))
    for start in range(0, size, count):
      start = min(start, size - count)  # All parts have the same size, so that one program is compiled.
      part = jax.lax.dynamic_slice_in_dim(shard.data, start, count)
      yield (slice(offset + start, offset + start + count), *others), np.asarray(part)


def converted(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Return part of a tensor, converted to another dtype.

  Raises:
    UserError: it holds values that are not finite or too large for the dtype.
  """
  with np.errstate(over='ignore'):  # Values that overflow are reported below.
    converted = values.astype(dtype, copy=False)
  if tensor_files.is_finite(converted):
    return converted
  if np.isfinite(values).all():
    wider = ' or '.join(f'--dtype={wide}' for wide in ('bfloat16', 'float32') if wide != dtype.name)
    raise UserError(
      f'Tensor {name!r} holds values up to {float(np.abs(values).max()):.3g}, but {dtype} ends at '
      f'{float(ml_dtypes.finfo(dtype).max):.3g}: export the model with {wider}.'
    )
  raise UserError(
    f'Tensor {name!r} holds values that are not finite (NaN or infinite), so that the model is useless: export another '
    'checkpoint (--step).'
  )


def _on_host(array: Any) -> np.ndarray:
  """Return an array on the host; all processes must call this together if it is sharded over processes."""
  if isinstance(array, jax.Array) and not array.is_fully_addressable:
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
  return np.asarray(array)


def _refuse(target: pathlib.Path) -> NoReturn:
  raise UserError(f'Another process is writing {target}: wait until it has ended, or name another directory.')


def _check_room(target: pathlib.Path, size: int) -> None:
  free = shutil.disk_usage(target.parent).free
  if free < size:
    raise UserError(
      f'{target} needs {_gigabytes(size)}, but {_gigabytes(free)} are free there: make room, name another directory, '
      'or store fewer bytes per weight (--dtype=bfloat16).'
    )


def _gigabytes(size: int) -> str:
  return f'{size / 1e9:.1f} GB'
