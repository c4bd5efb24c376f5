"""Conversion of dataset rows to examples.

The reference has two forms: raw rows (idx, kind, dataset, answer, elo, prompt, description, tests, system, …) and the
output of its data/preprocess.py:46-100 (data_source, prompt, ability, reward_model, extra_info). A raw row needs only
`prompt` and the fields that its grader reads, also under names that other trainers use: `messages`, `ground_truth`,
`solution`. Rows may name their graders in `environment`; otherwise the data source decides, as in the reference
(verl/utils/reward_score/feedback/__init__.py:8-26), or else the setting data.environment.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from sdpo_jax.config import rewards
from sdpo_jax.config.fields import did_you_mean
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
# Names of the ground truth in rows that are not graded by unit tests; the first one present counts.
TRUTHS = ('answer', 'ground_truth', 'solution')
LARGE = ('embedding',)  # Fields that are not passed to graders, since they take megabytes and nothing reads them.
LARGEST_ROW = 48 * 2**20  # Bytes or characters of a row in a file of any format.


@dataclasses.dataclass(frozen=True)
class RawRow:
  """One row of a file, unchecked."""

  origin: str  # File and line (or row) number, for messages.
  number: int  # From 1: line number in JSON files, row number in parquet and hub data sets.
  value: Any  # The value in the file; a mapping if it is well-formed.


def too_large(origin: str, size: int) -> UserError:
  """Return the error about a row of more than `LARGEST_ROW` bytes or characters."""
  limit = f'and at most {LARGEST_ROW >> 20} MiB are read: split it, or leave out what the model does not need'
  return UserError(f'{origin}: the row has {size / 2**20:.0f} MiB, {limit}.')


def example(
  row: RawRow, split: str, *, default_source: str = 'data', default_environment: str | None = None
) -> Example:
  """Return the example of a raw or preprocessed row.

  Args:
    row: the row as read from the file.
    split: 'train' or 'test'.
    default_source: data source of a row that names none.
    default_environment: graders of a row that names none and whose data source has none.

  Returns:
    The example; its `columns` hold the row's fields by name.

  Raises:
    UserError: the row is faulty; the message names file, line, field and fault.
  """
  value = fields(row)
  preprocessed = 'data_source' in value
  ready = value if preprocessed else preprocess(row, split, default_source, default_environment)
  source = _text(ready, 'data_source', row)
  messages = _messages(ready, row)
  reward = _field(ready, 'reward_model', row)
  if not isinstance(reward, Mapping) or (preprocessed and reward.get('ground_truth') is None):
    raise UserError(
      f"{row.origin}: field 'reward_model' must be an object with a 'ground_truth', not {short_repr(reward)}."
    )
  extra = ready.get('extra_info') or {}
  if not isinstance(extra, Mapping):
    raise UserError(f"{row.origin}: field 'extra_info' must be an object, not {short_repr(extra)}.")
  elsewhere = extra.get('environment') if preprocessed else None
  environment = _environment(value, default_environment, row, elsewhere)
  if environment is None:
    raise UserError(
      f"{row.origin}: no environment grades the data source {source!r}: name the grader in a field 'environment' or, "
      "for all rows that name none, in data.environment (in Python, grader=…); or say in a field 'dataset' that it "
      f'is {", ".join(ENVIRONMENTS)}.'
    )
  for grader in rewards.names([environment]):
    if wrong := ground_truth.check(grader, reward['ground_truth']):
      field = 'reward_model.ground_truth' if preprocessed else _truth_field(value, environment)
      raise UserError(f'{row.origin}: field {field!r}, which {grader!r} grades by, {wrong}.')
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
    columns={name: field for name, field in value.items() if name not in LARGE},
  )


def conversation(row: RawRow) -> list[dict[str, str]]:
  """Return a row's question: its `messages`, or its `prompt`, a text or a list of messages; graders are not checked.

  Raises:
    UserError: the row is faulty; the message names file, line, field and fault.
  """
  messages = _asked(fields(row), row)
  for text in (part for message in messages for part in message.values()):
    _check_unicode(text, row)
  return messages


def answered(row: RawRow) -> tuple[list[dict[str, str]], str | None]:
  """Return a row's question, as `conversation`, and its `answer`, a text; None: it has none.

  Raises:
    UserError: as `conversation`, or the row has other fields.
  """
  known = ('prompt', 'messages', 'system', 'answer')
  for name in fields(row).keys() - known:
    raise UserError(f'{row.origin}: there is no field {name!r}, only {", ".join(known)}{did_you_mean(name, known)}')
  messages, answer = conversation(row), row.value.get('answer')
  if answer is not None:
    _check_unicode(_text(row.value, 'answer', row), row)
  return messages, answer


def preprocess(
  row: RawRow, split: str, default_source: str = 'data', default_environment: str | None = None
) -> dict[str, Any]:
  """Return a raw row in the preprocessed form (reference data/preprocess.py:46-100).

  An empty system prompt is kept as a message, a null one is not; `self` is removed from LiveCodeBench's signatures;
  rows of kind `code` are graded by their `tests`, others by their `answer`. Defaults as in `example`; without a `kind`,
  the grader's name is used.

  Raises:
    UserError: the row is faulty; the message names file, line, field and fault.
  """
  value = row.value
  kind = None if value.get('kind') is None else _text(value, 'kind', row)
  source = default_source if value.get('dataset') is None else _text(value, 'dataset', row)
  messages = _asked(value, row)
  environment = _environment(value, default_environment, row)
  truth = _truth(value, environment, row)
  description = _text_or_null(value, 'description', row)
  if source == 'livecodebench':
    description = description and description.replace('(self, ', '(')
  index = next((value[name] for name in ('idx', 'id') if value.get(name) is not None), row.number)
  return {
    'data_source': source,
    'prompt': messages,
    'ability': kind or environment,
    'reward_model': {'style': kind or environment, 'ground_truth': truth},
    'extra_info': {
      'split': split,
      'index': str(index),
      'description': description,
      'problem': messages[-1]['content'],
      'elo': value.get('elo'),
      'achievement_prior': value.get('achievement_prior', 0) if split == 'train' else 0,
    },
  }


def _environment(value: Mapping[str, Any], default: str | None, row: RawRow, elsewhere: Any = None) -> str | None:
  """Return the graders that a row names in its field or `elsewhere`, else those of its data source, else `default`."""
  try:
    chosen = rewards.written(value.get('environment')) or rewards.written(elsewhere)
  except rewards.UnreadableRewards as error:
    raise UserError(f"{row.origin}: field 'environment' {error}.") from error
  named = value.get('dataset' if 'data_source' not in value else 'data_source')
  return chosen or (ENVIRONMENTS.get(named) if isinstance(named, str) else None) or rewards.written(default)


def _asked(value: Mapping[str, Any], row: RawRow) -> list[dict[str, str]]:
  """Return the messages of a raw row, preceded by its system prompt if it has one."""
  if value.get('messages') is None and 'prompt' not in value:
    raise _missing("'prompt' or 'messages'", row)
  system = _text_or_null(value, 'system', row)
  if value.get('messages') is not None or isinstance(value['prompt'], list):
    messages = _messages(value, row, 'prompt' if value.get('messages') is None else 'messages')
  else:
    prompt = _text(value, 'prompt', row)
    if value.get('dataset') == 'livecodebench':
      prompt = prompt.replace('(self, ', '(')
    messages = [{'role': 'user', 'content': prompt}]
  if system is None or messages[0]['role'] == 'system':
    return messages
  return [{'role': 'system', 'content': system}, *messages]


def _truth(value: Mapping[str, Any], environment: str | None, row: RawRow) -> Any:
  """Return a raw row's ground truth: a text for this project's graders, any value for others, None if there is none."""
  name = _truth_field(value, environment)
  if not any(map(ground_truth.is_checked, _graders(environment))):
    return value.get(name)
  if name not in value:
    others = '' if name == 'tests' else f'; {" and ".join(map(repr, TRUTHS[1:]))} are other names for it'
    raise UserError(f'{row.origin}: field {name!r} is missing or empty, but the row is graded by it{others}.')
  return _text(value, name, row)


def _graders(environment: str | None) -> set[str]:
  return set() if environment is None else rewards.names([environment])


def _truth_field(value: Mapping[str, Any], environment: str | None) -> str:
  kind = value.get('kind')
  if kind == 'code' or (kind is None and 'code' in _graders(environment)):
    return 'tests'
  return next((name for name in TRUTHS if value.get(name) is not None), TRUTHS[0])


def _check_unicode(text: Any, row: RawRow) -> None:
  """Raise UserError for a lone surrogate, which JSON can spell but no tokenizer or file can hold."""
  if not isinstance(text, str):
    return
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise UserError(
      f'{row.origin}: half of a character, {text[error.start]!r}, follows {short_repr(text[: error.start][-30:])}: '
      'write the whole character or leave it out.'
    ) from error


def fields(row: RawRow) -> Mapping[str, Any]:
  """Return a row's columns by name; raises UserError if it is no object."""
  if not isinstance(row.value, Mapping):
    raise UserError(f'{row.origin}: a row must be an object with named fields, not {short_repr(row.value)}.')
  return row.value


def _missing(names: str, row: RawRow) -> UserError:
  """Return the error for a row that has none of several fields, one of which is required."""
  there = ', '.join(map(repr, row.value)) or 'nothing'
  way_out = 'rename one, or let launch.init write rows of its own from the file'
  return UserError(f'{row.origin}: field {names} is missing; there is: {there}: {way_out}.')


def _field(value: Mapping[str, Any], name: str, row: RawRow) -> Any:
  if name not in value:
    raise UserError(f'{row.origin}: field {name!r} is missing.')
  return value[name]


def _text(value: Mapping[str, Any], name: str, row: RawRow) -> str:
  text = _field(value, name, row)
  if not isinstance(text, str) or not text.strip():
    raise UserError(f'{row.origin}: field {name!r} must be a non-empty string, not {short_repr(text)}.')
  return text


def _text_or_null(value: Mapping[str, Any], name: str, row: RawRow) -> str | None:
  text = value.get(name)
  if text is not None and not isinstance(text, str):
    raise UserError(f'{row.origin}: field {name!r} must be a string or null, not {short_repr(text)}.')
  return text


def is_message(value: Any) -> bool:
  """Return whether a value is a message, a mapping with the texts `role` and `content`."""
  return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ('role', 'content'))


def _messages(value: Mapping[str, Any], row: RawRow, name: str = 'prompt') -> list[dict[str, str]]:
  messages = _field(value, name, row)
  if not isinstance(messages, list) or not messages:
    raise UserError(f'{row.origin}: field {name!r} must be a non-empty list of messages, not {short_repr(messages)}.')
  for message in messages:
    if not is_message(message):
      raise UserError(
        f"{row.origin}: field {name!r}: a message must have the strings 'role' and 'content', not "
        f'{short_repr(message)}.'
      )
  if not messages[-1]['content'].strip():
    raise UserError(f'{row.origin}: field {name!r}: the last message, which asks the question, is empty.')
  if messages[-1]['role'] == 'assistant':
    raise UserError(
      f"{row.origin}: field {name!r}: the last message is the assistant's: leave it out, so that the model answers, "
      f'and put it into {TRUTHS[0]!r} if the grader needs it.'
    )
  return [{'role': message['role'], 'content': message['content']} for message in messages]
