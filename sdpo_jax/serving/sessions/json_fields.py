"""Validators for fields of JSON objects, which raise InvalidRequest with a sentence that names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
import math
from typing import Any

from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.tool_calls import flaw_of

LONGEST_TEXT = 1_000_000  # The most characters of a text.


def known(values: Any, fields: Sequence[str], what: str) -> Mapping[str, Any]:
  """Return an object that has only these fields; raises InvalidRequest for anything else."""
  if not isinstance(values, Mapping):
    raise InvalidRequest(f'{what} must be an object, not {short_repr(values)}.')
  for name in values:
    if name not in fields:
      raise InvalidRequest(f'{what} has no field {short_repr(name)}, only {", ".join(fields)}.', field=str(name))
  return values


def text(value: Any, field: str, *, longest: int = LONGEST_TEXT) -> str:
  """Return a text of limited length; raises InvalidRequest for anything else."""
  if not isinstance(value, str) or len(value) > longest:
    raise InvalidRequest(f'{field} must be a text of up to {longest} characters, not {short_repr(value)}.', field=field)
  return _sound(value, field)


def optional_text(value: Any, field: str) -> str | None:
  """Return a text or None; raises InvalidRequest for anything else."""
  return None if value is None else text(value, field)


def whole(value: Any, field: str, least: int, most: int) -> int:
  """Return an integer from `least` to `most`; raises InvalidRequest for anything else."""
  if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
    raise InvalidRequest(
      f'{field} must be a whole number between {least} and {most}, not {short_repr(value)}.', field=field
    )
  return value


def optional_whole(value: Any, field: str, least: int, most: int) -> int | None:
  """Return an integer from `least` to `most`, or None; raises InvalidRequest for anything else."""
  return None if value is None else whole(value, field, least, most)


def flag(value: Any, field: str) -> bool:
  """Return a boolean; raises InvalidRequest for anything else."""
  if not isinstance(value, bool):
    raise InvalidRequest(f'{field} must be true or false, not {short_repr(value)}.', field=field)
  return value


def mapping(value: Any, field: str) -> dict[str, Any]:
  """Return a copy of an object; raises InvalidRequest unless it can be written as JSON."""
  if not isinstance(value, Mapping):
    raise InvalidRequest(f'{field} must be an object, not {short_repr(value)}.', field=field)
  _sound(value, field)  # First, since it names numbers that are not finite.
  try:
    found = json.loads(json.dumps(dict(value), allow_nan=False))
  except (TypeError, ValueError, RecursionError) as error:
    raise InvalidRequest(f'{field} cannot be written as JSON: {error}.', field=field) from error
  return _sound(found, field)


def listed(value: Any, field: str, most: int, each: Callable[[Any, str], Any]) -> list[Any]:
  """Return a list of at most `most` elements, each validated by `each`; raises InvalidRequest for anything else."""
  if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > most:
    raise InvalidRequest(f'{field} must be a list of up to {most} elements, not {short_repr(value)}.', field=field)
  return [each(element, f'{field}[{number}]') for number, element in enumerate(value)]


def one_of(*allowed: str) -> Callable[[Any, str], str]:
  """Return a validator that returns one of these texts, and raises InvalidRequest for anything else."""

  def read(value: Any, field: str) -> str:
    if value not in allowed:
      raise InvalidRequest(f'{field} must be one of {", ".join(allowed)}, not {short_repr(value)}.', field=field)
    return value

  return read


def finite(value: Any, field: str) -> float:
  """Return a finite number as a float; raises InvalidRequest for anything else."""
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
    raise InvalidRequest(f'{field} must be a number, not {short_repr(value)}.', field=field)
  return float(value)


def _sound(value: Any, field: str) -> Any:
  """Return a value; raises InvalidRequest if it cannot be tokenized, stored or sent."""
  if flaw := flaw_of(value):
    raise InvalidRequest(f'{field} holds {flaw}.', field=field)
  return value
