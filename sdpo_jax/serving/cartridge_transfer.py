"""Import of cartridges, which are untrusted and checked against the served model first, and their export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import itertools
import os
import pathlib
import re
import tempfile

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.config.privacy import public_place
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models.adapters import cartridge_files, named_cartridges, published_cartridges
from sdpo_jax.models.adapters.cartridge import Cartridge, check_fits
from sdpo_jax.serving.engine import checked_cartridge
from sdpo_jax.serving.engine_settings import engine_settings
from sdpo_jax.serving.errors import Forbidden, InvalidRequest, refusal
from sdpo_jax.serving.peft_transfer import Served
from sdpo_jax.serving.records import FROZEN, KEYS, VALUES, WINDOWED
from sdpo_jax.serving.shelf import Arrays
from sdpo_jax.serving.store.blobs import Blobs, open_blobs

HUB = 'hub'  # The entry of serve.cartridge_sources that allows all names on the hub.
_OURS = (cartridge_files.MANIFEST, cartridge_files.TENSORS)
_PUBLISHED = (published_cartridges.TENSORS, published_cartridges.CONFIG)
_LISTED = 1000  # The most names in a bucket that are looked at.
_NAME = re.compile(r'[\w.-]+/[\w.-]+')


def is_cartridge(files: Mapping[str, bytes]) -> bool:
  """Return whether uploaded files are those of a cartridge."""
  return bool({*_OURS, *_PUBLISHED} & files.keys())


def arrays_of(files: Mapping[str, bytes], config: Config, served: Served) -> Arrays:
  """Read a cartridge from a user's files, in our format or the published one.

  Args:
    files: contents by name; other files are ignored.
    config: settings of the service.
    served: the model.

  Raises:
    InvalidRequest: a file is missing or damaged, the cartridge belongs to another model, is too large, or has values
      that no model computes.
  """
  origin = _origin(config, served)

  def read(root: pathlib.Path) -> Cartridge:
    for name in (*_OURS, *_PUBLISHED):
      if name in files:
        (root / name).write_bytes(files[name])
    if cartridge_files.MANIFEST in files:
      return cartridge_files.read(root, origin, served.policy.config)
    alone = published_cartridges.CONFIG not in files
    found = published_cartridges.read(root / published_cartridges.TENSORS if alone else root).cartridge
    check_fits(found, served.policy.config, 'The cartridge')
    return found

  with tempfile.TemporaryDirectory(prefix='sdpo-import-') as folder:
    root = pathlib.Path(folder)
    try:
      return _checked(read(root), config, served)
    except UserError as error:
      said = str(error).replace(f'{root}/', '').replace(str(root), 'The cartridge')
      raise InvalidRequest(said, field='files') from None


def fetched(source: str, config: Config, served: Served) -> Arrays:
  """Read a cartridge from a place that the operator allows (`serve.cartridge_sources`).

  Raises:
    Forbidden: the place is not allowed.
    InvalidRequest: as `arrays_of`.
  """
  if not is_allowed(source, config.serve.cartridge_sources):
    raise Forbidden(f'{short_repr(source)} is not in serve.cartridge_sources: upload the files of the cartridge.')
  try:
    if '://' in source:  # As it is there now, not a copy that was made before.
      with contextlib.closing(open_blobs(source)) as blobs:
        return arrays_of(_files_in(blobs), config, served)
    return _checked(named_cartridges.read(source, config.model.path, served.policy.config), config, served)
  except (UserError, FileNotFoundError) as error:  # The latter: there is no such bucket.
    raise refusal(error) from error


def _files_in(blobs: Blobs) -> dict[str, bytes]:
  """Return the files of a cartridge by name; the only .pt file may have any name."""
  names = [entry.key for entry in itertools.islice(blobs.list(), _LISTED) if '/' not in entry.key]
  torch = [name for name in names if name.endswith('.pt')]
  files = {name: name for name in names} | (dict.fromkeys(_PUBLISHED[:1], torch[0]) if len(torch) == 1 else {})
  return {name: blobs.get(files[name]) for name in (*_OURS, *_PUBLISHED) if name in files}


def is_allowed(source: str, places: Sequence[str]) -> bool:
  """Return whether a source lies in one of the places; links in local folders are followed first."""
  if ',' in source or '\0' in source or source != source.strip():  # Several paths, or another one when it is read.
    return False
  if '://' in source:
    parts = source.split('/')
    return '..' not in parts and any(
      _lies_in(parts, place.rstrip('/').split('/')) for place in places if '://' in place
    )
  path = os.path.expanduser(source)
  if os.path.isabs(path):
    real = os.path.realpath(path).split(os.sep)
    local = (os.path.expanduser(place) for place in places if '://' not in place)
    return any(_lies_in(real, os.path.realpath(place).split(os.sep)) for place in local if os.path.isabs(place))
  return HUB in places and _NAME.fullmatch(source) is not None and not os.path.exists(source)


def _lies_in(parts: Sequence[str], place: Sequence[str]) -> bool:
  return list(parts[: len(place)]) == list(place)


def files_of(arrays: Arrays, form: str, config: Config, served: Served) -> dict[str, bytes]:
  """Return the files of a cartridge by name, in our format or, if `form` is 'published', the published one.

  Raises:
    InvalidRequest: the published format cannot hold it.
  """
  cartridge = Cartridge(arrays[KEYS], arrays[VALUES], int(arrays[FROZEN]), bool(arrays[WINDOWED]))
  model = public_place(config.model.path)

  def write(root: pathlib.Path) -> None:
    if form == 'published':
      published_cartridges.write(root, cartridge, model)
    else:
      cartridge_files.write(root, cartridge, _origin(config, served))

  with tempfile.TemporaryDirectory(prefix='sdpo-export-') as folder:
    root = pathlib.Path(folder, 'cartridge')
    try:
      write(root)
    except UserError as error:
      raise InvalidRequest(str(error).replace(str(root), 'The cartridge'), field='format') from None
    names = _PUBLISHED if form == 'published' else _OURS
    return {name: (root / name).read_bytes() for name in names}


def _origin(config: Config, served: Served) -> cartridge_files.Origin:
  return cartridge_files.Origin.of(public_place(config.model.path), served.policy.config, served.weights)


def _checked(cartridge: Cartridge, config: Config, served: Served) -> Arrays:
  numbers = {FROZEN: np.int32(cartridge.frozen), WINDOWED: np.int32(cartridge.within_windows)}
  arrays = {KEYS: cartridge.keys, VALUES: cartridge.values} | numbers
  return checked_cartridge('The cartridge', arrays, engine_settings(config), served.policy.config)
