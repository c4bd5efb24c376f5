"""Settings of an adapter: its teacher, its guards, and the canary prompts on which guards measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sdpo_jax.config import ServeConfig
from sdpo_jax.errors import short_repr
from sdpo_jax.serving import request_prompts
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback_request import check_teacher, teacher_settings
from sdpo_jax.serving.guards import Guards
from sdpo_jax.serving.records import CARTRIDGE
from sdpo_jax.types import Messages

FIELDS = ('teacher', 'guards', 'canary_prompts', 'pinned_versions')
MOST_CANARIES = MOST_PINNED = 16


def checked(
  settings: Mapping[str, Any], serve: ServeConfig, prompt_of: Callable[..., list[int]], is_cartridge: bool = False
) -> dict[str, Any]:
  """Validate settings, and return them as JSON in the stored form; absent or None values mean the service's defaults.

  A cartridge keeps its `kind`, and has no settings but pinned versions.

  Args:
    settings: `teacher`, a kind or a mapping (`check_teacher`); `guards`, limits by name (`guards.Guards.of`);
      `canary_prompts`, texts or conversations; `pinned_versions`, numbers of versions that retention keeps.
    serve: the settings of the service.
    prompt_of: `ServiceState.prompt_of`, which tokenizes prompts.
    is_cartridge: whether they are those of a cartridge.

  Raises:
    InvalidRequest: a setting is invalid; the error names the field.
  """
  found: dict[str, Any] = {'kind': CARTRIDGE} if is_cartridge else {}
  fields = FIELDS[-1:] if is_cartridge else FIELDS
  for field, value in settings.items():
    if field not in fields and (field, value) not in found.items():
      raise InvalidRequest(
        f'{"Cartridges" if is_cartridge else "Adapters"} have no setting {short_repr(field)}, only '
        f'{", ".join(fields)}.',
        field=f'settings.{field}',
      )
  teacher, guards, canaries, pinned = (settings.get(field) for field in FIELDS)
  if teacher is not None:
    teacher = teacher_settings(teacher)
    if not isinstance(teacher, Mapping):
      raise InvalidRequest(f'teacher must be a kind or an object, not {short_repr(teacher)}.', field='teacher')
    check_teacher(teacher)
    found['teacher'] = dict(teacher)
  if guards is not None:
    if not isinstance(guards, Mapping):
      raise InvalidRequest(f'guards must be an object with limits by name, not {short_repr(guards)}.', field='guards')
    Guards.of(serve.guards, guards)
    found['guards'] = dict(guards)
  if canaries is not None:
    found['canary_prompts'] = _canaries(canaries, prompt_of)
  if pinned is not None:
    numbers = isinstance(pinned, list | tuple) and len(pinned) <= MOST_PINNED
    if not numbers or not all(type(each) is int and each >= 0 for each in pinned):
      raise InvalidRequest(
        f'pinned_versions must be a list of up to {MOST_PINNED} numbers of versions.', field='pinned_versions'
      )
    found['pinned_versions'] = sorted(set(pinned))
  return found


def _canaries(canaries: Any, prompt_of: Callable[..., list[int]]) -> list[Any]:
  if not isinstance(canaries, list | tuple) or len(canaries) > MOST_CANARIES:
    raise InvalidRequest(
      f'canary_prompts must be a list of up to {MOST_CANARIES} texts or conversations.', field='canary_prompts'
    )
  for number, canary in enumerate(canaries):
    try:
      prompt_of(messages=_messages_of(canary))
    except InvalidRequest as error:
      raise InvalidRequest(f'canary_prompts[{number}]: {error}', field=f'canary_prompts[{number}]') from error
  return [canary if isinstance(canary, str) else _messages_of(canary) for canary in canaries]


def _messages_of(canary: Any) -> Messages:
  """Return a canary prompt, given as a text or a conversation, as a conversation.

  Raises:
    InvalidRequest: the prompt is neither.
  """
  return request_prompts.conversation([{'role': 'user', 'content': canary}] if isinstance(canary, str) else canary)
