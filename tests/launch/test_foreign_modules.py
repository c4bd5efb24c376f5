"""Files of the folder in which a command is started are not run in place of installed modules."""

import os
import pathlib
import subprocess
import sys

import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.terminal import program
from sdpo_jax.terminal.embedded import Embedded

ROOT = pathlib.Path(__file__).parents[2]
# Third-party modules, modules of the standard library that our first files import, and what Python and tools read.
NAMES = ('absl', 'jax/__init__', 'numpy', 'ast', 'signal', 'typing', '__future__', 'pathlib', 'sitecustomize')


@pytest.fixture
def hostile(tmp_path):
  """Return a folder in which every file writes what ran it."""
  folder = tmp_path / 'work'
  for name in NAMES:
    path = folder / f'{name}.py'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'open({str(tmp_path / "ran")!r}, "a").write(__file__ + "\\n")\n')
  (folder / 'pyproject.toml').write_text('not TOML')
  (folder / 'configs').mkdir()
  (folder / 'configs' / 'session_quickstart.py').write_text((folder / 'absl.py').read_text())
  yield folder
  assert not (tmp_path / 'ran').exists(), (tmp_path / 'ran').read_text()


@pytest.mark.parametrize('module', ['launch.session', 'sdpo_jax.launch.train'])
def test_a_command_runs_nothing_of_the_working_directory(hostile, module):
  environment = os.environ | {'PYTHONPATH': str(ROOT)}
  command = [sys.executable, '-m', module, '--help']
  done = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0 and not done.stderr and '--config' in done.stdout


def test_the_console_script_and_pythonpath_run_nothing_of_it(hostile):
  (hostile / 'sitecustomize.py').unlink()  # Python itself runs it before any program.
  (hostile.parent / 'sdpo').write_text('from sdpo_jax.launch import main\nmain()\n')
  environment = os.environ | {'PYTHONPATH': f'{ROOT}:{hostile}'}  # As an empty entry of PYTHONPATH does.
  command = [sys.executable, '../sdpo', 'session', '--help']
  done = subprocess.run(command, cwd=hostile, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0 and '--workspace' in done.stdout


def test_the_service_of_a_session_runs_nothing_of_it(hostile):
  with pytest.raises(UserError, match='--config=none.py: there is no such file'):
    Embedded(['--config=none.py'], hostile)


def test_graders_of_the_working_directory_can_still_be_imported(tmp_path):
  (tmp_path / 'words.py').write_text('SCORE = 1.0\n')
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'rewards.py').write_text(
    'import words\n\ndef exact_reward(completions, **columns):\n'
    '  return [words.SCORE * bool(each) for each in completions]\n'
  )
  (tmp_path / 'absl.py').write_text('raise SystemExit("absl.py has run.")')
  (tmp_path / 'rows.jsonl').write_text('{"prompt": "1 + 1 =", "solution": "2", "environment": "exact_reward"}\n')
  command = [sys.executable, '-m', 'launch.check', f'--config={ROOT}/configs/quickstart.py']
  command += ['--config.environments.modules=mine/rewards.py', '--config.data.train_files=rows.jsonl']
  command += ['--config.data.train_batch_size=1', '--config.actor.ppo_mini_batch_size=1']
  environment = os.environ | {'PYTHONPATH': str(ROOT)}
  done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0 and 'exact_reward' in done.stdout, done.stderr


@pytest.mark.parametrize('given', [{}, {'config': 'configs/session_quickstart.py'}, {'config': '{}/mine.py'}])
def test_what_the_service_reads_is_outside_of_the_workspace(hostile, monkeypatch, given):
  monkeypatch.chdir(hostile if given.get('config', '').startswith('configs') or not given else hostile.parent)
  (hostile.parent / 'script').write_text('')
  places = {name: str(hostile.parent / name) for name in ('script', 'state')}
  config = {name: text.format(hostile) for name, text in given.items()}
  started = []
  monkeypatch.setattr(program, 'Embedded', lambda *arguments: started.append(arguments) or 1 / 0)
  raised = (UserError, 'in the workspace.*name a config') if given else (ZeroDivisionError, 'division')
  with pytest.raises(raised[0], match=raised[1]):
    program.run(program.CommandOptions(workspace=str(hostile), policy='ask', **places, **config))
  if not given:
    [[arguments, folder]] = started
    assert arguments[0] == f'--config={ROOT}/configs/session_quickstart.py' and str(folder) == places['state']


def test_programs_that_the_service_loads_are_outside_of_the_workspace(hostile, monkeypatch):
  (hostile.parent / 'script').write_text('')
  places = {name: str(hostile.parent / name) for name in ('script', 'state')}
  monkeypatch.setattr(program, 'Embedded', lambda *arguments: 1 / 0)
  for programs, raised in ((str(hostile / 'kept'), UserError), (str(hostile.parent / 'kept'), ZeroDivisionError)):
    overrides = [('serve.programs', programs)]
    with pytest.raises(raised, match='serve.programs: .*/kept is in the workspace|division'):
      program.run(program.CommandOptions(workspace=str(hostile), policy='ask', overrides=overrides, **places))


def test_a_workspace_with_the_program_itself_is_refused(tmp_path):
  for inside in (ROOT, ROOT.parent, ROOT / 'launch', pathlib.Path(sys.prefix)):
    options = program.CommandOptions(url='http://127.0.0.1:1', workspace=str(inside), state=str(tmp_path))
    with pytest.raises(UserError, match='has files of this program, in '):
      program.run(options)
