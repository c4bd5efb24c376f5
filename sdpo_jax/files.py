"""Files that commands read and write: checks with readable errors, JSON, atomic writes and syncing to the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from typing import Any

from etils import epath
import numpy as np

from sdpo_jax.errors import UserError, first_line, short_repr

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_cannot_sync: set[int] = set()  # Devices for which the warning has been logged.
_logger = logging.getLogger('sdpo_jax.files')


def is_local(path: epath.PathLike) -> bool:
  """Return whether `path` is on a file system, and not in an object store such as gs://."""
  return '://' not in str(path)


def is_full(error: BaseException) -> bool:
  """Return whether an error says that a disk or a quota is full."""
  return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_failing(error: BaseException) -> bool:
  """Return whether an error says that a disk, or the way to it, fails or has become read-only."""
  return isinstance(error, OSError) and error.errno in (errno.EIO, errno.EROFS, errno.ESTALE)


def check_file(path: epath.PathLike, way_out: str) -> None:
  """Raise a UserError if a path exists but is not a regular file: opening a pipe may block forever."""
  path = epath.Path(path)
  if path.is_dir():
    raise UserError(f'{path} is a folder where a file belongs: {way_out}.')
  if is_local(path) and os.path.exists(path) and not os.path.isfile(path):
    raise UserError(f'{path} is a pipe or a device where a file belongs: {way_out}.')


def read_bytes(path: epath.PathLike, way_out: str) -> bytes:
  """Return the content of a file written by a run.

  Args:
    path: path of the file.
    way_out: what the user can do about a file that cannot be read, such as 'restore it'.

  Raises:
    UserError: it is not a file, or cannot be read.
  """
  with _readable(path, way_out):
    check_file(path, way_out)
    return epath.Path(path).read_bytes()


def file_size(path: epath.PathLike, way_out: str) -> int:
  """Return the size of a file in bytes; arguments and errors as in `read_bytes`."""
  with _readable(path, way_out):
    check_file(path, way_out)
    return epath.Path(path).stat().length


@contextlib.contextmanager
def _readable(path: epath.PathLike, way_out: str) -> Iterator[None]:
  """Turn the errors of reading a file into a UserError."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    # Object stores raise many types of errors, also if their package is missing; all mean the same here.
    if is_local(path) and not isinstance(error, OSError):
      raise
    raise UserError(f'{path} cannot be read ({first_line(error)}): {way_out}.') from error


def read_text(path: epath.PathLike, way_out: str) -> str:
  """Return the text of a file written by a run; arguments and errors as in `read_bytes`, or it is not UTF-8."""
  try:
    return read_bytes(path, way_out).decode('utf-8')
  except UnicodeDecodeError as error:
    raise UserError(f'{path} is not UTF-8 text (byte {error.start}: {error.reason}): {way_out}.') from error


def json_object(text: str | bytes) -> dict[str, Any] | None:
  """Return the JSON object in a text; None if it holds none."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def read_json_object(path: epath.PathLike, way_out: str) -> dict[str, Any]:
  """Return the JSON object in a file written by a run; arguments and errors as in `read_text`, or it holds none."""
  text = read_text(path, way_out)
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is not JSON ({first_line(error)}): {way_out}.') from error
  if not isinstance(value, dict):
    raise UserError(f'{path} does not hold a JSON object but {short_repr(value)}: {way_out}.')
  return value


def sync_file(path: epath.PathLike) -> None:
  """Sync the data of a file to the disk; in an object store it is durable already.

  Raises:
    OSError: syncing failed. The data may now be lost even if a second call succeeds: write the file again.
  """
  if is_local(path):
    _sync(path, os.O_RDONLY | os.O_NOFOLLOW)


def sync_directory(path: epath.PathLike) -> None:
  """Sync the entries of a directory, i.e. its file names, to the disk; errors as in `sync_file`."""
  if is_local(path):
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_tree(path: epath.PathLike) -> None:
  """Sync every file below a directory, then every directory, to the disk; errors as in `sync_file`.

  Links are not followed.
  """
  if not is_local(path):
    return
  folders = []
  for folder, _, names in os.walk(path, onerror=_raise):
    folders.append(folder)
    for name in names:
      file = os.path.join(folder, name)
      if stat.S_ISREG(os.lstat(file).st_mode):
        sync_file(file)
  for folder in reversed(folders):  # The walk yields a directory before its subdirectories.
    sync_directory(folder)


def _raise(error: OSError) -> None:
  raise error


def _sync(path: epath.PathLike, flags: int) -> None:
  descriptor = os.open(path, flags)
  try:
    _sync_descriptor(descriptor, path)
  finally:
    os.close(descriptor)


def _sync_descriptor(descriptor: int, path: epath.PathLike) -> None:
  """Sync an open file or directory; if its file system cannot (EINVAL, ENOTSUP, ENOSYS), warn once per device."""
  try:
    os.fsync(descriptor)
  except OSError as error:
    if error.errno not in _CANNOT_SYNC:
      raise OSError(error.errno, f'{os.strerror(error.errno)}, when it was synced to the disk', str(path)) from error
    device = os.fstat(descriptor).st_dev
    if device not in _cannot_sync:
      _cannot_sync.add(device)
      _logger.warning(
        'The file system of %s cannot sync (%s): what is written there may be lost if the machine fails.',
        path,
        os.strerror(error.errno),
      )


def make_directory(path: epath.PathLike) -> None:
  """Make a directory and its missing parents, and sync the names of those that were made to the disk.

  Raises:
    OSError: it cannot be made.
  """
  path = epath.Path(path)
  if not is_local(path):
    path.mkdir(parents=True, exist_ok=True)
    return
  missing, place = [], os.path.realpath(path)
  while not os.path.lexists(place):
    missing.append(place)
    place = os.path.dirname(place)
  os.makedirs(path, exist_ok=True)
  for made in missing:
    sync_directory(os.path.dirname(made))


def sync_ancestors(path: epath.PathLike) -> None:
  """Sync the names of a directory and of all its parents to the disk; errors as in `sync_file`.

  A process may have been killed after making them and before syncing. Directories that may not be opened are skipped:
  somebody else made them.
  """
  if not is_local(path):
    return
  for place in epath.Path(os.path.realpath(path)).parents:
    with contextlib.suppress(PermissionError):
      sync_directory(place)


PARTIAL = re.compile(r'\.[0-9a-f]{16}\.partial')  # The names of files that are being written.


def write_atomically(path: epath.PathLike, text: str | bytes, mode: int = 0o666) -> None:
  """Write `text` to `path` atomically: whatever fails, the file holds either the old content or the new one.

  Text is encoded as UTF-8. An object store writes atomically by itself. On a file system the content is on the disk
  before its file gets the name, and the name is on the disk when this returns. A link at `path` is replaced, not
  followed. Several processes may write at once; the last one wins. `mode` is the file's permissions, before the
  process's umask.

  Raises:
    OSError: writing failed; the old content is still there, unless only the name could not be synced.
  """
  path = epath.Path(path)
  content = text.encode('utf-8') if isinstance(text, str) else text
  if not is_local(path):
    path.write_bytes(content)
    return
  partial = path.parent / f'.{secrets.token_hex(8)}.partial'
  try:
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with open(descriptor, 'wb') as file:
      file.write(content)
      file.flush()
      _sync_descriptor(descriptor, path)
    os.replace(partial, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(partial)
    raise
  sync_directory(path.parent)


def remove_partials(folder: epath.PathLike, age: float = 0.0) -> None:
  """Remove the partial files that killed processes have left in a local directory during `write_atomically`.

  Args:
    folder: directory; with age 0 no other process may write there, since its write would fail.
    age: remove only files that were last modified this many seconds ago; must exceed the time of others' writes.
  """
  if not is_local(folder) or not os.path.isdir(folder):
    return
  for name in os.listdir(folder):
    if PARTIAL.fullmatch(name):
      path = os.path.join(folder, name)
      with contextlib.suppress(FileNotFoundError):
        if not age or os.lstat(path).st_mtime < time.time() - age:
          os.unlink(path)


def append(path: epath.PathLike, text: str) -> None:
  """Append to a local file, which is created if missing; only `sync_file` makes the text durable.

  Raises:
    OSError: not all of it could be written, or `path` is a link, which is not followed.
  """
  descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
  with open(descriptor, 'a', encoding='utf-8', newline='') as file:
    file.write(text)


def write_output(path: epath.PathLike, text: str | bytes) -> None:
  """Write `text` to `path`, the value of --output, as `write_atomically` does.

  A link is followed, since the user chose it; a path that is not a regular file, such as a pipe, is written directly.
  """
  # Not by etils, which takes a pipe for a regular file.
  if is_local(path) and os.path.exists(path) and not os.path.isfile(path):
    epath.Path(path).write_bytes(text.encode('utf-8') if isinstance(text, str) else text)
    return
  write_atomically(os.path.realpath(path) if is_local(path) else path, text)


def check_output(path: epath.PathLike, *, overwrite: bool = True) -> None:
  """Check that a file can be written to `path`, the value of --output, without touching the file.

  Its folder is created. Commands check this first, because their output takes minutes to compute.

  Raises:
    UserError: it cannot be written, or it already exists and `overwrite` is false.
  """
  try:
    target = epath.Path(path)
    is_folder = target.is_dir()
  except KeyError as error:  # etils does not know the scheme.
    raise UserError(f'--output={path} has an unknown scheme: name a local file, or gs://….') from error
  except ImportError as error:
    raise UserError(f'--output={path} needs a package that is not installed: {first_line(error)}.') from error
  if is_folder:
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
  """Return `value` converted to types that JSON supports.

  Tuples and arrays become lists, non-finite numbers become null, and values of other types become their `str`.
  """
  if isinstance(value, Mapping):
    return {str(key): jsonable(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [jsonable(item) for item in value]
  if isinstance(value, np.ndarray | np.generic):
    return jsonable(value.tolist())
  if isinstance(value, float):
    return value + 0.0 if math.isfinite(value) else None  # No −0.
  return value if value is None or isinstance(value, str | int) else str(value)


def as_json(value: Any) -> bytes:
  """Return a value as compact JSON; non-finite numbers become null, and lone surrogates are escaped."""
  write = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
  try:
    return write(value).encode()
  except (TypeError, ValueError):  # Arrays or non-finite numbers: converting every value is far slower than writing.
    text = write(jsonable(value))
  try:
    return text.encode()
  except UnicodeEncodeError:
    return json.dumps(json.loads(text), separators=(',', ':')).encode()
