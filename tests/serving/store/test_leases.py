"""Replicas that share a PostgreSQL and a bucket: who holds an adapter, who takes over, and what a slow one may do."""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import sys
import threading
import time
import types

import pytest

from sdpo_jax.config import LimitsConfig
from sdpo_jax.errors import UserError
from sdpo_jax.serving.allowances import Allowances
from sdpo_jax.serving.capacity import Turns
from sdpo_jax.serving.errors import Busy, InFlight, InvalidRequest, NameTaken, NotFound, NotHolder, StorageFailed
from sdpo_jax.serving.service import Service
from sdpo_jax.serving.store import leases, migrations, optimizer_states, versions
from sdpo_jax.serving.store.blobs import LostSwapError, RemoteBlobs
from sdpo_jax.serving.store.database import connect
from sdpo_jax.serving.store.store import Retention, Store, StoredResponse
from tests.serving.served_process import until
from tests.serving.store import store_cases
from tests.serving.store.postgres import postgres  # noqa: F401 (A fixture.)
from tests.serving.store.store_cases import arrays, assert_same


class Dead(BaseException):
  """A process was killed here."""


class Replicas:
  """Replicas of one service in this process."""

  def __init__(self, server):
    self.database, self.root = server.url(), f'memory://{secrets.token_hex(8)}'
    self._open = contextlib.ExitStack()

  def start(self, name: str, **more) -> Store:
    """Start a replica."""
    store = Store.open(self.root, self.database, base=store_cases.tiny_base(), url=f'http://{name}', **more)
    self._open.callback(store.close)
    return store

  def lose(self, store: Store) -> None:
    """Let the database take a replica for dead, which does not know it."""
    store.leases.stopped.set()
    store.leases.thread.join()
    with store.database.writing(full=True) as rows:
      rows.execute('UPDATE replicas SET expires = 0 WHERE id = ?', (store.leases.replica,))

  def close(self) -> None:
    """Stop all."""
    self._open.close()


@pytest.fixture
def replicas(postgres):  # noqa: F811
  found = Replicas(postgres)
  yield found
  found.close()


def fail(*given):
  raise OSError('The storage is away.')


def head_of(store, adapter):
  folder = versions.adapter_folder(adapter.owner, adapter.id)
  return versions.read_head(store.blobs.get(f'{folder}/HEAD'), 'HEAD', folder)


def step(store, adapter, head, **more):
  return store.commit(adapter.owner, adapter.id, head, arrays(head + 1), reason='feedback', details={}, **more)


def test_one_replica_changes_an_adapter_and_all_read_it(replicas):
  one, other = replicas.start('one'), replicas.start('other')
  adapter, first = one.create('ada', 'mine', {'x': 1}, arrays(0))
  second = step(one, adapter, 0)
  assert other.versions('ada', adapter.id) == [first, second] and other.count('ada') == 1
  assert_same(other.arrays(second), arrays(1))
  with pytest.raises(NotHolder) as caught:
    step(other, adapter, 1)
  assert caught.value.url == 'http://one'
  with pytest.raises(NotHolder):
    other.create('ada', 'another', {}, arrays(0))  # By whom the owner's names are given.
  mine, _ = other.create('bob', 'his', {}, arrays(0))
  epoch = head_of(one, adapter).epoch
  one.close()  # It gives its leases back.
  step(other, adapter, 1)
  assert head_of(other, adapter).epoch > epoch > 0
  with pytest.raises(NameTaken):
    other.create('ada', 'mine', {}, arrays(0))
  other.delete('ada', adapter.id)
  with pytest.raises(NotFound):
    other.adapter('ada', adapter.id)
  assert other.adapter('bob', mine.id)


def test_a_lease_that_is_not_needed_goes_to_whoever_needs_it(replicas, monkeypatch):
  one, other = replicas.start('one'), replicas.start('other')
  adapter, _ = one.create('ada', 'mine', {}, arrays(0))
  version = step(one, adapter, 0)
  one.let_go()  # It was needed a moment ago.
  with pytest.raises(NotHolder):
    step(other, adapter, 1)
  monkeypatch.setattr(leases, 'IDLE', -1.0)

  def let_go_elsewhere():
    thread = threading.Thread(target=one.let_go)
    thread.start()
    thread.join()

  with one._alone(adapter.id):  # noqa: SLF001 (A change is under way.)
    let_go_elsewhere()
  with monkeypatch.context() as broken:
    broken.setattr(optimizer_states, 'write', fail)
    one.keep_optimizer_state(version, {}).result()
    one.let_go()  # Another replica would not find the moments.
  assert one.leases.epoch(adapter.id) is not None
  one.retain()
  until(lambda: not one.stats['waiting_states'])
  with monkeypatch.context() as slow:  # A creation whose bucket takes its time keeps the names of the owner.
    put_new = one.blobs.put_new
    slow.setattr(one.blobs, 'put_new', lambda *parts, **more: (let_go_elsewhere(), put_new(*parts, **more)))
    one.create('ada', 'slow', {}, arrays(0))
    assert one.leases.epoch(versions.adapter_folder('ada', '')) is not None
  one.let_go()
  step(other, adapter, 1)
  other.create('ada', 'another', {}, arrays(0))
  with pytest.raises(NotHolder):
    one.hold('ada', adapter.id)
  with pytest.raises(NotHolder):
    one.hold_owner('ada')
  monkeypatch.undo()
  assert other.adapter('ada', adapter.id).head == 2


def test_idle_leases_are_found_while_others_are_asked_for(replicas):
  found, stopped, before = replicas.start('one').leases, threading.Event(), sys.getswitchinterval()

  def ask(name):
    for number in itertools.count():
      if stopped.is_set():
        return
      found.epoch(f'{name}-{number}')

  askers = [threading.Thread(target=ask, args=(name,)) for name in range(3)]
  sys.setswitchinterval(1e-6)
  try:
    for asker in askers:
      asker.start()
    assert all(found.idle() == [] for _ in range(20))
  finally:
    stopped.set()
    sys.setswitchinterval(before)
    for asker in askers:
      asker.join()


def test_a_slow_holder_is_refused_by_the_epoch_in_head(replicas):
  slow = replicas.start('slow')
  adapter, _ = slow.create('ada', 'mine', {}, arrays(0))
  step(slow, adapter, 0)
  replicas.lose(slow)
  new = replicas.start('new')
  new.hold('ada', adapter.id)
  files = len(list(new.blobs.list()))
  with pytest.raises(NotHolder):  # Before the new holder has changed anything.
    step(slow, adapter, 1)
  assert len(list(new.blobs.list())) == files and new.adapter('ada', adapter.id).head == 1
  assert slow.versions('ada', adapter.id) == new.versions('ada', adapter.id)
  step(new, adapter, 1)
  with pytest.raises(NotHolder):
    slow.change_settings('ada', adapter.id, 2, {'x': 1})
  with pytest.raises(NotHolder):
    slow.delete('ada', adapter.id)
  assert slow.adapter('ada', adapter.id).head == 2
  slow.leases.valid_until = 0.0
  slow.leases.renew()  # It wakes up, and knows at last.
  assert slow.leases.epoch(adapter.id) is None


def test_a_slow_taker_removes_no_file_of_the_next_holder(replicas, monkeypatch):
  """It is paused after it has written its epoch; the next holder's HEAD has not moved yet when it lists the files."""
  dead, taker, third = (replicas.start(name) for name in ('dead', 'taker', 'third'))
  adapter, _ = dead.create('ada', 'mine', {}, arrays(0))
  replicas.lose(dead)
  uploads = f'{versions.adapter_folder("ada", adapter.id)}/versions/00000001-0123456789ab'
  real, paused = RemoteBlobs.list, []

  def listed(blobs, prefix=''):
    if blobs is taker.blobs and not paused:
      paused.append(prefix)
      replicas.lose(taker)
      third.hold('ada', adapter.id)
      third.blobs.put_new(uploads, {versions.MANIFEST: b'{}'})
    return real(blobs, prefix)

  monkeypatch.setattr(RemoteBlobs, 'list', listed)
  with pytest.raises(NotHolder):
    taker.hold('ada', adapter.id)
  assert paused and third.blobs.get(f'{uploads}/{versions.MANIFEST}') == b'{}'


def test_a_version_whose_answer_was_lost_stays_if_others_went_on_from_it(replicas, monkeypatch):
  slow, new = replicas.start('slow'), replicas.start('new')
  adapter, _ = slow.create('ada', 'mine', {}, arrays(0))
  request, real = slow.begin('ada', 'key', 'body'), RemoteBlobs.swap

  def unanswered(blobs, key, content, expected):
    real(blobs, key, content, expected)
    if blobs is slow.blobs and key.endswith('/HEAD'):
      monkeypatch.undo()
      replicas.lose(slow)
      assert new.begin('ada', 'key', 'body').version == 1
      step(new, adapter, 1)
      real(blobs, key, content, expected)  # The client of the bucket repeats it.

  monkeypatch.setattr(RemoteBlobs, 'swap', unanswered)
  assert step(slow, adapter, 0, request=request).number == 1
  for number in (1, 2):
    assert_same(new.arrays(new.version('ada', adapter.id, number)), arrays(number))


@pytest.mark.parametrize('shared', [True, False])
def test_a_put_of_head_that_was_given_up_moves_nothing_when_it_arrives(replicas, monkeypatch, tmp_path, shared):
  sqlite = functools.partial(Store.open, replicas.root, str(tmp_path / 'db'), base=store_cases.tiny_base())
  real, late = RemoteBlobs.swap, []

  def given_up(*given):
    monkeypatch.undo()
    late.append(given)
    raise StorageFailed('The bucket is away.')

  with contextlib.nullcontext(replicas.start('one')) if shared else contextlib.closing(sqlite()) as store:
    adapter, _ = store.create('ada', 'mine', {}, arrays(0))
    for what in (lambda: step(store, adapter, 0), lambda: store.create('ada', 'new', {}, arrays(0))):
      monkeypatch.setattr(RemoteBlobs, 'swap', given_up)
      with pytest.raises(StorageFailed):
        what()
    with pytest.raises(LostSwapError):
      real(*late[0])
    real(*late[1])
    assert step(store, adapter, 0).number == 1
    assert_same(store.arrays(store.version('ada', adapter.id, 1)), arrays(1))
  if not shared:
    (tmp_path / 'db').unlink()
    with contextlib.closing(sqlite()) as store:
      assert [each.id for each in store.adapters('ada')] == [adapter.id]


def test_a_lease_that_was_taken_over_unnoticed_is_forgotten(replicas):
  """As of a holder whose renewal is written after the end of its leases, and was begun before."""
  one, other = replicas.start('one'), replicas.start('other')
  adapter, _ = one.create('ada', 'mine', {}, arrays(0))
  with one.database.writing(full=True) as rows:
    rows.execute("UPDATE leases SET replica = ''")
  step(other, adapter, 0)
  other.hold_owner('ada')
  for ask in (lambda: step(one, adapter, 1), lambda: one.create('ada', 'new', {}, arrays(0))):
    for url in ('', 'http://other'):  # Then it asks who has the lease, so that requests are forwarded.
      with pytest.raises(NotHolder) as caught:
        ask()
      assert caught.value.url == url


def test_a_commit_that_nobody_knew_of_is_the_answer_of_its_request(replicas, monkeypatch):
  """HEAD has moved, the bucket fails, the request is given up and its replica dies: no row tells of it."""
  slow, new = replicas.start('slow'), replicas.start('new')
  adapter, _ = slow.create('ada', 'mine', {}, arrays(0))
  request, real = slow.begin('ada', 'key', 'body'), slow.blobs.swap

  def away(*_):
    raise StorageFailed('The bucket is away.')

  with monkeypatch.context() as patched:

    def swap(*given):
      real(*given)
      for name in ('tagged', 'get', 'list'):
        patched.setattr(slow.blobs, name, away)
      away()

    patched.setattr(slow.blobs, 'swap', swap)
    with pytest.raises(StorageFailed):
      step(slow, adapter, 0, request=request)
  slow.abandon(request)
  replicas.lose(slow)
  again = new.begin('ada', 'key', 'body')
  if not isinstance(again, StoredResponse):
    assert step(new, adapter, 0, request=again).number == 1
  assert [version.number for version in new.versions('ada', adapter.id)] == [0, 1]


def test_a_slow_deletion_erases_nothing_that_was_made_meanwhile(replicas, monkeypatch):
  slow, new = replicas.start('slow'), replicas.start('new')
  adapter, _ = slow.create('ada', 'mine', {}, arrays(0))
  real = RemoteBlobs.swap

  def paused(blobs, key, content, expected):
    if blobs is slow.blobs and key.endswith('/HEAD'):
      replicas.lose(slow)
      step(new, adapter, 0)
    real(blobs, key, content, expected)

  monkeypatch.setattr(RemoteBlobs, 'swap', paused)
  with pytest.raises(NotHolder):
    slow.delete('ada', adapter.id, expected=0)
  assert new.adapter('ada', adapter.id).head == 1
  new.delete('ada', adapter.id)
  assert new.count('ada') == 0


def test_a_slow_creation_cannot_take_a_name_that_was_given_meanwhile(replicas, monkeypatch):
  slow, new = replicas.start('slow'), None
  real = RemoteBlobs.swap

  def paused(blobs, key, content, expected):
    nonlocal new
    if blobs is slow.blobs and key.endswith('/HEAD') and new is None:
      replicas.lose(slow)
      new = replicas.start('new')
      new.create('ada', 'mine', {}, arrays(1))
    real(blobs, key, content, expected)

  monkeypatch.setattr(RemoteBlobs, 'swap', paused)
  with pytest.raises(NotHolder):
    slow.create('ada', 'mine', {}, arrays(0))
  [only] = new.adapters('ada')
  assert_same(new.arrays(new.version('ada', only.id, 0)), arrays(1))
  replicas.start('third').retain()
  assert new.adapters('ada') == [only]


def killed_at(monkeypatch, store, count):
  """Let all reads and writes of a replica fail from the one number `count` on, once it has begun or is done."""
  left = [count]

  def wrapped(real):
    def call(*arguments, **more):
      left[0] -= 1
      if left[0] < 0:
        raise Dead
      found = real(*arguments, **more)
      left[0] -= 1
      if left[0] < 0:
        raise Dead
      return found

    return call

  for name in ('put_new', 'swap', 'delete', 'tagged', 'list'):
    monkeypatch.setattr(store.blobs, name, wrapped(getattr(store.blobs, name)))
  real = store.database.connections.writing

  @contextlib.contextmanager
  def writing(*arguments):
    left[0] -= 1
    if left[0] < 0:
      raise Dead
    with real(*arguments) as rows:
      yield rows
    left[0] -= 1
    if left[0] < 0:
      raise Dead

  monkeypatch.setattr(store.database.connections, 'writing', writing)
  return left


def test_a_request_of_a_dead_holder_makes_one_version_wherever_it_was_killed(replicas, monkeypatch):
  reader, made = replicas.start('reader'), []
  for count in range(100):
    dead, key = replicas.start(f'dead {count}'), f'key {count}'
    adapter, _ = dead.create(f'ada {count}', 'mine', {}, arrays(0))
    request = dead.begin(adapter.owner, key, 'body')
    with pytest.raises(InFlight):
      reader.begin(adapter.owner, key, 'body')
    left = killed_at(monkeypatch, dead, count)
    try:
      step(dead, adapter, 0, request=request)
    except Dead:
      pass
    monkeypatch.undo()
    replicas.lose(dead)
    again = reader.begin(adapter.owner, key, 'body')
    if not isinstance(again, StoredResponse):
      step(reader, adapter, 0, request=again)
    else:
      assert again.version == 1
    made.append(isinstance(again, StoredResponse))
    assert reader.adapter(adapter.owner, adapter.id).head == 1
    assert [each.number for each in reader.versions(adapter.owner, adapter.id)] == [0, 1]
    folder = versions.adapter_folder(adapter.owner, adapter.id)
    assert len(list(reader.blobs.list(folder))) == 1 + 2 * 3  # Nothing of the other one is left.
    if left[0] >= 0:
      break
  assert count > 8 and made == sorted(made) and {True, False} == set(made)


def test_what_a_dead_replica_was_doing_is_put_right_by_retention(replicas, monkeypatch):
  reader = replicas.start('reader')
  for count in range(100):
    dead = replicas.start(f'dead {count}')
    adapter, _ = dead.create(f'ada {count}', 'mine', {}, arrays(0))
    left = killed_at(monkeypatch, dead, count)
    with contextlib.suppress(Dead):
      dead.delete(adapter.owner, adapter.id)
    monkeypatch.undo()
    replicas.lose(dead)
    reader.begin(adapter.owner, 'key', 'body')
    reader.retain()
    folder = versions.adapter_folder(adapter.owner, adapter.id)
    keys = [entry.key.rpartition('/')[2] for entry in reader.blobs.list(folder)]
    assert keys in (['TOMBSTONE'], ['HEAD', 'adapter_config.json', 'adapter_model.safetensors', 'manifest.json'])
    assert reader.count(adapter.owner) == (keys != ['TOMBSTONE'])
    assert not reader.database.intents() and reader.leases.epoch(adapter.id) is None
    if left[0] >= 0:
      break
  assert count > 6 and keys == ['TOMBSTONE']


def test_a_slow_creation_that_was_taken_for_unfinished_leaves_nothing(replicas, monkeypatch):
  slow, new = replicas.start('slow'), replicas.start('new')
  real = RemoteBlobs.put_new

  def paused(blobs, *given, **more):
    if blobs is slow.blobs:  # Nothing is there but the intent.
      monkeypatch.undo()
      replicas.lose(slow)
      new.create('ada', 'other', {}, arrays(0))
    return real(blobs, *given, **more)

  monkeypatch.setattr(RemoteBlobs, 'put_new', paused)
  with pytest.raises(NotHolder):
    slow.create('ada', 'mine', {}, arrays(0))
  [other] = new.adapters('ada')
  assert other.name == 'other'
  left = [entry.key.rpartition('/')[2] for entry in new.blobs.list('users') if other.id not in entry.key]
  assert left == ['TOMBSTONE']


def test_settings_that_a_dead_replica_was_changing_are_those_of_head(replicas, monkeypatch):
  reader, seen = replicas.start('reader'), []
  for count in range(100):
    dead = replicas.start(f'dead {count}')
    adapter, _ = dead.create(f'ada {count}', 'mine', {'x': 0}, arrays(0))
    left = killed_at(monkeypatch, dead, count)
    with contextlib.suppress(Dead):
      dead.change_settings(adapter.owner, adapter.id, 0, {'x': 1})
    monkeypatch.undo()
    replicas.lose(dead)
    reader.retain()
    seen.append(reader.adapter(adapter.owner, adapter.id).settings['x'])
    assert seen[-1] == head_of(reader, adapter).adapter.settings['x'] and not reader.database.intents()
    if left[0] >= 0:
      break
  assert seen == sorted(seen) and set(seen) == {0, 1}


def test_a_request_that_could_not_be_ended_keeps_no_other_replica_waiting(replicas, monkeypatch):
  one, other = replicas.start('one'), replicas.start('other')
  request = one.begin('ada', 'key', 'body')
  with monkeypatch.context() as failing:
    failing.setattr(one.database, 'drop_request', lambda *_: (_ for _ in ()).throw(StorageFailed('Away.')))
    with pytest.raises(StorageFailed):
      one.abandon(request)
  with pytest.raises(InFlight):
    other.begin('ada', 'key', 'body')
  one.settle_doubtful()
  other.abandon(other.begin('ada', 'key', 'body'))


def test_who_drains_lets_others_change_what_it_held(replicas):
  one, other = replicas.start('one'), replicas.start('other')
  adapter, _ = one.create('ada', 'mine', {}, arrays(0))
  one.drain()
  step(other, adapter, 0)
  with pytest.raises(NotHolder):
    step(one, adapter, 1)
  other.create('ada', 'another', {}, arrays(0))
  other.leases.give_back(adapter.id)
  step(one, adapter, 1)  # What is under way may end, and keeps nothing.
  assert one.leases.epoch(adapter.id) is None
  step(other, adapter, 2)


def test_limits_per_day_are_those_of_all_replicas(replicas):
  limits = LimitsConfig(tokens_per_day=100, tokens_per_minute=None)
  one, other = (Allowances(limits, replicas.start(name).database) for name in ('one', 'other'))
  one.spend('key', 'sampled', 60)
  one.save()
  other.save()
  assert other.used('key')['day']['sampled'] == 60
  with pytest.raises(Busy):
    other.spend('key', 'learned', 41)


def test_an_adapter_that_cannot_be_put_right_keeps_no_other_from_it(replicas, monkeypatch):
  dead, reader = replicas.start('dead'), replicas.start('reader')
  made = [dead.create('ada', name, {}, arrays(0))[0] for name in ('one', 'two', 'three')]
  with dead.database.writing(full=True) as rows:
    for adapter in made:
      folder = versions.adapter_folder('ada', adapter.id)
      rows.execute('INSERT INTO intents VALUES (?, ?, ?)', (adapter.id, folder, ''))
  replicas.lose(dead)
  real = RemoteBlobs.tagged

  def broken(blobs, key):
    if made[0].id in key:
      raise StorageFailed('A key that cannot be read.')
    return real(blobs, key)

  with monkeypatch.context() as patched:
    patched.setattr(RemoteBlobs, 'tagged', broken)
    with pytest.raises(StorageFailed):
      reader.retain()
    assert reader.database.intents().keys() == {made[0].id}
    reader.create('bob', 'his', {}, arrays(0))
  reader.retain()
  assert not reader.database.intents()
  with pytest.raises(InvalidRequest, match='stores no text with a NUL'):
    reader.create('bob', 'a\0b', {}, arrays(0))


def test_requests_have_one_answer_over_replicas(replicas):
  one, other = replicas.start('one'), replicas.start('other')
  request = one.begin('ada', 'key', 'body')
  one.finish(request, 200, b'{}')
  assert other.begin('ada', 'key', 'body') == StoredResponse(200, b'{}', None, None)
  failed = one.begin('ada', 'failed', 'body')
  one.abandon(failed)
  other.abandon(other.begin('ada', 'failed', 'another body'))
  other.begin('ada', 'dead', 'body')
  replicas.lose(other)
  assert one.database.request('ada', one.begin('ada', 'dead', 'another body').id.key).replica == one.leases.replica


def test_a_request_whose_row_is_there_although_writing_it_has_failed_can_be_sent_to_another_replica(
  replicas, monkeypatch
):
  one, other = replicas.start('one'), replicas.start('other')
  real = one.database.writing

  @contextlib.contextmanager
  def unanswered(**more):
    with real(**more) as rows:
      yield rows
    raise StorageFailed('The connection was lost.')

  for key in ('key', 'again'):
    with monkeypatch.context() as patched:
      patched.setattr(one.database, 'writing', unanswered)
      with pytest.raises(StorageFailed):
        one.begin('ada', key, 'body')
    with pytest.raises(InFlight):
      other.begin('ada', key, 'body')
  running = one.begin('ada', 'again', 'body')
  one.settle_doubtful()
  other.abandon(other.begin('ada', 'key', 'another body'))
  with pytest.raises(InFlight):
    other.begin('ada', 'again', 'body')
  one.finish(running, 200, b'{}')
  one.settle_doubtful()
  assert other.begin('ada', 'again', 'body') == StoredResponse(200, b'{}', None, None)


def test_a_slow_replica_does_not_end_a_request_that_another_one_runs_now(replicas):
  slow, new, third = (replicas.start(name) for name in ('slow', 'new', 'third'))
  begun = slow.begin('ada', 'key', 'body')
  replicas.lose(slow)
  again = new.begin('ada', 'key', 'body')
  slow.finish(begun, 200, b'{"late": true}')
  slow.abandon(begun)
  with pytest.raises(InFlight):
    third.begin('ada', 'key', 'body')
  new.finish(again, 200, b'{}')
  assert third.begin('ada', 'key', 'body') == StoredResponse(200, b'{}', None, None)


def test_a_replica_whose_clock_is_wrong_removes_nothing_too_early(replicas, monkeypatch):
  one = replicas.start('one')
  one.finish(one.begin('ada', 'key', 'body'), 200, b'{}')
  wrong = types.SimpleNamespace(**vars(time) | {'time': lambda: time.time() + 1e6})
  monkeypatch.setattr(leases, 'time', wrong)
  assert replicas.start('wrong', clock=wrong.time).retain().requests == 0
  assert one.begin('ada', 'key', 'body') == StoredResponse(200, b'{}', None, None)


@pytest.mark.parametrize('dies', [False, True])
def test_what_the_database_has_missed_follows_without_a_request(replicas, monkeypatch, dies):
  one, other = replicas.start('one'), replicas.start('other')
  adapter, _ = one.create('ada', 'mine', {}, arrays(0))
  with monkeypatch.context() as patched:

    def fail(*_):
      raise StorageFailed('The database is away.')

    patched.setattr(one.database, 'put_head', fail)
    step(one, adapter, 0)  # HEAD has moved.
  assert other.adapter('ada', adapter.id).head == 0
  if dies:
    replicas.lose(one)
  stopped = threading.Event()
  stopped.set()
  tending = other if dies else one
  service = types.SimpleNamespace(allowances=Allowances(LimitsConfig()), store=tending, turns=Turns())
  Service.tend(service, stopped)
  assert other.adapter('ada', adapter.id).head == 1


def is_back(database):
  try:
    database.check()
  except StorageFailed:
    return False
  return True


def test_without_the_database_nothing_is_acknowledged_and_then_all_goes_on(postgres, replicas, monkeypatch):  # noqa: F811
  monkeypatch.setattr('sdpo_jax.serving.store.connections._PATIENCE', 1.0)
  store = replicas.start('one')
  adapter, first = store.create('ada', 'mine', {}, arrays(0))
  postgres.stop()
  try:
    for what in (lambda: step(store, adapter, 0), lambda: store.begin('ada', 'key', 'body')):
      with pytest.raises(StorageFailed) as caught:
        what()
      assert caught.value.retry_after and 'host=' not in str(caught.value)
    assert store.unwritable()
  finally:
    postgres.start()
  until(lambda: is_back(store.database))  # Connections of before are replaced.
  assert store.versions('ada', adapter.id) == [first]
  assert step(store, adapter, 0).number == 1


def test_an_empty_database_is_filled_from_the_root_by_one(replicas, postgres):  # noqa: F811
  one = replicas.start('one')
  adapter, _ = one.create('ada', 'mine', {}, arrays(0))
  step(one, adapter, 0)
  epoch = head_of(one, adapter).epoch
  one.close()
  replicas.database = postgres.url()
  again = replicas.start('again')
  assert again.adapter('ada', adapter.id).head == 1
  step(again, adapter, 1)
  assert head_of(again, adapter).epoch > epoch
  with pytest.raises(UserError, match='belongs to another serve.store.root'):
    Store.open('memory://elsewhere', replicas.database, base=store_cases.tiny_base())
  with again.database.writing(full=True) as rows:
    rows.execute("UPDATE alembic_version SET version_num = '9999'")
  with pytest.raises(UserError, match='later version of sdpo_jax'):
    replicas.start('old')
  with again.database.writing(full=True) as rows:
    rows.execute('UPDATE alembic_version SET version_num = ?', (migrations.NEWEST,))


def test_no_transaction_waits_until_alembic_is_imported(postgres, monkeypatch):  # noqa: F811
  import psycopg

  url, real = postgres.url(), migrations.statements
  waiting = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND query LIKE '%alembic%'"

  @functools.cache
  def statements(*arguments):
    with psycopg.connect(url) as connection:
      assert connection.execute(waiting).fetchone() == (0,)
    return real(*arguments)

  monkeypatch.setattr(migrations, 'statements', statements)
  connect(url).close()


@pytest.mark.parametrize(
  ('url', 'said'),
  [('postgresql://nobody@/x?host=/nowhere', 'cannot be used'), ('postgresql://x?nonsense=1', 'is no address')],
)
def test_a_database_that_is_not_there_is_named(monkeypatch, url, said):
  monkeypatch.setattr('sdpo_jax.serving.store.connections._PATIENCE', 0.1)
  with pytest.raises(UserError, match=said):
    Store.open('memory://nothing', url, base=store_cases.tiny_base())


def test_texts_that_no_row_can_have_are_unknown(replicas):
  store = replicas.start('one')
  for text in ('a\0b', '\ud800'):
    with pytest.raises(NotFound):
      store.adapter('ada', text)
    with pytest.raises(NotFound):
      store.by_name('ada', text)


def test_idle_adapters_are_shrunk_by_whoever_is_free(replicas):
  one, other = (replicas.start(name, retention=Retention(keep_versions=1)) for name in ('one', 'other'))
  adapter, _ = one.create('ada', 'mine', {}, arrays(0))
  for head in range(4):
    step(one, adapter, head)
  assert other.retain().versions == 0  # Its holder does it.
  replicas.lose(one)
  assert other.retain().versions == 2
  assert other.leases.epoch(adapter.id) is None
  assert [each.number for each in other.versions('ada', adapter.id)] == [0, 3, 4]


def test_revisions_are_those_that_the_code_names():
  assert migrations.scripts().get_current_head() == migrations.NEWEST and migrations.is_known(migrations.FIRST)
  assert not migrations.is_known('9999') and migrations.statements('sqlite', migrations.NEWEST) == ()
