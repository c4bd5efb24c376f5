"""Digests of state: the formula in plain integers, flips of single bits, every sharding alike."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sdpo_jax.training.checkpoint import digests
from tests import compiling

DTYPES = ('float32', 'bfloat16', 'float16', 'float8_e4m3fn', 'int32', 'uint32', 'int8', 'uint8', 'int16', 'bool')
ONES = 2**32 - 1


def scrambled(number: int) -> int:
  number = (number ^ number >> 16) * 0x7FEB352D & ONES
  number = (number ^ number >> 15) * 0x846CA68B & ONES
  return number ^ number >> 16


def term(word: int, position: int, high: int, lane: int) -> int:
  """Return the module's formula in Python's integers."""
  spread, offset, first, second = digests.CONSTANTS[lane]
  word = (word ^ (scrambled(position) * spread + offset & ONES)) * first & ONES
  word = ((word ^ word >> 15) + high & ONES) * second & ONES
  return word ^ word >> 16


def undone(value: int, position: int, high: int, lane: int) -> int:
  """Return the inverse of `term` for a position."""
  spread, offset, first, second = digests.CONSTANTS[lane]
  value ^= value >> 16
  value = (value * pow(second, -1, 2**32) - high) & ONES
  value ^= value >> 15 ^ value >> 30
  return (value * pow(first, -1, 2**32) & ONES) ^ (scrambled(position) * spread + offset & ONES)


def slow_sums(words: list[list[int]]) -> list[int]:
  """Return the sums of an array of which each element has these words."""
  flat = list(itertools.chain.from_iterable(words))
  return [sum(term(word, place, 0, lane) for place, word in enumerate(flat)) & ONES for lane in range(digests.LANES)]


def bits_of(array: np.ndarray) -> list[list[int]]:
  """Return the words of each element, read byte by byte."""
  width = array.dtype.itemsize
  raw = array.tobytes()
  elements = [raw[start : start + width] for start in range(0, len(raw), width)]
  return [[int.from_bytes(raw[at : at + 4], 'little') for at in range(0, width, 4)] for raw in elements]


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
  """Any bits, NaN among them."""
  kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
  raw = np.random.default_rng(seed).bytes(math.prod(shape) * kind.itemsize)
  return (
    np.frombuffer(raw, np.uint8).astype(bool).reshape(shape)
    if dtype == 'bool'
    else np.frombuffer(raw, kind).reshape(shape)
  )


def whole_sums(array: np.ndarray) -> np.ndarray:
  return digests.block_sums(array, (0,) * array.ndim, array.shape)


def sums_of(*arrays: np.ndarray) -> np.ndarray:
  leaves = [jnp.asarray(array) for array in arrays]
  return np.asarray(digests.program(leaves)(leaves))


def test_sums_are_those_of_the_formula():
  shapes = ((3, 5), (), (0, 4), (7,), (2, 3, 4))
  arrays = [random_bits(dtype, shapes[place % len(shapes)]) for place, dtype in enumerate(DTYPES)]
  for array, row in zip(arrays, sums_of(*arrays), strict=True):
    expected = slow_sums(bits_of(array))
    assert row.tolist() == expected, array.dtype
    assert whole_sums(array).tolist() == expected


@pytest.mark.parametrize('dtype', ['float64', 'int64'])
def test_elements_of_eight_bytes_are_two_words(dtype):
  array = random_bits(dtype, (3, 5))
  assert whole_sums(array).tolist() == slow_sums(bits_of(array))
  with jax.enable_x64(True):
    assert sums_of(array)[0].tolist() == slow_sums(bits_of(array))


def test_a_typed_key_is_its_data():
  key = jax.random.key(7)
  data = np.asarray(jax.random.key_data(key))
  assert digests.leaf_digests({'rng': key}) == digests.leaf_digests({'rng': jnp.asarray(data)})


def test_terms_can_be_undone_so_that_no_change_of_a_word_is_without_effect():
  generator = np.random.default_rng(0)
  words = [0, 1, ONES, 2**31, *map(int, generator.integers(0, 2**32, 50))]
  for lane, position, high in itertools.product(range(digests.LANES), (0, 1, 2**32 - 1, 123_456_789), (0, 0xDEADBEEF)):
    assert [undone(term(word, position, high, lane), position, high, lane) for word in words] == words
  assert len({scrambled(number) for number in range(2**16)}) == 2**16


def test_every_flipped_bit_changes_every_lane_and_every_swap_the_digest():
  array = random_bits('bfloat16', (4, 5))
  raw = array.tobytes()
  versions = [array]
  for bit in range(8 * len(raw)):
    flipped = bytearray(raw)
    flipped[bit // 8] ^= 1 << bit % 8
    versions.append(np.frombuffer(bytes(flipped), array.dtype).reshape(array.shape))
  whole, *others = (whole_sums(version) for version in versions)
  assert all((whole != sums).all() for sums in others)
  wide = np.arange(40, dtype=np.float32).reshape(8, 5)
  swapped = []
  for left, right in itertools.combinations(range(wide.size), 2):
    copy = wide.reshape(-1).copy()
    copy[[left, right]] = copy[[right, left]]
    swapped.append(whole_sums(copy))
  assert all((whole_sums(wide) != sums).any() for sums in swapped)


def test_shape_dtype_and_path_are_part_of_the_digest():
  zeros = [jnp.zeros(shape, dtype) for shape in ((2, 6), (3, 4), (12,), (12, 1)) for dtype in (jnp.float32, jnp.int32)]
  found = digests.leaf_digests({str(place): leaf for place, leaf in enumerate(zeros)})
  assert len(set(found.values())) == len(zeros)
  assert digests.state_digest({'a': '1', 'b': '2'}) == digests.state_digest({'b': '2', 'a': '1'})
  assert digests.state_digest({'a': '1', 'b': '2'}) != digests.state_digest({'a': '2', 'b': '1'})


def test_blocks_of_an_array_add_up_to_it(monkeypatch):
  array = random_bits('float32', (5, 7, 3))
  monkeypatch.setattr(digests, 'BLOCK', 11)
  for sizes in ((2, 3, 2), (5, 7, 1), (1, 1, 3), (4, 7, 3)):
    origins = itertools.product(*(range(0, length, size) for length, size in zip(array.shape, sizes, strict=True)))
    parts = []
    for origin in origins:
      place = tuple(slice(start, start + size) for start, size in zip(origin, sizes, strict=True))
      parts.append(digests.block_sums(array[place], origin, array.shape))
    assert np.sum(parts, axis=0, dtype=np.uint32).tolist() == slow_sums(bits_of(array))
  line = random_bits('int8', (50,))
  parts = [digests.block_sums(line[at : at + 23], (at,), line.shape) for at in range(0, 50, 23)]
  assert np.sum(parts, axis=0, dtype=np.uint32).tolist() == slow_sums(bits_of(line))


def test_positions_of_a_huge_array_are_two_words():
  """2^33 elements are not made: two blocks of them are, at the end of the low word and after it."""
  shape = (8, 2**15, 2**15)
  values = random_bits('float32', (1, 1, 4))
  for start in (2**32 - 4, 2**30 * 5 + 3):
    expected = []
    for lane in range(digests.LANES):
      places = [divmod(start + place, 2**30) for place in range(4)]
      words = [word for [word] in bits_of(values)]
      terms = [term(word, low, scrambled(high), lane) for word, (high, low) in zip(words, places, strict=True)]
      expected.append(sum(terms) & ONES)
    assert digests.block_sums(values, np.unravel_index(start, shape), shape).tolist() == expected
  with pytest.raises(ValueError, match='too large'):
    digests.block_sums(values[0, 0], (0,), (2**33,))


def test_the_words_of_positions_are_the_same_on_devices(monkeypatch):
  """With a smaller word, so that an array of two words of positions is small."""
  array = random_bits('float32', (6, 4, 5))
  monkeypatch.setattr(digests, 'leading_axes', lambda shape, words: 1)
  assert np.asarray(digests.leaf_sums(jnp.asarray(array))).tolist() == whole_sums(array).tolist()


def test_other_elements_are_refused():
  for dtype in ('int4', 'complex64'):
    with pytest.raises(TypeError, match=f'dtype {dtype} cannot be digested'):
      digests.leaf_sums(jnp.zeros(3, dtype))


def test_every_sharding_has_the_same_digest_and_no_copy_is_made():
  devices = np.array(jax.devices()[:8]).reshape(2, 4)
  mesh = jax.sharding.Mesh(devices, ('a', 'b'))
  arrays = [random_bits('float32', (6, 16, 256)), random_bits('bfloat16', (16, 512)), random_bits('int32', ())]
  alone = digests.leaf_digests([jnp.asarray(array) for array in arrays])
  for axes in ((None, 'a', 'b'), ('a', None, 'b'), (None, ('b', 'a')), ()):
    placed = []
    for array in arrays:
      spec = jax.sharding.PartitionSpec(*axes[-array.ndim :] if array.ndim else ())
      placed.append(jax.device_put(array, jax.sharding.NamedSharding(mesh, spec)))
    assert digests.leaf_digests(placed) == alone
  compiled = compiling.compile_as_users(digests.program(placed).lower(placed))
  assert compiled.memory_analysis().temp_size_in_bytes < 10_000 < sum(array.nbytes for array in arrays)
