"""Tokenizers of Hugging Face model directories, checked to be usable for chat."""

from __future__ import annotations

import json
import logging
import os
import pathlib

import tokenizers

from models import chat_template as templates
from models import sentencepiece_model
from models.control_tokens import Tokenizer, control_strings
from models.model_files import read_json, resolve
from sdpo_jax.errors import UserError

_logger = logging.getLogger('sdpo_jax.models')


def load(
  path: str | os.PathLike, vocab_size: int | None = None, chat_template: str | os.PathLike | None = None
) -> Tokenizer:
  """Load the tokenizer of a model directory, with its chat template (tokenizer_config.json or chat_template.jinja).

  The added tokens with which the model ends a turn are among its `control_strings`, marked as special or not. Special
  tokens for which the model has no embedding, such as those of images, are text, unless the template writes them.

  Args:
    path: model directory or hub name.
    vocab_size: of the model; every token id must lie below it. None: not checked.
    chat_template: file with another chat template; None: the directory's.

  Raises:
    UserError: no tokenizer there or a damaged one, no chat template or one that fails on a user message or does not
      write it, or a token id that the model does not have.
  """
  root = resolve(path)
  tokenizer = read(root)
  source = f'The chat template of {root}'
  if chat_template is not None:
    tokenizer.chat_template = templates.read(chat_template)
    source = f'model.chat_template={chat_template}'
  if not templates.text_of(tokenizer):
    raise UserError(
      f'The tokenizer in {root} has no chat template: name a file with one in model.chat_template (launch.sample: '
      '--chat_template), or write chat_template.jinja into the directory.'
    )
  message = {'role': 'user', 'content': templates.PROBE}
  try:
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
  except templates.TEMPLATE_ERRORS as error:
    raise UserError(f'{source} fails on a single user message: {error}') from error
  if templates.PROBE not in text:  # Those of models that see images may look for lists of parts, and find none.
    raise UserError(
      f"{source} does not write the user's message: name a file with one that writes message['content'], a text, in "
      'model.chat_template (launch.sample: --chat_template).'
    )
  if vocab_size is not None:
    if unknown := [token for token in _declared_stops(root) if token >= vocab_size]:
      raise UserError(
        f'{root}: eos_token_id (of generation_config.json, or else of config.json) holds {unknown}, and the token ids '
        f'of the model go from 0 to {vocab_size - 1}: take both files of the same model, or correct it.'
      )
    _keep_embedded(tokenizer, root, vocab_size)
  added = tokenizer.added_tokens_decoder
  if stops := [added[token].content for token in _declared_stops(root) if token in added and not added[token].special]:
    tokenizer.chat_control_tokens = [*control_strings(tokenizer), *stops]
  return tokenizer


def read(path: str | os.PathLike) -> Tokenizer:
  """Return the tokenizer of a model directory as it is, whether or not it can write a chat.

  Args:
    path: model directory or hub name.

  Raises:
    UserError: no tokenizer there, or a damaged one.
  """
  root = resolve(path, weights=False)
  if not any((root / name).is_file() for name in ('tokenizer.json', 'tokenizer.model', 'vocab.json')):
    raise UserError(f'{root} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json).')
  from transformers import AutoTokenizer

  try:
    if sentencepiece_model.alone(root):
      tokenizer = sentencepiece_model.load(root)
    else:  # The same whether or not mistral-common is installed.
      tokenizer = AutoTokenizer.from_pretrained(root, mistral_format=False, trust_remote_code=False)
  except UserError:
    raise
  except Exception as error:  # The tokenizers library raises bare Exceptions for a damaged file.
    raise UserError(f'The tokenizer in {root} cannot be read: {error}') from error
  return tokenizer


def _keep_embedded(tokenizer: Tokenizer, root: pathlib.Path, vocab_size: int) -> None:
  """Take special tokens that nothing writes out of the tokenizer if they have no embedding; refuse all others."""
  names = {number: text for text, number in tokenizer.get_vocab().items()}
  beyond = {number: text for number, text in sorted(names.items()) if number >= vocab_size}
  if not beyond:
    return
  needed = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, *_declared_stops(root)}
  template, added = templates.text_of(tokenizer) or '', tokenizer.added_tokens_decoder
  for number, text in beyond.items():
    special = number in added and added[number].special and tokenizer.is_fast
    if not special or number in needed or text in template:
      raise UserError(
        f'The tokenizer in {root} has token id {number} ({text!r}); the model knows {vocab_size} tokens only: take the '
        'tokenizer and the config.json of the same model, or resize its embedding.'
      )
  described = json.loads(tokenizer.backend_tokenizer.to_str())
  described['added_tokens'] = [token for token in described['added_tokens'] if token['id'] not in beyond]
  for role, text in tokenizer.special_tokens_map.items():
    if text in beyond.values():
      setattr(tokenizer, role, None)
  tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
  _logger.warning(
    '%s: the model has no embedding for %d special tokens of the tokenizer, such as %r, which are read as text.',
    root,
    len(beyond),
    next(iter(beyond.values())),
  )


def exported(path: str | os.PathLike, tokenizer: Tokenizer, chat_template: str | os.PathLike | None) -> dict[str, str]:
  """Return files (name → text) with which others read prompts from an export as this tokenizer does.

  That is a chat_template.jinja where the template is not the directory's, and a tokenizer.json with its settings where
  `transformers` would make another tokenizer of a SentencePiece model.

  Args:
    path: model directory or hub name.
    tokenizer: of `load`.
    chat_template: as there.
  """
  texts = {} if chat_template is None else {'chat_template.jinja': tokenizer.chat_template}
  root = resolve(path, weights=False)
  if sentencepiece_model.alone(root):
    texts['tokenizer.json'] = tokenizer.backend_tokenizer.to_str(pretty=True) + '\n'
    settings = read_json(root, 'tokenizer_config.json') if (root / 'tokenizer_config.json').is_file() else {}
    # A tokenizer.json does not say which tokens begin and end a sequence; the SentencePiece model does.
    settings = tokenizer.special_tokens_map | settings
    texts['tokenizer_config.json'] = json.dumps(settings, indent=2, ensure_ascii=False) + '\n'
  return texts


def stop_token_ids(path: str | os.PathLike, tokenizer: Tokenizer) -> tuple[int, ...]:
  """Return the token ids that end a completion.

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
