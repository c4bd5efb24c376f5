"""A real HTTP server on this machine for graders to ask: it answers as a test says and keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import http.server
import json
import socket
import ssl
import threading
from typing import Any


@dataclasses.dataclass
class Answer:
  """What the server sends back; a `body` that is not bytes becomes JSON."""

  body: Any = b''
  status: int = 200
  headers: dict[str, str] = dataclasses.field(default_factory=dict)

  def content(self) -> bytes:
    return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


class RequestHandler(http.server.BaseHTTPRequestHandler):
  """Keeps connections open, answers at once, and prints nothing; the base of handlers of the servers of tests."""

  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True  # An answer is several writes: each would wait until the client has the one before.

  def log_message(self, *_: object) -> None:
    pass


class Server:
  """Asks `respond(body)` for the answer to every POST, behind `tls` if given; the address is `url`."""

  def __init__(self, respond: Callable[[Any], Answer], tls: ssl.SSLContext | None = None):
    self.bodies: list[Any] = []  # As they came in.
    self.headers: list[dict[str, str]] = []
    self.paths: list[str] = []
    self.most_at_once = 0
    self._active = 0
    self._lock = threading.Lock()
    self._respond = respond
    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), self._handler())
    self._server.daemon_threads = True
    self.url = f'{"https" if tls else "http"}://127.0.0.1:{self._server.server_address[1]}'
    if tls:
      self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)

  def __enter__(self) -> Server:
    threading.Thread(target=self._server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._server.shutdown()
    self._server.server_close()

  def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
    server = self

    class Handler(RequestHandler):
      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        with server._lock:
          server.bodies.append(body)
          server.headers.append(dict(self.headers))
          server.paths.append(self.path)
          server._active += 1
          server.most_at_once = max(server.most_at_once, server._active)
        try:
          answer = server._respond(body)
        finally:
          with server._lock:
            server._active -= 1
        content = answer.content()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The client may have hung up.
          self.send_response(answer.status)
          for name, value in {'Content-Length': str(len(content)), **answer.headers}.items():
            self.send_header(name, value)
          self.end_headers()
          self.wfile.write(content)

    return Handler


def dead_address() -> str:
  """Return an address at which nothing listens."""
  with http.server.HTTPServer(('127.0.0.1', 0), http.server.BaseHTTPRequestHandler) as server:
    return f'http://127.0.0.1:{server.server_address[1]}'


def free_port() -> int:
  with socket.create_server(('', 0)) as server:
    return server.getsockname()[1]
