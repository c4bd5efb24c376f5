"""Graders that ask a server: one POST a completion, some at a time, each tried again where that may help.

What a server does wrong costs the completions that it concerns (they are ungraded), not the run. A server that grades
nothing at all ends the run.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import contextlib
import dataclasses
import datetime
import email.utils
import json
import logging
import os
import random
import re
import threading
from typing import Any
import urllib.parse

import httpx2

from sdpo_jax import liveness
from sdpo_jax.config.addresses import VARIABLE
from sdpo_jax.environments import bounded_http, bounded_json
from sdpo_jax.environments.outcomes import ungraded
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import jsonable
from sdpo_jax.types import Example, Outcome

FIRST_PAUSE_S = 1.0  # Before the second attempt; twice as long before each further one.
LONGEST_PAUSE_S = 60.0
_LARGEST = 1e38  # Scores become float32.
SECRET_CHARACTERS = 6  # At least: a port is no secret, and may be in any text.
_PARAMETER = re.compile(r'=\s*"?([^",;\s]+)')  # The values in `Token token="x", …`.
_QUOTED = 200  # Characters of a server's answer that a message quotes.

Body = Callable[[], Mapping[str, Any]]  # Called anew for every attempt.
Reader = Callable[[Any], Outcome]  # From the JSON of an answer; raises Fault where it is none.


class Fault(Exception):
  """Why a completion could not be graded, in words."""

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


def number(value: Any, name: str) -> float:
  """A finite number of an answer; raises Fault naming the field."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise Fault(f'{name!r} of its answer must be a number, not {quoted(value)}')
  if not abs(value) < _LARGEST:
    raise Fault(f'{name!r} of its answer must be a finite number, not {quoted(value)}')
  return float(value)


def quoted(value: Any) -> str:
  """Return what a server said as messages quote it: shortened, on one line, with control characters as escapes."""
  return short_repr(' '.join(value.split()) if isinstance(value, str) else value, _QUOTED)


def printable(text: str) -> str:
  """Return text of a server for a message that does not quote it: on one line, shortened, without control characters."""
  text = ''.join(character if character.isprintable() else '\ufffd' for character in text)
  return text if len(text) <= _QUOTED else text[:_QUOTED] + '…'


def read_address(url: str, setting: str, example: str) -> tuple[str, tuple[str, ...]]:
  """The address, with the values of environment variables for ${NAME} in it, and these values.

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
  """The value of an environment variable that holds a key; '' where none is named or an optional one is unset.

  Raises:
    UserError: a required one is unset, or the value cannot be sent in a header. The value is never in the message.
  """
  secret = os.environ.get(variable, '').strip() if variable else ''
  if variable and required and not secret:
    raise UserError(f'{setting}={variable}: there is no such environment variable; export it, or empty the setting.')
  if not (secret.isascii() and secret.isprintable()):
    raise UserError(f'{setting}={variable}: the value of this environment variable cannot be sent in a header.')
  return secret


class Remote:
  """A server that grades; holds its connections and threads until `close()`."""

  def __init__(
    self,
    name: str,
    url: str,
    *,
    authorization: str,
    secrets: Sequence[str],
    timeout_s: float,
    retries: int,
    concurrency: int,
    setting: str,
  ):
    """Connects to nothing yet.

    Args:
      name: of the environment, for messages.
      url: to which bodies are posted.
      authorization: the Authorization header; '': none. Never shown.
      secrets: what else is never shown, such as parts of `url`.
      timeout_s: seconds from request to end of answer.
      retries: attempts after the first.
      concurrency: requests under way at once.
      setting: name of the setting with the address, for messages.
    """
    self._name, self._url, self._setting = name, url, setting
    self._secrets = _spellings([*secrets, *_keys(authorization)])
    self._timeout_s, self._retries, self._concurrency = timeout_s, retries, concurrency
    headers = {'Content-Type': 'application/json', 'Accept': 'application/json'}
    headers |= {'Authorization': authorization} if authorization else {}
    self._client = bounded_http.Client(url, headers, connections=concurrency, setting=setting)
    self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix=f'grader-{name}')
    self._closing = threading.Event()
    self._worked = False  # It has graded something in a batch before.
    self._batch = _Batch(concurrency)

  def grade(self, examples: Sequence[Example], bodies: Sequence[Body], read: Reader) -> list[Outcome]:
    """One outcome for each body, in order; those that cannot be had are ungraded, and in `end_batch`'s warning.

    Args:
      examples: [N] the question of each.
      bodies: [N] what to post.
      read: makes the outcome of an answer.

    Raises:
      UserError: as `end_batch`, as soon as the server is given up.
    """
    batch = self._batch
    asked = [self._threads.submit(self._ask, body, read, batch) for body in bodies]
    outcomes, reasons = [], []
    for waiting in asked:
      try:
        outcomes.append(self._without_secrets(waiting.result()))
      except Fault as fault:
        reasons.append(self._redacted(str(fault)))
        outcomes.append(ungraded(f'{self._name}: {reasons[-1]}'))
    batch.asked += len(bodies)
    batch.reasons += reasons
    batch.questions.update(example.id for example in examples)
    if batch.given_up:
      self._check(batch)
    return outcomes

  def end_batch(self) -> None:
    """Says how many completions since the last call could not be graded.

    Raises:
      UserError: not one of them could. (But one question of a server that has worked before in this run is taken to be
        the question's fault: it would otherwise end the run again after every resume.)
    """
    batch, self._batch = self._batch, _Batch(self._concurrency)
    self._check(batch)
    self._worked |= len(batch.reasons) < batch.asked
    if batch.reasons:
      logging.warning(
        'The environment %r could not grade %d of %d completions; the first: %s.',
        self._name,
        len(batch.reasons),
        batch.asked,
        batch.reasons[0],
      )

  def close(self) -> None:
    """Lets go of connections and threads; what is under way is not tried again."""
    self._closing.set()
    self._threads.shutdown(wait=False, cancel_futures=True)
    self._client.close()

  def _check(self, batch: _Batch) -> None:
    failed = batch.asked > 0 and len(batch.reasons) == batch.asked
    if failed and not (self._worked and len(batch.questions) == 1):
      raise UserError(
        f'The environment {self._name!r} graded none of {batch.asked} completions: {batch.reasons[0]}. See that '
        f'{self._public_url()} ({self._setting}) answers, then start the same command again.'
      )

  def _ask(self, body: Body, read: Reader, batch: _Batch) -> Outcome:
    for attempt in range(self._retries + 1):
      if batch.given_up:
        raise Fault(f'there was no answer to any of {batch.failed} requests before it')
      try:
        outcome = read(self._post(body(), batch))
        liveness.progress()
        return outcome
      except Fault as fault:
        last = not fault.again or attempt == self._retries
        if last or self._closing.wait(pause_s(attempt, fault.after_s, random.random())):
          batch.count_failed()
          raise
    raise AssertionError('The last attempt returns or raises.')

  def _post(self, body: Mapping[str, Any], batch: _Batch) -> Any:
    """The JSON of the answer; raises Fault."""

    def answered() -> None:
      batch.answered = True

    content = json.dumps(jsonable(body)).encode()
    try:
      answer = self._client.post(content, self._timeout_s, name=f'grader-{self._name}', on_answer=answered)
    except bounded_http.LateError as error:
      raise Fault(f'no complete answer within {self._timeout_s:g} s', again=True) from error
    except bounded_http.TooLargeError as error:
      raise Fault(f'its answer {error}') from error
    except bounded_http.ConnectionFailedError as error:
      raise Fault(f'the connection failed ({printable(self._redacted(str(error)))})', again=True) from error
    # Before anything is shortened, which would leave a part of a key that is not known for one.
    answer = dataclasses.replace(
      answer,
      reason=self._redacted(answer.reason),
      headers={key: self._redacted(value) for key, value in answer.headers.items()},
      body=self._redacted(answer.body.decode('latin-1')).encode('latin-1'),
    )
    if not 200 <= answer.status < 300:
      raise _refusal(answer)
    encoding = answer.headers.get('content-encoding', 'identity')
    if encoding.strip().lower() != 'identity':
      raise Fault(f'its answer is encoded ({quoted(encoding)}), which was not asked for')
    try:
      return bounded_json.loads(answer.body)
    except bounded_json.TooManyValuesError as error:
      raise Fault(f'its answer cannot be read: {error}') from error
    except ValueError as error:
      start = quoted(answer.body[: 4 * _QUOTED].decode('utf-8', 'replace'))
      raise Fault(f'its answer is not JSON ({printable(str(error))}): {start}') from error

  def _redacted(self, text: str) -> str:
    for secret in self._secrets:
      text = text.replace(secret, '***')
    return text

  def _without_secrets(self, outcome: Outcome) -> Outcome:
    """An outcome that repeats no key, as a server does that answers with what it was asked."""
    if not self._secrets:
      return outcome
    metrics = {
      self._redacted(name): self._redacted(value) if isinstance(value, str) else value
      for name, value in outcome.metrics.items()
    }
    feedback = None if outcome.feedback is None else self._redacted(outcome.feedback)
    return dataclasses.replace(outcome, feedback=feedback, metrics=metrics)

  def _public_url(self) -> str:
    return self._redacted(_public(httpx2.URL(self._url)))


def _keys(authorization: str) -> list[str]:
  """What is secret of an Authorization header: its last word, values of parameters, the password of a user."""
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


class _Batch:
  """What has become of the completions of a batch, which come in parts.

  A server that has answered nothing is given up, so that a batch does not wait for it hundreds of times.
  """

  def __init__(self, patience: int):
    self.asked = 0  # Completions.
    self.questions: set[str] = set()
    self.reasons: list[str] = []  # Why those that could not be graded could not.
    self.answered = False  # There was an answer of any kind.
    self.failed = 0  # Completions that have used all attempts, or as many as made sense.
    self._patience = patience
    self._lock = threading.Lock()

  def count_failed(self) -> None:
    with self._lock:
      self.failed += 1

  @property
  def given_up(self) -> bool:
    """Whether as many completions as are asked for at once had no answer of any kind."""
    return not self.answered and self.failed >= self._patience


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
  """The address without user, password, query and fragment, which may hold keys."""
  port = f':{url.port}' if url.port is not None else ''
  return f'{url.scheme}://{url.host}{port}{url.path}'
