"""Loading of tokenizers from Hugging Face model directories, with checks that they can be used for chat."""

from __future__ import annotations

import json
import logging
import os
import pathlib

from etils import epath
import tokenizers

from sdpo_jax.errors import UserError, first_line, short_repr
from sdpo_jax.models import chat_template as templates
from sdpo_jax.models import first_reading, sentencepiece_model
from sdpo_jax.models.control_tokens import Tokenizer, control_strings
from sdpo_jax.models.model_files import read_json, resolve
from sdpo_jax.models.remote_files import readable

_logger = logging.getLogger('sdpo_jax.models')


def load(
  path: str | os.PathLike, vocab_size: int | None = None, chat_template: str | os.PathLike | None = None
) -> Tokenizer:
  """Load the tokenizer of a model directory, with its chat template (tokenizer_config.json or chat_template.jinja).

  Added tokens with which the model ends a turn are among its `control_strings`, even if they are not marked special.
  Special tokens for which the model has no embedding, such as those of images, are read as text.

  Args:
    path: model directory or hub name.
    vocab_size: vocabulary size of the model, above all token ids; None: not checked.
    chat_template: file with another chat template; None: that of the directory.

  Raises:
    UserError: the tokenizer is missing or damaged; the chat template is missing, fails on a user message, or does not
      write it; or the model lacks a token id that is needed, such as one that the template writes.
  """
  root = resolve(path, weights=False)
  tokenizer = read(root)
  source = f'The chat template of {root} (chat_template.jinja or tokenizer_config.json)'
  if chat_template is not None:
    tokenizer.chat_template = _read_template(chat_template)
    source = f'model.chat_template={chat_template}'
    first_reading.check_template(tokenizer.chat_template, source)
  else:
    first_reading.check(root, template=True)
  if not templates.text_of(tokenizer):
    raise UserError(
      f'The tokenizer in {root} has no chat template: name a file with one in model.chat_template (launch.sample: '
      '--chat_template), or write chat_template.jinja into the directory.'
    )
  message = {'role': 'user', 'content': templates.PROBE}
  try:
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
  except templates.TEMPLATE_ERRORS as error:
    why = first_line(error).rstrip('.')
    raise UserError(f'{source} fails on a single user message: {why}: {first_reading.ANOTHER_TEMPLATE}.') from error
  if templates.PROBE not in text:  # Templates of models that read images may expect a list of parts.
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
  """Return the tokenizer of a model directory as it is, even if it has no chat template.

  Args:
    path: model directory or hub name.

  Raises:
    UserError: the tokenizer is missing or damaged.
  """
  root = resolve(path, weights=False)
  if not any((root / name).is_file() for name in ('tokenizer.json', 'tokenizer.model', 'vocab.json')):
    raise UserError(f'{root} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json).')
  try:
    if sentencepiece_model.alone(root):
      tokenizer = sentencepiece_model.load(root)
    elif _is_as_stored(root):
      from transformers import PreTrainedTokenizerFast

      tokenizer = PreTrainedTokenizerFast.from_pretrained(root)
    else:  # The same whether or not mistral-common is installed.
      from transformers import AutoTokenizer

      tokenizer = AutoTokenizer.from_pretrained(root, mistral_format=False, trust_remote_code=False)
  except UserError:
    raise
  except Exception as error:  # The tokenizers library raises bare Exceptions for damaged files.
    for name in (
      'tokenizer.json',
      'tokenizer_config.json',
      'special_tokens_map.json',
      'added_tokens.json',
      'vocab.json',
    ):
      if (root / name).is_file():
        read_json(root, name)  # Whose message names the file.
    raise UserError(f'The tokenizer in {root} cannot be read: {first_line(error)}') from error
  return tokenizer


def _read_template(path: str | os.PathLike) -> str:
  """Return the chat template in a Jinja file, local or any that `etils.epath` opens.

  Raises:
    UserError: the file cannot be read, or is empty.
  """
  named, way_out = f'model.chat_template={path}', 'name a file that holds a chat template (Jinja)'
  with readable(named, way_out):
    text = epath.Path(path).expanduser().read_text(encoding='utf-8')
  if not text.strip():
    raise UserError(f'{named} is empty: {way_out}.')
  return text


def _is_as_stored(root: pathlib.Path) -> bool:
  """Return whether `AutoTokenizer`, which may import PyTorch, would return tokenizer.json unchanged."""
  if not all((root / name).is_file() for name in ('tokenizer.json', 'tokenizer_config.json', 'config.json')):
    return False
  named = read_json(root, 'tokenizer_config.json')
  # For other model types, such as qwen2, it may override what the directory says.
  known = read_json(root, 'config.json').get('model_type') in ('qwen3', 'llama')
  return known and named.get('tokenizer_class') == 'PreTrainedTokenizerFast' and 'auto_map' not in named


def _keep_embedded(tokenizer: Tokenizer, root: pathlib.Path, vocab_size: int) -> None:
  """Remove special tokens that have no embedding and are not needed; raise UserError for others without embedding."""
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
        f'The tokenizer in {root} has token id {number} ({text!r}), but the model knows {vocab_size} tokens only: take '
        'the tokenizer and the config.json of the same model, or resize its embedding.'
      )
  described = json.loads(tokenizer.backend_tokenizer.to_str())
  described['added_tokens'] = [token for token in described['added_tokens'] if token['id'] not in beyond]
  for role, text in tokenizer.special_tokens_map.items():
    if text in beyond.values():
      setattr(tokenizer, role, None)
  # The attribute that `backend_tokenizer` reads; nothing public sets it.
  tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))  # noqa: SLF001
  _logger.warning(
    '%s: the model has no embedding for %d special tokens of the tokenizer, such as %r, which are read as text.',
    root,
    len(beyond),
    next(iter(beyond.values())),
  )


def exported(path: str | os.PathLike, tokenizer: Tokenizer, chat_template: str | os.PathLike | None) -> dict[str, str]:
  """Return files (name → text) that an export needs so that other programs tokenise prompts in the same way.

  They are a chat_template.jinja if the template is not that of the directory, and a tokenizer.json with its settings if
  the directory has only a SentencePiece model, from which `transformers` may build a different tokenizer.

  Args:
    path: model directory or hub name.
    tokenizer: from `load`.
    chat_template: as in `load`.
  """
  texts = {} if chat_template is None else {'chat_template.jinja': tokenizer.chat_template}
  root = resolve(path, weights=False)
  if sentencepiece_model.alone(root):
    texts['tokenizer.json'] = tokenizer.backend_tokenizer.to_str(pretty=True) + '\n'
    settings = read_json(root, 'tokenizer_config.json') if (root / 'tokenizer_config.json').is_file() else {}
    # Unlike the SentencePiece model, a tokenizer.json does not say which tokens begin and end a sequence.
    settings = tokenizer.special_tokens_map | settings
    texts['tokenizer_config.json'] = json.dumps(settings, indent=2, ensure_ascii=False) + '\n'
  return texts


def stop_token_ids(path: str | os.PathLike, tokenizer: Tokenizer) -> tuple[int, ...]:
  """Return the token ids that end a completion.

  They are the eos_token_id (an id or a list) of generation_config.json or else of config.json, as in
  transformers.generate, and the tokenizer's own end-of-sequence token.

  Raises:
    UserError: an eos_token_id is not an id, or there is no stop token at all.
  """
  root = resolve(path, weights=False)
  ids = _declared_stops(root)
  if tokenizer.eos_token_id is not None:
    ids = [*ids, tokenizer.eos_token_id]
  if not ids:
    raise UserError(f'{pathlib.Path(root)} names no end-of-sequence token: set eos_token_id in generation_config.json.')
  return tuple(dict.fromkeys(ids))


def _declared_stops(root: pathlib.Path) -> list[int]:
  """Return the ids in eos_token_id of generation_config.json or else of config.json; errors as in `stop_token_ids`."""
  for name in ('generation_config.json', 'config.json'):
    if not (root / name).is_file():
      continue
    value = read_json(root, name).get('eos_token_id')
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
      raise UserError(f'{root / name}: eos_token_id must be a token id or a list of them, not {short_repr(value)}.')
    if ids:
      return ids
  return []
