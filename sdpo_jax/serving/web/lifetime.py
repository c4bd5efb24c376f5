"""From the start of the service to its end: whether it is ready, works, or finishes what it has."""

from __future__ import annotations

from collections.abc import Callable
import threading
import time
from typing import TYPE_CHECKING

from sdpo_jax.serving.errors import NotReady

if TYPE_CHECKING:  # The service below does not know of HTTP, nor this of what it is made of.
  from sdpo_jax.serving.service import Service


class Lifetime:
  """What the port answers before the service is there, while it is, and when it ends; from any thread."""

  def __init__(self, service: Service | None = None, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._service = service
    self.failure: BaseException | None = None  # Of the start.
    self.stage = 'reading the model'  # What the start is doing, for /readyz.
    self._draining = threading.Event()
    self._listeners: list[Callable[[], None]] = []
    self._last_request = clock()
    self.under_way = 0  # Requests; of the event loop.

  def started(self, service: Service) -> None:
    """Note that the service is there; it may still compile."""
    self._service = service

  @property
  def present(self) -> Service | None:
    """The service, as soon as it is there."""
    return self._service

  @property
  def ready(self) -> bool:
    """Whether requests are welcome."""
    there = self._service is not None and self._service.worker.ready.is_set()
    return there and not self.draining and not self.why_not()

  @property
  def draining(self) -> bool:
    """Whether the service finishes what it has, and takes nothing new."""
    return self._draining.is_set()

  def on_drain(self, listener: Callable[[], None]) -> None:
    """Call `listener` when `drain` is called."""
    self._listeners.append(listener)

  def drain(self) -> None:
    """Refuses new work from now on."""
    self._draining.set()
    for listener in self._listeners:
      listener()

  def why_not(self) -> str:
    """One sentence about why the engine cannot work any more; empty: it can, or will when it is ready."""
    failure = self.failure or (self._service.worker.failure if self._service is not None else None)
    return f'The engine has failed ({type(failure).__name__}): see the log of the service.' if failure else ''

  def service(self) -> Service:
    """Return the service for a request.

    Raises:
      NotReady: it is not there yet, or does not take requests any more.
    """
    if self.draining:
      raise NotReady('The service is shutting down: ask the next one.')
    if self.why_not():
      raise NotReady(self.why_not())
    if self._service is None or not self._service.worker.ready.is_set():
      raise NotReady(f'The service is starting ({self.stage}): /readyz says when it is ready.')
    return self._service

  def touch(self) -> None:
    """Note that somebody asked for something."""
    self._last_request = self._clock()

  def idle_for(self) -> float:
    """Seconds without a request."""
    return 0.0 if self.under_way else self._clock() - self._last_request
