"""Tokasaurus' routes: an exchange of its published client, recorded in our names, and who may send one."""

import base64
import io
import json
import pickle
import types

import numpy as np
import pytest
from starlette.testclient import TestClient

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.models.adapters import published_cartridges
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.web import openai_logprobs
from sdpo_jax.serving.web.app import make_app
from sdpo_jax.serving.web.keys import KeyFile, add
from sdpo_jax.serving.web.telemetry import Log
from tests.config.valid_config import valid
from tests.serving import service_world
from tests.serving.web.foreign_pages import FOREIGN

BASE = '/tokasaurus'
BATCHES = ('custom/synchronous-batch-completions', 'custom/cartridge/synchronous-batch-completions')
BATCHES += ('batch/cartridge/chat/completions',)
CHAT, TEXT = 'custom/cartridge/chat/completions', 'custom/cartridge/completions'
# What the client posts, with names of this service.
ROW = {
  'messages': [{'role': 'user', 'content': 'What is 2+2?'}],
  'model': 'Tiny',
  'max_completion_tokens': 6,
  'temperature': 0.0,
  'apply_chat_template_overrides': {},
  'logprobs_in_fingerprint': True,
}
CARTRIDGES = [{'id': 'run-1/step-3', 'source': 'local', 'force_redownload': False}]
TOP = {'logprobs': True, 'top_logprobs': 5}
HEADERS = {'User-Agent': 'Python/3.11 aiohttp/3.14.5', 'Accept': '*/*', 'Accept-Encoding': 'gzip, deflate'}


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  """Yield a service with keys whose owner ada has a cartridge, as bob has another one."""
  folder = tmp_path_factory.mktemp('tokasaurus')
  config = service_world.make_config(service_world.model_folder(folder / 'model'), folder / 'root')
  config.serve.http.keys = str(folder / 'keys.jsonl')
  secrets = {owner: add(folder / 'keys.jsonl', owner, 'test')[0] for owner in ('ada', 'bob')}
  keys, logged = KeyFile(folder / 'keys.jsonl'), io.StringIO()
  with service_world.running(config) as service:
    for owner, name in (('ada', 'run-1-step-3'), ('bob', 'secret')):
      Account(service, owner).import_files(name, files(service, folder / name))
    off = make_app(service, config.serve, keys, log=Log(logged))
    config.serve.tokasaurus_tenant = 'ada'
    app = make_app(service, config.serve, keys, log=Log(logged))
    yield types.SimpleNamespace(service=service, config=config, secrets=secrets, app=app, off=off, logged=logged)


def files(service, folder):
  """Return a random cartridge as it is published."""
  sizes, draw = service.served.policy.config, np.random.default_rng(0)
  shape = sizes.layers, sizes.kv_heads, service_world.SLOTS, sizes.head_dim
  slots = (np.float32(0.5 * draw.standard_normal(shape)) for _ in range(2))
  published_cartridges.write(folder, Cartridge(*slots, 1), 'tiny')
  return {file.name: file.read_bytes() for file in folder.iterdir()}


def client(app, machine='127.0.0.1', **headers):
  return TestClient(app, base_url='http://127.0.0.1:8420', client=(machine, 1), headers={**HEADERS, **headers})


@pytest.fixture(scope='module')
def here(world):
  return client(world.app)


class PlainUnpickler(pickle.Unpickler):
  """Reads no pickle that names a class or a function."""

  def find_class(self, module, name):
    raise AssertionError(f'{module}.{name}')


def batch(here, path, *rows):
  response = here.post(f'{BASE}/{path}', json={'requests': rows})
  assert response.status_code == 200, response.text
  assert response.headers['content-type'] == 'application/octet-stream' and response.content[:2] == b'\x80\x04'
  found = PlainUnpickler(io.BytesIO(response.content)).load()
  assert len(found) == len(rows)
  return found


def array(text, kind):
  return np.frombuffer(base64.b64decode(text), kind)


def refused(here, path, status=400, /, **body):
  response = here.post(f'{BASE}/{path}', json=body)
  assert response.status_code == status and list(response.json()) == ['detail'], response.text
  return response.json()['detail']


@pytest.mark.parametrize('path', BATCHES)
def test_a_recorded_exchange_with_a_cartridge_and_as_the_teacher(world, here, path):
  """Tokens, text and log-probs as the account has them; both in one batch, in their order."""
  system = [{'role': 'system', 'content': 'Be brief.'}, *ROW['messages']]
  behind, alone = batch(here, path, ROW | {'cartridges': CARTRIDGES}, ROW | TOP | {'messages': system})
  account = Account(world.service, 'ada')
  for row, messages, model in ((behind, ROW['messages'], 'base#run-1-step-3'), (alone, system, 'base')):
    prompt = world.service.prompt_of(messages=messages)
    options = service_world.SampleOptions(max_tokens=6, temperature=0.0)
    [expected] = account.sample(account.resolve(model), prompt, options=options).result()
    said = json.loads(row['system_fingerprint'])
    [choice] = row['choices']
    assert said['completion_ids'] == [expected.tokens] and choice['message']['content'] == expected.text
    assert row['usage'] == {
      'prompt_tokens': len(prompt),
      'completion_tokens': len(expected.tokens),
      'total_tokens': len(prompt) + len(expected.tokens),
    }
    assert row['model'] == 'Tiny' and choice['logprobs'] is None and choice['index'] == 0
    assert choice['finish_reason'] == ('length' if len(expected.tokens) == 6 else 'stop')
    chosen = array(said['packed_chosen_logprobs'][0], '<f4')
    np.testing.assert_allclose(chosen, expected.log_probs, atol=1e-4)
    if model == 'base':
      ids, values = (
        array(said[name][0], kind).reshape(len(chosen), 5)
        for name, kind in (('packed_topk_indices', '<i4'), ('packed_topk_logprobs', '<f4'))
      )
      assert ids[:, 0].tolist() == expected.tokens and (values[:, 0] == chosen).all()
      [scored] = account.score(account.resolve('base'), [(prompt, expected.tokens)], topk=5)
      np.testing.assert_array_equal(ids, scored.top_ids)
      np.testing.assert_allclose(values, scored.top_log_probs, atol=1e-4)
    else:
      assert said['packed_topk_indices'] is None and said['packed_topk_logprobs'] is None


def test_the_json_routes_answer_alike(here, world):
  [row] = batch(here, BATCHES[1], ROW | TOP)
  wide = here.post(f'{BASE}/{CHAT}', json=ROW | {'top_logprobs': 20, 'logprobs': True, 'stop': None}).json()
  said, packed = json.loads(wide['system_fingerprint']), json.loads(row['system_fingerprint'])
  assert said['completion_ids'] == packed['completion_ids']
  assert len(array(said['packed_topk_indices'][0], '<i4')) == 20 * len(said['completion_ids'][0])
  assert wide['usage'].pop('prompt_tokens_details').keys() == {'cached_tokens'} and wide['usage'] == row['usage']
  plain = here.post(f'{BASE}/{CHAT}', json=ROW | TOP | {'logprobs_in_fingerprint': False}).json()
  content = plain['choices'][0]['logprobs']['content']
  np.testing.assert_allclose([at['logprob'] for at in content], array(packed['packed_chosen_logprobs'][0], '<f4'), 1e-5)
  assert [len(at['top_logprobs']) for at in content] == [5] * len(content)
  assert json.loads(plain['system_fingerprint'])['packed_chosen_logprobs'] is None
  prompt = world.service.prompt_of(messages=ROW['messages'])
  body = {'model': 'default', 'prompt': prompt, 'max_tokens': 6, 'temperature': 0, 'logprobs': 2, 'n': 2}
  text = here.post(f'{BASE}/{TEXT}', json=body).json()
  assert text['object'] == 'text_completion' and len(text['choices'][1]['logprobs']['top_logprobs'][0]) == 2
  assert json.loads(text['system_fingerprint'])['completion_ids'] == packed['completion_ids'] * 2
  assert text['usage']['prompt_tokens'] == 2 * len(prompt)


def test_log_probs_are_written_once(here, monkeypatch):
  monkeypatch.setattr(openai_logprobs, 'content_shape', None)
  [row] = batch(here, BATCHES[0], ROW | TOP)
  assert row['choices'][0]['logprobs'] is None


def test_log_probs_are_those_of_the_temperature(here, world):
  [row] = batch(here, BATCHES[0], ROW | {'temperature': 0.5, 'seed': 3})
  said = json.loads(row['system_fingerprint'])
  [tokens] = said['completion_ids']
  account, prompt = Account(world.service, 'ada'), world.service.prompt_of(messages=ROW['messages'])
  vocab = world.service.vocab_size
  ids = [np.tile(np.arange(vocab, dtype=np.int32), (len(tokens), 1))]
  [scored] = account.score(account.resolve('base'), [(prompt, tokens)], topk=1, ids=ids)
  tempered = scored.of_ids / 0.5
  expected = tempered[np.arange(len(tokens)), tokens] - np.log(np.exp(tempered).sum(axis=1))
  np.testing.assert_allclose(array(said['packed_chosen_logprobs'][0], '<f4'), expected, atol=1e-3)


def test_there_is_one_model_and_a_ping(here):
  found = here.get(f'{BASE}/v1/models').json()
  assert found['object'] == 'list' and [each['id'] for each in found['data']] == ['tiny']
  assert here.get(f'{BASE}/ping').json() == {'message': 'pong'}


@pytest.mark.parametrize(
  'changes, sentence',
  [
    ({'cartridges': CARTRIDGES, **TOP}, 'not supported behind a cartridge'),
    ({'temperature': 0.7, **TOP}, 'temperature other than 0 and 1'),
    ({'cartridges': [{'id': 'wauoq23f'}]}, 'wandb is not read here: upload it under that name'),
    ({'cartridges': [{'id': 'a/b', 'source': 'huggingface'}]}, "'a-b', and huggingface is not read"),
    ({'cartridges': [{'id': 'none', 'source': 'local'}]}, "no cartridge 'none'"),
    ({'cartridges': [{'id': 'base'}]}, "no cartridge 'base'"),
    ({'stream': True}, 'stream is not supported'),
    ({'top_p': 0.9}, 'top_p is not supported'),
    ({'prompt_logprobs': 1}, 'prompt_logprobs is not supported'),
    ({'frequency_penalty': 1}, 'frequency_penalty is not supported'),
    ({'ignore_eos': True}, 'ignore_eos is not supported'),
    ({'enable_thinking': True}, 'enable_thinking'),
    ({'apply_chat_template_overrides': {'enable_thinking': True}}, 'must be as data.enable_thinking'),
    ({'model': 'other'}, 'model must be tiny'),
    ({'messages': [*ROW['messages'], {'role': 'assistant', 'content': 'It is'}]}, 'must end with one of the user'),
    (
      {'messages': [{'role': 'system', 'content': '<cartridge>{}</cartridge>'}, *ROW['messages']]},
      'named in their field',
    ),
    ({'top_logprobs': 21, 'logprobs': True}, 'serve.limits.max_logprobs'),
    ({'n': 129}, ''),
    ({'max_completion_tokens': 10**9}, 'serve.response_buckets'),
    ({'max_completion_tokens': 0}, 'generates nothing'),
    ({'max_tokens': 6}, 'send one of max_tokens'),
    ({'max_completion_tokens': None}, 'send one of max_tokens'),
    ({'top_logprobs': 5}, 'top_logprobs requires logprobs'),
    ({'messages': 'Hi'}, 'messages'),
    ({'messages': [{'role': 'user', 'content': 'Hi', 'extra': 1}]}, 'extra'),
    ({'cartridges': [{'id': 'a', 'source': 's3'}]}, 'source'),
    ({'cartridges': [{}] * 65}, 'cartridges'),
    ({'temperature': 'hot'}, 'temperature'),
  ],
)
def test_what_cannot_be_done_is_refused_by_name_and_all_of_its_batch(here, changes, sentence):
  status = here.post(f'{BASE}/{CHAT}', json=ROW | changes).status_code
  assert status in (400, 422)
  assert sentence in refused(here, CHAT, status, **(ROW | changes))
  said = refused(here, BATCHES[2], status, requests=[ROW, ROW | changes])
  assert sentence in said and not said.endswith('..')


def test_hostile_bodies_are_refused_before_anything_is_sampled(here, world):
  assert 'serve.limits.max_waiting' in refused(here, BATCHES[0], requests=[ROW] * 257)
  assert 'at most 4096 items' in refused(here, BATCHES[0], 422, requests=[ROW] * 10_000)
  for body in (b'{', b'[]', b'', b'{"requests": 3}', b'{"requests": [[]]}', b'[' * 10_000, pickle.dumps([1])):
    response = here.post(f'{BASE}/{BATCHES[0]}', content=body, headers={'Content-Type': 'application/json'})
    assert response.status_code in (400, 422) and list(response.json()) == ['detail'], body[:20]
  assert here.post(f'{BASE}/{CHAT}', data={'model': 'tiny'}).status_code == 415
  assert batch(here, BATCHES[0]) == []
  assert refused(here, TEXT, model='tiny', prompt=['a', 'b']).startswith('Several prompts')
  assert 'echo' in refused(here, TEXT, model='tiny', prompt='a', echo=True)


def test_the_cartridge_of_another_owner_looks_unknown(here):
  foreign, unknown = (refused(here, CHAT, **ROW, cartridges=[{'id': name}]) for name in ('secret', 'nobody'))
  assert foreign == unknown.replace('nobody', 'secret')


def test_only_programs_on_this_machine_are_served_and_elsewhere_nobody_without_a_key(world, here):
  body = {'requests': [ROW]}
  for machine in ('10.0.0.7', '192.168.1.2', 'fe80::1', 'testclient', ''):
    for path in ('ping', 'v1/models'):
      assert client(world.app, machine).get(f'{BASE}/{path}').status_code == 403
    assert client(world.app, machine).post(f'{BASE}/{BATCHES[0]}', json=body).status_code == 403
  proxies = ('X-Forwarded-For', 'X-Forwarded-Host', 'Forwarded', 'X-Real-IP', 'Via')
  for headers in (*FOREIGN.values(), *({name: '10.0.0.7'} for name in proxies), {'Host': 'tokasaurus.example'}):
    response = client(world.app, **headers).get(f'{BASE}/ping')
    assert response.status_code == 403 and list(response.json()) == ['detail'], headers
  assert client(world.app, '::1').get(f'{BASE}/ping').status_code == 200

  async def behind_a_proxy(scope, receive, send):
    await world.app(scope | {'http_version': '1.0'}, receive, send)

  assert client(behind_a_proxy).get(f'{BASE}/ping').status_code == 403
  for path in ('/v1/models', '/v1/continual/adapters', '/v1/usage', f'{BASE}/v1/adapters', f'{BASE}/../v1/usage'):
    assert here.get(path).status_code in (401, 403), path
  assert here.post('/v1/chat/completions', json={'model': 'tiny', 'messages': ROW['messages']}).status_code == 401


def test_requests_are_counted_as_those_of_a_key_named_like_the_tenant(world, here):
  before = world.logged.tell()
  batch(here, BATCHES[0], ROW)
  world.logged.seek(before)
  line = json.loads(world.logged.read())
  assert line['key'] == 'ada' and line['tokens']['sampled'] > 0
  world.config.serve.limits.tokens_per_day, most = 1, world.config.serve.limits.tokens_per_day
  try:
    response = here.post(f'{BASE}/{BATCHES[0]}', json={'requests': [ROW]})
    assert response.status_code in (400, 429) and list(response.json()) == ['detail']
  finally:
    world.config.serve.limits.tokens_per_day = most


def test_it_is_off_by_default_and_described_when_it_is_on(world, here):
  assert Config().serve.tokasaurus_tenant == ''
  keyed = {'X-API-Key': world.secrets['ada']}
  assert client(world.off, **keyed).get(f'{BASE}/ping').status_code == 404
  paths = here.get('/openapi.json').json()['paths']
  found = {path for path in paths if path.startswith(BASE)}
  assert found == {f'{BASE}/{path}' for path in (*BATCHES, CHAT, TEXT, 'ping', 'v1/models')}
  assert all(entry['security'] == [] and entry['summary'] for path in found for entry in paths[path].values())


@pytest.mark.parametrize(
  'changes, sentence',
  [
    ({'host': '0.0.0.0', 'keys': 'keys'}, 'serve.http.host=127.0.0.1'),
    ({'allowed_hosts': ('box.example',), 'keys': 'keys'}, 'serve.http.allowed_hosts empty'),
    ({}, "name 'local' unless there are serve.http.keys"),
  ],
)
def test_what_would_let_others_in_is_refused_at_the_start(changes, sentence):
  config = valid()
  config.serve.tokasaurus_tenant = 'ada'
  for name, value in changes.items():
    setattr(config.serve.http, name, value)
  with pytest.raises(UserError, match='serve.tokasaurus_tenant') as caught:
    config.validate()
  assert sentence in str(caught.value)
