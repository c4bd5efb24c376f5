"""An export is complete or absent, whatever ends it; several at once, or several processes, make one."""

import errno
import fcntl
import json
import os
import pathlib
import signal

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from sdpo_jax.config import MeshConfig, ModelConfig
from sdpo_jax.distributed.mesh import make_mesh, parameter_sharding
from sdpo_jax.errors import UserError
from sdpo_jax.models import exporting, file_lock, huggingface, parameters, tensor_files
from tests import forked_commands, tiny
from tests.local_server import free_port
from tests.models.exported_models import CONFIG, export_adapter


@pytest.fixture(scope='module')
def made():
  return huggingface.init(CONFIG, jax.random.key(0))


def changed(made, path, value):
  """Return the model with one entry of a parameter changed."""
  policy, params = made
  leaves = [(p.path, np.array(parameters.get(params, p.path))) for p in policy.parameter_table()]
  dict(leaves)[path].flat[3] = value
  return policy, parameters.nest(leaves)


DOWN = ('layers', 'mlp', 'down')


@pytest.mark.parametrize(
  'path, tensor', [(DOWN, 'model.layers.0.mlp.down_proj.weight'), (('embedding',), 'model.embed')]
)
def test_what_the_type_cannot_hold_is_named_and_nothing_stays(made, path, tensor, tmp_path):
  with pytest.raises(UserError, match=rf"Tensor '{tensor}.* holds values up to 7e\+04, but float16 ends at 6.55e\+04"):
    huggingface.save(tmp_path / 'out', *changed(made, path, 7e4), dtype='float16')
  assert list(tmp_path.iterdir()) == []
  huggingface.save(tmp_path / 'out', *changed(made, path, 65504.0), dtype='float16')
  huggingface.save(tmp_path / 'wide', *changed(made, path, 7e4), dtype='bfloat16')
  with pytest.raises(UserError, match='bfloat16 ends at 3.39e.38: export the model with --dtype=float32'):
    huggingface.save(tmp_path / 'over', *changed(made, path, np.finfo(np.float32).max), dtype='bfloat16')


@pytest.mark.parametrize('value', [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_not_exported(made, value, tmp_path):
  with pytest.raises(
    UserError, match=r"Tensor 'model\.layers\.0\.mlp\.down_proj\.weight' holds values that are not finite"
  ):
    huggingface.save(tmp_path / 'out', *changed(made, DOWN, value), dtype='float32')
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('shape', [(8, 1), (2, 4)], ids=str)
def test_an_export_from_a_mesh_is_that_of_one_device(made, shape, monkeypatch, tmp_path):
  """Also for an embedding that is sharded by rows and fetched in parts of 3 rows."""
  monkeypatch.setattr(exporting, 'BAND_BYTES', 4 * 16 * 3 // shape[0] * shape[0])
  policy, params = made
  mesh = make_mesh(MeshConfig(*shape), jax.devices()[:8])
  split = parameters.map_tree(
    lambda p, leaf: jax.device_put(leaf, parameter_sharding(mesh, p.axes, p.shape)), policy.parameter_table(), params
  )
  for name, tree in (('whole', params), ('split', split)):
    huggingface.save(tmp_path / name, policy, tree, dtype='float32')
  whole, found = (load_file(tmp_path / name / 'model.safetensors') for name in ('whole', 'split'))
  assert whole.keys() == found.keys()
  for name, tensor in whole.items():
    np.testing.assert_array_equal(found[name], tensor)


def test_what_a_killed_export_left_is_replaced(made, tmp_path):
  """An export that was killed while writing leaves no directory of that name, and the next one replaces its rest."""
  program = """
import os, pathlib, signal, sys
from sdpo_jax.models import exporting
with exporting.new_directory(sys.argv[1], 1) as partial:
  (partial / 'model.safetensors').write_text('half')
  os.kill(os.getpid(), signal.SIGKILL)
"""
  killed = forked_commands.run(['-c', program, str(tmp_path / 'out')], tiny.environment(quick=True))
  assert killed.returncode == -signal.SIGKILL
  assert {path.name for path in tmp_path.iterdir()} == {'out.partial', 'out.partial.lock'}
  huggingface.save(tmp_path / 'out', *made, dtype='float32')
  assert [path.name for path in tmp_path.iterdir()] == ['out']
  assert {path.name for path in (tmp_path / 'out').iterdir()} == {'SHA256SUMS', 'config.json', 'model.safetensors'}


def test_of_two_exports_to_one_place_one_is_refused(made, tmp_path):
  with exporting.new_directory(tmp_path / 'out', 1) as partial:
    (partial / 'mine').write_text('kept')
    with pytest.raises(UserError, match='Another process is writing .*out: wait until it has ended'):
      huggingface.save(tmp_path / 'out', *made)
  assert [path.name for path in (tmp_path / 'out').iterdir()] == ['mine']
  with pytest.raises(UserError, match='out already exists and is not empty'):
    huggingface.save(tmp_path / 'out', *made)


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
  """The previous process ends, and removes the lock, between opening and locking it."""
  lock, taken, flock = tmp_path / 'lock', [], fcntl.flock

  def removed_once(descriptor, how):
    if not taken:
      lock.unlink()
    taken.append(os.fstat(descriptor).st_ino)
    flock(descriptor, how)

  monkeypatch.setattr(fcntl, 'flock', removed_once)
  with file_lock.held(lock, lambda: pytest.fail('nobody holds it')):
    assert len(taken) == 2 and taken[-1] == lock.stat().st_ino
  assert not lock.exists()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(made, tmp_path, monkeypatch):
  """Before anything is written, and in the middle of it."""
  with pytest.raises(UserError, match=r'out needs [\d.]+ GB, but [\d.]+ GB are free there: make room'):
    with exporting.new_directory(tmp_path / 'out', 10**18):
      pytest.fail('it began')

  def fail(*_):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(tensor_files, 'write', fail)
  with pytest.raises(UserError, match=r'out could not be written \(.*No space left on device\): make room for 0\.0 GB'):
    huggingface.save(tmp_path / 'out', *made)
  assert list(tmp_path.iterdir()) == []


def test_places_where_no_export_can_be_are_named(made, tmp_path, monkeypatch):
  with pytest.raises(UserError, match='gs://bucket/out: models are written to local directories'):
    huggingface.save('gs://bucket/out', *made)
  with pytest.raises(UserError, match='cannot be accessed .*File name too long.*: name another directory'):
    huggingface.save(tmp_path / ('x' * 300), *made)
  (tmp_path / 'file').write_text('kept')
  with pytest.raises(UserError, match='file is a file: name a new directory'):
    huggingface.save(tmp_path / 'file', *made)
  with pytest.raises(UserError, match=r'could not be written \(.*\): name another directory'):
    huggingface.save(tmp_path / 'file' / 'out', *made)
  monkeypatch.setattr(os.path, 'ismount', lambda path: True)
  with pytest.raises(UserError, match='out is a mount point, which cannot be replaced'):
    huggingface.save(tmp_path / 'out', *made)


def test_an_empty_directory_and_a_link_to_one_are_filled(made, tmp_path):
  (tmp_path / 'disk').mkdir()
  (tmp_path / 'link').symlink_to('disk')
  huggingface.save(tmp_path / 'link', *made)
  assert (tmp_path / 'link').is_symlink() and (tmp_path / 'disk' / 'model.safetensors').is_file()
  assert {path.name for path in tmp_path.iterdir()} == {'disk', 'link'}


TOGETHER = """
import sys
import jax
from absl import flags
from sdpo_jax.models import huggingface, parameters
from sdpo_jax import command
from sdpo_jax.config import MeshConfig, ModelConfig
from sdpo_jax.distributed.mesh import make_mesh
from tests.models.exported_models import export_adapter

flags.DEFINE_string('model', '', '')
flags.DEFINE_string('output', '', '')
command.define_cluster()


def main():
  command.join_cluster()
  mesh = make_mesh(MeshConfig(), jax.devices())
  policy, params = huggingface.load(flags.FLAGS.model, ModelConfig(dtype='float32'), mesh)
  assert not params['embedding'].is_fully_addressable
  # Where there is nothing to be read or written by any other than process 0.
  output = flags.FLAGS.output if jax.process_index() == 0 else '/nowhere'
  huggingface.save(output, policy, params, dtype='float32', source=flags.FLAGS.model)
  export_adapter(output, flags.FLAGS.model, mesh)


command.run(main)
"""


@pytest.mark.slow
def test_processes_load_and_export_a_model_together(tmp_path):
  """Each process holds half of the model, and process 0 writes all of it."""
  model = tiny.make_model(tmp_path / 'model')
  port = free_port()
  flags = [
    f'--model={model}',
    f'--output={tmp_path}/out',
    f'--coordinator_address=localhost:{port}',
    '--num_processes=2',
  ]
  lines = [['-c', TOGETHER, *flags, f'--process_id={index}'] for index in range(2)]
  done = forked_commands.run_together(lines, tiny.environment(quick=True))
  assert [process.returncode for process in done] == [0, 0], done
  expected, found = (load_file(pathlib.Path(tmp_path, name, 'model.safetensors')) for name in ('model', 'out'))
  assert expected.keys() == found.keys()
  for name, tensor in expected.items():
    np.testing.assert_array_equal(found[name], tensor)
  assert huggingface.check_files(tmp_path / 'out') == len(list((tmp_path / 'out').iterdir())) - 1
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['dtype'] == 'float32'
  huggingface.load(tmp_path / 'out', ModelConfig(dtype='float32'))
  export_adapter(tmp_path / 'alone', model)
  for name in ('adapter/adapter_model.safetensors', 'merged/model.safetensors'):
    expected, found = (load_file(tmp_path / f'{start}_{name}') for start in ('alone', 'out'))
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
      np.testing.assert_array_equal(found[key], tensor)
