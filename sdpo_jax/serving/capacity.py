"""Capacity that keys share: places of which each key always finds some, and permits and locks that keys get in turns.

A key may only take a place while it has fewer than are free, as in a switch buffer with dynamic thresholds (Choudhury
and Hahne, 1998). One key alone gets half of the places, two get a third each, and there is room for one that has none.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator
import concurrent.futures
import contextlib
import math
import threading
import time

from sdpo_jax.rollout.fair_queue import Payer, Shares
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Busy, Deadline

_LONGEST = 30.0  # The most seconds until those who were refused are asked to come again.


class Capacity:
  """A number of places, which one thread at a time may take and free."""

  def __init__(self, limit: int, *, of: str = 'places', per_key: int | None = None, shared: bool = True):
    """Make places, all free.

    Args:
      limit: the number of places.
      of: what they are, in the plural.
      per_key: the most places of one key; None: no such limit.
      shared: whether a key must leave room for others; False: there is only one.
    """
    self.limit, self.of, self._per_key, self._shared = limit, of, per_key, shared
    self._taken: collections.Counter[str] = collections.Counter()  # By key; no key that has none.
    # By key that has places: when it last freed one, the mean seconds between two, and when to come next if refused.
    self._paces: dict[str, tuple[float, float, float]] = {}

  @property
  def taken(self) -> int:
    """The number of places that are taken."""
    return self._taken.total()

  def has_room(self, key: str, places: int = 1) -> bool:
    """Return whether a key may take so many more places."""
    own, free = self._taken[key], self.limit - self.taken
    if self._per_key is not None and own + places > self._per_key:
      return False
    return (own + places if self._shared else places) <= free

  def take(self, key: str, places: int = 1) -> bool:
    """Take places for a key if it may; return whether it did."""
    if not self.has_room(key, places):
      return False
    self._taken[key] += places
    return True

  def let_go(self, key: str, places: int = 1) -> None:
    """Free places that a key has taken."""
    self._taken[key] -= places
    now = time.monotonic()
    last, pace, due = self._paces.get(key, (now, 0.0, 0.0))
    self._paces[key] = now, pace + 0.1 * (now - last - pace), due
    if not self._taken[key]:
      del self._taken[key], self._paces[key]

  def full(self, key: str) -> Busy:
    """Return the error for a request of a key that has found no room, which says when to come again."""
    seconds = self.refused(key)
    return Busy(
      f'You have as many {self.of} as one sender may have now, or all {self.limit} are taken: retry in '
      f'{math.ceil(seconds)} seconds.',
      retry_after=seconds,
    )

  def refused(self, key: str) -> float:
    """Return after how many seconds a request without room may find some: one comes as often as one of its key ends.

    If all came again after a second, a flood of refusals would take more from others than what is under way.
    """
    now = time.monotonic()
    last, pace, due = self._paces.get(key, (now, 0.0, 0.0))
    due = max(now + 1.0, due)
    if key in self._taken:
      self._paces[key] = last, pace, min(due + pace, now + _LONGEST)
    return due - now


class FairSemaphore:
  """A number of permits for which requests wait; payers get them in turns. Any thread may call."""

  def __init__(self, permits: int, *, shared: bool = False, per_key: int | None = None, others: str = 'requests'):
    """Make a semaphore with all permits free; the rest as for `Capacity`, `others` are what one waits for."""
    self._permits = Capacity(permits, shared=shared, per_key=per_key)
    self._lock, self._shares = threading.Lock(), Shares()
    self._waiting: dict[Payer, collections.deque[concurrent.futures.Future]] = {}
    self._others = others

  @contextlib.contextmanager
  def of(self, call: Call) -> Iterator[None]:
    """Hold a permit during the block.

    Args:
      call: the request that waits, until its deadline or until its client has left.

    Raises:
      Deadline: the deadline of the request has passed.
      Cancelled: the client has disconnected.
    """
    payer, turn = call.payer, concurrent.futures.Future()
    with self._lock:
      if payer not in self._waiting:
        self._shares.enter(payer)
        self._waiting[payer] = collections.deque()
      self._waiting[payer].append(turn)
      self._hand_out()
    try:
      try:
        call.result(turn, call.left)
      except TimeoutError:
        raise Deadline(
          f'Other {self._others} took all the time of this request: retry, or allow it more time.'
        ) from None
      call.check()
      yield
    finally:
      with self._lock:
        if turn.done() and not turn.cancelled():
          self._permits.let_go(payer.id)
        elif turn in self._waiting.get(payer, ()):
          self._drop(payer, turn)
        self._hand_out()

  def _hand_out(self) -> None:
    while able := [payer for payer in self._waiting if self._permits.has_room(payer.id)]:
      payer = self._shares.first(able)
      turn = self._waiting[payer][0]
      self._drop(payer, turn)
      if turn.set_running_or_notify_cancel():  # Otherwise its client has left.
        self._shares.charge(payer, 1)
        self._permits.take(payer.id)
        turn.set_result(None)

  def _drop(self, payer: Payer, turn: concurrent.futures.Future) -> None:
    self._waiting[payer].remove(turn)
    if not self._waiting[payer]:
      del self._waiting[payer]
      self._shares.leave(payer)


class Turns:
  """Locks by key: changes of one thing wait for each other.

  A key takes no memory while nobody holds or waits for its lock.
  """

  def __init__(self):
    """Make locks, all free."""
    self._lock, self._wanted = threading.Lock(), collections.Counter[Hashable]()  # By key: who holds it or waits.
    self._locks: dict[Hashable, FairSemaphore] = {}

  def __len__(self) -> int:
    """Return the number of locks that are held."""
    with self._lock:
      return len(self._locks)

  def __contains__(self, thing: Hashable) -> bool:
    """Return whether somebody holds or waits for the lock of a key."""
    return thing in self._locks

  @contextlib.contextmanager
  def of(self, thing: Hashable, call: Call) -> Iterator[None]:
    """Hold the lock of a key, such as the id of an adapter, during the block; see `FairSemaphore.of`."""
    with self._lock:
      own = self._locks.setdefault(thing, FairSemaphore(1, others='changes'))
      self._wanted[thing] += 1
    try:
      with own.of(call):
        yield
    finally:
      with self._lock:
        self._wanted[thing] -= 1
        if not self._wanted[thing]:
          del self._locks[thing], self._wanted[thing]
