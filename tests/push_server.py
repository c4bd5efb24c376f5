"""A stand-in for a service to which a run sends its cartridge: it keeps what it gets, or refuses it."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import threading
import zipfile

from tests.local_server import RequestHandler


class PushServer:
  """Knows one cartridge, once it was imported; `kept` are the notes of each version."""

  def __init__(self):
    self.kept, self.files, self.keys, self.paths = [], {}, set(), []
    self.status = 200  # Of further answers.
    self.known = False
    self.open = threading.Event()  # Requests wait until it is set.
    self.open.set()
    self.address = ''

  def answer(self, method, path, body):
    self.paths.append((method, path))
    self.open.wait(30)
    if self.status != 200:
      return self.status, {'error': 'not now'}
    if method == 'GET':
      return (200, {'adapter': 'ad-1'}) if self.known else (404, {})
    if path.endswith('/versions') and not self.known:
      return 404, {}
    self.known = True
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
      self.files = {name: archive.read(name) for name in archive.namelist()}
    self.kept.append(json.loads(self.files['cartridge.json'])['about'])
    return 201, {'id': 'ad-1'}


@contextlib.contextmanager
def push_server():
  """Give a server that listens on loopback."""
  made = PushServer()

  class Handler(RequestHandler):
    def answer(self):
      made.keys.add(self.headers.get('Authorization'))
      body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
      status, said = made.answer(self.command, self.path, body)
      content = json.dumps(said).encode()
      self.send_response(status)
      self.send_header('Content-Length', str(len(content)))
      self.end_headers()
      self.wfile.write(content)

    do_GET = do_POST = answer

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  made.address = f'http://127.0.0.1:{server.server_port}'
  try:
    yield made
  finally:
    made.open.set()
    server.shutdown()
    server.server_close()
