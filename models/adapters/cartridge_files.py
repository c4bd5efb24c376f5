"""Cartridge directories in this project's format: the slots as safetensors, and a manifest that names the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import tempfile
from types import MappingProxyType
from typing import Any, Literal

from etils import epath
import jax
import numpy as np

from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.errors import UserError, first_line, printable, short_repr
from sdpo_jax.files import check_file, is_local, jsonable, read_json_object
from sdpo_jax.models import checksums, exporting, identity, tensor_files
from sdpo_jax.models.adapters.cartridge import Cartridge, check, check_fits, narrowed
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.architecture import Architecture

TENSORS = 'cartridge.safetensors'  # `layers.{i}.key` and `layers.{i}.value`, each [KV, P, head_dim].
MANIFEST = 'cartridge.json'
FORMAT, VERSION = 'sdpo_jax.cartridge', 1
_WAY_OUT = 'get the directory again, or export the cartridge again'


@dataclasses.dataclass(frozen=True)
class Origin:
  """The model to which a cartridge belongs; in other models its slots are meaningless."""

  name: str  # The path or name from which it was loaded; it may have moved since.
  # Rotary embeddings, windows and score scale of its architecture, as JSON values; the keys depend on them.
  attention: Mapping[str, Any]
  weights: Mapping[str, str]  # Result of `identity.of_weights`.

  @classmethod
  def of(cls, path: str | os.PathLike, config: Architecture, weights: Mapping[str, str] | None = None) -> Origin:
    """Return the origin for a model directory or hub name; `weights` as in `Origin`, None: they are read."""
    attention = {
      'ropes': [dataclasses.asdict(rope) for rope in config.ropes],
      'layer_ropes': config.layer_ropes,
      'windows': config.windows,
      'query_scale': config.query_scale,
    }
    return cls(str(path), jsonable(attention), identity.of_weights(path) if weights is None else weights)


@dataclasses.dataclass(frozen=True)
class Description:
  """The properties of a cartridge that can be read without its slots and its model."""

  layers: int
  kv_heads: int
  head_dim: int
  prefix: KVPrefix
  sha256: str  # SHA-256 of the file that holds its slots.
  origin: Origin | None = None  # None: unknown, as for published cartridges.
  # Notes of the program that made it, such as the document and the step.
  about: Mapping[str, str] = dataclasses.field(default_factory=dict)


def write(
  path: str | os.PathLike,
  cartridge: Cartridge,
  origin: Origin,
  dtype: Literal['float32', 'bfloat16'] = 'float32',
  about: Mapping[str, str] = MappingProxyType({}),
  texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
  """Write the directory of a cartridge.

  It gets its name only when it is complete and on the disk. In a run of several processes all call this, and process 0
  writes.

  Args:
    path: directory to make; it must not hold files.
    cartridge: the same in all processes.
    origin: the model that it was made for.
    dtype: dtype of the stored tensors.
    about: notes to store with it.
    texts: further files to write, name → content.

  Raises:
    UserError: `path` holds files or cannot be written, or values of the cartridge are too large for the dtype.
  """
  if jax.process_index() == 0:
    check(cartridge, str(path))
    stored = exporting.stored_dtype(dtype)
    size = (cartridge.keys.size + cartridge.values.size) * stored.itemsize
    with exporting.new_directory(path, size) as partial:
      sha256 = tensor_files.write(partial / TENSORS, _parts(cartridge, stored), stored)
      values = {
        'format': FORMAT,
        'version': VERSION,
        'layers': cartridge.layers,
        'kv_heads': cartridge.kv_heads,
        'head_dim': cartridge.head_dim,
        'slots': cartridge.slots,
        'frozen': cartridge.frozen,
        'first_position': 0,
        'text_position': cartridge.slots,
        'within_windows': cartridge.within_windows,
        'model': dataclasses.asdict(origin),
        'sha256': sha256,
        'about': dict(about),
      }
      text = json.dumps(values | {'digest': identity.digest(values)}, indent=2, ensure_ascii=False)
      exporting.write_texts(partial, {**texts, MANIFEST: text + '\n'}, {TENSORS: sha256})
  barrier('the end of the export of the cartridge')


def _parts(cartridge: Cartridge, dtype: np.dtype) -> list[tensor_files.TensorPart]:
  shape = cartridge.keys.shape[1:]
  return [
    tensor_files.TensorPart(name, shape, functools.partial(narrowed, array[layer], dtype, name))
    for layer in range(cartridge.layers)
    for name, array in ((f'layers.{layer}.key', cartridge.keys), (f'layers.{layer}.value', cartridge.values))
  ]


def read(path: str | os.PathLike, origin: Origin, config: Architecture) -> Cartridge:
  """Return the cartridge in a directory.

  Args:
    path: path of the directory, local or in an object store.
    origin: the model that it is for, `Origin.of`.
    config: architecture of that model.

  Raises:
    UserError: the directory is missing, damaged or of a later version, or its cartridge belongs to another model.
  """
  manifest = read_manifest(path)
  _check_origin(path, manifest.origin, origin)
  check_file(_place(path, TENSORS), _WAY_OUT)
  with _local(path) as file:
    try:
      found = checksums.sha256(file)
    except OSError as error:
      raise UserError(f'{_place(path, TENSORS)} cannot be read ({first_line(error)}): {_WAY_OUT}.') from error
    if found != manifest.sha256:
      raise UserError(
        f'{_place(path, TENSORS)} is not as it was written: its SHA-256 is {found[:16]}…, but {MANIFEST} says '
        f'{manifest.sha256[:16]}…: {_WAY_OUT}.'
      )
    with tensor_files.TensorFile(file) as opened:
      keys, values = (_stacked(opened, manifest, name, _place(path, TENSORS)) for name in ('key', 'value'))
  cartridge = Cartridge(keys, values, manifest.prefix.frozen, manifest.prefix.within_windows)
  check(cartridge, str(path))
  check_fits(cartridge, config, str(path))
  return cartridge


def read_manifest(path: str | os.PathLike) -> Description:
  """Return the description in the manifest of a cartridge, without reading its slots.

  Args:
    path: path of the directory, local or in an object store.

  Raises:
    UserError: there is none, or it is damaged or of a later version.
  """
  file = _place(path, MANIFEST)
  if not file.exists():
    if is_local(path) and any(file.parent.glob('*.pt')):
      raise UserError(
        f'{path} holds a cartridge as PyTorch writes it (.pt) and no {MANIFEST}: read it with published_cartridges.'
      )
    raise UserError(f'{path} holds no cartridge, since it has no {MANIFEST}: name the directory of one.')
  values = read_json_object(file, _WAY_OUT)
  if values.get('format') != FORMAT:
    raise UserError(f'{file} is not the manifest of a cartridge: its format is {short_repr(values.get("format"))}.')
  if values.get('version') != VERSION:
    raise UserError(
      f'{file} is of version {short_repr(values.get("version"))}, but this program reads version {VERSION}: use the '
      'program that wrote it.'
    )
  digest = values.pop('digest', None)
  if digest != identity.digest(values):
    raise UserError(f'{file} is not as it was written, since its digest differs: {_WAY_OUT}.')
  return _parsed(values, file)


def _parsed(values: dict[str, Any], file: epath.Path) -> Description:
  model = values.get('model')
  model = model if isinstance(model, dict) else {}
  checks = {
    **{name: _is_count(values.get(name)) for name in ('layers', 'kv_heads', 'head_dim', 'slots')},
    'frozen': type(values.get('frozen')) is int and values['frozen'] >= 0,
    'first_position': values.get('first_position') == 0,
    'text_position': values.get('text_position') == values.get('slots'),
    'within_windows': isinstance(values.get('within_windows'), bool),
    'model.name': isinstance(model.get('name'), str),
    'model.attention': isinstance(model.get('attention'), dict),
    'model.weights': _are_texts(model.get('weights')),
    'sha256': isinstance(values.get('sha256'), str),
    'about': _are_texts(values.get('about')),
  }
  for name, right in checks.items():
    if not right:
      raise UserError(f'{file}: {name} is missing, or has a value that this program cannot read: {_WAY_OUT}.')
  if values['frozen'] >= values['slots']:
    raise UserError(
      f'{file}: {values["frozen"]} of its {values["slots"]} slots are frozen, but at least one must be trainable: '
      f'{_WAY_OUT}.'
    )
  origin = Origin(model['name'], model['attention'], model['weights'])
  prefix = KVPrefix(values['slots'], values['frozen'], values['within_windows'])
  own = {name: values[name] for name in ('layers', 'kv_heads', 'head_dim', 'sha256', 'about')}
  return Description(**own, prefix=prefix, origin=origin)


def _is_count(value: Any) -> bool:
  return type(value) is int and value > 0


def _are_texts(value: Any) -> bool:
  return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _check_origin(path: str | os.PathLike, made_for: Origin, origin: Origin) -> None:
  """Raise UserError if a cartridge was made for another model; the message says what differs."""
  differing = [
    what
    for what, left, right in (
      ('rotary embeddings or windows of attention', made_for.attention, origin.attention),
      ('weights', made_for.weights, origin.weights),
    )
    if left != right
  ]
  if differing:
    raise UserError(
      f'{path} is a cartridge of {printable(made_for.name)}, but {origin.name} has other '
      f'{" and other ".join(differing)}: use the model that it was made for, or make a cartridge for this one.'
    )


def _place(path: str | os.PathLike, name: str) -> epath.Path:
  return (epath.Path(path).expanduser() if is_local(path) else epath.Path(path)) / name


@contextlib.contextmanager
def _local(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Provide a local file with a cartridge's tensors: from an object store, a copy that is removed at the end."""
  file = _place(path, TENSORS)
  if is_local(path):
    yield pathlib.Path(file)
    return
  with tempfile.TemporaryDirectory(prefix='cartridge-') as folder:
    copy = pathlib.Path(folder) / TENSORS
    try:
      file.copy(copy)
    except Exception as error:  # Object stores raise many types of errors; all mean the same here.
      raise UserError(f'{file} could not be copied to {folder} ({first_line(error)}): {_WAY_OUT}.') from error
    yield copy


def _stacked(opened: tensor_files.TensorFile, manifest: Description, what: str, file: epath.Path) -> np.ndarray:
  """Return keys or values [L, KV, P, head_dim] float32.

  Raises:
    UserError: a layer is missing, or has another shape or dtype than the manifest says.
  """
  shape = (manifest.kv_heads, manifest.prefix.slots, manifest.head_dim)
  if len(opened.tensors) != 2 * manifest.layers:  # Checked before making a list as long as the manifest claims.
    raise UserError(
      f'{file} holds {len(opened.tensors)} tensors, but {manifest.layers} layers have two each: {_WAY_OUT}.'
    )
  names = [f'layers.{layer}.{what}' for layer in range(manifest.layers)]
  for name in names:
    tensor = opened.tensors.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype not in tensor_files.DTYPES:
      found = 'missing' if tensor is None else f'{tensor.dtype} {tensor.shape}'
      if tensor is not None and tensor.dtype not in tensor_files.DTYPES:
        found += f', which must be one of {", ".join(tensor_files.DTYPES)}'
      raise UserError(f'{file}: tensor {name!r} is {found}, but {MANIFEST} says {shape}: {_WAY_OUT}.')
  return np.stack([opened.tensors[name].rows((0, manifest.kv_heads)).astype(np.float32) for name in names])
