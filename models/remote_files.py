"""Local copies of model directories in an object store, made once per machine for all its processes.

A copy is made file by file, and resumed where it was interrupted. It also holds a record of the size and modification
time of every source file, which is written first, so that files with their final names are in the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
import contextlib
import fnmatch
import functools
import json
import logging
import os
import pathlib
import re
import shutil

from etils import epath

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import make_directory, sync_directory, sync_file, write_atomically
from sdpo_jax.models import file_lock

_logger = logging.getLogger('sdpo_jax.models')
FOLDER = 'SDPO_MODELS'  # Environment variable with the folder for copies.
RECORD = '.source.json'  # File in a copy: name → size and modification time in the object store.
PARTIAL = '.partial'  # Suffix of a file that is being copied.
STREAMS = 4  # Number of files that are copied at once.
ADDRESS = 'check the address, and that this machine may read it'  # What to do about a store that cannot be read.

_Identity = list[int]  # Size in bytes, and modification time in seconds since 1970 (0 if unknown).


@contextlib.contextmanager
def readable(named: str, way_out: str) -> Iterator[None]:
  """Turn errors of reading a path, which may be in an object store, into a UserError.

  Args:
    named: the path with its setting or flag, with which the message begins.
    way_out: what the user can do about a path that cannot be read.
  """
  try:
    yield
  except UserError:
    raise
  except ImportError as error:
    raise UserError(f'{named} needs a package that is not installed: {first_line(error)}.') from error
  except Exception as error:  # Object stores raise many types of errors; all mean the same here.
    raise UserError(f'{named} cannot be read ({first_line(error)}): {way_out}.') from error


@functools.cache
def fetch(address: str, patterns: Sequence[str], setting: str = 'model.path', what: str = 'model') -> pathlib.Path:
  """Return the local copy of a remote model directory, after copying files that are missing or have changed.

  It is in $SDPO_MODELS or else in ~/.cache/sdpo_jax/models. One process per machine copies while the others wait.

  Args:
    address: address of the directory.
    patterns: name patterns of the files to copy.
    setting: the setting that holds the address, for error messages.
    what: what the directory holds, for error messages.

  Raises:
    UserError: it cannot be read, changes meanwhile or has none of these files, or there is no room for the copy.
  """
  with readable(f'{setting}={address}', ADDRESS):
    sources = {path.name: path for path in epath.Path(address).iterdir()}
    wanted = [name for name in sources if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    identities = {name: _identity(sources[name]) for name in wanted}
  if not wanted:
    raise UserError(f'{setting}={address} holds no {what}: put a Hugging Face {what} directory there.')
  folder = pathlib.Path(os.environ.get(FOLDER) or pathlib.Path.home() / '.cache' / 'sdpo_jax' / 'models')
  target = folder / re.sub(r'\W+', '_', address)
  try:
    make_directory(target)
    with file_lock.held(
      folder / f'{target.name}.lock',
      lambda: _logger.warning('Another process is copying %s to %s: waiting for it.', address, target),
    ):
      _renew(target, {name: sources[name] for name in wanted}, identities, f'{setting}={address}', set(sources))
  except UserError:
    raise
  except Exception as error:  # As above, and errors of the disk.
    raise UserError(
      f'{setting}={address} could not be copied to {folder} ({first_line(error)}): make room there for '
      f'{sum(size for size, _ in identities.values()) / 1e9:.1f} GB, or name another folder in {FOLDER}; what was '
      'copied is kept.'
    ) from error
  return target


def _renew(
  target: pathlib.Path, sources: dict[str, epath.Path], identities: dict[str, _Identity], named: str, there: set[str]
) -> None:
  """Copy missing `sources`, after removing files that are no longer in the store (`there`) or have changed in it."""
  record = _recorded(target)
  kept = {
    name: identity for name, identity in record.items() if name in there and identities.get(name, identity) == identity
  }
  for path in target.iterdir():
    if path.name not in kept and path.name != RECORD:  # Another version, or an incomplete file.
      path.unlink()
  missing = [name for name in sources if not (target / name).exists()]
  if not missing:
    return
  sync_directory(target)
  needed, free = sum(identities[name][0] for name in missing), shutil.disk_usage(target).free
  if needed > free:
    raise UserError(
      f'{named} needs {needed / 1e9:.1f} GB more in {target.parent}, where {free / 1e9:.1f} GB are free: make '
      f'room there, or name another folder in {FOLDER}.'
    )
  write_atomically(target / RECORD, json.dumps(kept | identities, indent=2) + '\n')
  with ThreadPoolExecutor(STREAMS) as streams:
    for _ in streams.map(lambda name: _copy(sources[name], target / name, identities[name]), missing):
      pass
  sync_directory(target)


def _copy(source: epath.Path, target: pathlib.Path, identity: _Identity) -> None:
  """Copy a file.

  Raises:
    UserError: the source has changed since its identity was taken, so that the copy may mix two versions.
  """
  partial = target.with_name(target.name + PARTIAL)
  source.copy(partial, overwrite=True)
  if [partial.stat().st_size, _identity(source)] != [identity[0], identity]:
    raise UserError(f'{source} was changed while it was copied: start again when nothing writes to it.')
  sync_file(partial)  # A file with its final name is trusted, even after a failure of the machine.
  partial.rename(target)


def _identity(path: epath.Path) -> _Identity:
  stat = path.stat()
  return [stat.length, stat.mtime]


def _recorded(target: pathlib.Path) -> dict[str, _Identity]:
  """Return the record of a copy; an empty one if it is missing or damaged, so that all files are copied again."""
  try:
    record = json.loads((target / RECORD).read_text(encoding='utf-8'))
  except (FileNotFoundError, ValueError):
    return {}
  return record if isinstance(record, dict) else {}
