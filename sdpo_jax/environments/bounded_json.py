"""JSON from an untrusted sender, parsed only if that is quick.

A megabyte of brackets becomes 350 000 lists. Parsing them takes some hundred milliseconds, in which no other thread of
the process runs. Long strings are no such burden.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_VALUES = 10_000  # Default limit of the number of values.
# Matches a string, closed or not, so that no part of a text is scanned twice.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class TooManyValuesError(ValueError):
  """The JSON holds more values than allowed."""


def loads(data: bytes, most_values: int = MAX_VALUES) -> Any:
  """Parse JSON in UTF-8.

  Raises:
    TooManyValuesError: there are more than `most_values` values, counting nested ones.
    ValueError: it is not JSON, or is nested too deeply.
  """
  text = data.decode('utf-8-sig')
  if _most_values(text) > most_values and _most_values(_STRING.sub('', text)) > most_values:
    raise TooManyValuesError(f'it has more than {most_values} values')
  try:
    return json.loads(text)
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error


def _most_values(text: str) -> int:
  """Return an upper bound of the number of values: each value follows a character that no other value follows."""
  return 1 + sum(map(text.count, ',[{'))
