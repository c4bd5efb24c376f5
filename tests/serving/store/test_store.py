"""The store of the service: what is committed is there to the bit, what is another's is not, what is damaged has a
name.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import stat
import threading

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.models.adapters import peft_files
from sdpo_jax.serving.errors import (
  Damaged,
  Gone,
  InFlight,
  InvalidRequest,
  NameTaken,
  NotFound,
  StorageFailed,
  Unprocessable,
  VersionConflict,
)
from sdpo_jax.serving.records import SampleRecord
from sdpo_jax.serving.store import store as stores
from sdpo_jax.serving.store import versions
from sdpo_jax.serving.store.store import Retained, Retention, Store, StoredResponse
from tests.serving.store import store_cases
from tests.serving.store.store_cases import arrays, assert_same, open_store


class Clock:
  def __init__(self):
    self.now = 1e9

  def __call__(self) -> float:
    return self.now


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def store(tmp_path, clock):
  with open_store(tmp_path, clock=clock) as opened:
    yield opened


def step(store, adapter, seed, **more):
  """Commit the next version of an adapter."""
  head = store.adapter(adapter.owner, adapter.id).head
  more = {'reason': 'feedback', 'details': {'seed': seed}} | more
  return store.commit(adapter.owner, adapter.id, head, arrays(seed), **more)


def sample(adapter, id='s1', owner='ada', expires=1e9 + 60):
  return SampleRecord(
    id,
    owner,
    adapter,
    0,
    [1, 2, 3],
    [4, 5],
    np.float32([-0.5, -1.25]),
    0.7,
    [{'role': 'user', 'content': 'half a \ud800 pair'}],
    'text',
    'stop',
    1e9,
    expires,
  )


def folder_of(store, adapter):
  return versions.adapter_folder(adapter.owner, adapter.id)


def files_below(tmp_path):
  return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob('*') if path.is_file()}


def test_what_is_committed_is_there_to_the_bit_also_after_a_restart(tmp_path, store, clock):
  adapter, first = store.create('ada', 'mine', {'teacher': 'average'}, arrays(0))
  assert (first.number, first.parent, first.reason) == (0, None, 'create')
  clock.now += 5
  second = step(store, adapter, 1, details={'loss': float('nan'), 'ids': ('a', 'b')})
  undone = step(store, adapter, 0, reason='undo', details={'to': 0}, parent=0)
  assert (second.number, second.parent, second.created) == (1, 0, 1e9 + 5)
  assert second.details == {'loss': None, 'ids': ['a', 'b']}
  assert (undone.number, undone.parent, undone.engine_name) == (2, 0, f'{adapter.id}@2')
  settings_changed = store.change_settings('ada', adapter.id, 2, {'teacher': 'base'})
  store.close()
  with open_store(tmp_path, clock=clock) as again:
    assert again.adapter('ada', adapter.id) == settings_changed == again.by_name('ada', 'mine')
    assert again.adapters('ada') == [settings_changed] and settings_changed.head == 2
    assert again.versions('ada', adapter.id) == [first, second, undone]
    for version, seed in ((first, 0), (second, 1), (undone, 0)):
      assert_same(again.arrays(version), arrays(seed))
      assert again.version('ada', adapter.id, version.number) == version
    assert again.problems == []


def test_a_version_is_the_folder_of_an_adapter(tmp_path, store):
  """What PEFT itself makes of it, tests/models/adapters/test_peft.py says."""
  adapter, version = store.create('ada', 'mine', {}, arrays(3))
  folder = tmp_path / 'root' / folder_of(store, adapter) / 'versions' / versions.version_folder(0, version.digest)
  base = store_cases.tiny_base()
  assert peft_files.read_adapter(folder, base.table, lambda name: name) == base.adapter
  factors = peft_files.load_factors(folder, base.table, lambda name: name, None)
  query = arrays(3)['factors/layers.attention.query_lora_a']
  np.testing.assert_array_equal(factors['layers']['attention']['query_lora_a'], query)
  down = arrays(3)['factors/layers.mlp.down_lora_b']
  np.testing.assert_array_equal(factors['layers']['mlp']['down_lora_b'][1], down[1])
  stored = store.peft_files(version)
  assert {name: (folder / name).read_bytes() for name in stored} == stored and len(stored) == 2


def test_an_adapter_of_somebody_else_is_as_unknown_as_none(store):
  adapter, version = store.create('ada', 'mine', {}, arrays(0))
  store.keep_samples([sample(adapter.id)])
  for owner, id in (('bob', adapter.id), ('ada', 'ad-none'), ('ada', '../HEAD'), ('ada', '\ud800')):
    for call in (
      lambda o=owner, i=id: store.adapter(o, i),
      lambda o=owner, i=id: store.versions(o, i),
      lambda o=owner, i=id: store.version(o, i, 0),
      lambda o=owner, i=id: store.commit(o, i, 0, arrays(1), reason='feedback', details={}),
      lambda o=owner, i=id: store.change_settings(o, i, 0, {}),
      lambda o=owner, i=id: store.delete(o, i),
    ):
      with pytest.raises(NotFound) as error:
        call()
      assert str(error.value) == f'There is no adapter {id!r}.'
  with pytest.raises(NotFound, match=f"^There is no adapter 'mine' with that id; .* name has the id {adapter.id}.$"):
    store.adapter('ada', 'mine')
  with pytest.raises(NotFound, match="^There is no adapter 'mine'.$"):
    store.adapter('bob', 'mine')
  with pytest.raises(NotFound):
    store.by_name('bob', 'mine')
  with pytest.raises(NotFound):
    store.sample('bob', 's1')
  assert store.adapters('bob') == [] and store.adapters('ada') == [adapter]
  for number in (1, -1, 2**70):
    with pytest.raises(NotFound, match=f'no version {number}'):
      store.version('ada', adapter.id, number)
  assert_same(store.arrays(version), arrays(0))


def test_of_many_that_commit_on_a_version_exactly_one_wins(store):
  adapter, _ = store.create('ada', 'mine', {}, arrays(0))
  others = [store.create('bob', str(index), {}, arrays(10 + index)) for index in range(2)]
  start = threading.Barrier(8)

  def commit(seed):
    start.wait()
    try:
      return store.commit('ada', adapter.id, 0, arrays(seed), reason='feedback', details={'seed': seed})
    except VersionConflict as error:
      assert error.current == 1
      return None

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    won = [version for version in pool.map(commit, range(1, 9)) if version is not None]
  assert len(won) == 1 and won == store.versions('ada', adapter.id)[1:]
  assert_same(store.arrays(won[0]), arrays(won[0].details['seed']))
  for index, (_, version) in enumerate(others):
    assert_same(store.arrays(version), arrays(10 + index))
  assert len(list(store.blobs.list(f'{folder_of(store, adapter)}/versions'))) == 6  # Of two versions.


def test_two_processes_on_an_object_store_do_not_lose_a_version(tmp_path):
  """The stores have databases of their own, as those of two machines would."""
  root = f'memory://{tmp_path.name}'
  with (
    Store.open(root, tmp_path / 'a' / 'db', base=store_cases.tiny_base()) as one,
    Store.open(root, tmp_path / 'b' / 'db', base=store_cases.tiny_base()) as other,
  ):
    adapter, _ = one.create('ada', 'mine', {}, arrays(0))
    first = one.commit('ada', adapter.id, 0, arrays(1), reason='feedback', details={})
    with pytest.raises(NotFound):
      other.adapter('ada', adapter.id)  # It was opened before.
    other.close()
    with Store.open(root, tmp_path / 'b' / 'db', base=store_cases.tiny_base()) as other:
      second = other.commit('ada', adapter.id, 1, arrays(2), reason='feedback', details={})
      with pytest.raises(VersionConflict) as error:
        one.commit('ada', adapter.id, 1, arrays(3), reason='feedback', details={})
      assert error.value.current == 2 and one.versions('ada', adapter.id)[1:] == [first, second]
      assert_same(one.arrays(second), arrays(2))
      start = threading.Barrier(2)

      def commit(item):
        store, seed = item
        start.wait()
        try:
          return store.commit('ada', adapter.id, 2, arrays(seed), reason='feedback', details={})
        except VersionConflict:
          return None

      with concurrent.futures.ThreadPoolExecutor(2) as pool:
        won = [version for version in pool.map(commit, [(one, 4), (other, 5)]) if version is not None]
      assert len(won) == 1
      with pytest.raises(VersionConflict):
        one.commit('ada', adapter.id, 2, arrays(6), reason='feedback', details={})
      assert one.versions('ada', adapter.id)[-1] == won[0]
      other.delete('ada', adapter.id)
      with pytest.raises(NotFound):
        one.commit('ada', adapter.id, 3, arrays(6), reason='feedback', details={})
      assert one.adapters('ada') == []
      assert [entry.key.rpartition('/')[2] for entry in one.blobs.list()] == ['BASE', 'TOMBSTONE']


def test_a_second_process_is_refused_by_name(tmp_path, store):
  with pytest.raises(UserError, match=f'root=.* is in use by the process {os.getpid()}: stop that process'):
    open_store(tmp_path)
  with pytest.raises(UserError, match='database=.* is in use by the process'):
    Store.open(str(tmp_path / 'other'), tmp_path / 'database' / 'store.sqlite', base=store_cases.tiny_base())


def test_a_root_of_another_base_is_refused(tmp_path, store):
  adapter, version = store.create('ada', 'mine', {}, arrays(0))
  store.close()
  database = tmp_path / 'database' / 'store.sqlite'
  moved = dataclasses.replace(store_cases.tiny_base(), name='elsewhere')
  with Store.open(str(tmp_path / 'root'), database, base=moved) as again:
    assert_same(again.arrays(version), arrays(0))  # The model has another path; it is the same.
  for other, why in (
    (store_cases.tiny_base(rank=3), 'r differ'),
    (dataclasses.replace(store_cases.tiny_base(), fingerprint={'weights': 'others'}), 'the model differ'),
  ):
    with pytest.raises(UserError, match=f'of another model or shape .*{why}'):
      Store.open(str(tmp_path / 'root'), database, base=other)
  with pytest.raises(ValueError, match='lora_a'):
    with open_store(tmp_path) as again:
      again.commit('ada', adapter.id, 0, arrays(0, rank=3), reason='feedback', details={})


@pytest.mark.parametrize('how', ['missing', 'of another root', 'damaged', 'cut off', 'older'])
def test_a_database_is_filled_from_the_root(tmp_path, store, how):
  adapter, first = store.create('ada', 'mine', {'x': 1}, arrays(0))
  database, root = tmp_path / 'database' / 'store.sqlite', str(tmp_path / 'root')
  store.close()
  older = database.read_bytes()
  with open_store(tmp_path) as again:
    request = again.begin('ada', 'key', 'body')
    second = step(again, adapter, 1, request=request)
    adapter = again.change_settings('ada', adapter.id, 1, {'x': 2})
    other, third = again.create('bob', 'his', {}, arrays(2))
  if how == 'missing':
    database.unlink()
  elif how == 'of another root':
    database.unlink()
    Store.open(str(tmp_path / 'elsewhere'), database, base=store_cases.tiny_base()).close()
  elif how == 'damaged':
    database.write_bytes(b'no database' * 1000)
  elif how == 'cut off':
    database.write_bytes(database.read_bytes()[:9000])
  else:
    database.write_bytes(older)
  with Store.open(root, database, base=store_cases.tiny_base()) as again:
    assert again.adapters('ada') == [adapter] and again.adapters('bob') == [other]
    assert again.versions('ada', adapter.id) == [first, second] and again.versions('bob', other.id) == [third]
    for version, seed in ((first, 0), (second, 1), (third, 2)):
      assert_same(again.arrays(version), arrays(seed))
    assert again.begin('ada', 'key', 'body') == StoredResponse(None, None, adapter.id, 1)  # As the manifest says.
    with pytest.raises(Unprocessable):
      again.begin('ada', 'key', 'another body')
  aside = [path for path in database.parent.iterdir() if path.name.endswith('.aside')]
  assert len(aside) == (how in ('of another root', 'damaged', 'cut off'))


def test_what_is_damaged_is_named_and_never_half_loaded(tmp_path, store):
  adapter, first = store.create('ada', 'mine', {}, arrays(0))
  found = [first, *(step(store, adapter, seed) for seed in (1, 2, 3))]
  other, his = store.create('bob', 'his', {}, arrays(9))
  root = tmp_path / 'root'
  places = [root / folder_of(store, adapter) / 'versions' / versions.version_folder(v.number, v.digest) for v in found]
  flipped = bytearray((places[1] / 'adapter_model.safetensors').read_bytes())
  flipped[-1] ^= 1
  (places[1] / 'adapter_model.safetensors').write_bytes(flipped)
  with pytest.raises(Damaged, match=r'versions/00000001-.*/adapter_model.safetensors is damaged'):
    store.arrays(found[1])
  (places[0] / 'adapter_model.safetensors').unlink()
  with pytest.raises(Damaged, match=r'00000000-.*/adapter_model.safetensors is missing'):
    store.arrays(found[0])
  (places[2] / 'manifest.json').write_text('{}')
  with pytest.raises(Damaged, match=r'00000002-.*/manifest.json is damaged'):
    store.arrays(found[2])
  assert_same(store.arrays(found[3]), arrays(3))
  store.close()
  (tmp_path / 'database' / 'store.sqlite').unlink()
  with open_store(tmp_path) as again:  # What is below the damaged manifest is known all the same.
    assert again.versions('ada', adapter.id) == [found[0], found[1], found[3]]
    with pytest.raises(Damaged, match='00000002-.*manifest.json is damaged: restore it'):
      again.version('ada', adapter.id, 2)
    step(again, adapter, 4)
    assert_same(again.arrays(his), arrays(9))
  head = root / folder_of(store, adapter) / 'HEAD'
  content = head.read_bytes()
  for damage in (content.replace(b'"head": 4', b'"head": 2'), b'', None):
    head.unlink() if damage is None else head.write_bytes(damage)
    with open_store(tmp_path) as again:  # The database knows the adapter; it can be read, not changed.
      assert_same(again.arrays(again.version('ada', adapter.id, 3)), arrays(3))
      with pytest.raises(Damaged, match='HEAD is'):
        again.commit('ada', adapter.id, 4, arrays(5), reason='feedback', details={})
      assert step(again, other, 5).number >= 1
    (tmp_path / 'database' / 'store.sqlite').unlink()
    with open_store(tmp_path) as again:
      with pytest.raises(Damaged, match='HEAD is'):
        again.adapter('ada', adapter.id)
      with pytest.raises(NotFound):
        again.adapter('bob', adapter.id)
      assert len(again.problems) == 1 and again.adapters('ada') == [] and len(again.adapters('bob')) == 1
    head.write_bytes(content)
    with open_store(tmp_path) as again:
      assert again.adapter('ada', adapter.id).head == 4 and again.problems == []
  head.unlink()
  (tmp_path / 'database' / 'store.sqlite').unlink()
  with open_store(tmp_path) as again:
    again.delete('ada', adapter.id)
    with pytest.raises(NotFound):
      again.adapter('ada', adapter.id)
  assert not any(adapter.id in name and 'TOMBSTONE' not in name for name in files_below(root))


def test_what_others_have_put_into_the_root_is_left_alone(tmp_path, store, caplog):
  adapter, version = store.create('ada', 'mine', {}, arrays(0))
  root = tmp_path / 'root'
  folder = root / folder_of(store, adapter)
  strange = [root / 'README', folder / 'notes.txt', root / 'users' / 'x', folder / 'versions' / '00000007-x' / 'a.json']
  for path in strange:
    path.parent.mkdir(exist_ok=True)
    path.write_text('mine')
  (folder / 'link').symlink_to(root)
  leftover = folder / 'versions' / '00000001-0123456789ab'
  leftover.mkdir()
  (leftover / 'manifest.json').write_text('{}')
  (folder / f'.{"0" * 16}.partial').write_text('{')
  store.close()
  (root / 'STAMP').unlink()
  with open_store(tmp_path) as again:
    assert_same(again.arrays(version), arrays(0))
    assert 'notes.txt' in caplog.text
    assert not leftover.exists() and not (folder / f'.{"0" * 16}.partial').exists()
    again.delete('ada', adapter.id)
  assert all(path.read_text() == 'mine' for path in strange)


def test_a_deleted_adapter_leaves_nothing_but_a_tombstone(tmp_path, store):
  adapter, _ = store.create('ada', 'secret-name', {'canary': 'secret-setting'}, arrays(0))
  other, his = store.create('bob', 'his', {}, arrays(1))
  step(store, adapter, 2, details={'why': 'secret-reason'})
  store.keep_samples([dataclasses.replace(sample(adapter.id), text='secret-text')])
  request = store.begin('ada', 'key', 'body')
  store.about(request, adapter.id)
  store.finish(request, 200, b'secret-answer')
  with pytest.raises(VersionConflict) as error:
    store.delete('ada', adapter.id, 0)
  assert error.value.current == 1
  store.delete('ada', adapter.id, 1)
  for call in (store.adapter, store.versions, store.delete):
    with pytest.raises(NotFound):
      call('ada', adapter.id)
  with pytest.raises(NotFound):
    store.sample('ada', 's1')
  assert isinstance(store.begin('ada', 'key', 'another body'), stores.IdempotentRequest)
  again, _ = store.create('ada', 'secret-name'.upper(), {}, arrays(0))
  assert_same(store.arrays(his), arrays(1))
  store.close()
  left = [name for name in files_below(tmp_path / 'root') if adapter.id in name]
  assert left == [f'{folder_of(store, adapter)}/TOMBSTONE']
  for path in tmp_path.rglob('*'):
    assert not path.is_file() or b'secret' not in path.read_bytes(), path
  with open_store(tmp_path) as opened:
    assert opened.adapters('ada') == [again] and opened.adapters('bob') == [other]


def test_an_answer_goes_with_the_adapter_that_the_request_turned_out_to_be_about(tmp_path, store):
  adapter, _ = store.create('ada', 'mine', {}, arrays(0))
  request = store.begin('ada', 'key', 'body')
  store.about(request, adapter.id)
  store.finish(request, 200, b'secret-answer')
  assert store.begin('ada', 'key', 'body').response == b'secret-answer'
  store.delete('ada', adapter.id)
  assert not any(b'secret' in path.read_bytes() for path in (tmp_path / 'database').iterdir())


def test_what_has_expired_is_in_no_file(tmp_path, store, clock):
  store.keep_samples([dataclasses.replace(sample(None, 's1'), version=None, text='secret-text')])
  store.finish(store.begin('ada', 'key', 'body'), 200, b'secret-answer')
  files = [path for path in (tmp_path / 'database').iterdir() if path.is_file()]
  assert any(b'secret-text' in path.read_bytes() for path in files)
  clock.now += 2 * 86400
  assert store.retain() == Retained(0, 1, 1)
  assert not any(b'secret' in path.read_bytes() for path in files)


def test_retention_keeps_the_newest_the_current_and_the_first_version(tmp_path, clock):
  with open_store(tmp_path, clock=clock, retention=Retention(keep_versions=2)) as store:
    adapter, _ = store.create('ada', 'mine', {}, arrays(0))
    for seed in range(1, 6):
      step(store, adapter, seed)
    assert store.retain() == Retained(2, 0, 0) and store.retain() == Retained(0, 0, 0)
    kept = store.versions('ada', adapter.id)
    assert [version.number for version in kept] == [0, 3, 4, 5]
    with pytest.raises(Gone, match='Version 2 .* was removed'):
      store.version('ada', adapter.id, 2)
    for version in kept:
      assert_same(store.arrays(version), arrays(version.number))
    assert len(list(store.blobs.list(folder_of(store, adapter)))) == 4 * 3 + 1
  (tmp_path / 'database' / 'store.sqlite').unlink()
  with open_store(tmp_path) as store:
    assert store.versions('ada', adapter.id) == kept and store.retain() == Retained(0, 0, 0)
    step(store, adapter, 6)
    with pytest.raises(Gone):
      store.version('ada', adapter.id, 1)


def test_the_samples_of_a_request_are_kept_together_or_not_at_all(store):
  adapter, _ = store.create('ada', 'mine', {}, arrays(0))
  many = [dataclasses.replace(sample(adapter.id, f's{index}'), text=f'text {index}') for index in range(150)]
  store.keep_samples(many)
  assert [store.sample('ada', each.id).text for each in many] == [each.text for each in many]
  store.delete('ada', adapter.id)
  with pytest.raises(NotFound, match='no adapter'):
    store.keep_samples([dataclasses.replace(each, id=f'{each.id}-again') for each in many])
  for each in many:
    with pytest.raises(NotFound):
      store.sample('ada', f'{each.id}-again')


def test_samples_are_kept_until_they_expire(tmp_path, store, clock):
  adapter, _ = store.create('ada', 'mine', {}, arrays(0))
  kept = sample(adapter.id)
  bare = dataclasses.replace(sample(None, 's2'), version=None, messages=None, text='\ud800', tokens=[])
  store.keep_samples([kept])
  store.keep_samples([bare])
  store.close()
  with open_store(tmp_path, clock=clock) as again:
    for expected in (kept, bare):
      found = again.sample('ada', expected.id)
      assert dataclasses.replace(found, log_probs=0) == dataclasses.replace(expected, log_probs=0)
      assert found.log_probs.dtype == np.float32
      np.testing.assert_array_equal(found.log_probs, expected.log_probs)
    clock.now += 60
    with pytest.raises(Gone, match='s1 has expired: sample again'):
      again.sample('ada', 's1')
    assert again.retain() == Retained(0, 2, 0)
    with pytest.raises(Gone):
      again.sample('ada', 's1')
    clock.now += stores.FORGOTTEN
    again.retain()
    with pytest.raises(NotFound):
      again.sample('ada', 's1')


def test_a_request_is_answered_once(tmp_path, store, clock):
  request = store.begin('ada', 'key', 'body')
  with pytest.raises(InFlight):
    store.begin('ada', 'key', 'body')
  with pytest.raises(Unprocessable):
    store.begin('ada', 'key', 'another body')
  store.abandon(request)
  request = store.begin('ada', 'key', 'another body')
  store.abandon(store.begin('bob', 'key', 'body'))
  store.finish(request, 201, b'{}')
  assert store.begin('ada', 'key', 'another body') == StoredResponse(201, b'{}', None, None)
  with pytest.raises(Unprocessable):
    store.begin('ada', 'key', 'body')
  adapter, _ = store.create('ada', 'mine', {}, arrays(0))
  request = store.begin('ada', 'k2', 'body')
  step(store, adapter, 1, request=request)
  store.abandon(request)  # It has made something, and must not do so again.
  assert store.begin('ada', 'k2', 'body') == StoredResponse(None, None, adapter.id, 1)
  request = store.begin('ada', 'k3', 'body')
  store.change_settings('ada', adapter.id, 1, {'x': 1}, request=request)
  store.begin('ada', 'k4', 'body')
  store.close()
  with open_store(tmp_path, clock=clock) as again:  # Two were under way.
    assert again.begin('ada', 'key', 'another body') == StoredResponse(201, b'{}', None, None)
    assert again.begin('ada', 'k2', 'body') == StoredResponse(None, None, adapter.id, 1)
    assert again.begin('ada', 'k3', 'body') == StoredResponse(None, None, adapter.id, None)
    again.abandon(again.begin('ada', 'k4', 'another body'))
    clock.now += 86400
    assert again.retain().requests == 3
    for key in ('key', 'k2', 'k3'):
      again.abandon(again.begin('ada', key, 'a new body'))


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  with open_store(tmp_path_factory.mktemp('shared')) as store:
    yield store


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
  st.lists(
    st.tuples(
      st.one_of(st.sampled_from(['', '.', '..', '../..', '/etc', 'a/b', 'A', 'a', 'a\0b', "'; --", '%']), st.text()),
      st.one_of(st.sampled_from(['', '.', '../HEAD', 'a@1', 'a\nb', "x'y", '\ud800', 'é', 'e\u0301']), st.text()),
    ),
    max_size=3,
  )
)
def test_owners_and_names_are_any_strings_and_never_paths(shared, pairs):
  made = {}
  for owner, name in pairs:
    before = shared.adapters(owner)
    is_name = 0 < len(name) <= stores.LONGEST_NAME and '\ud800' not in name
    if not is_name or any(adapter.name == name for adapter in before):
      with pytest.raises(NameTaken if is_name else InvalidRequest) as error:
        shared.create(owner, name, {}, arrays(0))
      assert error.value.field == 'name'
      continue
    adapter, _ = shared.create(owner, name, {'name': name}, arrays(0))
    assert shared.adapters(owner) == [*before, adapter]
    assert shared.by_name(owner, name) == shared.adapter(owner, adapter.id) == adapter
    made[adapter.id] = adapter
    for other in made.values():
      assert (other.owner == owner) == (other in shared.adapters(owner))
  for adapter in made.values():
    shared.delete(adapter.owner, adapter.id)
  assert all(
    entry.key in ('BASE', 'LOCK', 'STAMP') or versions.parse_key(entry.key) is not None for entry in shared.blobs.list()
  )


def test_two_adapters_of_one_name_are_not_made_at_once(store):
  start = threading.Barrier(4)

  def create(seed):
    start.wait()
    try:
      return store.create('ada', 'mine', {}, arrays(seed))[0]
    except NameTaken as error:
      assert 'There is an adapter' in str(error)
      return None

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    made = [adapter for adapter in pool.map(create, range(4)) if adapter is not None]
  assert made == store.adapters('ada') and len(made) == 1


def test_nobody_else_may_look_into_the_folders(tmp_path, store):
  for folder in ('root', 'database'):
    assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
  assert stat.S_IMODE((tmp_path / 'database' / 'store.sqlite').stat().st_mode) == 0o600


def test_a_root_that_cannot_be_is_said(tmp_path):
  (tmp_path / 'file').write_text('')
  for root, why in ((tmp_path / 'file', 'cannot be'), ('ftp://host/x', 'cannot be opened')):
    with pytest.raises(UserError, match=why):
      Store.open(str(root), tmp_path / 'db' / 'x', base=store_cases.tiny_base())
  with pytest.raises(UserError, match='database=.* cannot be'):
    Store.open(str(tmp_path / 'root'), tmp_path / 'file' / 'x', base=store_cases.tiny_base())
  (tmp_path / 'root' / 'BASE').write_text('{}')
  with pytest.raises(UserError, match='BASE is damaged'):
    Store.open(str(tmp_path / 'root'), tmp_path / 'db' / 'x', base=store_cases.tiny_base())


def test_manifests_say_what_sha256sum_says(store, tmp_path):
  adapter, version = store.create('ada', 'mine', {}, arrays(0))
  folder = tmp_path / 'root' / folder_of(store, adapter) / 'versions' / versions.version_folder(0, version.digest)
  content = (folder / 'manifest.json').read_bytes()
  assert hashlib.sha256(content).hexdigest() == version.digest
  listed = json.loads(content)['files']
  assert listed == {
    path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.name in listed
  }
  assert len(listed) == 2 and StorageFailed.status == 503
