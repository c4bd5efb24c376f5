"""Characters that leave no mark, act or move others: one definition for what a terminal shows and what pages show."""

from __future__ import annotations

import re

# Python takes these for printable, but they leave no mark: joiners, fillers, silent vowels, variation selectors, the
# empty braille cell.
_BLANK = '\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef'
_IS_BLANK = re.compile(f'[{_BLANK}]')
_NAMED = ''.join(letter if letter == '-' else f'\\u{{{ord(letter):x}}}' for letter in _BLANK)
# Begins the script of a page: `INVISIBLE` matches what is not visible here, but for tabs and line breaks. C and Z are
# what Python takes for not printable: controls, directions, halves of pairs, what is not assigned, spaces.
SCRIPT = rf'const INVISIBLE = /(?![ \t\n])[\p{{C}}\p{{Z}}{_NAMED}]/gu;' + '\n'


def is_visible(letter: str) -> bool:
  """Return whether a character leaves a mark of its own, or is a plain space, and neither acts nor moves others."""
  return letter.isprintable() and not _IS_BLANK.match(letter)
