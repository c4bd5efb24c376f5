"""The gate, before any handler: who may ask, from where, how much, how long; and what is answered once."""

import asyncio
import collections
import io
import json
import threading
import types
from typing import ClassVar

import pydantic
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from sdpo_jax.config import LimitsConfig, ServeConfig
from sdpo_jax.serving.allowances import Allowances
from sdpo_jax.serving.capacity import FairSemaphore
from sdpo_jax.serving.errors import Forbidden, InFlight, InvalidRequest, StorageFailed, Unprocessable
from sdpo_jax.serving.store.store import StoredResponse
from sdpo_jax.serving.web import gate
from sdpo_jax.serving.web.admission import Lifetime
from sdpo_jax.serving.web.app import make_app
from sdpo_jax.serving.web.endpoints import Operation, Reply, route
from sdpo_jax.serving.web.events import ServerSentEvent, stream
from sdpo_jax.serving.web.gate import behind_gate
from sdpo_jax.serving.web.keys import KeyFile, add
from sdpo_jax.serving.web.telemetry import Log, Metrics
from tests.serving.web.foreign_pages import FOREIGN

LOCAL = 'http://localhost'
PIECE = 2**16  # Bytes of an answer that are sent at once.


class Account:
  """What the gate asks of an account, and what the handlers below do."""

  def __init__(self, service, owner, call):
    self.service, self.owner, self.call = service, owner, call

  def check_token(self, adapter, session, token):
    if token != f'token of {owner_of(adapter)} for {session}':
      raise Forbidden('This is not the token of the session.')


class RequestStore:
  """What the gate and the metrics ask of the store."""

  stats = {'waiting_states': 0}

  def __init__(self, requests):
    self.requests = requests

  def begin(self, owner, key, digest):
    known = self.requests.get((owner, key))
    if known is None:
      self.requests[owner, key] = (digest, None)
      return types.SimpleNamespace(owner=owner, key=key, digest=digest)
    if known[0] != digest:
      raise Unprocessable('The key was used with another body.')
    if known[1] is None:
      raise InFlight('The first one is under way.')
    return known[1]

  def finish(self, request, status, response):
    self.requests[request.owner, request.key] = request.digest, StoredResponse(status, response, None, None)

  def abandon(self, request):
    self.requests.pop((request.owner, request.key))


def owner_of(adapter):
  return adapter.partition('-')[0]


class Service:
  """A service that is ready."""

  def __init__(self):
    ready = threading.Event()
    ready.set()
    self.worker = types.SimpleNamespace(ready=ready, failure=None, stats={'waiting': 2})
    self.requests, self.calls = {}, collections.Counter()
    self.store, self.endpoint = RequestStore(self.requests), None
    self.parsing = FairSemaphore(1)


@pytest.fixture(autouse=True)
def accounts(monkeypatch):
  """Let the gate make accounts that are their own sessions."""
  monkeypatch.setattr(gate, 'Account', Account)
  monkeypatch.setattr(gate, 'Sessions', lambda account: account)


def change(asked):
  """Count how often it was done."""
  asked.account.service.calls['change'] += 1
  if asked.body == b'{"fail": true}':
    raise InvalidRequest('That cannot be.')
  return Reply({'version': asked.account.service.calls['change'], 'expected': asked.expected})


def whoami(asked):
  """Whose account it is."""
  asked.call.spend('sampled', 10)
  asked.call.closing.callback(asked.call.spend, 'sampled', -3)
  return Reply({'owner': asked.account.owner})


def broken(asked):
  """Fails in an unexpected way, which quotes what it was sent."""
  raise KeyError(asked.body.decode())


def wait(asked):
  """Wait until the request ends."""
  ended = threading.Event()
  with asked.call.on_end(ended.set):
    asked.account.service.calls['waiting'] += 1
    ended.wait()
  asked.account.service.calls['ended'] += 1
  asked.call.check()
  return Reply({})


class Parsed(pydantic.BaseModel):
  """A body that says how many are parsed at once, and waits until it may end."""

  text: str

  now: ClassVar[collections.Counter] = collections.Counter()
  go_on: ClassVar[threading.Event] = threading.Event()

  @pydantic.field_validator('text')
  @classmethod
  def parse(cls, text):
    if len(text) > 10:
      cls.now['parsing'] += 1
      cls.now['most'] = max(cls.now['most'], cls.now['parsing'])
      cls.go_on.wait()
      cls.now['parsing'] -= 1
    return text


STREAMING = threading.Event()  # The endless stream has begun.


async def endless(request):
  def events():
    STREAMING.set()
    yield ServerSentEvent({'hello': 1})
    ended = threading.Event()
    with request.state.call.on_end(ended.set):
      ended.wait()
    request.state.call.check()

  return await stream(request, events())


endless.operation = Operation(endless=True)


def open_session(asked):
  """Tells a secret."""
  return Reply({'token': 'never to be logged'})


SESSIONS = '/v1/continual/adapters/{adapter}/sessions'

ROUTES = [
  route('GET', '/v1/continual/whoami', whoami),
  route('POST', '/v1/continual/change/{adapter}', change, again=lambda *known: {'again': known[1:]}, tagged=True),
  route('POST', '/v1/continual/broken', broken),
  route('POST', '/v1/broken', broken),
  route('POST', '/v1/continual/wait', wait),
  route('POST', '/v1/continual/cheap', wait, cheap=True),
  route('POST', '/v1/continual/parsed', lambda asked: Reply({}), body=Parsed),
  Route('/v1/continual/endless', endless, methods=['GET']),
  route('GET', SESSIONS, whoami, guarded=True),
  route('POST', SESSIONS, open_session, guarded=True, secret=True),
  route('POST', f'{SESSIONS}/{{session}}', change, again=lambda *known: None, guarded=True, token=True),
]


class World:
  """An application with its parts."""

  def __init__(self, keys=None, ready=True, bodies=False, routes=ROUTES, **http):
    self.service, self.settings, self.logged = Service(), ServeConfig(), io.StringIO()
    for name, value in http.items():
      section = self.settings.limits if hasattr(self.settings.limits, name) else self.settings.http
      setattr(section, name, value)
    self.service.allowances = Allowances(self.settings.limits)
    self.lifetime = Lifetime(self.service if ready else None)
    self.metrics = Metrics(self.lifetime)
    log = Log(self.logged, bodies=bodies)
    parts = {'lifetime': self.lifetime, 'settings': self.settings, 'metrics': self.metrics}
    self.app = behind_gate(routes, keys=keys, log=log, **parts)

  def client(self, **headers):
    return TestClient(self.app, base_url=LOCAL, headers=headers)

  def lines(self):
    return [json.loads(line) for line in self.logged.getvalue().splitlines()]


@pytest.fixture
def world():
  return World()


@pytest.fixture
def keyed(tmp_path):
  path = tmp_path / 'keys.jsonl'
  ada, bob = (add(path, owner, 'key')[0] for owner in ('ada', 'bob'))
  return types.SimpleNamespace(path=path, ada=ada, bob=bob, world=World(KeyFile(path)))


def code(response):
  return response.status_code, response.json()['error']['code']


# Who asks.


def test_on_this_machine_everybody_is_the_one_owner(world):
  assert world.client().get('/v1/continual/whoami').json() == {'owner': 'local'}


def test_with_keys_the_key_says_who_it_is(keyed):
  client = keyed.world.client()
  for header in ({'Authorization': f'Bearer {keyed.ada}'}, {'X-API-Key': keyed.ada}):
    assert client.get('/v1/continual/whoami', headers=header).json() == {'owner': 'ada'}
  assert client.get('/v1/continual/whoami', headers={'X-API-Key': keyed.bob}).json() == {'owner': 'bob'}


@pytest.mark.parametrize('path', ['/v1/continual/whoami', '/v1/continual/nothing', '/v1/models', '/metrics', '/x'])
def test_without_a_key_that_is_known_nothing_is_said_not_even_what_there_is(keyed, path):
  answers = [
    keyed.world.client().get(path, headers=headers)
    for headers in ({}, {'X-API-Key': 'sdpo_wrong'}, {'Authorization': f'Basic {keyed.ada}'})
  ]
  assert [answer.status_code for answer in answers] == [401] * 3
  assert len({answer.content for answer in answers}) == 1 and answers[0].headers['www-authenticate'] == 'Bearer'


# From where.


@pytest.mark.parametrize('host', ['localhost', 'localhost:8420', '127.0.0.1:1', '[::1]:8420', 'LOCALHOST'])
def test_names_of_this_machine_are_answered(world, host):
  assert world.client(Host=host).get('/v1/continual/whoami').status_code == 200


@pytest.mark.parametrize(
  'host',
  [
    'evil.example',
    'localhost.evil.example',
    'evil-localhost',
    '127.0.0.1.evil.example',
    'a@localhost',
    'localhost/..',
    '',
    '[::2]',
  ],
)
def test_without_keys_no_other_name_is_answered(world, host):
  response = world.client(Host=host).get('/v1/continual/whoami')
  assert code(response) == (403, 'forbidden') and 'Host' in response.json()['error']['message']


def test_with_keys_names_are_free_unless_they_are_listed(tmp_path):
  path = tmp_path / 'keys'
  key, _ = add(path, 'ada', 'key')
  free, listed = World(KeyFile(path)), World(KeyFile(path), allowed_hosts=('api.example',))
  for asked, host, status in ((free, 'any.example', 200), (listed, 'api.example', 200), (listed, 'any.example', 403)):
    assert asked.client(Host=host, **{'X-API-Key': key}).get('/v1/continual/whoami').status_code == status


@pytest.mark.parametrize('origin', ['https://evil.example', 'null', 'http://localhost.evil.example', 'file://'])
def test_pages_of_others_may_not_ask(world, origin):
  response = world.client(Origin=origin).get('/v1/continual/whoami')
  assert code(response) == (403, 'forbidden') and 'access-control-allow-origin' not in response.headers


def test_pages_that_are_listed_may_ask():
  world = World(allowed_origins=('https://app.example',))
  client = world.client(Origin='https://app.example')
  assert client.get('/v1/continual/whoami').headers['access-control-allow-origin'] == 'https://app.example'
  before = client.options('/v1/continual/whoami', headers={'Access-Control-Request-Method': 'POST'})
  assert before.status_code == 204 and 'Idempotency-Key' in before.headers['access-control-allow-headers']
  assert world.client(Origin=LOCAL).get('/v1/continual/whoami').status_code == 200  # The service's own page.


@pytest.mark.parametrize(
  'kind', ['text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data; boundary=x', '']
)
def test_forms_of_pages_are_not_read(world, kind):
  response = world.client(**{'Content-Type': kind}).post('/v1/continual/change/a', content=b'{}')
  assert code(response) == (415, 'unsupported_media_type') and not world.service.calls


# Sessions: no page may see or say anything, with keys or without.

AT = '/v1/continual/adapters/ada-1/sessions'
TOKEN = {'X-Session-Token': 'token of ada for ses-1'}


@pytest.fixture(params=['without keys', 'with keys'])
def guarded(request, tmp_path):
  """Return a service, and the headers of its user."""
  if request.param == 'without keys':
    return World(), {}
  key, _ = add(tmp_path / 'keys.jsonl', 'ada', 'key')
  return World(KeyFile(tmp_path / 'keys.jsonl')), {'X-API-Key': key}


def asked_of_a_session(world, headers):
  """Return what comes of reading, opening and changing; nothing of the kind is asked anywhere else."""
  client = world.client(**headers)
  return [client.get(AT), client.post(AT, json={}), client.post(f'{AT}/ses-1', json={})]


@pytest.mark.parametrize('headers', FOREIGN.values(), ids=FOREIGN)
def test_no_page_of_others_reaches_a_session_even_with_key_and_token(guarded, headers):
  world, own = guarded
  answers = asked_of_a_session(world, {**own, **TOKEN, **headers})
  assert [code(answer) for answer in answers] == [(403, 'forbidden')] * 3
  assert all('serve.http.allowed_' in answer.json()['error']['message'] for answer in answers)
  assert not world.service.calls and 'never' not in ''.join(answer.text for answer in answers)


@pytest.mark.parametrize('headers', [{}, {'Origin': LOCAL}, {'Sec-Fetch-Site': 'none'}, {'Host': '127.0.0.1:8420'}])
def test_programs_and_the_services_own_page_reach_sessions(guarded, headers):
  world, own = guarded
  assert [answer.status_code for answer in asked_of_a_session(world, {**own, **TOKEN, **headers})] == [200] * 3


def test_pages_and_hosts_that_are_listed_reach_sessions():
  page = {'Origin': 'https://app.example', 'Sec-Fetch-Site': 'cross-site', 'Host': 'api.example'}
  world = World(allowed_origins=('https://app.example',), allowed_hosts=('api.example',))
  assert [answer.status_code for answer in asked_of_a_session(world, {**TOKEN, **page})] == [200] * 3
  before = world.client(**page).options(AT, headers={'Access-Control-Request-Method': 'POST'})
  assert 'X-Session-Token' in before.headers['access-control-allow-headers']
  other = world.client(Origin='https://evil.example').options(AT, headers={'Access-Control-Request-Method': 'POST'})
  assert other.status_code == 403 and not [name for name in other.headers if name.startswith('access-control')]


@pytest.mark.parametrize(
  'kind', ['text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data; boundary=x', '']
)
def test_forms_of_pages_change_no_session(guarded, kind):
  world, own = guarded
  client = world.client(**own, **TOKEN, **{'Content-Type': kind})
  for path in (AT, f'{AT}/ses-1'):
    assert code(client.post(path, content=b'{}')) == (415, 'unsupported_media_type')
  assert not world.service.calls


@pytest.mark.parametrize('token', [None, '', 'token of ada for ses-2', 'token of bob for ses-1'])
def test_a_session_is_changed_with_its_own_token_only(guarded, token):
  world, own = guarded
  client = world.client(**own, **({} if token is None else {'X-Session-Token': token}))
  first = client.post(f'{AT}/ses-1', json={}, headers={'Idempotency-Key': 'k'})
  assert code(first) == (403, 'forbidden') and not world.service.calls and not world.service.requests
  # An answer that is kept is given to nobody else either.
  done = world.client(**own, **TOKEN).post(f'{AT}/ses-1', json={}, headers={'Idempotency-Key': 'k'})
  again = client.post(f'{AT}/ses-1', json={}, headers={'Idempotency-Key': 'k'})
  assert done.status_code == 200 and code(again) == (403, 'forbidden')


def test_a_token_that_is_sent_twice_is_none():
  headers = [('X-Session-Token', 'token of ada for ses-1'), ('X-Session-Token', 'another')]
  sent = asgi(World(), 'POST', f'{AT}/ses-1', headers=headers)
  assert sent[0]['status'] == 400 and b'another' not in sent[1]['body']


def test_a_token_is_in_no_log_and_no_error_even_where_bodies_are_logged():
  world = World(bodies=True)
  asked_of_a_session(world, TOKEN)
  asked_of_a_session(world, {'X-Session-Token': 'token of ada for ses-9'})
  text = world.logged.getvalue()
  assert 'never to' not in text and 'token of ada' not in text and len(world.lines()) == 6
  assert 'local' in world.lines()[0]['answered'] and world.lines()[1]['answered'] == ''


# What is answered.


def test_what_there_is_not_and_methods_that_are_not_taken(world):
  client = world.client()
  assert code(client.get('/v1/continual/nothing')) == (404, 'not_found')
  assert code(client.delete('/v1/continual/whoami')) == (405, 'method_not_allowed')
  assert client.get('/v1/nothing').json()['error']['type'] == 'not_found_error'
  assert code(client.get('/v1/continual/whoami?verbose=1')) == (400, 'invalid_request')
  assert code(client.get('/v1/continual/whoami/')) == (404, 'not_found')


def test_what_is_unexpected_is_500_and_in_the_log_without_what_was_sent(world):
  for path in ('/v1/continual/broken', '/v1/broken'):
    response = world.client().post(path, json={'prompt': 'a secret'})
    error = response.json()['error']
    assert response.status_code == 500 and error['request_id'] == response.headers['x-request-id']
    assert 'secret' not in response.text and 'Traceback' not in response.text
  assert 'secret' not in world.logged.getvalue()
  logged = [line for line in world.lines() if line['event'] == 'error']
  assert logged[0]['error'] == 'KeyError' and 'broken' in logged[0]['at'][-1]


def test_answers_are_not_kept_by_browsers_and_have_an_id(world):
  response = world.client().get('/v1/continual/whoami')
  assert response.headers['cache-control'] == 'no-store' and response.headers['x-content-type-options'] == 'nosniff'
  assert world.lines()[-1]['request'] == response.headers['x-request-id']
  for given, kept in (('00112233445566ff', True), ('1', False), ('00112233445566ff\u00e9', False)):
    response = world.client(**{gate.MARK: given.encode('latin-1')}).get('/v1/continual/whoami')
    assert (response.headers['x-request-id'] == given) == kept == (world.lines()[-1]['request'] == given)


def test_the_log_has_neither_keys_nor_bodies_nor_queries(keyed):
  client = keyed.world.client(**{'X-API-Key': keyed.ada})
  client.post('/v1/continual/change/abc?key=in_the_query', json={'prompt': 'a secret prompt'})
  client.post(
    '/v1/continual/change/abc', json={'prompt': 'a secret prompt'}, headers={'Idempotency-Key': 'my-secret-key'}
  )
  client.get('/v1/continual/whoami', headers={'X-API-Key': 'sdpo_wrong_secret'})
  text = keyed.world.logged.getvalue()
  assert all(word not in text for word in (keyed.ada, 'secret', 'in_the_query'))
  line = keyed.world.lines()[1]
  assert line['route'] == '/v1/continual/change/{adapter}' and line['adapter'] == 'abc' and line['status'] == 200


def test_bodies_are_logged_where_they_are_asked_for():
  world = World(bodies=True)
  world.client().post('/v1/continual/change/abc', json={'prompt': 'a prompt'})
  assert 'a prompt' in world.lines()[-1]['asked'] and 'version' in world.lines()[-1]['answered']


def test_no_body_is_logged_of_what_shall_not_be_stored():
  world, json_body = World(bodies=True), {'Content-Type': 'application/json'}
  for path in ('/v1/continual/change/abc', '/v1/continual/broken'):
    for body in ('{"prompt": "a secret prompt", "store": false}', '{"store" :false, "prompt": "a secret'):
      world.client().post(path, content=body, headers=json_body)
  assert len(world.lines()) > 3 and 'secret' not in world.logged.getvalue()
  assert not any(line.get('answered') or 'message' in line for line in world.lines())
  world.client().post('/v1/continual/change/abc', json={'prompt': 'say "store": false'})
  assert 'say' in world.lines()[-1]['asked']


def test_tokens_are_counted_net_in_the_log_and_the_metrics(world):
  world.client().get('/v1/continual/whoami')
  assert world.lines()[-1]['tokens'] == {'sampled': 7}
  assert 'sdpo_tokens_total{kind="sampled"} 7.0' in world.metrics.text().decode()


# Limits.


def test_too_many_tokens_are_refused_with_the_time_to_come_again(tmp_path):
  path = tmp_path / 'keys'
  ada, bob = (add(path, owner, 'key')[0] for owner in ('ada', 'bob'))
  world = World(KeyFile(path), tokens_per_minute=60, burst_tokens=10)
  first, second = (world.client(**{'X-API-Key': ada}).get('/v1/continual/whoami') for _ in range(2))
  assert first.status_code == 200 and code(second) == (429, 'busy')
  assert int(second.headers['retry-after']) >= 1 and 0 < int(second.headers['retry-after-ms']) <= 7000
  assert world.client(**{'X-API-Key': bob}).get('/v1/continual/whoami').status_code == 200


def test_what_a_request_has_reserved_is_used_for_good_when_it_ends(world):
  world.service.allowances = Allowances(LimitsConfig(tokens_per_day=16), wall=lambda: 0.0)
  first, second = (world.client().get('/v1/continual/whoami') for _ in range(2))
  assert first.status_code == 200 and code(second) == (429, 'busy')
  assert second.headers['retry-after'] == '3600'  # The most; seven of 16 are used until midnight, and none reserved.
  world.service.allowances = Allowances(LimitsConfig(tokens_per_day=9))
  never = world.client().get('/v1/continual/whoami')
  assert never.status_code == 400 and 'serve.limits.tokens_per_day=9' in never.text


def flood(world, count, key, *, parts=(b'{',), ends=False, path='/v1/continual/change/a'):
  """Begin requests whose bodies do not end; return their tasks, and an event with which their senders leave."""
  left, tasks = asyncio.Event(), []
  for _ in range(count):
    given = [{'type': 'http.request', 'body': part, 'more_body': True} for part in parts]
    given += [{'type': 'http.request', 'body': b'', 'more_body': False}] if ends else []

    async def receive(given=given):
      if given:
        return given.pop(0)
      await left.wait()
      return {'type': 'http.disconnect'}

    headers = [(b'host', b'localhost'), (b'x-api-key', key.encode()), (b'content-type', b'application/json')]
    scope = {'type': 'http', 'method': 'POST', 'path': path, 'headers': headers, 'query_string': b''}
    scope |= {'root_path': '', 'scheme': 'http', 'server': ('127.0.0.1', 1), 'client': None}
    sent = []

    async def send(message, sent=sent):
      sent.append(message)

    tasks.append((asyncio.create_task(world.app(scope, receive, send)), sent))
  return tasks, left


def statuses(tasks):
  return [sent[0]['status'] for _, sent in tasks if sent]


def test_bodies_that_drip_take_no_place_and_cost_their_own_key_alone(tmp_path):
  """Of 30 of Ada's slow bodies half of the 16 that may arrive are waited for; Bob is answered meanwhile."""
  path = tmp_path / 'keys'
  ada, bob = (add(path, owner, 'key')[0] for owner in ('ada', 'bob'))
  world = World(KeyFile(path), max_requests=8)

  async def run():
    slow, left = flood(world, 30, ada)
    await asyncio.sleep(0)
    while len(statuses(slow)) < 22:
      await asyncio.sleep(0.001)
    assert statuses(slow) == [429] * 22 and not world.service.calls
    served, _ = flood(world, 4, bob, parts=(b'{}',), ends=True)
    await asyncio.gather(*(task for task, _ in served))
    assert statuses(served) == [200] * 4
    own, _ = flood(world, 1, ada, parts=(b'{}',), ends=True)
    await own[0][0]
    assert statuses(own) == [429] and (b'retry-after', b'1') in own[0][1][0]['headers']
    left.set()
    await asyncio.gather(*(task for task, _ in slow))
    own, _ = flood(world, 1, ada, parts=(b'{}',), ends=True)
    await own[0][0]
    assert statuses(own) == [200]

  asyncio.run(asyncio.wait_for(run(), 60))
  assert world.lifetime.under_way == 0


def test_bodies_in_memory_are_limited_and_freed(tmp_path):
  path = tmp_path / 'keys'
  ada, bob = (add(path, owner, 'key')[0] for owner in ('ada', 'bob'))
  world = World(KeyFile(path), max_bodies_mb=2900 / 2**20)

  async def run():
    slow, left = flood(world, 2, ada, parts=(b' ' * 1000,))
    while len(statuses(slow)) < 1:  # The second may not have 2,000 of 2,900 bytes.
      await asyncio.sleep(0.001)
    served, _ = flood(world, 1, bob, parts=(b' ' * 900, b'{}'), ends=True)
    await served[0][0]
    assert statuses(served) == [200] and statuses(slow) == [429]
    [said] = [sent[1]['body'] for _, sent in slow if sent]
    assert b'bytes of bodies in memory (serve.http.max_bodies_mb)' in said and b'2900' in said
    left.set()
    await asyncio.gather(*(task for task, _ in slow))
    for _ in range(3):
      again, _ = flood(world, 1, ada, parts=(b' ' * 1400, b'{}'), ends=True)
      await again[0][0]
      assert statuses(again) == [200]

  asyncio.run(asyncio.wait_for(run(), 60))


def test_a_key_has_its_share_of_places_and_another_always_finds_one(tmp_path):
  path = tmp_path / 'keys'
  ada, bob = (add(path, owner, 'key')[0] for owner in ('ada', 'bob'))
  for settings, most in (({'max_requests': 8}, 4), ({'max_requests': 8, 'max_requests_per_key': 2}, 2)):
    world = World(KeyFile(path), **settings)

    async def run(world=world, most=most):
      running, left = flood(world, 8, ada, parts=(b'{}',), ends=True, path='/v1/continual/wait')
      while len(statuses(running)) < 8 - most or world.service.calls['waiting'] < most:
        await asyncio.sleep(0.001)
      assert statuses(running) == [429] * (8 - most)
      other, _ = flood(world, 1, bob, parts=(b'{}',), ends=True)
      await other[0][0]
      assert statuses(other) == [200]
      left.set()
      await asyncio.gather(*(task for task, _ in running))
      again, _ = flood(world, 1, ada, parts=(b'{}',), ends=True)
      await again[0][0]
      assert statuses(again) == [200]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_only_sender_of_a_service_without_keys_has_all_places():
  world = World(max_requests=8, max_requests_per_key=2)

  async def run():
    running, left = flood(world, 9, '', parts=(b'{}',), ends=True, path='/v1/continual/wait')
    while len(statuses(running)) < 1 or world.service.calls['waiting'] < 8:
      await asyncio.sleep(0.001)
    assert statuses(running) == [429]
    left.set()
    await asyncio.gather(*(task for task, _ in running))

  asyncio.run(asyncio.wait_for(run(), 60))


def test_what_is_cheap_has_places_of_its_own_that_senders_share(tmp_path):
  path = tmp_path / 'keys'
  ada, bob = (add(path, owner, 'key')[0] for owner in ('ada', 'bob'))
  world = World(KeyFile(path), max_requests=32, max_requests_per_key=2)

  async def run():
    work, gone = flood(world, 3, ada, parts=(b'{}',), ends=True, path='/v1/continual/wait')
    while len(statuses(work)) < 1 or world.service.calls['waiting'] < 2:
      await asyncio.sleep(0.001)
    running, left = flood(world, 20, ada, parts=(b'{}',), ends=True, path='/v1/continual/cheap')
    other, away = flood(world, 1, bob, parts=(b'{}',), ends=True, path='/v1/continual/cheap')
    while len(statuses(running)) < 4 or world.service.calls['waiting'] < 2 + 16 + 1:
      await asyncio.sleep(0.001)
    assert b'usage, metrics and pages' in next(sent for _, sent in running if sent)[1]['body']
    for event in (left, gone, away):
      event.set()
    await asyncio.gather(*(task for task, _ in (*running, *work, *other)))

  asyncio.run(asyncio.wait_for(run(), 60))


def test_pages_metrics_and_usage_take_cheap_places_and_health_takes_none(monkeypatch):
  monkeypatch.setattr(gate, '_CHEAP', 0)
  client = TestClient(make_app(Service(), ServeConfig(), log=Log(io.StringIO())), base_url=LOCAL)
  for path in ('/docs', '/openapi.json', '/console', '/metrics', '/v1/usage'):
    assert client.get(path, follow_redirects=False).status_code == 429, path
  assert client.get('/healthz').status_code == 200


def test_large_bodies_are_parsed_one_at_a_time_and_small_ones_beside_them(world):
  Parsed.now.clear()
  Parsed.go_on.clear()
  large = (b'{"text": "' + b'x' * 2**16 + b'"}',)

  async def run():
    running, _ = flood(world, 3, '', parts=large, ends=True, path='/v1/continual/parsed')
    while not Parsed.now['parsing'] or not world.service.parsing._waiting:  # noqa: SLF001 (Nothing else tells.)
      await asyncio.sleep(0.001)
    small, _ = flood(world, 1, '', parts=(b'{"text": "x"}',), ends=True, path='/v1/continual/parsed')
    await small[0][0]
    assert statuses(small) == [200] and statuses(running) == []
    Parsed.go_on.set()
    await asyncio.gather(*(task for task, _ in running))
    assert statuses(running) == [200] * 3 and Parsed.now['most'] == 1

  asyncio.run(asyncio.wait_for(run(), 60))


def test_a_method_that_a_client_made_up_is_no_label(world):
  world.client().request('BREW', '/v1/continual/whoami')
  assert 'method="other",route="(none)"' in world.metrics.text().decode()
  assert 'BREW' not in world.metrics.text().decode()


def test_metrics_have_the_usage_of_the_own_key_and_of_all_for_the_operator(tmp_path):
  path = tmp_path / 'keys'
  (ada, one), (bob, two) = (add(path, owner, 'key') for owner in ('ada', 'bob'))
  for operator, seen in ((None, {one.id}), ('ada', {one.id, two.id}), ('bob', {one.id})):
    settings = ServeConfig()
    settings.http.operator = operator
    service = Service()
    service.allowances = Allowances(settings.limits)
    app = make_app(service, settings, KeyFile(path), log=Log(io.StringIO()))
    for key in (one, two):
      service.allowances.spend(key.id, 'sampled', 7)
    text = TestClient(app, base_url=LOCAL, headers={'X-API-Key': ada}).get('/metrics').text
    assert {key.id for key in (one, two) if f'sdpo_key_used_today{{key="{key.id}",kind="sampled"}} 7.0' in text} == seen
    assert ada not in text and bob not in text


def test_a_body_that_is_too_large_is_not_read():
  world = World(max_body_mb=0.001)
  response = world.client().post(
    '/v1/continual/change/a', content=b'x' * 5000, headers={'Content-Type': 'application/json'}
  )
  assert code(response) == (413, 'too_large') and not world.service.calls


def asgi(world, method, path, *, headers=(), body=b'{}', leave=None, then=None):
  """Run one request of a sender that leaves when `leave` is set; return the messages that it was sent.

  `then` is called when it was answered, and what goes on in the background afterwards is waited for.
  """

  async def run():
    sent, given, answered = [], False, asyncio.Event()

    async def receive():
      nonlocal given
      if not given:
        given = True
        return {'type': 'http.request', 'body': body, 'more_body': False}
      left = leave or answered
      while not left.is_set():
        await asyncio.sleep(0.001)
      return {'type': 'http.disconnect'}

    async def send(message):
      sent.append(message)
      if message['type'] == 'http.response.body' and not message.get('more_body', False):
        answered.set()

    known = [(b'host', b'localhost'), (b'content-type', b'application/json')]
    extra = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {
      'type': 'http',
      'asgi': {'version': '3.0', 'spec_version': '2.3'},
      'http_version': '1.1',
      'method': method,
      'path': path,
      'raw_path': path.encode(),
      'root_path': '',
      'query_string': b'',
      'scheme': 'http',
      'headers': known + extra,
      'client': ('127.0.0.1', 1),
      'server': ('127.0.0.1', 2),
    }
    await world.app(scope, receive, send)
    if then is not None:
      then()
      await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
    return sent

  return asyncio.run(run())


def test_a_request_ends_at_its_deadline(world):
  sent = asgi(world, 'POST', '/v1/continual/wait', headers=[('X-Deadline-Ms', '20')])
  assert sent[0]['status'] == 504 and world.service.calls['ended'] == 1
  assert world.client(**{'X-Deadline-Ms': 'soon'}).get('/v1/continual/whoami').status_code == 400


def test_a_handler_that_does_not_end_is_left_alone_and_keeps_its_place(monkeypatch):
  """The thread cannot be stopped: its sender is answered, and its place stays taken until it is done."""
  monkeypatch.setattr(gate, 'GRACE', 0.01)
  go_on = threading.Event()

  def stuck(asked):
    go_on.wait()
    return Reply({})

  with World(routes=[route('POST', '/v1/continual/stuck', stuck)], max_requests=1).client() as client:
    late = client.post('/v1/continual/stuck', json={}, headers={'X-Deadline-Ms': '10'})
    assert code(late) == (504, 'deadline')
    assert code(client.post('/v1/continual/stuck', json={})) == (429, 'busy')
    go_on.set()
    while (again := client.post('/v1/continual/stuck', json={})).status_code == 429:
      pass
    assert again.status_code == 200


def test_what_a_late_handler_says_is_kept_whole_for_whoever_asks_again(monkeypatch):
  """Its sender was told that the time was over, and has left: the answer that is kept is not what was sent to
  nobody.
  """
  monkeypatch.setattr(gate, 'GRACE', 0.01)
  go_on = threading.Event()

  def late(asked):
    go_on.wait()
    return Reply({'version': 3})

  world = World(routes=[route('POST', '/v1/continual/late', late, again=lambda *known: None)])
  headers = [('Idempotency-Key', 'k'), ('X-Deadline-Ms', '10')]
  sent = asgi(world, 'POST', '/v1/continual/late', headers=headers, then=go_on.set)
  assert [message.get('status') for message in sent] == [504, None]
  again = world.client(**{'Idempotency-Key': 'k'}).post('/v1/continual/late', json={})
  assert (again.status_code, again.json()) == (200, {'version': 3})


def test_an_answer_that_cannot_be_kept_is_sent(world, monkeypatch):
  def full(self, request, status, response):
    raise StorageFailed('The disk is full.')

  monkeypatch.setattr(RequestStore, 'finish', full)
  response = world.client(**{'Idempotency-Key': 'k'}).post('/v1/continual/change/a', json={})
  assert (response.status_code, response.json()['version']) == (200, 1)


def test_a_request_whose_sender_leaves_is_ended(world):
  left = threading.Event()

  def leave():
    while not world.service.calls['waiting']:
      pass
    left.set()

  threading.Thread(target=leave).start()
  asgi(world, 'POST', '/v1/continual/wait', leave=left)
  assert world.service.calls['ended'] == 1 and world.lifetime.under_way == 0
  assert world.lines()[-1]['status'] == 499


def test_more_requests_at_once_than_there_are_places_are_refused_at_once():
  world = World(max_requests=2)
  left = threading.Event()
  waiting = [
    threading.Thread(target=asgi, args=(world, 'POST', '/v1/continual/wait'), kwargs={'leave': left}) for _ in range(2)
  ]
  for thread in waiting:
    thread.start()
  while world.service.calls['waiting'] < 2:
    pass
  response = world.client().post('/v1/continual/wait', json={})
  assert code(response) == (429, 'busy') and response.headers['retry-after'] == '1'
  left.set()
  for thread in waiting:
    thread.join()
  assert world.client().get('/v1/continual/whoami').status_code == 200


# Requests that are sent again.


def test_a_request_with_a_key_is_done_once_and_answered_alike(world):
  client = world.client(**{'Idempotency-Key': 'k'})
  first, again = (client.post('/v1/continual/change/a', json={}) for _ in range(2))
  assert world.service.calls['change'] == 1 and first.content == again.content
  assert first.headers['etag'] == again.headers['etag'] == '"1"'
  assert again.headers['idempotency-replayed'] == 'true' and 'idempotency-replayed' not in first.headers
  assert code(client.post('/v1/continual/change/a', json={'a': 1})) == (422, 'unprocessable')
  assert code(client.post('/v1/continual/change/b', json={})) == (422, 'unprocessable')
  assert code(client.post('/v1/continual/change/a', json={}, headers={'If-Match': '"3"'})) == (422, 'unprocessable')


def test_a_request_that_failed_may_be_sent_again(world):
  client = world.client(**{'Idempotency-Key': 'k'})
  for _ in range(2):
    response = client.post(
      '/v1/continual/change/a', content=b'{"fail": true}', headers={'Content-Type': 'application/json'}
    )
    assert code(response) == (400, 'invalid_request')
  assert world.service.calls['change'] == 2 and not world.service.requests


def test_an_answer_that_was_lost_is_made_again_of_what_is_known(world, monkeypatch):
  world.service.requests['local', 'k'] = None
  digests = []
  lost = StoredResponse(None, None, 'a', 4)
  monkeypatch.setattr(world.service.store, 'begin', lambda owner, key, digest: digests.append(digest) or lost)
  response = world.client(**{'Idempotency-Key': 'k'}).post('/v1/continual/change/a', json={})
  assert response.json() == {'again': ['a', 4]} and response.headers['idempotency-replayed'] == 'true'
  assert not world.service.calls and len(digests[0]) == 64


@pytest.mark.parametrize('key', ['', 'k' * 256, 'ключ'.encode().decode('latin-1')])
def test_a_key_that_is_none_is_refused(world, key):
  response = world.client().post('/v1/continual/change/a', json={}, headers={b'Idempotency-Key': key.encode('latin-1')})
  assert code(response) == (400, 'invalid_request') and not world.service.calls


@pytest.mark.parametrize('value, expected', [('"7"', 7), ('*', None), (None, None)])
def test_if_match_names_a_version(world, value, expected):
  headers = {} if value is None else {'If-Match': value}
  assert world.client().post('/v1/continual/change/a', json={}, headers=headers).json()['expected'] == expected


@pytest.mark.parametrize('value', ['7', 'W/"7"', '"a"', '"-1"', '"1", "2"', '""'])
def test_if_match_that_is_no_version_is_refused(world, value):
  response = world.client().post('/v1/continual/change/a', json={}, headers={'If-Match': value})
  assert code(response) == (400, 'invalid_request') and response.json()['error']['field'] == 'If-Match'


# The beginning and the end.


def test_before_the_service_is_ready_and_when_it_ends_requests_are_refused():
  world = World(ready=False)
  assert code(world.client().get('/v1/continual/whoami')) == (503, 'not_ready')
  world.lifetime.present = world.service
  assert world.client().get('/v1/continual/whoami').status_code == 200
  world.service.worker.failure = RuntimeError('a secret')
  response = world.client().get('/v1/continual/whoami')
  assert code(response) == (503, 'not_ready') and 'RuntimeError' in response.text and 'secret' not in response.text
  world.service.worker.failure = None
  world.lifetime.drain()
  assert code(world.client().get('/v1/continual/whoami')) == (503, 'not_ready')


def test_streams_that_would_never_end_do_when_the_service_does(world):
  def drain():
    STREAMING.wait()
    world.lifetime.drain()

  STREAMING.clear()
  threading.Thread(target=drain).start()
  sent = asgi(world, 'GET', '/v1/continual/endless')
  text = b''.join(message.get('body', b'') for message in sent).decode()
  assert 'data: {"hello":1}' in text and 'event: error' in text and 'not_ready' in text


def test_a_stream_that_was_let_in_as_the_service_began_to_end_is_ended_too(world, monkeypatch):
  """The service drains after its check of the request, and before the stream is among those that are ended."""
  service = world.lifetime.service

  def checked():
    found = service()
    world.lifetime.drain()
    return found

  monkeypatch.setattr(world.lifetime, 'service', checked)
  sent = asgi(world, 'GET', '/v1/continual/endless')
  text = b''.join(message.get('body', b'') for message in sent).decode()
  assert 'event: error' in text and 'not_ready' in text


def test_a_stream_whose_reader_leaves_is_ended_and_its_place_free(world):
  left = threading.Event()

  def leave():
    while not world.lifetime.under_way:
      pass
    left.set()

  threading.Thread(target=leave).start()
  asgi(world, 'GET', '/v1/continual/endless', leave=left)
  assert world.lifetime.under_way == 0
  # As many again as there are places for streams: none is still taken.
  for _ in range(world.settings.http.max_requests // 4 + 1):
    done = threading.Event()
    done.set()
    assert asgi(world, 'GET', '/v1/continual/endless', leave=done)[0]['status'] == 200


async def sent_by(world, path, send):
  """Let an answer be sent by a function, to a client that stays."""
  left = [{'type': 'http.request', 'body': b'', 'more_body': False}]

  async def receive():
    if not left:
      await asyncio.Event().wait()
    return left.pop()

  scope = {'type': 'http', 'method': 'GET', 'path': path, 'headers': [(b'host', b'localhost')]}
  scope |= {'query_string': b'', 'root_path': '', 'scheme': 'http', 'server': ('127.0.0.1', 1), 'client': None}
  await world.app(scope, receive, send)


def test_an_answer_that_nobody_takes_is_given_up():
  world = World(read_timeout_s=0.01)

  async def send(message):
    await asyncio.Event().wait()

  asyncio.run(sent_by(world, '/v1/continual/whoami', send))
  assert world.lifetime.under_way == 0
  assert [line['event'] for line in world.lines()] == ['request']  # No error: the service did not fail.


def test_a_handler_is_cancelled_though_its_client_reads_on_at_that_moment():
  """Or what another replica streams would be passed on for ever, to nobody."""

  async def run():
    reads, sent = asyncio.Event(), []

    async def send(message):
      sent.append(message)
      await reads.wait()

    answer = gate.GateResponse(send, [], 60, 0)
    handler = asyncio.create_task(answer({'type': 'http.response.start', 'status': 200, 'headers': []}))
    while not sent:
      await asyncio.sleep(0)
    reads.set()
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
      await handler

  asyncio.run(run())


@pytest.mark.parametrize('size', [0, 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE - 1])
@pytest.mark.parametrize('more', [False, True])
def test_a_part_of_an_answer_is_sent_in_pieces_between_which_the_client_is_waited_for(size, more):
  sent, body = [], bytes(n % 251 for n in range(size))

  async def send(message):
    sent.append(message)

  async def run():
    answer = gate.GateResponse(send, [], 60, 0)
    await answer({'type': 'http.response.start', 'status': 200, 'headers': []})
    await answer({'type': 'http.response.body', 'body': body, 'more_body': more})
    assert (answer.size, answer.complete) == (size, not more)

  asyncio.run(run())
  assert sent[0] == {'type': 'http.response.start', 'status': 200, 'headers': []}
  pieces = [message['body'] for message in sent[1:]]
  assert b''.join(pieces) == body and [len(each) for each in pieces[:-1]] == [PIECE] * (len(pieces) - 1)
  assert len(pieces) == max(1, -(-size // PIECE)) and all(type(each) is bytes for each in pieces)
  assert [message['more_body'] for message in sent[1:]] == [True] * (len(pieces) - 1) + [more]


def test_the_time_limit_of_a_request_is_not_for_the_client_that_reads_the_answer(monkeypatch):
  """The limit is over when the client has the first piece, and so is the time that a handler has to end."""
  size, sent = 3 * PIECE, []
  world = World(routes=[route('GET', '/v1/continual/large', lambda asked: Reply({'text': '-' * size}))])

  async def run():
    reading = asyncio.Event()

    async def over(tasks, timeout):
      await reading.wait()
      return set(), tasks

    monkeypatch.setattr(asyncio, 'wait', over)

    async def send(message):
      if message.get('body'):
        reading.set()
        for _ in range(20):
          await asyncio.sleep(0)
      sent.append(message.get('body', b''))

    await sent_by(world, '/v1/continual/large', send)
    return b''.join(sent)

  assert asyncio.run(run()).count(b'-') == size
  assert [line['status'] for line in world.lines()] == [200]


def test_a_service_is_idle_while_nobody_asks():
  now = [0.0]
  lifetime = Lifetime(Service(), clock=lambda: now[0])
  now[0] = 5.0
  assert lifetime.idle_for() == 5.0
  lifetime.under_way = 1
  assert lifetime.idle_for() == 0.0
  lifetime.under_way = 0
  lifetime.touch()
  assert lifetime.idle_for() == 0.0
