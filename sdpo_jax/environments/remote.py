"""Graders that ask a server: one POST a completion, some at a time, each tried again where that may help.

What a server does wrong costs the completions that it concerns (they are ungraded), not the run. A server that grades
nothing at all ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import datetime
import email.utils
import json
import logging
import os
import random
import threading
import time
from typing import Any

import httpx2

from sdpo_jax import liveness
from sdpo_jax.environments.outcomes import ungraded
from sdpo_jax.environments.time_limit import OverranError, call_within
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import jsonable
from sdpo_jax.types import Example, Outcome

MAX_ANSWER_BYTES = 2**20
FIRST_PAUSE_S = 1.0  # Before the second attempt; twice as long before each further one.
LONGEST_PAUSE_S = 60.0
CONNECT_TIMEOUT_S = 10.0  # At most: a server that is there takes a connection quickly, however long it thinks.
_LARGEST = 1e38  # Scores become float32.
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
  except ValueError:
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
  """Return what a server said as messages quote it: shortened, on one line."""
  return short_repr(' '.join(value.split()) if isinstance(value, str) else value, _QUOTED)


def check_url(url: str, setting: str, example: str) -> str:
  """The address, stripped.

  Raises:
    UserError: it is empty or not an http(s) address.
  """
  if not url.strip():
    raise UserError(f'{setting} is empty: set it to the address to ask, e.g. {example}.')
  try:
    parsed = httpx2.URL(url.strip())
    whole = parsed.scheme in ('http', 'https') and bool(parsed.host)
  except httpx2.InvalidURL:
    whole = False
  if not whole:  # The sentence does not quote it, since an address can hold a key.
    raise UserError(f'{setting} is not an address of http or https: write it as in {example}.')
  return url.strip()


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
    self, name: str, url: str, *, authorization: str, timeout_s: float, retries: int, concurrency: int, setting: str
  ):
    """Connects to nothing yet.

    Args:
      name: of the environment, for messages.
      url: to which bodies are posted.
      authorization: the Authorization header; '': none. Never shown.
      timeout_s: seconds from request to end of answer.
      retries: attempts after the first.
      concurrency: requests under way at once.
      setting: name of the setting with the address, for messages.
    """
    self._name, self._url, self._setting = name, url, setting
    self._secret = authorization.split(' ')[-1]
    self._timeout_s, self._retries, self._concurrency = timeout_s, retries, concurrency

    def authorize(request: httpx2.Request) -> httpx2.Request:
      request.headers['Authorization'] = authorization
      return request

    self._client = httpx2.Client(
      headers={'Content-Type': 'application/json', 'Accept': 'application/json'},
      auth=authorize if authorization else None,  # Not a header: a user and password in the address would replace it.
      timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S), pool=None),
      # The threads bound how many are in use; those of abandoned requests must not keep others waiting.
      limits=httpx2.Limits(max_connections=None, max_keepalive_connections=concurrency),
    )
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
        outcomes.append(waiting.result())
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
    # The client limits each read, and a server that sends byte after byte takes as many as it likes.
    try:
      return call_within(lambda: self._fetch(body, batch), self._timeout_s, f'grader-{self._name}')
    except OverranError as error:
      raise self._late() from error

  def _late(self) -> Fault:
    return Fault(f'no complete answer within {self._timeout_s:g} s', again=True)

  def _fetch(self, body: Mapping[str, Any], batch: _Batch) -> Any:
    """The JSON of the answer, however long its headers take; raises Fault."""
    deadline = time.monotonic() + self._timeout_s
    content = bytearray()
    try:
      with self._client.stream('POST', self._url, content=json.dumps(jsonable(body)).encode()) as response:
        batch.answered = True
        for chunk in response.iter_bytes():
          content += chunk
          if len(content) > MAX_ANSWER_BYTES:
            if response.is_success:
              raise Fault(f'its answer is larger than {MAX_ANSWER_BYTES} bytes')
            break
          if time.monotonic() > deadline:
            raise self._late()
    except httpx2.TimeoutException as error:
      raise self._late() from error
    except httpx2.DecodingError as error:
      raise Fault(f'its answer cannot be decompressed ({error})') from error
    except httpx2.TransportError as error:
      raise Fault(f'the connection failed ({type(error).__name__}: {error})', again=True) from error
    if not response.is_success:
      raise _refusal(response, bytes(content))
    try:
      return json.loads(content)
    except (ValueError, RecursionError) as error:
      start = quoted(content[: 4 * _QUOTED].decode('utf-8', 'replace'))
      raise Fault(f'its answer is not JSON ({error}): {start}') from error

  def _redacted(self, text: str) -> str:
    return text.replace(self._secret, '***') if self._secret else text

  def _public_url(self) -> str:
    return _public(httpx2.URL(self._url))


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


def _refusal(response: httpx2.Response, content: bytes) -> Fault:
  status = f'status {response.status_code}' + (f' ({response.reason_phrase})' if response.reason_phrase else '')
  start = content[: 4 * _QUOTED].decode('utf-8', 'replace').strip()
  wait = retry_after_s(response.headers.get('Retry-After'), datetime.datetime.now(datetime.UTC))
  return Fault(
    f'it answered with {status}' + (f': {quoted(start)}' if start else ''),
    again=response.status_code == 429 or response.status_code >= 500,
    after_s=wait,
  )


def _public(url: httpx2.URL) -> str:
  """The address without user, password, query and fragment, which may hold keys."""
  port = f':{url.port}' if url.port is not None else ''
  return f'{url.scheme}://{url.host}{port}{url.path}'
