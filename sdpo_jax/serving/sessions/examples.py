"""Training examples of turns, with everything that is needed to learn them again elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal

import numpy as np

from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sessions import json_fields

Kind = Literal['denial', 'edit', 'result', 'rehearsal']
KINDS = ('denial', 'edit', 'result', 'rehearsal')
STATES = ('waiting', 'learned', 'rejected')
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TrainingExample:
  """A proposal, and the texts that the teacher was shown about it."""

  session: str
  turn: int
  kind: Kind
  state: Literal['waiting', 'learned', 'rejected']  # Rejected: by a guard.
  versions: Sequence[int]  # Versions of the adapter in which it was learned.
  drawn_by: int  # The version that drew the proposal.
  # The conversation before the proposal: role and content; for the assistant the raw text, and its calls.
  messages: Sequence[Mapping[str, Any]]
  tools: Sequence[Mapping[str, Any]]
  tool_form: str | None
  text: str  # The text of the proposal.
  said: str  # The text without thinking and calls.
  ended: bool  # Whether it ended its turn.
  calls: Sequence[Mapping[str, Any]]
  demonstration: str | None  # What the teacher was shown.
  demonstrated: Sequence[Mapping[str, Any]]  # The calls of the demonstration, if it consists of calls only.
  feedback: str | None
  environment: str | None
  prompt_tokens: Sequence[int]
  tokens: Sequence[int]
  log_probs: np.ndarray = dataclasses.field(compare=False)  # [T] float32 of the tokens when they were drawn.
  teacher_prompt: Sequence[int]
  tokenizer: str  # Its fingerprint; a service with another one learns from the texts.
  teacher: Mapping[str, Any] | None  # This and the fields below are settings of the session.
  update: Mapping[str, Any]
  guards: Mapping[str, Any] | None
  show_attempt: bool

  def to_json(self) -> dict[str, Any]:
    """Return the example in the form that `from_json` reads."""
    found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    lists = {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
    return {'format': FORMAT, **found, **lists, 'log_probs': [float(each) for each in self.log_probs]}

  @classmethod
  def from_json(cls, values: Any) -> TrainingExample:
    """Return an example read from JSON.

    Raises:
      InvalidRequest: a field is invalid; the error names it.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    said = dict(json_fields.known(values, ('format', *names), 'An example'))
    if said.pop('format', None) != FORMAT:
      raise InvalidRequest('The example is none that this version of sdpo_jax has exported.', field='format')
    missing = [name for name in names if name not in said]
    if missing:
      raise InvalidRequest(f'An example needs {missing[0]}.', field=missing[0])
    read = {name: _READ[name](said[name], name) for name in names}
    if len(read['log_probs']) != len(read['tokens']) or not read['tokens'] or not read['prompt_tokens']:
      raise InvalidRequest('An example has tokens, a prompt, and one of log_probs for each token.', field='log_probs')
    return cls(**read)


def _one_of(*allowed: str):
  def read(value: Any, field: str) -> str:
    if value not in allowed:
      raise InvalidRequest(f'{field} must be one of {", ".join(allowed)}, not {short_repr(value)}.', field=field)
    return value

  return read


def _objects(value: Any, field: str) -> tuple[dict[str, Any], ...]:
  return tuple(json_fields.listed(value, field, 2**20, json_fields.mapping))


def _wholes(value: Any, field: str) -> tuple[int, ...]:
  return tuple(json_fields.listed(value, field, 2**24, _whole))


def _whole(value: Any, field: str) -> int:
  return json_fields.whole(value, field, 0, 2**31 - 1)


def _messages(value: Any, field: str) -> tuple[dict[str, Any], ...]:
  found = _objects(value, field)
  for number, message in enumerate(found):
    if not isinstance(message.get('role'), str) or not isinstance(message.get('content'), str):
      raise InvalidRequest(f"{field}[{number}] needs 'role' and 'content', two texts.", field=f'{field}[{number}]')
    if 'calls' in message:  # A message of the assistant.
      json_fields.text(message.get('said'), f'{field}[{number}].said')
      _calls(message['calls'], f'{field}[{number}].calls')
  return found


def _log_probs(value: Any, field: str) -> np.ndarray:
  return np.asarray(json_fields.listed(value, field, 2**24, json_fields.finite), np.float32)


def _optional_object(value: Any, field: str) -> dict[str, Any] | None:
  return None if value is None else json_fields.mapping(value, field)


def _calls(value: Any, field: str) -> tuple[dict[str, Any], ...]:
  found = _objects(value, field)
  for number, call in enumerate(found):
    where = f'{field}[{number}]'
    if not isinstance(call.get('name'), str) or not isinstance(call.get('arguments'), Mapping):
      raise InvalidRequest(f"{where} needs 'name', a text, and 'arguments', an object.", field=where)
  return found


_READ = {
  'session': json_fields.text,
  'turn': _whole,
  'kind': _one_of(*KINDS),
  'state': _one_of(*STATES),
  'versions': _wholes,
  'drawn_by': _whole,
  'messages': _messages,
  'tools': _objects,
  'tool_form': lambda value, field: None if value is None else _one_of('hermes', 'llama3')(value, field),
  'text': json_fields.text,
  'said': json_fields.text,
  'ended': json_fields.flag,
  'calls': _calls,
  'demonstration': json_fields.optional_text,
  'demonstrated': _calls,
  'feedback': json_fields.optional_text,
  'environment': json_fields.optional_text,
  'prompt_tokens': _wholes,
  'tokens': _wholes,
  'log_probs': _log_probs,
  'teacher_prompt': _wholes,
  'tokenizer': json_fields.text,
  'teacher': _optional_object,
  'update': json_fields.mapping,
  'guards': _optional_object,
  'show_attempt': json_fields.flag,
}
