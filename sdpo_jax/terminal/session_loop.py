"""The main loop of a session: messages, proposals, decisions, tool calls and what is learned from them.

The next step depends only on the newest turn in the service and on the local history, so that continuing after a lost
connection is the same as continuing after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdpo_jax.errors import UserError
from sdpo_jax.terminal.calls import calls_of
from sdpo_jax.terminal.client import AnswerLost, Refused, digest_of
from sdpo_jax.terminal.commands import Commands, spoken
from sdpo_jax.terminal.history import History
from sdpo_jax.terminal.inputs import COMMAND, Leave
from sdpo_jax.terminal.learned import lines_of
from sdpo_jax.terminal.review import Reviewed, Reviewer
from sdpo_jax.terminal.script import Script
from sdpo_jax.terminal.session_context import SessionContext

INTERRUPTED, UNDONE = 130, 1  # Exit codes: after Ctrl-C; if a script was not completed.
_LATER = (408, 429)  # Statuses, besides those from 500, after which the same request can be sent again.
_NOT_TAKEN = (400, 413, 422)  # Statuses of requests that will never be accepted.


class Conversation:
  """A session with a person: the state of the loop."""

  def __init__(self, context: SessionContext, settings: Mapping[str, Any]):
    """Make the loop of a new or resumed session, which has these settings in the service."""
    self.session, self.history, self.screen = context.session, context.history, context.screen
    self.turns, self._seed_of = context.turns, context.seed_of
    self._inputs, self._workbench = context.inputs, context.workbench
    self._least = settings.get('min_sdpo_examples', 1)
    self._reviewer = Reviewer(context, self._command)
    self._commands = Commands(context, self._learned, self._deny)
    self._reviewed: Reviewed | None = None  # The review of the newest turn, if it was in this process.
    self._hold = False  # Whether to wait for the person before the next step.
    self._stale = True  # Whether the service may have newer turns than `turns`.

  @property
  def turn(self) -> dict[str, Any] | None:
    """The newest turn; None: there is none yet."""
    return self.turns[-1] if self.turns else None

  def run(self) -> int:
    """Run until the person leaves the program; return the exit code."""
    presses = 0
    while True:
      try:
        self._step()
        presses = 0
      except KeyboardInterrupt:
        self.screen.end_draft()
        presses += 1
        if presses == 2 or isinstance(self._inputs, Script):
          return INTERRUPTED
        self._hold = self._stale = True
        self.screen.say('Stopped. Enter continues; Ctrl-C again leaves.')
      except (AnswerLost, Refused) as error:
        self.screen.end_draft()
        self._hold = self._stale = True
        self.screen.say(str(error), 'wrong')
        if isinstance(self._inputs, Script):
          return UNDONE
        if isinstance(error, AnswerLost):
          self.screen.say('Nothing is lost: any input tries again.')
      except Leave:
        return UNDONE if isinstance(self._inputs, Script) and self._inputs.unanswered else 0

  def _step(self) -> None:
    if self._hold:
      said = self._listened()
      self._hold = False
      if said:
        self._take(said)
        return
    if self._stale:
      self._catch_up()
      return
    turn = self.turn
    if (turn is None or turn['status'] == 'answered') and not undelivered(self.history):
      self._take(self._listened())
    elif turn is not None and turn['status'] == 'open':
      self._judge(turn)
    elif turn is not None and turn['status'] in ('approved', 'edited') and not self._reported(turn):
      self._work(turn)
    else:
      self._propose()

  # Input from the person.

  def _listened(self) -> str:
    self.history.sync()
    said = self._inputs.message()
    if said is None:
      raise Leave
    return said

  def _take(self, said: str) -> None:
    if said.startswith(COMMAND):
      self._command(said)
    elif said:
      self.history.add('said', text=said)

  def _command(self, line: str) -> None:
    try:
      self._commands.run(line)
    except (UserError, AnswerLost, Refused) as error:
      if not isinstance(error, UserError):
        if isinstance(self._inputs, Script):
          raise
        self._stale = True  # Then a /deny that was not answered is sent again.
      self.screen.say(str(error), 'wrong')

  # Exchange with the service and the model.

  def _catch_up(self) -> None:
    """Fetch the turns of the session, and send a decision again that the service may not have received."""
    known = self.turn
    _, self.turns[:] = self.session.state()
    self._stale = False
    turn = self.turn
    if turn is None:
      return
    if known is None or turn['n'] != known['n'] or turn['status'] == 'open':
      self._reviewed = None
    if self.history.last('turn', n=turn['n']) is None:  # The response with it was lost.
      self._arrived(turn)
      self.screen.end_draft(turn)
    elif known is None and turn['status'] == 'open':  # The session was resumed: what the call belongs to is not seen.
      asked = next((each['messages'] for each in reversed(self.turns) if each['messages']), [])
      self.screen.show(line for message in asked for line in spoken(message['role'], message['content']))
      self.screen.end_draft(turn)
    sent = self.history.last('decision', 'decided', 'withdrawn', n=turn['n'])
    if sent is not None and sent['kind'] == 'decision':
      self._decide(turn['n'], sent['decision'])

  def _propose(self) -> None:
    messages = [{'role': 'user', 'content': text} for text in undelivered(self.history)]
    after = self.turn['n'] if self.turn is not None else -1
    self.history.add('asking', after=after, messages=len(messages))
    try:
      turn = self.session.propose(messages, self._seed_of(after + 1), self.screen.draft)
    except Refused as error:
      if messages and error.status in _NOT_TAKEN:  # Later requests with these messages would be refused, too.
        self.history.add('unsaid', why=str(error))
        self.screen.say('The model has not received your messages: write them differently.')
      raise
    self.screen.end_draft(turn)
    self.turns.append(turn)
    self._arrived(turn)

  def _arrived(self, turn: Mapping[str, Any]) -> None:
    self.history.add('turn', n=turn['n'], turn={name: turn[name] for name in turn if not name.endswith('tokens')})
    self._reviewed = None

  def _judge(self, turn: Mapping[str, Any]) -> None:
    self._reviewed = reviewed = self._reviewer.review(turn)
    decision = self._noted(turn, reviewed.decision, reviewed.told)
    if reviewed.says is not None:
      self._take(reviewed.says)
    self._decide(turn['n'], decision)

  def _deny(self, reason: str) -> None:
    """Deny the newest turn if it is an answer without calls; the conversation then goes on with another answer."""
    turn = self.turn
    if turn is None or turn['status'] != 'answered':
      raise UserError(
        'There is no answer to deny: /deny is for the last answer, before you write again; at a call press n.'
      )
    decision = self._noted(turn, {'decision': 'deny', 'correction': reason}, {})
    self._decide(turn['n'], decision)

  def _noted(self, turn: Mapping[str, Any], decision: Mapping[str, Any], told: Any) -> dict[str, Any]:
    """Write a decision to the history, and return it as it is sent: with the digest of what was shown."""
    sent = {**decision, **digest_of(turn)}
    self.history.add('decision', n=turn['n'], decision=sent, told=told)
    return sent

  def _decide(self, number: int, decision: Mapping[str, Any]) -> None:
    """Send a decision from the history; the service learns from it only once, even if it is sent again."""
    try:
      answer = self.session.decide(number, decision)
    except Refused as error:
      if error.status < 500 and error.status not in _LATER:
        self.history.add('withdrawn', n=number, why=str(error))
      raise
    self.turns[-1] = answer['turn']
    self.history.add('decided', n=number, status=answer['turn']['status'], learned=answer['learned'])
    self.screen.show(lines_of(answer['learned'], self._least))

  # Tool calls.

  def _reported(self, turn: Mapping[str, Any]) -> bool:
    return bool(turn['results']) or not calls_of(turn)

  def _work(self, turn: Mapping[str, Any]) -> None:
    decided = self.history.last('decision', n=turn['n'])
    told = decided['told'] if decided is not None else {}
    results = []
    for index, call in enumerate(calls_of(turn)):
      ran = self.history.last('ran', n=turn['n'], call=index)
      if ran is None:
        begun = self.history.last('running', n=turn['n'], call=index) is not None
        result = self._reviewer.result_of(turn['n'], index, call, told.get(str(index)), self._reviewed, begun)
        self.history.add('ran', n=turn['n'], call=index, result=result)
      else:
        result = ran['result']
      results.append(result)
    answer = self.session.results(turn, results)
    self.turns[-1] = answer['turn']
    self.history.add('reported', n=turn['n'], learned=answer['learned'])
    self.screen.show(lines_of(answer['learned'], self._least))
    self._hold = self._workbench.interrupted()

  def _learned(self, learned: Mapping[str, Any] | None) -> None:
    """Record and show what was learned without a decision."""
    self.history.add('learned', learned=learned)
    self.screen.show(lines_of(learned, self._least))


def undelivered(history: History) -> list[str]:
  """Return the messages of the person that no turn in the history has answered."""
  waiting: list[str] = []
  sent = 0
  for record in history.records:
    if record['kind'] == 'said':
      waiting.append(record['text'])
    elif record['kind'] == 'asking':
      sent = record['messages']
    elif record['kind'] == 'turn':
      waiting, sent = waiting[sent:], 0
    elif record['kind'] == 'unsaid':
      waiting, sent = [], 0
  return waiting
