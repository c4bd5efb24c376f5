"""One request below the HTTP layer: its deadline, cancellation and token allowance, and its turn to change a thing."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from typing import Any

from sdpo_jax.serving.errors import Cancelled, Deadline, ServiceError


@dataclasses.dataclass(eq=False)
class Call:
  """A request under way, which another thread can end; it is the `Stop` of what computes for it."""

  deadline: float | None = None  # On the clock; None: there is none.
  # Called with 'sampled', 'scored' or 'learned' and a number of tokens before they are computed; it raises Busy if they
  # exceed the allowance. A negative number refunds tokens that were not needed.
  spend: Callable[[str, int], None] = lambda kind, tokens: None
  clock: Callable[[], float] = time.monotonic  # Returns the time in seconds.
  _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)
  _ended: ServiceError | None = dataclasses.field(default=None, init=False)
  _listeners: list[Callable[[], None]] = dataclasses.field(default_factory=list, init=False)

  def end(self, error: ServiceError | None = None) -> None:
    """End the request, from any thread; the first error counts, Cancelled if none is given."""
    with self._lock:
      if self._ended is not None:
        return
      self._ended = error or Cancelled('The request was cancelled, for its sender does not wait any more.')
      listeners = list(self._listeners)
    for listener in listeners:
      listener()

  def asked(self) -> bool:
    """Return whether the request has ended; see `Stop`."""
    return self._ended is not None or (self.deadline is not None and self.clock() >= self.deadline)

  @property
  def left(self) -> float | None:
    """The seconds until the deadline, not below 0; None: there is none."""
    return None if self.deadline is None else max(0.0, self.deadline - self.clock())

  def check(self) -> None:
    """Raise the error that ended the request, if it has ended.

    Raises:
      Cancelled: the sender does not wait any more.
      Deadline: its time is over.
    """
    if self._ended is not None:
      raise self._ended
    if self.asked():
      raise Deadline('The time of the request was over before it was done: nothing was changed.')

  def result(self, future: concurrent.futures.Future, timeout: float | None = None) -> Any:
    """Wait for a future of the worker, which is cancelled if the request ends before it has begun.

    Args:
      future: result that the request needs.
      timeout: seconds to wait at most; None: no limit.

    Raises:
      Cancelled: the sender ended the request.
      TimeoutError: it is not done within `timeout`.
    """
    with self.on_end(future.cancel):
      try:
        return future.result(timeout)
      except concurrent.futures.CancelledError:
        self.check()
        raise

  @contextlib.contextmanager
  def on_end(self, listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener` once, from another thread, if the request ends within the block; at once if it has ended."""
    with self._lock:
      ended = self._ended is not None
      if not ended:
        self._listeners.append(listener)
    if ended:
      listener()
    try:
      yield
    finally:
      with self._lock:
        if listener in self._listeners:
          self._listeners.remove(listener)


class Turns:
  """Fair locks by key: changes of one thing wait for each other in order of arrival, and for no others.

  Nothing is stored for a key that nobody waits for.
  """

  def __init__(self):
    """Make locks that nobody holds."""
    self._lock = threading.Lock()
    self._queues: dict[Hashable, collections.deque[threading.Event]] = {}  # The holder, then those who wait.

  def __len__(self) -> int:
    """Return the number of keys whose lock somebody holds."""
    with self._lock:
      return len(self._queues)

  @contextlib.contextmanager
  def of(self, thing: Hashable, call: Call) -> Iterator[None]:
    """Hold the lock of a key within the block.

    Args:
      thing: the key, such as the id of an adapter.
      call: the request that waits for it, until its deadline.

    Raises:
      Deadline: its time is over.
      Cancelled: the sender does not wait any more.
    """
    turn = threading.Event()
    with self._lock:
      queue = self._queues.setdefault(thing, collections.deque())
      queue.append(turn)
      if queue[0] is turn:
        turn.set()
    try:
      if not turn.wait(call.left):
        raise Deadline('Other changes of the adapter took all the time that this one had: ask again, or give it more.')
      call.check()
      yield
    finally:
      with self._lock:
        queue.remove(turn)
        if not queue:
          del self._queues[thing]
        else:
          queue[0].set()
