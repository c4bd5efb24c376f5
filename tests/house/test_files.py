"""What commands write and say: outputs that can be written, JSON, tables, values quoted in messages."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from sdpo_jax import command, files, tables
from sdpo_jax.errors import UserError, first_line, short_repr
from tests import tiny

ROOT = tiny.REPOSITORY


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


def test_an_output_in_a_store_without_its_package_is_refused(monkeypatch):
  monkeypatch.setitem(sys.modules, 's3fs', None)
  with pytest.raises(UserError, match='--output=s3://bucket/x.json needs a package that is not installed: .*s3fs'):
    files.check_output('s3://bucket/x.json')


def test_bytes_are_written_as_they_are(tmp_path):
  files.write_output(tmp_path / 'x', b'\xff\r\n\x00')
  assert (tmp_path / 'x').read_bytes() == b'\xff\r\n\x00'
  files.write_output(tmp_path / 'x', 'ö\r\n')
  assert (tmp_path / 'x').read_bytes() == 'ö\r\n'.encode()


def test_the_link_and_the_pipe_that_a_user_names_are_written_to(tmp_path):
  target, link, pipe = tmp_path / 'target', tmp_path / 'link', tmp_path / 'pipe'
  target.write_text('old')
  link.symlink_to(target)
  files.write_output(link, 'new')
  assert link.is_symlink() and target.read_text() == 'new'
  os.mkfifo(pipe)
  reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # Open before the writer, who would wait for it.
  try:
    files.write_output(pipe, 'text')
    assert os.read(reader, 100) == b'text'
  finally:
    os.close(reader)
  assert pipe.is_fifo()


def test_no_link_in_a_run_is_written_through(tmp_path):
  outside, inside = tmp_path / 'outside', tmp_path / 'run' / 'metrics.jsonl'
  outside.write_text('theirs')
  inside.parent.mkdir()
  inside.symlink_to(outside)
  for write in (files.append, lambda path, text: files.sync_file(path)):
    with pytest.raises(OSError, match='symbolic link'):
      write(inside, 'ours')
  files.write_atomically(inside, 'ours')
  assert not inside.is_symlink() and inside.read_text() == 'ours'
  assert outside.read_text() == 'theirs'
  (inside.parent / 'link').symlink_to(tmp_path / 'nowhere')
  files.sync_tree(inside.parent)  # The link itself has nothing to sync.


@pytest.fixture
def calls(monkeypatch):
  """Return what is called of the system, in order: (name, file) of what gives a file its name or syncs it."""
  noted = []

  def note(name, path_of):
    original = getattr(os, name)

    def noting(*arguments, **options):
      result = original(*arguments, **options)
      noted.append((name, path_of(*arguments)))
      return result

    monkeypatch.setattr(os, name, noting)

  note('fsync', lambda descriptor: os.readlink(f'/proc/self/fd/{descriptor}'))
  note('replace', lambda source, target: str(target))
  note('mkdir', lambda path, *_: str(path))
  return noted


def test_a_text_is_synced_before_it_has_its_name_and_the_name_before_it_counts(tmp_path, calls):
  path = tmp_path / 'config.json'
  files.write_atomically(path, 'text')
  (first, partial), *rest = calls
  assert first == 'fsync' and os.path.dirname(partial) == str(tmp_path) and partial != str(path)
  assert rest == [('replace', str(path)), ('fsync', str(tmp_path))]
  assert os.listdir(tmp_path) == ['config.json'] and path.read_text() == 'text'


@pytest.mark.parametrize('error', [errno.EIO, errno.ENOSPC])
def test_what_could_not_be_synced_is_not_published(tmp_path, monkeypatch, error):
  path = tmp_path / 'config.json'
  path.write_text('old')

  def fail(descriptor):
    raise OSError(error, os.strerror(error))

  monkeypatch.setattr(os, 'fsync', fail)
  with pytest.raises(OSError, match='when it was synced') as raised:
    files.write_atomically(path, 'new')
  assert raised.value.errno == error and str(path) in str(raised.value)
  assert path.read_text() == 'old' and os.listdir(tmp_path) == ['config.json']
  assert files.is_full(raised.value) == (error == errno.ENOSPC)
  for sync in (files.sync_file, files.sync_tree):
    with pytest.raises(OSError, match='when it was synced'):
      sync(path if sync is files.sync_file else tmp_path)
  sentence = command.sentence_of(raised.value)
  assert sentence.count('.') >= 1 and str(path) in sentence and 'start the same command again' in sentence


def test_a_file_system_that_cannot_sync_is_named_once(tmp_path, monkeypatch, caplog):
  def fail(descriptor):
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

  monkeypatch.setattr(os, 'fsync', fail)
  monkeypatch.setattr(files, '_cannot_sync', set())  # In a process it is said once, and nothing else forgets it.
  files.write_atomically(tmp_path / 'a', 'text')
  files.write_atomically(tmp_path / 'b', 'text')
  assert (tmp_path / 'b').read_text() == 'text'
  assert [record.message.count('cannot sync') for record in caplog.records] == [1]


def test_made_directories_and_trees_are_synced_from_below(tmp_path, calls):
  base = str(tmp_path)
  files.make_directory(tmp_path / 'a' / 'b')
  assert calls == [
    ('mkdir', f'{base}/a'),
    ('mkdir', f'{base}/a/b'),
    ('fsync', f'{base}/a'),
    ('fsync', base),
  ]
  calls.clear()
  files.make_directory(tmp_path / 'a' / 'b')
  assert ('fsync', base) not in calls  # Nothing was made.
  (tmp_path / 'a' / 'x').write_text('')
  (tmp_path / 'a' / 'b' / 'y').write_text('')
  calls.clear()
  files.sync_tree(tmp_path / 'a')
  assert set(calls[:2]) == {('fsync', f'{base}/a/x'), ('fsync', f'{base}/a/b/y')}
  assert calls[2:] == [('fsync', f'{base}/a/b'), ('fsync', f'{base}/a')]
  calls.clear()
  files.sync_ancestors(tmp_path / 'a')
  assert calls == [('fsync', str(folder)) for folder in (tmp_path / 'a').parents]
  with pytest.raises(FileNotFoundError):
    files.sync_tree(tmp_path / 'missing')
  for sync in (files.sync_file, files.sync_directory, files.sync_tree, files.sync_ancestors):
    sync('gs://bucket/run')  # There is nothing to do, and nobody is asked.


_WRITER = """
import sys
from sdpo_jax import files
path, letter = sys.argv[1:]
for _ in range(100):
  files.write_atomically(path, letter * 50_000)
"""


def test_of_two_who_write_at_once_one_wins_whole(tmp_path):
  path = tmp_path / 'file'
  path.write_text('A' * 50_000)
  writers = [subprocess.Popen([sys.executable, '-c', _WRITER, path, letter], cwd=ROOT) for letter in 'AB']
  seen = set()
  while any(writer.poll() is None for writer in writers):
    text = path.read_text()
    assert len(text) == 50_000 and len(set(text)) == 1
    seen.add(text[0])
  assert [writer.wait() for writer in writers] == [0, 0] and seen
  assert os.listdir(tmp_path) == ['file']


_VICTIM = """
import os, sys
from sdpo_jax import files
os.replace = lambda source, target: os._exit(9)
files.write_atomically(sys.argv[1], 'text')
"""


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
  done = subprocess.run([sys.executable, '-c', _VICTIM, tmp_path / 'config.json'], cwd=ROOT, check=False)
  assert done.returncode == 9 and len(os.listdir(tmp_path)) == 1
  for name in ('.0123.partial', 'x.partial', 'config.json'):
    (tmp_path / name).write_text('')
  files.remove_partials(tmp_path)
  assert sorted(os.listdir(tmp_path)) == ['.0123.partial', 'config.json', 'x.partial']
  files.remove_partials(tmp_path / 'missing')


def test_lines_are_appended(tmp_path):
  for number in range(3):
    files.append(tmp_path / 'lines', json.dumps(number) + '\n')
  assert (tmp_path / 'lines').read_text() == '0\n1\n2\n'
