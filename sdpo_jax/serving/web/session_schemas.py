"""The bodies and responses of the routes of sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sdpo_jax.serving.sessions.session_records import JsonObject, Label, LearnedTurns, Text, ToolResult
from sdpo_jax.serving.web.schemas import Listed, PageSaid, RequestBody, ResponseBody


class SessionMessage(RequestBody):
  """A message of a session."""

  role: Literal['user', 'tool'] = Field(description='The author of the message.')
  content: Text


class ProposeRequest(RequestBody):
  """A request for the next proposal."""

  messages: Listed[SessionMessage] = Field(
    default_factory=list, description='The messages since the last proposal; empty after a denial: try again.'
  )
  seed: int | None = Field(None, description='The seed of sampling; null: a random one.')
  stream: bool = Field(False, description='Whether to stream server-sent events: draft {delta}, and at the end turn.')


class RetryRequest(RequestBody):
  """A request for an alternative to a turn."""

  seed: int | None = Field(None, description='The seed of sampling; null: a random one.')
  stream: bool = Field(False, description='Whether to stream server-sent events: draft {delta}, and at the end turn.')


class DecisionRequest(RequestBody):
  """A person's decision on a proposal."""

  decision: Literal['approve', 'deny', 'edit']
  digest: Label | None = Field(
    None,
    description='The digest of the turn as it was shown to the person; if the turn has another one, the response is '
    '409 and nothing is decided. Send it always; only clients from before it existed may leave it out.',
  )
  correction: Text | None = Field(
    None, description='For deny and edit: what is wrong, or what would be right, in words.'
  )
  arguments: JsonObject | None = Field(None, description='For edit: the new arguments of the call.')
  call: int = Field(0, ge=0, description='For edit: the index of the call in the proposal.')


class ResultsRequest(RequestBody):
  """The results of all calls of a turn."""

  results: Annotated[list[ToolResult], Field(min_length=1, max_length=64)]
  digest: Label | None = Field(
    None, description='The digest of the turn, after the decision, whose calls were run; otherwise as in a decision.'
  )


class Nothing(RequestBody):
  """An empty body: {}."""


# Responses.


class SessionSaid(ResponseBody):
  """A session."""

  id: str
  adapter: str = Field(description='The id of the adapter.')
  created: float = Field(description='Seconds since the epoch.')
  settings: dict[str, Any]
  tool_form: str | None = Field(None, description='The form of tool calls, such as hermes; null without tools.')


class SessionsSaid(PageSaid):
  """The sessions of an adapter, the oldest first."""

  sessions: list[SessionSaid]


class OpenedSaid(ResponseBody):
  """A new session and its token."""

  session: SessionSaid
  token: str = Field(description='The header X-Session-Token of all changes of the session; returned only once.')


class TurnSaid(ResponseBody):
  """A proposal of the model, the decision on it, and the results."""

  n: int = Field(description='The number of the turn, from 0.')
  status: str = Field(description='open, approved, edited, denied or answered (an answer without calls).')
  messages: list[dict[str, Any]] = Field(description='The messages between the previous turn and this one.')
  version: int = Field(description='The version of the adapter that proposed it.')
  sample_id: str
  prompt_tokens: list[int]
  tokens: list[int]
  text: str = Field(description='The whole text that the model wrote.')
  said: str = Field(description='The text without thinking and calls.')
  calls: list[dict[str, Any]] = Field(description='For each call: name and arguments, as proposed.')
  called: list[dict[str, str]] = Field(
    description='The calls to run, as edited: name, and arguments as JSON text, since parsers may round large numbers.'
  )
  digest: str = Field(description='Identifies the turn and the calls to run; decisions and results are sent with it.')
  fault: str | None = Field(None, description='Why something that looks like a call is invalid.')
  decision: dict[str, Any] | None = None
  results: list[dict[str, Any]] = Field(description='The results of its calls, once the tools have run.')
  learned: dict[str, Any] | None = None
  told: str | None = Field(
    None, description='What the model reads behind a denied proposal that stays in the conversation.'
  )
  created: float = Field(description='Seconds since the epoch.')
  kept_tokens: list[int] | None = Field(
    None, description='The tokens that replace `tokens` in the conversation; null: none were replaced.'
  )
  reused_tokens: int = Field(description='Prompt tokens whose keys and values came from a cached prefix.')
  compacted: bool = Field(
    description='Whether older parts of the conversation were left out before it, as it was full.'
  )


class SessionTurnsSaid(PageSaid):
  """A session with its turns."""

  session: SessionSaid
  turns: list[TurnSaid]


class ProposedSaid(ResponseBody):
  """A new turn."""

  turn: TurnSaid


class DecidedSaid(ResponseBody):
  """A turn after a decision or results, and what was learned from it."""

  turn: TurnSaid
  learned: LearnedTurns | None = None


class FlushedSaid(ResponseBody):
  """What was learned from the waiting examples."""

  learned: LearnedTurns | None = Field(None, description='Null: no example was waiting.')


class ReplayedSaid(ResponseBody):
  """What was learned in each step of a replay."""

  learned: list[LearnedTurns]
