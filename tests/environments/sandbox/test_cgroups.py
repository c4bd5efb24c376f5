"""Control groups of the sandbox: under the real kernel what it has of them here, version 2 by its protocol."""

import os
import pathlib
import shutil
import signal
import time

import pytest

from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox import cgroups, leftovers
from sdpo_jax.environments.sandbox import sandbox as implementation
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob
from tests.environments.sandbox.helper_process import group_of, pids

HARNESS = pathlib.Path(__file__).with_name('sandbox_harness.py')
LIMITS = Limits(wall_s=20, cpu_s=10, memory_mb=1024, file_mb=16, output_mb=1)


@pytest.fixture
def real():
  """Yield a group that this process may make on this machine."""
  group = cgroups.create(1 << 30, 100)
  if group is None:
    pytest.skip('no control group can be made here')
  yield group
  group.remove()


def run(sandbox, code):
  return sandbox.run([SandboxJob({'code': code}, '', LIMITS)])[0]


def members(group):
  return [(directory / 'cgroup.procs').read_text().split() for directory in group.directories]


def test_a_zygote_and_its_programs_are_in_a_group_that_ends_with_them(real):
  with Sandbox(SandboxConfig(workers=1), HARNESS) as sandbox:
    group = group_of(sandbox)
    assert group.controllers == real.controllers
    assert all(str(pids(sandbox)[0]) in within for within in members(group))
    assert f'cgroup v{group.version} ({", ".join(group.controllers)})' in sandbox.layers
    assert run(sandbox, 'result = 1').result == 1
    os.kill(pids(sandbox)[0], signal.SIGKILL)
    assert run(sandbox, 'result = 2').result == 2
    assert all(str(pids(sandbox)[0]) in within for within in members(group)), 'also after a restart'
  assert not any(directory.exists() for directory in group.directories)


def test_what_programs_take_beyond_their_limits_ends_them_alone(real, monkeypatch):
  if 'memory' not in real.controllers:
    pytest.skip('no group for memory can be made here')
  for name, value in {'GROUP_MB': 60, 'GROUP_PROGRAM_MB': 0, 'GROUP_EXTRA_MB': 0}.items():
    monkeypatch.setattr(implementation, name, value)
  with Sandbox(SandboxConfig(workers=1, memory_mb=60, file_mb=16), HARNESS) as sandbox:
    assert run(sandbox, 'x = bytearray(60 << 20)').exit_code == 0
    # Address space is within its limit, so that nothing but the group is in the way.
    report = run(sandbox, 'x = bytearray(400 << 20)')
    assert report.status in ('killed', 'failed'), report
    assert run(sandbox, 'result = 3').result == 3


def test_nothing_of_a_program_stays_in_memory(real):
  if real.version != 1 or 'memory' not in real.controllers:
    pytest.skip('reads a file of version 1')
  with Sandbox(SandboxConfig(workers=1), HARNESS) as sandbox:
    used = group_of(sandbox).directories[real.controllers.index('memory')] / 'memory.stat'

    def shared():
      return int(dict(line.split() for line in used.read_text().splitlines())['total_shmem'])

    for _ in range(8):
      report = run(sandbox, 'open("large", "wb").write(bytes(16 << 20)); result = 1')
      assert report.result == 1, report.stderr
    deadline = time.monotonic() + 60
    while shared() > 1 << 20:
      assert time.monotonic() < deadline, 'it stays'
      os.sched_yield()


@pytest.fixture
def fake(monkeypatch, tmp_path):
  """Return a hierarchy of version 2 in which this process is in /user/session, with as much of the kernel as is
  used.
  """
  tree = tmp_path / 'cgroup'
  mkdir, write_text = pathlib.Path.mkdir, pathlib.Path.write_text
  files = {'memory': ('memory.max', 'memory.swap.max', 'memory.oom.group'), 'pids': ('pids.max',), 'cpu': ('cpu.max',)}

  def fill(path, controllers):
    """Give a group the files of the controllers that its parent passes on."""
    write_text(path / 'cgroup.controllers', ' '.join(controllers))
    for name in ('cgroup.procs', 'cgroup.subtree_control', *(file for each in controllers for file in files[each])):
      (path / name).touch()

  def make(path, *arguments, **options):
    mkdir(path, *arguments, **options)
    if tree in path.parents:
      fill(path, (path.parent / 'cgroup.subtree_control').read_text().split())

  def write(path, text, *arguments, **options):
    if tree in path.parents and not path.exists():
      raise PermissionError(13, 'Permission denied', str(path))
    if tree in path.parents and path.name == 'cgroup.subtree_control':
      text = text.replace('+', '')
      for child in path.parent.iterdir():
        if child.is_dir():
          fill(child, text.split())
    return write_text(path, text, *arguments, **options)

  mkdir(tree)
  fill(tree, ['cpu', 'memory', 'pids'])
  write_text(tree / 'cgroup.subtree_control', 'memory pids')
  write_text(tmp_path / 'mountinfo', f'29 23 0:26 / {tree} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n')
  write_text(tmp_path / 'own', '0::/user/session\n')
  monkeypatch.setattr(pathlib.Path, 'mkdir', make)
  monkeypatch.setattr(pathlib.Path, 'write_text', write)
  monkeypatch.setattr(pathlib.Path, 'rmdir', shutil.rmtree)
  monkeypatch.setattr(cgroups, 'MOUNTS', tmp_path / 'mountinfo')
  monkeypatch.setattr(cgroups, 'OWN', tmp_path / 'own')
  (tree / 'user').mkdir()
  (tree / 'user' / 'cgroup.subtree_control').write_text('memory pids')
  (tree / 'user' / 'session').mkdir()
  return tree


def refuse(monkeypatch, kind, name, parent):
  """Lets a write to, or the making of, something below a directory fail as the kernel does."""
  original = getattr(pathlib.Path, kind)

  def refusing(path, *arguments, **options):
    if path.parent == parent and (name is None or path.name == name):
      raise PermissionError(13, 'Permission denied')
    return original(path, *arguments, **options)

  monkeypatch.setattr(pathlib.Path, kind, refusing)


def test_version_2_within_ones_own_group(fake, monkeypatch):
  group = cgroups.create(1 << 30, 100)
  (directory,) = group.directories
  assert group.version == 2 and directory.parent == fake / 'user' / 'session'
  assert (directory / 'memory.max').read_text() == str(1 << 30) and (directory / 'pids.max').read_text() == '100'
  assert (directory / 'memory.swap.max').read_text() == '0'
  with group.doors() as (door,):
    os.write(door, b'0')
  assert (directory / 'cgroup.procs').read_text() == '0'


def test_a_group_may_have_more_where_python_is_in_memory(real, fake):
  group = cgroups.create(1 << 30, 100)
  for more in (1 << 20, 1 << 22):  # A zygote that is started anew has another copy, and the first is gone.
    group.allow(more)
    assert (group.directories[0] / 'memory.max').read_text() == str((1 << 30) + more)
  if real.version == 1 and 'memory' in real.controllers:
    directory = real.directories[real.controllers.index('memory')]
    real.allow(1 << 20)
    assert (directory / 'memory.limit_in_bytes').read_text().strip() == str((1 << 30) + (1 << 20))


def test_version_2_beside_ones_own_group_where_that_may_have_none(fake, monkeypatch):
  refuse(monkeypatch, 'write_text', 'cgroup.subtree_control', fake / 'user' / 'session')
  (directory,) = cgroups.create(1 << 30, 100).directories
  assert directory.parent == fake / 'user'
  assert not list((fake / 'user' / 'session').glob('sdpo*')), 'the attempt is undone'


def test_no_group_where_none_may_be_made(fake, monkeypatch):
  refuse(monkeypatch, 'mkdir', None, fake / 'user')
  refuse(monkeypatch, 'mkdir', None, fake / 'user' / 'session')
  assert cgroups.create(1 << 30, 100) is None


def test_groups_of_processes_that_were_killed_are_removed(fake, monkeypatch):
  """The kernel lets go of a lock when its process ends, for which the closing of a descriptor stands here."""
  live, killed = cgroups.create(1 << 30, 100), cgroups.create(1 << 30, 100)
  for descriptor in killed.held:
    os.close(descriptor)
  cgroups.create(1 << 30, 100)
  assert killed.directories[0].exists(), 'it is younger than its lock may be'
  monkeypatch.setattr(leftovers, 'STALE_S', -1.0)
  cgroups.create(1 << 30, 100)
  assert live.directories[0].exists() and not killed.directories[0].exists()
