"""Connections to the database of a store: one SQLite file of this process, or a PostgreSQL that replicas share.

Statements are written with `?` as placeholders, in the SQL that both understand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import logging
import os
import pathlib
import sqlite3
import threading
from typing import Any, Protocol

from sdpo_jax.config.privacy import public_place
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.serving.errors import StorageFailed

POSTGRES = 'postgresql://'  # What the URL of such a database begins with.
_POOL = 16  # The most connections of a process to PostgreSQL.
_PATIENCE = 5.0  # Seconds until PostgreSQL must have answered; a request fails then, so that its client can retry.
# A paused process must not keep others from rows that it has locked.
_LIMITS = '-c statement_timeout=10s -c lock_timeout=5s -c idle_in_transaction_session_timeout=3s -c timezone=UTC'


class Rows(Protocol):
  """A connection within a transaction."""

  def execute(self, query: str, values: Sequence[Any] = ()) -> Any:
    """Run a statement; return a cursor with `fetchall`, `fetchone` and `rowcount`."""

  def executemany(self, query: str, values: Sequence[Sequence[Any]]) -> Any:
    """Run a statement with each of some values."""


class Connections(Protocol):
  """A database; any thread may call. What cannot be read or written raises StorageFailed."""

  dialect: str  # 'sqlite' or 'postgresql', as SQLAlchemy names it.
  name: str  # For messages, without a password.
  folder: str  # Of its local file; empty: it has none.
  failed: bool  # Whether reading or writing has failed since the last successful `Database.check`.

  def writing(self, full: bool, alone: str | None) -> contextlib.AbstractContextManager[Rows]:
    """Run a block in a transaction, which is rolled back if the block raises.

    Args:
      full: whether the transaction must be on the disk when it ends.
      alone: of transactions with the same text, in all processes, one runs at a time; None: any number.
    """

  def read(self, query: str, values: Sequence[Any]) -> list[tuple]:
    """Return the rows of a query, within the transaction that the thread is in, if it is in one."""

  def truncate_log(self) -> None:
    """Move the write-ahead log of SQLite into the database, so that no erased data remain in the log."""

  def close(self) -> None:
    """Close all connections; later calls fail."""


class SqliteConnection:
  """The only connection to a local file; no other process may use it."""

  dialect = 'sqlite'

  def __init__(self, path: pathlib.Path):
    """Open the file, which is made if it is missing; raises sqlite3.Error or OSError."""
    self.name, self.folder, self.failed, self._lock = str(path), str(path.parent), False, threading.RLock()
    # Made here, since SQLite gives the files beside it the same permissions.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    self.raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
      # With exclusive locking, the index of the write-ahead log needs no shared memory.
      for pragma in ('locking_mode=EXCLUSIVE', 'journal_mode=WAL', 'synchronous=FULL', 'secure_delete=ON'):
        self.raw.execute(f'PRAGMA {pragma}').fetchall()
    except sqlite3.Error:
      self.raw.close()
      raise
    self._full = True

  def close(self) -> None:
    with self._lock:
      self.raw.close()

  @contextlib.contextmanager
  def writing(self, full: bool, alone: str | None) -> Iterator[Rows]:
    with self._lock, self._failures():
      if full != self._full:
        self.raw.execute(f'PRAGMA synchronous={"FULL" if full else "NORMAL"}')
        self._full = full
      self.raw.execute('BEGIN IMMEDIATE')
      try:
        yield self.raw
        self.raw.execute('COMMIT')
      except BaseException:
        if self.raw.in_transaction:
          self.raw.execute('ROLLBACK')
        raise

  def truncate_log(self) -> None:
    with self._lock, self._failures():
      self.raw.execute('PRAGMA wal_checkpoint(TRUNCATE)').fetchall()

  def read(self, query: str, values: Sequence[Any]) -> list[tuple]:
    with self._lock, self._failures():
      return self.raw.execute(query, values).fetchall()

  @contextlib.contextmanager
  def _failures(self) -> Iterator[None]:
    try:
      yield
    except sqlite3.Error as error:
      self.failed = True
      raise StorageFailed(
        f'{self.name} cannot be read or written ({first_line(error)}): make room on its disk, or check the disk, and '
        'retry; if the file is damaged, restart the service, which rebuilds it from the root.',
        retry_after=1.0,
      ) from error


class _PostgresRows:
  """A connection to PostgreSQL that takes statements as SQLite does."""

  def __init__(self, connection: Any):
    self._connection = connection

  def execute(self, query: str, values: Sequence[Any] = ()) -> Any:
    return self._connection.execute(_placed(query), values or None)

  def executemany(self, query: str, values: Sequence[Sequence[Any]]) -> Any:
    return self._connection.cursor().executemany(_placed(query), values)


def _placed(query: str) -> str:
  return query.replace('%', '%%').replace('?', '%s') if '?' in query else query


class PostgresConnections:
  """A pool of connections to a PostgreSQL database."""

  dialect = 'postgresql'

  def __init__(self, url: str, setting: str):
    """Open the pool; `setting` names the database in messages.

    Raises:
      UserError: the database cannot be reached, or its driver is not installed.
    """
    self.name, self.folder, self.failed, self._within = public_place(url), '', False, threading.local()
    try:
      import psycopg
      import psycopg_pool
    except ImportError as error:
      raise UserError(
        f'{setting}={self.name} needs the package psycopg: install sdpo_jax[postgres], or name a local file.'
      ) from error
    self._errors = psycopg.Error
    logging.getLogger('psycopg.pool').setLevel(logging.ERROR)  # Whoever asks hears what it would warn of.
    try:
      own = psycopg.conninfo.conninfo_to_dict(url).get('options', '')
    except psycopg.Error as error:
      raise UserError(f'{setting}={self.name} is no address ({first_line(error)}): correct it.') from error
    options = {'connect_timeout': int(_PATIENCE), 'tcp_user_timeout': int(2000 * _PATIENCE)}
    self._pool = psycopg_pool.ConnectionPool(
      url,
      kwargs={'autocommit': True, 'options': f'{_LIMITS} {own}', **options},
      min_size=1,
      max_size=_POOL,
      timeout=_PATIENCE,
      reconnect_timeout=_PATIENCE,
      # A round trip, which only pays after a failure, when other connections may have died, too.
      check=lambda connection: psycopg_pool.ConnectionPool.check_connection(connection) if self.failed else None,
      open=False,
    )
    try:
      psycopg.connect(url, connect_timeout=int(_PATIENCE)).close()  # Whose errors say more than those of the pool.
      self._pool.open(wait=True, timeout=2 * _PATIENCE)
    except self._errors as error:
      self._pool.close()
      raise UserError(
        f'{setting}={self.name} cannot be used ({first_line(error)}): start it, or correct the address.'
      ) from error

  def close(self) -> None:
    self._pool.close()

  @contextlib.contextmanager
  def writing(self, full: bool, alone: str | None) -> Iterator[Rows]:
    with self._failures(), self._pool.connection() as connection, connection.transaction():
      if not full:
        connection.execute('SET LOCAL synchronous_commit = off')
      if alone is not None:
        connection.execute('SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))', (alone,))
      self._within.connection = connection
      try:
        yield _PostgresRows(connection)
      finally:
        self._within.connection = None

  def read(self, query: str, values: Sequence[Any]) -> list[tuple]:
    with self._failures():
      within = getattr(self._within, 'connection', None)
      with self._pool.connection() if within is None else contextlib.nullcontext(within) as connection:
        return _PostgresRows(connection).execute(query, values).fetchall()

  def truncate_log(self) -> None:
    """Do nothing: PostgreSQL recycles its log itself, and erased rows with its next vacuum."""

  @contextlib.contextmanager
  def _failures(self) -> Iterator[None]:
    try:
      yield
    except self._errors as error:
      self.failed = True
      raise StorageFailed(
        'The database of the service cannot be read or written now: retry; nothing that was acknowledged is lost.',
        log=f'{self.name}: {first_line(error)}',
        retry_after=1.0,
      ) from error
