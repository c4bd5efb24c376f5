"""Sessions over HTTP: what is proposed, decided and learned, and that no page and no other session has a say in it."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import hashlib
import io
import json
import pathlib
import time
import types

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from sdpo_jax.serving import feedback
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Cancelled, NotHolder
from sdpo_jax.serving.sessions.sessions import Sessions
from sdpo_jax.serving.web import endpoints, session_routes, session_schemas
from sdpo_jax.serving.web.app import make_app
from sdpo_jax.serving.web.forwarding import Forwarding
from sdpo_jax.serving.web.gate import LOCAL_OWNER, send_body
from sdpo_jax.serving.web.keys import KeyFile, add
from sdpo_jax.serving.web.telemetry import Log
from tests.serving import service_world, session_world
from tests.serving.web.foreign_pages import FOREIGN

ROOT = '/v1/continual/adapters'
HELLO = [{'role': 'user', 'content': 'Hi'}]
DENIAL = {'decision': 'deny', 'correction': 'Be brief.'}
LIMITS = {
  'max_sessions_per_adapter': 3,
  'max_turns_per_session': 3,
  'max_message_bytes': 2000,
  'max_tools_bytes': 1000,
}


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  """One service behind two doors: without keys, and with the key of one owner; bodies are logged."""
  folder = tmp_path_factory.mktemp('sessions')
  config = service_world.make_config(session_world.tool_model(folder / 'model'), folder / 'root')
  config.serve.guards.min_entropy = None
  for name, value in LIMITS.items():
    setattr(config.serve.limits, name, value)
  key, _ = add(folder / 'keys.jsonl', 'ada', 'test')
  logged = io.StringIO()
  with service_world.running(config) as service, contextlib.ExitStack() as stack:
    clients = [
      stack.enter_context(
        TestClient(
          make_app(service, config.serve, keys, log=Log(logged, bodies=True)),
          base_url='http://localhost',
          headers=headers,
        )
      )
      for keys, headers in ((None, {}), (KeyFile(folder / 'keys.jsonl'), {'X-API-Key': key}))
    ]
    yield types.SimpleNamespace(
      service=service, folder=folder, logged=logged, open=clients[0], keyed=clients[1], count=iter(range(1000))
    )


class Opened:
  """A session of a new adapter, or of one that there is, as a client has it."""

  def __init__(self, world, client=None, adapter=None, **settings):
    self.client = client or world.open
    if adapter is None:
      made = self.client.post(ROOT, json={'name': f'agent-{next(world.count)}'})
      assert made.status_code == 201, made.text
      adapter = made.json()['id']
    self.adapter = f'{ROOT}/{adapter}'
    self.answer = self.client.post(f'{self.adapter}/sessions', json=settings)
    assert self.answer.status_code == 201, self.answer.text
    self.session, self.token = self.answer.json()['session'], self.answer.json()['token']
    self.at = f'{self.adapter}/sessions/{self.session["id"]}'
    self.headers = {'X-Session-Token': self.token}

  def post(self, path, body, **headers):
    return self.client.post(f'{self.at}/{path}', json=body, headers=self.headers | headers)

  def propose(self, messages=(), **more):
    answer = self.post('turns', {'messages': list(messages), **more})
    assert answer.status_code == 200, answer.text
    return answer.json()['turn']

  def decide(self, n, decision, **headers):
    answer = self.post(f'turns/{n}/decision', decision, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()

  @property
  def known(self):
    return self.client.get(self.at).json()

  @property
  def version(self):
    return self.client.get(self.adapter).json()['version']


def code(response):
  return response.status_code, response.json()['error']['code']


# A session from its opening to its end.


def test_a_session_is_opened_listed_read_and_deleted(world):
  opened = Opened(world, title='mine', update={'learning_rate': 0.01, 'is_clip': None}, rehearse=1)
  assert opened.answer.headers['location'] == opened.at and opened.session['id'].startswith('ses-')
  assert opened.session['settings']['title'] == 'mine' and opened.session['settings']['rehearse'] == 1
  assert opened.session['settings']['update'] == {'learning_rate': 0.01, 'is_clip': None}
  assert opened.known == {
    'session': opened.session,
    'turns': [],
    **dict.fromkeys(('first_id', 'last_id', 'next')),
    'has_more': False,
  }
  other = Opened(world, adapter=opened.session['adapter'])
  listed = world.open.get(f'{opened.adapter}/sessions').json()['sessions']
  assert [each['id'] for each in listed] == [opened.session['id'], other.session['id']]
  assert code(world.open.delete(opened.at)) == (403, 'forbidden')
  assert code(world.open.delete(opened.at, headers=other.headers)) == (403, 'forbidden')
  gone = world.open.delete(opened.at, headers=opened.headers)
  assert gone.json() == {'id': opened.session['id'], 'deleted': True}
  assert code(world.open.get(opened.at)) == (404, 'not_found')
  assert code(opened.post('turns', {'messages': HELLO})) == (404, 'not_found')


def test_what_is_denied_is_learned_and_the_same_is_asked_of_the_new_version(world):
  opened = Opened(world, update={'learning_rate': 0.01})
  first = opened.propose(HELLO, seed=1)
  assert (first['n'], first['version'], first['messages']) == (0, 0, HELLO)
  assert 'log_probs' not in first and first['tokens']
  answer = opened.decide(0, DENIAL)
  learned = answer['learned']
  assert answer['turn']['status'] == 'denied' and answer['turn']['decision']['correction'] == 'Be brief.'
  assert (learned['version_before'], learned['version_after'], learned['turns']) == (0, 1, [0])
  assert learned['accepted'] and learned['divergence_before'] > 0 and learned['moved'] and opened.version == 1
  second = opened.propose(seed=1)
  asked = first['prompt_tokens'] + first['tokens']  # The model reads its proposal, and the correction.
  assert second['version'] == 1 and second['prompt_tokens'][: len(asked)] == asked
  assert answer['turn']['told'] == 'Be brief.' and first['told'] is None
  assert opened.decide(1, {'decision': 'approve'})['learned'] is None
  assert [turn['status'] for turn in opened.known['turns']] == ['denied', 'approved']
  retried = opened.post('turns/0/retry', {'seed': 1}).json()['turn']
  assert retried['n'] == 0 and len(opened.known['turns']) == 2
  again = Opened(world, adapter=opened.session['adapter'], after_denial='retry')
  denied = again.propose(HELLO, seed=1)
  assert denied['tokens'] == retried['tokens'] and again.decide(0, DENIAL)['turn']['told'] is None
  assert again.propose(seed=1)['prompt_tokens'] == denied['prompt_tokens'] == first['prompt_tokens']
  text = world.open.get('/metrics').text
  assert 'sdpo_session_decisions_total{decision="approve"} 1.0' in text
  denials = float(text.split('sdpo_session_decisions_total{decision="deny"} ')[1].split('\n')[0])
  assert f'sdpo_session_denial_seconds_count {denials}' in text
  assert 'sdpo_session_learned_total{outcome="committed"}' in text


def test_what_waits_is_learned_when_it_is_told_to(world):
  opened = Opened(world, min_sdpo_examples=2)
  opened.propose(HELLO)
  waiting = opened.decide(0, DENIAL)['learned']
  assert waiting['waiting'] == 1 and waiting['version_after'] == 0 == opened.version
  learned = opened.post('flush', {}).json()['learned']
  assert learned['version_after'] == 1 == opened.version and opened.post('flush', {}).json() == {'learned': None}
  assert code(opened.post('flush', {'all': True})) == (400, 'invalid_request')


@pytest.fixture
def script(world, monkeypatch):
  """Return what the model is going to say, which by itself calls no tool."""
  script = session_world.Script(world.service)
  monkeypatch.setattr(world.service.worker, 'sample', script.sample)
  return script


def test_a_call_is_edited_run_and_what_came_of_it_answered(world, script):
  opened = Opened(world, tools=session_world.TOOLS, learn_from_results=True)
  assert opened.session['tool_form'] == 'hermes'
  script.say(session_world.called(session_world.GREP))
  turn = opened.propose(HELLO)
  assert turn['status'] == 'open' and turn['calls'] == [{'name': 'g', 'arguments': {'p': 'x'}}]
  assert code(opened.post('turns', {'messages': HELLO})) == (409, 'turn_conflict')
  early = opened.post('turns/0/results', {'results': [{'call': 0, 'ok': True, 'text': 'a:1'}]})
  assert code(early) == (409, 'turn_conflict') and early.json()['error']['current_turn'] == 0
  missing = opened.post('turns/0/decision', {'decision': 'edit', 'arguments': {'p': 'y'}, 'call': 3})
  assert code(missing) == (400, 'invalid_request') and missing.json()['error']['field'] == 'call'
  edit = opened.decide(0, {'decision': 'edit', 'arguments': {'p': 'y'}})
  assert edit['turn']['status'] == 'edited' and edit['turn']['decision']['arguments'] == {'p': 'y'}
  assert edit['learned']['version_after'] == 1 and edit['learned']['turns'] == [0]
  failed = {'call': 0, 'ok': False, 'text': 'no such file', 'exit_code': 2, 'stderr': 'y?', 'field': 'p', 'line': 3}
  results = opened.post('turns/0/results', {'results': [failed]}, **{'Idempotency-Key': 'ran'})
  assert results.json()['turn']['results'] == [failed] and results.json()['learned']['version_after'] == 2
  again = opened.post('turns/0/results', {'results': [failed]}, **{'Idempotency-Key': 'ran'})
  assert again.content == results.content and opened.version == 2
  lines = world.open.get(f'{opened.adapter}/examples').content.splitlines()
  assert [json.loads(line)['kind'] for line in lines] == ['edit', 'result']


def test_the_conversation_goes_on_behind_what_tools_have_answered(world, script):
  opened = Opened(world, tools=session_world.TOOLS)
  script.say(session_world.called(session_world.GREP), session_world.called(session_world.READ))
  first = opened.propose(HELLO)
  assert opened.decide(0, {'decision': 'approve'})['learned'] is None
  assert opened.post('turns/0/results', {'results': [{'call': 0, 'ok': True, 'text': 'a'}]}).json()['learned'] is None
  second = opened.propose()
  before = first['prompt_tokens'] + first['tokens']
  assert second['n'] == 1 and second['calls'][0]['name'] == 'r' and second['prompt_tokens'][: len(before)] == before
  assert opened.version == 0


LARGE = '{"name": "g", "arguments": {"p": 12345678901234567890, "q": [-0.0, 0.1, "\u202e"]}}'


def test_a_decision_is_about_the_call_that_was_shown(world, script):
  opened, other = Opened(world, tools=session_world.TOOLS), Opened(world, tools=session_world.TOOLS)
  script.say(session_world.called(session_world.READ), session_world.called(session_world.READ))
  harmless, turn = other.propose(HELLO), opened.propose(HELLO)
  edit = {'decision': 'edit', 'arguments': {'p': 'y'}, 'digest': turn['digest']}
  for decision in ({'decision': 'approve'}, DENIAL, edit):
    for digest in (harmless['digest'], turn['digest'].upper(), ''):
      refused = opened.post('turns/0/decision', decision | {'digest': digest})
      assert code(refused) == (409, 'turn_conflict') and refused.json()['error']['current_turn'] == 0
  assert opened.known['turns'] == [turn] and opened.version == 0
  assert harmless['calls'] == turn['calls'] and harmless['digest'] != turn['digest']
  edited = opened.decide(0, edit)['turn']
  assert edited['digest'] != turn['digest'] and opened.decide(0, edit)['turn'] == edited
  results = {'results': [{'call': 0, 'ok': True, 'text': 'a'}]}
  assert code(opened.post('turns/0/results', results | {'digest': turn['digest']})) == (409, 'turn_conflict')
  assert opened.post('turns/0/results', results | {'digest': edited['digest']}).status_code == 200
  # Clients from before there were digests.
  assert other.decide(0, {'decision': 'approve'})['turn']['status'] == 'approved'
  assert other.post('turns/0/results', results).status_code == 200


def test_numbers_are_kept_as_they_are(world, script):
  opened = Opened(world, tools=session_world.TOOLS)
  script.say(session_world.called(LARGE))
  [call] = opened.propose(HELLO)['called']
  assert call == {'name': 'g', 'arguments': json.dumps(json.loads(LARGE)['arguments'], ensure_ascii=False, indent=2)}
  assert '12345678901234567890' in call['arguments'] and '-0.0' in call['arguments']
  for number, field, why in (('1e400', 'arguments', 'not finite'), ('9' * 5000, None, 'number out of range')):
    sent = f'{{"decision": "edit", "arguments": {{"p": {number}}}}}'
    headers = opened.headers | {'Content-Type': 'application/json'}
    refused = world.open.post(f'{opened.at}/turns/0/decision', content=sent, headers=headers)
    assert code(refused) == (400, 'invalid_request') and why in refused.json()['error']['message']
    assert refused.json()['error'].get('field') == field


# Streams.


def events_of(response):
  blocks = [block.split('\n') for block in response.read().decode().strip().split('\n\n')]
  return [(lines[0].removeprefix('event: '), json.loads(lines[1].removeprefix('data: '))) for lines in blocks]


def test_a_stream_ends_with_the_turn_that_an_answer_holds(world):
  opened = Opened(world)
  body = {'messages': HELLO, 'seed': 3, 'stream': True}
  with world.open.stream('POST', f'{opened.at}/turns', json=body, headers=opened.headers) as response:
    events = events_of(response)
  assert response.headers['content-type'].startswith('text/event-stream')
  turn = events[-1][1]['turn']
  assert [kind for kind, _ in events[:-1]] == ['draft'] * (len(events) - 1) and events[-1][0] == 'turn'
  assert turn['text'].startswith(''.join(data['delta'] for _, data in events[:-1])) and len(events) > 1
  assert opened.known['turns'] == [turn]
  again = Opened(world, adapter=opened.session['adapter']).propose(HELLO, seed=3)
  assert again['tokens'] == turn['tokens']
  with world.open.stream(
    'POST', f'{opened.at}/turns/0/retry', json={'seed': 3, 'stream': True}, headers=opened.headers
  ) as response:
    assert events_of(response)[-1][1]['turn']['tokens'] == turn['tokens']
  refused = opened.post('turns/7/retry', {'stream': True})
  assert refused.status_code == 404, refused.text


@pytest.mark.parametrize('ends', ['its reader closes it', 'its sender leaves'])
def test_of_a_stream_that_nobody_reads_to_the_end_no_turn_is_left(world, ends):
  opened, call = Opened(world), Call()
  asked = endpoints.Incoming(
    account=Account(world.service, LOCAL_OWNER, call),
    call=call,
    body=session_schemas.ProposeRequest.model_validate({'messages': HELLO, 'stream': True, 'seed': 3}),
    path={'session': opened.session['id']},
    adapter=opened.session['adapter'],
    query={},
    expected=None,
    idempotency=None,
    last_event=None,
    metrics=None,
    post_to_replica=None,
  )
  stream = session_routes.streamed(session_routes.propose, asked)
  assert next(stream).event == 'draft'
  if ends == 'its reader closes it':
    stream.close()
  else:
    call.end()
    with pytest.raises(Cancelled):
      list(stream)
  assert opened.known['turns'] == []
  assert opened.propose(HELLO)['n'] == 0


# Requests that come twice, and those that come too late.


def test_a_decision_that_is_sent_again_is_answered_alike_and_learned_once(world):
  opened = Opened(world)
  opened.propose(HELLO)
  first, again = (opened.post('turns/0/decision', DENIAL, **{'Idempotency-Key': 'no'}) for _ in range(2))
  assert first.status_code == 200 and first.content == again.content
  assert again.headers['idempotency-replayed'] == 'true' and opened.version == 1
  changed = opened.post('turns/0/decision', DENIAL | {'correction': 'Be long.'}, **{'Idempotency-Key': 'no'})
  assert code(changed) == (422, 'unprocessable')
  # Without the key, the turn itself knows what was decided.
  assert opened.decide(0, DENIAL)['learned']['version_after'] == 1 == opened.version
  # The process died with what it was about to say: nothing is known of the request.
  with world.service.store.database.writing() as rows:
    world.service.store.database.drop_request(rows, LOCAL_OWNER, hashlib.sha256(b'no').hexdigest())
  lost = opened.post('turns/0/decision', DENIAL, **{'Idempotency-Key': 'no'})
  assert lost.json()['turn'] == first.json()['turn'] and opened.version == 1


def test_another_decision_of_a_decided_turn_is_a_conflict_that_names_the_current_one(world):
  opened = Opened(world)
  opened.propose(HELLO)
  opened.decide(0, DENIAL)
  opened.propose()
  for late in ({'decision': 'approve'}, DENIAL | {'correction': 'Be long.'}):
    refused = opened.post('turns/0/decision', late)
    assert code(refused) == (409, 'turn_conflict') and refused.json()['error']['current_turn'] == 1
  assert opened.version == 1


def test_kept_answers_go_with_the_adapter(world):
  opened = Opened(world)
  opened.propose(HELLO)
  asked = {'json': DENIAL, 'headers': opened.headers | {'Idempotency-Key': 'gone'}}
  first = world.open.post(f'{opened.at}/turns/0/decision', **asked)
  assert first.status_code == 200
  world.open.delete(opened.adapter)
  assert code(world.open.post(f'{opened.at}/turns/0/decision', **asked)) == (404, 'not_found')
  assert world.service.store.database.request(LOCAL_OWNER, hashlib.sha256(b'gone').hexdigest()) is None


def test_texts_of_sessions_wait_for_their_turn_and_not_for_the_tokenizer(world, script):
  """Else those of one key would stand before the texts of all others."""
  service, turns = world.service, world.service.parsing
  opened, other = Opened(world, tools=session_world.TOOLS), Opened(world)

  def replay():
    lines = world.open.get(f'{opened.adapter}/examples').content
    return world.open.post(f'{other.adapter}/replay', content=lines, headers={'Content-Type': session_routes.NDJSON})

  script.say(session_world.called(session_world.GREP), session_world.called(session_world.READ))
  with ThreadPoolExecutor() as threads:
    for asked in (
      lambda: world.open.post(f'{opened.adapter}/sessions', json={}),
      lambda: opened.post('turns', {'messages': HELLO}),
      lambda: opened.post('turns/0/decision', DENIAL),
      lambda: opened.post('turns', {}),
      lambda: opened.post('turns/1/decision', {'decision': 'edit', 'arguments': {'p': 'y'}}),
      replay,
    ):
      with turns.of(Call()):
        answer = threads.submit(asked)
        while not turns._waiting and not answer.done():  # noqa: SLF001 (Nothing else tells.)
          time.sleep(0.001)
        assert not answer.done() and not service.tokenizing.locked()
      assert answer.result().status_code in (200, 201), answer.result().text


# Examples.


def test_examples_travel_as_lines_and_are_learned_by_another_adapter(world):
  opened, other = Opened(world), Opened(world)
  opened.propose(HELLO)
  opened.decide(0, DENIAL)
  found = world.open.get(f'{opened.adapter}/examples?session={opened.session["id"]}')
  lines = found.content.splitlines()
  assert found.headers['content-type'] == session_routes.NDJSON and len(lines) == 1 and 'Be brief.' in lines[0].decode()
  assert world.open.get(f'{opened.adapter}/examples').content == found.content
  assert world.open.get(f'{other.adapter}/examples').content == b''
  asked = {'content': found.content, 'headers': {'Content-Type': session_routes.NDJSON, 'Idempotency-Key': 'replay'}}
  first, again = (world.open.post(f'{other.adapter}/replay', **asked) for _ in range(2))
  assert first.status_code == 200 and first.content == again.content, first.text
  assert [each['version_after'] for each in first.json()['learned']] == [1] and other.version == 1


def test_turns_and_examples_have_pages(world):
  opened = Opened(world, min_sdpo_examples=64)
  for n in range(3):
    opened.propose(HELLO if n == 0 else ())
    opened.decide(n, DENIAL | {'correction': f'Say {n}.'})
  whole, found, after = opened.known, [], {}
  assert len(whole['turns']) == 3 and whole['next'] is None
  while after is not None:
    page = opened.client.get(opened.at, params={'limit': 2, **after}).json()
    assert page['session'] == whole['session'] and 0 < len(page['turns']) <= 2
    found += page['turns']
    after = {'after': page['next']} if page['has_more'] else None
  assert found == whole['turns']
  other = Opened(world, adapter=opened.session['adapter'], min_sdpo_examples=64)
  other.propose(HELLO)
  other.decide(0, DENIAL)
  for only, count in (({}, 4), ({'session': opened.session['id']}, 3)):
    lines = world.open.get(f'{opened.adapter}/examples', params=only).content.splitlines()
    assert len(lines) == count
    for limit in (1, 3, 4):
      answer = world.open.get(f'{opened.adapter}/examples', params={'limit': limit, **only})
      parts = [answer.content.splitlines()]
      while 'next' in answer.links:
        answer = world.open.get(answer.links['next']['url'])
        parts.append(answer.content.splitlines())
      assert sum(parts, []) == lines and all(0 < len(part) <= limit for part in parts)
  first = json.loads(world.open.get(f'{opened.adapter}/examples', params={'limit': 1}).content)
  opened.client.delete(opened.at, headers=opened.headers)
  [left] = world.open.get(f'{opened.adapter}/examples', params={'after': first['id']}).content.splitlines()
  assert json.loads(left)['session'] == other.session['id']
  for query in ({'limit': 0}, {'limit': 1001}, {'after': 'x'}, {'after': '-1'}):
    for path in (other.at, f'{opened.adapter}/examples'):
      assert code(world.open.get(path, params=query)) == (400, 'invalid_request')


def test_rehearsals_that_were_not_learned_fill_no_page(world):
  settings = {'canary_prompts': [HELLO]}
  adapter = world.open.post(ROOT, json={'name': 'guarded', 'settings': settings}).json()['id']
  opened = Opened(world, adapter=adapter, rehearse=1, guards={'min_entropy': 50.0})  # Rejects every step.
  opened.propose(HELLO)
  opened.decide(0, {'decision': 'approve'})
  turn = opened.propose(HELLO)
  assert turn['n'] == 1 and opened.decide(1, DENIAL)['learned']['accepted'] is False
  answer = world.open.get(f'{opened.adapter}/examples', params={'limit': 1})
  [line] = answer.content.splitlines()
  assert json.loads(line)['kind'] == 'denial' and 'next' not in answer.links


def test_a_replay_that_was_cut_short_goes_on_where_it_was(world):
  opened, other = Opened(world, update={'learning_rate': 1e-3}), Opened(world)
  opened.propose(HELLO)
  opened.decide(0, DENIAL)
  opened.propose()
  opened.decide(1, DENIAL)
  lines = world.open.get(f'{opened.adapter}/examples').content
  asked = {'content': lines, 'headers': {'Content-Type': session_routes.NDJSON, 'Idempotency-Key': 'cut'}}
  first = world.open.post(f'{other.adapter}/replay', **asked).json()['learned']
  assert [each['version_after'] for each in first] == [1, 2] == [each['turns'][0] + 1 for each in first]
  key, database = hashlib.sha256(b'cut').hexdigest(), world.service.store.database
  with (
    database.writing() as rows
  ):  # As after a kill: of the whole nothing is known, and of the last step only its version.
    database.drop_request(rows, LOCAL_OWNER, key)
    rows.execute("UPDATE requests SET state = 'made', response = NULL WHERE key = ?", (f'{key}/1',))
  again = world.open.post(f'{other.adapter}/replay', **asked).json()['learned']
  assert again[0] == first[0] and other.version == 2
  assert [(each['version_before'], each['version_after'], each['turns']) for each in again] == [
    (0, 1, [0]),
    (1, 2, [1]),
  ]
  with database.writing() as rows:  # It was killed before the last step was learned: only that is.
    for name in (key, f'{key}/1'):
      database.drop_request(rows, LOCAL_OWNER, name)
    rows.execute('UPDATE versions SET request_key = NULL WHERE adapter = ? AND number = 2', (other.session['adapter'],))
  last = world.open.post(f'{other.adapter}/replay', **asked).json()['learned']
  assert [each['version_after'] for each in last] == [1, 3] and other.version == 3


def test_a_replay_is_begun_anew_by_no_other_replica(world, monkeypatch):
  opened, other = Opened(world, update={'learning_rate': 1e-3}), Opened(world)
  opened.propose(HELLO)
  opened.decide(0, DENIAL)
  opened.propose()
  opened.decide(1, DENIAL)
  lines = world.open.get(f'{opened.adapter}/examples').content
  kind, learn, sent = {'Content-Type': session_routes.NDJSON}, feedback.learn, []

  def learn_once(account, adapter, *rest, **more):
    if account.version(adapter).number:  # Another replica has taken it over.
      raise NotHolder('http://there', 'there')
    return learn(account, adapter, *rest, **more)

  async def forwarded(self, holder, request, call, scope, receive, send):
    sent.append((holder.url, request.header('idempotency-key')))
    await send_body(send, 200, b'{"learned": []}', {})

  monkeypatch.setattr(feedback, 'learn', learn_once)
  monkeypatch.setattr(Forwarding, '__call__', forwarded)
  refused = world.open.post(f'{other.adapter}/replay', content=lines, headers=kind)
  assert sent == [] and code(refused) == (503, 'not_holder')
  assert 'after 1 steps of the replay' in refused.json()['error']['message'] and other.version == 1
  keyed = Opened(world)  # With a key the other one knows what was learned.
  answer = world.open.post(f'{keyed.adapter}/replay', content=lines, headers=kind | {'Idempotency-Key': 'moved'})
  assert answer.json() == {'learned': []} and keyed.version == 1 and sent == [('http://there', 'moved')]
  key, database = hashlib.sha256(b'moved').hexdigest(), world.service.store.database
  assert database.request(LOCAL_OWNER, f'{key}/0').state == 'done'
  assert [database.request(LOCAL_OWNER, name) for name in (key, f'{key}/1')] == [None, None]


@pytest.mark.parametrize('line', [b'', b'{}', b'[]', b'nothing', b'{"session": 3}', b'\xff', b'[' * 100_000])
def test_lines_that_are_no_examples_are_refused_by_their_number(world, line):
  opened = Opened(world)
  refused = world.open.post(f'{opened.adapter}/replay', content=line, headers={'Content-Type': session_routes.NDJSON})
  assert code(refused) == (400, 'invalid_request') and opened.version == 0
  assert ('Line 1' if line else 'no example') in refused.json()['error']['message']


# What is refused.


@pytest.mark.parametrize(
  'path, body, words',
  [
    ('turns', {'messages': [{'role': 'system', 'content': 'x'}]}, 'messages.0.role'),
    ('turns', {'messages': [{'role': 'user', 'content': 'x' * 2001}]}, 'serve.limits.max_message_bytes'),
    ('turns', {'messages': HELLO, 'sead': 1}, 'no field sead'),
    ('turns?seed=1', {'messages': HELLO}, "no parameter 'seed'"),
    ('turns?seed=1', {'messages': HELLO, 'stream': True}, "no parameter 'seed'"),
    ('turns/0/decision', {'decision': 'perhaps'}, 'decision'),
    ('turns/0/decision', {'decision': 'edit'}, 'arguments'),
    ('turns/0/decision', {'decision': 'approve', 'correction': 'x'}, 'correction'),
    ('turns/0/decision', {'decision': 'deny', 'correction': 'é' * 1001}, 'serve.limits.max_message_bytes'),
    ('turns/0/results', {'results': []}, 'results'),
    ('turns/0/results', {'results': [{'ok': True, 'text': '', 'colour': 1}]}, 'no field results.0.colour'),
    ('turns/0/results', {'results': [{'call': 0, 'ok': 'yes', 'text': ''}]}, 'results.0.ok'),
    ('turns/one/decision', DENIAL, 'whole number'),
  ],
)
def test_what_cannot_be_is_refused_in_a_sentence_that_names_it(world, path, body, words):
  opened = Opened(world)
  opened.propose(HELLO)
  refused = opened.post(path, body)
  assert code(refused) == (400, 'invalid_request') and words in refused.json()['error']['message']
  assert opened.known['turns'][0]['decision'] is None and opened.version == 0


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'system': 'x' * 2001}, 'serve.limits.max_message_bytes'),
    ({'tools': [{'name': 'x' * 1001}]}, 'serve.limits.max_tools_bytes'),
    ({'teacher': 'nobody'}, 'teacher'),
    ({'min_sdpo_examples': 0}, 'min_sdpo_examples'),
    ({'sampling': {'temperature': -1}}, 'sampling.temperature'),
    ({'update': {'learning_rate': 'high'}}, 'update.learning_rate'),
    ({'colour': 'red'}, 'no field colour'),
    ({'after_denial': 'ask'}, "after_denial: Input should be 'tell' or 'retry'"),
    ({'tools': [{'type': 'function'}]}, 'tools.0: must be {"type": "function"'),
    ({'tools': [{'name': 'x'}] * 129}, 'tools: List should have at most 128 items'),
  ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence_that_names_them(world, settings, words):
  made = world.open.post(ROOT, json={'name': f'agent-{next(world.count)}'}).json()
  refused = world.open.post(f'{ROOT}/{made["id"]}/sessions', json=settings)
  assert code(refused) == (400, 'invalid_request') and words in refused.json()['error']['message']
  assert world.open.get(f'{ROOT}/{made["id"]}/sessions').json()['sessions'] == []


def test_there_are_as_many_sessions_and_turns_as_the_settings_say(world):
  opened = Opened(world)
  for _ in range(LIMITS['max_sessions_per_adapter'] - 1):
    Opened(world, adapter=opened.session['adapter'])
  refused = world.open.post(f'{opened.adapter}/sessions', json={})
  assert code(refused) == (403, 'forbidden') and 'max_sessions_per_adapter' in refused.json()['error']['message']
  world.open.delete(opened.at, headers=opened.headers)
  opened = Opened(world, adapter=opened.session['adapter'], update={'learning_rate': 0.0})
  opened.propose(HELLO)
  for n in range(LIMITS['max_turns_per_session'] - 1):
    opened.decide(n, DENIAL)
    opened.propose()
  opened.decide(LIMITS['max_turns_per_session'] - 1, DENIAL)
  refused = opened.post('turns', {})
  assert code(refused) == (403, 'forbidden') and 'max_turns_per_session' in refused.json()['error']['message']


def test_if_match_is_refused_where_it_would_be_ignored(world):
  opened = Opened(world)
  opened.propose(HELLO)
  refused = opened.post('turns/0/decision', DENIAL, **{'If-Match': '"0"'})
  assert code(refused) == (400, 'invalid_request') and refused.json()['error']['field'] == 'If-Match'


# No page and no other session has a say.

BODIES = {
  'turns': {'json': {'messages': HELLO}},
  'decision': {'json': {'decision': 'approve'}},
  'results': {'json': {'results': [{'call': 0, 'ok': True, 'text': ''}]}},
  'replay': {'content': b'{}', 'headers': {'Content-Type': session_routes.NDJSON}},
}


def asked_of(opened, method, pattern, headers):
  """Return what comes of a request to a route of sessions that would do something, with the token and other headers."""
  ids = {'adapter': opened.session['adapter'], 'session': opened.session['id'], 'n': '0'}
  more = BODIES.get(pattern.rsplit('/', 1)[1], {'json': {}} if method == 'POST' else {})
  every = {**more.get('headers', {}), **opened.headers, **headers}
  return opened.client.request(method, pattern.format(**ids), **{**more, 'headers': every})


def of_sessions():
  return [(method, route) for route in session_routes.ROUTES for method in sorted(route.methods - {'HEAD'})]


def test_every_route_of_sessions_is_guarded_and_every_change_of_one_needs_its_token(world):
  below = [route for route in world.open.app.routes if isinstance(route, Route) and 'session' in route.path]
  assert {route.path for route in below} <= {route.path for route in session_routes.ROUTES} and len(below) == 9
  assert len(of_sessions()) == 11
  for method, route in of_sessions():
    known = route.endpoint.operation
    assert known.guarded and known.token == ('{session}' in route.path and method != 'GET'), route.path


@pytest.mark.parametrize('door', ['open', 'keyed'])
def test_pages_of_others_can_neither_read_nor_open_nor_decide_nor_stream(world, door):
  opened = Opened(world, getattr(world, door))
  opened.propose(HELLO)
  before = opened.known, opened.client.get(f'{opened.adapter}/sessions').json(), opened.version
  for method, route in of_sessions():
    for who, headers in FOREIGN.items():
      refused = asked_of(opened, method, route.path, headers)
      assert code(refused) == (403, 'forbidden'), (who, route.path, refused.text)
      assert 'access-control-allow-origin' not in refused.headers and opened.session['id'] not in refused.text
    # What a form or a script sends without being asked for leave.
    for kind in ('text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data') if method == 'POST' else ():
      assert asked_of(opened, method, route.path, {'Content-Type': kind}).status_code == 415, route.path
  assert before == (opened.known, opened.client.get(f'{opened.adapter}/sessions').json(), opened.version)


@pytest.mark.parametrize('door', ['open', 'keyed'])
def test_reading_changes_nothing(world, door):
  opened = Opened(world, getattr(world, door))
  opened.propose(HELLO)
  opened.decide(0, DENIAL)

  def state():
    owner, adapter = 'ada' if door == 'keyed' else LOCAL_OWNER, opened.session['adapter']
    account = Account(world.service, owner)
    turns = [turn.to_json() for turn in Sessions(account).turns(adapter, opened.session['id'])]
    return turns, account.versions(adapter), Sessions(account).list(adapter)

  before = state()
  for method, route in of_sessions():
    if method == 'GET':
      assert asked_of(opened, method, route.path, {}).status_code == 200
      # And no change can be asked for by reading.
    else:
      assert asked_of(opened, 'GET', route.path, {}).status_code in (200, 405)
  assert state() == before


def test_the_token_of_another_session_opens_nothing(world):
  opened = Opened(world)
  opened.propose(HELLO)
  other, before = Opened(world, adapter=opened.session['adapter']), opened.known
  changing = [(method, route.path) for method, route in of_sessions() if route.endpoint.operation.token]
  assert len(changing) == 6
  for method, path in changing:
    for token in (other.token, opened.token[:-1], opened.token.upper(), '', 'é'.encode()):
      assert code(asked_of(opened, method, path, {'X-Session-Token': token})) == (403, 'forbidden'), path
  assert opened.known == before


def test_a_token_is_neither_kept_nor_logged_nor_told_again(world):
  opened = Opened(world)
  opened.propose(HELLO)
  opened.decide(0, DENIAL, **{'Idempotency-Key': 'told'})
  asked_of(opened, 'POST', f'{opened.at}/turns', {'X-Session-Token': f'{opened.token}x'})
  told = [
    opened.client.get(path).text for path in (opened.at, f'{opened.adapter}/sessions', f'{opened.adapter}/examples')
  ]
  assert all(opened.token not in text for text in told)
  assert 'Be brief.' in world.logged.getvalue() and opened.token not in world.logged.getvalue()
  files = [path for path in pathlib.Path(world.folder).rglob('*') if path.is_file()]
  assert len(files) > 3 and all(opened.token.encode() not in path.read_bytes() for path in files)
