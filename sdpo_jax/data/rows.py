"""Dataset rows in the reference's schema, as examples.

Two forms are understood: raw rows (idx, kind, dataset, answer, elo, prompt, description, tests, system, …) and what the
reference's data/preprocess.py:46-100 makes of them (data_source, prompt, ability, reward_model, extra_info). Both may
carry one field of ours, `environment`, the name of the grader; without it the data source decides, as in the reference
(verl/utils/reward_score/feedback/__init__.py:8-26).
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from sdpo_jax.data import ground_truth
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.types import Example

ENVIRONMENTS = {
  'code': 'code',
  'livecodebench': 'code',
  'humanevalplus': 'code',
  'math': 'math',
  'math500': 'math',
  'dapo_math': 'math',
  'gsm8k': 'math',
  'gpqa': 'gpqa',
  'sciknoweval': 'mcq',
  'tooluse': 'tooluse',
}


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of a file, unchecked."""

  origin: str  # File and line (or row) number, for messages.
  number: int  # From 1: line number in JSON files, row number in parquet and hub data sets.
  value: Any  # What the file holds there; a mapping if it is well-formed.


def example(row: Row, split: str) -> Example:
  """The example of a raw or preprocessed row.

  Raises:
    UserError: naming file, line, field and fault.
  """
  value = _fields(row)
  if 'data_source' not in value and 'dataset' not in value:
    raise _missing("'dataset' (raw rows) or 'data_source' (preprocessed rows)", row)
  ready = value if 'data_source' in value else preprocess(row, split)
  source = _text(ready, 'data_source', row)
  messages = _messages(ready, row)
  reward = _field(ready, 'reward_model', row)
  if not isinstance(reward, Mapping) or reward.get('ground_truth') is None:
    raise UserError(
      f"{row.origin}: field 'reward_model' must be an object with a 'ground_truth', not {short_repr(reward)}."
    )
  extra = ready.get('extra_info') or {}
  if not isinstance(extra, Mapping):
    raise UserError(f"{row.origin}: field 'extra_info' must be an object, not {short_repr(extra)}.")
  environment = value.get('environment') or extra.get('environment') or ENVIRONMENTS.get(source)
  if not isinstance(environment, str):
    raise UserError(
      f'{row.origin}: no environment grades the data source {source!r}: choose one of {", ".join(ENVIRONMENTS)}, or '
      "name the grader in a field 'environment'."
    )
  if wrong := ground_truth.check(environment, reward['ground_truth']):
    raise UserError(f'{row.origin}: field {_truth_field(value)!r}, which {environment!r} grades by, {wrong}.')
  example_id = f'{source}/{extra.get("index", row.number)}'
  for text in (example_id, reward['ground_truth'], *(part for message in messages for part in message.values())):
    _check_unicode(text, row)
  return Example(
    id=example_id,
    messages=messages,
    environment=environment,
    ground_truth=reward['ground_truth'],
    data_source=source,
    extra={**extra, 'ability': ready.get('ability'), 'origin': row.origin},
  )


def conversation(row: Row) -> list[dict[str, str]]:
  """What a row asks, whoever may grade it: its `messages`, or its `prompt`, which is a list of messages too or a text.

  Raises:
    UserError: naming file, line, field and fault.
  """
  value = _fields(row)
  if 'messages' not in value and 'prompt' not in value:
    raise _missing("'prompt' or 'messages'", row)
  if 'messages' not in value and isinstance(value['prompt'], str):
    messages = _raw_messages(value, row)
  else:
    messages = _messages(value, row, 'messages' if 'messages' in value else 'prompt')
  for message in messages:
    _check_unicode(message['content'], row)
  return messages


def preprocess(row: Row, split: str) -> dict[str, Any]:
  """A raw row in the preprocessed form (reference data/preprocess.py:46-100).

  An empty system prompt is kept as a message, a null one is not; LiveCodeBench loses `self` from its signatures; rows
  of kind `code` are graded by their `tests`, the others by their `answer`.

  Raises:
    UserError: naming file, line, field and fault.
  """
  value = row.value
  kind, source = (_text(value, name, row) for name in ('kind', 'dataset'))
  messages = _raw_messages(value, row)
  truth = _text(value, 'tests' if kind == 'code' else 'answer', row)
  description = _text_or_null(value, 'description', row)
  if source == 'livecodebench':
    description = description and description.replace('(self, ', '(')
  return {
    'data_source': source,
    'prompt': messages,
    'ability': kind,
    'reward_model': {'style': kind, 'ground_truth': truth},
    'extra_info': {
      'split': split,
      'index': str(value.get('idx', row.number)),
      'description': description,
      'problem': messages[-1]['content'],
      'elo': value.get('elo'),
      'achievement_prior': value.get('achievement_prior', 0) if split == 'train' else 0,
    },
  }


def _raw_messages(value: Mapping[str, Any], row: Row) -> list[dict[str, str]]:
  """The prompt of a raw row, after its system prompt if it has one."""
  prompt, system = _text(value, 'prompt', row), _text_or_null(value, 'system', row)
  if value.get('dataset') == 'livecodebench':
    prompt = prompt.replace('(self, ', '(')
  user = {'role': 'user', 'content': prompt}
  return [user] if system is None else [{'role': 'system', 'content': system}, user]


def _truth_field(value: Mapping[str, Any]) -> str:
  if 'data_source' in value:
    return 'reward_model.ground_truth'
  return 'tests' if value.get('kind') == 'code' else 'answer'


def _check_unicode(text: Any, row: Row) -> None:
  """JSON can spell half of a character, which neither a tokenizer nor a file can hold."""
  if not isinstance(text, str):
    return
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise UserError(
      f'{row.origin}: half of a character, {text[error.start]!r}, follows {short_repr(text[: error.start][-30:])}: write it '
      'whole or leave it out.'
    ) from error


def _fields(row: Row) -> Mapping[str, Any]:
  if not isinstance(row.value, Mapping):
    raise UserError(f'{row.origin}: a row must be an object with named fields, not {short_repr(row.value)}.')
  return row.value


def _missing(names: str, row: Row) -> UserError:
  """The error of a row that has none of the fields it needs one of."""
  return UserError(f'{row.origin}: field {names} is missing; there is: {", ".join(map(str, row.value)) or "nothing"}.')


def _field(value: Mapping[str, Any], name: str, row: Row) -> Any:
  if name not in value:
    raise UserError(f'{row.origin}: field {name!r} is missing.')
  return value[name]


def _text(value: Mapping[str, Any], name: str, row: Row) -> str:
  text = _field(value, name, row)
  if not isinstance(text, str) or not text.strip():
    raise UserError(f'{row.origin}: field {name!r} must be a non-empty string, not {short_repr(text)}.')
  return text


def _text_or_null(value: Mapping[str, Any], name: str, row: Row) -> str | None:
  text = value.get(name)
  if text is not None and not isinstance(text, str):
    raise UserError(f'{row.origin}: field {name!r} must be a string or null, not {short_repr(text)}.')
  return text


def _messages(value: Mapping[str, Any], row: Row, name: str = 'prompt') -> list[dict[str, str]]:
  messages = _field(value, name, row)
  if not isinstance(messages, list) or not messages:
    raise UserError(f'{row.origin}: field {name!r} must be a non-empty list of messages, not {short_repr(messages)}.')
  for message in messages:
    good = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ('role', 'content'))
    if not good:
      raise UserError(
        f"{row.origin}: field {name!r}: a message must have the strings 'role' and 'content', not {short_repr(message)}."
      )
  if not messages[-1]['content'].strip():
    raise UserError(f'{row.origin}: field {name!r}: the last message, which asks the question, is empty.')
  return [{'role': message['role'], 'content': message['content']} for message in messages]
