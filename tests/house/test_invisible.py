"""Which characters are shown by their names: Unicode's own properties tell, on a terminal and on pages alike."""

import functools
import re
import sys
import unicodedata

import pytest
import regex
from starlette.testclient import TestClient

from sdpo_jax import invisible
from sdpo_jax.config import Config
from sdpo_jax.reporting import page
from sdpo_jax.serving.web.admission import Lifetime
from sdpo_jax.serving.web.app import make_app
from sdpo_jax.terminal import escaping

# Other, separators but the space, and what Unicode says to ignore where there is no glyph; what is drawn over or around
# another character; and what has a glyph without ink: an empty braille cell, fillers, blanks.
INVISIBLE = regex.compile(
  r'[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\p{Me}\p{ccc=1}\u2800\U00016fe4\U0001d159\U00013441\U00013442]'
  r'|(?! )\p{Zs}'
)
RIGHT_TO_LEFT = regex.compile(r'[\p{Bidi_Class=R}\p{Bidi_Class=AL}\p{Bidi_Class=AN}]')
# What some terminals draw into the cell of the character before it.
ZERO_WIDTH = regex.compile(r'[\p{M}\u1160-\u11ff\ud7b0-\ud7ff]')


@functools.cache
def assigned() -> list[str]:
  """Return the characters of the version of Unicode that Python knows; in others, versions differ."""
  return [letter for code in range(sys.maxunicode + 1) if unicodedata.category(letter := chr(code)) != 'Cn']


def test_invisible_is_what_unicode_says():
  assert [letter for letter in assigned() if invisible.is_visible(letter) == bool(INVISIBLE.match(letter))] == []
  assert not any(map(invisible.is_visible, '\u3164\u2800\ufe0f\u00a0\u202e\u200b\u00ad\ud800\x1b\U000e0101'))
  assert all(map(invisible.is_visible, ' aß日😀'))


def test_the_script_of_pages_matches_the_same():
  pattern = re.fullmatch(r'const INVISIBLE = /(.*)/gu;\n', invisible.SCRIPT)[1]
  script = regex.compile(re.sub(r'\\u\{(\w+)\}', lambda found: chr(int(found[1], 16)), pattern))
  assert {letter for letter in assigned() if invisible.is_visible(letter) == bool(script.match(letter))} == {'\t', '\n'}


def test_the_terminal_names_the_same_beside_its_own_brackets():
  alone = [letter for letter in assigned() if not ZERO_WIDTH.match(letter)]
  shown = {letter for letter in alone if escaping.visible(letter, '', prose=True) == letter}
  assert {letter for letter in alone if invisible.is_visible(letter)} - shown == set('⟨⟩')
  assert all(map(invisible.is_visible, shown))
  strict = {letter for letter in alone if escaping.visible(letter, '') == letter}
  assert shown - strict == {letter for letter in shown if RIGHT_TO_LEFT.match(letter)} and strict < shown


def test_no_character_is_drawn_into_what_it_does_not_belong_to():
  """Neither into letters of the program nor of a command: only accents of a letter that Unicode has in one piece."""
  wrong = []
  for mark in filter(ZERO_WIDTH.match, assigned()):
    for before in ('$ ', 'a', '/', '│ ', '日', 'я', '😀', '\u05d0'):
      shown = escaping.visible(before + mark, '')
      composed = unicodedata.normalize('NFC', before + mark)
      if (mark in shown) != (len(composed) == len(before) and not INVISIBLE.match(mark)):
        wrong.append((before, mark))
  assert wrong == []


def test_ordinary_letters_stay_as_they_are_in_pieces_too():
  """Every letter of Unicode that can be taken apart, and words of scripts that write vowels as marks."""
  letters = [letter for letter in assigned() if unicodedata.category(letter)[0] == 'L']
  apart = [pieces for letter in letters if len(pieces := unicodedata.normalize('NFD', letter)) > 1]
  hidden = [pieces for pieces in apart if escaping.visible(pieces, '', prose=True) != pieces]
  assert len(apart) > 11_000 and hidden == [], hidden
  for text in ('Tiếng Việt', 'हिन्दी', 'தமிழ்', 'ภาษาไทย', 'မြန်မာ', 'ខ្មែរ', 'བོད་སྐད', '한국어', 'パイ', 'ñandú'):
    for form in ('NFC', 'NFD'):
      assert escaping.visible(unicodedata.normalize(form, text)) == unicodedata.normalize(form, text)
  for text in ('שָׁלוֹם', 'مُحَمَّد'):
    assert escaping.visible(text, prose=True) == text and not RIGHT_TO_LEFT.search(escaping.visible(text))


def test_both_pages_have_that_script_and_no_other_such_set():
  with TestClient(make_app(None, Config().serve, lifetime=Lifetime(None)), base_url='http://localhost') as client:
    scripts = client.get('/console.js').text, page.render('', {}, [])
  for script in scripts:
    assert script.count(invisible.SCRIPT) == 1
    assert 'matchAll(INVISIBLE)' in script or 'replace(INVISIBLE' in script
    assert not re.search(r'\\p\{|\\u\{?(?:200b|202e|e000)', script.replace(invisible.SCRIPT, ''), re.IGNORECASE)


@pytest.mark.parametrize('text, shown', [('a\u3164b\ufe0f', 'a⟨U+3164⟩b⟨U+FE0F⟩'), ('a b', 'a b')])
def test_the_terminal_shows_names(text, shown):
  assert escaping.visible(text) == shown
