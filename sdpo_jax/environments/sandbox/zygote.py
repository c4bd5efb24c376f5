"""Process server of the sandbox: runs beside the training process, with an empty environment.

    python -I -X utf8 zygote.py DESCRIPTOR

DESCRIPTOR is a socket (AF_UNIX, SOCK_SEQPACKET) to the owner. Its first message holds settings (`Settings` in
sandbox.py); every later one is a job with six descriptors: standard input, output and error, payload, result,
channel. The answer goes to the job's channel: how the process ended, or why it was not started. The owner ends a job by
writing to its channel or closing it, and everything by closing the socket.

This process never reads a payload or a program's output, and does not fork programs itself: they are copies of the seed
(seed.py), which it forks before the first job, so that none finds another's outcome in its memory. Standard library
only.
"""

from __future__ import annotations

import atexit
from collections.abc import Generator
import contextlib
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

FIRST_FREE = 5  # 0, 1 and 2, then these two; all from here on are closed.
PAYLOAD, RESULT = 3, 4
# Modules that need shared libraries outside the Python installation, which programs cannot read later.
LINKED = ('_bz2', '_ctypes', '_decimal', '_hashlib', '_lzma', '_sqlite3', '_ssl', '_uuid', 'zlib')
MIB = 2**20
MESSAGE = 2**16  # Maximum bytes of a message.
DESCRIPTORS = 6  # Per job.
SLICE_S = 0.002  # How long the zygote counts or removes files before it checks the programs' time limits again.
MAX_GARBAGE = 8  # Ended programs' directories that may await removal when another program starts.
POLL_S = 0.05  # Interval of checks of a program's scratch directory and threads.
MAX_ENTRIES = 4096  # Files and directories per program.
MAX_DESCRIPTORS = 64
MAX_THREADS = 64
UID_BASE, UIDS, MAX_SLOTS = 2_000_000_000, 2**16, 1024  # Unused user ids for the programs of a privileged owner.
PR_SET_CHILD_SUBREAPER = 36


def load(path: str) -> types.ModuleType:
  """Load the module in a file, under the file's name."""
  name = os.path.splitext(os.path.basename(path))[0]
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


HERE = os.path.dirname(os.path.abspath(__file__))
MODULES = ('confinement', 'library', 'scratch', 'seed', 'view')  # Each after those that it needs.
confinement, library, scratch, seed, view = (load(os.path.join(HERE, f'{name}.py')) for name in MODULES)


class HarnessFault(Exception):
  """The harness cannot be loaded."""


class SandboxProcess:
  """A running program and the zygote's checks of it."""

  def __init__(
    self, pid: int, user: int | None, channel: socket.socket, directory: str | None, init: int | None, limits: dict
  ):
    self.pid, self.user, self.channel, self.limits = pid, user, channel, limits
    self.directory = directory  # Whose usage is checked; None: its own file system, limited by the kernel.
    self.init = init  # The first process of its PID namespace, if it has one.
    self.started = time.monotonic()
    self.ended_by: str | None = None  # The reason why the zygote killed it.
    self.next_check = self.started + min(limits['wall_s'], limits['cpu_s'], POLL_S)
    self.survey: Generator[None, None, bool] | None = None  # The survey of its directory that is running.

  def kill(self, reason: str) -> None:
    """Kill the program and its process group; the first reason is the one that is reported."""
    self.ended_by = self.ended_by or reason
    self.next_check = float('inf')
    for target in (-self.pid, self.pid):
      with contextlib.suppress(ProcessLookupError):  # The group is gone or does not exist yet.
        os.kill(target, signal.SIGKILL)

  def check(self, now: float, proc: int | None) -> None:
    """Kill the program if it exceeds a limit that the kernel does not check; always takes little time.

    Args:
      now: time of the monotonic clock.
      proc: descriptor of /proc; None: there is none.
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
        self.next_check = now  # After all other work that is due.
        return
      self.survey = None
      if over:
        self.kill('output')


class Zygote:
  """Starts programs for the owner, checks their limits and reports how they ended."""

  def __init__(self, control: socket.socket, settings: dict):
    self.entered = enter(settings['doors'])
    self.owner = watch(settings['owner'])
    namespaces = view.separate() if settings['view'] else []  # From here on this may be a fork.
    self.control = control
    self.mechanism: str = settings['mechanism']
    self.scratch: str = settings['scratch']
    self.pid = os.getpid()
    self.processes: dict[int, SandboxProcess] = {}
    own_users = os.geteuid() == 0 and self.mechanism == 'landlock' and 'user' not in namespaces
    self.users = user_ids() if own_users else range(0)
    self.version = landlock_version(self.mechanism)
    aliases = {path: os.path.realpath(path) for path in sys.path if os.path.realpath(path) != path}
    # Excludes packages of the base interpreter of a virtual environment, as a bubblewrap does.
    sys.path[:] = [
      path
      for path in map(os.path.realpath, sys.path)
      if below(path, settings['readable'])
      and (path in settings['packages'] or os.path.basename(path) not in library.PACKAGES)
    ]
    sys.path += [path for path in settings['packages'] if path not in sys.path]
    for name in [*LINKED, *settings['preload']]:
      with contextlib.suppress(ImportError):  # Programs that need it fail as they would without a zygote.
        importlib.import_module(name)
    try:
      self.harness = load(settings['harness'])
    except Exception as error:
      raise HarnessFault(f'{type(error).__name__}: {error}') from error
    self.probe = load(os.path.join(HERE, 'self_test.py'))
    confinement.call('prctl', PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.path.exists('/proc/self/oom_score_adj'):
      with open('/proc/self/oom_score_adj', 'w') as file:
        file.write('1000')  # If memory runs out, the kernel kills programs first.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    self.baseline = address_space()
    self.proc = os.open('/proc', os.O_PATH | os.O_DIRECTORY) if os.path.exists('/proc/self') else None
    self.ids: view.ProcessIds | None = None
    self.filter: bytes | None = None  # The seccomp filter, if all programs have the same process id.
    self.inits: set[int] = set()
    self.garbage: list[Generator[None, None, bool]] = []  # Unfinished removals.
    self.most_garbage = 0 if self.mechanism == 'bubblewrap' else MAX_GARBAGE
    self.layers = []
    self.copied = 0  # Bytes of Python copied to memory.
    if settings['view']:
      if 'user' in namespaces:  # Process ids differ from those outside.
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
    gc.freeze()  # Otherwise a collection in a program copies every page.
    self.seed = seed.Seed(self.child, self.readable)

  def serve(self) -> None:
    """Run jobs until the owner ends or closes the socket."""
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
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
      # Only programs that leave much behind wait for its removal.
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
    """Check the limits of the programs that are due."""
    now = time.monotonic()
    for process in list(self.processes.values()):
      if process.next_check <= now:
        process.check(now, self.proc)

  def close(self) -> None:
    """End the loop of `serve`."""
    self.open = False

  def accept(self) -> None:
    """Receive a job and start it."""
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

  def start(self, job: dict, channel: socket.socket, fds: list[int]) -> SandboxProcess:
    """Fork the process of a job; raises OSError if the machine has no room for it."""
    user, init = self.free_user(), None
    given = [*fds, channel.fileno()]
    if self.ids is not None:
      directory = None
      with self.ids.separate() as (init, namespace):
        self.inits.add(init)
        try:
          pid = self.seed.fork(encoded(job | {'user': user, 'directory': view.SCRATCH}), given, namespace)
        except OSError:
          os.kill(init, signal.SIGKILL)
          raise
    else:
      directory = os.path.join(self.scratch, secrets.token_hex(16))
      self.open_scratch()
      os.mkdir(directory, 0o700)
      if self.mechanism == 'bubblewrap':  # There programs share one user and run one after the other.
        os.chmod(self.scratch, 0o100)
      try:
        pid = self.seed.fork(encoded(job | {'user': user, 'directory': directory}), given)
      except OSError:
        self.discard(directory)
        raise
    return SandboxProcess(pid, user, channel, directory, init, job['limits'])

  def free_user(self) -> int | None:
    """Return a random unused user id, which reveals nothing about other programs; None if there are none."""
    taken = {process.user for process in self.processes.values()}
    while self.users:
      user = self.users[secrets.randbelow(len(self.users))]
      if user not in taken or len(self.users) <= len(taken):
        return user
    return None

  def stop(self, process: SandboxProcess) -> None:
    """Kill a process that its owner no longer wants."""
    self.selector.unregister(process.channel)
    process.kill('owner')

  def reap(self, options: int = os.WNOHANG) -> None:
    """Report every process that has ended."""
    while options == os.WNOHANG or self.processes or self.inits:
      pid, status, usage = os.wait4(-1, options)
      if pid == 0:
        return
      if pid == self.seed.pid:
        os._exit(1)  # All programs end with this process, and the owner starts another zygote.
      self.inits.discard(pid)
      process = self.processes.pop(pid, None)
      if process is None:
        continue  # The first process of a namespace, or a stray.
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
    """Make the parent of all scratch directories writable for this process."""
    if self.mechanism == 'bubblewrap':
      os.chmod(self.scratch, 0o700)

  def discard(self, directory: str) -> None:
    """Remove the scratch directory of an ended program in small steps."""
    self.open_scratch()
    self.garbage.append(scratch.removal(directory))

  def child(self, job: bytes, fds: list[int]) -> None:
    """Run one job in a copy of the seed; never returns."""
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
    """Confine this process permanently; on failure, send a message to the channel and return False."""
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
      os.write(channel, encoded({'fault': f'a program cannot be confined: {reason}'}))
      return False
    return True


def run(harness, directory: str, leave) -> None:
  """Run the payload, then exit as Python does: join threads, call exit functions, and flush output."""
  write, dumps, shutdown, exit_functions = os.write, json.dumps, threading._shutdown, atexit._run_exitfuncs  # noqa: SLF001
  os.environ.clear()
  os.environ.update(HOME=directory, TMPDIR=directory, LANG='C.UTF-8')
  sys.argv = ['']
  standard_streams()
  if 'numpy.random' in sys.modules:
    sys.modules['numpy.random'].seed()  # Python's own generator reseeds itself after a fork.
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
      code = code or 120  # As Python itself exits when output is lost.
  while text:
    text = text[write(RESULT, text) :]
  leave(code)


def exit_code(error: SystemExit) -> int:
  """Return the exit code that `sys.exit` derives from its argument."""
  if error.code is None:
    return 0
  if isinstance(error.code, int):
    return error.code & 0xFF
  print(error.code, file=sys.stderr)
  return 1


def standard_streams() -> None:
  """Reopen descriptors 0, 1 and 2 as a fresh interpreter does."""
  options = dict(encoding='utf-8', closefd=False)
  sys.stdin = sys.__stdin__ = open(0, errors='surrogateescape', **options)
  sys.stdout = sys.__stdout__ = open(1, 'w', errors='surrogateescape', **options)
  raw = io.FileIO(2, 'w', closefd=False)
  sys.stderr = sys.__stderr__ = io.TextIOWrapper(
    io.BufferedWriter(raw), 'utf-8', 'backslashreplace', line_buffering=True, write_through=True
  )


def set_limits(limits: dict, baseline: int, own_user: bool) -> None:
  """Set the kernel's limits on this process; its memory counts from the zygote's `baseline`."""
  cpu_s = int(-(-limits['cpu_s'] // 1))
  values = {
    resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
    resource.RLIMIT_AS: baseline + limits['memory_mb'] * MIB,
    resource.RLIMIT_FSIZE: limits['file_mb'] * MIB,
    resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
    resource.RLIMIT_CORE: 1,  # 0 would not stop the kernel from piping a crash to the system's handler; see core(5).
  }
  # The kernel counts threads and pending signals per user, not per process: other programs of the same user would reach
  # the limit, and signals reveal them.
  if own_user:
    values |= {resource.RLIMIT_NPROC: MAX_THREADS, resource.RLIMIT_SIGPENDING: MAX_THREADS}
  for limit, value in values.items():
    soft, hard = value if isinstance(value, tuple) else (value, value)
    most = resource.getrlimit(limit)[1]
    if most != resource.RLIM_INFINITY:
      soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(limit, (soft, hard))


def user_ids() -> range:
  """Return a range of unused user ids, one per slot; in a small user namespace only that of nobody, or none.

  Root of a namespace without other users is an ordinary user outside of it, and keeps its id.
  """
  first = UID_BASE + os.getpid() % UIDS * MAX_SLOTS
  found = range(0)
  with open('/proc/self/uid_map') as file:
    for inside, _, count in (map(int, line.split()) for line in file):
      if inside <= first and first + MAX_SLOTS <= inside + count:
        return range(first, first + MAX_SLOTS)
      if inside <= view.NOBODY < inside + count:
        found = range(view.NOBODY, view.NOBODY + 1)
  return found


def enter(doors: list[int]) -> bool:
  """Enter a control group by writing to all of its `doors`, its files cgroup.procs; return whether it worked."""
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
  """Return a descriptor that becomes readable when `owner` ends, even if a fork of it keeps the socket open."""
  if owner is None:
    return None
  fd = confinement.call('pidfd_open', owner, 0)
  if os.getppid() != owner:
    raise ProcessLookupError(f'process {owner} has ended')
  return fd


def strays(known: set[int]) -> list[int]:
  """Return the children of this process that are not `known`: left behind by an unconfined program."""
  found = []
  for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
    with contextlib.suppress(OSError):
      with open(f'/proc/{pid}/stat') as file:
        parent = int(file.read().rpartition(')')[2].split()[1])
      if parent == os.getpid() and pid not in known:
        found.append(pid)
  return found


def address_space() -> int:
  """Return this process's address space in bytes, to within a MiB."""
  try:
    with open('/proc/self/statm') as file:
      return int(file.read().split()[0]) * os.sysconf('SC_PAGE_SIZE')
  except FileNotFoundError:  # In a bubblewrap: search the lowest limit that leaves room for one more page.
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
  """Return the names of this process's modules and packages from these directories."""
  files = {name: getattr(module, '__file__', None) or '' for name, module in sys.modules.items()}
  return {name.partition('.')[0] for name, file in files.items() if below(os.path.realpath(file), directories)}


def below(path: str, directories: list[str]) -> bool:
  """Return whether a path equals one of the directories or lies below one."""
  return any(path == directory or path.startswith(directory + '/') for directory in directories)


def advance(work: Generator[None, None, bool]) -> bool | None:
  """Continue a task for a few milliseconds; return its value, or None if it is unfinished."""
  end = time.monotonic() + SLICE_S
  try:
    while time.monotonic() < end:
      next(work)
  except StopIteration as finished:
    return finished.value
  return None


def landlock_version(mechanism: str) -> int:
  """Return the Landlock version to use, 0 for none; raises confinement.Unsupported if the mechanism requires one."""
  if mechanism == 'landlock':
    return confinement.landlock_version()
  with contextlib.suppress(confinement.Unsupported):
    return confinement.landlock_version() if mechanism == 'bubblewrap' else 0
  return 0


def threads(pid: int, proc: int | None) -> int:
  """Return the number of threads of a process; 0 if it is gone, or `proc`, an open /proc, is None."""
  if proc is None:
    return 0
  try:
    with open(os.open(f'{pid}/stat', os.O_RDONLY, dir_fd=proc)) as file:
      return int(file.read().rpartition(')')[2].split()[17])
  except (OSError, IndexError):
    return 0


def encoded(message: dict) -> bytes:
  """Return a message as JSON in UTF-8."""
  return json.dumps(message).encode()


def send(channel: socket.socket, report: dict) -> None:
  """Send a message to the owner, who may be gone."""
  with contextlib.suppress(OSError):
    channel.send(encoded(report))


def main() -> None:
  """Serve the owner whose socket is the descriptor on the command line."""
  while os.dup(2) < FIRST_FREE - 1:
    pass  # Every program has its own modules below.
  control = socket.socket(fileno=int(sys.argv[1]))
  control.set_inheritable(False)
  settings = json.loads(control.recv(MESSAGE))
  os.umask(0o022)
  try:
    zygote = Zygote(control, settings)
  except Exception as error:
    control.send(encoded({'fault': str(error), 'harness': isinstance(error, HarnessFault)}))
    return
  control.send(encoded({'layers': zygote.layers, 'entered': zygote.entered, 'copied': zygote.copied}))
  zygote.serve()


if __name__ == '__main__':
  main()
