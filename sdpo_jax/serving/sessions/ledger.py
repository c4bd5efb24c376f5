"""The stored sessions of an owner: looked up with the owner, and changed by one request at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import sqlite3

from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest, NotFound, TurnConflict
from sdpo_jax.serving.sessions import archive, example_export
from sdpo_jax.serving.sessions.conversation import Dialogue
from sdpo_jax.serving.sessions.session_records import AgentSession, SessionTurn
from sdpo_jax.serving.store import session_tables
from sdpo_jax.serving.store.session_tables import ExampleRow, SessionRow
from sdpo_jax.serving.tenant import Tenant


@dataclasses.dataclass(frozen=True)
class SessionState:
  """A session as it is now."""

  session: AgentSession
  row: SessionRow
  turns: Sequence[SessionTurn]  # From the newest turn that is part of the conversation on; all if none is.

  @property
  def newest(self) -> SessionTurn | None:
    return self.turns[-1] if self.turns else None

  @property
  def number(self) -> int:
    """The number of the newest turn, −1 if there is none."""
    return self.turns[-1].n if self.turns else -1

  @property
  def answered(self) -> SessionTurn | None:
    """The newest turn that is part of the conversation."""
    return self.turns[0] if self.turns and self.turns[0].joins else None


class Ledger:
  """The sessions of an owner's adapters in the store."""

  def __init__(self, tenant: Tenant):
    """Make the ledger of one request of an owner."""
    self._tenant, self._service = tenant, tenant.service
    self._database = tenant.service.store.database

  def row(self, adapter: str, session: str) -> SessionRow:
    """Return the row of a session; raise NotFound if it does not exist or belongs to another owner."""
    known = self._tenant.adapter(adapter)
    row = session_tables.session(self._database, known.id, session)
    if row is None:
      raise NotFound(f'There is no session {short_repr(session)} of {adapter}.')
    return row

  def held(self, adapter: str, session: str) -> SessionState:
    """Read a session and its newest turns, back to one that joined the conversation; raise NotFound if absent."""
    row = self.row(adapter, session)
    turns: list[SessionTurn] = []
    while not turns or not turns[-1].joins:
      before = turns[-1].n if turns else 2**62
      found = session_tables.turns_back(self._database, session, before, 1)
      if not found:
        break
      turns.append(archive.turn_of(found[0]))
    return SessionState(archive.session_of(row, self._tenant.owner), row, turns[::-1])

  def settled(self, adapter: str, session: str) -> SessionState:
    """Return a session as it is now, after noting what was already learned from it."""
    self.row(adapter, session)  # This also makes the store re-read the adapter if its versions are in doubt.
    session_tables.reconcile(self._database, adapter)
    return self.held(adapter, session)

  def turn(self, held: SessionState, n: int) -> SessionTurn:
    """Return a turn; raise NotFound if there is none of this number."""
    row = session_tables.turn(self._database, held.session.id, n) if 0 <= n <= held.number else None
    if row is None:
      raise NotFound(f'There is no turn {short_repr(n)} of {held.session.id}, whose newest is {held.number}.')
    return archive.turn_of(row)

  def dialogue_of(self, held: SessionState) -> Dialogue:
    """Return the conversion of a session's messages to tokens.

    Raises:
      InvalidRequest: the tokenizer or the template have changed since the session was opened.
    """
    if held.row.record['written'] != example_export.written_by(self._service):
      raise InvalidRequest(
        f'The session {held.session.id} was opened with another tokenizer or chat template than the service has now: '
        'open a new one, or serve the old ones again (model.path, model.chat_template, '
        'data.apply_chat_template_kwargs). What it has taught stays learned, and its examples can be replayed.'
      )
    return example_export.dialogue_of(self._service, held.session)

  @contextlib.contextmanager
  def alone(self, session: str) -> Iterator[None]:
    """Hold the lock of a session within the block."""
    with self._service.turns.of(('session', session), self._tenant.call.deadline):
      self._tenant.call.check()
      yield

  @contextlib.contextmanager
  def writing(self) -> Iterator[sqlite3.Connection]:
    """Provide a transaction that is on the disk when it ends."""
    with self._database.writing(full=True) as rows:
      yield rows

  def change(self, held: SessionState, turn: SessionTurn, example: ExampleRow | None) -> None:
    """Store the new state of a turn, and the example to learn from it."""
    with self.writing() as rows:
      self.advance(rows, held)
      session_tables.change_turn(rows, held.session.id, turn.n, archive.record_of(turn), turn.kept_tokens)
      if example is not None:
        session_tables.put_example(rows, held.session.adapter, example)

  def advance(self, rows: sqlite3.Connection, held: SessionState) -> None:
    """Raise TurnConflict if a session has changed since it was read, and NotFound if it does not exist any more."""
    if session_tables.advance(rows, held.session.id, held.row.revision):
      return
    if session_tables.session(self._database, held.session.adapter, held.session.id) is None:
      raise NotFound(f'There is no session {held.session.id} any more.')
    raise TurnConflict(
      'Something else has changed the session meanwhile: look at its turns, and ask again.', current=held.number
    )
