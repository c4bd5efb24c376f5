"""Whether a request is let in: the life cycle of the service, and limits of tokens, concurrency, size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
import math
import threading
import time
from typing import TYPE_CHECKING

from starlette.types import Message, Receive

from sdpo_jax.config import LimitsConfig
from sdpo_jax.serving.errors import Busy, InvalidRequest, NotReady, TooLarge
from sdpo_jax.serving.web.error_responses import TooSlow

if TYPE_CHECKING:  # Only for annotations: this module does not depend on the service at run time.
  from sdpo_jax.serving.service import Service

_LARGEST_HEADER_MS = 10**9


class Lifetime:
  """The state of the service for the HTTP layer, from before it exists until it ends; any thread may call."""

  def __init__(self, service: Service | None = None, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self.present = service  # The service; None: it does not exist yet.
    self.failure: BaseException | None = None  # The error that ended the start.
    self.stage = 'reading the model'  # The present stage of the start, for /readyz.
    self.draining = False  # Whether the service finishes its requests and accepts no new ones.
    self._listeners: list[Callable[[], None]] = []
    self._last_request = clock()
    self.under_way = 0  # The number of requests; used in the event loop only.

  @property
  def ready(self) -> bool:
    """Whether requests are accepted."""
    there = self.present is not None and self.present.worker.ready.is_set()
    return there and not self.draining and not self.why_not()

  def on_drain(self, listener: Callable[[], None]) -> None:
    """Call `listener` when `drain` is called."""
    self._listeners.append(listener)

  def drain(self) -> None:
    """Refuse new work from now on."""
    self.draining = True
    for listener in self._listeners:
      listener()

  def why_not(self) -> str:
    """Return a sentence on why the engine has failed for good; empty: it has not."""
    failure = self.failure or (self.present.worker.failure if self.present is not None else None)
    return f'The engine has failed ({type(failure).__name__}): see the log of the service.' if failure else ''

  def service(self) -> Service:
    """Return the service for a request.

    Raises:
      NotReady: it is not ready yet, or accepts no requests any more.
    """
    if self.draining:
      raise NotReady('The service is shutting down: ask the next one.')
    if self.why_not():
      raise NotReady(self.why_not())
    if self.present is None or not self.present.worker.ready.is_set():
      raise NotReady(f'The service is starting ({self.stage}): /readyz says when it is ready.')
    return self.present

  def touch(self) -> None:
    """Note that a request has come."""
    self._last_request = self._clock()

  def idle_for(self) -> float:
    """Return the seconds since the last request."""
    return 0.0 if self.under_way else self._clock() - self._last_request


class TokenBucket:
  """A token bucket: the tokens of one key are refilled at a steady rate, up to a limit."""

  def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic):
    self._rate, self._burst, self._clock = per_second, burst, clock
    self._level, self._at = burst, clock()

  def take(self, tokens: int) -> float:
    """Take tokens, or return them if negative.

    A request for more than the bucket can hold is admitted when the bucket is full; the level then becomes negative.

    Returns:
      0 if the tokens were taken; otherwise the seconds until they could be.
    """
    now = self._clock()
    self._level = min(self._burst, self._level + self._rate * (now - self._at))
    self._at = now
    if tokens > 0 and self._level < min(tokens, self._burst):
      return max((min(tokens, self._burst) - self._level) / self._rate, 1e-3)
    self._level = min(self._burst, self._level - tokens)
    return 0.0

  @property
  def full(self) -> bool:
    """Whether the bucket is full, so that it need not be stored."""
    return self._level + self._rate * (self._clock() - self._at) >= self._burst


class Allowances:
  """The token buckets of all keys; any thread may call."""

  def __init__(self, settings: LimitsConfig, clock: Callable[[], float] = time.monotonic):
    self._settings, self._clock = settings, clock
    self._lock = threading.Lock()
    self._buckets: dict[str, TokenBucket] = {}

  def spend(self, key: str, tokens: int) -> None:
    """Take tokens from the allowance of a key, or return them if negative.

    Raises:
      Busy: the allowance is used up.
    """
    rate = self._settings.tokens_per_minute
    if rate is None or tokens == 0:
      return
    with self._lock:
      bucket = self._buckets.get(key)
      if bucket is None:
        self._buckets = {name: kept for name, kept in self._buckets.items() if not kept.full}
        bucket = TokenBucket(rate / 60, float(self._settings.burst_tokens or rate), self._clock)
        self._buckets[key] = bucket
      wait = bucket.take(tokens)
    if wait:
      raise Busy(
        f'This key may have {rate} tokens a minute, and {tokens} more are too many now: come again in '
        f'{math.ceil(wait)} seconds.',
        retry_after=wait,
      )


class ConcurrencyLimit:
  """A counter of concurrent requests; used in the event loop only."""

  def __init__(self, limit: int):
    self._limit, self.taken = limit, 0

  def take(self) -> None:
    """Take a place.

    Raises:
      Busy: there is none.
    """
    if self.taken >= self._limit:
      raise Busy(f'{self._limit} requests are under way already: come again in a second.', retry_after=1.0)
    self.taken += 1

  def let_go(self) -> None:
    """Release a place."""
    self.taken -= 1


def time_limit(header: str | None, longest: float) -> float:
  """Return the seconds that a request may take.

  Args:
    header: the value of X-Deadline-Ms; None: it was not sent.
    longest: the limit of every request.

  Raises:
    InvalidRequest: the header is not a number of milliseconds.
  """
  if header is None:
    return longest
  if not header.isdecimal() or not header.isascii() or not 0 < int(header[:12]) <= _LARGEST_HEADER_MS:
    raise InvalidRequest(f'X-Deadline-Ms must be a number of milliseconds from 1 to {_LARGEST_HEADER_MS}.')
  return min(longest, int(header[:12]) / 1000)


async def read_body(receive: Receive, declared: str | None, limit: int, timeout: float, whole: float) -> bytes | None:
  """Return the body of a request, reading no more than the limit; None: the sender has disconnected.

  Args:
    receive: of the request.
    declared: the value of Content-Length; None: it was not sent.
    limit: bytes.
    timeout: seconds within which every part must come.
    whole: seconds within which the whole must come, lest a sender of single bytes hold a place for ever.

  Raises:
    TooLarge: it is longer.
    TooSlow: a part or the whole did not come in time.
  """
  until = time.monotonic() + whole
  sentence = f'The body is larger than the {limit} bytes that are read (serve.http.max_body_mb).'
  if declared is not None and declared.isdecimal() and int(declared[:20]) > limit:
    raise TooLarge(sentence)
  parts, size = [], 0
  while True:
    try:
      message: Message = await asyncio.wait_for(receive(), min(timeout, until - time.monotonic()))
    except TimeoutError:
      if time.monotonic() >= until:
        raise TooSlow(f'The body did not come within {whole:g} seconds (serve.http.deadline_s).') from None
      raise TooSlow(f'The next part of the body did not come within {timeout:g} seconds.') from None
    if message['type'] == 'http.disconnect':
      return None
    part = message.get('body', b'')
    size += len(part)
    if size > limit:
      raise TooLarge(sentence)
    parts.append(part)
    if not message.get('more_body', False):
      return b''.join(parts)
