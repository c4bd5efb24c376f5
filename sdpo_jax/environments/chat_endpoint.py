"""OpenAI-compatible endpoints: reading their address from the settings, and the text from chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdpo_jax.environments import json_server
from sdpo_jax.errors import UserError
from sdpo_jax.types import Messages

PATH = '/chat/completions'


def read_address(url: str, setting: str, path: str = PATH) -> tuple[str, tuple[str, ...]]:
  """Return the address to post to, with environment variables filled in, and the values of these variables.

  Args:
    url: address of the endpoint, up to and including its version.
    setting: name of the setting, for messages.
    path: path of the requests below that address.

  Raises:
    UserError: as `json_server.read_address`, or the address continues after the version.
  """
  example = 'http://localhost:8000/v1'
  url, secrets = json_server.read_address(url, setting, example)
  url = url.rstrip('/')
  if url.endswith(path):
    raise UserError(f'{setting} must end before {path}, which is added to it, as in {example}.')
  return url + path, secrets


def answered(answer: Any) -> tuple[str, bool]:
  """Return the text of a chat completion and whether it was cut off at its token limit.

  Raises:
    json_server.Fault: the answer holds no text; another attempt may help.
  """
  choices = answer.get('choices') if isinstance(answer, Mapping) else None
  choice = choices[0] if isinstance(choices, list) and choices else None
  message = choice.get('message') if isinstance(choice, Mapping) else None
  content = message.get('content') if isinstance(message, Mapping) else None
  if not isinstance(content, str):
    raise json_server.Fault(
      f"its answer has no text in 'choices[0].message.content': {json_server.quoted(answer)}", again=True
    )
  return content, choice.get('finish_reason') == 'length'


def conversation(messages: Messages) -> str:
  """Return the text of a single message, or of several messages, each under the name of its role."""
  if len(messages) == 1:
    return messages[0]['content']
  return '\n\n'.join(f'{message["role"]}:\n{message["content"]}' for message in messages)
