"""Hugging Face model directories: import, export and random initialisation, driven by the parameter table."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import json
import logging
import os
import pathlib
import re
from types import MappingProxyType
from typing import Any, Literal

import jax

from models import checksums, exporting, hub, parameters, placing, remote_files, stored_tensors, tensor_files
from models.architecture import Architecture
from models.decoder import DecoderPolicy
from models.families import registry
from models.families.family import NAMES
from models.tensor_files import DTYPES, Tensor
from sdpo_jax.config import ModelConfig
from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.errors import UserError
from sdpo_jax.types import Tree

_logger = logging.getLogger('sdpo_jax.models')
COMPANIONS = ('*.json', '*.jinja', '*.model', '*.txt', checksums.SUMS)  # Of weights, where these are fetched.
# Vocabularies of at least LARGE tokens get rows up to a multiple of 1024: 8 shards of whole 128-lane tiles.
LARGE, LARGE_MULTIPLE = 32768, 1024
# Tensors that some writers store although they follow from config.json.
IGNORED = ('rotary_emb.inv_freq', 'attn.masked_bias')


def load(
  path: str | os.PathLike, config: ModelConfig, mesh: jax.sharding.Mesh | None = None
) -> tuple[DecoderPolicy, Tree]:
  """Loads the policy and its float32 parameters from a model directory (one or several safetensors files).

  A process reads of every tensor the rows that its devices need part of, each once. Beside the result it holds its share
  of one stacked parameter at a time, and a few megabytes.

  Args:
    path: directory with config.json and safetensors, or a hub name (organisation/model).
    config: compute dtype and rematerialisation.
    mesh: devices over which `sdpo_jax.distributed.mesh` shards the parameters. None: the default device, which holds all.

  Raises:
    UserError: naming the missing or damaged file, the unsupported architecture, the missing, unexpected or misshapen
      tensor, or the one that holds values that are not finite.
  """
  root = resolve(path)
  check_files(root, edited=True)
  policy = read_policy(root, config).on(mesh, config.attention)
  table = policy.parameter_table()
  with stored_tensors.open_tensors(root) as stored:
    tensors = _of_model(root, policy.config, table, stored)
    params = parameters.map_table(lambda parameter: placing.place(parameter, tensors, mesh), table)
  return policy, params


def check_files(root: pathlib.Path, *, edited: bool = False) -> int:
  """Compare the files of a model directory with the SHA-256 that is known of them; return how many could be compared.

  Args:
    root: the directory.
    edited: whether files that people edit, all but the weights, may be others; it is said.

  Raises:
    UserError: naming one that is not as it was written.
  """
  expected = {name: digest for name, digest in checksums.known(root).items() if (root / name).exists()}
  for name, error in checksums.differences(root, expected).items():
    if not edited or name.endswith(('.safetensors', stored_tensors.INDEX)):
      raise error
    _logger.warning('%s', error)
  return len(expected)


def read_policy(path: str | os.PathLike, config: ModelConfig) -> DecoderPolicy:
  """Returns the policy that a directory's config.json describes; reads no weights.

  It computes attention in the way that runs anywhere; `DecoderPolicy.on` chooses the kernels of its devices.

  Raises:
    UserError: missing or malformed config.json, unsupported architecture.
  """
  root = resolve(path, weights=False)
  return _policy(registry.read(read_json(root, 'config.json'), str(root / 'config.json')), config)


def describe(config_json: dict[str, Any], config: ModelConfig) -> DecoderPolicy:
  """Returns the policy that the contents of a config.json describe."""
  return _policy(registry.read(config_json), config)


def _policy(model: Architecture, config: ModelConfig) -> DecoderPolicy:
  multiple = config.vocab_multiple or (LARGE_MULTIPLE if model.vocab_size >= LARGE else 1)
  return DecoderPolicy(dataclasses.replace(model, vocab_multiple=multiple), config.dtype, config.remat)


def init(config_json: dict[str, Any], rng: jax.Array, config: ModelConfig | None = None) -> tuple[DecoderPolicy, Tree]:
  """Returns a policy with random float32 parameters, from the contents of a config.json.

  Args:
    config_json: contents of a config.json; initializer_range is the standard deviation.
    rng: PRNG key.
    config: compute dtype and rematerialisation; None: float32, none.
  """
  config = config or ModelConfig(dtype='float32', remat='none')
  policy = describe(config_json, config).on(None, config.attention)
  return policy, parameters.initialise(policy.parameter_table(), rng, policy.config.initializer_range)


def save(
  path: str | os.PathLike,
  policy: DecoderPolicy,
  params: Tree,
  *,
  source: str | os.PathLike | None = None,
  dtype: Literal['float32', 'bfloat16', 'float16'] = 'bfloat16',
  max_shard_bytes: int = 5 * 10**9,
  texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
  """Writes a model directory that transformers loads.

  The directory appears under its name only when it is complete and on the disk, with the SHA-256 of its files. In a run
  of several processes all call this, and process 0 writes.

  Args:
    path: directory to make; it must not hold files.
    policy: whose parameter table names the tensors.
    params: nested dict of arrays, jax or numpy.
    source: the model directory whose config.json, tokenizer and generation_config.json are copied; None: config.json
      is written from the policy, and nothing else.
    dtype: of the stored tensors.
    max_shard_bytes: a file holds at most so many bytes of tensors (or one tensor); more than one file: with an index.
    texts: files to write, name → content, in place of those of the source.

  Raises:
    UserError: `path` already holds files or cannot be written, `source` has no config.json, or a parameter holds values
      that the dtype cannot, or that are not finite.
  """
  table = policy.parameter_table()
  if jax.process_index() != 0:
    exporting.write_weights(None, table, params, dtype, max_shard_bytes)
  else:
    exporting.check_target(path)
    origin = None if source is None else resolve(source, weights=False)
    family = registry.family_of(policy.config)
    values = family.write(policy.config) if origin is None else family.exported(read_json(origin, 'config.json'))
    # transformers 4 wrote torch_dtype; whoever reads the source reads the copy.
    values = values | {'torch_dtype' if 'torch_dtype' in values and 'dtype' not in values else 'dtype': dtype}
    with exporting.new_directory(path, exporting.total_bytes(table, dtype)) as partial:
      if origin is not None:
        exporting.copy_companions(origin, partial, family.left_out)
      for name, text in texts.items():
        (partial / name).write_text(text, encoding='utf-8')
      (partial / 'config.json').write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')
      sums = exporting.write_weights(partial, table, params, dtype, max_shard_bytes)
      checksums.write(partial, sums)
  barrier('the end of the export')


def resolve(path: str | os.PathLike, weights: bool = True) -> pathlib.Path:
  """Returns the local directory that `path` names: itself, a copy of gs://…, or the hub's snapshot of a name.

  A path whose parent directory exists, or that is written as one (/…, ./…, ~/…), never reaches for the network.

  Args:
    path: of the model.
    weights: false: the weights, which are gigabytes, are not fetched.

  Raises:
    UserError: it names neither.
  """
  local = pathlib.Path(path).expanduser()
  if remote_files.is_remote(path):
    fetch = functools.partial(remote_files.fetch, str(path))
  elif local.is_dir():
    return local
  elif not re.fullmatch(r'[\w.-]+/[\w.-]+', str(path)) or str(path).startswith('.') or local.parent.is_dir():
    raise UserError(f'The model directory {local} does not exist: set model.path to a Hugging Face model directory.')
  else:
    fetch = functools.partial(hub.fetch, str(path))
  root = fetch(COMPANIONS)
  if weights:
    # The architecture first: gigabytes of weights that we cannot use are not worth fetching. Nor are those that the
    # index does not name: some publishers store them a second time.
    registry.read(read_json(root, 'config.json'), f'{path}/config.json')
    root = fetch((*COMPANIONS, *stored_tensors.weight_files(stored_tensors.read_index(root))))
  return root


def read_json(root: pathlib.Path, name: str) -> dict[str, Any]:
  """Returns the JSON object in a file of a model directory.

  Raises:
    UserError: the file is missing or does not hold a JSON object.
  """
  file = root / name
  if not file.is_file():
    raise UserError(f'{root} has no {name}: model.path must be a Hugging Face model directory.')
  try:
    values = json.loads(file.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:  # Numbers of thousands of digits and deep nesting, too.
    raise UserError(f'{file} is not JSON: {error}.') from error
  if not isinstance(values, dict):
    raise UserError(f'{file} must hold a JSON object, not {type(values).__name__}.')
  return values


def _of_model(
  root: pathlib.Path, config: Architecture, table: parameters.Table, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
  """Returns the tensors of a model, by the names in its table.

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
  if head is not None and not tensor_files.are_equal(head, tensors[NAMES['embedding']]):
    raise UserError(
      f'{root}: {head.name!r} is another matrix than {tensors[NAMES["embedding"]].name!r}, and the two are tied by '
      'config.json: set tie_word_embeddings to false there, or remove the tensor if the embedding is meant.'
    )
  return tensors
