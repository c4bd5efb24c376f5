"""Sessions of a real process that is killed again and again while people say no: nothing is lost, nothing learned
twice.
"""

import http.client
import random
import signal
import threading

import pytest

from tests import tiers
from tests.serving.served_process import PATIENCE, ask, served, until

ROOT = '/v1/continual/adapters'
HELLO = {'messages': [{'role': 'user', 'content': 'Hi'}]}


class Person(threading.Thread):
  """A client who denies proposal after proposal of one session until the server is gone."""

  def __init__(self, running, at: str, token: str, acknowledged: dict[int, dict], told, keyed: bool):
    super().__init__()
    self.at, self.token, self.acknowledged, self.keyed = at, token, acknowledged, keyed
    self.doubtful = None  # The turn whose decision was sent and not answered.
    self._running, self._told = running, told

  def again(self, running, told) -> 'Person':
    """Return the same person before the server that came back."""
    return Person(running, self.at, self.token, self.acknowledged, told, self.keyed)

  def send(self, running, path: str, body: dict, **headers: str) -> tuple[int, dict]:
    return ask(running, 'POST', f'{self.at}/{path}', body, **{'X-Session-Token': self.token, **headers})

  def deny(self, running, n: int) -> tuple[int, dict]:
    """Denies a turn; half of the people send a key with which the answer is kept, the others only the same words."""
    body = {'decision': 'deny', 'correction': f'Be {n} times as brief.'}
    return self.send(
      running, f'turns/{n}/decision', body, **({'Idempotency-Key': f'{self.at}/{n}'} if self.keyed else {})
    )

  def known(self, running) -> list[dict]:
    status, found = ask(running, 'GET', self.at)
    assert status == 200
    return found['turns']

  def run(self):
    try:
      turns = self.known(self._running)
      while True:
        if turns and turns[-1]['status'] != 'denied':
          n = turns[-1]['n']
        else:
          body = HELLO if not turns else {}
          status, answer = self.send(self._running, 'turns', body)
          assert status == 200, answer
          n = answer['turn']['n']
        turns = [{'n': n, 'status': 'denied'}]
        self.doubtful = n
        status, answer = self.deny(self._running, n)
        assert status == 200, answer
        self.acknowledged[n], self.doubtful = answer, None
        self._told.release()
    except (OSError, http.client.HTTPException, ValueError, AssertionError):
      return  # What was lost and what not is looked at when the server is back.


def check(running, person: Person) -> None:
  """Check that what was acknowledged is there, and what was in doubt is decided now, once."""
  turns = person.known(running)
  assert [turn['n'] for turn in turns] == list(range(len(turns)))
  if person.doubtful is not None:
    status, answer = person.deny(running, person.doubtful)
    assert status == 200, answer
    person.acknowledged[person.doubtful] = answer
    turns = person.known(running)
  denied = {turn['n']: turn['learned'] for turn in turns if turn['status'] == 'denied'}
  assert denied.keys() == person.acknowledged.keys()
  for n, answer in person.acknowledged.items():
    known = denied[n]
    assert answer['turn']['n'] == n and (known['version_before'], known['version_after'], known['turns']) == (
      answer['learned']['version_before'],
      answer['learned']['version_after'],
      answer['learned']['turns'],
    )
  if person.acknowledged:  # Sent once more, the newest one is answered as before, and nothing is learned.
    newest = max(person.acknowledged)
    assert person.deny(running, newest) == (200, person.acknowledged[newest])


def versions(running, adapter: str) -> dict[int, dict]:
  """Return what is known of the versions of an adapter beside the first."""
  return {
    each['version']: each for each in ask(running, 'GET', f'{adapter}/versions')[1]['versions'] if each['version']
  }


def begin(running, adapter: str, keyed: bool) -> Person:
  status, opened = ask(running, 'POST', f'{adapter}/sessions', {'update': {'learning_rate': 1e-4}})
  assert status == 201, opened
  return Person(running, f'{adapter}/sessions/{opened["session"]["id"]}', opened['token'], {}, None, keyed)


@pytest.mark.parametrize('kills', tiers.cases((2, 20), slow=(2,)))
def test_a_server_that_is_killed_while_people_deny_has_lost_nothing_and_learned_nothing_twice(tmp_path, kills):
  """By SIGKILL, while three people deny, two of them with one adapter; the last time it is told by SIGTERM."""
  draw, digests = random.Random(0), {}
  for turn in range(kills + 2):
    with served(tmp_path) as running:
      until(lambda: ask(running, 'GET', '/readyz')[0] == 200)
      if turn == 0:
        adapters = [f'{ROOT}/{ask(running, "POST", ROOT, {"name": name})[1]["id"]}' for name in 'ab']
        people = [begin(running, adapters[index // 2], keyed=index % 2 == 0) for index in range(3)]
      for person in people:
        check(running, person)
      for adapter in adapters:
        made = versions(running, adapter)
        denied = [
          answer['learned']['version_after']
          for person in people
          if person.at.startswith(f'{adapter}/')
          for answer in person.acknowledged.values()
        ]
        # Each version comes of one denial and each denial has one, and those that were known are as they were.
        assert sorted(denied) == sorted(made) == list(range(1, len(made) + 1))
        named = {number: each['digest'] for number, each in made.items()}
        assert digests.get(adapter, {}).items() <= named.items()
        digests[adapter] = named
      if turn == kills + 1:
        running.process.terminate()
        break
      told = threading.Semaphore(0)
      people = [person.again(running, told) for person in people]
      for person in people:
        person.start()
      for _ in range(draw.randrange(1, 12)):
        assert told.acquire(timeout=PATIENCE)
      threading.Event().wait(draw.uniform(0, 0.2))  # The moment is any of a request.
      running.process.send_signal(signal.SIGKILL if turn < kills else signal.SIGTERM)
      assert running.process.wait(PATIENCE) == (-signal.SIGKILL if turn < kills else 0)
      for person in people:
        person.join(PATIENCE)
        assert not person.is_alive()
  assert sum(map(len, digests.values())) > 3 * kills
