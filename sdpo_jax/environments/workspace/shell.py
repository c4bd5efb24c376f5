"""An agent's commands in its workspace: bash, with a read-only system, no network and no other processes.

Kernel namespaces isolate a command from everything outside; without them there are no commands, and `Shell` raises an
error. shell_child.py sets them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Literal

from sdpo_jax.environments.sandbox import cgroups
from sdpo_jax.environments.workspace.boundary import checked_workspace
from sdpo_jax.environments.workspace.survey import MIB, DiskLimit, survey
from sdpo_jax.errors import UserError, printable
from sdpo_jax.tables import counted

CHILD = pathlib.Path(__file__).with_name('shell_child.py')
# Paths that a command may read where they exist. Only the parts of /etc that programs need to start.
SYSTEM = ('/usr', '/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32', '/opt')
ETC = (
  *('passwd', 'group', 'hosts', 'nsswitch.conf', 'localtime', 'ld.so.cache', 'ld.so.conf', 'ld.so.conf.d'),
  *('alternatives', 'ssl/certs', 'ca-certificates', 'mime.types', 'bash.bashrc', 'gitconfig', 'magic'),
)
_CHUNK = 2**16
LOOK_S = 0.1  # Seconds between looks at the clock and the disk, while something runs.


@dataclasses.dataclass(frozen=True)
class ShellLimits:
  """Limits of one command."""

  wall_s: float = 120.0
  cpu_s: int = 300  # Per process.
  memory_mb: int = 4096  # Per process, and in total where control groups can be made.
  file_mb: int = 1024  # Largest file.
  disk_mb: int = 2048  # What it may add to the disk of the workspace; it is ended soon after it has added more.
  tmp_mb: int = 512  # Size of its temporary directory and of its shared memory, which are removed with it.
  processes: int = 512
  descriptors: int = 1024
  kept_bytes: int = 2**20  # Bytes of output that are kept; the middle of longer output is dropped.


@dataclasses.dataclass(frozen=True)
class ShellReport:
  """The result of a command."""

  status: Literal['ended', 'timeout', 'cancelled', 'stopped', 'failed']
  exit_code: int | None  # If negative, the number of the signal that ended it.
  output: bytes  # Standard output and error in order of arrival; the middle may be missing.
  dropped: int  # Bytes missing in `output`, after its first half.
  wall_s: float
  reason: str = ''  # Why it has failed or was stopped.
  missing: tuple[str, ...] = ()  # Parts of a command's surroundings that this machine forbids.
  closed: int = 0  # Files or folders of the workspace that it could not change.
  note: str = ''  # What it could not see of the workspace.


class Shell:
  """Runs commands in a workspace; calls from several threads run in parallel."""

  def __init__(
    self,
    workspace: pathlib.Path,
    limits: ShellLimits = ShellLimits(),
    *,
    readable: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
  ):
    """Make a shell and test it with a command that does nothing.

    Args:
      workspace: a folder, the only one that commands can change.
      limits: limits of each command.
      readable: real paths of further folders that commands can read.
      variables: further environment variables of commands.

    Raises:
      UserError: the workspace cannot be one, as `checked_workspace` says, or commands cannot be confined to it on this
        machine.
    """
    self._workspace = checked_workspace(workspace)
    self._limits = limits
    self._bash = shutil.which('bash', path='/usr/bin:/bin:/usr/local/bin')
    if self._bash is None:
      raise UserError('There is no bash on this machine, so an agent cannot run commands: do not allow it any.')
    python = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)}
    found = {*SYSTEM, *(f'/etc/{name}' for name in ETC), *python, *readable}
    self._readable = sorted(path for path in found if os.path.lexists(path))  # A folder before those within it.
    self._environment = {  # Nothing of this process's own.
      'PATH': f'{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin',
      'HOME': '/tmp',
      'LANG': 'C.UTF-8',
      'TERM': 'dumb',
      **(variables or {}),
    }
    tried = self.run(':')
    if tried.status != 'ended' or tried.exit_code != 0:
      why = tried.reason or tried.output.decode(errors='replace').strip() or f'exit code {tried.exit_code}'
      raise UserError(
        f'Commands of an agent cannot be confined to its workspace on this machine: {why}. Do not allow it any, or '
        'enable user namespaces (sysctl kernel.unprivileged_userns_clone, '
        'kernel.apparmor_restrict_unprivileged_userns).'
      )
    notes = [tried.note] if tried.note else []
    if tried.missing:
      notes.append(f'This machine forbids commands {", ".join(tried.missing)}; what needs that will fail in them.')
    if tried.closed:
      notes.append(
        f'Commands cannot change {tried.closed} files or folders of the workspace, since they have hard links outside '
        'of it or run with the rights of their owner: if they should, copy the workspace (cp -r) and work in the copy.'
      )
    self.notes = ' '.join(notes)  # What a person should know about commands in this workspace.

  def run(
    self,
    command: str,
    *,
    wall_s: float | None = None,
    cancelled: Cancellation | None = None,
    shown: Callable[[bytes], None] = lambda chunk: None,
  ) -> ShellReport:
    """Run `bash -c command` in the workspace and wait until it and all its children have ended.

    Args:
      command: the agent's command.
      wall_s: seconds that it may take; None or more than the limit means the limit.
      cancelled: lets a signal handler or another thread end the command.
      shown: called with each piece of output, and often with none while the command runs.

    Raises:
      UserError: the workspace cannot be read.
    """
    wall_s = min(wall_s or self._limits.wall_s, self._limits.wall_s)
    began = time.monotonic()
    try:
      before = survey(self._workspace)
    except OSError as error:
      raise UserError(f'The workspace {self._workspace} cannot be read ({error}): chmod u+rx it.') from error
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
        'closed': before.closed,
        'hidden': before.sockets + before.unreadable,
        'doors': doors,
        'tmp_mb': self._limits.tmp_mb,
        'limits': dataclasses.asdict(self._limits),
        'shell': [self._bash, '--noprofile', '--norc', '-c', command],
        'environment': self._environment,
      }
      request = stack.enter_context(tempfile.TemporaryFile())
      request.write(json.dumps(job).encode())
      request.seek(0)
      # In memory, since the command may fill the disk.
      answer = stack.enter_context(open(os.memfd_create('answer'), 'rb'))
      child = subprocess.Popen(
        [sys.executable, '-I', '-S', str(CHILD), str(os.getpid()), str(request.fileno()), str(answer.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={'LANG': 'C.UTF-8'},
        cwd='/',
        pass_fds=[request.fileno(), answer.fileno(), *doors],
        start_new_session=True,
      )
      kept = _Kept(self._limits.kept_bytes)
      disk = DiskLimit(self._workspace, before, self._limits.disk_mb * MIB)
      status, reason = _watch(child, kept, began + wall_s, cancelled, disk, shown)
      answer.seek(0)
      told = {name: value for line in answer for name, value in json.loads(line).items()}
    wall = time.monotonic() - began
    if status == 'ended' and ('failed' in told or 'exit_code' not in told):
      # A Ctrl-C may have reached the command while it was started.
      status = 'cancelled' if cancelled is not None and cancelled.done else 'failed'
      reason = told.get('failed', 'it ended before its command began')
    exit_code = told['exit_code'] if status == 'ended' else None
    missing = tuple(told.get('missing', ()))
    note = ''
    if before.unreadable:
      note = (
        f'Commands find {counted(len(before.unreadable), "folder")} of the workspace empty, since they cannot be read, '
        f'such as {printable(before.unreadable[0], 500)}: chmod u+rx it outside of the session if they should see it.'
      )
    return ShellReport(status, exit_code, kept.value(), kept.dropped, wall, reason, missing, len(before.closed), note)


class Cancellation(contextlib.AbstractContextManager['Cancellation']):
  """Lets a signal handler or another thread end a command."""

  def __init__(self):
    self.done, self._event = False, os.eventfd(0)

  def __exit__(self, *error: object) -> None:
    os.close(self._event)

  def set(self) -> None:
    """End the command; may be called repeatedly, from any thread or signal handler."""
    self.done = True
    os.eventfd_write(self._event, 1)

  def fileno(self) -> int:
    """Return a descriptor that is readable once the command should end."""
    return self._event


def _watch(
  child: subprocess.Popen,
  kept: _Kept,
  deadline: float,
  cancelled: Cancellation | None,
  disk: DiskLimit,
  shown: Callable[[bytes], None],
) -> tuple[Literal['ended', 'timeout', 'cancelled', 'stopped'], str]:
  """Read a command's output until it ends or is killed; return how it ended, and why it was stopped."""
  status: Literal['ended', 'timeout', 'cancelled', 'stopped'] = 'ended'
  reason: str | None = None
  assert child.stdout is not None
  with selectors.DefaultSelector() as selector, child:
    selector.register(child.stdout, selectors.EVENT_READ)
    if cancelled is not None:
      selector.register(cancelled, selectors.EVENT_READ)
    look = 0.0
    try:
      while True:
        ready = [key.fileobj for key, _ in selector.select(max(0.0, min(LOOK_S, deadline - time.monotonic())))]
        now = time.monotonic()
        if now >= look:
          reason, look = disk.exceeded(child.pid), now + LOOK_S
        if cancelled in ready:
          status = 'cancelled'
        elif reason is not None:
          status = 'stopped'
        elif now >= deadline:
          status = 'timeout'
        else:
          chunk = os.read(child.stdout.fileno(), _CHUNK) if ready else b''
          kept.add(chunk)
          if chunk or not ready:
            shown(chunk)
            continue
        break
    finally:
      if status != 'ended' or sys.exc_info()[0] is not None:
        child.send_signal(signal.SIGKILL)  # Ends the namespace with everything in it.
        if status != 'ended':
          os.set_blocking(child.stdout.fileno(), False)
          with contextlib.suppress(BlockingIOError):
            kept.add(os.read(child.stdout.fileno(), _CHUNK))
    child.wait()
  return status, reason or ''


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
