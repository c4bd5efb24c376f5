"""Interactive sessions: an adapter proposes, a person decides, and the adapter learns from corrections at once.

Conversations are stored as token ids. A denied proposal stays in the conversation with the reason, or leaves it, and
the next one answers the same prompt (`SessionSettings.after_denial`); what is learned is on the prompt without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import hmac
import json
import secrets
from typing import Any

from sdpo_jax.environments.workspace import tools
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.errors import Forbidden, InvalidRequest, NotFound, TurnConflict
from sdpo_jax.serving.records import place_after
from sdpo_jax.serving.sample_requests import SampleDraft
from sdpo_jax.serving.sessions import examples, proposing, replaying, session_tables, teaching, waiting_examples
from sdpo_jax.serving.sessions.conversation import Dialogue, dialogue_of, template_of, written_by
from sdpo_jax.serving.sessions.examples import TrainingExample
from sdpo_jax.serving.sessions.session_records import (
  DECIDED,
  AgentSession,
  Decision,
  LearnedTurns,
  SessionSettings,
  SessionState,
  SessionTurn,
  TeacherTexts,
  ToolResult,
  edited,
)
from sdpo_jax.serving.store.database import ALL
from sdpo_jax.serving.store.store import IdempotentRequest
from sdpo_jax.serving.tool_calls import ToolCall, cutting, form_of, read_calls, write_calls


class Sessions:
  """The sessions of all adapters of an owner; any thread may call.

  As in `Account`, methods raise NotFound for adapters and sessions that do not exist or belong to another owner.
  """

  def __init__(self, account: Account):
    """Make the interface to the sessions of an account."""
    self._account, self._service = account, account.service
    self._database = account.service.store.database

  # Sessions.

  def open(self, adapter: str, settings: SessionSettings) -> tuple[AgentSession, str]:
    """Open a session.

    Args:
      adapter: the id of the adapter that proposes and learns.
      settings: the settings of the session.

    Returns:
      The session, and the token that all changes of it need, of which only the digest is stored.

    Raises:
      InvalidRequest: a setting is not allowed, the tools leave no room for a message, the chat template writes calls in
        an unknown form, or conversations with it cannot be continued after sampled tokens.
      Forbidden: the adapter has as many sessions as the limit allows.
    """
    service, known = self._service, self._account.adapter(adapter)
    if known.is_cartridge:
      raise InvalidRequest(f'{known.name} is a cartridge, which does not learn here: name an adapter.', field='adapter')
    settings.check(service.settings, max_completion=service.max_completion, vocab_size=service.vocab_size)
    form = None
    if settings.tools:
      try:
        form = form_of(template_of(service.tokenizer, settings.tools))
      except UserError as error:
        raise InvalidRequest(str(error), field='tools') from error
      if (stop := cutting(settings.options(None).stop, form)) is not None:
        raise InvalidRequest(
          f'sampling.stop has {short_repr(stop)}, which would cut off every call: leave it out.',
          field='sampling.stop',
        )
    id, token, created = f'ses-{secrets.token_hex(8)}', f'sst-{secrets.token_urlsafe(32)}', service.clock()
    session = AgentSession(id, known.id, created, settings, form, written_by(service), _digest(token))
    dialogue = dialogue_of(service, session)
    with self._account.tokenizing():
      dialogue.check(form)
      least = len(dialogue.begin([{'role': 'user', 'content': 'x'}]).tokens)
    if least > service.max_prompt:
      raise InvalidRequest(
        f'The {len(settings.tools)} tools and the system message make a prompt of {least} tokens, more than the limit '
        f'of {service.max_prompt} (serve.prompt_buckets): leave some out, or raise the limit.',
        field='tools' if settings.tools else 'system',
      )
    with self._database.writing(full=True, alone=f'sessions {known.id}') as rows:
      if not self._database.is_there(rows, known.id, known.owner):
        raise NotFound(f'There is no adapter {short_repr(adapter)}.')
      most = service.settings.limits.max_sessions_per_adapter
      if session_tables.count(self._database, known.id) >= most:
        raise Forbidden(
          f'The adapter has {most} sessions, the limit (serve.limits.max_sessions_per_adapter): delete one.'
        )
      session_tables.put_session(rows, session)
    return session, token

  def check_token(self, adapter: str, session: str, token: str | None) -> None:
    """Raise Forbidden unless `token` is the token of the session."""
    known = self.get(adapter, session)
    if token is None or not hmac.compare_digest(_digest(token), known.token):
      raise Forbidden('Send the token of the session, from when it was opened, in the header X-Session-Token.')

  def list(self, adapter: str, after: str | None = None, limit: int = ALL) -> list[AgentSession]:
    """Return the sessions of an adapter, the oldest first, from the one after `after` on, see `place_after`.

    Raises:
      InvalidRequest: there is no session `after`.
    """
    id = self._account.adapter(adapter).id
    place = place_after(after, lambda session: self.get(adapter, session))
    return session_tables.sessions(self._database, id, place, limit)

  def get(self, adapter: str, session: str) -> AgentSession:
    """Return a session by its id."""
    known = session_tables.session(self._database, self._account.adapter(adapter).id, session)
    if known is None:
      raise NotFound(f'{adapter} has no session {short_repr(session)}.')
    return known

  def turns(self, adapter: str, session: str, after: int = -1, limit: int = ALL) -> Sequence[SessionTurn]:
    """Return the turns of a session with numbers above `after` in order."""
    return session_tables.turns(self._database, self.get(adapter, session).id, after, limit)

  def delete(self, adapter: str, session: str) -> None:
    """Erase a session with its turns and examples; what the adapter has learned stays."""
    self._service.store.hold(self._account.owner, adapter)
    with self._service.turns.of(('session', session), self._account.call):
      self.get(adapter, session)
      with self._database.writing(full=True) as rows:
        session_tables.erase_session(rows, session)
      self._database.connections.truncate_log()

  # Turns.

  def propose(
    self,
    adapter: str,
    session: str,
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    seed: int | None = None,
    drafts: bool = False,
  ) -> Iterator[SampleDraft | SessionTurn]:
    """Start sampling the next proposal, from the newest version of the adapter.

    Args:
      adapter: the id of the adapter.
      session: the id of the session.
      messages: the new messages: of the user, or of tools whose results were not passed to `results`. They may be empty
        after a denied proposal or after results.
      seed: the seed of sampling; None: a random one.
      drafts: whether to yield drafts, too.

    Raises:
      TurnConflict: the newest proposal is not decided yet.
      Forbidden: the session has as many turns as the limit allows.
      InvalidRequest: there is nothing to answer, a message is invalid, or the prompt is too long.
      ServiceError, UserError: as `Account.sample`.
    """
    held = self._held(adapter, session)
    new, newest = proposing.new_messages(held, messages), held.turns[-1] if held.turns else None
    if newest is not None and newest.status == 'open':
      raise TurnConflict(f'Turn {newest.n} is not decided yet: approve, edit or deny it first.', current=newest.n)
    most = self._service.settings.limits.max_turns_per_session
    if held.number + 1 >= most:
      raise Forbidden(f'The session has {most} turns, the limit (serve.limits.max_turns_per_session): open a new one.')
    dialogue = self._dialogue_of(held.session)
    if not new and newest is not None and newest.status == 'denied' and newest.told is None:
      prompt, compacted = list(newest.prompt_tokens), False
    else:
      with self._account.tokenizing():
        prompt, compacted = proposing.next_prompt(self._database, held, dialogue, new, self._service.max_prompt)
    sampling = {'seed': seed, 'drafts': drafts, 'compacted': compacted}
    return proposing.draw(self._account, held, dialogue, prompt, new, held.number + 1, **sampling)

  def retry(
    self, adapter: str, session: str, n: int, *, seed: int | None = None, drafts: bool = False
  ) -> Iterator[SampleDraft | SessionTurn]:
    """Start sampling an alternative to a turn, from the newest version; it is not stored.

    Args:
      adapter: the id of the adapter.
      session: the id of the session.
      n: the number of the turn.
      seed: as in `propose`.
      drafts: as in `propose`.
    """
    held = self._held(adapter, session)
    turn = self._turn(held, n)
    dialogue, prompt, messages = self._dialogue_of(held.session), turn.prompt_tokens, turn.messages
    return proposing.draw(self._account, held, dialogue, prompt, messages, n, seed=seed, drafts=drafts, joins=False)

  def decide(
    self, adapter: str, session: str, n: int, decision: Decision, digest: str | None = None
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Store a decision on the newest proposal, and learn from it.

    The decision is on the disk before learning begins. If learning has failed, the same decision can be sent again: it
    is learned exactly once, and further repeats return the stored result.

    Args:
      adapter: the id of the adapter.
      session: the id of the session.
      n: the number of the turn.
      decision: the decision.
      digest: the digest of the proposal on which the person has decided; None: it is not checked.

    Returns:
      The turn after the decision, and what was learned (None: there was nothing to learn).

    Raises:
      TurnConflict: it is not the newest turn, it was decided differently, or it has another digest.
      InvalidRequest: the decision does not fit the turn, or the lesson does not fit the teacher's prompt.
      ServiceError, UserError: as `feedback.learn`; the decision is stored, but not learned yet.
    """
    with self._settled(adapter, session) as (held, dialogue):
      turn = self._turn(held, n)
      _check_digest(held, turn, turn.calls, digest)
      if turn.decision is not None:
        if turn.decision != decision:
          raise TurnConflict(
            f'Turn {n} is already {turn.status}, which cannot be changed: deny a later proposal instead.',
            current=held.number,
          )
        return self._again(held, dialogue, turn)
      if n != held.number:
        raise TurnConflict(f'The newest turn is {held.number}, not {n}: decide on that one.', current=held.number)
      decided, said = self._decided(held.session, dialogue, turn, decision)
      return self._change(held, dialogue, decided, 'edit' if decision.kind == 'edit' else 'denial', said)

  def results(
    self, adapter: str, session: str, n: int, results: Sequence[ToolResult], digest: str | None = None
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Add tool results to the conversation, and learn from failures if `learn_from_results` is set.

    They can be replaced until a turn has read them, or they were taken for a lesson.

    Args:
      adapter: the id of the adapter.
      session: the id of the session.
      n: the number of the newest turn, which must be approved or edited.
      results: one result for each of its calls.
      digest: the digest of the turn whose calls were run, after the decision; None: it is not checked.

    Returns:
      As `decide`.

    Raises:
      TurnConflict: it is not the newest turn, not approved or edited, or has another digest or other results that stay.
      InvalidRequest: the results do not match the calls of the turn.
      ServiceError, UserError: as `decide`.
    """
    with self._settled(adapter, session) as (held, dialogue):
      turn = self._turn(held, n)
      _check_digest(held, turn, turn.called, digest)
      results = tuple(sorted(results, key=lambda result: result.call))
      if turn.results == results:
        return self._again(held, dialogue, turn)
      if turn.results:
        known = session_tables.examples(self._database, adapter, session=session)
        if n != held.number or any((each.n, each.kind) == (n, 'result') for each in known):
          raise TurnConflict(
            f'Turn {n} already has other results, which a later turn has read or which are learned.',
            current=held.number,
          )
      if n != held.number or turn.status not in ('approved', 'edited'):
        raise TurnConflict(
          f'Turn {n} is {turn.status}, and the newest turn is {held.number}: send results for the newest turn, after '
          'it was approved or edited.',
          current=held.number,
        )
      if not turn.calls or [result.call for result in results] != list(range(len(turn.calls))):
        raise InvalidRequest(
          f'Turn {n} has {len(turn.calls)} calls: send one result for each of them.', field='results'
        )
      learns = held.session.settings.learn_from_results
      said = teaching.of_results(turn, results) if learns else TeacherTexts()
      return self._change(held, dialogue, dataclasses.replace(turn, results=results), 'result', said)

  # Learning.

  def flush(self, adapter: str, session: str) -> LearnedTurns | None:
    """Learn from the waiting examples now, and return the result; None: no example waits."""
    with self._settled(adapter, session) as (held, dialogue):
      return waiting_examples.learn(self._account, held.session, dialogue, few=True)

  def examples(
    self, adapter: str, session: str | None = None, after: int = -1, limit: int = ALL
  ) -> Sequence[TrainingExample]:
    """Return examples that were or will be learned in sessions of an adapter, or in one, with ids above `after`."""
    self._account.adapter(adapter)
    if session is not None:
      self.get(adapter, session)
    return examples.exported(self._account, adapter, session, after, limit)

  def replay(
    self, adapter: str, examples: Sequence[TrainingExample], *, request: IdempotentRequest | None = None
  ) -> Sequence[LearnedTurns]:
    """Learn from examples of another adapter, see `replaying.replay`."""
    self._account.adapter(adapter)
    return replaying.replay(self._account, adapter, examples, request)

  # State.

  def _held(self, adapter: str, session: str) -> SessionState:
    """Read a session and its newest turns, back to one that is part of the conversation."""
    return session_tables.state(self._database, self.get(adapter, session))

  @contextlib.contextmanager
  def _settled(self, adapter: str, session: str) -> Iterator[tuple[SessionState, Dialogue]]:
    """Hold the lock of a session; yields its state, after marking the examples that were already learned."""
    self._service.store.hold(self._account.owner, adapter)
    with self._service.turns.of(('session', session), self._account.call):
      found = self.get(adapter, session)  # Makes the store re-read the adapter if that is in doubt.
      session_tables.reconcile(self._database, found)
      yield session_tables.state(self._database, found), self._dialogue_of(found)

  def _turn(self, held: SessionState, n: int) -> SessionTurn:
    """Return a turn by its number; raises NotFound if there is none."""
    turn = session_tables.turn(self._database, held.session.id, n) if 0 <= n <= held.number else None
    if turn is None:
      raise NotFound(f'{held.session.id} has no turn {short_repr(n)}: its newest is {held.number}.')
    return turn

  def _dialogue_of(self, session: AgentSession) -> Dialogue:
    """Return the `Dialogue` of a session.

    Raises:
      InvalidRequest: the tokenizer or the chat template has changed since the session was opened.
    """
    if session.written != written_by(self._service):
      raise InvalidRequest(
        f'The session {session.id} was opened with another tokenizer or chat template than the service has now: '
        'open a new one, or restore these settings (model.path, model.chat_template, '
        'data.apply_chat_template_kwargs). What was learned in it stays, and its examples can be replayed.'
      )
    return dialogue_of(self._service, session)

  def _decided(
    self, session: AgentSession, dialogue: Dialogue, turn: SessionTurn, decision: Decision
  ) -> tuple[SessionTurn, TeacherTexts]:
    """Return a turn with its decision, and the texts that the teacher reads about it."""
    decided = dataclasses.replace(turn, decision=decision, status=DECIDED[decision.kind])
    if decision.kind != 'deny' and turn.calls and turn.fault is not None:
      raise InvalidRequest(
        f'Turn {turn.n} also has an invalid call ({turn.fault}): deny it, since its plan is incomplete.',
        field='decision',
      )
    if decision.kind == 'approve':
      return decided, TeacherTexts()
    if decision.kind == 'deny':
      said = TeacherTexts(feedback=decision.correction, environment=turn.fault)
      if session.settings.after_denial == 'tell':
        told = tools.denied(said.whole) if turn.calls else said.whole or tools.DENIED
        decided = dataclasses.replace(decided, told=told)
      return decided, said
    if decision.call >= len(turn.calls):
      raise InvalidRequest(
        f'Turn {turn.n} has {len(turn.calls)} calls, numbered from 0, and no call {decision.call}.', field='call'
      )
    calls = edited(turn.calls, decision)
    one, other = (json.dumps(dict(each[decision.call].arguments), sort_keys=True) for each in (calls, turn.calls))
    if one == other:  # As JSON, since 1, 1.0 and true are equal in Python.
      raise InvalidRequest('The arguments are unchanged: approve the call, or change them.', field='arguments')
    with self._account.tokenizing():
      kept = dialogue.edited(turn.text, calls, session.tool_form)
      if tuple(read_calls(dialogue.text_of(kept), session.tool_form, session.settings.tools).calls) != calls:
        raise InvalidRequest(
          'These arguments cannot be written as a call in the form of the model: change them.', field='arguments'
        )
    written = write_calls(calls, session.tool_form, session.settings.tools)
    return dataclasses.replace(decided, kept_tokens=kept), TeacherTexts(written, decision.correction)

  def _change(
    self, held: SessionState, dialogue: Dialogue, turn: SessionTurn, kind: str, said: TeacherTexts
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Store a changed turn and its example, if there is text for the teacher; then learn from waiting examples."""
    example = waiting_examples.example_of(self._account, held.session, dialogue, turn, kind, said)
    with self._database.writing(full=True) as rows:
      session_tables.advance(rows, held.session, held.number)
      session_tables.change_turn(rows, held.session, turn)
      if example is not None:
        session_tables.put_example(rows, held.session.adapter, example)
    return self._taught(held, dialogue, turn) if example is not None else (turn, None)

  def _taught(
    self, held: SessionState, dialogue: Dialogue, turn: SessionTurn
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Learn from the waiting examples; return the turn after that, and the result."""
    learned = waiting_examples.learn(self._account, held.session, dialogue)
    return self._turn(held, turn.n), learned

  def _again(
    self, held: SessionState, dialogue: Dialogue, turn: SessionTurn
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Return turn and result for a repeated request; if the example of the turn still waits, learn from it now."""
    session = held.session
    waiting = session_tables.examples(self._database, session.adapter, session=session.id, state='waiting')
    if any(example.n == turn.n for example in waiting):
      return self._taught(held, dialogue, turn)
    return turn, turn.learned


def _check_digest(held: SessionState, turn: SessionTurn, calls: Sequence[ToolCall], digest: str | None) -> None:
  """Raise TurnConflict if the turn with these calls has another digest than the one that a client has shown."""
  if digest is not None and digest != turn.digest(calls):
    raise TurnConflict(
      f'Turn {turn.n} is not what the request is about (digest): read the session, and decide on what it says now.',
      current=held.number,
    )


def _digest(token: str) -> str:
  return hashlib.sha256(token.encode('utf-8', 'surrogatepass')).hexdigest()
