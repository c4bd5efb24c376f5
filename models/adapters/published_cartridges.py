"""Directories of published cartridges: a .pt file, and a config.yaml with the number of slots and the model.

Servers read `kv_cache_initializer.max_tokens` and `model.pretrained_model_name_or_path` of config.yaml. If Weights &
Biases has written it, they are one level deeper, under `value`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import logging
import os
import pathlib
import re
from types import MappingProxyType
from typing import Any, Literal

import jax
import yaml

from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.files import is_local, read_text
from sdpo_jax.models import exporting, plain_yaml
from sdpo_jax.models.adapters import cartridge_pt
from sdpo_jax.models.adapters.cartridge import Cartridge, check
from sdpo_jax.models.adapters.kv_prefix import KVPrefix

TENSORS, CONFIG = 'cartridge.pt', 'config.yaml'
PAGE = 16  # Slots per page of a server, which cuts off an incomplete page.
LARGEST_CONFIG = 2**20  # Maximum bytes of a config.yaml.
MOST_SLOTS = 2**31  # Maximum number of slots in a config.yaml.
_NUMBER = re.compile('[0-9]{1,10}')
_WAY_OUT = 'get the directory again'
_logger = logging.getLogger('sdpo_jax.models')


@dataclasses.dataclass(frozen=True)
class Published:
  """A published cartridge, which does not identify the weights of its model."""

  cartridge: Cartridge
  model: str | None  # The name of its model in config.yaml; None: there is none.


def read(path: str | os.PathLike) -> Published:
  """Return the cartridge in a directory with config.yaml and one .pt file, or in such a file alone.

  Args:
    path: local path of the directory or the file.

  Raises:
    UserError: something is missing or damaged, or the file contradicts config.yaml.
  """
  if not is_local(path):
    raise UserError(f'{path}: published cartridges are read from local disks only: copy it there, and name the copy.')
  place = pathlib.Path(path).expanduser()
  if place.is_file():
    return Published(cartridge_pt.read(place), None)
  tensors = tensors_file(place)
  slots, model = _read_config(place / CONFIG)
  cartridge = cartridge_pt.read(tensors)
  if slots is not None and slots < cartridge.slots:
    raise UserError(
      f'{tensors} holds {cartridge.slots} slots, but {place / CONFIG} says at most {slots}: they belong to different '
      f'cartridges; {_WAY_OUT}.'
    )
  if slots is not None and slots > cartridge.slots:  # The text that initialised it was shorter.
    _logger.warning('%s holds %d slots; %s allows %d.', tensors, cartridge.slots, CONFIG, slots)
  return Published(cartridge, model)


def write(
  path: str | os.PathLike,
  cartridge: Cartridge,
  model: str,
  spelling: cartridge_pt.Spelling = 'frozen',
  dtype: Literal['float32', 'bfloat16', 'float16'] = 'bfloat16',
  texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
  """Write a directory that the server for cartridges and both `TrainableCache` classes load.

  If no slots are frozen, tensors without slots are written for them, since neither server nor classes load empty lists.
  When the second version of the class loads a file, it takes the number of key-value heads for that of frozen slots: it
  computes the same, but would train the other slots only. In a run of several processes all call this, and process 0
  writes.

  Args:
    path: directory to make; it must not hold files.
    cartridge: the same in all processes.
    model: name of its model on the Hugging Face hub.
    spelling: name of the frozen slots' entries: 'frozen' for the second version of the class, 'fixed' for the first;
      the server accepts both.
    dtype: dtype of the tensors.
    texts: further files to write, name → content.

  Raises:
    UserError: the format cannot hold the cartridge, or it cannot be written.
  """
  if jax.process_index() == 0:
    check(cartridge, str(path))
    check_servable(path, cartridge.prefix, cartridge.kv_heads)
    size = (cartridge.keys.size + cartridge.values.size) * (4 if dtype == 'float32' else 2)
    config = {
      'kv_cache_initializer': {'max_tokens': cartridge.slots, 'num_frozen_tokens': cartridge.frozen},
      'model': {'pretrained_model_name_or_path': model},
    }
    with exporting.new_directory(path, size) as partial:
      cartridge_pt.write(partial / TENSORS, cartridge, spelling, dtype, zero_width=True)
      exporting.write_texts(partial, {**texts, CONFIG: yaml.safe_dump(config, sort_keys=False, allow_unicode=True)})
  barrier('the end of the export of the cartridge')


def check_servable(path: str | os.PathLike, prefix: KVPrefix, kv_heads: int) -> None:
  """Check that the format can hold a prefix.

  Args:
    path: path to write to, for error messages.
    prefix: the slots.
    kv_heads: number of key-value heads of their model.

  Raises:
    UserError: programs that read the format would misinterpret the slots.
  """
  if prefix.slots % PAGE:
    raise UserError(
      f'{path}: a server cuts {prefix.slots} slots to a multiple of {PAGE}: make a cartridge of '
      f'{-(-prefix.slots // PAGE) * PAGE} slots to export it in this format.'
    )
  if prefix.slots <= kv_heads:
    raise UserError(
      f'{path}: programs load {kv_heads} slots of this format as frozen, one per key-value head, but the cartridge has '
      f'{prefix.slots}: make one with more slots to export it in this format.'
    )
  if prefix.within_windows:
    raise UserError(
      f'{path}: programs that load this format show all slots to layers with a sliding window, but this cartridge was '
      'trained with model.cartridge.sliding_window=windowed: make one without that to export it in this format.'
    )


def tensors_file(place: pathlib.Path) -> pathlib.Path:
  """Return the file with the slots: `place` itself, or in a directory cartridge.pt or the only .pt file.

  Raises:
    UserError: there is none, or more than one.
  """
  if place.is_file():
    return place
  if (place / TENSORS).is_file():
    return place / TENSORS
  found = sorted(place.glob('*.pt')) if place.is_dir() else []
  if len(found) != 1:
    names = ', '.join(file.name for file in found[:8]) or 'none'
    raise UserError(f'{place} must hold {TENSORS}, or a single .pt file, but holds {names}: name another directory.')
  return found[0]


def _read_config(file: pathlib.Path) -> tuple[int | None, str | None]:
  """Return the number of slots and the name of the model in a config.yaml; None for each that is missing."""
  if not file.is_file():
    raise UserError(f'{file} is missing: get it too, or name the .pt file itself.')
  if file.stat().st_size > LARGEST_CONFIG:
    raise UserError(f'{file} is larger than {LARGEST_CONFIG // 2**20} MB: {_WAY_OUT}, or name the .pt file itself.')
  try:
    values = plain_yaml.read(read_text(file, _WAY_OUT))
  except ValueError as error:
    raise UserError(f'{file} is not YAML ({first_line(error)}): {_WAY_OUT}.') from error
  slots = _entry(values, 'kv_cache_initializer', 'max_tokens')
  model = _entry(values, 'model', 'pretrained_model_name_or_path')
  if slots is not None and not (isinstance(slots, str) and _NUMBER.fullmatch(slots) and 0 < int(slots) <= MOST_SLOTS):
    raise UserError(
      f'{file}: kv_cache_initializer.max_tokens is {short_repr(slots)}, but must be the number of slots: correct it.'
    )
  if model is not None and not isinstance(model, str):
    raise UserError(
      f'{file}: model.pretrained_model_name_or_path is {short_repr(model)}, but must be a name: correct it.'
    )
  return slots and int(slots), model


def _entry(values: Any, section: str, name: str) -> Any:
  """Return an entry of a section, or of `value` in that section; None if there is none."""
  part = values.get(section) if isinstance(values, dict) else None
  for place in (part, part.get('value') if isinstance(part, dict) else None):
    if isinstance(place, dict) and place.get(name) is not None:
      return place[name]
  return None
