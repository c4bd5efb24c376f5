"""Export of a session's examples with their conversations, so that another adapter can learn from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, Field

from sdpo_jax.serving.account import Account
from sdpo_jax.serving.records import in_effect
from sdpo_jax.serving.sessions import session_tables, teaching
from sdpo_jax.serving.sessions.conversation import dialogue_of
from sdpo_jax.serving.sessions.session_records import AgentSession, JsonObject, SessionExample, SessionTurn, Text
from sdpo_jax.serving.sessions.session_tables import REHEARSAL
from sdpo_jax.serving.tool_calls import Form, ToolCall

Kind = Literal['denial', 'edit', 'result', 'rehearsal']
State = Literal['waiting', 'learned', 'rejected', 'undone']  # Rejected: by a guard.
FORMAT: Literal[1] = 1


def _for_each_token(values: Sequence[float] | None, info: pydantic.ValidationInfo) -> Sequence[float] | None:
  tokens = info.data.get('tokens')
  if None not in (values, tokens) and len(values) != len(tokens):
    raise ValueError('must be one number for each of the tokens, or null')
  return values


_Number = Annotated[int, Field(ge=0, lt=2**31)]
_Tokens = Annotated[tuple[_Number, ...], Field(min_length=1)]
_LogProbs = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...] | None, AfterValidator(_for_each_token)]


def _call(value: Any) -> Any:
  named = isinstance(value, dict) and isinstance(value.get('name'), str)
  if not named or not isinstance(value.get('arguments'), dict):
    raise ValueError("a call needs 'name', a text, and 'arguments', an object")
  return value


def _message(value: dict[str, Any]) -> dict[str, Any]:
  texts = ('role', 'content', 'said') if 'calls' in value else ('role', 'content')
  calls = value.get('calls', [])
  if not isinstance(calls, list) or not all(isinstance(value.get(name), str) for name in texts):
    raise ValueError(f'a message needs {" and ".join(texts)}, all of them texts, and calls in a list')
  for each in calls:
    _call(each)
  return value


_Call = Annotated[JsonObject, AfterValidator(_call)]
_Message = Annotated[JsonObject, AfterValidator(_message)]


@dataclasses.dataclass(frozen=True)
class TrainingExample:
  """A proposal with its conversation, and the texts that the teacher reads about it; each field is JSON."""

  __pydantic_config__ = pydantic.ConfigDict(extra='forbid', strict=True)

  format: Literal[1]  # Those of other versions of sdpo_jax have another number.
  session: Text
  turn: _Number
  kind: Kind
  state: State
  versions: tuple[_Number, ...]  # The versions of the adapter in which it was learned.
  drawn_by: _Number  # The version that proposed.
  # The messages before the proposal, with role and content; those of the assistant have the raw text, and their calls.
  messages: tuple[_Message, ...]
  tools: tuple[JsonObject, ...]
  tool_form: Form | None
  text: Text  # The text of the proposal.
  said: Text  # The text without thinking and calls.
  ended: bool  # Whether the model ended its turn.
  calls: tuple[_Call, ...]
  demonstration: Text | None  # This, feedback and environment are what the teacher reads.
  demonstrated: tuple[_Call, ...]  # The calls in the demonstration, if it consists of calls only.
  feedback: Text | None
  environment: Text | None
  prompt_tokens: _Tokens
  tokens: _Tokens
  # [T] when they were sampled; None: that was from another prompt.
  log_probs: _LogProbs = dataclasses.field(compare=False)
  teacher_prompt: tuple[_Number, ...]
  tokenizer: Text  # Its fingerprint; a service with another tokenizer learns from the texts.
  teacher: JsonObject | None  # This and the following fields are settings of the session.
  update: JsonObject
  guards: JsonObject | None
  show_attempt: bool
  edited_tokens: tuple[_Number, ...] | None = None  # The edited answer, if it is learned without a teacher.
  # Larger for later ones of the same service.
  id: Annotated[int, Field(ge=0, lt=2**63)] | None = dataclasses.field(default=None, compare=False)


READER = pydantic.TypeAdapter(TrainingExample)  # Of lines as `as_json(vars(example))` writes them.


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
    format=FORMAT,
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
    log_probs=tuple(map(float, turn.log_probs)) if example.asked is None else None,
    teacher_prompt=tuple(example.teacher_prompt),
    edited_tokens=tuple(turn.kept_tokens) if example.direct else None,
    tokenizer=session.written['tokenizer'],
    **dataclasses.asdict(example.said),
    **{name: getattr(settings, name) for name in ('teacher', 'update', 'guards', 'show_attempt')},
  )


def _as_json(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
  return [dataclasses.asdict(call) for call in calls]
