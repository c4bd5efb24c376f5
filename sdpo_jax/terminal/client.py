"""HTTP client of the service for the terminal program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import json
import time
from typing import Any

import httpx2

from sdpo_jax.errors import UserError, first_line, printable

_ROOT = '/v1/continual/adapters'
_CONNECT_S, _ANSWER_S = 10.0, 600.0  # Feedback may wait for that of other sessions.
_LOOK_S = 0.2  # Seconds between polls for readiness.


class Refused(Exception):
  """The service refused a request; the message says why."""

  def __init__(self, status: int, code: str, message: str):
    super().__init__(message)
    self.status, self.code = status, code


class AnswerLost(Exception):
  """No answer arrived: it is unknown whether the service did what was asked."""


class ServiceClient:
  """A connection to a service, with an API key."""

  def __init__(self, url: str, key: str | None = None, *, local: bool = False):
    """Make the client without connecting.

    Args:
      url: address of the service, such as http://127.0.0.1:8420.
      key: the API key; None: the service needs none.
      local: whether to connect directly, ignoring proxies in the environment.

    Raises:
      UserError: the address is invalid.
    """
    try:
      address = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
      raise UserError(
        f'--url={printable(url)} is no address ({first_line(error)}): http://127.0.0.1:8420 is one.'
      ) from error
    if address.scheme not in ('http', 'https') or not address.host:
      raise UserError(f'--url={printable(url)} is no address of a service: http://127.0.0.1:8420 is one.')
    self.url = url.rstrip('/')
    headers = {} if key is None else {'Authorization': f'Bearer {key}'}
    timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
    # Without TLS, skip loading certificates, which takes longer than everything else here.
    verify = address.scheme == 'https'
    self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=not local, verify=verify)

  def close(self) -> None:
    self._http.close()

  def wait(self, stage: Callable[[str], None], alive: Callable[[], None] = lambda: None) -> None:
    """Wait until the service is ready.

    Args:
      stage: called with the service's state, whenever it changes, until it is ready.
      alive: raises an error if the service has ended.

    Raises:
      AnswerLost: there is no service.
      UserError: the service has failed or is stopping.
    """
    said = None
    while True:
      alive()
      answer = self._sent('GET', '/readyz')
      try:
        state = answer.json()
      except ValueError:
        state = None
      if not isinstance(state, dict) or answer.status_code not in (200, 503):
        raise UserError(f'{self.url} is no service of launch.serve: name another one with --url.')
      if answer.status_code == 200:
        return
      if state.get('status') not in ('starting', None):
        raise UserError(f'The service at {self.url} does not take requests: {printable(json.dumps(state), 300)}.')
      if state.get('stage') != said:
        said = state.get('stage')
        stage(str(said))
      time.sleep(_LOOK_S)

  def adapter(self, name: str) -> dict[str, Any]:
    """Return the adapter with this name or id; creates one if no adapter has the name."""
    found = self.get(_ROOT)['adapters']
    for adapter in found:
      if name in (adapter['name'], adapter['id']):
        return adapter
    return self.post(_ROOT, {'name': name})

  def adapter_now(self, adapter: str) -> dict[str, Any]:
    """Return the current state of an adapter."""
    return self.get(f'{_ROOT}/{adapter}')

  def versions(self, adapter: str) -> list[dict[str, Any]]:
    """Return the stored versions, oldest first."""
    return self.get(f'{_ROOT}/{adapter}/versions')['versions']

  def difference(self, adapter: str, before: int, after: int) -> dict[str, Any]:
    """Return the difference between two versions."""
    return self.get(f'{_ROOT}/{adapter}/versions/{after}/diff', against=before)

  def undo(self, adapter: str, to: int) -> dict[str, Any]:
    """Create a new version equal to an older one and return it."""
    return self.post(f'{_ROOT}/{adapter}/undo', {'to': to})

  def export(self, adapter: str) -> bytes:
    """Return the newest version in PEFT's format, as a zip file."""
    return _checked(self._sent('GET', f'{_ROOT}/{adapter}/export')).content

  def open_session(self, adapter: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Open a session; return it and its token."""
    answer = self.post(f'{_ROOT}/{adapter}/sessions', settings)
    return answer['session'], answer['token']

  def get(self, path: str, **query: Any) -> Any:
    """Return the decoded answer of a path; raises Refused if the service refuses, AnswerLost if it does not answer."""
    return _json(self._sent('GET', path, params=query))

  def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
    """Send a body to a path and return the decoded answer; raises as `get`."""
    return _json(self._sent('POST', path, json=body, headers=headers))

  @contextlib.contextmanager
  def stream(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[Iterator[tuple[str, Any]]]:
    """Send a body to a path and yield the events of the answer as they arrive; raises as `get`."""
    with self._answers(), self._http.stream('POST', path, json=body | {'stream': True}, headers=headers) as answer:
      if answer.status_code != 200:
        answer.read()
        _checked(answer)
      yield events(answer.iter_lines())

  def _sent(self, method: str, path: str, **more: Any) -> httpx2.Response:
    with self._answers():
      return self._http.request(method, path, **more)

  @contextlib.contextmanager
  def _answers(self) -> Iterator[None]:
    """Convert network errors to `AnswerLost`."""
    try:
      yield
    except httpx2.HTTPError as error:
      raise AnswerLost(
        f'The service at {self.url} does not answer ({type(error).__name__}: {first_line(error)}).'
      ) from error


class SessionClient:
  """Client of one session; holds the token that permits changes."""

  def __init__(self, client: ServiceClient, adapter: str, session: str, token: str):
    self.client, self.adapter, self.id = client, adapter, session
    self._path = f'{_ROOT}/{adapter}/sessions/{session}'
    self._headers = {'X-Session-Token': token}

  def state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the session and its turns."""
    answer = self.client.get(self._path)
    return answer['session'], answer['turns']

  def propose(
    self, messages: Sequence[Mapping[str, str]], seed: int | None, write: Callable[[str], None]
  ) -> dict[str, Any]:
    """Ask the model for a turn and return it; calls `write` with each piece of the answer as it arrives."""
    return self._streamed(f'{self._path}/turns', {'messages': list(messages), **_seeded(seed)}, write)

  def retry(self, number: int, seed: int | None, write: Callable[[str], None]) -> dict[str, Any]:
    """Ask the newest version for another answer to a turn's messages."""
    return self._streamed(f'{self._path}/turns/{number}/retry', _seeded(seed), write)

  def decide(self, number: int, decision: Mapping[str, Any]) -> dict[str, Any]:
    """Send a decision; return 'turn' and 'learned'. Sending it twice teaches it once."""
    return self._post(f'turns/{number}/decision', decision)

  def results(self, number: int, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Send the results of a turn's calls; returns the same as `decide`."""
    return self._post(f'turns/{number}/results', {'results': list(results)})

  def flush(self) -> dict[str, Any] | None:
    """Train on all waiting feedback and return what was learned; None if none was waiting."""
    return self._post('flush', {})['learned']

  def _post(self, path: str, body: Mapping[str, Any]) -> Any:
    return self.client.post(f'{self._path}/{path}', body, self._headers)

  def _streamed(self, path: str, body: dict[str, Any], write: Callable[[str], None]) -> dict[str, Any]:
    turn = None
    with self.client.stream(path, body, self._headers) as arriving:
      for kind, data in arriving:
        if kind == 'draft':
          write(data['delta'])
        elif kind == 'turn':
          turn = data['turn'] if 'turn' in data else data
        elif kind == 'error':
          raise _refusal(500, data)
    if turn is None:
      raise AnswerLost(f'The answer of the service at {self.client.url} ended before it was whole.')
    return turn


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
  """Yield kind and data of server-sent events, without comments.

  Raises:
    AnswerLost: the data are not valid JSON.
  """
  kind, data = 'message', []
  for line in lines:
    if not line:
      if data:
        try:
          yield kind, json.loads('\n'.join(data))
        except ValueError as error:
          raise AnswerLost('The service has sent an event that is not JSON.') from error
      kind, data = 'message', []
    elif line.startswith('event:'):
      kind = line.removeprefix('event:').strip()
    elif line.startswith('data:'):
      data.append(line.removeprefix('data:').removeprefix(' '))


def _seeded(seed: int | None) -> dict[str, int]:
  return {} if seed is None else {'seed': seed}


def _json(answer: httpx2.Response) -> Any:
  try:
    return _checked(answer).json()
  except ValueError as error:
    raise AnswerLost(f'{answer.url} has answered with something else than JSON.') from error


def _checked(answer: httpx2.Response) -> httpx2.Response:
  """Return an answer; raises Refused if it is an error."""
  if answer.is_success:
    return answer
  try:
    body = answer.json()
  except ValueError:
    body = None
  raise _refusal(answer.status_code, body)


def _refusal(status: int, body: Any) -> Refused:
  said = body.get('error') if isinstance(body, dict) else None
  if not isinstance(said, dict):
    return Refused(status, 'unknown', f'The service answers with status {status}.')
  return Refused(status, str(said.get('code')), str(said.get('message')))
