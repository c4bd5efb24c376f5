"""The pipeline: order, epochs, resume, generators, limits on prompts, and faults found before anything is compiled."""

import glob
import json

from hypothesis import given, settings
from hypothesis import strategies as st
import jinja2
import pytest

from sdpo_jax.config import Config
from sdpo_jax.data import pipeline, prompts
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example
from tests.golden.tokenizer import CharacterTokenizer


class Registry:
  """Stands for `sdpo_jax.environments.registry`."""

  def require(self, name):
    if name not in ('mcq', 'toy'):
      raise UserError(f'There is no environment {name!r}: choose from mcq, toy.')

  def get_generator(self, name):
    if name != 'toy':
      raise UserError(f'There is no generator {name!r}: choose from toy.')
    return toy


def toy(split, seed, *, every='0'):
  """Question i; with `every` k, the last of each k is long."""

  def make(index):
    text = f'q{index}' + 'x' * (100 if int(every) and index % int(every) == int(every) - 1 else 0)
    return Example(f'{split}-{seed}-{index}', [{'role': 'user', 'content': text}], 'toy', index, 'toy')

  return make


def raw(index, prompt='What?', **more):
  return {'idx': index, 'kind': 'mcq', 'dataset': 'sciknoweval', 'answer': 'A', 'prompt': prompt, **more}


@pytest.fixture
def write(tmp_path):
  def write(values, name='rows.json'):
    path = tmp_path / name
    path.write_text('\n'.join(json.dumps(value) for value in values))
    return str(path)

  return write


def config(files=(), *, val=(), batch=4, seed=0, **data):
  made = Config(seed=seed)
  made.data.train_files, made.data.val_files, made.data.train_batch_size = tuple(files), tuple(val), batch
  for key, value in data.items():
    setattr(made.data, key, value)
  return made


def train(*args, **kwargs):
  return pipeline.TrainIterator(config(*args, **kwargs), CharacterTokenizer(), Registry())


def ids(batch):
  return [example.id for example in batch]


def test_an_epoch_shows_every_row_once_and_drops_the_remainder(write):
  it = train([write([raw(i) for i in range(10)])], batch=4)
  epochs = [ids(next(it)) + ids(next(it)) for _ in range(20)]
  assert all(len(set(epoch)) == 8 for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) > 15  # Shuffled anew each epoch.
  assert len({i for epoch in epochs for i in epoch}) == 10  # Other rows are dropped in other epochs.


def test_the_seed_decides_the_order_and_neighbouring_seeds_share_nothing(write):
  files = [write([raw(i) for i in range(40)])]
  order = lambda seed: [tuple(ids(batch)) for _, batch in zip(range(20), train(files, seed=seed), strict=False)]
  assert order(3) == order(3)
  assert not set(order(3)) & set(order(4))


def test_sources_are_concatenated(write):
  it = train([write([raw(i) for i in range(4)], 'a.json'), write([raw(i) for i in range(4, 8)], 'b.json')], batch=8)
  assert sorted(ids(next(it))) == [f'sciknoweval/{i}' for i in range(8)]


@settings(max_examples=20, deadline=None)
@given(
  before=st.integers(0, 12),
  kind=st.sampled_from(['files', 'generator', 'both']),
  filtered=st.booleans(),
  seed=st.integers(0, 3),
)
def test_a_restored_position_gives_the_same_remaining_batches(tmp_path_factory, before, kind, filtered, seed):
  path = tmp_path_factory.mktemp('data') / 'rows.json'
  path.write_text('\n'.join(json.dumps(raw(i)) for i in range(11)))
  files = {'files': [str(path)], 'generator': ['generator:toy?every=3'], 'both': ['generator:toy?every=3', str(path)]}
  keys = dict(seed=seed, filter_overlong_prompts=filtered, max_prompt_length=60 if filtered else 1000)
  it = train(files[kind], **keys)
  for _ in range(before):
    next(it)
  state = json.dumps(it.get_state())
  rest = [ids(next(it)) for _ in range(10)]
  again = train(files[kind], **keys)
  next(again)
  again.set_state(json.loads(state))
  assert [ids(next(again)) for _ in range(10)] == rest


def test_a_position_in_other_rows_is_refused(write):
  state = train([write([raw(i) for i in range(8)])]).get_state()
  with pytest.raises(UserError, match='data.train_files hold other rows'):
    train([write([raw(i) for i in range(9)])]).set_state(state)


def test_a_generator_is_endless_ordered_and_gets_seed_split_and_options():
  it = train(['generator:toy?every=2'], seed=5, filter_overlong_prompts=True, max_prompt_length=60)
  assert ids(next(it)) == [f'train-5-{i}' for i in (0, 2, 4, 6)]
  assert ids(next(it)) == [f'train-5-{i}' for i in (8, 10, 12, 14)]


def test_generators_and_files_take_turns(write):
  it = train(['generator:toy', 'generator:toy?seed=9', write([raw(0)])], batch=6)
  assert ids(next(it)) == ['sciknoweval/0', 'train-0-0', 'train-9-0', 'sciknoweval/0', 'train-0-1', 'train-9-1']


@pytest.mark.parametrize(
  ('source', 'message'),
  [
    ('generator:other', "no generator 'other'"),
    ('generator:toy?speed=3', "'toy' does not take these options.*speed"),
    ('generator:toy?speed', 'is not generator:NAME'),
    ('generator:toy?seed=x', 'is not generator:NAME'),
  ],
)
def test_a_wrong_generator_is_named(source, message):
  with pytest.raises(UserError, match=message):
    train([source])


def test_evaluation_takes_the_first_rows_of_each_source_in_order(write):
  val = [write([raw(i) for i in range(5)]), 'generator:toy']
  examples = pipeline.evaluation_examples(config(val=val, val_max_samples=2, seed=7), CharacterTokenizer(), Registry())
  assert ids(examples) == ['sciknoweval/0', 'sciknoweval/1', 'test-0-0', 'test-0-1']
  with pytest.raises(UserError, match='set data.val_max_samples'):
    pipeline.evaluation_examples(config(val=val), CharacterTokenizer(), Registry())


def test_an_overlong_prompt_names_the_row_and_the_setting(write, caplog):
  files = [write([raw(i, 'x' * 200 if i == 2 else 'x') for i in range(5)])]
  with pytest.raises(UserError, match=r'rows.json, line 3: the prompt has \d+ tokens.*data.max_prompt_length=100'):
    train(files, max_prompt_length=100)
  it = train(files, max_prompt_length=100, filter_overlong_prompts=True)
  assert 'left out 1 of 5 rows' in caplog.text
  assert 'sciknoweval/2' not in {i for _ in range(9) for i in ids(next(it))}
  with pytest.raises(UserError, match='every prompt is longer'):
    train(files, max_prompt_length=3, filter_overlong_prompts=True)


def test_an_overlong_question_of_a_generator_is_named():
  with pytest.raises(UserError, match="example 'train-0-2': the prompt has"):
    train(['generator:toy?every=3'], max_prompt_length=60)
  it = train(['generator:toy?every=100'], max_prompt_length=60, batch=64)  # Beyond what is probed at the start.
  next(it)
  with pytest.raises(UserError, match="example 'train-0-99'"):
    next(it)


def test_too_few_rows_for_a_batch(write):
  with pytest.raises(UserError, match='3 usable rows, fewer than data.train_batch_size=4'):
    train([write([raw(i) for i in range(3)])])


def test_an_unknown_environment_names_the_row(write):
  with pytest.raises(UserError, match="rows.json, line 2: There is no environment 'math'"):
    train([write([raw(0), raw(1, dataset='gsm8k'), raw(2)])])


def test_a_malformed_row_ends_the_run_at_once(write):
  with pytest.raises(UserError, match="rows.json, line 2: field 'prompt' must be a non-empty string"):
    train([write([raw(0), raw(1, prompt='')])])


def test_prompt_tokens_are_the_chat_template_s():
  example = toy('train', 0)(0)
  made, tokenizer = config(max_prompt_length=60), CharacterTokenizer()
  assert tokenizer.decode(prompts.prompt_tokens(tokenizer, example, made)) == '<|user|>\nq0<|end|>\n<|assistant|>\n'
  made.data.enable_thinking = False
  assert tokenizer.decode(prompts.prompt_tokens(tokenizer, example, made)).endswith('</think>\n\n')
  made.data.max_prompt_length = 10
  with pytest.raises(UserError, match='data.max_prompt_length=10'):
    prompts.prompt_tokens(tokenizer, example, made)


def test_a_row_that_the_chat_template_refuses_is_named(write):
  class NoSystem(CharacterTokenizer):
    def apply_chat_template(self, conversations, **options):
      if any(messages[0]['role'] == 'system' for messages in conversations):
        raise jinja2.TemplateError('System role not supported')
      return super().apply_chat_template(conversations, **options)

  files = [write([raw(i, system='s' if i == 3 else None) for i in range(5)])]
  with pytest.raises(UserError, match='rows.json, line 4: .*chat template refuses.*System role not supported'):
    pipeline.TrainIterator(config(files), NoSystem(), Registry())


def test_real_rows(request):
  folder = request.config.getoption('--datasets')
  if folder is None:
    pytest.skip('needs --datasets=DIR')
  files = sorted(glob.glob(f'{folder}/sciknoweval/*/train.json'))
  assert files
  it = train(files, batch=32, max_prompt_length=10**5)
  seen = [example for _ in range(20) for example in next(it)]
  assert {example.environment for example in seen} == {'mcq'}
  assert {example.ground_truth for example in seen} <= set('ABCD')
  assert all(example.messages[0]['content'].startswith('\nGiven a question') for example in seen)
