"""Limits per sender: tokens per minute, concurrent requests, body size, time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
import math
import threading
import time

from starlette.types import Message, Receive

from sdpo_jax.config import LimitsConfig
from sdpo_jax.serving.errors import Busy, InvalidRequest, TooLarge
from sdpo_jax.serving.web.error_responses import TooSlow

_LARGEST_HEADER_MS = 10**9


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
