"""Files that commands read and write: whether they can be, what JSON holds, and never half of one."""

from __future__ import annotations

from collections.abc import Mapping
import errno
import json
import math
import os
from typing import Any

from etils import epath
import numpy as np

from sdpo_jax.errors import UserError, first_line, short_repr


def is_local(path: epath.PathLike) -> bool:
  """Return whether `path` is on a file system, and not in an object store such as gs://."""
  return '://' not in str(path)


def is_full(error: BaseException) -> bool:
  """Return whether an error says that a disk or a quota is full."""
  return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_text(path: epath.PathLike, way_out: str) -> str:
  """Return the text of a file that a run has written.

  Args:
    path: of the file.
    way_out: what the user can do about a file that cannot be read, such as 'restore it'.

  Raises:
    UserError: it is not a file, cannot be read, or is not UTF-8.
  """
  path = epath.Path(path)
  if path.is_dir():
    raise UserError(f'{path} is a directory where a file belongs: {way_out}.')
  try:
    return path.read_bytes().decode('utf-8')
  except UnicodeDecodeError as error:
    raise UserError(f'{path} is not UTF-8 text (byte {error.start}: {error.reason}): {way_out}.') from error
  except OSError as error:
    raise UserError(f'{path} cannot be read ({first_line(error)}): {way_out}.') from error


def read_json_object(path: epath.PathLike, way_out: str) -> dict[str, Any]:
  """Return the JSON object in a file that a run has written; arguments and errors as `read_text`, or it holds none."""
  text = read_text(path, way_out)
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is not JSON ({first_line(error)}): {way_out}.') from error
  if not isinstance(value, dict):
    raise UserError(f'{path} does not hold a JSON object but {short_repr(value)}: {way_out}.')
  return value


def write_atomically(path: epath.PathLike, text: str) -> None:
  """Write `text` to `path`; whoever reads it sees the old file or the new one (an object store promises that).

  A link stays, and what is no file, such as a pipe, is written to.
  """
  path = epath.Path(path)
  # Whether it is a regular file, which etils says of a pipe too.
  if not is_local(path) or (os.path.exists(path) and not os.path.isfile(path)):
    path.write_text(text)
    return
  path = epath.Path(os.path.realpath(path))
  partial = path.parent / (path.name + '.partial')
  partial.write_text(text)
  partial.replace(path)


def check_output(path: epath.PathLike, *, overwrite: bool = True) -> None:
  """Make sure that a file can be written to `path`, the value of --output, without touching it.

  Its folder is made. What is written takes minutes to compute, so that a command had better check this first.

  Raises:
    UserError: it cannot be written, or it is there already and may not be overwritten.
  """
  target = epath.Path(path)
  if target.is_dir():
    raise UserError(f'--output={path} is a directory: name a file.')
  if not overwrite and target.exists():
    raise UserError(f'--output={path} already exists: name another file, or add --overwrite.')
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    way_out = 'make room' if is_full(error) else 'name another file'
    raise UserError(f'--output={path} cannot be written ({error}): {way_out}.') from error
  if is_local(path) and not all(os.access(place, os.W_OK) for place in (target.parent, target) if place.exists()):
    raise UserError(f'--output={path} may not be written: name another file.')


def jsonable(value: Any) -> Any:
  """Return `value` as JSON can hold it.

  Tuples and arrays become lists, numbers that are not finite null, and what JSON does not know its text.
  """
  if isinstance(value, Mapping):
    return {str(key): jsonable(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [jsonable(item) for item in value]
  if isinstance(value, np.ndarray | np.generic):
    return jsonable(value.tolist())
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  return value if value is None or isinstance(value, str | int) else str(value)
