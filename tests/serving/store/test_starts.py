"""The start of a store: what the last process has left together is believed, and everything else is read."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading

import pytest

from sdpo_jax.serving.errors import Damaged, NotFound, StorageFailed
from sdpo_jax.serving.store import store_recovery, versions
from sdpo_jax.serving.store.blobs import LocalBlobs
from sdpo_jax.serving.store.database import Database
from tests import tiny
from tests.serving.store.store_cases import arrays, assert_same, open_store

KILLED = """
import os, pathlib, signal, sys
from tests.serving.store.store_cases import arrays, open_store
store = open_store(pathlib.Path(sys.argv[1]))
[adapter] = store.adapters('ada')
store.commit('ada', adapter.id, adapter.head, arrays(adapter.head + 1), reason='feedback', details={})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def heads_read(monkeypatch):
  """Return the names of the HEADs that recovery has read."""
  read = []

  def noted(content, name, folder, own=versions.read_head):
    read.append(name)
    return own(content, name, folder)

  monkeypatch.setattr(versions, 'read_head', noted)
  listed = LocalBlobs.list
  monkeypatch.setattr(LocalBlobs, 'list', lambda blobs, prefix='': read.append(prefix) or listed(blobs, prefix))
  return read


def grown(folder: pathlib.Path, to: int) -> str:
  """Make the adapter of a store, or commit until it is at a version; then close the store, and return its id."""
  with open_store(folder) as store:
    adapter = store.adapters('ada')[0] if store.count('ada') else store.create('ada', 'mine', {}, arrays(0))[0]
    for head in range(adapter.head, to):
      store.commit('ada', adapter.id, head, arrays(head + 1), reason='feedback', details={})
    return adapter.id


def is_at(folder: pathlib.Path, number: int) -> bool:
  """Open a store, check all versions of its adapter, and return whether the database was believed."""
  with open_store(folder) as store:
    [adapter] = store.adapters('ada')
    assert adapter.head == number and store.problems == []
    for version in store.versions('ada', adapter.id):
      assert_same(store.arrays(version), arrays(version.number))
    assert len(store.versions('ada', adapter.id)) == number + 1
    return store.database.trusted


def killed(folder: pathlib.Path) -> None:
  """Let a process commit to the adapter of a store, and be killed."""
  command = [sys.executable, '-c', KILLED, str(folder)]
  ran = subprocess.run(command, env=tiny.environment(), cwd=tiny.REPOSITORY, check=False)
  assert ran.returncode == -signal.SIGKILL


def left_within(folder: pathlib.Path, change) -> pathlib.Path:
  """Return a folder with what a process leaves that is killed in a change, once HEAD has moved."""
  left, own = folder.with_name(f'{folder.name}-left'), LocalBlobs.swap

  def swap(*given):
    own(*given)
    shutil.copytree(folder, left)

  with pytest.MonkeyPatch.context() as patched, open_store(folder) as store:
    patched.setattr(LocalBlobs, 'swap', swap)
    change(store, store.by_name('ada', 'mine'))
  return left


CHANGES = {
  'commit': lambda store, mine: store.commit('ada', mine.id, 1, arrays(2), reason='feedback', details={}),
  'settings': lambda store, mine: store.change_settings('ada', mine.id, 1, {'x': 1}),
  'create': lambda store, mine: store.create('ada', 'new', {}, arrays(0)),
}


def stamp_of(folder: pathlib.Path) -> str:
  """Return what the stamp of a root begins with."""
  return (folder / 'root' / store_recovery.STAMP).read_text().split()[0]


def put_back(folder: pathlib.Path, part: str, copy: pathlib.Path) -> None:
  shutil.rmtree(folder / part)
  shutil.copytree(copy / part, folder / part)


@pytest.mark.parametrize('how', ['replaced', 'copied over'])
def test_a_root_put_back_after_a_kill_is_read(tmp_path, how):
  """Its stamp is that of the last orderly end, after which the database has gone on."""
  live, copy = tmp_path / 'live', tmp_path / 'copy'
  grown(live, 1)
  shutil.copytree(live, copy)
  killed(live)
  if how == 'replaced':
    put_back(live, 'root', copy)
  else:
    shutil.copytree(copy, live, dirs_exist_ok=True)
  assert not is_at(live, 1)


def test_after_an_orderly_end_nothing_of_the_root_is_read(tmp_path, heads_read):
  grown(tmp_path, 2)
  heads_read.clear()
  assert is_at(tmp_path, 2) and heads_read == []
  assert is_at(tmp_path, 2)  # The stamp is taken at the start, and left again.
  (tmp_path / 'root' / store_recovery.STAMP).unlink()
  assert not is_at(tmp_path, 2) and heads_read
  assert stamp_of(tmp_path) == store_recovery.CLOSED


def test_a_killed_process_leaves_a_stamp(tmp_path):
  grown(tmp_path, 1)
  killed(tmp_path)
  assert stamp_of(tmp_path) == store_recovery.OPEN
  assert is_at(tmp_path, 2)


@pytest.mark.parametrize('what', CHANGES)
def test_after_a_kill_the_start_reads_what_was_under_way_and_the_first_use_the_rest(tmp_path, heads_read, what):
  mine = grown(tmp_path / 'store', 1)
  with open_store(tmp_path / 'store') as store:
    other = store.create('ada', 'other', {}, arrays(0))[0].id
  left = left_within(tmp_path / 'store', CHANGES[what])
  heads_read.clear()
  with open_store(left) as store:
    assert store.database.trusted and not any(other in name for name in heads_read)
    assert any(mine in name for name in heads_read) == (what != 'create')
    listed = {adapter.name: adapter for adapter in store.adapters('ada')}  # Right at once.
    assert listed['mine'].head == 1 + (what == 'commit') and ('new' in listed) == (what == 'create')
    assert listed['mine'].settings == ({'x': 1} if what == 'settings' else {})
    for adapter in listed.values():
      heads_read.clear()
      assert store.adapter('ada', adapter.id) == adapter
      assert any(adapter.id in name for name in heads_read)
      heads_read.clear()
      assert store.adapter('ada', adapter.id) == adapter and heads_read == []
  assert stamp_of(left) == store_recovery.OPEN  # Nobody has looked whether the root has more.
  with open_store(left) as store:
    store.retain()
  heads_read.clear()
  with open_store(left) as store:
    assert store.adapter('ada', other).head == 0 and heads_read == []


def test_what_a_kill_has_left_beside_versions_is_removed_when_the_adapter_is_used(tmp_path):
  id = grown(tmp_path / 'store', 1)
  left = left_within(tmp_path / 'store', CHANGES['create'])
  folder = left / 'root' / versions.adapter_folder('ada', id)
  partial = next(folder.glob('versions/00000001-*')) / f'.{"0" * 16}.partial'
  partial.write_bytes(b'an optimizer state')
  with open_store(left) as store:
    assert partial.exists()
    assert store.adapter('ada', id).head == 1 and not partial.exists()


def test_what_only_the_root_has_after_a_kill_is_found(tmp_path):
  """As if the database were an older copy of the same process."""
  mine = grown(tmp_path / 'store', 1)
  left = left_within(tmp_path / 'store', CHANGES['create'])
  with contextlib.closing(sqlite3.connect(left / 'database' / 'store.sqlite')) as raw, raw:
    raw.execute('DELETE FROM adapters')
    raw.execute('DELETE FROM versions')
  with open_store(left) as store:
    assert store.database.trusted and [adapter.name for adapter in store.adapters('ada')] == ['new']
    store.retain()
    assert store.by_name('ada', 'mine').id == mine and len(store.adapters('ada')) == 2
    for version in store.versions('ada', mine):
      assert_same(store.arrays(version), arrays(version.number))


def test_what_only_the_root_has_after_a_kill_and_cannot_be_read_is_said(tmp_path):
  mine = grown(tmp_path / 'store', 1)
  left = left_within(tmp_path / 'store', CHANGES['create'])
  with contextlib.closing(sqlite3.connect(left / 'database' / 'store.sqlite')) as raw, raw:
    raw.execute('DELETE FROM adapters')
    raw.execute('DELETE FROM versions')
  (left / 'root' / versions.adapter_folder('ada', mine) / 'HEAD').write_bytes(b'?')
  with open_store(left) as store:
    store.retain()
    [problem] = store.problems
    assert mine in problem
    store.delete('ada', mine)
    assert store.problems == []


def test_a_database_that_is_found_to_be_damaged_after_a_kill_is_not_believed_again(tmp_path, monkeypatch):
  grown(tmp_path / 'store', 1)
  left, own = left_within(tmp_path / 'store', CHANGES['commit']), Database.read
  damaged = {'PRAGMA quick_check(1)': [('a page is damaged',)]}
  with monkeypatch.context() as patched, open_store(left) as store:
    patched.setattr(Database, 'read', lambda self, query, *values: damaged.get(query) or own(self, query, *values))
    with pytest.raises(StorageFailed, match='is damaged: restart the service'):
      store.retain()
    assert store.unwritable()
    assert not (left / 'root' / store_recovery.STAMP).exists()  # As it would be found after another kill.
  assert not is_at(left, 2)
  assert is_at(left, 2)


@pytest.mark.parametrize(
  'parts, number, believed',
  [
    (['root'], 1, False),  # An old root: its versions are what there is.
    (['database'], 3, False),  # An old database: the root has more.
    (['root', 'database'], 1, True),  # Both of one end.
  ],
)
def test_what_is_put_back_from_a_copy_is_noticed(tmp_path, parts, number, believed):
  store, copy = tmp_path / 'store', tmp_path / 'copy'
  grown(store, 1)
  shutil.copytree(store, copy)
  grown(store, 3)
  for part in parts:
    put_back(store, part, copy)
  assert is_at(store, number) == believed
  assert is_at(store, number)


def test_a_copy_of_a_running_store_has_another_stamp(tmp_path):
  grown(tmp_path / 'store', 1)
  with open_store(tmp_path / 'store') as store:
    [adapter] = store.adapters('ada')
    store.commit('ada', adapter.id, 1, arrays(2), reason='feedback', details={})
    shutil.copytree(tmp_path / 'store' / 'root', tmp_path / 'copy' / 'root')
  put_back(tmp_path / 'store', 'root', tmp_path / 'copy')
  assert not is_at(tmp_path / 'store', 2)


def test_a_lost_or_damaged_database_is_not_believed(tmp_path):
  grown(tmp_path, 1)
  file = tmp_path / 'database' / 'store.sqlite'
  file.unlink()
  assert not is_at(tmp_path, 1)
  file.write_bytes(b'no database' * 100)
  assert not is_at(tmp_path, 1)


def test_a_changed_root_is_read_once_its_stamp_is_removed(tmp_path):
  """As the documentation says for changes by hand; a change of the adapter finds out in any case."""
  id = grown(tmp_path, 1)
  head = tmp_path / 'root' / versions.adapter_folder('ada', id) / versions.HEAD
  old = head.read_bytes()
  grown(tmp_path, 2)
  head.write_bytes(old)
  with open_store(tmp_path) as store:
    assert store.database.trusted and store.adapter('ada', id).head == 2
    with pytest.raises(Exception, match='is at version 1'):
      store.commit('ada', id, 2, arrays(3), reason='feedback', details={})
    assert store.adapter('ada', id).head == 1
  grown(tmp_path, 2)
  head.write_bytes(old)
  (tmp_path / 'root' / store_recovery.STAMP).unlink()
  assert not is_at(tmp_path, 1)


@pytest.mark.parametrize('what', ['damaged', 'deletion', 'failed', 'request'])
def test_a_store_with_something_unfinished_has_not_ended_in_order(tmp_path, monkeypatch, heads_read, what):
  id = grown(tmp_path, 2)
  folder = tmp_path / 'root' / versions.adapter_folder('ada', id)
  if what == 'damaged':
    next(folder.glob('versions/00000001-*/manifest.json')).write_text('{}')
    (tmp_path / 'database' / 'store.sqlite').unlink()
  with monkeypatch.context() as patched, open_store(tmp_path) as store:
    if what == 'deletion':
      patched.setattr(Database, 'erase', lambda *_: (_ for _ in ()).throw(StorageFailed('no')))
      with pytest.raises(StorageFailed):
        store.delete('ada', id)
    elif what == 'failed':
      patched.setattr(LocalBlobs, 'put_new', lambda *_, **__: (_ for _ in ()).throw(StorageFailed('no')))
      patched.setattr(LocalBlobs, 'delete', lambda *_: (_ for _ in ()).throw(StorageFailed('no')))
      with pytest.raises(StorageFailed):
        store.commit('ada', id, 2, arrays(3), reason='feedback', details={})
    elif what == 'request':
      store.begin('ada', 'key', 'body')
    elif what == 'damaged':
      with pytest.raises(Damaged):
        store.version('ada', id, 1)
  assert stamp_of(tmp_path) == store_recovery.OPEN
  heads_read.clear()
  with open_store(tmp_path) as store:
    with contextlib.suppress(NotFound):  # The deletion was continued.
      store.adapter('ada', id)
    assert any(id in name for name in heads_read)


def test_a_change_that_outlives_the_store_is_refused_and_not_an_end_in_order(tmp_path, monkeypatch):
  id = grown(tmp_path, 1)
  store = open_store(tmp_path)
  begun, go, ended = threading.Event(), threading.Event(), []
  own = LocalBlobs.put_new

  def slow(*arguments, **more):
    begun.set()
    assert go.wait(10)
    return own(*arguments, **more)

  monkeypatch.setattr(LocalBlobs, 'put_new', slow)

  def commit():
    try:
      store.commit('ada', id, 1, arrays(2), reason='feedback', details={})
    except Exception as error:  # Whatever it is, nothing was acknowledged.
      ended.append(error)

  thread = threading.Thread(target=commit)
  thread.start()
  assert begun.wait(10)
  store.close()
  go.set()
  thread.join()
  assert ended
  monkeypatch.undo()
  assert stamp_of(tmp_path) == store_recovery.OPEN
  assert is_at(tmp_path, 1)
  with open_store(tmp_path) as store:
    pass
  with pytest.raises(StorageFailed):
    store.commit('ada', id, 1, arrays(2), reason='feedback', details={})


def test_a_full_disk_is_told_without_writing_and_a_failed_write_is_tried_again(tmp_path, monkeypatch):
  id, now = grown(tmp_path, 1), [100.0]
  monkeypatch.setattr('time.monotonic', lambda: now[0])
  with open_store(tmp_path) as store:
    assert store.unwritable() == ''
    seen, statvfs = [], os.statvfs

    def full(path):
      seen.append(path)
      found = list(statvfs(path))
      found[4] = 0  # f_bavail.
      return os.statvfs_result(found)

    monkeypatch.setattr(os, 'statvfs', full)
    assert store.unwritable() == 'The disk is full.' and str(tmp_path / 'root') in seen
    monkeypatch.setattr(os, 'statvfs', statvfs)
    assert store.unwritable() == ''
    swaps, own = [], LocalBlobs.swap

    def failing(blobs, key, content, expected):
      swaps.append(key)
      with blobs._failures(tmp_path / 'root'):  # noqa: SLF001 (As a disk fails within it.)
        raise OSError(122, 'Disk quota exceeded')

    monkeypatch.setattr(LocalBlobs, 'swap', failing)
    with pytest.raises(StorageFailed):
      store.commit('ada', id, 1, arrays(2), reason='feedback', details={})
    swaps.clear()
    for _ in range(3):  # One attempt for many probes.
      assert store.unwritable() == 'The storage cannot be written.'
    assert len(swaps) == 1
    now[0] += 6
    assert store.unwritable() and len(swaps) == 2
    monkeypatch.setattr(LocalBlobs, 'swap', own)
    assert store.unwritable()
    now[0] += 6
    assert store.unwritable() == '' and not (tmp_path / 'root' / 'TRIED').exists()
    assert store.commit('ada', id, 1, arrays(2), reason='feedback', details={}).number == 2
