"""Servers that are asked with JSON and answer with JSON: addresses and keys of the settings, one bounded POST, its
faults.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import email.utils
import json
import os
import re
from typing import Any
import urllib.parse

import httpx2

from sdpo_jax.config.addresses import VARIABLE
from sdpo_jax.environments import bounded_http, bounded_json
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import jsonable

FIRST_PAUSE_S = 1.0  # Before the second attempt; twice as long before each further one.
LONGEST_PAUSE_S = 60.0
SECRET_CHARACTERS = 6  # At least: a port is no secret, and may be in any text.
_PARAMETER = re.compile(r'=\s*"?([^",;\s]+)')  # The values in `Token token="x", …`.
_QUOTED = 200  # Characters of a server's answer that a message quotes.


class Fault(Exception):
  """Why there is no usable answer, in words."""

  def __init__(self, reason: str, *, again: bool = False, after_s: float | None = None):
    """`again`: another attempt may help; `after_s`: the seconds that the server asks to wait before it."""
    super().__init__(reason)
    self.again = again
    self.after_s = after_s


def pause_s(attempt: int, after_s: float | None, draw: float) -> float:
  """Seconds to wait after failed attempt 0, 1, …

  Args:
    attempt: number of the attempt that failed.
    after_s: what the server asked for; None: nothing, so the pause doubles with each attempt.
    draw: in [0, 1); spreads the attempts of many requests that failed together over half to one and a half times that.
  """
  if after_s is not None:
    return min(max(after_s, 0.0), LONGEST_PAUSE_S)
  return min(FIRST_PAUSE_S * 2**attempt * (0.5 + draw), LONGEST_PAUSE_S)


def retry_after_s(header: str | None, now: datetime.datetime) -> float | None:
  """Seconds asked for by a Retry-After header, a number or a date (RFC 9110, 10.2.3); None if it is neither."""
  if header is None:
    return None
  if header.strip().isdecimal():
    return float(header)
  try:
    when = email.utils.parsedate_to_datetime(header)
  except (ValueError, TypeError, OverflowError):  # Anybody's text.
    return None
  return (when.replace(tzinfo=when.tzinfo or datetime.UTC) - now).total_seconds()


def quoted(value: Any) -> str:
  """Return what a server said as messages quote it: shortened, on one line, with control characters as escapes."""
  return short_repr(' '.join(value.split()) if isinstance(value, str) else value, _QUOTED)


def printable(text: str) -> str:
  """Return text of a server for a message that does not quote it: on one line, shortened, without control
  characters.
  """
  text = ''.join(character if character.isprintable() else '\ufffd' for character in text)
  return text if len(text) <= _QUOTED else text[:_QUOTED] + '…'


def read_address(url: str, setting: str, example: str) -> tuple[str, tuple[str, ...]]:
  """Return the address, with the values of environment variables for ${NAME} in it, and these values.

  Raises:
    UserError: it is empty or not an http(s) address, or holds a user, or there is no such variable.
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
  if not fits:  # The sentence does not quote it, since an address can hold a key.
    raise UserError(
      f'{setting} is not an address of http or https, or one with a user or a password in it: write it as in {example}.'
    )
  return whole, tuple(values.values())


def read_secret(variable: str, setting: str, *, required: bool) -> str:
  """Return the value of an environment variable that holds a key; '' where none is named or an optional one is unset.

  Raises:
    UserError: a required one is unset, or the value cannot be sent in a header. The value is never in the message.
  """
  secret = os.environ.get(variable, '').strip() if variable else ''
  if variable and required and not secret:
    raise UserError(f'{setting}={variable}: there is no such environment variable; export it, or empty the setting.')
  if not (secret.isascii() and secret.isprintable()):
    raise UserError(f'{setting}={variable}: the value of this environment variable cannot be sent in a header.')
  return secret


class JsonServer:
  """Connections to one address to which JSON is posted; thread-safe. Holds them until `close()`."""

  def __init__(self, url: str, *, authorization: str, secrets: Sequence[str], connections: int, setting: str):
    """Connect to nothing yet.

    Args:
      url: to which bodies are posted.
      authorization: the Authorization header; '': none. Never shown.
      secrets: what else is never shown, such as parts of `url`.
      connections: kept open for the next request at most.
      setting: name of the setting with the address, for messages.
    """
    self._url, self._secrets = url, _spellings([*secrets, *_keys(authorization)])
    headers = {'Content-Type': 'application/json', 'Accept': 'application/json'}
    headers |= {'Authorization': authorization} if authorization else {}
    self._client = bounded_http.Client(url, headers, connections=connections, setting=setting)

  @property
  def public_url(self) -> str:
    """The address, without what may be secret of it."""
    return self.redacted(_public(httpx2.URL(self._url)))

  @property
  def has_secrets(self) -> bool:
    """Whether anything must not be shown."""
    return bool(self._secrets)

  def redacted(self, text: str) -> str:
    """Return a text without the keys that the server was sent."""
    for secret in self._secrets:
      text = text.replace(secret, '***')
    return text

  def close(self) -> None:
    """Lets go of all connections."""
    self._client.close()

  def ask(
    self,
    body: Mapping[str, Any],
    timeout_s: float,
    *,
    name: str,
    on_answer: Callable[[], None] = lambda: None,
    most_bytes: int = bounded_http.MAX_BODY_BYTES,
    most_values: int = bounded_json.MAX_VALUES,
  ) -> Any:
    """Return the JSON of the answer to one POST, without keys that the server repeats.

    Args:
      body: to post.
      timeout_s: seconds from now until the whole answer is there.
      name: of the thread in which this happens.
      on_answer: called when there is an answer of any kind.
      most_bytes: of the answer.
      most_values: in it.

    Raises:
      Fault: there is no such answer.
    """
    content = json.dumps(jsonable(body)).encode()
    try:
      answer = self._client.post(content, timeout_s, name=name, on_answer=on_answer, most_bytes=most_bytes)
    except bounded_http.LateError as error:
      raise Fault(f'no complete answer within {timeout_s:g} s', again=True) from error
    except bounded_http.TooLargeError as error:
      raise Fault(f'its answer {error}') from error
    except bounded_http.ConnectionFailedError as error:
      raise Fault(f'the connection failed ({printable(self.redacted(str(error)))})', again=True) from error
    # Before anything is shortened, which would leave a part of a key that is not known for one.
    answer = dataclasses.replace(
      answer,
      reason=self.redacted(answer.reason),
      headers={key: self.redacted(value) for key, value in answer.headers.items()},
      body=self.redacted(answer.body.decode('latin-1')).encode('latin-1'),
    )
    if not 200 <= answer.status < 300:
      raise _refusal(answer)
    encoding = answer.headers.get('content-encoding', 'identity')
    if encoding.strip().lower() != 'identity':
      raise Fault(f'its answer is encoded ({quoted(encoding)}), which was not asked for')
    try:
      return bounded_json.loads(answer.body, most_values)
    except bounded_json.TooManyValuesError as error:
      raise Fault(f'its answer cannot be read: {error}') from error
    except ValueError as error:
      start = quoted(answer.body[: 4 * _QUOTED].decode('utf-8', 'replace'))
      raise Fault(f'its answer is not JSON ({printable(str(error))}): {start}') from error


def _keys(authorization: str) -> list[str]:
  """Return what is secret of an Authorization header: its last word, values of parameters, the password of a user."""
  scheme, _, rest = authorization.rpartition(' ')
  found = [rest, *_PARAMETER.findall(authorization)]
  if scheme.strip().lower() == 'basic':
    with contextlib.suppress(ValueError):  # It is whatever the user wrote.
      found += base64.b64decode(rest).decode().split(':', 1)[1:]
  return found


def _spellings(secrets: Sequence[str]) -> list[str]:
  """Secrets as they may be repeated: as they are, in an address, in JSON; the longest first."""
  found = set()
  for secret in secrets:
    if len(secret) >= SECRET_CHARACTERS:
      quoted_in_json = json.dumps(secret)[1:-1]
      found |= {secret, urllib.parse.quote(secret, safe=''), quoted_in_json, quoted_in_json.replace('/', '\\/')}
  return sorted(found, key=len, reverse=True)


def _refusal(answer: bounded_http.Answer) -> Fault:
  reason = printable(answer.reason)
  start = answer.body[: 4 * _QUOTED].decode('utf-8', 'replace').strip()
  wait = retry_after_s(answer.headers.get('retry-after'), datetime.datetime.now(datetime.UTC))
  return Fault(
    f'it answered with status {answer.status}'
    + (f' ({reason})' if reason else '')
    + (f': {quoted(start)}' if start else ''),
    again=answer.status == 429 or answer.status >= 500,
    after_s=wait,
  )


def _public(url: httpx2.URL) -> str:
  """Return the address without user, password, query and fragment, which may hold keys."""
  port = f':{url.port}' if url.port is not None else ''
  return f'{url.scheme}://{url.host}{port}{url.path}'
