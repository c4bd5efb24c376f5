"""The session routes of a service whose model says what a test has written down, behind a real port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import http.server
import io
import json
import re
import threading
from typing import Any
import zipfile

from sdpo_jax.serving.tool_calls import ToolCall, read_calls, write_calls
from tests.local_server import RequestHandler

TOKEN = 'sst-the-token'
_ADAPTER = {'id': 'ad-1', 'name': 'mine', 'version': 0}


def call(name: str, **arguments: Any) -> str:
  """Return what a model writes to call a tool."""
  return write_calls([ToolCall(name, arguments)], 'hermes')


class Failed(Exception):
  """An answer with another status than 200."""

  def __init__(self, status: int, code: str, message: str):
    super().__init__(message)
    self.status, self.code = status, code


class SessionServer:
  """Answers as the service does. `lose` names actions whose next answer does not arrive, though it is done."""

  def __init__(self, *answers: str):
    self.answers = list(answers)
    self.asked: list[tuple[str, Any]] = []  # Actions that changed something, with their bodies, without digests.
    self.digests: list[tuple[str, str]] = []  # Actions, and the digests of their bodies.
    self.lose: set[str] = set()
    self.refuse: dict[str, tuple[int, str]] = {}  # Actions that are refused the next time: status and sentence.
    self.guard: str | None = None
    self.drawing: Callable[[], None] = lambda: None  # Called while the model draws.
    self.versions = [{'version': 0, 'parent': None, 'reason': 'create', 'details': {}, 'undone': False}]
    self.settings: dict[str, Any] = {}
    self.turns: list[dict[str, Any]] = []
    self.lessons = 0
    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), self._handler())
    self._server.daemon_threads = True
    self.url = f'http://127.0.0.1:{self._server.server_address[1]}'

  def __enter__(self) -> SessionServer:
    threading.Thread(target=self._server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._server.shutdown()
    self._server.server_close()

  @property
  def version(self) -> int:
    return self.versions[-1]['version']

  def decisions(self) -> list[Any]:
    return [body for action, body in self.asked if action == 'decision']

  # What the routes do.

  def answer(self, method: str, path: str, body: Any, token: str | None) -> tuple[str, Any]:
    """Return the name of an action and what it answers."""
    if path == '/readyz':
      return 'ready', {'status': 'ready'}
    path, _, query = path.removeprefix('/v1/continual/adapters').partition('?')
    if method == 'GET':
      return 'get', self._read(path, query)
    action = re.sub(r'\d+', 'N', path.removeprefix('/ad-1').removeprefix('/sessions/ses-1'))
    guarded = path.startswith('/ad-1/sessions/')
    if guarded and token != TOKEN:
      raise Failed(403, 'forbidden', 'The token of the session is missing.')
    name, answered = {
      '': ('create', lambda: {**_ADAPTER, 'name': body['name']}),
      '/undo': ('undo', lambda: self._undo(body['to'])),
      '/sessions': ('open', lambda: self._open(body)),
      '/turns': ('propose', lambda: self._propose(body)),
      '/turns/N/decision': ('decision', lambda: self._decide(_number(path), body)),
      '/turns/N/results': ('results', lambda: self._results(_number(path), body)),
      '/turns/N/retry': ('retry', lambda: {'turn': {**self.turns[_number(path)], 'text': 'otherwise', 'version': 7}}),
      '/flush': ('flush', lambda: {'learned': None}),
    }[action]
    if isinstance(body, dict) and 'digest' in body:
      self.digests.append((name, body.pop('digest')))
      turn = self.turns[_number(path)]
      if self.digests[-1][1] != (_digest(turn) if name == 'decision' else turn['digest']):
        raise Failed(409, 'turn_conflict', 'Another turn.')
    self.asked.append((name, body))
    if name in self.refuse:
      status, why = self.refuse.pop(name)
      raise Failed(status, 'refused', why)
    return name, answered()

  def _read(self, path: str, query: str) -> Any:
    if path == '':
      return {'adapters': []}
    if path == '/ad-1':
      return {**_ADAPTER, 'version': self.version}
    if path == '/ad-1/versions':
      return {'versions': self.versions}
    if path.endswith('/diff'):
      norms = {'before': 1.0, 'after': 2.0, 'change': 1.5}
      return {'total': {'matrix': 'all', **norms}, 'largest': [{'matrix': f'of {query}', **norms}], 'matrices': []}
    if path == '/ad-1/export':
      content = io.BytesIO()
      with zipfile.ZipFile(content, 'w') as archive:
        archive.writestr('adapter_config.json', '{}')
      return content.getvalue()
    return {'session': {'id': 'ses-1', 'adapter': 'ad-1', 'settings': self.settings}, 'turns': self.turns}

  def _open(self, body: Any) -> Any:
    self.settings = {'min_sdpo_examples': 1, **body}
    return {'session': {'id': 'ses-1', 'adapter': 'ad-1', 'settings': self.settings}, 'token': TOKEN}

  def _propose(self, body: Any) -> Any:
    if self.turns and self.turns[-1]['status'] == 'open':
      raise Failed(409, 'conflict', f'Turn {self.turns[-1]["n"]} is still open: decide about it first.')
    self.drawing()
    text = self.answers.pop(0)
    found = read_calls(text, 'hermes')
    turn = {
      'n': len(self.turns),
      'messages': body['messages'],
      'version': self.version,
      'sample_id': 'smp',
      'prompt_tokens': [1],
      'tokens': [2],
      'text': text,
      'said': found.text,
      'calls': [{'name': each.name, 'arguments': dict(each.arguments)} for each in found.calls],
      'fault': found.fault,
      'status': 'open' if found.calls or found.fault else 'answered',
      'decision': None,
      'results': [],
      'learned': None,
      'created': 0.0,
      'reused_tokens': 0,
    }
    turn['digest'] = _digest(turn)
    self.turns.append(turn)
    return {'turn': turn}

  def _decide(self, number: int, body: Any) -> Any:
    turn = self.turns[number]
    if turn['decision'] is not None:
      if turn['decision'] != body:
        raise Failed(409, 'conflict', f'Turn {number} has been decided otherwise.')
      return {'turn': turn, 'learned': turn['learned']}
    if body['decision'] != 'deny' and turn['calls'] and turn['fault'] is not None:
      raise Failed(400, 'invalid_request', f'Turn {number} also has a call that cannot be read: deny it.')
    turn['decision'] = body
    turn['status'] = {'approve': 'approved', 'deny': 'denied', 'edit': 'edited'}[body['decision']]
    if body['decision'] == 'edit':
      turn['digest'] += ', edited'
    if body['decision'] != 'approve':
      turn['learned'] = self._learn(number)
    return {'turn': turn, 'learned': turn['learned']}

  def _learn(self, number: int) -> Any:
    self.lessons += 1
    before = self.version
    waits = self.settings['min_sdpo_examples'] > self.lessons
    if not waits and self.guard is None:
      self._commit('feedback', before, {'session': {'id': 'ses-1', 'turns': [number]}})
    return {
      'version_before': before,
      'version_after': self.version,
      'accepted': not waits and self.guard is None,
      'reason': self.guard,
      'turns': [number],
      'waiting': self.lessons if waits else 0,
      'divergence_before': 0.5,
      'divergence_after': 0.25,
      'moved': [{'position': 3, 'token': 9, 'text': 'grep\x1b', 'before': -0.5, 'after': -1.75}],
      'seconds': 0.125,
    }

  def _undo(self, to: int | None) -> Any:
    to = self.versions[-1]['parent'] if to is None else to
    if to is None:
      raise Failed(400, 'invalid_request', 'Version 0 is the first one: there is nothing to undo.')
    return self._commit('undo', to, {'to': to})

  def _commit(self, reason: str, parent: int, details: Any) -> Any:
    new = {'version': self.version + 1, 'parent': parent, 'reason': reason, 'details': details, 'undone': False}
    self.versions.append(new)
    return self.versions[-1]

  def _results(self, number: int, body: Any) -> Any:
    turn = self.turns[number]
    assert sorted(each['call'] for each in body['results']) == list(range(len(turn['calls'])))
    turn['results'] = body['results']
    return {'turn': turn, 'learned': None}

  def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
    server = self

    class Handler(RequestHandler):
      def do_GET(self):
        self._reply('GET', None)

      def do_POST(self):
        self._reply('POST', json.loads(self.rfile.read(int(self.headers['Content-Length']))))

      def _reply(self, method: str, body: Any) -> None:
        kind = 'application/json'
        try:
          action, answer = server.answer(method, self.path, body, self.headers['X-Session-Token'])
          status = 200
        except Failed as error:
          action, answer, status = 'failed', {'error': {'code': error.code, 'message': str(error)}}, error.status
        if action in server.lose:
          server.lose.discard(action)
          self.close_connection = True
          return
        if isinstance(body, dict) and body.get('stream') and status == 200:
          kind, content = 'text/event-stream', _events(answer['turn'])
        else:
          content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
          self.send_response(status)
          self.send_header('Content-Type', kind)
          self.send_header('Content-Length', str(len(content)))
          self.end_headers()
          self.wfile.write(content)

    return Handler


def _digest(turn: Any) -> str:
  return f'of {turn["n"]}: {turn["text"]}'


def _number(path: str) -> int:
  return int(path.split('/')[-2])


def _events(turn: Any) -> bytes:
  half = len(turn['text']) // 2
  pieces: Sequence[tuple[str, Any]] = [
    ('draft', {'delta': turn['text'][:half]}),
    ('draft', {'delta': turn['text'][half:]}),
    ('turn', {'turn': turn}),
  ]
  return ''.join(f': still here\n\nevent: {kind}\ndata: {json.dumps(data)}\n\n' for kind, data in pieces).encode()
