"""Adapters that users upload in PEFT's format, checked against the served shape before anything is made from them."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import pathlib
import re
import tempfile
from typing import Any

import numpy as np

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import read_json_object
from sdpo_jax.learning import training_pool
from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import lora, peft_config, peft_files
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.models.families import known_families
from sdpo_jax.serving.errors import InvalidRequest, TooLarge

LARGEST_HEADER = 2**20  # Bytes of the names and shapes of a safetensors file.
LARGEST_CONFIG = 2**18  # Bytes of adapter_config.json, and of base_fingerprint.json.
# Allowed patterns of module names: an expression with repetitions could take years to match.
_PLAIN = re.compile(r'[\w.^\\$-]*')


@dataclasses.dataclass(frozen=True)
class Served:
  """The shape of all adapters of a service, and the model that they belong to."""

  policy: DecoderPolicy  # The model with the adapter.
  weights: Mapping[str, Any]  # The weights' part of the model's fingerprint, `sdpo_jax.models.identity.of_weights`.

  @property
  def adapter(self) -> lora.Adapter:
    return self.policy.adapter

  @property
  def table(self) -> parameters.Table:
    """The parameter table of the model without factors."""
    return self.policy.base_policy().parameter_table()

  @property
  def rank(self) -> int | None:
    """The rank r of all matrices; None: it varies."""
    return _one({target.rank for target in self.adapter.targets})

  @property
  def scale(self) -> float | None:
    """The scale alpha / r of all matrices; None: it varies."""
    return _one({scale for target in self.adapter.targets for scale in target.scales if scale})

  @property
  def targets(self) -> tuple[str, ...]:
    """The matrices with factors, by the last part of their module names in transformers."""
    rows = {row.name: row for row in self.table}
    return tuple(sorted({lora.module_name(rows[each.name], 0).rsplit('.', 1)[-1] for each in self.adapter.targets}))

  def factors(self, files: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Return the factors in a user's files, by their names in the table, [L, …] float32.

    Args:
      files: adapter_config.json and adapter_model.safetensors by name; a base_fingerprint.json is compared with the
        model's. Other files are ignored.

    Raises:
      InvalidRequest: a file is missing or damaged, the adapter has another shape, kind or model, or holds values that
        are not finite.
      TooLarge: a file is larger than such an adapter can be.
    """
    self._check_sizes(files)
    with tempfile.TemporaryDirectory(prefix='sdpo-import-') as folder:
      root = pathlib.Path(folder)
      for name in (peft_config.FILE, peft_files.WEIGHTS, peft_files.BASE):
        if name in files:
          (root / name).write_bytes(files[name])
      try:
        return self._read(root)
      except UserError as error:
        raise InvalidRequest(
          str(error).replace(f'{root}/', '').replace(str(root), 'the adapter'), field='files'
        ) from None

  def _check_sizes(self, files: Mapping[str, bytes]) -> None:
    for name in (peft_config.FILE, peft_files.WEIGHTS):
      if name not in files:
        raise InvalidRequest(
          f'There is no {name}: send the files that save_pretrained of PEFT has written.', field='files'
        )
    for name in (peft_config.FILE, peft_files.BASE):
      if len(files.get(name, b'')) > LARGEST_CONFIG:
        raise TooLarge(f'{name} has more than {LARGEST_CONFIG} bytes, which no adapter needs.', field='files')
    weights = files[peft_files.WEIGHTS]
    header = int.from_bytes(weights[:8], 'little')
    if header > LARGEST_HEADER:
      raise InvalidRequest(
        f'{peft_files.WEIGHTS} says that its header has {header} bytes, and {LARGEST_HEADER} are read at most: send '
        'the file that save_pretrained of PEFT has written.',
        field='files',
      )
    most = 8 + header + 4 * sum(math.prod(row.shape) for row in lora.factors(self.policy.parameter_table()))
    if len(weights) > most:
      raise TooLarge(
        f'{peft_files.WEIGHTS} has {len(weights)} bytes, and adapters as they are served here have {most} at most: '
        f'{self.described()}.',
        field='files',
      )

  def _read(self, root: pathlib.Path) -> dict[str, np.ndarray]:
    _check_patterns(read_json_object(root / peft_config.FILE, 'send the file that PEFT has written'))
    known_name = known_families.family_of(self.policy.config).known_name
    if peft_files.read_adapter(root, self.table, known_name) != self.adapter:
      raise UserError(f'The adapter has another shape than is served here, which is {self.described()}.')
    known = peft_files.base_of(root)
    if known is not None and known['weights'] != self.weights:
      raise UserError(
        f'{peft_files.BASE} says that the adapter belongs to a model with other weights than the one that is served: '
        'send an adapter of this model.'
      )
    factors = peft_files.host_factors(root, self.table, known_name)
    for name, values in factors.items():
      if not training_pool.fits(values):
        raise UserError(
          f'{peft_files.WEIGHTS}: the factor {name} holds a value of {training_pool.LARGEST:g} or more, which is not '
          'served: send an adapter that was trained.'
        )
    return factors

  def described(self) -> str:
    """Return a description of the shape in words."""
    if self.rank is None or self.scale is None:
      return f'one with different ranks or scales, of {", ".join(self.targets)}'
    return f'rank {self.rank} and lora_alpha {self.scale * self.rank:g}, of {", ".join(self.targets)}'


def _one(values: set[Any]) -> Any:
  return next(iter(values)) if len(values) == 1 else None


def _check_patterns(values: Mapping[str, Any]) -> None:
  """Raise UserError if a configuration has a regular expression that could take long to match."""
  for entry in ('target_modules', 'exclude_modules', 'layers_pattern', 'rank_pattern', 'alpha_pattern'):
    value = values.get(entry)
    for pattern in [value] if isinstance(value, str) else value if isinstance(value, list | dict) else []:
      if isinstance(pattern, str) and not _PLAIN.fullmatch(pattern):
        raise UserError(
          f'{peft_config.FILE}: {entry} holds {short_repr(pattern)}, a regular expression with repetitions or choices, '
          'which are not read here: list the names of the modules.'
        )
