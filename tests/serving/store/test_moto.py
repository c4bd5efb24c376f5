"""The store's bucket over moto, which is not ours: conditional puts as HEAD's compare-and-swap needs them, lists and
deletions.

Unlike S3, moto does not check and write at once (see `moto_store`), and never answers a put with 409. Lists of several
pages, lost answers and refusals are tested over `s3_store`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
import importlib.util

import pytest

from benchmarks.replicas import bucket
from sdpo_jax.serving.errors import NotFound, VersionConflict
from sdpo_jax.serving.store import versions
from sdpo_jax.serving.store.blobs import LostSwapError, RemoteBlobs, Tagged
from sdpo_jax.serving.store.store import Store
from tests.serving.store import store_cases
from tests.serving.store.store_cases import arrays, assert_same

if importlib.util.find_spec('moto') is None:
  pytest.skip('moto is not installed (requirements-test.txt)', allow_module_level=True)


@pytest.fixture(scope='module', autouse=True)
def moto(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch, bucket('moto', tmp_path_factory.mktemp('moto')) as names:
    for name, value in names.items():
      patch.setenv(name, value)
    yield


@pytest.fixture
def blobs(request):
  blobs = RemoteBlobs(f's3://bucket/{request.node.name}')
  yield blobs
  blobs.close()


def test_a_swap_needs_the_object_as_it_was_read(blobs):
  with pytest.raises(LostSwapError):
    blobs.swap('HEAD', b'0', Tagged(b'', {'e_tag': '"0"'}))
  assert blobs.tagged('HEAD') is None
  blobs.swap('HEAD', b'1', None)
  with pytest.raises(LostSwapError):
    blobs.swap('HEAD', b'2', None)
  first = blobs.tagged('HEAD')
  blobs.swap('HEAD', b'3', first)
  with pytest.raises(LostSwapError):
    blobs.swap('HEAD', b'4', first)
  assert first.content == b'1' and blobs.get('HEAD') == b'3'
  blobs.swap('HEAD', b'3', first)  # As after a lost answer: what is there is its own.
  blobs.delete(['HEAD'], '')
  with pytest.raises(LostSwapError):
    blobs.swap('HEAD', b'5', first)


def test_of_those_that_swap_at_once_one_wins(blobs):
  blobs.swap('HEAD', b'before', None)

  def wins(key, number, expected):
    try:
      blobs.swap(key, f'{key} {number}'.encode(), expected)
    except LostSwapError:
      return False
    return True

  with ThreadPoolExecutor(8) as pool:
    for turn in range(5):
      before = blobs.tagged('HEAD')
      assert sum(pool.map(lambda number: wins('HEAD', f'{turn} {number}', before), range(8))) == 1  # noqa: B023
      assert sum(pool.map(lambda number: wins(f'new {turn}', number, None), range(8))) == 1  # noqa: B023


def test_objects_are_made_once_and_listed_below_their_folder_until_they_are_deleted(blobs):
  blobs.put_new('a/b', {'one': b'1', 'two': b'22'}, {'last': b''})
  blobs.put_new('a/b', {'one': b'1'})  # As after a lost answer.
  with pytest.raises(FileExistsError):
    blobs.put_new('a/b', {'one': b'another'})
  blobs.put('a/bc', b'333')
  blobs.put('a/bc', b'4444')
  sizes = {'a/b/last': 0, 'a/b/one': 1, 'a/b/two': 2}
  assert {entry.key: entry.size for entry in blobs.list('a/b')} == sizes
  assert {entry.key: entry.size for entry in blobs.list()} == sizes | {'a/bc': 4}
  blobs.delete(['a/b/one', 'a/b/one', 'a/b/none', 'a/bc'], 'a')
  assert [entry.key for entry in blobs.list()] == ['a/b/last', 'a/b/two']
  with pytest.raises(FileNotFoundError):
    blobs.get('a/b/one')


@pytest.mark.slow
def test_two_stores_over_one_bucket_make_one_history(tmp_path):
  def start(name):
    return Store.open('s3://bucket/store', tmp_path / name / 'store.sqlite', base=store_cases.tiny_base())

  def step(store, head):
    return store.commit('ada', adapter.id, head, arrays(head + 1), reason='feedback', details={})

  with start('one') as one:
    adapter, first = one.create('ada', 'mine', {}, arrays(0))
    with start('other') as other:
      second = step(other, 0)
    with pytest.raises(VersionConflict) as error:
      step(one, 0)
    assert error.value.current == 1 and one.versions('ada', adapter.id) == [first, second]
    step(one, 1)
  with start('third') as store:
    found = store.versions('ada', adapter.id)
    assert [version.number for version in found] == [0, 1, 2]
    for version in found:
      assert_same(store.arrays(version), arrays(version.number))
    store.delete('ada', adapter.id)
    with pytest.raises(NotFound):
      store.adapter('ada', adapter.id)
    assert [entry.key.rpartition('/')[2] for entry in store.blobs.list('users')] == [versions.TOMBSTONE]
