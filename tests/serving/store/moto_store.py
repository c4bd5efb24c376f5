"""moto's S3 in a process of its own, which prints its address and serves until it is killed.

  python -m tests.serving.store.moto_store

Unlike S3, moto looks at the condition of a put first and writes then, while other threads may write between the two: of
eight clients that swap one object, two win now and then. So requests are handled one at a time here.
"""

from __future__ import annotations

from collections.abc import Iterable
import io
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug import serving


def main() -> None:
  application, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

  def alone(environ, start_response) -> Iterable[bytes]:
    # A client that is paused while it sends must keep no other waiting.
    environ['wsgi.input'] = io.BytesIO(environ['wsgi.input'].read(int(environ.get('CONTENT_LENGTH') or 0)))
    with lock:
      return list(application(environ, start_response))

  server = serving.make_server('127.0.0.1', 0, alone, threaded=True)
  print(f'http://127.0.0.1:{server.port}', flush=True)
  server.serve_forever()


if __name__ == '__main__':
  main()
