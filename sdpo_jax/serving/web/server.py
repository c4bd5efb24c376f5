"""The process of a service: it opens the port first, then starts the engine, and shuts down in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sdpo_jax.command_lines import command_line
from sdpo_jax.config import Config, HttpConfig
from sdpo_jax.config.addresses import is_loopback
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.serving.service import Service
from sdpo_jax.serving.web.admission import Lifetime
from sdpo_jax.serving.web.app import make_app
from sdpo_jax.serving.web.keys import Keys, open_place
from sdpo_jax.serving.web.telemetry import Forward, Log

_LOOK = 0.1  # Seconds between two polls.
_KEEP_ALIVE = 30  # Seconds that a connection may stay open without a request.
_SWITCH = 0.0005  # Seconds for which a busy thread keeps others from running; Python's 5 ms delay every answer.
_LAST_ANSWERS = 5  # Seconds within which connections must finish sending at shutdown.


def open_keys(http: HttpConfig) -> Keys | None:
  """Return the keys of a service; None: it has none, and only this machine can reach it.

  Raises:
    UserError: other machines can reach a service without keys, or the key file is invalid, see `KeyFile`.
  """
  if http.keys is not None:
    return open_place(http.keys)
  if not is_loopback(http.host):
    raise UserError(
      f'serve.http.host={http.host} can be reached from other machines, and serve.http.keys is None: make a key with '
      f'{command_line("serve_key", "--keys=FILE", "--owner=NAME")} and name that file, or listen on 127.0.0.1.'
    )
  return None


def listen(http: HttpConfig) -> socket.socket:
  """Open a listening socket at the configured address.

  Raises:
    UserError: the address is invalid or in use.
  """
  try:
    family, *_, address = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # Of ::, IPv4, too.
    found = socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    # Connections inherit it. Without, a body waits 40 ms for a client that delays the acknowledgement of the head.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  except OSError as error:
    raise UserError(
      f'Cannot listen on serve.http.host={http.host}, serve.http.port={http.port} ({first_line(error)}): choose '
      'another port, 0 for a free one, or end the program that uses it.'
    ) from error
  found.setblocking(False)
  return found


def url_of(listening: socket.socket) -> str:
  """Return the URL of a listening socket."""
  host, port = listening.getsockname()[:2]
  return f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'


class PatientProtocol(H11Protocol):
  """HTTP/1.1 that drops clients that send no headers or do not read; uvicorn would wait forever.

  Each server makes its own subclass, which holds the state that its connections share.
  """

  patience: float = 30.0  # Seconds within which the headers of a request must arrive, and a full buffer be read.
  most: int = 320  # The most open connections; beyond them, the one waiting longest for headers is closed.
  waiting: dict[PatientProtocol, None]  # Connections with a running timeout, the oldest first.
  _timer: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._look()
    # Or silent connections would use up the file descriptors of the process.
    if len(self.connections) > self.most:  # Those that still read a response are left alone; this one has none yet.
      next(each for each in self.waiting if not each.transport.get_write_buffer_size()).give_up()

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    self._look()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    self._look()

  def pause_writing(self) -> None:
    super().pause_writing()
    self._look()

  def resume_writing(self) -> None:
    super().resume_writing()
    self._stop()
    self._look()

  def connection_lost(self, exc: Exception | None) -> None:
    super().connection_lost(exc)
    self._stop()

  def _look(self) -> None:
    """Start the timeout if no request is in progress or the buffer is full; otherwise stop it."""
    if self.cycle is not None and not (self.cycle.response_complete or self.flow.write_paused):
      self._stop()
    elif self._timer is None:
      self._timer = self.loop.call_later(self.patience, self.give_up)
      self.waiting[self] = None

  def _stop(self) -> None:
    self.waiting.pop(self, None)
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None

  def give_up(self) -> None:
    """Drop the connection and what its client has not read; to close it would wait for the client."""
    self._stop()
    self.transport.abort()


class Server(uvicorn.Server):
  """A uvicorn server that leaves signals to its owner; uvicorn would abort requests in progress and re-raise them."""

  def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]):
    super().__init__(config)
    self._on_signal = on_signal

  @contextlib.contextmanager
  def capture_signals(self):
    """Call `on_signal` in the event loop at the first signal, and end the process at the second."""
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    loop, seen = asyncio.get_running_loop(), False

    def handle(number: int, frame: Any) -> None:
      nonlocal seen
      if seen:
        os._exit(128 + number)
      seen = True
      loop.call_soon_threadsafe(self._on_signal)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)


class ServiceProcess:
  """The process of a service, from its start to its shutdown."""

  def __init__(self, config: Config, announce: Callable[[str], None], make: Callable[..., Service] = Service.make):
    """Read the keys and open the port.

    Args:
      config: validated settings.
      announce: receives lines for the user who started the process.
      make: makes the service; called in a thread.

    Raises:
      UserError: required keys are missing, or the port cannot be opened.
    """
    self._config, self._announce, self._make = config, announce, make
    http = config.serve.http
    keys = open_keys(http)
    self._socket = listen(http)
    self.url = url_of(self._socket)
    self.lifetime = Lifetime()
    log = Log(bodies=http.log_bodies)
    for name in ('uvicorn', 'sdpo_jax'):
      logger = logging.getLogger(name)
      logger.handlers, logger.propagate = [Forward(log)], False
    app = make_app(None, config.serve, keys, lifetime=self.lifetime, log=log)
    most = 4 * http.max_requests + 64
    protocol = type('Protocol', (PatientProtocol,), {'patience': http.read_timeout_s, 'most': most, 'waiting': {}})
    self._server = Server(
      uvicorn.Config(
        app,
        http=protocol,
        ws='none',
        loop='asyncio',
        lifespan='off',
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=2 * most,  # Counts connections; idle ones are closed before it is reached.
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_LAST_ANSWERS,
        h11_max_incomplete_event_size=2**16,
      ),
      self.lifetime.drain,
    )
    self._stopped = False

  def run(self) -> None:
    """Serve until a signal arrives or the service has been idle for `serve.http.idle_shutdown_s`.

    Raises:
      UserError: the service cannot be made.
    """
    self._announce(f'Listening on {self.url}; /readyz reports when it is ready, and /docs lists the routes.')
    sys.setswitchinterval(_SWITCH)
    threading.Thread(target=self._start, name='start', daemon=True).start()
    try:
      asyncio.run(self._serve())
    finally:
      self._socket.close()
    if self.lifetime.failure is not None:
      raise self.lifetime.failure
    if not self._stopped:  # Stopped during compilation, which cannot be interrupted.
      sys.stderr.flush()
      os._exit(0)

  def _start(self) -> None:
    def note(line: str) -> None:
      self.lifetime.stage = line.strip()
      self._announce(line)

    try:
      service = self._make(self._config, announce=note)
      self.lifetime.present = service
      service.start()
    except BaseException as error:
      self.lifetime.failure = error

  async def _serve(self) -> None:
    """Serve until the service should stop, and then stop it."""
    serving = asyncio.create_task(self._server.serve([self._socket]))
    began, lifetime, idle = time.monotonic(), self.lifetime, self._config.serve.http.idle_shutdown_s
    told = False
    while not (lifetime.draining or lifetime.failure or serving.done()):
      await asyncio.sleep(_LOOK)
      worker = lifetime.present.worker if lifetime.present is not None else None
      if worker is not None and worker.ended:  # Other failures pass, and /readyz reports them.
        lifetime.failure = worker.failure
      elif lifetime.ready and not told:
        told = True
        gc.collect()
        gc.freeze()  # A full collection would go through all modules, and stop every request for a quarter of a second.
        lifetime.touch()
        self._announce(f'Ready after {time.monotonic() - began:.1f} s.')
      if told and idle is not None and lifetime.idle_for() > idle:
        self._announce(f'No request for {idle:g} seconds: the service stops (serve.http.idle_shutdown_s).')
        lifetime.drain()
    lifetime.drain()
    await self._end()
    self._server.should_exit = True
    await serving

  async def _end(self) -> None:
    """Let requests finish within serve.http.drain_s, then close the service."""
    self._announce('Stopping: requests in progress may finish, new ones are refused.')
    until = time.monotonic() + self._config.serve.http.drain_s
    if self.lifetime.present is not None:
      await asyncio.to_thread(self.lifetime.present.store.drain)
    while self.lifetime.under_way and time.monotonic() < until:
      await asyncio.sleep(_LOOK)
    service = self.lifetime.present
    if service is not None and (service.worker.ready.is_set() or service.worker.failure is not None):
      await asyncio.to_thread(service.stop, max(0.0, until - time.monotonic()))
      self._stopped = True
