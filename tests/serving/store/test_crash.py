"""Stores whose process, machine or disk fails: nothing that was acknowledged is lost, and nothing is there by half.

`tests.serving.store.store_history` is recorded call by call. Every prefix of its operations is what a killed process
leaves; of those that were not synced, a machine that fails may leave anything. Over PostgreSQL and a bucket (see
`tests.serving.replicated`) the operations are puts and commits, and a crash of PostgreSQL may lose the newest commits
that need not last.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile

import obstore
import pytest

from sdpo_jax.serving.errors import NotFound, StorageFailed
from sdpo_jax.serving.store import versions
from sdpo_jax.serving.store.database import Database
from sdpo_jax.serving.store.store import StoredResponse
from tests import file_operations, tiers, tiny
from tests.serving.store import places, store_history
from tests.serving.store.store_cases import arrays, assert_same, open_store, slots
from tests.serving.store.store_history import RETENTION, ask, history, state_of

CHANGES = frozenset('create mkdir write truncate rename link unlink rmdir'.split())


@pytest.fixture
def scratch():
  """Yield a folder in memory, where there is one: syncing takes most of the time otherwise."""
  memory = pathlib.Path('/dev/shm')
  with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
    yield pathlib.Path(folder)


@pytest.fixture(scope='module')
def recorded(request, tmp_path_factory) -> list[file_operations.Operation] | list[places.Write]:
  folder = tmp_path_factory.mktemp('recorded')
  if places.replicated():
    with open_store(folder, retention=RETENTION) as store:
      return places.record(folder, lambda: history(store))
  recorder = request.getfixturevalue('recorder')
  (folder / 'disk').mkdir()
  subprocess.run(
    [sys.executable, '-m', 'tests.serving.store.store_history', str(folder / 'disk')],
    env=tiny.environment() | recorder.environment(folder / 'disk', folder / 'log'),
    cwd=tiny.REPOSITORY,
    check=True,
  )
  operations = file_operations.read_log(folder / 'log')
  assert file_operations.after(operations).now() == file_operations.read_tree(folder / 'disk')  # None escaped.
  return operations


def promised(operations) -> list[tuple[dict, dict]]:
  """Return what was acknowledged before every operation, and what was to be acknowledged next."""
  marks = [(place, json.loads(one.path)) for place, one in enumerate(operations) if one.kind == 'mark']
  found = []
  for place in range(len(operations)):
    before = [state for where, state in marks if where < place]
    after = [state for where, state in marks if where >= place]
    found.append((before[-1] if before else {}, after[0] if after else before[-1]))
  return found


def check_versions(store, state) -> None:
  """All versions that a store names can be read, and are what was committed; there is nothing else in the root."""
  assert store.problems == []
  files = {'BASE'} if places.replicated() else {'BASE', 'LOCK', 'STAMP'}
  for id, adapter in state.items():
    folder = versions.adapter_folder(adapter['owner'], id)
    files.add(f'{folder}/HEAD')
    known = store.versions(adapter['owner'], id)
    store_history.state_of_newest(store, known)
    for version in known:
      seed, drawn = version.details['seed'], version.details.get('drawn', False)
      expected = versions.fresh(store.base.adapter, store.base.rows, seed) if drawn else arrays(seed)
      stored = () if drawn else versions.PEFT_FILES
      if version.details.get('slots'):
        expected, stored = slots(seed), (versions.SLOTS,)
      assert_same(store.arrays(version), expected)
      name = versions.version_folder(version.number, version.digest)
      files |= {f'{folder}/versions/{name}/{file}' for file in (versions.MANIFEST, *stored)}
  others = (versions.TOMBSTONE, versions.MOMENTS, versions.AVERAGE)  # `state_of_newest` is about the last two.
  keys = {entry.key for entry in store.blobs.list()}
  found = {key for key in keys if not key.endswith(others)}
  if places.replicated():  # Nobody knows of a creation that was killed before it was in the database: its files stay.
    parts = {key: versions.parse_key(key) for key in found}
    known = {*state, *(key.split('/')[-2] for key in keys if key.endswith(versions.TOMBSTONE))}
    found -= {key for key, of in parts.items() if of is not None and of.number == 0 and of.adapter not in known}
  assert found == files


def is_between(found, before, after) -> bool:
  """Whether an adapter is as before or after a change; of the two files of a state, one may have been written."""
  if found in (before, after):
    return True
  if None in (found, before, after):
    return False
  files = zip(found['state of'], before['state of'], after['state of'], strict=True)
  others = [{**each, 'state of': None} for each in (found, before, after)]
  return others[0] in others[1:] and all(one in (two, three) for one, two, three in files)


class Judge:
  """Opens what a disk may hold, and says what is wrong with it; what holds the same is opened once."""

  def __init__(self, scratch: pathlib.Path):
    self._scratch, self._seen = scratch, set()
    self.opened = 0

  def check(self, tree: file_operations.Tree, before: dict, after: dict) -> None:
    case = (file_operations.key(tree), json.dumps([before, after]))
    if case in self._seen:
      return
    self._seen.add(case)
    self.opened += 1
    folder = self._scratch / 'disk'
    places.write_tree(tree, folder)
    try:
      self._check(folder, before, after)
    finally:
      places.remove(folder)

  def _check(self, folder: pathlib.Path, before: dict, after: dict) -> None:
    with open_store(folder, retention=RETENTION) as store:
      places.take_over(store, 'ada', 'bob')
      found = state_of(store)
      for id in before.keys() | after.keys() | found.keys():
        assert is_between(found.get(id), before.get(id), after.get(id)), id
      check_versions(store, found)
      self._ask_again(store)
      for adapter in store.adapters('bob'):  # Whatever has happened, it goes on.
        made = store.commit('bob', adapter.id, adapter.head, arrays(1), reason='feedback', details={'seed': 1})
        assert_same(store.arrays(made), arrays(1))

  def _ask_again(self, store) -> None:
    """Check that the request of the history, sent again, makes its version if it is not there, and else no other."""
    with contextlib.suppress(NotFound):
      mine = store.by_name('ada', 'mine')
      if mine.head == 0:
        return
      answer = ask(store, mine.id, mine.head)
      assert answer == 2 and store.by_name('ada', 'mine').head == max(mine.head, 2)
      assert store.version('ada', mine.id, 2).details == {'seed': 12}
      assert ask(store, mine.id, mine.head) == 2


@pytest.mark.parametrize('every', [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_at_any_operation_has_lost_nothing(recorded, scratch, every):
  judge, disk, changes = Judge(scratch), places.new_disk(), itertools.count()
  for place, (operation, (before, after)) in enumerate(zip(recorded, promised(recorded), strict=True)):
    if operation.kind in CHANGES and next(changes) % every == 0:
      judge.check(disk.now(), before, after) if place else None
    disk.apply(operation)
  judge.check(disk.now(), after, after)
  assert judge.opened > (80 if places.replicated() else 250) // every and len(after) == 3 and len(before) == 3


@pytest.mark.parametrize('operations, every', [(9, 7), pytest.param(1, 1, marks=pytest.mark.campaign)])
def test_a_machine_that_fails_at_any_operation_has_lost_nothing(recorded, scratch, operations, every):
  judge, disk = Judge(scratch), places.new_disk()
  every = min(every, 2) if places.replicated() else every  # It has fewer states to be in, how many depends on the time.
  for place, (operation, (before, after)) in enumerate(zip(recorded, promised(recorded), strict=True)):
    disk.apply(operation)
    for case, (_, tree) in enumerate(disk.survivors() if place % operations == 0 else ()):
      if (place + case) % every == 0:
        judge.check(tree, before, after)
  assert judge.opened > (2 if places.replicated() else 30)


def test_a_machine_that_is_gone_has_lost_nothing_that_was_acknowledged(recorded, scratch):
  """The root alone, elsewhere, after every acknowledgement."""
  disk = places.new_disk()
  for operation in recorded:
    disk.apply(operation)
    if operation.kind == 'mark':
      tree = {path: content for path, content in disk.now().items() if path.split('/')[0] == 'root'}
      places.write_tree(tree, scratch / 'disk')
      with open_store(scratch / 'disk') as store:
        found = state_of(store)
        assert found == json.loads(operation.path)
        check_versions(store, found)
        if any('2' in adapter['versions'] for adapter in found.values()):
          mine = store.by_name('ada', 'mine')
          assert ask(store, mine.id, mine.head) == 2
      places.remove(scratch / 'disk')


# Processes that are killed under load.


@pytest.mark.parametrize('kills', tiers.cases((3, 20), slow=(3,)))
def test_what_was_acknowledged_is_there_after_a_kill_under_load(scratch, kills):
  store_history.prepare(scratch / 'store')
  draw, acknowledged, deleted = random.Random(kills), {}, set()
  process = subprocess.Popen(
    [sys.executable, '-m', 'tests.serving.store.store_history', str(scratch), 'load'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env=tiny.environment(),
    cwd=tiny.REPOSITORY,
    text=True,
  )

  def told(line: str) -> bool:
    """Note an acknowledgement; return whether it was one."""
    if not line.endswith('\n') or json.loads(line) == ['ended']:
      return False
    owner, adapter, number, digest, seed = json.loads(line)
    if number is None:
      deleted.add((owner, adapter))
    else:
      assert (owner, adapter, number) not in acknowledged  # No version is acknowledged twice.
      acknowledged[owner, adapter, number] = digest, seed
    return True

  with process:
    for _ in range(kills):
      process.stdin.write('store\n')
      process.stdin.flush()
      kind, child = json.loads(process.stdout.readline())
      assert kind == 'pid'
      for _ in range(draw.randrange(5, 60)):
        assert told(process.stdout.readline())
      os.kill(child, signal.SIGKILL)
      while told(process.stdout.readline()):
        pass
      places.bury(scratch / 'store')
      owners = ['all', *(f'owner {number}' for number in range(store_history.THREADS))]
      with open_store(scratch / 'store') as store:
        places.take_over(store, *owners)
        for (owner, adapter, number), (digest, seed) in acknowledged.items():
          version = store.version(owner, adapter, number)
          assert version.digest == digest and version.details == {'seed': seed}
        for owner, adapter in deleted:
          with pytest.raises(NotFound):
            store.adapter(owner, adapter)
        found = {adapter.id: {'owner': owner} for owner in owners for adapter in store.adapters(owner)}
        check_versions(store, found)
        for id, adapter in found.items():
          made = [version.number for version in store.versions(adapter['owner'], id)]
          assert made == list(range(len(made)))
    process.stdin.close()
  assert len({adapter for _, adapter, _ in acknowledged}) == store_history.THREADS + 1 and deleted


# Disks that are full.


class Disk:
  """A disk that refuses to be written: at one operation, or from one on."""

  def __init__(self, monkeypatch):
    self.operations, self._from, self._until = 0, 0, 0
    for name in ('fsync', 'replace', 'unlink', 'rmdir', 'mkdir'):
      monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
    real = os.open

    def counted_open(path, flags, *rest, **more):
      if flags & os.O_CREAT:
        self._count()
      return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, 'open', counted_open)
    for name in ('put', 'delete'):
      monkeypatch.setattr(obstore, name, self._counted(getattr(obstore, name)))
    writing = Database.writing

    @contextlib.contextmanager
    def counted_writing(database, **more):
      with writing(database, **more) as rows:
        yield rows
        try:
          self._count()
        except OSError as error:
          raise StorageFailed(str(error)) from error

    monkeypatch.setattr(Database, 'writing', counted_writing)

  def _counted(self, real):
    def call(*arguments, **more):
      self._count()
      return real(*arguments, **more)

    return call

  def _count(self) -> None:
    self.operations += 1
    if self._from <= self.operations < self._until:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  @contextlib.contextmanager
  def full(self, first: int, count: float):
    """Refuses the operations from the `first` on, `count` of them."""
    self._from, self._until = self.operations + first, self.operations + first + count
    yield
    self._from = self._until = 0


def send(store, mine) -> None:
  """Handle a request with an idempotency key, whose client sends it until it has an answer."""
  request = store.begin('ada', 'key', 'body')
  if isinstance(request, StoredResponse):
    assert request.version == 5 or request.status == 200
    return
  try:
    head = store.adapter('ada', mine.id).head
    store.commit('ada', mine.id, head, arrays(6), reason='feedback', details={'seed': 6}, request=request)
    store.finish(request, 200, b'{}')
  except StorageFailed:
    store.abandon(request)
    raise


ACTIONS = {
  'send': send,
  'create': lambda store, mine: store.create('ada', 'new', {}, arrays(5), details={'seed': 5}),
  'commit': lambda store, mine: store.commit('ada', mine.id, 4, arrays(6), reason='feedback', details={'seed': 6}),
  'change': lambda store, mine: store.change_settings('ada', mine.id, 4, {'step': 7}),
  'retain': lambda store, mine: store.retain(),
  'delete': lambda store, mine: store.delete('ada', mine.id),
}


@pytest.mark.parametrize(
  'action, count',
  [
    *((action, 1) for action in ACTIONS),
    ('send', math.inf),
    *(pytest.param(action, math.inf, marks=pytest.mark.slow) for action in ACTIONS if action != 'send'),
  ],
)
def test_a_full_disk_loses_nothing(scratch, monkeypatch, action, count):
  with open_store(scratch / 'like') as store:
    mine, _ = store.create('ada', 'mine', {}, arrays(0), details={'seed': 0})
    for seed in range(4):
      store.commit('ada', mine.id, seed, arrays(seed), reason='feedback', details={'seed': seed})
    store.create('bob', 'his', {}, arrays(9), details={'seed': 9})
    before = state_of(store)
  like = places.read_tree(scratch / 'like')
  disk = Disk(monkeypatch)
  happened = set()
  for first in itertools.count(1):
    places.write_tree(like, scratch / 'store')
    with open_store(scratch / 'store', retention=RETENTION) as store:
      with disk.full(first, count):
        start = disk.operations
        try:
          ACTIONS[action](store, mine)
          failed = False
        except StorageFailed as error:
          failed = True
          assert 'No space left' in str(error)
        reached = disk.operations - start >= first
      if action == 'send':  # Before anything else looks at the adapter.
        send(store, mine)
      seen = state_of(store)
      others = {id: adapter for id, adapter in seen.items() if adapter['name'] == 'his'}
      assert others == {id: adapter for id, adapter in before.items() if adapter['name'] == 'his'}
      happened.add((failed, seen == before))
      if not failed or action == 'delete' and seen != before:
        assert seen != before
      elif seen == before:
        ACTIONS[action](store, mine)
        seen = state_of(store)
        assert seen != before
      assert action != 'send' or seen[mine.id]['head'] == 5  # It is made once, however often it is sent.
    with open_store(scratch / 'store', retention=RETENTION) as store:
      places.take_over(store, 'ada', 'bob')
      assert state_of(store) == seen
      check_versions(store, seen)
    places.remove(scratch / 'store')
    if not reached:
      break
  assert first > 5 and (action == 'send' or (True, True) in happened) and (False, False) in happened
