"""The pipeline: order, epochs, resume, generators, limits on prompts, and faults found before anything is compiled."""

import collections
import glob
import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import jinja2
import pytest
from transformers import AutoTokenizer

from sdpo_jax.config import Config
from sdpo_jax.data import pipeline, prompts
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError
from sdpo_jax.training.specs import prompt_spec
from sdpo_jax.types import Example
from tests import tiny
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


def train(*args, process=(0, 1), **kwargs):
  index, count = process
  return iterator(config(*args, **kwargs), process_index=index, process_count=count)


def iterator(made, tokenizer=None, registry=None, **kwargs):
  """Return a `TrainIterator` of settings."""
  tokenizer, registry = tokenizer or CharacterTokenizer(), registry or Registry()
  return pipeline.TrainIterator(made.data, prompt_spec(made), made.seed, tokenizer, registry, **kwargs)


def evaluation_examples(made):
  return pipeline.evaluation_examples(made.data, prompt_spec(made), CharacterTokenizer(), Registry())


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

  def order(seed):
    return [tuple(ids(batch)) for _, batch in zip(range(20), train(files, seed=seed), strict=False)]

  assert order(3) == order(3)
  assert not set(order(3)) & set(order(4))


def test_sources_are_concatenated(write):
  it = train([write([raw(i) for i in range(4)], 'a.json'), write([raw(i) for i in range(4, 8)], 'b.json')], batch=8)
  assert sorted(ids(next(it))) == [f'sciknoweval/{i}' for i in range(8)]


@settings(max_examples=12, deadline=None)
@given(
  before=st.integers(0, 12),
  kind=st.sampled_from(['files', 'generator', 'both', 'weighted']),
  filtered=st.booleans(),
  seed=st.integers(0, 3),
)
def test_a_restored_position_gives_the_same_remaining_batches(tmp_path_factory, before, kind, filtered, seed):
  path = tmp_path_factory.mktemp('data') / 'rows.json'
  path.write_text('\n'.join(json.dumps(raw(i)) for i in range(11)))
  files = {'files': [str(path)], 'generator': ['generator:toy?every=3'], 'both': ['generator:toy?every=3', str(path)]}
  files['weighted'] = [str(path), *files['both']]
  keys = dict(seed=seed, filter_overlong_prompts=filtered, max_prompt_length=60 if filtered else 1000)
  if kind == 'weighted':
    keys['source_weights'] = (3, 1, 0.5)
  it = train(files[kind], **keys)
  for _ in range(before):
    next(it)
  state = json.dumps(it.get_state())
  rest = [ids(next(it)) for _ in range(6)]  # Three epochs of the file.
  again = train(files[kind], **keys)
  next(again)
  again.set_state(json.loads(state))
  assert [ids(next(again)) for _ in range(6)] == rest


def test_a_position_in_other_rows_is_refused(write):
  state = train([write([raw(i) for i in range(8)])]).get_state()
  with pytest.raises(UserError, match='data.train_files hold different rows'):
    train([write([raw(i) for i in range(9)])]).set_state(state)


def test_a_position_in_other_rows_may_be_taken_but_not_one_that_counts_otherwise(write):
  rows = train([write([raw(i) for i in range(8)])])
  next(rows)
  same = train([write([raw(i, prompt='Which?') for i in range(8)])])
  same.set_state(rows.get_state(), other_rows=True)
  assert ids(next(same)) == ids(next(rows))
  endless = train(['generator:toy'])
  next(endless)
  with pytest.raises(UserError, match='mix files and generators differently'):
    same.set_state(endless.get_state(), other_rows=True)


def test_a_generator_is_endless_ordered_and_gets_seed_split_and_options():
  it = train(['generator:toy?every=2'], seed=5, filter_overlong_prompts=True, max_prompt_length=60)
  assert ids(next(it)) == [f'train-5-{i}' for i in (0, 2, 4, 6)]
  assert ids(next(it)) == [f'train-5-{i}' for i in (8, 10, 12, 14)]


def test_generators_and_files_take_turns(write):
  it = train(['generator:toy', 'generator:toy?seed=9', write([raw(0)])], batch=6)
  assert ids(next(it)) == ['sciknoweval/0', 'train-0-0', 'train-9-0', 'sciknoweval/0', 'train-0-1', 'train-9-1']


def drawn(iterator, batches):
  return [example.id for _ in range(batches) for example in next(iterator)]


@pytest.mark.parametrize(
  ('weights', 'shares'), [((7, 3), (7, 3)), ((0.7, 0.3), (7, 3)), ((1, 2), (1, 2)), ((0.1, 0.005), (20, 1))]
)
def test_each_source_has_exactly_its_share_of_every_round_however_large_it_is(write, weights, shares):
  files = [write([raw(i) for i in range(3)], 'few.json'), write([raw(100 + i) for i in range(20)], 'many.json')]
  it = train(files, batch=sum(shares), source_weights=weights)
  for _ in range(12):
    few = sum(int(i.split('/')[1]) < 100 for i in drawn(it, 1))
    assert (few, sum(shares) - few) == shares


def test_weighted_files_are_shuffled_on_their_own_and_shown_evenly(write):
  files = [write([raw(i) for i in range(5)], 'few.json'), write([raw(100 + i) for i in range(40)], 'many.json')]
  it = train(files, batch=4, source_weights=(1, 3))
  few = [i for i in drawn(it, 20) if int(i.split('/')[1]) < 100]
  epochs = [few[at : at + 5] for at in range(0, 20, 5)]
  assert all(len(set(epoch)) == 5 for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) > 1
  # Two copies of one file are not in the same order.
  both = train([files[1], files[1]], batch=2, source_weights=(1, 1))
  assert any(first != second for first, second in (ids(next(both)) for _ in range(5)))


def test_weights_mix_generators_with_files_and_each_row_keeps_its_environment(write):
  sources = ['generator:toy', write([raw(i) for i in range(8)]), 'generator:toy?seed=9']
  it = train(sources, batch=6, source_weights=(3, 2, 1))
  assert it.environments == {'toy', 'mcq'}
  batches = [next(it) for _ in range(10)]
  assert all(collections.Counter(e.environment for e in batch) == {'toy': 4, 'mcq': 2} for batch in batches)
  first = [example.id for batch in batches for example in batch if example.id.startswith('train-0-')]
  assert first == [f'train-0-{i}' for i in range(30)]  # In order of index, none left out, none twice.


def test_weights_spread_a_source_over_the_round():
  parts = [pipeline.grain.MapDataset.range(10**6).map(lambda i, part=part: (part, i)) for part in 'ab']
  mixed = pipeline.mix(parts, (3, 1))
  assert [mixed[i] for i in range(8)] == [
    *(('a', 0), ('a', 1), ('b', 0), ('a', 2)),
    *(('a', 3), ('a', 4), ('b', 1), ('a', 5)),
  ]


@pytest.mark.parametrize(
  ('weights', 'message'),
  [
    ((1.0,), 'source_weights has 1 numbers for 2 data.train_files'),
    ((1.0, 0.0), 'source_weights must be positive'),
    ((1.0, -2.0), 'source_weights must be positive'),
    ((1.0, 1 / 3), 'have too many digits'),
  ],
)
def test_unusable_weights_are_refused(weights, message):
  made = config(['a.json', 'b.json'], source_weights=weights, val=['a.json'])
  made.model.path, made.actor.ppo_mini_batch_size = 'model', 4
  with pytest.raises(UserError, match=message):
    made.validate()
  made.data.source_weights = (1.0, 0.25)
  made.validate()


@pytest.mark.parametrize('kind', ['files', 'weighted'])
@pytest.mark.parametrize('count', [1, 2, 4])
def test_processes_share_every_batch_and_together_see_what_one_alone_sees(write, count, kind):
  files = {
    'files': [write([raw(i) for i in range(11)])],
    'weighted': [write([raw(0), raw(1)], 'few.json'), 'generator:toy?every=3'],
  }
  keys = dict(source_weights=(2, 1)) if kind == 'weighted' else {}
  keys |= dict(max_prompt_length=60, filter_overlong_prompts=True)
  alone = train(files[kind], **keys)
  processes = [train(files[kind], process=(index, count), **keys) for index in range(count)]
  for _ in range(7):
    shares = [ids(next(process)) for process in processes]
    assert all(len(share) == 4 // count for share in shares)
    assert sum(shares, []) == ids(next(alone))


def test_a_position_of_some_processes_is_one_for_any_other_number_of_them(write):
  files = [write([raw(i) for i in range(30)])]
  one_of_four = train(files, process=(3, 4))
  for _ in range(9):
    next(one_of_four)
  state = json.loads(json.dumps(one_of_four.get_state()))
  alone, pair = train(files), [train(files, process=(index, 2)) for index in range(2)]
  for iterator in (alone, *pair):
    iterator.set_state(state)
  for _ in range(9):
    batch = ids(next(alone))
    assert ids(next(one_of_four)) == batch[3:] and [i for process in pair for i in ids(next(process))] == batch


def test_a_batch_that_does_not_divide_among_processes_is_refused(write):
  with pytest.raises(UserError, match='train_batch_size=4 questions do not divide among 3 processes'):
    train([write([raw(i) for i in range(8)])], process=(0, 3))


def test_rows_of_a_hub_data_set_train_and_evaluate(tmp_path, monkeypatch):
  import datasets  # With pandas.

  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  (tmp_path / 'set').mkdir()
  for split, count in (('train', 8), ('test', 3)):
    (tmp_path / 'set' / f'{split}.jsonl').write_text('\n'.join(json.dumps(raw(i)) for i in range(count)))
  source = f'hf:{tmp_path}/set?split='
  it = train([source + 'train'])
  assert sorted(drawn(it, 2)) == [f'sciknoweval/{i}' for i in range(8)]
  held_out = evaluation_examples(config(val=[source + 'test'], val_max_samples=2))
  assert ids(held_out) == ['sciknoweval/0', 'sciknoweval/1']


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
  examples = evaluation_examples(config(val=val, val_max_samples=2, seed=7))
  assert ids(examples) == ['sciknoweval/0', 'sciknoweval/1', 'test-0-0', 'test-0-1']
  with pytest.raises(UserError, match='set data.val_max_samples'):
    evaluation_examples(config(val=val))


def test_an_overlong_prompt_names_the_row_and_the_setting(write, caplog):
  files = [write([raw(i, 'x' * 200 if i == 2 else 'x') for i in range(5)])]
  with pytest.raises(UserError, match=r'rows.json, line 3: the prompt has \d+ tokens.*data.max_prompt_length=100'):
    train(files, max_prompt_length=100)
  it = train(files, max_prompt_length=100, filter_overlong_prompts=True)
  assert 'left out 1 of 5 rows' in caplog.text
  assert 'sciknoweval/2' not in {i for _ in range(9) for i in ids(next(it))}
  with pytest.raises(UserError, match='every prompt is longer'):
    train(files, max_prompt_length=3, filter_overlong_prompts=True)


def test_rows_of_ones_own_need_no_names(write, tmp_path):
  (tmp_path / 'capitals.csv').write_text('prompt,answer\nCapital of Chile?,A\nOf Peru?,B\n')
  files = [str(tmp_path / 'capitals.csv'), write([{'prompt': 'x', 'solution': 'B'}, raw(7)], 'own.jsonl')]
  it = train(files, environment='mcq')
  batch = next(it)
  assert sorted(ids(batch)) == ['capitals/2', 'capitals/3', 'own/1', 'sciknoweval/7']
  assert {example.environment for example in batch} == {'mcq'} and it.environments == {'mcq'}
  with pytest.raises(UserError, match="capitals.csv, line 2: no environment grades the data source 'capitals'"):
    train(files)
  with pytest.raises(UserError, match="capitals.csv, line 2: There is no environment 'other'"):
    train(files, environment='other')


def test_the_rows_of_the_documentation_train_as_they_are(tmp_path):
  text = (tiny.REPOSITORY / 'docs' / 'data.md').read_text()
  shown = re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", text, re.MULTILINE | re.DOTALL)
  assert [name for name, _ in shown] == ['rows.jsonl', 'rows.csv', 'rows.json']
  for name, content in shown:
    (tmp_path / name).write_text(content)
  made = config(environment='math')
  examples = []
  for name, _ in shown:
    examples += pipeline.read_examples(
      str(tmp_path / name),
      'train',
      made.data,
      prompt_spec(made),
      CharacterTokenizer(),
      registry,
      setting='data.train_files',
    )
  assert [(example.data_source, example.ground_truth) for example in examples] == [
    *(('rows', '42'), ('rows', '7'), ('rows', '42'), ('rows', '12'), ('tables', '42'))
  ]
  assert {example.environment for example in examples} == {'math'}


class Reader(CharacterTokenizer):
  """Counts the characters that it reads, and takes spaces next to each other for one."""

  read = 0

  def encode(self, text):
    self.read += len(text)
    return super().encode(re.sub(' +', ' ', text))


def test_a_prompt_of_megabytes_is_refused_or_left_out_unread(write):
  files = [write([raw(i, 'x' * 2_000_000 if i == 2 else 'x' + ' ' * 3000 + '?') for i in range(5)])]
  tokenizer, made = Reader(), config(files, max_prompt_length=100)
  with pytest.raises(UserError, match=r'rows.json, line 3: the prompt has more than 200 tokens with the chat template'):
    iterator(made, tokenizer)
  made.data.filter_overlong_prompts = True
  it = iterator(made, tokenizer)
  assert {i for _ in range(9) for i in ids(next(it))} == {f'sciknoweval/{i}' for i in (0, 1, 3, 4)}
  assert tokenizer.read < 100_000


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
  assert (
    tokenizer.decode(prompts.prompt_tokens(tokenizer, example, prompt_spec(made)))
    == '<|user|>\nq0<|end|>\n<|assistant|>\n'
  )
  made.data.enable_thinking = False
  assert tokenizer.decode(prompts.prompt_tokens(tokenizer, example, prompt_spec(made))).endswith('</think>\n\n')
  made.data.max_prompt_length = 10
  with pytest.raises(UserError, match='data.max_prompt_length=10'):
    prompts.prompt_tokens(tokenizer, example, prompt_spec(made))


def test_a_row_that_the_chat_template_refuses_is_named(write):
  class NoSystem(CharacterTokenizer):
    def apply_chat_template(self, conversations, **options):
      if any(messages[0]['role'] == 'system' for messages in conversations):
        raise jinja2.TemplateError('System role not supported')
      return super().apply_chat_template(conversations, **options)

  files = [write([raw(i, system='s' if i == 3 else None) for i in range(5)])]
  with pytest.raises(UserError, match='rows.json, line 4: .*chat template refuses.*System role not supported'):
    iterator(config(files), NoSystem())


@pytest.fixture
def real(request):
  folder = request.config.getoption('--datasets')
  if folder is None:
    pytest.skip('needs --datasets=DIR')
  return folder


class AnyEnvironment(Registry):
  def require(self, name):
    pass


# Rows of the paper's files: training, held-out.
SIZES = {
  'sciknoweval/biology': (450, 50),
  'sciknoweval/chemistry': (1890, 210),
  'sciknoweval/material': (841, 94),
  'sciknoweval/physics': (720, 80),
  'tooluse': (None, 68),
}


LARGE = ('sciknoweval/chemistry', 'sciknoweval/material', 'sciknoweval/physics')


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=pytest.mark.campaign if name in LARGE else ()) for name in SIZES]
)
def test_real_files_load_whole_and_every_prompt_passes_through_the_chat_template(real, name):
  tokenizer = AutoTokenizer.from_pretrained('configs/quickstart_model')
  for split, size in zip(('train', 'test'), SIZES[name], strict=True):
    if size is None:
      continue
    made = config(max_prompt_length=10**6)
    file = f'{real}/{name}/{split}.json'
    examples = pipeline.read_examples(
      file, split, made.data, prompt_spec(made), tokenizer, AnyEnvironment(), setting='data.train_files'
    )
    assert len(examples) == size
    assert {e.environment for e in examples} == {'tooluse' if name == 'tooluse' else 'mcq'}
    for example in examples:
      text = tokenizer.decode(prompts.prompt_tokens(tokenizer, example, prompt_spec(made)))
      assert text.count('<|im_start|>') == len(example.messages) + 1 and text.endswith('<|im_start|>assistant\n')
      assert len(example.messages) == (1 if name == 'tooluse' else 2)


def test_real_rows(real):
  files = sorted(glob.glob(f'{real}/sciknoweval/*/train.json'))
  assert files
  it = train(files, batch=32, max_prompt_length=10**5)
  seen = [example for _ in range(20) for example in next(it)]
  assert {example.environment for example in seen} == {'mcq'}
  assert {example.ground_truth for example in seen} <= set('ABCD')
  assert all(example.messages[0]['content'].startswith('\nGiven a question') for example in seen)


def test_real_files_mix_by_weight(real):
  files = [f'{real}/sciknoweval/chemistry/train.json', f'{real}/tooluse/test.json']
  made = config(files, batch=10, max_prompt_length=10**5, source_weights=(4, 1))
  it = iterator(made, registry=AnyEnvironment())
  for _ in range(20):
    assert collections.Counter(e.environment for e in next(it)) == {'mcq': 8, 'tooluse': 2}
