"""JSON requests to a server: addresses and keys from the settings, one bounded POST, and its errors.

The timeouts of HTTP libraries apply to single reads, so a server that sends byte after byte can take as long as it
likes. Here every operation on the connection gets the time that is left until one deadline. Nothing is decompressed, no
redirect is followed, no cookie is kept, and no header is repeated in a log.

An answer is parsed only if that is quick. A megabyte of brackets becomes 350 000 lists; parsing them takes some hundred
milliseconds, in which no other thread of the process runs. Long strings are parsed quickly.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import datetime
import email.utils
import json
import math
import os
import re
import threading
import time
from typing import Any, NamedTuple
import urllib.parse
import urllib.request

import httpcore2
import httpx2

from sdpo_jax.config.addresses import VARIABLE
from sdpo_jax.environments.time_limit import OverranError, call_within
from sdpo_jax.errors import UserError, printable, short_repr
from sdpo_jax.files import jsonable

MAX_BODY_BYTES = 2**20  # Default limit of an answer's body.
MAX_HEAD_BYTES = 2**16  # Limit of status lines and headers, including those of provisional answers (RFC 9110, 15.2).
MAX_PIECES = 10_000  # Limit per body: reading a piece costs as much as reading some hundred bytes.
PIECE_BYTES = 512  # Larger bodies that callers expect may come in pieces of this size.
MAX_VALUES = 10_000  # Default limit of the number of values in an answer.
CONNECT_TIMEOUT_S = 10.0  # Upper limit: a server that runs accepts a connection quickly, however long it thinks.
WRITE_BYTES = 2**14  # Bytes per write, so that the deadline is checked between writes.
FIRST_PAUSE_S = 1.0  # Pause before the second attempt; doubles before each further one.
LONGEST_PAUSE_S = 60.0
SECRET_CHARACTERS = 6  # Minimum length of a secret: a shorter text, such as a port number, may occur anywhere.
_PARAMETER = re.compile(r'=\s*"?([^",;\s]+)')  # The values in `Token token="x", …`.
# Matches a string in JSON, closed or not, so that no part of a text is scanned twice.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
QUOTED = 200  # Characters of a server's answer that a message quotes.


class Fault(Exception):
  """The reason, in words, why a server gave no usable answer."""

  def __init__(
    self,
    reason: str,
    *,
    again: bool = False,
    after_s: float | None = None,
    advice: str = '',
    status: int | None = None,
  ):
    """Store `reason` and what may help.

    Args:
      reason: what was wrong.
      again: whether another attempt may help.
      after_s: pause in seconds that the server asked for.
      advice: what to look at if all answers are so, though the server works.
      status: the HTTP status with which the server refused the request; None: it did not.
    """
    super().__init__(reason)
    self.again, self.after_s, self.advice, self.status = again, after_s, advice, status


def pause_s(attempt: int, after_s: float | None, draw: float) -> float:
  """Return the seconds to wait after a failed attempt.

  Args:
    attempt: index of the failed attempt.
    after_s: pause that the server asked for; None: it asked for none, so the pause doubles with each attempt.
    draw: number in [0, 1) that varies the pause by a factor of 0.5 to 1.5, to spread requests that failed together.
  """
  if after_s is not None:
    return min(max(after_s, 0.0), LONGEST_PAUSE_S)
  return min(FIRST_PAUSE_S * 2**attempt * (0.5 + draw), LONGEST_PAUSE_S)


def retry_after_s(header: str | None, now: datetime.datetime) -> float | None:
  """Parse a Retry-After header, a number or a date (RFC 9110, 10.2.3), into seconds; None if it is neither."""
  if header is None:
    return None
  if header.strip().isdecimal():
    return float(header)
  try:
    when = email.utils.parsedate_to_datetime(header)
  except (ValueError, TypeError, OverflowError):  # The text may be anything.
    return None
  return (when.replace(tzinfo=when.tzinfo or datetime.UTC) - now).total_seconds()


def quoted(value: Any) -> str:
  """Return a server's answer as messages quote it: shortened, on one line, control characters escaped."""
  return short_repr(' '.join(value.split()) if isinstance(value, str) else value, QUOTED)


def read_address(url: str, setting: str, example: str) -> tuple[str, tuple[str, ...]]:
  """Return the address with environment variables filled in for ${NAME}, and the values of these variables.

  Raises:
    UserError: the address is empty, not http(s), contains a user name, or names an unset variable.
  """
  if not url.strip():
    raise UserError(f'{setting} is empty: set it to the address to ask, e.g. {example}.')
  values = {name: os.environ.get(name, '').strip() for name in VARIABLE.findall(url)}
  missing = [name for name, value in values.items() if not value]
  if missing:
    raise UserError(f'{setting} names ${{{missing[0]}}}: there is no such environment variable; export it.')
  whole = VARIABLE.sub(lambda match: values[match[1]], url.strip())
  try:
    parsed = httpx2.URL(whole)
    fits = parsed.scheme in ('http', 'https') and bool(parsed.host) and not parsed.userinfo
  except httpx2.InvalidURL:
    fits = False
  if not fits:  # The message does not quote the address, which can hold a key.
    raise UserError(f'{setting} must be an http or https address without a user name and password, such as {example}.')
  return whole, tuple(values.values())


def read_secret(variable: str, setting: str, *, required: bool) -> str:
  """Return a key from an environment variable; '' if no variable is named, or an optional one is unset.

  Raises:
    UserError: a required variable is unset, or its value cannot be sent in a header. The message never has the value.
  """
  secret = os.environ.get(variable, '').strip() if variable else ''
  if variable and required and not secret:
    raise UserError(f'{setting}={variable}: there is no such environment variable; export it, or clear the setting.')
  if not (secret.isascii() and secret.isprintable()):
    raise UserError(f'{setting}={variable}: the value of this environment variable must be printable ASCII.')
  return secret


class JsonServer:
  """Connections to one address to which JSON is posted; thread-safe. Call `close()` to release them."""

  def __init__(self, url: str, *, authorization: str, secrets: Sequence[str], connections: int, setting: str):
    """Prepare the connections without opening any.

    Args:
      url: the http or https address of all requests.
      authorization: the Authorization header; '': none. Never shown.
      secrets: other texts that must never be shown, such as parts of `url`.
      connections: maximum number of idle connections that are kept open.
      setting: name of the setting that holds the address, for messages.

    Raises:
      UserError: the environment names a proxy that cannot be used.
    """
    self._url, self._secrets = httpx2.URL(url), _spellings([*secrets, *_keys(authorization)])
    self.setting = setting
    headers = {'Content-Type': 'application/json', 'Accept': 'application/json', 'Accept-Encoding': 'identity'}
    headers |= {'Authorization': authorization} if authorization else {}
    self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
    self._backend = _Backend()
    self._pool = _pool(self._url, self._backend, connections, setting)

  @property
  def public_url(self) -> str:
    """Return the address without the parts that may be secret."""
    return self.redacted(_public(self._url))

  def redacted(self, text: str) -> str:
    """Remove the keys that were sent to the server from a text."""
    for secret in self._secrets:
      text = text.replace(secret, '***')
    return text

  def close(self) -> None:
    """Close all connections."""
    self._pool.close()

  def ask(
    self,
    body: Mapping[str, Any],
    timeout_s: float,
    *,
    name: str,
    on_answer: Callable[[], None] = lambda: None,
    most_bytes: int = MAX_BODY_BYTES,
    most_values: int = MAX_VALUES,
  ) -> Any:
    """Post a JSON body and return the JSON of the answer, without keys that the server repeats.

    Args:
      body: the object to post.
      timeout_s: seconds until the whole answer must have arrived.
      name: name of the thread that does the request.
      on_answer: called as soon as any answer arrives.
      most_bytes: size limit of the answer.
      most_values: limit of the number of values in it.

    Raises:
      Fault: there is no usable answer.
    """
    content = json.dumps(jsonable(body)).encode()
    # A name lookup cannot be interrupted; the thread that waits for it ends later.
    exchange = _Exchange(time.monotonic() + timeout_s)
    try:
      answer = call_within(lambda: self._post(content, exchange, on_answer, most_bytes), timeout_s, name)
    except (OverranError, httpcore2.TimeoutException) as error:
      raise Fault(f'no complete answer within {timeout_s:g} s', again=True) from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError) as error:
      reason = printable(self.redacted(f'{type(error).__name__}: {error}'), QUOTED)
      raise Fault(f'the connection failed ({reason})', again=True) from error
    if not 200 <= answer.status < 300:
      raise _refusal(answer)
    encoding = answer.headers.get('content-encoding', 'identity')
    if encoding.strip().lower() != 'identity':
      raise Fault(f'its answer is encoded ({quoted(encoding)}), which was not asked for')
    try:
      return bounded_loads(answer.body, most_values)
    except ValueError as error:
      start = quoted(answer.body[: 4 * QUOTED].decode('utf-8', 'replace'))
      raise Fault(f'its answer is not JSON ({printable(str(error), QUOTED)}): {start}') from error

  def _post(self, content: bytes, exchange: _Exchange, on_answer: Callable[[], None], most_bytes: int) -> _Answer:
    """Post a body and return the answer without keys; for a status other than success, the beginning of its body."""
    body, pieces = bytearray(), 0
    most_pieces = max(MAX_PIECES, most_bytes // PIECE_BYTES)
    self._backend.thread.exchange = exchange
    with self._pool.stream(
      'POST', _parts(self._url), headers=self._headers, content=content, extensions=TIMEOUTS
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
          raise Fault(f'its answer is larger than {most_bytes} bytes')
        if pieces > most_pieces:
          raise Fault(f'its answer comes in more than {most_pieces} pieces')
      # Redact before shortening, which would leave an unrecognizable part of a key.
      return _Answer(
        response.status,
        self.redacted(response.extensions.get('reason_phrase', b'').decode('latin-1')),
        {key.decode('latin-1').lower(): self.redacted(value.decode('latin-1')) for key, value in response.headers},
        self.redacted(body.decode('latin-1')).encode('latin-1'),
      )


class _Answer(NamedTuple):
  status: int
  reason: str  # As the server sends it; may hold control characters.
  headers: dict[str, str]  # Keyed by lower-case name; the last value of repeated headers.
  body: bytes


def bounded_loads(data: bytes, most_values: int = MAX_VALUES) -> Any:
  """Parse JSON in UTF-8 from an untrusted sender.

  Raises:
    Fault: there are more than `most_values` values, counting nested ones.
    ValueError: it is not JSON, or is nested too deeply.
  """
  text = data.decode('utf-8-sig')
  if _most_values(text) > most_values and _most_values(_STRING.sub('', text)) > most_values:
    raise Fault(f'its answer cannot be read: it has more than {most_values} values')
  try:
    return json.loads(text)
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error


def _most_values(text: str) -> int:
  """Return an upper bound of the number of values: each value follows a character that no other value follows."""
  return 1 + sum(map(text.count, ',[{'))


def _keys(authorization: str) -> list[str]:
  """Return the secrets in an Authorization header: its last word, parameter values, and the user's password."""
  scheme, _, rest = authorization.rpartition(' ')
  found = [rest, *_PARAMETER.findall(authorization)]
  if scheme.strip().lower() == 'basic':
    with contextlib.suppress(ValueError):  # The user may have written anything.
      found += base64.b64decode(rest).decode().split(':', 1)[1:]
  return found


def _spellings(secrets: Sequence[str]) -> list[str]:
  """Return the forms in which a server may repeat secrets: verbatim, in a URL, in JSON; longest first."""
  found = set()
  for secret in secrets:
    if len(secret) >= SECRET_CHARACTERS:
      quoted_in_json = json.dumps(secret)[1:-1]
      found |= {secret, urllib.parse.quote(secret, safe=''), quoted_in_json, quoted_in_json.replace('/', '\\/')}
  return sorted(found, key=len, reverse=True)


def _refusal(answer: _Answer) -> Fault:
  reason = printable(answer.reason, QUOTED)
  start = answer.body[: 4 * QUOTED].decode('utf-8', 'replace').strip()
  wait = retry_after_s(answer.headers.get('retry-after'), datetime.datetime.now(datetime.UTC))
  return Fault(
    f'it answered with status {answer.status}'
    + (f' ({reason})' if reason else '')
    + (f': {quoted(start)}' if start else ''),
    again=answer.status == 429 or answer.status >= 500,
    after_s=wait,
    status=answer.status,
  )


def _public(url: httpx2.URL) -> str:
  """Return the address without user, password, query and fragment, which may hold keys."""
  port = f':{url.port}' if url.port is not None else ''
  return f'{url.scheme}://{url.host}{port}{url.path}'


# ———— Connections ————


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
      raise Fault(f'its answer {exchange.too_much}')
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
    'ssl_context': httpx2.create_ssl_context() if url.scheme == 'https' else None,  # Takes a while to make.
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
      f'{setting}: the environment names a proxy for this address that is not an http or https address: correct '
      'HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, or list the host in NO_PROXY.'
    )
  return httpcore2.HTTPProxy(proxy_url=_parts(proxy.url), proxy_auth=proxy.raw_auth, **options)


def _parts(url: httpx2.URL) -> httpcore2.URL:
  return httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
