"""Recent events of adapters: a bounded list for each, which can be read from any of its events on."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import dataclasses
import threading
import time
from typing import Any

KEPT = 256  # Events of an adapter.
ADAPTERS = 4096  # The most adapters with events; those without events for the longest time are dropped first.


@dataclasses.dataclass(frozen=True)
class AdapterEvent:
  """An event of one adapter."""

  id: int  # Later events have larger ones, also after a restart.
  adapter: str
  kind: str  # queued, scored, stepped, guarded, committed, rejected …
  time: float  # Seconds since the epoch.
  details: Mapping[str, Any]  # As JSON.


class EventLog:
  """The recent events of many adapters. Any thread may call."""

  def __init__(self, clock: Callable[[], float] = time.time):
    """Make a log without events."""
    self._clock, self._changed = clock, threading.Condition()
    self._next = int(1e6 * clock())
    self._events: collections.OrderedDict[str, collections.deque[AdapterEvent]] = collections.OrderedDict()

  def add(self, adapter: str, kind: str, details: Mapping[str, Any]) -> AdapterEvent:
    """Add an event and wake those who wait for one."""
    with self._changed:
      event = AdapterEvent(self._next, adapter, kind, self._clock(), details)
      self._next += 1
      self._events.setdefault(adapter, collections.deque(maxlen=KEPT)).append(event)
      self._events.move_to_end(adapter)
      if len(self._events) > ADAPTERS:
        self._events.popitem(last=False)
      self._changed.notify_all()
    return event

  def after(self, adapter: str, last: int | None) -> list[AdapterEvent]:
    """Return the kept events of an adapter with ids above `last`; None: all that are kept."""
    with self._changed:
      return [event for event in self._events.get(adapter, ()) if last is None or event.id > last]

  def wait(self, adapter: str, last: int | None, timeout: float) -> list[AdapterEvent]:
    """Return the events with ids above `last`, after waiting up to `timeout` seconds for the first of them."""
    with self._changed:
      return self._changed.wait_for(lambda: self.after(adapter, last), timeout)

  def forget(self, adapter: str) -> None:
    """Drop all events of an adapter."""
    with self._changed:
      self._events.pop(adapter, None)
