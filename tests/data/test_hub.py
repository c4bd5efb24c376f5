"""Hub data sets: named by hf:…, their splits found as the library `datasets` finds them; from folders and a hub."""

import json
import random
import re
import resource
import subprocess
import sys
import time

import datasets
from fsspec.utils import glob_translate
import pyarrow
import pyarrow.parquet
import pytest

from sdpo_jax.data import hub_datasets, rows, sources
from sdpo_jax.errors import UserError
from tests import hub_server, tiers, tiny
from tests.data.reference_rows import CALLS, RAW


@pytest.fixture
def folder(tmp_path):
  made = tmp_path / 'set'
  made.mkdir()
  tool_use = {
    **RAW,
    'kind': 'tooluse',
    'dataset': 'tooluse',
    'system': None,
    'tests': None,
    'answer': json.dumps(CALLS),
  }
  for split, values in (('train', [{**RAW, 'idx': i} for i in range(5)]), ('test', [tool_use])):
    (made / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, values)))
  return made


def write(home, **files):
  """Write files by name, with / for __ and a . for the last _: rows of them, or a card's text."""
  for name, values in files.items():
    path = home / '.'.join(name.replace('__', '/').rsplit('_', 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == '.parquet':
      pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{'at': value} for value in values]), path)
    elif path.suffix == '.csv':
      path.write_text('at\n' + ''.join(f'{value}\n' for value in values))
    elif path.suffix == '.md':
      path.write_text(values)
    else:
      path.write_text(''.join(json.dumps({'at': value}) + '\n' for value in values))


def read(source):
  return [int(row.value['at']) for row in sources.read_rows(source, 'data.train_files')]


def test_rows_of_a_split(folder):
  found = sources.read_rows(f'hf:{folder}?split=train', 'data.train_files')
  assert [r.number for r in found] == [1, 2, 3, 4, 5]
  assert found[2].origin == f'hf:{folder}?split=train, row 3'
  assert [rows.example(r, 'train').id for r in found] == [f'sciknoweval/{i}' for i in range(5)]
  (row,) = sources.read_rows(f'hf:{folder}?split=test', 'data.val_files')
  example = rows.example(row, 'test')
  assert example.environment == 'tooluse' and [m['role'] for m in example.messages] == ['user']


def test_preprocessed_rows(folder):
  ready = [rows.preprocess(rows.RawRow('', i, {**RAW, 'idx': i}), 'train') for i in range(2)]
  datasets.Dataset.from_list(ready).to_parquet(folder / 'train.parquet')
  (folder / 'train.jsonl').unlink()
  (folder / 'test.jsonl').unlink()
  found = sources.read_rows(f'hf:{folder}', 'data.train_files')  # The only split need not be named.
  assert [rows.example(r, 'train').messages for r in found] == [r['prompt'] for r in ready]


SLICES = ['train[1:3]', 'train[-2:]', 'train[:60%]', 'train[30%:]', 'train[:-1]', 'train+test[:1]', 'test+train[4:]']


@pytest.mark.parametrize('split', SLICES)
def test_slices_and_sums_are_those_of_datasets(tmp_path, monkeypatch, split):
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  write(tmp_path / 'set', train_jsonl=range(7), test_jsonl=range(10, 13))
  wanted = datasets.load_dataset(str(tmp_path / 'set'), split=split)['at']
  assert read(f'hf:{tmp_path}/set?split={split}'.replace('+', '%2B').replace('%:', '%25:').replace('%]', '%25]')) == [
    *wanted
  ]


CARD = """---
license: mit
configs:
- config_name: easy
  data_files: easy/*.jsonl
- config_name: hard
  default: true
  data_files:
  - split: train
    path: ["hard/a*.jsonl", "hard/more.jsonl"]
  - split: dev
    path: hard/b.jsonl
---
# A set
"""
LAYOUTS = {  # Files, source options → the splits as `datasets` finds them, compared one by one.
  'names': dict(train_jsonl=[1], test_jsonl=[2], validation_jsonl=[3]),
  'words in names': {'my-training-set_jsonl': [1], 'my_eval_jsonl': [2]},
  'folders': dict(data__train__a_csv=[1, 2], data__test__b_csv=[3], data__train__c_csv=[4]),
  'shards': {
    'data__train-00000-of-00002_parquet': [1, 2],
    'data__train-00001-of-00002_parquet': [3],
    'data__odd-00000-of-00001_parquet': [4],
  },
  'one file': dict(questions_parquet=[1, 2]),
  'no split': dict(a_jsonl=[1], b_jsonl=[2]),
  'the most frequent format': dict(train_jsonl=[1], test_jsonl=[2], train_csv=[3]),
}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_splits_are_found_as_datasets_finds_them(tmp_path, monkeypatch, layout):
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  write(tmp_path / 'set', **LAYOUTS[layout])
  wanted = datasets.load_dataset(str(tmp_path / 'set'))
  assert {split: read(f'hf:{tmp_path}/set?split={split}') for split in wanted} == {
    split: [*wanted[split]['at']] for split in wanted
  }
  with pytest.raises(UserError, match=f'has no split .none.: choose from {", ".join(wanted)}'):
    read(f'hf:{tmp_path}/set?split=none')


def test_the_configs_of_a_card_are_those_of_datasets(tmp_path, monkeypatch):
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  files = dict(easy__x_jsonl=[1], easy__deep__y_jsonl=[9], hard__a1_jsonl=[2], hard__a2_jsonl=[3])
  write(tmp_path, **files, hard__more_jsonl=[4], hard__b_jsonl=[5], README_md=CARD)
  for config, split in (('easy', 'train'), ('hard', 'train'), ('hard', 'dev')):
    wanted = datasets.load_dataset(str(tmp_path), config, split=split)
    assert read(f'hf:{tmp_path}?config={config}&split={split}') == wanted['at'][:]
  for true in ('true', 'TRUE', 'yes', 'On'):  # The config that the card says is the default.
    (tmp_path / 'README.md').write_text(CARD.replace('default: true', f'default: {true}'))
    assert datasets.load_dataset_builder(str(tmp_path)).config.name == 'hard' and read(f'hf:{tmp_path}?split=dev') == [
      5
    ]
  (tmp_path / 'README.md').write_text(CARD)
  with pytest.raises(UserError, match="has no config 'main': choose from easy, hard"):
    read(f'hf:{tmp_path}?config=main')
  (tmp_path / 'README.md').write_text(CARD.replace('  default: true\n', ''))
  with pytest.raises(UserError, match='has several configs: add config= with easy, hard'):
    read(f'hf:{tmp_path}?split=dev')
  for wrong in ('configs: 3', 'configs: [a]', 'configs:\n- config_name: x\n  data_files: [{"a": 1}]', '}: {'):
    (tmp_path / 'README.md').write_text(f'---\n{wrong}\n---\n')
    with pytest.raises(UserError, match=r'the configs in its README.md cannot be read: .') as raised:
      read(f'hf:{tmp_path}?split=dev')
    assert '\n' not in str(raised.value)


def test_a_pattern_matches_the_names_that_it_matches_for_fsspec():
  draw = random.Random(0)

  def joined(parts, most):
    return ''.join(draw.choices(parts, k=draw.randint(1, most)))

  names = sorted({'/'.join(joined('ab.', 3) for _ in range(draw.randint(1, 4))) for _ in range(200)})
  matched = 0
  for _ in range(500):
    parts = [draw.choice(('**', joined(['a', 'b', '.', '?', '[ab]', '*a', '*'], 3))) for _ in range(draw.randint(1, 5))]
    pattern = '/'.join('**' if '**' in part else part for part in parts)
    expected = [name for name in names if re.match(glob_translate(pattern), name)]
    assert list(hub_datasets._matching(pattern, names, time.thread_time() + 60)) == expected, pattern  # noqa: SLF001 (else a folder per pattern)
    matched += len(expected)
  assert matched > 5000


ONE = 'configs:\n- config_name: x\n  data_files: '
LAUGHS = 'a0: &a0 [l, l]\n' + ''.join(f'a{i}: &a{i} [{", ".join([f"*a{i - 1}"] * 10)}]\n' for i in range(1, 13))
MERGED = 'a0: &a0 {k: v}\n' + ''.join(f'a{i}: &a{i}\n  <<: [{", ".join([f"*a{i - 1}"] * 9)}]\n' for i in range(1, 13))
SLOW = 'they take more than 3 s'
HOSTILE = {  # Cards and, in parts, how reading them ends.
  'many stars': (f'{ONE}"{"*a" * 60}b"', 'has no files of rows'),
  'many folders': (f'{ONE}"{"**/*a*a*/" * 60}b"', 'has no files of rows'),
  'many patterns': (f'{ONE}\n' + '  - "*.jsonl"\n' * 60_000, SLOW),
  'many configs': ('configs:\n' + ''.join(f'- config_name: c{i}\n' for i in range(40_000)), SLOW),
  'many pieces': (f'{ONE}\n' + ''.join(f'  - "*{"a" * 120}b{i}*"\n' for i in range(7000)), SLOW),
  'a long pattern': (f'{ONE}"{"?*" * 500_000}"', SLOW),
  'aliases in a name': (f'{LAUGHS}configs:\n- config_name: *a12', 'cannot be read: unhashable'),
  'aliases in a path': (f'{LAUGHS}{ONE}\n  - split: x\n    path: [*a12]', 'cannot be read: can only concatenate'),
  'aliases in a folder': (f'{LAUGHS}configs:\n- config_name: x\n  data_dir: *a12', "cannot be read: 'list' object"),
  'merged aliases': (f'{MERGED}configs:\n- <<: *a12', 'cannot be read: merge keys'),
  'a value that holds itself': ('configs: &a\n- *a', 'cannot be read: found unconstructable recursive node'),
  'a long number': (f'configs:\n- config_name: 1{":59" * 340_000}', 'does not name a split'),
  'a tagged number': (f'configs:\n- config_name: !!int 1{":59" * 340_000}', 'does not name a split'),
  'long names': (f'configs:\n- config_name: {"a" * 500_000}\n- config_name: {"b" * 500_000}', 'has several configs'),
  'deep lists': (f'configs: {"[" * 900}{"]" * 900}', 'cannot be read: maximum recursion depth'),
  'wide lists': (f'configs: [{"[]," * 340_000}]', 'cannot be read: list indices'),
  'a split without a name': (f'{ONE}\n  - split: ~\n    path: "*.jsonl"', 'a config or split is null'),
  'splits without a name': (f'{ONE}\n    ~: "*.jsonl"\n    b: "*.jsonl"', 'a config or split is null'),
  'a config without a name': (
    'configs:\n- config_name: ~\n- config_name: b',
    'a config or split is null',
  ),
  'lines in names of configs': (
    'configs:\n- config_name: a\n  data_files: "*.jsonl"\n- config_name: "b\\nERROR: forged."\n  data_files: "*.jsonl"',
    r'has several configs: add config= with a, b\nERROR: forged.',
  ),
  'lines in names of splits': (
    f'{ONE}\n    "\\e[2Ja": "train.jsonl"\n    "b\\nERROR: forged.": "test.jsonl"',
    r'add split= with one of \x1b[2Ja, b\nERROR: forged.',
  ),
  'no end': ('a: b\n' * 300_000, 'its settings do not end within 1048576 characters'),
}
LONG = tuple(name for name, (_, message) in HOSTILE.items() if message == SLOW and name != 'a long pattern') + (
  'wide lists',
)
PROGRAM = """
import resource, sys
from sdpo_jax.data import sources
from sdpo_jax.errors import UserError

resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
try:
  sources.read_rows(sys.argv[1], 'data.train_files')
except UserError as error:
  print(error)
"""


@pytest.fixture(scope='module')
def strangers(tmp_path_factory):
  home = tmp_path_factory.mktemp('strangers')
  names = ['/'.join(['a' * 20] * 8), 'a' * 200]
  write(home, **{f'{name}{i}_jsonl': [] for name in names for i in range(1000)}, train_jsonl=[1], test_jsonl=[1])
  return home


@pytest.mark.parametrize('name', tiers.cases(HOSTILE, default=HOSTILE.keys() - set(LONG), slow=LONG))
def test_hostile_cards_end_in_a_sentence(name, strangers):
  text, message = HOSTILE[name]
  (strangers / 'README.md').write_text(f'---\n{text}\n---\n')
  if name in LONG:
    command = [sys.executable, '-c', PROGRAM, f'hf:{strangers}']
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny.REPOSITORY, env=tiny.environment())
    assert (
      done.returncode == 0 and len(done.stdout) < 3000 and done.stdout.count('\n') == 1 and message in done.stdout
    ), done.stderr
    return
  before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with pytest.raises(UserError) as raised:
    read(f'hf:{strangers}')
  assert time.process_time() - before[0] < 60 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 2**20
  assert message in str(raised.value) and '\n' not in str(raised.value) and len(str(raised.value)) < 3000


def test_patterns_are_matched_for_a_limited_time(strangers, monkeypatch):
  monkeypatch.setattr(hub_datasets, 'MATCHING_S', 0.1)
  (strangers / 'README.md').write_text(f'---\n{HOSTILE["many patterns"][0]}\n---\n')
  with pytest.raises(UserError, match=r'they take more than 0\.1 s'):
    read(f'hf:{strangers}')


@pytest.mark.parametrize('begins', ['', '---\n'])
def test_a_card_of_64_gib_is_not_read_whole(tmp_path, begins):
  write(tmp_path, train_jsonl=[1])
  (tmp_path / 'README.md').write_text(begins)
  with (tmp_path / 'README.md').open('r+') as file:
    file.truncate(2**36)
  if not begins:
    assert read(f'hf:{tmp_path}') == [1]
    return
  with pytest.raises(UserError, match='its settings do not end within'):
    read(f'hf:{tmp_path}')


@pytest.mark.parametrize(
  ('query', 'message'),
  [
    ('', 'does not name a split: add split= with one of train, test'),
    ('?split=dev', "has no split 'dev': choose from train, test"),
    ('?split=test[0]', "'test\\[0\\]' is not a split NAME or NAME\\[start:stop\\]"),
    ('?split=test[2:]', 'holds no rows'),
    ('?split=test&config=main', "has no config 'main': choose from default"),
    ('?splits=test', "there is no option 'splits'"),
    ('?split', 'is not hf:OWNER/NAME'),
  ],
)
def test_a_wrong_option_is_named(folder, query, message):
  with pytest.raises(UserError, match=message):
    sources.read_rows(f'hf:{folder}{query}', 'data.train_files')


def test_what_cannot_be_reached_ends_with_a_sentence_that_names_it(tmp_path):
  for source, message in (
    (
      'hf:no/set?split=test',
      "data.val_files='no/set' is not a directory here, and it cannot be loaded",
    ),
    (f'hf:{tmp_path}/missing?split=test', "/missing' is not a directory here, and it cannot be loaded"),
    (f'hf:{tmp_path}?split=test', 'has no files of rows that can be read here'),
    ('hf:?split=test', 'the name is missing'),
  ):
    with pytest.raises(UserError, match=message) as raised:
      sources.read_rows(source, 'data.val_files')
    assert '\n' not in str(raised.value)


def test_a_broken_file_of_a_data_set_is_named_with_its_line(folder):
  (folder / 'train.jsonl').write_text('{"a": 1}\n{"a": \n')
  with pytest.raises(UserError, match='train.jsonl, line 2: invalid JSON'):
    sources.read_rows(f'hf:{folder}?split=train', 'data.train_files')


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """Serve a hub of data sets, with an empty cache before it."""
  with hub_server.reached(tmp_path, monkeypatch) as served:
    yield served


def test_a_data_set_of_the_hub_is_downloaded_once_and_only_its_split(hub, monkeypatch):
  home = hub.folder / 'me' / 'rows'
  write(home / 'main', README_md='# Rows', train_parquet=[1, 2, 3], test_parquet=[4], **{'a[1]_txt': [1]})
  write(home / 'v1', train_parquet=[7])
  assert read('hf:me/rows?split=train[1:]') == [2, 3] == read('hf:me/rows?split=train[1:]')
  fetched = [path.rpartition('/')[2] for path in hub.asked if '/resolve/' in path]
  assert 'train.parquet' in fetched and not {'test.parquet', 'a[1].txt'} & set(fetched)
  assert read('hf:me/rows?revision=v1') == [7]
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  count = len(hub.asked)
  assert read('hf:me/rows?split=train') == [1, 2, 3] and len(hub.asked) == count
  with pytest.raises(UserError, match="has no split 'test': choose from train"):
    read('hf:me/rows?split=test')  # It was not downloaded.


def test_a_set_in_another_format_is_read_as_the_hub_has_converted_it(hub):
  home = hub.folder / 'me' / 'script'
  write(home / 'main', rows_arrow=[1])
  write(home / 'refs%2Fconvert%2Fparquet', **{'main__train__0000_parquet': [1, 2], 'main__test__0000_parquet': [3]})
  assert read('hf:me/script?split=train') == [1, 2] and read('hf:me/script?config=main&split=test') == [3]


@pytest.mark.parametrize(
  ('source', 'message'),
  [
    ('hf:me/none', "data.train_files='me/none' .* there is no such data set, or it is private: .* `hf auth login`"),
    ('hf:me/rows?revision=v9', "data.train_files='me/rows' .* it has no such revision"),
    ('hf:me/script', "data.train_files='me/script' .* it has no such revision"),
    ('hf:a/b/c', "data.train_files='a/b/c' is not a directory here"),
  ],
)
def test_what_the_hub_does_not_have_is_said_by_name(hub, source, message):
  write(hub.folder / 'me' / 'rows' / 'main', train_parquet=[1])
  write(hub.folder / 'me' / 'script' / 'main', rows_arrow=[1])
  with pytest.raises(UserError, match=message) as raised:
    read(source)
  assert '\n' not in str(raised.value)


def test_percentages_of_rows_are_rounded_as_datasets_does():
  assert [len(hub_datasets.taken(range(7), (None, f'{percent}%'))) for percent in (0, 7, 8, 50, 100)] == [0, 0, 1, 4, 7]
