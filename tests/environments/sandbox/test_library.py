"""What of Python programs get to see in memory, and that it is the same as on the disk."""

import os
import pathlib
import subprocess
import sys

import pytest

from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox import library
from sdpo_jax.environments.sandbox import sandbox as implementation
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob
from sdpo_jax.errors import UserError
from tests.environments.sandbox.helper_process import pids

HARNESS = pathlib.Path(__file__).with_name('sandbox_harness.py')
LIMITS = Limits(wall_s=60, cpu_s=20, memory_mb=512, file_mb=4, output_mb=1)


def distribution(directory, name, record, requires=()):
  info = directory / f'{name}-1.0.dist-info'
  info.mkdir(parents=True)
  (info / 'RECORD').write_text(''.join(f'{path},sha256=x,1\n' for path in [*record, f'{info.name}/RECORD']))
  (info / 'METADATA').write_text('Name: x\n' + ''.join(f'Requires-Dist: {each}\n' for each in requires))
  for path in record:
    if not path.startswith('..'):
      (directory / path).parent.mkdir(parents=True, exist_ok=True)
      (directory / path).write_text('1')


@pytest.fixture
def packages(tmp_path):
  requires = ['Base_Dist (>=1)', 'missing>=2', "docs; extra == 'all'", "gone; python_version < '3' and extra == 'x'"]
  distribution(tmp_path, 'numbers', ['num/__init__.py', 'num/deep/a.py', 'num.libs/c.so', '../../bin/num'], requires)
  distribution(tmp_path, 'base.dist', ['based.py', '__pycache__/based.cpython-311.pyc'])
  distribution(tmp_path, 'docs', ['docs/__init__.py'])
  (tmp_path / 'bare').mkdir()
  (tmp_path / 'bare' / '__init__.py').write_text('')
  return tmp_path


def test_a_name_brings_its_distribution_and_what_that_requires(packages):
  needed = {'based.py', '__pycache__/based.cpython-311.pyc', 'base.dist-1.0.dist-info'}
  assert library.entries(str(packages), {'based'}) == needed
  assert library.entries(str(packages), {'num'}) == needed | {'num', 'num.libs', 'numbers-1.0.dist-info'}
  assert library.entries(str(packages), {'bare', 'unknown'}) == {'bare'}
  assert library.entries(str(packages), set()) == set()


def test_copies_are_as_the_files_are(packages, tmp_path_factory):
  to = tmp_path_factory.mktemp('to')
  standard = tmp_path_factory.mktemp('standard')
  (standard / 'test').mkdir()
  (standard / 'module.py').write_bytes(b'x' * 5000)
  (standard / 'tool').write_text('#!')
  (standard / 'tool').chmod(0o755)
  (standard / 'link.py').symlink_to('module.py')
  os.mkfifo(standard / 'pipe')
  os.utime(standard / 'module.py', ns=(1, 10**18 + 7))
  found = library.files([str(standard)], [str(packages)], {'num'})
  library.copy(found, str(to))
  copied = pathlib.Path(f'{to}{standard}')
  assert sorted(os.listdir(copied)) == ['link.py', 'module.py', 'tool']
  assert (copied / 'link.py').read_bytes() == b'x' * 5000 and os.readlink(copied / 'link.py') == 'module.py'
  assert (copied / 'module.py').stat().st_mtime_ns == 10**18 + 7 and (copied / 'tool').stat().st_mode & 0o777 == 0o555
  assert pathlib.Path(f'{to}{packages}/num/deep/a.py').read_text() == '1'
  written = sum(-(-path.lstat().st_size // 4096) for path in to.rglob('*') if path.is_file() and not path.is_symlink())
  assert library.size(found) == written * 4096


@pytest.fixture(scope='module')
def sandbox():
  try:
    value = Sandbox(SandboxConfig(workers=1, packages=('numpy',)), HARNESS, preload=('numpy',))
  except UserError as error:
    if 'needs a view of its own' not in str(error):
      raise
    pytest.skip(str(error))
  with value:
    yield value


def run(sandbox, code):
  (report,) = sandbox.run([SandboxJob({'code': code}, '', LIMITS)])
  return report


def test_programs_see_nothing_of_a_disk(sandbox):
  (layer,) = (layer for layer in sandbox.layers if 'view' in layer)
  assert layer.startswith('read-only view in memory (')
  lines = pathlib.Path(f'/proc/{pids(sandbox)[0]}/mountinfo').read_text().splitlines()
  assert lines and {line.partition(' - ')[2].split()[0] for line in lines} == {'tmpfs'}


def test_programs_find_what_is_named_and_nothing_else(sandbox):
  report = run(sandbox, 'import colorsys, json, numpy.fft, numpy.linalg; result = int(numpy.fft.fft([1, 2]).real[0])')
  assert report.result == 3, report.stderr
  assert "No module named 'jax'" in run(sandbox, 'import jax').stderr
  compiled = run(
    sandbox,
    'import colorsys, importlib.util as u; result = [colorsys.__file__, u.cache_from_source(colorsys.__file__)]',
  )
  source, cache = map(pathlib.Path, compiled.result)
  assert source.name == 'colorsys.py' and cache.exists() == source.exists()
  assert 'Read-only file system' in run(sandbox, f'open({str(source)!r} + "x", "w")').stderr


@pytest.mark.parametrize('mechanism', ['landlock', 'bubblewrap'])
def test_packages_are_those_of_this_interpreter_alone(monkeypatch, mechanism):
  monkeypatch.setattr(implementation, 'ATTEMPTS', ((mechanism, True), (mechanism, False)))
  try:
    value = Sandbox(SandboxConfig(workers=1), HARNESS)
  except UserError as error:
    pytest.skip(str(error))
  with value:
    path = run(value, 'import sys; result = sys.path').result
  readable, packages = implementation.installation()
  assert {each for each in path if os.path.basename(each) in library.PACKAGES} == set(packages)
  assert all(any(each.startswith(directory) for directory in readable) for each in path)


@pytest.mark.parametrize('name', ['no_such_package', 'numpy.linalg', ''])
def test_a_package_that_is_not_there_is_named(name):
  with pytest.raises(UserError, match='environments.sandbox.packages names'):
    Sandbox(SandboxConfig(packages=('numpy', name)), HARNESS)


def test_without_views_it_is_said_that_they_are_needed(monkeypatch):
  monkeypatch.setattr(implementation, 'ATTEMPTS', (('landlock', False),))
  with pytest.raises(UserError, match='landlock: environments.sandbox.packages needs a view of its own'):
    Sandbox(SandboxConfig(packages=()), HARNESS)


def test_the_module_is_loaded_alone():
  done = subprocess.run([sys.executable, '-I', library.__file__], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
