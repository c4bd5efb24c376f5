"""Tokenizers of Hugging Face model directories, checked to be usable for chat."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jinja2

from models.control_tokens import control_strings
from models.huggingface import read_json, resolve
from sdpo_jax.errors import UserError

Tokenizer = Any  # transformers.PreTrainedTokenizerBase; imported lazily, since that takes seconds.


def load(path: str | os.PathLike, vocab_size: int | None = None) -> Tokenizer:
  """Loads the tokenizer of a model directory, with its chat template (tokenizer_config.json or chat_template.jinja).

  The added tokens with which the model ends a turn are among its `control_strings`, marked as special or not.

  Args:
    path: model directory or hub name.
    vocab_size: of the model; every token id must lie below it. None: not checked.

  Raises:
    UserError: no tokenizer there or a damaged one, no chat template or one that fails on a user message, or a token
      id that the model does not have.
  """
  root = resolve(path)
  if not any((root / name).is_file() for name in ('tokenizer.json', 'tokenizer.model', 'vocab.json')):
    raise UserError(f'{root} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json).')
  from transformers import AutoTokenizer

  try:
    tokenizer = AutoTokenizer.from_pretrained(root)
  except Exception as error:  # The tokenizers library raises bare Exceptions for a damaged file.
    raise UserError(f'The tokenizer in {root} cannot be read: {error}') from error
  template = tokenizer.chat_template
  if not template or (isinstance(template, dict) and 'default' not in template):
    raise UserError(
      f'The tokenizer in {root} has no chat template: add chat_template to tokenizer_config.json or write '
      'chat_template.jinja.'
    )
  try:
    tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}], add_generation_prompt=True, tokenize=False)
  except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
    raise UserError(f'The chat template of {root} fails on a single user message: {error}') from error
  largest = max(tokenizer.get_vocab().values(), default=-1)
  if vocab_size is not None and largest >= vocab_size:
    raise UserError(f'The tokenizer in {root} has token id {largest}; the model knows {vocab_size} tokens only.')
  added = tokenizer.added_tokens_decoder
  if stops := [added[token].content for token in _declared_stops(root) if token in added and not added[token].special]:
    tokenizer.chat_control_tokens = [*control_strings(tokenizer), *stops]
  return tokenizer


def stop_token_ids(path: str | os.PathLike, tokenizer: Tokenizer) -> tuple[int, ...]:
  """Returns the token ids that end a completion.

  The eos_token_id of generation_config.json (an id or a list), or of config.json where the former says nothing, as
  transformers.generate takes them; then the tokenizer's own end-of-sequence token.

  Raises:
    UserError: an eos_token_id that is no id, or no stop token at all.
  """
  root = resolve(path)
  ids = _declared_stops(root)
  if tokenizer.eos_token_id is not None:
    ids = [*ids, tokenizer.eos_token_id]
  if not ids:
    raise UserError(f'{pathlib.Path(root)} names no end-of-sequence token: set eos_token_id in generation_config.json.')
  return tuple(dict.fromkeys(ids))


def _declared_stops(root: pathlib.Path) -> list[int]:
  """Return eos_token_id of generation_config.json, or of config.json; raises UserError for one that is no id."""
  for name in ('generation_config.json', 'config.json'):
    if not (root / name).is_file():
      continue
    value = read_json(root, name).get('eos_token_id')
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
      raise UserError(f'{root / name}: eos_token_id must be a token id or a list of them, not {json.dumps(value)}.')
    if ids:
      return ids
  return []
