"""Names of the parameters that hold the slots of a prefix (`kv_prefix`)."""

from __future__ import annotations

from sdpo_jax.models.parameters import Parameter, Path

KEY, VALUE = 'prefix.key', 'prefix.value'  # Names of the trained slots in a layer.
FROZEN_KEY, FROZEN_VALUE = 'prefix.frozen_key', 'prefix.frozen_value'


def is_slots(parameter: Parameter) -> bool:
  """Return whether a parameter holds slots of a prefix, and is thus not a matrix that tokens are multiplied by."""
  return names_slots(parameter.path)


def names_slots(path: Path) -> bool:
  """Return whether a path in a parameter tree leads to slots."""
  return path[:2] == ('layers', 'prefix')
