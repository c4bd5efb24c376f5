"""Model directories in an object store: copied to this machine's disk once, since weights are read by memory-mapping."""

from __future__ import annotations

from collections.abc import Sequence
import fnmatch
import functools
import os
import pathlib
import re
import shutil
import tempfile

from etils import epath

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import sync_directory, sync_tree

FOLDER = 'SDPO_MODELS'  # The environment variable that names where copies are kept.


def is_remote(path: str | os.PathLike) -> bool:
  """Whether `path` is in an object store (gs://bucket/folder)."""
  return '://' in str(path)


@functools.cache
def fetch(address: str, patterns: Sequence[str]) -> pathlib.Path:
  """Returns the local copy of a remote model directory, made or renewed where it lacks a file or one has another size.

  It is in $SDPO_MODELS, or ~/.cache/sdpo_jax/models, and appears there only when it is complete.

  Args:
    address: of the directory.
    patterns: of the names of files to copy.

  Raises:
    UserError: it cannot be read, has none of these files, or there is no room for the copy.
  """
  try:
    sources = {
      path.name: path
      for path in epath.Path(address).iterdir()
      if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
    }
    sizes = {name: path.stat().length for name, path in sources.items()}
  except ImportError as error:
    raise UserError(f'model.path={address} needs a package that is not installed: {error}.') from error
  except Exception as error:  # Object stores raise many kinds; all mean the same here.
    raise UserError(
      f'model.path={address} cannot be read ({first_line(error)}): check the address, and that this machine may read it.'
    ) from error
  if not sources:
    raise UserError(f'model.path={address} holds no model: put a Hugging Face model directory there.')
  folder = pathlib.Path(os.environ.get(FOLDER) or pathlib.Path.home() / '.cache' / 'sdpo_jax' / 'models')
  target = folder / re.sub(r'\W+', '_', address)
  if target.is_dir() and {path.name: path.stat().st_size for path in target.iterdir()} == sizes:
    return target
  try:
    folder.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=target.name, suffix='.partial', dir=folder))
    try:
      for name, source in sources.items():
        source.copy(partial / name, overwrite=True)
      sync_tree(partial)  # Its files are trusted by their sizes, which a machine that fails may leave without data.
      shutil.rmtree(target, ignore_errors=True)
      partial.rename(target)
      sync_directory(folder)
    finally:
      shutil.rmtree(partial, ignore_errors=True)
  except Exception as error:  # As above, and of the disk.
    raise UserError(
      f'model.path={address} could not be copied to {folder} ({first_line(error)}): make room there for '
      f'{sum(sizes.values()) / 1e9:.1f} GB, or name another folder in {FOLDER}.'
    ) from error
  return target
