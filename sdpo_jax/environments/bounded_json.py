"""JSON of somebody who may mean harm: read only if that is quick.

A megabyte of brackets becomes 350 000 lists, which take some hundred milliseconds in which no other thread of the
process runs. Text is no such burden, however long.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_VALUES = 10_000  # Unless the caller expects more.
# A string, also one that does not end, so that no part of a text is looked at twice.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class TooManyValuesError(ValueError):
  """There are more values than anybody has to send."""


def loads(data: bytes, most_values: int = MAX_VALUES) -> Any:
  """Return the value of JSON in UTF-8.

  Raises:
    TooManyValuesError: there are more than `most_values` values, those within others included.
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
  """No text has more: there is a character before each value that stands before no other."""
  return 1 + sum(map(text.count, ',[{'))
