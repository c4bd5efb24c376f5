"""Model directories with known SHA-256 sums: a changed file is refused by name, whatever the source of its sum."""

import hashlib
import os
import pathlib
import shutil
import subprocess

import jax
import pytest

from sdpo_jax.config import ModelConfig
from sdpo_jax.errors import UserError
from sdpo_jax.models import checksums, huggingface
from tests import tiny
from tests.training_states import flipped


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
  """Return a model in two files, saved by this program, with the companions of another."""
  folder = tmp_path_factory.mktemp('checksums')
  source = tiny.make_model(folder / 'source')
  policy, parameters = huggingface.load(source, ModelConfig(dtype='float32'))
  huggingface.save(folder / 'out', policy, parameters, source=source, dtype='float32', max_shard_bytes=20_000)
  return folder / 'out'


def test_an_export_names_the_digest_of_every_file(exported):
  names = {path.name for path in exported.iterdir()} - {checksums.SUMS}
  sums = checksums.known(exported)
  assert sums.keys() == names and len([name for name in names if name.endswith('.safetensors')]) > 1
  for name in names:
    assert sums[name] == hashlib.sha256((exported / name).read_bytes()).hexdigest()
  subprocess.run(['sha256sum', '--check', '--strict', '--quiet', checksums.SUMS], cwd=exported, check=True)
  assert huggingface.check_files(exported) == len(names)


def test_a_flipped_bit_of_any_file_is_refused(exported):
  for path in exported.iterdir():
    content = path.read_bytes()
    path.write_bytes(flipped(content, 4 * len(content) - 1))
    with pytest.raises(UserError, match=f'{path.name} is not as it was written|SHA256SUMS'):
      huggingface.check_files(exported)
    if path.name.endswith('.safetensors'):
      with pytest.raises(UserError, match=f'{path.name} is not as it was written'):
        huggingface.load(exported, ModelConfig(dtype='float32'))
    path.write_bytes(content)
  policy, parameters = huggingface.load(exported, ModelConfig(dtype='float32'))
  assert jax.tree.leaves(parameters)


def test_what_people_edit_is_said_and_not_refused(exported, tmp_path, caplog):
  shutil.copytree(exported, tmp_path / 'model')
  huggingface.load(tmp_path / 'model', ModelConfig(dtype='float32'))
  assert not caplog.text
  with (tmp_path / 'model' / 'config.json').open('a') as file:
    file.write('\n')
  huggingface.load(tmp_path / 'model', ModelConfig(dtype='float32'))
  assert caplog.text.count('config.json is not as it was written') == 1


def test_the_sums_of_an_export_are_not_those_of_its_source(exported, tmp_path):
  policy, parameters = huggingface.load(exported, ModelConfig(dtype='float32'))
  huggingface.save(tmp_path / 'again', policy, parameters, source=exported, dtype='bfloat16')
  huggingface.load(tmp_path / 'again', ModelConfig(dtype='float32'))


def test_blobs_of_the_hub_are_named_by_their_digest(exported, tmp_path):
  """The layout of the hub's cache: small files are named by a git hash, large ones by their SHA-256."""
  blobs, snapshot = tmp_path / 'blobs', tmp_path / 'snapshots' / 'main'
  blobs.mkdir()
  snapshot.mkdir(parents=True)
  for path in exported.iterdir():
    if path.name != checksums.SUMS:
      content = path.read_bytes()
      large = path.name.endswith('.safetensors')
      name = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(content).hexdigest()
      (blobs / name).write_bytes(content)
      (snapshot / path.name).symlink_to(pathlib.Path('..', '..', 'blobs', name))
  huggingface.load(snapshot, ModelConfig(dtype='float32'))
  victim = next(snapshot.glob('*.safetensors'))
  victim.resolve().write_bytes(flipped(victim.read_bytes(), 8000))
  with pytest.raises(UserError, match=f'{victim.name} is not as it was written'):
    huggingface.load(snapshot, ModelConfig(dtype='float32'))


@pytest.mark.parametrize('content', [b'hello\n', b'\xff\n', b'0123  model.safetensors\n'])
def test_sums_that_cannot_be_read_are_named(exported, tmp_path, content):
  (tmp_path / checksums.SUMS).write_bytes(content)
  with pytest.raises(UserError, match='SHA256SUMS.* restore it, or remove it to load the model unchecked'):
    checksums.known(tmp_path)


def test_sums_of_files_that_are_not_there_and_of_other_tools(exported, tmp_path):
  (tmp_path / 'a.json').write_text('{}')
  digest = hashlib.sha256(b'{}').hexdigest()
  (tmp_path / checksums.SUMS).write_text(f'{digest} *./a.json\n{digest}  model.gguf\n')
  assert checksums.known(tmp_path) == {'a.json': digest, 'model.gguf': digest}


def test_files_that_several_processes_see_are_compared_by_one_of_them():
  """Processes 0 and 1 share a disk, 2 has its own, on which one file happens to look the same."""
  names = [f'{index}.safetensors' for index in range(5)]
  shared = {name: (index, 10, 1000) for index, name in enumerate(names)}
  own = {name: (index, 10, 2000 + index) for index, name in enumerate(names[:4])} | {names[4]: shared[names[4]]}
  taken = [set(checksums.files_to_compare([shared, shared, own], process)) for process in range(3)]
  assert taken[0] | taken[1] >= set(names[:4]) and not taken[0] & taken[1]
  assert len(taken[0] & set(names[:4])) == len(taken[1] & set(names[:4])) == 2
  assert taken[2] >= set(names[:4]) and sum(names[4] in files for files in taken) == 1


def test_a_link_that_leads_to_itself_is_no_crash(exported, tmp_path):
  shutil.copytree(exported, tmp_path / 'model')
  (tmp_path / 'model' / 'loop.json').symlink_to('loop.json')
  assert huggingface.check_files(tmp_path / 'model') > 0


def test_no_sum_leads_out_of_the_directory_or_to_what_never_ends(exported, tmp_path, caplog):
  root = shutil.copytree(exported, tmp_path / 'model')
  os.mkfifo(root / 'pipe')
  (root / checksums.SUMS).write_text(
    ''.join(f'{"0" * 64}  {name}\n' for name in ('../out/config.json', '/etc/passwd', 'pipe'))
  )
  assert huggingface.check_files(root, edited=True) == 0 and not caplog.text
