"""The store on an object store: an S3 server whose answers may be lost, and two processes that know nothing of each
other.
"""

from __future__ import annotations

import itertools

import pytest

from sdpo_jax.serving.errors import NotFound, StorageFailed, VersionConflict
from sdpo_jax.serving.store import versions
from sdpo_jax.serving.store.store import Store
from tests.serving.store import s3_store, store_cases
from tests.serving.store.store_cases import arrays, assert_same


@pytest.fixture
def server():
  with s3_store.S3() as server:
    yield server


def open_remote(server, folder, **more):
  more = {'base': store_cases.tiny_base()} | server.options | more
  return Store.open('s3://bucket/some/prefix', folder / 'store.sqlite', **more)


def test_another_machine_goes_on_from_the_root(server, tmp_path):
  with open_remote(server, tmp_path / 'one') as store:
    adapter, first = store.create('ada', 'mine', {'x': 1}, arrays(0))
    second = store.commit('ada', adapter.id, 0, arrays(1), reason='feedback', details={})
    store.change_settings('ada', adapter.id, 1, {'x': 2})
    gone, _ = store.create('ada', 'gone', {}, arrays(2))
    store.delete('ada', gone.id)
  with open_remote(server, tmp_path / 'other') as store:
    assert store.versions('ada', adapter.id) == [first, second]
    assert store.adapters('ada') == [store.adapter('ada', adapter.id)]
    assert store.adapter('ada', adapter.id).settings == {'x': 2}
    for version, seed in ((first, 0), (second, 1)):
      assert_same(store.arrays(version), arrays(seed))
  assert {name.split('/')[0:2] == ['some', 'prefix'] for name in server.objects} == {True}
  assert len(server.objects) == 1 + 1 + 2 * 3 + 1  # BASE, HEAD, two versions, a tombstone.


def test_an_answer_that_is_lost_makes_nothing_twice_and_loses_nothing(server, tmp_path):
  """Of every request of a commit, the answer is lost once; the client asks again."""
  with open_remote(server, tmp_path) as store:
    adapter, _ = store.create('ada', 'mine', {}, arrays(0))
    for head in itertools.count():
      requests = itertools.count()
      server.disturb = lambda method, name, done, n=head, r=requests: 'lose' if done and next(r) == n else None
      made = store.commit('ada', adapter.id, head, arrays(head + 1), reason='feedback', details={})
      assert made.number == head + 1
      assert_same(store.arrays(made), arrays(head + 1))
      if next(requests) <= head:
        break
    assert head >= 5 and [version.number for version in store.versions('ada', adapter.id)] == list(range(head + 2))


@pytest.mark.parametrize('done', [False, True], ids=['before', 'after'])
def test_a_store_that_cannot_be_reached_is_asked_again(server, tmp_path, done):
  """From every request on, the server fails; when it is back, the version is there as a whole or not at all.

  How many requests a commit takes depends on which of them run at once, so that the decisive one may be missed.
  """
  expected = {(True, 0), (True, 1), (False, 1)} if done else {(True, 0), (False, 1)}
  with open_remote(server, tmp_path / 'one', retry_config={'max_retries': 0}) as store:
    adapter, _ = store.create('ada', 'mine', {}, arrays(0))
    outcomes, first, rounds = set(), 0, 0
    while first or outcomes != expected:
      requests, head = itertools.count(), store.adapter('ada', adapter.id).head
      server.disturb = lambda method, name, after, n=first, r=requests: 403 if after == done and next(r) >= n else None
      try:
        store.commit('ada', adapter.id, head, arrays(head + 1), reason='feedback', details={})
        failed = False
      except StorageFailed as error:
        failed = True
        assert 's3://bucket/some/prefix' in str(error) and 'retry' in str(error)
      ended = next(requests) <= first
      server.disturb = lambda *_: None
      now = store.adapter('ada', adapter.id).head
      assert now == head + 1 or failed
      outcomes.add((failed, now - head))
      for version in store.versions('ada', adapter.id):
        assert_same(store.arrays(version), arrays(version.number))
      first, rounds = (0, rounds + 1) if ended else (first + 1, rounds)
      assert outcomes <= expected and rounds < 5
  with open_remote(server, tmp_path / 'other') as again:
    assert again.versions('ada', adapter.id)[-1].number == now
    assert_same(again.arrays(again.version('ada', adapter.id, now)), arrays(now))


def test_a_put_that_conflicts_with_one_under_way_is_asked_again(server, tmp_path):
  """As S3 answers (409, ConditionalRequestConflict) while the put that is repeated has not ended."""
  with open_remote(server, tmp_path) as store:
    adapter, _ = store.create('ada', 'mine', {}, arrays(0))
    server.disturb = lambda method, name, done: 409 if method == 'PUT' and 'manifest' in name and not done else None
    with pytest.raises(StorageFailed, match='is being written: retry') as error:
      store.commit('ada', adapter.id, 0, arrays(1), reason='feedback', details={})
    assert error.value.retry_after
    server.disturb = lambda *_: None
    assert store.commit('ada', adapter.id, 0, arrays(1), reason='feedback', details={}).number == 1


def test_what_another_process_may_be_writing_is_not_removed(server, tmp_path):
  with open_remote(server, tmp_path / 'one') as store:
    adapter, _ = store.create('ada', 'mine', {}, arrays(0))
    folder = f'some/prefix/{versions.adapter_folder("ada", adapter.id)}/versions/00000001-0123456789ab'
    server.objects[f'{folder}/manifest.json'] = b'{}'
  modified = 1767225600.0  # What the server says of all objects.
  with open_remote(server, tmp_path / 'other', clock=lambda: modified + 60):
    assert f'{folder}/manifest.json' in server.objects
  with open_remote(server, tmp_path / 'other', clock=lambda: modified + 7200) as store:
    assert f'{folder}/manifest.json' not in server.objects
    assert_same(store.arrays(store.version('ada', adapter.id, 0)), arrays(0))


def test_of_two_processes_that_commit_at_once_one_loses(server, tmp_path):
  """The other one commits between what this one reads and what it writes."""
  with open_remote(server, tmp_path / 'one') as one:
    adapter, _ = one.create('ada', 'mine', {}, arrays(0))
    with open_remote(server, tmp_path / 'other') as other:
      made = []

      def between(method, name, done):
        if method == 'PUT' and name.endswith('manifest.json') and done and not made:
          made.append(None)
          made[0] = other.commit('ada', adapter.id, 0, arrays(1), reason='feedback', details={})

      server.disturb = between
      with pytest.raises(VersionConflict) as error:
        one.commit('ada', adapter.id, 0, arrays(2), reason='feedback', details={})
      server.disturb = lambda *_: None
      assert error.value.current == 1 and one.versions('ada', adapter.id)[1:] == made
      assert_same(one.arrays(made[0]), arrays(1))
      assert len(server.objects) == 1 + 1 + 2 * 3
      other.delete('ada', adapter.id)
      with pytest.raises(NotFound):
        one.change_settings('ada', adapter.id, 1, {})
