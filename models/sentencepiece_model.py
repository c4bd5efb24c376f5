"""Tokenizers of directories that hold a SentencePiece model (tokenizer.model) but no file converted from it.

`transformers` converts such a file, but the class named in config.json may do so wrongly: it may lose the space before
a text, or split words differently. So the result is compared with SentencePiece itself.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
import pathlib
from typing import Any

import tokenizers

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.models.control_tokens import Tokenizer, is_delimiter

FILE = 'tokenizer.model'
# Files that transformers prefers to a SentencePiece model.
OTHERS = ('tokenizer.json', 'vocab.json', 'tekken.json')
_ROLES = {'bos_token': 'bos_id', 'eos_token': 'eos_id', 'unk_token': 'unk_id', 'pad_token': 'pad_id'}
# Sample texts, without leading spaces and control tokens, which classes may treat differently.
_TEXTS = (
  'The answer is 42.',
  'two  spaces,\na line\n\n\tand a tab',
  "don't, naïve — “quoted”… ＡＢ ① ﬁ",
  'def f(x):\n    return x ** 2  # 1234567890',
  'Ünïcödé 中文字符 кириллица العربية 😀',
  '\\frac{1}{2} + \\sqrt{8} = \\boxed{3.14}',
)


def alone(root: pathlib.Path) -> bool:
  """Return whether a SentencePiece model is the only tokenizer in a directory."""
  return (root / FILE).is_file() and not any((root / name).is_file() for name in OTHERS)


def load(root: pathlib.Path) -> Tokenizer:
  """Return a `transformers` tokenizer that gives the same token ids as SentencePiece.

  Raises:
    UserError: the file is not a SentencePiece model, or no class of `transformers` agrees with SentencePiece.
    Exception: any error of `transformers` about other files of the directory.
  """
  import sentencepiece
  from transformers import AutoTokenizer, LlamaTokenizer

  way_out = 'put a tokenizer.json beside it, as `save_pretrained` of its own tokenizer writes it'
  try:
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(root / FILE))
  except (RuntimeError, OSError) as error:  # Raised by the library for files that it cannot parse.
    raise UserError(f'{root / FILE} is not a SentencePiece model ({first_line(error)}): {way_out}.') from error
  settings = root / 'tokenizer_config.json'
  named = json.loads(settings.read_text(encoding='utf-8')) if settings.is_file() else {}
  roles = {role: getattr(pieces, number)() for role, number in _ROLES.items() if role not in named}
  roles = {role: pieces.id_to_piece(number) for role, number in roles.items() if number >= 0}
  # Llama's class first: transformers from 5.24 on has one for Mistral that puts a space after each control token.
  for make in (
    lambda: LlamaTokenizer.from_pretrained(root, **roles),
    lambda: AutoTokenizer.from_pretrained(root, trust_remote_code=False),
  ):
    tokenizer = make()
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    if described['model']['type'] == 'BPE':
      described['model']['merges'] = merges(pieces, described['model']['vocab'])
    names = {token['content'] for token in described['added_tokens']}
    for token in described['added_tokens']:  # User-defined symbols may be any text, even runs of spaces.
      token['special'] |= is_delimiter(token['content'], names)
    # The attribute that `backend_tokenizer` reads; nothing public sets it.
    tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))  # noqa: SLF001
    tokenizer.extra_special_tokens = [token['content'] for token in described['added_tokens'] if token['special']]
    if all(tokenizer.encode(text, add_special_tokens=False) == pieces.encode(text) for text in _TEXTS):
      return tokenizer
  raise UserError(f'{root / FILE}: transformers splits text differently from SentencePiece: {way_out}.')


def merges(pieces: Any, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
  """Return the merges of a BPE model, best first: SentencePiece joins the two neighbours whose piece scores highest.

  Scores need not be in the order of ids: Llama's runs of spaces have the lowest.

  Args:
    pieces: a `SentencePieceProcessor`.
    vocabulary: piece → id.
  """
  ranked = []
  for piece, number in vocabulary.items():
    if number >= pieces.get_piece_size() or pieces.is_control(number) or pieces.is_byte(number):
      continue
    splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
    known = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
    ranked += [(-pieces.get_score(number), number, vocabulary[left], vocabulary[right]) for left, right in known]
  names = {number: piece for piece, number in vocabulary.items()}
  return [(names[left], names[right]) for *_, left, right in sorted(ranked)]
