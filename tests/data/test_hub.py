"""Hub data sets: named by hf:…, read by the datasets library; without a network, from folders that it accepts."""

import json
import logging

import pytest

from sdpo_jax.data import hub_datasets, rows, sources
from sdpo_jax.errors import UserError
from tests.data.reference_rows import CALLS, RAW


@pytest.fixture
def folder(tmp_path, monkeypatch):
  import datasets  # With pandas.

  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
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


def test_rows_of_a_split(folder):
  found = sources.read_rows(f'hf:{folder}?split=train', 'data.train_files')
  assert [r.number for r in found] == [1, 2, 3, 4, 5]
  assert found[2].origin == f'hf:{folder}?split=train, row 3'
  assert [rows.example(r, 'train').id for r in found] == [f'sciknoweval/{i}' for i in range(5)]
  (row,) = sources.read_rows(f'hf:{folder}?split=test', 'data.val_files')
  example = rows.example(row, 'test')
  assert example.environment == 'tooluse' and [m['role'] for m in example.messages] == ['user']


def test_preprocessed_rows(folder):
  import datasets

  ready = [rows.preprocess(rows.RawRow('', i, {**RAW, 'idx': i}), 'train') for i in range(2)]
  datasets.Dataset.from_list(ready).to_parquet(folder / 'train.parquet')
  (folder / 'train.jsonl').unlink()
  (folder / 'test.jsonl').unlink()
  found = sources.read_rows(f'hf:{folder}', 'data.train_files')  # The only split need not be named.
  assert [rows.example(r, 'train').messages for r in found] == [r['prompt'] for r in ready]


def test_a_slice_of_a_split(folder):
  assert len(sources.read_rows(f'hf:{folder}?split=train[1:3]', 'data.train_files')) == 2
  found = sources.read_rows(f'hf:{folder}?split=train', 'data.train_files')
  assert [r.value['idx'] for r in found[3:]] == [3, 4] and found[-1].number == 5 and len(found[:None]) == 5
  with pytest.raises(IndexError):
    found[5]


@pytest.mark.parametrize(
  ('query', 'message'),
  [
    ('', 'does not name a split: add \\?split= with one of train, test'),
    ('?split=dev', "cannot be loaded: Unknown split \"dev\". Should be one of \\['train', 'test'\\]"),
    ('?split=test&config=main', "cannot be loaded: BuilderConfig 'main' not found"),
    ('?splits=test', "there is no option 'splits'"),
    ('?split', 'is not hf:OWNER/NAME'),
  ],
)
def test_a_wrong_option_is_named(folder, query, message):
  with pytest.raises(UserError, match=message):
    sources.read_rows(f'hf:{folder}{query}', 'data.train_files')


def test_what_cannot_be_reached_ends_with_a_sentence_that_names_it(tmp_path):
  for source, message in (
    ('hf:nobody/nothing?split=test', "data.val_files: 'hf:nobody/nothing.split=test' cannot be loaded: Couldn't reach"),
    (f'hf:{tmp_path}/missing?split=test', "cannot be loaded: Couldn't find any data file"),
    ('hf:?split=test', 'the name is missing'),
  ):
    with pytest.raises(UserError, match=message) as raised:
      sources.read_rows(source, 'data.val_files')
    assert '\n' not in str(raised.value)


def test_a_broken_file_of_a_data_set_is_reported_once(folder, capfd):
  (folder / 'train.jsonl').write_text('{"a": 1}\n{"a": \n')
  with pytest.raises(UserError, match='cannot be loaded: .*JSON parse error'):
    sources.read_rows(f'hf:{folder}?split=train', 'data.train_files')
  assert 'JSON parse error' not in capfd.readouterr().err


def test_the_log_level_of_the_library_is_left_as_it_was(folder):
  logging.getLogger('datasets').setLevel(logging.ERROR)
  sources.read_rows(f'hf:{folder}?split=train', 'data.train_files')
  assert logging.getLogger('datasets').level == logging.ERROR


def test_an_option_reaches_the_library(monkeypatch):
  import datasets

  seen = {}
  monkeypatch.setattr(datasets, 'load_dataset', lambda *args, **options: seen.update(options, path=args) or [{'a': 1}])
  (row,) = hub_datasets.read_rows('hf:owner/name?split=test&config=main&revision=refs/pr/6', 'data.train_files')
  assert seen == {'path': ('owner/name',), 'name': 'main', 'split': 'test', 'revision': 'refs/pr/6'}
  assert row.value == {'a': 1}
