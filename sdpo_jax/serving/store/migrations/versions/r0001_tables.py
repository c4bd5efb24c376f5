"""The tables of a store in one SQLite file. Its rows about adapters and versions can be rebuilt from the root.

Texts are stored as JSON in ASCII, since clients' texts may not be valid UTF-8.
"""

from __future__ import annotations

from alembic import op
import sqlalchemy as sa

revision, down_revision = '0001', None
# Of all tables by their names: the columns, and those of the primary key. Types: t(ext), i(nteger), r(eal), b(ytes);
# those in capitals are not null, and `#` is a number that the database gives to each row.
TABLES = {
  'meta': ('root:T', ''),
  'adapters': (
    'id:T owner:T name:T head:I created:R settings:T digest:T origin:T kept_from:I pinned:T tag:T deleted:I',
    'id',
  ),
  'versions': (
    'adapter:T number:I parent:i reason:t created:r digest:t previous:t details:t request_key:t request_body:t '
    'damaged:t',
    'adapter number',
  ),
  'intents': ('adapter:T folder:T version:T', 'adapter'),
  'samples': (
    'id:T owner:T adapter:t version:i prompt_tokens:b tokens:b log_probs:b temperature:r messages:t text:t '
    'finish_reason:t created:r expires:r',
    'id',
  ),
  'requests': (
    'owner:T key:T body:T state:T status:i response:b adapter:t version:i created:R',
    'owner key',
  ),
  'feedback': ('id:# adapter:T record:T', 'id'),
  'sessions': ('id:T adapter:T created:R token:T revision:I record:T', 'id'),
  'session_turns': (
    'session:T n:I adapter:T prompt_tokens:B tokens:B log_probs:B kept_tokens:b record:T',
    'session n',
  ),
  'session_examples': (
    'id:# session:T n:I kind:T adapter:T state:T head:I versions:T teacher_prompt:B record:T',
    'id',
  ),
  'closings': ('stamp:T', ''),
  'shrunk': ('adapter:T head:I', 'adapter'),
  'usage': ('key:T day:I kind:T amount:I', 'key day kind'),
}
INDICES = {
  'adapters_of_owner': ('adapters', 'owner name'),
  'adapters_by_age': ('adapters', 'owner deleted created id'),
  'versions_by_request': ('versions', 'request_key'),
  'samples_by_end': ('samples', 'expires'),
  'samples_of_adapter': ('samples', 'adapter'),
  'requests_of_adapter': ('requests', 'adapter'),
  'feedback_of_adapter': ('feedback', 'adapter'),
  'sessions_of_adapter': ('sessions', 'adapter'),
  'sessions_by_age': ('sessions', 'adapter created id'),
  'session_turns_of_adapter': ('session_turns', 'adapter'),
  'session_examples_of_adapter': ('session_examples', 'adapter state'),
}
UNIQUE = {'session_examples': 'session n kind'}
_TYPES = {'T': sa.Text(), 'I': sa.BigInteger(), 'R': sa.Double(), 'B': sa.LargeBinary()}
_NUMBER = sa.BigInteger().with_variant(sa.Integer(), 'sqlite')  # SQLite numbers the rows of that type only.


def upgrade() -> None:
  """Make the tables."""
  for name, (columns, key) in TABLES.items():
    make(name, columns, key)
  for name, (table, columns) in INDICES.items():
    op.create_index(name, table, columns.split())


def make(name: str, columns: str, key: str) -> None:
  """Make a table from its columns, as in `TABLES`."""
  made = [column(each, key.split()) for each in columns.split()]
  if name in UNIQUE:
    made.append(sa.UniqueConstraint(*UNIQUE[name].split()))
  op.create_table(name, *made)


def column(said: str, key: list[str]) -> sa.Column:
  """Return a column, as in `TABLES`."""
  name, _, kind = said.partition(':')
  if kind == '#':
    return sa.Column(name, _NUMBER, sa.Identity(), primary_key=True)
  default = '0' if name == 'deleted' else None
  return sa.Column(name, _TYPES[kind.upper()], primary_key=name in key, nullable=kind.islower(), server_default=default)
