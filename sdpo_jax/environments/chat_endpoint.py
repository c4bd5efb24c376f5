"""OpenAI-compatible endpoints: the server that the settings name, and reading the text from chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdpo_jax.config import FeedbackEndpointConfig, JudgeConfig, TeacherEndpointConfig
from sdpo_jax.environments import json_server
from sdpo_jax.errors import UserError
from sdpo_jax.types import Messages

PATH = '/chat/completions'


def connect(
  settings: JudgeConfig | TeacherEndpointConfig | FeedbackEndpointConfig,
  prefix: str,
  *,
  address: str = 'url',
  path: str = PATH,
  needs_key: bool = True,
) -> json_server.JsonServer:
  """Return the server that settings name; no connection is made yet.

  Args:
    settings: the address up to and including its version, the key, and the number of concurrent requests.
    prefix: what the names of these settings or flags begin with, for messages: 'environments.judge.'.
    address: name of the setting that holds the address.
    path: path of the requests below that address.
    needs_key: whether the environment variable with the key must exist if one is named.

  Raises:
    UserError: as `json_server.read_address` and `read_secret`, or the address continues after the version.
  """
  setting, example = prefix + address, 'http://localhost:8000/v1'
  url, secrets = json_server.read_address(getattr(settings, address), setting, example)
  url = url.rstrip('/')
  if url.endswith(path):
    raise UserError(f'{setting} must end before {path}, which is added to it, as in {example}.')
  key = json_server.read_secret(settings.api_key_env, f'{prefix}api_key_env', required=needs_key)
  return json_server.JsonServer(
    url + path,
    authorization=f'Bearer {key}' if key else '',
    secrets=secrets,
    connections=settings.concurrency,
    setting=setting,
  )


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
