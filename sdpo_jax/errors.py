"""The exception for errors that users can fix, and helpers to quote values in its message."""

from __future__ import annotations

import reprlib
from typing import Any


class UserError(Exception):
  """An error that the user can fix: one sentence that names the setting, file or row and the way out.

  Commands print it to stderr without a traceback and exit with code 2.
  """


def first_line(error: BaseException) -> str:
  """Return the first line of an error's message, at most 300 characters; the name of its type if it has no message."""
  return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def short_repr(value: Any, limit: int = 60) -> str:
  """Return the repr of a value on one line, cut after about `limit` characters.

  Long texts and large or deeply nested containers are never written out in full on the way.
  """
  if isinstance(value, str):
    return repr(value if len(value) <= limit else value[:limit] + '…')
  shortener = reprlib.Repr()
  shortener.maxdict = shortener.maxlist = shortener.maxtuple = 8
  shortener.maxstring = shortener.maxother = shortener.maxlong = limit
  try:
    text = shortener.repr(value).replace('\n', ' ')
  except ValueError:  # Python refuses to write whole numbers of thousands of digits.
    return f'a {type(value).__name__} that is too large to be shown'
  return text if len(text) <= limit else text[:limit] + '…'


def printable(text: str, limit: int | None = 120, keep: str = '') -> str:
  """Return a text from an outside source, such as a name in a file, cut after `limit` characters (None: whole).

  Characters that would end the line or control a terminal are escaped as in Python, except those in `keep`.
  """
  cut = text if limit is None or len(text) <= limit else text[:limit] + '…'
  return ''.join(
    letter if letter.isprintable() or letter in keep else letter.encode('unicode_escape').decode() for letter in cut
  )
