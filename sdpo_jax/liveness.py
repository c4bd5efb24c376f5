"""The last progress of this process and its phase: recorded by long-running code, read by watchdogs.

There is one record per process. Recording takes a microsecond and may happen in any thread.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class Sign(NamedTuple):
  """The last recorded progress, with the phase in which it was made."""

  phase: str  # What the process was doing.
  began: float  # When it began that phase, on the monotonic clock.
  at: float  # When it last made progress, on the same clock.


_last = Sign('start', time.monotonic(), time.monotonic())


def begin(phase: str) -> None:
  """Record the start of another phase."""
  global _last
  now = time.monotonic()
  _last = Sign(phase, now, now)


def progress() -> None:
  """Record progress in the current phase, such as a finished completion or micro-batch."""
  global _last
  _last = _last._replace(at=time.monotonic())


def last() -> Sign:
  """Return the last recorded progress."""
  return _last
