"""The database of the store: an index of adapters and versions, and samples, requests and intents.

Its rows about adapters and versions can be rebuilt from the root. A transaction with `full=True` is on the disk when it
ends; others survive a crash of the process, but perhaps not of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import secrets
import sqlite3
from typing import Any

import numpy as np

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.serving.errors import StorageFailed
from sdpo_jax.serving.records import BEGINNING, AdapterRecord, Ancestor, SampleRecord, Version
from sdpo_jax.serving.store import migrations
from sdpo_jax.serving.store.blobs import make_private
from sdpo_jax.serving.store.connections import POSTGRES, Connections, PostgresConnections, Rows, SqliteConnection
from sdpo_jax.serving.store.versions import Head, RequestId, VersionManifest

_logger = logging.getLogger('sdpo_jax.serving')
ALL = 2**62  # More than there are rows.
# `user_version` of a file: of this version, and of those with the tables of the first revision and no table of it.
SCHEMA, _FIRST_SCHEMA = 3, 2
SESSION_TABLES = frozenset({'sessions', 'session_turns', 'session_examples'})  # `session_tables` has their rows.
_USAGE_DAYS = 31  # Days for which the use of keys is kept.
_ROWS = 64  # The most rows that one statement inserts: databases limit the number of values.


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
  replica: str = ''  # The replica that runs it, or has run it.


class Database:
  """The rows of a store; any thread may call. Use `Database.open`."""

  def __init__(self, connections: Connections, *, is_new: bool, trusted: bool = False):
    """Make it from connections to a database that has all tables; use `open` instead."""
    self.connections = connections
    self.is_new = is_new  # Whether it knew nothing of the root when it was opened.
    self.trusted = trusted  # Whether it and the root were last used together.

  @classmethod
  def open(cls, place: str | os.PathLike, root: str, stamp: str = '') -> Database:
    """Open a database, or make a new one.

    Args:
      place: a local file, which no other process may use and which is moved aside and replaced by a new one if it is
        damaged or belongs to another root; or postgresql://….
      root: the id of the root that it belongs to.
      stamp: the stamp of the root; empty: it has none.

    Raises:
      UserError: a later version of sdpo_jax has written it, it is in PostgreSQL and belongs to another root, or it can
        be neither opened nor made.
    """
    if str(place).startswith(POSTGRES):
      return _open_postgres(str(place), root)
    path = pathlib.Path(place)
    try:
      make_private(path.parent)
      found = None if not path.exists() else _open_file(path, root, stamp)
      return found or _make_file(path, root)
    except (sqlite3.Error, OSError) as error:
      raise UserError(
        f'serve.store.database={path} cannot be opened ({first_line(error)}): name a local file that can be written to.'
      ) from error

  @property
  def shared(self) -> bool:
    """Whether other processes may use it, too."""
    return self.connections.dialect != 'sqlite'

  def close(self) -> None:
    """Close the connections; later calls fail."""
    self.connections.close()

  def writing(self, *, full: bool = False, alone: str | None = None) -> contextlib.AbstractContextManager[Rows]:
    """Run a block in a transaction, see `Connections.writing`."""
    return self.connections.writing(full, alone)

  def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple]:
    """Return the rows of a query; `values` fill its placeholders."""
    if self.shared and any(isinstance(value, str) and '\0' in value for value in values):
      return []  # No row of PostgreSQL has such a text.
    try:
      return self.connections.read(query, values)
    except UnicodeEncodeError:  # A value has a lone surrogate, which JSON can hold and no row does.
      return []

  def check(self) -> None:
    """Write what is there already; raises StorageFailed if it cannot be written, or a local file is damaged."""
    if not self.shared and self.read('PRAGMA quick_check(1)') != [('ok',)]:
      self.connections.failed = True
      raise StorageFailed(f'{self.connections.name} is damaged: restart the service, which rebuilds it from the root.')
    with self.writing(full=True) as rows:
      rows.execute('UPDATE meta SET root = root')
    self.connections.failed = False

  def unfinished(self) -> bool:
    """Return whether the next start has something to finish or to read again."""
    tables = 'adapters WHERE deleted != 0', 'intents', 'versions WHERE damaged IS NOT NULL'
    return any(self.read(f'SELECT 1 FROM {table} LIMIT 1') for table in tables)

  def put_stamp(self, stamp: str) -> None:
    """Store a stamp in the place of the last one."""
    with self.writing(full=True) as rows:
      rows.execute('DELETE FROM closings')
      put(rows, 'closings', {'stamp': stamp})

  # Adapters.

  def known(self, adapter: str) -> Known | None:
    """Return the entry of an adapter; None: there is none."""
    return next(iter(self._chosen('id = ?', adapter)), None)

  def all_known(self) -> list[Known]:
    """Return the entries of all adapters."""
    return self._chosen('1 = 1')

  def _chosen(self, condition: str, *values: Any, limit: int = ALL) -> list[Known]:
    query = f'SELECT {_ADAPTER} FROM adapters WHERE {condition} ORDER BY created, id LIMIT ?'
    return [_known(row) for row in self.read(query, (*values, limit))]

  def count(self, owner: str) -> int:
    """Return the number of adapters of an owner."""
    found = self.read('SELECT count(*) FROM adapters WHERE owner = ? AND deleted = 0', (owner,))
    return found[0][0] if found else 0

  def of_owner(
    self, owner: str, after: tuple[float, str] = BEGINNING, limit: int = ALL, prefix: str = ''
  ) -> list[AdapterRecord]:
    """Return adapters of an owner whose names have a prefix, the oldest first, made after a time or with a later id."""
    chosen = 'owner = ? AND deleted = 0 AND (created, id) > (?, ?) AND substr(name, 1, ?) = ?'
    return [known.head.adapter for known in self._chosen(chosen, owner, *after, len(prefix), prefix, limit=limit)]

  def by_name(self, owner: str, name: str) -> AdapterRecord | None:
    """Return the adapter of an owner that has a name, the oldest if there are several; None: there is none."""
    found = self._chosen('owner = ? AND name = ? AND deleted = 0', owner, name, limit=1)
    return found[0].head.adapter if found else None

  def put_head(self, rows: Rows, head: Head, tag: str) -> None:
    """Store the contents of an adapter's HEAD, and drop the versions that were removed according to it."""
    adapter = head.adapter
    kept = ', '.join(['0', *(str(int(number)) for number in head.pinned)])
    gone = f'adapter = ? AND number < ? AND number NOT IN ({kept})'
    rows.execute(f'DELETE FROM versions WHERE {gone}', (adapter.id, head.kept_from))
    own = {name: getattr(head, name) for name in ('digest', 'origin', 'kept_from')} | {'tag': tag}
    texts = {'settings': json.dumps(adapter.settings), 'pinned': json.dumps(head.pinned)}
    put(rows, 'adapters', vars(adapter) | own | texts | {'deleted': 0}, key='id')

  def to_shrink(self, keep: int, before: float) -> list[AdapterRecord]:
    """Return the adapters with more versions than are kept, or with all versions made before a time.

    Args:
      keep: how many versions are kept beside the newest one and version 0; 0: all.
      before: seconds since the epoch. Adapters whose newest version is noted in the table `shrunk` are left out.
    """
    chosen = (
      'deleted = 0 AND ((? > 0 AND head - ? > kept_from) OR ('
      'EXISTS (SELECT 1 FROM versions v WHERE v.adapter = adapters.id AND v.number = head AND v.created <= ?) '
      'AND NOT EXISTS (SELECT 1 FROM shrunk s WHERE s.adapter = adapters.id AND s.head = adapters.head)))'
    )
    return [known.head.adapter for known in self._chosen(chosen, keep, keep, before)]

  def mark_deleted(self, rows: Rows, adapter: str) -> None:
    """Hide an adapter, since its data are about to be erased."""
    rows.execute('UPDATE adapters SET deleted = 1 WHERE id = ?', (adapter,))

  def erase(self, rows: Rows, adapter: str) -> None:
    """Erase all rows about an adapter, including requests with several parts of which one is about it."""
    rows.execute('DELETE FROM adapters WHERE id = ?', (adapter,))
    # Keys are digests of 64 characters; that of a part has the digest of the whole first.
    wholes = 'SELECT owner, substr(key, 1, 64) FROM requests WHERE adapter = ? AND length(key) > 64'
    rows.execute(f'DELETE FROM requests WHERE (owner, key) IN ({wholes})', (adapter,))
    for table in ('versions', 'intents', 'samples', 'requests', 'shrunk', 'leases', *SESSION_TABLES):
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

  def is_damaged(self, adapter: str) -> bool:
    """Return whether an adapter has a damaged version."""
    return bool(self.read('SELECT 1 FROM versions WHERE adapter = ? AND damaged IS NOT NULL LIMIT 1', (adapter,)))

  def put_version(self, rows: Rows, manifest: VersionManifest) -> None:
    """Insert or replace a version."""
    version, request = manifest.version, manifest.request or RequestId(None, None)
    made = {'previous': manifest.previous, 'request_key': request.key, 'request_body': request.body}
    values = vars(version) | made | {'details': json.dumps(version.details), 'damaged': None}
    put(rows, 'versions', values, key='adapter, number')

  # Intents.

  def intents(self) -> dict[str, tuple[str, str]]:
    """Return, by id, the folders of adapters with a change that may not have ended, and that of a version or ''."""
    return {id: (folder, version) for id, folder, version in self.read('SELECT adapter, folder, version FROM intents')}

  def put_intent(self, rows: Rows, adapter: str, folder: str, version: str = '') -> None:
    """Store the intent to commit a version, by its folder name, or to change HEAD otherwise; replaces an older one."""
    put(rows, 'intents', {'adapter': adapter, 'folder': folder, 'version': version}, key='adapter')

  def drop_intent(self, rows: Rows, adapter: str, version: str | None = None) -> None:
    """Drop the intent of an adapter, or only that to commit a version, by its folder name: the outcome is known."""
    rows.execute('DELETE FROM intents WHERE adapter = ? AND version = coalesce(?, version)', (adapter, version))

  # Samples.

  def put_samples(self, rows: Rows, samples: Sequence[SampleRecord]) -> None:
    """Insert samples."""
    values = [
      vars(sample)
      | {
        'prompt_tokens': np.asarray(sample.prompt_tokens, '<i4').tobytes(),
        'tokens': np.asarray(sample.tokens, '<i4').tobytes(),
        'log_probs': np.asarray(sample.log_probs, '<f4').tobytes(),
        'messages': None if sample.messages is None else json.dumps(list(sample.messages)),
        'text': json.dumps(sample.text),
      }
      for sample in samples
    ]
    for first in range(0, len(values), _ROWS):
      put(rows, 'samples', *values[first : first + _ROWS])

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

  def expire_samples(self, rows: Rows, now: float, forgotten: float) -> int:
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
    query = f'SELECT {", ".join(_REQUEST)} FROM requests WHERE owner = ? AND key = ?'
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

  def put_request(self, rows: Rows, owner: str, key: str, row: RequestRow) -> None:
    """Insert or replace a request."""
    put(rows, 'requests', {**vars(row), 'owner': owner, 'key': key}, key='owner, key')

  def drop_request(self, rows: Rows, owner: str, key: str) -> None:
    """Drop a request, so that it can be sent again."""
    rows.execute('DELETE FROM requests WHERE owner = ? AND key = ?', (owner, key))

  def note_made(self, rows: Rows, owner: str, request: RequestId, adapter: str, version: int | None) -> None:
    """Store which version (None: none) a request has made, so that a repeat does not make it again."""
    rows.execute(
      "UPDATE requests SET state = 'made', adapter = ?, version = ? WHERE owner = ? AND key = ?",
      (adapter, version, owner, request.key),
    )

  def is_there(self, rows: Rows, adapter: str, owner: str) -> bool:
    """Return whether an owner has an adapter, which then cannot be erased before the transaction ends."""
    query = 'SELECT 1 FROM adapters WHERE id = ? AND owner = ? AND deleted = 0' + ' FOR SHARE' * self.shared
    return bool(rows.execute(query, (adapter, owner)).fetchall())

  def expire_requests(self, rows: Rows, before: float) -> int:
    """Drop finished requests that began before a time; return how many."""
    return rows.execute("DELETE FROM requests WHERE created <= ? AND state != 'open'", (before,)).rowcount

  # Usage.

  def usage(self, day: int) -> dict[tuple[str, str], int]:
    """Return what was used on a day, counted from the epoch, by the id of the key and the kind."""
    rows = self.read('SELECT key, kind, amount FROM usage WHERE day = ?', (day,))
    return {(key, kind): amount for key, kind, amount in rows}

  def add_usage(self, amounts: Mapping[tuple[str, int, str], int]) -> None:
    """Add to what was used, by key, day and kind."""
    with self.writing() as rows:
      rows.executemany(
        'INSERT INTO usage (key, day, kind, amount) VALUES (?, ?, ?, ?) '
        'ON CONFLICT (key, day, kind) DO UPDATE SET amount = usage.amount + excluded.amount',
        [(*name, amount) for name, amount in sorted(amounts.items())],  # In one order, or processes block each other.
      )
      newest = max(day for _, day, _ in amounts)
      rows.execute('DELETE FROM usage WHERE day < ?', (newest - _USAGE_DAYS,))


_ADAPTER = 'id, owner, name, head, created, settings, digest, origin, kept_from, pinned, tag, deleted'
_VERSION = 'adapter, number, parent, reason, created, digest, previous, details, request_key, request_body, damaged'
_REQUEST = [field.name for field in dataclasses.fields(RequestRow)]
_SAMPLE = [field.name for field in dataclasses.fields(SampleRecord)]


def put(rows: Rows, table: str, *values: Mapping[str, Any], key: str | None = None, replace: bool = True) -> None:
  """Insert rows, given as values by column.

  Args:
    rows: the connection within a transaction.
    table: the name of the table.
    *values: the values by column, of the same columns for each row.
    key: the columns of a primary key or unique constraint, of which there may be a row already; None: there is none.
    replace: whether such a row gets these values; otherwise it stays as it is.
  """
  columns, places = ', '.join(values[0]), ', '.join([f'({", ".join("?" * len(values[0]))})'] * len(values))
  changed = ', '.join(f'{name} = excluded.{name}' for name in values[0])
  also = '' if key is None else f' ON CONFLICT ({key}) DO ' + (f'UPDATE SET {changed}' if replace else 'NOTHING')
  items = [item for row in values for item in row.values()]
  rows.execute(f'INSERT INTO {table} ({columns}) VALUES {places}{also}', items)


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


def _open_file(path: pathlib.Path, root: str, stamp: str) -> Database | None:
  """Open an existing file; None: it was not completed, or it cannot be used and was moved aside."""
  with contextlib.ExitStack() as closing:
    try:
      connection = SqliteConnection(path)
      closing.callback(connection.close)
      [(schema,)] = connection.raw.execute('PRAGMA user_version')
      if schema < _FIRST_SCHEMA:
        if connection.raw.execute('SELECT count(*) FROM sqlite_master').fetchall() == [(0,)]:
          return None
        raise UserError(
          f'serve.store.database={path} belongs to another program or an earlier version of sdpo_jax: name another '
          'file.'
        )
      revisions = [(migrations.FIRST,)]
      if schema > _FIRST_SCHEMA:
        revisions = connection.raw.execute('SELECT version_num FROM alembic_version').fetchall()
      if schema > SCHEMA or not migrations.is_known(revisions[0][0]):
        raise UserError(
          f'serve.store.database={path} was written by a later version of sdpo_jax: install that, or name another '
          'file, which is then rebuilt from the root.'
        )
      stamps = connection.raw.execute('SELECT stamp FROM closings').fetchall()
      trusted = stamp != '' and stamps == [(stamp,)]
      if not trusted and connection.raw.execute('PRAGMA quick_check(1)').fetchall() != [('ok',)]:
        raise ValueError('it is damaged')
      if connection.raw.execute('SELECT root FROM meta').fetchall() != [(root,)]:
        raise ValueError('it belongs to another root')
      if stamps or schema < SCHEMA or revisions[0][0] != migrations.NEWEST:
        with connection.writing(True, None) as rows:
          # Before anything changes: if this process is killed, an older root has that stamp, too.
          rows.execute('DELETE FROM closings')
          if schema == _FIRST_SCHEMA:
            rows.execute('CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)')
            put(rows, 'alembic_version', {'version_num': migrations.FIRST})
          _upgrade(rows, connection, revisions[0][0])
      closing.pop_all()
      return Database(connection, is_new=False, trusted=trusted)
    except (sqlite3.DatabaseError, ValueError, IndexError) as error:
      if isinstance(error, sqlite3.OperationalError):
        raise
      why = f'it is damaged ({first_line(error)})' if isinstance(error, sqlite3.Error) else first_line(error)
  aside = path.with_name(f'{path.name}.{secrets.token_hex(4)}.aside')
  for suffix in ('-wal', '-shm', ''):
    with contextlib.suppress(FileNotFoundError):
      os.replace(f'{path}{suffix}', f'{aside}{suffix}')
  _logger.warning('%s was renamed to %s, because %s; a new one is filled from the root.', path, aside, why)
  return None


def _make_file(path: pathlib.Path, root: str) -> Database:
  connection = SqliteConnection(path)
  with connection.writing(True, None) as rows:
    _upgrade(rows, connection, None)
    put(rows, 'meta', {'root': root})
  return Database(connection, is_new=True)


def connect(url: str, setting: str = 'serve.store.database') -> PostgresConnections:
  """Open a database in PostgreSQL, and make the tables that it does not have.

  Args:
    url: postgresql://….
    setting: what names it, for messages.

  Raises:
    UserError: it cannot be reached, or a later version of sdpo_jax has written it.
  """
  connections = PostgresConnections(url, setting)
  with contextlib.ExitStack() as closing:
    closing.callback(connections.close)
    _revision_of(connections)  # Makes the statements, while nobody waits for the transaction.
    with connections.writing(True, 'tables') as rows:
      _upgrade(rows, connections, _revision_of(connections))
    closing.pop_all()
  return connections


def _revision_of(connections: PostgresConnections) -> str | None:
  """Return the revision of the tables, for which the statements are made; None: there are none."""
  [(there,)] = connections.read("SELECT to_regclass('alembic_version') IS NOT NULL", ())
  revision = connections.read('SELECT version_num FROM alembic_version', ())[0][0] if there else None
  if revision is not None and not migrations.is_known(revision):
    raise UserError(
      f'The database {connections.name} was written by a later version of sdpo_jax: install that, or name another one.'
    )
  migrations.statements(connections.dialect, revision)
  return revision


def _open_postgres(url: str, root: str) -> Database:
  connections = connect(url)
  known = connections.read('SELECT root FROM meta', ())
  if known not in ([], [(root,)]):
    connections.close()
    raise UserError(
      f'serve.store.database={connections.name} belongs to another serve.store.root: name that one, or another '
      'database.'
    )
  return Database(connections, is_new=not known, trusted=bool(known))


def _upgrade(rows: Rows, connections: Connections, revision: str | None) -> None:
  """Bring the tables from a revision (None: there are none) to the newest one."""
  for statement in migrations.statements(connections.dialect, revision):
    rows.execute(statement)
  if connections.dialect == 'sqlite':
    rows.execute(f'PRAGMA user_version={SCHEMA}')
