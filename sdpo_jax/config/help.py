"""The help texts of settings: default, type, allowed values, unit, meaning."""

from __future__ import annotations

import textwrap
from typing import Any

from sdpo_jax.config.fields import settings, type_name, unknown_setting
from sdpo_jax.config.ranges import Range

WIDTH = 110


def settings_help(config: Any, part: str = '') -> str:
  """Return the help text of a config's settings, with their values.

  Args:
    config: config whose values are shown, for example the defaults.
    part: prefix of dotted names or, if no name has it, text in a name or its description; empty: all settings.

  Raises:
    UserError: there is no such setting.
  """
  known = [
    (name, value, values_of(hint, field.metadata['range']), field.metadata['doc'])
    for name, value, hint, field in settings(config)
  ]
  found = [row for row in known if row[0] == part or row[0].startswith(part.rstrip('.') + '.')] if part else known
  found = found or [row for row in known if row[0].startswith(part)]
  found = found or [row for row in known if part.lower() in f'{row[0]} {row[2]} {row[3]}'.lower()]
  if not found:
    raise unknown_setting(config, part)
  return '\n'.join(_entry(*row) for row in found)


def _entry(name: str, value: Any, values: str, doc: str) -> str:
  said = textwrap.wrap(doc, WIDTH, initial_indent='      ', subsequent_indent='      ', break_on_hyphens=False)
  return '\n'.join([f'--config.{name}={value!r}', f'      [{values}]', *said])


def values_of(hint: Any, allowed: Range | None) -> str:
  """Return a description of the values that a setting takes, for users."""
  if allowed is None:
    return type_name(hint)
  *kinds, last = type_name(hint).split(' or ')
  kinds = kinds if last == 'None' else [*kinds, last]
  described = f'{" or ".join(kinds)}, {allowed}' + (f' ({allowed.unit})' if allowed.unit else '')
  return f'{described}, or None' if last == 'None' else described
