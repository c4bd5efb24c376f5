"""A process that holds sessions and learns from denials in a store, for tests that stop it or its machine at any point.

python -m tests.serving.sessions.session_history FOLDER ROUNDS
  does what `history` says once, and marks what it has been told
python -m tests.serving.sessions.session_history FOLDER load
  for every line on stdin, NAME: a process that goes on with the sessions in FOLDER/NAME, a thread each, and says what
  was acknowledged on stdout

The store is a real one, and so is all that sessions do. Only the engine is not: proposals are always the same, and
learning commits arrays that depend on the version's number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import functools
import json
import os
import pathlib
import sys
import tempfile
import threading
import types

import numpy as np
import transformers

from sdpo_jax.config import Config, SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.learning.learner import LessonScores
from sdpo_jax.serving import feedback
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import FairSemaphore, Turns
from sdpo_jax.serving.feedback import FeedbackResult
from sdpo_jax.serving.lessons import AnswersMoved, Reprompting
from sdpo_jax.serving.records import SampleRecord
from sdpo_jax.serving.sample_requests import SampleDone
from sdpo_jax.serving.sessions.session_records import Decision, SessionSettings, SessionTurn, ToolResult
from sdpo_jax.serving.sessions.sessions import Sessions
from sdpo_jax.serving.store.store import Retention, Store
from tests import file_operations, tiny
from tests.serving.session_world import GREP, TEMPLATE, TOOLS, called
from tests.serving.store.store_cases import arrays, open_store

OWNER, SESSIONS, ADAPTERS = 'ada', 8, 4
RETENTION = Retention(keep_versions=2)  # So that the folders of long histories stay small.
DENY, DENY_ONLY, EDIT = Decision('deny', 'Use rg.'), Decision('deny'), Decision('edit', arguments={'p': 'y'})
FAILED = ToolResult(False, 'It failed.', exit_code=1)
_HI = [{'role': 'user', 'content': 'Hi'}]
_LONG = 10**6  # Tokens of prompts.


@functools.cache
def tokenizer() -> transformers.PreTrainedTokenizerFast:
  """Of the proposals."""
  with tempfile.TemporaryDirectory() as folder:
    tiny.make_tokenizer(pathlib.Path(folder), TEMPLATE)
    return transformers.AutoTokenizer.from_pretrained(folder)


class Drawn:
  """Stands in the place of a `Sampling` whose completion is drawn."""

  reused = 0  # Nothing is kept of other prompts.

  def __init__(self, done: SampleDone):
    self._done = done

  def __iter__(self) -> Iterator[SampleDone]:
    yield self._done


class Learner(Account):
  """What an owner can do without an engine, beside `learn`."""

  def sample(self, target, prompt_tokens, **_) -> Drawn:
    """Draws what is always proposed."""
    tokens = [*tokenizer().encode(called(GREP)), tokenizer().eos_token_id]
    log_probs, text, adapter = np.zeros(len(tokens), np.float32), called(GREP), target.adapter.id
    sample = SampleRecord('smp', OWNER, adapter, target.number, [], tokens, log_probs, 1.0, None, text, 'stop', 0, 0)
    return Drawn(SampleDone(0, '', sample))


def learn(tenant, id, expected, request, **_) -> FeedbackResult:
  """Commit a version that depends on nothing, as `feedback.learn` commits one that was learned."""
  with tenant.turn(id, expected) as adapter:
    details = {**request.source, 'warnings': []}
    made = tenant.service.store.commit(
      OWNER, id, adapter.head, arrays(adapter.head % 20), reason='feedback', details=details
    )
  none, nothing = np.zeros(len(request.items[-1].tokens), np.float32), np.zeros((len(request.items[-1].tokens), 0))
  scores = LessonScores(none, none, none, nothing.astype(np.int32), nothing, none, none, none)
  said = {'adapter': id, 'version_before': adapter.head, 'version_after': made.number, 'unchanged': False}
  said |= {'accepted': True, 'reason': None, 'warnings': []}
  return FeedbackResult(said, [scores], [AnswersMoved()] * len(request.items))


def account_of(store: Store) -> Learner:
  """Return what the owner can do in a store."""
  chat, lock = ChatFormat(), threading.Lock()
  config = SelfDistillationConfig(max_reprompt_len=_LONG)
  service = types.SimpleNamespace(
    store=store,
    tokenizer=tokenizer(),
    chat=chat,
    settings=Config().serve,
    tokenizing=lock,
    parsing=FairSemaphore(1),
    turns=Turns(),
    stop_token_ids=(tokenizer().eos_token_id,),
    max_prompt=_LONG,
    max_completion=_LONG,
    vocab_size=_LONG,
    reprompting=Reprompting(config, tokenizer(), chat, lock),
    clock=store.clock,
    remember=lambda adapter, owner: None,
    texts=None,  # No token moves, so that none is shown.
  )
  return Learner(service, OWNER, Call())


def settings_of(number: int) -> SessionSettings:
  """Return the settings of a session: of two of them examples wait for a second one, and half learn from tools."""
  several = 2 if number >= SESSIONS - 2 else 1
  said = {'tools': TOOLS, 'title': str(number), 'min_sdpo_examples': several, 'learn_from_results': number % 2 == 0}
  return SessionSettings(**said, rehearse=1 if number == 0 else 0)


def prepare(account: Learner) -> list[tuple[str, str]]:
  """Make the adapters and the sessions; return their ids."""
  adapters = [account.service.store.create(OWNER, f'one {number}', {}, arrays(0))[0].id for number in range(ADAPTERS)]
  return [
    (adapters[number % ADAPTERS], Sessions(account).open(adapters[number % ADAPTERS], settings_of(number))[0].id)
    for number in range(SESSIONS)
  ]


def find(account: Learner) -> list[tuple[str, str]]:
  """Return the sessions that there are, in order."""
  found = [(each.id, session) for each in account.adapters() for session in Sessions(account).list(each.id)]
  return [(adapter, session.id) for adapter, session in sorted(found, key=lambda each: int(each[1].settings.title))]


def step(account: Learner, where: tuple[str, str], number: int, told: Callable[[str, SessionTurn], None]) -> None:
  """Proposes and decides once in a session: mostly a denial; calls `told` with every turn that was acknowledged."""
  turns = Sessions(account).turns(*where)
  turn = turns[-1] if turns else None
  if turn is None or turn.status != 'open':
    begins = turn is None or turn.joins and not turn.results
    [turn] = Sessions(account).propose(*where, _HI if begins else ())
    told(where[1], turn)
  decision = (DENY, DENY, EDIT, DENY, DENY_ONLY)[(turn.n + number) % 5]
  turn, _ = Sessions(account).decide(*where, turn.n, decision)
  told(where[1], turn)
  if decision is EDIT:
    turn, _ = Sessions(account).results(*where, turn.n, [FAILED])
    told(where[1], turn)


def said_of(session: str, turn: SessionTurn) -> list:
  """Return what is acknowledged with a turn, as JSON."""
  learned = None if turn.learned is None else turn.learned.version_after
  return [session, turn.n, turn.status, learned, len(turn.results)]


def history(store: Store, rounds: int) -> None:
  """Proposes and decides in all sessions in turn, and marks what was acknowledged."""
  account = account_of(store)
  places = prepare(account)
  for _ in range(rounds):
    for session, where in enumerate(places):
      step(account, where, session, lambda *told: file_operations.mark(json.dumps(said_of(*told))))
    store.retain()


def load(folder: pathlib.Path) -> None:
  """Goes on with the sessions, a thread each, until it is killed; says what was acknowledged."""
  account, lock = account_of(open_store(folder)), threading.Lock()

  def told(session: str, turn: SessionTurn) -> None:
    with lock:
      os.write(1, (json.dumps(said_of(session, turn)) + '\n').encode())

  def work(number: int, where: tuple[str, str]) -> None:
    while True:
      step(account, where, number, told)

  for number, where in enumerate(find(account)):
    threading.Thread(target=work, args=(number, where), daemon=True).start()
  threading.Event().wait()


def main() -> None:
  feedback.learn = learn
  folder = pathlib.Path(sys.argv[1])
  if sys.argv[2:] != ['load']:
    with open_store(folder, retention=RETENTION) as store:
      history(store, int(sys.argv[2]))
    return
  tokenizer()
  for line in sys.stdin:  # A child each: what takes long is the imports.
    child = os.fork()
    if child == 0:
      try:
        load(folder / line.strip())
      finally:
        os._exit(1)
    os.write(1, (json.dumps(['pid', child]) + '\n').encode())
    os.waitpid(child, 0)
    os.write(1, b'["ended"]\n')


if __name__ == '__main__':
  main()
