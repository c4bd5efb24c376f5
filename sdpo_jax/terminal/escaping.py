"""Escaping of untrusted text, so that it can neither control the terminal nor hide anything from the reader.

A character that is invisible or a control is shown by its name between ⟨ and ⟩. These two are escaped in the same way,
so that no two texts look alike: the original can be read back.
"""

from __future__ import annotations

import re

from sdpo_jax.invisible import is_visible

_NAMES = {'\t': 'tab', '\n': 'newline', '\r': 'return', '\x1b': 'escape', '\0': 'null', ' ': 'space'}
_BY_NAME = {name: character for character, name in _NAMES.items()}
_ESCAPED = re.compile('⟨(?:U\\+([0-9A-F]{4,6})|([a-z]+))⟩')


def visible(text: str, keep: str = '\n') -> str:
  """Return a text with every character visible.

  Args:
    text: untrusted text.
    keep: control or invisible characters that are left as they are: newline, tab or space.
  """
  return ''.join(
    letter if letter in keep or is_visible(letter) and letter not in '⟨⟩' else escaped(letter) for letter in text
  )


def visible_line(text: str) -> str:
  """Escape one line of a file as `visible` does, with trailing spaces visible, too."""
  body = text.rstrip(' ')
  return visible(body, keep='') + escaped(' ') * (len(text) - len(body))


def escaped(letter: str) -> str:
  """Return the escape of a character."""
  return f'⟨{_NAMES.get(letter) or f"U+{ord(letter):04X}"}⟩'


def original(shown: str) -> str:
  """Undo `visible`."""
  return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else _BY_NAME[found[2]], shown)
