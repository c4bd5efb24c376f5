"""Import, export and random initialisation of Hugging Face models, driven by the parameter table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import logging
import os
import pathlib
from types import MappingProxyType
from typing import Any, Literal

import jax

from sdpo_jax.config import CartridgeConfig, ModelConfig
from sdpo_jax.errors import UserError
from sdpo_jax.models import checksums, exporting, parameters, placing, stored_tensors, tensor_files
from sdpo_jax.models.adapters import lora, merging, peft_files, slot_names
from sdpo_jax.models.adapters.cartridge import check_fits
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.models.families import known_families
from sdpo_jax.models.families.table import parameter_table
from sdpo_jax.models.model_files import open_model, read_json, resolve
from sdpo_jax.types import Tree

_logger = logging.getLogger('sdpo_jax.models')
# Vocabularies of at least LARGE tokens are padded to a multiple of 1024 rows: 8 shards of whole 128-lane tiles.
LARGE, LARGE_MULTIPLE = 32768, 1024
SHARD_BYTES = 5 * 10**9  # Default of the maximum bytes of tensors in a file.


def load(
  path: str | os.PathLike, config: ModelConfig, mesh: jax.sharding.Mesh | None = None, seed: int = 0
) -> tuple[DecoderPolicy, Tree]:
  """Load the policy and its parameters from a model directory (one or several safetensors files).

  Parameters are float32, except those that are frozen under an adapter. The factors of a new adapter are drawn at
  random. The slots of a cartridge are not included, because computing their initial values may need the model.

  A process reads only the rows of every tensor that its devices need, each once. In addition to the result, the host
  holds its share of one stacked parameter at a time, and a few megabytes.

  Args:
    path: directory with config.json and safetensors, or a hub name (organisation/model).
    config: compute dtype, rematerialisation and adapter.
    mesh: mesh over which the parameters are sharded (`sdpo_jax.distributed.mesh`); None: the default device.
    seed: seed of the factors of a new adapter.

  Raises:
    UserError: a file is missing or damaged, the architecture is not supported, or a tensor is missing, unexpected,
      misshapen or holds values that are not finite; the message names it.
  """
  root = resolve(path)
  check_files(root, edited=True)
  policy = read_policy(root, config).on(mesh, config.attention)
  table = policy.parameter_table()
  own = tuple(parameter for parameter in lora.without_factors(table) if not slot_names.is_slots(parameter))
  with open_model(root) as tensors:
    params = parameters.map_table(lambda parameter: placing.place(parameter, tensors, mesh), own)
  if config.lora.path:
    adapter_root = peft_files.resolve(config.lora.path)
    check_files(adapter_root, edited=True)
    known_name = known_families.family_of(policy.config).known_name
    factors = peft_files.load_factors(adapter_root, lora.without_factors(table), known_name, mesh)
  else:
    place = functools.partial(placing.put, mesh)
    factors = parameters.initialise(lora.factors(table), jax.random.key(seed), policy.config.initializer_range, place)
  return policy, parameters.merge(params, factors)


def load_frozen(
  path: str | os.PathLike, config: ModelConfig, mesh: jax.sharding.Mesh | None = None
) -> tuple[DecoderPolicy, Tree]:
  """Load a model that is not trained: its policy, and all its parameters as a base in compute dtype.

  Args:
    path: directory with config.json and safetensors, or a hub name (organisation/model).
    config: compute dtype and rematerialisation; it must not have an adapter.
    mesh: as in `load`.

  Raises:
    UserError: as in `load`.
  """
  root = resolve(path)
  check_files(root, edited=True)
  policy = read_policy(root, config).on(mesh, config.attention)
  table = parameters.frozen_in(policy.parameter_table(), policy.dtype)
  with open_model(root) as tensors:
    return policy, parameters.map_table(lambda parameter: placing.place(parameter, tensors, mesh), table)


def check_files(root: pathlib.Path, *, edited: bool = False) -> int:
  """Compare the files of a model directory with their known SHA-256; return the number of files compared.

  Args:
    root: the directory.
    edited: whether files other than weights, which users may have edited, may differ; a warning is then logged.

  Raises:
    UserError: a file, which the message names, is not as it was written.
  """
  expected = {name: digest for name, digest in checksums.known(root).items() if (root / name).is_file()}
  for name, error in checksums.differences(root, expected).items():
    if not edited or name.endswith(('.safetensors', stored_tensors.INDEX)):
      raise error
    _logger.warning('%s', error)
  return len(expected)


def read_policy(path: str | os.PathLike, config: ModelConfig) -> DecoderPolicy:
  """Return the policy that a directory's config.json describes, without reading weights.

  Its attention runs on any device; `DecoderPolicy.on` chooses kernels for particular devices.

  Raises:
    UserError: config.json is missing or malformed, or its architecture is not supported.
  """
  root = resolve(path, weights=False)
  return _policy(known_families.read(read_json(root, 'config.json'), str(root / 'config.json')), config)


def describe(config_json: dict[str, Any], config: ModelConfig) -> DecoderPolicy:
  """Return the policy that the contents of a config.json describe; errors as in `read_policy`."""
  return _policy(known_families.read(config_json), config)


def positions(config_json: dict[str, Any]) -> int | None:
  """Return max_position_embeddings of the contents of a config.json; None if it is not given."""
  found = config_json.get('text_config', config_json).get('max_position_embeddings')
  return found if isinstance(found, int) else None


def _policy(model: Architecture, config: ModelConfig) -> DecoderPolicy:
  multiple = config.vocab_multiple or (LARGE_MULTIPLE if model.vocab_size >= LARGE else 1)
  architecture = dataclasses.replace(model, vocab_multiple=multiple)
  table = parameter_table(architecture)
  if config.lora.path:
    adapter = peft_files.read_adapter(config.lora.path, table, known_families.family_of(architecture).known_name)
  else:
    adapter = _prefix(config.cartridge, architecture) or lora.from_config(config.lora, table)
  return DecoderPolicy(architecture, config.dtype, config.remat, adapter=adapter)


def _prefix(config: CartridgeConfig, architecture: Architecture) -> KVPrefix | None:
  """Return the prefix that the settings describe; None: there is none.

  Raises:
    UserError: the cartridge to start from cannot be read, or belongs to a model of other sizes.
  """
  slots, frozen, within_windows = config.tokens, config.num_frozen_tokens, config.sliding_window == 'windowed'
  if config.path or config.distractors:
    from sdpo_jax.models.adapters import named_cartridges  # Needed only for cartridges that exist.

  if config.path:
    described = named_cartridges.describe(config.path)
    check_fits(described, architecture, config.path)
    slots, frozen, within_windows = (getattr(described.prefix, name) for name in ('slots', 'frozen', 'within_windows'))
  if slots is None or not config.distractors:
    return None if slots is None else KVPrefix(slots, frozen, within_windows)
  others = [named_cartridges.describe(path).prefix for path in config.distractors]
  if len({other.slots for other in others}) > 1 or within_windows or any(other.within_windows for other in others):
    each = [*zip(config.distractors, others, strict=True), ('the trained one', KVPrefix(slots, frozen, within_windows))]
    has = ', '.join(f'{p.slots} {"windowed" if p.within_windows else "visible"} slots in {name}' for name, p in each)
    raise UserError(
      'model.cartridge.distractors must have equally many slots, and they and the trained cartridge '
      f"sliding_window='visible', but there are {has}: leave out what differs, or train it again."
    )
  at_once = min(config.max_distractors, len(others))
  return KVPrefix(slots, frozen, members=len(others), member_slots=others[0].slots, at_once=at_once)


def init(config_json: dict[str, Any], rng: jax.Array, config: ModelConfig | None = None) -> tuple[DecoderPolicy, Tree]:
  """Return a policy with random float32 parameters, from the contents of a config.json.

  Args:
    config_json: contents of a config.json, whose initializer_range is the standard deviation.
    rng: PRNG key.
    config: compute dtype and rematerialisation; None: float32 and no rematerialisation.
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
  max_shard_bytes: int = SHARD_BYTES,
  texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
  """Write a model directory that transformers loads.

  It gets its name only when it is complete and on the disk, with the SHA-256 of its files. In a run of several
  processes all call this, and process 0 writes.

  Args:
    path: directory to make; it must not hold files.
    policy: policy whose parameter table names the tensors.
    params: nested dict of arrays, jax or numpy.
    source: model directory whose config.json, tokenizer and generation_config.json are copied; None: only a config.json
      is written, from the policy.
    dtype: dtype of the stored tensors.
    max_shard_bytes: maximum bytes of tensors in a file, unless it holds only one; several files get an index.
    texts: files to write, name → content, in place of those of the source.

  Raises:
    ValueError: the policy has an adapter.
    UserError: `path` already holds files or cannot be written, `source` has no config.json, or a parameter holds values
      that are not finite or too large for the dtype.
  """
  if policy.adapter is not None:
    raise ValueError('The policy has an adapter: write it with peft_files.save, or the merged model with save_merged.')
  parts = exporting.parts(policy.parameter_table(), params, dtype)
  _save(path, policy.config, parts, source, dtype, texts, max_shard_bytes)


def save_merged(
  path: str | os.PathLike,
  policy: DecoderPolicy,
  factors: Tree,
  source: str | os.PathLike,
  *,
  dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32',
  texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
  """Write a model directory with an adapter merged: the products of its factors are added to the matrices.

  The model is read from its files and merged in float32, tensor by tensor.

  Args:
    path: as in `save`.
    policy: policy of the model with its adapter.
    factors: nested dict of arrays.
    source: the model directory.
    dtype: as in `save`.
    texts: as in `save`.

  Raises:
    UserError: as in `save`, or the model cannot be read.
  """
  table = policy.base_policy().parameter_table()
  with open_model(resolve(source)) as tensors:
    parts = merging.merged(table, policy.adapter, factors, tensors, dtype)
    _save(path, policy.config, parts, source, dtype, texts)


def _save(
  path: str | os.PathLike,
  architecture: Architecture,
  parts: Sequence[tensor_files.TensorPart],
  source: str | os.PathLike | None,
  dtype: str,
  texts: Mapping[str, str],
  max_shard_bytes: int = SHARD_BYTES,
) -> None:
  family = known_families.family_of(architecture)
  if source is None:
    values, companions = family.write(architecture), []
  else:
    origin = resolve(source, weights=False)
    values = family.exported(read_json(origin, 'config.json'))
    companions = [file for file in exporting.companions(origin) if file.name not in family.left_out]
  values = {name: value for name, value in values.items() if name != '_name_or_path'}  # A folder of the source's maker.
  # transformers 4 wrote torch_dtype; readers of the source must be able to read the copy.
  values = values | {'torch_dtype' if 'torch_dtype' in values and 'dtype' not in values else 'dtype': dtype}
  texts = {**texts, 'config.json': json.dumps(values, indent=2) + '\n'}
  exporting.write_directory(path, parts, dtype, max_shard_bytes=max_shard_bytes, companions=companions, texts=texts)
