"""Cartridges found by path or name: of either format, on a disk, in an object store or on the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib

from etils import epath

from sdpo_jax.config.locations import paths
from sdpo_jax.errors import UserError, first_line, printable
from sdpo_jax.files import check_file, is_local
from sdpo_jax.models import checksums, directories, remote_files
from sdpo_jax.models.adapters import cartridge_files, published_cartridges
from sdpo_jax.models.adapters.cartridge import Cartridge, check_fits
from sdpo_jax.models.adapters.cartridge_files import Description
from sdpo_jax.models.adapters.composition import Positions, composed
from sdpo_jax.models.architecture import Architecture

SETTING = 'model.cartridge.path'
_FILES = (cartridge_files.MANIFEST, cartridge_files.TENSORS, published_cartridges.CONFIG, '*.pt')
_logger = logging.getLogger('sdpo_jax.models')


def describe(path: str | os.PathLike) -> Description:
  """Return the description of a cartridge of either format, or of several as one.

  Args:
    path: a directory of either format, local, in an object store, or by its name on the hub; or a published .pt file.
      Or several of these, as `paths` reads them.

  Raises:
    UserError: there is none, or it is damaged.
  """
  first, *others = map(_described, paths(path))
  slots = first.prefix.slots + sum(other.prefix.slots for other in others)
  return dataclasses.replace(
    first,
    prefix=dataclasses.replace(first.prefix, slots=slots),
    sha256=','.join(each.sha256 for each in (first, *others)),
  )


def _described(path: str) -> Description:
  place = _resolve(path)
  if _is_ours(place):
    return cartridge_files.read_manifest(place)
  stats = [part.stat() for part in (place, _tensors(place), place / published_cartridges.CONFIG) if part.exists()]
  return _describe_published(place, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))


def read(
  path: str | os.PathLike, model: str | os.PathLike, config: Architecture, positions: Positions = 'overlap'
) -> Cartridge:
  """Return a cartridge for a model, composed if several are named; a published one, which names no model, is warned of.

  Args:
    path: as in `describe`.
    model: path of the model.
    config: architecture of that model.
    positions: of the slots of several.

  Raises:
    UserError: as in `describe`, or it belongs to another model.
  """
  return composed([_read(each, model, config) for each in paths(path)], positions, config, os.fspath(path))


def _read(path: str, model: str | os.PathLike, config: Architecture) -> Cartridge:
  place = _resolve(path)
  if _is_ours(place):
    return cartridge_files.read(place, cartridge_files.Origin.of(model, config), config)
  _tensors(place)  # Raises if it has neither format.
  published = published_cartridges.read(place)
  check_fits(published.cartridge, config, str(path))
  named = '' if published.model is None else f' (its {published_cartridges.CONFIG} names {printable(published.model)})'
  _logger.warning(
    '%s does not say which weights it belongs to%s: its sizes are those of %s, but nothing more can be checked.',
    path,
    named,
    model,
  )
  return published.cartridge


@functools.lru_cache(maxsize=8)
def _describe_published(place: pathlib.Path, identity: tuple[tuple[int, int], ...]) -> Description:
  """Return the description of a published cartridge, which is read whole once per version, given by `identity`."""
  del identity
  found, file = published_cartridges.read(place).cartridge, _tensors(place)
  try:
    return Description(found.layers, found.kv_heads, found.head_dim, found.prefix, checksums.sha256(file))
  except OSError as error:
    raise UserError(f'{file} cannot be read ({first_line(error)}): make it readable, or get it again.') from error


def _resolve(path: str | os.PathLike) -> epath.Path | pathlib.Path:
  """Return the local directory or .pt file of a cartridge, or its remote directory if that has our format."""
  if not is_local(path):
    with remote_files.readable(str(path), remote_files.ADDRESS):
      if _is_ours(epath.Path(path)):
        return epath.Path(path)
  local = pathlib.Path(path).expanduser()
  if local.exists() and not local.is_dir():
    check_file(local, f'name a .pt file or a directory in {SETTING}')
    return local
  return directories.fetch(path, _FILES, SETTING, 'cartridge')


def _is_ours(place: epath.Path | pathlib.Path) -> bool:
  return (place / cartridge_files.MANIFEST).exists()


def _tensors(place: pathlib.Path) -> pathlib.Path:
  """Return the file with the slots of a published cartridge.

  Raises:
    UserError: there is none, or more than one.
  """
  if place.is_dir() and not any(place.glob('*.pt')):
    raise UserError(
      f'{place} holds no cartridge: it has neither {cartridge_files.MANIFEST} nor a .pt file beside a '
      f'{published_cartridges.CONFIG}; name the directory of one.'
    )
  return published_cartridges.tensors_file(place)
