"""Reading of Hugging Face model directories: finding them, JSON files, and tensors by the names of the family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import os
import pathlib
from typing import Any

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import read_json_object
from sdpo_jax.models import checksums, directories, parameters, stored_tensors, tensor_files
from sdpo_jax.models.adapters import peft_config
from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.families import known_families
from sdpo_jax.models.families.family import NAMES
from sdpo_jax.models.families.table import parameter_table
from sdpo_jax.models.tensor_files import DTYPES, Tensor

COMPANIONS = ('*.json', '*.jinja', '*.model', '*.txt', checksums.SUMS)  # Files that are fetched in addition to weights.
# Endings of tensors that some programs store although they follow from config.json.
IGNORED = ('rotary_emb.inv_freq', 'attn.masked_bias')


def resolve(path: str | os.PathLike, weights: bool = True, setting: str = 'model.path') -> pathlib.Path:
  """Return the local directory of a model, fetched as by `directories.fetch`.

  Args:
    path: path or hub name of the model.
    weights: whether to fetch the weights, which take gigabytes.
    setting: the setting that holds the path, for error messages.

  Raises:
    UserError: there is no such model, or its architecture is not supported.
  """
  root = directories.fetch(path, COMPANIONS, setting, 'model')
  if weights and not directories.is_local(path):
    # Check the architecture before fetching gigabytes of weights that could not be used. Files that the index does not
    # name are not fetched either: some publishers store the weights a second time.
    known_families.read(read_json(root, 'config.json'), f'{path}/config.json')
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
        'pass this directory as --adapter or in model.lora.path.'
      )
    raise UserError(f'{root} has no {name}: model.path must be a Hugging Face model directory.')
  return read_json_object(file, 'correct it, or get the file again')


@contextlib.contextmanager
def open_model(root: pathlib.Path, *, compare_heads: bool = True) -> Iterator[dict[str, Tensor]]:
  """Provide the tensors of a model directory by the names of its family, while its files are open.

  Args:
    root: the directory.
    compare_heads: whether to check that the unembedding, if it is stored for a tied model, equals the embedding.

  Raises:
    UserError: as in `huggingface.load`, except for values that are not finite.
  """
  architecture = known_families.read(read_json(root, 'config.json'), str(root / 'config.json'))
  with stored_tensors.open_tensors(root) as stored:
    tensors, head = _of_model(root, architecture, parameter_table(architecture), stored)
    if compare_heads and head is not None and not tensor_files.are_equal(head, tensors[NAMES['embedding']]):
      raise UserError(
        f'{root}: {head.name!r} is another matrix than {tensors[NAMES["embedding"]].name!r}, but config.json ties the '
        'two: set tie_word_embeddings to false there, or remove the tensor if the embedding is meant.'
      )
    yield tensors


def _of_model(
  root: pathlib.Path, config: Architecture, table: parameters.Table, stored: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor | None]:
  """Return the tensors of a model by name in its table, and the unembedding if one is stored for a tied model.

  Raises:
    UserError: a tensor, which the message names, is missing, unexpected, duplicate, or has another shape or dtype.
  """
  known_name = known_families.family_of(config).known_name
  expected = {p.huggingface_name(layer): p for p in table for layer in range(p.layers)}
  tensors: dict[str, Tensor] = {}
  unexpected, head = [], None
  for tensor in stored.values():
    name = known_name(tensor.name)
    if name in tensors:
      raise UserError(
        f'{root}: {tensors[name].name!r} and {tensor.name!r} name the same tensor of the model: remove one of them.'
      )
    if name in expected:
      tensors[name] = tensor
    elif name == NAMES['unembedding']:
      head = tensor  # The model is tied, or it would be expected.
    elif name is not None and not name.endswith(IGNORED):
      unexpected.append(tensor.name)
  missing = [name for name in expected if name not in tensors]
  wrong = [f'{len(missing)} tensors are missing, first {missing[0]!r}'] if missing else []
  if unexpected:
    first = short_repr(min(unexpected))
    wrong.append(f'{len(unexpected)} tensors do not belong to the model that config.json describes, first {first}')
  if wrong:
    raise UserError(f'{root}: {", and ".join(wrong)}: get config.json and weights of the same model.')
  for name, tensor in tensors.items():
    if tensor.shape != expected[name].huggingface_shape:
      raise UserError(
        f'{tensor.file.path}: tensor {tensor.name!r} has shape {tensor.shape}; config.json says '
        f'{expected[name].huggingface_shape}: get both of the same model.'
      )
    if tensor.dtype not in DTYPES:
      raise UserError(
        f'{tensor.file.path}: tensor {tensor.name!r} is stored as {tensor.dtype[:20]}; supported: {", ".join(DTYPES)}: '
        'get the model in one of these.'
      )
  return tensors, head
