"""SHA-256 of the files of a model directory: written by exports, compared where they are known.

They are known from a file SHA256SUMS (`sha256sum -c SHA256SUMS` reads it, too), and of what the Hugging Face hub's cache
holds from its layout: a large file there is a link to one that is named by its SHA-256.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import pathlib
import re
from types import MappingProxyType

from sdpo_jax.errors import UserError, first_line

SUMS = 'SHA256SUMS'
_SHA256 = re.compile(r'[0-9a-f]{64}')
_LINE = re.compile(r'([0-9a-f]{64}) [ *](?:\./)?(.+)')


def write(root: pathlib.Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
  """Write SHA256SUMS of all files in a directory; of those in `known` (name → SHA-256) it is taken from there."""
  names = sorted(path.name for path in root.iterdir() if path.is_file() and path.name != SUMS)
  text = ''.join(f'{known.get(name) or sha256(root / name)}  {name}\n' for name in names)
  (root / SUMS).write_text(text, encoding='utf-8')


def known(root: pathlib.Path) -> dict[str, str]:
  """Return the SHA-256 of the files of a model directory of which it is known, by name.

  Raises:
    UserError: SHA256SUMS cannot be read.
  """
  return _cached(root) | _listed(root)


def check(file: pathlib.Path, expected: str) -> None:
  """Compare a file with its SHA-256.

  Raises:
    UserError: it is not as it was written, or cannot be read.
  """
  try:
    found = sha256(file)
  except OSError as error:
    raise UserError(f'{file} cannot be read ({first_line(error)}): make it readable, or get it again.') from error
  if found != expected:
    raise UserError(
      f'{file} is not as it was written: its SHA-256 is {found[:16]}…, not {expected[:16]}…: get the file again, or '
      f'export the model anew; if it was changed on purpose, correct its line in {SUMS}.'
    )


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
        f'{file}, line {number} is not a SHA-256 with the name of a file: restore it, or remove it to load the model '
        'unchecked.'
      )
    found[match[2]] = match[1]
  return found


def _cached(root: pathlib.Path) -> dict[str, str]:
  """Return the SHA-256 of the files that are links to blobs of the hub's cache which are named by theirs."""
  links = (path for path in root.iterdir() if path.is_symlink())
  blobs = {path.name: path.resolve() for path in links}
  return {
    name: blob.name for name, blob in blobs.items() if blob.parent.name == 'blobs' and _SHA256.fullmatch(blob.name)
  }
