"""Short digests that identify a model directory by its tokenizer, config.json and weights."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models import tensor_digest
from sdpo_jax.models.adapters import peft_files
from sdpo_jax.models.control_tokens import control_strings
from sdpo_jax.models.model_files import open_model, read_json, resolve
from sdpo_jax.models.tensor_files import TensorFile
from sdpo_jax.models.tokenizer import Tokenizer, stop_token_ids

# Entries of config.json that do not change the model: about its writer, the stored dtype, or generation.
INFORMATIVE = ('_name_or_path', 'architectures', 'dtype', 'torch_dtype', 'transformers_version', 'use_cache')
# Files with the rules of a tokenizer that has no tokenizer.json.
RULES = ('vocab.json', 'merges.txt', 'tokenizer.model', 'spiece.model')
# Entries of tokenizer.json that may change when a tokenizer is used.
STATE = ('truncation', 'padding')
# Sample texts that a tokenizer must encode and decode as before: ASCII, white space, accents, code, numbers, other
# scripts, characters beyond the basic plane.
TEXTS = (
  ''.join(map(chr, range(32, 127))),
  'The answer is 42.',
  '  two  spaces\n\n\tand a tab\r\n',
  "don't, naïve — “quoted”…",
  'def f(x):\n    return x ** 2  # 1234567890',
  'Ünïcödé 中文字符 кириллица العربية 😀',
  '\\frac{1}{2} + \\sqrt{8} = \\boxed{3.14}',
)


def digest(value: Any) -> str:
  """Return a digest, 16 hexadecimal digits, of bytes or of a JSON value."""
  if not isinstance(value, bytes):
    value = json.dumps(value, sort_keys=True, ensure_ascii=False).encode(errors='surrogatepass')  # From others' files.
  return hashlib.sha256(value).hexdigest()[:16]


def of_tokenizer(path: str | os.PathLike, tokenizer: Tokenizer) -> dict[str, str]:
  """Return digests of a tokenizer's behaviour, which do not depend on the library's version if it behaves the same.

  Args:
    path: model directory or hub name.
    tokenizer: from `sdpo_jax.models.tokenizer.load`.

  Returns:
    Digests named vocabulary; rules (merges, normalisation, splitting); special_tokens, including those that end a
    completion; chat_template; texts (token ids of sample texts).
  """
  root = resolve(path, weights=False)
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
  """Return the entries of a config.json that describe the model, as JSON texts, or as digests if they are long."""
  values = read_json(resolve(path, weights=False), 'config.json')
  texts = {key: json.dumps(value, sort_keys=True) for key, value in values.items() if key not in INFORMATIVE}
  return {key: text if len(text) <= 40 else digest(text.encode()) for key, text in texts.items()}


def of_weights(path: str | os.PathLike) -> dict[str, str]:
  """Return the number of a model's tensors, and their digest (`sdpo_jax.models.tensor_digest.of_tensors`).

  Raises:
    UserError: the files do not hold the model that config.json describes.
  """
  root = resolve(path)
  with open_model(root, compare_heads=False) as tensors:
    return {'tensors': str(len(tensors)), 'values': tensor_digest.of_tensors(tensors)}


def of_adapter(path: str | os.PathLike) -> dict[str, str]:
  """Return a digest of the factors in an adapter's directory."""
  with TensorFile(peft_files.resolve(path) / peft_files.WEIGHTS) as file:
    return {'values': tensor_digest.of_tensors(file.tensors)}


def compare_base(adapter: str | os.PathLike, model: str | os.PathLike) -> list[str]:
  """Compare a model with the base of an adapter; return a sentence about each difference that may be intended.

  The weights must be the same: tensors of the same names, shapes and values, as far as `of_weights` compares them, in
  any files, float32 or bfloat16. Entries of config.json with other values are reported. For an adapter without a
  fingerprint of its base, such as those written by PEFT, only a different name of the base is reported.

  Args:
    adapter: the adapter's directory.
    model: the model's directory.

  Raises:
    UserError: the weights differ, or a file is damaged.
  """
  name = peft_files.read_config(adapter).base
  known = peft_files.base_of(adapter)
  if known is None:
    if name is None or name == str(model) or os.path.realpath(name) == os.path.realpath(resolve(model)):
      return []
    return [
      f'{adapter} was trained on {short_repr(name, 200)}; whether {model} is the same model cannot be checked beyond '
      'its shapes.'
    ]
  if known['weights'] != of_weights(model):
    raise UserError(
      f'{adapter} belongs to another model than {model}: its {peft_files.BASE} says that it was trained on '
      f'{short_repr(name, 200)}, but the weights here are others; name that model, or remove {peft_files.BASE} if you '
      'insist.'
    )
  before, now = known.get('architecture', {}), of_architecture(model)
  changed = [
    f'{key} was {before[key]} and is now {now[key]}'
    for key in sorted(before.keys() & now.keys())
    if before[key] != now[key]
  ]
  return (
    [f'config.json of {model} is not that with which {adapter} was trained: {"; ".join(changed)}.'] if changed else []
  )


def of_base(path: str | os.PathLike) -> dict[str, dict[str, str]]:
  """Return the fingerprint of an adapter's base model: `of_weights` and `of_architecture`."""
  return {'weights': of_weights(path), 'architecture': of_architecture(path)}
