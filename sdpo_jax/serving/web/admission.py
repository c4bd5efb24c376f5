"""Admission of requests: the state of the service, allowed origins, and limits of size and time.

The origin of a request is the host name that it uses for this machine, and the web page that sends it.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import time
from typing import TYPE_CHECKING
import urllib.parse

from starlette.types import Message, Receive

from sdpo_jax.config import HttpConfig
from sdpo_jax.config.addresses import is_loopback
from sdpo_jax.serving.errors import Forbidden, InvalidRequest, NotReady, TooLarge
from sdpo_jax.serving.web.error_responses import TooSlow

if TYPE_CHECKING:  # Only for annotations: this module does not depend on the service at run time.
  from sdpo_jax.serving.service import Service

_LARGEST_HEADER_MS = 10**9
LOCAL_HOSTS = ('localhost', '127.0.0.1', '::1')
_FORWARDED = ('origin', 'forwarded', 'via', 'x-real-ip')  # And x-forwarded-….
_CORS_HEADERS = (
  'Authorization, Content-Type, Idempotency-Key, If-Match, Last-Event-ID, X-API-Key, X-Deadline-Ms, X-Session-Token'
)
_CORS_EXPOSED = 'ETag, Link, Retry-After, retry-after-ms, X-Request-Id, Idempotency-Replayed'
# Values of Sec-Fetch-Site for the service's own pages, and for addresses that a person has typed.
_OWN_SITES = ('same-origin', 'none')


class Lifetime:
  """The state of the service as the HTTP layer sees it, from before it exists until it ends; any thread may call."""

  def __init__(self, service: Service | None = None, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self.present = service  # The service; None: it does not exist yet.
    self.failure: BaseException | None = None  # The error because of which the process ends.
    self.stage = 'reading the model'  # The current stage of the start, for /readyz.
    self.draining = False  # Whether the service accepts no new requests because it is shutting down.
    self._listeners: list[Callable[[], None]] = []
    self._last_request = clock()
    self.under_way = 0  # Requests in progress; used in the event loop only.

  @property
  def ready(self) -> bool:
    """Whether requests are accepted."""
    there = self.present is not None and self.present.worker.ready.is_set()
    return there and not self.draining and not self.why_not()

  def on_drain(self, listener: Callable[[], None]) -> None:
    """Register a function to be called when `drain` is called."""
    self._listeners.append(listener)

  def drain(self) -> None:
    """Refuse new requests from now on, and notify the listeners."""
    self.draining = True
    for listener in self._listeners:
      listener()

  def why_not(self) -> str:
    """Return a sentence about the error that has stopped the engine; empty: the engine has not failed."""
    failure = self.failure or (self.present.worker.failure if self.present is not None else None)
    return f'The engine has failed ({type(failure).__name__}): see the log of the service.' if failure else ''

  def service(self) -> Service:
    """Return the service, for a new request.

    Raises:
      NotReady: the service is starting, has failed, or is shutting down.
    """
    if self.draining:
      raise NotReady('The service is shutting down: retry when it is back.', retry_after=1.0)
    if self.why_not():
      raise NotReady(self.why_not())
    if self.present is None or not self.present.worker.ready.is_set():
      raise NotReady(f'The service is starting ({self.stage}): /readyz reports when it is ready.')
    return self.present

  def touch(self) -> None:
    """Note the time of a request, for `idle_for`."""
    self._last_request = self._clock()

  def idle_for(self) -> float:
    """Return the seconds since the last request; 0 while one is in progress."""
    return 0.0 if self.under_way else self._clock() - self._last_request


@dataclasses.dataclass
class GateRequest:
  """A request on its way through the gate."""

  id: str
  method: str
  path: str
  headers: Mapping[str, Sequence[str]]
  route: str = '(none)'  # The path pattern of its route.
  adapter: str | None = None  # The adapter named in its path.
  key: str | None = None  # The id of the key, never the key itself.
  body: bytes = b''
  unstored: bool = False  # Whether the client wants nothing of it to be kept.
  quiet: bool = False  # Whether only unexpected responses are logged, as for health checks.
  secret: bool = False  # Whether its response is never logged, even if bodies are.
  # Tokens by kind, and feedbacks, as `Call.spend` counts them.
  spent: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

  def header(self, name: str) -> str | None:
    """Return the value of a header, given in lower case; None: it was not sent.

    Raises:
      InvalidRequest: it was sent more than once.
    """
    values = self.headers.get(name, ())
    if len(values) > 1:
      raise InvalidRequest(f'The header {name} was sent {len(values)} times: send it once.')
    return values[0] if values else None


class Origins:
  """The host names and web pages that may reach the service."""

  def __init__(self, http: HttpConfig, *, keyed: bool):
    """Read the settings.

    Args:
      http: settings.
      keyed: whether every request needs a key.
    """
    self._origins = http.allowed_origins
    self._hosts = {name.lower() for name in (*LOCAL_HOSTS, http.host, *http.allowed_hosts)}
    self._named = not keyed or bool(http.allowed_hosts)  # Whether every route checks Host.

  def check(self, request: GateRequest) -> None:
    """Raise Forbidden if Host is not a name of the service, or Origin is a page that is not allowed.

    Without keys, whoever reaches the port acts as the owner; a web page in a browser on this machine must not.
    """
    if self._named and not self._is_served(request):
      raise Forbidden(
        'The header Host names another machine: use localhost, or add the name to serve.http.allowed_hosts.'
      )
    host, origin = request.header('host') or '', request.header('origin')
    if origin is None or origin in self._origins:
      return
    if origin not in (f'http://{host}', f'https://{host}'):
      raise Forbidden('Pages of this origin are not allowed: add it to serve.http.allowed_origins to allow them.')

  def check_page(self, request: GateRequest) -> None:
    """Raise Forbidden if a foreign web page may have made a browser send the request, even if there are keys.

    If the name of a page is made to resolve to this machine, its requests have that name as Host. Links, images and
    forms may send no Origin, but browsers add Sec-Fetch-Site, which no script can forge.
    """
    if not self._is_served(request):
      raise Forbidden(
        'The header Host is not a name of the service, which this address requires: use localhost, or add the name to '
        'serve.http.allowed_hosts.'
      )
    site, origin = request.header('sec-fetch-site'), request.header('origin')
    if site is not None and site not in _OWN_SITES and origin not in self._origins:
      raise Forbidden('Pages of this site are not allowed: add its origin to serve.http.allowed_origins to allow them.')

  def headers(self, request: GateRequest) -> list[tuple[bytes, bytes]]:
    """Return the CORS headers that let a page of an allowed origin read the response; empty for other origins."""
    origins = request.headers.get('origin', ())
    if len(origins) != 1 or origins[0] not in self._origins:
      return []
    return [
      (b'access-control-allow-origin', origins[0].encode('latin-1')),
      (b'access-control-allow-methods', b'GET, POST, PATCH, DELETE'),
      (b'access-control-allow-headers', _CORS_HEADERS.encode()),
      (b'access-control-expose-headers', _CORS_EXPOSED.encode()),
      (b'vary', b'Origin'),
    ]

  def _is_served(self, request: GateRequest) -> bool:
    """Return whether Host is a name of the service, without spaces, slashes, a user or non-ASCII characters."""
    host = request.header('host') or ''
    if not host.isascii() or any(letter in host for letter in ' /\\@?#,\t'):
      return False
    try:
      found = urllib.parse.urlsplit(f'//{host}')
      return found.hostname in self._hosts and found.port != 0
    except ValueError:
      return False


def check_program(request: GateRequest, client: str, version: str) -> None:
  """Raise Forbidden unless a program on this machine has sent a request, for nobody else as far as one can tell.

  Who reaches such an address needs no key, so browsers are refused whatever page is open, and proxies that say whom
  they ask for, or speak HTTP/1.0, as some do by default.

  Args:
    request: the request.
    client: the address that it comes from; empty: unknown.
    version: of HTTP, such as 1.1.
  """
  forwarded = any(name in _FORWARDED or name.startswith('x-forwarded-') for name in request.headers)
  if forwarded or version == '1.0' or not is_loopback(client):
    raise Forbidden('Only programs on the machine of the service may send requests here, no proxy and no web page.')


def time_limit(header: str | None, longest: float) -> float:
  """Return the time limit of a request in seconds.

  Args:
    header: the value of X-Deadline-Ms; None: it was not sent.
    longest: the limit for all requests, in seconds.

  Raises:
    InvalidRequest: the header is not a number of milliseconds.
  """
  if header is None:
    return longest
  if not header.isdecimal() or not header.isascii() or not 0 < int(header[:12]) <= _LARGEST_HEADER_MS:
    raise InvalidRequest(f'The header X-Deadline-Ms must be a number of milliseconds from 1 to {_LARGEST_HEADER_MS}.')
  return min(longest, int(header[:12]) / 1000)


async def read_body(
  receive: Receive,
  declared: str | None,
  limit: int,
  timeout: float,
  whole: float,
  count: Callable[[int], None] = lambda size: None,
) -> bytes | None:
  """Return the body of a request, reading no more than the limit; None: the client has disconnected.

  Args:
    receive: the ASGI function of the request.
    declared: the value of Content-Length; None: it was not sent.
    limit: the most bytes.
    timeout: seconds within which each part must arrive.
    whole: seconds within which the whole body must arrive, even if a client sends it byte by byte.
    count: called with the size of each part before it is kept; may raise.

  Raises:
    TooLarge: the body is longer than the limit.
    TooSlow: a part or the whole did not arrive in time.
  """
  until = time.monotonic() + whole
  sentence = f'The body is larger than the limit of {limit} bytes (serve.http.max_body_mb).'
  if declared is not None and declared.isdecimal() and int(declared[:20]) > limit:
    raise TooLarge(sentence)
  parts, size = [], 0
  while True:
    try:
      async with asyncio.timeout(min(timeout, until - time.monotonic())):  # Not `wait_for`, see `GateResponse`.
        message: Message = await receive()
    except TimeoutError:
      if time.monotonic() >= until:
        raise TooSlow(f'The body did not arrive within {whole:g} seconds (serve.http.deadline_s).') from None
      raise TooSlow(f'No part of the body arrived for {timeout:g} seconds (serve.http.read_timeout_s).') from None
    if message['type'] == 'http.disconnect':
      return None
    part = message.get('body', b'')
    size += len(part)
    if size > limit:
      raise TooLarge(sentence)
    count(len(part))
    parts.append(part)
    if not message.get('more_body', False):
      return b''.join(parts)
