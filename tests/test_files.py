"""What commands write and say: outputs that can be written, JSON, tables, values quoted in messages."""

import os

import numpy as np
import pytest

from sdpo_jax import files, tables
from sdpo_jax.errors import UserError, first_line, short_repr


def test_an_output_is_checked_and_its_folder_made(tmp_path):
  files.check_output(tmp_path / 'new' / 'x.json')
  assert (tmp_path / 'new').is_dir() and not (tmp_path / 'new' / 'x.json').exists()
  (tmp_path / 'x.json').write_text('old')
  files.check_output(tmp_path / 'x.json')
  for path, overwrite, sentence in [
    (tmp_path, True, 'is a directory: name a file'),
    (tmp_path / 'x.json', False, 'already exists: .* --overwrite'),
    (tmp_path / 'x.json' / 'y.json', True, 'cannot be written'),
  ]:
    with pytest.raises(UserError, match=f'--output={path} {sentence}'):
      files.check_output(path, overwrite=overwrite)
  assert (tmp_path / 'x.json').read_text() == 'old'


def test_an_output_without_permission_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'access', lambda path, mode: False)
  with pytest.raises(UserError, match='may not be written'):
    files.check_output(tmp_path / 'x.json')


def test_values_become_what_json_holds():
  value = {1: (np.float32(2), np.arange(2)), 'a': [float('nan'), -np.inf, True, None, 'x'], 'b': {3}}
  assert files.jsonable(value) == {'1': [2.0, [0, 1]], 'a': [None, None, True, None, 'x'], 'b': '{3}'}


def test_tables_are_aligned():
  header, rows = ['name', 'n'], [['a', '10'], ['longer', '2']]
  assert tables.aligned(header, rows).splitlines() == ['name     n', '──────  ──', 'a       10', 'longer   2']
  assert tables.markdown(header, rows).splitlines() == [
    '| name   |  n |',
    '|--------|---:|',
    '| a      | 10 |',
    '| longer |  2 |',
  ]
  assert tables.markdown(header, []) == '| name | n |\n|------|--:|'


def test_a_quoted_value_is_short_and_one_line():
  assert short_repr('x\n') == "'x\\n'" and short_repr([1]) == '[1]'
  assert short_repr('x' * 10**6) == repr('x' * 60 + '…')
  assert '\n' not in short_repr(np.zeros((3, 3)))
  nested = []
  for _ in range(100_000):
    nested = [nested]
  for value in (nested, list(range(10**6)), {'a' * 500: 'b' * 500}):
    assert len(short_repr(value)) <= 61


def test_the_first_line_of_an_error():
  assert first_line(ValueError('\none\ntwo')) == 'one'
  assert first_line(ValueError()) == 'ValueError'
  assert len(first_line(ValueError('x' * 1000))) == 300


def test_a_link_stays_and_what_is_no_file_is_written_to(tmp_path):
  target, link, pipe = tmp_path / 'target', tmp_path / 'link', tmp_path / 'pipe'
  target.write_text('old')
  link.symlink_to(target)
  files.write_atomically(link, 'new')
  assert link.is_symlink() and target.read_text() == 'new'
  os.mkfifo(pipe)
  reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # Open before the writer, who would wait for it.
  try:
    files.write_atomically(pipe, 'text')
    assert os.read(reader, 100) == b'text'
  finally:
    os.close(reader)
  assert pipe.is_fifo()
