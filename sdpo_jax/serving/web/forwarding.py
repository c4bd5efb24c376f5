"""Forwarding of requests to the replica that holds what they change, with the headers and the body of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import contextlib
import json
from typing import Any

import httpx2
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import FairSemaphore
from sdpo_jax.serving.errors import NotHolder, StorageFailed
from sdpo_jax.serving.web.admission import GateRequest

MARK = 'x-forwarded-by-replica'  # The header of a forwarded request, which is not forwarded again.
PART = 'part of a batch {} {}'  # The Idempotency-Key of a forwarded entry of a batch: key and body of its part.
_CONNECT_S = 2.0  # Seconds until another replica must have accepted a connection.
_LOOK_S = (
  1.0  # Seconds between two looks whether it still renews its leases, since a paused one leaves connections open.
)
# Headers of one connection, which the next one has of its own.
_OF_CONNECTION = frozenset('connection content-length expect keep-alive te trailer transfer-encoding upgrade'.split())


class Forwarding:
  """The client of other replicas; for one event loop."""

  def __init__(self, lives: Callable[[str], bool], places: FairSemaphore) -> None:
    """Make a client.

    Args:
      lives: whether the replica at a URL has renewed its leases; may raise StorageFailed.
      places: held by what is posted, as many as a replica has, so that a batch of requests waits and is not refused.
    """
    self._lives, self._places = lives, places
    self._client: httpx2.AsyncClient | None = None

  async def __call__(self, url: str, request: GateRequest, call: Call, scope: Scope, receive: Receive, send: Send):
    """Answer a request, as an ASGI application, with what the replica at `url` answers.

    Raises:
      NotHolder: that replica does not answer.
      ServiceError: the request has ended.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    # As the client has sent them, so that the digest of the request is the same there.
    path = scope['raw_path'] + (b'?' + scope['query_string'] if scope.get('query_string') else b'')
    named = {each.strip().lower() for value in request.headers.get('connection', ()) for each in value.split(',')}
    headers = [(name, value) for name, values in request.headers.items() if name not in named for value in values]
    try:
      with call.on_end(lambda: loop.call_soon_threadsafe(task.cancel)):
        async with self._sent(url, request.method, path, headers, request.body, call) as answer:
          own = [(name, value) for name, value in answer.headers.raw if name.decode().lower() not in _OF_CONNECTION]
          await send({'type': 'http.response.start', 'status': answer.status_code, 'headers': own})
          async for part in answer.aiter_raw():
            await send({'type': 'http.response.body', 'body': part, 'more_body': True})
          await send({'type': 'http.response.body', 'body': b''})
    except asyncio.CancelledError:
      call.check()
      raise

  def post(
    self,
    loop: asyncio.AbstractEventLoop,
    request: GateRequest,
    call: Call,
    url: str,
    path: str,
    body: bytes,
    more: Mapping[str, str],
  ) -> tuple[int, Any]:
    """Post JSON to another replica, in the name of a client whose request this one is working on, from any thread.

    Args:
      loop: the event loop of the gate.
      request: the request of the client, whose headers are sent.
      call: likewise.
      url: where the other replica is reached.
      path: the address there.
      body: the JSON.
      more: headers by their names in lower case; Idempotency-Key and If-Match of the client are not sent.

    Returns:
      Status and JSON of the answer.
    """
    instead = {'idempotency-key', 'if-match', *more}
    headers = [(name, value) for name, values in request.headers.items() if name not in instead for value in values]

    async def answered() -> tuple[int, Any]:
      async with self._sent(url, 'POST', path.encode(), [*headers, *more.items()], body, call) as answer:
        return answer.status_code, json.loads(await answer.aread())

    with self._places.of(call):
      return call.result(asyncio.run_coroutine_threadsafe(answered(), loop))

  @contextlib.asynccontextmanager
  async def _sent(
    self, url: str, method: str, path: bytes, headers: Sequence[tuple[str, str]], body: bytes, call: Call
  ):
    kept = [(name, value) for name, value in headers if name not in _OF_CONNECTION | {'x-deadline-ms', MARK}]
    limit = [] if call.left is None else [('x-deadline-ms', str(max(1, round(1000 * call.left))))]
    if self._client is None:
      limits = httpx2.Limits(max_connections=None)
      self._client = httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=_CONNECT_S), limits=limits, trust_env=False
      )
      self._client.headers.clear()
    try:
      sending = [(name.encode(), value.encode('latin-1')) for name, value in [*kept, *limit, (MARK, '1')]]
      target = httpx2.URL(url).copy_with(raw_path=path)
      async with asyncio.timeout(None) as patience:
        watcher = asyncio.create_task(self._watch(url, patience))
        try:
          async with self._client.stream(method, target, headers=sending, content=body) as answer:
            yield answer
        finally:
          watcher.cancel()
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
      raise NotHolder('') from error

  async def _watch(self, url: str, patience: asyncio.Timeout) -> None:
    """End the patience with a replica once it lives no more."""
    lives = True
    while lives:
      await asyncio.sleep(_LOOK_S)
      with contextlib.suppress(StorageFailed):
        lives = await run_in_threadpool(self._lives, url)
    patience.reschedule(asyncio.get_running_loop().time())
