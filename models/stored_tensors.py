"""The tensors of a model directory, in one safetensors file or in several with an index."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import pathlib

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import read_json_object
from sdpo_jax.models.tensor_files import Tensor, TensorFile

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'


@contextlib.contextmanager
def open_tensors(root: pathlib.Path) -> Iterator[dict[str, Tensor]]:
  """Provide the tensors of a model directory by name, while its files are open.

  Files that an index does not name are ignored: some publishers store the weights a second time.

  Raises:
    UserError: a file is missing or damaged, or the index contradicts the files; the message names the file.
  """
  index = read_index(root)
  if index is not None and (root / WEIGHTS).exists() and WEIGHTS not in index.values():
    raise UserError(
      f'{root} holds two models, {WEIGHTS} and the files that {INDEX} names: remove the one that is not meant.'
    )
  with contextlib.ExitStack() as stack:
    files = [stack.enter_context(TensorFile(_present(root, name, index))) for name in weight_files(index)]
    yield _collect(root, files, index)


def read_index(root: pathlib.Path) -> dict[str, str] | None:
  """Return the index of a model directory, tensor name → file name; None if it has none.

  Raises:
    UserError: the index cannot be read, or names a file outside the directory.
  """
  file = root / INDEX
  if not file.exists():
    return None
  weight_map = read_json_object(file, 'get the file again').get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise UserError(f'{file} has no weight_map: get the file again, or remove it if {WEIGHTS} holds all weights.')
  for name, shard in weight_map.items():
    if not isinstance(shard, str) or not shard.endswith('.safetensors') or '/' in shard or '\\' in shard:
      raise UserError(
        f'{file} says that {name!r} is in {short_repr(shard)}, which is not the name of a safetensors file in its '
        'directory: get the file again.'
      )
  return weight_map


def weight_files(index: dict[str, str] | None) -> list[str]:
  """Return the names of the files that hold the tensors, given the index (None: there is none)."""
  return [WEIGHTS] if index is None else sorted(set(index.values()))


def _present(root: pathlib.Path, name: str, index: dict[str, str] | None) -> pathlib.Path:
  file = root / name
  if file.is_file():
    return file
  if index is None and not file.is_symlink():
    raise UserError(f'{root} has neither {WEIGHTS} nor {INDEX}: only safetensors weights are read.')
  who = f'{root} has' if index is None else f'{root / INDEX} names'
  if file.is_symlink():
    raise UserError(
      f'{who} {name}, a link to {short_repr(str(file.readlink()), 200)}, which does not exist: copy the file that it '
      'should lead to (cp -L), or get it again.'
    )
  raise UserError(f'{who} {name}, which is missing: get it again.')


def _collect(root: pathlib.Path, files: list[TensorFile], index: dict[str, str] | None) -> dict[str, Tensor]:
  tensors: dict[str, Tensor] = {}
  for file in files:
    for name, tensor in file.tensors.items():
      if name in tensors:
        raise UserError(
          f'{root}: tensor {name!r} is both in {tensors[name].file.path.name} and in {file.path.name}: get the files '
          'again.'
        )
      tensors[name] = tensor
  for name, shard in (index or {}).items():
    if name not in tensors:
      raise UserError(f'{root / INDEX} says that {shard} holds tensor {name!r}, but it does not: get both again.')
    if tensors[name].file.path.name != shard:
      raise UserError(
        f'{root / INDEX} says that {shard} holds tensor {name!r}, but it is in {tensors[name].file.path.name}: get the '
        'files again.'
      )
  return tensors
