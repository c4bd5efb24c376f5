"""JSON requests to a server: addresses and keys from the settings, one bounded POST, and its errors."""

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
from sdpo_jax.environments.time_limit import OverranError
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import jsonable

FIRST_PAUSE_S = 1.0  # Pause before the second attempt; doubles before each further one.
LONGEST_PAUSE_S = 60.0
SECRET_CHARACTERS = 6  # Minimum length: a port number is no secret and may occur in any text.
_PARAMETER = re.compile(r'=\s*"?([^",;\s]+)')  # The values in `Token token="x", …`.
QUOTED = 200  # Characters of a server's answer that a message quotes.


class Fault(Exception):
  """The reason in words why there is no usable answer."""

  def __init__(self, reason: str, *, again: bool = False, after_s: float | None = None):
    """Store `reason`; `again`: another attempt may help; `after_s`: pause in seconds that the server asked for."""
    super().__init__(reason)
    self.again = again
    self.after_s = after_s


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


def printable(text: str) -> str:
  """Return a server's text for a message without quotes: shortened, on one line, no control characters."""
  text = ''.join(character if character.isprintable() else '\ufffd' for character in text)
  return text if len(text) <= QUOTED else text[:QUOTED] + '…'


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
    raise UserError(
      f'{setting} is not an address of http or https, or one with a user or a password in it: write it as in {example}.'
    )
  return whole, tuple(values.values())


def read_secret(variable: str, setting: str, *, required: bool) -> str:
  """Return a key from an environment variable; '' if no variable is named, or an optional one is unset.

  Raises:
    UserError: a required variable is unset, or its value cannot be sent in a header. The message never has the value.
  """
  secret = os.environ.get(variable, '').strip() if variable else ''
  if variable and required and not secret:
    raise UserError(f'{setting}={variable}: there is no such environment variable; export it, or empty the setting.')
  if not (secret.isascii() and secret.isprintable()):
    raise UserError(f'{setting}={variable}: the value of this environment variable cannot be sent in a header.')
  return secret


class JsonServer:
  """Connections to one address to which JSON is posted; thread-safe. Call `close()` to release them."""

  def __init__(self, url: str, *, authorization: str, secrets: Sequence[str], connections: int, setting: str):
    """Prepare the connections without opening any.

    Args:
      url: the address of all requests.
      authorization: the Authorization header; '': none. Never shown.
      secrets: other texts that must never be shown, such as parts of `url`.
      connections: the most idle connections that are kept open.
      setting: name of the setting that holds the address, for messages.
    """
    self._url, self._secrets = url, _spellings([*secrets, *_keys(authorization)])
    headers = {'Content-Type': 'application/json', 'Accept': 'application/json'}
    headers |= {'Authorization': authorization} if authorization else {}
    self._client = bounded_http.HttpClient(url, headers, connections=connections, setting=setting)

  @property
  def public_url(self) -> str:
    """Return the address without the parts that may be secret."""
    return self.redacted(_public(httpx2.URL(self._url)))

  def redacted(self, text: str) -> str:
    """Remove the keys that were sent to the server from a text."""
    for secret in self._secrets:
      text = text.replace(secret, '***')
    return text

  def close(self) -> None:
    """Close all connections."""
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
    try:
      answer = self._client.post(content, timeout_s, name=name, on_answer=on_answer, most_bytes=most_bytes)
    except OverranError as error:
      raise Fault(f'no complete answer within {timeout_s:g} s', again=True) from error
    except bounded_http.TooLargeError as error:
      raise Fault(f'its answer {error}') from error
    except bounded_http.ConnectionFailedError as error:
      raise Fault(f'the connection failed ({printable(self.redacted(str(error)))})', again=True) from error
    # Redact before shortening, which would leave an unrecognizable part of a key.
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
      start = quoted(answer.body[: 4 * QUOTED].decode('utf-8', 'replace'))
      raise Fault(f'its answer is not JSON ({printable(str(error))}): {start}') from error


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


def _refusal(answer: bounded_http.HttpResponse) -> Fault:
  reason = printable(answer.reason)
  start = answer.body[: 4 * QUOTED].decode('utf-8', 'replace').strip()
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
