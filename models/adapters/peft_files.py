"""Adapter directories in PEFT's format: adapter_config.json and adapter_model.safetensors.

Directories written here also have SHA256SUMS and a base_fingerprint.json, which identifies the base model. Factors are
read onto the devices like the parameters of a model (`sdpo_jax.models.placing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import re
from types import MappingProxyType
from typing import Any, Literal, Self

import jax
import numpy as np

from sdpo_jax.config import ModelConfig
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import read_json_object
from sdpo_jax.models import checksums, directories, exporting, model_files, parameters, placing, tensor_files
from sdpo_jax.models.adapters import lora, peft_config
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.models.families import known_families
from sdpo_jax.models.tensor_files import DTYPES, Tensor, TensorFile
from sdpo_jax.types import Tree

_logger = logging.getLogger('sdpo_jax.models')
WEIGHTS, PICKLED = 'adapter_model.safetensors', 'adapter_model.bin'
BASE = 'base_fingerprint.json'
BASE_FORMAT = 1
SETTING = 'model.lora.path'
ROOT = 'base_model.model.'  # PEFT's prefix of transformers' names.
_FILES = (peft_config.FILE, WEIGHTS, PICKLED, BASE, checksums.SUMS)
_FACTOR = re.compile(re.escape(ROOT) + r'(.+)\.lora_([AB])\.weight')
_AGAIN = 'get the adapter again, or export it again'
# Tokenizer files of the base model, which are copied because the adapter must be used with them.
_TOKENIZER = re.compile(
  r'tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|chat_template.*|.*\.model'
)

# Returns the name in the table of a tensor in a model's file; None: it belongs to a part that is not trained.
KnownName = Callable[[str], str | None]


def resolve(path: str | os.PathLike) -> pathlib.Path:
  """Return the local directory of an adapter: itself, a copy of gs://…, or the hub's snapshot of a name.

  Raises:
    UserError: the directory does not exist, or has no configuration or no weights.
  """
  root = directories.fetch(path, _FILES, SETTING, 'adapter')
  for name in (peft_config.FILE, WEIGHTS):
    if not (root / name).is_file():
      pickled = name == WEIGHTS and (root / PICKLED).is_file()
      way_out = (
        f'{PICKLED} is not read, because a pickle can run code: save the adapter again with safe_serialization=True'
        if pickled
        else f'set {SETTING} to a directory that PEFT or launch.export has written'
      )
      raise UserError(f'{root} has no {name}: {way_out}.')
  return root


def read_config(path: str | os.PathLike) -> peft_config.AdapterConfig:
  """Return the configuration in the adapter_config.json of a directory.

  Raises:
    UserError: it is missing, damaged or not supported.
  """
  file = resolve(path) / peft_config.FILE
  return peft_config.read(read_json_object(file, _AGAIN), str(file))


def read_adapter(path: str | os.PathLike, table: parameters.Table, known_name: KnownName) -> lora.Adapter:
  """Return the adapter in a directory, that is for which matrices it has factors; the factors are not read.

  Args:
    path: path of the adapter's directory.
    table: table of the model without factors.
    known_name: `known_name` of the model's family.

  Raises:
    UserError: the directory cannot be read, is not supported, or holds an adapter of another model.
  """
  with _opened(path, table, known_name) as (adapter, _):
    return adapter


def load_factors(
  path: str | os.PathLike, table: parameters.Table, known_name: KnownName, mesh: jax.sharding.Mesh | None
) -> Tree:
  """Return the factors of an adapter on the devices; layers without factors get zeros.

  Args:
    path: path of the adapter's directory.
    table: table of the model without factors.
    known_name: `known_name` of the model's family.
    mesh: mesh over which they are sharded like parameters; None: the default device.

  Raises:
    UserError: as in `read_adapter`, or the file cannot be read, or holds values that are not finite.
  """
  with _opened_whole(path, table, known_name) as (rows, tensors):
    return parameters.map_table(lambda row: placing.place(row, tensors, mesh), rows)


def host_factors(path: str | os.PathLike, table: parameters.Table, known_name: KnownName) -> dict[str, np.ndarray]:
  """Return the factors of an adapter on the host, by name in the table; otherwise as `load_factors`."""
  with _opened_whole(path, table, known_name) as (rows, tensors):
    return {row.name: placing.read_whole(row, tensors) for row in rows}


@contextlib.contextmanager
def _opened_whole(
  path: str | os.PathLike, table: parameters.Table, known_name: KnownName
) -> Iterator[tuple[parameters.Table, dict[str, Tensor | _Nothing]]]:
  """Provide the table of an adapter's factors and the tensors for all layers, while the file is open."""
  with _opened(path, table, known_name) as (adapter, tensors):
    rows = lora.factors(adapter.extended(table, 'float32'))
    none = {row.huggingface_name(i): _Nothing(row.huggingface_shape) for row in rows for i in range(row.layers)}
    yield rows, none | tensors


@dataclasses.dataclass(frozen=True)
class _Nothing:
  """A tensor of zeros, for a layer without factors."""

  shape: tuple[int, ...]

  def rows(self, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> np.ndarray:
    """Return zeros of the shape that `Tensor.rows` would return."""
    left, right = columns or (0, self.shape[1])
    return np.zeros((rows[1] - rows[0], right - left), np.float32)


@contextlib.contextmanager
def _opened(
  path: str | os.PathLike, table: parameters.Table, known_name: KnownName
) -> Iterator[tuple[lora.Adapter, dict[str, Tensor]]]:
  """Provide an adapter and its tensors, by name in the table of its factors, while the file is open."""
  root = resolve(path)
  config = read_config(root)
  with TensorFile(root / WEIGHTS) as file:
    names = {name: _known(name, known_name) for name in file.tensors}
    modules = peft_config.same_names(table, _prefix(names))
    adapter = peft_config.adapter_of(config, table, modules)
    rows = lora.factors(adapter.extended(table, 'float32'))
    expected = {row.huggingface_name(layer): row for row, layer in held(adapter, rows)}
    yield adapter, _tensors(file, names, expected, config)


def held(adapter: lora.Adapter, rows: parameters.Table) -> Iterator[tuple[parameters.Parameter, int]]:
  """Yield (row of factors from `lora.factors`, layer) for all layers that have these factors, in order."""
  for row in rows:
    target = adapter.by_name[row.name.removesuffix(f'_{lora.A}').removesuffix(f'_{lora.B}')]
    for layer, scale in enumerate(target.scales):
      if scale:
        yield row, layer


def _known(name: str, known_name: KnownName) -> str | None:
  """Return the name in the table of a tensor in a file; None: it belongs to a part that is not trained."""
  factor = _FACTOR.fullmatch(name)
  if factor is None:
    return name
  matrix = known_name(f'{factor[1]}.weight')
  return None if matrix is None else f'{ROOT}{matrix.removesuffix(".weight")}.lora_{factor[2]}.weight'


def _prefix(names: Mapping[str, str | None]) -> str:
  """Return the prefix of the text model's module names in a file, usually 'model.'."""
  for name, known in names.items():
    rest = None if known is None else known.removeprefix(f'{ROOT}model.')
    if rest is not None and rest != known and name.endswith(rest):
      return name.removeprefix(ROOT).removesuffix(rest)
  return 'model.'


def _tensors(
  file: TensorFile,
  names: Mapping[str, str | None],
  expected: Mapping[str, parameters.Parameter],
  config: peft_config.AdapterConfig,
) -> dict[str, Tensor]:
  """Return the tensors of a file by their names in the table.

  Raises:
    UserError: a tensor, which the message names, is missing, duplicate, unexpected, or has another shape or dtype.
  """
  trained_on = (
    '' if config.base is None else f'; {peft_config.FILE} says that it was trained on {short_repr(config.base, 200)}'
  )
  found: dict[str, Tensor] = {}
  unexpected, left_out = [], 0
  for name, known in names.items():
    if known is None:
      left_out += 1
    elif known in found:
      raise UserError(f'{file.path}: {found[known].name!r} and {name!r} name the same tensor: {_AGAIN}.')
    elif known in expected:
      found[known] = file.tensors[name]
    else:
      unexpected.append(name)
  missing = [name for name in expected if name not in found]
  wrong = [f'{len(missing)} tensors are missing, first {missing[0]!r}'] if missing else []
  if unexpected:
    wrong.append(
      f'{len(unexpected)} tensors are of no module that this model has and {peft_config.FILE} targets, first '
      f'{min(unexpected)!r}'
    )
  if wrong:
    raise UserError(
      f'{file.path}: {", and ".join(wrong)}{trained_on}: load the adapter onto its own base model, or get it again.'
    )
  for name, tensor in found.items():
    row = expected[name]
    if tensor.shape != row.huggingface_shape:
      raise UserError(
        f'{file.path}: tensor {tensor.name!r} has shape {tensor.shape}; {_misfit(row, tensor, trained_on)}.'
      )
    if tensor.dtype not in DTYPES:
      raise UserError(
        f'{file.path}: tensor {tensor.name!r} is stored as {tensor.dtype}; supported: {", ".join(DTYPES)}: save the '
        'adapter in one of these.'
      )
  if left_out:
    _logger.warning(
      '%s: %d tensors adapt the part of the model that reads images, and are left out.', file.path, left_out
    )
  return found


def _misfit(row: parameters.Parameter, tensor: Tensor, trained_on: str) -> str:
  """Return the end of the message about a tensor of the wrong shape: the likely cause and the way out."""
  rank = 0 if row.path[-1].endswith(lora.A) else 1
  expected, other = row.huggingface_shape, 1 - rank
  if len(tensor.shape) == 2 and tensor.shape[other] == expected[other]:
    return f'{peft_config.FILE} says that the rank is {expected[rank]}: {_AGAIN}'
  return f'the model needs {expected}{trained_on}: load the adapter onto its own base model'


def base_of(path: str | os.PathLike) -> dict[str, Any] | None:
  """Return the fingerprint of an adapter's base model, from base_fingerprint.json; None: there is no such file.

  Raises:
    UserError: the file is damaged, or has another version.
  """
  file = resolve(path) / BASE
  if not file.is_file():
    return None
  way_out = f'{_AGAIN}, or remove the file and the base model is not compared'
  values = read_json_object(file, way_out)
  weights, architecture = values.get('weights'), values.get('architecture', {})
  if values.get('format') != BASE_FORMAT or not (
    isinstance(weights, dict) and weights and isinstance(architecture, dict)
  ):
    raise UserError(f'{file} is not a fingerprint in the format {BASE_FORMAT}: {way_out}.')
  return values


@dataclasses.dataclass(frozen=True)
class AdapterBase:
  """The base model of adapters that have the same matrices, ranks and scales."""

  name: str  # Path or hub name, for adapter_config.json.
  fingerprint: Mapping[str, Any]  # Fingerprint of the model (`sdpo_jax.models.identity.of_base`).
  adapter: lora.Adapter
  table: parameters.Table  # The table of the model without factors.
  prefix: str = 'model.'  # Of transformers' module names; differs if the text model is part of a larger one.
  use_rslora: bool = False  # Whether alphas are those of rank-stabilised LoRA.

  @classmethod
  def of(cls, model: ModelConfig, policy: DecoderPolicy, fingerprint: Mapping[str, Any]) -> Self:
    """Return the base of the adapter in a model's settings."""
    root = model_files.resolve(model.path)
    given = read_config(model.lora.path) if model.lora.path else model.lora
    return cls(
      name=str(root.resolve()) if directories.is_local(model.path) else model.path,
      fingerprint=fingerprint,
      adapter=policy.adapter,
      table=policy.base_policy().parameter_table(),
      prefix=known_families.family_of(policy.config).module_prefix(model_files.read_json(root, 'config.json')),
      use_rslora=given.use_rslora,
    )

  @functools.cached_property
  def rows(self) -> parameters.Table:
    """The table of an adapter's factors."""
    return lora.factors(self.adapter.extended(self.table, 'float32'))

  @functools.cached_property
  def config(self) -> Mapping[str, Any]:
    """The contents of adapter_config.json."""
    modules = peft_config.same_names(self.table, self.prefix)
    whole = self.prefix == 'model.'
    return peft_config.contents(self.adapter, modules, whole=whole, use_rslora=self.use_rslora, base=self.name)


def save(
  path: str | os.PathLike,
  base: AdapterBase,
  factors: Tree,
  *,
  companions: pathlib.Path | None = None,
  texts: Mapping[str, str] = MappingProxyType({}),
  dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32',
) -> None:
  """Write a directory that `peft.PeftModel.from_pretrained` loads onto the base model.

  It gets its name only when it is complete and on the disk. In a run of several processes all call this, and process 0
  writes.

  Args:
    path: directory to make; it must not hold files.
    base: the base model, and which matrices have factors.
    factors: nested dict of arrays.
    companions: the base model's directory, whose tokenizer files are copied; None: none are.
    texts: further files to write, name → content, in place of those copied.
    dtype: dtype of the stored tensors.

  Raises:
    UserError: `path` already holds files or cannot be written, or a factor holds values that are not finite or too
      large for the dtype.
  """
  parts = [_part(row, factors, layer, dtype, base.prefix) for row, layer in held(base.adapter, base.rows)]
  files = [] if companions is None else exporting.companions(companions)
  values = {peft_config.FILE: base.config, BASE: {'format': BASE_FORMAT, **base.fingerprint}}
  exporting.write_directory(
    path,
    parts,
    dtype,
    weights=WEIGHTS,
    companions=[file for file in files if _TOKENIZER.fullmatch(file.name)],
    texts={**texts, **{name: json.dumps(content, indent=2) + '\n' for name, content in values.items()}},
  )


def _part(row: parameters.Parameter, factors: Tree, layer: int, dtype: str, prefix: str) -> tensor_files.TensorPart:
  part = exporting.part(row, parameters.get(factors, row.path), layer, dtype)
  return part._replace(name=stored_name(row, layer, prefix))


def stored_name(row: parameters.Parameter, layer: int, prefix: str) -> str:
  """Return the name of a factor's tensor in a file; `prefix` as in `save`."""
  return ROOT + prefix + row.huggingface_name(layer).removeprefix(f'{ROOT}model.')
