"""A request on its way through the gate: the name by which it reaches this machine, and the web page that sends it."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import urllib.parse

from sdpo_jax.config import HttpConfig
from sdpo_jax.serving.errors import Forbidden, InvalidRequest

LOCAL_HOSTS = ('localhost', '127.0.0.1', '::1')
_CORS_HEADERS = (
  'Authorization, Content-Type, Idempotency-Key, If-Match, Last-Event-ID, X-API-Key, X-Deadline-Ms, X-Session-Token'
)
_CORS_EXPOSED = 'ETag, Retry-After, retry-after-ms, X-Request-Id, Idempotency-Replayed'
# Sec-Fetch-Site of requests from the service's own page, and of addresses that a person has typed.
_OWN_SITES = ('same-origin', 'none')


@dataclasses.dataclass
class GateRequest:
  """A request on its way through the gate."""

  id: str
  method: str
  path: str
  headers: Mapping[str, Sequence[str]]
  route: str = '(none)'  # The pattern of its path.
  adapter: str | None = None  # The adapter named in its path.
  key: str | None = None  # The id of the key, never the key.
  body: bytes = b''
  quiet: bool = False  # Whether only unexpected responses are logged, since it is a frequent health check.
  secret: bool = False  # Whether its response is never logged, even if bodies are.
  tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

  def header(self, name: str) -> str | None:
    """Return the value of a header that may be sent once; None: it was not sent.

    Raises:
      InvalidRequest: it was sent several times.
    """
    values = self.headers.get(name, ())
    if len(values) > 1:
      raise InvalidRequest(f'The header {name} was sent {len(values)} times: send it once.')
    return values[0] if values else None


class Origins:
  """The allowed host names and web pages."""

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
    """Raise Forbidden for a foreign host name of this machine, or a page that is not allowed.

    Without keys, everyone who reaches the port is the owner; a web page in a browser on this machine must not be.
    """
    if self._named and not self._is_served(request):
      raise Forbidden(
        'The header Host names another machine: ask for localhost, or add it to serve.http.allowed_hosts.'
      )
    host, origin = request.header('host') or '', request.header('origin')
    if origin is None or origin in self._origins:
      return
    if origin not in (f'http://{host}', f'https://{host}'):
      raise Forbidden('A page of this origin may not ask: add it to serve.http.allowed_origins if it may.')

  def check_page(self, request: GateRequest) -> None:
    """Raise Forbidden if a web page may have made a browser send the request, whatever keys and settings say.

    A page whose name resolves to this machine has its own name as Host. A request without Origin, as links, images and
    forms send it, still has Sec-Fetch-Site, which no script can forge.
    """
    if not self._is_served(request):
      raise Forbidden(
        'Sessions are answered only under names of the service, and the header Host has another one: add it to '
        'serve.http.allowed_hosts.'
      )
    site, origin = request.header('sec-fetch-site'), request.header('origin')
    if site is not None and site not in _OWN_SITES and origin not in self._origins:
      raise Forbidden('A page of another site may not ask: add its origin to serve.http.allowed_origins if it may.')

  def headers(self, request: GateRequest) -> list[tuple[bytes, bytes]]:
    """Return the CORS headers that let a page of an allowed origin read a response; none for others."""
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

  def is_preflight(self, request: GateRequest) -> bool:
    """Return whether the request is a CORS preflight for a page of an allowed origin."""
    asked = 'access-control-request-method' in request.headers
    return request.method == 'OPTIONS' and asked and bool(self.headers(request))

  def _is_served(self, request: GateRequest) -> bool:
    """Return whether the Host header is a name of the service: no spaces, slashes, user or characters beyond ASCII."""
    host = request.header('host') or ''
    if not host.isascii() or any(letter in host for letter in ' /\\@?#,\t'):
      return False
    try:
      found = urllib.parse.urlsplit(f'//{host}')
      return found.hostname in self._hosts and found.port != 0
    except ValueError:
      return False
