"""Chat-templated prompts as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import logging
from typing import Any

import jinja2

from models.control_tokens import plain_messages
from sdpo_jax.config import Config, DataConfig
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example, Messages

Tokenizer = Any  # A transformers tokenizer with a chat template.

_BATCH = 256  # Conversations tokenised in one call; bounds the memory of long files.


@dataclasses.dataclass(frozen=True)
class ChatFormat:
  """How messages become tokens, of the student's prompts and of the teacher's."""

  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Of the chat template, e.g. enable_thinking.
  split_special_tokens: bool = True  # Messages cannot spell control tokens.

  @classmethod
  def of(cls, data: DataConfig) -> ChatFormat:
    """Return the format that the settings describe."""
    thinking = {} if data.enable_thinking is None else {'enable_thinking': data.enable_thinking}
    return cls({**data.apply_chat_template_kwargs, **thinking}, data.split_special_tokens)


DEFAULT_FORMAT = ChatFormat()


def chat_tokens(tokenizer: Tokenizer, conversations: Sequence[Messages], chat: ChatFormat) -> list[list[int]]:
  """Return the token ids of each conversation up to and including the header of the assistant's turn.

  Args:
    tokenizer: a transformers tokenizer with a chat template.
    conversations: lists of messages with 'role' and 'content'.
    chat: how they become tokens.

  Raises:
    jinja2.TemplateError: the chat template refuses one.
  """
  spelled: dict[int, list[int]] = {}
  if chat.split_special_tokens:
    plain = plain_messages(tokenizer)
    spelled = {
      at: plain.encode(messages, **chat.variables)
      for at, messages in enumerate(conversations)
      if plain.spelled(messages)
    }
  others = [messages for at, messages in enumerate(conversations) if at not in spelled]
  if not others:
    return [spelled[at] for at in range(len(conversations))]
  tokens = iter(
    tokenizer.apply_chat_template(
      others, tokenize=True, return_dict=False, add_generation_prompt=True, **chat.variables
    )
  )
  return [spelled[at] if at in spelled else next(tokens) for at in range(len(conversations))]


def named_chat_tokens(
  tokenizer: Tokenizer, conversations: Sequence[Messages], names: Sequence[str], chat: ChatFormat
) -> list[list[int]]:
  """As `chat_tokens`; `names` are how messages speak of the conversations.

  Raises:
    UserError: the chat template refuses one, which is named.
  """
  try:
    return chat_tokens(tokenizer, conversations, chat)
  except jinja2.TemplateError as error:
    if len(conversations) == 1:
      raise UserError(f"{names[0]}: the model's chat template refuses these messages: {error}.") from error
  # Again one by one, to name it.
  return [
    named_chat_tokens(tokenizer, [messages], [name], chat)[0]
    for messages, name in zip(conversations, names, strict=True)
  ]


def prompt_tokens(tokenizer: Tokenizer, example: Example, config: Config) -> list[int]:
  """Token ids of the student's prompt.

  Raises:
    UserError: longer than `data.max_prompt_length`, or refused by the chat template.
  """
  tokens = _tokens(tokenizer, [example], config)[0]
  _check_length(example, tokens, config)
  return tokens


def fits(tokenizer: Tokenizer, example: Example, config: Config) -> bool:
  """Whether the prompt has at most `data.max_prompt_length` tokens.

  Raises:
    UserError: it has more and `data.filter_overlong_prompts` is off, or the chat template refuses it.
  """
  return bool(_fitting(tokenizer, [example], config))


def fitting(tokenizer: Tokenizer, examples: Sequence[Example], config: Config, origin: str) -> list[Example]:
  """The examples whose prompt has at most `data.max_prompt_length` tokens.

  Args:
    tokenizer: a transformers tokenizer with a chat template.
    examples: questions.
    config: settings; with `data.filter_overlong_prompts` the others are left out and their number is logged.
    origin: where the examples come from, for messages.

  Raises:
    UserError: one is longer and rows are not to be filtered, or none is left, or the chat template refuses one.
  """
  kept = _fitting(tokenizer, examples, config)
  limit = config.data.max_prompt_length
  if examples and not kept:
    raise UserError(f'{origin}: every prompt is longer than data.max_prompt_length={limit} tokens: raise it.')
  if dropped := len(examples) - len(kept):
    logging.warning(
      '%s: left out %d of %d rows whose prompt is longer than data.max_prompt_length=%d tokens.',
      origin,
      dropped,
      len(examples),
      limit,
    )
  return kept


def _fitting(tokenizer: Tokenizer, examples: Sequence[Example], config: Config) -> list[Example]:
  kept = []
  for start in range(0, len(examples), _BATCH):
    part = examples[start : start + _BATCH]
    for example, tokens in zip(part, _tokens(tokenizer, part, config), strict=True):
      if len(tokens) <= config.data.max_prompt_length:
        kept.append(example)
      elif not config.data.filter_overlong_prompts:
        _check_length(example, tokens, config)
  return kept


def _check_length(example: Example, tokens: Sequence[int], config: Config) -> None:
  limit = config.data.max_prompt_length
  if len(tokens) > limit:
    raise UserError(
      f'{name(example)}: the prompt has {len(tokens)} tokens with the chat template, more than data.max_prompt_length='
      f'{limit}: raise it, or set data.filter_overlong_prompts=true to leave such rows out.'
    )


def _tokens(tokenizer: Tokenizer, examples: Sequence[Example], config: Config) -> list[list[int]]:
  conversations = [example.messages for example in examples]
  return named_chat_tokens(tokenizer, conversations, list(map(name, examples)), ChatFormat.of(config.data))


def name(example: Example) -> str:
  """How messages speak of an example: file and line where it has them."""
  return example.extra.get('origin', f'example {example.id!r}')
