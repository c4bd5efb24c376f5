"""Where the stores of folders are: in the folder, or in PostgreSQL and a bucket under `tests.serving.replicated`.

What a store has stored is a `file_operations.Tree` either way: below root/ the blobs, below tables/ the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import shutil
import threading

import pytest

from sdpo_jax.serving.store.connections import PostgresConnections
from sdpo_jax.serving.store.database import connect
from sdpo_jax.serving.store.store import Store
from tests import file_operations
from tests.file_operations import Tree
from tests.serving.store import s3_store

POSTGRES = 'TESTS_POSTGRES'  # The variable with the URL of the server, for all processes of a test.
bucket: s3_store.S3 | None = None  # In the process that has started it.


def replicated() -> bool:
  """Return whether stores are in PostgreSQL and a bucket."""
  return POSTGRES in os.environ


def places(folder: pathlib.Path) -> tuple[str, str]:
  """Return the root and the database of the store of a folder."""
  if not replicated():
    return str(folder / 'root'), str(folder / 'database' / 'store.sqlite')
  with _schema(folder) as (name, rows):
    rows.execute(f'CREATE SCHEMA IF NOT EXISTS {name}')
  return f's3://bucket{folder}', f'{os.environ[POSTGRES]}&options=-csearch_path%3D{name}'


@contextlib.contextmanager
def _schema(folder: pathlib.Path) -> Iterator:
  """Yield the name of the schema of a folder and a connection to it, which need not exist yet."""
  import psycopg

  name = f't{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}'
  with psycopg.connect(os.environ[POSTGRES], options=f'-csearch_path={name}') as rows:
    yield name, rows


def bury(folder: pathlib.Path) -> None:
  """Let the leases of killed processes end now, and not some seconds later."""
  if replicated():
    with _schema(folder) as (_, rows):
      rows.execute('DELETE FROM replicas')


def take_over(store: Store, *owners: str) -> None:
  """Let a store hold all adapters of owners, which puts right what a killed process has left."""
  if replicated():
    for owner in owners:
      store.hold_owner(owner)
      for adapter in store.adapters(owner):
        store.hold(owner, adapter.id)


def read_tree(folder: pathlib.Path) -> Tree:
  """Return what is stored of a folder."""
  if not replicated():
    return file_operations.read_tree(folder)
  return _objects(folder) | _tables(folder)


def _objects(folder: pathlib.Path) -> dict[str, bytes]:
  found = dict(bucket.objects).items()
  start = f'{folder}/'.removeprefix('/')
  return {f'root/{name.removeprefix(start)}': content for name, content in found if name.startswith(start)}


def _tables(folder: pathlib.Path) -> dict[str, bytes]:
  """Return the rows of all tables, but of no replica, as if all were dead."""
  found = {}
  with _schema(folder) as (_, rows):
    rows.execute('SET TRANSACTION ISOLATION LEVEL REPEATABLE READ')
    for (table,) in rows.execute('SELECT tablename FROM pg_tables WHERE schemaname = current_schema()').fetchall():
      if table != 'replicas':
        with rows.cursor().copy(f'COPY {table} TO STDOUT') as copy:
          found[f'tables/{table}'] = b''.join(copy)
  return found


def write_tree(tree: Tree, folder: pathlib.Path) -> None:
  """Store what `read_tree` has returned of another folder; without tables there is an empty database."""
  if not replicated():
    file_operations.write_tree(tree, folder)
    return
  remove(folder)
  start = str(folder).removeprefix('/')
  for path, content in tree.items():
    if path.startswith('root/'):
      bucket.objects[start + path.removeprefix('root')] = content
  tables = {path.removeprefix('tables/'): rows for path, rows in tree.items() if path.startswith('tables/')}
  if not tables:
    return
  connect(places(folder)[1]).close()
  with _schema(folder) as (_, rows):
    rows.execute(f'TRUNCATE {", ".join(tables)}')
    for table, content in tables.items():
      with rows.cursor().copy(f'COPY {table} FROM STDIN') as copy:
        copy.write(content)
    rows.execute("SELECT setval(pg_get_serial_sequence('session_examples', 'id'), max(id)) FROM session_examples")


def remove(folder: pathlib.Path) -> None:
  """Remove what is stored of a folder."""
  shutil.rmtree(folder, ignore_errors=replicated())
  if replicated():
    with _schema(folder) as (name, rows):
      rows.execute(f'DROP SCHEMA IF EXISTS {name} CASCADE')
    for name in _objects(folder):
      del bucket.objects[f'{folder}{name.removeprefix("root")}'.removeprefix('/')]


# What a killed process leaves, and what a failure of the machine.


@dataclasses.dataclass(frozen=True)
class Write:
  """A put or a commit, with what is stored then; or a mark."""

  kind: str  # As those of `file_operations.Operation`.
  path: str
  tree: Tree
  full: bool = False  # Whether it was a commit that no crash of PostgreSQL loses.


def record(folder: pathlib.Path, run: Callable[[], None]) -> list[Write]:
  """Record what is stored of a folder after every put and every commit of a function, and its marks."""
  written, alone = [], threading.RLock()
  real = PostgresConnections.writing

  def note(kind: str, full: bool = False) -> None:
    written.append(Write(kind, '', read_tree(folder), full))

  def disturb(method: str, name: str, done: bool) -> None:
    if method == 'GET' or not name.startswith(str(folder).removeprefix('/')) and method != 'POST':
      return
    if not done:
      alone.acquire()
      return
    try:
      note('write')
    finally:
      alone.release()

  @contextlib.contextmanager
  def writing(connections, full, only):
    with contextlib.ExitStack() as held:
      with real(connections, full, only) as rows:
        yield rows
        held.enter_context(alone)
      note('write', full)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(bucket, 'disturb', disturb)
    patch.setattr(PostgresConnections, 'writing', writing)
    patch.setattr(file_operations, 'mark', lambda text: written.append(Write('mark', text, {})))
    run()
  return written


class Disk:
  """What is stored, write by write, as `file_operations.Disk` has it of files."""

  def __init__(self):
    self._tree: Tree = {}
    self._commits: list[Tree] = [{}]  # Rows after the last commit that no crash loses, and after those since.

  def apply(self, write: Write) -> None:
    """Do what was recorded."""
    if write.kind == 'mark':
      return
    self._tree = write.tree
    rows = {path: content for path, content in write.tree.items() if path.startswith('tables/')}
    if write.full:
      self._commits = [rows]
    elif rows != self._commits[-1]:
      self._commits.append(rows)

  def now(self) -> Tree:
    """Return what processes see."""
    return self._tree

  def survivors(self) -> Iterator[tuple[str, Tree]]:
    """Yield what may be there after a crash of PostgreSQL, which may lose the newest commits that need not last."""
    objects = {path: content for path, content in self._tree.items() if path.startswith('root/')}
    for number, rows in enumerate(self._commits):
      yield f'{number} commits', objects | rows


def new_disk() -> Disk | file_operations.Disk:
  """Return an empty disk."""
  return Disk() if replicated() else file_operations.Disk()
