"""The lock of the base install: it meets the requirements, is made by a command, and a changed archive is refused."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
import pytest

from tests import tiny

ROOT = tiny.REPOSITORY
PIN = re.compile(r'([\w.-]+)==([\w.]+)(?: ; ([^\\]+))? ((?:\\\n  --hash=sha256:[0-9a-f]{64} ?)+)\n')


def locked(text: str) -> list[tuple[str, ...]]:
  """Return (name, version, marker, hashes) of every package; nothing but comments and such pins may be there."""
  assert [line for line in PIN.sub('', text).splitlines() if not line.startswith('#')] == []
  return PIN.findall(text)


@pytest.mark.parametrize('python', ['3.11', '3.12'])
def test_the_lock_pins_one_version_of_each_requirement_within_its_range(python):
  here = {'python_version': python, 'python_full_version': f'{python}.0', 'sys_platform': 'linux'}
  pins = locked((ROOT / 'requirements.lock').read_text())
  applies = [(name, release) for name, release, marker, _ in pins if not marker or Marker(marker).evaluate(here)]
  found = dict(applies)
  assert len(found) == len(applies) > 50
  wanted = [Requirement(line) for line in (ROOT / 'requirements.txt').read_text().splitlines() if line[0] != '#']
  for requirement in wanted:
    assert found[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def wheel(folder, name: str, needs: str = '') -> None:
  """Write a wheel of one module."""
  info = f'{name}-1.0.dist-info'
  held = {
    f'{name}.py': b'',
    f'{info}/METADATA': f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}'.encode(),
    f'{info}/WHEEL': b'Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n',
  }
  digests = {path: base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b'=') for path, text in held.items()}
  record = ''.join(f'{path},sha256={digest.decode()},{len(held[path])}\n' for path, digest in digests.items())
  with zipfile.ZipFile(folder / f'{name}-1.0-py3-none-any.whl', 'w') as archive:
    for path, text in (held | {f'{info}/RECORD': f'{record}{info}/RECORD,,\n'.encode()}).items():
      archive.writestr(path, text)


def test_a_lock_made_by_the_command_installs_and_refuses_another_archive(tmp_path):
  """Without an index: of two wheels, one of which needs the other."""
  copy, wheels = tmp_path / '.ci' / 'lock', tmp_path / 'wheels'
  copy.parent.mkdir()
  wheels.mkdir()
  shutil.copy(ROOT / '.ci' / 'lock', copy)
  wheel(wheels, 'needed')
  wheel(wheels, 'asked', 'Requires-Dist: needed>=1\n')
  (tmp_path / 'requirements.txt').write_text('asked>=1,<2\n')
  offline = {name: value for name, value in os.environ.items() if not name.startswith('PIP_')}
  offline |= {'PIP_CONFIG_FILE': os.devnull, 'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': str(wheels)}

  def run(*command: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], env=offline, capture_output=True, text=True, check=False)

  made = run(copy, sys.executable)
  assert made.returncode == 0, made.stderr
  pins = locked((tmp_path / 'requirements.lock').read_text())
  assert [(name, release, marker) for name, release, marker, _ in pins] == [('asked', '1.0', ''), ('needed', '1.0', '')]
  for name, _, _, hashes in pins:
    archive = wheels / f'{name}-1.0-py3-none-any.whl'
    assert re.findall('[0-9a-f]{64}', hashes) == [hashlib.sha256(archive.read_bytes()).hexdigest()]
  install = ('-m', 'pip', 'install', '--require-hashes', '-r', tmp_path / 'requirements.lock', '--target')
  done = run(*install, tmp_path / 'installed')
  assert done.returncode == 0 and (tmp_path / 'installed' / 'needed.py').is_file(), done.stderr
  with zipfile.ZipFile(wheels / 'needed-1.0-py3-none-any.whl', 'a') as archive:
    archive.writestr('added.py', b'')
  refused = run(*install, tmp_path / 'other')
  assert refused.returncode == 1 and 'DO NOT MATCH THE HASHES' in refused.stderr
  assert not (tmp_path / 'other').exists()
  (tmp_path / 'requirements.txt').write_text('asked>=2\n')
  failed = run(copy, sys.executable)
  assert failed.returncode == 1 and 'does not resolve requirements.txt' in failed.stderr
  assert locked((tmp_path / 'requirements.lock').read_text()) == pins  # The lock from before is left.
