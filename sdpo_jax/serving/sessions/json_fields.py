"""Readers for fields of JSON objects, which raise InvalidRequest with a sentence about an invalid field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
import math
from typing import Any

from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.tool_calls import flaw_of

LONGEST_TEXT = 1_000_000  # Characters of a text of a request.


def known(values: Any, fields: Sequence[str], what: str) -> Mapping[str, Any]:
  """Return an object; raise InvalidRequest unless it is one and has only these fields."""
  if not isinstance(values, Mapping):
    raise InvalidRequest(f'{what} must be an object, not {short_repr(values)}.')
  for name in values:
    if name not in fields:
      raise InvalidRequest(f'{what} has no {short_repr(name)}; there are {", ".join(fields)}.', field=str(name))
  return values


def text(value: Any, field: str, *, longest: int = LONGEST_TEXT) -> str:
  """Return a text; raise InvalidRequest for anything else."""
  if not isinstance(value, str) or len(value) > longest:
    raise InvalidRequest(f'{field} must be a text of up to {longest} characters, not {short_repr(value)}.', field=field)
  return _sound(value, field)


def optional_text(value: Any, field: str) -> str | None:
  """Return a text or None; raise InvalidRequest for anything else."""
  return None if value is None else text(value, field)


def whole(value: Any, field: str, least: int, most: int) -> int:
  """Return an integer within bounds; raise InvalidRequest for anything else."""
  if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
    raise InvalidRequest(
      f'{field} must be a whole number between {least} and {most}, not {short_repr(value)}.', field=field
    )
  return value


def optional_whole(value: Any, field: str, least: int, most: int) -> int | None:
  """Return an integer within bounds or None; raise InvalidRequest for anything else."""
  return None if value is None else whole(value, field, least, most)


def flag(value: Any, field: str) -> bool:
  """Return true or false; raise InvalidRequest for anything else."""
  if not isinstance(value, bool):
    raise InvalidRequest(f'{field} must be true or false, not {short_repr(value)}.', field=field)
  return value


def mapping(value: Any, field: str) -> dict[str, Any]:
  """Return an object; raise InvalidRequest unless it is one that JSON can hold."""
  if not isinstance(value, Mapping):
    raise InvalidRequest(f'{field} must be an object, not {short_repr(value)}.', field=field)
  try:
    found = json.loads(json.dumps(dict(value), allow_nan=False))
  except (TypeError, ValueError, RecursionError) as error:
    raise InvalidRequest(f'{field} holds what JSON cannot: {error}.', field=field) from error
  return _sound(found, field)


def listed(value: Any, field: str, most: int, each: Callable[[Any, str], Any]) -> list[Any]:
  """Return a list with each element read by `each`; raise InvalidRequest for anything else."""
  if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > most:
    raise InvalidRequest(f'{field} must be a list of up to {most}, not {short_repr(value)}.', field=field)
  return [each(element, f'{field}[{number}]') for number, element in enumerate(value)]


def finite(value: Any, field: str) -> float:
  """Return a finite number; raise InvalidRequest for anything else."""
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
    raise InvalidRequest(f'{field} must be a number, not {short_repr(value)}.', field=field)
  return float(value)


def _sound(value: Any, field: str) -> Any:
  """Return a value; raise InvalidRequest for one that could not be tokenized, stored or sent."""
  if flaw := flaw_of(value):
    raise InvalidRequest(f'{field} holds {flaw}.', field=field)
  return value
