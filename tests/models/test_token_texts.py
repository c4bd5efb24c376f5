"""The bytes of a text's tokens join to the text, and their offsets point into it, with tokenizers of all families."""

import pytest

from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.token_texts import TokenTexts
from tests import tiny
from tests.models import tokenizer_styles
from tests.models.tokenizer_styles import STYLES

TEXTS = ('The answer is 4.', '  two  spaces\n\nand a line ', 'Zwölf <think> 😀 <0x0A> INST] </think> 漢字')


@pytest.fixture(scope='module', params=tuple(STYLES))
def tokenizer(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp('style') / request.param
  tokenizer_styles.make(request.param, folder)
  return tokenizers.load(folder, vocab_size=384)


@pytest.mark.parametrize('text', TEXTS)
def test_the_bytes_of_tokens_join_to_their_text(tokenizer, text):
  texts = TokenTexts(tokenizer)
  tokens = tokenizer.encode(text, add_special_tokens=False)
  whole = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
  # Those of sentencepiece put a space before a text, and take it away from the whole.
  assert texts.text(tokens) in (whole, ' ' + whole)
  assert b''.join(map(texts.bytes_of, tokens)).decode() == texts.text(tokens)
  offsets = texts.offsets(tokens, 5)
  for token, offset in zip(tokens, offsets, strict=True):
    if not texts.text_of(token).startswith('bytes:'):
      assert texts.text(tokens)[offset - 5 :].startswith(texts.text_of(token))


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
  folder = tmp_path_factory.mktemp('plain')
  tiny.make_tokenizer(folder)
  return tokenizers.load(folder)


def test_tokens_that_are_part_of_a_character(plain):
  texts, tokens = TokenTexts(plain), plain.encode('a€b')
  assert [texts.text_of(each) for each in tokens] == ['a', 'bytes:\\xe2', 'bytes:\\x82', 'bytes:\\xac', 'b']
  assert texts.text(tokens) == 'a€b' and texts.text(tokens[:3]) == 'a�'
  assert texts.offsets(tokens) == [0, 1, 1, 1, 2]


def test_special_tokens_have_a_text_where_it_is_wanted(plain):
  texts, tokens = TokenTexts(plain), [*plain.encode('a'), plain.eos_token_id, *plain.encode('b')]
  assert texts.text(tokens) == 'a<|im_end|>b' and texts.text(tokens, special=False) == 'ab'
  assert texts.offsets(tokens) == [0, 1, 11] and texts.offsets(tokens, special=False) == [0, 1, 1]
  assert texts.text_of(10**6) == '' and texts.bytes_of(10**6) == b''
