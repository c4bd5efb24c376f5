"""The package: what a wheel holds, its extras, and commands in a directory that is not the repository."""

import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

from sdpo_jax.command_lines import as_typed
from sdpo_jax.config import beside
from sdpo_jax.config.locations import model_path
from sdpo_jax.errors import UserError
from sdpo_jax.models import directories, model_files
from tests import tiny

ROOT = tiny.REPOSITORY
PACKAGES = ('sdpo_jax', 'models', 'launch', 'configs')


def requirements(name: str) -> list[str]:
  """Return the requirements of a file as an extra lists them, where another extra stands for another file."""
  lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
  others = [
    line.removeprefix('-r requirements-').removesuffix('.txt') for line in lines if line.startswith('-r requirements-')
  ]
  return [f'sdpo_jax[{other}]' for other in others] + [
    line for line in lines if line and not line.startswith(('#', '-r '))
  ]


def start(folder: pathlib.Path, *arguments: str, installed: pathlib.Path) -> subprocess.CompletedProcess:
  """Run the console script of an installation in a folder."""
  command = [sys.executable, str(installed / 'bin' / 'sdpo'), *arguments]
  environment = tiny.environment(quick=True) | {'PYTHONPATH': str(installed)}
  return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


class Sources:
  """A copy of the files that git knows, with a setuptools to build packages of them."""

  def __init__(self, folder: pathlib.Path):
    self.folder, self._tools = folder / 'sources', folder / 'tools'
    listed = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split('\0')[:-1]:  # A copy, since setuptools leaves what it builds beside the sources.
      (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, self.folder / name)
    self.git('init', '--quiet')
    self.git('add', '--all', '--force')
    self.git('-c', 'user.name=T', '-c', 'user.email=t@example.org', 'commit', '--quiet', '--message=All files')
    [needed] = tomllib.loads((ROOT / 'pyproject.toml').read_text())['build-system']['requires']
    done = self.python('pip', 'install', '--quiet', '--no-compile', '--target', self._tools, needed)
    if 'No matching distribution found for setuptools' in done.stderr:
      pytest.skip('there is no package index to take setuptools from')
    assert done.returncode == 0, done.stderr

  def git(self, *arguments: str) -> str:
    """Return what git prints in the copy."""
    done = subprocess.run(['git', *arguments], cwd=self.folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()

  def python(self, module: str, *arguments) -> subprocess.CompletedProcess:
    """Run a module in the copy, with setuptools."""
    return subprocess.run(
      [sys.executable, '-m', module, *arguments],
      cwd=self.folder,
      env=os.environ | {'PYTHONPATH': str(self._tools)},
      capture_output=True,
      text=True,
      check=False,
    )

  def install(self, what: pathlib.Path | str, *where: pathlib.Path | str) -> None:
    """Install a package alone; `where` are the last arguments of pip."""
    options = ('--quiet', '--no-deps', '--no-compile', '--no-build-isolation')
    done = self.python('pip', 'install', *options, *where, what)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope='module')
def copied(tmp_path_factory):
  return Sources(tmp_path_factory.mktemp('package'))


@pytest.fixture(scope='module')
def installed(copied, tmp_path_factory):
  """Install the wheel of the files that git knows, apart from the packages of the tests."""
  folder = tmp_path_factory.mktemp('wheel')
  copied.install(copied.folder, '--target', folder)
  return folder


def held(folder: pathlib.Path) -> set[str]:
  """Return the paths of the files of an installed package."""
  return {path.relative_to(folder).as_posix() for path in (folder / 'sdpo_jax').rglob('*') if path.is_file()}


def metadata(folder: pathlib.Path) -> tuple[str, dict]:
  """Return the commit and the bill of materials of an installed package."""
  [info] = folder.glob('sdpo_jax-*.dist-info')
  return (info / 'commit.txt').read_text().strip(), json.loads((info / 'sboms' / 'sdpo_jax.cdx.json').read_text())


def test_extras_are_the_requirement_files():
  extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
  files = {path.stem.removeprefix('requirements-') for path in ROOT.glob('requirements-*.txt')}
  assert extras == {name: requirements(f'requirements-{name}.txt') for name in files}


def test_figures_and_tables_of_others_are_no_requirements():
  base = {re.match(r'[\w-]+', line)[0] for line in requirements('requirements.txt')}
  assert base & {'httpx', 'matplotlib', 'datasets', 'pandas', 'torch', 'trl'} == set() and {'jax', 'httpx2'} <= base


def test_files_beside_a_config_are_found_from_anywhere(tmp_path, monkeypatch):
  config = tmp_path / 'experiments' / 'mine.py'
  (config.parent / 'my_model').mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  assert beside(str(config), 'text.txt') == 'experiments/text.txt'
  assert model_path('my_model', pathlib.Path('experiments/mine.py')) == 'experiments/my_model'
  for path in ('Qwen/Qwen3-8B', 'gs://bucket/my_model', '', str(config.parent / 'my_model')):
    assert model_path(path, config) == path
  (tmp_path / 'my_model').mkdir()
  assert model_path('my_model', config) == 'my_model'  # The working directory comes first.
  (tmp_path / 'elsewhere').mkdir()
  monkeypatch.chdir(tmp_path / 'elsewhere')
  assert model_path('my_model', config) == str(config.parent / 'my_model')


def test_the_models_of_the_project_are_found_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = 'configs/quickstart_model'
  assert model_files.resolve(path) == ROOT / path and directories.is_local(path)
  with pytest.raises(UserError, match='The model directory configs/quick_model does not exist: set model.path'):
    model_files.resolve('configs/quick_model')  # Which is not looked for on the hub.
  (tmp_path / path).mkdir(parents=True)
  assert model_files.resolve(path) == pathlib.Path(path)  # The working directory comes first.


@pytest.mark.slow
def test_the_wheel_takes_one_name_and_holds_the_files_of_git(installed):
  assert {path.name for path in installed.iterdir() if path.suffix != '.dist-info'} == {'bin', 'sdpo_jax'}
  assert [path.name for path in (installed / 'bin').iterdir()] == ['sdpo']
  listed = subprocess.run(['git', 'ls-files', *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
  assert held(installed) == {
    name if name.startswith('sdpo_jax/') else f'sdpo_jax/{name}' for name in listed.stdout.split()
  }


@pytest.mark.slow
def test_a_source_distribution_installs_what_the_wheel_installs(copied, installed, tmp_path):
  done = copied.python('setup', 'sdist', '--quiet', '--dist-dir', tmp_path)
  assert done.returncode == 0, done.stderr
  [archive] = tmp_path.glob('*.tar.gz')
  copied.install(archive, '--target', tmp_path / 'installed')
  assert held(tmp_path / 'installed') == held(installed)
  assert metadata(tmp_path / 'installed') == metadata(installed)


@pytest.mark.slow
def test_the_metadata_of_the_wheel_name_its_commit_and_the_packages_of_the_lock(copied, installed):
  commit, bill = metadata(installed)
  assert commit == copied.git('rev-parse', 'HEAD')
  component = bill['metadata']['component']
  assert (bill['bomFormat'], component['name']) == ('CycloneDX', 'sdpo_jax')
  assert component['pedigree']['commits'] == [{'uid': commit}]
  lock = (ROOT / 'requirements.lock').read_text()
  pins = [line.split()[0] for line in lock.splitlines() if '==' in line and not line.startswith('#')]
  assert [f'{part["name"]}=={part["version"]}' for part in bill['components']] == pins
  assert [part['purl'] for part in bill['components']] == [f'pkg:pypi/{pin.replace("==", "@")}' for pin in pins]
  hashes = [found['hashes'][0]['content'] for part in bill['components'] for found in part['externalReferences']]
  assert hashes == re.findall(r'sha256:(\w{64})', lock)


@pytest.mark.slow
def test_an_editable_installation_runs_the_files_of_the_checkout(copied, tmp_path):
  copied.install(copied.folder, '--prefix', tmp_path / 'prefix', '--editable')
  [link] = (tmp_path / 'prefix').rglob('__editable__*.pth')
  program = (
    f'import site; site.addsitedir({str(link.parent)!r})\nimport sdpo_jax.launch\nprint(sdpo_jax.launch.__file__)'
  )
  environment = tiny.environment(quick=True) | {'PYTHONPATH': ''}
  run = functools.partial(subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
  assert run([sys.executable, '-c', program]).stdout.strip() == str(copied.folder / 'launch' / '__init__.py')


def test_commands_in_texts_are_written_as_they_were_typed(monkeypatch):
  text = 'as launch.plan, python -m launch.check, /a/launch.check and launch.me say'
  monkeypatch.setattr(sys, 'argv', ['launch/train.py'])
  assert as_typed(text) == text
  monkeypatch.setattr(sys, 'argv', ['/bin/sdpo train'])
  assert as_typed(text) == 'as sdpo plan, sdpo check, /a/launch.check and launch.me say'


@pytest.mark.slow
def test_the_console_script_runs_in_an_empty_folder(installed, tmp_path):
  steps = '--config.trainer.total_training_steps=1'
  done = start(tmp_path, 'train', '--config=configs/quickstart.py', steps, installed=installed)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'runs' / 'quickstart' / 'metrics.jsonl').is_file()
  printed = [shlex.split(line) for line in done.stdout.split('Next:')[1].splitlines() if line.strip()]
  assert [line[:2] for line in printed] == [['sdpo', name] for name in ('evaluate', 'report', 'sample', 'export')]
  for _, *arguments in printed[1:]:
    done = start(tmp_path, *arguments, installed=installed)
    assert done.returncode == 0, done.stderr
  assert sorted(os.listdir(tmp_path)) == ['quickstart_model', 'runs']
  assert (tmp_path / 'quickstart_model' / 'model.safetensors').is_file()
  module = [sys.executable, '-m', 'sdpo_jax.launch.export', '--workdir=runs/quickstart', '--output=again']
  environment = tiny.environment(quick=True) | {'PYTHONPATH': str(installed)}
  done = subprocess.run(module, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0 and (tmp_path / 'again' / 'model.safetensors').is_file(), done.stderr
  missing = start(tmp_path, 'check', '--config=configs/none.py', installed=installed)
  assert missing.returncode == 2 and 'there is no such file' in missing.stderr
  helped = start(tmp_path, 'help', 'check', installed=installed)
  assert helped.returncode == 0 and '  sdpo check --config=configs/quickstart.py\n' in helped.stdout
  assert 'launch.' not in helped.stdout and '--config' in helped.stdout and '--help_settings' in helped.stdout


@pytest.mark.slow
def test_a_csv_file_trains_after_two_commands_in_an_empty_folder(installed, tmp_path):
  rows = '\n'.join(f'Name number {number}.,Number {number}' for number in range(10))
  (tmp_path / 'my.csv').write_text(f'question,answer\n{rows}\n')
  done = start(tmp_path, 'init', '--data=my.csv', '--model=configs/quickstart_model', installed=installed)
  assert done.returncode == 0 and done.stderr == '', done.stderr
  command = shlex.split(done.stdout.splitlines()[-1])
  assert command == ['sdpo', 'train', '--config=my/config.py']
  # Shorter than what init guesses, so that there is less to compile.
  lengths = ('data.max_response_length=16', 'actor.self_distillation.max_reprompt_len=128', 'rollout.n=2')
  short = [f'--config.{name}' for name in (*lengths, 'val_kwargs.n=2', 'trainer.total_training_steps=1')]
  done = start(tmp_path, *command[1:], *short, installed=installed)
  assert done.returncode == 0 and '1 step done; the run is in runs/my.' in done.stdout, done.stderr
  assert 'held_out/mean@2' in done.stdout


GRADER = """

def odd(examples, completions, *, truncated):
  return [Outcome(float(sum(text.encode()) % 2), 'Be odd.') for text in completions]
"""
PROJECTS = {  # What a user's project holds → how its config file gets the grader.
  'a package models': ({'models/__init__.py': '', 'models/mynet.py': GRADER}, 'from models.mynet import odd'),
  'a folder models': ({'models/mynet.py': GRADER}, 'from models.mynet import odd'),
  'a file models.py': ({'models.py': GRADER}, 'from models import odd'),
  'a package configs': ({'configs/__init__.py': GRADER}, 'from configs import odd'),
  'a file launch.py': ({'launch.py': GRADER}, 'import launch\nodd = launch.odd'),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PROJECTS)
def test_projects_with_packages_of_these_names_import_their_own(installed, tmp_path, name):
  held, imported = PROJECTS[name]
  for path, text in held.items():
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(f'from sdpo_jax.types import Outcome\n{text}')
  config = tiny.make_experiment(tmp_path / 'experiments')  # Below the working directory, which has the project's code.
  before, rest = config.read_text().split("@registry.register('parity')")
  after = rest[rest.index('@registry.register_generator') :].replace(
    'total_training_steps = 3', 'total_training_steps = 1'
  )
  config.write_text(f"{before}{imported}\nregistry.register('parity')(odd)\n\n\n{after}")
  done = start(tmp_path, 'train', f'--config={config.relative_to(tmp_path)}', installed=installed)
  assert done.returncode == 0, done.stderr
  assert '1 step done' in done.stdout


TYPED = """
import sdpo_jax


def odd(completions: list[str], answer: list[int], **_: object) -> list[float]:
  return [1.0 for _ in completions]


class Look(sdpo_jax.Callback):
  def on_step(self, step: sdpo_jax.Step) -> None:
    print(step.number, step.metrics['train/loss'])


config: sdpo_jax.Config = sdpo_jax.load_config('configs/quickstart.py', {'optimizer.lr': 1e-4})
config.optimizer.lr = 1e-3
rows = [{'prompt': 'Q', 'answer': 1}]
result: sdpo_jax.Result = sdpo_jax.train(config, rows=rows, grader=[odd, ('math', 0.5)], callbacks=[Look()])
score: float = result.evaluations[3]['eval/x/mean@4']
answers: list[str] = sdpo_jax.generator('runs/x').generate('Q')
each: list[list[str]] = sdpo_jax.generator(model='m').generate(['Q', 'R'])
for step in sdpo_jax.steps(config, 'runs/y'):
  texts: list[str] = step.sample('Q', n=2)
try:
  done: int = sdpo_jax.export('runs/x', 'model', format='peft')
except sdpo_jax.UserError as error:
  print(error)
metrics: dict[str, dict[str, float]] = sdpo_jax.evaluate(config, workdir='runs/x').metrics
sdpo_jax.train(3)
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_interface_of_the_wheel(installed, tmp_path):
  (tmp_path / 'program.py').write_text(TYPED)
  options = ['--strict', '--follow-imports=silent', '--disable-error-code=import-untyped', '--no-error-summary']
  checked = ['program.py', *(installed / 'sdpo_jax' / name for name in ('interface.py', '__init__.pyi'))]
  done = subprocess.run(
    [sys.executable, '-m', 'mypy', *options, *checked],
    cwd=tmp_path,
    env=os.environ | {'MYPYPATH': str(installed)},
    capture_output=True,
    text=True,
    check=False,
  )
  [complaint] = done.stdout.splitlines()  # About the last line alone, which is wrong.
  assert complaint.startswith(
    f'program.py:{len(TYPED.splitlines())}: error: Argument 1 to "train" has incompatible type'
  )
