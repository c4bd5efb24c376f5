"""Optimizer state beside the versions: the newest and pinned ones have it, it is whole or none, and it never serves."""

from __future__ import annotations

import json
import logging
import random

import numpy as np
import pytest

from sdpo_jax.serving.errors import Damaged, Gone, NotFound, StorageFailed
from sdpo_jax.serving.store import versions
from sdpo_jax.serving.store.store import Retained, Retention
from tests.serving.store import store_cases
from tests.serving.store.store_cases import arrays, assert_same, open_store, state

DAY = 86400.0


class Clock:
  now = 1e9

  def __call__(self) -> float:
    return self.now


@pytest.fixture
def store(tmp_path):
  with open_store(tmp_path) as opened:
    yield opened


def step(store, adapter, seed, *, average=True, **more):
  """Commit the next version of an adapter, and wait until its state is written."""
  head = store.adapter('ada', adapter.id).head
  more = {'reason': 'feedback', 'details': {}} | more
  made = store.commit('ada', adapter.id, head, arrays(seed), **more)
  if made.reason == 'feedback':
    store.keep_optimizer_state(made, state(seed, average)).result()
  return made


def adapter_of(store, name='mine'):
  return store.create('ada', name, {}, seed=0)[0]


def files(store, adapter):
  """Return the names of the files of each version, by its number."""
  found = {}
  for entry in store.blobs.list(versions.adapter_folder('ada', adapter.id)):
    key = versions.parse_key(entry.key)
    if key.number is not None:
      found.setdefault(key.number, set()).add(key.rest.rpartition('/')[2])
  return found


def path_of(tmp_path, version, file=versions.MOMENTS):
  folder = versions.adapter_folder('ada', version.adapter)
  return tmp_path / 'root' / folder / 'versions' / versions.version_folder(version.number, version.digest) / file


def assert_state(store, version, moments, average=None):
  """Check that the state of a version is that of these seeds; None: zeros, or no average."""
  found, expected = store.optimizer_state(version), {}
  if moments is not None:
    expected |= {name: array for name, array in state(moments).items() if not name.startswith('average')}
  if average is not None:
    expected |= {name: array for name, array in state(average).items() if name.startswith('average')}
  assert_same(dict(found.arrays), expected)
  return found


BARE = {'manifest.json'}
WHOLE = {*BARE, 'adapter_config.json', 'adapter_model.safetensors'}
STATE = {versions.MOMENTS, versions.AVERAGE}


def test_only_the_newest_version_and_pinned_ones_have_a_state(tmp_path, store):
  adapter = adapter_of(store)
  assert_state(store, store.version('ada', adapter.id, 0), None)
  step(store, adapter, 1)
  step(store, adapter, 2)
  with pytest.raises(NotFound):
    store.change_settings('ada', adapter.id, 2, {'pinned_versions': [3]})
  store.change_settings('ada', adapter.id, 2, {'pinned_versions': [1, 2]})
  third, fourth = step(store, adapter, 3), step(store, adapter, 4, average=False)
  assert files(store, adapter) == {0: BARE, 1: WHOLE, 2: WHOLE | STATE, 3: WHOLE, 4: WHOLE | {versions.MOMENTS}}
  store.close()
  with open_store(tmp_path) as again:
    second = again.version('ada', adapter.id, 2)
    found = assert_state(again, fourth, 4)  # It has moments, so that no older average is taken.
    assert (found.moments_of, found.average_of) == (4, None)
    assert_state(again, third, 2, 2)
    assert_state(again, again.version('ada', adapter.id, 1), None)
    undone = step(again, adapter, 2, reason='undo', parent=2)
    assert_state(again, undone, 2, 2)
    undone = step(again, adapter, 0, reason='undo', parent=0)
    assert_state(again, undone, None)
    for version, seed in ((second, 2), (third, 3), (fourth, 4)):
      assert_same(again.arrays(version), arrays(seed))


def test_a_state_that_was_not_written_is_that_of_an_ancestor_or_zeros(tmp_path, store):
  adapter = adapter_of(store)
  step(store, adapter, 1)
  made = [store.commit('ada', adapter.id, n, arrays(n + 1), reason='feedback', details={}) for n in (1, 2)]
  found = assert_state(store, made[1], 1, 1)
  assert (found.moments_of, found.average_of) == (1, 1)
  path_of(tmp_path, store.version('ada', adapter.id, 1)).unlink()
  found = assert_state(store, made[1], None, 1)
  assert (found.moments_of, found.average_of) == (None, 1)


def test_damage_is_noticed_and_another_versions_state_is_not_taken(tmp_path, store, caplog):
  """Whatever is done to a file, the state is what was written, or that of an ancestor; factors are untouched."""
  adapter, other = adapter_of(store), adapter_of(store, 'other')
  first = step(store, adapter, 1)
  store.change_settings('ada', adapter.id, 1, {'pinned_versions': [1]})
  second, his = step(store, adapter, 2), step(store, other, 3)
  path = path_of(tmp_path, second)
  content, draw, noticed = path.read_bytes(), random.Random(0), 0
  damages = [bytearray(content) for _ in range(60)]
  for damage in damages:
    damage[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
  for damage in (*damages, b'', content[:-1], content + b' ', path_of(tmp_path, first).read_bytes(), b'{}' * 100):
    path.write_bytes(damage)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
      of = store.optimizer_state(second).moments_of
    assert_state(store, second, of, 2)
    assert (of == 1) == ('moments.safetensors cannot be used' in caplog.text)
    noticed += of == 1
  assert noticed >= 60  # A flip in the padding of the header changes nothing.
  path.write_bytes(path_of(tmp_path, his).read_bytes())
  assert_state(store, second, 1, 2)
  assert_same(store.arrays(second), arrays(2))


def test_states_that_cannot_be_written_yet_are_there_and_are_tried_again(tmp_path, store, monkeypatch):
  adapter = adapter_of(store)
  step(store, adapter, 1)

  def fail(*_):
    raise StorageFailed('The disk is full.')

  with monkeypatch.context() as patched:
    patched.setattr(store.blobs, 'put', fail)
    second = step(store, adapter, 2)
    third = step(store, adapter, 3)
    assert_state(store, third, 3, 3)
    assert_state(store, second, 1, 1)  # The newer one has taken its place.
  store.retain()
  store.close()
  with open_store(tmp_path) as again:
    assert_state(again, third, 3, 3)
    assert files(again, adapter)[1] == files(again, adapter)[2] == WHOLE


def test_states_that_cannot_be_written_are_given_up_when_there_are_too_many(store, monkeypatch, caplog):
  def fail(*_):
    raise StorageFailed('The disk is full.')

  made = [step(store, adapter_of(store, str(index)), 1) for index in range(2)]
  monkeypatch.setattr(store.blobs, 'put', fail)
  for index in range(2, 14):
    made.append(step(store, adapter_of(store, str(index)), 1))
  assert store.stats['waiting_states'] == 8 and 'is given up' in caplog.text
  assert [store.optimizer_state(version).moments_of for version in made] == [1, 1, *[None] * 4, *[1] * 8]
  monkeypatch.undo()


def test_a_pinned_version_does_not_lose_a_state_that_waits(store, monkeypatch):
  adapter = adapter_of(store)
  with monkeypatch.context() as patched:
    patched.setattr(store._writer, 'submit', lambda *_: None)  # noqa: SLF001 (It is slow.)
    second = [store.commit('ada', adapter.id, n, arrays(n), reason='feedback', details={}) for n in (0, 1)][1]
    store.keep_optimizer_state(second, state(2))
    store.change_settings('ada', adapter.id, 2, {'pinned_versions': [2]})
  step(store, adapter, 3)
  assert_state(store, second, 2, 2)


def test_an_adapter_that_learns_all_the_time_is_shrunk_between_two_passes(tmp_path):
  with open_store(tmp_path, retention=Retention(keep_versions=3)) as store:
    adapter, most = adapter_of(store), 0
    for seed in range(1, 25):
      step(store, adapter, seed)
      most = max(most, len(store.versions('ada', adapter.id)))
    assert most <= 2 + 2 * 3 + 1 and store.versions('ada', adapter.id)[-1].number == 24
    assert sorted(files(store, adapter)) == [version.number for version in store.versions('ada', adapter.id)]


def test_one_adapter_that_cannot_be_shrunk_does_not_keep_others_from_it(tmp_path, monkeypatch):
  with open_store(tmp_path, retention=Retention(keep_versions=1)) as store:
    bad, good = adapter_of(store, 'bad'), adapter_of(store, 'good')
    for adapter in (bad, good):
      for number in range(3):
        store.commit('ada', adapter.id, number, arrays(1), reason='feedback', details={})
    delete = store.blobs.delete

    def fails(keys, below):
      if bad.id in below:
        raise StorageFailed('The disk is broken.')
      delete(keys, below)

    monkeypatch.setattr(store.blobs, 'delete', fails)
    with pytest.raises(StorageFailed):
      store.retain()
    assert sorted(files(store, good)) == [0, 2, 3]
    monkeypatch.undo()


def test_many_states_wait_only_while_there_is_room(store, monkeypatch):
  adapters = [adapter_of(store, str(index)) for index in range(12)]
  put, waiting = store.blobs.put, []
  monkeypatch.setattr(store.blobs, 'put', lambda *item: (waiting.append(len(store._states)), put(*item)))  # noqa: SLF001
  made = [store.commit('ada', adapter.id, 0, arrays(1), reason='feedback', details={}) for adapter in adapters]
  for version in made:
    store.keep_optimizer_state(version, state(1))
  for version in made:
    assert_state(store, version, 1, 1)
  store.close()
  assert max(waiting) <= 9 and not store._states  # noqa: SLF001


def test_a_state_of_a_deleted_adapter_leaves_nothing(store, monkeypatch):
  """It is deleted while its state is written: before the file is there, and after."""
  put = store.blobs.put
  for when in ('before', 'after', 'within'):
    adapter = adapter_of(store, f'deleted {when}')

    def between(*item, of=adapter, when=when):
      if when == 'before':
        store.delete('ada', of.id)
      if when == 'within':  # The deletion has listed the files, and has not ended yet.
        with store.database.writing() as rows:
          store.database.mark_deleted(rows, of.id)
      put(*item)
      if when == 'after':
        store.delete('ada', of.id)

    with monkeypatch.context() as patched:
      patched.setattr(store.blobs, 'put', between)
      step(store, adapter, 1)
    if when == 'within':
      assert not any(name in STATE for names in files(store, adapter).values() for name in names)
      continue
    left = [entry.key.rpartition('/')[2] for entry in store.blobs.list(versions.adapter_folder('ada', adapter.id))]
    assert left == [versions.TOMBSTONE]


def test_idle_adapters_keep_their_newest_and_pinned_versions_without_moments(tmp_path):
  clock, retention = Clock(), Retention(keep_versions=3, idle_s=14 * DAY)
  with open_store(tmp_path, clock=clock, retention=retention) as store:
    adapter, busy = adapter_of(store), adapter_of(store, 'busy')
    for seed in range(1, 4):
      step(store, adapter, seed)
    store.change_settings('ada', adapter.id, 3, {'pinned_versions': [1]})
    newest = step(store, adapter, 4)
    clock.now += 14 * DAY - 1
    step(store, busy, 1)
    assert store.retain() == Retained(0, 0, 0)
    clock.now += 2
    assert store.retain() == Retained(2, 0, 0)
    assert files(store, adapter) == {0: BARE, 1: WHOLE, 4: WHOLE | {versions.AVERAGE}}
    assert files(store, busy)[1] == WHOLE | STATE
    assert_state(store, newest, None, 4)
    for number in (0, 1, 4):
      assert store.version('ada', adapter.id, number).number == number
    with pytest.raises(Gone, match='Version 3 .* was removed: version 0, those from 4 on and pinned ones are kept'):
      store.version('ada', adapter.id, 3)
    listed = []
    real, store.blobs.list = store.blobs.list, lambda *prefix: listed.append(prefix) or real(*prefix)
    assert store.retain() == Retained(0, 0, 0) and listed == []  # It is not looked at again until it changes.
    store.blobs.list = real
    step(store, adapter, 5)
    assert files(store, adapter)[5] == WHOLE | STATE
    store.change_settings('ada', adapter.id, 5, {'pinned_versions': []})
    with pytest.raises(Gone):
      store.version('ada', adapter.id, 1)
    assert 1 not in files(store, adapter)
    step(store, adapter, 6), step(store, adapter, 7), step(store, adapter, 8)
    store.retain()
    assert sorted(files(store, adapter)) == [0, 5, 6, 7, 8]


def test_pinned_versions_are_known_without_the_database(tmp_path):
  with open_store(tmp_path, retention=Retention(keep_versions=1)) as store:
    adapter = adapter_of(store)
    for seed in (1, 2):
      step(store, adapter, seed)
    store.change_settings('ada', adapter.id, 2, {'pinned_versions': [1, 2]})
    for seed in (3, 4, 5):
      step(store, adapter, seed)
    store.retain()
    kept = store.versions('ada', adapter.id)
    assert [version.number for version in kept] == [0, 1, 2, 4, 5]
  (tmp_path / 'database' / 'store.sqlite').unlink()
  with open_store(tmp_path, retention=Retention(keep_versions=1)) as again:
    assert again.versions('ada', adapter.id) == kept and again.problems == []
    assert_state(again, kept[2], 2, 2)
    assert_same(again.arrays(kept[1]), arrays(1))


def test_moments_may_be_stored_in_bfloat16_or_not_at_all(tmp_path):
  sizes = {}
  for dtype in ('float32', 'bfloat16', 'none'):
    with open_store(tmp_path / dtype, retention=Retention(moments=dtype)) as store:
      made = step(store, adapter_of(store), 1)
      found = store.optimizer_state(made)
      sizes[dtype] = sum(entry.size for entry in store.blobs.list() if entry.key.endswith(versions.MOMENTS))
      if dtype == 'none':
        assert found.moments_of is None and found.average_of == 1
        continue
      for name, array in found.arrays.items():
        exact = dtype == 'float32' or name.startswith('average') or name == 'count'
        np.testing.assert_allclose(array, state(1)[name], rtol=0 if exact else 2**-8)
  numbers = 2 * sum(np.prod(shape, dtype=int) for shape in store_cases.tiny_base().shapes.values())
  assert sizes['float32'] - sizes['bfloat16'] == pytest.approx(2 * numbers, abs=64) and sizes['none'] == 0


def test_a_version_from_a_seed_has_no_files_and_is_checked(tmp_path, store, monkeypatch):
  adapter, version = store.create('ada', 'mine', {}, seed=7)
  twin, _ = store.create('ada', 'twin', {}, versions.fresh(store.base.adapter, store.base.rows, 7))
  assert files(store, adapter) == {0: BARE} and files(store, twin) == {0: WHOLE}
  listed = json.loads(path_of(tmp_path, version, versions.MANIFEST).read_bytes())
  twins = store.version('ada', twin.id, 0)
  assert listed['seed'] == 7 and store.peft_files(version) == store.peft_files(twins)
  assert_same(store.arrays(version), store.arrays(twins))
  for name, array in store.arrays(version).items():
    assert (not array.any()) == name.endswith('_b') or 'down' in name
  real = versions.fresh
  monkeypatch.setattr(versions, 'fresh', lambda adapter, rows, seed: real(adapter, rows, seed + 1))
  with pytest.raises(Damaged, match='version 0 is not stored but drawn from a seed, and this version of NumPy'):
    store.arrays(version)
