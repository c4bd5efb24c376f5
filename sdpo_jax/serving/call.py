"""A request below the HTTP layer: deadline, cancellation and token allowance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from typing import Any

from sdpo_jax.rollout.fair_queue import SERVICE, Payer
from sdpo_jax.serving.errors import Cancelled, Deadline, ServiceError


@dataclasses.dataclass(eq=False)
class Call:
  """A request in progress, which another thread can end; usable as the `Stop` of its computations."""

  deadline: float | None = None  # A time on `clock`; None: there is no deadline.
  # Called with 'sampled', 'scored' or 'learned' and a number of tokens before these are computed, or with 'feedbacks'
  # and 1; raises Busy if they exceed the allowance. A negative number takes back what was not used.
  spend: Callable[[str, int], None] = lambda kind, amount: None
  payer: Payer = SERVICE  # On whose account its work is done.
  clock: Callable[[], float] = time.monotonic  # Returns seconds.
  # What is done when the request has been answered or given up, such as taking back what it has not used.
  closing: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
  _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)
  _ended: ServiceError | None = dataclasses.field(default=None, init=False)
  _listeners: list[Callable[[], None]] = dataclasses.field(default_factory=list, init=False)

  def end(self, error: ServiceError | None = None) -> None:
    """End the request with an error, by default Cancelled; the first call wins. Any thread may call."""
    with self._lock:
      if self._ended is not None:
        return
      self._ended = error or Cancelled('The request was cancelled, because its client has disconnected.')
      listeners = list(self._listeners)
    for listener in listeners:
      listener()

  def asked(self) -> bool:
    """Return whether the request has ended or its deadline has passed; see `Stop`."""
    return self._ended is not None or (self.deadline is not None and self.clock() >= self.deadline)

  @property
  def work(self) -> dict[str, Any]:
    """The deadline and the payer, as arguments of the worker's methods that queue work."""
    return {'deadline': self.deadline, 'payer': self.payer}

  @property
  def left(self) -> float | None:
    """The seconds until the deadline, at least 0; None: there is no deadline."""
    return None if self.deadline is None else max(0.0, self.deadline - self.clock())

  def check(self) -> None:
    """Raise the error of a request that has ended; return if it goes on.

    Raises:
      Cancelled: the client has disconnected.
      Deadline: the deadline has passed.
    """
    if self._ended is not None:
      raise self._ended
    if self.asked():
      raise Deadline('The time limit of the request was reached: nothing was changed.')

  def result(self, future: concurrent.futures.Future, timeout: float | None = None) -> Any:
    """Wait for a future of the worker, and return its result; if the request ends first, the future is cancelled.

    Args:
      future: the future; it cannot be cancelled once the worker has begun it.
      timeout: the most seconds to wait; None: no limit.

    Raises:
      Cancelled: the client has disconnected.
      TimeoutError: the future is not done within `timeout`.
    """
    with self.on_end(future.cancel):
      try:
        return future.result(timeout)
      except concurrent.futures.CancelledError:
        self.check()
        raise

  @contextlib.contextmanager
  def on_end(self, listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener` once, from another thread, if the request ends during the block; now if it already has."""
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
