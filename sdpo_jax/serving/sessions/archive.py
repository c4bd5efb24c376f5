"""Conversion between the sessions of the service and the rows of the store."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from sdpo_jax.serving.sessions.session_records import AgentSession, Decision, LearnedTurns, SessionTurn, ToolResult
from sdpo_jax.serving.sessions.session_settings import SessionSettings
from sdpo_jax.serving.store.session_tables import SessionRow, TurnRow
from sdpo_jax.serving.tool_calls import ToolCall

_TOKENS = ('n', 'prompt_tokens', 'tokens', 'log_probs', 'kept_tokens')  # Columns of a turn beside its record.


def session_row(session: AgentSession, token: str, written: Mapping[str, Any]) -> SessionRow:
  """Return the row of a new session.

  Args:
    session: the session.
    token: the digest of its token.
    written: how its messages become tokens, `exporting.written_by`.
  """
  record = {'settings': session.settings.to_json(), 'tool_form': session.tool_form, 'written': dict(written)}
  return SessionRow(session.id, session.adapter, session.created, token, 0, record)


def session_of(row: SessionRow, owner: str) -> AgentSession:
  """Return the session of a row."""
  settings = SessionSettings.from_json(row.record['settings'])
  return AgentSession(row.id, row.adapter, owner, row.created, settings, row.record['tool_form'])


def turn_row(turn: SessionTurn) -> TurnRow:
  """Return the row of a turn."""
  return TurnRow(turn.n, turn.prompt_tokens, turn.tokens, turn.log_probs, turn.kept_tokens, record_of(turn))


def record_of(turn: SessionTurn) -> dict[str, Any]:
  """Return a turn without its tokens and log-probs, as JSON."""
  return {name: value for name, value in turn.to_json().items() if name not in _TOKENS}


def turn_of(row: TurnRow) -> SessionTurn:
  """Return the turn of a row."""
  record: Mapping[str, Any] = row.record
  read = {
    'calls': tuple(ToolCall(call['name'], call['arguments']) for call in record['calls']),
    'decision': None if record['decision'] is None else Decision.from_json(record['decision']),
    'results': tuple(map(ToolResult.from_json, record['results'])),
    'learned': None if record['learned'] is None else LearnedTurns.from_json(record['learned']),
  }
  tokens = {field.name: getattr(row, field.name) for field in dataclasses.fields(row) if field.name in _TOKENS}
  return SessionTurn(**{**record, **read, **tokens})
