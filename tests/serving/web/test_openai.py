"""The unmodified `openai` client against the service: what it asks for is done, exactly, and what goes wrong is
told.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
import io
import json
import os
import re
import runpy
import subprocess
import sys
import time
import zipfile

import httpx
import numpy as np
import openai
import pytest

from benchmarks import sessions as sessions_benchmark
from sdpo_jax.config import Config, ModelConfig, TeacherEndpointConfig
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.adapters.cartridge import Cartridge
from sdpo_jax.models.adapters.cartridge_files import Origin
from sdpo_jax.serving import cartridge_transfer
from sdpo_jax.serving.account import Account
from sdpo_jax.serving.allowances import Allowances
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import Deadline
from sdpo_jax.serving.records import FROZEN, KEYS, VALUES, WINDOWED, engine_name
from sdpo_jax.serving.web import keys as key_files
from sdpo_jax.serving.web import pages
from sdpo_jax.serving.web.app import make_app
from sdpo_jax.serving.web.archives import zipped
from sdpo_jax.teacher.endpoint import Endpoint, EndpointQuery
from sdpo_jax.training.pushing import Pushing
from tests.scoring_server import log_probs
from tests.serving import openai_server, service_world

MESSAGES = [{'role': 'user', 'content': 'Hi'}]
WIDE = service_world.WIDE


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  """Yield the service with two adapters: 'ada', which changes nothing yet, and 'bob', which does."""
  folder = tmp_path_factory.mktemp('openai')
  config = service_world.make_config(service_world.model_folder(folder / 'model'), folder / 'store')
  config.serve.limits.max_logprobs = WIDE
  with openai_server.running(config) as running:
    account = running.account
    account.create('ada')
    bob, _ = account.create('bob')
    make_different(running.service, bob)
    yield running


def make_different(service, adapter, scale=0.3):
  """Give an adapter a version 1 whose factors are random."""
  draw = np.random.default_rng(0)
  arrays = {
    name: np.float32(scale * draw.standard_normal(value.shape)) if name.startswith('factors/') else value
    for name, value in service.worker.arrays(engine_name(adapter.id, 0)).items()
  }
  service.store.commit(adapter.owner, adapter.id, 0, arrays, reason='feedback', details={})


@pytest.fixture(scope='module')
def client(world):
  with openai.OpenAI(base_url=f'{world.url}/v1', api_key='none', max_retries=0) as client:
    yield client


@pytest.fixture(scope='module')
def model(world):
  """Return the tiny model without the service: policy and parameters."""
  return huggingface.load(world.service.config.model.path, ModelConfig(dtype='float32', remat='none'))


@pytest.fixture(scope='module')
def reader(world):
  return tokenizers.load(world.service.config.model.path)


def complete(client, prompt='Hello', model='tiny', **options):
  extra = {name: options.pop(name) for name in list(options) if name in EXTRA}
  return client.completions.create(model=model, prompt=prompt, extra_body=extra, **options)


EXTRA = (
  'prompt_logprobs',
  'return_token_ids',
  'top_k',
  'min_p',
  'add_special_tokens',
  'stop_token_ids',
  'echo_last',
  'store',
  'cartridges',
)


# --- What is drawn ---


def test_a_cartridge_stands_before_prompts(client, world):
  """By its own name, after # or as a field; it is uploaded and pushed as a zip."""
  service, draw, zipping = world.service, np.random.default_rng(0), {'Content-Type': 'application/zip'}
  sizes, adapters = service.served.policy.config, f'{world.url}/v1/continual/adapters'

  def upload(address, **more):
    shape = sizes.layers, sizes.kv_heads, 4, sizes.head_dim
    arrays = dict.fromkeys((FROZEN, WINDOWED), np.int32(0))
    arrays |= {name: np.float32(draw.standard_normal(shape)) for name in (KEYS, VALUES)}
    files = cartridge_transfer.files_of(arrays, 'sdpo_jax', service.config, service.served)
    return httpx.post(f'{adapters}/{address}', content=zipped(files), headers=zipping | more)

  made = upload('import?name=notes').json()
  assert made['kind'] == 'cartridge' and made['settings'] == {}
  assert {'notes', 'notes@0'} <= {each.id for each in client.models.list()}
  options = dict(temperature=0, max_tokens=6)
  plain, behind, beside = (complete(client, model=model, **options) for model in ('tiny', 'notes', 'base+bob@1#notes'))
  assert len({answer.choices[0].text for answer in (plain, behind, beside)}) == 3
  assert behind.choices[0].sample_id is None and behind.system_fingerprint == f'base#sdpo://{made["id"]}@0'
  streamed = complete(client, model='tiny', cartridges=['notes'], stream=True, **options)
  assert ''.join(chunk.choices[0].text for chunk in streamed) == behind.choices[0].text
  for more in (dict(logprobs=0), dict(prompt_logprobs=0), dict(echo=True, max_tokens=0)):
    with pytest.raises(openai.BadRequestError, match='behind a cartridge'):
      complete(client, model='notes', **options | more)
  asked = dict(model='notes', messages=MESSAGES, temperature=0, max_tokens=3)
  answer = httpx.post(f'{world.url}/v1/continual/completions', json=asked).json()
  [done] = answer['completions']
  assert answer['uri'] == behind.system_fingerprint
  assert done['sample_id'] == '' and len(done['log_probs']) == 3
  pushed = upload(f'{made["id"]}/versions', **{'If-Match': '"0"'})
  assert (pushed.status_code, pushed.json()['version'], pushed.headers['ETag']) == (201, 1, '"1"')
  assert upload(f'{made["id"]}/versions', **{'If-Match': '"0"'}).status_code == 412
  assert complete(client, model='notes', **options).choices[0].text != behind.choices[0].text
  assert complete(client, model='notes@0', **options).choices[0].text == behind.choices[0].text
  assert httpx.delete(f'{adapters}/{made["id"]}').json()['deleted']


def test_a_completion_is_drawn_and_kept(client, world, reader):
  answer = complete(client, max_tokens=6, seed=7, return_token_ids=True)
  [choice] = answer.choices
  again = complete(client, max_tokens=6, seed=7).choices[0]
  assert choice.text == again.text and choice.sample_id != again.sample_id
  assert complete(client, max_tokens=6, seed=8).choices[0].text != choice.text
  kept = world.account.service.store.sample(world.account.owner, choice.sample_id)
  assert kept.tokens == choice.token_ids and kept.text == choice.text and kept.version is None
  assert choice.prompt_token_ids == reader.encode('Hello') == kept.prompt_tokens
  assert answer.object == 'text_completion' and answer.model == 'tiny' and answer.system_fingerprint == 'base'
  assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, len(choice.token_ids))
  assert choice.finish_reason == ('length' if len(kept.tokens) == 6 else 'stop')


def test_a_chat_is_answered_by_the_chat_template(client, world, reader):
  answer = client.chat.completions.create(model='tiny', messages=MESSAGES, max_completion_tokens=4, seed=3)
  [choice] = answer.choices
  kept = world.account.service.store.sample(world.account.owner, choice.sample_id)
  assert reader.decode(kept.prompt_tokens) == '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
  assert kept.messages == MESSAGES and choice.message.role == 'assistant' and choice.message.content == kept.text
  unlimited = client.chat.completions.create(model='tiny', messages=MESSAGES, seed=3, stop=None).choices[0]
  assert unlimited.message.content.startswith(choice.message.content)


def test_several_prompts_have_several_choices_each(client, reader):
  alone = [complete(client, prompt, n=2, max_tokens=4, seed=1).choices for prompt in ('ab', 'c')]
  expected = [choice.text for choices in alone for choice in choices]
  for prompt in (['ab', 'c'], [reader.encode('ab'), reader.encode('c')]):
    answer = complete(client, prompt, n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == 3


def test_a_stop_string_ends_a_text_and_is_no_part_of_it(client):
  whole = complete(client, max_tokens=8, seed=2).choices[0].text
  stop = next(character for character in whole[1:] if character.isascii())
  for form in (stop, [stop, 'never there']):
    [choice] = complete(client, max_tokens=8, seed=2, stop=form).choices
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == 'stop'


def test_temperature_0_takes_the_most_likely_token(client, model, reader):
  [choice] = complete(client, max_tokens=4, temperature=0, return_token_ids=True).choices
  tokens = reader.encode('Hello')
  for token in choice.token_ids:
    assert token == log_probs(*model, tokens)[-1].argmax()
    tokens.append(token)
  assert complete(client, max_tokens=4, temperature=2, top_k=1, seed=5).choices[0].text == choice.text


def test_adapters_are_models(client, world):
  bob = world.account.resolve('bob').adapter
  base, fresh, first, last = (
    complete(client, model=model, max_tokens=6, seed=4) for model in ('base', 'ada', 'bob@0', 'bob')
  )
  assert base.choices[0].text == fresh.choices[0].text == first.choices[0].text != last.choices[0].text
  assert last.system_fingerprint == f'sdpo://{bob.id}@1'
  for name in (bob.id, f'{bob.id}@1', f'sdpo://{bob.id}@1'):
    assert complete(client, model=name, max_tokens=6, seed=4).choices[0].text == last.choices[0].text
  listed = {each.id: each for each in client.models.list()}
  assert set(listed) == {'tiny', 'ada', 'ada@0', 'bob', 'bob@1'} and listed['bob'].adapter == bob.id
  assert client.models.retrieve('bob@0').version == 0 and client.models.retrieve('bob').version == 1
  assert client.models.retrieve('tiny').object == 'model'


def test_models_are_listed_in_pages(world):
  whole = world.http.get('/v1/models').json()
  names = [each['id'] for each in whole['data']]
  assert names[0] == 'tiny' and len(names) % 2 == 1 and not whole['has_more'] and whole['object'] == 'list'
  for limit in range(1, len(names) + 2):
    found, after = [], {}
    while True:
      page = world.http.get('/v1/models', params={'limit': limit, **after}).json()
      found += page['data']
      assert len(page['data']) <= limit and page['last_id'] == page['data'][-1]['id']
      if not page['has_more']:
        break
      after = {'after': page['next']}
    assert found == whole['data']
  for query in ({'limit': 0}, {'limit': 1001}, {'limit': 'x'}, {'after': 'nobody'}, {'after': ''}, {'after': '\0%'}):
    refused = world.http.get('/v1/models', params=query)
    assert refused.status_code == 400 and refused.json()['error']['param'] in query, query


def test_a_list_without_a_limit_has_all_models(client, world, monkeypatch):
  """OpenAI's clients ask for no second page."""
  whole = [each.id for each in client.models.list()]
  monkeypatch.setattr(pages, 'MOST_LISTED', 2)
  assert len(whole) > 2 and [each.id for each in client.models.list()] == whole
  page = world.http.get('/v1/models', params={'limit': 2}).json()
  assert [each['id'] for each in page['data']] == whole[:2] and page['has_more']


def test_a_resumed_run_goes_on_with_the_cartridge_that_it_has_sent(world):
  served, config = world.service.served, Config(name='notes')
  config.trainer.push_url, sizes = world.url, served.policy.config
  slots = np.ones((sizes.layers, sizes.kv_heads, 4, sizes.head_dim), np.float32)
  for step in (1, 2):
    run = Pushing(config, Origin.of('tiny', sizes, served.weights))
    run.send(Cartridge(slots, slots, 0), step)
    run.close()
  found = [world.http.get(f'/v1/models/{name}').json() for name in ('notes', 'base+notes@0')]
  assert [each['version'] for each in found] == [1, 0]
  assert world.http.delete(f'/v1/continual/adapters/{found[0]["adapter"]}').status_code == 200


@pytest.mark.parametrize('stream', [False, True])
def test_nothing_is_kept_of_what_shall_not_be_stored(client, world, stream):
  database = world.service.store.database
  before = database.read('SELECT count(*) FROM samples')
  made = complete(client, model='bob', max_tokens=4, seed=3, store=False, stream=stream)
  choices = [part.choices[0] for part in made] if stream else made.choices
  kept = complete(client, model='bob', max_tokens=4, seed=3).choices[0]
  assert ''.join(choice.text for choice in choices) == kept.text
  assert choices[-1].sample_id is None and kept.sample_id.startswith('smp-')
  assert database.read('SELECT count(*) FROM samples') == [(before[0][0] + 1,)]  # The other one.


# --- Log-probs ---


@pytest.mark.parametrize('max_tokens', [0, 1, 3])
def test_echoed_log_probs_are_those_of_a_forward_pass(client, model, reader, max_tokens):
  """The off-by-one check: the log-prob beside a token is that of this token, given those before it."""
  text = 'The sky is'
  [choice] = complete(client, text, max_tokens=max_tokens, echo=True, logprobs=2, return_token_ids=True, seed=1).choices
  tokens = reader.encode(text) + choice.token_ids
  said, found = log_probs(*model, tokens), choice.logprobs
  assert (
    len(found.tokens) == len(tokens) == 10 + max_tokens and found.token_logprobs[0] is found.top_logprobs[0] is None
  )
  expected = said[np.arange(len(tokens) - 1), tokens[1:]]
  np.testing.assert_allclose(found.token_logprobs[1:], expected, atol=1e-4)
  for row, top, token in zip(said[:-1], found.top_logprobs[1:], tokens[1:], strict=True):
    best = np.argsort(-row)[:2]
    np.testing.assert_allclose(sorted(top.values())[-2:], np.sort(row[best]), atol=1e-4)
    assert len(top) in (2, 3) and (len(top) == 2) == (token in best)
  assert choice.text.startswith(text)
  for place, (offset, token) in enumerate(zip(found.text_offset, found.tokens, strict=True)):
    assert token.startswith('bytes:') or choice.text[offset:].startswith(token) or place >= len(tokens) - 1


def test_log_probs_of_an_adapter_are_its_own(client, world, reader):
  tokens = reader.encode('The sky is')
  [choice] = complete(client, tokens, model='bob', max_tokens=0, echo=True, logprobs=0).choices
  [scored] = world.account.score(world.account.resolve('bob'), [(tokens[:4], tokens[4:])], topk=0)
  np.testing.assert_allclose(choice.logprobs.token_logprobs[4:], scored.log_probs, atol=1e-4)
  [base] = complete(client, tokens, max_tokens=0, echo=True, logprobs=0).choices
  assert np.abs(np.subtract(choice.logprobs.token_logprobs[1:], base.logprobs.token_logprobs[1:])).max() > 0.01
  assert choice.text == 'The sky is' and choice.finish_reason == 'length' and choice.sample_id is None


def test_a_chat_tells_the_bytes_of_its_tokens(client, world, model):
  answer = client.chat.completions.create(
    model='tiny', messages=MESSAGES, max_tokens=8, seed=5, n=2, temperature=1.5, logprobs=True, top_logprobs=3
  )
  for choice in answer.choices:
    kept, content = world.account.service.store.sample(world.account.owner, choice.sample_id), choice.logprobs.content
    assert len(content) == len(kept.tokens)
    said = log_probs(*model, [*kept.prompt_tokens, *kept.tokens])[len(kept.prompt_tokens) - 1 : -1]
    for row, token, each in zip(said, kept.tokens, content, strict=True):
      assert abs(each.logprob - row[token]) < 1e-4 and len(each.top_logprobs) == 3
      np.testing.assert_allclose([top.logprob for top in each.top_logprobs], np.sort(row)[::-1][:3], atol=1e-4)
    raw = b''.join(bytes(each.bytes) for each in content)
    assert raw.decode(errors='replace').removesuffix('<|im_end|>') == choice.message.content


def test_log_probs_that_are_no_numbers_are_null(client, world):
  wild, _ = world.account.create('wild')
  make_different(world.service, wild, scale=1e15)
  answer = client.chat.completions.create(model='wild', messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2)
  assert all(each.logprob is None for each in answer.choices[0].logprobs.content)
  world.account.delete(wild.id, None)


def test_prompt_log_probs_have_the_shape_of_vllm(client, model, reader):
  tokens = reader.encode('Hello €')
  answer = complete(client, tokens, max_tokens=1, temperature=0, prompt_logprobs=5, return_token_ids=True)
  [choice] = answer.choices
  rows, said = choice.prompt_logprobs, log_probs(*model, tokens)
  assert rows[0] is None and len(rows) == len(tokens) == len(choice.prompt_token_ids)
  for place, (row, token) in enumerate(zip(rows[1:], tokens[1:], strict=True)):
    best = np.argsort(-said[place], kind='stable')[:5].tolist()
    assert set(map(int, row)) == {*best, token} and len(row) == (5 if token in best else 6)
    for number, entry in row.items():
      assert abs(entry['logprob'] - said[place][int(number)]) < 1e-4
      rank = 1 + int((said[place] > said[place][int(number)]).sum())
      assert entry['rank'] == (rank if rank <= WIDE else None)
  assert rows[1][str(tokens[1])]['decoded_token'] == 'e'
  assert rows[-1][str(tokens[-1])]['decoded_token'].startswith('bytes:\\x')
  chat = client.chat.completions.create(
    model='tiny', messages=MESSAGES, max_tokens=1, extra_body={'prompt_logprobs': 0}
  )
  assert chat.prompt_logprobs[0] is None and all(len(row) == 1 for row in chat.prompt_logprobs[1:])


def test_texts_that_are_only_read_may_be_as_long_as_those_that_are_scored(client, world, model, reader):
  tokens = reader.encode('The sky is blue. ' * 12)
  [choice] = complete(client, tokens, max_tokens=1, temperature=0, echo=True, logprobs=1, return_token_ids=True).choices
  longest = (tokens * 2)[: world.service.max_text]
  all_said = log_probs(*model, longest)  # Once, since every length compiles a program.
  said = all_said[:204]
  assert choice.token_ids == [said[-1].argmax()] and choice.sample_id is None and len(tokens) == 204
  expected = [*said[np.arange(203), tokens[1:]], said[-1].max()]
  np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], expected, atol=1e-4)
  [drawn] = complete(client, tokens[:60], max_tokens=1, temperature=0, logprobs=1, return_token_ids=True).choices
  [read] = complete(client, tokens[:60], max_tokens=1, temperature=0, prompt_logprobs=0, return_token_ids=True).choices
  assert drawn.token_ids == read.token_ids and drawn.sample_id is not None
  with pytest.raises(openai.BadRequestError, match='the limit is 64'):
    complete(client, tokens, max_tokens=1, temperature=0)
  [full] = complete(client, longest, max_tokens=1, temperature=0, prompt_logprobs=0).choices
  said = all_said[np.arange(320), longest[1:]]
  found = [row[str(token)]['logprob'] for row, token in zip(full.prompt_logprobs[1:], longest[1:], strict=True)]
  np.testing.assert_allclose(found, said, atol=1e-4)
  assert (full.text, full.finish_reason, len(longest)) == ('', 'length', 321)  # There is no room for a next token.
  with pytest.raises(openai.BadRequestError, match='the limit is 321'):
    complete(client, [*longest, 5], max_tokens=1, temperature=0, prompt_logprobs=0)


@pytest.mark.parametrize('field', ['prompt_logprobs', 'logprobs'])
def test_more_log_probs_than_are_given_are_refused(client, field):
  with pytest.raises(
    openai.BadRequestError, match=f'logprobs of 101, which is greater than max allowed: {WIDE}'
  ) as caught:
    complete(client, max_tokens=1, **{field: WIDE + 1})
  assert caught.value.param == field and caught.value.type == 'invalid_request_error'


def test_more_prompts_than_ever_find_room_are_refused_for_good(client, world):
  most = world.service.settings.limits.max_waiting // 2
  with pytest.raises(openai.BadRequestError, match=f'At most {most} prompts') as caught:
    client.completions.create(model='base', prompt=['Hi'] * (most + 1), max_tokens=1)
  assert caught.value.param == 'prompt'


# --- Streams ---


def test_a_stream_says_what_the_whole_answer_says(client):
  whole = complete(client, n=2, max_tokens=8, seed=6, temperature=1.5)
  texts, ends, usage = {0: '', 1: ''}, {}, None
  stream = complete(
    client, n=2, max_tokens=8, seed=6, temperature=1.5, stream=True, stream_options={'include_usage': True}
  )
  for chunk in stream:
    assert chunk.id.startswith('cmpl-') and chunk.object == 'text_completion'
    usage = chunk.usage or usage
    for choice in chunk.choices:
      texts[choice.index] += choice.text
      if choice.finish_reason:
        ends[choice.index] = choice.finish_reason, choice.sample_id
  assert texts == {choice.index: choice.text for choice in whole.choices} and usage == whole.usage
  assert {index: end for index, (end, _) in ends.items()} == {each.index: each.finish_reason for each in whole.choices}
  assert all(sample_id for _, sample_id in ends.values())


def test_a_streamed_chat_begins_with_the_role(client):
  whole = client.chat.completions.create(model='bob', messages=MESSAGES, max_tokens=8, seed=6)
  chunks = list(client.chat.completions.create(model='bob', messages=MESSAGES, max_tokens=8, seed=6, stream=True))
  assert chunks[0].choices[0].delta.role == 'assistant' and {chunk.object for chunk in chunks} == {
    'chat.completion.chunk'
  }
  assert ''.join(chunk.choices[0].delta.content or '' for chunk in chunks) == whole.choices[0].message.content
  assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_stream_with_log_probs_has_those_of_every_token(client):
  options = {'max_tokens': 5, 'seed': 6, 'logprobs': 2, 'echo': True}
  [whole] = complete(client, **options).choices
  chunks = [chunk.choices[0] for chunk in complete(client, stream=True, **options)]
  assert ''.join(chunk.text for chunk in chunks) == whole.text
  [said] = [chunk.logprobs for chunk in chunks if chunk.logprobs]
  assert said.tokens == whole.logprobs.tokens and said.text_offset == whole.logprobs.text_offset
  np.testing.assert_allclose(said.token_logprobs[1:], whole.logprobs.token_logprobs[1:], atol=1e-5)


def test_the_asynchronous_client_streams_too(client, world):
  async def ask():
    async with openai.AsyncOpenAI(base_url=f'{world.url}/v1', api_key='none') as other:
      stream, whole = await asyncio.gather(
        other.completions.create(model='tiny', prompt='Hello', max_tokens=8, seed=9, stream=True),
        other.completions.create(model='tiny', prompt='Hello', max_tokens=8, seed=9),
      )
      return ''.join([chunk.choices[0].text async for chunk in stream]), whole.choices[0].text

  streamed, whole = asyncio.run(ask())
  assert streamed == whole == complete(client, max_tokens=8, seed=9).choices[0].text


# --- What goes wrong ---


@pytest.mark.parametrize('name', ['carl', 'bob@7', 'sdpo://bob@1', '../bob', 'http://127.0.0.1/x'])
def test_a_model_that_is_not_there_is_not_found(client, name):
  with pytest.raises(openai.NotFoundError, match='There is no') as caught:
    complete(client, model=name)
  assert caught.value.type == 'not_found_error'


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'logit_bias': {'5': 1}}, 'logit_bias is not supported'),
    ({'extra_body': {'guided_json': {}}}, "no parameter 'guided_json'"),
    ({'prompt': 'a' * 100}, 'The prompt has .* and the limit is 64'),
    ({'prompt': [999]}, 'token ids are from 0 to 263'),
    ({'max_tokens': 9}, 'max_tokens=9 is more than the limit of 8'),
    ({'stop': ['']}, 'stop must be'),
  ],
)
def test_what_is_not_served_is_told(client, options, words):
  with pytest.raises(openai.BadRequestError, match=words):
    client.completions.create(**{'model': 'tiny', 'prompt': 'x', 'max_tokens': 2, **options})


def test_text_that_is_no_unicode_is_refused(world):
  content = b'{"model": "tiny", "prompt": "\\ud800"}'
  answer = world.http.post('/v1/completions', content=content, headers={'Content-Type': 'application/json'})
  assert answer.status_code == 400 and answer.json()['error']['type'] == 'invalid_request_error'


@pytest.fixture
def guarded(world, tmp_path_factory):
  """Asks the same service where keys are needed, and are for few tokens; yields what makes a client of a key."""
  path = tmp_path_factory.mktemp('keys') / 'keys.jsonl'
  secret, _ = key_files.add(path, 'ada', 'test')
  settings = world.service.settings
  limits = type(settings.limits)(**{**vars(settings.limits), 'tokens_per_minute': 60, 'burst_tokens': 8})
  app = make_app(world.service, settings, key_files.KeyFile(path))
  before, world.service.allowances = world.service.allowances, Allowances(limits)

  async def ask(key, count=1):
    transport = httpx.ASGITransport(app=app)
    async with openai.AsyncOpenAI(
      base_url='http://localhost/v1',
      api_key=key or secret,
      max_retries=0,
      http_client=httpx.AsyncClient(transport=transport),
    ) as client:
      return [await client.completions.create(model='tiny', prompt='x', max_tokens=6) for _ in range(count)]

  yield ask
  world.service.allowances = before


def test_whoever_has_no_key_is_refused(guarded):
  with pytest.raises(openai.AuthenticationError, match='key'):
    asyncio.run(guarded('sdpo_wrong'))


def test_whoever_asks_too_much_hears_when_to_come_again(guarded):
  with pytest.raises(openai.RateLimitError, match='60 tokens per minute') as caught:
    asyncio.run(guarded(None, 3))
  assert 1 <= int(caught.value.response.headers['retry-after']) <= 60 and caught.value.type == 'rate_limit_error'


def test_what_goes_wrong_in_a_stream_is_told_in_it(client, world, monkeypatch):
  def broken(*arguments):
    raise Deadline('The time of the request was over.')

  monkeypatch.setattr(world.service.store, 'keep_samples', broken)
  with pytest.raises(openai.APIError, match='time of the request was over'):
    for chunk in complete(client, max_tokens=8, seed=6, stream=True, temperature=0, prompt='Hello '):
      assert chunk.choices[0].finish_reason is None


def test_what_is_somebody_elses_is_not_there(client, world):
  """On every route that names an adapter, a foreign one is answered as one that there is not."""
  eve = Account(world.service, 'eve')
  secret, _ = eve.create('secret')
  adapter = f'{secret.id}@0'

  def answers(name):
    chat = {'model': name, 'messages': MESSAGES, 'max_tokens': 1}
    said = {'prompt': 'Hi', 'response': 'Ho', 'feedback': 'No.', 'lora_id': name}
    asked = [
      ('POST', '/v1/completions', {'model': name, 'prompt': 'x', 'max_tokens': 1}),
      ('POST', '/v1/completions', {'model': name, 'prompt': 'xy', 'max_tokens': 0, 'echo': True, 'logprobs': 1}),
      ('POST', '/v1/chat/completions', chat),
      ('POST', '/v1/chat/completions', chat | {'stream': True}),
      ('GET', f'/v1/models/{name}', None),
      ('POST', '/v1/distill', said),
      ('POST', '/v1/feedback', {'requests': [said]}),
      ('POST', '/v1/score', {'model': name, 'messages': MESSAGES, 'completion': 'x'}),
      ('GET', f'/v1/lora/export?lora_id={name}', None),
      ('DELETE', f'/v1/lora?lora_id={name}', None),
    ]
    for method, path, body in asked:
      answer = world.http.request(method, path, json=body)
      yield answer.status_code, answer.text.replace(name, 'NAME')

  for known, unknown in ((secret.id, 'ad-0123456789abcdef'), (adapter, 'ad-0123456789abcdef@0'), ('secret', 'absent')):
    foreign = list(answers(known))
    assert foreign == list(answers(unknown)) and {status for status, _ in foreign} == {404}
  assert eve.adapter(secret.id).head == 0 and not {'secret', secret.id} & {each.id for each in client.models.list()}


# --- As an evaluation harness reads it ---


@pytest.mark.slow
def test_lm_eval_measures_what_forward_passes_say(world, model, reader, tmp_path):
  """lm-eval's `local-completions`: log-likelihoods of continuations and of whole texts, to 1e-4."""
  pytest.importorskip('lm_eval', reason='lm-eval is not installed: pip install lm-eval==0.4.13')
  rows = [('The sky is', ['blue', 'green, I think']), ('Two plus three is', ['5', 'six €'])]
  lines = [json.dumps({'question': question, 'choices': choices, 'answer': 0}) for question, choices in rows]
  (tmp_path / 'rows.jsonl').write_text('\n'.join(lines))
  common = f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test\n'
  (tmp_path / 'choice.yaml').write_text(
    f"{common}task: choice\noutput_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\ndoc_to_choice: choices\n"
    'doc_to_target: answer\nmetric_list: [{metric: acc}]\n'
  )
  (tmp_path / 'rolling.yaml').write_text(
    f"{common}task: rolling\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{question}}}}'\n"
    'metric_list: [{metric: byte_perplexity}]\n'
  )
  arguments = f'model=tiny,base_url={world.url}/v1/completions,tokenizer_backend=remote,max_length=300,max_retries=1'
  command = [sys.executable, '-m', 'lm_eval', '--model', 'local-completions', '--model_args', arguments]
  command += ['--tasks', 'choice,rolling', '--include_path', str(tmp_path), '--log_samples', '--output_path']
  environment = os.environ | {'HF_HOME': str(tmp_path / 'home'), 'HF_HUB_OFFLINE': '1', 'HF_DATASETS_OFFLINE': '1'}
  done = subprocess.run([*command, str(tmp_path / 'out')], env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-3000:]

  def samples(task):
    [path] = (tmp_path / 'out').rglob(f'samples_{task}_*.jsonl')
    return [json.loads(line)['resps'] for line in path.read_text().splitlines()]

  def likelihood(prompt, tokens):
    said = log_probs(*model, [*prompt, *tokens])[len(prompt) - 1 : -1]
    return said[np.arange(len(tokens)), tokens].sum()

  for (question, choices), found in zip(rows, samples('choice'), strict=True):
    for choice, [[value, _]] in zip(choices, found, strict=True):
      assert abs(float(value) - likelihood(reader.encode(question), reader.encode(f' {choice}'))) < 1e-4
  for (question, _), [[value]] in zip(rows, samples('rolling'), strict=True):
    assert abs(float(value) - likelihood([reader.eos_token_id], reader.encode(question))) < 1e-4


def test_a_remote_tokenizer_has_what_lm_eval_asks_for(world, reader):
  with httpx.Client(base_url=world.url) as client:
    info = client.get('/tokenizer_info', headers={'Content-Type': 'application/json'}).json()
    assert info['eos_token'] == reader.eos_token and info['chat_template'] == reader.chat_template
    assert set(info) == {f'{kind}_token' for kind in ('bos', 'eos', 'pad', 'unk')} | {
      'tokenizer_class',
      'chat_template',
    }

    def tokens(**body):
      return client.post('/tokenize', json=body).json()

    for text in ('Hello, six €', reader.eos_token, ''):
      found = tokens(prompt=text, add_special_tokens=False)
      assert found['tokens'] == reader.encode(text, add_special_tokens=False) and found['count'] == len(found['tokens'])
      assert client.post('/detokenize', json={'tokens': found['tokens']}).json() == {'prompt': text}
    assert tokens(prompt='ab', return_token_strs=True)['token_strs'] == ['a', 'b']
    said = reader.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert tokens(messages=MESSAGES)['tokens'] == said
    for path, body in (('tokenize', {}), ('tokenize', {'prompt': 'a' * 200_001}), ('detokenize', {'tokens': [264]})):
      assert client.post(f'/{path}', json=body).status_code == 400


def test_texts_to_encode_wait_for_their_turn_and_not_for_the_tokenizer(world):
  """Else those of one key would stand before all prompts of the others."""
  service = world.service
  with httpx.Client(base_url=world.url) as client, ThreadPoolExecutor() as threads:
    with service.parsing.of(Call()):
      asked = threads.submit(client.post, '/tokenize', json={'prompt': 'a'})
      while not service.parsing._waiting and not asked.done():  # noqa: SLF001 (Nothing else tells.)
        time.sleep(0.001)
      assert not asked.done() and not service.tokenizing.locked()
    assert asked.result().status_code == 200


# --- As a teacher ---


@pytest.mark.parametrize(('dialect', 'k'), [('vllm', WIDE), ('fireworks', 5)])
def test_the_service_teaches_as_an_external_teacher(world, dialect, k):
  asked = [EndpointQuery([5, 9, 30], [7, 8, 201, 4]), EndpointQuery([17], [1]), EndpointQuery([2, 3], [])]
  settings = TeacherEndpointConfig(url=f'{world.url}/v1', dialect=dialect, model='bob@1', top_k=k)
  with Endpoint(settings, 264) as teacher:
    found = teacher.score(asked)
  target = world.account.resolve('bob@1')
  expected = world.account.score(target, [(each.prompt, each.completion) for each in asked[:2]], topk=k)
  for one, other in zip(found, expected, strict=False):
    np.testing.assert_allclose(one.target_log_probs, other.log_probs, atol=1e-4)
    np.testing.assert_allclose(one.log_probs, other.top_log_probs, atol=1e-4)
    assert one.token_ids.tolist() == other.top_ids.tolist()


def test_a_teacher_with_the_same_tokenizer_passes_the_check(world, reader):
  path = world.service.config.model.path
  settings = TeacherEndpointConfig(url=f'{world.url}/v1', dialect='vllm', model='tiny', top_k=20, tokenizer=path)
  with Endpoint(settings, 264) as teacher:
    teacher.check(path, reader, 60)


def test_a_teacher_is_asked_for_fewer_log_probs(world):
  settings = TeacherEndpointConfig(url=f'{world.url}/v1', dialect='vllm', model='tiny', top_k=WIDE + 1)
  with Endpoint(settings, 264) as teacher, pytest.raises(UserError, match='max allowed: 100.*lower .*top_k=101'):
    teacher.score([EndpointQuery([5], [6])])


# --- Feedback on what was drawn ---


def test_samples_are_aligned_with_what_is_learned_from_them(client, world):
  """Without feedback the teacher reads what the student read: nothing is to be learned, at any token."""
  drawn = client.chat.completions.create(model='ada', messages=MESSAGES, max_tokens=8, seed=1, n=2, logprobs=True)
  ada = world.account.resolve('ada').adapter
  body = {'items': [{'sample_id': choice.sample_id} for choice in drawn.choices], 'mode': 'dry_run'}
  for loss in ('sdpo', 'jsd_pg'):
    answer = world.http.post(f'/v1/continual/adapters/{ada.id}/feedback', json=body | {'update': {'loss': loss}}).json()
    for choice, item in zip(drawn.choices, answer['items'], strict=True):
      said = item['per_token']
      assert len(said['advantages']) == len(choice.logprobs.content) and not any(said['advantages'])
      assert not any(said['divergence'])
      np.testing.assert_allclose(
        said['log_probs_before'], [each.logprob for each in choice.logprobs.content], atol=1e-4
      )
    assert abs(answer['metrics']['loss']) < 1e-6


# --- The words of other services ---


def post(world, path, body, **headers):
  answer = world.http.post(f'{path}', json=body, headers=headers)
  return answer.status_code, answer.json()


@pytest.fixture
def dan(world):
  """Return the name of a new adapter."""
  status, made = post(world, '/v1/lora/init', {'lora_id': 'dan', 'base_model': 'tiny', 'lora_r': 2, 'lora_alpha': 4})
  assert status == 200 and made['lora_uri'] == f'sdpo://{made["id"]}@0'
  yield made['id']
  answer = world.http.delete('/v1/lora', params={'lora_id': 'dan'})
  assert answer.json() == {'deleted': True} and 'dan' not in world.http.get('/v1/lora').json()['loras']


def test_distill_learns_by_jsd_pg_and_says_what_came_of_it(world, dan):
  body = {'lora_uri': f'sdpo://{dan}@0', 'prompt': 'Hi', 'response': 'Hello'}
  status, plain = post(world, '/v1/distill', body)
  told = plain['metadata']
  assert told['mean_advantage'] == told['loss'] == told['jsd_reg'] == told['pg_loss'] == 0.0  # Nothing was said.
  assert status == 200 and plain['lora_uri'] == body['lora_uri'] and told['unchanged']
  assert told['tokens_processed'] == 5 and told['mean_is_ratio'] == pytest.approx(1)
  status, plain = post(world, '/v1/distill', {**body, 'feedback': 'Be.'})
  assert status == 200 and plain['lora_uri'] == f'sdpo://{dan}@1' and not plain['metadata']['unchanged']
  status, stale = post(world, '/v1/distill', body)
  assert status == 412 and stale['error']['current_version'] == 1
  learned = {
    **body,
    'lora_uri': plain['lora_uri'],
    'feedback': 'Be brief.',
    'training': {'num_steps': 2, 'learning_rate': 1e-2},
  }
  (status, answer), again = (post(world, '/v1/distill', learned, **{'Idempotency-Key': 'dan-2'}) for _ in range(2))
  assert status == 200 and again == (status, answer)  # Sent twice, learned once.
  assert answer['lora_uri'] == f'sdpo://{dan}@2' and answer['metadata']['mean_advantage'] > 0
  details = world.account.version(dan, 2).details
  assert details['loss']['name'] == 'jsd_pg' and details['teacher'] == 'live'
  status, answer = post(world, '/v1/distill', learned | {'lora_uri': answer['lora_uri'], 'teacher': 'base'})
  assert status == 200 and world.account.version(dan, 3).details['teacher'] == 'base'
  status, wrong = post(world, '/v1/distill', body | {'lora_uri': answer['lora_uri'], 'teacher': 'nobody'})
  assert status == 400 and wrong['error']['field'] == 'teacher.kind'
  learned |= {'lora_uri': answer['lora_uri'], 'training': {'tail': True}}
  status, answer = post(world, '/v1/distill', learned)
  assert status == 200 and world.account.version(dan, 4).details['loss']['tail'] is True
  learned |= {'lora_uri': answer['lora_uri'], 'training': {'support': 'union'}}
  status, wrong = post(world, '/v1/distill', learned)
  assert status == 400 and "set support='teacher'" in wrong['error']['message']
  assert 'serve.union_support' in wrong['error']['message']


def test_distill_says_that_moments_were_lost_also_if_its_answer_was(world, dan, monkeypatch):
  body, service = {'lora_id': 'dan', 'prompt': 'Hi', 'response': 'Hello', 'feedback': 'Be.'}, world.account.service
  with monkeypatch.context() as patched:  # As after a kill between the answer and the writing of its state.
    patched.setattr(service.store, 'keep_optimizer_state', lambda *_: None)
    assert post(world, '/v1/distill', body)[1]['metadata']['warnings'] == []
  service.worker.forget(f'{dan}@1')
  with monkeypatch.context() as patched:  # As after a kill before the answer is stored.
    patched.setattr(service.store, 'finish', lambda request, *_: service.store.abandon(request))
    answers = [post(world, '/v1/distill', body, **{'Idempotency-Key': 'dan-lost'})]
  answers.append(post(world, '/v1/distill', body, **{'Idempotency-Key': 'dan-lost'}))
  for status, answer in answers:
    assert status == 200 and answer['lora_uri'] == f'sdpo://{dan}@2'
    [warning] = answer['metadata']['warnings']
    assert warning == 'The moments of version 1 are not stored, so learning began with zeros.'


def test_feedback_learns_by_the_divergence(world, dan):
  said = {'lora_id': 'dan', 'prompt': 'Hi', 'response': 'Hello', 'feedback': 'Be brief.'}
  training = {
    'learning_rate': 1e-2,
    'alpha': 0.5,
    'is_clip': 5.0,
    'max_grad_norm': 1.0,
    'kl_reg_weight': 0.0,
    'teacher_top_k': 100,
  }
  body = {
    'requests': [said | {'training': training}, said | {'training': training, 'prompt': 'Ho'}],
    'orchestration': {},
  }
  status, answer = post(world, '/v1/feedback', body)
  assert status == 200 and answer['status'] == 'ok' and answer['batch_size'] == 2
  assert answer['distill_result']['lora_uri'] == f'sdpo://{dan}@1' and answer['distill_result']['metadata']['loss'] > 0
  assert world.account.version(dan, 1).details['loss']['is_clip'] == 5.0
  for change, field in (({'kl_reg_weight': 0.1}, 'kl_reg_weight'), ({'teacher_top_k': 101}, 'topk')):
    wrong = {'requests': [said | {'training': training | change}]}
    status, answer = post(world, '/v1/feedback', wrong)
    assert status == 400 and field in answer['error']['message']


def test_a_completion_is_scored_behind_a_conversation(world, model, reader):
  status, answer = post(world, '/v1/score', {'messages': MESSAGES, 'completion': 'Hello'})
  prompt, tokens = world.account.service.prompt_of(messages=MESSAGES), reader.encode('Hello')
  expected = log_probs(*model, [*prompt, *tokens])[len(prompt) - 1 : -1][np.arange(5), tokens]
  assert status == 200 and answer['tokens'] == tokens
  np.testing.assert_allclose(answer['logprobs'], expected, atol=1e-4)
  assert answer['logprob_sum'] == pytest.approx(sum(answer['logprobs']))


def test_adapters_are_listed_exported_and_deleted(world, dan):
  listed = world.http.get('/v1/lora', params={'prefix': 'd'}).json()
  assert listed == {'loras': ['dan'], 'first_id': 'dan', 'last_id': 'dan', 'next': None, 'has_more': False}
  everything = world.http.get('/v1/lora').json()['loras']
  rest = world.http.get('/v1/lora', params={'after': everything[0], 'limit': 2}).json()
  assert rest['loras'] == everything[1:3] and rest['has_more'] == (len(everything) > 3)
  first = world.http.get('/v1/lora', params={'limit': 1}).json()
  assert world.http.get('/v1/lora', params={'after': first['next'], 'limit': 2}).json() == rest
  files = world.http.get('/v1/lora/export', params={'lora_id': 'dan'})
  with zipfile.ZipFile(io.BytesIO(files.content)) as archive:
    assert {'adapter_config.json', 'adapter_model.safetensors'} <= set(archive.namelist())
  assert world.http.get('/v1/health').json()['status'] == 'healthy'


@pytest.mark.parametrize(
  ('path', 'body', 'status', 'words'),
  [
    ('/v1/distill', {'lora_id': 'base', 'prompt': 'Hi', 'response': 'Hello'}, 400, 'model without an adapter'),
    ('/v1/distill', {'lora_id': 'carl', 'prompt': 'Hi', 'response': 'Hello'}, 404, 'There is no'),
    ('/v1/distill', {'prompt': 'Hi', 'response': 'Hello'}, 400, 'send one of lora_uri, lora_id and id'),
    (
      '/v1/distill',
      {'lora_id': 'ada', 'prompt': 'Hi', 'response': 'Hello', 'training': {'alpha': 1.5}},
      400,
      'training.alpha',
    ),
    (
      '/v1/distill',
      {'lora_id': 'ada', 'prompt': 'Hi', 'response': 'Hello', 'traning': {}},
      400,
      "no field traning; did you mean 'training'?",
    ),
    ('/v1/feedback', {'requests': []}, 400, 'requests'),
    ('/v1/score', {'completion': 'x'}, 400, 'one of messages and prompt'),
    ('/v1/lora/init', {'lora_id': 'eve', 'lora_r': 16}, 400, 'rank'),
    ('/v1/lora/init', {'lora_id': 'eve', 'target_modules': ['q_proj']}, 400, 'target_modules'),
  ],
)
def test_what_other_services_would_take_is_refused_in_a_sentence(world, path, body, status, words):
  found, answer = post(world, path, body)
  assert found == status and words in answer['error']['message'] and answer['error']['code']


def test_the_example_shows_what_it_says(world, capsys):
  for _ in range(2):  # What it has made the first time is no obstacle.
    runpy.run_path('examples/serve_client.py')['main'](world.url)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith('adapter reverse at version 0')
    assert [line.rsplit(maxsplit=2)[1:] for line in lines[1:13]] == [
      ['version', str(number)] for number in range(1, 13)
    ]
    assert any(line.startswith('streamed: ') for line in lines)
    first, last = (float(line.rsplit(maxsplit=1)[1]) for line in (lines[13], lines[-1]))
    assert lines[-1].startswith('version 13 is version 0 again') and first == last


def test_the_example_of_a_session_shows_what_it_says(world, capsys):
  """The random model calls no tool, so that its scripted person is never content."""
  example = runpy.run_path('examples/session_client.py')
  example['main'](world.url, tools=[], tasks=['Hi'])
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == '> Hi' and len(lines) == 2 + 3 * example['DENIALS']
  proposals, denials, learned = lines[1::3], lines[2::3], lines[3::3]
  assert [line.split(':')[0] for line in proposals] == [f'version {number}' for number in range(example['DENIALS'] + 1)]
  assert set(denials) == {'  no: call bash, which runs a command'}
  assert all(re.fullmatch(r'  learned: divergence \d+\.\d+ -> \d+\.\d+ in \d+\.\d+ s', line) for line in learned)


def test_the_scripted_person_of_the_example_knows_what_to_say():
  objection = runpy.run_path('examples/session_client.py')['objection']

  def call(command):
    return {'fault': None, 'calls': [{'name': 'bash', 'arguments': {'command': command}}]}

  assert (
    objection(call('rg total src')) is None and objection(call('grep -r total src')) == 'use rg rather than grep -r'
  )
  assert objection({'fault': None, 'calls': []}) == 'call bash, which runs a command'
  assert objection({'fault': 'A call is not closed.', 'calls': []}) == 'A call is not closed.'


def test_the_benchmark_of_sessions_measures_every_denial(world):
  found = sessions_benchmark.measure(world.http, 2, [])
  assert found['denials'] == 2 and found['learned'] == 1.0 and 0 <= found['reused_tokens'] <= 1
  whole, parts = found['denial_to_first_token_ms'], (found['decision_ms'], found['first_token_ms'])
  # Of two, the median is the mean, and so the parts add up, but for rounding.
  assert abs(whole['p50'] - sum(part['p50'] for part in parts)) <= 0.2 and found['feedback_ms']['p50'] > 0


def test_the_example_client_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'openai', None)
  with pytest.raises(SystemExit, match='which is not installed: pip install openai'):
    runpy.run_path('examples/serve_client.py')
