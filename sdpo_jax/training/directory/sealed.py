"""JSON objects that hold their own SHA-256, so that a reader notices if they were changed."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import json
from typing import Any

SEAL = 'sha256'  # Key of the SHA-256 of all other entries.


def seal(values: Mapping[str, Any]) -> str:
  """Return the text of a JSON object with these values and their seal."""
  values = {name: value for name, value in values.items() if name != SEAL}
  text = json.dumps(values, sort_keys=True)
  return json.dumps(values | {SEAL: hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True, indent=1) + '\n'


def unseal(content: bytes) -> dict[str, Any]:
  """Return the values of an object that `seal` wrote.

  Raises:
    ValueError: the content differs from what `seal` returned, even by one bit.
  """
  try:
    values = json.loads(content)
    whole = isinstance(values, dict) and seal(values).encode() == content
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error
  if not whole:
    raise ValueError(f'it does not agree with its {SEAL}' if content else 'it is empty')
  return values
