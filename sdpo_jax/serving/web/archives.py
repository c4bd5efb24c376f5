"""Files of an adapter or a cartridge as one zip file; the names in it are checked, and never used as paths."""

from __future__ import annotations

from collections.abc import Mapping
import io
import zipfile
import zlib

from sdpo_jax.errors import printable
from sdpo_jax.serving.errors import InvalidRequest, TooLarge

PEFT = frozenset({'adapter_config.json', 'adapter_model.safetensors', 'base_fingerprint.json'})
CARTRIDGE = frozenset({'cartridge.json', 'cartridge.safetensors', 'cartridge.pt', 'config.yaml'})
_TORCH = '.pt'  # The end of a cartridge's name in the published format, which becomes cartridge.pt.
_BESIDE = frozenset({'README.md', 'SHA256SUMS'})  # What exports have beside.
_RATIO = 20  # The largest expansion of a zip that is read; LoRA factors are hardly compressible.
_SLACK = 2**20  # Additional bytes, for small files.
_MOST = 16  # Files in a zip.


def zipped(files: Mapping[str, bytes]) -> bytes:
  """Return files as an uncompressed zip, the same bytes for the same files."""
  content = io.BytesIO()
  with zipfile.ZipFile(content, 'w', zipfile.ZIP_STORED) as archive:
    for name, body in sorted(files.items()):
      archive.writestr(zipfile.ZipInfo(name), body)
  return content.getvalue()


def unzipped(content: bytes) -> dict[str, bytes]:
  """Return the files of an adapter in a zip, where they may be in one folder.

  Raises:
    InvalidRequest: it is not a zip, holds other files, or one of them twice.
    TooLarge: the files expand far more than LoRA factors do.
  """
  try:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
      return _read(archive, _RATIO * len(content) + _SLACK)
  except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
    raise InvalidRequest(
      'The body is not a readable zip: send one with adapter_config.json and adapter_model.safetensors, or with the '
      'files of a cartridge.'
    ) from error


def _read(archive: zipfile.ZipFile, limit: int) -> dict[str, bytes]:
  entries = [entry for entry in archive.infolist() if not entry.is_dir()]
  if len(entries) > _MOST:
    raise InvalidRequest(f'The zip has {len(entries)} files: send those of an adapter or a cartridge.')
  files: dict[str, bytes] = {}
  for entry in entries:
    *folder, name = entry.filename.replace('\\', '/').split('/')
    name = f'cartridge{_TORCH}' if name.endswith(_TORCH) else name
    both = {name, *files} - _BESIDE
    if len(folder) > 1 or not (both <= PEFT or both <= CARTRIDGE):
      raise InvalidRequest(
        f'The zip holds {printable(entry.filename)!r}: send adapter_config.json and adapter_model.safetensors and '
        'nothing else, or the files of a cartridge.'
      )
    if name in files:
      raise InvalidRequest(f'The zip holds {name} twice: send it once.')
    with archive.open(entry) as file:
      files[name] = file.read(limit + 1)
    limit -= len(files[name])
    if limit < 0:
      raise TooLarge('The files in the zip are far larger than the zip: send it without compression.')
  return files
