"""A user's grader in a process of its own, which the trainer ends at a time limit (grader_process.py).

    python -P grader_child.py DESCRIPTOR PIPE

The trainer sends the grader and then, for each call, a method and its arguments, pickled; answers, and before them what
the grader logs, are JSON of plain values, whatever it returns. Nothing is written to PIPE: once the trainer is gone,
even killed, the kernel ends the processes of this one's group, whatever code they are in.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import logging.handlers
from multiprocessing.connection import Connection
import os
from pathlib import Path
import pickle
import re
import signal
import sys
from types import FunctionType, ModuleType
from typing import Any


def main() -> None:
  """Answer calls until an empty one, or until the trainer is gone."""
  pipe = int(sys.argv[2])
  fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())  # All processes of this one's group.
  if sys.platform == 'linux':  # Elsewhere it is SIGIO, which a grader could ignore.
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
  fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
  connection, own = Connection(int(sys.argv[1])), os.getpid()
  settings = pickle.loads(connection.recv_bytes())
  sys.path[:] = settings['path']
  sender = _Sender(connection)
  logging.basicConfig(level=settings['level'], handlers=[sender], format='%(message)s')
  os.register_at_fork(after_in_child=lambda: logging.basicConfig(force=True))  # Messages of forks would be mixed up.
  grader: Any = None
  with contextlib.suppress(EOFError):
    while request := connection.recv_bytes():
      answer, grader = answered(grader, settings, request)
      with contextlib.suppress(OSError, ValueError, AttributeError):  # The grader may have closed it.
        sys.stdout.flush()
      if os.getpid() != own:  # A fork that the grader made and did not end.
        os._exit(0)
      sender.send(answer)


class _Sender(logging.handlers.QueueHandler):
  """Sends answers to the trainer, and what is logged, one at a time; the queue is the connection."""

  def enqueue(self, record: logging.LogRecord) -> None:
    # Not its other attributes, by which handlers there might do anything.
    self.send({'logged': [record.name, int(record.levelno), record.pathname, record.lineno, record.getMessage()]})

  def send(self, message: dict[str, Any]) -> None:
    with self.lock:
      self.queue.send_bytes(json.dumps(message, default=str).encode())


def answered(grader: Any, settings: dict[str, Any], request: bytes) -> tuple[dict[str, Any], Any]:
  """Return the answer to a request and the grader, which the first request brings.

  The answer has 'outcomes' as from `called`, or what went wrong: 'refused', if the request cannot be
  answered here, 'user_error' or 'raised'.
  """
  from sdpo_jax.environments import registry  # The path is known only now.
  from sdpo_jax.environments.outcomes import called, described
  from sdpo_jax.errors import UserError

  try:
    registry.names_in_run = settings['names']
    for name, file in settings.pop('modules', {}).items():
      load(name, file)
    asked = pickle.loads(request)
  except BaseException as error:
    return {'refused': described(error)}, None
  if grader is None:
    return {'states': {name: state(module) for name, module in list(sys.modules.items()) if _is_users(module)}}, asked
  try:
    outcomes = called(grader, *asked, settings['name'], settings['score_range'])
    return {'outcomes': [vars(outcome) for outcome in outcomes]}, grader
  except registry.NotImportedError as error:
    return {'refused': str(error)}, None
  except UserError as error:
    return {'user_error': str(error)}, grader
  except BaseException as error:  # Whatever it is costs a completion, not the process.
    return {'raised': described(error)}, grader


def _is_users(module: ModuleType) -> bool:
  from sdpo_jax.environments.grader_code import counts

  file, name = getattr(module, '__file__', None), getattr(module, '__name__', '__main__')
  return isinstance(file, str) and name.split('.')[0] not in ('__main__', 'sdpo_jax') and counts(Path(file).resolve())


def state(module: ModuleType) -> dict[str, str]:
  """Return what the names of a module stand for, in short, by which two processes compare it."""

  def described(value: Any, depth: int = 5) -> str:
    kind = type(value)
    deep = not depth and kind in (dict, list, tuple)  # The order of a set differs between processes.
    if deep or kind in (bool, int, float, str, bytes, type(None), re.Pattern):
      return repr(value)
    parts: Any = ()
    if isinstance(value, dict) and depth:
      parts = [(described(key, depth - 1), described(held, depth - 1)) for key, held in value.items()]
    elif isinstance(value, list | tuple | set | frozenset) and depth:
      parts = [described(held, depth - 1) for held in value]
      parts = parts if isinstance(value, list | tuple) else sorted(parts)
    elif depth and module.__name__ in (kind.__module__, getattr(value, '__module__', None)):
      # Attributes of functions, classes and objects of the module; graders that are objects have states of their own.
      own = (
        getattr(value, '__dict__', {}).items() if isinstance(value, type | FunctionType) or not callable(value) else ()
      )
      parts = [(key, described(held, depth - 1)) for key, held in own if key[:2] != '__' and not callable(held)]
    text = f'{kind.__module__}.{kind.__qualname__} {parts}'
    return text if len(text) < 100 else hashlib.sha256(text.encode(errors='replace')).hexdigest()

  return {key: described(value) for key, value in vars(module).items() if key[:2] != '__'}


def load(name: str, file: str) -> ModuleType:
  """Return a module, by its name or else from its file, as the trainer has loaded it."""
  if (found := importlib.util.find_spec(name)) and found.origin == file:
    return importlib.import_module(name)
  spec = importlib.util.spec_from_file_location(name, file)
  module = sys.modules[name] = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


if __name__ == '__main__':
  main()
