"""Validators for fields of JSON objects, which raise InvalidRequest with a sentence that names the field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import json
import math
from typing import Any

from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.tool_calls import flaw_of

Reader = Callable[[Any, str], Any]  # Validates the value of a field, and returns it; raises InvalidRequest.
LONGEST_TEXT = 1_000_000  # The most characters of a text.


def known(values: Any, fields: Iterable[str], what: str, within: str = '') -> dict[str, Any]:
  """Return an object that has only these fields; raises InvalidRequest for anything else.

  Args:
    values: the object.
    fields: the names of its fields.
    what: what it is, for error messages.
    within: the beginning of the names of its fields in errors.
  """
  if not isinstance(values, Mapping):
    raise InvalidRequest(f'{what} must be an object, not {short_repr(values)}.')
  for name in values:
    if name not in fields:
      raise InvalidRequest(
        f'{what} has no field {short_repr(name)}, only {", ".join(fields)}.', field=f'{within}{name}'
      )
  return dict(values)


def fields_of(values: Any, fields: Mapping[str, Reader], what: str, needed: Iterable[str] = ()) -> dict[str, Any]:
  """Return an object with its fields validated; raises InvalidRequest if it has others or lacks one.

  Args:
    values: the object.
    fields: the validator of each field.
    what: what it is, for error messages.
    needed: the names of the fields that must be there.
  """
  said = known(values, fields, what)
  for name in needed:
    if name not in said:
      raise InvalidRequest(f'{what} needs {name}.', field=name)
  return {name: fields[name](value, name) for name, value in said.items()}


def text(value: Any, field: str, *, longest: int = LONGEST_TEXT) -> str:
  """Return a text of limited length; raises InvalidRequest for anything else."""
  if not isinstance(value, str) or len(value) > longest:
    raise InvalidRequest(f'{field} must be a text of up to {longest} characters, not {short_repr(value)}.', field=field)
  return _sound(value, field)


def whole(least: int, most: int) -> Callable[[Any, str], int]:
  """Return a validator that returns an integer from `least` to `most`, and raises InvalidRequest for anything else."""

  def read(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
      raise InvalidRequest(
        f'{field} must be a whole number between {least} and {most}, not {short_repr(value)}.', field=field
      )
    return value

  return read


def optional(reader: Reader) -> Reader:
  """Return a validator that also accepts None."""
  return lambda value, field: None if value is None else reader(value, field)


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


def listed(value: Any, field: str, most: int, each: Reader) -> list[Any]:
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
