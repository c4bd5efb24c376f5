"""The bodies and responses of the routes of sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sdpo_jax.serving.web.schemas import Number, RequestBody, ResponseBody, Teacher, Text, Update

Label = Annotated[str, Field(max_length=200)]


class SessionSampling(RequestBody):
  """How proposals are drawn; absent fields take the defaults of completions."""

  max_tokens: int | None = Field(None, ge=1, description='Of a proposal; null: as many as are served at most.')
  temperature: Number | None = Field(None, ge=0)
  top_p: Number | None = Field(None, gt=0, le=1)
  top_k: int | None = Field(None, ge=-1)
  min_p: Number | None = Field(None, ge=0, lt=1)
  stop: Annotated[list[str], Field(max_length=64)] | None = None


class OpenSession(RequestBody):
  """The settings of a session, fixed when it is opened."""

  system: Text | None = Field(None, description='The message of the role system that the conversation begins with.')
  tools: list[dict[str, Any]] = Field(
    default_factory=list, description='JSON schemas of the tools that may be called, as chat templates take them.'
  )
  title: Label = Field('', description='A label, for people.')
  min_sdpo_examples: int = Field(1, ge=1, description='So many examples are learned together; fewer wait.')
  teacher: Teacher | None = Field(
    None, description="live, ema, lagged, base or frozen, or {kind: …} with more; null: the adapter's."
  )
  update: Update = Field(default_factory=Update)
  guards: dict[str, Number | None] | None = Field(None, description="As of feedback; null: the adapter's.")
  sampling: SessionSampling = Field(default_factory=SessionSampling)
  learn_from_results: bool = Field(False, description='Whether a tool that failed is a lesson, too.')
  rehearse: int = Field(
    0, ge=0, description='So many of the newest approved proposals are learned beside a correction, so that they stay.'
  )
  show_attempt: bool = Field(False, description='Whether the teacher reads the denied proposal, too.')


class SessionMessage(RequestBody):
  role: Literal['user', 'tool'] = Field(description='Who says it.')
  content: Text


class ProposeRequest(RequestBody):
  messages: list[SessionMessage] = Field(
    default_factory=list, description='What was said since the last proposal; none after a denial asks again.'
  )
  seed: int | None = Field(None, description='Null: another one every time.')
  stream: bool = Field(False, description='Server-sent events: draft {delta}, and at the end turn.')


class RetryRequest(RequestBody):
  seed: int | None = Field(None, description='Null: another one every time.')
  stream: bool = Field(False, description='Server-sent events: draft {delta}, and at the end turn.')


class DecisionRequest(RequestBody):
  decision: Literal['approve', 'deny', 'edit']
  correction: Text | None = Field(
    None, description='Of deny and edit: what was wrong, or what would have been right, in words.'
  )
  arguments: dict[str, Any] | None = Field(None, description='Of edit: what the call should have had.')
  call: int = Field(0, ge=0, description='Of edit: which call of the proposal it is.')


class ToolResultGiven(RequestBody):
  """What came of a call, on the machine where it was run."""

  call: int = Field(0, ge=0, description='Which call of the proposal it is.')
  ok: bool = Field(description='Whether the tool did what it was asked for.')
  text: Text = Field(description='What the model reads of it.')
  exit_code: int | None = Field(None, description='Of a command.')
  stderr: Text | None = Field(None, description='The end of what a command complained of.')
  field: Label | None = Field(None, description='The argument that was wrong.')
  line: int | None = Field(None, description='The line of the file at which it failed.')


class ResultsRequest(RequestBody):
  results: Annotated[list[ToolResultGiven], Field(min_length=1, max_length=64)]


class Nothing(RequestBody):
  """There is nothing more to say: {}."""


# Responses.


class SessionSaid(ResponseBody):
  id: str
  adapter: str = Field(description='Its id.')
  created: float = Field(description='Seconds since the epoch.')
  settings: dict[str, Any]
  tool_form: str | None = Field(None, description='How the model writes calls: hermes or llama3; null without tools.')


class SessionsSaid(ResponseBody):
  sessions: list[SessionSaid]


class OpenedSaid(ResponseBody):
  session: SessionSaid
  token: str = Field(description='For the header X-Session-Token of all that changes the session; told this one time.')


class TurnSaid(ResponseBody):
  n: int = Field(description='0, 1, …')
  status: str = Field(description='open, approved, edited, denied or answered (there is no call to decide on).')
  messages: list[dict[str, Any]] = Field(description='Messages between the turn before and this one.')
  version: int = Field(description='Of the adapter, which drew it.')
  sample_id: str
  prompt_tokens: list[int]
  tokens: list[int]
  text: str = Field(description='All that was drawn.')
  said: str = Field(description='The text beside the calls.')
  calls: list[dict[str, Any]] = Field(description='Of each call: name, arguments.')
  fault: str | None = Field(None, description='Why something that looks like a call is none.')
  decision: dict[str, Any] | None = None
  results: list[dict[str, Any]] = Field(description='Of its calls, once the tools have run.')
  learned: dict[str, Any] | None = None
  created: float = Field(description='Seconds since the epoch.')
  kept_tokens: list[int] | None = Field(
    None, description='What stands in the conversation in the place of tokens; null: these.'
  )
  reused_tokens: int = Field(description='Of the prompt, whose keys and values were there already.')


class LearnedSaid(ResponseBody):
  version_before: int
  version_after: int = Field(description='The same if nothing was committed.')
  accepted: bool
  reason: str | None = Field(None, description='Why not.')
  turns: list[int] = Field(description='Turns that were learned from.')
  waiting: int = Field(description='Examples that wait until there are min_sdpo_examples.')
  divergence_before: float | None = Field(None, description='Mean per token of the answer, teacher‖student, in nats.')
  divergence_after: float | None = Field(None, description='The same of the new version.')
  moved: list[dict[str, Any]] = Field(
    description='Tokens whose log-prob moved most: position, token, text, before, after.'
  )
  seconds: float | None = Field(None, description='Null: the process that learned it died before it could say more.')


class SessionTurnsSaid(ResponseBody):
  session: SessionSaid
  turns: list[TurnSaid]


class ProposedSaid(ResponseBody):
  turn: TurnSaid


class DecidedSaid(ResponseBody):
  turn: TurnSaid
  learned: LearnedSaid | None = None


class FlushedSaid(ResponseBody):
  learned: LearnedSaid | None = Field(None, description='Null: nothing waited.')


class ReplayedSaid(ResponseBody):
  learned: list[LearnedSaid]
