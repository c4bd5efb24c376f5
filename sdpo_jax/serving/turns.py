"""One at a time, in the order of asking: changes of an adapter wait for each other, and for nobody else's."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator
import contextlib
import threading
import time

from sdpo_jax.serving.errors import Deadline


class Turns:
  """First come, first served, for each of any number of things; nothing is kept of those that nobody waits for."""

  def __init__(self):
    """Make turns of nothing yet."""
    self._lock = threading.Lock()
    self._queues: dict[Hashable, collections.deque[threading.Event]] = {}  # Whose turn it is, and those behind.

  def __len__(self) -> int:
    """How many things somebody has a turn at."""
    with self._lock:
      return len(self._queues)

  @contextlib.contextmanager
  def of(self, thing: Hashable, deadline: float | None = None) -> Iterator[None]:
    """Wait for the turn at a thing, which lasts as long as the block.

    Args:
      thing: such as the id of an adapter.
      deadline: of `time.monotonic`, until which the turn must have come; None: it may take any time.

    Raises:
      Deadline: it has not.
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
