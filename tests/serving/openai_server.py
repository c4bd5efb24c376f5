"""A service behind a real port, for clients that know nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import socket
import threading

import httpx
import uvicorn

from sdpo_jax.config import Config
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.service import Service
from sdpo_jax.serving.web.app import make_app
from sdpo_jax.serving.web.gate import LOCAL_OWNER
from tests.serving import service_world


@dataclasses.dataclass(frozen=True)
class Running:
  """A service behind a port."""

  url: str
  service: Service
  http: httpx.Client  # That asks there.

  @property
  def account(self) -> Account:
    """That of its only owner, who needs no key."""
    return Account(self.service, LOCAL_OWNER)


@contextlib.contextmanager
def running(config: Config) -> Iterator[Running]:
  """Give a service that takes requests, and stop it."""
  with service_world.running(config) as service, behind_port(service, config) as found:
    yield found


@contextlib.contextmanager
def behind_port(service: Service, config: Config) -> Iterator[Running]:
  """Give a service a port of this machine while the block lasts."""
  server = uvicorn.Server(uvicorn.Config(make_app(service, config.serve), log_config=None))
  # Bound here, so that the port is known and takes connections at once.
  with socket.create_server(('127.0.0.1', 0)) as bound:
    thread = threading.Thread(target=server.run, kwargs={'sockets': [bound]}, daemon=True)
    thread.start()
    try:
      url = f'http://127.0.0.1:{bound.getsockname()[1]}'
      with httpx.Client(base_url=url, timeout=300) as http:
        yield Running(url, service, http)
    finally:
      server.should_exit = True
      thread.join()
