"""Tokenizers of directories that hold a SentencePiece model (tokenizer.model) and nothing made of it.

`transformers` builds a tokenizer of its own from such a file, and the class that a config.json asks for need not read the
file as SentencePiece does: it may lose the space before a text, or split words otherwise. So what it built is compared
with SentencePiece itself.
"""

from __future__ import annotations

import json
import pathlib

from models.control_tokens import Tokenizer
from sdpo_jax.errors import UserError, first_line

FILE = 'tokenizer.model'
# Files from which transformers reads a tokenizer in preference to a SentencePiece model.
OTHERS = ('tokenizer.json', 'vocab.json', 'tekken.json')
_ROLES = {'bos_token': 'bos_id', 'eos_token': 'eos_id', 'unk_token': 'unk_id', 'pad_token': 'pad_id'}
# Without spaces before and control tokens: classes may treat these in ways of their own.
_TEXTS = (
  'The answer is 42.',
  'two  spaces,\na line\n\n\tand a tab',
  "don't, naïve — “quoted”… ＡＢ ① ﬁ",
  'def f(x):\n    return x ** 2  # 1234567890',
  'Ünïcödé 中文字符 кириллица العربية 😀',
  '\\frac{1}{2} + \\sqrt{8} = \\boxed{3.14}',
)


def alone(root: pathlib.Path) -> bool:
  """Return whether the tokenizer of a directory is a SentencePiece model and nothing else."""
  return (root / FILE).is_file() and not any((root / name).is_file() for name in OTHERS)


def load(root: pathlib.Path) -> Tokenizer:
  """Return the `transformers` tokenizer that gives texts the token ids that SentencePiece gives them.

  Raises:
    UserError: the file is no SentencePiece model, or no class of `transformers` reads it as SentencePiece does.
    Exception: whatever `transformers` raises for the other files of the directory.
  """
  import sentencepiece
  from transformers import AutoTokenizer, LlamaTokenizer

  way_out = 'put a tokenizer.json beside it, which the `save_pretrained` of its own tokenizer writes'
  try:
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(root / FILE))
  except (RuntimeError, OSError) as error:  # What the library raises for what it cannot parse.
    raise UserError(f'{root / FILE} is not a SentencePiece model ({first_line(error)}): {way_out}.') from error
  settings = root / 'tokenizer_config.json'
  named = json.loads(settings.read_text(encoding='utf-8')) if settings.is_file() else {}
  roles = {role: getattr(pieces, number)() for role, number in _ROLES.items() if role not in named}
  roles = {role: pieces.id_to_piece(number) for role, number in roles.items() if number >= 0}
  for make in (lambda: AutoTokenizer.from_pretrained(root), lambda: LlamaTokenizer.from_pretrained(root, **roles)):
    tokenizer = make()
    if all(tokenizer.encode(text, add_special_tokens=False) == pieces.encode(text) for text in _TEXTS):
      return tokenizer
  raise UserError(f'{root / FILE}: transformers splits text otherwise than SentencePiece does with it: {way_out}.')
