"""Characters that are invisible, control a terminal or reorder text: one definition for terminals and web pages."""

from __future__ import annotations

import re

# Printable according to Python, but invisible: joiners, fillers, silent vowels, variation selectors, the empty braille
# cell.
_BLANK = '\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef'
_IS_BLANK = re.compile(f'[{_BLANK}]')
_NAMED = ''.join(letter if letter == '-' else f'\\u{{{ord(letter):x}}}' for letter in _BLANK)
# First line of a page's script: `INVISIBLE` matches characters that are not `is_visible`, except tabs and line breaks.
# C and Z are the characters that Python calls not printable: control and direction characters, surrogates, unassigned
# code points, spaces.
SCRIPT = rf'const INVISIBLE = /(?![ \t\n])[\p{{C}}\p{{Z}}{_NAMED}]/gu;' + '\n'


def is_visible(letter: str) -> bool:
  """Return whether a character has a glyph of its own, or is a plain space, and neither controls nor moves others."""
  return letter.isprintable() and not _IS_BLANK.match(letter)
