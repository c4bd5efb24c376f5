"""Language models behind OpenAI-compatible endpoints: their address in the settings, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdpo_jax.environments import json_server
from sdpo_jax.errors import UserError
from sdpo_jax.types import Messages

PATH = '/chat/completions'


def read_address(url: str, setting: str) -> tuple[str, tuple[str, ...]]:
  """Return the address to post to, with the values of environment variables in it, and these values.

  Args:
    url: of the endpoint, up to and including its version.
    setting: its name, for messages.

  Raises:
    UserError: as `json_server.read_address`, or the address goes on after the version.
  """
  example = 'http://localhost:8000/v1'
  url, secrets = json_server.read_address(url, setting, example)
  url = url.rstrip('/')
  if url.endswith(PATH):
    raise UserError(f'{setting} must end before {PATH}, which is added to it, as in {example}.')
  return url + PATH, secrets


def answered(answer: Any) -> tuple[str, bool]:
  """Return the text of a chat completion, and whether it was cut off at its limit.

  Raises:
    json_server.Fault: there is no text in it; another attempt may help.
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
  """Return the text of a single message; of several, each under the name of its role."""
  if len(messages) == 1:
    return messages[0]['content']
  return '\n\n'.join(f'{message["role"]}:\n{message["content"]}' for message in messages)
