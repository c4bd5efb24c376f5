"""The texts of a cartridge: the document that its teacher reads, and the text that initialises its slots."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
import os

import jax.numpy as jnp

from sdpo_jax.config import Config
from sdpo_jax.config.locations import paths
from sdpo_jax.data.prompts import ChatFormat, Tokenizer, chat_tokens, document_tokens
from sdpo_jax.distributed import accelerators
from sdpo_jax.distributed.mesh import FSDP
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import file_size, read_text
from sdpo_jax.models import huggingface, model_files
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.chat_template import PROBE, TEMPLATE_ERRORS, has_system_turn
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.training.specs import chat_format

SECTION = 'model.cartridge'
WHOLE_SHARE = 1 / 8  # Fraction of a chip's memory up to which every device holds the whole document.
USUAL = 16  # Bytes that only rare tokens exceed.


@dataclasses.dataclass(frozen=True)
class Texts:
  """The texts that the settings of a cartridge name, as tokens."""

  document: Sequence[int] | None  # The N tokens that the teacher reads; None: it reads no document.
  initial: Sequence[int] | None  # P tokens whose keys and values initialise the slots; None: not initialised by text.


def read_texts(config: Config, tokenizer: Tokenizer, *, teaches: bool) -> Texts:
  """Return the texts of a cartridge.

  Args:
    config: settings with a cartridge.
    tokenizer: tokenizer of the model.
    teaches: whether the teacher's document is needed, i.e. the objective has a teacher that reads.

  Raises:
    UserError: a file cannot be read, is empty, or has fewer tokens than there are slots or more than the model has
      positions; there are more slots than positions; or a teacher is needed and no document is set.
  """
  cartridge = config.model.cartridge
  document = initial = None
  if teaches:
    if not cartridge.document:
      raise UserError(
        f'{SECTION}.document is empty, but the teacher of a cartridge is the model reading a document: name a text '
        'file.'
      )
    if cartridge.teacher_scope == 'full':
      _check_size(config, tokenizer)
    document = read_document(config, tokenizer)
    check_length(config, read_at_once(config, len(document)), context_length(config.model.path))
  setting = {'document': 'document', 'text': 'init_text', 'random': None}[cartridge.initializer]
  if setting is not None and not cartridge.path:
    known = document if setting == 'document' else None
    initial = _tokens(config, tokenizer, setting) if known is None else known
    if len(initial) < cartridge.tokens:
      raise UserError(
        f'{SECTION}.tokens={cartridge.tokens}: {getattr(cartridge, setting)}, which initialises the slots, has '
        f'{len(initial)} tokens only: lower {SECTION}.tokens, or name a longer text.'
      )
    initial = initial[: cartridge.tokens]
    if cartridge.init_turn_end:
      initial = _ended(initial, tokenizer, chat_format(config))
  if cartridge.tokens is not None:
    check_slots(config, context_length(config.model.path))
  return Texts(document, initial)


def _ended(initial: list[int], tokenizer: Tokenizer, chat: ChatFormat) -> list[int]:
  """Return as many tokens of which the last are those that the chat template writes at the end of a system message.

  These are the tokens that KVFromText reads in the published code of cartridges (HazyResearch/cartridges).

  Raises:
    UserError: the template writes none, or as many as there are slots.
  """
  tokens = [document_tokens(tokenizer, text, chat)[::-1] for text in (PROBE, PROBE[::-1])]
  end = os.path.commonprefix(tokens)[::-1]
  if not 0 < len(end) < len(initial):
    raise UserError(
      f'{SECTION}.init_turn_end=True: the chat template ends a system message with {len(end)} tokens of its own, and '
      f'there are {len(initial)} slots: leave it at False' + (f', or raise {SECTION}.tokens.' if end else '.')
    )
  return [*initial[: -len(end)], *end]


def read_document(config: Config, tokenizer: Tokenizer) -> list[int]:
  """Return the tokens of `model.cartridge.document`, as placed before a conversation; errors as in `read_texts`.

  Of several files, those of each follow one another.
  """
  return _tokens(config, tokenizer, 'document')


def read_at_once(config: Config, document: int) -> int:
  """Return the tokens that the teacher reads before a prompt: those of a document of this length, or of a chunk."""
  return document if config.model.cartridge.teacher_scope == 'full' else config.model.cartridge.max_chunk


def chunks_held(config: Config) -> int:
  """Return the number of chunks whose keys and values are in memory."""
  return config.model.cartridge.chunks_held or config.data.train_batch_size


def prefix_of(config: Config, policy: DecoderPolicy, length: int) -> KVPrefix:
  """Return the key-value prefix that holds the document of a teacher, or the bank of its chunks.

  Args:
    config: settings with a cartridge.
    policy: policy of the student or of the model alone, on its mesh.
    length: number of tokens of the document, from `read_at_once`.
  """
  prefix, mesh = KVPrefix(length, length, within_windows=True), policy.backend.mesh
  if config.model.cartridge.teacher_scope == 'chunk':
    prefix = KVPrefix(0, 0, within_windows=True, members=chunks_held(config), member_slots=length)
  if mesh is None or mesh.size == 1 or config.model.cartridge.divide_document is False:
    return prefix
  if config.model.cartridge.divide_document is None:
    table = prefix.rows(policy.base_policy().parameter_table(), policy.dtype)
    whole = sum(math.prod(row.shape) * jnp.dtype(row.dtype).itemsize for row in table)
    chip = accelerators.find(mesh.devices.flat[0].device_kind)
    if chip is None or chip.memory_gib is None or whole <= chip.memory_gib * 2**30 * WHOLE_SHARE:
      return prefix
  return dataclasses.replace(prefix, parts=mesh.shape[FSDP])


def _tokens(config: Config, tokenizer: Tokenizer, setting: str) -> list[int]:
  """Return the tokens of the file that a setting names, as placed before a conversation."""
  named, found, whole = getattr(config.model.cartridge, setting), [], config.model.cartridge.teacher_scope == 'full'
  for file in paths(named) if setting == 'document' else [named]:
    found += tokens_before(config, tokenizer, text_of(file, f'{SECTION}.{setting}'), file, followed=whole)
  return found


def text_of(file: str, setting: str) -> str:
  """Return the text of a file that a setting names; raises UserError if it cannot be read or is empty."""
  text = read_text(file, f'name a text file in {setting}')
  if not text.strip():
    raise UserError(f'{file} is empty: name a file with text in {setting}.')
  return text


def tokens_before(config: Config, tokenizer: Tokenizer, text: str, file: str, *, followed: bool = True) -> list[int]:
  """Return the tokens of a text as placed before a conversation.

  Args:
    config: settings with a cartridge.
    tokenizer: tokenizer of the model.
    text: the text.
    file: where it is from, for messages.
    followed: whether the teacher reads questions behind all of it.

  Raises:
    UserError: the chat template refuses the text, or it is followed and no slots can replace it.
  """
  chat = chat_format(config)
  try:
    tokens = document_tokens(tokenizer, text, chat)
    split = followed and _is_split(tokenizer, text, tokens, chat)
  except TEMPLATE_ERRORS as error:
    raise UserError(
      f"{file}: the model's chat template refuses it as a system message ({first_line(error)}): name another template "
      'in model.chat_template.'
    ) from error
  if split:
    raise UserError(
      f"{file}: the tokens of a question after this text differ from those after other texts, by the model's chat "
      'template and tokenizer, so that no slots can replace it: add a line at the end of the text, or name another '
      'template in model.chat_template.'
    )
  return tokens


def _is_split(tokenizer: Tokenizer, text: str, tokens: list[int], chat: ChatFormat) -> bool:
  """Return whether a question is tokenised differently after this document than after other texts."""
  if not has_system_turn(tokenizer, chat.variables):
    return False  # Document and question are tokenised separately.
  question = {'role': 'user', 'content': PROBE}
  [behind] = chat_tokens(tokenizer, [[question]], chat)
  usual = dataclasses.replace(chat, behind_document=False)
  [whole] = chat_tokens(tokenizer, [[{'role': 'system', 'content': text}, question]], usual)
  return whole != [*tokens, *behind]


def context_length(model: str) -> int | None:
  """Return the number of positions in the config.json of a model (a directory or hub name); None if it names none."""
  return huggingface.positions(model_files.read_json(model_files.resolve(model, weights=False), 'config.json'))


def _check_size(config: Config, tokenizer: Tokenizer) -> None:
  """Raise UserError if the file of a document is too large for the model's positions, whatever its tokens are.

  Such a file is not read, since tokenising it could take very long.
  """
  positions, file = context_length(config.model.path), config.model.cartridge.document
  if positions is None:
    return
  size = file_size(file, f'name a text file in {SECTION}.document')
  if size <= USUAL * positions:
    return
  longest = max(len(token.encode('utf-8', 'surrogatepass')) for token in tokenizer.get_vocab())
  if size > longest * positions:
    raise UserError(
      f'{SECTION}.document={file} has {size:,} bytes, more than the {positions} positions (max_position_embeddings) of '
      'the model can hold: shorten it, or choose a model with a longer context.'
    )


def check_slots(config: Config, positions: int | None) -> None:
  """Raise UserError if the configured slots and the longest row after them exceed the model's positions.

  Args:
    config: settings.
    positions: number of positions of the model; None: unknown.
  """
  slots, data = config.model.cartridge.tokens, config.data
  if positions is not None and slots + data.max_prompt_length + data.max_response_length > positions:
    raise UserError(
      f'{SECTION}.tokens={slots}: with a prompt of {data.max_prompt_length} and a completion of '
      f'{data.max_response_length} that is more than the {positions} positions (max_position_embeddings) of the model: '
      'lower one of the three.'
    )


def check_length(config: Config, document: int, positions: int | None) -> None:
  """Raise UserError if a document and the longest row after it exceed the model's positions.

  Args:
    config: settings.
    document: number of tokens of the document.
    positions: number of positions of the model; None: unknown.
  """
  if positions is None:
    return
  sd, data = config.actor.self_distillation, config.data
  asked = sd.max_reprompt_len if sd.teacher_context == 'reprompt' else data.max_prompt_length
  if document + asked + data.max_response_length > positions:
    whole = f'{SECTION}.document={config.model.cartridge.document} has {document} tokens, and', 'shorten it'
    chunk = f'{SECTION}.max_chunk={document}:', 'lower it'
    read, way_out = whole if config.model.cartridge.teacher_scope == 'full' else chunk
    raise UserError(
      f'{read} with a prompt of {asked} and a completion of {data.max_response_length} that is more than the '
      f'{positions} positions (max_position_embeddings) of the model: {way_out}, lower the limits, or choose a model '
      'with a longer context.'
    )
