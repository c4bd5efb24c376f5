"""HTTP POST requests with one deadline for the whole exchange and a limit on the bytes that are read.

The timeouts of HTTP libraries apply to single reads, so a server that sends byte after byte can take as long as it
likes. Here every operation on the connection gets the time that is left until one deadline. Nothing is decompressed, no
redirect is followed, no cookie is kept, and no header is repeated in a log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
import math
import threading
import time
from typing import Any
import urllib.request

import httpcore2
import httpx2

from sdpo_jax.environments.time_limit import OverranError, call_within
from sdpo_jax.errors import UserError

MAX_BODY_BYTES = 2**20  # Default limit of an answer's body.
MAX_HEAD_BYTES = 2**16  # Limit of status lines and headers, including those of provisional answers (RFC 9110, 15.2).
MAX_PIECES = 10_000  # Limit per body: reading a piece costs as much as reading some hundred bytes.
PIECE_BYTES = 512  # Larger bodies that callers expect may come in pieces of this size.
CONNECT_TIMEOUT_S = 10.0  # Upper limit: a server that runs accepts a connection quickly, however long it thinks.
WRITE_BYTES = 2**14  # Bytes per write, so that the deadline is checked between writes.


class TooLargeError(Exception):
  """The answer is larger than allowed; the message says which limit it exceeds."""


class ConnectionFailedError(Exception):
  """The connection failed or was lost, or the answer is not HTTP; the message says which."""


@dataclasses.dataclass(frozen=True)
class HttpResponse:
  """The server's answer: status, reason, headers and body."""

  status: int
  reason: str  # As the server sends it; may hold control characters.
  headers: dict[str, str]  # Keyed by lower-case name; the last value of repeated headers.
  body: bytes


class HttpClient:
  """A pool of connections to one address; thread-safe."""

  def __init__(self, url: str, headers: dict[str, str], *, connections: int, setting: str):
    """Prepare the pool without connecting.

    Args:
      url: an http or https address.
      headers: headers of every request.
      connections: the most idle connections that are kept open.
      setting: name of the setting that holds the address, for messages.

    Raises:
      UserError: the environment names a proxy that cannot be used.
    """
    parsed = httpx2.URL(url)
    self._url = _parts(parsed)
    self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
    self._headers += [(b'Accept-Encoding', b'identity')]
    self._backend = _Backend()
    self._pool = _pool(parsed, self._backend, connections, setting)

  def post(
    self,
    content: bytes,
    timeout_s: float,
    *,
    name: str = 'post',
    on_answer: Callable[[], None] = lambda: None,
    most_bytes: int = MAX_BODY_BYTES,
  ) -> HttpResponse:
    """Post a body and return the answer; for a status other than success, only the beginning of its body.

    Args:
      content: the request body.
      timeout_s: seconds until the whole answer must have arrived.
      name: name of the thread that does the request.
      on_answer: called as soon as any answer arrives.
      most_bytes: limit of the answer's body.

    Raises:
      OverranError: the complete answer did not arrive in time.
      TooLargeError, ConnectionFailedError: as their classes say.
    """
    # A name lookup cannot be interrupted; the thread that waits for it ends later.
    exchange = _Exchange(time.monotonic() + timeout_s)
    return call_within(lambda: self._post(content, exchange, on_answer, most_bytes), timeout_s, name)

  def close(self) -> None:
    """Close all connections."""
    self._pool.close()

  def _post(self, content: bytes, exchange: _Exchange, on_answer: Callable[[], None], most_bytes: int) -> HttpResponse:
    body, pieces = bytearray(), 0
    most_pieces = max(MAX_PIECES, most_bytes // PIECE_BYTES)
    self._backend.thread.exchange = exchange
    try:
      with self._pool.stream(
        'POST', self._url, headers=self._headers, content=content, extensions=TIMEOUTS
      ) as response:
        on_answer()
        exchange.most = exchange.received + most_bytes + MAX_HEAD_BYTES
        exchange.too_much = f'is larger than {most_bytes} bytes'
        success = 200 <= response.status < 300
        for piece in response.stream:
          body += piece
          pieces += 1
          if not success and len(body) >= WRITE_BYTES:
            break
          if len(body) > most_bytes:
            raise TooLargeError(f'is larger than {most_bytes} bytes')
          if pieces > most_pieces:
            raise TooLargeError(f'comes in more than {most_pieces} pieces')
        return HttpResponse(
          response.status,
          response.extensions.get('reason_phrase', b'').decode('latin-1'),
          {key.decode('latin-1').lower(): value.decode('latin-1') for key, value in response.headers},
          bytes(body),
        )
    except httpcore2.TimeoutException as error:
      raise OverranError('the deadline has passed') from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError) as error:
      raise ConnectionFailedError(f'{type(error).__name__}: {error}') from error


# Every operation may take all the time that is left.
TIMEOUTS = {'timeout': {'connect': math.inf, 'read': math.inf, 'write': math.inf, 'pool': None}}


class _Exchange:
  """The deadline of a request and the number of bytes received so far."""

  def __init__(self, deadline: float):
    self.deadline = deadline  # In terms of time.monotonic().
    self.received = 0  # Bytes.
    self.most = MAX_HEAD_BYTES
    self.too_much = f'begins with more than {MAX_HEAD_BYTES} bytes of headers'

  def left_s(self) -> float:
    """Return the seconds until the deadline; raises OverranError when none are left."""
    left = self.deadline - time.monotonic()
    if left <= 0:
      raise OverranError('the deadline has passed')
    return left


class _Backend(httpcore2.NetworkBackend):
  """A network backend whose operations keep the deadline of the request that their thread is doing."""

  def __init__(self):
    self._inner = httpcore2.SyncBackend()
    self.thread = threading.local()  # Its `exchange` is the request of a thread, which does no other.

  def connect_tcp(
    self,
    host: str,
    port: int,
    timeout: float | None = None,
    local_address: str | None = None,
    socket_options: Iterable[Any] | None = None,
  ) -> httpcore2.NetworkStream:
    limit = min(self.thread.exchange.left_s(), CONNECT_TIMEOUT_S)
    return _Stream(self, self._inner.connect_tcp(host, port, limit, local_address, socket_options))


class _Stream(httpcore2.NetworkStream):
  def __init__(self, backend: _Backend, inner: httpcore2.NetworkStream):
    self._backend, self._inner = backend, inner

  def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
    exchange = self._backend.thread.exchange
    if exchange.received > exchange.most:
      raise TooLargeError(exchange.too_much)
    # Read just enough to exceed the limit: the parser has its own limit and its own error message.
    data = self._inner.read(min(max_bytes, exchange.most + 1 - exchange.received), exchange.left_s())
    exchange.received += len(data)
    return data

  def write(self, buffer: bytes, timeout: float | None = None) -> None:
    for start in range(0, len(buffer), WRITE_BYTES):
      self._inner.write(buffer[start : start + WRITE_BYTES], self._backend.thread.exchange.left_s())

  def close(self) -> None:
    self._inner.close()

  def start_tls(
    self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
  ) -> httpcore2.NetworkStream:
    left = self._backend.thread.exchange.left_s()
    return _Stream(self._backend, self._inner.start_tls(ssl_context, server_hostname, left))

  def get_extra_info(self, info: str) -> Any:
    return self._inner.get_extra_info(info)


def _pool(url: httpx2.URL, backend: _Backend, connections: int, setting: str) -> httpcore2.ConnectionPool:
  """Return a connection pool for an address, through the proxy that the environment names (HTTPS_PROXY and so on)."""
  options = {
    'ssl_context': httpx2.create_ssl_context(),
    # Callers limit how many are in use; connections of abandoned requests must not make others wait.
    'max_connections': None,
    'max_keepalive_connections': connections,
    'keepalive_expiry': 5.0,
    'network_backend': backend,
  }
  proxies = urllib.request.getproxies()
  address = proxies.get(url.scheme) or proxies.get('all')
  if not address or urllib.request.proxy_bypass(url.host):
    return httpcore2.ConnectionPool(**options)
  try:
    proxy = httpx2.Proxy(address if '://' in address else f'http://{address}')
  except (ValueError, httpx2.InvalidURL):
    proxy = None
  if proxy is None or proxy.url.scheme not in ('http', 'https'):
    raise UserError(
      f'{setting}: the environment names a proxy for this address that is none of http or https: correct HTTP_PROXY, '
      'HTTPS_PROXY or ALL_PROXY, or list the host in NO_PROXY.'
    )
  return httpcore2.HTTPProxy(proxy_url=_parts(proxy.url), proxy_auth=proxy.raw_auth, **options)


def _parts(url: httpx2.URL) -> httpcore2.URL:
  return httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
