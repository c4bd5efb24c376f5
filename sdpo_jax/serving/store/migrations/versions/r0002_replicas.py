"""What replicas need: who lives, who holds which adapter, whose requests are in progress, and their common keys."""

from __future__ import annotations

from alembic import op
import sqlalchemy as sa

revision, down_revision = '0002', '0001'


def upgrade() -> None:
  """Make the tables."""
  text, number, seconds = sa.Text(), sa.BigInteger(), sa.Double()
  op.create_table(
    'replicas',
    sa.Column('id', text, primary_key=True),
    sa.Column('url', text, nullable=False),
    sa.Column('expires', seconds, nullable=False),  # Seconds since the epoch, by the clock of the database.
  )
  op.create_table(
    'leases',
    sa.Column('adapter', text, primary_key=True),  # The id of an adapter, or what `leases` makes of an owner.
    sa.Column('replica', text, nullable=False),  # '': it was given back.
    sa.Column('epoch', number, nullable=False),
  )
  op.create_index('leases_of_replica', 'leases', ['replica'])
  op.create_table(
    'api_keys',
    sa.Column('id', text, primary_key=True),
    sa.Column('record', text, nullable=False),
  )
  op.add_column('requests', sa.Column('replica', text, nullable=False, server_default=''))
