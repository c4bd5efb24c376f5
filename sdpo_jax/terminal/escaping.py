"""Escaping of untrusted text, which could otherwise control the terminal or hide something from the reader.

Invisible and control characters are shown by their names between ⟨ and ⟩. These two are escaped in the same way, so
that different texts look different, and the original can be recovered.
"""

from __future__ import annotations

import re

from sdpo_jax.invisible import is_visible

_NAMES = {'\t': 'tab', '\n': 'newline', '\r': 'return', '\x1b': 'escape', '\0': 'null', ' ': 'space'}
_BY_NAME = {name: character for character, name in _NAMES.items()}
_ESCAPED = re.compile('⟨(?:U\\+([0-9A-F]{4,6})|([a-z]+))⟩')


def visible(text: str, keep: str = '\n') -> str:
  """Return a text in which every character is visible.

  Args:
    text: an untrusted text.
    keep: invisible characters that are not escaped, among newline, tab and space.
  """
  return ''.join(
    letter if letter in keep or is_visible(letter) and letter not in '⟨⟩' else escaped(letter) for letter in text
  )


def visible_line(text: str) -> str:
  """Return a line of a file in which every character is visible, including trailing spaces."""
  body = text.rstrip(' ')
  return visible(body, keep='') + escaped(' ') * (len(text) - len(body))


def escaped(letter: str) -> str:
  """Return the escape of a character, such as ⟨tab⟩ or ⟨U+200B⟩."""
  return f'⟨{_NAMES.get(letter) or f"U+{ord(letter):04X}"}⟩'


def original(shown: str) -> str:
  """Return the text that `visible` has escaped."""
  return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else _BY_NAME[found[2]], shown)
