"""Runs a process for every program; runs on its own, beside the training process, with an empty environment.

    python -I -X utf8 zygote.py DESCRIPTOR

DESCRIPTOR is a socket (AF_UNIX, SOCK_SEQPACKET) to the owner. The first message on it holds settings (`Settings` in
sandbox.py); every further one is a job with six descriptors: standard input, output and error, payload, result,
channel. The answer goes to the job's channel: what became of the process, or why it was not started. The owner ends a
job by writing to its channel or closing it, and everything by closing the socket.

This process never reads a payload or what a program prints, and does not fork programs itself: they are copies of the
seed (seed.py), which it forks before the first job, so that none finds in its memory what became of another. Standard
library only.
"""

from __future__ import annotations

import atexit
from collections.abc import Generator
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
DESCRIPTORS = 6  # Of a job.
SLICE_S = 0.002  # How long the zygote counts or removes files before it looks after the programs' time again.
MAX_GARBAGE = 8  # Directories of ended programs that may be waiting for their removal when another starts.
POLL_S = 0.05  # How often the scratch directory and the threads of a program are looked at.
MAX_ENTRIES = 4096  # Files and directories of a program.
MAX_DESCRIPTORS = 64
MAX_THREADS = 64
UID_BASE, UIDS, MAX_SLOTS = 2_000_000_000, 2**16, 1024  # User ids of nobody, for programs of a privileged owner.
NOBODY = 65534
PR_SET_CHILD_SUBREAPER = 36


def load(path: str) -> types.ModuleType:
  """Return the module in a file, under the file's name."""
  name = os.path.splitext(os.path.basename(path))[0]
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


HERE = os.path.dirname(os.path.abspath(__file__))
confinement = load(os.path.join(HERE, 'confinement.py'))
library = load(os.path.join(HERE, 'library.py'))
scratch = load(os.path.join(HERE, 'scratch.py'))
seed = load(os.path.join(HERE, 'seed.py'))
view = load(os.path.join(HERE, 'view.py'))


class HarnessFault(Exception):
  """The harness cannot be loaded."""


class Process:
  """A running program, as the zygote sees it."""

  def __init__(
    self, pid: int, user: int | None, channel: socket.socket, directory: str | None, init: int | None, limits: dict
  ):
    self.pid, self.user, self.channel, self.limits = pid, user, channel, limits
    self.directory = directory  # Whose use the zygote watches; None: a file system of its own, which the kernel bounds.
    self.init = init  # The first process of its namespace of process ids, if it has one.
    self.started = time.monotonic()
    self.ended_by: str | None = None  # Why the zygote killed it.
    self.next_check = self.started + min(limits['wall_s'], limits['cpu_s'], POLL_S)
    self.survey: Generator[None, None, bool] | None = None  # Of its directory, under way.

  def kill(self, reason: str) -> None:
    self.ended_by = self.ended_by or reason
    self.next_check = float('inf')
    for target in (-self.pid, self.pid):
      try:
        os.kill(target, signal.SIGKILL)
      except ProcessLookupError:
        pass  # The group has gone, or was not made yet.

  def check(self, now: float, proc: int | None) -> None:
    """Kills the program if it is over a limit that the kernel does not watch; takes little time whatever it has done.

    Args:
      now: time of the monotonic clock.
      proc: an open /proc; None: there is none.
    """
    try:
      # clock_getcpuclockid(3): the CPU clock of another process.
      cpu_s = time.clock_gettime((~self.pid << 3) | 2)
    except OSError:
      self.next_check = now + POLL_S  # It has just ended.
      return
    left = min(self.started + self.limits['wall_s'] - now, self.limits['cpu_s'] - cpu_s)
    if left <= 0:
      return self.kill('timeout')
    if threads(self.pid, proc) > MAX_THREADS:
      return self.kill('threads')
    self.next_check = now + min(max(left, 0.001), POLL_S)
    if self.directory is not None:
      most = self.limits['file_mb'] * MIB
      self.survey = self.survey or scratch.survey(self.directory, self.pid, proc, most, MAX_ENTRIES)
      over = advance(self.survey)
      if over is None:
        self.next_check = now  # After whatever else is to be done.
        return
      self.survey = None
      if over:
        self.kill('output')


class Zygote:
  """The loop over jobs."""

  def __init__(self, control: socket.socket, settings: dict):
    self.entered = enter(settings['doors'])
    self.owner = watch(settings['owner'])
    namespaces = view.separate() if settings['view'] else []  # What follows may be a fork of this process.
    self.control = control
    self.mechanism: str = settings['mechanism']
    self.scratch: str = settings['scratch']
    self.pid = os.getpid()
    self.processes: dict[int, Process] = {}
    own_users = os.geteuid() == 0 and self.mechanism == 'landlock' and 'user' not in namespaces
    self.users = user_ids() if own_users else range(0)
    self.version = landlock_version(self.mechanism)
    aliases = {path: os.path.realpath(path) for path in sys.path if os.path.realpath(path) != path}
    # Not the packages of the interpreter of which a virtual environment is one, as a bubblewrap's is.
    sys.path[:] = [
      path
      for path in map(os.path.realpath, sys.path)
      if below(path, settings['readable'])
      and (path in settings['packages'] or os.path.basename(path) not in library.PACKAGES)
    ]
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
    confinement.call('prctl', PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.path.exists('/proc/self/oom_score_adj'):
      with open('/proc/self/oom_score_adj', 'w') as file:
        file.write('1000')  # Where memory runs out, programs go first.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    self.baseline = address_space()
    self.proc = os.open('/proc', os.O_PATH | os.O_DIRECTORY) if os.path.exists('/proc/self') else None
    self.ids: view.ProcessIds | None = None
    self.filter: bytes | None = None  # Of system calls, where all programs have the same process id.
    self.inits: set[int] = set()
    self.garbage: list[Generator[None, None, bool]] = []  # Removals under way.
    self.most_garbage = 0 if self.mechanism == 'bubblewrap' else MAX_GARBAGE
    self.layers = []
    self.copied = 0  # Bytes of Python in memory.
    if settings['view']:
      if 'user' in namespaces:  # Process ids are others than outside.
        if self.proc is not None:
          os.close(self.proc)
        self.proc = view.processes(self.scratch)
      self.ids = view.ProcessIds()
      self.filter = confinement.filter_program(view.PROGRAM)
      aliases = {path: real for path, real in aliases.items() if below(real, settings['readable'])}
      copies = None
      if settings['modules'] is not None:
        standard = [path for path in settings['readable'] if path not in settings['packages']]
        names = {*settings['modules'], *loaded(settings['packages'])}
        copies = library.files(standard, settings['packages'], names)
        self.copied = library.size(copies)
      view.build(settings['readable'], aliases, self.scratch, copies)
      memory = f' in memory ({self.copied // MIB} MiB)' * (copies is not None)
      self.layers += [f'namespaces of {", ".join([*namespaces, "pid"])}', f'read-only view{memory}', 'own tmpfs']
    elif self.users:
      view.reach([*settings['readable'], self.scratch])
    self.readable = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in settings['readable']]
    self.layers += [f'Landlock {self.version}'] * bool(self.version)
    self.layers += ['seccomp'] * (self.mechanism != 'none') + ['own user ids'] * bool(self.users)
    gc.collect()
    gc.freeze()  # So that a collection in a program does not copy every page.
    self.seed = seed.Seed(self.child, self.readable)

  def serve(self) -> None:
    """Run jobs until the owner closes the socket or ends."""
    wake_r, wake_w = os.pipe()
    for end in (wake_r, wake_w):
      os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    self.selector = selectors.DefaultSelector()
    if self.owner is not None:
      self.selector.register(self.owner, selectors.EVENT_READ, self.close)
    self.selector.register(wake_r, selectors.EVENT_READ, lambda: os.read(wake_r, 4096))
    self.open = True
    while self.open:
      self.check()
      if self.garbage and advance(self.garbage[0]) is not None:
        del self.garbage[0]
      # Programs that leave much behind wait for its removal, and nobody else.
      ready, listening = len(self.garbage) <= self.most_garbage, self.control in self.selector.get_map()
      if ready and not listening:
        self.selector.register(self.control, selectors.EVENT_READ, self.accept)
      elif listening and not ready:
        self.selector.unregister(self.control)
      next_check = min((process.next_check for process in self.processes.values()), default=float('inf'))
      if self.garbage:
        next_check = 0.0
      wait = None if next_check == float('inf') else max(0.0, next_check - time.monotonic())
      for key, _ in self.selector.select(wait):
        key.data()
      self.reap()
    for process in list(self.processes.values()):
      process.kill('closed')
    while self.processes or self.inits:
      self.reap(0)
    self.seed.close()
    if self.ids is None:
      self.open_scratch()
      scratch.remove(self.scratch)

  def check(self) -> None:
    """Look after the limits of the programs whose turn it is."""
    now = time.monotonic()
    for process in list(self.processes.values()):
      if process.next_check <= now:
        process.check(now, self.proc)

  def close(self) -> None:
    self.open = False

  def accept(self) -> None:
    """Start the job of the next message."""
    message, fds, _, _ = socket.recv_fds(self.control, MESSAGE, DESCRIPTORS, seed.MSG_CMSG_CLOEXEC)
    if not message:
      return self.close()
    job = json.loads(message)
    channel = socket.socket(fileno=fds.pop())
    try:
      process = self.start(job, channel, fds)
    except OSError as error:
      send(channel, {'fault': f'a program cannot be started ({error})'})
      channel.close()
    else:
      self.processes[process.pid] = process
      self.selector.register(channel, selectors.EVENT_READ, lambda: self.stop(process))
    finally:
      for fd in fds:
        os.close(fd)

  def start(self, job: dict, channel: socket.socket, fds: list[int]) -> Process:
    """Forks the process of a job; raises OSError where the machine has no room for it."""
    user, init = self.free_user(), None
    given = [*fds, channel.fileno()]
    if self.ids is not None:
      directory = None
      with self.ids.separate() as (init, namespace):
        self.inits.add(init)
        try:
          pid = self.seed.fork(for_program(job, user, view.SCRATCH), given, namespace)
        except OSError:
          os.kill(init, signal.SIGKILL)
          raise
    else:
      directory = os.path.join(self.scratch, secrets.token_hex(16))
      self.open_scratch()
      os.mkdir(directory, 0o700)
      if self.mechanism == 'bubblewrap':  # Programs are of one user there, and run one after the other.
        os.chmod(self.scratch, 0o100)
      try:
        pid = self.seed.fork(for_program(job, user, directory), given)
      except OSError:
        self.discard(directory)
        raise
    return Process(pid, user, channel, directory, init, job['limits'])

  def free_user(self) -> int | None:
    """Return a user id that no other program has now, by chance, which tells nothing of the others; None: there are
    none.
    """
    taken = {process.user for process in self.processes.values()}
    while self.users:
      user = self.users[secrets.randbelow(len(self.users))]
      if user not in taken or len(self.users) <= len(taken):
        return user
    return None

  def stop(self, process: Process) -> None:
    """Kills a process that its owner wants no more."""
    self.selector.unregister(process.channel)
    process.kill('owner')

  def reap(self, options: int = os.WNOHANG) -> None:
    """Report every process that has ended."""
    while options == os.WNOHANG or self.processes or self.inits:
      pid, status, usage = os.wait4(-1, options)
      if pid == 0:
        return
      if pid == self.seed.pid:
        os._exit(1)  # Programs end with this process, and the owner starts another.
      self.inits.discard(pid)
      process = self.processes.pop(pid, None)
      if process is None:
        continue  # The first of a namespace, or a stray.
      if process.init in self.inits:
        os.kill(process.init, signal.SIGKILL)
      if self.mechanism == 'none':
        while left := strays({*self.processes, self.seed.pid}):
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
      if process.channel in self.selector.get_map():
        self.selector.unregister(process.channel)
      send(process.channel, report)
      process.channel.close()
      if process.directory is not None:
        self.discard(process.directory)

  def open_scratch(self) -> None:
    """Make the directory of the scratch directories one that this process may change."""
    if self.mechanism == 'bubblewrap':
      os.chmod(self.scratch, 0o700)

  def discard(self, directory: str) -> None:
    """Remove the scratch directory of a program that has ended, little by little."""
    self.open_scratch()
    self.garbage.append(scratch.removal(directory))

  def child(self, job: bytes, fds: list[int]) -> None:
    """Be the process of one job, a copy of the seed; do not return."""
    leave = os._exit
    try:
      told = json.loads(job)
      if self.confine(told['limits'], told['user'], told['directory'], fds):
        confinement.close_from(FIRST_FREE)
        run(self.probe.run if told['probe'] else self.harness.run, told['directory'], leave)
    except BaseException:
      traceback.print_exc()
    finally:
      leave(70)

  def confine(self, limits: dict, user: int | None, directory: str, fds: list[int]) -> bool:
    """Confines this process for good; False, after a message on the channel, if that fails."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for fd in fds]
    channel, stdin = high.pop(), None
    try:
      os.setpgid(0, 0)
      for target, fd in enumerate(high):
        os.dup2(fd, target)
      if self.ids is not None:
        view.own_files(limits['file_mb'] * MIB, MAX_ENTRIES, user, 0)
        stdin = os.open(view.STDIN, os.O_PATH)
      elif user is not None:
        os.chown(directory, user, user)
      opened = os.open(directory, os.O_PATH | os.O_DIRECTORY)
      os.chdir(directory)
      set_limits(limits, self.baseline, len(self.users) > 1)
      if self.mechanism != 'none':
        confinement.drop_privileges(user)
      confinement.die_with_parent(self.pid if self.ids is None else 0)
      if self.version:
        confinement.restrict_files(self.version, self.readable, opened, stdin)
      if self.mechanism != 'none':
        confinement.restrict_calls(self.filter or confinement.filter_program(os.getpid()))
    except (OSError, ValueError) as error:
      reason = getattr(error, 'strerror', None) or error
      os.write(channel, json.dumps({'fault': f'a program cannot be confined: {reason}'}).encode())
      return False
    return True


def run(harness, directory: str, leave) -> None:
  """Run the payload and end as Python does: threads joined, exit functions called, output written."""
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
  """Return what `sys.exit` means by its argument."""
  if error.code is None:
    return 0
  if isinstance(error.code, int):
    return error.code & 0xFF
  print(error.code, file=sys.stderr)
  return 1


def standard_streams() -> None:
  """Put new objects on descriptors 0, 1 and 2, as a fresh interpreter makes them."""
  options = dict(encoding='utf-8', closefd=False)
  sys.stdin = sys.__stdin__ = open(0, errors='surrogateescape', **options)
  sys.stdout = sys.__stdout__ = open(1, 'w', errors='surrogateescape', **options)
  raw = io.FileIO(2, 'w', closefd=False)
  sys.stderr = sys.__stderr__ = io.TextIOWrapper(
    io.BufferedWriter(raw), 'utf-8', 'backslashreplace', line_buffering=True, write_through=True
  )


def set_limits(limits: dict, baseline: int, own_user: bool) -> None:
  """Set the kernel's limits on this process; memory is what it takes beyond the zygote's `baseline`."""
  cpu_s = int(-(-limits['cpu_s'] // 1))
  values = {
    resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
    resource.RLIMIT_AS: baseline + limits['memory_mb'] * MIB,
    resource.RLIMIT_FSIZE: limits['file_mb'] * MIB,
    resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
    resource.RLIMIT_CORE: 1,  # 0 would not keep the kernel from feeding a crash to the system's handler; see core(5).
  }
  # The kernel counts threads and pending signals of a user, not of a process: other programs of the same one would meet
  # the limit, and signals tell them.
  if own_user:
    values |= {resource.RLIMIT_NPROC: MAX_THREADS, resource.RLIMIT_SIGPENDING: MAX_THREADS}
  for limit, value in values.items():
    soft, hard = value if isinstance(value, tuple) else (value, value)
    most = resource.getrlimit(limit)[1]
    if most != resource.RLIM_INFINITY:
      soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(limit, (soft, hard))


def user_ids() -> range:
  """User ids that no one else has, one a slot; nobody's alone where a user namespace has fewer; none where not even
  that.

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


def enter(doors: list[int]) -> bool:
  """Whether this process is in a control group now, to all of whose `doors`, its files cgroup.procs, it writes."""
  try:
    for descriptor in doors:
      os.write(descriptor, b'0')
  except OSError:
    return False  # For example, the group has been removed.
  finally:
    for descriptor in doors:
      os.close(descriptor)
  return bool(doors)


def watch(owner: int | None) -> int | None:
  """Return a descriptor that becomes readable when the process `owner` ends, also where a fork of it keeps the socket
  open.
  """
  if owner is None:
    return None
  fd = confinement.call('pidfd_open', owner, 0)
  if os.getppid() != owner:
    raise ProcessLookupError(f'process {owner} has ended')
  return fd


def strays(known: set[int]) -> list[int]:
  """Children of this process that are not `known`: what an unconfined program left behind."""
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


def loaded(directories: list[str]) -> set[str]:
  """Names of the modules and packages of this process that come from these directories."""
  files = {name: getattr(module, '__file__', None) or '' for name, module in sys.modules.items()}
  return {name.partition('.')[0] for name, file in files.items() if below(os.path.realpath(file), directories)}


def below(path: str, directories: list[str]) -> bool:
  """Whether a path is one of the directories or lies in one."""
  return any(path == directory or path.startswith(directory + '/') for directory in directories)


def advance(work: Generator[None, None, bool]) -> bool | None:
  """Goes on with some work for a few milliseconds; its value, None if it has not ended by then."""
  end = time.monotonic() + SLICE_S
  try:
    while time.monotonic() < end:
      next(work)
  except StopIteration as finished:
    return finished.value
  return None


def landlock_version(mechanism: str) -> int:
  """Version of Landlock to be used, 0: none; raises confinement.Unsupported where the mechanism is nothing without."""
  if mechanism == 'none':
    return 0
  try:
    return confinement.landlock_version()
  except confinement.Unsupported:
    if mechanism == 'landlock':
      raise
    return 0


def threads(pid: int, proc: int | None) -> int:
  """Threads of a process; 0 once it has gone, or where there is no `proc`, an open /proc, to say."""
  if proc is None:
    return 0
  try:
    with open(os.open(f'{pid}/stat', os.O_RDONLY, dir_fd=proc)) as file:
      return int(file.read().rpartition(')')[2].split()[17])
  except (OSError, IndexError):
    return 0


def for_program(job: dict, user: int | None, directory: str) -> bytes:
  """Return a job as its process hears of it."""
  return json.dumps({'limits': job['limits'], 'probe': job['probe'], 'user': user, 'directory': directory}).encode()


def send(channel: socket.socket, report: dict) -> None:
  """One message to the owner, who may have gone."""
  try:
    channel.send(json.dumps(report).encode())
  except OSError:
    pass


def main() -> None:
  while os.dup(2) < FIRST_FREE - 1:
    pass  # Those below are every program's own.
  control = socket.socket(fileno=int(sys.argv[1]))
  control.set_inheritable(False)
  settings = json.loads(control.recv(MESSAGE))
  os.umask(0o022)
  try:
    zygote = Zygote(control, settings)
  except Exception as error:
    control.send(json.dumps({'fault': str(error), 'harness': isinstance(error, HarnessFault)}).encode())
    return
  control.send(json.dumps({'layers': zygote.layers, 'entered': zygote.entered, 'copied': zygote.copied}).encode())
  zygote.serve()


if __name__ == '__main__':
  main()
