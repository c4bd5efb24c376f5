"""Which characters are shown by their names: Unicode's own properties tell, on a terminal and on pages alike."""

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

# What versions of Unicode differ in is left out: characters that are not assigned in the one that Python knows.
ALL = [letter for code in range(sys.maxunicode + 1) if unicodedata.category(letter := chr(code)) != 'Cn']
# Other, separators but the space, and what Unicode says to ignore where there is no glyph; and the empty braille cell,
# which has a glyph without ink.
INVISIBLE = regex.compile(r'[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800]|(?! )\p{Zs}')


def test_invisible_is_what_unicode_says():
  assert [letter for letter in ALL if invisible.is_visible(letter) == bool(INVISIBLE.match(letter))] == []
  assert not any(map(invisible.is_visible, '\u3164\u2800\ufe0f\u00a0\u202e\u200b\u00ad\ud800\x1b\U000e0101'))
  assert all(map(invisible.is_visible, ' aß日😀'))


def test_the_script_of_pages_matches_the_same():
  pattern = re.fullmatch(r'const INVISIBLE = /(.*)/gu;\n', invisible.SCRIPT)[1]
  script = regex.compile(re.sub(r'\\u\{(\w+)\}', lambda found: chr(int(found[1], 16)), pattern))
  assert {letter for letter in ALL if invisible.is_visible(letter) == bool(script.match(letter))} == {'\t', '\n'}


def test_the_terminal_names_the_same_beside_its_own_brackets():
  assert {letter for letter in ALL if invisible.is_visible(letter) != (escaping.visible(letter, '') == letter)} == set(
    '⟨⟩'
  )


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
