"""What others have written, made visible: nothing in it can steer the terminal or hide itself from the reader.

A character that is not seen, or that acts, is shown by its name between ⟨ and ⟩. These two are themselves shown so, and
therefore no two texts look alike: what is shown can be read back.
"""

from __future__ import annotations

import re

from sdpo_jax.invisible import is_visible

_NAMES = {'\t': 'tab', '\n': 'newline', '\r': 'return', '\x1b': 'escape', '\0': 'null', ' ': 'space'}
_BY_NAME = {name: character for character, name in _NAMES.items()}
_ESCAPED = re.compile('⟨(?:U\\+([0-9A-F]{4,6})|([a-z]+))⟩')


def visible(text: str, keep: str = '\n') -> str:
  """Return a text of which every character can be seen.

  Args:
    text: of anybody.
    keep: characters that are left as they are though they act, of newline, tab and space.
  """
  return ''.join(
    letter if letter in keep or is_visible(letter) and letter not in '⟨⟩' else escaped(letter) for letter in text
  )


def visible_line(text: str) -> str:
  """Return one line of a file so that it can be seen to its end: as `visible`, with the spaces at its end, too."""
  body = text.rstrip(' ')
  return visible(body, keep='') + escaped(' ') * (len(text) - len(body))


def escaped(letter: str) -> str:
  """Return what is shown in the place of a character."""
  return f'⟨{_NAMES.get(letter) or f"U+{ord(letter):04X}"}⟩'


def original(shown: str) -> str:
  """Return the text of which `visible` has made another one."""
  return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else _BY_NAME[found[2]], shown)
