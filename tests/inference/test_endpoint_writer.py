"""A model behind an endpoint writes a pool: what it is asked, what of its answers is kept, and wrong servers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import threading
import time

import pytest

from sdpo_jax.config import CartridgeConfig, Config, FeedbackEndpointConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.data.self_study import Document
from sdpo_jax.environments import json_server
from sdpo_jax.errors import UserError
from sdpo_jax.inference import synthesis
from sdpo_jax.inference.endpoint_writer import EndpointWriter
from sdpo_jax.inference.synthesis import Asker, SynthesisOptions
from sdpo_jax.training.opening import load_tokenizer
from tests import tiny
from tests.local_server import Answer, Server, dead_address

TEXT = '\n'.join(f'Fact {i}: house {i * 7 % 13} is {"red blue green".split()[i % 3]}.' for i in range(40))
OPTIONS = SynthesisOptions(count=12, seed=5, min_window=20, max_window=60, per_window=2, max_tokens=6)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
  monkeypatch.setattr(json_server, 'FIRST_PAUSE_S', 0.0)


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> Config:
  """Return settings whose model has no weights."""
  folder = tmp_path_factory.mktemp('writer')
  (folder / 'document.txt').write_text(TEXT)
  config = Config(name='pool')
  # With fewer positions than a window has tokens, as another model reads it.
  config.model.path = str(tiny.make_model(folder / 'model', max_position_embeddings=32))
  for file in (folder / 'model').glob('*.safetensors'):
    file.unlink()
  config.model.cartridge = CartridgeConfig(tokens=16, document=str(folder / 'document.txt'))
  config.data.max_prompt_length = 64
  return config


def choice(text, reason='stop', **message) -> dict:
  return {'index': 0, 'message': {'role': 'assistant', 'content': text, **message}, 'finish_reason': reason}


def choices(*texts) -> Answer:
  return Answer({'choices': [text if isinstance(text, dict) else choice(text) for text in texts]})


def writes():
  """Return a server's answers: as many messages as it is asked for, each another one."""
  numbers = itertools.count()
  return lambda body: choices(*(f'What is {next(numbers)}?' for _ in range(body['n'])))


def written(config, output, url, options=OPTIONS, stop=(), overwrite=False, **settings) -> tuple[list[dict], list[str]]:
  """Return the rows of a pool that an endpoint writes, and what is said about it."""
  said = []
  settings = FeedbackEndpointConfig(**{'url': f'{url}/v1', 'model': 'author', 'retries': 2, **settings})
  with EndpointWriter(settings, options, stop) as writer:
    document = config.model.cartridge.document
    synthesis.synthesize(
      config,
      options,
      document=document,
      output=str(output),
      writer=writer,
      overwrite=overwrite,
      announce=said.append,
    )
  return [json.loads(line) for line in pathlib.Path(output).read_text().splitlines()], said


def test_an_endpoint_is_asked_about_the_same_windows_and_its_messages_are_kept(config, tmp_path, monkeypatch):
  monkeypatch.setattr(synthesis, 'ROUND', 8)
  monkeypatch.setenv('AUTHORS_KEY', 'secret-of-the-author')
  started = threading.Barrier(3, timeout=20)
  answer = writes()

  def respond(body):
    if len(server.bodies) <= 3:
      started.wait()  # Three requests are under way at once.
    return answer(body)

  with Server(respond) as server:
    rows, said = written(
      config, tmp_path / 'pool.jsonl', server.url, stop=('END',), concurrency=3, api_key_env='AUTHORS_KEY'
    )
  assert server.most_at_once == 3 and {*server.paths} == {'/v1/chat/completions'}
  assert {headers['Authorization'] for headers in server.headers} == {'Bearer secret-of-the-author'}
  tokenizer = load_tokenizer(config)
  chat = synthesis.thinking_off(tokenizer, ChatFormat())
  own = Asker(Document(TEXT, tokenizer), tokenizer, chat, OPTIONS, None)
  asks = [own.ask(number, at) for number, count in enumerate((4, 2)) for at in range(count)]
  same = {'model': 'author', 'n': 2, 'temperature': 0.6, 'max_tokens': 6, 'stop': ['END']}
  bodies = {json.dumps(body.pop('messages')): body for body in map(dict, server.bodies)}
  assert bodies.keys() == {json.dumps(ask.messages) for ask in asks} and len(server.bodies) == 6
  assert len({body['seed'] for body in bodies.values()}) == 6
  assert all(0 <= body['seed'] < 2**31 and body | same == body and len(body) == 6 for body in bodies.values())
  assert '<info>' in asks[0].messages[0]['content'] and asks[0].messages[0]['role'] == 'system'
  assert len({row['prompt'][0]['content'] for row in rows}) == 12
  assert [row['id'] for row in rows] == [f'{number}-{at}' for number, n in enumerate((8, 4)) for at in range(n)]
  assert [(row['dataset'], row['window_start'], row['window_end']) for row in rows[::2]] == [
    (ask.seed_type, *ask.window) for ask in asks
  ]
  assert said[-1].endswith('12 messages were drawn.')
  with Server(writes()) as again:
    written(config, tmp_path / 'again.jsonl', again.url, concurrency=1)
  assert {json.dumps(body['messages']): body['seed'] for body in again.bodies} == {
    messages: body['seed'] for messages, body in bodies.items()
  }


def test_messages_that_are_cut_off_empty_or_refused_are_left_out(config, tmp_path):
  odd = iter(
    [
      choices(choice('What is', 'length'), 'One?'),
      choices(choice(None, refusal='I cannot.'), choice(None, 'content_filter')),
      choices(choice(None, reasoning_content='Hm.'), choice(None, 'length', reasoning_content='Hm…')),
      Answer({'error': 'this passage breaks the rules'}, status=400),
      choices('\ud800?', 'Two?'),
    ]
  )
  answer = writes()
  with Server(lambda body: next(odd, None) or answer(body)) as server:
    rows, said = written(config, tmp_path / 'pool.jsonl', server.url, concurrency=1)
  assert [row['prompt'][0]['content'] for row in rows[:3]] == ['One?', '??', 'Two?']
  reasons = '2 cut off by --max_tokens, 1 empty, 2 refused by the model, 2 refused with status 400'
  assert f'were left out (5 beyond --count, {reasons})' in said[-1]


def test_a_server_that_writes_fewer_messages_is_asked_again_with_other_seeds(config, tmp_path):
  numbers = itertools.count()
  with Server(lambda body: choices(f'What is {next(numbers)}?')) as server:
    rows, said = written(
      config, tmp_path / 'pool.jsonl', server.url, dataclasses.replace(OPTIONS, per_window=3), concurrency=1
    )
  assert len(rows) == 12 == len(server.bodies) and said[-1].endswith('12 messages were drawn.')
  assert [body['n'] for body in server.bodies] == [3, 2, 1] * 4
  assert len({body['seed'] for body in server.bodies}) == 12
  with Server(lambda body: choices('More?', 'than?', 'asked?', f'for? {next(numbers)}')) as server:
    rows, _ = written(config, tmp_path / 'more.jsonl', server.url, dataclasses.replace(OPTIONS, count=2))
  assert [row['prompt'][0]['content'] for row in rows] == ['More?', 'than?']


@pytest.mark.parametrize(
  'fault',
  [
    Answer(status=429, headers={'Retry-After': '3'}),
    Answer(status=503),
    choices(),
    choices(choice('What', 'abort')),
    Answer({'choices': [{'text': 'of /v1/completions'}]}),
  ],
)
def test_what_may_pass_is_asked_again(config, tmp_path, monkeypatch, fault):
  waited = []
  monkeypatch.setattr(json_server, 'LONGEST_PAUSE_S', 0.0)
  pause = json_server.pause_s
  monkeypatch.setattr(json_server, 'pause_s', lambda *given: waited.append(given[1]) or pause(*given))
  answer = writes()
  with Server(lambda body: fault if len(server.bodies) < 3 else answer(body)) as server:
    rows, _ = written(config, tmp_path / 'pool.jsonl', server.url, concurrency=1)
  assert len(rows) == 12 and len(server.bodies) == 8 and server.bodies[0] == server.bodies[1] == server.bodies[2]
  assert waited == [3.0 if fault.status == 429 else None] * 2


@pytest.mark.parametrize(
  ('respond', 'says'),
  [
    (lambda body: Answer(status=401), 'status 401'),
    (lambda body: Answer({'error': 'no such model'}, status=404), 'status 404.*no such model'),
    (lambda body: Answer({'error': 'the context is too short'}, status=400), 'status 400.*the context is too short'),
    (lambda body: choices(), "its answer has no 'choices'"),
    (lambda body: choices(choice('What', 'eos_token')), 'no message with a finish_reason of stop, length, content'),
    (lambda body: time.sleep(0.4) or choices('Late?'), 'no complete answer within 0.1 s'),
  ],
)
def test_a_server_that_does_not_write_ends_with_one_sentence(config, tmp_path, respond, says):
  with Server(respond) as server:
    with pytest.raises(UserError, match=rf'--endpoint_url\) has not .*: .*{says}.* serves \'author\', then start the'):
      written(config, tmp_path / 'pool.jsonl', server.url, timeout_s=0.1 if 'complete' in says else 20.0)
  assert list(tmp_path.iterdir()) == []


def test_a_pool_goes_on_where_its_endpoint_died_also_at_another_address(config, tmp_path, monkeypatch):
  monkeypatch.setattr(synthesis, 'ROUND', 8)
  output, answer = tmp_path / 'pool.jsonl', writes()
  with Server(lambda body: answer(body) if len(server.bodies) <= 4 else Answer(status=500)) as server:
    with pytest.raises(UserError, match='status 500'):
      written(config, output, server.url)
  with pytest.raises(UserError, match='the connection failed'):
    written(config, output, dead_address())
  with Server(answer) as server:
    with pytest.raises(UserError, match="--endpoint_model was 'author' and is 'other'"):
      written(config, output, server.url, model='other')
    monkeypatch.setenv('AUTHORS_KEY', 'secret-of-the-author')
    rows, said = written(config, output, server.url, api_key_env='AUTHORS_KEY')
  assert said[0].startswith('Continuing with the 8 messages') and len(server.bodies) == 2 and len(rows) == 12
