"""Hugging Face model directories: import, export and random initialisation, driven by the parameter table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import re
import shutil
from typing import Any, Literal, NamedTuple

import jax
import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

from models import checksums, hub, parameters, remote_files
from models.architecture import Architecture
from models.decoder import DecoderPolicy
from models.families import registry
from sdpo_jax.config import ModelConfig
from sdpo_jax.distributed.mesh import parameter_sharding
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import sync_directory, sync_tree
from sdpo_jax.types import Tree

_logger = logging.getLogger('sdpo_jax.models')
WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
HUB_FILES = ('*.json', '*.jinja', '*.safetensors', '*.model', '*.txt', checksums.SUMS)
# Vocabularies of at least LARGE tokens get rows up to a multiple of 1024: 8 shards of whole 128-lane tiles.
LARGE, LARGE_MULTIPLE = 32768, 1024
STORED_DTYPES = ('F32', 'F16', 'BF16')
# Tensors that some writers store although they follow from config.json.
IGNORED = ('rotary_emb.inv_freq', 'attn.masked_bias')


def load(
  path: str | os.PathLike, config: ModelConfig, mesh: jax.sharding.Mesh | None = None
) -> tuple[DecoderPolicy, Tree]:
  """Loads the policy and its float32 parameters from a model directory (one or several safetensors files).

  Files are memory-mapped, and a process reads of every tensor the blocks that its devices hold, each once: beside the
  result it holds its share of one stacked parameter at a time.

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
  with contextlib.ExitStack() as stack:
    tensors = _open(root, stack)
    _check(root, table, tensors, tied=policy.config.tied)
    params = parameters.map_table(lambda parameter: _read(parameter, tensors, mesh), table)
  return policy, params


def check_files(root: pathlib.Path, *, edited: bool = False) -> int:
  """Compare the files of a model directory with the SHA-256 that is known of them; return how many could be compared.

  Args:
    root: the directory.
    edited: whether files that people edit, all but the weights, may be others; it is said.

  Raises:
    UserError: naming one that is not as it was written.
  """
  expected = checksums.known(root)
  names = [name for name in sorted(expected) if (root / name).exists()]
  for name in names:
    try:
      checksums.check(root / name, expected[name])
    except UserError as error:
      if not edited or name.endswith(('.safetensors', INDEX)):
        raise
      _logger.warning('%s', error)
  return len(names)


def read_policy(path: str | os.PathLike, config: ModelConfig) -> DecoderPolicy:
  """Returns the policy that a directory's config.json describes; reads no weights.

  It computes attention in the way that runs anywhere; `DecoderPolicy.on` chooses the kernels of its devices.

  Raises:
    UserError: missing or malformed config.json, unsupported architecture.
  """
  root = resolve(path)
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
) -> None:
  """Writes a model directory that transformers loads.

  The directory appears under its name only when it is complete and on the disk, with the SHA-256 of its files.

  Args:
    path: directory to make; it must not hold files.
    policy: whose parameter table names the tensors.
    params: nested dict of arrays, jax (fully addressable) or numpy.
    source: the model directory whose config.json, tokenizer and generation_config.json are copied; None: config.json
      is written from the policy, and nothing else.
    dtype: of the stored tensors.
    max_shard_bytes: a file holds at most so many bytes of tensors (or one tensor); more than one file: with an index.

  Raises:
    UserError: `path` already holds files, or `source` has no config.json.
  """
  root = pathlib.Path(path)
  if root.exists() and (not root.is_dir() or any(root.iterdir())):
    raise UserError(f'{root} already exists and is not empty: remove it or name another directory.')
  origin = None if source is None else resolve(source)
  family = registry.family_of(policy.config)
  values = family.write(policy.config) if origin is None else family.exported(read_json(origin, 'config.json'))
  # transformers 4 wrote torch_dtype; whoever reads the source reads the copy.
  values = values | {'torch_dtype' if 'torch_dtype' in values and 'dtype' not in values else 'dtype': dtype}
  partial = root.with_name(root.name + '.partial')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  if origin is not None:
    _copy_companions(origin, partial)
  (partial / 'config.json').write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')
  _write_weights(partial, policy.parameter_table(), params, np.dtype(getattr(ml_dtypes, dtype, dtype)), max_shard_bytes)
  checksums.write(partial)
  sync_tree(partial)
  if root.exists():
    root.rmdir()
  partial.rename(root)
  sync_directory(root.parent)


def resolve(path: str | os.PathLike, weights: bool = True) -> pathlib.Path:
  """Returns the local directory that `path` names: itself, a copy of gs://…, or the hub's snapshot of a name.

  A path whose parent directory exists, or that is written as one (/…, ./…, ~/…), never reaches for the network.

  Args:
    path: of the model.
    weights: false: the weights, which are gigabytes, are not fetched.

  Raises:
    UserError: it names neither.
  """
  files = HUB_FILES if weights else tuple(name for name in HUB_FILES if 'safetensors' not in name)
  if remote_files.is_remote(path):
    return remote_files.fetch(str(path), files)
  local = pathlib.Path(path).expanduser()
  if local.is_dir():
    return local
  if not re.fullmatch(r'[\w.-]+/[\w.-]+', str(path)) or str(path).startswith('.') or local.parent.is_dir():
    raise UserError(f'The model directory {local} does not exist: set model.path to a Hugging Face model directory.')
  from huggingface_hub import errors, hf_hub_download, snapshot_download

  unreachable = hub.unreachable()
  try:
    # The architecture first: gigabytes of weights that we cannot use are not worth fetching.
    described = pathlib.Path(hf_hub_download(str(path), 'config.json'))
    registry.read(read_json(described.parent, 'config.json'), f'{path}/config.json')
    return pathlib.Path(snapshot_download(str(path), allow_patterns=files))
  except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
    where = f'model.path={str(path)!r} is not a directory here'
    if unreachable:
      raise UserError(
        f'{where}, and {unreachable}: connect this machine, or set model.path to a Hugging Face model directory.'
      ) from error
    raise UserError(f'{where}, and it cannot be loaded from the Hugging Face hub: {first_line(error)}') from error


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
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise UserError(f'{file} is not JSON: {error}.') from error
  if not isinstance(values, dict):
    raise UserError(f'{file} must hold a JSON object, not {type(values).__name__}.')
  return values


def _files(root: pathlib.Path) -> list[pathlib.Path]:
  if (root / INDEX).is_file():
    weight_map = read_json(root, INDEX).get('weight_map')
    if not isinstance(weight_map, dict) or not weight_map:
      raise UserError(f'{root / INDEX} has no weight_map.')
    files = [root / name for name in sorted(set(weight_map.values()))]
  elif (root / WEIGHTS).is_file():
    files = [root / WEIGHTS]
  else:
    raise UserError(f'{root} has neither {WEIGHTS} nor {INDEX}: only safetensors weights are read.')
  for file in files:
    if not file.is_file():
      raise UserError(f'{root / INDEX} names {file.name}, which is missing.')
  return files


class _Stored(NamedTuple):
  """Where a tensor lies."""

  file: pathlib.Path
  handle: Any  # The open file, which gives `get_slice(name)`.


def _open(root: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, _Stored]:
  """Returns the open file that holds each tensor, by name."""
  tensors = {}
  for file in _files(root):
    try:
      handle = stack.enter_context(safetensors.safe_open(file, framework='numpy'))
    except (safetensors.SafetensorError, OSError) as error:
      raise UserError(f'{file} is damaged or not a safetensors file: {error}.') from error
    tensors.update(dict.fromkeys(handle.keys(), _Stored(file, handle)))
  return tensors


def _check(root: pathlib.Path, table: parameters.Table, tensors: dict[str, _Stored], tied: bool) -> None:
  expected = {p.huggingface_name(layer): p for p in table for layer in range(p.layers)}
  missing = [name for name in expected if name not in tensors]
  if missing:
    raise UserError(f'{root}: {len(missing)} tensors are missing, first {missing[0]!r}.')
  ignored = (*IGNORED, 'lm_head.weight') if tied else IGNORED
  unexpected = [name for name in sorted(tensors) if name not in expected and not name.endswith(ignored)]
  if unexpected:
    raise UserError(
      f'{root}: {len(unexpected)} tensors do not belong to the model that config.json describes, first '
      f'{unexpected[0]!r}.'
    )
  for name, parameter in expected.items():
    view = tensors[name].handle.get_slice(name)
    if tuple(view.get_shape()) != parameter.huggingface_shape:
      raise UserError(
        f'{root}: tensor {name!r} has shape {tuple(view.get_shape())}; config.json says {parameter.huggingface_shape}.'
      )
    if view.get_dtype() not in STORED_DTYPES:
      raise UserError(
        f'{root}: tensor {name!r} is stored as {view.get_dtype()}; supported: {", ".join(STORED_DTYPES)}.'
      )


def _read(parameter: parameters.Parameter, tensors: dict[str, _Stored], mesh: jax.sharding.Mesh | None) -> jax.Array:
  if mesh is None:
    return jax.device_put(_gather(parameter, tensors, [tuple((0, size) for size in parameter.shape)])[0])
  sharding = parameter_sharding(mesh, parameter.axes, parameter.shape)
  blocks = {
    device: tuple(part.indices(size)[:2] for part, size in zip(index, parameter.shape, strict=True))
    for device, index in sharding.addressable_devices_indices_map(parameter.shape).items()
  }
  distinct = list(dict.fromkeys(blocks.values()))
  arrays = dict(zip(distinct, _gather(parameter, tensors, distinct), strict=True))
  pieces = [jax.device_put(arrays[block], device) for device, block in blocks.items()]
  return jax.make_array_from_single_device_arrays(parameter.shape, sharding, pieces)


def _gather(
  parameter: parameters.Parameter, tensors: dict[str, _Stored], blocks: list[parameters.Bounds]
) -> list[np.ndarray]:
  """Reads blocks of a parameter; only what they hold is read, layer by layer, as it lies in the files.

  Raises:
    UserError: a tensor holds values there that are not finite.
  """
  outputs = [np.empty([stop - start for start, stop in block], parameter.dtype) for block in blocks]
  for layer in range(parameter.layers):
    name = parameter.huggingface_name(layer)
    tensor = tensors[name].handle.get_slice(name)
    for block, output in zip(blocks, outputs, strict=True):
      if not parameter.stacked:
        part = output[...] = parameter.from_huggingface(tensor, block)
      elif block[0][0] <= layer < block[0][1]:
        part = output[layer - block[0][0]]
        part[...] = parameter.from_huggingface(tensor, block[1:])
      else:
        continue
      if not _is_finite(part):
        raise UserError(_not_finite(tensors[name].file, name, tensor))
  return outputs


def _is_finite(values: np.ndarray) -> bool:
  """Returns whether all values are finite: for almost all arrays by two reductions, without an array beside it."""
  # A maximum and a minimum are NaN where any value is.
  return values.size == 0 or bool(np.isfinite(values.max()) and np.isfinite(values.min()))


def _not_finite(file: pathlib.Path, name: str, tensor: Any) -> str:
  """Returns the sentence about a tensor that cannot be trained; reads it again to count."""
  values = tensor[:]
  wrong = values.size - int(np.count_nonzero(np.isfinite(values)))
  return (
    f'{file}: tensor {name!r} holds {wrong} values of {values.size} that are not finite (NaN or infinite), with which '
    'nothing can be trained or sampled: get the file again, or export the model anew from a checkpoint that works.'
  )


def _copy_companions(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies everything that is not weights: tokenizer, chat template, generation_config.json, licence."""
  weights = ('.safetensors', '.safetensors.index.json', '.bin', '.bin.index.json', '.pt', '.pth', '.gguf', '.onnx')
  for file in source.iterdir():
    if file.is_file() and not file.name.startswith('.') and not file.name.endswith((*weights, checksums.SUMS)):
      shutil.copyfile(file, target / file.name)


def _tensors(table: parameters.Table, params: Tree, dtype: np.dtype) -> Iterator[tuple[str, int, Callable]]:
  """Yields (name, bytes, function that makes the tensor) of every tensor of an export."""
  for parameter in table:
    leaf = parameters.get(params, parameter.path)
    if tuple(leaf.shape) != parameter.shape:
      raise ValueError(f'{parameter.name} has shape {leaf.shape}, not {parameter.shape}.')
    for layer in range(parameter.layers):
      make = functools.partial(_tensor, parameter, leaf, layer, dtype)
      yield parameter.huggingface_name(layer), math.prod(parameter.huggingface_shape) * dtype.itemsize, make


def _tensor(parameter: parameters.Parameter, leaf: Any, layer: int, dtype: np.dtype) -> np.ndarray:
  return parameter.to_huggingface(np.asarray(leaf[layer] if parameter.stacked else leaf).astype(dtype))


def _write_weights(
  root: pathlib.Path, table: parameters.Table, params: Tree, dtype: np.dtype, max_shard_bytes: int
) -> None:
  shards: list[list[tuple[str, int, Callable]]] = [[]]
  for tensor in _tensors(table, params, dtype):
    if shards[-1] and sum(size for _, size, _ in shards[-1]) + tensor[1] > max_shard_bytes:
      shards.append([])
    shards[-1].append(tensor)
  names = (
    [WEIGHTS]
    if len(shards) == 1
    else [f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors' for i in range(len(shards))]
  )
  for file, shard in zip(names, shards, strict=True):
    save_file({name: make() for name, _, make in shard}, root / file, metadata={'format': 'pt'})
  if len(shards) > 1:
    index = {
      'metadata': {'total_size': sum(size for shard in shards for _, size, _ in shard)},
      'weight_map': {name: file for file, shard in zip(names, shards, strict=True) for name, _, _ in shard},
    }
    (root / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + '\n', encoding='utf-8')
