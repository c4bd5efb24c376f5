"""The HTTP client with which the terminal program talks to a service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import json
import time
from typing import Any

import httpx2

from sdpo_jax.errors import UserError, first_line, printable
from sdpo_jax.files import json_object

_ROOT = '/v1/continual/adapters'
_CONNECT_S, _ANSWER_S = 10.0, 600.0  # Timeouts in seconds; feedback may wait for that of other sessions.
_LOOK_S = 0.2  # Seconds between polls for readiness.


class Refused(Exception):
  """The service has refused a request; the message is the reason that it gave."""

  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status = status


class AnswerLost(Exception):
  """No response has arrived, so it is unknown whether the service has carried out the request."""


class ServiceClient:
  """A client of a service, for all its adapters."""

  def __init__(self, url: str, key: str | None = None, *, local: bool = False, lost: Callable[[], None] = lambda: None):
    """Make the client without connecting.

    Args:
      url: the address of the service, such as http://127.0.0.1:8420.
      key: the API key; None: the service needs none.
      local: whether to connect directly, ignoring proxies in the environment.
      lost: called when a response has not arrived; raises an error if none ever will.

    Raises:
      UserError: the address is invalid.
    """
    try:
      address = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
      raise UserError(
        f'--url={printable(url)} is not a URL ({first_line(error)}): write it like http://127.0.0.1:8420.'
      ) from error
    if address.scheme not in ('http', 'https') or not address.host:
      raise UserError(f'--url={printable(url)} is not the URL of a service: write it like http://127.0.0.1:8420.')
    self.url, self._lost = url.rstrip('/'), lost
    headers = {} if key is None else {'Authorization': f'Bearer {key}'}
    timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
    # Loading certificates is slow, and only needed for TLS.
    verify = address.scheme == 'https'
    self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=not local, verify=verify)

  def close(self) -> None:
    """Close the connections."""
    self._http.close()

  def wait(self, stage: Callable[[str], None], alive: Callable[[], None] = lambda: None) -> None:
    """Wait until the service is ready.

    Args:
      stage: called with the stage of the start whenever it changes.
      alive: raises an error if the service has ended.

    Raises:
      AnswerLost: there is no service at the address.
      UserError: the service has failed or is stopping, or the address belongs to another program.
    """
    said = None
    while True:
      alive()
      answer = self._sent('GET', '/readyz')
      state = json_object(answer.content)
      if state is None or answer.status_code not in (200, 503):
        raise UserError(f'{self.url} is not a service of launch.serve: name another address with --url.')
      if answer.status_code == 200:
        return
      if state.get('status') not in ('starting', None):
        raise UserError(f'The service at {self.url} accepts no requests: {printable(json.dumps(state), 300)}.')
      if state.get('stage') != said:
        said = state.get('stage')
        stage(str(said))
      time.sleep(_LOOK_S)

  def adapter(self, name: str) -> dict[str, Any]:
    """Return the adapter with this name or id; if there is none, create one with the name."""
    for adapter in (each for page in self.pages(_ROOT, 'adapters') for each in page['adapters']):
      if name in (adapter['name'], adapter['id']):
        return adapter
    return self.post(_ROOT, {'name': name}, 'id')

  def adapter_now(self, adapter: str) -> dict[str, Any]:
    """Return the current state of an adapter."""
    return self.get(f'{_ROOT}/{adapter}', 'name', 'version')

  def versions(self, adapter: str) -> list[dict[str, Any]]:
    """Return the stored versions of an adapter, the oldest first."""
    return [each for page in self.pages(f'{_ROOT}/{adapter}/versions', 'versions') for each in page['versions']]

  def pages(self, path: str, *fields: str) -> Iterator[dict[str, Any]]:
    """Yield the pages of a list, raising as `get`."""
    yield (page := self.get(path, *fields))
    while page.get('next') is not None:  # Services of earlier versions have no pages.
      yield (page := self.get(path, *fields, after=page['next']))

  def difference(self, adapter: str, before: int, after: int) -> dict[str, Any]:
    """Return how far the matrices of two versions are apart, in Frobenius norms."""
    return self.get(f'{_ROOT}/{adapter}/versions/{after}/diff', 'total', 'largest', against=before)

  def undo(self, adapter: str, to: int | None) -> dict[str, Any]:
    """Make a new version that equals an older one (None: the one before the newest not undone), and return it."""
    return self.post(f'{_ROOT}/{adapter}/undo', {'to': to}, 'version', 'details')

  def export(self, adapter: str) -> bytes:
    """Return the newest version in PEFT's format, as the bytes of a zip file."""
    return _checked(self._sent('GET', f'{_ROOT}/{adapter}/export')).content

  def open_session(self, adapter: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Open a session, and return it with its token."""
    answer = self.post(f'{_ROOT}/{adapter}/sessions', settings, 'session', 'token')
    return answer['session'], answer['token']

  def get(self, path: str, *fields: str, **query: Any) -> Any:
    """Return the JSON object at a path.

    Raises:
      Refused: the service refuses the request.
      AnswerLost: it does not respond, or without one of these fields.
    """
    return _json(self._sent('GET', path, params=query), fields)

  def post(self, path: str, body: Any, *fields: str, headers: Mapping[str, str] | None = None) -> Any:
    """Send a JSON body to a path, and return the JSON object of the response; raises as `get`."""
    return _json(self._sent('POST', path, json=body, headers=headers), fields)

  @contextlib.contextmanager
  def stream(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[httpx2.EventSource]:
    """Send a JSON body to a path, and yield the events of the response, to be iterated over; raises as `get`."""
    sent = self._sent('POST', path, stream=True, json=body | {'stream': True}, headers=headers)
    with self._answers(), contextlib.closing(sent) as answer:
      if answer.status_code != 200:
        answer.read()
        _checked(answer)
      yield httpx2.EventSource(answer, max_event_size=None)  # An event can be as long as an answer.

  def _sent(self, method: str, path: str, *, stream: bool = False, **more: Any) -> httpx2.Response:
    try:
      request = self._http.build_request(method, path, **more)
    except ValueError as error:  # NaN or half of a character.
      raise UserError(
        f'A request cannot be written as JSON ({first_line(error)}): correct --adapter, --system or --settings.'
      ) from error
    with self._answers():
      return self._http.send(request, stream=stream)

  @contextlib.contextmanager
  def _answers(self) -> Iterator[None]:
    """Convert network errors to `AnswerLost`."""
    try:
      yield
    except httpx2.HTTPError as error:
      self._lost()
      raise AnswerLost(
        f'The service at {self.url} does not answer ({type(error).__name__}: {first_line(error)}).'
      ) from error


class SessionClient:
  """A client of one session, with the token that allows changes."""

  def __init__(self, client: ServiceClient, adapter: str, session: str, token: str):
    self.client, self.adapter, self.id = client, adapter, session
    self._path = f'{_ROOT}/{adapter}/sessions/{session}'
    self._headers = {'X-Session-Token': token}

  def state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the session and its turns."""
    pages = list(self.client.pages(self._path, 'session', 'turns'))
    return pages[-1]['session'], [turn for page in pages for turn in page['turns']]

  def propose(
    self, messages: Sequence[Mapping[str, str]], seed: int | None, write: Callable[[str], None]
  ) -> dict[str, Any]:
    """Ask the model for the next turn, and return it; `write` gets each piece of its text as it arrives."""
    return self._streamed(f'{self._path}/turns', {'messages': list(messages), **_seeded(seed)}, write)

  def retry(self, number: int, seed: int | None, write: Callable[[str], None]) -> dict[str, Any]:
    """Ask the newest version for an alternative to a turn, and return it; `write` as in `propose`."""
    return self._streamed(f'{self._path}/turns/{number}/retry', _seeded(seed), write)

  def decide(self, number: int, decision: Mapping[str, Any]) -> dict[str, Any]:
    """Send a decision, and return 'turn' and 'learned'; it can be sent again, and is learned only once."""
    return self._post(f'turns/{number}/decision', decision, 'turn', 'learned')

  def results(self, turn: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Send the results of all calls of a turn, and return the same as `decide`."""
    body = {'results': list(results), **digest_of(turn)}
    return self._post(f'turns/{turn["n"]}/results', body, 'turn', 'learned')

  def flush(self) -> dict[str, Any] | None:
    """Let the adapter learn from the waiting examples, and return the result; None: none was waiting."""
    return self._post('flush', {}, 'learned')['learned']

  def _post(self, path: str, body: Mapping[str, Any], *fields: str) -> Any:
    return self.client.post(f'{self._path}/{path}', body, *fields, headers=self._headers)

  def _streamed(self, path: str, body: dict[str, Any], write: Callable[[str], None]) -> dict[str, Any]:
    turn = None
    with self.client.stream(path, body, self._headers) as arriving:
      for event in arriving:
        try:
          data = event.json()
        except ValueError as error:
          raise AnswerLost('The service has sent an event without valid JSON.') from error
        if event.event == 'draft':
          write(data['delta'])
        elif event.event == 'turn':
          turn = data['turn'] if 'turn' in data else data
        elif event.event == 'error':
          raise _refusal(500, data)
    if turn is None:
      raise AnswerLost(f'The response of the service at {self.client.url} was cut off.')
    return turn


def digest_of(turn: Mapping[str, Any]) -> dict[str, str]:
  """Return the field of a request by which the service checks that it is about this turn; services had none once."""
  return {'digest': turn['digest']} if 'digest' in turn else {}


def _seeded(seed: int | None) -> dict[str, int]:
  return {} if seed is None else {'seed': seed}


def _json(answer: httpx2.Response, fields: Sequence[str]) -> dict[str, Any]:
  body = json_object(_checked(answer).content)
  if body is None or not body.keys() >= set(fields):
    what = 'is not a JSON object' if body is None else f'has not {" and ".join(fields)}'
    raise AnswerLost(f'The response from {answer.url} {what}: it is not one of launch.serve.')
  return body


def _checked(answer: httpx2.Response) -> httpx2.Response:
  """Return a response; raises Refused if it is an error."""
  if answer.is_success:
    return answer
  raise _refusal(answer.status_code, json_object(answer.content))


def _refusal(status: int, body: Any) -> Refused:
  said = body.get('error') if isinstance(body, dict) else None
  if not isinstance(said, dict):
    return Refused(status, f'The service has responded with status {status}.')
  return Refused(status, str(said.get('message')))
