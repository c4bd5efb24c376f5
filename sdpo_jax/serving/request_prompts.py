"""Tokenization of prompts in requests, given as a conversation, a text or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdpo_jax.data.prompts import ChatFormat, Tokenizer, count_tokens, named_chat_tokens
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.types import Messages

MOST_MESSAGES = 1024
_LONG = 16  # Long texts are cut to this many characters per token of the limit, and tokenized for a first check.


def tokens_of(
  tokenizer: Tokenizer,
  chat: ChatFormat,
  vocab_size: int,
  limit: int,
  *,
  messages: Sequence[Mapping[str, Any]] | None = None,
  text: str | None = None,
  tokens: Sequence[int] | None = None,
  add_special_tokens: bool = True,
) -> list[int]:
  """Return the token ids of a prompt.

  Args:
    tokenizer: the tokenizer of the model, with a chat template.
    chat: settings of the chat template.
    vocab_size: the number of tokens in the vocabulary of the model.
    limit: the most tokens.
    messages: a conversation, rendered by the chat template up to the header of the assistant's turn. Messages cannot
      spell control tokens unless the settings allow it.
    text: a text, tokenized without the chat template; it can spell control tokens.
    tokens: token ids, used as they are.
    add_special_tokens: whether the tokenizer adds its special tokens to a text.

  Raises:
    InvalidRequest: none or several of the three forms are given, the prompt is invalid, empty or too long.
  """
  given = [name for name, value in (('messages', messages), ('text', text), ('tokens', tokens)) if value is not None]
  if len(given) != 1:
    raise InvalidRequest(f'A prompt must be one of messages, text and tokens, not {" and ".join(given) or "none"}.')
  if tokens is not None:
    check_tokens(tokens, vocab_size, 'tokens')
    found = list(tokens)
  elif text is not None:
    found = _of_text(tokenizer, text, limit, add_special_tokens)
  else:
    found = _of_messages(tokenizer, chat, conversation(messages), limit)
  if found is None or len(found) > limit:
    raise InvalidRequest(
      f'The prompt has {count_tokens(found, limit)}, and the limit is {limit}: shorten it.', field=given[0]
    )
  if not found:
    raise InvalidRequest('The prompt is empty: it needs at least one token.', field=given[0])
  return found


def _of_messages(tokenizer: Tokenizer, chat: ChatFormat, messages: Messages, limit: int) -> list[int] | None:
  try:
    return named_chat_tokens(tokenizer, [messages], ['messages'], limit, chat)[0]
  except UserError as error:
    raise InvalidRequest(str(error), field='messages') from error


def _of_text(tokenizer: Tokenizer, text: str, limit: int, add_special_tokens: bool) -> list[int] | None:
  """Return the token ids of a text; None: it surely has more than the limit, as its beginning shows."""
  if not isinstance(text, str):
    raise InvalidRequest(f'text must be a text, not {short_repr(text)}.', field='text')
  length = _LONG * limit
  while len(text) > length:
    if len(tokenizer.encode(text[:length], add_special_tokens=add_special_tokens)) > 2 * limit:
      return None
    length *= 2
  return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_tokens(tokens: Sequence[int], vocab_size: int, field: str) -> None:
  """Raise InvalidRequest unless `tokens` is a non-empty list of token ids of the model."""
  if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not tokens:
    raise InvalidRequest(f'{field} must be a non-empty list of token ids, not {short_repr(tokens)}.', field=field)
  for token in tokens:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
      raise InvalidRequest(
        f'{field} has {short_repr(token)}, and token ids are from 0 to {vocab_size - 1}.', field=field
      )


def conversation(messages: Any, field: str = 'messages') -> Messages:
  """Validate a conversation, and return it with one text as the content of each message.

  Args:
    messages: objects with 'role' and 'content' as in OpenAI's API; contents are texts or lists of text parts.
    field: the name of the field in the request, for error messages.

  Raises:
    InvalidRequest: it is not a conversation, or has content other than text.
  """
  if not isinstance(messages, list | tuple) or not 1 <= len(messages) <= MOST_MESSAGES:
    raise InvalidRequest(f'{field} must be a list of 1 to {MOST_MESSAGES} messages.', field=field)
  return [_message(message, f'{field}[{number}]') for number, message in enumerate(messages)]


def _message(message: Any, field: str) -> dict[str, str]:
  if not isinstance(message, Mapping) or not isinstance(message.get('role'), str):
    raise InvalidRequest(f"{field} must be an object with 'role' and 'content'.", field=field)
  content = message.get('content')
  parts = content if isinstance(content, list) else [{'type': 'text', 'text': content}]
  texts = [part.get('text') for part in parts if isinstance(part, Mapping) and part.get('type') == 'text']
  if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
    raise InvalidRequest(
      f'{field}.content must be a text, or a list of parts of the type text.', field=f'{field}.content'
    )
  return {'role': message['role'], 'content': ''.join(texts)}
