"""The layout of a store's root: keys and files of versions, their manifests, and the HEAD of an adapter.

  users/OWNER/adapters/ID/HEAD                                    the adapter and its newest version
  users/OWNER/adapters/ID/TOMBSTONE                               marks a deleted adapter
  users/OWNER/adapters/ID/versions/NUMBER-DIGEST/manifest.json    the version, and the digests of its files
                                                /adapter_config.json, adapter_model.safetensors    as PEFT reads them
                                                /slots.safetensors    instead, of a cartridge
                                                /moments.safetensors, average.safetensors    see `optimizer_states`

OWNER is a digest, since owners are arbitrary strings. A version belongs to an adapter if HEAD, or the manifest of the
next version, has the digest of its manifest. All other files are remains of unfinished commits. A version whose
manifest has a seed has no files for PEFT: they are drawn again when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import secrets
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from sdpo_jax.errors import first_line
from sdpo_jax.files import PARTIAL, jsonable
from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import lora, peft_config, peft_files
from sdpo_jax.serving.errors import Damaged
from sdpo_jax.serving.records import KEYS, AdapterRecord, Version
from sdpo_jax.serving.store.blobs import Blobs

# The arrays of a version by their names in the engine: factors/…, or those of a cartridge.
Arrays = Mapping[str, np.ndarray]

FORMAT = 2
BASE, HEAD, TOMBSTONE, MANIFEST = 'BASE', 'HEAD', 'TOMBSTONE', 'manifest.json'
MOMENTS, AVERAGE = 'moments.safetensors', 'average.safetensors'
SLOTS = 'slots.safetensors'
PEFT_FILES = (peft_config.FILE, peft_files.WEIGHTS)
FILES = (*PEFT_FILES, SLOTS)  # Of which a version has some.
_ADAPTER_KEY = re.compile(r'users/([0-9a-f]{32})/adapters/([0-9a-z-]+)/(.+)')
_VERSION_KEY = re.compile(r'versions/(([0-9]{8,})-([0-9a-f]{12}))/(.+)')


@dataclasses.dataclass(frozen=True)
class Base(peft_files.AdapterBase):
  """The model of all adapters of a root, and their common shape."""

  @functools.cached_property
  def tensors(self) -> Sequence[tuple[str, parameters.Parameter, int]]:
    """The tensors in the PEFT file of a version: name, row of the factor in the parameter table, and layer."""
    held = peft_files.held(self.adapter, self.rows)
    return [(peft_files.stored_name(row, layer, self.prefix), row, layer) for row, layer in held]

  @functools.cached_property
  def described(self) -> Mapping[str, Any]:
    """The properties that adapters of a root share, as JSON; without the model's path, since it may move."""
    config = {key: value for key, value in self.config.items() if key != 'base_model_name_or_path'}
    return json.loads(json.dumps({'fingerprint': jsonable(self.fingerprint), 'adapter': config}))

  @functools.cached_property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    """The shapes of the factors of a version, float32, by name."""
    return {f'factors/{row.name}': row.shape for row in self.rows}


def adapter_folder(owner: str, adapter: str) -> str:
  """Return the key prefix of an adapter: users/OWNER/adapters/ID."""
  digest = hashlib.sha256(owner.encode('utf-8', 'surrogatepass')).hexdigest()[:32]
  return f'users/{digest}/adapters/{adapter}'


@dataclasses.dataclass(frozen=True)
class BlobKey:
  """The parts of the key of a blob in the root."""

  folder: str  # The folder of the adapter.
  adapter: str  # Its id.
  rest: str  # HEAD, TOMBSTONE, a partial write of HEAD, or a path below versions/.
  version: str | None = None  # The folder name of the version; None: the blob is not of a version.
  number: int | None = None

  @property
  def is_partial(self) -> bool:
    """Whether the blob is an unfinished write of another one."""
    return PARTIAL.fullmatch(self.rest.rpartition('/')[2]) is not None

  @property
  def is_state(self) -> bool:
    """Whether the blob is a part of an optimizer state."""
    return self.rest.endswith((f'/{MOMENTS}', f'/{AVERAGE}'))


def parse_key(key: str) -> BlobKey | None:
  """Return the parts of a key; None: it does not have this layout."""
  found = _ADAPTER_KEY.fullmatch(key)
  if found is None:
    return None
  folder, rest = key.removesuffix(f'/{found[3]}'), found[3]
  if rest in (HEAD, TOMBSTONE) or PARTIAL.fullmatch(rest):
    return BlobKey(folder, found[2], rest)
  version = _VERSION_KEY.fullmatch(rest)
  if version is None or not (version[4] in (MANIFEST, MOMENTS, AVERAGE, *FILES) or PARTIAL.fullmatch(version[4])):
    return None
  return BlobKey(folder, found[2], rest, version[1], int(version[2]))


def version_folder(number: int, digest: str) -> str:
  """Return the folder name of a version, from the digest of its manifest."""
  return f'{number:08d}-{digest[:12]}'


# Arrays and files.


def files_of(base: Base, arrays: Arrays) -> dict[str, bytes]:
  """Serialize a version as PEFT's files, or as the file of a cartridge, by name.

  Raises:
    ValueError: the arrays are no cartridge, and do not have the shape of adapters of this base.
  """
  if KEYS in arrays:
    return {SLOTS: safetensors.numpy.save(dict(arrays))}
  check_arrays(base.shapes, arrays)
  tensors = {name: row.to_huggingface(arrays[f'factors/{row.name}'][layer]) for name, row, layer in base.tensors}
  return {
    peft_config.FILE: (json.dumps(base.config, indent=2) + '\n').encode(),
    peft_files.WEIGHTS: safetensors.numpy.save(tensors, {'format': 'pt'}),
  }


def arrays_of(base: Base, name: str, content: bytes) -> dict[str, np.ndarray]:
  """Read a version from its file of this name, bit for bit as `files_of` has stored it.

  Layers without factors of a matrix have zeros, as `fresh` gives them.

  Raises:
    ValueError: the file holds other arrays, or is not a valid safetensors file.
  """
  found = {name: np.zeros(shape, np.float32) for name, shape in base.shapes.items()}
  try:
    tensors = safetensors.numpy.load(content)
    if name == SLOTS:
      return tensors
    for name, row, layer in base.tensors:
      whole = tuple((0, size) for size in row.shape[1:])
      found[f'factors/{row.name}'][layer] = row.from_huggingface(tensors[name], whole)
  except (safetensors.SafetensorError, KeyError) as error:
    raise ValueError(first_line(error)) from error
  return found


def fresh(adapter: lora.Adapter, rows: parameters.Table, seed: int) -> dict[str, np.ndarray]:
  """Return factors that do not change the model yet, as PEFT draws them; in layers without factors they are 0."""
  # The two words of `jax.random.key(seed)`, which would compile a program if it were called.
  tree = parameters.draw(rows, [0, seed % 2**32], 0.0, lambda _, values: values)
  found = {f'factors/{row.name}': parameters.get(tree, row.path) for row in rows}
  held = {(row.name, layer) for row, layer in peft_files.held(adapter, rows)}
  for row in rows:
    found[f'factors/{row.name}'][[(row.name, layer) not in held for layer in range(row.layers)]] = 0
  return found


def check_arrays(shapes: Mapping[str, tuple[int, ...]], arrays: Arrays) -> None:
  """Raise ValueError unless arrays have these names and shapes, and are float32."""
  found = {name: array.shape for name, array in arrays.items() if array.dtype == np.float32}
  wrong = {name for name in shapes.keys() | arrays.keys() if found.get(name) != shapes.get(name)}
  if wrong:
    raise ValueError(f'The arrays {sorted(wrong)[:3]} do not have the names or shapes of adapters of this base.')


# The manifest of a version.


@dataclasses.dataclass(frozen=True)
class RequestId:
  """The identity of a request with an idempotency key, which outlives its process."""

  key: str  # Digest of its idempotency key.
  body: str  # Digest of its body.


@dataclasses.dataclass(frozen=True)
class VersionManifest:
  """The contents of a version's manifest.json."""

  version: Version
  previous: str | None  # The digest of the previous version's manifest; None: it is the first version.
  request: RequestId | None  # The request that made it; None: it had no idempotency key.
  files: Mapping[str, str]  # The SHA-256 of each file, by name.
  seed: int | None = None  # The seed from which the files are drawn when they are read; None: they are stored.

  @property
  def folder(self) -> str:
    """The name of the version's folder."""
    return version_folder(self.version.number, self.version.digest)


def make_manifest(
  version: Version, previous: str | None, request: RequestId | None, files: Mapping[str, bytes], seed: int | None
) -> tuple[VersionManifest, bytes]:
  """Make the manifest of a new version, whose digest is not known yet, see `VersionManifest`.

  Returns:
    The manifest with the digest, and its serialized content, which a nonce makes unique.
  """
  values = {
    'format': FORMAT,
    **{name: getattr(version, name) for name in _OF_VERSION},
    'previous': previous,
    'request': None if request is None else dataclasses.asdict(request),
    'files': {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    'seed': seed,
    'nonce': secrets.token_hex(8),
  }
  content = _json(values)
  return _manifest(values, hashlib.sha256(content).hexdigest()), content


def read_manifest(blobs: Blobs, folder: str, number: int, digest: str) -> VersionManifest:
  """Read the manifest of a version.

  Args:
    blobs: the blobs of the root.
    folder: the folder of the adapter.
    number: the number of the version.
    digest: the digest of the manifest, in full or its first characters.

  Raises:
    Damaged: the manifest is missing or has another digest.
  """
  key = f'{folder}/versions/{version_folder(number, digest)}/{MANIFEST}'
  content = _get(blobs, key)
  found = hashlib.sha256(content).hexdigest()
  values = _parsed(content)
  if not (found == digest if len(digest) == 64 else found.startswith(digest)) or values is None:
    raise Damaged(f'{blobs.name}/{key} is damaged: {_WAY_OUT}.')
  return _manifest(values, found)


def read_files(
  blobs: Blobs, base: Base, folder: str, manifest: VersionManifest, names: tuple[str, ...]
) -> dict[str, bytes]:
  """Read those of the named files that a version of the adapter in this folder has; return their contents by name.

  Raises:
    Damaged: a file is missing or differs from its digest in the manifest.
  """
  found, names = {}, tuple(name for name in names if name in manifest.files)
  if manifest.seed is not None:
    drawn = files_of(base, fresh(base.adapter, base.rows, manifest.seed))
    if hashlib.sha256(drawn[peft_files.WEIGHTS]).hexdigest() != manifest.files[peft_files.WEIGHTS]:
      raise Damaged(
        f'{blobs.name}/{folder}: version {manifest.version.number} is not stored but drawn from a seed, and this '
        'version of NumPy draws other numbers than when it was made: undo to another version.'
      )
    return {name: drawn[name] for name in names}  # The configuration names the model's path, which may have moved.
  for name in names:
    key = f'{folder}/versions/{manifest.folder}/{name}'
    found[name] = _get(blobs, key)
    if hashlib.sha256(found[name]).hexdigest() != manifest.files.get(name):
      raise Damaged(f'{blobs.name}/{key} is damaged: {_WAY_OUT}.')
  return found


_OF_VERSION = ('adapter', 'number', 'parent', 'reason', 'created', 'details')  # The fields of `Version` in a manifest.
_WAY_OUT = 'restore it from a copy, or undo to another version of the adapter'


def _get(blobs: Blobs, key: str) -> bytes:
  try:
    return blobs.get(key)
  except FileNotFoundError:
    raise Damaged(f'{blobs.name}/{key} is missing: {_WAY_OUT}.') from None


def _manifest(values: Mapping[str, Any], digest: str) -> VersionManifest:
  version = Version(digest=digest, **{name: values[name] for name in _OF_VERSION})
  request = None if values['request'] is None else RequestId(**values['request'])
  return VersionManifest(version, values['previous'], request, values['files'], values['seed'])


# The HEAD of an adapter.


@dataclasses.dataclass(frozen=True)
class Head:
  """The contents of an adapter's HEAD."""

  adapter: AdapterRecord
  digest: str  # Digest of the manifest of its newest version.
  origin: str  # Digest of the manifest of version 0, which is never removed.
  kept_from: int = 1  # The versions after 0 and before this one were removed, except pinned ones.
  pinned: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Digests of manifests by number, in decimal.
  epoch: int = 0  # That of the lease under which it was written; 0: there is one process only.
  deleted: bool = False  # Whether a tombstone follows.


def tag_of(content: bytes) -> str:
  """Return the digest of the content of a HEAD, by which two HEADs can be told apart."""
  return hashlib.sha256(content).hexdigest()


def bury(blobs: Blobs, folder: str, id: str, now: float) -> None:
  """Write the TOMBSTONE of an adapter in its folder, unless it has one; `now` in seconds since the epoch."""
  content = (json.dumps({'format': FORMAT, 'adapter': id, 'deleted': now}) + '\n').encode()
  with contextlib.suppress(FileExistsError):
    blobs.put_new(folder, {TOMBSTONE: content})


def write_head(head: Head) -> bytes:
  """Serialize a HEAD; a nonce makes the content unique."""
  values = {'format': FORMAT, **dataclasses.asdict(head), 'nonce': secrets.token_hex(8)}
  return _json({**values, 'sha256': hashlib.sha256(_json(values)).hexdigest()})


def read_head(content: bytes, name: str, folder: str) -> Head:
  """Parse the content of a HEAD.

  Args:
    content: the content of the blob.
    name: the name of the blob, for error messages.
    folder: the folder of the adapter.

  Raises:
    Damaged: the content is invalid, or belongs to another adapter.
  """
  values = _parsed(content) or {}
  digest = values.pop('sha256', None)
  try:
    adapter = AdapterRecord(**values['adapter'])
    names = ('digest', 'origin', 'kept_from', 'pinned')
    late = {name: values[name] for name in ('epoch', 'deleted') if name in values}
    head = Head(adapter, *(values[name] for name in names), **late)
    known = values['format'] == FORMAT and digest == hashlib.sha256(_json(values)).hexdigest()
    known = known and adapter_folder(adapter.owner, adapter.id) == folder
  except (TypeError, KeyError):
    known = False
  if not known:
    raise Damaged(f'{name} is damaged: restore it from a copy; the versions beside it are untouched.')
  return head


def _json(values: Mapping[str, Any]) -> bytes:
  return (json.dumps(values, indent=1, allow_nan=False) + '\n').encode('ascii')


def _parsed(content: bytes) -> dict[str, Any] | None:
  try:
    values = json.loads(content)
  except (ValueError, RecursionError):
    return None
  return values if isinstance(values, dict) else None
