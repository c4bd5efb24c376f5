"""A Hugging Face hub on this machine: its data sets are folders."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading
from typing import Any
import urllib.parse

from tests.local_server import RequestHandler


class Hub:
  """Serves `folder/OWNER/NAME/REVISION/…` as data sets, with '%2F' for a '/' in a revision; notes what is asked."""

  def __init__(self, folder: pathlib.Path):
    self.folder, self.asked = folder, []

  def answer(self, path: str) -> tuple[int, dict[str, str], Any]:
    """Return status, headers and body, which is JSON if it is not bytes."""
    self.asked.append(path)
    listing = re.fullmatch(r'/api/datasets/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/]+))?', path)
    file = re.fullmatch(r'/datasets/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)', path)
    name, revision = (listing[1], listing[3] or 'main') if listing else (file[1], file[2]) if file else ('', '')
    repository = self.folder / name
    if not name or not repository.is_dir():
      return 404, {'X-Error-Code': 'RepoNotFound'}, {}
    homes = {self._commit(home): home for home in repository.iterdir()}
    home = homes.get(revision, repository / revision)
    if not home.is_dir():
      return 404, {'X-Error-Code': 'RevisionNotFound'}, {}
    commit = self._commit(home)
    if listing:
      names = sorted(path.relative_to(home).as_posix() for path in home.rglob('*') if path.is_file())
      if listing[2] == 'tree':
        return 200, {}, [self._entry(home, held) for held in names]
      return 200, {}, {'id': name, 'sha': commit, 'siblings': [{'rfilename': held} for held in names]}
    held = home / urllib.parse.unquote(file[3])
    if not held.is_file():
      return 404, {'X-Error-Code': 'EntryNotFound', 'X-Repo-Commit': commit}, {}
    content = held.read_bytes()
    return 200, {'X-Repo-Commit': commit, 'ETag': f'"{hashlib.sha1(content).hexdigest()}"'}, content

  @staticmethod
  def _commit(home: pathlib.Path) -> str:
    return hashlib.sha1(str(home).encode()).hexdigest()

  @staticmethod
  def _entry(home: pathlib.Path, name: str) -> dict[str, Any]:
    content = (home / name).read_bytes()
    return {'type': 'file', 'path': name, 'size': len(content), 'oid': hashlib.sha1(content).hexdigest()}


def constants(address: str, cache: pathlib.Path) -> dict[str, Any]:
  """Return the constants of huggingface_hub with which this process uses a hub, by name."""
  template = f'{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}'
  return {
    'ENDPOINT': address,
    'HUGGINGFACE_CO_URL_TEMPLATE': template,
    'HF_HUB_OFFLINE': False,
    'HF_HUB_CACHE': str(cache),
  }


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[str]:
  """Serve a hub while the block runs; yields its address."""

  class Handler(RequestHandler):
    def do_GET(self):
      status, headers, body = hub.answer(urllib.parse.urlsplit(self.path).path)
      content = body if isinstance(body, bytes) else json.dumps(body).encode()
      self.send_response(status)
      for name, value in {**headers, 'Content-Length': str(len(content))}.items():
        self.send_header(name, value)
      self.end_headers()
      if self.command == 'GET':
        self.wfile.write(content)

    do_HEAD = do_GET

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_address[1]}'
    server.shutdown()
