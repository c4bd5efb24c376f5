"""Model directories in an object store: copied to this machine's disk once, since every process reads parts of them
often.

A copy is made file by file and goes on where it was interrupted. Beside the files it holds a record of what they are
copies of: size and time of change of each. It is written before the files are, so that a file with its name is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
import fnmatch
import functools
import json
import logging
import os
import pathlib
import re
import shutil

from etils import epath

from models import file_lock
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import make_directory, sync_directory, sync_file, write_atomically

_logger = logging.getLogger('sdpo_jax.models')
FOLDER = 'SDPO_MODELS'  # The environment variable that names where copies are kept.
RECORD = '.source.json'  # In a copy: name → size and time of change in the object store.
PARTIAL = '.partial'  # How the name ends of a file that is being copied.
STREAMS = 4  # Files that are copied at once.

_Identity = list[int]  # Bytes, and seconds since 1970 (0 where the store does not say).


def is_remote(path: str | os.PathLike) -> bool:
  """Whether `path` is in an object store (gs://bucket/folder)."""
  return '://' in str(path)


@functools.cache
def fetch(address: str, patterns: Sequence[str], setting: str = 'model.path', what: str = 'model') -> pathlib.Path:
  """Return the local copy of a remote model directory, made or renewed where it lacks a file or holds another one.

  It is in $SDPO_MODELS, or ~/.cache/sdpo_jax/models. Of several processes of a machine one copies, and the others wait.

  Args:
    address: of the directory.
    patterns: of the names of files to copy.
    setting: that names it, for errors.
    what: the directory holds, for errors.

  Raises:
    UserError: it cannot be read or changes meanwhile, has none of these files, or there is no room for the copy.
  """
  try:
    sources = {path.name: path for path in epath.Path(address).iterdir()}
    wanted = [name for name in sources if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    identities = {name: _identity(sources[name]) for name in wanted}
  except ImportError as error:
    raise UserError(f'{setting}={address} needs a package that is not installed: {error}.') from error
  except Exception as error:  # Object stores raise many kinds; all mean the same here.
    raise UserError(
      f'{setting}={address} cannot be read ({first_line(error)}): check the address, and that this machine may read it.'
    ) from error
  if not wanted:
    raise UserError(f'{setting}={address} holds no {what}: put a Hugging Face {what} directory there.')
  folder = pathlib.Path(os.environ.get(FOLDER) or pathlib.Path.home() / '.cache' / 'sdpo_jax' / 'models')
  target = folder / re.sub(r'\W+', '_', address)
  try:
    make_directory(target)
    with file_lock.held(
      folder / f'{target.name}.lock',
      lambda: _logger.warning('Another process copies %s to %s: waiting for it.', address, target),
    ):
      _renew(target, {name: sources[name] for name in wanted}, identities, f'{setting}={address}', set(sources))
  except UserError:
    raise
  except Exception as error:  # As above, and of the disk.
    raise UserError(
      f'{setting}={address} could not be copied to {folder} ({first_line(error)}): make room there for '
      f'{sum(size for size, _ in identities.values()) / 1e9:.1f} GB, or name another folder in {FOLDER}; what was '
      'copied is kept.'
    ) from error
  return target


def _renew(
  target: pathlib.Path, sources: dict[str, epath.Path], identities: dict[str, _Identity], named: str, there: set[str]
) -> None:
  """Make a copy hold `sources`, and nothing that the store does not have (whose names are `there`) or has otherwise."""
  record = _recorded(target)
  kept = {
    name: identity for name, identity in record.items() if name in there and identities.get(name, identity) == identity
  }
  for path in target.iterdir():
    if path.name not in kept and path.name != RECORD:  # Another version, or half a file.
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
    UserError: it is not what it was when its identity was taken, so that the copy may be of two versions.
  """
  partial = target.with_name(target.name + PARTIAL)
  source.copy(partial, overwrite=True)
  if [partial.stat().st_size, _identity(source)] != [identity[0], identity]:
    raise UserError(f'{source} was changed while it was copied: start again when nobody writes it any more.')
  sync_file(partial)  # What has its name is trusted, also after the machine failed.
  partial.rename(target)


def _identity(path: epath.Path) -> _Identity:
  stat = path.stat()
  return [stat.length, stat.mtime]


def _recorded(target: pathlib.Path) -> dict[str, _Identity]:
  """Return what the files of a copy are copies of; nothing where that cannot be read, and all is copied anew."""
  try:
    record = json.loads((target / RECORD).read_text(encoding='utf-8'))
  except (FileNotFoundError, ValueError):
    return {}
  return record if isinstance(record, dict) else {}
