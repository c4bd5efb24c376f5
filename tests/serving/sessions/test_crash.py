"""Sessions whose process or machine fails: nothing that was acknowledged is lost, and nothing is learned twice.

`tests.serving.sessions.session_history` is recorded call by call; every prefix of its operations is what a killed
process leaves; over PostgreSQL and a bucket, every prefix of its puts and commits.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile

import pytest

from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.serving import feedback
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.sessions import conversation
from sdpo_jax.serving.sessions.sessions import Sessions
from tests import file_operations, tiers, tiny
from tests.serving.sessions import session_history
from tests.serving.sessions.session_history import DENY, RETENTION, account_of, find
from tests.serving.store import places
from tests.serving.store.store_cases import open_store

CHANGES = frozenset('create mkdir write truncate rename link unlink rmdir'.split())


@pytest.fixture
def scratch():
  """Yield a folder in memory, where there is one: syncing takes most of the time otherwise."""
  memory = pathlib.Path('/dev/shm')
  with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
    yield pathlib.Path(folder)


@pytest.fixture(autouse=True)
def without_an_engine(monkeypatch):
  """Learns as the recorded processes do."""
  monkeypatch.setattr(feedback, 'learn', session_history.learn)


def recorded(request, folder: pathlib.Path, rounds: int) -> list[file_operations.Operation] | list[places.Write]:
  if places.replicated():
    with pytest.MonkeyPatch.context() as patch, open_store(folder, retention=RETENTION) as store:
      patch.setattr(feedback, 'learn', session_history.learn)
      return places.record(folder, lambda: session_history.history(store, rounds))
  recorder = request.getfixturevalue('recorder')
  (folder / 'disk').mkdir(parents=True)
  subprocess.run(
    [sys.executable, '-m', 'tests.serving.sessions.session_history', str(folder / 'disk'), str(rounds)],
    env=tiny.environment() | recorder.environment(folder / 'disk', folder / 'log'),
    cwd=tiny.REPOSITORY,
    check=True,
  )
  operations = file_operations.read_log(folder / 'log')
  assert file_operations.after(operations).now() == file_operations.read_tree(folder / 'disk')  # None escaped.
  return operations


@pytest.fixture(scope='module')
def two_rounds(request, tmp_path_factory) -> list[file_operations.Operation] | list[places.Write]:
  return recorded(request, tmp_path_factory.mktemp('two_rounds'), 2)


def check(account, promised: dict[tuple[str, int], list]) -> int:
  """Everything that was acknowledged is there; what was not learned is, when it is sent again, and nothing twice.

  Returns how many turns are denied.
  """
  sessions = find(account)
  found = {
    session: {turn.n: turn for turn in Sessions(account).turns(adapter, session)} for adapter, session in sessions
  }
  for (session, n), (_, _, status, learned, results) in promised.items():
    turn = found[session][n]
    assert status in ('open', turn.status) and len(turn.results) >= results, (session, n)
    assert learned is None or turn.learned is not None and turn.learned.version_after >= learned, (session, n)
  for adapter, session in sessions:
    if not found[session]:
      continue
    newest = found[session][max(found[session])]
    for turn in found[session].values():
      assert turn.status != 'open' or turn is newest
    if newest.decision is not None:  # As a client does that has had no answer.
      Sessions(account).decide(adapter, session, newest.n, newest.decision)
      if newest.results:
        Sessions(account).results(adapter, session, newest.n, newest.results)
    Sessions(account).flush(adapter, session)
  for adapter in account.adapters():
    # Every version but the first was learned in a session, and what a version learned from is learned in no other.
    turns = [turn for id, session in sessions if id == adapter.id for turn in Sessions(account).turns(id, session)]
    examples = Sessions(account).examples(adapter.id)
    versions = [example.versions for example in examples if example.kind != 'rehearsal']
    assert all(len(each) == 1 for each in versions) and not any(each.state == 'waiting' for each in examples)
    head = account.adapter(adapter.id).head
    assert {version for [version] in versions} == set(range(1, head + 1))
    keys = {(example.session, example.turn) for example in examples if example.kind == 'denial'}
    assert len(keys) == sum(turn.decision == DENY for turn in turns)
    for version in account.versions(adapter.id):
      for n, kind in version.details.get('session', {}).get('examples', ()):
        own = [e for e in examples if (e.session, e.turn, e.kind) == (version.details['session']['id'], n, kind)]
        assert [version.number in example.versions for example in own] == [True]
  return sum(turn.status == 'denied' for turns in found.values() for turn in turns.values())


class Judge:
  """Opens what a disk may hold, and says what is wrong with it; what holds the same is opened once."""

  def __init__(self, scratch: pathlib.Path):
    self._scratch, self._seen, self.opened, self.denied = scratch, set(), 0, 0

  def check(self, tree: file_operations.Tree, promised: dict[tuple[str, int], list]) -> None:
    case = file_operations.key(tree), len(promised)
    if case in self._seen:
      return
    self._seen.add(case)
    self.opened += 1
    folder = self._scratch / 'disk'
    places.write_tree(tree, folder)
    try:
      with open_store(folder, retention=RETENTION) as store:
        account = account_of(store)
        self.denied = max(self.denied, check(account, promised))
        sessions = find(account)
        if len(sessions) == session_history.SESSIONS:  # Whatever has happened, it goes on.
          session_history.step(account, sessions[self.opened % len(sessions)], 0, lambda *_: None)
    finally:
      places.remove(folder)


@pytest.mark.parametrize(
  'rounds, every',
  [(2, 25), pytest.param(5, 1, marks=pytest.mark.campaign), pytest.param(170, 401, marks=pytest.mark.campaign)],
)
def test_a_process_that_is_killed_at_any_write_loses_no_decision_and_learns_none_twice(
  request, two_rounds, scratch, tmp_path, rounds, every
):
  if places.replicated() and rounds > 5:  # Those are looked at write by write.
    pytest.skip('What is recorded there, all rows after each write, would not fit into memory.')
  judge, disk, promised = Judge(scratch), places.new_disk(), {}
  changes = itertools.count()
  for operation in two_rounds if rounds == 2 else recorded(request, tmp_path, rounds):
    if operation.kind in CHANGES and next(changes) % every == 0:
      judge.check(disk.now(), promised)
    disk.apply(operation)
    if operation.kind == 'mark':
      said = json.loads(operation.path)
      promised[said[0], said[1]] = said
  judge.check(disk.now(), promised)
  assert judge.opened > (5 if places.replicated() else 20)
  assert judge.denied >= session_history.SESSIONS * rounds * 3 // 5


@pytest.mark.parametrize('operations, every', [(40, 25), pytest.param(1, 10, marks=pytest.mark.campaign)])
def test_a_machine_that_fails_at_any_write_loses_no_decision_and_learns_none_twice(
  two_rounds, scratch, operations, every
):
  judge, disk, promised = Judge(scratch), places.new_disk(), {}
  for place, operation in enumerate(two_rounds):
    disk.apply(operation)
    if operation.kind == 'mark':
      said = json.loads(operation.path)
      promised[said[0], said[1]] = said
    for case, (_, tree) in enumerate(disk.survivors() if place % operations == 0 else ()):
      if (place + case) % every == 0:
        judge.check(tree, promised)
  assert judge.opened > (0 if places.replicated() else 10)


@pytest.mark.parametrize('kills', tiers.cases((2, 20), slow=(2,)))
def test_what_was_acknowledged_is_there_after_a_kill_while_all_sessions_learn(scratch, kills):
  with open_store(scratch / 'store') as store:
    session_history.prepare(account_of(store))
  draw, promised = random.Random(kills), {}
  process = subprocess.Popen(
    [sys.executable, '-m', 'tests.serving.sessions.session_history', str(scratch), 'load'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env=tiny.environment(),
    cwd=tiny.REPOSITORY,
    text=True,
  )

  def told(line: str) -> bool:
    """Note an acknowledgement; return whether it was one."""
    if not line.endswith('\n') or json.loads(line) == ['ended']:
      return False
    said = json.loads(line)
    promised[said[0], said[1]] = said
    return True

  with process:
    for _ in range(kills):
      process.stdin.write('store\n')
      process.stdin.flush()
      kind, child = json.loads(process.stdout.readline())
      assert kind == 'pid'
      for _ in range(draw.randrange(20, 160)):
        assert told(process.stdout.readline())
      os.kill(child, signal.SIGKILL)
      while told(process.stdout.readline()):
        pass
      places.bury(scratch / 'store')
      with open_store(scratch / 'store') as store:
        assert check(account_of(store), promised) > 0
    process.stdin.close()
  assert len({session for session, _ in promised}) == session_history.SESSIONS


def test_a_session_is_not_gone_on_with_by_another_template(scratch, monkeypatch):
  with open_store(scratch / 'disk') as store:
    account = account_of(store)
    adapter, _ = where = session_history.prepare(account)[0]
    next(Sessions(account).propose(*where, [{'role': 'user', 'content': 'Hi'}]))
    Sessions(account).decide(*where, 0, DENY)
    next(Sessions(account).propose(*where))
    [mark] = {each.tokenizer for each in Sessions(account).examples(adapter)}
    for whose, name, value in (
      (conversation, 'fingerprint', lambda tokenizer: 'another'),
      (account.service, 'chat', ChatFormat({'enable_thinking': False})),
    ):
      with monkeypatch.context() as patch:
        patch.setattr(whose, name, value)
        for change in (
          lambda: Sessions(account).decide(*where, 1, DENY),
          lambda: Sessions(account).retry(*where, 0),
          lambda: Sessions(account).flush(*where),
        ):
          with pytest.raises(InvalidRequest, match='opened with another tokenizer or chat template'):
            change()
        assert Sessions(account).turns(*where)[1].status == 'open'
        assert {each.tokenizer for each in Sessions(account).examples(adapter)} == {mark}
    assert Sessions(account).decide(*where, 1, DENY)[0].status == 'denied'
    with monkeypatch.context() as patch:
      patch.setattr(account.service, 'chat', ChatFormat(split_special_tokens=False))
      with pytest.raises(InvalidRequest, match='another tokenizer'):
        Sessions(account).propose(*where)
