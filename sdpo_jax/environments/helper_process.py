"""Helper processes that parse the output of model-written programs, outside the training process.

They run a single file that needs only the standard library, without the owner's environment variables; each limits its
own CPU time and memory. A process that dies on a request is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import multiprocessing
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any
import weakref

from sdpo_jax.errors import first_line

WALL_S = 60.0  # Seconds to wait for an answer; the process itself has a smaller limit of CPU time.
# Signals with which a request can end the process: too much CPU time, or stack or memory exhausted in C.
_BY_THE_REQUEST = (signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


class RequestOverranError(Exception):
  """A request took too much time or memory."""


class HelperPool:
  """A pool of processes that answer requests, one at a time each; thread-safe."""

  def __init__(self, script: pathlib.Path, count: int):
    """Start `count` processes that run `script` (see code_verdicts.py for an example).

    Raises:
      RuntimeError: the processes cannot be started.
    """
    self._script = script
    self._idle: queue.SimpleQueue[_Helper | None] = queue.SimpleQueue()  # None: one that has ended, to be replaced.
    self._all: weakref.WeakSet[_Helper] = weakref.WeakSet()
    self._lock = threading.Lock()
    self._finalizer = weakref.finalize(self, _close, self._all, os.getpid())
    for _ in range(count):
      self._idle.put(self._start())

  def ask(self, question: Any, *parts: bytes) -> dict[str, Any]:
    """Send a question, JSON data, with three byte strings `parts`, and return the answer.

    Raises:
      RequestOverranError: the request took too much time or memory.
      RuntimeError: there was no answer, for a reason other than the request.
    """
    request = [json.dumps(question, default=_plain).encode(), *parts]
    helper = self._idle.get()
    try:
      for attempt in range(2):
        helper = helper or self._start()
        try:
          answer = helper.ask(request)
          break
        except BaseException as error:
          # For any error: another request must not read a late answer of this process.
          ended, helper = helper, None
          code = ended.end()
          if not isinstance(error, OSError | EOFError):
            raise
          if -code in _BY_THE_REQUEST:
            raise RequestOverranError from error
          if attempt or isinstance(error, TimeoutError):
            raise RuntimeError(f'The process that compares results ended ({code}, {first_line(error)}).') from error
    finally:
      self._idle.put(helper)
    if 'fault' in answer:
      raise RuntimeError(f'The process that compares results has a fault: {answer["fault"]}.')
    if 'overran' in answer:
      raise RequestOverranError
    return answer

  def close(self) -> None:
    """End the processes; may be called twice."""
    with self._lock:  # A process that is being started is ended too.
      self._finalizer()

  def _start(self) -> _Helper:
    with self._lock:
      if not self._finalizer.alive:
        raise RuntimeError('The processes that compare results are closed.')
      helper = _Helper(self._script)
      self._all.add(helper)
      return helper


class _Helper:
  """One process and the connection to it."""

  def __init__(self, script: pathlib.Path):
    self._connection, theirs = multiprocessing.Pipe()
    with theirs, tempfile.TemporaryFile() as errors:
      descriptor = theirs.fileno()
      command = [sys.executable, '-I', '-X', 'utf8', str(script), str(descriptor)]
      self._process = started(command, [descriptor], errors, {})
      theirs.close()
      try:
        self._read()
      except BaseException as error:
        self.end()
        if not isinstance(error, OSError | EOFError):
          raise
        said = last_line(errors) or error
        raise RuntimeError(f'A process that compares results cannot be started: {said}.') from error

  def ask(self, request: Sequence[bytes]) -> dict[str, Any]:
    """Send a request and return its answer; raises OSError or EOFError if the process ended or hangs."""
    for part in request:
      self._connection.send_bytes(part)
    return json.loads(self._read())

  def end(self) -> int:
    """End the process if it still runs and return its exit code."""
    self._connection.close()
    return ended(self._process, within_s=1)

  def _read(self) -> bytes:
    if not self._connection.poll(WALL_S):
      raise TimeoutError('timed out')
    return self._connection.recv_bytes()


def started(
  command: Sequence[str], descriptors: Sequence[int], output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen:
  """Start a process in a session of its own that has these variables and descriptors alone, and prints to `output`."""
  return subprocess.Popen(
    command,
    env=environment,
    cwd='/',
    stdin=subprocess.DEVNULL,
    stdout=output,
    stderr=output,
    pass_fds=descriptors,
    start_new_session=True,
  )


def last_line(output: IO[bytes]) -> str:
  """Return the last line that a process has printed, which says why it ended; '' if there is none."""
  output.seek(0)
  return ''.join(output.read().decode(errors='replace').strip().splitlines()[-1:])


def ended(process: subprocess.Popen, within_s: float) -> int:
  """Return the exit code of a process that has been told to end; it is killed if it does not."""
  try:
    return process.wait(within_s)
  except subprocess.TimeoutExpired:
    process.kill()
    return process.wait()


def _close(helpers: weakref.WeakSet[_Helper], owner: int) -> None:
  if os.getpid() != owner:  # A fork of the owner exits; the processes are not its own.
    return
  for helper in list(helpers):
    helper.end()


def _plain(value: Any) -> Any:
  """Convert data that JSON does not support."""
  return value.tolist() if hasattr(value, 'tolist') else str(value)
