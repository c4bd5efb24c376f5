"""Interactive sessions: an adapter proposes, a person decides, and corrections are learned at once.

The conversation is stored here, as token ids. A denied proposal leaves it: the next one answers the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import hmac
import secrets
from typing import Any

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.serving.errors import Forbidden, InvalidRequest, NotFound, TurnConflict
from sdpo_jax.serving.sessions import (
  archive,
  decisions,
  example_export,
  proposing,
  replaying,
  teaching,
  waiting_examples,
)
from sdpo_jax.serving.sessions.conversation import Dialogue, template_of
from sdpo_jax.serving.sessions.examples import TrainingExample
from sdpo_jax.serving.sessions.ledger import Ledger, SessionState
from sdpo_jax.serving.sessions.proposing import Proposing
from sdpo_jax.serving.sessions.session_records import (
  AgentSession,
  Decision,
  LearnedTurns,
  SessionTurn,
  ToolResult,
)
from sdpo_jax.serving.sessions.session_settings import SessionSettings
from sdpo_jax.serving.store import session_tables
from sdpo_jax.serving.store.store import IdempotentRequest
from sdpo_jax.serving.tenant import Tenant
from sdpo_jax.serving.tool_calls import cutting, form_of


class Sessions:
  """The sessions of an owner's adapters; any thread may call.

  Methods raise NotFound for sessions and adapters of other owners, as those of `Account` do.
  """

  def __init__(self, tenant: Tenant):
    """Make the object that `Account.sessions` returns."""
    self._tenant, self._service = tenant, tenant.service
    self._database = tenant.service.store.database
    self._ledger = Ledger(tenant)

  # Sessions.

  def open(self, adapter: str, settings: SessionSettings) -> tuple[AgentSession, str]:
    """Open a session.

    Args:
      adapter: the id of the adapter that proposes and learns.
      settings: of the session.

    Returns:
      The session, and the token that every change of it needs. The token itself is not stored.

    Raises:
      InvalidRequest: a setting is not allowed, or the chat template writes calls in an unknown form, or its
        conversations cannot be continued token by token.
      Forbidden: the adapter has reached the limit of sessions.
    """
    service, known = self._service, self._tenant.adapter(adapter)
    settings.check(service.settings, max_completion=service.max_completion, vocab_size=service.vocab_size)
    form = None
    if settings.tools:
      try:
        form = form_of(template_of(service.tokenizer, settings.tools))
      except UserError as error:
        raise InvalidRequest(str(error), field='tools') from error
      if (stop := cutting(settings.options(None).stop, form)) is not None:
        raise InvalidRequest(
          f'sampling.stop has {short_repr(stop)}, which is part of every call, so that none would be whole: leave it '
          'out.',
          field='sampling.stop',
        )
    session = AgentSession(f'ses-{secrets.token_hex(8)}', known.id, known.owner, service.clock(), settings, form)
    dialogue = example_export.dialogue_of(service, session)
    with service.tokenizing:
      dialogue.check(form)
    written = example_export.written_by(service)
    token = f'sst-{secrets.token_urlsafe(32)}'
    with self._ledger.writing() as rows:
      head = self._database.known(known.id)
      if head is None or head.deleted:
        raise NotFound(f'There is no adapter {short_repr(adapter)}.')
      most = service.settings.limits.max_sessions_per_adapter
      if len(session_tables.sessions(self._database, known.id)) >= most:
        raise Forbidden(
          f'The adapter has {most} sessions, as many as one may have (serve.limits.max_sessions_per_adapter): delete '
          'one.'
        )
      session_tables.put_session(rows, archive.session_row(session, _digest(token), written))
    return session, token

  def check_token(self, adapter: str, session: str, token: str | None) -> None:
    """Raise Forbidden unless `token` is the one that the session was opened with."""
    row = self._ledger.row(adapter, session)
    if token is None or not hmac.compare_digest(_digest(token), row.token):
      raise Forbidden('The session needs the token that it was opened with, in the header X-Session-Token.')

  def list(self, adapter: str) -> list[AgentSession]:
    """Return the sessions of an adapter, the oldest first."""
    known = self._tenant.adapter(adapter)
    return [archive.session_of(row, known.owner) for row in session_tables.sessions(self._database, known.id)]

  def get(self, adapter: str, session: str) -> AgentSession:
    """Return a session."""
    return archive.session_of(self._ledger.row(adapter, session), self._tenant.owner)

  def turns(self, adapter: str, session: str) -> Sequence[SessionTurn]:
    """Return the turns of a session in order."""
    self._ledger.row(adapter, session)
    return [archive.turn_of(row) for row in session_tables.turns(self._database, session)]

  def delete(self, adapter: str, session: str) -> None:
    """Erase a session, its turns and its examples; what the adapter has learned stays."""
    with self._ledger.alone(session):
      self._ledger.row(adapter, session)
      with self._ledger.writing() as rows:
        session_tables.erase_session(rows, session)
      self._database.truncate_log()

  # Turns.

  def propose(
    self,
    adapter: str,
    session: str,
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    seed: int | None = None,
    drafts: bool = False,
  ) -> Proposing:
    """Draw the next proposal from the newest version of the adapter.

    Args:
      adapter: its id.
      session: its id.
      messages: the messages before it: of the user, or tool answers that were not passed to `results`. None are needed
        after a denied proposal or after results.
      seed: seed of the proposal; None: a random one.
      drafts: whether to also yield drafts.

    Raises:
      TurnConflict: the newest proposal is not decided yet.
      Forbidden: the session has reached the limit of turns.
      InvalidRequest: there is nothing to answer, a message is invalid, or the prompt is too long.
      ServiceError, UserError: as `Tenant.sample`.
    """
    held = self._ledger.held(adapter, session)
    new, newest = proposing.new_messages(held, messages), held.newest
    if newest is not None and newest.status == 'open':
      raise TurnConflict(
        f'Turn {newest.n} is not decided yet: approve, edit or deny it before the next one.', current=newest.n
      )
    most = self._service.settings.limits.max_turns_per_session
    if held.number + 1 >= most:
      raise Forbidden(
        f'The session has {most} turns, as many as one may have (serve.limits.max_turns_per_session): open a new one.'
      )
    dialogue = self._ledger.dialogue_of(held)
    if not new and newest is not None and newest.status == 'denied':
      prompt = list(newest.prompt_tokens)
    else:
      with self._service.tokenizing:
        prompt = proposing.next_prompt(held, dialogue, new).tokens
    return proposing.draw(
      self._tenant, self._ledger, held, dialogue, prompt, seed, drafts, number=held.number + 1, messages=new
    )

  def retry(self, adapter: str, session: str, n: int, *, seed: int | None = None, drafts: bool = False) -> Proposing:
    """Draw an alternative to a turn from the newest version; it does not join the conversation and is not stored.

    Args:
      adapter: its id.
      session: its id.
      n: number of the turn.
      seed: as in `propose`.
      drafts: as in `propose`.
    """
    held = self._ledger.held(adapter, session)
    turn = self._ledger.turn(held, n)
    dialogue = self._ledger.dialogue_of(held)
    return proposing.draw(
      self._tenant,
      self._ledger,
      held,
      dialogue,
      turn.prompt_tokens,
      seed,
      drafts,
      number=n,
      messages=turn.messages,
      joins=False,
    )

  def decide(self, adapter: str, session: str, n: int, decision: Decision) -> tuple[SessionTurn, LearnedTurns | None]:
    """Decide on the newest proposal, and learn from the decision.

    The decision is on the disk before it is learned. If learning failed, sending the same decision again learns it,
    exactly once whatever happens; if it was learned already, this returns the stored result.

    Args:
      adapter: its id.
      session: its id.
      n: number of the turn.
      decision: the decision.

    Returns:
      The turn as it is now, and what was learned; None: there was nothing to learn.

    Raises:
      TurnConflict: it is not the newest turn, or was decided differently.
      InvalidRequest: the decision does not fit the turn, or its lesson does not fit the teacher's prompt.
      ServiceError, UserError: as `feedback.learn`; the decision stands, but is not learned yet.
    """
    with self._ledger.alone(session):
      held = self._ledger.settled(adapter, session)
      turn = self._ledger.turn(held, n)
      dialogue = self._ledger.dialogue_of(held)
      if turn.decision is not None:
        if turn.decision != decision:
          raise TurnConflict(
            f'Turn {n} is {turn.status} already: what was decided stays; deny a later proposal instead.',
            current=held.number,
          )
        return self._again(held, dialogue, turn)
      if n != held.number:
        raise TurnConflict(f'Turn {n} is not the newest, which is {held.number}: decide that one.', current=held.number)
      decided, example = decisions.decided(self._tenant, held, dialogue, turn, decision)
      self._ledger.change(held, decided, example)
      return self._taught(held, dialogue, decided, example is not None)

  def results(
    self, adapter: str, session: str, n: int, results: Sequence[ToolResult]
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Add tool results to the conversation, and learn from failed ones if the session's settings say so.

    Args:
      adapter: its id.
      session: its id.
      n: number of the newest turn, which was approved or edited.
      results: one for each of its calls.

    Returns:
      As `decide`.

    Raises:
      TurnConflict: it is not the newest turn, not decided, or has other results.
      InvalidRequest: the results do not match the calls of the turn.
      ServiceError, UserError: as `decide`.
    """
    with self._ledger.alone(session):
      held = self._ledger.settled(adapter, session)
      turn = self._ledger.turn(held, n)
      dialogue = self._ledger.dialogue_of(held)
      results = tuple(sorted(results, key=lambda result: result.call))
      if turn.results:
        if turn.results != results:
          raise TurnConflict(f'Turn {n} has other results already.', current=held.number)
        return self._again(held, dialogue, turn)
      if n != held.number or turn.status not in ('approved', 'edited'):
        raise TurnConflict(
          f'Turn {n} is {turn.status}, and turn {held.number} is the newest: results belong to the newest turn, once '
          'it was approved or edited.',
          current=held.number,
        )
      if not turn.calls or [result.call for result in results] != list(range(len(turn.calls))):
        raise InvalidRequest(
          f'Turn {n} has {len(turn.calls)} calls, and its results must be one for each of them.', field='results'
        )
      answered, example = dataclasses.replace(turn, results=results), None
      if held.session.settings.learn_from_results:
        example = decisions.example_of(
          self._tenant, held, dialogue, answered, 'result', teaching.of_results(turn, results)
        )
      self._ledger.change(held, answered, example)
      return self._taught(held, dialogue, answered, example is not None)

  # Learning.

  def flush(self, adapter: str, session: str) -> LearnedTurns | None:
    """Learn the waiting examples now and return the result; None: none waits."""
    with self._ledger.alone(session):
      held = self._ledger.settled(adapter, session)
      return waiting_examples.learn(self._tenant, held.session, self._ledger.dialogue_of(held), few=True)

  def examples(self, adapter: str, session: str | None = None) -> Sequence[TrainingExample]:
    """Return every example that was or will be learned in sessions of an adapter, or in one of them."""
    self._tenant.adapter(adapter)
    if session is not None:
      self._ledger.row(adapter, session)
    return example_export.examples(self._tenant, adapter, session)

  def replay(
    self, adapter: str, examples: Sequence[TrainingExample], *, request: IdempotentRequest | None = None
  ) -> Sequence[LearnedTurns]:
    """Learn examples of another adapter, in the groups in which they were learned; see `replaying.replay`."""
    self._tenant.adapter(adapter)
    return replaying.replay(self._tenant, adapter, examples, request)

  # Inside.

  def _taught(
    self, held: SessionState, dialogue: Dialogue, turn: SessionTurn, teaches: bool
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Learn the waiting examples if a turn has added one; return the turn afterwards, and the result."""
    if not teaches:
      return turn, None
    learned = waiting_examples.learn(self._tenant, held.session, dialogue)
    return self._ledger.turn(held, turn.n), learned

  def _again(
    self, held: SessionState, dialogue: Dialogue, turn: SessionTurn
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Return the turn and the result for a repeated request; learn its example now if it still waits."""
    waiting = session_tables.examples(self._database, held.session.adapter, session=held.session.id, state='waiting')
    if any(row.n == turn.n for row in waiting):
      return self._taught(held, dialogue, turn, True)
    return turn, turn.learned


def _digest(token: str) -> str:
  return hashlib.sha256(token.encode('utf-8', 'surrogatepass')).hexdigest()
