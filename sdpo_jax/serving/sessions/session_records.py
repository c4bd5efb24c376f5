"""Records of sessions: settings, turns, decisions, tool results, and what was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import AfterValidator, Field
import pydantic.dataclasses

from sdpo_jax.config import ServeConfig
from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback_request import check_teacher, learning_of
from sdpo_jax.serving.guards import Guards
from sdpo_jax.serving.sample_requests import SampleOptions
from sdpo_jax.serving.tool_calls import Form, ToolCall, flaw_of
from sdpo_jax.serving.web.schemas import Number, RequestBody, Teacher, Update

Status = Literal['open', 'approved', 'edited', 'denied', 'answered']
DECIDED = {'approve': 'approved', 'deny': 'denied', 'edit': 'edited'}  # The status of a turn after each decision.
_STRICT = pydantic.ConfigDict(extra='forbid', strict=True, allow_inf_nan=False)


def _sound(value: dict[str, Any]) -> dict[str, Any]:
  if flaw := flaw_of(value):
    raise ValueError(f'holds {flaw}')
  return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_sound)]  # What can be tokenized, stored and sent.
Text = Annotated[str, Field(max_length=1_000_000)]
Label = Annotated[str, Field(max_length=200)]


def _with_name(tool: dict[str, Any]) -> dict[str, Any]:
  function = tool.get('function', tool)
  if not isinstance(function, dict) or not isinstance(function.get('name'), str) or not function['name']:
    raise ValueError('must be {"type": "function", "function": {"name": …, "description": …, "parameters": …}}')
  return tool


class SessionSampling(RequestBody):
  """Sampling options of proposals; absent fields take the defaults of completions."""

  max_tokens: int | None = Field(None, ge=1, description="The most tokens of a proposal; null: the service's limit.")
  temperature: Number | None = Field(None, ge=0)
  top_p: Number | None = Field(None, gt=0, le=1)
  top_k: int | None = Field(None, ge=-1)
  min_p: Number | None = Field(None, ge=0, lt=1)
  stop: Annotated[list[str], Field(max_length=64)] | None = None


def _given(update: Update) -> dict[str, Any]:
  return update.model_dump(exclude_unset=True)  # null is another thing than absent.


def _chosen(sampling: SessionSampling) -> dict[str, Any]:
  return sampling.model_dump(exclude_none=True)


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class SessionSettings:
  """The settings of a session, fixed when it is opened: how it samples proposals, and how it learns from decisions."""

  system: Text | None = Field(None, description='The system message of the conversation.')
  tools: list[Annotated[JsonObject, AfterValidator(_with_name)]] = Field(
    default_factory=list,
    max_length=128,
    description='JSON schemas of the tools that the model may call, as chat templates take them.',
  )
  title: Label = Field('', description='A title for people.')
  min_sdpo_examples: int = Field(1, ge=1, lt=2**31, description='How many examples are learned together; fewer wait.')
  teacher: Teacher | None = Field(
    None, description="live, ema, lagged, base or frozen, or {kind: …} with its settings; null: the adapter's."
  )
  update: Annotated[Update, AfterValidator(_given)] = Field(default_factory=dict)
  guards: dict[str, Number | None] | None = Field(None, description="Limits as in a feedback; null: the adapter's.")
  sampling: Annotated[SessionSampling, AfterValidator(_chosen)] = Field(default_factory=dict)
  learn_from_results: bool = Field(False, description='Whether to learn from failed tool calls, too.')
  rehearse: int = Field(
    0,
    ge=0,
    lt=2**31,
    description='How many of the newest approved proposals to learn with a correction, so as to keep them.',
  )
  # In the paper, that makes it a worse teacher (Table 6).
  show_attempt: bool = Field(False, description='Whether the teacher also reads the denied proposal.')
  after_denial: Literal['tell', 'retry'] = Field(
    'tell',
    description='tell: a denied proposal stays in the conversation, with the reason in place of the results of its '
    'calls, or as a message of the user; if that is longer than a prompt may be, it leaves. retry: it leaves, and the '
    'next proposal answers the same prompt. What is learned is on the prompt without it.',
  )
  # An edited answer that is longer than a completion may be is learned from the teacher in any case.
  learn_edits: Literal['direct', 'teacher'] = Field(
    'direct',
    description='direct: an edited call is learned by cross-entropy, and the proposed one as unwanted; teacher: from '
    'the teacher, which reads the edited call.',
  )

  def to_json(self) -> dict[str, Any]:
    """Return the settings as JSON, fields by name."""
    return dataclasses.asdict(self)

  def check(self, serve: ServeConfig, *, max_completion: int, vocab_size: int) -> None:
    """Raise InvalidRequest for settings that the service does not allow.

    Args:
      serve: the settings of the service.
      max_completion: the most tokens of a completion.
      vocab_size: the number of tokens in the vocabulary of the model.
    """
    if self.teacher is not None:
      check_teacher(self.teacher)
    Guards.of(serve.guards, self.guards)
    steps = learning_of(self.update, serve.learning, serve.topk).steps
    if not 1 <= steps <= serve.limits.max_steps:
      raise InvalidRequest(
        f'steps must be between 1 and {serve.limits.max_steps}, not {short_repr(steps)}.', field='update.steps'
      )
    together = self.min_sdpo_examples + self.rehearse
    if together > serve.limits.max_items:
      raise InvalidRequest(
        f'min_sdpo_examples={self.min_sdpo_examples} and rehearse={self.rehearse} add up to {together} completions, '
        f'more than the limit of {serve.limits.max_items} (serve.limits.max_items): lower one of them.',
        field='min_sdpo_examples',
      )
    self.options(None).checked(max_completion=max_completion, vocab_size=vocab_size)

  def options(self, seed: int | None, stop_token_ids: Sequence[int] = ()) -> SampleOptions:
    """Return the sampling options of proposals.

    Args:
      seed: the seed of sampling; None: a random one.
      stop_token_ids: tokens that end a proposal, besides those of the model.
    """
    return SampleOptions(**self.sampling, seed=seed, stop_token_ids=tuple(stop_token_ids))


@dataclasses.dataclass(frozen=True)
class AgentSession:
  """A session: a conversation with an adapter that learns from a person's decisions on its proposals."""

  id: str  # 'ses-…'.
  adapter: str  # The id of the adapter.
  created: float  # Seconds since the epoch.
  settings: SessionSettings
  tool_form: Form | None  # The form of calls that the model writes; None: there are no tools.
  written: Mapping[str, Any]  # How its messages are tokenized, see `conversation.written_by`.
  token: str  # The SHA-256 of the session's token, in hex.
  revision: int = 0  # The number of changes so far, which detects concurrent ones.

  def to_json(self) -> dict[str, Any]:
    """Return the session as JSON for clients, without token and revision."""
    shown = {name: getattr(self, name) for name in ('id', 'adapter', 'created', 'settings', 'tool_form')}
    return {**shown, 'settings': self.settings.to_json()}


@dataclasses.dataclass(frozen=True)
class Decision:
  """A person's decision on a proposal."""

  kind: Literal['approve', 'deny', 'edit']
  correction: str | None = None  # What is wrong with the proposal, in words.
  arguments: Mapping[str, Any] | None = None  # For an edit: the new arguments.
  call: int = 0  # For an edit: the index of the call.

  def __post_init__(self):
    """Raise InvalidRequest for fields that do not go together."""
    if (self.arguments is None) == (self.kind == 'edit'):
      raise InvalidRequest(
        "An edit needs the new arguments of the call: send 'arguments'."
        if self.kind == 'edit'
        else f'Only an edit takes arguments, and the decision is {self.kind}: leave them out.',
        field='arguments',
      )
    if self.kind == 'approve' and self.correction is not None:
      raise InvalidRequest('An approval takes no correction: leave it out, or deny the proposal.', field='correction')

  def to_json(self) -> dict[str, Any]:
    """Return the decision as JSON; only edits have arguments and call."""
    found = {'kind': self.kind, 'correction': self.correction}
    return {**found, 'arguments': dict(self.arguments), 'call': self.call} if self.kind == 'edit' else found


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class ToolResult:
  """The result of a tool call, as the client reports it."""

  ok: bool = Field(description='Whether the tool succeeded.')
  text: Text = Field(description='The output that the model reads; after a failure with a sentence about it before.')
  call: int = Field(0, ge=0, description='The index of the call in the proposal.')
  exit_code: int | None = Field(None, ge=-(2**31), lt=2**31, description='The exit code of a command.')
  stderr: Text | None = Field(None, description='The end of the stderr of a command, unless the text contains it.')
  field: Label | None = Field(None, description='The name of the invalid argument.')
  line: int | None = Field(None, ge=0, le=2**53, description='The line of the file, from 1, at which the tool failed.')


@dataclasses.dataclass(frozen=True)
class MovedToken:
  """A token of an answer whose log-prob changed with the new version."""

  position: int  # The index in the answer.
  token: int  # The token id.
  text: str
  before: float  # The log-prob before learning.
  after: float  # The log-prob after learning.


@dataclasses.dataclass(frozen=True)
class MovedAnswers:
  """The log-probs of whole answers on the prompt of a lesson, before and after learning; None: not measured."""

  turn: int
  rejected: tuple[float | None, ...] | None  # Of the proposal that was denied or edited.
  wanted: tuple[float | None, ...] | None  # Of the edited proposal.


@pydantic.dataclasses.dataclass(frozen=True)
class LearnedTurns:
  """The result of learning from turns of a session."""

  version_before: int
  version_after: int = Field(description='Equal to version_before if nothing was committed.')
  accepted: bool = Field(description='Whether no guard rejected a new version, and enough examples were there.')
  reason: str | None = Field(description='Why a guard rejected the new version; null: none did.')
  turns: tuple[int, ...] = Field((), description='The numbers of the turns that were learned from.')
  waiting: int = Field(0, description='The number of examples that wait until there are min_sdpo_examples.')
  divergence_before: float | None = Field(
    None,
    description="KL(teacher‖student) in nats, the mean over the tokens of the answer, from the teacher's most likely "
    'tokens and a tail bucket; null: not measured.',
  )
  divergence_after: float | None = Field(None, description='Likewise for the new version, to the same teacher.')
  moved: tuple[MovedToken, ...] = Field(
    (), description='The tokens whose log-probs changed most, the largest change first.'
  )
  seconds: float | None = Field(None, description='Null: the process ended after learning, before it noted more.')
  answers: tuple[MovedAnswers, ...] = Field(
    (),
    description='For each turn that was denied or edited, the log-probs [before, after] of the whole answer on the '
    "lesson's prompt: rejected, and after an edit wanted. They are those of the new version, even if it was rejected.",
  )
  warnings: tuple[str, ...] = Field((), description='As in a feedback, or about answers that moved wrongly.')
  unchanged: bool = Field(False, description='Whether every gradient was 0: nothing was learned, no version made.')

  def to_json(self) -> dict[str, Any]:
    """Return the result as JSON, fields by name."""
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class SessionTurn:
  """A proposal, the messages before it, the decision on it, and the results."""

  n: int  # 0, 1, …
  messages: Sequence[Mapping[str, str]]  # The messages between the previous turn and this one.
  version: int  # The version of the adapter that proposed it.
  sample_id: str
  prompt_tokens: Sequence[int]
  tokens: Sequence[int]  # As they were sampled.
  log_probs: np.ndarray = dataclasses.field(compare=False)  # [T] float32 when sampled, at temperature 1.
  text: str
  said: str  # The text without thinking and calls.
  calls: Sequence[ToolCall]
  fault: str | None  # Why something that looks like a call is invalid.
  status: Status
  created: float  # Seconds since the epoch.
  decision: Decision | None = None
  results: Sequence[ToolResult] = ()  # One for each call, once the tools have run.
  learned: LearnedTurns | None = None  # What was learned from the decision, or later from tool results.
  reused_tokens: int = 0  # Prompt tokens whose keys and values came from a cached prefix.
  compacted: bool = False  # Whether older parts of the conversation were left out before this turn, which was full.
  kept_tokens: Sequence[int] | None = None  # The tokens that replace `tokens` in the conversation, after an edit.
  told: str | None = None  # What the model reads after a denied proposal that stays in the conversation; None: it left.

  @property
  def answer_tokens(self) -> Sequence[int]:
    """The tokens of the proposal in the conversation, as edited."""
    return self.tokens if self.kept_tokens is None else self.kept_tokens

  @property
  def joins(self) -> bool:
    """Whether the turn was accepted as part of the conversation."""
    return self.status in ('approved', 'edited', 'answered')

  @property
  def called(self) -> Sequence[ToolCall]:
    """The calls to run, with the arguments as edited."""
    return edited(self.calls, self.decision) if self.status == 'edited' else self.calls

  def digest(self, calls: Sequence[ToolCall]) -> str:
    """Return the SHA-256 of the turn with these calls, in hex; no other turn has the same one."""
    shown = [self.n, self.sample_id, self.text, [dataclasses.asdict(call) for call in calls]]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()

  def to_json(self) -> dict[str, Any]:
    """Return the turn as JSON for clients, without the log-probs."""
    return {
      **{name: value for name, value in vars(self).items() if name != 'log_probs'},
      'calls': [dataclasses.asdict(call) for call in self.calls],
      'decision': None if self.decision is None else self.decision.to_json(),
      'results': [dataclasses.asdict(result) for result in self.results],
      'learned': None if self.learned is None else self.learned.to_json(),
      'digest': self.digest(self.called),
      'called': [
        {'name': call.name, 'arguments': json.dumps(dict(call.arguments), ensure_ascii=False, indent=2)}
        for call in self.called
      ],
    }


@dataclasses.dataclass(frozen=True)
class SessionState:
  """The current state of a session."""

  session: AgentSession
  turns: Sequence[SessionTurn]  # From the newest turn that joined the conversation on; all turns if none has.

  @property
  def number(self) -> int:
    """The number of the newest turn, −1 if there is none."""
    return self.turns[-1].n if self.turns else -1

  @property
  def answered(self) -> SessionTurn | None:
    """The newest turn that joined the conversation; None: there is none."""
    return self.turns[0] if self.turns and self.turns[0].joins else None

  @property
  def denied(self) -> Sequence[SessionTurn]:
    """The denied turns since then that stay in the conversation."""
    return [turn for turn in self.turns if turn.told is not None]


@dataclasses.dataclass(frozen=True)
class TeacherTexts:
  """The texts that the teacher reads besides the conversation."""

  demonstration: str | None = None  # What should have been proposed.
  feedback: str | None = None  # A person's comment on the proposal.
  environment: str | None = None  # The output of running it.

  @property
  def whole(self) -> str | None:
    """Feedback and environment as one text; None: both are empty."""
    return '\n\n'.join(dict.fromkeys(text for text in (self.feedback, self.environment) if text)) or None

  def __bool__(self) -> bool:
    """Return whether there is any text for the teacher."""
    return any(text and text.strip() for text in dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class SessionExample:
  """An example to learn from, made from a turn."""

  session: str
  n: int  # The number of the turn.
  kind: str  # A turn has at most one example of each kind.
  state: Literal['waiting', 'learned', 'rejected']  # Rejected: by a guard.
  head: int  # The version of the adapter when the example was made; only later ones can have learned it.
  versions: Sequence[int]  # The versions in which it was learned.
  teacher_prompt: Sequence[int]
  said: TeacherTexts
  # The prompt without the denied proposals right before the turn; None: there is none, and it is that of the turn.
  asked: Sequence[int] | None = None
  direct: bool = False  # Whether the edited answer is learned without a teacher.
  id: int | None = None  # Of its row; larger for later ones. None: it is not stored.


def edited(calls: Sequence[ToolCall], decision: Decision) -> tuple[ToolCall, ...]:
  """Return the calls of a turn with the new arguments of an edit."""
  changed = ToolCall(calls[decision.call].name, decision.arguments)
  return (*calls[: decision.call], changed, *calls[decision.call + 1 :])
