"""Runs model-written programs, each in a fresh confined process, and says what became of them.

A small helper process, the zygote, is started without the owner's environment and memory; it forks a process for every
job, which confines itself before it reads the payload. Payload, standard input and output go between this process and
the program directly, past the zygote. docs/sandbox.md says against what this helps and against what it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import fcntl
import importlib.util
import io
import json
import logging
import os
import pathlib
import queue
import select
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from typing import Any, Literal
import weakref

from sdpo_jax import liveness
from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox import bubblewrap, cgroups, confinement, leftovers, scratch
from sdpo_jax.errors import UserError, short_repr

HERE = pathlib.Path(__file__).parent
MIB = 2**20
MESSAGE = 2**16  # Bytes of a message at most.
CHUNK = 2**18
# A program may print byte by byte. What comes in pieces smaller than half a pipe is read after pauses, each twice as
# long as the one before, in which more gathers in the pipe; larger pieces, of which there are few, begin anew.
PIECE, LONGEST_PAUSE_MS = 2**15, 16
START_S = 120.0  # A zygote that has not loaded its modules by then will not.
# Seconds between attempts at a program that the machine had no room for: no memory, process or descriptor was left.
PAUSES_S = (0.05, 0.5, 2.0)
# From the strongest on: the mechanism, and whether every program has a view of its own (view.py).
ATTEMPTS = (('landlock', True), ('bubblewrap', True), ('bubblewrap', False), ('landlock', False))
# Libraries that start a thread a core when loaded would make the zygote fork with threads.
ENVIRONMENT = {name: '1' for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS')}
# The C library would reserve 64 MiB of address space, which counts as memory, for each thread of a program.
ENVIRONMENT['MALLOC_ARENA_MAX'] = '1'
MFD_CLOEXEC, MFD_ALLOW_SEALING, F_ADD_SEALS, ALL_SEALS = 1, 2, 1033, 0b1111
PIPES = ('stdout', 'stderr', 'result')
# Of a zygote and its programs together: memory of the zygote, the least a program is granted and what it has beside its
# limits, MiB; processes of the zygote and of a program, threads included (MAX_THREADS in zygote.py, and a few).
GROUP_MB, GROUP_PROGRAM_MB, GROUP_EXTRA_MB, GROUP_PROCESSES, PROGRAM_PROCESSES = 512, 1024, 128, 8, 72
GRACE_S = 60.0  # A zygote that says nothing for so long after a program's time is over has failed.


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a program may use; its scratch directory and what it prints are bounded beside."""

  wall_s: float  # From this program's own start.
  cpu_s: float
  memory_mb: int = SandboxConfig.memory_mb  # Beyond what the harness and the preloaded modules take, MiB.
  file_mb: int = SandboxConfig.file_mb  # In the scratch directory, MiB.
  output_mb: int = SandboxConfig.output_mb  # Standard output and error together, and as much of a result, MiB.
  # Bytes that are kept of each, and read of the result: a program that returns more is ended. None: all of the above.
  stdout_bytes: int | None = None
  stderr_bytes: int | None = None
  result_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Job:
  """One program to run."""

  payload: Any  # JSON data that the harness is called with.
  stdin: str  # What the program reads on descriptor 0.
  limits: Limits


@dataclasses.dataclass(frozen=True)
class Report:
  """What became of a program; what it returned and printed is whatever it made it."""

  # Ended by itself with any exit code; over its wall or CPU time; printed, returned or wrote too much; killed by a
  # signal that is not the sandbox's (or for too many threads); not run, or not to its end, since the machine had no
  # room for it: this says nothing of the program, and `reason` says why.
  status: Literal['ended', 'timeout', 'output', 'killed', 'failed']
  exit_code: int | None
  signal: int | None
  wall_s: float
  cpu_s: float
  result_bytes: bytes = b''  # What the harness returned, as JSON; b'' if it did not get that far.
  stdout_bytes: bytes = b''
  stderr_bytes: bytes = b''
  # Bytes that came beyond what is kept, of 'result', 'stdout' and 'stderr'; nothing of one that is whole.
  dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
  reason: str = ''  # Why it failed.

  @property
  def result(self) -> Any:
    """What the harness returned; None if it did not get that far, or what came is not JSON.

    Parsing takes a hundred times the memory of the text, and seconds for megabytes of brackets: read it here only where
    `Limits.result_bytes` is small.
    """
    return _json(self.result_bytes)

  @property
  def stdout(self) -> str:
    return self.stdout_bytes.decode(errors='replace')

  @property
  def stderr(self) -> str:
    return self.stderr_bytes.decode(errors='replace')


class Sandbox:
  """A place for programs that are trusted with nothing; thread-safe."""

  def __init__(self, settings: SandboxConfig, harness: pathlib.Path, *, preload: Sequence[str] = ()):
    """Start the strongest mechanism that withstands the attacks of probe.py on this machine.

    Args:
      settings: `environments.sandbox`.
      harness: Python file with `run(payload)`, which is called in the program's process and returns JSON data.
      preload: modules that programs are likely to import; those that are not installed are skipped.

    Raises:
      UserError: no mechanism works and `allow_unsandboxed` is off, or the harness cannot be loaded.
    """
    if sys.platform != 'linux':
      raise UserError('Model-written code runs only on Linux: choose another environment, or another machine.')
    self._workers = settings.workers or len(os.sched_getaffinity(0))
    self._hosts = _start(settings, pathlib.Path(harness).resolve(), tuple(preload), self._workers)
    self.mechanism: Literal['landlock', 'bubblewrap', 'none'] = self._hosts[0].mechanism
    self.layers: list[str] = self._hosts[0].layers  # What confines programs, in words.
    # Programs do not see one another under Landlock; in a bubblewrap they would, so that each worker has its own.
    self._idle: queue.SimpleQueue[_Host] = queue.SimpleQueue()
    for index in range(self._workers):
      self._idle.put(self._hosts[index % len(self._hosts)])
    self._pool = concurrent.futures.ThreadPoolExecutor(self._workers, 'sandbox')
    self._finalizer = weakref.finalize(self, _close, self._hosts)

  def run(self, jobs: Sequence[Job], then: Callable[[int, Report], Any] | None = None) -> list[Any]:
    """Return a report for every job, in order; `workers` at once, over all threads that call.

    Args:
      jobs: the programs.
      then: what to return in place of a report, given the number of its job; called by several threads. A report holds
        megabytes if the program likes: those of a batch together need not fit in memory.

    Raises:
      RuntimeError: the sandbox is closed.
    """

    def run(number: int, job: Job) -> Any:
      report = self._run(job)
      liveness.progress()
      return report if then is None else then(number, report)

    return list(self._pool.map(run, range(len(jobs)), jobs))

  def close(self) -> None:
    """End all programs and the helper processes and remove what they wrote; may be called twice."""
    self._finalizer()
    self._pool.shutdown()

  def __enter__(self) -> Sandbox:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _run(self, job: Job) -> Report:
    host = self._idle.get()
    try:
      for pause_s in PAUSES_S:
        try:
          return host.run(job)
        except _Ended:
          raise
        except _Fault:
          time.sleep(pause_s)
      return host.run(job)
    except _Fault as error:
      logging.warning('The sandbox could not run a program: %s.', error)
      return Report('failed', None, None, 0.0, 0.0, reason=str(error))
    finally:
      self._idle.put(host)


class _Fault(Exception):
  """A program could not be run, through no fault of its own as far as is known; the message says why."""


class _Ended(_Fault):
  """The same, and it is not worth another attempt."""


class _Died(Exception):
  """The zygote ended while it had a job."""


class _Zygote:
  """A running helper process and the socket to it."""

  def __init__(self, command: _Command, group: cgroups.Group | None):
    self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self.lock = threading.Lock()
    with theirs, tempfile.TemporaryFile() as errors, group.doors() if group else contextlib.nullcontext([]) as doors:
      arguments, settings = command(theirs.fileno())
      settings['doors'] = doors
      self.process = subprocess.Popen(
        arguments,
        env=ENVIRONMENT,
        cwd='/',
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=[theirs.fileno(), *doors],
        start_new_session=True,
      )
      theirs.close()
      try:
        self.control.settimeout(START_S)
        self.control.send(json.dumps(settings).encode())
        answer = json.loads(self.control.recv(MESSAGE) or 'null')
        silence = 'the helper process ends at once'
      except (OSError, ValueError) as error:
        answer, silence = None, f'the helper process does not answer ({error})'
      if answer and answer.get('harness'):
        self.close()
        raise UserError(f'The sandbox cannot load its harness: {answer["fault"]}.')
      if answer is None or 'fault' in answer:
        self.close()
        errors.seek(0)
        last = errors.read().decode(errors='replace').strip().splitlines()[-1:]
        raise confinement.Unsupported((answer or {}).get('fault') or ''.join(last) or silence)
    self.layers: list[str] = answer['layers']
    if answer['entered']:
      self.layers.append(f'cgroup v{group.version} ({", ".join(group.controllers)})')
      try:
        group.allow(answer['copied'])
      except OSError:
        self.close()
        raise
    self.control.settimeout(None)

  def close(self) -> None:
    """End the zygote, and with it all its programs."""
    self.control.close()
    try:
      self.process.wait(5)
    except subprocess.TimeoutExpired:
      self.kill()

  def kill(self) -> None:
    self.process.kill()
    self.process.wait()


_Command = Callable[[int], tuple[list[str], dict]]


class _Host:
  """Keeps a zygote running and speaks with it."""

  def __init__(
    self,
    mechanism: str,
    view: bool,
    programs: int,
    settings: SandboxConfig,
    harness: pathlib.Path,
    preload: tuple[str, ...],
  ):
    """Start a zygote for so many `programs` at once; raise as `_Zygote`."""
    self.mechanism, self.view = mechanism, view
    self._settings, self._harness, self._preload = settings, harness, preload
    self._lock = threading.Lock()
    self._closed = False
    self._owner = os.getpid()
    self._scratch: str | None = None
    self._held: int | None = None  # Descriptor by which other starts know that it is not abandoned.
    # A page table or inode more or less must not count: where programs keep to their limits, this one is never met.
    memory_mb = GROUP_MB + programs * (max(settings.memory_mb, GROUP_PROGRAM_MB) + settings.file_mb + GROUP_EXTRA_MB)
    self._group = cgroups.create(memory_mb * MIB, GROUP_PROCESSES + programs * PROGRAM_PROCESSES)
    try:
      self._zygote = _Zygote(self._command, self._group)
    except BaseException:
      self._remove()
      raise
    self.layers = self._zygote.layers

  @property
  def pid(self) -> int:
    return self._zygote.process.pid

  def run(self, job: Job, *, probe: bool = False) -> Report:
    """See `Sandbox.run`; `probe` runs probe.py in place of the harness."""
    zygote = self._zygote
    try:
      return _run(zygote, job, probe)
    except _Died:
      zygote = self._restart(zygote)
    try:
      return _run(zygote, job, probe)
    except _Died as error:
      raise _Ended("the sandbox's helper process ended twice under the same program") from error

  def close(self) -> None:
    if os.getpid() != self._owner:  # A fork of the owner ends; the zygote and its files are not its own.
      return
    with self._lock:
      self._closed = True
    self._zygote.close()
    self._remove()

  def _remove(self) -> None:
    if self._group is not None:
      self._group.remove()
    if self._scratch is not None:  # The zygote has removed it unless it was killed.
      scratch.remove(self._scratch)
    if self._held is not None:
      os.close(self._held)
      self._held = None

  def _restart(self, dead: _Zygote) -> _Zygote:
    with self._lock:
      if self._closed:
        raise RuntimeError('The sandbox is closed.')
      if self._zygote is dead:
        dead.kill()
        dead.control.close()
        try:
          self._zygote = _Zygote(self._command, self._group)
        except (confinement.Unsupported, OSError) as error:
          raise _Fault(f"the sandbox's helper process cannot be started again: {error}") from error
      return self._zygote

  def _command(self, descriptor: int) -> tuple[list[str], dict]:
    readable, packages = installation()
    files = [
      HERE / name
      for name in ('zygote.py', 'confinement.py', 'library.py', 'scratch.py', 'seed.py', 'view.py', 'probe.py')
    ]
    settings = {
      'mechanism': self.mechanism,
      'view': self.view,
      'owner': os.getpid(),
      'readable': readable,
      'packages': packages,
      'modules': self._settings.packages,
      'preload': self._preload,
      'harness': str(self._harness),
    }
    if self.mechanism == 'bubblewrap':
      size = self._settings.file_mb * MIB
      found, files = bubblewrap.find(), [*files, self._harness]
      arguments = bubblewrap.arguments(found, readable, files, ENVIRONMENT, size, descriptor, proc=self.view)
      return arguments, {**settings, 'owner': None, 'scratch': bubblewrap.SCRATCH}
    if self._scratch is None:
      self._scratch = os.path.realpath(tempfile.mkdtemp(prefix=leftovers.PREFIX))
    os.makedirs(self._scratch, exist_ok=True)
    if self._held is not None:
      os.close(self._held)
    self._held = leftovers.hold(self._scratch)
    os.chmod(self._scratch, 0o711)  # Programs may have another user id, and must not list it.
    arguments = [sys.executable, '-I', '-X', 'utf8', str(files[0]), str(descriptor)]
    return arguments, {**settings, 'scratch': self._scratch}


def installation() -> tuple[list[str], list[str]]:
  """Directories that programs may read: those of Python and its packages; and which of them hold packages.

  Nothing else on `sys.path` is one: an editable installation would open its repository.
  """
  packages = [*site.getsitepackages(), sysconfig.get_path('purelib'), sysconfig.get_path('platlib')]
  if site.ENABLE_USER_SITE:
    packages.append(site.getusersitepackages())
  standard = [sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib')]
  return _directories([*standard, *packages]), _directories(packages)


def _directories(paths: Sequence[str]) -> list[str]:
  """Return the real paths of those that are directories, each once."""
  return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path)))


def _start(settings: SandboxConfig, harness: pathlib.Path, preload: tuple[str, ...], workers: int) -> list[_Host]:
  """Hosts of the first mechanism that withstands the probe; raises UserError if none does and none is forbidden."""
  _check_packages(settings.packages or ())
  leftovers.remove_abandoned(tempfile.gettempdir(), scratch.remove)
  reasons = []
  for mechanism, view in ATTEMPTS:
    if settings.mechanism not in ('auto', mechanism):
      continue
    if settings.packages is not None and not view:
      reasons.append(f'{mechanism}: environments.sandbox.packages needs a view of its own for every program')
      continue
    hosts: list[_Host] = []
    try:
      for _ in range(workers if mechanism == 'bubblewrap' else 1):
        programs = 1 if mechanism == 'bubblewrap' else workers
        hosts.append(_Host(mechanism, view, programs, settings, harness, preload))
        channels = _probe(hosts[-1])
      if channels:
        hosts[0].layers.append(f'but a program {", ".join(channels)}')
      if reasons:
        logging.warning(
          'A stronger sandbox than %s cannot be had here: %s.', ', '.join(hosts[0].layers), '; '.join(reasons)
        )
      return hosts
    except (confinement.Unsupported, OSError) as error:
      reasons.append(f'{mechanism}{" with a view of its own for every program" * view}: {error}')
      _close(hosts)
  if not settings.allow_unsandboxed:
    raise UserError(
      f'Model-written code needs a sandbox, and this machine has none that works ({"; ".join(reasons)}): use a kernel '
      'with Landlock (Linux 5.13 or newer), install bubblewrap, or, if the code may do whatever you may, set '
      'environments.sandbox.allow_unsandboxed.'
    )
  logging.warning(
    'MODEL-WRITTEN CODE RUNS WITHOUT A SANDBOX (%s): it can read, change and send whatever this user can. '
    'environments.sandbox.allow_unsandboxed allows it.',
    '; '.join(reasons),
  )
  return [_Host('none', False, workers, settings, harness, preload)]


def _check_packages(names: Sequence[str]) -> None:
  """Raise UserError if one of `environments.sandbox.packages` is not installed."""
  for name in names:
    if not name.isidentifier() or importlib.util.find_spec(name) is None:
      raise UserError(
        f'environments.sandbox.packages names {short_repr(name)}, which cannot be imported here: name packages as '
        '`import` does, without what follows a dot, and install them.'
      )


def _close(hosts: Sequence[_Host]) -> None:
  for host in hosts:
    host.close()


def _probe(host: _Host) -> list[str]:
  """By what programs can learn of one another, found by running probe.py twice, the second time after another program.

  Raises:
    confinement.Unsupported: a program could do what it must not, or not what it must.
  """
  with contextlib.ExitStack() as stack:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=leftovers.PREFIX))
    stack.callback(os.close, leftovers.hold(directory))
    server = stack.enter_context(socket.create_server(('127.0.0.1', 0)))
    canary = os.path.join(directory, 'canary')
    with open(canary, 'w') as file:
      file.write('canary')
    os.chmod(directory, 0o777)  # So that nothing but the sandbox keeps a program of another user out.
    os.chmod(canary, 0o666)
    limits = Limits(wall_s=30, cpu_s=10, file_mb=1)
    payload = {
      'canary': canary,
      'directory': directory,
      'port': server.getsockname()[1],
      'owner': os.getpid(),
      'zygote': host.pid,
      'users': sum(int(line.split()[2]) for line in pathlib.Path('/proc/self/uid_map').read_text().splitlines()) > 1,
      'view': host.view,
      'file_mb': limits.file_mb,
    }
    leaks: list[str] = []
    channels: list[str] = []
    for _ in range(2):
      try:
        report = host.run(Job(payload, '', limits), probe=True)
      except (_Fault, RuntimeError) as error:
        raise confinement.Unsupported(str(error).rstrip('.')) from error
      result = report.result
      if report.status != 'ended' or not isinstance(result, dict):
        raise confinement.Unsupported(f'its test does not end as it should: {report.status}, {report.stderr.strip()}')
      if result['broken']:
        raise confinement.Unsupported('; '.join(f'{use} fails ({error})' for use, error in result['broken'].items()))
      leaks, channels = [*leaks, *result['leaks']], result['channels']
    with open(canary) as file:
      touched = os.listdir(directory) != ['canary'] or file.read() != 'canary'
  if leaks or touched:
    raise confinement.Unsupported(f'a program in it {", ".join(dict.fromkeys(leaks)) or "changes a file"}')
  # Bubblewrap mounts them read-only.
  kept = host.view or host.mechanism == 'bubblewrap'
  if not kept and not all(os.statvfs(path).f_flag & (os.ST_NOATIME | os.ST_RDONLY) for path in installation()[0]):
    channels.append('leaves access times')
  return channels


# ———— One job ————


def _run(zygote: _Zygote, job: Job, probe: bool) -> Report:
  """Run a job and collect what comes of it; raise _Died if the zygote ends first."""
  limits = job.limits
  with contextlib.ExitStack() as stack:
    try:
      stdin = stack.enter_context(_memory_file(job.stdin.encode('utf-8', 'surrogatepass')))
      payload = stack.enter_context(_memory_file(json.dumps(job.payload).encode()))
      channel, theirs = stack.enter_context(_channel())
      readers, writers = zip(*(stack.enter_context(_pipe()) for _ in range(3)), strict=True)
    except OSError as error:  # No memory, or no descriptor, left: of this process or of the machine.
      raise _Fault(f'a program cannot be given its input ({error.strerror})') from error
    header = {'probe': probe, 'limits': dataclasses.asdict(limits)}
    out, err, result = writers
    fds = [file.fileno() for file in (stdin, out, err, payload, result, theirs)]
    try:
      with zygote.lock:
        socket.send_fds(zygote.control, [json.dumps(header).encode()], fds)
    except OSError as error:
      raise _Died from error
    for file in (stdin, payload, theirs, *writers):
      file.close()
    answer, outputs, dropped = _collect(channel, readers, limits)
  if 'fault' in answer:
    raise _Fault(answer['fault'])
  if answer['ended_by'] == 'closed':
    raise RuntimeError('The sandbox was closed while a program ran.')
  stdout, stderr, result = outputs
  return Report(
    status='output' if dropped.too_much else _status(answer, limits),
    exit_code=answer['exit_code'],
    signal=answer['signal'],
    wall_s=answer['wall_s'],
    cpu_s=answer['cpu_s'],
    result_bytes=result,
    stdout_bytes=stdout,
    stderr_bytes=stderr,
    dropped={name: count for name, count in dropped.counts.items() if count},
  )


@dataclasses.dataclass
class _Dropped:
  counts: dict[str, int]  # Bytes, by the name of the pipe.
  too_much: bool = False  # Over a limit, so that the program was ended.


def _collect(
  channel: socket.socket, readers: Sequence[io.FileIO], limits: Limits
) -> tuple[dict, list[bytes], _Dropped]:
  """Return the zygote's answer, what is kept of what came through each pipe, and what is not."""
  names = {reader.fileno(): index for index, reader in enumerate(readers)}
  outputs = [bytearray() for _ in readers]
  most = limits.output_mb * MIB
  kept = [most if limit is None else limit for limit in (limits.stdout_bytes, limits.stderr_bytes, limits.result_bytes)]
  printed, returned = [most], [min(most, kept[2])]
  left = dict(zip(names, (printed, printed, returned), strict=True))
  dropped = _Dropped(dict.fromkeys(PIPES, 0))
  open_ends = set(names)
  poll, answered = select.poll(), select.poll()
  answered.register(channel, select.POLLIN)
  for fd in [*names, channel.fileno()]:
    os.set_blocking(fd, False)
    poll.register(fd, select.POLLIN)

  def read(fd: int) -> int:
    """Return the number of bytes that came; 0: there is no more to read now."""
    try:
      data = os.read(fd, CHUNK)
    except BlockingIOError:
      return 0
    index = names[fd]
    room = min(left[fd][0], kept[index] - len(outputs[index]))
    dropped.counts[PIPES[index]] += max(0, len(data) - room)
    if len(data) > left[fd][0] and not dropped.too_much:
      dropped.too_much = True
      _tell(channel)
    outputs[index] += data[:room]
    left[fd][0] -= min(left[fd][0], len(data))
    if not data and fd in open_ends:
      open_ends.remove(fd)
      poll.unregister(fd)
    return len(data)

  deadline = time.monotonic() + limits.wall_s + GRACE_S
  answer, pause_ms = None, 0
  while answer is None:
    ready = answered.poll(pause_ms) or poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    if not ready:
      raise _Died('It does not answer.')
    pause_ms = min(2 * pause_ms or 1, LONGEST_PAUSE_MS)
    for fd, _ in ready:
      if fd not in names:
        answer = _receive(channel)
      elif read(fd) >= PIECE:
        pause_ms = 0
  if not answer:
    raise _Died
  for fd in names:
    while read(fd) and not dropped.too_much:
      pass
  return json.loads(answer), [bytes(output) for output in outputs], dropped


def _receive(channel: socket.socket) -> bytes:
  try:
    return channel.recv(MESSAGE)
  except ConnectionResetError:  # Comes first where the zygote has left our message unread.
    return channel.recv(MESSAGE)


def _tell(channel: socket.socket) -> None:
  """Asks the zygote to end the program, which may have ended."""
  try:
    channel.send(b'end')
  except OSError:
    pass


def _status(answer: dict, limits: Limits) -> Literal['ended', 'timeout', 'output', 'killed']:
  if answer['ended_by'] in ('timeout', 'output'):
    return answer['ended_by']
  if answer['signal'] is None:
    return 'ended'
  over = answer['signal'] == signal.SIGKILL and answer['cpu_s'] >= limits.cpu_s
  return 'timeout' if over or answer['signal'] == signal.SIGXCPU else 'killed'


def _json(raw: bytes) -> Any:
  """Return the JSON value; None if it is not one, or one that is nested too deeply to read."""
  try:
    return json.loads(raw)
  except (ValueError, RecursionError):
    return None


def _memory_file(data: bytes) -> io.FileIO:
  """Return an anonymous file with these contents, at its beginning, that nobody can change any more."""
  name = ctypes.create_string_buffer(b'sandbox')
  file = open(confinement.call('memfd_create', ctypes.addressof(name), MFD_CLOEXEC | MFD_ALLOW_SEALING), 'r+b', 0)
  view = memoryview(data)
  while view:
    view = view[file.write(view) :]
  file.seek(0)
  fcntl.fcntl(file, F_ADD_SEALS, ALL_SEALS)
  return file


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[io.FileIO, io.FileIO]]:
  reader, writer = os.pipe()
  with open(reader, 'rb', 0) as reading, open(writer, 'wb', 0) as writing:
    yield reading, writing


@contextlib.contextmanager
def _channel() -> Iterator[tuple[socket.socket, socket.socket]]:
  ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  with ours, theirs:
    yield ours, theirs
