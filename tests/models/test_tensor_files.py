"""Damaged tensor files are refused by name, and the safetensors library reads what is written."""

import hashlib
import json
import weakref

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from sdpo_jax.errors import UserError
from sdpo_jax.models import stored_tensors, tensor_files
from sdpo_jax.models.tensor_files import TensorFile, TensorPart


def encoded(header, data=b'', length=None):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return (len(text) if length is None else length).to_bytes(8, 'little') + text + data


def entry(*offsets, shape=(2,), dtype='F32'):
  return {'dtype': dtype, 'shape': list(shape), 'data_offsets': list(offsets)}


DAMAGES = {
  'empty': (b'', 'it has 0 bytes'),
  'no header': (b'\x10\0\0\0\0\0\0\0{', 'its header should have 16 bytes, but the file has 9'),
  'a header without end': (encoded(b'{}', length=2**63), 'its header should have 9223372036854775808 bytes'),
  'no JSON': (encoded(b'{"a"'), 'its header is not JSON'),
  'no text': (encoded(b'\xff\xff'), 'its header is not JSON'),
  'a list': (encoded([]), 'its header is not a JSON object'),
  'an entry without shape': (encoded({'a': {'dtype': 'F32', 'data_offsets': [0, 8]}}, bytes(8)), "tensor 'a' as"),
  'an entry that is a number': (encoded({'a': 1}), "describes tensor 'a' as 1"),
  'a negative size': (encoded({'a': entry(0, 8, shape=(-2,))}, bytes(8)), "describes tensor 'a'"),
  'too few bytes': (encoded({'a': entry(0, 4)}, bytes(4)), r"'a' of F32 \(2,\) cannot have 4 bytes"),
  'backwards': (encoded({'a': entry(8, 0)}, bytes(8)), 'cannot have -8 bytes'),
  'cut off': (encoded({'a': entry(0, 8)}, bytes(7)), 'it was cut off'),
  'something behind': (encoded({'a': entry(0, 8)}, bytes(9)), 'its tensors end at byte'),
  'a hole': (encoded({'a': entry(0, 8), 'b': entry(16, 24)}, bytes(24)), "tensor 'b' begins at byte"),
  'an overlap': (encoded({'a': entry(0, 8), 'b': entry(4, 12)}, bytes(12)), "tensor 'b' begins at byte"),
}


@pytest.mark.parametrize('content, message', DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_as_the_library_refuses_it(content, message, tmp_path):
  path = tmp_path / 'model.safetensors'
  path.write_bytes(content)
  with pytest.raises(SafetensorError), safe_open(path, framework='numpy') as file:
    file.keys()
  with pytest.raises(UserError, match=message) as error:
    TensorFile(path)
  assert str(error.value).startswith(f'{path} is damaged or not a safetensors file')


def test_a_name_that_occurs_twice_is_refused(tmp_path):
  """The safetensors library would take the last one."""
  one = json.dumps(entry(0, 8)).encode()
  (tmp_path / 'a.safetensors').write_bytes(encoded(b'{"a":%b,"a":%b}' % (one, one), bytes(8)))
  with pytest.raises(UserError, match='a name occurs twice'):
    TensorFile(tmp_path / 'a.safetensors')


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
  save_file({'a': np.zeros(3, np.float32), 'b': np.zeros((2, 2), np.float16)}, tmp_path / 'whole')
  content = (tmp_path / 'whole').read_bytes()
  for length in range(len(content)):
    (tmp_path / 'cut').write_bytes(content[:length])
    with pytest.raises(UserError, match='cut is damaged or not a safetensors file'):
      TensorFile(tmp_path / 'cut')
  with TensorFile(tmp_path / 'whole') as file:
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {'a': (3,), 'b': (2, 2)}


def test_a_file_that_becomes_shorter_is_named(tmp_path):
  save_file({'a': np.zeros((100, 10), np.float32)}, tmp_path / 'a.safetensors')
  with TensorFile(tmp_path / 'a.safetensors') as file:
    with (tmp_path / 'a.safetensors').open('r+b') as writer:
      writer.truncate(1000)
    with pytest.raises(UserError, match=r'a\.safetensors became shorter while it was read'):
      file.tensors['a'].rows((0, 100))


def test_types_and_empty_tensors_that_the_format_has_are_no_damage(tmp_path):
  arrays = {'a': np.zeros(3, np.int8), 'b': np.zeros((0, 4), np.float64), 'c': np.zeros((), bool)}
  save_file(arrays, tmp_path / 'a.safetensors')
  (tmp_path / 'b.safetensors').write_bytes(encoded({'d': entry(0, 3, dtype='OF_THE_FUTURE')}, bytes(3)))
  with TensorFile(tmp_path / 'a.safetensors') as file:
    assert {tensor.dtype for tensor in file.tensors.values()} == {'I8', 'F64', 'BOOL'}
  with TensorFile(tmp_path / 'b.safetensors') as file:
    assert file.tensors['d'].dtype == 'OF_THE_FUTURE'


@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize('gap', [0, 2**16])
def test_rows_and_columns_are_those_of_the_tensor(dtype, gap, monkeypatch, tmp_path):
  monkeypatch.setattr(tensor_files, 'GAP', gap)
  array = np.random.default_rng(0).normal(size=(7, 5)).astype(dtype)
  save_file({'other': array[0].copy(), 'a': array}, tmp_path / 'a.safetensors')
  with TensorFile(tmp_path / 'a.safetensors') as file:
    tensor = file.tensors['a']
    for rows in ((0, 7), (2, 5), (6, 7), (3, 3)):
      np.testing.assert_array_equal(tensor.rows(rows), array[slice(*rows)])
      for columns in ((0, 5), (1, 4), (4, 5)):
        np.testing.assert_array_equal(tensor.rows(rows, columns), array[slice(*rows), slice(*columns)])


@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_finite_is_what_numpy_says(dtype):
  values = np.array([0.0, -0.0, 1e-8, -1.5, np.nan, -np.nan, np.inf, -np.inf], dtype)
  largest = np.array([ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min], dtype)
  for value in (*values, *largest):
    assert tensor_files.is_finite(np.full(3, value, dtype)) == bool(np.isfinite(value))
  assert tensor_files.is_finite(np.zeros((0, 3), dtype))


@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_written_is_read_by_the_library_and_only_one_tensor_is_in_memory(dtype, tmp_path):
  rng = np.random.default_rng(1)
  expected = {'a': rng.normal(size=(3, 5)).astype(dtype), 'ä "b"': rng.normal(size=7).astype(dtype)}
  made, alive = [], []

  def part(name):
    def make():
      alive.append(sum(reference() is not None for reference in made))
      array = expected[name].copy()
      made.append(weakref.ref(array))
      return array

    return TensorPart(name, expected[name].shape, make)

  digest = tensor_files.write(tmp_path / 'a.safetensors', [part(name) for name in expected], np.dtype(dtype))
  found = load_file(tmp_path / 'a.safetensors')
  assert found.keys() == expected.keys() and alive == [0, 0]
  for name, array in expected.items():
    assert found[name].dtype == dtype
    np.testing.assert_array_equal(found[name], array)
  content = (tmp_path / 'a.safetensors').read_bytes()
  assert digest == hashlib.sha256(content).hexdigest() and int.from_bytes(content[:8], 'little') % 8 == 0
  with safe_open(tmp_path / 'a.safetensors', framework='numpy') as file:
    assert file.metadata() == {'format': 'pt'}  # transformers wants to know.


FILES = {
  'model-1.safetensors': {'a': np.zeros(2, np.float32), 'b': np.ones(2, np.float32)},
  'model-2.safetensors': {'c': np.zeros(3, np.float32)},
}
MAP = {name: file for file, arrays in FILES.items() for name in arrays}


@pytest.fixture
def folder(tmp_path):
  """Return a model of two files and an index."""
  for name, arrays in FILES.items():
    save_file(arrays, tmp_path / name)
  (tmp_path / stored_tensors.INDEX).write_text(json.dumps({'metadata': {}, 'weight_map': MAP}))
  return tmp_path


def edit_map(**changes):
  return lambda folder: (folder / stored_tensors.INDEX).write_text(json.dumps({'weight_map': MAP | changes}))


def replaced(name, arrays):
  return lambda folder: save_file(arrays, folder / name)


def link(target):
  def damage(folder):
    (folder / 'model-2.safetensors').unlink()
    (folder / 'model-2.safetensors').symlink_to(target)

  return damage


INDEX_MISTAKES = {
  'a shard is missing': (
    lambda folder: (folder / 'model-2.safetensors').unlink(),
    r'index\.json names model-2\.safetensors, which is missing',
  ),
  'a link to nowhere': (
    link('../blobs/0f'),
    r"names model-2\.safetensors, a link to '\.\./blobs/0f', which does not exist",
  ),
  'a link to itself': (link('model-2.safetensors'), 'a link to .* which does not exist'),
  'a directory': (
    lambda folder: ((folder / 'model-2.safetensors').unlink(), (folder / 'model-2.safetensors').mkdir()),
    'is missing',
  ),
  'a file elsewhere': (edit_map(c='../model-2.safetensors'), r"says that 'c' is in '\.\./model-2\.safetensors', which"),
  'an absolute file': (edit_map(c='/etc/passwd'), "says that 'c' is in '/etc/passwd', which is not the name of a"),
  'a file of another kind': (edit_map(c='model.bin'), "is in 'model.bin', which is not the name of a safetensors file"),
  'no name': (edit_map(c=['model-2.safetensors']), r"says that 'c' is in \['model-2\.safetensors'\], which is not"),
  'no map': (lambda folder: (folder / stored_tensors.INDEX).write_text('{"weight_map": ["a"]}'), 'has no weight_map'),
  'no object': (lambda folder: (folder / stored_tensors.INDEX).write_text('[]'), 'does not hold a JSON object'),
  'no JSON': (lambda folder: (folder / stored_tensors.INDEX).write_text('{'), r'index\.json is not JSON'),
  'a tensor that is nowhere': (
    edit_map(d='model-1.safetensors'),
    "model-1.safetensors holds tensor 'd', but it does",
  ),
  'a tensor elsewhere': (
    edit_map(a='model-2.safetensors'),
    "says that model-2.safetensors holds tensor 'a', but it is in model-1.safetensors",
  ),
  'a tensor twice': (
    replaced('model-2.safetensors', {'b': np.zeros(2, np.float32), 'c': np.zeros(3, np.float32)}),
    "tensor 'b' is both in model-1.safetensors and in model-2.safetensors",
  ),
  'two models': (replaced('model.safetensors', FILES['model-1.safetensors']), 'holds two models, model.safetensors'),
}


@pytest.mark.parametrize('damage, message', INDEX_MISTAKES.values(), ids=INDEX_MISTAKES)
def test_an_index_and_files_that_disagree_are_named(damage, message, folder):
  damage(folder)
  with pytest.raises(UserError, match=message) as error, stored_tensors.open_tensors(folder):
    pass
  assert str(folder) in str(error.value)


def test_files_that_the_index_does_not_name_are_left_alone(folder):
  (folder / 'consolidated.safetensors').write_bytes(b'the same weights in a format of the publisher')
  with stored_tensors.open_tensors(folder) as tensors:
    assert {name: tensor.file.path.name for name, tensor in tensors.items()} == MAP
