"""From where a request comes: under which name of this machine, and from which page of a browser."""

from __future__ import annotations

import urllib.parse

from sdpo_jax.config import HttpConfig
from sdpo_jax.serving.errors import Forbidden
from sdpo_jax.serving.web.passing import Passing

LOCAL_HOSTS = ('localhost', '127.0.0.1', '::1')
_CORS_HEADERS = (
  'Authorization, Content-Type, Idempotency-Key, If-Match, Last-Event-ID, X-API-Key, X-Deadline-Ms, X-Session-Token'
)
_CORS_EXPOSED = 'ETag, Retry-After, retry-after-ms, X-Request-Id, Idempotency-Replayed'
# What browsers say of a request of the service's own page, and of one that a person has typed.
_OWN_SITES = ('same-origin', 'none')


class Origins:
  """Which names and pages the settings allow."""

  def __init__(self, http: HttpConfig, *, keyed: bool):
    """Make it.

    Args:
      http: settings.
      keyed: whether every request needs a key.
    """
    self._origins = http.allowed_origins
    self._hosts = {name.lower() for name in (*LOCAL_HOSTS, http.host, *http.allowed_hosts)}
    self._named = not keyed or bool(http.allowed_hosts)  # Whether Host must be one of these on every route.

  def check(self, passing: Passing) -> None:
    """Raise Forbidden for a name of this machine that somebody else has given it, or a page that may not ask.

    Without keys, whoever reaches the port is the owner: a page in a browser of this machine must not be.
    """
    if self._named and not self._is_served(passing):
      raise Forbidden(
        'The header Host names another machine: ask for localhost, or add it to serve.http.allowed_hosts.'
      )
    host, origin = passing.header('host') or '', passing.header('origin')
    if origin is None or origin in self._origins:
      return
    if origin not in (f'http://{host}', f'https://{host}'):
      raise Forbidden('A page of this origin may not ask: add it to serve.http.allowed_origins if it may.')

  def check_page(self, passing: Passing) -> None:
    """Raise Forbidden where a web page could have had a browser send a request, whatever keys and settings say.

    A page whose name leads to this machine has its own name as Host. A request without Origin, as a link, an image or a
    form sends it, still says from where it comes (Sec-Fetch-Site), and no script can make it say otherwise.
    """
    if not self._is_served(passing):
      raise Forbidden(
        'Sessions are answered only under names of the service, and the header Host has another one: add it to '
        'serve.http.allowed_hosts.'
      )
    site, origin = passing.header('sec-fetch-site'), passing.header('origin')
    if site is not None and site not in _OWN_SITES and origin not in self._origins:
      raise Forbidden('A page of another site may not ask: add its origin to serve.http.allowed_origins if it may.')

  def headers(self, passing: Passing) -> list[tuple[bytes, bytes]]:
    """Return the headers with which a browser lets a page of an allowed origin read an answer; none for others."""
    origins = passing.headers.get('origin', ())
    if len(origins) != 1 or origins[0] not in self._origins:
      return []
    return [
      (b'access-control-allow-origin', origins[0].encode('latin-1')),
      (b'access-control-allow-methods', b'GET, POST, PATCH, DELETE'),
      (b'access-control-allow-headers', _CORS_HEADERS.encode()),
      (b'access-control-expose-headers', _CORS_EXPOSED.encode()),
      (b'vary', b'Origin'),
    ]

  def is_preflight(self, passing: Passing) -> bool:
    """Return whether a browser asks on behalf of a page of an allowed origin whether it may ask."""
    asked = 'access-control-request-method' in passing.headers
    return passing.method == 'OPTIONS' and asked and bool(self.headers(passing))

  def _is_served(self, passing: Passing) -> bool:
    """Return whether the header Host has a name of the service."""
    host = passing.header('host') or ''
    return _is_host(host) and urllib.parse.urlsplit(f'//{host}').hostname in self._hosts


def _is_host(text: str) -> bool:
  """Return whether a text may be a Host header: no spaces, slashes, user or characters beyond ASCII."""
  if not text or not text.isascii() or any(letter in text for letter in ' /\\@?#,\t'):
    return False
  try:
    return urllib.parse.urlsplit(f'//{text}').hostname is not None and urllib.parse.urlsplit(f'//{text}').port != 0
  except ValueError:
    return False
