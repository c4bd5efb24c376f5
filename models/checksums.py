"""SHA-256 sums of the files of a model directory: exports write them, and loading compares those that are known.

They are known from a file SHA256SUMS (which `sha256sum -c SHA256SUMS` reads, too), and in the cache of the Hugging Face
hub from its layout: a large file there is a link to a file named by its SHA-256.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import hashlib
import os
import pathlib
import re
from types import MappingProxyType

import jax

from sdpo_jax.distributed.collectives import gathered
from sdpo_jax.errors import UserError, first_line

SUMS = 'SHA256SUMS'
READERS = 4  # Number of files that are read at once.
_SHA256 = re.compile(r'[0-9a-f]{64}')
_LINE = re.compile(r'([0-9a-f]{64}) [ *](?:\./)?(.+)')


def write(root: pathlib.Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
  """Write SHA256SUMS for all files in a directory; the sums in `known` (name → SHA-256) are not computed again."""
  names = sorted(path.name for path in root.iterdir() if path.is_file() and path.name != SUMS)
  text = ''.join(f'{known.get(name) or sha256(root / name)}  {name}\n' for name in names)
  (root / SUMS).write_text(text, encoding='utf-8')


def known(root: pathlib.Path) -> dict[str, str]:
  """Return the known SHA-256 sums of a model directory's files, by name.

  Raises:
    UserError: SHA256SUMS cannot be read.
  """
  return _cached(root) | _listed(root)


def differences(root: pathlib.Path, expected: Mapping[str, str]) -> dict[str, UserError]:
  """Compare files of a model directory with their SHA-256; return an error for each that differs, by name.

  Several files are read at once. In a run of several processes all must call this together; files that they share on
  one disk are divided among them. A process that finds a difference ends the run.
  """
  names = _share(root, sorted(expected))
  with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers:
    found = readers.map(lambda name: _difference(root / name, expected[name]), names)
    return {name: error for name, error in zip(names, found, strict=True) if error is not None}


def _share(root: pathlib.Path, names: Sequence[str]) -> Sequence[str]:
  """Return the files that this process compares.

  A file with the same inode, size and change time in several processes is on a shared disk, and one of them compares
  it. Each process compares all files on its own disk.
  """
  if jax.process_count() == 1:
    return names
  stats = {name: (root / name).stat() for name in names}
  identities = {name: (stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in stats.items()}
  all_identities = gathered(identities, 'the comparison of the model with its SHA-256')
  return files_to_compare(all_identities, jax.process_index())


def files_to_compare(identities: Sequence[Mapping[str, tuple[int, ...]]], process: int) -> list[str]:
  """Return the files that `process` compares, given the identities of the files of every process."""
  taken = []
  for index, name in enumerate(sorted(set().union(*identities))):
    sharing = [other for other, seen in enumerate(identities) if seen.get(name) == identities[process].get(name)]
    if name in identities[process] and sharing[index % len(sharing)] == process:
      taken.append(name)
  return taken


def _difference(file: pathlib.Path, expected: str) -> UserError | None:
  """Return an error if a file has another SHA-256 or cannot be read; None if it is as expected."""
  try:
    found = sha256(file)
  except OSError as error:
    return UserError(f'{file} cannot be read ({first_line(error)}): make it readable, or get it again.')
  if found != expected:
    return UserError(
      f'{file} is not as it was written: its SHA-256 is {found[:16]}…, not {expected[:16]}…: get the file '
      f'again, or export the model again; if it was changed on purpose, correct its line in {SUMS}.'
    )
  return None


def sha256(path: pathlib.Path) -> str:
  """Return the SHA-256 of a file, in hex."""
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _listed(root: pathlib.Path) -> dict[str, str]:
  file = root / SUMS
  if not file.is_file():
    return {}
  found = {}
  try:
    lines = file.read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(
      f'{file} cannot be read ({first_line(error)}): restore it, or remove it to load the model unchecked.'
    ) from error
  for number, line in enumerate(lines, 1):
    match = _LINE.fullmatch(line)
    if match is None:
      raise UserError(
        f'{file}, line {number} is not a SHA-256 and a file name: restore it, or remove it to load the model unchecked.'
      )
    if '/' not in match[2]:  # Only files of the directory itself are read, and none outside.
      found[match[2]] = match[1]
  return found


def _cached(root: pathlib.Path) -> dict[str, str]:
  """Return the SHA-256 of files that are links to blobs in the hub's cache, which are named by their SHA-256."""
  links = (path for path in root.iterdir() if path.is_symlink())
  blobs = {path.name: pathlib.Path(os.path.realpath(path)) for path in links}
  return {
    name: blob.name for name, blob in blobs.items() if blob.parent.name == 'blobs' and _SHA256.fullmatch(blob.name)
  }
