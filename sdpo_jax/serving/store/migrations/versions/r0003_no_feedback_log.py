"""The log of feedback, which nothing read, is dropped: what was learned stands in the details of versions."""

from __future__ import annotations

from alembic import op

revision, down_revision = '0003', '0002'


def upgrade() -> None:
  """Drop its table."""
  op.drop_table('feedback')
