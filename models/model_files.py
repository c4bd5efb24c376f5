"""The files of a Hugging Face model directory: where they are, its JSON, and its tensors by the names of its family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import json
import os
import pathlib
from typing import Any

from models import checksums, directories, parameters, stored_tensors, tensor_files
from models.adapters import peft_config
from models.architecture import Architecture
from models.families import registry
from models.families.family import NAMES
from models.families.table import parameter_table
from models.tensor_files import DTYPES, Tensor
from sdpo_jax.errors import UserError

COMPANIONS = ('*.json', '*.jinja', '*.model', '*.txt', checksums.SUMS)  # Of weights, where these are fetched.
# Tensors that some writers store although they follow from config.json.
IGNORED = ('rotary_emb.inv_freq', 'attn.masked_bias')


def resolve(path: str | os.PathLike, weights: bool = True, setting: str = 'model.path') -> pathlib.Path:
  """Return the local directory of a model, as `directories.fetch`.

  Args:
    path: of the model.
    weights: false: the weights, which are gigabytes, are not fetched.
    setting: that names it, for messages.

  Raises:
    UserError: there is none, or it is of an architecture that is not supported.
  """
  root = directories.fetch(path, COMPANIONS, setting, 'model')
  if weights and not directories.is_local(path):
    # The architecture first: gigabytes of weights that we cannot use are not worth fetching. Nor are those that the
    # index does not name: some publishers store them a second time.
    registry.read(read_json(root, 'config.json'), f'{path}/config.json')
    files = stored_tensors.weight_files(stored_tensors.read_index(root))
    root = directories.fetch(path, (*COMPANIONS, *files), setting, 'model')
  return root


def read_json(root: pathlib.Path, name: str) -> dict[str, Any]:
  """Return the JSON object in a file of a model directory.

  Raises:
    UserError: the file is missing or does not hold a JSON object.
  """
  file = root / name
  if not file.is_file():
    if (root / peft_config.FILE).is_file():
      raise UserError(
        f'{root} has no {name}, because it holds an adapter: set model.path to the model that it was trained on, and '
        'name this directory as --adapter or in model.lora.path.'
      )
    raise UserError(f'{root} has no {name}: model.path must be a Hugging Face model directory.')
  try:
    values = json.loads(file.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:  # Numbers of thousands of digits and deep nesting, too.
    raise UserError(f'{file} is not JSON: {error}.') from error
  if not isinstance(values, dict):
    raise UserError(f'{file} must hold a JSON object, not {type(values).__name__}.')
  return values


@contextlib.contextmanager
def open_model(root: pathlib.Path, *, compare_heads: bool = True) -> Iterator[dict[str, Tensor]]:
  """Give the tensors of the model of a directory while its files are open, by the names of its family.

  Args:
    root: the directory.
    compare_heads: whether to read the unembedding that a file has of a tied model, to see that it is the embedding.

  Raises:
    UserError: as `load`, but whether values are finite is not looked at.
  """
  architecture = registry.read(read_json(root, 'config.json'), str(root / 'config.json'))
  with stored_tensors.open_tensors(root) as stored:
    tensors, head = _of_model(root, architecture, parameter_table(architecture), stored)
    if compare_heads and head is not None and not tensor_files.are_equal(head, tensors[NAMES['embedding']]):
      raise UserError(
        f'{root}: {head.name!r} is another matrix than {tensors[NAMES["embedding"]].name!r}, and the two are tied by '
        'config.json: set tie_word_embeddings to false there, or remove the tensor if the embedding is meant.'
      )
    yield tensors


def _of_model(
  root: pathlib.Path, config: Architecture, table: parameters.Table, stored: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor | None]:
  """Return the tensors of a model, by the names in its table, and the unembedding that is stored of a tied one.

  Raises:
    UserError: naming one that is missing, does not belong to the model, is there twice, or has another shape or dtype.
  """
  known_name = registry.family_of(config).known_name
  expected = {p.huggingface_name(layer): p for p in table for layer in range(p.layers)}
  tensors: dict[str, Tensor] = {}
  unexpected, head = [], None
  for tensor in stored.values():
    name = known_name(tensor.name)
    if name in tensors:
      raise UserError(
        f'{root}: {tensors[name].name!r} and {tensor.name!r} are the same tensor of the model: remove one of them.'
      )
    if name in expected:
      tensors[name] = tensor
    elif name == NAMES['unembedding']:
      head = tensor  # Of a tied model.
    elif name is not None and not name.endswith(IGNORED):
      unexpected.append(tensor.name)
  missing = [name for name in expected if name not in tensors]
  wrong = [f'{len(missing)} tensors are missing, first {missing[0]!r}'] if missing else []
  if unexpected:
    wrong.append(
      f'{len(unexpected)} tensors do not belong to the model that config.json describes, first {min(unexpected)!r}'
    )
  if wrong:
    raise UserError(f'{root}: {", and ".join(wrong)}.')
  for name, tensor in tensors.items():
    if tensor.shape != expected[name].huggingface_shape:
      raise UserError(
        f'{root}: tensor {tensor.name!r} has shape {tensor.shape}; config.json says {expected[name].huggingface_shape}.'
      )
    if tensor.dtype not in DTYPES:
      raise UserError(
        f'{tensor.file.path}: tensor {tensor.name!r} is stored as {tensor.dtype}; supported: {", ".join(DTYPES)}: get '
        'the model in one of these.'
      )
  return tensors, head
