"""The gate: middleware that every request passes before and after its handler; no route can bypass it.

It checks key, origin, body size, concurrency and time limit, sends one response per Idempotency-Key, turns errors into
responses and writes the log line. Handlers get `request.state.account`, which only reaches the data of its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import secrets
import threading
import time
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sdpo_jax.config import ServeConfig
from sdpo_jax.files import as_json
from sdpo_jax.rollout.fair_queue import Payer
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.allowances import TOKENS, Allowances
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.capacity import Capacity, FairSemaphore
from sdpo_jax.serving.errors import (
  Deadline,
  InvalidRequest,
  NotFound,
  NotHolder,
  NotReady,
  ServiceError,
  Unauthorized,
)
from sdpo_jax.serving.sessions.sessions import Sessions
from sdpo_jax.serving.store.store import IdempotentRequest, StoredResponse
from sdpo_jax.serving.web import error_responses
from sdpo_jax.serving.web.admission import GateRequest, Lifetime, Origins, check_program, read_body, time_limit
from sdpo_jax.serving.web.endpoints import Operation, operation_of
from sdpo_jax.serving.web.forwarding import MARK, PART, Forwarding
from sdpo_jax.serving.web.keys import ApiKey, Keys, presented
from sdpo_jax.serving.web.telemetry import Log, Metrics

LOCAL_OWNER = 'local'  # The owner of all adapters of a service without keys.
_LOCAL = ApiKey(LOCAL_OWNER, '', LOCAL_OWNER, LOCAL_OWNER, 0.0)
GRACE = 5.0  # Seconds after its time limit within which a handler may still respond.
_CHEAP = 32  # Requests at once that cost little and wait for nothing; the senders of others leave them alone.
_PART = re.compile(PART.format('([0-9a-f]{64}/[0-9]+)', '([0-9a-f]{64})'))
_LONGEST_KEY = 255  # Characters of an Idempotency-Key.
_WITH_BODY = ('POST', 'PUT', 'PATCH')
_PIECE = 2**16  # Bytes of a body sent at once; only between two sends does the server wait for the client.
_LOGGED_BODY = 100_000  # The most bytes of a response kept for the log.
# Of a request that wants nothing to be kept, also if its body is no JSON; texts in JSON cannot match.
_UNSTORED = re.compile(rb'"store"\s*:\s*false')
_SAFE_HEADERS = ((b'x-content-type-options', b'nosniff'), (b'cache-control', b'no-store'))


@dataclasses.dataclass
class GateResponse:
  """The response to a request: adds common headers, counts bytes, and holds it back until it is stored."""

  to_socket: Send  # Sends to the client.
  headers: Sequence[tuple[bytes, bytes]]  # Defaults, which the handler may override.
  patience: float  # Seconds within which the client must accept each piece.
  keep: int  # How many bytes of the body to keep.
  status: int = 0
  size: int = 0  # Bytes of the body.
  kept: bytearray = dataclasses.field(default_factory=bytearray)  # The first `keep` bytes of the body sent.
  held: list[Message] | None = None  # Messages held back until `release`; None: they are sent at once.
  replaced: bool = False  # Whether another response was sent; the held-back one is stored but never sent.
  closed: bool = False  # Whether all further messages are dropped.
  complete: bool = False  # Whether the handler has sent the last part of the body.

  async def __call__(self, message: Message) -> None:
    if self.closed:
      return
    if message['type'] == 'http.response.start':
      self.status = message['status']
      own = {name.lower() for name, _ in message['headers']}
      added = [(name, value) for name, value in self.headers if name not in own]
      message = message | {'headers': [*message['headers'], *added]}
    else:
      body = message.get('body', b'')
      self.size += len(body)
      self.kept += body[: max(0, self.keep - len(self.kept))]
      self.complete = not message.get('more_body', False)
    if self.held is not None:
      self.held.append(message)
    else:
      await self._send(message)

  async def _send(self, message: Message) -> None:
    body = memoryview(message.get('body', b''))
    last = max(0, len(body) - 1) // _PIECE * _PIECE
    for start in range(0, last, _PIECE):
      await self._send(message | {'body': bytes(body[start : start + _PIECE]), 'more_body': True})
    try:
      async with asyncio.timeout(self.patience):  # In Python 3.11, `asyncio.wait_for` can swallow a cancellation.
        await self.to_socket(message | {'body': bytes(body[last:])} if last else message)
    except TimeoutError:
      self.closed = True
      raise OSError(f'The client did not read the response within {self.patience:g} seconds.') from None

  @property
  def held_body(self) -> bytes:
    """The part of the body that is held back."""
    return b''.join(message.get('body', b'') for message in self.held or ())

  async def release(self) -> None:
    """Send the messages that were held back, unless another response has replaced them."""
    waiting, self.held = self.held or [], None
    for message in waiting if not self.replaced else ():
      await self._send(message)

  async def json(self, status: int, body: Any, headers: Mapping[str, str]) -> None:
    """Respond with JSON unless a response has begun; a held-back one is replaced."""
    if self.closed or self.replaced or (self.status and self.held is None):
      return
    content = as_json(body)
    if self.held is None:
      await send_body(self, status, content, headers)
      return
    # A late handler continues; its response is stored for a repeat of the request.
    self.replaced = True
    instead = GateResponse(self.to_socket, self.headers, self.patience, self.keep)
    await send_body(instead, status, content, headers)
    self.status, self.size, self.kept = instead.status, instead.size, instead.kept


async def send_body(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
  """Send a response with a complete body, JSON unless the headers say otherwise."""
  named = {'Content-Type': 'application/json', 'Content-Length': str(len(body)), **headers}
  raw = [(name.lower().encode(), value.encode('latin-1', 'replace')) for name, value in named.items()]
  await send({'type': 'http.response.start', 'status': status, 'headers': raw})
  await send({'type': 'http.response.body', 'body': body})


class Gate:
  """The ASGI middleware around all routes."""

  def __init__(
    self,
    app: ASGIApp,
    *,
    routes: Sequence[BaseRoute],
    lifetime: Lifetime,
    settings: ServeConfig,
    keys: Keys | None,
    log: Log,
    metrics: Metrics,
  ):
    self._app, self._lifetime, self._settings = app, lifetime, settings
    self._routes = [(route, operation_of(route)) for route in routes if isinstance(route, Route)]
    self._keys, self._log, self._metrics = keys, log, metrics
    http = settings.http
    self._counting = threading.Lock()  # Guards what requests have spent.
    shared = keys is not None
    per_key = settings.limits.max_requests_per_key if shared else None
    capacity = functools.partial(Capacity, shared=shared)
    self._places = capacity(http.max_requests, of='requests under way', per_key=per_key)
    self._endless_places = capacity(max(1, http.max_requests // 4), of='streams under way', per_key=per_key)
    self._cheap_places = Capacity(_CHEAP, of='requests for usage, metrics and pages')
    self._reading = capacity(2 * http.max_requests, of='bodies that arrive')
    self._bytes = capacity(int(http.max_bodies_mb * 2**20), of='bytes of bodies in memory (serve.http.max_bodies_mb)')
    self._endless: set[Call] = set()
    places = FairSemaphore(http.max_requests, shared=shared, per_key=per_key)
    self._forwarding = Forwarding(lambda replica: lifetime.present.store.leases.lives(replica), places)
    self._origins = Origins(http, keyed=keys is not None)
    lifetime.on_drain(self._end_endless)

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope['type'] != 'http':
      await self._app(scope, receive, send)
      return
    threads = self._settings.http.max_requests + self._settings.http.max_requests // 4 + _CHEAP
    anyio.to_thread.current_default_thread_limiter().total_tokens = threads  # Of this event loop.
    headers: dict[str, list[str]] = {}
    for name, value in scope['headers']:
      headers.setdefault(name.decode('latin-1').lower(), []).append(value.decode('latin-1'))
    given = re.fullmatch('[0-9a-f]{16}', headers.get(MARK, [''])[0])  # The id of the request, if it was forwarded.
    request = GateRequest(given[0] if given else secrets.token_hex(8), scope['method'], scope['path'], headers)
    common = [*_SAFE_HEADERS, (b'x-request-id', request.id.encode()), *self._origins.headers(request)]
    answer = GateResponse(send, common, self._settings.http.read_timeout_s, _LOGGED_BODY if self._log.bodies else 0)
    began = time.monotonic()
    self._lifetime.under_way += 1
    try:
      await self._pass(scope, receive, answer, request)
    except Exception as error:  # Not BaseException: the server is stopping, or the connection is gone.
      if not answer.closed:  # That a client does not read is no failure of the service.
        failed = error_responses.failure_of(error, request.path, request.id, self._log_of(request).error)
        with contextlib.suppress(OSError):
          await answer.json(failed.status, failed.body, failed.headers)
    finally:
      seconds, tokens = time.monotonic() - began, {kind: request.spent[kind] for kind in TOKENS if request.spent[kind]}
      self._lifetime.under_way -= 1
      self._metrics.end(request.route, request.method, answer.status, seconds, tokens)
      if not request.quiet or answer.status not in (200, 503):
        self._log_of(request).write(
          'request',
          bodies={'asked': request.body, 'answered': b'' if request.secret else bytes(answer.kept)},
          request=request.id,
          method=request.method,
          route=request.route,
          adapter=request.adapter,
          status=answer.status,
          ms=round(1000 * seconds, 1),
          bytes_in=len(request.body),
          bytes_out=answer.size,
          key=request.key,
          tokens=tokens,
        )

  async def _pass(self, scope: Scope, receive: Receive, answer: GateResponse, request: GateRequest) -> None:
    """Check a request and pass it to its handler.

    Raises:
      Unauthorized: there is no valid key.
    """
    self._origins.check(request)
    asks_for_page = request.method == 'OPTIONS' and 'access-control-request-method' in request.headers
    if asks_for_page and self._origins.headers(request):  # A CORS preflight for a page of an allowed origin.
      await send_body(answer, 204, b'', {'Access-Control-Max-Age': '600'})
      return
    route, operation, params = self._route(scope)
    if route is not None:
      request.route, request.quiet, request.secret = route.path, operation.probe, operation.secret
    if operation.open:
      await self._show(scope, receive, answer, None if operation.probe else (scope.get('client') or [''])[0])
      return
    if operation.tenant is None:
      key = presented(request.headers)
      sender = _LOCAL if self._keys is None else key and self._keys.find(key)
    else:
      check_program(request, (scope.get('client') or [''])[0], scope['http_version'])
      sender = ApiKey(operation.tenant, '', operation.tenant, operation.tenant, 0.0)
    if sender is None:
      raise Unauthorized('A valid API key is required: send Authorization: Bearer sdpo_… or X-API-Key: sdpo_….')
    owner, request.key = sender.owner, sender.id
    if route is None:
      raise self._no_route(scope)
    if operation.guarded:
      self._origins.check_page(request)
    state: MutableMapping[str, Any] = scope.setdefault('state', {})
    if operation.observes:
      state['sender'] = sender
      await self._show(scope, receive, answer, request.key)
      return
    self._lifetime.touch()
    request.adapter = params.get('adapter')
    if request.method in _WITH_BODY:  # Web forms can send bodies of some other types across origins.
      kind = (request.header('content-type') or '').partition(';')[0].strip().lower()
      if kind != operation.content_type:
        raise error_responses.NotJson(f'Content-Type must be {operation.content_type}, also for an empty body.')
    service = self._lifetime.service()
    http = self._settings.http
    seconds = None if operation.endless else time_limit(request.header('x-deadline-ms'), http.deadline_s)
    places = self._cheap_places if operation.cheap else self._endless_places if operation.endless else self._places
    # What a key has no place for is refused unread. A place is taken once the body is there: slow senders hold none.
    if not places.has_room(request.key):
      raise places.full(request.key)
    task: asyncio.Task[None] | None = None
    with contextlib.ExitStack() as held:
      if not await self._read(receive, request, held):
        return
      _take(places, request.key, held)
      service.allowances.spend(request.key, 'requests', 1)
      deadline = None if seconds is None else time.monotonic() + seconds
      spend = functools.partial(self._spend, service.allowances, request)
      held.callback(service.allowances.settle, request.key, request.spent)
      call = Call(deadline, spend, Payer(sender.id, sender.weight))
      held.enter_context(call.closing)
      account = Account(service, owner, call)
      state |= {
        'account': account,
        'call': call,
        'log': self._log_of(request),
        'metrics': self._metrics,
        'request_id': request.id,
        'idempotency': None,
        'kept': True,
        'post_to_replica': functools.partial(self._forwarding.post, asyncio.get_running_loop(), request, call),
      }
      if operation.token:  # Before a stored response is returned.
        token = request.header('x-session-token')
        await run_in_threadpool(Sessions(account).check_token, params['adapter'], params['session'], token)
      idempotent = None
      key = request.header('idempotency-key') if operation.again is not None else None
      if key is not None:
        if not (0 < len(key) <= _LONGEST_KEY and key.isascii() and key.isprintable()):
          raise InvalidRequest(f'The header Idempotency-Key must have 1 to {_LONGEST_KEY} printable ASCII characters.')
        part = _PART.fullmatch(key) if MARK in request.headers else None
        begin = service.store.begin if part is None else service.store.begin_part
        names = (key, _digest(request, scope)) if part is None else part.groups()
        begun = await run_in_threadpool(begin, owner, *names)
        if isinstance(begun, StoredResponse):
          await send_body(answer, *await run_in_threadpool(_again, operation, account, begun))
          return
        idempotent, answer.held = begun, []
        state['idempotency'] = idempotent
      handled = self._handle(scope, receive, answer, request, account, operation.endless, idempotent)
      task = asyncio.create_task(handled)
      rest = held.pop_all()
      task.add_done_callback(lambda _: rest.close())
      await self._wait(task, call, answer, seconds)

  async def _show(self, scope: Scope, receive: Receive, answer: GateResponse, sender: str | None) -> None:
    """Let a handler that needs no account respond; None: it needs no place either."""
    with contextlib.ExitStack() as held:
      if sender is not None:
        _take(self._cheap_places, sender, held)
      await self._app(scope, receive, answer)

  async def _read(self, receive: Receive, request: GateRequest, held: contextlib.ExitStack) -> bool:
    """Read the body of a request, whose bytes are counted until `held` closes; return whether the client is there."""
    http, count = self._settings.http, functools.partial(_take, self._bytes, request.key, held)
    with contextlib.ExitStack() as reading:
      _take(self._reading, request.key, reading)
      length = request.header('content-length')
      most = int(http.max_body_mb * 2**20)
      body = await read_body(receive, length, most, http.read_timeout_s, http.deadline_s, count)
    request.body = body or b''
    request.unstored = _UNSTORED.search(request.body) is not None
    return body is not None

  async def _wait(self, task: asyncio.Task[None], call: Call, answer: GateResponse, seconds: float | None) -> None:
    """Wait for a handler; when its time limit is over it is told to stop, and `GRACE` seconds later it is abandoned.

    Once it has responded, only the client is waited for, which has no time limit as long as it reads.
    """
    try:
      await asyncio.wait({task}, timeout=seconds)
      if not (task.done() or (answer.complete and answer.held is None)):
        late = Deadline(f'The request was not done within its time limit of {seconds:g} seconds.')
        call.end(late)
        await asyncio.wait({task}, timeout=GRACE)
        if not (task.done() or (answer.complete and answer.held is None)):
          # Retrieve the exception, or asyncio would log that nobody did.
          task.add_done_callback(lambda done: done.cancelled() or done.exception())
          raise late
      await task
    except asyncio.CancelledError:
      call.end()
      raise

  async def _handle(
    self,
    scope: Scope,
    receive: Receive,
    answer: GateResponse,
    request: GateRequest,
    account: Account,
    endless: bool,
    idempotent: IdempotentRequest | None,
  ) -> None:
    """Run the handler; end the request if the client disconnects.

    If another replica holds what the request changes, let that one answer it.
    """
    call, gone, store = account.call, asyncio.Event(), account.service.store
    unread: list[Message] = [{'type': 'http.request', 'body': request.body, 'more_body': False}]

    async def replay() -> Message:
      if unread:
        return unread.pop()
      await gone.wait()
      return {'type': 'http.disconnect'}

    async def watch() -> None:
      while (await receive())['type'] != 'http.disconnect':
        pass
      if not answer.complete:
        call.end()
      gone.set()

    watcher = asyncio.create_task(watch())
    if endless:
      self._endless.add(call)
      if self._lifetime.draining:  # `_end_endless` may have run just before this request was added.
        self._end_endless()
    try:
      try:
        await self._app(scope, replay, answer)
      except NotHolder as error:
        if not error.url or answer.status or MARK in request.headers:
          raise
        if idempotent is not None:  # That one begins and counts the request.
          await run_in_threadpool(store.abandon, idempotent)
        account.service.allowances.spend(request.key, 'requests', -1)
        answer.held = idempotent = None
        await self._forwarding(error, request, call, scope, replay, answer)
      if idempotent is not None:
        end = functools.partial(store.abandon, idempotent)
        if answer.status < 400 and answer.complete and scope['state']['kept']:
          end = functools.partial(store.finish, idempotent, answer.status, answer.held_body)
        idempotent = None
        try:
          await run_in_threadpool(end)  # Before the client has the answer, and may send the request again.
        except ServiceError as error:  # The request has succeeded; the response to a repeat is rebuilt.
          self._log.error(error, request.id)
        await answer.release()
    finally:
      self._endless.discard(call)
      watcher.cancel()
      if idempotent is not None:
        await run_in_threadpool(store.abandon, idempotent)

  def _log_of(self, request: GateRequest) -> Log:
    return self._log.without_bodies() if request.unstored else self._log

  def _end_endless(self) -> None:
    for call in list(self._endless):
      call.end(NotReady('The service is shutting down.'))

  # The request.

  def _route(self, scope: Scope) -> tuple[Route | None, Operation, Mapping[str, Any]]:
    """Return the route of a request (None: no route matches), its operation and its path parameters."""
    for route, operation in self._routes:
      match, child = route.matches(scope)
      if match == Match.FULL:
        return route, operation, child['path_params']
    return None, Operation(), {}

  def _no_route(self, scope: Scope) -> ServiceError:
    allowed = {
      method for route, _ in self._routes if route.matches(scope)[0] == Match.PARTIAL for method in route.methods or ()
    }
    if allowed:
      return error_responses.MethodNotAllowed(
        f'This address accepts {", ".join(sorted(allowed))}, not {scope["method"][:20]}.'
      )
    return NotFound('There is no such address: /openapi.json lists all addresses.')

  def _spend(self, allowances: Allowances, request: GateRequest, kind: str, amount: int) -> None:
    """Take from the allowance of the request's key, and count it by kind."""
    allowances.spend(request.key, kind, amount, reserve=True)
    with self._counting:
      request.spent[kind] += amount


def _take(places: Capacity, key: str, held: contextlib.ExitStack, count: int = 1) -> None:
  """Take places until `held` closes; raises Busy if the key may not."""
  if not places.take(key, count):
    raise places.full(key)
  held.callback(places.let_go, key, count)


def _again(operation: Operation, account: Account, stored: StoredResponse) -> tuple[int, bytes, dict[str, str]]:
  """Return status, body and headers for a repeated request: as stored, or rebuilt from the version that it made."""
  status, content = stored.status, stored.response
  if content is not None and status is not None:
    said = json.loads(content) if operation.tagged else None
  else:
    said = operation.again(account, stored.adapter, stored.version)
    status, content = operation.status, as_json(said)
  return status, content, operation.headers_of(said) | {'Idempotency-Replayed': 'true'}


def _digest(request: GateRequest, scope: Scope) -> str:
  """Return a digest of a request, which requests with the same Idempotency-Key must have in common."""
  query = scope.get('query_string', b'').decode('latin-1')
  parts = request.method, request.path, query, request.header('if-match') or ''
  return hashlib.sha256('\0'.join(parts).encode() + b'\0' + request.body).hexdigest()


def behind_gate(routes: Sequence[BaseRoute], **parts: Any) -> Starlette:
  """Make an application in which every request to the routes passes a `Gate` of these parts."""
  return Starlette(routes=routes, middleware=[Middleware(Gate, routes=routes, **parts)])
