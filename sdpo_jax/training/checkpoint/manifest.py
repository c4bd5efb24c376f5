"""The manifest of a checkpoint, a description of its contents, by which they are verified when read.

`manifest.json` is the last file of a checkpoint to be written. It holds the digest of every array (`digests`), and the
size and SHA-256 of every file that holds no array data, and is sealed (`sealed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
from typing import Any

from etils import epath

from sdpo_jax.training.checkpoint import digests
from sdpo_jax.training.directory import sealed
from sdpo_jax.training.directory.published_checkpoints import MANIFEST

FORMAT = 1
_ARRAYS = 'd'  # Name of the folders in which Orbax stores array data.


class DamagedError(Exception):
  """A checkpoint differs from what was written; the message completes 'the checkpoint cannot be read: …'."""


@dataclasses.dataclass(frozen=True)
class CheckpointManifest:
  """The contents of `manifest.json`, which describe a checkpoint."""

  step: int
  fencing_epoch: int  # Epoch of the start that wrote the checkpoint (`directory.epochs`).
  leaves: Mapping[str, str]  # Path of an array of the state → its digest.
  metrics: Mapping[str, float]  # The finite metrics of the step.
  files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)  # Name → its bytes and sha256.
  line_digest: str = ''  # That of the last line of metrics.jsonl by then; '': there was none, or it had none.

  @property
  def state_digest(self) -> str:
    """The digest of the whole state."""
    return digests.state_digest(self.leaves)

  def to_json(self) -> str:
    """Return the text of `manifest.json`."""
    values = {'format': FORMAT, **dataclasses.asdict(self), 'state_digest': self.state_digest}
    return sealed.seal(values)


def read_manifest(folder: epath.Path) -> CheckpointManifest:
  """Return the manifest of a checkpoint.

  Raises:
    FileNotFoundError: there is none.
    DamagedError: it was changed, or belongs to another step or format.
    OSError: it cannot be read.
  """
  content = (folder / MANIFEST).read_bytes()
  try:
    values = sealed.unseal(content)
  except ValueError as error:
    raise DamagedError(f'its {MANIFEST} is damaged') from error
  if values.get('format') != FORMAT:
    raise DamagedError(f'its {MANIFEST} has the format {values.get("format")!r}, not {FORMAT}')
  if str(values['step']) != folder.name:
    raise DamagedError(f'its {MANIFEST} is that of step {values["step"]}')
  names = [field.name for field in dataclasses.fields(CheckpointManifest) if field.name in values]
  return CheckpointManifest(**{name: values[name] for name in names})


def described_files(folder: epath.Path) -> dict[str, dict[str, Any]]:
  """Return size and SHA-256 of a checkpoint's files by relative name, except for array data and the manifest."""
  found = {}
  for name in sorted(_host_files(folder)):
    content = (folder / name).read_bytes()
    found[name] = {'bytes': len(content), 'sha256': hashlib.sha256(content).hexdigest()}
  return found


def _host_files(folder: epath.Path, prefix: str = '') -> Iterator[str]:
  for path in folder.iterdir():
    if path.is_dir():
      if path.name != _ARRAYS:
        yield from _host_files(path, f'{prefix}{path.name}/')
    elif prefix or path.name != MANIFEST:
      yield prefix + path.name


def check_files(folder: epath.Path, manifest: CheckpointManifest) -> None:
  """Compare the files of a checkpoint with its manifest.

  Raises:
    DamagedError: a file is missing or was changed; names the first one.
    OSError: a file cannot be read.
  """
  for name, expected in manifest.files.items():
    try:
      content = (folder / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
      raise DamagedError(f'its file {name} is missing') from error
    if len(content) != expected['bytes']:
      raise DamagedError(f'its file {name} has {len(content)} bytes, not {expected["bytes"]}')
    if hashlib.sha256(content).hexdigest() != expected['sha256']:
      raise DamagedError(f'its file {name} is not as it was written')


def check_leaves(found: Mapping[str, str], manifest: CheckpointManifest) -> None:
  """Compare digests of restored arrays, all or some of the state's, with those of a manifest.

  Raises:
    DamagedError: an array was changed; names the first one.
  """
  for name, digest in found.items():
    if manifest.leaves.get(name) != digest:
      raise DamagedError(f'the array {name} is not as it was written')
