"""What each key has used, and may still use: requests, feedbacks and tokens of this minute and of this day, in UTC.

A request reserves the most that it may use before it begins, which counts as used, and takes back the rest at its end.
Counts of days are added to the database about once a second, so that they survive a restart; several processes may add.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import math
import threading
import time
from typing import Any

from sdpo_jax.config import LimitsConfig
from sdpo_jax.serving.errors import Busy, InvalidRequest
from sdpo_jax.serving.store.database import Database

TOKENS = 'sampled', 'scored', 'learned'
KINDS = 'requests', 'feedbacks', *TOKENS
_DAY = 86400
_SOON = 1.0  # Seconds after which to come again for what requests under way have reserved and may not use.


class TokenBucket:
  """A token bucket: the tokens of one key are refilled at a steady rate, up to a limit."""

  def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic):
    self._rate, self._burst, self._clock = per_second, burst, clock
    self._level, self._at = burst, clock()

  def take(self, tokens: int) -> float:
    """Take tokens, or return them if negative.

    More tokens than the bucket can hold are taken once it is full; its level then becomes negative.

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
    """Whether the bucket is full, and so need not be stored."""
    return self._level + self._rate * (self._clock() - self._at) >= self._burst


class Allowances:
  """The use of all keys, and their limits; any thread may call."""

  def __init__(
    self,
    settings: LimitsConfig,
    database: Database | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
  ):
    """Read what was used today from the database.

    Args:
      settings: the limits.
      database: where days are counted; None: in memory only.
      clock: returns seconds, for the rates per minute.
      wall: returns seconds since the epoch, for days.
    """
    self._settings, self._database, self._clock, self._wall = settings, database, clock, wall
    self._lock = threading.Lock()
    self._buckets: dict[tuple[str, str], TokenBucket] = {}  # By key and 'tokens' or 'feedbacks'; no full ones.
    self._minute, self._of_minute = 0, collections.Counter[tuple[str, str]]()  # By key and kind.
    self._day, self._of_day = int(wall()) // _DAY, collections.Counter[tuple[str, str]]()
    self._reserved = collections.Counter[tuple[str, str]]()  # By key and 'tokens' or 'feedbacks': used, maybe.
    self._unsaved: collections.Counter[tuple[str, int, str]] = collections.Counter()  # By key, day and kind.
    if database is not None:
      self._of_day.update(database.usage(self._day))

  def spend(self, key: str, kind: str, amount: int, *, reserve: bool = False) -> None:
    """Count a use of a key, or take one back if negative.

    Args:
      key: the id of the key.
      kind: one of `KINDS`.
      amount: how many requests, feedbacks or tokens.
      reserve: whether some of it may be taken back, until `settle`.

    Raises:
      Busy: it would exceed a limit; it was not counted.
      InvalidRequest: it is more than may be used in a day.
    """
    if not amount:
      return
    with self._lock:
      self._turn()
      self._take(key, _unit(kind), amount)
      self._reserved[key, _unit(kind)] += amount if reserve else 0
      for counts in (self._of_minute, self._of_day):  # What is taken back may be of yesterday, and then counts as used.
        change = max(amount, -counts[key, kind])
        counts[key, kind] += change
      self._unsaved[key, self._day, kind] += change

  def settle(self, key: str, spent: Mapping[str, int]) -> None:
    """Note that a request has ended: what it has spent with `reserve`, by kind, is used for good."""
    with self._lock:
      for kind, amount in spent.items():
        self._reserved[key, _unit(kind)] -= amount

  def _take(self, key: str, unit: str, amount: int) -> None:
    per_day, reserved = getattr(self._settings, f'{unit}_per_day', None), self._reserved[key, unit]
    if per_day is not None and amount > 0:
      if amount > per_day:
        raise InvalidRequest(
          f'This request may use {amount} {unit}, more than serve.limits.{unit}_per_day={per_day}: ask for less.'
        )
      used = sum(self._of_day[key, kind] for kind in KINDS if _unit(kind) == unit)
      if used + amount > per_day:
        fits = used - reserved + amount <= per_day
        raise _exceeded(unit, per_day, 'day', amount, _SOON if fits else _DAY - self._wall() % _DAY)
    per_minute = getattr(self._settings, f'{unit}_per_minute', None)
    if per_minute is None:
      return
    bucket = self._buckets.get((key, unit))
    if bucket is None:
      self._buckets = {name: kept for name, kept in self._buckets.items() if not kept.full}
      burst = self._settings.burst_tokens if unit == 'tokens' else None
      bucket = self._buckets[key, unit] = TokenBucket(per_minute / 60, float(burst or per_minute), self._clock)
    if wait := bucket.take(amount):
      wait = max(min(wait, _SOON), wait - reserved * 60 / per_minute)
      raise _exceeded(unit, per_minute, 'minute', amount, wait)

  def _turn(self) -> None:
    """Begin a new minute or day if it is time."""
    now = int(self._wall())
    if now // 60 != self._minute:
      self._minute = now // 60
      self._of_minute.clear()
    if now // _DAY != self._day:
      self._day = now // _DAY
      self._of_day.clear()

  def save(self) -> None:
    """Add what was used since the last call to the database, and learn from it what other processes have added.

    Raises:
      StorageFailed: the database cannot be written; the next call adds it.
    """
    with self._lock:
      unsaved, self._unsaved = self._unsaved, collections.Counter()
    if self._database is None or not (unsaved or self._database.shared):
      return
    try:
      if unsaved:
        self._database.add_usage(unsaved)
    except BaseException:
      with self._lock:
        self._unsaved.update(unsaved)
      raise
    day = self._day  # It may turn meanwhile.
    totals = self._database.usage(day)
    with self._lock:
      for (key, kind), total in totals.items():
        if day == self._day:
          self._of_day[key, kind] = total + self._unsaved[key, day, kind]

  def used(self, key: str) -> dict[str, Any]:
    """Return what a key has used in this minute and today, and its limits, as JSON."""
    with self._lock:
      self._turn()
      said = {
        name: {kind: max(0, counts[key, kind]) for kind in KINDS}
        for name, counts in (('minute', self._of_minute), ('day', self._of_day))
      }
    units = 'tokens', 'feedbacks'
    limits = {f'{unit}_per_{time}': getattr(self._settings, f'{unit}_per_{time}') for unit in units for time in said}
    return {'key': key, **said, 'limits': limits}

  def today(self) -> Mapping[tuple[str, str], int]:
    """Return what was used today, by key and kind."""
    with self._lock:
      self._turn()
      return dict(self._of_day)


def _unit(kind: str) -> str:
  """Return what limits a kind: 'tokens', or its own name."""
  return 'tokens' if kind in TOKENS else kind


def _exceeded(unit: str, limit: int, time: str, amount: int, wait: float) -> Busy:
  more = f'{amount} more exceed that' if amount > 1 else 'they are used up'
  return Busy(
    f'This key is limited to {limit} {unit} per {time}, and {more}: retry in {math.ceil(wait)} seconds.',
    retry_after=wait,
  )
