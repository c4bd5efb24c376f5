"""Database tables of sessions: sessions, their turns, and examples to learn from.

Rows are on the disk when their transaction ends, and are erased with their adapter. The details of a version name the
examples that it has learned: if the process dies after the commit of a version, before its examples are marked here,
`reconcile` marks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json

import numpy as np

from sdpo_jax.serving.errors import NotFound, TurnConflict
from sdpo_jax.serving.sessions.session_records import (
  AgentSession,
  Decision,
  LearnedTurns,
  SessionExample,
  SessionSettings,
  SessionState,
  SessionTurn,
  TeacherTexts,
  ToolResult,
)
from sdpo_jax.serving.store.connections import Rows
from sdpo_jax.serving.store.database import ALL, Database, put
from sdpo_jax.serving.tool_calls import ToolCall

REHEARSAL = 'rehearsal'  # The kind of examples that are learned with others, any number of times.
SOURCE = 'session'  # Key in the details of a version: {'id': …, 'turns': […], 'examples': [[n, kind], …]}.
_SESSION = 'id, adapter, created, token, revision, record'
_TURN = 'n, prompt_tokens, tokens, log_probs, kept_tokens, record'
_EXAMPLE = 'id, session, n, kind, state, head, versions, teacher_prompt, record'
_REAL = f"(kind != '{REHEARSAL}' OR versions != '[]')"

# Reading.


def session(database: Database, adapter: str, id: str) -> AgentSession | None:
  """Return a session of an adapter by its id; None: there is none."""
  rows = database.read(f'SELECT {_SESSION} FROM sessions WHERE id = ? AND adapter = ?', (id, adapter))
  return _session(rows[0]) if rows else None


def sessions(database: Database, adapter: str, after: tuple[float, str], limit: int) -> list[AgentSession]:
  """Return the sessions of an adapter, the oldest first, made after a time or with a later id."""
  query = f'SELECT {_SESSION} FROM sessions WHERE adapter = ? AND (created, id) > (?, ?) ORDER BY created, id LIMIT ?'
  return [_session(row) for row in database.read(query, (adapter, *after, limit))]


def count(database: Database, adapter: str) -> int:
  """Return the number of sessions of an adapter."""
  return database.read('SELECT count(*) FROM sessions WHERE adapter = ?', (adapter,))[0][0]


def turns(database: Database, session: str, after: int = -1, limit: int = ALL) -> list[SessionTurn]:
  """Return the turns of a session with numbers above `after` in order."""
  query = f'SELECT {_TURN} FROM session_turns WHERE session = ? AND n > ? ORDER BY n LIMIT ?'
  return [_turn(row) for row in database.read(query, (session, after, limit))]


def turn(database: Database, session: str, n: int) -> SessionTurn | None:
  """Return a turn of a session by its number; None: there is none."""
  rows = database.read(f'SELECT {_TURN} FROM session_turns WHERE session = ? AND n = ?', (session, n))
  return _turn(rows[0]) if rows else None


def turns_back(database: Database, session: str, before: int, count: int) -> list[SessionTurn]:
  """Return up to `count` turns of a session with numbers below `before`, the newest first."""
  query = f'SELECT {_TURN} FROM session_turns WHERE session = ? AND n < ? ORDER BY n DESC LIMIT ?'
  return [_turn(row) for row in database.read(query, (session, before, count))]


def state(database: Database, session: AgentSession, before: int = 2**62) -> SessionState:
  """Return a session with the turns with numbers below `before`, from the newest that joined the conversation on."""
  found: list[SessionTurn] = []
  while not found or not found[-1].joins:
    page = turns_back(database, session.id, found[-1].n if found else before, 1)
    if not page:
      break
    found += page
  return SessionState(session, found[::-1])


def examples(database: Database, adapter: str, after: int = -1, limit: int = ALL, **only: str) -> list[SessionExample]:
  """Return the examples of an adapter with ids above `after` in order; `only` may select a `session` and a `state`.

  Rehearsals that no version has learned are left out.
  """
  chosen = ' AND '.join(['adapter = ?', 'id > ?', _REAL, *(f'{column} = ?' for column in only)])
  query = f'SELECT {_EXAMPLE} FROM session_examples WHERE {chosen} ORDER BY id LIMIT ?'
  return [_example(row) for row in database.read(query, (adapter, after, *only.values(), limit))]


# Writing, within a transaction.


def put_session(rows: Rows, session: AgentSession) -> None:
  """Insert a session."""
  record = {'settings': session.settings.to_json(), 'tool_form': session.tool_form, 'written': session.written}
  columns = {name: getattr(session, name) for name in ('id', 'adapter', 'created', 'token', 'revision')}
  put(rows, 'sessions', {**columns, 'record': json.dumps(record)})


def advance(rows: Rows, session: AgentSession, newest: int) -> None:
  """Increment the revision of a session, whose newest turn is `newest`, for the error.

  Raises:
    TurnConflict: the session has changed since it was read.
    NotFound: the session was deleted.
  """
  query = 'UPDATE sessions SET revision = revision + 1 WHERE id = ? AND revision = ?'
  if rows.execute(query, (session.id, session.revision)).rowcount == 1:
    return
  if not rows.execute('SELECT 1 FROM sessions WHERE id = ?', (session.id,)).fetchall():
    raise NotFound(f'The session {session.id} does not exist any more.')
  raise TurnConflict('The session has changed meanwhile: read its turns, and retry.', current=newest)


def put_turn(rows: Rows, session: AgentSession, turn: SessionTurn) -> None:
  """Insert a turn of a session."""
  values = {
    'session': session.id,
    'n': turn.n,
    'adapter': session.adapter,
    'prompt_tokens': _bytes(turn.prompt_tokens),
    'tokens': _bytes(turn.tokens),
    'log_probs': np.asarray(turn.log_probs, '<f4').tobytes(),
    'kept_tokens': _bytes(turn.kept_tokens),
    'record': _record(turn),
  }
  put(rows, 'session_turns', values)


def change_turn(rows: Rows, session: AgentSession, turn: SessionTurn) -> None:
  """Replace the record of a turn, and its tokens in the conversation."""
  query = 'UPDATE session_turns SET record = ?, kept_tokens = ? WHERE session = ? AND n = ?'
  rows.execute(query, (_record(turn), _bytes(turn.kept_tokens), session.id, turn.n))


def put_example(rows: Rows, adapter: str, example: SessionExample) -> None:
  """Insert an example, unless its turn has one of the same kind."""
  columns = {name: getattr(example, name) for name in ('session', 'n', 'kind', 'state', 'head')}
  written = {
    'versions': json.dumps(list(example.versions)),
    'teacher_prompt': _bytes(example.teacher_prompt),
    'record': json.dumps({**dataclasses.asdict(example.said), 'asked': example.asked, 'direct': example.direct}),
  }
  put(rows, 'session_examples', {'adapter': adapter, **columns, **written}, key='session, n, kind', replace=False)


def note_learned(
  rows: Rows, references: Iterable[tuple[str, int, str]], version: int | None, learned: LearnedTurns
) -> None:
  """Store that examples were learned, or rejected, and the result in their turns.

  Args:
    rows: the connection within the transaction.
    references: session, turn and kind of each example; missing ones are skipped.
    version: the version in which they were learned; None: a guard has rejected it.
    learned: the result to store in the turns.
  """
  for session, n, kind in references:
    found = rows.execute(
      'SELECT id, versions FROM session_examples WHERE session = ? AND n = ? AND kind = ?', (session, n, kind)
    ).fetchall()
    for id, versions in found:
      every = {*json.loads(versions), *([] if version is None else [version])}
      values = ('learned' if every else 'rejected', json.dumps(sorted(every)), id)
      rows.execute('UPDATE session_examples SET state = ?, versions = ? WHERE id = ?', values)
    if kind != REHEARSAL:
      query = 'SELECT record FROM session_turns WHERE session = ? AND n = ?'
      for (record,) in rows.execute(query, (session, n)).fetchall():
        values = (json.dumps({**json.loads(record), 'learned': learned.to_json()}), session, n)
        rows.execute('UPDATE session_turns SET record = ? WHERE session = ? AND n = ?', values)


def erase_session(rows: Rows, session: str) -> None:
  """Erase a session, its turns and its examples."""
  rows.execute('DELETE FROM sessions WHERE id = ?', (session,))
  for table in ('session_turns', 'session_examples'):
    rows.execute(f'DELETE FROM {table} WHERE session = ?', (session,))


# Recovery of notes.


def reconcile(database: Database, session: AgentSession) -> None:
  """Mark those waiting examples of a session that a version has already learned.

  The caller must hold the lock of the session: the example of a change under way waits until its result is noted, too.
  """
  waiting = examples(database, session.adapter, session=session.id, state='waiting')
  if not waiting:
    return
  open_ones = {(example.n, example.kind) for example in waiting}
  query = (
    "SELECT number, details FROM versions WHERE adapter = ? AND number > ? AND reason = 'feedback' ORDER BY number"
  )
  for number, details in database.read(query, (session.adapter, min(example.head for example in waiting))):
    made = json.loads(details)
    source = made.get(SOURCE)
    if not isinstance(source, Mapping) or source['id'] != session.id:
      continue
    named = [(n, kind) for n, kind in source['examples']]
    if open_ones.isdisjoint(named):
      continue
    said = LearnedTurns(number - 1, number, True, None, source['turns'], warnings=made['warnings'])
    with database.writing(full=True) as rows:
      note_learned(rows, [(session.id, *each) for each in named], number, said)


# Rows.


def _session(row: tuple) -> AgentSession:
  id, adapter, created, token, revision, record = row
  record = json.loads(record)
  # Sessions from before these settings go on as they were.
  settings = SessionSettings(**{'after_denial': 'retry', 'learn_edits': 'teacher', **record['settings']})
  return AgentSession(id, adapter, created, settings, record['tool_form'], record['written'], token, revision)


def _turn(row: tuple) -> SessionTurn:
  n, prompt, tokens, log_probs, kept, record = row
  said = json.loads(record)
  return SessionTurn(
    **{
      **said,
      'n': n,
      'prompt_tokens': _ids(prompt),
      'tokens': _ids(tokens),
      'log_probs': np.frombuffer(log_probs, '<f4'),
      'kept_tokens': _ids(kept),
      'calls': tuple(ToolCall(**call) for call in said['calls']),
      'decision': None if said['decision'] is None else Decision(**said['decision']),
      'results': tuple(ToolResult(**result) for result in said['results']),
      'learned': None if said['learned'] is None else LearnedTurns(**said['learned']),
    }
  )


def _record(turn: SessionTurn) -> str:
  """Return the fields of a turn without a column of their own, as JSON."""
  other = ('n', 'prompt_tokens', 'tokens', 'kept_tokens', 'digest', 'called')  # In columns, or derived.
  return json.dumps({name: value for name, value in turn.to_json().items() if name not in other})


def _example(row: tuple) -> SessionExample:
  id, *first, versions, teacher_prompt, record = row
  said = json.loads(record)
  more = said.pop('asked', None), said.pop('direct', False)
  return SessionExample(*first, json.loads(versions), _ids(teacher_prompt), TeacherTexts(**said), *more, id)


def _bytes(tokens: Sequence[int] | None) -> bytes | None:
  return None if tokens is None else np.asarray(tokens, '<i4').tobytes()


def _ids(content: bytes | None) -> list[int] | None:
  return None if content is None else np.frombuffer(content, '<i4').tolist()
