"""When this process last made progress, and in what: noted by whatever takes long, read by whoever watches over it.

There is one process and one record. A note costs a microsecond and may come from any thread.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class Sign(NamedTuple):
  """A sign of life."""

  phase: str  # What the process was doing.
  began: float  # When it began to do that, on the monotonic clock.
  at: float  # When it last got on with it, on the same clock.


_last = Sign('start', time.monotonic(), time.monotonic())


def begin(phase: str) -> None:
  """Note that the process begins to do something else."""
  global _last
  now = time.monotonic()
  _last = Sign(phase, now, now)


def progress() -> None:
  """Note that it gets on with what it is doing: a part of it is done, such as a completion or a micro-batch."""
  global _last
  _last = _last._replace(at=time.monotonic())


def last() -> Sign:
  """Return the last sign of life."""
  return _last
