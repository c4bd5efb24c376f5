"""Names of the parameters that hold the slots of a prefix (`kv_prefix`)."""

from __future__ import annotations

from sdpo_jax.models.parameters import Parameter, Path

KEY, VALUE = 'prefix.key', 'prefix.value'  # Trained slots of a layer.
FROZEN_KEY, FROZEN_VALUE = 'prefix.frozen_key', 'prefix.frozen_value'  # Frozen slots of a layer.
BANK_KEY, BANK_VALUE = 'prefix.bank_key', 'prefix.bank_value'  # Slots of the prefixes of a bank.
FILLED = 'prefix.filled'  # The number of slots of each prefix of a bank, the same in all layers.


def is_slots(parameter: Parameter) -> bool:
  """Return whether a parameter holds slots of a prefix, by which no token is multiplied."""
  return names_slots(parameter.path)


def is_bank(parameter: Parameter) -> bool:
  """Return whether a parameter holds the prefixes of a bank."""
  return parameter.name.removeprefix('layers.') in (BANK_KEY, BANK_VALUE)


def names_slots(path: Path) -> bool:
  """Return whether a path in a parameter tree leads to slots."""
  return path[:2] == ('layers', 'prefix')
