"""Execution of model-written programs, each in a fresh confined process, with a report on each.

A small helper process, the zygote, is started without the owner's environment and memory; it forks a process for every
job, which confines itself before it reads the payload. Payload, standard input and output pass directly between this
process and the program, not through the zygote. docs/sandbox.md lists the attacks that this does and does not stop.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
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
import sys
import sysconfig
import tempfile
import threading
import time
from typing import Any, Literal
import weakref

from sdpo_jax import liveness
from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments import helper_process
from sdpo_jax.environments.sandbox import bubblewrap, cgroups, confinement, leftovers, scratch
from sdpo_jax.errors import UserError, short_repr

HERE = pathlib.Path(__file__).parent
MIB = 2**20
MESSAGE = 2**16  # Maximum bytes of a message.
CHUNK = 2**18
# A program may print byte by byte. After a read of less than half a pipe there is a pause in which more gathers; each
# pause is twice as long as the last. Larger reads, of which there are few, reset the pause.
PIECE, LONGEST_PAUSE_MS = 2**15, 16
START_S = 120.0  # A zygote that has not loaded its modules by then never will.
# Seconds between retries of a program for which the machine had no memory, process or descriptor left.
PAUSES_S = (0.05, 0.5, 2.0)
# Strongest first: the mechanism, and whether every program has a view of its own (view.py).
ATTEMPTS = (('landlock', True), ('bubblewrap', True), ('bubblewrap', False), ('landlock', False))
# Libraries that start a thread per core on import would make the zygote fork with threads.
ENVIRONMENT = {name: '1' for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS')}
# Otherwise the C library reserves 64 MiB of address space, which counts as memory, per thread of a program.
ENVIRONMENT['MALLOC_ARENA_MAX'] = '1'
MFD_CLOEXEC, MFD_ALLOW_SEALING, F_ADD_SEALS, ALL_SEALS = 1, 2, 1033, 0b1111
PIPES = ('stdout', 'stderr', 'result')
# Limits of a zygote and its programs together: memory of the zygote, minimum of a program and its overhead, in MiB;
# processes of the zygote and of a program, including threads (MAX_THREADS in zygote.py, and a few more). A bubblewrap
# runs one program, so the kernel counts its threads alone: these are the others, by whether it has a view of its own.
GROUP_MB, GROUP_PROGRAM_MB, GROUP_EXTRA_MB, GROUP_PROCESSES, PROGRAM_PROCESSES = 512, 1024, 128, 8, 72
MAX_THREADS, BUBBLEWRAP_PROCESSES = 64, {True: 4, False: 2}
GRACE_S = 60.0  # A zygote that is silent this long after a program's time limit has failed.


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of one program: time, memory, files and output."""

  wall_s: float  # Starts when the program starts.
  cpu_s: float
  memory_mb: int = SandboxConfig.memory_mb  # In addition to the memory of the harness and the preloaded modules, MiB.
  file_mb: int = SandboxConfig.file_mb  # In the scratch directory, MiB.
  output_mb: int = SandboxConfig.output_mb  # Standard output and error together, and again for the result, MiB.
  # Bytes kept of each output and read of the result; a larger result ends the program. None: `output_mb`.
  stdout_bytes: int | None = None
  stderr_bytes: int | None = None
  result_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class SandboxJob:
  """A call of the harness in a process of its own, with its input and limits."""

  payload: Any  # JSON data with which the harness is called.
  stdin: str  # The program's standard input.
  limits: Limits


@dataclasses.dataclass(frozen=True)
class SandboxReport:
  """How a program ended, and its output, which may be anything."""

  # Ended with any exit code; exceeded its wall or CPU time; printed, returned or wrote too much; killed by a signal
  # that is not the sandbox's (or for too many threads); not run, or not to its end, for lack of room on the machine,
  # which is not the program's fault and explained in `reason`.
  status: Literal['ended', 'timeout', 'output', 'killed', 'failed']
  exit_code: int | None
  signal: int | None
  wall_s: float
  cpu_s: float
  result_bytes: bytes = b''  # The harness's result as JSON; b'' if it did not return.
  stdout_bytes: bytes = b''
  stderr_bytes: bytes = b''
  # Bytes dropped from 'result', 'stdout' and 'stderr'; complete outputs are absent.
  dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
  reason: str = ''  # The reason of a failure.

  @property
  def result(self) -> Any:
    """Return the harness's result; None if it did not return, or the bytes are not JSON or nested too deeply.

    Parsing takes a hundred times the memory of the text, and seconds for megabytes of brackets: use this only if
    `Limits.result_bytes` is small.
    """
    try:
      return json.loads(self.result_bytes)
    except (ValueError, RecursionError):
      return None

  @property
  def stdout(self) -> str:
    """Return the kept standard output as text; bytes that are not UTF-8 become U+FFFD."""
    return self.stdout_bytes.decode(errors='replace')

  @property
  def stderr(self) -> str:
    """Return the kept standard error as text; bytes that are not UTF-8 become U+FFFD."""
    return self.stderr_bytes.decode(errors='replace')


class Sandbox(contextlib.AbstractContextManager['Sandbox']):
  """Runs untrusted programs; thread-safe."""

  def __init__(self, settings: SandboxConfig, harness: pathlib.Path, *, preload: Sequence[str] = ()):
    """Start the strongest mechanism that withstands the attacks of self_test.py on this machine.

    Args:
      settings: `environments.sandbox`.
      harness: Python file with `run(payload)`, which is called in the program's process and returns JSON data.
      preload: modules that programs are likely to import; missing ones are skipped.

    Raises:
      UserError: no mechanism works and `allow_unsandboxed` is off, or the harness cannot be loaded.
    """
    if sys.platform != 'linux':
      raise UserError('Model-written code runs only on Linux: choose another environment, or another machine.')
    self._workers = settings.workers or len(os.sched_getaffinity(0))
    self._hosts = _start(settings, pathlib.Path(harness).resolve(), tuple(preload), self._workers)
    self.mechanism: Literal['landlock', 'bubblewrap', 'none'] = self._hosts[0].mechanism
    self.layers: list[str] = self._hosts[0].layers  # Descriptions of the layers that confine programs.
    # Landlock hides programs from each other; a bubblewrap does not, so each worker has its own.
    self._idle: queue.SimpleQueue[_Host] = queue.SimpleQueue()
    for index in range(self._workers):
      self._idle.put(self._hosts[index % len(self._hosts)])
    self._pool = concurrent.futures.ThreadPoolExecutor(self._workers, 'sandbox')
    self._finalizer = weakref.finalize(self, _close, self._hosts)

  def run(self, jobs: Sequence[SandboxJob], then: Callable[[int, SandboxReport], Any] | None = None) -> list[Any]:
    """Run jobs, `workers` at once over all calling threads, and return a report for each, in order.

    Args:
      jobs: the programs.
      then: maps a job's index and report to the value to return in place of the report; called by several threads. A
        report may take megabytes, and those of a batch need not fit in memory together.

    Raises:
      RuntimeError: the sandbox is closed.
    """

    def run(number: int, job: SandboxJob) -> Any:
      report = self._run(job)
      liveness.progress()
      return report if then is None else then(number, report)

    return list(self._pool.map(run, range(len(jobs)), jobs))

  def close(self) -> None:
    """End all programs and helper processes and remove their files; may be called twice."""
    self._finalizer()
    self._pool.shutdown()

  def __exit__(self, *error: object) -> None:
    self.close()

  def _run(self, job: SandboxJob) -> SandboxReport:
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
      return SandboxReport('failed', None, None, 0.0, 0.0, reason=str(error))
    finally:
      self._idle.put(host)


class _Fault(Exception):
  """A program could not be run, probably through no fault of its own; the message says why."""


class _Ended(_Fault):
  """A fault that is not worth a retry."""


class _Died(Exception):
  """The zygote ended during a job."""


class _Zygote:
  """A running helper process and the socket to it."""

  def __init__(self, command: _Command, group: cgroups.Group | None):
    self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self.lock = threading.Lock()
    with theirs, tempfile.TemporaryFile() as errors, group.doors() if group else contextlib.nullcontext([]) as doors:
      arguments, settings = command(theirs.fileno())
      settings['doors'] = doors
      self.process = helper_process.started(arguments, [theirs.fileno(), *doors], errors, ENVIRONMENT)
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
        fault = (answer or {}).get('fault')
        raise confinement.Unsupported(fault or helper_process.last_line(errors) or silence)
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
    """End the zygote and with it all its programs."""
    self.control.close()
    helper_process.ended(self.process, within_s=5)

  def kill(self) -> None:
    self.process.kill()
    self.process.wait()


_Command = Callable[[int], tuple[list[str], dict]]


class _Host:
  """Keeps a zygote running and communicates with it."""

  def __init__(
    self,
    mechanism: str,
    view: bool,
    programs: int,
    settings: SandboxConfig,
    harness: pathlib.Path,
    preload: tuple[str, ...],
  ):
    """Start a zygote for this number of concurrent `programs`; raises as `_Zygote`."""
    self.mechanism, self.view = mechanism, view
    self._settings, self._harness, self._preload = settings, harness, preload
    self._lock = threading.Lock()
    self._closed = False
    self._owner = os.getpid()
    self._scratch: str | None = None
    self._held: int | None = None  # Descriptor whose lock shows others that the directory is in use.
    # A page table or inode more must not matter: programs that keep to their limits never reach this one.
    memory_mb = GROUP_MB + programs * (max(settings.memory_mb, GROUP_PROGRAM_MB) + settings.file_mb + GROUP_EXTRA_MB)
    processes = GROUP_PROCESSES + programs * PROGRAM_PROCESSES
    if mechanism == 'bubblewrap':
      processes = MAX_THREADS + BUBBLEWRAP_PROCESSES[view]
    self._group = cgroups.create(memory_mb * MIB, processes)
    try:
      self._zygote = _Zygote(self._command, self._group)
    except BaseException:
      self._remove()
      raise
    self.layers = self._zygote.layers

  @property
  def pid(self) -> int:
    return self._zygote.process.pid

  def run(self, job: SandboxJob, *, probe: bool = False) -> SandboxReport:
    """Run a job as `Sandbox.run` does; with `probe`, run self_test.py in place of the harness."""
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
    if os.getpid() != self._owner:  # A fork of the owner exits; the zygote and its files are not its own.
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
      for name in ('zygote.py', 'confinement.py', 'library.py', 'scratch.py', 'seed.py', 'view.py', 'self_test.py')
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
  """Return the directories of Python and its packages, which programs may read, and which of them hold packages.

  Other entries of `sys.path` are left out: an editable installation would expose its repository.
  """
  packages = [*site.getsitepackages(), sysconfig.get_path('purelib'), sysconfig.get_path('platlib')]
  if site.ENABLE_USER_SITE:
    packages.append(site.getusersitepackages())
  standard = [sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib')]
  return _directories([*standard, *packages]), _directories(packages)


def _directories(paths: Sequence[str]) -> list[str]:
  """Return the distinct real paths of those `paths` that are directories."""
  return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path)))


def _start(settings: SandboxConfig, harness: pathlib.Path, preload: tuple[str, ...], workers: int) -> list[_Host]:
  """Start hosts of the first mechanism that passes the probe.

  Raises UserError if none does and running unsandboxed is not allowed.
  """
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
          'A stronger sandbox than %s is not available here: %s.', ', '.join(hosts[0].layers), '; '.join(reasons)
        )
      return hosts
    except (confinement.Unsupported, OSError) as error:
      reasons.append(f'{mechanism}{" with a view of its own for every program" * view}: {error}')
      _close(hosts)
  if not settings.allow_unsandboxed:
    raise UserError(
      f'Model-written code needs a sandbox, and this machine has none that works ({"; ".join(reasons)}): use a kernel '
      'with Landlock (Linux 5.13 or newer), install bubblewrap, or, if the code may do all that you can, set '
      'environments.sandbox.allow_unsandboxed.'
    )
  logging.warning(
    'MODEL-WRITTEN CODE RUNS WITHOUT A SANDBOX (%s): it can read, change and send whatever this user can. '
    'environments.sandbox.allow_unsandboxed allows it.',
    '; '.join(reasons),
  )
  return [_Host('none', False, workers, settings, harness, preload)]


def _check_packages(names: Sequence[str]) -> None:
  """Raise UserError if a package of `environments.sandbox.packages` is not installed."""
  for name in names:
    if not name.isidentifier() or importlib.util.find_spec(name) is None:
      raise UserError(
        f'environments.sandbox.packages names {short_repr(name)}, which cannot be imported here: name top-level '
        'packages, as in `import numpy`, and install them.'
      )


def _close(hosts: Sequence[_Host]) -> None:
  for host in hosts:
    host.close()


def _probe(host: _Host) -> list[str]:
  """Return the channels between programs, found by running self_test.py twice, with another program in between.

  Raises:
    confinement.Unsupported: a program could do something forbidden, or failed at something permitted.
  """
  with contextlib.ExitStack() as stack:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=leftovers.PREFIX))
    stack.callback(os.close, leftovers.hold(directory))
    server = stack.enter_context(socket.create_server(('127.0.0.1', 0)))
    canary = pathlib.Path(directory, 'canary')
    canary.write_text('canary')
    os.chmod(directory, 0o777)  # So only the sandbox keeps a program of another user out.
    canary.chmod(0o666)
    limits = Limits(wall_s=30, cpu_s=10, file_mb=1)
    payload = {
      'canary': str(canary),
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
        report = host.run(SandboxJob(payload, '', limits), probe=True)
      except (_Fault, RuntimeError) as error:
        raise confinement.Unsupported(str(error).rstrip('.')) from error
      result = report.result
      if report.status != 'ended' or not isinstance(result, dict):
        raise confinement.Unsupported(f'its self-test did not finish: {report.status}, {report.stderr.strip()}')
      if result['broken']:
        raise confinement.Unsupported('; '.join(f'{use} fails ({error})' for use, error in result['broken'].items()))
      leaks, channels = [*leaks, *result['leaks']], result['channels']
    touched = os.listdir(directory) != ['canary'] or canary.read_text() != 'canary'
  if leaks or touched:
    raise confinement.Unsupported(f'a program in it {", ".join(dict.fromkeys(leaks)) or "changes a file"}')
  # Bubblewrap mounts them read-only.
  kept = host.view or host.mechanism == 'bubblewrap'
  if not kept and not all(os.statvfs(path).f_flag & (os.ST_NOATIME | os.ST_RDONLY) for path in installation()[0]):
    channels.append('leaves access times')
  return channels


# ———— One job ————


def _run(zygote: _Zygote, job: SandboxJob, probe: bool) -> SandboxReport:
  """Run a job and collect its output; raises _Died if the zygote ends first."""
  limits = job.limits
  with contextlib.ExitStack() as stack:
    try:
      stdin = stack.enter_context(_memory_file(job.stdin.encode('utf-8', 'surrogatepass')))
      payload = stack.enter_context(_memory_file(json.dumps(job.payload).encode()))
      channel, theirs = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
      readers, writers = zip(*(stack.enter_context(_pipe()) for _ in range(3)), strict=True)
    except OSError as error:  # No memory or descriptor left, in this process or the machine.
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
    answer, (stdout, stderr, result), dropped, too_much = _collect(channel, readers, limits)
  if 'fault' in answer:
    raise _Fault(answer['fault'])
  ended_by = answer.pop('ended_by')
  if ended_by == 'closed':
    raise RuntimeError('The sandbox was closed while a program ran.')
  return SandboxReport(
    'output' if too_much else _status(ended_by, answer['signal'], answer['cpu_s'], limits),
    **answer,
    result_bytes=result,
    stdout_bytes=stdout,
    stderr_bytes=stderr,
    dropped=dropped,
  )


def _collect(
  channel: socket.socket, readers: Sequence[io.FileIO], limits: Limits
) -> tuple[dict, list[bytes], dict[str, int], bool]:
  """Collect the output of a program until it has ended.

  Returns:
    the zygote's answer, the kept bytes of each pipe, the number of dropped ones of the pipes with any, and whether a
    limit was exceeded, so that the program was ended.
  """
  names = {reader.fileno(): index for index, reader in enumerate(readers)}
  outputs = [bytearray() for _ in readers]
  most = limits.output_mb * MIB
  kept = [most if limit is None else limit for limit in (limits.stdout_bytes, limits.stderr_bytes, limits.result_bytes)]
  printed, returned = [most], [min(most, kept[2])]
  left = dict(zip(names, (printed, printed, returned), strict=True))
  dropped, too_much = collections.Counter[str](), False
  poll, answered = select.poll(), select.poll()
  answered.register(channel, select.POLLIN)
  for fd in [*names, channel.fileno()]:
    os.set_blocking(fd, False)
    poll.register(fd, select.POLLIN)

  def read(fd: int) -> int:
    """Read once and return the number of bytes; 0 if nothing is available now."""
    nonlocal too_much
    try:
      data = os.read(fd, CHUNK)
    except BlockingIOError:
      return 0
    index = names[fd]
    room = min(left[fd][0], kept[index] - len(outputs[index]))
    dropped[PIPES[index]] += max(0, len(data) - room)
    if len(data) > left[fd][0] and not too_much:
      too_much = True
      with contextlib.suppress(OSError):  # The program may already have ended.
        channel.send(b'end')
    outputs[index] += data[:room]
    left[fd][0] -= min(left[fd][0], len(data))
    if not data:
      with contextlib.suppress(KeyError):  # The pipe's end has been seen before.
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
    while read(fd) and not too_much:
      pass
  return json.loads(answer), list(map(bytes, outputs)), dict(+dropped), too_much


def _receive(channel: socket.socket) -> bytes:
  try:
    return channel.recv(MESSAGE)
  except ConnectionResetError:  # Comes first where the zygote left our message unread.
    return channel.recv(MESSAGE)


def _status(
  ended_by: str | None, number: int | None, cpu_s: float, limits: Limits
) -> Literal['ended', 'timeout', 'output', 'killed']:
  if ended_by in ('timeout', 'output'):
    return ended_by
  if number is None:
    return 'ended'
  over = number == signal.SIGKILL and cpu_s >= limits.cpu_s
  return 'timeout' if over or number == signal.SIGXCPU else 'killed'


def _memory_file(data: bytes) -> io.FileIO:
  """Return an anonymous, immutable file with these contents, positioned at its beginning."""
  file = open(confinement.call('memfd_create', b'sandbox', MFD_CLOEXEC | MFD_ALLOW_SEALING), 'r+b', 0)
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
