"""The SQLite database of the store: an index of adapters and versions, and samples, requests, feedback and intents.

Its rows about adapters and versions can be rebuilt from the root. A transaction with `full=True` is on the disk when it
ends; others survive a crash of the process, but perhaps not of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import secrets
import sqlite3
import threading
from typing import Any, Literal

import numpy as np

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.serving.errors import StorageFailed
from sdpo_jax.serving.records import AdapterRecord, Ancestor, SampleRecord, Version
from sdpo_jax.serving.store.blobs import make_private
from sdpo_jax.serving.store.versions import Head, RequestId, VersionManifest

_logger = logging.getLogger('sdpo_jax.serving')
ALL = 2**62  # More than there are rows.
SCHEMA = 2  # `user_version` of the file.
# Texts are stored as JSON in ASCII, since clients' texts may not be valid UTF-8.
_TABLES = """
CREATE TABLE meta (root TEXT NOT NULL);
CREATE TABLE adapters (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, head INTEGER NOT NULL, created REAL NOT NULL,
  settings TEXT NOT NULL, digest TEXT NOT NULL, origin TEXT NOT NULL, kept_from INTEGER NOT NULL, pinned TEXT NOT NULL,
  tag TEXT NOT NULL, deleted INTEGER NOT NULL DEFAULT 0);
CREATE INDEX adapters_of_owner ON adapters (owner, name);
CREATE TABLE versions (
  adapter TEXT NOT NULL, number INTEGER NOT NULL, parent INTEGER, reason TEXT, created REAL, digest TEXT, previous TEXT,
  details TEXT, request_key TEXT, request_body TEXT, damaged TEXT, PRIMARY KEY (adapter, number)) WITHOUT ROWID;
CREATE INDEX versions_by_request ON versions (request_key);
CREATE TABLE intents (adapter TEXT PRIMARY KEY, folder TEXT NOT NULL, version TEXT NOT NULL);
CREATE TABLE samples (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, adapter TEXT, version INTEGER, prompt_tokens BLOB, tokens BLOB,
  log_probs BLOB, temperature REAL, messages TEXT, text TEXT, finish_reason TEXT, created REAL, expires REAL);
CREATE INDEX samples_by_end ON samples (expires);
CREATE INDEX samples_of_adapter ON samples (adapter);
CREATE TABLE requests (
  owner TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, state TEXT NOT NULL, status INTEGER, response BLOB,
  adapter TEXT, version INTEGER, created REAL NOT NULL, PRIMARY KEY (owner, key)) WITHOUT ROWID;
CREATE INDEX requests_of_adapter ON requests (adapter);
CREATE TABLE feedback (id INTEGER PRIMARY KEY, adapter TEXT NOT NULL, record TEXT NOT NULL);
CREATE INDEX feedback_of_adapter ON feedback (adapter);
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, adapter TEXT NOT NULL, created REAL NOT NULL, token TEXT NOT NULL, revision INTEGER NOT NULL,
  record TEXT NOT NULL);
CREATE INDEX sessions_of_adapter ON sessions (adapter);
CREATE TABLE session_turns (
  session TEXT NOT NULL, n INTEGER NOT NULL, adapter TEXT NOT NULL, prompt_tokens BLOB NOT NULL, tokens BLOB NOT NULL,
  log_probs BLOB NOT NULL, kept_tokens BLOB, record TEXT NOT NULL, PRIMARY KEY (session, n));
CREATE INDEX session_turns_of_adapter ON session_turns (adapter);
CREATE TABLE session_examples (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL, n INTEGER NOT NULL, kind TEXT NOT NULL, adapter TEXT NOT NULL,
  state TEXT NOT NULL, head INTEGER NOT NULL, versions TEXT NOT NULL, teacher_prompt BLOB NOT NULL,
  record TEXT NOT NULL, UNIQUE (session, n, kind));
CREATE INDEX session_examples_of_adapter ON session_examples (adapter, state);
CREATE INDEX sessions_by_age ON sessions (adapter, created, id);
CREATE INDEX adapters_by_age ON adapters (owner, deleted, created, id);
CREATE TABLE closings (stamp TEXT NOT NULL);
CREATE TABLE shrunk (adapter TEXT PRIMARY KEY, head INTEGER NOT NULL);
CREATE TABLE usage (
  key TEXT NOT NULL, day INTEGER NOT NULL, kind TEXT NOT NULL, amount INTEGER NOT NULL, PRIMARY KEY (key, day, kind))
"""
SESSION_TABLES = frozenset({'sessions', 'session_turns', 'session_examples'})  # `session_tables` has their rows.
_USAGE_DAYS = 31  # Days for which the use of keys is kept.


@dataclasses.dataclass(frozen=True)
class Known:
  """The database's entry of an adapter."""

  head: Head
  tag: str  # The digest of the HEAD from which the entry was read.
  deleted: bool  # Whether its data are being erased.


@dataclasses.dataclass(frozen=True)
class KnownVersion:
  """The database's entry of a version."""

  number: int
  manifest: VersionManifest | None  # Without the digests of the files; None: it is damaged.
  damaged: str | None  # A sentence about the damage; None: the version is intact.


@dataclasses.dataclass(frozen=True)
class RequestRow:
  """The state of a request with an idempotency key."""

  body: str  # The digest of its body.
  state: str  # 'open'; 'made': it has changed something, but has no stored response yet; 'done'.
  status: int | None
  response: bytes | None
  adapter: str | None  # The adapter that it is about.
  version: int | None  # The version that it made.
  created: float


class Database:
  """The only connection to the database file; any thread may call."""

  def __init__(self, path: pathlib.Path, root: str, stamp: str | None = None):
    """Open the file, or make a new one.

    A file that belongs to another root or is damaged is moved aside and replaced by a new one.

    Args:
      path: the path of the file; no other process may use it.
      root: the id of the root that it belongs to.
      stamp: the stamp of the root's last orderly end; None: it has none.

    Raises:
      UserError: a later version of sdpo_jax has written it, or it can be neither opened nor made.
    """
    self._path, self._lock, self._stamp = path, threading.RLock(), stamp
    self.folder = str(path.parent)
    self.trusted = False  # Whether the last process has closed the file and the root together, in order.
    self.failed = False  # Whether reading or writing has failed since the last successful `check`.
    try:
      make_private(path.parent)
      self.is_new = not path.exists()
      why = None if self.is_new else self._open(root)
      if why is not None:
        self._move_aside(why)
      if why is not None or self.is_new:
        self._make(root)
    except (sqlite3.Error, OSError) as error:
      raise UserError(
        f'serve.store.database={path} cannot be opened ({first_line(error)}): name a local file that can be written to.'
      ) from error

  def _open(self, root: str) -> str | None:
    """Open the existing file; return why it cannot be used (None: it can)."""
    try:
      self._connect()
      [(schema,)] = self._connection.execute('PRAGMA user_version')
      if schema > SCHEMA:
        raise UserError(
          f'serve.store.database={self._path} was written by a later version of sdpo_jax: install that, or name '
          'another file, which is then rebuilt from the root.'
        )
      if schema < SCHEMA:
        if self._connection.execute('SELECT count(*) FROM sqlite_master').fetchall() != [(0,)]:
          raise UserError(
            f'serve.store.database={self._path} belongs to another program or an earlier version of sdpo_jax: name '
            'another file.'
          )
        self._connection.close()
        self.is_new = True  # The file was not completed.
        return None
      tables = self._connection.execute("SELECT name FROM sqlite_master WHERE name = 'closings'").fetchall()
      stamps = [stamp for (name,) in tables for (stamp,) in self._connection.execute(f'SELECT stamp FROM {name}')]
      self.trusted = self._stamp is not None and stamps == [self._stamp]
      if not self.trusted and self._connection.execute('PRAGMA quick_check(1)').fetchall() != [('ok',)]:
        return 'it is damaged'
      [(known,)] = self._connection.execute('SELECT root FROM meta')
      if known != root:
        return 'it belongs to another root'
      if stamps:  # Before anything changes: if this process is killed, an older root has that stamp, too.
        with self.writing(full=True) as rows:
          rows.execute('DELETE FROM closings')
      return None
    except (sqlite3.DatabaseError, ValueError) as error:
      if isinstance(error, sqlite3.OperationalError):
        raise
      return f'it is damaged ({first_line(error)})'

  def _connect(self) -> None:
    # Made here, since SQLite gives the files beside it the same permissions.
    os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
    # With exclusive locking, the index of the write-ahead log needs no shared memory.
    for pragma in ('locking_mode=EXCLUSIVE', 'journal_mode=WAL', 'synchronous=FULL', 'secure_delete=ON'):
      self._connection.execute(f'PRAGMA {pragma}').fetchall()
    self._full = True

  def _make(self, root: str) -> None:
    self.is_new = True
    self._connect()
    with self.writing(full=True) as rows:
      for statement in _TABLES.split(';'):
        rows.execute(statement)
      rows.execute('INSERT INTO meta VALUES (?)', (root,))
      rows.execute(f'PRAGMA user_version={SCHEMA}')

  def _move_aside(self, why: str) -> None:
    self._connection.close()
    self.trusted = False
    aside = self._path.with_name(f'{self._path.name}.{secrets.token_hex(4)}.aside')
    for suffix in ('-wal', '-shm', ''):
      with contextlib.suppress(FileNotFoundError):
        os.replace(f'{self._path}{suffix}', f'{aside}{suffix}')
    _logger.warning('%s was renamed to %s, because %s; a new one is filled from the root.', self._path, aside, why)

  def close(self) -> None:
    """Close the connection; later calls fail."""
    with self._lock:
      self._connection.close()

  @contextlib.contextmanager
  def writing(self, *, full: bool = False) -> Iterator[sqlite3.Connection]:
    """Provide the connection within a transaction, which is rolled back if the block raises.

    Args:
      full: whether the transaction must be on the disk when it ends.

    Raises:
      StorageFailed: the database cannot be written.
    """
    with self._lock, self._failures():
      if full != self._full:
        self._connection.execute(f'PRAGMA synchronous={"FULL" if full else "NORMAL"}')
        self._full = full
      self._connection.execute('BEGIN IMMEDIATE')
      try:
        yield self._connection
        self._connection.execute('COMMIT')
      except BaseException:
        if self._connection.in_transaction:
          self._connection.execute('ROLLBACK')
        raise

  def truncate_log(self) -> None:
    """Move the write-ahead log into the database and truncate it, so that no erased data remain in the log."""
    with self._lock, self._failures():
      self._connection.execute('PRAGMA wal_checkpoint(TRUNCATE)').fetchall()

  def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple]:
    """Return the rows of a query; `values` fill its placeholders."""
    with self._lock, self._failures():
      try:
        return self._connection.execute(query, values).fetchall()
      except UnicodeEncodeError:  # A value has a lone surrogate, which JSON can hold and no row does.
        return []

  @contextlib.contextmanager
  def _failures(self) -> Iterator[None]:
    try:
      yield
    except sqlite3.Error as error:
      self.failed = True
      raise StorageFailed(
        f'{self._path} cannot be read or written ({first_line(error)}): make room on its disk, or check the disk, and '
        'retry; if the file is damaged, restart the service, which rebuilds it from the root.'
      ) from error

  def check(self) -> None:
    """Write what is there already; raises StorageFailed if the file cannot be written."""
    with self.writing(full=True) as rows:
      rows.execute('UPDATE meta SET root = root')
    self.failed = False

  def unfinished(self) -> bool:
    """Return whether the next start has something to finish or to read again."""
    tables = 'adapters WHERE deleted != 0', 'intents', 'versions WHERE damaged IS NOT NULL'
    return any(self.read(f'SELECT 1 FROM {table} LIMIT 1') for table in tables)

  def put_stamp(self, stamp: str) -> None:
    """Store the stamp of an orderly end, for the next start."""
    with self.writing(full=True) as rows:
      rows.execute('DELETE FROM closings')
      put(rows, 'closings', {'stamp': stamp})

  # Adapters.

  def known(self, adapter: str) -> Known | None:
    """Return the entry of an adapter; None: there is none."""
    rows = self.read(f'SELECT {_ADAPTER} FROM adapters WHERE id = ?', (adapter,))
    return _known(rows[0]) if rows else None

  def all_known(self) -> list[Known]:
    """Return the entries of all adapters."""
    return [_known(row) for row in self.read(f'SELECT {_ADAPTER} FROM adapters')]

  def count(self, owner: str) -> int:
    """Return the number of adapters of an owner."""
    found = self.read('SELECT count(*) FROM adapters WHERE owner = ? AND deleted = 0', (owner,))
    return found[0][0] if found else 0

  def of_owner(
    self, owner: str, after: AdapterRecord | None = None, limit: int = ALL, prefix: str = ''
  ) -> list[AdapterRecord]:
    """Return adapters of an owner whose names have a prefix, the oldest first, from the one after `after` on."""
    place = (-math.inf, '') if after is None else (after.created, after.id)
    chosen = 'owner = ? AND deleted = 0 AND (created, id) > (?, ?) AND substr(name, 1, ?) = ?'
    query = f'SELECT {_ADAPTER} FROM adapters WHERE {chosen} ORDER BY created, id LIMIT ?'
    return [_known(row).head.adapter for row in self.read(query, (owner, *place, len(prefix), prefix, limit))]

  def by_name(self, owner: str, name: str) -> AdapterRecord | None:
    """Return the adapter of an owner that has a name, the oldest if there are several; None: there is none."""
    query = f'SELECT {_ADAPTER} FROM adapters WHERE owner = ? AND name = ? AND deleted = 0 ORDER BY created, id LIMIT 1'
    rows = self.read(query, (owner, name))
    return _known(rows[0]).head.adapter if rows else None

  def put_head(self, rows: sqlite3.Connection, head: Head, tag: str) -> None:
    """Store the contents of an adapter's HEAD, and drop the versions that were removed according to it."""
    adapter = head.adapter
    first = 1
    for end in (*sorted(int(number) for number in head.pinned if int(number) < head.kept_from), head.kept_from):
      self.drop_versions(rows, adapter.id, first, end)
      first = end + 1
    own = {name: getattr(head, name) for name in ('digest', 'origin', 'kept_from')} | {'tag': tag}
    texts = {'settings': json.dumps(adapter.settings), 'pinned': json.dumps(head.pinned)}
    put(rows, 'adapters', vars(adapter) | own | texts, conflict='REPLACE')

  def to_shrink(self, keep: int, before: float) -> list[AdapterRecord]:
    """Return the adapters with more versions than are kept, or with all versions made before a time.

    Args:
      keep: how many versions are kept beside the newest one and version 0; 0: all.
      before: seconds since the epoch. Adapters whose newest version is noted in the table `shrunk` are left out.
    """
    rows = self.read(
      f'SELECT {_ADAPTER} FROM adapters WHERE NOT deleted AND ((? > 0 AND head - ? > kept_from) OR ('
      'EXISTS (SELECT 1 FROM versions v WHERE v.adapter = adapters.id AND v.number = head AND v.created <= ?) '
      'AND NOT EXISTS (SELECT 1 FROM shrunk s WHERE s.adapter = adapters.id AND s.head = adapters.head)))',
      (keep, keep, before),
    )
    return [_known(row).head.adapter for row in rows]

  def mark_deleted(self, rows: sqlite3.Connection, adapter: str) -> None:
    """Hide an adapter, since its data are about to be erased."""
    rows.execute('UPDATE adapters SET deleted = 1 WHERE id = ?', (adapter,))

  def erase(self, rows: sqlite3.Connection, adapter: str) -> None:
    """Erase all rows about an adapter, including requests with several parts of which one is about it."""
    rows.execute('DELETE FROM adapters WHERE id = ?', (adapter,))
    wholes = "SELECT owner, substr(key, 1, instr(key, '/') - 1) FROM requests WHERE adapter = ? AND key LIKE '%/%'"
    rows.execute(f'DELETE FROM requests WHERE (owner, key) IN ({wholes})', (adapter,))
    for table in ('versions', 'intents', 'samples', 'requests', 'feedback', 'shrunk', *SESSION_TABLES):
      rows.execute(f'DELETE FROM {table} WHERE adapter = ?', (adapter,))

  # Versions.

  def versions(self, adapter: str, after: int = -1, limit: int = ALL, *, intact: bool = False) -> list[KnownVersion]:
    """Return versions of an adapter, or only `intact` ones, with numbers above `after` in order."""
    chosen = 'adapter = ? AND number > ?' + ' AND damaged IS NULL' * intact
    query = f'SELECT {_VERSION} FROM versions WHERE {chosen} ORDER BY number LIMIT ?'
    return [_known_version(row) for row in self.read(query, (adapter, after, limit))]

  def lineage(self, adapter: str) -> list[Ancestor]:
    """Return the intact versions of an adapter in order, without their details."""
    query = 'SELECT number, parent, reason FROM versions WHERE adapter = ? AND damaged IS NULL ORDER BY number'
    return [Ancestor(*row) for row in self.read(query, (adapter,))]

  def version(self, adapter: str, number: int) -> KnownVersion | None:
    """Return a version of an adapter; None: there is none."""
    rows = self.read(f'SELECT {_VERSION} FROM versions WHERE adapter = ? AND number = ?', (adapter, number))
    return _known_version(rows[0]) if rows else None

  def damaged(self) -> set[str]:
    """Return the ids of the adapters with a damaged version."""
    return {adapter for (adapter,) in self.read('SELECT adapter FROM versions WHERE damaged IS NOT NULL')}

  def put_version(self, rows: sqlite3.Connection, manifest: VersionManifest) -> None:
    """Insert or replace a version."""
    version, request = manifest.version, manifest.request or RequestId(None, None)
    made = {'previous': manifest.previous, 'request_key': request.key, 'request_body': request.body}
    put(rows, 'versions', vars(version) | made | {'details': json.dumps(version.details)}, conflict='REPLACE')

  def put_damaged(self, rows: sqlite3.Connection, adapter: str, number: int, damaged: str) -> None:
    """Insert or replace a version as damaged, with a sentence about the damage."""
    put(rows, 'versions', {'adapter': adapter, 'number': number, 'damaged': damaged}, conflict='REPLACE')

  def drop_versions(self, rows: sqlite3.Connection, adapter: str, first: int, end: int) -> None:
    """Drop the versions of an adapter with numbers from `first` up to but not including `end`."""
    rows.execute('DELETE FROM versions WHERE adapter = ? AND number >= ? AND number < ?', (adapter, first, end))

  # Intents.

  def intents(self) -> dict[str, str]:
    """Return the folder names of versions whose commit may not have ended, by the id of their adapter."""
    return dict(self.read('SELECT adapter, version FROM intents'))

  def drop_intent(self, rows: sqlite3.Connection, adapter: str) -> None:
    """Drop the intent of an adapter, since the outcome of its commit is known."""
    rows.execute('DELETE FROM intents WHERE adapter = ?', (adapter,))

  # Samples.

  def put_sample(self, rows: sqlite3.Connection, sample: SampleRecord) -> None:
    """Insert a sample."""
    values = {
      'prompt_tokens': np.asarray(sample.prompt_tokens, '<i4').tobytes(),
      'tokens': np.asarray(sample.tokens, '<i4').tobytes(),
      'log_probs': np.asarray(sample.log_probs, '<f4').tobytes(),
      'messages': None if sample.messages is None else json.dumps(list(sample.messages)),
      'text': json.dumps(sample.text),
    }
    put(rows, 'samples', vars(sample) | values)

  def sample(self, owner: str, sample: str) -> tuple[float, SampleRecord | None] | None:
    """Return the expiry of a sample, and the sample unless it was erased; None: the owner has no such sample."""
    rows = self.read(f'SELECT {", ".join(_SAMPLE)} FROM samples WHERE id = ? AND owner = ?', (sample, owner))
    if not rows:
      return None
    found = dict(zip(_SAMPLE, rows[0], strict=True))
    if found['tokens'] is None:
      return found['expires'], None
    values = {
      'prompt_tokens': np.frombuffer(found['prompt_tokens'], '<i4').tolist(),
      'tokens': np.frombuffer(found['tokens'], '<i4').tolist(),
      'log_probs': np.frombuffer(found['log_probs'], '<f4'),
      'messages': None if found['messages'] is None else json.loads(found['messages']),
      'text': json.loads(found['text']),
    }
    return found['expires'], SampleRecord(**found | values)

  def expire_samples(self, rows: sqlite3.Connection, now: float, forgotten: float) -> int:
    """Erase the contents of expired samples, and return how many were erased.

    Samples that expired before the time `forgotten` are dropped altogether.
    """
    erased = rows.execute(
      'UPDATE samples SET prompt_tokens = NULL, tokens = NULL, log_probs = NULL, messages = NULL, text = NULL '
      'WHERE expires <= ? AND tokens IS NOT NULL',
      (now,),
    )
    rows.execute('DELETE FROM samples WHERE expires <= ?', (forgotten,))
    return erased.rowcount

  # Requests with an idempotency key.

  def request(self, owner: str, key: str) -> RequestRow | None:
    """Return the row of an owner's request by the digest of its key; None: there is none."""
    query = 'SELECT body, state, status, response, adapter, version, created FROM requests WHERE owner = ? AND key = ?'
    rows = self.read(query, (owner, key))
    return RequestRow(*rows[0]) if rows else None

  def made_by(self, owner: str, key: str) -> RequestRow | None:
    """Return the row of a request as the version that it made implies; None: it has made none."""
    rows = self.read(
      'SELECT v.request_body, v.adapter, v.number, v.created FROM versions v JOIN adapters a ON a.id = v.adapter '
      'WHERE v.request_key = ? AND a.owner = ? ORDER BY v.created DESC LIMIT 1',
      (key, owner),
    )
    return RequestRow(rows[0][0], 'made', None, None, *rows[0][1:]) if rows else None

  def put_request(self, rows: sqlite3.Connection, owner: str, key: str, row: RequestRow) -> None:
    """Insert or replace a request."""
    put(rows, 'requests', {**vars(row), 'owner': owner, 'key': key}, conflict='REPLACE')

  def drop_request(self, rows: sqlite3.Connection, owner: str, key: str) -> None:
    """Drop a request, so that it can be sent again."""
    rows.execute('DELETE FROM requests WHERE owner = ? AND key = ?', (owner, key))

  def note_made(
    self, rows: sqlite3.Connection, owner: str, request: RequestId, adapter: str, version: int | None
  ) -> None:
    """Store which version (None: none) a request has made, so that a repeat does not make it again."""
    rows.execute(
      "UPDATE requests SET state = 'made', adapter = ?, version = ? WHERE owner = ? AND key = ?",
      (adapter, version, owner, request.key),
    )

  def note_about(self, rows: sqlite3.Connection, owner: str, key: str, adapter: str) -> None:
    """Store which adapter a request is about."""
    rows.execute('UPDATE requests SET adapter = ? WHERE owner = ? AND key = ?', (adapter, owner, key))

  def drop_open_requests(self, rows: sqlite3.Connection) -> None:
    """Drop requests that had made nothing when their process ended, so that they can be sent again."""
    rows.execute("DELETE FROM requests WHERE state = 'open'")

  def expire_requests(self, rows: sqlite3.Connection, before: float) -> int:
    """Drop finished requests that began before a time; return how many."""
    return rows.execute("DELETE FROM requests WHERE created <= ? AND state != 'open'", (before,)).rowcount

  # Feedback.

  def feedback(self, adapter: str) -> list[dict[str, Any]]:
    """Return the feedback records of an adapter, the oldest first."""
    rows = self.read('SELECT record FROM feedback WHERE adapter = ? ORDER BY id', (adapter,))
    return [json.loads(record) for (record,) in rows]

  # Usage.

  def usage(self, day: int) -> dict[tuple[str, str], int]:
    """Return what was used on a day, counted from the epoch, by the id of the key and the kind."""
    rows = self.read('SELECT key, kind, amount FROM usage WHERE day = ?', (day,))
    return {(key, kind): amount for key, kind, amount in rows}

  def add_usage(self, amounts: Mapping[tuple[str, int, str], int]) -> dict[tuple[str, int, str], int]:
    """Add to what was used, by key, day and kind; return the new amounts."""
    with self.writing() as rows:
      rows.executemany(
        'INSERT INTO usage (key, day, kind, amount) VALUES (?, ?, ?, ?) '
        'ON CONFLICT (key, day, kind) DO UPDATE SET amount = usage.amount + excluded.amount',
        [(*name, amount) for name, amount in amounts.items()],
      )
      newest = max(day for _, day, _ in amounts)
      rows.execute('DELETE FROM usage WHERE day < ?', (newest - _USAGE_DAYS,))
      query = 'SELECT amount FROM usage WHERE key = ? AND day = ? AND kind = ?'
      return {name: rows.execute(query, name).fetchone()[0] for name in amounts}


_ADAPTER = 'id, owner, name, head, created, settings, digest, origin, kept_from, pinned, tag, deleted'
_VERSION = 'adapter, number, parent, reason, created, digest, previous, details, request_key, request_body, damaged'
_SAMPLE = [field.name for field in dataclasses.fields(SampleRecord)]


def put(
  rows: sqlite3.Connection,
  table: str,
  values: Mapping[str, Any],
  *,
  conflict: Literal['ABORT', 'IGNORE', 'REPLACE'] = 'ABORT',
) -> None:
  """Insert a row, given as values by column; `conflict` is what SQLite does if a row has the same key."""
  columns, places = ', '.join(values), ', '.join('?' * len(values))
  rows.execute(f'INSERT OR {conflict} INTO {table} ({columns}) VALUES ({places})', tuple(values.values()))


def _known(row: tuple) -> Known:
  id, owner, name, number, created, settings, digest, origin, kept_from, pinned, tag, deleted = row
  adapter = AdapterRecord(id, owner, name, number, created, json.loads(settings))
  return Known(Head(adapter, digest, origin, kept_from, json.loads(pinned)), tag, bool(deleted))


def _known_version(row: tuple) -> KnownVersion:
  adapter, number, parent, reason, created, digest, previous, details, key, body, damaged = row
  if damaged is not None:
    return KnownVersion(number, None, damaged)
  version = Version(adapter, number, parent, reason, created, digest, json.loads(details))
  request = None if key is None else RequestId(key, body)
  return KnownVersion(number, VersionManifest(version, previous, request, {}), None)
