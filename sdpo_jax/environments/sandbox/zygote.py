"""Forks a process for every program; runs on its own, beside the training process, with an empty environment.

    python -I -X utf8 zygote.py DESCRIPTOR

DESCRIPTOR is a socket (AF_UNIX, SOCK_SEQPACKET) to the owner. The first message on it holds settings (`Settings` in
sandbox.py); every further one is a job with six descriptors: standard input, output and error, payload, result, channel.
The answer goes to the job's channel: what became of the process, or why it was not started. The owner ends a job by
writing to its channel or closing it, and everything by closing the socket.

This process never reads a payload or what a program prints: a fork of it finds nothing of another program in its
memory. Standard library only.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import mmap
import os
import resource
import secrets
import selectors
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import types

FIRST_FREE = 5  # 0, 1 and 2, then these; what comes from there on is closed.
PAYLOAD, RESULT = 3, 4
# Modules that need shared libraries from outside the Python installation, which programs cannot read later.
LINKED = ('_bz2', '_ctypes', '_decimal', '_hashlib', '_lzma', '_sqlite3', '_ssl', '_uuid', 'zlib')
MIB = 2**20
MESSAGE = 2**16  # Bytes of a message at most.
POLL_S = 0.05  # How often the scratch directory and the threads of a program are looked at.
MAX_ENTRIES = 4096  # Files and directories of a program.
MAX_DESCRIPTORS = 64
MAX_THREADS = 64
UID_BASE, UIDS, MAX_SLOTS = 2_000_000_000, 2**16, 1024  # User ids of nobody, for programs of a privileged owner.
NOBODY = 65534
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def load(path: str) -> types.ModuleType:
  """The module in a file, under the file's name."""
  name = os.path.splitext(os.path.basename(path))[0]
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


HERE = os.path.dirname(os.path.abspath(__file__))
confinement = load(os.path.join(HERE, 'confinement.py'))
scratch = load(os.path.join(HERE, 'scratch.py'))


class HarnessFault(Exception):
  """The harness cannot be loaded."""


class Process:
  """A running program, as the zygote sees it."""

  def __init__(self, pid: int, slot: int, channel: socket.socket, scratch: str, limits: dict):
    self.pid, self.slot, self.channel, self.scratch, self.limits = pid, slot, channel, scratch, limits
    self.started = time.monotonic()
    self.ended_by: str | None = None  # Why the zygote killed it.
    self.next_check = self.started + min(limits['wall_s'], limits['cpu_s'], POLL_S)

  def kill(self, reason: str) -> None:
    self.ended_by = self.ended_by or reason
    self.next_check = float('inf')
    for target in (-self.pid, self.pid):
      try:
        os.kill(target, signal.SIGKILL)
      except ProcessLookupError:
        pass  # The group has gone, or was not made yet.

  def check(self, now: float) -> None:
    """Kills the program if it is over a limit that the kernel does not watch."""
    try:
      # clock_getcpuclockid(3): the CPU clock of another process.
      cpu_s = time.clock_gettime((~self.pid << 3) | 2)
    except OSError:
      self.next_check = now + POLL_S  # It has just ended.
      return
    left = min(self.started + self.limits['wall_s'] - now, self.limits['cpu_s'] - cpu_s)
    if left <= 0:
      self.kill('timeout')
    elif scratch.used(self.scratch, self.pid, self.limits['file_mb'] * MIB, MAX_ENTRIES):
      self.kill('output')
    elif threads(self.pid) > MAX_THREADS:
      self.kill('threads')
    else:
      self.next_check = now + min(max(left, 0.001), POLL_S)


class Zygote:
  """The loop over jobs."""

  def __init__(self, control: socket.socket, settings: dict):
    self.control = control
    self.mechanism: str = settings['mechanism']
    self.scratch: str = settings['scratch']
    self.pid = os.getpid()
    self.processes: dict[int, Process] = {}
    self.selector = selectors.DefaultSelector()
    self.uids = user_ids() if os.geteuid() == 0 and self.mechanism == 'landlock' else range(0)
    self.version = confinement.landlock_version() if self.mechanism == 'landlock' else 0
    sys.path[:] = [path for path in map(os.path.realpath, sys.path) if below(path, settings['readable'])]
    sys.path += [path for path in settings['packages'] if path not in sys.path]
    for name in [*LINKED, *settings['preload']]:
      try:
        importlib.import_module(name)
      except ImportError:
        continue  # Programs that want it fail as they would without a zygote.
    try:
      self.harness = load(settings['harness'])
    except Exception as error:
      raise HarnessFault(f'{type(error).__name__}: {error}') from error
    self.probe = load(os.path.join(HERE, 'probe.py'))
    if self.uids:
      make_reachable([*settings['readable'], self.scratch])
    self.owner = watch(settings['owner'])
    confinement.call('prctl', PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.path.exists('/proc/self/oom_score_adj'):
      with open('/proc/self/oom_score_adj', 'w') as file:
        file.write('1000')  # Where memory runs out, programs go first.
    self.readable = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in settings['readable']]
    self.baseline = address_space()

  def serve(self) -> None:
    """Runs jobs until the owner closes the socket or ends."""
    wake_r, wake_w = os.pipe()
    for end in (wake_r, wake_w):
      os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    self.selector.register(self.control, selectors.EVENT_READ, self.accept)
    if self.owner is not None:
      self.selector.register(self.owner, selectors.EVENT_READ, self.close)
    self.selector.register(wake_r, selectors.EVENT_READ, lambda: os.read(wake_r, 4096))
    self.open = True
    while self.open:
      now = time.monotonic()
      for process in list(self.processes.values()):
        if process.next_check <= now:
          process.check(now)
      next_check = min((process.next_check for process in self.processes.values()), default=float('inf'))
      wait = None if next_check == float('inf') else max(0.0, next_check - time.monotonic())
      for key, _ in self.selector.select(wait):
        key.data()
      self.reap()
    for process in list(self.processes.values()):
      process.kill('closed')
    while self.processes:
      self.reap(0)
    scratch.remove(self.scratch)

  def close(self) -> None:
    self.open = False

  def accept(self) -> None:
    """Starts the job of the next message."""
    message, fds, _, _ = socket.recv_fds(self.control, MESSAGE, 6)
    if not message:
      return self.close()
    job = json.loads(message)
    channel = socket.socket(fileno=fds.pop())
    slot = min(set(range(len(self.processes) + 1)) - {process.slot for process in self.processes.values()})
    directory = os.path.join(self.scratch, secrets.token_hex(16))
    try:
      os.mkdir(directory, 0o700)
      pid = os.fork()
      if pid == 0:
        self.child(job, slot, directory, [*fds, channel.detach()])
    except OSError as error:
      send(channel, {'fault': f'a program cannot be started: {error}'})
      channel.close()
      scratch.remove(directory)
    else:
      process = self.processes[pid] = Process(pid, slot, channel, directory, job['limits'])
      self.selector.register(channel, selectors.EVENT_READ, lambda: self.stop(process))
    finally:
      for fd in fds:
        os.close(fd)

  def stop(self, process: Process) -> None:
    """Kills a process that its owner wants no more."""
    self.selector.unregister(process.channel)
    process.kill('owner')

  def reap(self, options: int = os.WNOHANG) -> None:
    """Reports every process that has ended."""
    while self.processes:
      try:
        pid, status, usage = os.wait4(-1, options)
      except ChildProcessError:
        return
      if pid == 0:
        return
      process = self.processes.pop(pid, None)
      if process is None:
        continue  # A stray.
      if self.mechanism == 'none':
        while left := strays(self.processes):
          for stray in left:
            os.kill(stray, signal.SIGKILL)
            os.waitpid(stray, 0)
      report = {
        'wall_s': time.monotonic() - process.started,
        'cpu_s': usage.ru_utime + usage.ru_stime,
        'exit_code': os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        'signal': os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        'ended_by': process.ended_by,
      }
      scratch.remove(process.scratch)
      if process.channel in self.selector.get_map():
        self.selector.unregister(process.channel)
      send(process.channel, report)
      process.channel.close()

  def child(self, job: dict, slot: int, directory: str, fds: list[int]) -> None:
    """The process of one job; does not return."""
    leave = os._exit
    try:
      if self.confine(job['limits'], slot, directory, fds):
        confinement.close_from(FIRST_FREE)
        run(self.probe.run if job['probe'] else self.harness.run, directory, leave)
    except BaseException:
      traceback.print_exc()
    finally:
      leave(70)

  def confine(self, limits: dict, slot: int, directory: str, fds: list[int]) -> bool:
    """Confines this process for good; False, after a message on the channel, if that fails."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for fd in fds]
    channel = high.pop()
    try:
      os.setpgid(0, 0)
      for target, fd in enumerate(high):
        os.dup2(fd, target)
      uid = self.uids[slot % len(self.uids)] if self.uids else None
      if uid is not None:
        os.chown(directory, uid, uid)
      opened = os.open(directory, os.O_PATH | os.O_DIRECTORY)
      os.chdir(directory)
      set_limits(limits, self.baseline, bool(self.uids))
      if self.mechanism != 'none':
        confinement.drop_privileges(uid)
      confinement.die_with_parent(self.pid)
      if self.mechanism == 'landlock':
        confinement.restrict_files(self.version, self.readable, opened)
      if self.mechanism != 'none':
        confinement.restrict_calls(confinement.filter_program(os.getpid()))
    except (OSError, ValueError) as error:
      reason = getattr(error, 'strerror', None) or error
      os.write(channel, json.dumps({'fault': f'a program cannot be confined: {reason}'}).encode())
      return False
    return True


def run(harness, directory: str, leave) -> None:
  """Runs the payload and ends as Python does: threads joined, exit functions called, output written."""
  write, dumps, shutdown, exit_functions = os.write, json.dumps, threading._shutdown, atexit._run_exitfuncs
  os.environ.clear()
  os.environ.update(HOME=directory, TMPDIR=directory, LANG='C.UTF-8')
  sys.argv = ['']
  standard_streams()
  if 'numpy.random' in sys.modules:
    sys.modules['numpy.random'].seed()  # Python's own generator seeds itself after a fork.
  with open(PAYLOAD, 'rb') as file:
    payload = json.loads(file.read())
  code, text = 0, b''
  try:
    text = dumps(harness(payload)).encode()
  except SystemExit as error:
    code = exit_code(error)
  except BaseException:
    traceback.print_exc()
    code = 1
  shutdown()
  exit_functions()
  for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
    try:
      if stream is not None and not getattr(stream, 'closed', False):
        stream.flush()
    except Exception:  # The program may have put anything there.
      code = code or 120  # As Python itself ends when output is lost.
  while text:
    text = text[write(RESULT, text) :]
  leave(code)


def exit_code(error: SystemExit) -> int:
  """What `sys.exit` means by its argument."""
  if error.code is None:
    return 0
  if isinstance(error.code, int):
    return error.code & 0xFF
  print(error.code, file=sys.stderr)
  return 1


def standard_streams() -> None:
  """New objects on descriptors 0, 1 and 2, as a fresh interpreter makes them."""
  options = dict(encoding='utf-8', closefd=False)
  sys.stdin = sys.__stdin__ = open(0, errors='surrogateescape', **options)
  sys.stdout = sys.__stdout__ = open(1, 'w', errors='surrogateescape', **options)
  raw = io.FileIO(2, 'w', closefd=False)
  sys.stderr = sys.__stderr__ = io.TextIOWrapper(
    io.BufferedWriter(raw), 'utf-8', 'backslashreplace', line_buffering=True, write_through=True
  )


def set_limits(limits: dict, baseline: int, own_user: bool) -> None:
  """The kernel's limits on this process; memory is what it takes beyond the zygote's `baseline`."""
  cpu_s = int(-(-limits['cpu_s'] // 1))
  values = {
    resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
    resource.RLIMIT_AS: baseline + limits['memory_mb'] * MIB,
    resource.RLIMIT_FSIZE: limits['file_mb'] * MIB,
    resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
    resource.RLIMIT_CORE: 1,  # 0 would not keep the kernel from feeding a crash to the system's handler; see core(5).
    resource.RLIMIT_SIGPENDING: MAX_THREADS,
  }
  if own_user:  # The kernel counts the threads of a user, not of a process.
    values[resource.RLIMIT_NPROC] = MAX_THREADS
  for limit, value in values.items():
    soft, hard = value if isinstance(value, tuple) else (value, value)
    most = resource.getrlimit(limit)[1]
    if most != resource.RLIM_INFINITY:
      soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(limit, (soft, hard))


def user_ids() -> range:
  """User ids that no one else has, one a slot; nobody's alone where a user namespace has fewer; none where not even that.

  Root of a namespace without other users is an ordinary user outside of it, and stays who it is.
  """
  first = UID_BASE + os.getpid() % UIDS * MAX_SLOTS
  found = range(0)
  with open('/proc/self/uid_map') as file:
    for inside, _, count in (map(int, line.split()) for line in file):
      if inside <= first and first + MAX_SLOTS <= inside + count:
        return range(first, first + MAX_SLOTS)
      if inside <= NOBODY < inside + count:
        found = range(NOBODY, NOBODY + 1)
  return found


def make_reachable(paths: list[str]) -> None:
  """Lets other users reach `paths` where a directory above them is closed: in a mount namespace of this process alone.

  Programs could otherwise not read a Python below a closed home directory once they have dropped their privileges.
  """
  closed: dict[str, list[str]] = {}
  for path in paths:
    parts = path.split('/')
    for ancestor in ('/'.join(parts[:count]) for count in range(2, len(parts))):
      if not os.stat(ancestor).st_mode & stat.S_IXOTH:
        closed.setdefault(ancestor, []).append(path)
        break
  if not closed:
    return
  libc = ctypes.CDLL(None, use_errno=True)

  def checked(result: int, what: str) -> None:
    if result:
      code = ctypes.get_errno()
      raise confinement.Unsupported(
        f'other users cannot enter {", ".join(closed)}, in which Python or the temporary directory lies, and {what} '
        f'fails ({os.strerror(code)}): put them where others can read, or run as an ordinary user'
      )

  def mount(source: str, target: str, kind: str, flags: int, data: str = '') -> None:
    encoded = [part.encode() for part in (source, target, kind, data)]
    checked(libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), 'mounting it elsewhere')

  checked(libc.unshare(CLONE_NEWNS), 'a mount namespace')
  mount('none', '/', '', MS_REC | MS_PRIVATE)
  for ancestor, inside in closed.items():
    fds = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in inside]
    mount('tmpfs', ancestor, 'tmpfs', 0, 'mode=0755,size=1m')
    for path, fd in zip(inside, fds, strict=True):
      os.makedirs(path, 0o755, exist_ok=True)
      mount(f'/proc/self/fd/{fd}', path, '', MS_BIND | MS_REC)
      os.close(fd)


def watch(owner: int | None) -> int | None:
  """A descriptor that becomes readable when the process `owner` ends, also where a fork of it keeps the socket open."""
  if owner is None:
    return None
  fd = confinement.call('pidfd_open', owner, 0)
  if os.getppid() != owner:
    raise ProcessLookupError(f'process {owner} has ended')
  return fd


def strays(known: dict[int, Process]) -> list[int]:
  """Children of this process that are no program's own process: what an unconfined program left behind."""
  found = []
  for name in filter(str.isdigit, os.listdir('/proc')):
    try:
      with open(f'/proc/{name}/stat') as file:
        parent = file.read().rpartition(')')[2].split()[1]
    except OSError:
      continue
    if int(parent) == os.getpid() and int(name) not in known:
      found.append(int(name))
  return found


def address_space() -> int:
  """Bytes of address space that this process has taken, to a MiB."""
  try:
    with open('/proc/self/statm') as file:
      return int(file.read().split()[0]) * os.sysconf('SC_PAGE_SIZE')
  except FileNotFoundError:  # In a bubblewrap: the least limit under which there is room for one page more.
    pass
  limits = resource.getrlimit(resource.RLIMIT_AS)
  too_little, enough = 0, 2**44
  while enough - too_little > MIB:
    middle = (too_little + enough) // 2
    resource.setrlimit(resource.RLIMIT_AS, (middle, limits[1]))
    try:
      mmap.mmap(-1, 1).close()
      enough = middle
    except (OSError, MemoryError):
      too_little = middle
  resource.setrlimit(resource.RLIMIT_AS, limits)
  return enough


def below(path: str, directories: list[str]) -> bool:
  """Whether a path is one of the directories or lies in one."""
  return any(path == directory or path.startswith(directory + '/') for directory in directories)


def threads(pid: int) -> int:
  """Threads of a process; 0 once it has gone, or where /proc is not there to say."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return int(file.read().rpartition(')')[2].split()[17])
  except (OSError, IndexError):
    return 0


def send(channel: socket.socket, report: dict) -> None:
  """One message to the owner, who may have gone."""
  try:
    channel.send(json.dumps(report).encode())
  except OSError:
    pass


def main() -> None:
  control = socket.socket(fileno=int(sys.argv[1]))
  settings = json.loads(control.recv(MESSAGE))
  os.umask(0o022)
  try:
    zygote = Zygote(control, settings)
  except Exception as error:
    control.send(json.dumps({'fault': str(error), 'harness': isinstance(error, HarnessFault)}).encode())
    return
  gc.collect()
  gc.freeze()  # So that a collection in a fork does not copy every page.
  control.send(b'{}')
  zygote.serve()


if __name__ == '__main__':
  main()
