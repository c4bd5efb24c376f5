"""Prompts as token ids: chat templates, documents before conversations, and limits of length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import logging
from typing import Any

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.models.chat_template import PROBE, TEMPLATE_ERRORS, has_system_turn
from sdpo_jax.models.control_tokens import plain_messages
from sdpo_jax.types import Example, Messages

Tokenizer = Any  # A transformers tokenizer with a chat template.

_BATCH = 256  # Conversations tokenised in one call; bounds the memory of long files.
# Characters per token of a limit; a longer conversation is tokenised only as far as needed to see that it is too long.
_LONG = 16
# Tokens per token of a limit that the beginnings of messages must have to be judged too long. One would be enough,
# except that the last word before a cut may become more tokens than it is in the whole text.
_BEYOND = 2


@dataclasses.dataclass(frozen=True)
class ChatFormat:
  """How messages become tokens, in the prompts of student and teacher."""

  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Of the chat template, e.g. enable_thinking.
  split_special_tokens: bool = True  # Messages cannot spell control tokens.
  # A document, or slots for one, precedes every conversation (`document_tokens`), whose tokens are those after it.
  behind_document: bool = False


DEFAULT_FORMAT = ChatFormat()


@dataclasses.dataclass(frozen=True)
class PromptSpec:
  """How questions become prompts of the student, and the limit of their length."""

  chat: ChatFormat
  limit: int  # Maximum number of tokens of a prompt: data.max_prompt_length.
  drops_longer: bool = False  # Whether questions with longer prompts are left out: data.filter_overlong_prompts.


def chat_tokens(tokenizer: Tokenizer, conversations: Sequence[Messages], chat: ChatFormat) -> list[list[int]]:
  """Return the token ids of each conversation up to and including the header of the assistant's turn.

  Args:
    tokenizer: a transformers tokenizer with a chat template.
    conversations: lists of messages with 'role' and 'content'.
    chat: how messages become tokens.

  Raises:
    TEMPLATE_ERRORS: the chat template refuses a conversation.
    UserError: the template's text after a document depends on the document.
  """
  if not chat.behind_document:
    return _encoded(tokenizer, conversations, chat)
  if not has_system_turn(tokenizer, chat.variables):
    begin = _begin(tokenizer, chat)
    return [tokens[len(begin) :] for tokens in _encoded(tokenizer, conversations, chat)]
  # A short text stands in for the document, which may be long.
  before = document_tokens(tokenizer, PROBE, chat)
  whole = _encoded(tokenizer, [[_system(PROBE), *messages] for messages in conversations], chat)
  if any(tokens[: len(before)] != before for tokens in whole):
    raise UserError(
      'The chat template of the model writes a system message differently when other messages follow it, so no '
      'document or cartridge can take its place: name another template in model.chat_template.'
    )
  return [tokens[len(before) :] for tokens in whole]


def document_tokens(tokenizer: Tokenizer, text: str, chat: ChatFormat) -> list[int]:
  """Return the token ids of a document as it precedes a conversation.

  If the chat template writes a system message on its own, the document is that message; otherwise it is the plain text,
  after the token with which conversations begin, if there is one.

  Args:
    tokenizer: a transformers tokenizer with a chat template.
    text: text of the document.
    chat: how messages become tokens.

  Raises:
    TEMPLATE_ERRORS: the chat template refuses it.
  """
  if has_system_turn(tokenizer, chat.variables):
    [tokens] = _encoded(tokenizer, [[_system(text)]], chat, add_generation_prompt=False)
    return tokens
  plain = plain_messages(tokenizer)
  tokens = plain.encode_text(text) if chat.split_special_tokens else tokenizer.encode(text, add_special_tokens=False)
  return [*_begin(tokenizer, chat), *tokens]


def _system(text: str) -> dict[str, str]:
  return {'role': 'system', 'content': text}


def _begin(tokenizer: Tokenizer, chat: ChatFormat) -> list[int]:
  """Return the token with which conversations begin, if the template writes one; else []."""
  [tokens] = _encoded(tokenizer, [[{'role': 'user', 'content': PROBE}]], chat)
  begin = tokens[:1]
  return begin if begin == [tokenizer.bos_token_id] else []


def _encoded(
  tokenizer: Tokenizer, conversations: Sequence[Messages], chat: ChatFormat, add_generation_prompt: bool = True
) -> list[list[int]]:
  """Return the token ids of whole conversations, by default with the header of the assistant's turn."""
  spelled: dict[int, list[int]] = {}
  if chat.split_special_tokens:
    plain = plain_messages(tokenizer)
    spelled = {
      at: plain.encode(messages, add_generation_prompt, **chat.variables)
      for at, messages in enumerate(conversations)
      if plain.spelled(messages)
    }
  others = [messages for at, messages in enumerate(conversations) if at not in spelled]
  if not others:
    return [spelled[at] for at in range(len(conversations))]
  tokens = iter(
    tokenizer.apply_chat_template(
      others, tokenize=True, return_dict=False, add_generation_prompt=add_generation_prompt, **chat.variables
    )
  )
  return [spelled[at] if at in spelled else next(tokens) for at in range(len(conversations))]


def bounded_chat_tokens(
  tokenizer: Tokenizer, conversations: Sequence[Messages], limit: int, chat: ChatFormat
) -> list[list[int] | None]:
  """Return `chat_tokens`, with None for a long conversation that has more than twice `limit` tokens.

  The cost depends on the limit alone, not on the length of the conversation.
  """
  long = [at for at, messages in enumerate(conversations) if _size(messages) > _LONG * limit]
  cut = {at: chat_tokens_of_cut(tokenizer, conversations[at], limit, chat, _beginnings) for at in long}
  known = {at: found[0] if found[1] else None for at, found in cut.items()}
  others = iter(chat_tokens(tokenizer, [m for at, m in enumerate(conversations) if at not in known], chat))
  return [known[at] if at in known else next(others) for at in range(len(conversations))]


def chat_tokens_of_cut(
  tokenizer: Tokenizer,
  messages: Messages,
  limit: int,
  chat: ChatFormat,
  cut: Callable[[Messages, int], Messages],
) -> tuple[list[int], bool]:
  """Return the token ids of a conversation, cut so that they are more than twice `limit`, or else of all of it.

  Args:
    tokenizer: a transformers tokenizer with a chat template.
    messages: the conversation.
    limit: limit of tokens.
    chat: how messages become tokens.
    cut: shortens the messages that it may cut to a number of characters.

  Returns:
    The token ids, and whether they are those of the whole conversation.
  """
  length = _LONG * limit
  while True:
    shorter = cut(messages, length)
    whole = _size(shorter) == _size(messages)
    [tokens] = chat_tokens(tokenizer, [shorter], chat)
    if whole or len(tokens) > _BEYOND * limit:
      return tokens, whole
    length *= 2


def _beginnings(messages: Messages, length: int) -> Messages:
  return [{**message, 'content': message['content'][:length]} for message in messages]


def _size(messages: Messages) -> int:
  return sum(len(message['content']) for message in messages)


def count_tokens(tokens: Sequence[int] | None, limit: int) -> str:
  """Return the number of tokens, as returned by `bounded_chat_tokens`, in words for error messages."""
  return f'more than {_BEYOND * limit} tokens' if tokens is None else f'{len(tokens)} tokens'


def named_chat_tokens(
  tokenizer: Tokenizer, conversations: Sequence[Messages], names: Sequence[str], limit: int, chat: ChatFormat
) -> list[list[int] | None]:
  """Return `bounded_chat_tokens`; `names` are the names of the conversations in error messages.

  Raises:
    UserError: the chat template refuses a conversation, which is named.
  """
  try:
    return bounded_chat_tokens(tokenizer, conversations, limit, chat)
  except TEMPLATE_ERRORS as error:
    if len(conversations) == 1:
      raise _refused(tokenizer, conversations[0], names[0], chat, error) from error
  # Again one by one, to name the conversation.
  return [
    named_chat_tokens(tokenizer, [messages], [name], limit, chat)[0]
    for messages, name in zip(conversations, names, strict=True)
  ]


def _refused(tokenizer: Tokenizer, messages: Messages, name: str, chat: ChatFormat, error: Exception) -> UserError:
  """Return the error about messages that the chat template refuses, with a remedy."""
  roles = ', '.join(message['role'] for message in messages)
  others = [message for message in messages if message['role'] != 'system']
  way_out = 'give them roles that it accepts'
  if 0 < len(others) < len(messages):
    with contextlib.suppress(*TEMPLATE_ERRORS):
      chat_tokens(tokenizer, [others], chat)
      way_out = "it accepts them without the system message, whose text can go into the user's message"
  return UserError(
    f"{name}: the model's chat template refuses these messages ({roles}): {first_line(error).rstrip('.!')}; {way_out}, "
    'or name another template in model.chat_template.'
  )


def prompt_tokens(tokenizer: Tokenizer, example: Example, spec: PromptSpec) -> list[int]:
  """Return the token ids of the student's prompt.

  Raises:
    UserError: it is longer than `data.max_prompt_length`, or refused by the chat template.
  """
  [tokens] = _tokens(tokenizer, [example], spec)
  if tokens is None or len(tokens) > spec.limit:
    raise _overlong(example, tokens, spec)
  return tokens


def fits(tokenizer: Tokenizer, example: Example, spec: PromptSpec) -> bool:
  """Return whether the prompt has at most `data.max_prompt_length` tokens.

  Raises:
    UserError: it has more and `data.filter_overlong_prompts` is off, or the chat template refuses it.
  """
  return bool(_fitting(tokenizer, [example], spec))


def fitting(tokenizer: Tokenizer, examples: Sequence[Example], spec: PromptSpec, origin: str) -> list[Example]:
  """Return the examples whose prompts have at most `data.max_prompt_length` tokens.

  Args:
    tokenizer: a transformers tokenizer with a chat template.
    examples: questions.
    spec: the limit, and whether longer prompts are left out (their number is then logged).
    origin: where the examples come from, for messages.

  Raises:
    UserError: a prompt is longer and `spec` does not drop it, or no prompt is left, or the chat template refuses one.
  """
  kept = _fitting(tokenizer, examples, spec)
  if examples and not kept:
    raise UserError(f'{origin}: every prompt is longer than data.max_prompt_length={spec.limit} tokens: raise it.')
  if dropped := len(examples) - len(kept):
    logging.warning(
      '%s: left out %d of %d rows whose prompt is longer than data.max_prompt_length=%d tokens.',
      origin,
      dropped,
      len(examples),
      spec.limit,
    )
  return kept


def _fitting(tokenizer: Tokenizer, examples: Sequence[Example], spec: PromptSpec) -> list[Example]:
  kept = []
  for start in range(0, len(examples), _BATCH):
    part = examples[start : start + _BATCH]
    for example, tokens in zip(part, _tokens(tokenizer, part, spec), strict=True):
      if tokens is not None and len(tokens) <= spec.limit:
        kept.append(example)
      elif not spec.drops_longer:
        raise _overlong(example, tokens, spec)
  return kept


def _overlong(example: Example, tokens: Sequence[int] | None, spec: PromptSpec) -> UserError:
  return UserError(
    f'{name(example)}: the prompt has {count_tokens(tokens, spec.limit)} with the chat template, more than '
    f'data.max_prompt_length={spec.limit}: raise it, or set data.filter_overlong_prompts=true to leave such rows out.'
  )


def _tokens(tokenizer: Tokenizer, examples: Sequence[Example], spec: PromptSpec) -> list[list[int] | None]:
  conversations, limit = [example.messages for example in examples], spec.limit
  return named_chat_tokens(tokenizer, conversations, list(map(name, examples)), limit, spec.chat)


def name(example: Example) -> str:
  """Return the name of an example in error messages: file and line if it has them."""
  return example.extra.get('origin', f'example {example.id!r}')
