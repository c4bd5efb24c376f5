"""What tells a model directory from another: its tokenizer, its config.json, its weights; each as short digests."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

from models.control_tokens import control_strings
from models.huggingface import read_json, resolve
from models.tokenizer import Tokenizer, stop_token_ids

# Of config.json: what writers note about themselves, how tensors were stored, and what generation alone reads.
INFORMATIVE = ('_name_or_path', 'architectures', 'dtype', 'torch_dtype', 'transformers_version', 'use_cache')
# Files that hold the rules of tokenizers which have no tokenizer.json.
RULES = ('vocab.json', 'merges.txt', 'tokenizer.model', 'spiece.model')
# Of tokenizer.json: the state of whoever called it last.
STATE = ('truncation', 'padding')
# Encoded and decoded by the library as it is installed: ASCII, white space, accents, code, numbers, other scripts,
# characters beyond the basic plane.
TEXTS = (
  ''.join(map(chr, range(32, 127))),
  'The answer is 42.',
  '  two  spaces\n\n\tand a tab\r\n',
  "don't, naïve — “quoted”…",
  'def f(x):\n    return x ** 2  # 1234567890',
  'Ünïcödé 中文字符 кириллица العربية 😀',
  '\\frac{1}{2} + \\sqrt{8} = \\boxed{3.14}',
)
SPOTS, SPOT_BYTES = 16, 65536  # Places of a weights file that are read, and bytes at each.


def digest(value: Any) -> str:
  """Return 16 hexadecimal digits that tell a value from others: of bytes, or of anything that JSON can hold."""
  content = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
  return hashlib.sha256(content).hexdigest()[:16]


def of_tokenizer(path: str | os.PathLike, tokenizer: Tokenizer) -> dict[str, str]:
  """Return digests of what a tokenizer makes of texts; another version of the library that does the same has the same.

  Args:
    path: model directory or hub name.
    tokenizer: of `models.tokenizer.load`.

  Returns:
    vocabulary; rules (merges, normalisation, splitting); special_tokens, also those that end a completion;
    chat_template; texts (the token ids of a few).
  """
  root = resolve(path)
  ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
  return {
    'vocabulary': digest(sorted(tokenizer.get_vocab().items())),
    'rules': digest(_rules(root)),
    'special_tokens': digest(
      [sorted(control_strings(tokenizer)), list(stop_token_ids(path, tokenizer)), tokenizer.pad_token_id]
    ),
    'chat_template': digest(tokenizer.chat_template),
    'texts': digest([ids, [tokenizer.decode(tokens) for tokens in ids]]),
  }


def _rules(root: pathlib.Path) -> Any:
  if not (root / 'tokenizer.json').is_file():
    return {name: digest((root / name).read_bytes()) for name in RULES if (root / name).is_file()}
  return {key: value for key, value in read_json(root, 'tokenizer.json').items() if key not in STATE}


def of_architecture(path: str | os.PathLike) -> dict[str, str]:
  """Return the entries of a config.json that describe the model, as JSON; long ones as digests."""
  values = read_json(resolve(path, weights=False), 'config.json')
  texts = {key: json.dumps(value, sort_keys=True) for key, value in values.items() if key not in INFORMATIVE}
  return {key: text if len(text) <= 40 else digest(text.encode()) for key, text in texts.items()}


def of_weights(path: str | os.PathLike) -> dict[str, str]:
  """Return how many bytes the safetensors of a model directory have, and a digest of `SPOTS` places in each file.

  It costs a millisecond a file. Training moves nearly all weights, so that other weights differ there; a single
  flipped bit need not.
  """
  files = sorted(resolve(path).glob('*.safetensors'))
  return {
    'bytes': str(sum(file.stat().st_size for file in files)),
    'spots': digest([[file.name, digest(b''.join(_spots(file)))] for file in files]),
  }


def _spots(file: pathlib.Path) -> list[bytes]:
  size = file.stat().st_size
  with open(file, 'rb') as content:
    found = []
    for spot in range(SPOTS):
      content.seek(max(size - SPOT_BYTES, 0) * spot // (SPOTS - 1))
      found.append(content.read(SPOT_BYTES))
    return found
