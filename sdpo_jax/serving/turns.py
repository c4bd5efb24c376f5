"""Fair locks by key: changes of one adapter wait for each other in order of arrival, and for no others."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator
import contextlib
import threading
import time

from sdpo_jax.serving.errors import Deadline


class Turns:
  """First-come, first-served locks for any number of keys; nothing is stored for a key that nobody waits for."""

  def __init__(self):
    """Make locks that nobody holds."""
    self._lock = threading.Lock()
    self._queues: dict[Hashable, collections.deque[threading.Event]] = {}  # The holder, then those who wait.

  def __len__(self) -> int:
    """Return the number of keys whose lock somebody holds."""
    with self._lock:
      return len(self._queues)

  @contextlib.contextmanager
  def of(self, thing: Hashable, deadline: float | None = None) -> Iterator[None]:
    """Hold the lock of a key within the block.

    Args:
      thing: the key, such as the id of an adapter.
      deadline: on `time.monotonic`, for acquiring the lock; None: there is none.

    Raises:
      Deadline: the deadline has passed.
    """
    turn = threading.Event()
    with self._lock:
      queue = self._queues.setdefault(thing, collections.deque())
      queue.append(turn)
      if queue[0] is turn:
        turn.set()
    try:
      timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
      if not turn.wait(timeout):
        raise Deadline('Other changes of the adapter took all the time that this one had: ask again, or give it more.')
      yield
    finally:
      with self._lock:
        queue.remove(turn)
        if not queue:
          del self._queues[thing]
        else:
          queue[0].set()
