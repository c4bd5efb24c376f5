"""The life cycle of the service: starting, ready, draining."""

from __future__ import annotations

from collections.abc import Callable
import threading
import time
from typing import TYPE_CHECKING

from sdpo_jax.serving.errors import NotReady

if TYPE_CHECKING:  # Only for annotations: this module does not depend on the service at run time.
  from sdpo_jax.serving.service import Service


class Lifetime:
  """The state of the service for the HTTP layer, from before it exists until it ends; any thread may call."""

  def __init__(self, service: Service | None = None, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._service = service
    self.failure: BaseException | None = None  # The error that ended the start.
    self.stage = 'reading the model'  # The present stage of the start, for /readyz.
    self._draining = threading.Event()
    self._listeners: list[Callable[[], None]] = []
    self._last_request = clock()
    self.under_way = 0  # The number of requests; used in the event loop only.

  def started(self, service: Service) -> None:
    """Note that the service exists; it may still compile."""
    self._service = service

  @property
  def present(self) -> Service | None:
    """The service, or None before it exists."""
    return self._service

  @property
  def ready(self) -> bool:
    """Whether requests are accepted."""
    there = self._service is not None and self._service.worker.ready.is_set()
    return there and not self.draining and not self.why_not()

  @property
  def draining(self) -> bool:
    """Whether the service finishes its requests and accepts no new ones."""
    return self._draining.is_set()

  def on_drain(self, listener: Callable[[], None]) -> None:
    """Call `listener` when `drain` is called."""
    self._listeners.append(listener)

  def drain(self) -> None:
    """Refuse new work from now on."""
    self._draining.set()
    for listener in self._listeners:
      listener()

  def why_not(self) -> str:
    """Return a sentence on why the engine has failed for good; empty: it has not."""
    failure = self.failure or (self._service.worker.failure if self._service is not None else None)
    return f'The engine has failed ({type(failure).__name__}): see the log of the service.' if failure else ''

  def service(self) -> Service:
    """Return the service for a request.

    Raises:
      NotReady: it is not ready yet, or accepts no requests any more.
    """
    if self.draining:
      raise NotReady('The service is shutting down: ask the next one.')
    if self.why_not():
      raise NotReady(self.why_not())
    if self._service is None or not self._service.worker.ready.is_set():
      raise NotReady(f'The service is starting ({self.stage}): /readyz says when it is ready.')
    return self._service

  def touch(self) -> None:
    """Note that a request has come."""
    self._last_request = self._clock()

  def idle_for(self) -> float:
    """Return the seconds since the last request."""
    return 0.0 if self.under_way else self._clock() - self._last_request
