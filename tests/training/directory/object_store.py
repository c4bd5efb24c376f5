"""A local server that speaks as much of Google Cloud Storage's JSON API as TensorStore and gcsfs ask for.

It keeps generations and honours `ifGenerationMatch`; a test may let answers be lost or requests be refused.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import http.server
import json
import re
import threading
import urllib.parse

from tests.local_server import RequestHandler


@dataclasses.dataclass
class Object:
  """What is stored under a name."""

  content: bytes
  generation: int


class ObjectStore:
  """The server; `url` is its address, `objects` what it holds: bucket/name → object."""

  def __init__(self):
    self.objects: dict[str, Object] = {}
    self.requests: list[str] = []  # Method and path.
    # Called with method, bucket/name and whether it is before or after the request is done: 'lose' closes the
    # connection without an answer, a number is the status of the answer.
    self.disturb: Callable[[str, str, bool], str | int | None] = lambda method, name, done: None
    self._generation = 1_000_000_000
    self._uploads: dict[str, tuple[str, int | None, bytes]] = {}
    self._lock = threading.RLock()
    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), self._handler())
    self._server.daemon_threads = True
    self.url = f'http://127.0.0.1:{self._server.server_address[1]}'

  def __enter__(self) -> ObjectStore:
    threading.Thread(target=self._server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._server.shutdown()
    self._server.server_close()

  def environment(self) -> dict[str, str]:
    """Variables with which TensorStore and gcsfs ask this server, without credentials."""
    return {
      'TENSORSTORE_GCS_HTTP_URL': self.url,
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'token',
      'STORAGE_EMULATOR_HOST': self.url,
    }

  def put(self, name: str, content: bytes, expected: int | None) -> Object | None:
    """Store an object; None where its generation is not the expected one (0: there must be none)."""
    with self._lock:
      now = self.objects.get(name)
      if expected is not None and (now.generation if now else 0) != expected:
        return None
      self._generation += 1
      self.objects[name] = Object(content, self._generation)
      return self.objects[name]

  def remove(self, name: str, expected: int | None) -> bool:
    with self._lock:
      now = self.objects.get(name)
      if expected is not None and (now.generation if now else 0) != expected:
        return False
      self.objects.pop(name, None)
      return True

  def listed(self, bucket: str, prefix: str, delimiter: str, start: str, end: str) -> tuple[list[str], list[str]]:
    """Names and prefixes below a prefix."""
    names, folders = [], set()
    with self._lock:
      for whole in sorted(self.objects):
        if not whole.startswith(f'{bucket}/'):
          continue
        name = whole.removeprefix(f'{bucket}/')
        if not name.startswith(prefix) or name < start or (end and name >= end):
          continue
        rest = name[len(prefix) :]
        if delimiter and delimiter in rest:
          folders.add(prefix + rest[: rest.index(delimiter) + 1])
        else:
          names.append(name)
    return names, sorted(folders)

  def described(self, bucket: str, name: str) -> dict[str, object]:
    """Return what the API says of an object."""
    found = self.objects[f'{bucket}/{name}']
    return {
      'kind': 'storage#object',
      'bucket': bucket,
      'name': name,
      'size': str(len(found.content)),
      'generation': str(found.generation),
      'metageneration': '1',
      'updated': '2026-01-01T00:00:00.000Z',
      'timeCreated': '2026-01-01T00:00:00.000Z',
      'storageClass': 'STANDARD',
      'contentType': 'application/octet-stream',
    }

  def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
    store = self

    class Handler(RequestHandler):
      def answer(self, status, body=b'', headers=None):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = 'application/octet-stream' if isinstance(body, bytes) else 'application/json'
        self.send_response(status)
        for name, value in {'Content-Length': str(len(content)), 'Content-Type': kind, **(headers or {})}.items():
          self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
          with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The client may have hung up.
            self.wfile.write(content)

      def handle_request(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        store.requests.append(f'{self.command} {self.path}')
        expected = int(query['ifGenerationMatch']) if 'ifGenerationMatch' in query else None
        upload = re.fullmatch(r'/(?:resumable/)?upload/storage/v1/b/([^/]+)/o', url.path)
        named = re.fullmatch(r'(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)', url.path)
        copied = re.fullmatch(r'/storage/v1/b/([^/]+)/o/([^/]+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)', url.path)
        bucket = re.fullmatch(r'/storage/v1/b/([^/]+)/?', url.path)
        listing = re.fullmatch(r'/storage/v1/b/([^/]+)/o/?', url.path)
        unquote = urllib.parse.unquote
        if upload:
          name = query.get('name')
          if query.get('uploadType') == 'multipart':
            boundary = re.search(r'boundary="?([^";]+)', self.headers['Content-Type']).group(1).encode()
            parts = body.split(b'--' + boundary)
            described, content = (part.partition(b'\r\n\r\n')[2] for part in parts[1:3])
            name = name or json.loads(described)['name']
            body = content.removesuffix(b'\r\n').removesuffix(b'\n')
          elif query.get('uploadType') == 'resumable':
            if 'upload_id' not in query:
              name = name or json.loads(body)['name']
              key = f'upload{len(store._uploads)}'
              store._uploads[key] = (f'{upload.group(1)}/{name}', expected, b'')
              location = f'{store.url}/upload/storage/v1/b/{upload.group(1)}/o?uploadType=resumable&upload_id={key}'
              return self.answer(200, b'', {'Location': location})
            whole, expected, so_far = store._uploads[query['upload_id']]
            body = so_far + body
            if re.fullmatch(r'bytes .*/\*', self.headers.get('Content-Range', '')):
              store._uploads[query['upload_id']] = (whole, expected, body)
              return self.answer(308, b'', {'Range': f'bytes=0-{len(body) - 1}'})
            name = whole.partition('/')[2]
          return self.change(
            f'{upload.group(1)}/{name}', lambda whole: store.put(whole, body, expected), upload.group(1), name
          )
        if copied:
          source, target = (unquote('/'.join(copied.groups()[index : index + 2])) for index in (0, 2))
          if source not in store.objects:
            return self.answer(404, {'error': {'code': 404, 'message': 'not found'}})
          store.put(target, store.objects[source].content, None)
          described = store.described(copied.group(3), unquote(copied.group(4)))
          return self.answer(200, {'done': True, 'resource': described, **described})
        if named:
          place, name = named.group(1), unquote(named.group(2))
          whole = f'{place}/{name}'
          if self.command == 'DELETE':
            if whole not in store.objects:
              return self.answer(404, {'error': {'code': 404, 'message': 'not found'}})
            return self.change(whole, lambda whole: store.remove(whole, expected), place, None)
          if (status := store.disturb(self.command, whole, False)) is not None:
            return self.broken(status)
          with store._lock:
            found = store.objects.get(whole)
            described = store.described(place, name) if found else None
          if found is None:
            return self.answer(404, {'error': {'code': 404, 'message': f'No such object: {whole}'}})
          unmodified = query.get('ifGenerationNotMatch')
          if unmodified is not None and int(unmodified) == found.generation:
            return self.answer(304)
          if expected is not None and expected != found.generation:
            return self.answer(412)
          if query.get('alt') != 'media':
            return self.answer(200, described)
          return self.deliver(found)
        if listing:
          bounds = query.get('startOffset', ''), query.get('endOffset', '')
          names, folders = store.listed(listing.group(1), query.get('prefix', ''), query.get('delimiter', ''), *bounds)
          items = [store.described(listing.group(1), name) for name in names]
          return self.answer(200, {'kind': 'storage#objects', 'items': items, 'prefixes': folders})
        if bucket:
          return self.answer(200, {'kind': 'storage#bucket', 'name': bucket.group(1), 'id': bucket.group(1)})
        return self.answer(501, {'error': {'code': 501, 'message': f'{self.command} {self.path}'}})

      def deliver(self, found):
        headers = {
          'X-Goog-Generation': str(found.generation),
          'X-Goog-Stored-Content-Length': str(len(found.content)),
          'X-Goog-Stored-Content-Encoding': 'identity',
        }
        ranged = re.fullmatch(r'bytes=(\d*)-(\d*)', self.headers.get('Range') or '')
        if not ranged:
          return self.answer(200, found.content, headers)
        size = len(found.content)
        first, last = ranged.groups()
        begin = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1) if first and last else size
        if begin >= size:
          return self.answer(416, b'', {'Content-Range': f'bytes */{size}'})
        headers['Content-Range'] = f'bytes {begin}-{end - 1}/{size}'
        return self.answer(206, found.content[begin:end], headers)

      def change(self, whole, function, place, name):
        if (status := store.disturb(self.command, whole, False)) is not None:
          return self.broken(status)
        done = function(whole)
        if (status := store.disturb(self.command, whole, True)) is not None:
          return self.broken(status)
        if not done:
          return self.answer(412, {'error': {'code': 412, 'message': 'conditionNotMet'}})
        return self.answer(204) if name is None else self.answer(200, store.described(place, name))

      def broken(self, status):
        if isinstance(status, int):
          return self.answer(status, {'error': {'code': status, 'message': 'as the test wanted'}})
        self.close_connection = True
        with contextlib.suppress(OSError):
          self.connection.shutdown(2)

      do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_request

    return Handler
