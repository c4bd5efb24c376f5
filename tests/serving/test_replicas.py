"""Two replicas of a service behind ports: what one does not hold it lets the other answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
import contextlib
import json
import socket
import threading
import time
import types

import pytest

from sdpo_jax.serving import feedback
from sdpo_jax.serving.errors import NotHolder
from sdpo_jax.serving.store import leases
from sdpo_jax.serving.web import native
from tests.serving import openai_server, service_world
from tests.serving.served_process import until
from tests.serving.store.postgres import postgres  # noqa: F401 (A fixture.)

pytestmark = pytest.mark.slow  # Two engines.
ROOT = '/v1/continual'
ITEM = {'prompt_tokens': [1, 2], 'tokens': [3, 4], 'feedback': 'Be brief.'}


@pytest.fixture(scope='module')
def replicas(postgres, tmp_path_factory):  # noqa: F811
  """Give two replicas, `one` and `other`."""
  folder = tmp_path_factory.mktemp('replicas')
  model, database = service_world.model_folder(folder / 'model'), postgres.url()
  with contextlib.ExitStack() as stack:
    found = types.SimpleNamespace()
    for name in ('one', 'other'):
      config = service_world.make_config(model, folder / name)
      config.serve.store.root, config.serve.store.database = f'memory://{folder}', database
      config.serve.http.url = 'http://replaced'
      running = stack.enter_context(openai_server.running(config))
      with running.service.store.database.writing(full=True) as rows:  # Its port was not known before.
        replica = running.service.store.leases.replica
        rows.execute('UPDATE replicas SET url = ? WHERE id = ?', (running.url, replica))
      setattr(found, name, running)
    yield found


def made(running, name):
  answer = running.http.post(f'{ROOT}/adapters', json={'name': name})
  assert answer.status_code == 201, answer.text
  return answer.json()['id']


def test_a_request_is_answered_wherever_it_arrives(replicas):
  one, other = replicas.one.http, replicas.other.http
  mine = made(replicas.one, 'mine')
  made(replicas.other, 'also-mine')  # By the replica that gives the owner's names.
  body = {'items': [ITEM]}
  answer = other.post(f'{ROOT}/adapters/{mine}/feedback', json=body, headers={'Idempotency-Key': 'first'})
  assert answer.status_code == 200 and answer.json()['version_after'] == 1 and answer.headers['etag'] == '"1"'
  assert len(answer.headers.get_list('date')) == 1
  again = one.post(f'{ROOT}/adapters/{mine}/feedback', json=body, headers={'Idempotency-Key': 'first'})
  assert again.json() == answer.json() and again.headers['idempotency-replayed'] == 'true'
  assert other.post(f'{ROOT}/adapters/{mine}/feedback', json=body, headers={'If-Match': '"0"'}).status_code == 412
  said = [
    each.post('/v1/completions', json={'model': f'{mine}@1', 'prompt': 'Hi', 'temperature': 0, 'max_tokens': 4}).json()
    for each in (one, other)
  ]
  assert said[0]['choices'][0]['text'] == said[1]['choices'][0]['text']
  fork = other.post(f'{ROOT}/adapters/{mine}/fork', json={'name': 'fork'})
  assert fork.status_code == 201
  assert other.post(
    '/v1/distill', json={'lora_id': 'mine', 'prompt': 'Hi', 'response': 'no', 'feedback': 'Yes.'}
  ).json()
  assert one.get(f'{ROOT}/adapters/{mine}').json() == other.get(f'{ROOT}/adapters/{mine}').json()
  assert other.delete(f'{ROOT}/adapters/{fork.json()["id"]}').status_code == 200


def test_a_batch_is_learned_by_those_who_hold_its_adapters(replicas):
  here, there = made(replicas.one, 'here'), made(replicas.one, 'there')
  replicas.one.service.store.leases.give_back(there)
  replicas.other.service.store.hold('local', there)
  entries = [{'adapter': id, 'items': [ITEM]} for id in (here, there, here)]
  headers = {'Idempotency-Key': 'batch'}
  answer = replicas.one.http.post(f'{ROOT}/feedback/batch', json={'entries': entries}, headers=headers).json()
  assert [(each['adapter'], each['version_after']) for each in answer['results']] == [(here, 1), (there, 1), (here, 2)]
  again = replicas.one.http.post(f'{ROOT}/feedback/batch', json={'entries': entries}, headers=headers).json()
  assert again == answer
  repeated = replicas.other.http.post(f'{ROOT}/feedback/batch', json={'entries': entries}, headers=headers).json()
  assert repeated == answer and replicas.other.service.store.adapter('local', there).head == 1
  alone = replicas.other.service.store.database  # As after the death of the first one, before it had stored anything.
  with alone.writing(full=True) as rows:
    rows.execute("DELETE FROM requests WHERE key NOT LIKE '%/%'")
  assert replicas.other.http.post(f'{ROOT}/feedback/batch', json={'entries': entries}, headers=headers).json() == answer
  assert replicas.other.service.store.adapter('local', there).head == 1
  assert replicas.one.http.delete(f'{ROOT}/adapters/{there}').status_code == 200
  assert alone.read("SELECT count(*) FROM requests WHERE key LIKE '%/1'") == [(0,)]
  entries = [{'adapter': here, 'items': [ITEM]}, {'adapter': made(replicas.one, 'where'), 'items': [ITEM]}]
  there = entries[1]['adapter']
  replicas.one.service.store.leases.give_back(there)
  replicas.other.service.store.hold('local', there)
  replicas.other.http.post(f'{ROOT}/adapters/{there}/feedback', json={'items': [ITEM]})
  entries[1]['if_match'] = 0
  wrong = replicas.one.http.post(f'{ROOT}/feedback/batch', json={'entries': entries[1:2]}).json()
  assert [(each['status'], each['error']['code']) for each in wrong['results']] == [(412, 'version_conflict')]
  assert wrong['results'][0]['error']['current_version'] == 1


def test_a_session_goes_on_where_its_adapter_is(replicas):
  mine = made(replicas.one, 'agent')
  begun = replicas.other.http.post(f'{ROOT}/adapters/{mine}/sessions', json={}).json()
  headers = {'X-Session-Token': begun['token']}
  path = f'{ROOT}/adapters/{mine}/sessions/{begun["session"]["id"]}'
  body = {'messages': [{'role': 'user', 'content': 'Hi'}], 'stream': True}
  with replicas.other.http.stream('POST', f'{path}/turns', json=body, headers=headers) as answer:
    assert answer.status_code == 200 and answer.headers['content-type'].startswith('text/event-stream')
    assert 'event: ' in answer.read().decode()  # To its end, when the turn is stored.
  assert replicas.one.http.get(path).json() == replicas.other.http.get(path).json()


def test_a_replay_goes_on_where_its_adapter_has_gone(replicas, monkeypatch):
  mine, target = made(replicas.one, 'taught'), made(replicas.one, 'replayed')
  for _ in range(2):
    begun = replicas.one.http.post(f'{ROOT}/adapters/{mine}/sessions', json={'guards': {'min_entropy': None}}).json()
    path, token = f'{ROOT}/adapters/{mine}/sessions/{begun["session"]["id"]}', {'X-Session-Token': begun['token']}
    body = {'messages': [{'role': 'user', 'content': 'Hi'}]}
    assert replicas.one.http.post(f'{path}/turns', json=body, headers=token).status_code == 200
    body = {'decision': 'deny', 'correction': 'Be brief.'}
    assert replicas.one.http.post(f'{path}/turns/0/decision', json=body, headers=token).status_code == 200
  learn = feedback.learn

  def learn_once(account, adapter, *rest, **more):
    done = learn(account, adapter, *rest, **more)
    if account.service is replicas.one.service:
      replicas.one.service.store.leases.give_back(adapter)
      replicas.other.service.store.hold('local', adapter)
    return done

  monkeypatch.setattr(feedback, 'learn', learn_once)
  headers = {'Content-Type': 'application/x-ndjson', 'Idempotency-Key': 'taken over'}
  asked = {'content': replicas.one.http.get(f'{ROOT}/adapters/{mine}/examples').content, 'headers': headers}
  answer = replicas.one.http.post(f'{ROOT}/adapters/{target}/replay', **asked)
  assert [each['version_after'] for each in answer.json()['learned']] == [1, 2], answer.text
  assert replicas.one.http.post(f'{ROOT}/adapters/{target}/replay', **asked).json() == answer.json()
  assert replicas.other.service.store.adapter('local', target).head == 2


def test_a_feedback_keeps_its_adapter_for_as_long_as_it_learns(replicas, monkeypatch):
  mine, service = made(replicas.one, 'slow'), replicas.one.service
  learn, ended, kept = service.worker.learn, threading.Event(), []
  ended.set()

  def learn_slowly(*given, **more):
    with monkeypatch.context() as later:
      later.setattr(leases, 'IDLE', -1.0)
      service.tend(ended)
    with pytest.raises(NotHolder):
      replicas.other.service.store.hold('local', mine)
    kept.append(mine)
    return learn(*given, **more)

  with monkeypatch.context() as slow:
    slow.setattr(service.worker, 'learn', learn_slowly)
    answer = replicas.one.http.post(f'{ROOT}/adapters/{mine}/feedback', json={'items': [ITEM]})
  assert kept == [mine] and answer.json()['version_after'] == 1, answer.text
  monkeypatch.setattr(leases, 'IDLE', -1.0)
  service.store.retain()  # Moments that wait would keep it, too.
  until(lambda: not service.store.stats['waiting_states'])
  service.tend(ended)
  replicas.other.service.store.hold('local', mine)


def test_nothing_is_acknowledged_while_the_database_is_away(replicas, postgres):  # noqa: F811
  mine, headers = made(replicas.one, 'away'), {'Idempotency-Key': 'away'}
  path, body = f'{ROOT}/adapters/{mine}/feedback', {'items': [ITEM]}
  postgres.stop()
  try:
    for each in (replicas.one, replicas.other):
      refused = each.http.post(path, json=body, headers=headers)
      assert refused.status_code == 503 and int(refused.headers['retry-after']) >= 1, refused.text
      assert 'postgres' not in refused.text.lower() and '/' not in refused.json()['error']['message']
  finally:
    postgres.start()
  until(lambda: all(each.http.get('/readyz').status_code == 200 for each in (replicas.one, replicas.other)))
  until(lambda: replicas.other.http.post(path, json=body, headers=headers).status_code == 200)
  assert replicas.one.service.store.adapter('local', mine).head == 1


def test_events_of_another_replica_stream_no_longer_than_to_their_client(replicas, monkeypatch):
  monkeypatch.setattr(native, '_LOOK', 0.05)
  mine, events, looks = made(replicas.one, 'watched'), replicas.one.service.events, []
  wait = events.wait
  monkeypatch.setattr(events, 'wait', lambda *given: looks.append(given) or wait(*given))
  for _ in range(8):
    with replicas.other.http.stream('GET', f'{ROOT}/adapters/{mine}/events') as answer:
      assert next(answer.iter_lines()) == ': still here'

  def nobody_looks():
    before = len(looks)
    time.sleep(0.5)
    return len(looks) == before

  assert looks
  until(nobody_looks)


def test_who_holds_an_adapter_and_does_not_answer_is_waited_for(replicas):
  mine = made(replicas.one, 'silent')
  with replicas.one.service.store.database.writing(full=True) as rows:
    replica = replicas.one.service.store.leases.replica
    rows.execute("UPDATE replicas SET url = 'http://127.0.0.1:9' WHERE id = ?", (replica,))
  try:
    answer = replicas.other.http.post(f'{ROOT}/adapters/{mine}/feedback', json={'items': [ITEM]})
    assert answer.status_code == 503 and answer.headers['retry-after'] == '1'
    assert answer.json()['error']['code'] == 'not_holder' and '127' not in answer.text
    assert json.loads(answer.text)
  finally:
    with replicas.one.service.store.database.writing(full=True) as rows:
      rows.execute('UPDATE replicas SET url = ? WHERE id = ?', (replicas.one.url, replica))
  with pytest.raises(NotHolder):
    replicas.other.service.store.hold('local', mine)
  replicas.one.service.store.leases.give_back(mine)
  assert replicas.other.http.post(f'{ROOT}/adapters/{mine}/feedback', json={'items': [ITEM]}).json()['version_after']


def test_a_holder_that_is_paused_is_waited_for_only_as_long_as_its_leases_live(replicas, monkeypatch):
  monkeypatch.setattr('sdpo_jax.serving.web.forwarding._LOOK_S', 0.01)
  mine = made(replicas.one, 'paused')
  replicas.one.service.store.leases.give_back(mine)
  with ThreadPoolExecutor() as threads, contextlib.ExitStack() as stack:
    paused = stack.enter_context(socket.create_server(('127.0.0.1', 0)))
    with replicas.one.service.store.database.writing(full=True) as rows:
      url = f'http://127.0.0.1:{paused.getsockname()[1]}'
      for name in ('paused', 'restarted'):  # The latter has begun where the former was.
        rows.execute('INSERT INTO replicas (id, url, expires) VALUES (?, ?, ?)', (name, url, 1e12))
      rows.execute('UPDATE leases SET replica = ? WHERE adapter = ?', ('paused', mine))
    path, more = f'{ROOT}/adapters/{mine}/undo', {'json': {'to': 0}, 'headers': {'X-Deadline-Ms': '20000'}}
    ask = lambda: replicas.other.http.post(path, **more)  # noqa: E731
    answer = threads.submit(ask)
    stack.enter_context(paused.accept()[0])  # Dropped, it would be closed.
    assert not answer.done()
    with replicas.one.service.store.database.writing(full=True) as rows:
      rows.execute("UPDATE replicas SET expires = 0 WHERE id = 'paused'")
    assert answer.result().json()['error']['code'] == 'not_holder'
    assert ask().json()['version'] == 1
