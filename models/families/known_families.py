"""The supported families of models, by name and by the model_type of a config.json."""

from __future__ import annotations

from collections.abc import Mapping

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.families import gemma3, llama, mistral, olmo3, qwen
from sdpo_jax.models.families.config_json import Json
from sdpo_jax.models.families.family import Family

_ALL = (qwen.QWEN3, qwen.QWEN2, llama.FAMILY, mistral.FAMILY, olmo3.FAMILY, gemma3.FAMILY)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
BY_MODEL_TYPE: Mapping[str, Family] = {kind: family for family in FAMILIES.values() for kind in family.model_types}
# Why some model types, similar to supported ones, are not supported.
REASONS: Mapping[str, str] = {
  'gemma2': 'its logits are soft-capped',
  'mixtral': 'a mixture of experts',
  'qwen2_moe': 'a mixture of experts',
  'qwen3_moe': 'a mixture of experts',
  'qwen2_5_vl': 'it reads images',
  'qwen3_vl': 'it reads images',
}


def family_of(architecture: Architecture) -> Family:
  """Return the family that an architecture names."""
  return FAMILIES[architecture.family]


def read(values: Json, source: str = 'config.json') -> Architecture:
  """Return the architecture in the contents of a config.json, as read by the family of its model_type.

  Raises:
    UserError: something is not supported; the message names it and `source`.
  """
  model_type = values.get('model_type')
  if model_type not in list(BY_MODEL_TYPE):  # Which may be unhashable.
    supported = ', '.join(map(repr, BY_MODEL_TYPE))
    reason = f' ({REASONS[model_type]})' if model_type in list(REASONS) else ''
    raise UserError(
      f'{source}: model_type {short_repr(model_type)} is not supported{reason}; supported: {supported} (dense).'
    )
  return BY_MODEL_TYPE[model_type].read(values, source)
