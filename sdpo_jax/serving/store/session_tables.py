"""The tables of sessions in the database: sessions, their turns, and the examples to learn from them.

Rows are acknowledged, and on the disk, when their transaction ends. All rows name their adapter and are erased with it.
An example waits for a version whose details name it: if a process dies between the commit of the version and the note
of it here, `reconcile` makes the note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import sqlite3
from typing import Any, Literal

import numpy as np

from sdpo_jax.serving.store.database import Database

State = Literal['waiting', 'learned', 'rejected']


@dataclasses.dataclass(frozen=True)
class SessionRow:
  """A session as stored."""

  id: str
  adapter: str
  created: float
  token: str  # The SHA-256 of its token, in hex.
  revision: int  # The number of its changes.
  record: Mapping[str, Any]  # All other fields, as JSON.


@dataclasses.dataclass(frozen=True)
class TurnRow:
  """A turn as stored."""

  n: int
  prompt_tokens: Sequence[int]
  tokens: Sequence[int]
  log_probs: np.ndarray  # [T] float32.
  kept_tokens: Sequence[int] | None
  record: Mapping[str, Any]  # All other fields, as JSON.


@dataclasses.dataclass(frozen=True)
class ExampleRow:
  """An example as stored."""

  session: str
  n: int  # The number of the turn.
  kind: str  # A turn has at most one example of each kind.
  state: State
  head: int  # The adapter's version when this was written; it can only be learned in a later one.
  versions: Sequence[int]  # The versions in which it was learned.
  teacher_prompt: Sequence[int]
  record: Mapping[str, Any]  # All other fields, as JSON.


# Reading.


def session(database: Database, adapter: str, id: str) -> SessionRow | None:
  """Return a session of an adapter; None: there is none of this id."""
  rows = database.read(f'SELECT {_SESSION} FROM sessions WHERE id = ? AND adapter = ?', (id, adapter))
  return _session(rows[0]) if rows else None


def sessions(database: Database, adapter: str) -> list[SessionRow]:
  """Return the sessions of an adapter, the oldest first."""
  query = f'SELECT {_SESSION} FROM sessions WHERE adapter = ? ORDER BY created, id'
  return [_session(row) for row in database.read(query, (adapter,))]


def turns(database: Database, session: str, first: int = 0) -> list[TurnRow]:
  """Return the turns of a session from number `first` on, in order."""
  query = f'SELECT {_TURN} FROM session_turns WHERE session = ? AND n >= ? ORDER BY n'
  return [_turn(row) for row in database.read(query, (session, first))]


def turn(database: Database, session: str, n: int) -> TurnRow | None:
  """Return a turn of a session; None: there is none of this number."""
  rows = database.read(f'SELECT {_TURN} FROM session_turns WHERE session = ? AND n = ?', (session, n))
  return _turn(rows[0]) if rows else None


def turns_back(database: Database, session: str, before: int, count: int) -> list[TurnRow]:
  """Return up to `count` turns of a session with numbers below `before`, the newest first."""
  query = f'SELECT {_TURN} FROM session_turns WHERE session = ? AND n < ? ORDER BY n DESC LIMIT ?'
  return [_turn(row) for row in database.read(query, (session, before, count))]


def examples(
  database: Database, adapter: str, *, session: str | None = None, state: State | None = None
) -> list[ExampleRow]:
  """Return an adapter's examples, optionally of one session or in one state, in the order they were written."""
  query, values = f'SELECT {_EXAMPLE} FROM session_examples WHERE adapter = ?', [adapter]
  for column, value in (('session', session), ('state', state)):
    if value is not None:
      query, values = f'{query} AND {column} = ?', [*values, value]
  return [_example(row) for row in database.read(f'{query} ORDER BY id', values)]


# Writing, within a transaction.


def put_session(rows: sqlite3.Connection, row: SessionRow) -> None:
  """Insert a session."""
  values = (row.id, row.adapter, row.created, row.token, row.revision, json.dumps(row.record))
  rows.execute(f'INSERT INTO sessions ({_SESSION}) VALUES (?, ?, ?, ?, ?, ?)', values)


def advance(rows: sqlite3.Connection, session: str, revision: int) -> bool:
  """Increment the revision of a session; return False if it is missing or has another revision."""
  query = 'UPDATE sessions SET revision = revision + 1 WHERE id = ? AND revision = ?'
  return rows.execute(query, (session, revision)).rowcount == 1


def put_turn(rows: sqlite3.Connection, session: str, adapter: str, row: TurnRow) -> None:
  """Insert a turn."""
  rows.execute(
    f'INSERT INTO session_turns (session, adapter, {_TURN}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)',
    (
      session,
      adapter,
      row.n,
      _ids(row.prompt_tokens),
      _ids(row.tokens),
      np.asarray(row.log_probs, '<f4').tobytes(),
      None if row.kept_tokens is None else _ids(row.kept_tokens),
      json.dumps(row.record),
    ),
  )


def change_turn(
  rows: sqlite3.Connection, session: str, n: int, record: Mapping[str, Any], kept: Sequence[int] | None
) -> None:
  """Replace the record of a turn, and its tokens in the conversation."""
  query = 'UPDATE session_turns SET record = ?, kept_tokens = ? WHERE session = ? AND n = ?'
  rows.execute(query, (json.dumps(record), None if kept is None else _ids(kept), session, n))


def put_example(rows: sqlite3.Connection, adapter: str, row: ExampleRow) -> None:
  """Insert an example, unless there is one of the same turn and kind."""
  rows.execute(
    f'INSERT OR IGNORE INTO session_examples (adapter, {_EXAMPLE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)',
    (
      adapter,
      row.session,
      row.n,
      row.kind,
      row.state,
      row.head,
      json.dumps(list(row.versions)),
      _ids(row.teacher_prompt),
      json.dumps(row.record),
    ),
  )


def note_learned(
  rows: sqlite3.Connection, references: Iterable[tuple[str, int, str]], version: int | None, said: Mapping[str, Any]
) -> None:
  """Store that examples were learned in a version, and the result in their turns.

  Args:
    rows: the connection of the transaction.
    references: session, turn and kind of each example; missing ones are skipped.
    version: None: a guard has rejected it.
    said: the result as JSON, the new `learned` of the turns.
  """
  for session, n, kind in references:
    found = rows.execute(
      'SELECT id, versions FROM session_examples WHERE session = ? AND n = ? AND kind = ?', (session, n, kind)
    ).fetchall()
    for id, versions in found:
      learned = json.loads(versions) + ([] if version is None else [version])
      state = 'rejected' if not learned else 'learned'
      values = (state, json.dumps(sorted(set(learned))), id)
      rows.execute('UPDATE session_examples SET state = ?, versions = ? WHERE id = ?', values)
    if kind != REHEARSAL:
      query = 'SELECT record FROM session_turns WHERE session = ? AND n = ?'
      for (record,) in rows.execute(query, (session, n)).fetchall():
        values = (json.dumps({**json.loads(record), 'learned': said}), session, n)
        rows.execute('UPDATE session_turns SET record = ? WHERE session = ? AND n = ?', values)


def erase_session(rows: sqlite3.Connection, session: str) -> None:
  """Erase a session, its turns and its examples."""
  rows.execute('DELETE FROM sessions WHERE id = ?', (session,))
  for table in ('session_turns', 'session_examples'):
    rows.execute(f'DELETE FROM {table} WHERE session = ?', (session,))


# Recovery of notes.

REHEARSAL = 'rehearsal'  # The kind of examples that are learned beside others, any number of times.
SOURCE = 'session'  # Key in the details of a version: {'id': …, 'turns': […], 'examples': [[n, kind], …]}.


def reconcile(database: Database, adapter: str | None = None) -> int:
  """Mark the waiting examples that were learned already according to the versions; return how many versions name any.

  Args:
    database: database that knows the versions.
    adapter: the adapter of the examples; None: all.
  """
  query = "SELECT adapter, min(head) FROM session_examples WHERE state = 'waiting'"
  if adapter is None:
    waiting = database.read(f'{query} GROUP BY adapter')
  else:
    waiting = database.read(f'{query} AND adapter = ? GROUP BY adapter', (adapter,))
  noted = 0
  for id, head in waiting:
    open_ones = {(row.session, row.n, row.kind) for row in examples(database, id, state='waiting')}
    query = (
      "SELECT number, details FROM versions WHERE adapter = ? AND number > ? AND reason = 'feedback' ORDER BY number"
    )
    for number, details in database.read(query, (id, head)):
      source = json.loads(details).get(SOURCE)
      if not isinstance(source, Mapping):
        continue
      named = [(source['id'], n, kind) for n, kind in source['examples']]
      if open_ones.isdisjoint(named):
        continue
      said = {
        'version_before': number - 1,
        'version_after': number,
        'accepted': True,
        'reason': None,
        'turns': list(source['turns']),
        'waiting': 0,
        'divergence_before': None,
        'divergence_after': None,
        'moved': [],
        'seconds': None,
      }
      with database.writing(full=True) as rows:
        note_learned(rows, named, number, said)
      noted += 1
  return noted


_SESSION = 'id, adapter, created, token, revision, record'
_TURN = 'n, prompt_tokens, tokens, log_probs, kept_tokens, record'
_EXAMPLE = 'session, n, kind, state, head, versions, teacher_prompt, record'


def _session(row: tuple) -> SessionRow:
  return SessionRow(*row[:-1], json.loads(row[-1]))


def _turn(row: tuple) -> TurnRow:
  n, prompt, tokens, log_probs, kept, record = row
  kept = None if kept is None else _list(kept)
  return TurnRow(n, _list(prompt), _list(tokens), np.frombuffer(log_probs, '<f4'), kept, json.loads(record))


def _example(row: tuple) -> ExampleRow:
  *first, versions, teacher_prompt, record = row
  return ExampleRow(*first, json.loads(versions), _list(teacher_prompt), json.loads(record))


def _ids(tokens: Sequence[int]) -> bytes:
  return np.asarray(tokens, '<i4').tobytes()


def _list(content: bytes) -> list[int]:
  return np.frombuffer(content, '<i4').tolist()
