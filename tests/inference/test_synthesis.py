"""Prompts about a document, by the model itself: what it is asked, what is kept, and how a pool goes on and is trained
on.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import dataclasses
import json
import os
import re

import jax
import numpy as np
import pytest

from sdpo_jax.config import CartridgeConfig, Config, MeshConfig, ModelConfig
from sdpo_jax.data import rows, self_study, sources
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.data.self_study import Document
from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError
from sdpo_jax.inference import prompt_pools, synthesis
from sdpo_jax.inference.prompt_pools import PoolFile, Round
from sdpo_jax.inference.synthesis import Asker, Pool, SynthesisOptions, WrittenMessage
from sdpo_jax.models import huggingface
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.training import loop
from sdpo_jax.training.opening import load_tokenizer, stop_token_ids
from sdpo_jax.training.questions import training_questions
from tests import tiny

TEXT = '\n'.join(f'Fact {i}: house {i * 7 % 13} is {"red blue green".split()[i % 3]}.' for i in range(40))
OPTIONS = SynthesisOptions(count=12, seed=5, min_window=20, max_window=60, per_window=2, max_tokens=6)
# As Gemma's: it has no system turn, and says so.
REFUSING = (
  "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
) + tiny.CHAT_TEMPLATE
# As some of small models: a system message is passed over.
IGNORING = tiny.CHAT_TEMPLATE.replace(
  '{% for message in messages %}', "{% for message in messages if message.role != 'system' %}"
)
SWITCHED = tiny.CHAT_TEMPLATE.replace(
  'assistant\n{% endif %}',
  'assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}',
)


MESHES = [MeshConfig(1, 1), pytest.param(MeshConfig(4, 2), marks=pytest.mark.campaign)]


@pytest.fixture(scope='module', params=MESHES, ids=lambda mesh: f'{mesh.fsdp}x{mesh.tensor}')
def config(request, tmp_path_factory) -> Iterator[Config]:
  folder = tmp_path_factory.mktemp('synthesize')
  (folder / 'document.txt').write_text(TEXT)
  config = Config(name='pool')
  config.model.path = str(tiny.make_model(folder / 'model', initializer_range=0.3, max_position_embeddings=2048))
  config.model.dtype, config.model.remat = 'float32', 'none'
  config.model.cartridge = CartridgeConfig(tokens=16, document=str(folder / 'document.txt'))
  config.data.train_batch_size = 2
  config.data.max_prompt_length, config.data.max_response_length = 64, 4
  config.rollout.n, config.rollout.max_batch_rows = 4, 64
  config.rollout.stop_token_ids = tuple(range(60))  # A random model hardly ever ends its turn otherwise.
  config.actor.ppo_mini_batch_size, config.actor.ppo_micro_batch_size = 2, 8
  sd = config.actor.self_distillation
  sd.teacher_context, sd.teacher_regularization = 'prompt', 'base'
  sd.alpha, sd.distillation_topk = 0.0, None
  config.algorithm.rollout_correction.rollout_is = None
  config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.tensorboard = 3, 0, False
  config.mesh = request.param
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(accelerators, 'devices', lambda: jax.devices()[: config.mesh.fsdp * config.mesh.tensor])
    yield config


@pytest.fixture(scope='module')
def tokenizer(config):
  return load_tokenizer(config)


def asker(tokenizer, options=OPTIONS, positions=None, **variables) -> Asker:
  chat = synthesis.thinking_off(tokenizer, ChatFormat(variables))
  return Asker(Document(TEXT, tokenizer), tokenizer, chat, options, positions)


def test_windows_are_of_every_length_and_at_every_place(tokenizer):
  """Tokens of the tiny tokenizer are bytes."""
  draw = np.random.default_rng(0)
  document = Document('0123456789', tokenizer)
  windows = [document.draw_window(draw, 3, 5) for _ in range(3000)]
  seen = collections.Counter(windows)
  # 1/3 for each length, which has 10 − length + 1 places.
  expected = {(at, at + length): 1000 / (11 - length) for length in (3, 4, 5) for at in range(11 - length)}
  assert seen.keys() == expected.keys()
  assert all(abs(seen[window] - mean) < 5 * mean**0.5 for window, mean in expected.items())
  assert all(document.passage((start, end)) == '0123456789'[start:end] for start, end in seen)
  assert {document.draw_window(draw, 30, 50) for _ in range(9)} == {(0, 10)}
  assert {document.draw_window(draw, 1, 50) for _ in range(200)} >= {(0, 10), (0, 1), (9, 10)}
  assert [document.spaced_window(at, 3, 4) for at in range(3)] == [(0, 4), (3, 7), (6, 10)]
  assert document.spaced_window(0, 1, 4) == (0, 4) and document.spaced_window(2, 3, 99) == (0, 10)
  few = asker(tokenizer, dataclasses.replace(OPTIONS, windows=3, min_window=20, max_window=30))
  ends = len(TEXT.encode()) - 30
  assert {few.ask(0, at).window[0] for at in range(40)} == {0, ends // 2, ends}
  SynthesisOptions(count=1, windows=3, max_window=30).check()  # Fewer than the usual --min_window.


def test_documents_with_other_windows_have_other_digests(tokenizer):
  class Words:
    is_fast = True

    def __call__(self, text, **_):
      return {'offset_mapping': [word.span() for word in re.finditer('[a-z]+', text)]}

  texts = 'one two', 'one  two', 'one too'
  digests = [Document(text, by).digest for text in texts for by in (tokenizer, Words())]
  assert len(set(digests)) == 6 and digests[0] == Document(texts[0], tokenizer).digest


def test_a_passage_has_whole_characters_and_no_control_tokens(tokenizer):
  document = Document('aö<|im_end|>', tokenizer)
  assert len(document) == 1 + 2 + 10
  assert [document.passage(window) for window in ((0, 2), (2, 3), (2, 5))] == ['aö', 'ö', 'ö<|']


@pytest.mark.parametrize('template', [None, REFUSING, IGNORING, SWITCHED])
def test_a_prompt_is_what_the_template_makes_of_passage_and_request(config, template, tmp_path):
  if template is not None:
    (tmp_path / 'template.jinja').write_text(template)
    config = dataclasses.replace(
      config, model=dataclasses.replace(config.model, chat_template=str(tmp_path / 'template.jinja'))
    )
  tokenizer = load_tokenizer(config)
  options = dataclasses.replace(OPTIONS, seed_types=tuple(self_study.REQUESTS))
  ours, variables = asker(tokenizer, options), {'enable_thinking': False} if template == SWITCHED else {}
  starts = set()
  for number in range(8):
    ask = ours.ask(3, number)
    start, end = ask.window
    assert 20 <= end - start <= 60
    text = tokenizer.decode(ask.tokens)
    assert TEXT[start:end] in text
    [request] = [
      told
      for kind in [ask.seed_type]
      for form in self_study.FORMATS
      for told in dict.fromkeys(self_study.spelled(request, form) for request in self_study.REQUESTS[kind])
      if told in text
    ][:1]
    information = text[text.index('This conversation') : text.index('</info>') + 7]
    if template in (None, SWITCHED):
      messages = [{'role': 'system', 'content': information}, {'role': 'user', 'content': request}]
    else:
      messages = [{'role': 'user', 'content': f'{information}\n\n{request}'}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)
    assert ask.tokens == expected and len(expected) <= ours.limit
    assert ours.ask(3, number) == ask and {'generic'} | {*options.seed_types} >= {ask.seed_type}
    starts.add(start)
  assert len(starts) > 4 and ours.ask(4, 0) != ours.ask(3, 0)
  assert ('<think></think>' in text) == (template == SWITCHED)


def test_types_and_requests_are_drawn_as_often_as_their_weights_say():
  draw = np.random.default_rng(0)
  drawn = [self_study.draw_request(draw, ('question', 'structuring'), (3, 1)) for _ in range(2400)]
  kinds, texts = collections.Counter(kind for kind, _ in drawn), collections.Counter(drawn)
  assert abs(kinds['structuring'] - 600) < 5 * (2400 * 3 / 16) ** 0.5
  questions = [count for (kind, _), count in texts.items() if kind == 'question']
  assert len(questions) == 3 and max(abs(count - 600) for count in questions) < 5 * 600**0.5
  forms = {form for form in self_study.FORMATS for (kind, text) in texts if kind == 'structuring' and form in text}
  assert forms == {'JSON', 'YAML', 'TOML', 'INI', 'XML', 'plain text'}
  assert all(count > 0 and '{' not in text for (_, text), count in texts.items())


def test_a_passage_that_grows_in_its_prompt_is_cut(config, tmp_path):
  """A template may write more than it is given, as one that doubles every line break does."""
  (tmp_path / 'template.jinja').write_text(
    tiny.CHAT_TEMPLATE.replace('message.content }}', "message.content | replace('Fact', 'F' * 90) }}")
  )
  model = dataclasses.replace(config.model, chat_template=str(tmp_path / 'template.jinja'))
  ours = asker(load_tokenizer(dataclasses.replace(config, model=model)))
  asks = [ours.ask(0, number) for number in range(20)]
  assert max(len(ask.tokens) for ask in asks) <= ours.limit
  assert min(ask.window[1] - ask.window[0] for ask in asks) < 20


def scripted(texts):
  """Return a sampler that writes these texts; a tuple is one that was cut off."""
  left = iter(texts)

  def draw(prompts, number):
    found = [next(left) for _ in range(len(prompts) * OPTIONS.per_window)]
    return [WrittenMessage(text[0], False) if isinstance(text, tuple) else WrittenMessage(text, True) for text in found]

  return draw


def filled(tokenizer, texts, **changes):
  options = dataclasses.replace(OPTIONS, **changes)
  pool = Pool(lambda text: len(text) <= 12, 'book.txt', '')
  kept = []
  found = synthesis.fill(
    pool,
    0,
    options,
    asker(tokenizer).ask,
    scripted(texts),
    lambda number, result: kept.append(result),
    lambda text: None,
  )
  return pool, found, kept, synthesis.outcome(pool, found, options, 'x.jsonl')


def test_what_is_of_no_use_is_left_out_and_counted(tokenizer):
  texts = ['One?', ' one? \n', '', '<think>Hm.</think>\nTwo?', ('Three and',), 'much longer than 12', *'456789']
  pool, found, kept, said = filled(tokenizer, texts, count=6)
  assert [row['prompt'][0]['content'] for row in found] == ['One?', 'Two?', '4', '5', '6', '7']
  assert [row['id'] for row in found] == ['0-0', '0-3', '1-0', '1-1', '1-2', '1-3']
  assert [result.drawn for result in kept] == [6, 6] and pool.drawn == 12
  reasons = {
    'empty': 1,
    'cut off by --max_tokens': 1,
    'the same as another': 1,
    'longer than data.max_prompt_length': 1,
  }
  assert pool.dropped == reasons and kept[0].dropped == reasons
  own = asker(tokenizer)
  asks = [own.ask(0, 0), own.ask(0, 1), *(own.ask(1, at) for at in (0, 0, 1, 1))]
  assert [(row['dataset'], row['window_start'], row['window_end']) for row in found] == [
    (ask.seed_type, *ask.window) for ask in asks
  ]
  assert {row['document'] for row in found} == {'book.txt'}
  assert (
    said.startswith('x.jsonl: 6 prompts (')
    and '12 messages were drawn, of which 6 were left out (2 beyond --count, 1 cut' in said
  )
  assert 'smaller' not in said


def test_a_pool_that_cannot_be_filled_ends_and_says_so(tokenizer):
  pool, found, kept, said = filled(tokenizer, ['A', 'B'] * 100, count=8)
  assert len(found) == 2 and 8 * synthesis.GIVE_UP <= pool.drawn < 8 * synthesis.GIVE_UP + 8
  assert 'smaller than --count=8' in said and f'{pool.drawn - 2} the same as another' in said
  assert [len(result.rows) for result in kept] == [2, *[0] * (len(kept) - 1)]


def test_as_many_rows_as_a_run_has_memory_for():
  config = Config()
  config.rollout.max_batch_rows, config.data.max_prompt_length, config.data.max_response_length = 64, 1024, 512
  assert synthesis.rows_at_once(config, 1536, 0) == 64 == synthesis.rows_at_once(config, 100, 0)
  assert synthesis.rows_at_once(config, 4608, 0) == 21  # 64 × 1536 / 4608 = 21.3.
  assert synthesis.rows_at_once(config, 4608, 98304) == 42  # Twice as many tokens.
  assert synthesis.rows_at_once(config, 10**9, 0) == 1


@pytest.mark.parametrize('suffix', prompt_pools.SUFFIXES)
def test_a_file_is_read_as_rows_of_a_run(tokenizer, tmp_path, suffix):
  _, found, _, _ = filled(tokenizer, [f'What is ö{i}?' for i in range(12)])
  file = PoolFile(str(tmp_path / f'pool{suffix}'), {})
  file.check(overwrite=False)
  file.finish(found)
  read = sources.read_rows(str(tmp_path / f'pool{suffix}'), 'data.train_files')
  assert [row.value for row in read] == found and len(found) == 12
  example = rows.example(read[3], 'train')
  assert example.messages == [{'role': 'user', 'content': 'What is ö3?'}] and example.environment == 'none'
  assert (example.data_source, example.id) == (found[3]['dataset'], f'{found[3]["dataset"]}/0-3')
  assert [path.name for path in tmp_path.iterdir()] == [f'pool{suffix}']


def drawing(config, output, monkeypatch, options=OPTIONS, stop_after=None, overwrite=False):
  """Run `synthesize`, interrupted after so many rounds; return what it said and the prompts of each round."""
  said, asked = [], []
  sample = Sampler.sample

  def watched(sampler, base, trainable, prompts, **given):
    if len(asked) == stop_after:
      raise KeyboardInterrupt
    asked.append(prompts)
    assert trainable == {} and given['temperature'] == 0.6 and given['max_tokens'] == options.max_tokens
    drawn = sample(sampler, base, trainable, prompts, **given)
    # On a device, a prompt is read once for all of its messages.
    assert len(prompts) <= sampler.stats.prompts <= len(prompts) * config.mesh.fsdp
    return drawn

  monkeypatch.setattr(Sampler, 'sample', watched)
  call = dict(document=config.model.cartridge.document, output=str(output), announce=said.append, overwrite=overwrite)
  if stop_after is None:
    synthesis.synthesize(config, options, **call)
  else:
    with pytest.raises(KeyboardInterrupt):
      synthesis.synthesize(config, options, **call)
  monkeypatch.setattr(Sampler, 'sample', sample)
  return said, asked


@pytest.fixture(scope='module')
def made(config, tmp_path_factory):
  """(folder, what was said, prompts of each round): pool.jsonl, drawn in rounds of eight messages."""
  folder = tmp_path_factory.mktemp('made')
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(synthesis, 'ROUND', 8)
    said, asked = drawing(config, folder / 'pool.jsonl', monkeypatch)
  return folder, said, asked


def test_a_model_writes_a_pool(made, config, tokenizer):
  folder, said, asked = made
  found = [json.loads(line) for line in (folder / 'pool.jsonl').read_text().splitlines()]
  assert len(found) == 12 == len({row['prompt'][0]['content'] for row in found})
  assert [path.name for path in folder.iterdir()] == ['pool.jsonl']
  own = asker(tokenizer)
  assert [[own.ask(number, at).tokens for at in range(len(prompts))] for number, prompts in enumerate(asked)] == asked
  assert len(asked) > 1 and max(map(len, asked)) == 4
  for row in found:
    number, sample = map(int, row['id'].split('-'))
    ask = own.ask(number, sample // OPTIONS.per_window)
    assert (row['dataset'], row['window_start'], row['window_end']) == (ask.seed_type, *ask.window)
    assert row['window_digest'] == Document(TEXT, tokenizer).digest
  policy, parameters = huggingface.load(config.model.path, ModelConfig(dtype='float32'))  # Not frozen, on one device.
  stops = stop_token_ids(config, tokenizer)
  sampler = Sampler(policy, tokenizer, response_buckets=(6,), stop_token_ids=stops)
  written = sampler.sample({}, parameters, asked[0], n=2, seed=5, step=0, max_tokens=6, temperature=0.6)
  kept = {text.strip() for text, reason in zip(written.text, written.finish_reason, strict=True) if reason == 'stop'}
  first = {row['prompt'][0]['content'] for row in found if row['id'].startswith('0-')}
  assert first == kept - {''} != set()
  assert said[0].endswith(f'has {len(TEXT)} tokens without a template, and a prompt about it at most {own.limit}.')
  assert said[-1].startswith(f'{folder}/pool.jsonl: 12 prompts (')


def test_a_pool_that_cannot_be_kept_is_said(tmp_path):
  (tmp_path / 'pool.jsonl.parts').write_text('')
  with pytest.raises(UserError, match='--output=.*pool.jsonl cannot be written .*: name another file'):
    PoolFile(str(tmp_path / 'pool.jsonl'), {}).add(0, Round([], 3, {}))
  with pytest.raises(UserError, match='--output=unknown://a/pool.jsonl has an unknown scheme'):
    PoolFile('unknown://a/pool.jsonl', {}).check(overwrite=True)


def test_of_two_commands_at_once_the_first_leaves_what_the_second_keeps(monkeypatch, tmp_path):
  first, second = (PoolFile(str(tmp_path / 'pool.jsonl'), {}) for _ in range(2))
  first.add(0, Round([], 3, {}))
  remove = os.rmdir

  def interrupted(path, **settings):
    second.add(1, Round([], 3, {}))  # Between the removal of the files and that of the folder.
    remove(path, **settings)

  monkeypatch.setattr(os, 'rmdir', interrupted)
  first.finish([{'id': '0-0'}])
  monkeypatch.undo()
  second.finish([{'id': '0-0'}])
  assert [path.name for path in tmp_path.iterdir()] == ['pool.jsonl']


def test_a_pool_goes_on_where_it_was_interrupted(made, config, monkeypatch, tmp_path):
  folder, _, asked = made
  monkeypatch.setattr(synthesis, 'ROUND', 8)
  output = tmp_path / 'pool.jsonl'
  _, before = drawing(config, output, monkeypatch, stop_after=1)
  assert not output.exists() and before == asked[:1]
  with pytest.raises(
    UserError, match=r'pool.jsonl.parts .* with other settings \(--seed was 5 and is 6\): .* --overwrite'
  ):
    drawing(config, output, monkeypatch, dataclasses.replace(OPTIONS, seed=6))
  stopping = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, stop=('.',)))
  with pytest.raises(UserError, match=r"\(rollout\.stop was \[\] and is \['\.'\]\)"):
    drawing(stopping, output, monkeypatch)
  template = tmp_path / 'other.jinja'
  template.write_text(IGNORING)
  other = dataclasses.replace(config, model=dataclasses.replace(config.model, chat_template=str(template)))
  with pytest.raises(UserError, match='chat_template of the tokenizer was '):
    drawing(other, output, monkeypatch)
  template.unlink()
  said, after = drawing(config, output, monkeypatch)
  assert after == asked[1:] and said[0].startswith('Continuing with the ')
  assert output.read_bytes() == (folder / 'pool.jsonl').read_bytes()
  assert [path.name for path in tmp_path.iterdir()] == ['pool.jsonl']
  with pytest.raises(UserError, match='already exists: name another file, or add --overwrite'):
    drawing(config, output, monkeypatch)


def test_what_other_settings_have_left_goes_with_overwrite(tmp_path):
  output = str(tmp_path / 'pool.jsonl')
  PoolFile(output, {'--seed': 1}).add(0, Round([], 3, {}))
  assert PoolFile(output, {'--seed': 1}).rounds(overwrite=False) == [Round([], 3, {})]
  assert PoolFile(output, {'--seed': 2}).rounds(overwrite=True) == [] == list(tmp_path.iterdir())
  file = PoolFile(output, {'--seed': 1})
  file.add(0, Round([], 3, {}))
  (file.folder / '00001.json').write_text('{"settings": {"--seed": 1}}')
  with pytest.raises(UserError, match='00001.json is not a round of a pool: remove '):
    file.rounds(overwrite=False)
  (file.folder / '00001.json').write_text('{"settings"')
  with pytest.raises(UserError, match='00001.json is not JSON .*: remove .*pool.jsonl.parts, or add --overwrite'):
    file.rounds(overwrite=False)


def test_the_rows_are_questions_of_a_run(made, config, tokenizer):
  folder, _, _ = made
  config = pool_config(config, folder)
  iterator = training_questions(config, tokenizer)
  assert iterator.rows == 12 and iterator.environments == {'none'}
  found = [json.loads(line) for line in (folder / 'pool.jsonl').read_text().splitlines()]
  asked = sorted((example.data_source, example.messages[0]['content']) for example in iterator.questions)
  assert asked == sorted((row['dataset'], row['prompt'][0]['content']) for row in found)


def pool_config(config, folder):
  data = dataclasses.replace(config.data, train_files=(str(folder / 'pool.jsonl'),))
  return dataclasses.replace(config, data=data).validate()


@pytest.mark.slow
def test_a_run_trains_on_a_pool_and_logs_each_seed_type(made, config, tmp_path):
  folder, _, _ = made
  config = pool_config(config, folder)
  loop.train(config, str(tmp_path / 'run'))
  lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
  steps = [line for line in lines if line['step']]
  mixed = [line for line in steps if any(name.endswith('/divergence') and name.count('/') == 2 for name in line)]
  assert len(steps) == 3 and mixed
  for line in mixed:
    kinds = {name.split('/')[1]: value for name, value in line.items() if name.count('/') == 2 and 'divergence' in name}
    assert len(kinds) == 2 <= len(kinds.keys() & set(self_study.DEFAULT_TYPES))
    assert min(kinds.values()) <= line['teacher/divergence'] <= max(kinds.values())


@pytest.mark.parametrize(
  ('changes', 'says'),
  [
    ({'seed_types': ('questions',)}, "--seed_types: 'questions' must be one of structuring, summarization, question,"),
    ({'seed_types': ()}, '--seed_types= must name at least one type'),
    ({'seed_types': ('question', 'question')}, 'and none twice'),
    ({'seed_weights': (1.0,)}, '--seed_weights has 1 numbers for 5 seed types'),
    ({'seed_weights': (1.0, 1, 1, 0, 1)}, '--seed_weights must be positive'),
    ({'seed_weights': (1.0, 1, 1, float('nan'), 1)}, '--seed_weights must be positive'),
    ({'seed_types': ('question', 'creative'), 'seed_weights': (1e308, 1e308)}, '--seed_weights=.* have no finite sum'),
    ({'temperature': float('nan')}, '--temperature=nan must be a finite number'),
    ({'per_window': 513}, '--per_window=513 is more than the 512 messages'),
    ({'min_window': 61}, '--min_window=61 is more than --max_window=60'),
    ({'windows': 3}, '--min_window=20 has no effect with --windows'),
    (
      {'max_tokens': 1800},
      r'a passage of 60 tokens, .* the 2048 positions \(max_position_embeddings\) of the model: lower',
    ),
  ],
)
def test_options_that_do_not_fit_are_refused(config, tmp_path, changes, says):
  options = dataclasses.replace(OPTIONS, **changes)
  with pytest.raises(UserError, match=says):
    synthesis.synthesize(
      config, options, document=config.model.cartridge.document, output=str(tmp_path / 'x.jsonl'), announce=print
    )


def test_files_that_do_not_fit_are_refused(config, tmp_path):
  (tmp_path / 'empty.txt').write_text(' \n')
  document = config.model.cartridge.document
  for given, output, says in (
    (f'{tmp_path}/none.txt', 'x.jsonl', 'none.txt cannot be read .*: name a text file in --document'),
    (f'{tmp_path}/empty.txt', 'x.jsonl', 'empty.txt is empty: name a file with text in --document'),
    (document, 'x.csv', r'x.csv must end in .jsonl or .parquet'),
    (document, 'empty.txt/x.jsonl', 'cannot be written'),
  ):
    with pytest.raises(UserError, match=says):
      synthesis.synthesize(config, OPTIONS, document=given, output=str(tmp_path / output))
