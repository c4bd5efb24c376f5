"""A run's directory: whatever is wrong with what it holds ends in one sentence, before anything is written."""

import errno
import json
import os

from etils import epath
import orbax.checkpoint
import pytest

from sdpo_jax.config import Config
from sdpo_jax.errors import UserError
from sdpo_jax.inference import runs
from sdpo_jax.training.checkpoint import checkpoints
from sdpo_jax.training.directory import workdir
from sdpo_jax.training.directory.lines import read_metrics


@pytest.fixture
def run(tmp_path):
  """Return the directory of a run of two steps, without its checkpoints."""
  folder = tmp_path / 'run'
  folder.mkdir()
  (folder / 'config.json').write_text(Config().to_json())
  (folder / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 2}\n')
  return folder


def test_a_run_and_a_new_directory_are_taken(run):
  before = {path.name: path.read_bytes() for path in run.iterdir()}
  assert workdir.check_workdir(Config(), run) == epath.Path(run)
  assert workdir.check_workdir(Config(), run / 'new') == epath.Path(run / 'new')
  for part in ('checkpoints/20', 'eval'):
    with pytest.raises(UserError, match=f'{part} is part of the run .*/run: name that, or a directory outside it'):
      workdir.check_workdir(Config(), run / part)
  with pytest.raises(UserError, match='--workdir=unknown://a/b is in an unknown kind of store'):
    workdir.check_workdir(Config(), 'unknown://a/b')
  assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize(
  'name, content, sentence',
  [
    ('metrics.jsonl', b'{"step": 1}\n\xff\n{"step": 2}\n', 'metrics.jsonl is not UTF-8 text .*: repair or remove it'),
    (
      'metrics.jsonl',
      b'{"step": 1}\n[2]\n{"step": 3}\n',
      r'line 2 is not an object .* but \[2\]: .* repair or remove it',
    ),
    ('metrics.jsonl', b'{"loss": 1}\n{"step": 3}\n', 'line 1 is not an object with a whole number as its step'),
    ('metrics.jsonl', b'{"step": "1"}\n{"step": 3}\n', 'line 1 is not an object with a whole number as its step'),
    (
      'metrics.jsonl',
      b'{"step": 1, "fencing_epoch": "1"}\n',
      "line 1 is not .* as its fencing_epoch if it has one, but {'fencing_epoch': '1', .* repair or remove it",
    ),
    ('metrics.jsonl', b'{"step": 1}\nhello\n{"step": 3}\n', 'line 2 is not JSON'),
    ('metrics.jsonl', b'[' * 100_000 + b'\n{"step": 3}\n', 'line 1 is not JSON'),
    ('metrics.jsonl', None, 'metrics.jsonl is a folder where the run needs a file: move it away'),
    ('config.json', b'[]', r'config.json does not hold a JSON object but \[\]: restore it'),
    ('config.json', b'{"seed": \xff}', 'config.json is not UTF-8 text .*: restore it'),
    ('config.json', b'{"seed": ', 'config.json is not JSON .*: restore it'),
    ('config.json', None, 'config.json is a folder where the run needs a file'),
    ('wandb_id', None, 'wandb_id is a folder where the run needs a file'),
    *[
      (name, b'', f'{name} is a file where the run needs a folder: move it away or choose another --workdir')
      for name in ('rollouts', 'eval', 'checkpoints', 'tensorboard', 'profile')
    ],
  ],
)
def test_what_cannot_be_read_is_named(run, name, content, sentence):
  (run / name).unlink(missing_ok=True)
  if content is None:
    (run / name).mkdir()
  else:
    (run / name).write_bytes(content)
  with pytest.raises(UserError, match=f'{run}/.*{sentence}'):
    workdir.check_workdir(Config(), run)


@pytest.mark.parametrize(
  'made, named, what',
  [
    ((), 'rum', r"there is no such directory; did you mean 'run'\?"),
    ((), 'other/run', r'there is no such directory\.'),
    ((), 'run/metrics.jsonl', 'it is part of the run .*/run; name that'),
    (('run/checkpoints/2/x',), 'run/checkpoints/2', 'it is part of the run .*/run; name that'),
    ((), '.', 'it holds runs; name one of them, such as .*/run'),
    (('a.txt',), 'a.txt', 'it is a file; name the --workdir of launch.train'),
    (('notes/b.txt',), 'notes', 'there is no config.json in it; name the --workdir of launch.train'),
    (('model/config.json',), 'model', 'its config.json is not that of a run; a model is passed as --model'),
    (('factors/adapter_config.json',), 'factors', 'it is a LoRA adapter, passed as --adapter with its --model'),
    (('slots/cartridge.json',), 'slots', 'it is a cartridge, passed as --cartridge with its --model'),
    (('left/checkpoints/2/x',), 'left', 'there is no config.json in it; restore it, or resume the run'),
  ],
)
def test_what_is_no_run_is_named_and_what_to_name_instead(run, made, named, what):
  for path in (run.parent / name for name in made):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{}')
  with pytest.raises(UserError, match=f'is not a run: {what}'):
    runs.export(run.parent / named, run.parent / 'out', 'student')
  assert not (run.parent / 'out').exists()


def test_what_may_be_insisted_on_is_offered_beside_what_is_accepted_already(run):
  config = Config()
  config.environments.http.url = 'http://localhost:1/'
  config.trainer.accept_changes = ('data',)
  with pytest.raises(UserError, match=r"http.url was '' and is now .* --config.trainer.accept_changes=data,graders\.$"):
    workdir.check_workdir(config, run)
  config.trainer.accept_changes = ('data', 'graders')
  assert workdir.check_workdir(config, run) == epath.Path(run)
  config.seed = 1
  with pytest.raises(
    UserError, match=r'seed was 0 and is now 1\. Use the settings of that run, or another --workdir\.$'
  ):
    workdir.check_workdir(config, run)


@pytest.mark.parametrize('name', ['config.json', 'metrics.jsonl', 'fingerprint.json', 'epochs.json'])
def test_a_pipe_in_the_place_of_a_file_is_not_opened(run, name):
  (run / name).unlink(missing_ok=True)
  os.mkfifo(run / name)
  with pytest.raises(UserError, match=f'{name} is a pipe or a device where the run needs a file: move it away'):
    workdir.check_workdir(Config(), run)


def test_a_file_is_no_workdir(run):
  with pytest.raises(UserError, match=f'--workdir={run}/config.json is a file: name a directory'):
    workdir.check_workdir(Config(), run / 'config.json')


def test_a_file_without_permission_is_named(run, monkeypatch):
  """Tests may run as root, who may read everything: the file system refuses by proxy."""

  def refuse(path):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

  monkeypatch.setattr(type(epath.Path(run)), 'read_bytes', refuse)
  for read in (workdir.saved_settings, read_metrics):
    with pytest.raises(UserError, match='cannot be read .*Permission denied'):
      read(run)
  monkeypatch.undo()
  monkeypatch.setattr(type(epath.Path(run)), 'exists', refuse)
  with pytest.raises(UserError, match=f'--workdir={run} cannot be read .*Permission denied'):
    workdir.check_workdir(Config(), run)


@pytest.mark.parametrize('saved, sentence', [('[]', 'JSON object'), ('{"optimizer": 3}', 'optimizer=3 is not')])
def test_settings_that_are_none_do_not_open_a_run(run, saved, sentence):
  (run / 'config.json').write_text(saved)
  with pytest.raises(UserError, match=sentence):
    runs.run_config(run)


@pytest.mark.parametrize(
  'number, way_out',
  [(errno.ENOSPC, 'make room, then start the same command again'), (errno.EROFS, 'choose another --workdir')],
)
def test_a_full_disk_needs_room_and_not_another_directory(tmp_path, monkeypatch, number, way_out):
  def refuse(path, text):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(workdir, 'write_atomically', refuse)
  with pytest.raises(UserError, match=f'cannot be written .*{os.strerror(number)}.*: {way_out}'):
    workdir.write_settings(Config(), epath.Path(tmp_path))


def test_checkpoints_that_cannot_be_written_are_named_when_they_are_closed(tmp_path, monkeypatch):
  """The loop closes them while another error is on its way, which must not end as the storage library's traceback."""
  opened = checkpoints.Checkpoints(tmp_path)

  def fail(writer, close=orbax.checkpoint.AsyncCheckpointer.close):
    close(writer)
    raise ValueError('RESOURCE_EXHAUSTED: no space')

  monkeypatch.setattr(orbax.checkpoint.AsyncCheckpointer, 'close', fail)
  with pytest.raises(UserError, match='A checkpoint could not be written .*RESOURCE_EXHAUSTED'):
    opened.close()


def test_an_evaluation_does_not_replace_another(tmp_path):
  config = Config()
  config.data.val_files = ('x.jsonl',)
  for name in ('e.json', 'e.samples.jsonl'):
    (tmp_path / name).write_text(json.dumps('kept'))
    with pytest.raises(UserError, match=f'{name} already exists: .* --overwrite'):
      runs.evaluate_to_file(config, runs.RunOrModel(), output=str(tmp_path / 'e.json'))
    # With it, the command goes on to its next check.
    with pytest.raises(UserError, match='Name one of --workdir'):
      runs.evaluate_to_file(config, runs.RunOrModel(), output=str(tmp_path / 'e.json'), overwrite=True)
    assert (tmp_path / name).read_text() == '"kept"'
    (tmp_path / name).unlink()


@pytest.mark.parametrize(
  'name', ['config.json', 'metrics.jsonl', 'rollouts', 'checkpoints', 'checkpoints_damaged', 'before_restart']
)
def test_a_run_with_a_link_in_it_is_refused(run, tmp_path, name):
  (tmp_path / 'elsewhere').mkdir()
  (run / name).unlink(missing_ok=True)
  for target in ('elsewhere', 'nowhere'):
    (run / name).symlink_to(tmp_path / target)
    with pytest.raises(UserError, match=f'{name} is a link, which a run does not write through'):
      workdir.check_workdir(Config(), run)
    (run / name).unlink()
  (tmp_path / 'link').symlink_to(run)  # The whole directory may be one.
  (run / 'config.json').write_text(Config().to_json())
  assert workdir.check_workdir(Config(), tmp_path / 'link')


def test_what_a_killed_process_has_named_is_synced_before_the_run_goes_on(run, monkeypatch):
  synced = []
  monkeypatch.setattr(os, 'fsync', lambda descriptor: synced.append(os.readlink(f'/proc/self/fd/{descriptor}')))
  (run / 'eval').mkdir()
  (run / 'eval' / f'.{"0" * 16}.partial').write_text('half')
  (run / 'config.json').write_text(Config().to_json() + '\n')
  workdir.open_workdir(epath.Path(run))
  assert {str(run / 'eval'), str(run), str(run.parent), '/'} <= set(synced)
  assert not list((run / 'eval').iterdir())
