"""Processes of a user's graders, which can be ended when a call takes too long; a thread cannot.

A grader is sent once, pickled: modules by name or file, objects with their state. What it keeps between calls lives in
its process, until that is ended. The process has the trainer's environment variables, folder and output, and no
accelerator; what is logged there reaches the handlers here.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import io
import json
import logging
import math
import multiprocessing
from multiprocessing.connection import Connection
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import time
from typing import Any
import weakref

from sdpo_jax.environments import registry
from sdpo_jax.environments.grader_child import state
from sdpo_jax.environments.grader_code import counts
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.types import Outcome

CHILD = pathlib.Path(__file__).with_name('grader_child.py')
CLOSE_S = 5.0  # For what a process does at its exit, such as writing what it has in buffers.
START_S = 120.0  # A grader whose modules are not loaded by then stays in a thread.
MESSAGE = 2**28  # Most bytes of an answer.
LOGGER = logging.getLogger('sdpo_jax.graders')


class UnsendableError(Exception):
  """A grader, or a question, cannot be sent to another process; the message says why."""


class RaisedError(Exception):
  """A grader raised an exception in its process; the message goes on after the grader's name."""


class EndedProcessError(RaisedError):
  """A grader ended its process, or what came from it cannot be read, so that it was ended."""


class GraderProcess:
  """A running process with a grader; one call at a time."""

  def __init__(self, grader: Any, name: str, score_range: Sequence[float]):
    """Start the process.

    Raises:
      UnsendableError: the grader cannot be pickled, or not be read in another process, where its modules would be
        others than here.
      EndedProcessError: no process can be started for now, or it ended, as for want of memory.
    """
    content = io.BytesIO()
    packer = _Packer(content, pickle.HIGHEST_PROTOCOL)
    _pickled(packer.dump, grader)
    settings = {'path': sys.path, 'name': name, 'score_range': tuple(score_range), 'modules': packer.modules}
    settings |= {'names': registry.names(), 'level': LOGGER.getEffectiveLevel()}
    try:
      self._connection, theirs = multiprocessing.Pipe()
      hanging_up, alive = os.pipe()
      self._process = subprocess.Popen(
        [sys.executable, '-P', str(CHILD), str(theirs.fileno()), str(hanging_up)],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno(), hanging_up],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
        start_new_session=True,
      )
    except OSError as error:
      raise EndedProcessError(f'has no process, as none can be started ({error})') from error
    theirs.close(), os.close(hanging_up)
    self._finalizer = weakref.finalize(self, _end, self._process, self._connection, alive)
    self._finalizer.atexit = False  # It ends by itself, and this process may be a fork.
    try:
      states = self._asked(pickle.dumps(settings), content.getvalue(), seconds=START_S)['states']
      for name in states.keys() & sys.modules.keys():
        ours = state(sys.modules[name])
        if changed := [key for key in {**ours, **states[name]} if ours.get(key) != states[name].get(key)]:
          raise UnsendableError(f'{changed[0]} of its module {name} is not what an import makes it')
    except BaseException:
      self.end()
      raise

  def ask(self, method: str, asked: Sequence[list[Any]]) -> list[Outcome]:
    """Call a method of the grader as `outcomes.called` does.

    Raises:
      UnsendableError: the arguments cannot be sent, or the grader needs another that is not there.
      UserError: the grader raised it, or returned no outcomes.
      RaisedError: it raised something else.
      EndedProcessError: it ended the process.
    """
    answer = self._asked(_pickled(pickle.dumps, (method, asked)))
    return [Outcome(**fields) for fields in answer['outcomes']]

  def end(self) -> str:
    """End the process and those of its group; return how it ended. May be called twice, by any thread."""
    self._finalizer()
    code = self._process.wait()
    return f'exit code {code}' if code >= 0 else str(signal.strsignal(-code))

  def close(self) -> None:
    """Let the process end by itself; no call may be running."""
    if not self.ended:
      with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        self._connection.send_bytes(b'')
        self._process.wait(CLOSE_S)
    self.end()

  @property
  def ended(self) -> bool:
    return self._process.poll() is not None

  def _asked(self, *requests: bytes, seconds: float | None = None) -> dict[str, Any]:
    """Send requests and return the answer to the last one; raises as `ask`, also without an answer within `seconds`."""
    try:
      with contextlib.suppress(OSError):  # Reading finds the reason.
        for request in requests:
          self._connection.send_bytes(request)
      while logged := (answer := self._read(seconds)).get('logged'):
        record = LOGGER.makeRecord(*logged, (), None)
        if LOGGER.isEnabledFor(record.levelno):
          LOGGER.handle(record)
    except UnsendableError:
      raise
    except Exception as error:  # Whatever it is: the next call must not read the rest as its answer.
      with contextlib.suppress(subprocess.TimeoutExpired):  # It hangs up just before its end.
        self._process.wait(isinstance(error, EOFError | ConnectionError))
      alone, how = self.ended, self.end()
      raise EndedProcessError(
        f'ended its process ({how})' if alone else f'sent what cannot be read ({first_line(error)})'
      ) from error
    finally:
      if self.ended:  # Here nothing reads it any more.
        self._connection.close()
    if 'refused' in answer:
      self.end()
      raise UnsendableError(answer['refused'])
    if 'user_error' in answer:
      raise UserError(answer['user_error'])
    if 'raised' in answer:
      raise RaisedError(answer['raised'])
    return answer

  def _read(self, seconds: float | None) -> dict[str, Any]:
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while not self._connection.poll(0.1):
      if self.ended:  # Processes that it has started may hold the connection open.
        raise EOFError
      if time.monotonic() >= deadline:
        raise UnsendableError(f'its modules are not loaded within {seconds:g} s')
    return json.loads(self._connection.recv_bytes(MESSAGE))


class _Packer(pickle.Pickler):
  """Pickles a grader and finds the files of the user's modules that it needs, by their names."""

  def __init__(self, *arguments: Any):
    super().__init__(*arguments)
    self.modules: dict[str, str] = {}

  def reducer_override(self, value: Any) -> Any:
    name = getattr(value, '__module__', None)
    if name == '__main__':
      raise UnsendableError('it is defined in the program that was started')
    held = callable(getattr(value, 'close', None)) and not isinstance(value, type)
    if held and type(value).__getstate__ is object.__getstate__:  # Others know how they are copied.
      raise UnsendableError(f'it holds an object with a method close() ({type(value).__name__})')
    file = getattr(sys.modules.get(name), '__file__', None) if isinstance(name, str) else None
    if file and name not in self.modules and counts(pathlib.Path(file).resolve()):
      self.modules[name] = file
    return NotImplemented


def _pickled(pickled: Any, value: Any) -> Any:
  try:
    return pickled(value)
  except Exception as error:  # What a value raises depends on its type.
    raise UnsendableError(first_line(error)) from error


def _end(process: subprocess.Popen, connection: Connection, alive: int) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  os.close(alive)
  # Not closed: a thread may still read. It closes with its last user.
  with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
    ours.shutdown(socket.SHUT_RDWR)
