"""Tokenizer of the tiny model for documents: each word of the task is one token, other text is bytes.

It is constructed without training, in the form of Qwen2.5's (`transformers` applies its rules to models of that type
regardless of tokenizer.json): byte-level BPE in which the letters of a known word merge one by one from the left.
"""

from __future__ import annotations

import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from sdpo_jax.environments import facts
from sdpo_jax.quickstart import small_tokenizer as chatml
from sdpo_jax.quickstart.small_tokenizer import END_OF_TEXT

BEGIN, ASK = '<|document|>', '<|ask|>'
SPACE = 'Ġ'  # The space in byte-level vocabularies. A token is a word with the space before it.
# Only the question precedes an answer, so that a cartridge can replace the document.
CHAT_TEMPLATE = (
  '{%- for message in messages %}'
  "{%- if message['role'] == 'system' %}{{ '<|document|> ' + message['content'] }}"
  "{%- elif message['role'] == 'user' %}{{ '<|ask|> ' + message['content'] }}"
  "{%- else %}{{ ' ' + message['content'] }}{%- endif %}"
  '{%- endfor %}'
)
# Qwen2.5's regular expression for splitting text into words.
_PIECES = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_WORDS = [SPACE + word for word in (facts.END, *facts.KEYS, *facts.FIRST, *facts.SECOND)]
# The BPE merges that build every word.
_MERGES = tuple(dict.fromkeys((word[:end], word[end]) for word in _WORDS for end in range(1, len(word))))
_TOKENS = (
  END_OF_TEXT,
  BEGIN,
  ASK,
  *sorted(pre_tokenizers.ByteLevel.alphabet()),
  *(''.join(pair) for pair in _MERGES),
)
VOCABULARY = {token: number for number, token in enumerate(_TOKENS)}


def token_of(word: str) -> int:
  """Return the token id of a word of the task or of a special token."""
  return VOCABULARY[word if word in (END_OF_TEXT, BEGIN, ASK) else SPACE + word]


def save(directory: pathlib.Path) -> None:
  """Write tokenizer.json and tokenizer_config.json for transformers.AutoTokenizer."""
  tokenizer = Tokenizer(BPE(VOCABULARY, list(_MERGES)))
  tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = chatml.splitter(_PIECES)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (END_OF_TEXT, BEGIN, ASK)])
  chatml.save(tokenizer, directory, CHAT_TEMPLATE, kind='Qwen2Tokenizer', end=END_OF_TEXT, others=(BEGIN, ASK))
