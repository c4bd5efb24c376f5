"""Clients of OpenAI-compatible servers, and sending many requests from a few threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import random
import threading
from typing import Any, Self, TypeVar

from sdpo_jax import liveness
from sdpo_jax.config import FeedbackEndpointConfig, TeacherEndpointConfig
from sdpo_jax.distributed.stopping import Stop, StoppedError
from sdpo_jax.environments import chat_endpoint, json_server

STOP_S = 0.5  # Seconds between checks for a request to stop, while waiting for answers.
Answer = TypeVar('Answer')


class EndpointClient:
  """A client of an OpenAI-compatible server; holds connections until `close()`."""

  def __init__(self, settings: TeacherEndpointConfig | FeedbackEndpointConfig, prefix: str, path: str):
    """Prepare the client; no connection is made yet.

    Args:
      settings: the address up to and including its version, the key, and the number of concurrent requests.
      prefix: what the names of these settings or flags begin with, for messages.
      path: path of the requests below the address.

    Raises:
      UserError: the address or an environment variable is missing, or the address continues after the version.
    """
    self._settings = settings
    self._server = chat_endpoint.connect(settings, prefix, path=path)
    self.public_url = self._server.public_url  # The address without parts that may be secret.
    self._closing = threading.Event()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Close the connections; requests under way are not retried."""
    self._closing.set()
    self._server.close()

  def _ask_again(
    self, body: Mapping[str, Any], read: Callable[[Any], Answer], given_up: threading.Event, **options: Any
  ) -> Answer:
    """Return what `read` makes of the answer to a request, which is repeated after failures as the settings say.

    Args:
      body: what to post.
      read: called with the JSON of an answer; raises Fault if it is not valid.
      given_up: set when no answer is needed any more.
      options: as in `JsonServer.ask`.

    Raises:
      Fault: there is no usable answer, and further attempts cannot help.
    """
    for attempt in range(self._settings.retries + 1):
      if given_up.is_set() or self._closing.is_set():
        raise json_server.Fault('the server was given up because of earlier requests')
      try:
        answer = read(self._server.ask(body, self._settings.timeout_s, **options))
        liveness.progress()
        return answer
      except json_server.Fault as fault:
        if not fault.again or attempt == self._settings.retries:
          raise
        given_up.wait(json_server.pause_s(attempt, fault.after_s, random.random()))
    raise AssertionError('The last attempt returns or raises.')


def ask_all(
  ask: Callable[[int], Answer], count: int, *, threads: int, name: str, stop: Stop, given_up: threading.Event
) -> list[Answer]:
  """Return `ask(i)` for every i from 0 to count − 1, in order, called by several threads.

  Threads of an earlier call that are still waiting do not count, and no thread keeps the process from exiting.

  Args:
    ask: called by several threads. The first exception that it raises ends the call.
    count: number of requests.
    threads: number of threads.
    name: name of the threads.
    stop: tells whether the run should stop; if so, this function stops waiting for answers.
    given_up: set when answers are no longer needed, to end threads that are still waiting for one.

  Raises:
    StoppedError: the run should stop.
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
      except BaseException as error:  # Raised again in the waiting thread.
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
