"""Escaping of untrusted text, which could otherwise control the terminal or hide something from the reader.

Characters that are invisible, or that control, reorder, strike out or cover others, are shown by their names between ⟨
and ⟩. These two are escaped in the same way, so that different texts look different, and the original can be recovered.
"""

from __future__ import annotations

import re

from sdpo_jax.invisible import fits, is_mark, is_right_to_left, is_visible

_NAMES = {'\t': 'tab', '\n': 'newline', '\r': 'return', '\x1b': 'escape', '\0': 'null', ' ': 'space'}
_BY_NAME = {name: character for character, name in _NAMES.items()}
_ESCAPED = re.compile('⟨(?:U\\+([0-9A-F]{4,6})|([a-z]+))⟩')


def visible(text: str, keep: str = '\n', *, prose: bool = False) -> str:
  """Return a text in which every character is visible, and none moves or covers others.

  Args:
    text: an untrusted text.
    keep: invisible characters that are not escaped, among newline, tab and space.
    prose: whether the text is only read, not approved: letters of right-to-left scripts are left as they are.
  """
  shown, cluster = [], ''  # What the next mark would be drawn into.
  for letter in text:
    if ' ' <= letter <= '~':
      seen, cluster = True, letter
    elif is_mark(letter):
      seen = fits(letter, cluster)
      cluster = cluster + letter if seen else ''
    else:
      seen = is_visible(letter) and letter not in '⟨⟩' and (prose or not is_right_to_left(letter))
      cluster = letter if seen else ''
    shown.append(letter if seen or letter in keep else escaped(letter))
  return ''.join(shown)


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
