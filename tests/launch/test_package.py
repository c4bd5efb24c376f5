"""The package: what a wheel holds, its extras, and commands in a directory that is not the repository."""

import os
import pathlib
import subprocess
import sys
import tomllib
import zipfile

import pytest

from sdpo_jax.config import beside
from sdpo_jax.config.locations import model_path
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


def start(folder: pathlib.Path, *arguments: str, path: pathlib.Path = ROOT) -> subprocess.CompletedProcess:
  environment = tiny.environment(quick=True) | {'PYTHONPATH': str(path)}
  command = [sys.executable, '-m', *arguments]
  return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_extras_are_the_requirement_files():
  extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
  files = {path.stem.removeprefix('requirements-') for path in ROOT.glob('requirements-*.txt')}
  assert extras == {name: requirements(f'requirements-{name}.txt') for name in files}


@pytest.mark.parametrize('name', PACKAGES[:2] + PACKAGES[3:])
def test_a_package_of_the_user_in_the_place_of_ours_is_named(tmp_path, name):
  (tmp_path / name).mkdir()
  (tmp_path / name / '__init__.py').write_text('')
  done = start(tmp_path, 'launch.train', '--config=configs/quickstart.py')
  assert done.returncode == 1
  [sentence] = done.stderr.strip().splitlines()
  assert sentence.startswith(f'The package {name!r} of sdpo_jax is found in {tmp_path / name}') and 'rename' in sentence


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


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_folder(tmp_path):
  """The files of git, and nothing else, are in the wheel; the first command of the README runs with it."""
  built = subprocess.run(
    [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--wheel-dir', tmp_path, '.'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  if 'No matching distribution found for setuptools' in built.stderr:
    pytest.skip('there is no package index to take setuptools from')
  assert built.returncode == 0, built.stderr
  [wheel] = tmp_path.glob('*.whl')
  installed, empty = tmp_path / 'installed', tmp_path / 'empty'
  empty.mkdir()
  with zipfile.ZipFile(wheel) as archive:
    held = {name for name in archive.namelist() if '.dist-info/' not in name}
    archive.extractall(installed)
  listed = subprocess.run(['git', 'ls-files', *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
  assert held == set(listed.stdout.split())
  steps = '--config.trainer.total_training_steps=1'
  done = start(empty, 'launch.train', '--config=configs/quickstart.py', steps, path=installed)
  assert done.returncode == 0, done.stderr
  assert (empty / 'runs' / 'quickstart' / 'metrics.jsonl').is_file()
  shipped = start(empty, 'launch.check', '--config=configs/cartridge_quickstart.py', path=installed)
  assert shipped.returncode == 0, shipped.stderr
  missing = start(empty, 'launch.check', '--config=configs/none.py', path=installed)
  assert missing.returncode == 2 and 'there is no such file' in missing.stderr
  assert os.listdir(empty) == ['runs']
