"""Many requests to a server, sent by a few threads while the run watches for a request to stop."""

from __future__ import annotations

from collections.abc import Callable
import threading
from typing import TypeVar

from sdpo_jax.distributed.stopping import Stop, StoppedError

STOP_S = 0.5  # Seconds between checks whether the run is to stop, while it waits for answers.
Answer = TypeVar('Answer')


def ask_all(
  ask: Callable[[int], Answer], count: int, *, threads: int, name: str, stop: Stop, given_up: threading.Event
) -> list[Answer]:
  """Return `ask(i)` for every i from 0 to count − 1, in order, called by several threads.

  Threads of an earlier call that still wait do not count among `threads`, and no thread keeps the process from exiting.

  Args:
    ask: called by several threads. The first exception that it raises ends the call.
    count: number of requests.
    threads: number of threads.
    name: name of the threads.
    stop: says whether the run is to stop; then answers are not waited for.
    given_up: set when answers are no longer needed, for threads that still wait for one.

  Raises:
    StoppedError: the run is to stop.
    BaseException: the first exception of `ask`.
  """
  found: dict[int, Answer] = {}
  failures: list[BaseException] = []
  places, over, changed = iter(range(count)), threading.Event(), threading.Condition()

  def work() -> None:
    while True:
      with changed:
        place = None if over.is_set() else next(places, None)
      if place is None:
        return
      try:
        found[place] = ask(place)
      except BaseException as error:  # It belongs to the thread that waits.
        failures.append(error)
        over.set()
      with changed:
        changed.notify()

  for _ in range(min(threads, count)):
    threading.Thread(target=work, name=name, daemon=True).start()
  try:
    with changed:
      while not changed.wait_for(lambda: bool(failures) or len(found) == count, STOP_S):
        if stop.asked():
          raise StoppedError
  finally:
    over.set()
    given_up.set()
  if failures:
    raise failures[0]
  return [found[place] for place in range(count)]
