"""A process that serves the tiny model behind a real port, and requests to it."""

import contextlib
import http.client
import json
import pathlib
import subprocess
import sys
import threading
import time
import types

from benchmarks import serve
from tests import tiny
from tests.serving import service_world
from tests.serving.store import places

PATIENCE = 300.0  # Seconds after which a process that does not answer is given up; none is expected to take them.
CONFIG = """
import pathlib
from tests.serving import service_world

def get_config():
  config = service_world.make_config(pathlib.Path({model!r}), pathlib.Path({root!r}))
  config.serve.http.port = 0
  config.serve.store.keep_versions = 0  # Tests look at every version that was made.
  return config
"""


def until(condition):
  deadline = time.monotonic() + PATIENCE
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.005)


@contextlib.contextmanager
def served(folder: pathlib.Path):
  """Yield a process that serves the tiny model, and its address."""
  if not (folder / 'config.py').exists():
    model = service_world.model_folder(folder / 'model')
    (folder / 'config.py').write_text(CONFIG.format(model=str(model), root=str(folder / 'root')))
  command = [sys.executable, '-m', 'launch.serve', f'--config={folder / "config.py"}']
  process = subprocess.Popen(
    command, stderr=subprocess.PIPE, text=True, cwd=tiny.REPOSITORY, env=tiny.environment(quick=True)
  )
  lines = []
  try:
    line = process.stderr.readline()
    url = serve.address_in(line)
    assert url is not None, line + process.stderr.read()
    reading = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    reading.start()
    yield types.SimpleNamespace(process=process, url=url, lines=lines)
    reading.join(PATIENCE)
  finally:
    process.kill()
    process.wait()
    places.bury(folder / 'root')


def ask(running, method, path, body=None, **headers):
  connection = http.client.HTTPConnection(running.url.removeprefix('http://'), timeout=PATIENCE)
  with contextlib.closing(connection):
    kind = {'Content-Type': 'application/json'} if body is not None else {}
    connection.request(method, path, None if body is None else json.dumps(body), {**kind, **headers})
    response = connection.getresponse()
    return response.status, json.loads(response.read())
