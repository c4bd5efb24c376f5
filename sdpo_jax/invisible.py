"""Characters that are invisible, control a terminal, or strike out, hide or reorder others, for terminals and pages."""

from __future__ import annotations

import re
import unicodedata

# Printable according to Python, but invisible: joiners, fillers, silent vowels, variation selectors, the empty braille
# cell, blank hieroglyphs and notes.
_BLANK = '\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef'
_BLANK += '\U00013441\U00013442\U00016fe4\U0001d159'
# Marks that strike out or enclose the character before them.
_OVERLAYS = (
  '\u0334-\u0338\u0488\u0489\u1abe\u1cd4\u1ce2-\u1ce8\u20d2\u20d3\u20d8-\u20da\u20dd-\u20e0\u20e2-\u20e6\u20ea\u20eb'
)
_OVERLAYS += '\ua670-\ua672\U00010a39\U00016af0-\U00016af4\U0001bc9e\U0001d167-\U0001d169'
_IS_HIDDEN = re.compile(f'[{_BLANK}{_OVERLAYS}]')
_NAMED = ''.join(letter if letter == '-' else f'\\u{{{ord(letter):x}}}' for letter in _BLANK + _OVERLAYS)
# First line of a page's script: `INVISIBLE` matches characters that are not `is_visible`, except tabs and line breaks.
# C and Z are the characters that Python calls not printable: control and direction characters, surrogates, unassigned
# code points, spaces.
SCRIPT = rf'const INVISIBLE = /(?![ \t\n])[\p{{C}}\p{{Z}}{_NAMED}]/gu;' + '\n'
_MOST_MARKS = 4  # Of one letter, as in Tibetan stacks; further ones would cover the lines around it.


def is_visible(letter: str) -> bool:
  """Return whether a character has a glyph of its own, or is a plain space, and neither controls nor hides others."""
  return letter.isprintable() and not _IS_HIDDEN.match(letter)


def is_right_to_left(letter: str) -> bool:
  """Return whether a character reorders the punctuation and numbers around it, as Hebrew and Arabic ones do."""
  return unicodedata.bidirectional(letter) in ('R', 'AL', 'AN')


def is_mark(letter: str) -> bool:
  """Return whether a character is drawn into the one before it: accents, vowel signs, ends of Hangul syllables."""
  return unicodedata.category(letter)[0] == 'M' or '\u1160' <= letter <= '\u11ff' or '\ud7b0' <= letter <= '\ud7ff'


def fits(mark: str, cluster: str) -> bool:
  """Return whether a mark makes an ordinary letter of the letter and the marks before it.

  Accents do if Unicode has the letter in one piece, marks of a script after a letter of that script.
  """
  if not cluster or len(cluster) > _MOST_MARKS or not is_visible(mark):
    return False
  if len(unicodedata.normalize('NFC', cluster + mark)) == 1:
    return True
  is_of_letter = unicodedata.category(mark)[0] == 'M' and unicodedata.category(cluster[0])[0] == 'L'
  return is_of_letter and _script(mark) == _script(cluster[0])


def _script(letter: str) -> str:
  """Return the first word of a character's name: its script, or COMBINING for the accents of all scripts."""
  return unicodedata.name(letter, '').partition(' ')[0]
