"""The processes of a run, one per host: how they connect, detect a lost process, and end together.

If a process is missing or lost, JAX's own service aborts the others with a stack trace. Here every process also has a
connection to process 0, over which it sends a heartbeat every few seconds. Whatever ends one process (a kill, a host
that dies or hangs, bad input) ends all of them within `Timeouts.heartbeat` seconds, with the same message; `barrier`
names the process for which the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from sdpo_jax.distributed.stopping import StopPoint
from sdpo_jax.errors import UserError, first_line

EXIT_LOST = 75  # EX_TEMPFAIL: a process is gone or missing; the same command resumes the run.
EXIT_BAD_INPUT, EXIT_ERROR = 2, 1
BEATS = 4  # Heartbeats within a heartbeat timeout.
RETRY_S = 0.2  # Seconds between attempts to reach process 0.
ENDS = 'the end of the run'
NOTES = 8  # Maximum number of notes exchanged at a barrier, so that a message stays short.
# How messages of XLA errors of any type begin if a collective or the service fails, but not if memory is exhausted.
_COLLECTIVE = re.compile(
  'ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN'
)


class ProcessLost(Exception):
  """A process is lost or never started; the message says which. Commands end with EXIT_LOST."""


class PeerFailed(Exception):
  """Another process has failed and is about to report why; commands wait for its message, and end with it."""


@dataclasses.dataclass(frozen=True)
class ProcessPlace:
  """The place of a process among those of its run."""

  address: str  # host:port at which process 0 listens.
  count: int
  index: int


@dataclasses.dataclass(frozen=True)
class Timeouts:
  """Timeouts, in seconds."""

  join: float = 300.0  # For all processes to start.
  heartbeat: float = 60.0  # For a heartbeat.
  barrier: float = 1800.0  # At a barrier, from its first process to its last.


def slice_place(timeout: float) -> ProcessPlace | None:
  """Return this process's place on a Cloud TPU slice of several hosts; None if there is no such slice.

  Raises:
    UserError: there are TPU chips, but the slice's description is not available.
  """
  try:
    # JAX has no public name for what `jax.distributed.initialize()` detects.
    from jax._src.clusters import ClusterEnv

    address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
      None, None, None, None, None, int(timeout)
    )
  except (OSError, RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:
    raise UserError(
      f'The hosts of this TPU slice cannot be found ({first_line(error)}): give --coordinator_address, '
      '--num_processes and --process_id; for one host alone --coordinator_address=localhost:8482 --num_processes=1 '
      '--process_id=0.'
    ) from error
  return None if address is None or count is None or index is None else ProcessPlace(address, count, index)


def join(place: ProcessPlace, timeouts: Timeouts = Timeouts()) -> None:
  """Wait until all processes of a run have started, connect them, and start `jax.distributed`.

  Args:
    place: place of this process; with one process nothing happens.
    timeouts: how long to wait.

  Raises:
    ProcessLost: not all started in time; the message names those missing, or process 0 if it cannot be reached.
    UserError: two processes claim the same place or disagree about their number, or process 0 cannot listen at the
      address.
  """
  global _member
  if place.count == 1:
    return
  if _member is not None:
    raise RuntimeError('join() must be called once.')
  member = Hub(place, timeouts) if place.index == 0 else Spoke(place, timeouts)
  address = member.meet()
  _member = member
  import jax  # Late here and below, so that `--help` does not wait for it.

  # JAX's own timeouts are longer than ours, so that ours report first.
  jax.distributed.initialize(
    address,
    place.count,
    place.index,
    initialization_timeout=int(timeouts.join) + 60,
    heartbeat_timeout_seconds=2 * int(timeouts.heartbeat) + 30,
    shutdown_timeout_seconds=int(timeouts.heartbeat) + 30,
  )


def joined() -> bool:
  """Return whether `join` has connected this process to others."""
  return _member is not None


def barrier(name: str) -> None:
  """Block until all processes have reached this point; if one does not in time, the run ends with its name.

  Args:
    name: name of the point in the message 'process 3 did not reach NAME'.
  """
  exchange_notes(name)


def exchange_notes(name: str, note: str = '', within_s: float | None = None) -> dict[int, str] | None:
  """Exchange notes at a barrier, and return the non-empty ones by process; uses no devices.

  Args:
    name: as in `barrier`.
    note: note of this process for all others; at most `NOTES` notes are passed on.
    within_s: seconds to wait for the others, after which None is returned; None: wait as in `barrier`.
  """
  if _member is not None:
    return _member.exchange_notes(name, note, within_s)
  return {0: note} if note else {}


def stop_point() -> StopPoint:
  """Return the `StopPoint` at which this process leaves when a process of the run is told to stop."""
  return _alone if _member is None else _member.stop_point


def ask_to_stop() -> None:
  """Tell all processes of the run that this one was told to stop."""
  if _member is None:
    _alone.settle(_alone.freeze() + 1)
  else:
    _member.ask_to_stop()


def on_stop(listener: Callable[[], None] | None) -> None:
  """Call `listener`, in another thread, when any process is told to stop; None removes the listener."""
  if _member is not None:
    _member.listener = listener
    if listener is not None and _member.stop_point.asked():
      listener()


def start_alone() -> None:
  """Reset the stop point of a run of one process, since an earlier run in this process may have been stopped."""
  global _alone
  _alone = StopPoint()


def finish() -> None:
  """End the run together; all processes call this when they have done their work."""
  global _member
  if _member is None:
    return
  import jax

  barrier(ENDS)
  jax.distributed.shutdown()
  _member = None


def fail(code: int, sentence: str) -> None:
  """End this process and all others with `sentence` and `code`; return in a run of one process.

  The others end with the same code, since starting again would not help.
  """
  if _member is not None:
    _member.fail(code, sentence)


def await_verdict(error: BaseException) -> None:
  """If `error` may be due to a lost process, wait as long as its detection takes.

  If a process is lost, this process ends here with that message. Otherwise the error is this process's own.
  """
  if _member is not None and (isinstance(error, PeerFailed) or is_of_a_collective(error)):
    time.sleep(_member.timeouts.heartbeat)


def is_of_a_collective(error: BaseException) -> bool:
  """Return whether an error, or one in its chain of causes, looks like XLA's for a failed collective or service."""
  return any(_COLLECTIVE.match(str(link)) for link in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
  """Yield an error, the members of an error group, and their causes, each once."""
  seen: set[int] = set()
  waiting: list[BaseException | None] = [error]
  while waiting:
    link = waiting.pop()
    if link is None or id(link) in seen:
      continue
    seen.add(id(link))
    yield link
    waiting += [link.__cause__, link.__context__, *(link.exceptions if isinstance(link, BaseExceptionGroup) else ())]


def leave(sentence: str, code: int) -> NoReturn:
  """End this process at once, whatever its other threads are doing, after saying why."""
  with contextlib.suppress(OSError):
    sys.stdout.flush()
    print(f'\n{sentence}', file=sys.stderr, flush=True)
  os._exit(code)


class _Connection:
  """Lines of JSON over a socket; `receive` raises TimeoutError if the other end was silent for `timeout`."""

  def __init__(self, connected: socket.socket, timeout: float):
    connected.settimeout(timeout)
    self._socket, self._lines, self._lock = connected, connected.makefile('rb'), threading.Lock()

  def send(self, **message: Any) -> None:
    with self._lock:
      self._socket.sendall(json.dumps(message).encode() + b'\n')

  def receive(self) -> dict[str, Any] | None:
    """Return the next message; None if the other end is closed, or does not speak this protocol."""
    line = self._lines.readline(1 << 16)
    try:
      message = json.loads(line) if line.endswith(b'\n') else None
    except ValueError:
      return None
    return message if isinstance(message, dict) else None

  def limit(self, timeout: float) -> None:
    self._socket.settimeout(timeout)

  def close(self) -> None:
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()


class _Member:
  """The common part of the hub and the spokes."""

  def __init__(self, place: ProcessPlace, timeouts: Timeouts):
    self.place, self.timeouts = place, timeouts
    self.hosts: dict[int, str] = {}
    self.stop_point = StopPoint()
    self.listener: Callable[[], None] | None = None  # Called when a process is told to stop.
    self._passed: dict[str, threading.Event] = {}
    self._notes: dict[str, dict[int, str]] = {}  # Notes of completed barriers that this process has not read yet.
    self._lock = threading.Lock()
    self._ending = threading.Lock()  # The thread that holds it ends the process, and only it reports why.
    self._over = False  # All processes have done their work: connections may close.

  def called(self, index: int) -> str:
    return f'process {index} ({self.hosts[index]})' if index in self.hosts else f'process {index}'

  def event(self, name: str) -> threading.Event:
    with self._lock:
      return self._passed.setdefault(name, threading.Event())

  def passed(self, name: str, notes: dict[int, str]) -> None:
    self._over = self._over or name == ENDS
    with self._lock:
      self._notes[name] = notes
    self.event(name).set()

  def arrive(self, name: str, note: str) -> None:
    """Tell all processes that this one has reached a barrier."""
    raise NotImplementedError

  def exchange_notes(self, name: str, note: str, within_s: float | None) -> dict[int, str] | None:
    self.arrive(name, note)
    if not self.event(name).wait(within_s):
      return None
    with self._lock:
      del self._passed[name]
      return self._notes.pop(name)

  def received(self, connection: _Connection, index: int) -> dict[str, Any]:
    """Return the next message of a process; if it is silent or lost, a message that ends the run."""
    try:
      message = connection.receive()
    except TimeoutError:
      return {'end': _silent(self.called(index), self.timeouts.heartbeat), 'code': EXIT_LOST}
    except OSError:
      message = None
    return {'end': _gone(self.called(index)), 'code': EXIT_LOST} if message is None else message

  def ask_to_stop(self) -> None:
    """Tell all processes that this one was told to stop."""
    raise NotImplementedError

  def freeze(self) -> int:
    """Freeze the stop point as in `StopPoint.freeze`, and call the listener."""
    passed = self.stop_point.freeze()
    if self.listener is not None:
      self.listener()
    return passed

  def tell(self, sentence: str, code: int, but: int | None = None) -> None:
    """Tell the others (all of them, except process `but`) why the run ends."""
    raise NotImplementedError

  def end(self, sentence: str, code: int, *, told: str | None = None, but: int | None = None) -> NoReturn:
    """End the process from any thread (the main thread may hang in a collective); send others `told`, if given."""
    self._ending.acquire()
    if told is not None:
      self.tell(told, code, but)
    leave(sentence, code)

  def fail(self, code: int, sentence: str) -> NoReturn:
    self.end(sentence, code, told=f'{_capital(self.called(self.place.index))} ended: {sentence}')

  def beats(self) -> Iterator[None]:
    while not self._over:
      yield
      time.sleep(self.timeouts.heartbeat / BEATS)


def _capital(text: str) -> str:
  return text[0].upper() + text[1:]


def _gone(who: str) -> str:
  return f'{_capital(who)} is gone: the run ends here; the same command resumes from its last checkpoint.'


def _silent(who: str, seconds: float) -> str:
  return (
    f'{_capital(who)} has given no sign of life for {seconds:g} seconds: the run ends here; the same command '
    'resumes from its last checkpoint.'
  )


class Hub(_Member):
  """Process 0: receives the messages of all others, and broadcasts."""

  def __init__(self, place: ProcessPlace, timeouts: Timeouts):
    super().__init__(place, timeouts)
    self.hosts = {0: socket.gethostname()}
    self._spokes: dict[int, _Connection] = {}
    # Barrier → the notes of the processes that have arrived, and when the first did.
    self._arrived: dict[str, tuple[dict[int, str], float]] = {}
    self._stopping: dict[int, int] | None = None  # Points passed by each process, once one was told to stop.
    self._complete = threading.Event()
    self._refused: str | None = None

  def meet(self) -> str:
    """Wait for all others; return the address for JAX's service."""
    host, port = _split(self.place.address)
    try:
      dual = socket.has_dualstack_ipv6()
      server = socket.create_server(
        ('', port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=self.place.count
      )
    except OSError as error:
      raise UserError(
        f'Process 0 cannot listen at port {port} ({error}): end whatever uses it, or choose another '
        '--coordinator_address.'
      ) from error
    threading.Thread(target=self._accept, args=(server,), daemon=True).start()
    if not self._complete.wait(self.timeouts.join):
      sentence = self._missing()
      self.tell(sentence, EXIT_LOST)
      raise ProcessLost(sentence)
    if self._refused:
      self.tell(self._refused, EXIT_BAD_INPUT)
      raise UserError(self._refused)
    with socket.create_server(('', 0)) as server:
      service = server.getsockname()[1]  # A free port.
    for spoke in self._spokes.values():
      spoke.send(joined={str(index): name for index, name in self.hosts.items()}, service=service)
    for index, spoke in self._spokes.items():
      threading.Thread(target=self._hear, args=(index, spoke), daemon=True).start()
    threading.Thread(target=self._watch, daemon=True).start()
    return f'{host}:{service}'

  def _missing(self) -> str:
    missing = [index for index in range(self.place.count) if index not in self.hosts]
    numbers = ', '.join(map(str, missing))
    here = ', '.join(f'{index} ({name})' for index, name in sorted(self.hosts.items()))
    return (
      f'{"Process" if len(missing) == 1 else "Processes"} {numbers} of {self.place.count} did not start within '
      f'{self.timeouts.join:g} seconds (here: {here}): look at the log there (on a TPU slice: worker {numbers}), then '
      'start the command on all hosts again; --join_timeout_s waits longer.'
    )

  def _accept(self, server: socket.socket) -> None:
    while True:
      connected, _ = server.accept()
      threading.Thread(target=self._greet, args=(_Connection(connected, self.timeouts.heartbeat),), daemon=True).start()

  def _greet(self, spoke: _Connection) -> None:
    try:
      hello = spoke.receive()
    except OSError:
      hello = None
    if hello is None or not isinstance(hello.get('hello'), int):
      spoke.close()  # Not a process of this run.
      return
    index, host, count = hello['hello'], str(hello.get('host')), hello.get('count')
    with self._lock:
      if count != self.place.count or not 0 < index < self.place.count:
        self._refused = (
          f'Process {index} ({host}) was started with --num_processes={count}, process 0 with {self.place.count}: '
          'give all the same number, and each its own --process_id below it.'
        )
      elif index in self._spokes:
        self._refused = (
          f'Two processes were started with --process_id={index} ({self.hosts[index]} and {host}): give each its own.'
        )
      else:
        self._spokes[index], self.hosts[index] = spoke, host
      complete = self._refused or len(self._spokes) == self.place.count - 1
    if self._refused:
      with contextlib.suppress(OSError):
        spoke.send(end=self._refused, code=EXIT_BAD_INPUT)
    if complete:
      self._complete.set()  # Set last, since process 0 may end from now on.

  def _hear(self, index: int, spoke: _Connection) -> None:
    """Receive the messages of another process until the end of the run."""
    while True:
      message = self.received(spoke, index)
      if self._over:
        return
      if 'end' in message:
        self.end(message['end'], message['code'], told=message['end'], but=index)
      if 'arrive' in message:
        self._arrive(index, message['arrive'], str(message.get('note', '')))
      if 'stop' in message:
        self.ask_to_stop()
      if 'at' in message:
        self._has_come(index, int(message['at']))

  def _arrive(self, index: int, name: str, note: str) -> None:
    with self._lock:
      there, _ = self._arrived.setdefault(name, ({}, time.monotonic()))
      there[index] = note
      complete = len(there) == self.place.count
      notes = dict(sorted((place, text) for place, text in there.items() if text)[:NOTES])
      if complete:
        del self._arrived[name]
        self._over = self._over or name == ENDS
        self._broadcast(passed=name, notes=notes)
    if complete:
      self.passed(name, notes)

  def arrive(self, name: str, note: str) -> None:
    self._arrive(0, name, note)

  def ask_to_stop(self) -> None:
    with self._lock:
      if self._stopping is not None:
        return
      self._stopping = {}
      self._broadcast(stop=True)
    self._has_come(0, self.freeze())

  def _has_come(self, index: int, passed: int) -> None:
    """Record how many points a process has passed; once that is known of all, broadcast where they leave."""
    with self._lock:
      self._stopping[index] = passed
      if len(self._stopping) < self.place.count:
        return
      at = max(self._stopping.values()) + 1
      self._broadcast(leave=at)
    self.stop_point.settle(at)

  def _watch(self) -> None:
    """Send heartbeats of process 0, and end barriers that wait too long."""
    for _ in self.beats():
      with self._lock:
        self._broadcast(beat=True)
        late = [
          (name, [index for index in range(self.place.count) if index not in there])
          for name, (there, since) in self._arrived.items()
          if time.monotonic() - since > self.timeouts.barrier
        ]
      for name, missing in late:
        sentence = (
          f'{" and ".join(map(self.called, missing))} did not reach {name} within {self.timeouts.barrier:g} seconds of '
          'the others: the run ends here; the same command resumes from its last checkpoint.'
        )
        self.end(_capital(sentence), EXIT_LOST, told=_capital(sentence))

  def tell(self, sentence: str, code: int, but: int | None = None) -> None:
    self._broadcast(but=but, end=sentence, code=code)

  def _broadcast(self, *, but: int | None = None, **message: Any) -> None:
    for index, spoke in list(self._spokes.items()):
      if index != but:
        with contextlib.suppress(OSError):  # The thread that listens to it notices that it is gone.
          spoke.send(**message)


class Spoke(_Member):
  """Any process other than process 0, connected to process 0."""

  _hub: _Connection

  def meet(self) -> str:
    """Wait for process 0 and, through it, for all others; return the address of JAX's service."""
    host, port = _split(self.place.address)
    deadline = time.monotonic() + self.timeouts.join
    self._hub = self._reach(host, port, deadline)
    try:
      self._hub.send(hello=self.place.index, count=self.place.count, host=socket.gethostname())
      message = self._hub.receive()
    except OSError as error:
      raise ProcessLost(_gone('process 0')) from error
    if message is None:
      raise ProcessLost(_gone('process 0'))
    if 'end' in message:
      raise UserError(message['end']) if message['code'] == EXIT_BAD_INPUT else ProcessLost(message['end'])
    self.hosts = {int(index): name for index, name in message['joined'].items()}
    self._hub.limit(self.timeouts.heartbeat)
    threading.Thread(target=self._hear, daemon=True).start()
    threading.Thread(target=self._beat, daemon=True).start()
    return f'127.0.0.1:{_relay((host, message["service"]))}'

  def _reach(self, host: str, port: int, deadline: float) -> _Connection:
    while True:
      try:
        connected = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), RETRY_S))
        # Process 0 answers when all processes are there, or when its own timeout is over.
        return _Connection(connected, self.timeouts.join + self.timeouts.heartbeat)
      except OSError as error:
        if time.monotonic() + RETRY_S > deadline:
          raise ProcessLost(
            f'Process {self.place.index} could not reach process 0 at {host}:{port} within {self.timeouts.join:g} '
            f'seconds ({first_line(error)}): look at the log of process 0 (on a TPU slice: worker 0), and whether the '
            'network lets that port through; then start the command on all hosts again.'
          ) from error
        time.sleep(RETRY_S)

  def _hear(self) -> None:
    while True:
      message = self.received(self._hub, 0)
      if 'passed' in message:
        self.passed(message['passed'], {int(index): note for index, note in message['notes'].items()})
      if 'stop' in message:
        self._send(at=self.freeze())
      if 'leave' in message:
        self.stop_point.settle(message['leave'])
      if self._over:
        return
      if 'end' in message:
        self.end(message['end'], message['code'])

  def _beat(self) -> None:
    for _ in self.beats():
      self._send(beat=True)

  def arrive(self, name: str, note: str) -> None:
    self._send(arrive=name, note=note)

  def ask_to_stop(self) -> None:
    self._send(stop=True)  # Process 0 broadcasts it to all, including this one.

  def tell(self, sentence: str, code: int, but: int | None = None) -> None:
    self._send(end=sentence, code=code)

  def _send(self, **message: Any) -> None:
    with contextlib.suppress(OSError):  # The listening thread notices that process 0 is gone.
      self._hub.send(**message)


def _relay(target: tuple[str, int]) -> int:
  """Return a local port that forwards to `target`; when the target closes, the local end stays open.

  When its connection to process 0 closes, JAX aborts the process with a stack trace, before the reason can be printed.
  """
  server = socket.create_server(('127.0.0.1', 0))

  def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        sink.sendall(data)

  def serve() -> None:
    while True:
      near, _ = server.accept()
      with contextlib.suppress(OSError):  # JAX retries until its own timeout.
        far = socket.create_connection(target)
        for ends in ((near, far), (far, near)):
          threading.Thread(target=pump, args=ends, daemon=True).start()
        continue
      near.close()

  threading.Thread(target=serve, daemon=True).start()
  return server.getsockname()[1]


def _split(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(':')
  if not host or not port.isdigit():
    raise UserError(f'--coordinator_address={address} is not host:port.')
  return host, int(port)


_member: Hub | Spoke | None = None
_alone = StopPoint()  # The stop point of a run of one process.
