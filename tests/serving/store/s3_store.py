"""A local server that speaks as much of Amazon S3 as the store asks for: conditional puts, gets, deletions, lists.

A test may let answers be lost or requests be refused.
"""

from __future__ import annotations

from collections.abc import Callable
import hashlib
import http.server
import re
import threading
import urllib.parse
from xml.sax import saxutils

from tests.local_server import RequestHandler

PAGE = 7  # Objects of a list at once.


class S3:
  """The server; `options` opens it with obstore, `objects` is what it holds: name → content."""

  def __init__(self):
    self.objects: dict[str, bytes] = {}
    # Called with method, name and whether it is before or after the request is done: 'lose' closes the connection
    # without an answer, a number is the status of the answer.
    self.disturb: Callable[[str, str, bool], str | int | None] = lambda method, name, done: None
    self._lock = threading.Lock()
    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), self._handler())
    self._server.daemon_threads = True
    self.options = {
      'endpoint': f'http://127.0.0.1:{self._server.server_address[1]}',
      'region': 'none',
      'skip_signature': True,
      'client_options': {'allow_http': True},
      'retry_config': {'max_retries': 2},
    }

  def __enter__(self) -> S3:
    threading.Thread(target=self._server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._server.shutdown()
    self._server.server_close()

  def answer(self, method: str, name: str, query: dict[str, str], headers, body: bytes) -> tuple[int, bytes, str]:
    """Return status, body and ETag of an answer."""
    with self._lock:
      found = self.objects.get(name)
      if method == 'PUT':
        wanted = headers.get('If-Match')
        if headers.get('If-None-Match') == '*' and found is not None or wanted and wanted != _etag(found):
          return 412, b'', ''
        self.objects[name] = body
        return 200, b'', _etag(body)
      if method == 'POST' and 'delete' in query:
        keys = re.findall('<Key>.*?</Key>', body.decode())
        for key in keys:
          self.objects.pop(saxutils.unescape(key[5:-6]), None)
        deleted = ''.join(f'<Deleted>{key}</Deleted>' for key in keys)
        return 200, f'<DeleteResult>{deleted}</DeleteResult>'.encode(), ''
      if 'list-type' in query:
        return 200, self._list(query), ''
      return (404, b'', '') if found is None else (200, found, _etag(found))

  def _list(self, query: dict[str, str]) -> bytes:
    names = sorted(name for name in self.objects if name.startswith(query.get('prefix', '')))
    start = int(query.get('continuation-token', 0))
    rest = start + PAGE < len(names)
    parts = [
      f'<Contents><Key>{saxutils.escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>'
      f'<Size>{len(self.objects[name])}</Size><ETag>{saxutils.escape(_etag(self.objects[name]))}</ETag></Contents>'
      for name in names[start : start + PAGE]
    ]
    more = f'<NextContinuationToken>{start + PAGE}</NextContinuationToken>' if rest else ''
    cut = f'<IsTruncated>{str(rest).lower()}</IsTruncated>'
    return f'<ListBucketResult>{cut}{more}{"".join(parts)}</ListBucketResult>'.encode()

  def _handler(server) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(RequestHandler):
      def do(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        name = urllib.parse.unquote(url.path).removeprefix('/bucket').removeprefix('/')
        body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
        status, content, etag = 500, b'', ''
        trouble = server.disturb(self.command, name, False)
        if trouble is None:
          query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
          status, content, etag = server.answer(self.command, name, query, self.headers, body)
          trouble = server.disturb(self.command, name, True)
        if trouble == 'lose':
          self.close_connection = True
          return
        self.send_response(status if trouble is None else trouble)
        self.send_header('Content-Length', str(len(content)))
        self.send_header('Last-Modified', 'Thu, 01 Jan 2026 00:00:00 GMT')
        if etag:
          self.send_header('ETag', etag)
        self.end_headers()
        self.wfile.write(content)

      do_GET = do_PUT = do_POST = do

    return Handler


def _etag(content: bytes | None) -> str:
  return '' if content is None else f'"{hashlib.md5(content).hexdigest()}"'


if __name__ == '__main__':  # A server in a process of its own, which prints its address and serves until it is killed.
  PAGE = 1000
  with S3() as server:
    print(server.options['endpoint'], flush=True)
    threading.Event().wait()
