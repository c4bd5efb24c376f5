"""The state of one request below the HTTP layer: its deadline, its cancellation, and its token allowance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import threading
import time
from typing import Any

from sdpo_jax.serving.errors import Cancelled, Deadline, ServiceError


class Call:
  """A request under way, which another thread can end; it is the `Stop` of what computes for it."""

  def __init__(
    self,
    deadline: float | None = None,
    spend: Callable[[str, int], None] = lambda kind, tokens: None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Make a request.

    Args:
      deadline: on the monotonic clock; None: there is none.
      spend: called with 'sampled', 'scored' or 'learned' and a number of tokens before they are computed; it raises
        Busy if they exceed the allowance. A negative number refunds tokens that were not needed.
      clock: returns the time in seconds.
    """
    self.deadline, self.spend, self._clock = deadline, spend, clock
    self._lock = threading.Lock()
    self._ended: ServiceError | None = None
    self._listeners: list[Callable[[], None]] = []

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
    return self._ended is not None or (self.deadline is not None and self._clock() >= self.deadline)

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
