"""Export of a session's examples with their conversations, so that another adapter can learn from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import in_effect
from sdpo_jax.serving.sessions import json_fields, session_tables, teaching
from sdpo_jax.serving.sessions.conversation import dialogue_of
from sdpo_jax.serving.sessions.session_records import AgentSession, SessionExample, SessionTurn
from sdpo_jax.serving.sessions.session_tables import REHEARSAL
from sdpo_jax.serving.tool_calls import FORMS, ToolCall

Kind = Literal['denial', 'edit', 'result', 'rehearsal']
State = Literal['waiting', 'learned', 'rejected', 'undone']  # Rejected: by a guard.
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TrainingExample:
  """A proposal with its conversation, and the texts that the teacher reads about it."""

  session: str
  turn: int
  kind: Kind
  state: State
  versions: Sequence[int]  # The versions of the adapter in which it was learned.
  drawn_by: int  # The version that proposed.
  # The messages before the proposal, with role and content; those of the assistant have the raw text, and their calls.
  messages: Sequence[Mapping[str, Any]]
  tools: Sequence[Mapping[str, Any]]
  tool_form: str | None
  text: str  # The text of the proposal.
  said: str  # The text without thinking and calls.
  ended: bool  # Whether the model ended its turn.
  calls: Sequence[Mapping[str, Any]]
  demonstration: str | None  # This, feedback and environment are what the teacher reads.
  demonstrated: Sequence[Mapping[str, Any]]  # The calls in the demonstration, if it consists of calls only.
  feedback: str | None
  environment: str | None
  prompt_tokens: Sequence[int]
  tokens: Sequence[int]
  # [T] float32, when they were sampled; None: that was from another prompt.
  log_probs: np.ndarray | None = dataclasses.field(compare=False)
  teacher_prompt: Sequence[int]
  tokenizer: str  # Its fingerprint; a service with another tokenizer learns from the texts.
  teacher: Mapping[str, Any] | None  # This and the following fields are settings of the session.
  update: Mapping[str, Any]
  guards: Mapping[str, Any] | None
  show_attempt: bool
  edited_tokens: Sequence[int] | None = None  # The edited answer, if it is learned without a teacher.
  id: int | None = dataclasses.field(default=None, compare=False)  # Larger for later ones of the same service.

  def to_json(self) -> dict[str, Any]:
    """Return the example as JSON, in the form that `from_json` reads."""
    found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    lists = {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
    log_probs = None if self.log_probs is None else [float(each) for each in self.log_probs]
    return {'format': FORMAT, **found, **lists, 'log_probs': log_probs}

  @classmethod
  def from_json(cls, values: Any) -> TrainingExample:
    """Validate JSON, and return it as an example.

    Raises:
      InvalidRequest: a field is invalid; the error names it.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    said = json_fields.known(values, ('format', *names), 'An example')
    if said.pop('format', None) != FORMAT:
      raise InvalidRequest(f'An example must have the format {FORMAT} of this version of sdpo_jax.', field='format')
    said = {'edited_tokens': None, 'id': None} | said  # Examples from before they were there.
    read = json_fields.fields_of(said, _READ, 'An example', names)
    fits = read['log_probs'] is None or len(read['log_probs']) == len(read['tokens'])
    if not fits or not read['tokens'] or not read['prompt_tokens']:
      raise InvalidRequest(
        'An example needs prompt_tokens, tokens, and log_probs for each token, or null.', field='log_probs'
      )
    return cls(**read)


def exported(account: Account, adapter: str, session: str | None, after: int, limit: int) -> list[TrainingExample]:
  """Return examples that were or will be learned in sessions of an adapter, the oldest first.

  Args:
    account: the account of the owner.
    adapter: the id of the adapter.
    session: the id of one of its sessions; None: all.
    after: the id of the last example already seen.
    limit: the most examples.
  """
  database = account.service.store.database
  only = {} if session is None else {'session': session}
  found = session_tables.examples(database, adapter, after, limit, **only)
  contexts: dict[tuple[str, int], tuple[AgentSession, SessionTurn, list[dict[str, Any]], bool]] = {}
  for id in dict.fromkeys(each.session for each in found):
    known = session_tables.session(database, adapter, id)
    if known is not None:
      numbers = {each.n for each in found if each.session == id}
      for turn, messages, ended in _histories(account, known, numbers):
        contexts[id, turn.n] = known, turn, messages, ended
  kept = in_effect(account.versions(adapter))
  numbers, oldest = {version.number for version in kept}, kept[-1].number
  lines = []
  for each in (each for each in found if (each.session, each.n) in contexts):
    line = _exported(each, *contexts[each.session, each.n])
    # Of versions before the oldest one that is stored, nothing is known.
    left = tuple(number for number in each.versions if number in numbers or number < oldest)
    if line.state == 'learned':
      line = dataclasses.replace(line, **({'versions': left} if left else {'state': 'undone'}))
    lines.append(line)
  return lines


def _histories(
  account: Account, session: AgentSession, numbers: set[int]
) -> Iterator[tuple[SessionTurn, list[dict[str, Any]], bool]]:
  """Yield turns of a session by number, each with the messages before it and whether its answer has ended."""
  service, settings = account.service, session.settings
  dialogue = dialogue_of(service, session)
  said: list[dict[str, Any]] = [] if settings.system is None else [{'role': 'system', 'content': settings.system}]
  pending: list[dict[str, Any]] = []
  told: list[dict[str, Any]] = []  # The pending messages with denied proposals that stay in the conversation.
  for turn in session_tables.turns(service.store.database, session.id):
    pending += [dict(message) for message in turn.messages]
    told += [dict(message) for message in turn.messages]
    if turn.n in numbers:
      yield turn, [*said, *pending], dialogue.is_ended(turn.tokens)
    if turn.joins:
      text = turn.text
      if turn.kept_tokens is not None:
        with service.tokenizing:
          text = dialogue.text_of(turn.kept_tokens)
      said += [*told, _answer(turn, text)]
      pending = teaching.behind(turn)
      told = list(pending)
    elif turn.told is not None:
      told += [_answer(turn, turn.text), *teaching.behind(turn)]


def _answer(turn: SessionTurn, text: str) -> dict[str, Any]:
  return {'role': 'assistant', 'content': text, 'calls': _as_json(turn.called), 'said': turn.said}


def _exported(
  example: SessionExample, session: AgentSession, turn: SessionTurn, messages: list[dict[str, Any]], ended: bool
) -> TrainingExample:
  settings, rehearsed = session.settings, example.kind == REHEARSAL and not turn.said
  return TrainingExample(
    id=example.id,
    session=session.id,
    turn=turn.n,
    kind=example.kind,
    state=example.state,
    versions=tuple(example.versions),
    drawn_by=turn.version,
    messages=tuple(messages),
    tools=tuple(settings.tools),
    tool_form=session.tool_form,
    text=turn.text,
    said=turn.said,
    ended=ended,
    calls=tuple(_as_json(turn.calls)),
    demonstrated=tuple(_as_json(turn.called if example.kind == 'edit' else turn.calls if rehearsed else ())),
    prompt_tokens=tuple(turn.prompt_tokens if example.asked is None else example.asked),
    tokens=tuple(turn.tokens),
    log_probs=turn.log_probs if example.asked is None else None,
    teacher_prompt=tuple(example.teacher_prompt),
    edited_tokens=tuple(turn.kept_tokens) if example.direct else None,
    tokenizer=session.written['tokenizer'],
    **dataclasses.asdict(example.said),
    **{name: getattr(settings, name) for name in ('teacher', 'update', 'guards', 'show_attempt')},
  )


def _as_json(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
  return [dataclasses.asdict(call) for call in calls]


_whole = json_fields.whole(0, 2**31 - 1)


def _objects(value: Any, field: str) -> tuple[dict[str, Any], ...]:
  return tuple(json_fields.listed(value, field, 2**20, json_fields.mapping))


def _wholes(value: Any, field: str) -> tuple[int, ...]:
  return tuple(json_fields.listed(value, field, 2**24, _whole))


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
  'kind': json_fields.one_of(*get_args(Kind)),
  'state': json_fields.one_of(*get_args(State)),
  'versions': _wholes,
  'drawn_by': _whole,
  'messages': _messages,
  'tools': _objects,
  'tool_form': json_fields.optional(json_fields.one_of(*FORMS)),
  'text': json_fields.text,
  'said': json_fields.text,
  'ended': json_fields.flag,
  'calls': _calls,
  'demonstration': json_fields.optional(json_fields.text),
  'demonstrated': _calls,
  'feedback': json_fields.optional(json_fields.text),
  'environment': json_fields.optional(json_fields.text),
  'prompt_tokens': _wholes,
  'tokens': _wholes,
  'log_probs': json_fields.optional(_log_probs),
  'teacher_prompt': _wholes,
  'tokenizer': json_fields.text,
  'teacher': json_fields.optional(json_fields.mapping),
  'update': json_fields.mapping,
  'guards': json_fields.optional(json_fields.mapping),
  'show_attempt': json_fields.flag,
  'edited_tokens': json_fields.optional(_wholes),
  'id': json_fields.optional(json_fields.whole(0, 2**63 - 1)),
}
