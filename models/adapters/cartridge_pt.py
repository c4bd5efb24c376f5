"""Cartridges as PyTorch files, which the published `TrainableCache` classes save and load.

Such a file is a dictionary of four lists with one tensor [1, KV, tokens, head_dim] per layer: keys and values of the
trainable slots, and of the frozen slots, which come first in the cache. The first version of the class calls the latter
`fixed`, the second `frozen`. Lists are `torch.nn.ParameterList`s, or plain lists in files of other programs.
"""

from __future__ import annotations

from collections.abc import Mapping
import os
import pathlib
import pickle
import re
import types
from typing import Any, Literal, get_args
import zipfile

import numpy as np

from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.models.adapters.cartridge import Cartridge, check, narrowed
from sdpo_jax.models.exporting import stored_dtype

Spelling = Literal['fixed', 'frozen']
DTYPES = ('float32', 'bfloat16', 'float16')
OLDEST_TORCH = (2, 7)
_WAY_OUT = 'get the file again'
_GLOBAL = re.compile(r'GLOBAL ([\w.]+)')


class _ParameterList:
  """An inert replacement for `torch.nn.ParameterList` while a file is read; it only keeps the attributes."""


def read(path: str | os.PathLike) -> Cartridge:
  """Return the cartridge in a file of either spelling.

  No code in the file is run: a file that holds anything but tensors, lists and dictionaries is refused.

  Args:
    path: local path of the file.

  Raises:
    UserError: PyTorch is not installed, or the file cannot be read, is damaged, or holds something else.
  """
  path = pathlib.Path(path).expanduser()
  content = _load(path)
  spelling = _spelling(path, content)
  lists = {name: _tensors(path, name, content[name]) for name in _names(spelling)}
  frozen = _check_shapes(path, spelling, lists)

  def joined(what: str) -> np.ndarray:
    parts = [lists[name] for name in (f'{spelling}_{what}', f'trainable_{what}') if lists[name]]
    return np.stack([np.concatenate([_array(part) for part in layer], axis=1) for layer in zip(*parts, strict=True)])

  cartridge = Cartridge(joined('keys'), joined('values'), frozen)
  check(cartridge, str(path))
  return cartridge


def write(
  path: pathlib.Path,
  cartridge: Cartridge,
  spelling: Spelling,
  dtype: Literal['float32', 'bfloat16', 'float16'],
  *,
  zero_width: bool = False,
) -> None:
  """Write a file like that of the class with the given spelling.

  Args:
    path: path of a file that does not exist yet.
    cartridge: a checked cartridge.
    spelling: name of the frozen slots' entries.
    dtype: dtype of the tensors.
    zero_width: how to write zero frozen slots. False: lists without tensors, which the classes write but cannot load;
      true: lists of tensors without slots, which their loaders accept.

  Raises:
    UserError: PyTorch is not installed, or values of the cartridge are too large for the dtype.
    OSError: the file cannot be written.
  """
  torch = _torch(path)
  content = {}
  for part, first, last in (('trainable', cartridge.frozen, cartridge.slots), (spelling, 0, cartridge.frozen)):
    for what, array in (('keys', cartridge.keys), ('values', cartridge.values)):
      layers = array[:, :, first:last] if last or zero_width else ()
      content[f'{part}_{what}'] = torch.nn.ParameterList(
        torch.nn.Parameter(_tensor(torch, layer, dtype, f'{what} of layer {at}'), requires_grad=part == 'trainable')
        for at, layer in enumerate(layers)
      )
  with path.open('xb') as file:
    torch.save(content, file)


def _names(spelling: str) -> tuple[str, ...]:
  return ('trainable_keys', 'trainable_values', f'{spelling}_keys', f'{spelling}_values')


def _torch(path: pathlib.Path) -> types.ModuleType:
  """Return the module `torch`, if its version can restrict what a file that is read may contain."""
  way_out = 'pip install torch --index-url https://download.pytorch.org/whl/cpu'
  try:
    import torch
  except ImportError as error:
    raise UserError(f'{path}: files of PyTorch need PyTorch, which is not installed: {way_out}.') from error
  version = tuple(int(number) for number in re.findall(r'\d+', torch.__version__)[:2])
  if version < OLDEST_TORCH:
    raise UserError(
      f'{path}: PyTorch {torch.__version__} cannot read it safely; {".".join(map(str, OLDEST_TORCH))} and newer can: '
      f'{way_out} --upgrade.'
    )
  return torch


def _load(path: pathlib.Path) -> Any:
  """Return the content of a file, with ParameterLists as inert `_ParameterList`s."""
  if not path.is_file():
    raise UserError(f'{path} is not a file: name a cartridge.pt.')
  torch = _torch(path)
  try:
    _check_archive(path)
    with torch.serialization.safe_globals([(_ParameterList, 'torch.nn.modules.container.ParameterList')]):
      return torch.load(path, map_location='cpu', weights_only=True)
  except OSError as error:
    raise UserError(f'{path} cannot be read ({first_line(error)}): make it readable, or {_WAY_OUT}.') from error
  except pickle.UnpicklingError as error:
    asked = _GLOBAL.search(str(error))
    why = f'it asks for {asked[1]}, which is not part of a cartridge' if asked else 'its pickle is not one of tensors'
    raise UserError(
      f'{path} is refused, and no code in it was run: {why}: {_WAY_OUT}, or export it again where it was made.'
    ) from error
  except Exception as error:  # The error type depends on where a file is damaged.
    raise UserError(f'{path} is damaged or not a file of torch.save ({first_line(error)}): {_WAY_OUT}.') from error


def _check_archive(path: pathlib.Path) -> None:
  """Check that a file is an uncompressed zip archive with correct checksums."""
  with zipfile.ZipFile(path) as archive:
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
      raise ValueError('it is compressed, which torch.save never does')
    wrong = archive.testzip()
    if wrong is not None:
      raise ValueError(f'the checksum of its part {wrong} is wrong')


def _spelling(path: pathlib.Path, content: Any) -> str:
  if not isinstance(content, dict):
    raise UserError(f'{path} holds no cartridge but a {type(content).__name__}: {_WAY_OUT}.')
  for spelling in get_args(Spelling):
    if content.keys() == set(_names(spelling)):
      return spelling
  raise UserError(
    f'{path} is not a cartridge: it holds {short_repr(sorted(map(str, content)), 120)}, but a cartridge holds '
    f'{", ".join(_names("frozen"))} (or fixed_… for frozen_…) and nothing else: {_WAY_OUT}.'
  )


def _tensors(path: pathlib.Path, name: str, values: Any) -> list[Any]:
  """Return the tensors of a list, by layer."""
  import torch

  if isinstance(values, _ParameterList):
    state = vars(values)
    entries = state.get('_parameters')
    if not isinstance(entries, dict) or list(entries) != [str(layer) for layer in range(len(entries))]:
      raise UserError(f'{path}: {name} is not a list of parameters by layer: {_WAY_OUT}.')
    values = list(entries.values())
  if not isinstance(values, list | tuple):
    raise UserError(
      f'{path}: {name} is a {type(values).__name__}, but must be a list with a tensor per layer: {_WAY_OUT}.'
    )
  for layer, tensor in enumerate(values):
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.device.type != 'cpu':
      raise UserError(f'{path}: layer {layer} of {name} is no tensor with values but {short_repr(tensor)}: {_WAY_OUT}.')
    if str(tensor.dtype).removeprefix('torch.') not in DTYPES:
      raise UserError(f'{path}: layer {layer} of {name} is {tensor.dtype}; supported: {", ".join(DTYPES)}.')
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
      raise UserError(f'{path}: layer {layer} of {name} claims more values than the file holds: {_WAY_OUT}.')
  return list(values)


def _check_shapes(path: pathlib.Path, spelling: str, lists: Mapping[str, list[Any]]) -> int:
  """Return the number of frozen slots; raise UserError if the shapes of the lists do not match."""
  counts = {name: len(tensors) for name, tensors in lists.items()}
  layers = counts['trainable_keys']
  none_frozen = not counts[f'{spelling}_keys'] and not counts[f'{spelling}_values']
  if not layers or any(count != layers for name, count in counts.items() if count or not none_frozen):
    raise UserError(
      f'{path}: its lists have different numbers of layers, or none ('
      + ', '.join(f'{name}: {count}' for name, count in counts.items())
      + f'): {_WAY_OUT}.'
    )
  shapes = {name: sorted({tuple(tensor.shape) for tensor in tensors}) for name, tensors in lists.items() if tensors}
  first = shapes['trainable_keys'][0]
  for name, found in shapes.items():
    partner = shapes[name.replace('values', 'keys')]
    if len(found) > 1 or found != partner or len(found[0]) != 4 or found[0][0] != 1 or len(first) != 4:
      raise UserError(
        f'{path}: the tensors of {name} are {short_repr(found, 120)}, and those of its keys '
        f'{short_repr(partner, 120)}: all must be [1, key-value heads, tokens, head_dim] of the same shape; {_WAY_OUT}.'
      )
    if (found[0][1], found[0][3]) != (first[1], first[3]):
      raise UserError(
        f'{path}: {name} have {found[0][1]} heads of {found[0][3]}, but trainable_keys {first[1]} of {first[3]}: '
        f'{_WAY_OUT}.'
      )
  return 0 if none_frozen else shapes[f'{spelling}_keys'][0][2]


def _array(tensor: Any) -> np.ndarray:
  """Return a tensor [1, KV, tokens, head_dim] as float32 [KV, tokens, head_dim]."""
  return tensor.detach()[0].float().contiguous().numpy()


def _tensor(torch: types.ModuleType, layer: np.ndarray, dtype: str, name: str) -> Any:
  """Return [KV, tokens, head_dim] float32 as a tensor [1, KV, tokens, head_dim] with storage of its own."""
  narrowed(layer, stored_dtype(dtype), name)
  return torch.tensor(layer[None]).to(getattr(torch, dtype))
