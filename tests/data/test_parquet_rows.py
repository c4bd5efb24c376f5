"""Rows of any file are at most so large, and those of parquet files are measured before they take memory."""

import csv
import json
import re

import pytest

from sdpo_jax.data import rows, sources
from sdpo_jax.errors import UserError

pyarrow = pytest.importorskip('pyarrow')
parquet = pytest.importorskip('pyarrow.parquet')

MIB = 2**20


@pytest.fixture
def limited(monkeypatch):
  """Let rows have at most 100 bytes."""
  for module in (rows, sources):
    monkeypatch.setattr(module, 'LARGEST_ROW', 100)
  before = csv.field_size_limit()  # Of the whole process.
  yield
  csv.field_size_limit(before)


def write(path, table, **options):
  parquet.write_table(table, path, **options)
  return path


def repeated(text, count):
  """Return a column of `count` texts that a file holds once."""
  return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text]))


def test_a_file_of_2_kb_with_20_rows_of_64_mib_takes_the_memory_of_none(tmp_path, monkeypatch):
  path = write(tmp_path / 'rows.parquet', pyarrow.table({'prompt': repeated('x' * 64 * MIB, 20)}), compression='zstd')
  assert path.stat().st_size < 3000
  pool = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
  before = pyarrow.default_memory_pool()
  pyarrow.set_memory_pool(pool)
  try:
    with pytest.raises(UserError, match=r'rows\.parquet, row 1: the row has 64 MiB, and at most 48 MiB are read'):
      sources.read_rows(str(path), 'data.train_files')
  finally:
    pyarrow.set_memory_pool(before)
  assert pool.max_memory() < 20 * 64 * MIB / 4


@pytest.mark.parametrize(
  'table',
  [
    {'prompt': repeated('x' * 4 * MIB, 2000)},  # Each small enough, 8 GB as a whole.
    {'prompt': [['x' * MIB] * 49]},
    {'prompt': pyarrow.ListArray.from_arrays([0, 8_000_000], pyarrow.repeat(1, 8_000_000))},
    {'prompt': [{'content': ['x' * MIB] * 49}]},
    {'prompt': pyarrow.repeat(pyarrow.scalar(b'x' * 49 * MIB, pyarrow.binary(49 * MIB)), 3)},
    {'prompt': pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(['x' * 49 * MIB] * 2))},
  ],
  ids=['together', 'of a list', 'numbers', 'of a field', 'of a width', 'of an extension'],
)
def test_what_a_file_says_many_times_counts_each_time(table, tmp_path):
  path = write(tmp_path / 'rows.parquet', pyarrow.table(table), compression='zstd')
  with pytest.raises(UserError, match=r'rows\.parquet(, row 1.*: the row has|: the rows of this file of) \d+.*read: '):
    sources.read_rows(str(path), 'data.train_files')


def test_files_without_bombs_are_read_whatever_their_types(tmp_path):
  text = pyarrow.string()
  table = pyarrow.table(
    {
      'texts': ['a', None, 'ccc'],
      'large': pyarrow.array(['a', None, 'b'], pyarrow.large_string()),
      'map': pyarrow.array([[('k', 'v')], None, []], pyarrow.map_(text, text)),
      'pairs': pyarrow.array([['a', 'b'], None, ['c', None]], pyarrow.list_(text, 2)),
      'numbers': pyarrow.array([1, 2, None]).dictionary_encode(),
      'names': pyarrow.array(['x', None, 'x']).dictionary_encode(),
      'nothing': pyarrow.nulls(3),
      'nested': [{'a': [{'b': 'x'}]}, None, {'a': None}],
      'flags': [True, None, False],
      'bytes': pyarrow.array([b'ab'] * 3, pyarrow.binary(2)),
      'empty': pyarrow.array([[], [], []], pyarrow.list_(pyarrow.struct([('a', text)]))),
    }
  )
  path = write(tmp_path / 'rows.parquet', table, row_group_size=2)
  found = sources.read_rows(str(path), 'data.train_files')
  assert [row.value for row in found] == parquet.read_table(path).to_pylist()


@pytest.mark.parametrize('encoding', ['DELTA_LENGTH_BYTE_ARRAY', 'DELTA_BYTE_ARRAY'])
def test_texts_that_are_written_as_differences(encoding, tmp_path):
  """Which newer writers do; a text then stands for itself and, or not, for those after it."""
  options = dict(use_dictionary=False, column_encoding={'prompt': encoding}, compression='zstd')
  table = pyarrow.table({'prompt': [f'text {number}' for number in range(50)]})
  path = write(tmp_path / 'rows.parquet', table, **options)
  assert [row.value for row in sources.read_rows(str(path), 'data.train_files')] == table.to_pylist()
  path = write(tmp_path / 'rows.parquet', pyarrow.table({'prompt': ['x' * 49 * MIB] * 3}), **options)
  with pytest.raises(UserError, match=r'rows\.parquet, row 1.*: the row has 49 MiB'):
    sources.read_rows(str(path), 'data.train_files')


def test_groups_without_rows_are_read(tmp_path):
  table = pyarrow.table({'prompt': ['a', 'b']})
  with parquet.ParquetWriter(tmp_path / 'rows.parquet', table.schema) as writer:
    for part in (table.slice(0, 0), table, table.slice(0, 0)):
      writer.write_table(part)
  assert len(sources.read_rows(str(tmp_path / 'rows.parquet'), 'data.train_files')) == 2


def size(value):
  """Return the bytes of a value, as the documentation counts them."""
  if isinstance(value, str | bytes):
    return len(value.encode() if isinstance(value, str) else value)
  if isinstance(value, list):
    return 8 * len(value) + sum(map(size, value))
  return sum(map(size, value.values())) if isinstance(value, dict) else 8


@pytest.mark.parametrize('large', [0, 3, 6])
def test_the_first_row_that_is_too_large_is_named(large, tmp_path, monkeypatch):
  counts = [9000 if n == large else 100 for n in range(7)]
  values = [{'prompt': [{'role': 'user', 'content': 'ä' * n}], 'n': n, 'of': ['x'] * (n // 9)} for n in counts]
  monkeypatch.setattr(rows, 'LARGEST_ROW', size(values[large]) - 1)
  path = write(tmp_path / 'rows.parquet', pyarrow.Table.from_pylist(values), row_group_size=3)
  with pytest.raises(UserError, match=rf'rows\.parquet, row {large + 1}: the row has'):
    sources.read_rows(str(path), 'data.train_files')
  monkeypatch.setattr(rows, 'LARGEST_ROW', max(map(size, values)) + 100)
  assert len(sources.read_rows(str(path), 'data.train_files')) == 7


LONG = 'x' * 101


@pytest.mark.parametrize(
  'name, text, line',
  [
    ('rows.jsonl', f'{json.dumps({"prompt": "x"})}\n{json.dumps({"prompt": LONG})}\n', 2),
    ('rows.json', f'[{json.dumps({"prompt": "x"})},\n{json.dumps({"prompt": LONG})}]', 2),
    ('rows.csv', f'prompt,answer\nx,y\n{LONG[:60]},{LONG[:60]}\n', 3),
    ('rows.csv', f'prompt,answer\n"{LONG},y\n', 2),
    ('rows.txt', f'x\n{LONG}\n', 2),
  ],
)
def test_rows_of_text_files_are_as_limited(name, text, line, limited, tmp_path):
  (tmp_path / name).write_text(text)
  message = rf'{re.escape(name)}, line {line}: (the row has 0 MiB, and at most|invalid CSV: field larger than)'
  with pytest.raises(UserError, match=message):
    sources.read_rows(str(tmp_path / name), 'data.train_files')
  (tmp_path / name).write_text(text.replace(LONG, 'z').replace(LONG[:60], 'z').replace('"z,', 'z,'))
  assert sources.read_rows(str(tmp_path / name), 'data.train_files')


def test_a_file_larger_than_memory_is_said(tmp_path):
  with (tmp_path / 'rows.jsonl').open('wb') as file:
    file.truncate(2**43)
  with pytest.raises(UserError, match=r'data\.train_files: .*rows\.jsonl.* cannot be read: '):
    sources.read_rows(str(tmp_path / 'rows.jsonl'), 'data.train_files')
