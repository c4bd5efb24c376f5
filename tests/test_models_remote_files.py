"""A model in a bucket is copied once, whole or not at all. The bucket is a folder that epath takes for gs://."""

import os
import pathlib

import chex
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem
import pytest

from models import huggingface, remote_files
from models import tokenizer as tokenizers
from sdpo_jax.config import ModelConfig
from sdpo_jax.errors import UserError
from tests import tiny

ADDRESS = 'gs://here/models/tiny'


@pytest.fixture
def store(tmp_path, monkeypatch):
  """The folder that stands for gs://here; copies go to tmp_path/copies."""
  root = tmp_path / 'store'
  (root / 'models').mkdir(parents=True)

  class Store(LocalFileSystem):
    @classmethod
    def _strip_protocol(cls, path):
      return super()._strip_protocol(str(path).replace('gs://here', str(root)))

  monkeypatch.setattr(backend.fsspec_backend, 'fs', lambda path: Store(skip_instance_cache=True))
  monkeypatch.setenv(remote_files.FOLDER, str(tmp_path / 'copies'))
  remote_files.fetch.cache_clear()
  yield root
  remote_files.fetch.cache_clear()


def test_a_model_in_a_bucket_is_read_from_a_copy(store, tmp_path):
  folder = tiny.make_model(store / 'models' / 'tiny')
  (folder / 'training_args.bin').write_bytes(b'not wanted')
  _, expected = huggingface.load(folder, ModelConfig())
  _, found = huggingface.load(ADDRESS, ModelConfig())
  chex.assert_trees_all_equal(found, expected)
  assert tokenizers.load(ADDRESS).encode('a') == tokenizers.load(folder).encode('a')
  [copy] = (tmp_path / 'copies').iterdir()
  assert {path.name for path in copy.iterdir()} == {path.name for path in folder.iterdir()} - {'training_args.bin'}


def test_it_is_copied_again_only_when_it_has_changed(store):
  folder = tiny.make_model(store / 'models' / 'tiny')
  copy = huggingface.resolve(ADDRESS)
  (copy / 'model.safetensors').touch()
  before = (copy / 'model.safetensors').stat().st_mtime_ns
  remote_files.fetch.cache_clear()
  assert huggingface.resolve(ADDRESS) == copy
  assert (copy / 'model.safetensors').stat().st_mtime_ns == before
  (folder / 'README.txt').write_text('new')
  remote_files.fetch.cache_clear()
  assert (huggingface.resolve(ADDRESS) / 'README.txt').read_text() == 'new'


def test_a_copy_is_on_the_disk_before_it_has_its_name(store, tmp_path, monkeypatch):
  tiny.make_model(store / 'models' / 'tiny')
  synced, named = [], tmp_path / 'copies' / 'gs_here_models_tiny'

  def note(descriptor):
    synced.append((named.exists(), pathlib.Path(os.readlink(f'/proc/self/fd/{descriptor}')).name))

  monkeypatch.setattr(os, 'fsync', note)
  copy = huggingface.resolve(ADDRESS)
  assert copy == named
  assert {name for exists, name in synced if not exists} >= {path.name for path in copy.iterdir()}
  assert synced[-1] == (True, 'copies')


def test_a_copy_that_fails_leaves_nothing_behind(store, tmp_path, monkeypatch):
  tiny.make_model(store / 'models' / 'tiny')

  def fail(*_, **__):
    raise OSError('No space left on device')

  monkeypatch.setattr(backend.fsspec_backend, 'copy', fail)
  with pytest.raises(UserError, match=r'could not be copied .* \(No space left on device\): make room'):
    huggingface.resolve(ADDRESS)
  assert list((tmp_path / 'copies').iterdir()) == []


@pytest.mark.parametrize('address', ['gs://here/models/none', 'gs://here/models'])
def test_what_is_no_model_is_named(store, address):
  with pytest.raises(UserError, match=rf'model\.path={address} (cannot be read|holds no model)'):
    huggingface.resolve(address)
