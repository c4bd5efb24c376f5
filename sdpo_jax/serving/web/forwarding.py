"""Forwarding of requests to the replica that holds what they change, with the headers and the body of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import json
from typing import Any

import httpx2
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import FairSemaphore
from sdpo_jax.serving.errors import NotHolder, StorageFailed
from sdpo_jax.serving.web.admission import GateRequest

# The header of a forwarded request, which is not forwarded again: the id of the request of the client.
MARK = 'x-forwarded-by-replica'
PART = 'part of a batch {} {}'  # The Idempotency-Key of a forwarded entry of a batch: key and body of its part.
_CONNECT_S = 2.0  # Seconds until another replica must have accepted a connection.
_LOOK_S = 1.0  # Seconds between two looks whether it still lives, since a paused one leaves connections open.
# Headers of which the next connection has its own.
_PER_HOP = frozenset('connection content-length date expect keep-alive te trailer transfer-encoding upgrade'.split())


class Forwarding:
  """The client of other replicas; for one event loop."""

  def __init__(self, lives: Callable[[str], bool], places: FairSemaphore) -> None:
    """Make a client.

    Args:
      lives: whether the replica of an id has renewed its leases; may raise StorageFailed.
      places: held by what is posted, as many as a replica has, so that a batch of requests waits and is not refused.
    """
    self._lives, self._places = lives, places
    self._client: httpx2.AsyncClient | None = None
    self._looks: dict[str, asyncio.Task[bool]] = {}  # By replica: whether it lives, for all who ask meanwhile.

  async def __call__(
    self, holder: NotHolder, request: GateRequest, call: Call, scope: Scope, receive: Receive, send: Send
  ):
    """Answer a request, as an ASGI application, with what the replica answers that an error names.

    Raises:
      NotHolder: that replica does not answer.
      ServiceError: the request has ended.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    # As the client has sent them, so that the digest of the request is the same there.
    path = scope['raw_path'] + (b'?' + scope['query_string'] if scope.get('query_string') else b'')
    try:
      with call.on_end(lambda: loop.call_soon_threadsafe(task.cancel)):
        async with self._sent(holder, request, path, call) as answer:
          own = [(name, value) for name, value in answer.headers.raw if name.decode().lower() not in _PER_HOP]
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
    holder: NotHolder,
    path: str,
    body: bytes,
    headers: Mapping[str, Sequence[str]],
  ) -> tuple[int, Any]:
    """Post JSON to another replica, in the name of a client whose request this one is working on, from any thread.

    Args:
      loop: the event loop of the gate.
      request: the request of the client, a POST, whose headers are sent.
      call: likewise.
      holder: names the other replica.
      path: the address there.
      body: the JSON.
      headers: values in place of those of the client, by names in lower case.

    Returns:
      Status and JSON of the answer.
    """
    # The client's Connection names none of the headers that are given.
    posted = dataclasses.replace(request, headers={**request.headers, 'connection': [], **headers}, body=body)

    async def answered() -> tuple[int, Any]:
      async with self._sent(holder, posted, path.encode(), call) as answer:
        content = await answer.aread()
      try:
        return answer.status_code, json.loads(content)
      except (ValueError, RecursionError) as error:
        raise NotHolder('') from error

    with self._places.of(call):
      return call.result(asyncio.run_coroutine_threadsafe(answered(), loop))

  @contextlib.asynccontextmanager
  async def _sent(self, holder: NotHolder, request: GateRequest, path: bytes, call: Call):
    named = {each.strip().lower() for value in request.headers.get('connection', ()) for each in value.split(',')}
    kept = {name: values for name, values in request.headers.items() if name not in _PER_HOP | named}
    limit = [] if call.left is None else [str(max(1, round(1000 * call.left)))]
    headers = kept | {'x-deadline-ms': limit, MARK: [request.id]}
    if self._client is None:
      timeout, limits = httpx2.Timeout(None, connect=_CONNECT_S), httpx2.Limits(max_connections=None)
      self._client = httpx2.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
      self._client.headers.clear()
    try:
      sending = [(name.encode(), value.encode('latin-1')) for name, values in headers.items() for value in values]
      target = httpx2.URL(holder.url).copy_with(raw_path=path)
      async with asyncio.timeout(None) as patience:
        watcher = asyncio.create_task(self._watch(holder.replica, patience))
        try:
          async with self._client.stream(request.method, target, headers=sending, content=request.body) as answer:
            yield answer
        finally:
          watcher.cancel()
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
      raise NotHolder('') from error

  async def _watch(self, replica: str, patience: asyncio.Timeout) -> None:
    """End the patience with a replica once it lives no more."""
    lives = True
    while lives:
      # To await one that is done, whose callback waits for its turn, would let nothing else run.
      if replica not in self._looks or self._looks[replica].done():
        self._looks[replica] = asyncio.create_task(self._look(replica))
        self._looks[replica].add_done_callback(lambda _: self._looks.pop(replica, None))
      lives = await asyncio.shield(self._looks[replica])
    patience.reschedule(asyncio.get_running_loop().time())

  async def _look(self, replica: str) -> bool:
    """Return whether a replica lives in a moment; it does as long as that is not known."""
    await asyncio.sleep(_LOOK_S)
    with contextlib.suppress(StorageFailed):
      return await run_in_threadpool(self._lives, replica)
    return True
