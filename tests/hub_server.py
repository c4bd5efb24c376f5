"""A Hugging Face hub on this machine: its data sets are folders, and its models are what has been pushed."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import hashlib
import http.server
import json
import pathlib
import re
import threading
from typing import Any
import urllib.parse

import pytest
import yaml

from sdpo_jax.models import hub
from tests.local_server import RequestHandler

Reply = tuple[int, dict[str, str], Any]  # Status, headers and body, which is JSON if it is not bytes.


@dataclasses.dataclass
class Model:
  """A model as it was pushed."""

  private: bool
  files: dict[str, bytes] = dataclasses.field(default_factory=dict)


class Hub:
  """Serves `folder/OWNER/NAME/REVISION/…` as data sets, with '%2F' for a '/' in a revision; notes what is asked.

  Models are taken from those whose token is in `users`, into their own name space.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder, self.asked, self.address = folder, [], ''
    self.users: dict[str, dict[str, Any]] = {}  # Token → what /api/whoami-v2 says.
    self.models: dict[str, Model] = {}
    self.blobs: dict[str, bytes] = {}  # Large files by their SHA-256.

  def as_user(self, path: str, token: str, body: bytes) -> Reply | None:
    """Answer a request that needs a user, or is about a model; None: it is another one."""
    user = self.users.get(token)
    made = re.fullmatch(r'/api/repos/create', path)
    about = re.fullmatch(r'/api/models/([\w.-]+/[\w.-]+)(?:/(preupload|commit|tree)/main)?', path)
    large = re.fullmatch(r'/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch', path)
    if path == '/api/whoami-v2':
      return (401, {}, {'error': 'Invalid username or password.'}) if user is None else (200, {}, user)
    if path == '/api/validate-yaml':
      card = json.loads(body)['content']
      return 200, {}, {'errors': [], 'warnings': [] if yaml.safe_load(card.split('---')[1]) else [{'message': 'empty'}]}
    if not (made or about or large):
      return None
    values = json.loads(body) if made or large else {}
    name = f'{values.get("organization") or user["name"]}/{values["name"]}' if made else (about or large)[1]
    if user is None or name.split('/')[0] != user['name']:
      return 403, {'X-Error-Message': f'You have no rights to the namespace {name.split("/")[0]}'}, {}
    if made:
      if name in self.models:
        return 409, {}, {'error': 'You already created this model repo', 'url': f'{self.address}/{name}'}
      self.models[name] = Model(values.get('visibility') == 'private')
      return 200, {}, {'url': f'{self.address}/{name}'}
    if name not in self.models:
      return 404, {'X-Error-Code': 'RepoNotFound'}, {}
    model = self.models[name]
    if large:
      actions = {held['oid']: {'upload': {'href': f'{self.address}/lfs/{held["oid"]}'}} for held in values['objects']}
      return 200, {}, {'objects': [held | {'actions': actions[held['oid']]} for held in values['objects']]}
    if about[2] == 'tree':
      return 200, {}, [{'type': 'file', 'path': each, 'size': 1, 'oid': 'x'} for each in model.files]
    if about[2] == 'preupload':
      modes = {each['path']: 'lfs' if each['path'].endswith('.safetensors') else 'regular'
               for each in json.loads(body)['files']}  # fmt: skip
      return (
        200,
        {},
        {'files': [{'path': path, 'uploadMode': mode, 'shouldIgnore': False} for path, mode in modes.items()]},
      )
    if about[2] == 'commit':
      for line in map(json.loads, body.splitlines()):
        self._commit_line(model, line['key'], line['value'])
      return 200, {}, {'commitUrl': f'{self.address}/{name}/commit/1', 'commitOid': '1'}
    return 200, {}, {'id': name, 'private': model.private, 'siblings': []}

  def _commit_line(self, model: Model, key: str, value: Mapping[str, Any]) -> None:
    if key == 'file':
      model.files[value['path']] = base64.b64decode(value['content'])
    elif key == 'lfsFile':
      model.files[value['path']] = self.blobs[value['oid']]
    elif key == 'deletedFile':
      del model.files[value['path']]

  def answer(self, path: str, token: str = '', body: bytes = b'') -> Reply:
    """Answer a request."""
    self.asked.append(path)
    if blob := re.fullmatch(r'/lfs/([0-9a-f]{64})', path):
      assert hashlib.sha256(body).hexdigest() == blob[1]
      self.blobs[blob[1]] = body
      return 200, {}, {}
    if (answered := self.as_user(path, token, body)) is not None:
      return answered
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
    'HF_TOKEN_PATH': str(cache / 'token'),
    'HF_HUB_DISABLE_XET': True,  # Its servers are others than the hub.
  }


@contextlib.contextmanager
def serving(served: Hub) -> Iterator[str]:
  """Serve a hub while the block runs; yields its address."""

  class Handler(RequestHandler):
    def do_GET(self):
      if 'chunked' in self.headers.get('Transfer-Encoding', ''):
        sent = b''.join(iter(self.chunk, b''))
      else:
        sent = self.rfile.read(int(self.headers.get('Content-Length', 0)))
      token = self.headers.get('Authorization', '').removeprefix('Bearer ')
      status, headers, body = served.answer(urllib.parse.urlsplit(self.path).path, token, sent)
      content = body if isinstance(body, bytes) else json.dumps(body).encode()
      self.send_response(status)
      for name, value in {**headers, 'Content-Length': str(len(content))}.items():
        self.send_header(name, value)
      self.end_headers()
      if self.command != 'HEAD':
        self.wfile.write(content)

    do_HEAD = do_POST = do_PUT = do_GET

    def chunk(self):
      content = self.rfile.read(int(self.rfile.readline(), 16))
      self.rfile.readline()
      return content

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
    served.address = f'http://127.0.0.1:{server.server_address[1]}'
    yield served.address
    server.shutdown()


def user(name: str, role: str = 'write') -> dict[str, Any]:
  """Return what the hub says of somebody whose token has a role."""
  return {'name': name, 'type': 'user', 'orgs': [], 'auth': {'accessToken': {'role': role}}}


@contextlib.contextmanager
def reached(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
  """Serve `folder/hub` as the hub that this process uses, with an empty cache before it; `me` is logged in."""
  served = Hub(folder / 'hub')
  with serving(served) as address:
    for name, value in constants(address, folder / 'cache').items():
      monkeypatch.setattr(f'huggingface_hub.constants.{name}', value)
    served.users['hf_me'] = user('me')
    monkeypatch.setenv('HF_TOKEN', 'hf_me')
    hub.unreachable.cache_clear()
    yield served
  hub.unreachable.cache_clear()
