"""Places on the devices and the shelf beside them: who is where, who has to go, and that nothing is lost or changed."""

import hashlib
import pathlib

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.serving import shelf as shelves
from sdpo_jax.serving.shelf import NoPlaceError, Places, Shelf


def test_the_place_that_was_let_go_longest_ago_is_given_away_first():
  places = Places(2)
  assert places.index('a') is None and not places.full
  first, second = places.take('a'), places.take('b')
  assert places.full and places.index('b') == second.index
  assert {first.index, second.index} == {0, 1} and not first.filled and not second.filled
  with pytest.raises(NoPlaceError, match='All 2 places'):
    places.take('c')
  places.let_go('b')
  places.let_go('a')
  assert not places.full and places.index('a') == first.index  # It keeps its place until another needs it.
  assert places.take('b').filled
  third = places.take('c')
  assert third.index == first.index and not third.filled and 'a' not in places
  with pytest.raises(NoPlaceError):
    places.take('a')


def test_a_version_has_its_place_until_the_last_user_lets_go():
  places = Places(1)
  assert places.take('a').index == places.take('a').index == 0
  places.let_go('a')
  with pytest.raises(NoPlaceError):
    places.take('b')
  with pytest.raises(ValueError, match='in use'):
    places.forget('a')
  places.let_go('a')
  with pytest.raises(ValueError, match='not in use'):
    places.let_go('a')
  places.forget('a')
  places.forget('a')
  assert not places.take('a').filled  # It was forgotten.


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from('abcdef'), st.booleans()), max_size=40))
def test_two_versions_never_share_a_place(calls):
  places, users, held = Places(3), {}, {}
  for version, takes in calls:
    if takes:
      try:
        place = places.take(version)
      except NoPlaceError:
        assert sum(count > 0 for count in users.values()) == 3
        continue
      assert place.filled == (held.get(place.index) == version)
      held[place.index] = version
      users[version] = users.get(version, 0) + 1
    elif users.get(version):
      places.let_go(version)
      users[version] -= 1
    in_use = [index for index, own in held.items() if users.get(own)]
    assert len({held[index] for index in in_use}) == len(in_use)


def arrays(seed, size=64):
  draw = np.random.default_rng(seed)
  return {'a': draw.standard_normal((2, size), np.float32), 'count': np.int32(seed), 'b': draw.standard_normal(3)}


def kept(seed):
  return {name: np.array(value) for name, value in arrays(seed).items()}


def assert_is(found, seed):
  assert found.keys() == arrays(seed).keys()
  for name, expected in arrays(seed).items():
    np.testing.assert_array_equal(found[name], expected)
    assert (found[name].dtype, found[name].shape) == (np.asarray(expected).dtype, np.shape(expected))


def files(folder: pathlib.Path):
  return sorted(folder.glob('*.safetensors'))


def test_what_is_too_much_for_memory_goes_to_files_and_comes_back_as_it_was(tmp_path):
  size = sum(value.nbytes for value in kept(0).values())
  shelf = Shelf(tmp_path / 'shelf', 2 * size)
  for seed in range(4):
    shelf.put(f'v{seed}', kept(seed))
  assert shelf.memory_bytes == 2 * size and len(files(tmp_path / 'shelf')) == 2
  for seed in (0, 3, 1, 2, 0):
    assert_is(shelf.get(f'v{seed}'), seed)
    assert shelf.memory_bytes <= 2 * size
  with pytest.raises(KeyError):
    shelf.get('v9')
  with pytest.raises(ValueError, match='v3 exists already'):
    shelf.put('v3', kept(3))
  with pytest.raises(ValueError, match='read-only'):
    shelf.get('v1')['a'][0, 0] = 1
  shelf.drop('v0')
  shelf.drop('v0')
  assert 'v0' not in shelf and 'v1' in shelf
  # Nothing of it is left: what is erased is erased.
  name = hashlib.sha256(b'v0').hexdigest()[:32]
  assert not (tmp_path / 'shelf' / f'{name}.safetensors').exists()


def test_a_version_larger_than_the_memory_is_there_all_the_same(tmp_path):
  shelf = Shelf(tmp_path / 'shelf', 10)
  shelf.put('v0', kept(0))
  shelf.put('v1', kept(1))
  assert_is(shelf.get('v0'), 0)
  assert_is(shelf.get('v1'), 1)


def test_a_file_that_is_not_as_it_was_written_is_refused(tmp_path):
  shelf = Shelf(tmp_path / 'shelf', 10)
  shelf.put('v0', kept(0))
  shelf.put('v1', kept(1))
  [file] = files(tmp_path / 'shelf')
  content = bytearray(file.read_bytes())
  content[-1] ^= 1
  file.write_bytes(content)
  with pytest.raises(UserError, match='is damaged'):
    shelf.get('v0')
  file.unlink()
  with pytest.raises(UserError, match='cannot be read'):
    shelf.get('v0')


def test_a_full_disk_loses_nothing_and_is_said(tmp_path, monkeypatch):
  shelf = Shelf(tmp_path / 'shelf', 10)
  shelf.put('v0', kept(0))

  def fail(path, content):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as broken:
    broken.setattr(shelves, 'write_atomically', fail)
    with pytest.raises(UserError, match='No space left'):
      shelf.put('v1', kept(1))
    assert 'v1' not in shelf
    assert_is(shelf.get('v0'), 0)
  shelf.put('v1', kept(1))  # There is room again.
  for seed in range(2):
    assert_is(shelf.get(f'v{seed}'), seed)


def test_what_another_process_left_is_removed(tmp_path):
  first = Shelf(tmp_path / 'shelf', 10)
  first.put('v0', kept(0))
  first.put('v1', kept(1))
  second = Shelf(tmp_path / 'shelf', 10)
  assert 'v0' not in second and not files(tmp_path / 'shelf')
