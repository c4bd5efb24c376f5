"""The tables of the database, and how older databases get them: revisions of Alembic below `versions/`."""

from __future__ import annotations

import functools
import io
import pathlib
from typing import Any

# The revision that made the tables that the oldest databases have, and the newest one.
FIRST, NEWEST = '0001', '0003'


@functools.cache
def scripts() -> Any:
  """Return the revisions, as Alembic's `ScriptDirectory`."""
  from alembic.script import ScriptDirectory  # Not above, since most starts do not need it.

  return ScriptDirectory(str(pathlib.Path(__file__).parent))


@functools.cache
def statements(dialect: str, since: str | None) -> tuple[str, ...]:
  """Return the SQL statements that bring a database to the newest revision; they belong into one transaction.

  Args:
    dialect: 'sqlite' or 'postgresql'.
    since: the revision that it has; None: it is empty.
  """
  if since == NEWEST:
    return ()
  from alembic.config import Config
  from alembic.runtime.environment import EnvironmentContext

  def steps(revision: str, _: Any) -> Any:
    return scripts()._upgrade_revs(NEWEST, revision)  # noqa: SLF001 (Alembic's cookbook says so.)

  found = io.StringIO()
  with EnvironmentContext(Config(), scripts(), fn=steps, as_sql=True, starting_rev=since) as environment:
    environment.configure(dialect_name=dialect, output_buffer=found, transactional_ddl=False)
    environment.run_migrations()
  lines = [line for line in found.getvalue().splitlines() if not line.startswith('--')]
  return tuple(each.strip() for each in '\n'.join(lines).split(';') if each.strip())


def is_known(revision: str) -> bool:
  """Return whether this version of sdpo_jax has a revision."""
  return revision == NEWEST or revision in {each.revision for each in scripts().walk_revisions()}
