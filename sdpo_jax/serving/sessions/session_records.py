"""The records of sessions: the session, its turns, decisions, tool results, and what was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal

import numpy as np

from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sessions import json_fields
from sdpo_jax.serving.sessions.session_settings import SessionSettings
from sdpo_jax.serving.tool_calls import MAX_CALLS, Form, ToolCall

Status = Literal['open', 'approved', 'edited', 'denied', 'answered']
KINDS = ('approve', 'deny', 'edit')
DECIDED = {'approve': 'approved', 'deny': 'denied', 'edit': 'edited'}  # The status after each decision.


@dataclasses.dataclass(frozen=True)
class AgentSession:
  """A conversation between a person and an adapter that learns from the person's decisions."""

  id: str  # 'ses-…'.
  adapter: str  # Its id.
  owner: str
  created: float  # Seconds since the epoch.
  settings: SessionSettings
  tool_form: Form | None  # How the model writes calls; None: the session has no tools.

  def to_json(self) -> dict[str, Any]:
    """Return the session as clients see it."""
    return {**_shallow(self), 'settings': self.settings.to_json()}


@dataclasses.dataclass(frozen=True)
class Decision:
  """A person's decision on a proposal."""

  kind: Literal['approve', 'deny', 'edit']
  correction: str | None = None  # What is wrong with it, in words.
  arguments: Mapping[str, Any] | None = None  # For an edit: the new arguments of the call.
  call: int = 0  # For an edit: the index of the call.

  @classmethod
  def from_json(cls, values: Any) -> Decision:
    """Return a decision of {"decision" or "kind", "correction"?, "arguments"?, "call"?}; raise InvalidRequest."""
    said = dict(json_fields.known(values, ('decision', 'kind', 'correction', 'arguments', 'call'), 'A decision'))
    kind = said.get('decision', said.get('kind'))
    if kind not in KINDS:
      raise InvalidRequest(f'decision must be one of {", ".join(KINDS)}, not {short_repr(kind)}.', field='decision')
    correction = json_fields.optional_text(said.get('correction'), 'correction')
    arguments, call = said.get('arguments'), said.get('call')
    if (arguments is None) == (kind == 'edit'):
      raise InvalidRequest(
        "An edit needs the call's new arguments."
        if kind == 'edit'
        else f'arguments belong to an edit, and this is to {kind}: leave them out.',
        field='arguments',
      )
    if kind == 'approve' and correction is not None:
      raise InvalidRequest(
        'An approval has no correction: deny the proposal to correct it, or leave it out.', field='correction'
      )
    return cls(
      kind,
      correction if correction is not None and correction.strip() else None,
      None if arguments is None else json_fields.mapping(arguments, 'arguments'),
      0 if call is None else json_fields.whole(call, 'call', 0, MAX_CALLS - 1),
    )

  def to_json(self) -> dict[str, Any]:
    """Return the decision in the form that `from_json` reads."""
    found = {'kind': self.kind, 'correction': self.correction}
    return {**found, 'arguments': dict(self.arguments), 'call': self.call} if self.kind == 'edit' else found


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """The result of a tool call, from where the tool ran."""

  call: int  # Index of the call in the turn.
  ok: bool
  text: str  # For the model; after a failure it begins with a sentence about that.
  exit_code: int | None = None  # Set for a command.
  stderr: str | None = None  # The end of stderr, unless the text contains it.
  field: str | None = None  # The argument at fault.
  line: int | None = None  # Line of the file, from 1, where it failed.

  @classmethod
  def from_json(cls, values: Any) -> ToolResult:
    """Return a result read from JSON; raise InvalidRequest."""
    said = json_fields.known(values, [field.name for field in dataclasses.fields(cls)], 'A result')
    for name in ('call', 'ok', 'text'):
      if name not in said:
        raise InvalidRequest(f'A result needs {name}.', field=name)
    return cls(
      json_fields.whole(said['call'], 'call', 0, MAX_CALLS - 1),
      json_fields.flag(said['ok'], 'ok'),
      json_fields.text(said['text'], 'text'),
      json_fields.optional_whole(said.get('exit_code'), 'exit_code', -(2**31), 2**31 - 1),
      json_fields.optional_text(said.get('stderr'), 'stderr'),
      json_fields.optional_text(said.get('field'), 'field'),
      json_fields.optional_whole(said.get('line'), 'line', 0, 2**53),
    )

  def to_json(self) -> dict[str, Any]:
    """Return the result in the form that `from_json` reads."""
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class MovedToken:
  """A token of an answer whose log-prob changed with the new version."""

  position: int
  token: int
  text: str
  before: float  # Its log-prob.
  after: float


@dataclasses.dataclass(frozen=True)
class LearnedTurns:
  """The result of learning from turns of a session, or the number of examples that wait."""

  version_before: int
  version_after: int  # The same, if nothing was committed.
  accepted: bool  # Whether it was committed.
  reason: str | None  # Why a guard rejected it.
  turns: Sequence[int] = ()  # Numbers of the turns that were learned from.
  waiting: int = 0  # Examples that wait for others (`min_sdpo_examples`).
  # KL(teacher‖student), mean over the tokens of the answer, in nats, over the teacher's most likely tokens and a tail
  # bucket. None: it was not measured.
  divergence_before: float | None = None
  divergence_after: float | None = None  # Likewise for the new version, against the same teacher scores.
  moved: Sequence[MovedToken] = ()  # The tokens whose log-probs changed most, the largest change first.
  seconds: float | None = None  # None: the process died after learning, before it could note more.

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> LearnedTurns:
    """Return the result that `to_json` has written."""
    moved = tuple(MovedToken(**each) for each in values['moved'])
    return cls(**{**values, 'moved': moved, 'turns': tuple(values['turns'])})

  def to_json(self) -> dict[str, Any]:
    """Return the result in the form that `from_json` reads."""
    found = dataclasses.asdict(self)
    return {**found, 'turns': list(found['turns']), 'moved': list(found['moved'])}


@dataclasses.dataclass(frozen=True)
class SessionTurn:
  """A proposal, the messages before it, the decision on it, and the results."""

  n: int  # 0, 1, …
  messages: Sequence[Mapping[str, str]]  # The messages between the turn before and this one.
  version: int  # The adapter's version that drew it.
  sample_id: str
  prompt_tokens: Sequence[int]
  tokens: Sequence[int]  # As they were drawn.
  log_probs: np.ndarray = dataclasses.field(compare=False)  # [T] float32 of the tokens, at temperature 1, when drawn.
  text: str
  said: str  # The text without thinking and calls.
  calls: Sequence[ToolCall]
  fault: str | None  # Why something that looks like a call is invalid.
  status: Status
  created: float  # Seconds since the epoch.
  decision: Decision | None = None
  results: Sequence[ToolResult] = ()  # One for each call, once the tools have run.
  learned: LearnedTurns | None = None  # From the decision; replaced by the result of learning from tool results.
  reused_tokens: int = 0  # Prompt tokens whose keys and values came from a cached prefix.
  kept_tokens: Sequence[int] | None = None  # The tokens that replace `tokens` in the conversation; None: they stay.

  @property
  def answer_tokens(self) -> Sequence[int]:
    """The tokens that stand for the proposal in the conversation, if it is part of it."""
    return self.tokens if self.kept_tokens is None else self.kept_tokens

  @property
  def joins(self) -> bool:
    """Whether the turn is part of the conversation."""
    return self.status in ('approved', 'edited', 'answered')

  @property
  def called(self) -> Sequence[ToolCall]:
    """The calls to run, with edited arguments."""
    return edited(self.calls, self.decision) if self.status == 'edited' else self.calls

  def to_json(self) -> dict[str, Any]:
    """Return the turn as clients see it: all but the log-probs."""
    found = {name: value for name, value in _shallow(self).items() if name != 'log_probs'}
    return {
      **found,
      'messages': [dict(message) for message in self.messages],
      'prompt_tokens': list(self.prompt_tokens),
      'tokens': list(self.tokens),
      'kept_tokens': None if self.kept_tokens is None else list(self.kept_tokens),
      'calls': [{'name': call.name, 'arguments': dict(call.arguments)} for call in self.calls],
      'decision': None if self.decision is None else self.decision.to_json(),
      'results': [result.to_json() for result in self.results],
      'learned': None if self.learned is None else self.learned.to_json(),
    }


def edited(calls: Sequence[ToolCall], decision: Decision) -> tuple[ToolCall, ...]:
  """Return the calls with the arguments of an edit in place of one call's own."""
  changed = ToolCall(calls[decision.call].name, decision.arguments)
  return (*calls[: decision.call], changed, *calls[decision.call + 1 :])


def _shallow(record: Any) -> dict[str, Any]:
  return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
