"""Interactive sessions: an adapter proposes, a person decides, and what was said of a proposal is learned at once.

The conversation is held here, as token ids. A denied proposal leaves it: the next one answers the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import hmac
import secrets
import sqlite3
from typing import TYPE_CHECKING, Any

from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.serving import prompts
from sdpo_jax.serving.errors import Forbidden, InvalidRequest, NotFound, TurnConflict
from sdpo_jax.serving.sampling import SampleDone
from sdpo_jax.serving.sessions import archive, classroom, exporting, replaying, teaching
from sdpo_jax.serving.sessions.conversation import Asked, Dialogue, template_of
from sdpo_jax.serving.sessions.examples import TrainingExample
from sdpo_jax.serving.sessions.proposing import Proposing
from sdpo_jax.serving.sessions.records import (
  DECIDED,
  AgentSession,
  Decision,
  LearnedTurns,
  SessionTurn,
  ToolResult,
  edited,
)
from sdpo_jax.serving.sessions.settings import SessionSettings
from sdpo_jax.serving.store import session_tables
from sdpo_jax.serving.store.session_tables import ExampleRow, SessionRow
from sdpo_jax.serving.store.store import Request
from sdpo_jax.serving.targets import Target
from sdpo_jax.serving.tool_calls import form_of, read_calls
from sdpo_jax.types import Messages

if TYPE_CHECKING:
  from sdpo_jax.serving.account import Account

_ROLES = ('user', 'assistant', 'tool')


@dataclasses.dataclass(frozen=True)
class _Held:
  """A session as it is now."""

  session: AgentSession
  row: SessionRow
  turns: Sequence[
    SessionTurn
  ]  # From the newest one that is part of the conversation on; from the first one if none is.

  @property
  def newest(self) -> SessionTurn | None:
    return self.turns[-1] if self.turns else None

  @property
  def number(self) -> int:
    """Of the newest turn."""
    return self.turns[-1].n if self.turns else -1

  @property
  def answered(self) -> SessionTurn | None:
    """The newest turn that is part of the conversation."""
    return self.turns[0] if self.turns and self.turns[0].joins else None


class Sessions:
  """The sessions of an owner's adapters; any thread may call.

  Methods raise NotFound for what is another owner's, as those of `Account` do.
  """

  def __init__(self, account: Account):
    """Makes what `Account.sessions` returns."""
    self._account, self._service = account, account.service
    self._database = account.service.store.database

  # Sessions.

  def open(self, adapter: str, settings: SessionSettings) -> tuple[AgentSession, str]:
    """Opens a session.

    Args:
      adapter: the id of the adapter that proposes and learns.
      settings: of the session.

    Returns:
      The session, and the token without which nothing of it can be changed. It is kept nowhere.

    Raises:
      InvalidRequest: settings that cannot be, or a chat template that writes calls in a form that is not known, or whose
        conversations cannot be continued token by token.
      Forbidden: the adapter has as many sessions as it may have.
    """
    service, known = self._service, self._account.adapter(adapter)
    settings.check(service.settings, max_completion=service.max_completion, vocab_size=service.vocab_size)
    form = None
    if settings.tools:
      try:
        form = form_of(template_of(service.tokenizer, settings.tools))
      except UserError as error:
        raise InvalidRequest(str(error), field='tools') from error
    session = AgentSession(f'ses-{secrets.token_hex(8)}', known.id, known.owner, service.clock(), settings, form)
    dialogue = self._dialogue(session)
    with service.tokenizing:
      dialogue.check(form)
    token = f'sst-{secrets.token_urlsafe(32)}'
    with self._writing() as rows:
      head = self._database.known(known.id)
      if head is None or head.deleted:
        raise NotFound(f'There is no adapter {short_repr(adapter)}.')
      most = service.settings.limits.max_sessions_per_adapter
      if len(session_tables.sessions(self._database, known.id)) >= most:
        raise Forbidden(
          f'The adapter has {most} sessions, as many as one may have (serve.limits.max_sessions_per_adapter): delete one.'
        )
      session_tables.put_session(rows, archive.session_row(session, _digest(token)))
    return session, token

  def check_token(self, adapter: str, session: str, token: str | None) -> None:
    """Raises Forbidden unless this is the token that the session was opened with."""
    row = self._row(adapter, session)
    if token is None or not hmac.compare_digest(_digest(token), row.token):
      raise Forbidden('The session needs the token that it was opened with, in the header X-Session-Token.')

  def list(self, adapter: str) -> list[AgentSession]:
    """Returns the sessions of an adapter, the oldest first."""
    known = self._account.adapter(adapter)
    return [archive.session_of(row, known.owner) for row in session_tables.sessions(self._database, known.id)]

  def get(self, adapter: str, session: str) -> AgentSession:
    """Returns a session."""
    return archive.session_of(self._row(adapter, session), self._account.owner)

  def turns(self, adapter: str, session: str) -> Sequence[SessionTurn]:
    """Returns the turns of a session in order."""
    self._row(adapter, session)
    return [archive.turn_of(row) for row in session_tables.turns(self._database, session)]

  def delete(self, adapter: str, session: str) -> None:
    """Erases a session, its turns and its examples; what was learned stays learned."""
    with self._alone(session):
      self._row(adapter, session)
      with self._writing() as rows:
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
    """Draws the next proposal, from the newest version of the adapter.

    Args:
      adapter: its id.
      session: its id.
      messages: what comes before it: of the user, or what tools have answered, where `results` has not been told that.
        None are needed behind a proposal that was denied, and behind results.
      seed: of the proposal; None: another one every time.
      drafts: yield drafts, too.

    Raises:
      TurnConflict: the newest proposal is not decided yet.
      Forbidden: the session has as many turns as one may have.
      InvalidRequest: there is nothing to answer, messages that are none, or a prompt that is too long.
      ServiceError, UserError: as `Account.sample`.
    """
    held = self._held(adapter, session)
    new, newest = self._new_messages(held, messages), held.newest
    if newest is not None and newest.status == 'open':
      raise TurnConflict(
        f'Turn {newest.n} is not decided yet: approve, edit or deny it before the next one.', current=newest.n
      )
    most = self._service.settings.limits.max_turns_per_session
    if held.number + 1 >= most:
      raise Forbidden(
        f'The session has {most} turns, as many as one may have (serve.limits.max_turns_per_session): open a new one.'
      )
    dialogue = self._dialogue(held.session)
    if not new and newest is not None and newest.status == 'denied':
      prompt = list(newest.prompt_tokens)
    else:
      with self._service.tokenizing:
        prompt = self._next_prompt(held, dialogue, new).tokens
    return self._draw(held, dialogue, prompt, seed, drafts, number=held.number + 1, messages=new)

  def retry(self, adapter: str, session: str, n: int, *, seed: int | None = None, drafts: bool = False) -> Proposing:
    """Draws what the newest version proposes in the place of a turn; it does not join the conversation, and is not kept.

    Args:
      adapter: its id.
      session: its id.
      n: number of the turn.
      seed: as in `propose`.
      drafts: likewise.
    """
    held = self._held(adapter, session)
    turn = self._turn(held, n)
    dialogue = self._dialogue(held.session)
    return self._draw(held, dialogue, turn.prompt_tokens, seed, drafts, number=n, messages=turn.messages, joins=False)

  def decide(self, adapter: str, session: str, n: int, decision: Decision) -> tuple[SessionTurn, LearnedTurns | None]:
    """Decides the newest proposal, and learns from that.

    The decision is on the disk before it is learned. If it could not be learned, the same decision sent again learns it,
    once whatever happens; once it was learned, it returns what came of that.

    Args:
      adapter: its id.
      session: its id.
      n: number of the turn.
      decision: what is said of it.

    Returns:
      The turn as it is now, and what was learned; None: there was nothing to learn.

    Raises:
      TurnConflict: it is not the newest turn, or was decided in another way.
      InvalidRequest: a decision that this turn cannot have, or whose lesson has no room.
      ServiceError, UserError: as `feedback.run`; then the decision stands, and is not learned yet.
    """
    with self._alone(session):
      held = self._settled(adapter, session)
      turn = self._turn(held, n)
      dialogue = self._dialogue(held.session)
      if turn.decision is not None:
        if turn.decision != decision:
          raise TurnConflict(
            f'Turn {n} is {turn.status} already: what was decided stays; deny a later proposal instead.',
            current=held.number,
          )
        return self._again(held, dialogue, turn)
      if n != held.number:
        raise TurnConflict(f'Turn {n} is not the newest, which is {held.number}: decide that one.', current=held.number)
      decided, example = self._decided(held, dialogue, turn, decision)
      self._change(held, decided, example)
      return self._taught(held, dialogue, decided, example is not None)

  def results(
    self, adapter: str, session: str, n: int, results: Sequence[ToolResult]
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Adds what the tools have answered to the conversation, and learns from those that failed, where the session says so.

    Args:
      adapter: its id.
      session: its id.
      n: number of the newest turn, which was approved or edited.
      results: one for each of its calls.

    Returns:
      As `decide`.

    Raises:
      TurnConflict: it is not the newest turn, not decided, or has other results.
      InvalidRequest: results that do not belong to the calls of the turn.
      ServiceError, UserError: as `decide`.
    """
    with self._alone(session):
      held = self._settled(adapter, session)
      turn = self._turn(held, n)
      dialogue = self._dialogue(held.session)
      results = tuple(sorted(results, key=lambda result: result.call))
      if turn.results:
        if turn.results != results:
          raise TurnConflict(f'Turn {n} has other results already.', current=held.number)
        return self._again(held, dialogue, turn)
      if n != held.number or turn.status not in ('approved', 'edited'):
        raise TurnConflict(
          f'Turn {n} is {turn.status}, and turn {held.number} is the newest: results belong to the newest turn, once it was '
          'approved or edited.',
          current=held.number,
        )
      if not turn.calls or [result.call for result in results] != list(range(len(turn.calls))):
        raise InvalidRequest(
          f'Turn {n} has {len(turn.calls)} calls, and its results must be one for each of them.', field='results'
        )
      answered, example = dataclasses.replace(turn, results=results), None
      if held.session.settings.learn_from_results:
        example = self._example(held, dialogue, answered, 'result', teaching.of_results(turn, results))
      self._change(held, answered, example)
      return self._taught(held, dialogue, answered, example is not None)

  # What is learned.

  def flush(self, adapter: str, session: str) -> LearnedTurns | None:
    """Learns what waits for more examples; None: nothing does."""
    with self._alone(session):
      held = self._settled(adapter, session)
      return classroom.learn(self._account, held.session, self._dialogue(held.session), few=True)

  def examples(self, adapter: str, session: str | None = None) -> Sequence[TrainingExample]:
    """Returns every example that was or will be learned in sessions of an adapter, or in one of them."""
    self._account.adapter(adapter)
    if session is not None:
      self._row(adapter, session)
    return exporting.examples(self._account, adapter, session)

  def replay(
    self, adapter: str, examples: Sequence[TrainingExample], *, request: Request | None = None
  ) -> Sequence[LearnedTurns]:
    """Learns examples of another adapter, those together that were learned together; see `replaying.replay`."""
    self._account.adapter(adapter)
    return replaying.replay(self._account, adapter, examples, request)

  # Inside: what is there.

  def _row(self, adapter: str, session: str) -> SessionRow:
    known = self._account.adapter(adapter)
    row = session_tables.session(self._database, known.id, session)
    if row is None:
      raise NotFound(f'There is no session {short_repr(session)} of {adapter}.')
    return row

  def _held(self, adapter: str, session: str) -> _Held:
    row = self._row(adapter, session)
    turns: list[SessionTurn] = []
    while not turns or not turns[-1].joins:
      before = turns[-1].n if turns else 2**62
      found = session_tables.turns_back(self._database, session, before, 1)
      if not found:
        break
      turns.append(archive.turn_of(found[0]))
    return _Held(archive.session_of(row, self._account.owner), row, turns[::-1])

  def _settled(self, adapter: str, session: str) -> _Held:
    """Returns a session as it is, once it is noted what was learned of it already."""
    self._row(adapter, session)  # Also ends doubts of the store about the adapter's versions.
    session_tables.reconcile(self._database, adapter)
    return self._held(adapter, session)

  def _turn(self, held: _Held, n: int) -> SessionTurn:
    row = session_tables.turn(self._database, held.session.id, n) if 0 <= n <= held.number else None
    if row is None:
      raise NotFound(f'There is no turn {short_repr(n)} of {held.session.id}, whose newest is {held.number}.')
    return archive.turn_of(row)

  def _dialogue(self, session: AgentSession) -> Dialogue:
    service, settings = self._service, session.settings
    return Dialogue(
      service.tokenizer,
      service.chat,
      system=settings.system,
      tools=settings.tools,
      stop_token_ids=service.stop_token_ids,
    )

  @contextlib.contextmanager
  def _alone(self, session: str) -> Iterator[None]:
    """Waits until nobody else changes a session."""
    with self._service.turns.of(('session', session), self._account.call.deadline):
      self._account.call.check()
      yield

  @contextlib.contextmanager
  def _writing(self) -> Iterator[sqlite3.Connection]:
    with self._database.writing(full=True) as rows:
      yield rows

  # Inside: proposals.

  def _new_messages(self, held: _Held, messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Returns the messages that a proposal is asked for with."""
    if not messages:
      return []
    new = prompts.conversation(messages)
    begins = not held.turns and held.session.settings.system is None
    for number, message in enumerate(new):
      if message['role'] not in _ROLES and not (begins and number == 0 and message['role'] == 'system'):
        raise InvalidRequest(
          f'messages[{number}] has the role {short_repr(message["role"])}: messages of a session are of the user or a tool; '
          'its system message is a setting.',
          field=f'messages[{number}].role',
        )
    if new[-1]['role'] not in ('user', 'tool'):
      raise InvalidRequest('The last message must be of the user or a tool: it is to be answered.', field='messages')
    answered = held.answered
    if answered is not None and answered.results and any(message['role'] == 'tool' for message in new):
      raise InvalidRequest(
        f'The results of turn {answered.n} are in the conversation already: leave the messages of tools out.',
        field='messages',
      )
    return new

  def _next_prompt(self, held: _Held, dialogue: Dialogue, new: Messages) -> Asked:
    """Returns the prompt of the next proposal."""
    answered = held.answered
    pending: Messages = [] if answered is None else [teaching.result_message(each) for each in answered.results]
    for turn in held.turns[0 if answered is None else 1 :]:
      pending += [dict(message) for message in turn.messages]
    pending += new
    if not pending:
      raise InvalidRequest(
        'There is nothing to answer: send a message of the user, or the results of the tools.', field='messages'
      )
    if answered is None:
      return dialogue.begin(pending)
    return dialogue.after(answered.prompt_tokens, answered.answer_tokens, pending)

  def _draw(
    self,
    held: _Held,
    dialogue: Dialogue,
    prompt: Sequence[int],
    seed: int | None,
    drafts: bool,
    *,
    number: int,
    messages: Messages,
    joins: bool = True,
  ) -> Proposing:
    session, service = held.session, self._service
    if len(prompt) > service.max_prompt:
      named = f' {session.settings.title!r}' if session.settings.title else ''
      raise InvalidRequest(
        f'The conversation{named} has {len(prompt)} tokens, and {service.max_prompt} are read at most '
        '(serve.prompt_buckets): open a new session, and begin it with what matters of this one.',
        field='messages',
      )
    target = Target(adapter := self._account.adapter(session.adapter), adapter.head)
    options = session.settings.options(seed, [dialogue.turn_end])
    sampling = self._account.sample(target, prompt, options=options, drafts=drafts)

    def finish(done: SampleDone) -> SessionTurn:
      sample = done.sample
      text = dialogue.text_of(sample.tokens, options.stop, sample.text)
      proposal = read_calls(text, session.tool_form) if session.tool_form else None
      calls, fault = ((), None) if proposal is None else (tuple(proposal.calls), proposal.fault)
      turn = SessionTurn(
        n=number,
        messages=tuple(dict(message) for message in messages),
        version=adapter.head,
        sample_id=sample.id,
        prompt_tokens=list(prompt),
        tokens=list(sample.tokens),
        log_probs=sample.log_probs,
        text=text,
        said=without_thinking(text).strip() if proposal is None else proposal.text,
        calls=calls,
        fault=fault,
        status='open' if calls or fault or not joins else 'answered',
        reused_tokens=sampling.reused(done.index),
        created=service.clock(),
      )
      if joins:
        with self._writing() as rows:
          self._advance(rows, held)
          session_tables.put_turn(rows, session.id, session.adapter, archive.turn_row(turn))
      return turn

    return Proposing(sampling, finish)

  # Inside: decisions.

  def _decided(
    self, held: _Held, dialogue: Dialogue, turn: SessionTurn, decision: Decision
  ) -> tuple[SessionTurn, ExampleRow | None]:
    """Returns a turn with a decision, and what is to be learned of it."""
    session, kept = held.session, None
    decided = dataclasses.replace(turn, decision=decision, status=DECIDED[decision.kind])
    if decision.kind != 'deny' and turn.calls and turn.fault is not None:
      raise InvalidRequest(
        f'Turn {turn.n} also has a call that cannot be read ({turn.fault}): deny it, so that nothing is done by half.',
        field='decision',
      )
    if decision.kind == 'approve':
      return decided, None
    if decision.kind == 'deny':
      return decided, self._example(held, dialogue, decided, 'denial', teaching.of_denial(turn, decision.correction))
    if decision.call >= len(turn.calls):
      raise InvalidRequest(
        f'Turn {turn.n} has {len(turn.calls)} calls, and none of the number {decision.call}.', field='call'
      )
    calls = edited(turn.calls, decision)
    with self._service.tokenizing:
      kept = dialogue.edited(turn.text, calls, session.tool_form)
      plain = self._service.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
      if tuple(read_calls(dialogue.text_of(kept, (), plain), session.tool_form).calls) != calls:
        raise InvalidRequest(
          'These arguments cannot be written in the form of calls that the model knows.', field='arguments'
        )
    decided = dataclasses.replace(decided, kept_tokens=kept)
    return decided, self._example(held, dialogue, decided, 'edit', teaching.of_edit(decided, session.tool_form))

  def _example(
    self, held: _Held, dialogue: Dialogue, turn: SessionTurn, kind: str, said: teaching.Said
  ) -> ExampleRow | None:
    """Returns what is to be learned of a turn; None: nothing is said of it."""
    if not said:
      return None
    session, service = held.session, self._service
    attempt = turn.tokens if session.settings.show_attempt else None
    with service.tokenizing:
      asked = dialogue.split(turn.prompt_tokens)
      config, title = service.reprompting.config, session.settings.title
      prompt = teaching.teacher_prompt(dialogue, asked, said, config, attempt, title=title)
    head = self._account.adapter(session.adapter).head
    return classroom.example_row(session, turn, kind, said, prompt, head)

  def _change(self, held: _Held, turn: SessionTurn, example: ExampleRow | None) -> None:
    """Keeps what has become of a turn, and what is to be learned of it."""
    with self._writing() as rows:
      self._advance(rows, held)
      session_tables.change_turn(rows, held.session.id, turn.n, archive.record_of(turn), turn.kept_tokens)
      if example is not None:
        session_tables.put_example(rows, held.session.adapter, example)

  def _advance(self, rows: sqlite3.Connection, held: _Held) -> None:
    if session_tables.advance(rows, held.session.id, held.row.revision):
      return
    if session_tables.session(self._database, held.session.adapter, held.session.id) is None:
      raise NotFound(f'There is no session {held.session.id} any more.')
    raise TurnConflict(
      'Something else has changed the session meanwhile: look at its turns, and ask again.', current=held.number
    )

  def _taught(
    self, held: _Held, dialogue: Dialogue, turn: SessionTurn, teaches: bool
  ) -> tuple[SessionTurn, LearnedTurns | None]:
    """Learns what waits, if a turn has added to it; returns the turn as it is then."""
    if not teaches:
      return turn, None
    learned = classroom.learn(self._account, held.session, dialogue)
    return self._turn(held, turn.n), learned

  def _again(self, held: _Held, dialogue: Dialogue, turn: SessionTurn) -> tuple[SessionTurn, LearnedTurns | None]:
    """Returns what came of something that is sent again; what was not learned then is learned now."""
    waiting = session_tables.examples(self._database, held.session.adapter, session=held.session.id, state='waiting')
    if any(row.n == turn.n for row in waiting):
      return self._taught(held, dialogue, turn, True)
    return turn, turn.learned


def _digest(token: str) -> str:
  return hashlib.sha256(token.encode('utf-8', 'surrogatepass')).hexdigest()
