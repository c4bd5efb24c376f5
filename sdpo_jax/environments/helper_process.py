"""Processes of our own that read what a model's program made, so that the training process need not.

They run a file of the standard library alone, without the owner's environment, and each keeps a limit of its own on
processor time and memory. One that dies over a request is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any
import weakref

from sdpo_jax.environments.code_verdicts import ANSWER, FRAME
from sdpo_jax.errors import first_line

WALL_S = 60.0  # For an answer; the process keeps a smaller limit of its own on processor time.
# What ends a process by what it was asked: too much processor time, or a stack or memory that came to its end in C.
_BY_THE_REQUEST = (signal.SIGPROF, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


class RequestOverranError(Exception):
  """A request took too much time or memory to answer."""


class HelperPool:
  """Processes that answer requests, each one at a time; thread-safe."""

  def __init__(self, script: pathlib.Path, count: int):
    """Start `count` processes that run `script` (code_verdicts.py shows what it does).

    Raises:
      RuntimeError: they cannot be started.
    """
    self._script = script
    self._idle: queue.SimpleQueue[_Helper] = queue.SimpleQueue()
    self._all: set[_Helper] = set()
    self._lock = threading.Lock()
    self._finalizer = weakref.finalize(self, _close, self._all, os.getpid())
    for _ in range(count):
      self._idle.put(self._start())

  def ask(self, question: Any, *parts: bytes) -> dict[str, Any]:
    """Return the answer to a question, JSON data, about three `parts`.

    Raises:
      RequestOverranError: the request took too much time or memory.
      RuntimeError: there was no answer, for a reason that is not the request.
    """
    request = [json.dumps(question, default=_plain).encode(), *parts]
    helper = self._idle.get()
    try:
      for attempt in range(2):
        try:
          answer = helper.ask(request)
          break
        except (OSError, EOFError) as error:
          code = self._end(helper)
          helper = self._start()
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
    self._finalizer()

  def _start(self) -> _Helper:
    with self._lock:
      if not self._finalizer.alive:
        raise RuntimeError('The processes that compare results are closed.')
      helper = _Helper(self._script)
      self._all.add(helper)
      return helper

  def _end(self, helper: _Helper) -> int:
    with self._lock:
      self._all.discard(helper)
    return helper.end()


class _Helper:
  """One process and the socket to it."""

  def __init__(self, script: pathlib.Path):
    self._socket, theirs = socket.socketpair()
    self._socket.settimeout(WALL_S)
    with theirs, tempfile.TemporaryFile() as errors:
      descriptor = theirs.fileno()
      self._process = subprocess.Popen(
        [sys.executable, '-I', '-X', 'utf8', str(script), str(descriptor)],
        env={},
        cwd='/',
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=[descriptor],
        start_new_session=True,
      )
      theirs.close()
      try:
        self._read(ANSWER.size)
      except (OSError, EOFError) as error:
        self.end()
        errors.seek(0)
        last = errors.read().decode(errors='replace').strip().splitlines()[-1:]
        raise RuntimeError(f'A process that compares results cannot be started: {"".join(last) or error}.') from error

  def ask(self, request: Sequence[bytes]) -> dict[str, Any]:
    """Raise OSError or EOFError where the process ends or stands still."""
    self._socket.sendall(FRAME.pack(*map(len, request)))
    for part in request:
      self._socket.sendall(part)
    return json.loads(self._read(*ANSWER.unpack(self._read(ANSWER.size))))

  def end(self) -> int:
    """End the process, which may have ended; its exit code."""
    self._socket.close()
    try:
      return self._process.wait(1)
    except subprocess.TimeoutExpired:
      self._process.kill()
      return self._process.wait()

  def _read(self, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
      chunk = self._socket.recv(size - len(data))
      if not chunk:
        raise EOFError('it hung up')
      data += chunk
    return bytes(data)


def _close(helpers: set[_Helper], owner: int) -> None:
  if os.getpid() != owner:  # A fork of the owner ends; the processes are not its own.
    return
  for helper in list(helpers):
    helper.end()


def _plain(value: Any) -> Any:
  """Return data of a row that JSON does not know."""
  return value.tolist() if hasattr(value, 'tolist') else str(value)
