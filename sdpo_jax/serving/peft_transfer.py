"""Import of adapters in PEFT's format, which are untrusted and checked against the served shape first."""

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

LARGEST_HEADER = 2**20  # The most bytes of the header of a safetensors file, with names and shapes.
LARGEST_CONFIG = 2**18  # The most bytes of adapter_config.json and of base_fingerprint.json.
# Allowed patterns for module names: regular expressions with repetitions could take years to match.
_PLAIN = re.compile(r'[\w.^\\$-]*')


@dataclasses.dataclass(frozen=True)
class Served:
  """The shape of all adapters of a service, and the model that they belong to."""

  policy: DecoderPolicy  # The model with the adapter.
  weights: Mapping[str, Any]  # The fingerprint of the model's weights, see `sdpo_jax.models.identity.of_weights`.

  @property
  def adapter(self) -> lora.Adapter:
    """The shape of the adapters: targets, ranks and scales."""
    return self.policy.adapter

  @property
  def table(self) -> parameters.Table:
    """The parameter table of the model without factors."""
    return self.policy.base_policy().parameter_table()

  @property
  def rank(self) -> int | None:
    """The rank r of all matrices; None: they differ."""
    return _one({target.rank for target in self.adapter.targets})

  @property
  def scale(self) -> float | None:
    """The scale alpha / r of all matrices; None: they differ."""
    return _one({scale for target in self.adapter.targets for scale in target.scales if scale})

  @property
  def targets(self) -> tuple[str, ...]:
    """The matrices with factors, by the last part of their module names in transformers, sorted."""
    rows = {row.name: row for row in self.table}
    return tuple(sorted({lora.module_name(rows[each.name], 0).rsplit('.', 1)[-1] for each in self.adapter.targets}))

  def factors(self, files: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Read the factors from a user's files, by their names in the parameter table, [L, …] float32.

    Args:
      files: the contents of adapter_config.json and adapter_model.safetensors by name, and optionally of
        base_fingerprint.json, which must match the model. Other files are ignored.

    Raises:
      InvalidRequest: a file is missing or damaged, the adapter has another shape, kind or model, or values that are not
        finite.
      TooLarge: a file is larger than it can be for an adapter of the served shape.
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
          f'The file {name} is missing: send the files that save_pretrained of PEFT has written.', field='files'
        )
    for name in (peft_config.FILE, peft_files.BASE):
      if len(files.get(name, b'')) > LARGEST_CONFIG:
        raise TooLarge(f'{name} has more than {LARGEST_CONFIG} bytes: send the file of PEFT.', field='files')
    weights = files[peft_files.WEIGHTS]
    header = int.from_bytes(weights[:8], 'little')
    if header > LARGEST_HEADER:
      raise InvalidRequest(
        f'{peft_files.WEIGHTS} has a header of {header} bytes, more than the limit of {LARGEST_HEADER}: send the file '
        'that save_pretrained of PEFT has written.',
        field='files',
      )
    most = 8 + header + 4 * sum(math.prod(row.shape) for row in lora.factors(self.policy.parameter_table()))
    if len(weights) > most:
      raise TooLarge(
        f'{peft_files.WEIGHTS} has {len(weights)} bytes, and adapters of the served shape ({self.described()}) have '
        f'at most {most}.',
        field='files',
      )

  def _read(self, root: pathlib.Path) -> dict[str, np.ndarray]:
    _check_patterns(read_json_object(root / peft_config.FILE, 'send the file that PEFT has written'))
    known_name = known_families.family_of(self.policy.config).known_name
    if peft_files.read_adapter(root, self.table, known_name) != self.adapter:
      raise UserError(f'The adapter does not have the shape that is served here: {self.described()}.')
    known = peft_files.base_of(root)
    if known is not None and known['weights'] != self.weights:
      raise UserError(
        f'According to {peft_files.BASE}, the adapter belongs to a model with other weights than the served one: send '
        'an adapter of this model.'
      )
    factors = peft_files.host_factors(root, self.table, known_name)
    for name, values in factors.items():
      if not training_pool.fits(values):
        raise UserError(
          f'{peft_files.WEIGHTS}: the factor {name} has a value of {training_pool.LARGEST:g} or more, or not finite: '
          'send an adapter without such values.'
        )
    return factors

  def described(self) -> str:
    """Return the shape in words: rank, lora_alpha and matrices."""
    if self.rank is None or self.scale is None:
      return f'different ranks or scales, of {", ".join(self.targets)}'
    return f'rank {self.rank} and lora_alpha {self.scale * self.rank:g}, of {", ".join(self.targets)}'


def _one(values: set[Any]) -> Any:
  return next(iter(values)) if len(values) == 1 else None


def _check_patterns(values: Mapping[str, Any]) -> None:
  """Raise UserError if a PEFT configuration has a regular expression that could take long to match."""
  for entry in ('target_modules', 'exclude_modules', 'layers_pattern', 'rank_pattern', 'alpha_pattern'):
    value = values.get(entry)
    for pattern in [value] if isinstance(value, str) else value if isinstance(value, list | dict) else []:
      if isinstance(pattern, str) and not _PLAIN.fullmatch(pattern):
        raise UserError(
          f'{peft_config.FILE}: {entry} has {short_repr(pattern)}, a regular expression with repetitions or choices, '
          'which are not supported here: list the names of the modules.'
        )
