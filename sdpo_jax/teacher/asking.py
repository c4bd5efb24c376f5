"""Many questions to a server, asked by a few threads while the run looks whether it is to stop."""

from __future__ import annotations

from collections.abc import Callable
import threading
from typing import TypeVar

from sdpo_jax.distributed.stopping import Stop, StoppedError

STOP_S = 0.5  # Between two questions whether the run is to stop, while answers are waited for.
Answer = TypeVar('Answer')


def ask_all(
  ask: Callable[[int], Answer], count: int, *, threads: int, name: str, stop: Stop, given_up: threading.Event
) -> list[Answer]:
  """Return what `ask` returns of 0 to count − 1, in order.

  Threads of an earlier call which still wait take no place of this one's, and none keeps the process from ending.

  Args:
    ask: called by several threads. What it raises first ends the call.
    count: of questions.
    threads: how many ask at a time.
    name: of the threads.
    stop: whether the run is to stop, which does not wait for answers.
    given_up: set when no answer is wanted any more, for those who still wait for one.

  Raises:
    StoppedError: as `stop` said.
    BaseException: what `ask` raised.
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
