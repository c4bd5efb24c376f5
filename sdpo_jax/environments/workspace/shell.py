"""An agent's commands in its workspace: bash, with a read-only system, no network and no other processes.

Kernel namespaces isolate a command from everything outside; without them there are no commands, and `Shell` raises an
error. shell_child.py sets them up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from typing import Literal

from sdpo_jax.environments.sandbox import cgroups
from sdpo_jax.errors import UserError

CHILD = pathlib.Path(__file__).with_name('shell_child.py')
# Paths that a command may read where they exist. Only the parts of /etc that programs need to start.
SYSTEM = ('/usr', '/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32', '/opt')
ETC = (
  *('passwd', 'group', 'hosts', 'nsswitch.conf', 'localtime', 'ld.so.cache', 'ld.so.conf', 'ld.so.conf.d'),
  *('alternatives', 'ssl/certs', 'ca-certificates', 'mime.types', 'bash.bashrc', 'gitconfig', 'magic'),
)
_CLOSED = ('/', '/usr', '/bin', '/sbin', '/lib', '/lib64', '/opt')
_CLOSED_WITH_ALL_BELOW = ('/proc', '/sys', '/dev', '/run', '/etc')
_CHUNK = 2**16


@dataclasses.dataclass(frozen=True)
class ShellLimits:
  """Limits of one command."""

  wall_s: float = 120.0
  cpu_s: int = 300  # Per process.
  memory_mb: int = 4096  # Per process, and in total where control groups can be made.
  file_mb: int = 1024  # Largest file.
  tmp_mb: int = 512  # Size of its temporary directory, which is removed with it.
  processes: int = 512
  descriptors: int = 1024
  kept_bytes: int = 2**20  # Bytes of output that are kept; the middle of longer output is dropped.


@dataclasses.dataclass(frozen=True)
class ShellReport:
  """The result of a command."""

  status: Literal['ended', 'timeout', 'cancelled', 'failed']
  exit_code: int | None  # If negative, the number of the signal that ended it.
  output: bytes  # Standard output and error in order of arrival; the middle may be missing.
  dropped: int  # Bytes missing in `output`, after its first half.
  wall_s: float
  reason: str = ''  # The reason of a failure.


class Shell:
  """Runs commands in a workspace; calls from several threads run in parallel."""

  def __init__(self, workspace: pathlib.Path, limits: ShellLimits = ShellLimits()):
    """Make a shell and test it with a command that does nothing.

    Args:
      workspace: a folder, the only one that commands can change.
      limits: limits of each command.

    Raises:
      UserError: the workspace is not a folder or is a system folder, or commands cannot be confined to it on this
        machine.
    """
    self._workspace = pathlib.Path(os.path.realpath(workspace))
    if not self._workspace.is_dir():
      raise UserError(f'The workspace {workspace} is not a folder.')
    if str(self._workspace) in _CLOSED or any(map(self._workspace.is_relative_to, _CLOSED_WITH_ALL_BELOW)):
      raise UserError(f'The workspace {workspace} is a system folder: name one of your own.')
    if str(self._workspace) in ('/tmp', '/var/tmp'):
      raise UserError(f'The workspace {workspace} is shared by all users: name a folder within it.')
    self._limits = limits
    self._bash = shutil.which('bash', path='/usr/bin:/bin:/usr/local/bin')
    if self._bash is None:
      raise UserError('There is no bash on this machine, so an agent cannot run commands: do not allow it any.')
    python = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)}
    found = [*SYSTEM, *(f'/etc/{name}' for name in ETC), *sorted(python)]
    self._readable = [path for path in found if os.path.lexists(path)]
    self._environment = {  # Nothing of this process's own.
      'PATH': f'{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin',
      'HOME': '/tmp',
      'LANG': 'C.UTF-8',
      'TERM': 'dumb',
    }
    tried = self.run(':')
    if tried.status != 'ended' or tried.exit_code != 0:
      why = tried.reason or tried.output.decode(errors='replace').strip() or f'exit code {tried.exit_code}'
      raise UserError(
        f'Commands of an agent cannot be confined to its workspace on this machine: {why}. Do not allow it any, or '
        'enable user namespaces (sysctl kernel.unprivileged_userns_clone, '
        'kernel.apparmor_restrict_unprivileged_userns).'
      )

  def run(self, command: str, *, wall_s: float | None = None, cancelled: Cancellation | None = None) -> ShellReport:
    """Run `bash -c command` in the workspace and wait until it and all its children have ended.

    Args:
      command: the agent's command.
      wall_s: seconds that it may take; None or more than the limit means the limit.
      cancelled: lets another thread end the command.

    Raises:
      UserError: the workspace cannot be read.
    """
    wall_s = min(wall_s or self._limits.wall_s, self._limits.wall_s)
    began = time.monotonic()
    try:
      shared = shared_files(self._workspace)
    except OSError as error:
      raise UserError(f'The workspace {self._workspace} cannot be read ({error}).') from error
    group = cgroups.create(self._limits.memory_mb * 2**20, self._limits.processes)
    with contextlib.ExitStack() as stack:
      if group is not None:
        stack.callback(group.remove)
      at = stack.enter_context(tempfile.TemporaryDirectory(prefix='sdpo_shell_', ignore_cleanup_errors=True))
      doors = [] if group is None else stack.enter_context(group.doors())
      job = {
        'at': os.path.realpath(at),
        'workspace': str(self._workspace),
        'readable': self._readable,
        'shared': [str(path) for path in shared],
        'doors': doors,
        'tmp_mb': self._limits.tmp_mb,
        'limits': dataclasses.asdict(self._limits),
        'shell': [self._bash, '--noprofile', '--norc', '-c', command],
        'environment': self._environment,
      }
      request = stack.enter_context(tempfile.TemporaryFile())
      request.write(json.dumps(job).encode())
      request.seek(0)
      answer, told = os.pipe()
      stack.callback(os.close, answer)
      try:
        child = subprocess.Popen(
          [sys.executable, '-I', str(CHILD), str(os.getpid()), str(request.fileno()), str(told)],
          stdin=subprocess.DEVNULL,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          env={'LANG': 'C.UTF-8'},
          cwd='/',
          pass_fds=[request.fileno(), told, *doors],
          start_new_session=True,
        )
      finally:
        os.close(told)
      kept = _Kept(self._limits.kept_bytes)
      status = _watch(child, kept, began + wall_s, cancelled)
      os.set_blocking(answer, False)
      said = b''
      with contextlib.suppress(BlockingIOError):  # The ended process has written nothing.
        said = os.read(answer, _CHUNK)
    wall = time.monotonic() - began
    told = {name: value for line in said.splitlines() for name, value in json.loads(line).items()}
    exit_code, reason = None, ''
    if status == 'ended' and ('failed' in told or not told):
      status, reason = 'failed', told.get('failed', 'it ended before its command began')
    elif status == 'ended':
      exit_code = told['exit_code']
    return ShellReport(status, exit_code, kept.value(), kept.dropped, wall, reason)


class Cancellation(contextlib.AbstractContextManager['Cancellation']):
  """Lets another thread end a command."""

  def __init__(self):
    self._read, self._write = os.pipe()

  def __exit__(self, *error: object) -> None:
    os.close(self._read)
    os.close(self._write)

  def set(self) -> None:
    """End the command; may be called repeatedly, from any thread."""
    os.write(self._write, b'x')

  def fileno(self) -> int:
    """Return a descriptor that is readable once the command should end."""
    return self._read


def _watch(
  child: subprocess.Popen, kept: _Kept, deadline: float, cancelled: Cancellation | None
) -> Literal['ended', 'timeout', 'cancelled']:
  """Read a command's output until it ends or is killed."""
  status: Literal['ended', 'timeout', 'cancelled'] = 'ended'
  assert child.stdout is not None
  with selectors.DefaultSelector() as selector, child:
    selector.register(child.stdout, selectors.EVENT_READ)
    if cancelled is not None:
      selector.register(cancelled, selectors.EVENT_READ)
    try:
      while True:
        ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
          status = 'timeout'
        elif cancelled is not None and any(key.fileobj is cancelled for key, _ in ready):
          status = 'cancelled'
        else:
          chunk = os.read(child.stdout.fileno(), _CHUNK)
          kept.add(chunk)
          if chunk:
            if time.monotonic() < deadline:
              continue
            status = 'timeout'  # Its output never ends.
        break
    finally:
      if status != 'ended' or sys.exc_info()[0] is not None:
        child.send_signal(signal.SIGKILL)  # Ends the namespace with everything in it.
        if status != 'ended':
          os.set_blocking(child.stdout.fileno(), False)
          with contextlib.suppress(BlockingIOError):
            kept.add(os.read(child.stdout.fileno(), _CHUNK))
    child.wait()
  return status


class _Kept:
  """The beginning and the end of an output."""

  def __init__(self, limit: int):
    self._half, self._head, self._tail, self.dropped = limit // 2, bytearray(), bytearray(), 0

  def add(self, chunk: bytes) -> None:
    room = self._half - len(self._head)
    self._head += chunk[:room]
    self._tail += chunk[room:]
    over = len(self._tail) - self._half
    if over > 0:
      del self._tail[:over]
      self.dropped += over

  def value(self) -> bytes:
    return bytes(self._head + self._tail)


def shared_files(workspace: pathlib.Path) -> list[pathlib.Path]:
  """Return the files in a folder with hard links outside of it, where a write would change them, too.

  Raises:
    OSError: the folder cannot be read.
  """
  found: dict[tuple[int, int, int], list[pathlib.Path]] = {}  # By device, inode and number of links.

  def fail(error: OSError) -> None:
    raise error

  for folder, _, names in os.walk(workspace, onerror=fail):
    for name in names:
      path = pathlib.Path(folder, name)
      try:
        status = os.lstat(path)
      except FileNotFoundError:  # Removed meanwhile.
        continue
      if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        found.setdefault((status.st_dev, status.st_ino, status.st_nlink), []).append(path)
  return [path for (_, _, links), paths in found.items() if len(paths) < links for path in paths]
