"""The native routes over the whole service: what is asked and answered, and that nobody reaches what another one
has.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import sqlite3
import threading
import types
import zipfile

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from sdpo_jax.config import TeacherEndpointConfig
from sdpo_jax.errors import UserError
from sdpo_jax.serving import feedback
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Deadline, NotHolder, NotReady, StorageFailed
from sdpo_jax.serving.records import engine_name
from sdpo_jax.serving.sidecar import FAILURES, Sidecar
from sdpo_jax.serving.store import blobs
from sdpo_jax.serving.store.versions import MOMENTS
from sdpo_jax.serving.web import endpoints, gate, native, packed
from sdpo_jax.serving.web.app import make_app
from sdpo_jax.serving.web.keys import KeyFile, add
from sdpo_jax.serving.web.telemetry import Log
from sdpo_jax.teacher import asking
from tests.local_server import Answer, Server, dead_address
from tests.serving import service_world
from tests.serving.served_process import until

ROOT = '/v1/continual'
MESSAGES = [{'role': 'user', 'content': 'Hi'}]


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  """Yield a service with the keys of two owners, each of whom has an adapter and a sample of it."""
  folder = tmp_path_factory.mktemp('native')
  config = service_world.make_config(service_world.model_folder(folder / 'model'), folder / 'root')
  keys = folder / 'keys.jsonl'
  secrets = {owner: add(keys, owner, 'test')[0] for owner in ('ada', 'bob')}
  with service_world.running(config) as service, contextlib.ExitStack() as stack:
    logged = io.StringIO()
    app = make_app(service, config.serve, KeyFile(keys), log=Log(logged))
    clients = {
      owner: stack.enter_context(TestClient(app, base_url='http://localhost', headers={'X-API-Key': secret}))
      for owner, secret in secrets.items()
    }
    own, samples, sessions = {}, {}, {}
    for owner, client in clients.items():
      made = client.post(f'{ROOT}/adapters', json={'name': f'first-of-{owner}'})
      assert made.status_code == 201, made.text
      own[owner] = made.json()['id']
      samples[owner] = draw(client, own[owner])['completions'][0]['sample_id']
      opened = client.post(f'{ROOT}/adapters/{own[owner]}/sessions', json={})
      assert opened.status_code == 201, opened.text
      sessions[owner] = opened.json()
    yield types.SimpleNamespace(
      folder=folder,
      app=app,
      service=service,
      own=own,
      samples=samples,
      sessions=sessions,
      logged=logged,
      secrets=secrets,
      ada=clients['ada'],
      bob=clients['bob'],
    )


def draw(client, model, **changes):
  """Completions of a greeting."""
  body = {'model': model, 'messages': MESSAGES, 'max_tokens': 6, 'seed': 1, **changes}
  response = client.post(f'{ROOT}/completions', json=body)
  assert response.status_code == 200, response.text
  return response.json()


def create(client, name):
  """Return the address of a new adapter."""
  response = client.post(f'{ROOT}/adapters', json={'name': name})
  assert response.status_code == 201, response.text
  return response.headers['location']


def code(response):
  return response.status_code, response.json()['error']['code']


def walked(client, path, name, limit):
  """Return all entries of a list, page by page, after checking what each page says about itself."""
  found, more, after = [], True, {}
  while more:
    page = client.get(path, params={'limit': limit, **after}).json()
    key = {'adapters': 'id', 'versions': 'version', 'sessions': 'id'}[name]
    assert [page['first_id'], page['last_id']] == [page[name][0][key], page[name][-1][key]]
    assert len(page[name]) == limit if page['has_more'] else 0 < len(page[name]) <= limit
    found += page[name]
    assert page['has_more'] == (page['next'] is not None)
    more, after = page['has_more'], {'after': page['next']}
  return found


def test_lists_have_pages(world):
  own = f'{ROOT}/adapters/{world.own["ada"]}'
  made = [create(world.ada, f'paged-{number}') for number in range(3)]
  for _ in range(2):
    assert world.ada.post(f'{own}/sessions', json={}).status_code == 201
    assert world.ada.post(f'{own}/undo', json={'to': 0}).status_code == 200
  for path, name in (
    (f'{ROOT}/adapters', 'adapters'),
    (f'{own}/versions', 'versions'),
    (f'{own}/sessions', 'sessions'),
  ):
    whole = world.ada.get(path).json()
    assert not whole['has_more'] and len(whole[name]) >= 3
    for limit in (1, 2, len(whole[name]), 1000):
      assert walked(world.ada, path, name, limit) == whole[name]
    first = {'adapters': world.own['bob'], 'versions': 'x', 'sessions': world.sessions['bob']['session']['id']}[name]
    for query in (
      *({'limit': limit} for limit in (0, -1, 1001, '1e3', '', '٣', '9' * 40)),
      *({'after': after} for after in (first, '', "' OR 1=1 --", '\0', '%ff', 'a' * 5000, '-1')),
    ):
      refused = world.ada.get(path, params=query)
      assert code(refused) == (400, 'invalid_request') and refused.json()['error']['field'] in query, query
  page = world.ada.get(f'{own}/versions', params={'after': 10**8}).json()
  assert page == {'versions': [], 'first_id': None, 'last_id': None, 'next': None, 'has_more': False}
  for at in made:
    assert world.ada.delete(at).status_code == 200


def test_a_list_goes_on_after_an_entry_that_was_deleted(world):
  own = f'{ROOT}/adapters/{world.own["ada"]}'
  adapters = [create(world.ada, f'gone-{number}') for number in range(3)]
  sessions = [world.ada.post(f'{own}/sessions', json={}) for _ in range(3)]
  tokens = {each.headers['location']: {'X-Session-Token': each.json()['token']} for each in sessions}
  for path, name, made in ((f'{ROOT}/adapters', 'adapters', adapters), (f'{own}/sessions', 'sessions', [*tokens])):
    ids = [at.rpartition('/')[2] for at in made]
    before = [each['id'] for each in world.ada.get(path).json()[name]].index(ids[0])
    page = world.ada.get(path, params={'limit': before + 1}).json()
    assert page['last_id'] == ids[0]
    rest = world.ada.get(path, params={'after': page['last_id']}).json()
    assert world.ada.delete(made[0], headers=tokens.get(made[0], {})).status_code == 200
    assert world.ada.get(path, params={'after': page['next']}).json() == rest
    assert [each['id'] for each in rest[name]][:2] == ids[1:]
    refused = world.ada.get(path, params={'after': page['last_id']})
    assert code(refused) == (400, 'invalid_request') and 'was deleted' in refused.json()['error']['message']
    # The place of another's entry is only a time.
    assert world.bob.get(f'{ROOT}/adapters', params={'after': page['next']}).status_code == 200
  for at in adapters[1:]:
    assert world.ada.delete(at).status_code == 200


def test_a_name_is_taken_once_and_is_no_id(world):
  at = create(world.ada, 'taken')
  for path, body in ((f'{ROOT}/adapters', {}), (f'{at}/fork', {})):
    assert code(world.ada.post(path, json={'name': 'taken', **body})) == (409, 'name_taken')
    assert code(world.ada.post(path, json={'name': world.own['bob'], **body})) == (400, 'invalid_request')
  assert code(world.ada.post('/v1/lora/init', json={'lora_id': 'taken'})) == (409, 'name_taken')
  assert world.ada.delete(at).status_code == 200


def test_readiness_is_also_that_of_the_storage(world, monkeypatch):
  monkeypatch.setattr(
    os, 'statvfs', lambda path: types.SimpleNamespace(f_bavail=1, f_bfree=1, f_blocks=9, f_frsize=4096)
  )
  failed = world.ada.get('/readyz')
  assert failed.status_code == 503
  assert failed.json() == {'status': 'storage_failed', 'reason': 'The disk is full.'}
  monkeypatch.undo()
  assert world.ada.get('/readyz').json() == {'status': 'ready'}


def test_an_adapter_from_its_making_to_its_end(world):
  made = world.ada.post(f'{ROOT}/adapters', json={'name': 'mine', 'settings': {'teacher': {'kind': 'base'}}, 'rank': 2})
  assert made.status_code == 201 and made.headers['etag'] == '"0"'
  at = made.headers['location']
  assert made.json()['settings']['teacher'] == {'kind': 'base'}
  assert world.ada.get(at).json() == made.json() and world.ada.get(at).headers['etag'] == '"0"'
  assert made.json()['id'] in [adapter['id'] for adapter in world.ada.get(f'{ROOT}/adapters').json()['adapters']]
  changed = world.ada.patch(at, json={'settings': {'teacher': {'kind': 'live'}}}, headers={'If-Match': '"0"'})
  assert changed.json()['settings']['teacher'] == {'kind': 'live'} and changed.json()['version'] == 0
  assert code(world.ada.post(f'{ROOT}/adapters', json={'name': 'other', 'rank': 3})) == (400, 'invalid_request')
  assert code(world.ada.delete(at, headers={'If-Match': '"7"'})) == (412, 'version_conflict')
  assert world.ada.delete(at).json() == {'id': made.json()['id'], 'deleted': True}
  assert code(world.ada.get(at)) == (404, 'not_found')


def test_feedback_makes_the_next_version_and_says_so(world):
  at = create(world.ada, 'learner')
  adapter = at.rsplit('/', 1)[1]
  sample = draw(world.ada, 'learner')['completions'][0]
  body = {'sample_id': sample['sample_id'], 'feedback': 'Be brief.', 'update': {'learning_rate': 0.01, 'steps': 2}}
  dry = world.ada.post(f'{at}/feedback', json=body | {'mode': 'dry_run', 'teacher': 'ema'})
  assert dry.json()['version_after'] == 0 and dry.headers['etag'] == '"0"', dry.text
  assert dry.json()['teacher'] == 'ema'
  assert world.ada.post(f'{at}/feedback', json=body | {'teacher': 3}).json()['error']['field'] == 'teacher'
  for update, part in (
    ({'support': 'teacher'}, {'name': 'sdpo', 'support': 'teacher'}),
    ({'loss': 'jsd_pg', 'tail': True}, {'name': 'jsd_pg', 'support': 'teacher', 'tail': True}),
  ):
    learned = world.ada.post(f'{at}/feedback', json=body | {'mode': 'dry_run', 'update': update, 'teacher': 'base'})
    assert part.items() <= learned.json()['loss'].items() and learned.json()['accepted']
  for update in ({'loss': 'jsd_pg', 'support': 'union'}, {'support': 'union'}, {'tail': True}):
    wrong = world.ada.post(f'{at}/feedback', json=body | {'update': update})
    assert code(wrong) == (400, 'invalid_request') and re.search('support|tail', wrong.json()['error']['message'])
  done = world.ada.post(f'{at}/feedback', json=body, headers={'If-Match': '"0"'})
  answer = done.json()
  assert done.status_code == 200 and done.headers['etag'] == '"1"'
  assert (answer['version_before'], answer['version_after'], answer['accepted']) == (0, 1, True)
  store = world.service.store
  until(lambda: not store.stats['waiting_states'])
  keys = [each.key for each in store.blobs.list('users') if f'{adapter}/versions/' in each.key]
  [moments] = [key for key in keys if key.endswith(MOMENTS)]
  store.blobs.swap(moments, b'damaged', store.blobs.tagged(moments))
  world.service.worker.forget(engine_name(adapter, 1))  # It is read again, and its moments are not needed for that.
  assert draw(world.ada, adapter)['version'] == 1
  again = world.ada.post(f'{at}/feedback', json=body | {'mode': 'dry_run'}).json()
  assert again['moments_of'] is None and 'moments of version 1' in again['warnings'][0]
  late = world.ada.post(f'{at}/feedback', json=body, headers={'If-Match': '"0"'})
  assert code(late) == (412, 'version_conflict') and late.json()['error']['current_version'] == 1
  assert late.headers['etag'] == '"1"'
  versions = world.ada.get(f'{at}/versions').json()['versions']
  assert [(version['version'], version['reason']) for version in versions] == [(0, 'create'), (1, 'feedback')]
  diff = world.ada.get(f'{at}/versions/1/diff').json()
  assert (diff['from'], diff['to']) == (0, 1) and diff['total']['change'] > 0
  assert world.ada.get(f'{at}/versions/1/diff?against=1').json()['total']['change'] == 0
  assert code(world.ada.get(f'{at}/versions/0/diff')) == (400, 'invalid_request')
  back = world.ada.post(f'{at}/undo', json={'to': 0}, headers={'If-Match': '"1"'})
  assert back.json()['version'] == 2 and back.headers['etag'] == '"2"' and back.json()['reason'] == 'undo'
  # What it says is what it said at the beginning.
  assert draw(world.ada, f'{adapter}@2')['completions'][0]['log_probs'] == sample['log_probs']
  assert draw(world.ada, f'sdpo://{adapter}@1')['version'] == 1
  fork = world.ada.post(f'{at}/fork', json={'name': 'forked', 'version': 1}).json()
  assert (
    draw(world.ada, 'forked')['completions'][0]['log_probs']
    == draw(world.ada, 'learner@1')['completions'][0]['log_probs']
  )
  assert fork['version'] == 0
  metrics = world.ada.get('/metrics').text
  assert 'sdpo_feedback_total{outcome="committed"}' in metrics and 'sdpo_feedback_total{outcome="dry_run"}' in metrics


def test_a_feedback_that_is_sent_again_is_learned_once(world):
  at = create(world.ada, 'once')
  body = {'sample_id': draw(world.ada, 'once')['completions'][0]['sample_id'], 'feedback': 'Be brief.'}
  first, again = (world.ada.post(f'{at}/feedback', json=body, headers={'Idempotency-Key': 'one'}) for _ in range(2))
  assert first.status_code == 200 and first.content == again.content and again.headers['etag'] == '"1"'
  assert again.headers['idempotency-replayed'] == 'true' and world.ada.get(at).json()['version'] == 1
  other = world.ada.post(f'{at}/feedback', json=body | {'feedback': 'Be long.'}, headers={'Idempotency-Key': 'one'})
  assert code(other) == (422, 'unprocessable')


def test_a_kept_answer_that_committed_nothing_goes_with_its_adapter(world):
  at = create(world.ada, 'gone')
  body = {'sample_id': draw(world.ada, 'gone')['completions'][0]['sample_id'], 'feedback': 'No.', 'mode': 'dry_run'}
  asked = {'json': body, 'headers': {'Idempotency-Key': 'trial'}}
  first, again = (world.ada.post(f'{at}/feedback', **asked) for _ in range(2))
  assert first.status_code == 200 and first.content == again.content
  world.ada.delete(at)
  assert code(world.ada.post(f'{at}/feedback', **asked)) == (404, 'not_found')


def test_a_teacher_that_hangs_until_the_time_limit_is_a_503_that_names_no_address(world, monkeypatch):
  calls, leave = [], threading.Event()
  monkeypatch.setattr(gate, 'Call', lambda *given: calls.append(Call(*given)) or calls[-1])
  monkeypatch.setattr(asking, 'STOP_S', 0.01)

  def hang(body):
    calls[-1].end(Deadline('The request was not done within its time limit.'))  # As the gate does.
    return leave.wait(30) and Answer({}, 500)

  at = create(world.ada, 'hung')
  body = {'sample_id': draw(world.ada, 'hung')['completions'][0]['sample_id'], 'feedback': 'No.', 'teacher': 'endpoint'}
  with Server(hang) as server:
    settings = TeacherEndpointConfig(url=f'{server.url}/v1', model='m', timeout_s=30.0)
    monkeypatch.setattr(world.service, 'endpoint', Sidecar(settings, 264, lambda *_: None, pause_s=60.0))
    response = world.ada.post(f'{at}/feedback', json=body)
    leave.set()
  assert code(response) == (503, 'teacher_unavailable') and int(response.headers['retry-after']) >= 1
  assert 'within the time limit' in response.text and '127.0.0.1' not in response.text
  assert world.ada.get(at).json()['version'] == 0


def test_no_answer_tells_where_the_service_keeps_things_or_whom_it_asks(world, monkeypatch, caplog):
  service, root, said = world.service, world.folder / 'root', []
  away = dead_address()
  settings = TeacherEndpointConfig(url=f'{away}/v1', model='m', retries=0, timeout_s=5.0)
  monkeypatch.setattr(service, 'endpoint', Sidecar(settings, 264, lambda *_: None, pause_s=60.0))
  at, fork = create(world.ada, 'told'), {'json': {'name': 'told-again'}}
  adapter = at.rsplit('/', 1)[1]
  sample = draw(world.ada, 'told')['completions'][0]['sample_id']
  body = {'sample_id': sample, 'feedback': 'No.'}

  def ask(method, path, statuses, **more):
    """Send a request, which must end with one of the statuses; return the answer's text."""
    response = world.ada.request(method, path, **more)
    said.append(f'{response.headers} {response.text}')
    assert response.status_code in statuses, (path, response.text)
    return response

  def learn(**more):
    return ask('POST', f'{at}/feedback', (500, 503), json=body | more)

  # A dead teacher, first when it is asked, then when it is not asked any more.
  for _ in range(FAILURES + 1):
    gone = learn(teacher='endpoint')
    assert gone.status_code == 503 and int(gone.headers['retry-after']) >= 1
    assert gone.json()['error']['code'] == 'teacher_unavailable'
  wrong = {'lora_id': 'told', 'prompt': 'Hi', 'response': 'Ho', 'feedback': 'No.', 'teacher': 'endpoint'}
  assert ask('POST', '/v1/distill', (503,), json=wrong).headers['retry-after'] == gone.headers['retry-after']
  entry = {**body, 'adapter': 'told', 'teacher': 'endpoint'}
  [result] = ask('POST', f'{ROOT}/feedback/batch', (200,), json={'entries': [entry]}).json()['results']
  assert result['error']['retry_after_s'] > 1.0 and gone.json()['error']['retry_after_s'] > 1.0
  assert result['status'] == 503 and world.ada.get(at).json()['version'] == 0
  assert ask('GET', '/readyz', (200,)).json()['teacher']['breaker'] == 'open'
  assert 'sdpo_teacher_open 1.0' in ask('GET', '/metrics', (200,)).text

  # A disk and a database that fail, and an engine that says what it had at hand.
  def fail(*_, **__):
    raise OSError(28, 'No space left on device', str(root / 'x'))

  for module, name in ((blobs, '_create'), (blobs, 'write_atomically')):
    with monkeypatch.context() as broken:
      broken.setattr(module, name, fail)
      assert 'nothing that was acknowledged is lost' in learn().json()['error']['message']
      ask('POST', f'{ROOT}/adapters', (503,), json={'name': 'more'})
  with monkeypatch.context() as broken:
    error = sqlite3.OperationalError(f'disk I/O error: {root}')
    failing = types.SimpleNamespace(execute=lambda *_: (_ for _ in ()).throw(error))
    broken.setattr(service.store.database.connections, 'raw', failing)
    for path in (f'{ROOT}/adapters', at, f'{at}/versions', '/v1/models', '/v1/lora'):
      ask('GET', path, (503,))
  asked = {'json': {'model': 'told', 'rows': [{'prompt': 'Hi', 'completion': 'Ho'}]}}
  for error in (RuntimeError(f'{root}/lib.so'), UserError(f'{root}/shelf/a.safetensors is damaged: restart.')):
    engine = service.worker._engine  # noqa: SLF001 (Nothing else holds it.)
    with monkeypatch.context() as broken:
      broken.setattr(engine, 'learn_in_pieces', lambda *_, error=error: (_ for _ in ()).throw(error))
      ask('POST', f'{at}/feedback', (400, 500), json=body)

  # Files that are damaged or gone, of a version that the engine has to read.
  assert world.ada.post(f'{at}/feedback', json=body).json()['version_after'] == 1
  [folder] = root.glob(f'users/*/adapters/{adapter}/versions/00000001-*')
  for name in ('adapter_model.safetensors', 'manifest.json'):
    content = (folder / name).read_bytes()
    for damage in (content[:-1] + bytes([content[-1] ^ 1]), None):
      (folder / name).unlink()
      if damage is not None:
        (folder / name).write_bytes(damage)
      service.worker.forget(f'{adapter}@1')
      answers = [ask('POST', f'{at}/fork', (500,), **fork), learn(), ask('POST', f'{at}/undo', (500,), json={'to': 1})]
      answers += [ask('POST', f'{ROOT}/score', (500,), **asked)]
      answers += [ask('GET', f'{at}/export', (500,)), ask('GET', f'{at}/versions/1/diff', (500,))]
      for answer in answers:
        assert f'Version 1 of {adapter} is damaged in the store: undo to' in answer.json()['error']['message']
      (folder / name).write_bytes(content)
  head = folder.parent.parent / 'HEAD'
  content = head.read_bytes()
  for damage in (b'x', None):
    head.unlink() if damage is None else head.write_bytes(damage)
    assert f'The adapter {adapter} is damaged in the store' in learn().json()['error']['message']
    head.write_bytes(content)

  # What is well tells nothing either.
  with zipfile.ZipFile(io.BytesIO(world.ada.get(f'{at}/export').content)) as files:
    said += [files.read(name).decode('latin-1') for name in files.namelist()]
  for path in (at, f'{at}/versions', f'{at}/versions/1', '/v1/models', '/v1/capabilities', '/openapi.json', '/docs'):
    ask('GET', path, (200,))
  for secret in (
    f'{away}/v1',
    'cannot be read or written',
    'No space left',
    'disk I/O error',
    f'{folder}/manifest.json',
    f'{head} is',
  ):
    assert secret in caplog.text
  told = '\n'.join(said)
  for secret in (str(world.folder), str(root), away, away.removeprefix('http://'), 'users/'):
    assert secret not in told, told[max(0, told.index(secret) - 300) : told.index(secret) + 100]


def test_several_feedbacks_are_answered_each_by_itself(world):
  names = ['batch-a', 'batch-b']
  for name in names:
    create(world.ada, name)
  entries = [
    {'adapter': name, 'sample_id': draw(world.ada, name)['completions'][0]['sample_id'], 'feedback': 'Be brief.'}
    for name in names
  ]
  response = world.ada.post(f'{ROOT}/feedback/batch', json={'entries': [*entries, entries[0] | {'if_match': 0}]})
  results = response.json()['results']
  assert [result.get('version_after') for result in results] == [1, 1, None]
  assert results[2]['status'] == 412 and results[2]['error']['current_version'] == 1
  wrong = world.ada.post(f'{ROOT}/feedback/batch', json={'entries': [entries[0], entries[1] | {'adapter': 'nobody'}]})
  assert code(wrong) == (404, 'not_found') and wrong.json()['error']['field'].startswith('entries.1')


def test_a_batch_with_a_key_is_learned_once_also_where_its_answer_was_lost(world):
  at = {name: create(world.ada, name) for name in ('once-a', 'once-b')}
  entries = [
    {'adapter': name, 'sample_id': draw(world.ada, name)['completions'][0]['sample_id'], 'feedback': 'Be brief.'}
    for name in at
  ]
  trial = entries[0] | {'mode': 'dry_run'}
  asked = {'json': {'entries': [*entries, trial]}, 'headers': {'Idempotency-Key': 'batch'}}
  first, again = (world.ada.post(f'{ROOT}/feedback/batch', **asked) for _ in range(2))
  assert first.status_code == 200 and first.content == again.content
  key, database = hashlib.sha256(b'batch').hexdigest(), world.service.store.database
  with database.writing() as rows:  # As after a kill: two have learned, nothing is known of the whole and of the trial.
    for name in (key, f'{key}/2'):
      database.drop_request(rows, 'ada', name)
    rows.execute("UPDATE requests SET state = 'made', response = NULL WHERE key = ?", (f'{key}/1',))
  results = world.ada.post(f'{ROOT}/feedback/batch', **asked).json()['results']
  assert results[0] == first.json()['results'][0] and results[1]['recovered']
  assert [each['version_after'] for each in results] == [1, 1, 1] and results[2]['mode'] == 'dry_run'
  assert [world.ada.get(each).json()['version'] for each in at.values()] == [1, 1]
  world.ada.delete(at['once-a'])  # With it the answer of the whole.
  assert database.request('ada', key) is None and database.request('ada', f'{key}/1') is not None
  assert code(world.ada.post(f'{ROOT}/feedback/batch', **asked)) == (404, 'not_found')


@pytest.mark.parametrize('database', ['answers', 'fails'])
def test_entries_that_failed_run_again_with_a_repeated_batch(world, monkeypatch, database):
  names = [f'{name}-{database}' for name in ('learned', 'failed', 'failed-too')]
  at = [create(world.ada, name) for name in names]
  entries = [{'adapter': name, 'items': [{'prompt_tokens': [1], 'tokens': [2], 'feedback': 'No.'}]} for name in names]
  refused, learn, released = entries[0] | {'if_match': 7}, feedback.learn, gate.GateResponse.release
  asked = {'json': {'entries': [*entries, refused]}, 'headers': {'Idempotency-Key': f'mended-{database}'}}

  def fail(*given, **more):
    raise StorageFailed('No.')

  async def release(answer):
    assert not world.service.store._under_way  # noqa: SLF001 (Or a repeat that comes at once would be refused.)
    await released(answer)

  monkeypatch.setattr(gate.GateResponse, 'release', release)
  with monkeypatch.context() as broken:
    broken.setattr(
      feedback, 'learn', lambda account, id, *a, **b: (learn if id in at[0] else fail)(account, id, *a, **b)
    )
    if database == 'fails':
      broken.setattr(world.service.store, '_drop', fail)
    first = world.ada.post(f'{ROOT}/feedback/batch', **asked)
  again, last = (world.ada.post(f'{ROOT}/feedback/batch', **asked).json()['results'] for _ in range(2))
  if database == 'fails':
    assert code(first) == (503, 'storage_failed')
  else:
    assert [each.get('status') for each in first.json()['results']] == [None, 503, 503, 412]
    assert [again[0], again[3]] == [first.json()['results'][index] for index in (0, 3)]
  assert [each.get('version_after') for each in again] == [1, 1, 1, None] and again == last
  assert [world.ada.get(each).json()['version'] for each in at] == [1, 1, 1]


def test_a_version_travels_as_peft_files(world):
  at = create(world.ada, 'traveller')
  exported = world.ada.get(f'{at}/export')
  with zipfile.ZipFile(io.BytesIO(exported.content)) as archive:
    names, card = set(archive.namelist()), archive.read('README.md').decode()
  assert exported.headers['content-type'] == 'application/zip' and {'adapter_model.safetensors', 'README.md'} <= names
  assert 'the directory of these files for `traveller`.' in card  # The zip has no folder of that name.
  config = world.ada.get(f'{at}/export/adapter_config.json?version=0')
  assert json.loads(config.content)['peft_type'] == 'LORA'
  assert code(world.ada.get(f'{at}/export/optimizer.pt')) == (404, 'not_found')
  kind = {'Content-Type': 'application/zip'}
  made = world.bob.post(f'{ROOT}/adapters/import?name=came', content=exported.content, headers=kind)
  assert made.status_code == 201 and made.headers['etag'] == '"0"', made.text
  back = world.bob.get(f'{made.headers["location"]}/export/adapter_model.safetensors').content
  assert back == world.ada.get(f'{at}/export/adapter_model.safetensors').content
  assert code(world.bob.post(f'{ROOT}/adapters/import', content=exported.content, headers=kind)) == (
    400,
    'invalid_request',
  )
  assert code(world.bob.post(f'{ROOT}/adapters/import?name=x', content=b'PK', headers=kind)) == (400, 'invalid_request')
  assert code(world.bob.post(f'{ROOT}/adapters/import?name=x', json={})) == (415, 'unsupported_media_type')


def test_a_stream_ends_with_what_an_answer_holds(world):
  whole = draw(world.ada, 'base', n=2)
  body = {'messages': MESSAGES, 'max_tokens': 6, 'seed': 1, 'n': 2, 'stream': True}
  with world.ada.stream('POST', f'{ROOT}/completions', json=body) as response:
    text = response.read().decode()
  assert response.headers['content-type'].startswith('text/event-stream')
  events = [block.split('\n') for block in text.strip().split('\n\n')]
  kinds = [lines[0].removeprefix('event: ') for lines in events]
  data = [json.loads(lines[1].removeprefix('data: ')) for lines in events]
  assert set(kinds) == {'draft', 'completion', 'done'} and kinds[-1] == 'done'
  for completion in whole['completions']:
    parts = [
      each['delta']
      for kind, each in zip(kinds, data, strict=True)
      if kind == 'draft' and each['index'] == completion['index']
    ]
    [done] = [
      each
      for kind, each in zip(kinds, data, strict=True)
      if kind == 'completion' and each['index'] == completion['index']
    ]
    assert ''.join(parts) == done['text'] == completion['text']
    np.testing.assert_allclose(done['log_probs'], completion['log_probs'], atol=1e-5)
  # Of the same prompt, only the last token is read again.
  assert data[-1]['usage'] == whole['usage'] | {'reused_tokens': whole['usage']['prompt_tokens'] - 1}
  refused = world.ada.post(f'{ROOT}/completions', json=body | {'model': 'nobody'})
  assert code(refused) == (404, 'not_found')


def test_scores_are_the_same_in_every_format_and_those_of_the_sampler(world):
  drawn = draw(world.ada, 'base')
  tokens = drawn['completions'][0]['tokens']
  row = {'prompt_tokens': drawn['prompt_tokens'], 'tokens': tokens, 'ids': [[1, 2]] * len(tokens)}
  asked = {'rows': [row], 'topk': 4}
  rows, columns = (
    world.ada.post(f'{ROOT}/score', json=asked | {'format': name}).json()['rows'][0] for name in ('rows', 'columns')
  )
  answer = world.ada.post(f'{ROOT}/score', json=asked | {'format': 'packed'})
  [small] = packed.unpack(answer.content)
  assert answer.headers['content-type'] == packed.CONTENT_TYPE
  np.testing.assert_allclose(
    [each['log_prob'] for each in rows['tokens']], drawn['completions'][0]['log_probs'], atol=1e-4
  )
  np.testing.assert_allclose(columns['log_probs'], small.log_probs, atol=1e-6)
  assert columns['top_ids'] == small.top_ids.tolist()
  assert [[top['token'] for top in each['top']] for each in rows['tokens']] == columns['top_ids']
  np.testing.assert_allclose(np.asarray(columns['top_log_probs']) * -1e-4, small.top_log_probs, rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(columns['of_ids'], small.of_ids, atol=1e-6)
  wrong = world.ada.post(f'{ROOT}/score', json={'rows': [row | {'ids': [[1]]}]})
  assert code(wrong) == (400, 'invalid_request') and wrong.json()['error']['field'] == 'rows.0.ids'


def listening(world, at, last):
  """Return a request for the events of an adapter after the `last` one."""
  call = Call()
  return endpoints.Incoming(
    account=Account(world.service, 'ada', call),
    call=call,
    body=b'',
    path={},
    adapter=at.rsplit('/', 1)[1],
    query={},
    expected=None,
    idempotency=None,
    last_event=last,
    metrics=None,
    post_to_replica=None,
  )


def test_events_tell_what_happened_and_read_on(world):
  at = create(world.ada, 'eventful')
  sample = draw(world.ada, 'eventful')['completions'][0]['sample_id']
  world.ada.post(f'{at}/feedback', json={'sample_id': sample, 'feedback': 'Be brief.'})
  known = world.service.events.wait(at.rsplit('/', 1)[1], None, 0)
  assert [event.kind for event in known] == ['committed', 'queued', 'scored', 'stepped', 'guarded', 'committed']
  asked = listening(world, at, known[3].id)
  stream = native.event_stream(asked)
  said = [next(stream) for _ in range(3)]
  assert said[0].data is None and [each.event for each in said[1:]] == ['guarded', 'committed']
  assert said[2].data['version'] == 1 and said[2].id == known[5].id
  asked.call.end(NotReady('Over.'))
  with pytest.raises(NotReady):
    next(stream)


def test_a_stream_of_events_ends_where_they_happen_no_more(world, monkeypatch):
  at = create(world.ada, 'moving')
  fails = {}

  def hold(owner, adapter):
    for error in fails.pop(adapter, ()):
      raise error

  monkeypatch.setattr(world.service.store, 'hold', hold)
  monkeypatch.setattr(native, '_LOOK', 0.001)
  monkeypatch.setattr(native, '_HEARTBEAT', 0.001)
  stream = native.event_stream(listening(world, at, None))
  assert [next(stream).event for _ in range(3)] == [None, 'committed', None]
  fails[at.rsplit('/', 1)[1]] = [StorageFailed('Who has it is not known.')]
  assert next(stream).data is None and not fails
  fails[at.rsplit('/', 1)[1]] = [NotHolder('http://there')]
  with pytest.raises(NotHolder):
    next(stream)


# Nobody reaches what another one has.

FEEDBACK = {'feedback': 'Be brief.', 'prompt_tokens': [1], 'tokens': [2]}
SESSION = f'{ROOT}/adapters/{{adapter}}/sessions/{{session}}'
# (method, path) → what a request to it holds that would do something on an adapter of one's own.
REQUESTS = {
  ('GET', f'{ROOT}/adapters/{{adapter}}'): {},
  ('PATCH', f'{ROOT}/adapters/{{adapter}}'): {'json': {'settings': {}}},
  ('DELETE', f'{ROOT}/adapters/{{adapter}}'): {},
  ('POST', f'{ROOT}/adapters/{{adapter}}/fork'): {'json': {'name': 'stolen'}},
  ('POST', f'{ROOT}/adapters/{{adapter}}/undo'): {'json': {'to': 0}},
  ('GET', f'{ROOT}/adapters/{{adapter}}/versions'): {},
  ('POST', f'{ROOT}/adapters/{{adapter}}/versions'): {
    'content': b'PK',
    'headers': {'Content-Type': 'application/zip'},
  },
  ('GET', f'{ROOT}/adapters/{{adapter}}/versions/{{number}}'): {},
  ('GET', f'{ROOT}/adapters/{{adapter}}/versions/{{number}}/diff'): {'params': {'against': 0}},
  ('GET', f'{ROOT}/adapters/{{adapter}}/export'): {},
  ('GET', f'{ROOT}/adapters/{{adapter}}/export/{{file}}'): {},
  ('GET', f'{ROOT}/adapters/{{adapter}}/events'): {},
  ('POST', f'{ROOT}/adapters/{{adapter}}/feedback'): {'json': FEEDBACK},
  ('GET', f'{ROOT}/adapters/{{adapter}}/sessions'): {},
  ('POST', f'{ROOT}/adapters/{{adapter}}/sessions'): {'json': {}},
  ('GET', SESSION): {},
  ('DELETE', SESSION): {},
  ('POST', f'{SESSION}/turns'): {'json': {'messages': MESSAGES}},
  ('POST', f'{SESSION}/turns/{{n}}/decision'): {'json': {'decision': 'deny', 'correction': 'Be brief.'}},
  ('POST', f'{SESSION}/turns/{{n}}/results'): {'json': {'results': [{'call': 0, 'ok': True, 'text': ''}]}},
  ('POST', f'{SESSION}/turns/{{n}}/retry'): {'json': {}},
  ('POST', f'{SESSION}/flush'): {'json': {}},
  ('GET', f'{ROOT}/adapters/{{adapter}}/examples'): {},
  ('POST', f'{ROOT}/adapters/{{adapter}}/replay'): {
    'content': b'{}',
    'headers': {'Content-Type': 'application/x-ndjson'},
  },
}
# (method, path) of routes that name an adapter elsewhere → a request with that name.
LORA = {'prompt': 'Hi', 'response': 'Ho', 'feedback': 'Be brief.'}
NAMED = {
  ('POST', f'{ROOT}/completions'): lambda name: {'json': {'model': name, 'messages': MESSAGES}},
  ('POST', f'{ROOT}/score'): lambda name: {'json': {'model': name, 'rows': [{'prompt_tokens': [1], 'tokens': [2]}]}},
  ('POST', f'{ROOT}/feedback/batch'): lambda name: {'json': {'entries': [{'adapter': name, **FEEDBACK}]}},
  ('POST', '/v1/completions'): lambda name: {'json': {'model': name, 'prompt': 'Hi'}},
  ('POST', '/v1/chat/completions'): lambda name: {'json': {'model': name, 'messages': MESSAGES}},
  ('POST', '/v1/distill'): lambda name: {'json': {'lora_id': name, **LORA}},
  ('POST', '/v1/feedback'): lambda name: {'json': {'requests': [{'lora_id': name, **LORA}]}},
  ('POST', '/v1/score'): lambda name: {'json': {'model': name, 'prompt': 'Hi', 'completion': 'Ho'}},
  ('GET', '/v1/lora/export'): lambda name: {'params': {'lora_id': name}},
  ('DELETE', '/v1/lora'): lambda name: {'params': {'lora_id': name}},
}
# Routes that name no adapter that there is, or are looked at by themselves.
NAMELESS = {
  f'{ROOT}/adapters',
  f'{ROOT}/adapters/import',
  '/v1/capabilities',
  '/v1/usage',
  '/v1/models',
  '/v1/models/{model}',
  '/v1/lora',
  '/v1/lora/init',
  '/v1/health',
  '/healthz',
  '/readyz',
  '/metrics',
  '/openapi.json',
  '/docs',
  '/',
  '/console',
  '/console.css',
  '/console.js',
  '/tokenize',
  '/detokenize',
  '/tokenizer_info',
}
LEARNED = {'prompt': 'Hi', 'response': 'Ho', 'feedback': 'No.'}
# Routes in the words of other services: (method, path) → a request that names an adapter.
ELSEWHERE = {
  ('POST', '/v1/completions'): lambda name: {'json': {'model': name, 'prompt': 'Hi', 'max_tokens': 1}},
  ('POST', '/v1/chat/completions'): lambda name: {'json': {'model': name, 'messages': MESSAGES, 'max_tokens': 1}},
  ('GET', '/v1/models/{model}'): lambda name: {},
  ('POST', '/v1/distill'): lambda name: {'json': {'lora_id': name, **LEARNED}},
  ('POST', '/v1/feedback'): lambda name: {'json': {'requests': [{'lora_id': name, **LEARNED}]}},
  ('POST', '/v1/score'): lambda name: {'json': {'model': name, 'prompt': 'Hi', 'completion': 'Ho'}},
  ('GET', '/v1/lora/export'): lambda name: {'params': {'lora_id': name}},
  ('DELETE', '/v1/lora'): lambda name: {'params': {'lora_id': name}},
}
# Routes that name no adapter, or a new one.
OTHERS = {
  *(('GET', path) for path in ('/docs', '/openapi.json', '/healthz', '/readyz', '/metrics', '/v1/capabilities')),
  *(('GET', path) for path in ('/v1/health', '/v1/usage', '/v1/models', '/v1/lora')),
  *(('GET', path) for path in ('/', '/console', '/console.css', '/console.js')),
  ('POST', '/v1/lora/init'),
  *(('POST', path) for path in ('/tokenize', '/detokenize')),
  ('GET', '/tokenizer_info'),
}
IDS = st.text(
  st.characters(codec='utf-8', exclude_characters='/?#%\\', exclude_categories=('Cc', 'Cs')), min_size=1, max_size=30
).filter(lambda text: text not in ('.', '..', 'import'))


def refused(client, method, pattern, name, more, opened):
  values = {'number': '0', 'file': 'adapter_config.json', 'session': opened['session']['id'], 'n': '0'}
  path = pattern.replace('{adapter}', name)
  for field, value in values.items():
    path = path.replace(f'{{{field}}}', value)
  headers = {'X-Session-Token': opened['token'], **more.get('headers', {})}
  return client.request(method, path, **{**more, 'headers': headers})


def without(response, name):
  """Return an answer in which the id that was asked for is X, whichever way it is quoted."""
  text = response.content.decode()
  for spelled in (json.dumps(name, ensure_ascii=False)[1:-1], json.dumps(repr(name), ensure_ascii=False)[1:-1], name):
    text = text.replace(spelled, 'X')
  return response.status_code, text.replace("'X'", 'X')


def test_a_key_sees_what_it_has_used_and_nothing_of_others(tmp_path, world):
  service = world.service
  path = tmp_path / 'keys'
  (ada, one), (bob, two) = (add(path, owner, 'key') for owner in ('usage-ada', 'usage-bob'))
  client = TestClient(make_app(service, service.settings, KeyFile(path)), base_url='http://localhost')
  clients = {key: functools.partial(client.request, headers={'X-API-Key': key}) for key in (ada, bob)}
  made = clients[ada]('POST', f'{ROOT}/adapters', json={'name': 'mine'}).json()['id']
  body = {'model': made, 'messages': MESSAGES, 'n': 2, 'max_tokens': 4}
  drawn = clients[ada]('POST', f'{ROOT}/completions', json=body).json()
  sample = drawn['completions'][0]['sample_id']
  entries = [{'adapter': made, 'items': [{'sample_id': sample, 'feedback': 'No.'}]}] * 2
  clients[ada]('POST', f'{ROOT}/feedback/batch', json={'entries': entries})
  said = clients[ada]('GET', '/v1/usage').json()
  assert said['key'] == one.id and said['minute'] == said['day'] or said['minute']['requests'] == 1  # A new minute.
  assert said['day']['requests'] == 4 and said['day']['feedbacks'] == 2  # This request is one of them.
  assert said['day']['sampled'] == drawn['usage']['completion_tokens'] and said['day']['learned'] > 0
  other = clients[bob]('GET', '/v1/usage').json()
  assert other['key'] == two.id and other['day'] == dict.fromkeys(said['day'], 0) | {'requests': 1}
  assert one.id not in json.dumps(other) and ada not in json.dumps(said)


def test_the_tables_have_every_route(world):
  there = {
    (method, route.path)
    for route in world.app.routes
    if isinstance(route, Route)
    for method in route.methods - {'HEAD'}
  }
  known = set(REQUESTS) | set(NAMED)
  nameless = {(method, path) for method, path in there if path in NAMELESS} - known
  assert there == known | nameless and {path for _, path in nameless} == NAMELESS


@pytest.mark.parametrize('method, pattern', sorted(REQUESTS))
def test_what_another_owner_has_is_not_there(world, method, pattern):
  more = REQUESTS[method, pattern]
  before = world.bob.get(f'{ROOT}/adapters/{world.own["bob"]}').content, world.bob.get(f'{ROOT}/adapters').content
  opened = world.sessions['bob']  # Even with the token of the session, which is another one's.
  foreign = refused(world.ada, method, pattern, world.own['bob'], more, opened)
  unknown = refused(world.ada, method, pattern, 'ad-0000000000000000', more, opened)
  assert foreign.status_code == 404
  assert without(foreign, world.own['bob']) == without(unknown, 'ad-0000000000000000')
  assert foreign.headers.keys() == unknown.headers.keys()
  after = world.bob.get(f'{ROOT}/adapters/{world.own["bob"]}').content, world.bob.get(f'{ROOT}/adapters').content
  assert before == after


@pytest.mark.parametrize('method, pattern', sorted(entry for entry in REQUESTS if '{session}' in entry[1]))
def test_a_session_of_another_owner_is_not_there_below_ones_own_adapter(world, method, pattern):
  bobs = f'{ROOT}/adapters/{world.own["bob"]}/sessions/{world.sessions["bob"]["session"]["id"]}'
  before = world.bob.get(bobs).content
  answers = []
  for opened in (world.sessions['bob'], {'session': {'id': 'ses-0000000000000000'}, 'token': 'sst-none'}):
    more = REQUESTS[method, pattern]
    answer = refused(world.ada, method, pattern, world.own['ada'], more, opened)
    answers.append(without(answer, opened['session']['id']))
  assert answers[0] == answers[1] and answers[0][0] == 404 and world.bob.get(bobs).content == before


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=IDS)
def test_odd_ids_are_not_there_either(world, name):
  for (method, pattern), more in REQUESTS.items():
    response = refused(world.ada, method, pattern, name, more, world.sessions['ada'])
    assert code(response) == (404, 'not_found'), (method, pattern, name, response.text)


@pytest.mark.parametrize('method, path', sorted(NAMED))
def test_requests_name_adapters_of_ones_own_only(world, method, path):
  before = world.bob.get(f'{ROOT}/adapters').content
  foreign = [world.own['bob'], 'first-of-bob', f'{world.own["bob"]}@0', f'sdpo://{world.own["bob"]}@0']
  unknown = ['ad-0000000000000000', 'nobody', 'ad-0000000000000000@0', 'sdpo://ad-0000000000000000@0']
  for theirs, nobodys in zip(foreign, unknown, strict=True):
    answers = []
    for name in (theirs, nobodys):
      response = world.ada.request(method, path, **NAMED[method, path](name))
      assert response.status_code == 404, response.text
      answers.append(without(response, name))
    assert answers[0] == answers[1]
  for odd in ('../bob', 'file:///etc/passwd', 'http://localhost/', 'gs://x/y', '@0', 'sdpo://', 'a' * 500):
    assert world.ada.request(method, path, **NAMED[method, path](odd)).status_code == 404, odd
  assert world.bob.get(f'{ROOT}/adapters').content == before


def test_models_of_others_are_not_listed(world):
  listed = json.dumps(world.ada.get('/v1/models').json()) + json.dumps(world.ada.get('/v1/lora').json())
  assert 'first-of-ada' in listed and 'first-of-bob' not in listed and world.own['bob'] not in listed
  answers = [world.ada.get(f'/v1/models/{name}') for name in (world.own['bob'], 'ad-0000000000000000')]
  assert [answer.status_code for answer in answers] == [404, 404]
  assert without(answers[0], world.own['bob']) == without(answers[1], 'ad-0000000000000000')


def elsewhere(client, method, path, name):
  return client.request(method, path.replace('{model}', name), **ELSEWHERE[method, path](name))


def test_the_table_has_every_route_in_the_words_of_others(world):
  found = {
    (method, route.path)
    for route in world.app.routes
    if not route.path.startswith(ROOT)
    for method in route.methods - {'HEAD'}
  }
  assert found == set(ELSEWHERE) | OTHERS


@pytest.mark.parametrize('method, path', sorted(ELSEWHERE))
def test_the_words_of_others_name_adapters_of_ones_own_only(world, method, path):
  own, theirs = f'{ROOT}/adapters/{world.own["bob"]}', f'{ROOT}/adapters'
  before = world.bob.get(own).content, world.bob.get(theirs).content
  forms = ('{}', '{}@0', 'sdpo://{}@0') if '{model}' not in path else ('{}', '{}@0')
  for foreign, unknown in [(world.own['bob'], 'ad-0000000000000000'), ('first-of-bob', 'none-at-all')]:
    for form in forms:
      names = form.format(foreign), form.format(unknown)
      one, other = (without(elsewhere(world.ada, method, path, name), name) for name in names)
      assert one == other and one[0] == 404, (names, one)
  assert before == (world.bob.get(own).content, world.bob.get(theirs).content)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=IDS)
def test_the_words_of_others_with_odd_names_are_not_there_either(world, name):
  for method, path in ELSEWHERE:
    assert elsewhere(world.ada, method, path, name).status_code == 404, (method, path, name)


def test_a_sample_of_another_owner_is_not_there(world):
  at = f'{ROOT}/adapters/{world.own["ada"]}/feedback'
  foreign, unknown = (
    world.ada.post(at, json={'sample_id': sample, 'feedback': 'x'})
    for sample in (world.samples['bob'], 'smp-' + '0' * 24)
  )
  assert code(foreign) == code(unknown) == (404, 'not_found')
  assert without(foreign, world.samples['bob']) == without(unknown, 'smp-' + '0' * 24)


# What there is, is described.


def test_every_route_is_in_the_openapi_document_and_on_the_page(world):
  found = world.ada.get('/openapi.json').json()
  for route in world.app.routes:
    for method in route.methods - {'HEAD'}:
      entry = found['paths'][route.path][method.lower()]
      assert entry['summary'], route.path
  assert found['openapi'].startswith('3.1') and found['security']
  names = [entry['operationId'] for methods in found['paths'].values() for entry in methods.values()]
  assert len(set(names)) == len(names)
  text = json.dumps(found)
  for reference in set(part.split('"')[0] for part in text.split('#/components/schemas/')[1:]):
    assert reference in found['components']['schemas']
  page = world.ada.get('/docs')
  assert page.status_code == 200 and "default-src 'none'" in page.headers['content-security-policy']
  assert 'http://' not in page.text and 'https://' not in page.text and '<script' not in page.text
  assert all(path in page.text for path in found['paths'])
  for schema in found['components']['schemas'].values():
    assert all(f'<td><code>{field}</code></td>' in page.text for field in schema.get('properties', {}))
  for line in (
    'Body: <a href="#FeedbackBody">',
    'Response: <a href="#FeedbackSaid">',
    'If-Match',
    'integer ≥ 1, default 1',
  ):
    assert line in page.text
  assert '"title"' not in page.text  # Tables, not the document over again.


def test_health_is_open_and_metrics_are_not(world):
  anybody = TestClient(world.app, base_url='http://localhost')
  assert anybody.get('/healthz').json() == {'status': 'alive'} and anybody.get('/readyz').json() == {'status': 'ready'}
  assert anybody.get('/openapi.json').status_code == 200 and anybody.get('/metrics').status_code == 401
  text = world.ada.get('/metrics').text
  assert 'sdpo_ready 1.0' in text and 'sdpo_engine_versions' in text and 'sdpo_request_seconds_bucket' in text


def test_no_log_has_a_key_a_prompt_or_a_completion(world):
  secret = 'violet armadillo'
  body = {'messages': [{'role': 'user', 'content': secret}], 'max_tokens': 4}
  drawn = world.ada.post(f'{ROOT}/completions', json=body).json()['completions'][0]
  at = f'{ROOT}/adapters/{world.own["ada"]}/feedback'
  world.ada.post(at, json={'sample_id': drawn['sample_id'], 'feedback': secret})
  world.ada.post(at, json={'sample_id': 5, 'feedback': secret, secret: secret})
  text = world.logged.getvalue()
  assert len(text.splitlines()) > 3
  assert all(word not in text for word in (secret, 'violet', *world.secrets.values()))
