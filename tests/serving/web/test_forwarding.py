"""Requests to other replicas: how many at once, and what is sent."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
import threading

from anyio import from_thread
import pytest

from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import FairSemaphore
from sdpo_jax.serving.web.admission import GateRequest
from sdpo_jax.serving.web.forwarding import Forwarding
from tests.local_server import Answer, Server

REQUEST = GateRequest('00112233445566ff', 'POST', '/batch', {'content-type': ['application/json']})


@pytest.fixture
def loop():
  """Give an event loop that runs in another thread."""
  with from_thread.start_blocking_portal() as portal:
    yield portal.call(asyncio.get_running_loop)


def test_what_is_posted_beyond_its_places_waits(loop):
  places, leave = FairSemaphore(3, per_key=1), threading.Event()
  forwarding = Forwarding(lambda url: True, places)
  with Server(lambda body: Answer({'found': leave.wait(30) and body})) as server, ThreadPoolExecutor() as threads:
    posted = [
      threads.submit(forwarding.post, loop, REQUEST, Call(), server.url, '/x', b'%d' % number, {}) for number in (1, 2)
    ]
    while len(server.bodies) + sum(map(len, places._waiting.values())) < 2:  # noqa: SLF001
      pass
    leave.set()
    assert [each.result() for each in posted] == [(200, {'found': 1}), (200, {'found': 2})]
    assert server.most_at_once == 1
