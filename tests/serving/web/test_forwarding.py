"""Requests to other replicas: what is sent, how many at once, and for how long an answer is waited for."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
import threading

from anyio import from_thread
import pytest

from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import FairSemaphore
from sdpo_jax.serving.errors import NotHolder
from sdpo_jax.serving.web import forwarding
from sdpo_jax.serving.web.admission import GateRequest
from sdpo_jax.serving.web.forwarding import MARK, Forwarding
from tests.local_server import Answer, Server

HEADERS = {'connection': ['Keep-Alive, X-Hop'], 'x-hop': ['1'], 'x-api-key': ['k'], 'if-match': ['"1"'], MARK: ['x']}
REQUEST = GateRequest('00112233445566ff', 'POST', '/batch', HEADERS)


@pytest.fixture
def loop():
  """Give an event loop that runs in another thread."""
  with from_thread.start_blocking_portal() as portal:
    yield portal.call(asyncio.get_running_loop)


def post(loop, forwarding, url, body, **headers):
  holder = NotHolder(url, 'holder')
  return forwarding.post(loop, REQUEST, Call(), holder, '/x', body, {'if-match': [], **headers})


def test_what_is_posted_has_the_id_of_the_request_and_headers_of_the_client(loop):
  with Server(lambda body: Answer({})) as server:
    post(loop, Forwarding(lambda replica: True, FairSemaphore(1)), server.url, b'1', **{'idempotency-key': ['part']})
  sent = {name.lower(): value for name, value in server.headers[0].items()}
  assert (sent['x-api-key'], sent['idempotency-key'], sent[MARK]) == ('k', 'part', REQUEST.id)
  assert 'if-match' not in sent and sent.get('connection') != HEADERS['connection'][0]


def test_one_look_a_moment_is_for_all_who_wait_for_a_replica(loop, monkeypatch):
  monkeypatch.setattr(forwarding, '_LOOK_S', 0.01)
  looks, leave = [], threading.Event()

  def lives(replica):
    assert replica == 'holder'
    looks.append(len(server.bodies))
    return looks[-1] < 2

  forward = Forwarding(lives, FairSemaphore(2))
  with Server(lambda body: Answer({'left': leave.wait(30)})) as server, ThreadPoolExecutor() as threads:
    posted = [threads.submit(post, loop, forward, server.url, b'1') for _ in range(2)]
    assert [type(each.exception()) for each in posted] == [NotHolder, NotHolder]
    leave.set()
  assert looks.count(2) == 1 and not forward._looks  # noqa: SLF001


def test_what_is_posted_beyond_its_places_waits(loop):
  places, leave = FairSemaphore(3, per_key=1), threading.Event()
  forward = Forwarding(lambda replica: True, places)
  with Server(lambda body: Answer({'found': leave.wait(30) and body})) as server, ThreadPoolExecutor() as threads:
    posted = [threads.submit(post, loop, forward, server.url, b'%d' % number) for number in (1, 2)]
    while len(server.bodies) + sum(map(len, places._waiting.values())) < 2:  # noqa: SLF001
      pass
    leave.set()
    assert [each.result() for each in posted] == [(200, {'found': 1}), (200, {'found': 2})]
    assert server.most_at_once == 1


def test_an_answer_that_no_replica_sends_is_none(loop):
  with Server(lambda body: Answer(b'<html>')) as server, pytest.raises(NotHolder):
    post(loop, Forwarding(lambda replica: True, FairSemaphore(1)), server.url, b'1')


class Done(asyncio.Future):
  """A look that has just ended, whose callbacks have not run yet."""

  def __init__(self):
    super().__init__()
    self.set_result(True)

  def __await__(self):
    raise AssertionError('It returns at once, so the callback that replaces it would never run.')


def test_who_asks_in_the_moment_in_which_a_look_ends_looks_anew(monkeypatch):
  monkeypatch.setattr(forwarding, '_LOOK_S', 0.0)

  async def watched():
    forward = Forwarding(lambda replica: False, FairSemaphore(1))
    forward._looks['holder'] = Done()  # noqa: SLF001
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(None) as patience:
        await forward._watch('holder', patience)  # noqa: SLF001
        await asyncio.sleep(30)

  asyncio.run(watched())
