"""Declaration of settings, and checking and parsing of their values by type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import difflib
import functools
import json
import re
import string
import sys
import types
import typing
from typing import Any, Literal

from sdpo_jax.errors import UserError, short_repr

# The errors of `re.compile` for malformed regular expressions, including large repetitions and deep nesting.
MALFORMED_PATTERN = (re.error, OverflowError, RecursionError)


def setting(default: Any, doc: str, allowed: Any = None) -> Any:
  """Return the dataclass field of a setting or a section.

  Args:
    default: its default value; for a section its class.
    doc: documentation string for users.
    allowed: a `ranges.Range` of its numbers, if that does not depend on other settings.
  """
  metadata = {'doc': doc, 'range': allowed}
  if isinstance(default, type):
    return dataclasses.field(default_factory=default, metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


def fields_of(template: str) -> set[str]:
  """Return the names of the fields of a template for `str.format`; doubled braces are no field."""
  return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def is_number(value: Any) -> bool:
  """Return whether a value is a finite number that fits a float; booleans do not count."""
  # Integers can exceed the range of floats, and `math.isfinite` raises OverflowError for those.
  return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def flatten(config: Any, prefix: str = '', like: Any = None) -> dict[str, Any]:
  """Return settings by dotted name; tuples become lists, so that a config and its JSON compare equal.

  Args:
    config: a dataclass, or the nested dict read from its JSON.
    prefix: prefix of every name.
    like: for a nested dict, a dataclass with the same sections; a dict that is no section in it is a single setting.
  """
  items = config
  if dataclasses.is_dataclass(config):
    items = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
  flat: dict[str, Any] = {}
  for key, value in items.items():
    known = getattr(like, key, None)
    if dataclasses.is_dataclass(value) or (isinstance(value, dict) and dataclasses.is_dataclass(known)):
      flat.update(flatten(value, f'{prefix}{key}.', known))
    else:
      flat[prefix + key] = list(value) if isinstance(value, tuple | list) else value
  return flat


def settings(config: Any, prefix: str = '') -> Iterator[tuple[str, Any, Any, dataclasses.Field]]:
  """Yield (dotted name, value, type, field) of every setting of a config."""
  hints = types_of(type(config))
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      yield from settings(value, f'{prefix}{field.name}.')
    else:
      yield prefix + field.name, value, hints[field.name], field


def is_listed(name: str, listed: Sequence[str]) -> bool:
  """Return whether a setting, or a section that contains it, is among the `listed` names."""
  return any(name == entry or name.startswith(entry + '.') for entry in listed)


@functools.cache
def types_of(section: type) -> dict[str, Any]:
  """Return the types of the fields of a section's class by name, cached since reading annotations is slow."""
  return typing.get_type_hints(section)


def takes_none(hint: Any) -> bool:
  """Return whether a setting of this type may be None."""
  return type(None) in _alternatives(hint)


def unknown_setting(config: Any, name: str) -> UserError:
  """Return the error for a name that `config` does not have, with the most similar names that it has."""
  known = flatten(config)
  near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  same_leaf = [key for key in known if key.split('.')[-1] == name.split('.')[-1] and key not in near]
  section = name.rpartition('.')[0]
  hint = ', '.join(sorted(same_leaf + near, key=lambda key: key.rpartition('.')[0] != section))
  return UserError(
    f'There is no setting {name!r}' + (f'; did you mean {hint}?' if hint else '; --help_settings lists all of them.')
  )


def did_you_mean(given: Any, known: Iterable[Any]) -> str:
  """Return the end of an error message about an unknown name: '; did you mean …?' or, if no name is similar, '.'.

  Args:
    given: the unknown name; values that are not strings have no similar names.
    known: the names that exist, compared regardless of case.
  """
  names = {name.lower(): name for name in known if isinstance(name, str)}
  near = difflib.get_close_matches(given.lower(), names, 1) if isinstance(given, str) else []
  return f'; did you mean {names[near[0]]!r}?' if near else '.'


def _alternatives(hint: Any) -> tuple[Any, ...]:
  return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def type_name(hint: Any) -> str:
  """Return the name of a setting's type for users."""
  names = []
  for kind in _alternatives(hint):
    if typing.get_origin(kind) is Literal:
      names += [repr(value) for value in typing.get_args(kind)]
    elif typing.get_origin(kind) is tuple:
      names.append(f'a list of {typing.get_args(kind)[0].__name__}')
    elif typing.get_origin(kind) is dict:
      names.append('a JSON object')
    else:
      names.append('None' if kind is type(None) else kind.__name__)
  return ' or '.join(names)


def _mistyped(name: str, value: Any, hint: Any) -> UserError:
  """Return the error for a value that does not have its setting's type, with the most similar allowed value."""
  literals = (kind for kind in _alternatives(hint) if typing.get_origin(kind) is Literal)
  fixed = (known for kind in literals for known in typing.get_args(kind))
  if isinstance(value, str) and matches([value], hint):
    return UserError(f'{name}={short_repr(value)} is not {type_name(hint)}: write [{short_repr(value)}].')
  return UserError(f'{name}={short_repr(value)} is not {type_name(hint)}{did_you_mean(value, fixed)}')


def matches(value: Any, hint: Any) -> bool:
  """Return whether a value has a type, such as that of a setting or an abstract collection."""
  return any(_is_of(value, kind) for kind in _alternatives(hint))


def _is_of(value: Any, kind: Any) -> bool:
  """Return whether a value is of one alternative of a type."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is Literal:
    return isinstance(value, tuple(map(type, arguments))) and value in arguments  # Arrays are compared by items.
  if origin is tuple:
    return isinstance(value, tuple | list) and all(matches(item, arguments[0]) for item in value)
  if origin is dict:
    return isinstance(value, dict) and _is_json(value)
  if origin in (Iterable, Sequence):
    return isinstance(value, origin) and not isinstance(value, str | bytes | Mapping)
  if kind is float:
    return is_number(value)
  if kind is int:
    return isinstance(value, int) and not isinstance(value, bool)
  return kind is Any or isinstance(value, origin or kind)


def _is_json(value: Any) -> bool:
  """Return whether `value` is unchanged by a config.json, from which tuples come back as lists and keys as strings."""
  if isinstance(value, dict):
    return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
  if isinstance(value, list):
    return all(map(_is_json, value))
  return value is None or isinstance(value, str | int | bool) or is_number(value)


def parse_entry(text: str) -> Any:
  """Return the value of command-line text for one key of a JSON object: parsed as JSON if possible, else the text."""
  if text in ('None', 'True', 'False'):
    return {'None': None, 'True': True, 'False': False}[text]
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):  # Also an integer of more digits than Python converts.
    return text
  return value if _is_json(value) else text


def parse(name: str, text: str, hint: Any) -> Any:
  """Parse command-line text for the setting `name` of type `hint`; raise UserError if it does not have that type."""
  alternatives = _alternatives(hint)
  if type(None) in alternatives and text.lower() in ('none', 'null'):  # Before str, which takes any text.
    return None
  for kind in alternatives:
    if kind is bool and text.lower() in ('true', 'false', '1', '0'):
      return text.lower() in ('true', '1')
    if typing.get_origin(kind) is Literal:
      spelled = text.replace('_', '-') if text.replace('_', '-') in typing.get_args(kind) else text
      if spelled in typing.get_args(kind):
        return spelled
    if typing.get_origin(kind) is tuple:
      try:
        items = json.loads(text) if _is_list(text) else [item for item in _within(text).split(',') if item]
      except json.JSONDecodeError as error:
        raise UserError(f'{name}={text!r} is not {type_name(hint)}: {error}; write a,b or ["a", "b"].') from error
      return tuple(
        parse(name, item if isinstance(item, str) else json.dumps(item), typing.get_args(kind)[0]) for item in items
      )
    if typing.get_origin(kind) is dict:
      value = parse_entry(text)
      if isinstance(value, dict):
        return value
    if kind is str:
      return text
    if kind in (int, float):
      try:
        value = kind(text)
      except ValueError:
        continue
      if is_number(value):
        return value
  raise _mistyped(name, text, hint)


def _is_list(text: str) -> bool:
  """Return whether text looks like a JSON list, unlike for example the regular expression '[qv]_proj'."""
  return text.startswith('[') and (text.endswith(']') or ']' not in text)


def _within(text: str) -> str:
  """Return the text inside parentheses that enclose all of it, else the text, as for '(a|b).(c)'."""
  depth = 0
  for position, character in enumerate(text):
    depth += (character == '(') - (character == ')')
    if depth <= 0:
      return text[1:-1] if text.startswith('(') and position == len(text) - 1 else text
  return text


def check_types(config: Any) -> None:
  """Raise UserError for the first setting that is unknown or whose value is not of its type.

  Args:
    config: a dataclass whose fields are settings or such dataclasses.
  """
  _check_section(config, '', config)


def _check_section(section: Any, prefix: str, config: Any) -> None:
  hints = types_of(type(section))
  unknown = vars(section).keys() - hints.keys()
  if unknown:
    raise unknown_setting(config, prefix + min(unknown))
  for field in dataclasses.fields(section):
    value = getattr(section, field.name)
    if dataclasses.is_dataclass(value):
      _check_section(value, f'{prefix}{field.name}.', config)
    elif not matches(value, hints[field.name]):
      raise _mistyped(prefix + field.name, value, hints[field.name])
