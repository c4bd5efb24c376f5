"""A user's grader in a process of its own, which the trainer ends at a time limit (grader_process.py).

    python -P grader_child.py DESCRIPTOR

The trainer sends the grader and then, for each call, a method and its arguments, pickled; answers are JSON of plain
values, whatever the grader returns. Standard input is a pipe that nothing is written to: once the trainer is gone, even
killed, the kernel ends this process and all that it has started, whatever code it is in.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import json
from multiprocessing.connection import Connection
import os
import pickle
import signal
import sys
from types import ModuleType
from typing import Any


def main() -> None:
  """Answer calls until an empty one, or until the trainer is gone."""
  fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpid())  # All processes of this one's group.
  if sys.platform == 'linux':  # Elsewhere it is SIGIO, which a grader could ignore.
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
  fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
  connection, own = Connection(int(sys.argv[1])), os.getpid()
  settings = pickle.loads(connection.recv_bytes())
  sys.path[:] = settings['path']
  grader: Any = None
  with contextlib.suppress(EOFError):
    while request := connection.recv_bytes():
      answer, grader = answered(grader, settings, request)
      with contextlib.suppress(OSError, ValueError, AttributeError):  # The grader may have closed it.
        sys.stdout.flush()
      if os.getpid() != own:  # A fork that the grader made and did not end.
        os._exit(0)
      connection.send_bytes(json.dumps(answer).encode())


def answered(grader: Any, settings: dict[str, Any], request: bytes) -> tuple[dict[str, Any], Any]:
  """Return the answer to a request and the grader, which the first request brings.

  The answer has 'outcomes' and 'unusable' as from `called`, or what went wrong: 'refused', if the request cannot be
  read, 'user_error' or 'raised'.
  """
  from sdpo_jax.environments.outcomes import called, described  # The path is known only now.
  from sdpo_jax.errors import UserError

  try:
    for name, (file, constants) in settings.pop('modules', {}).items():
      here = vars(load(name, file))
      here.update({key: value for key, value in constants.items() if here.get(key) != value})  # Scripts change them.
    asked = pickle.loads(request)
  except BaseException as error:
    return {'refused': described(error)}, None
  if grader is None:
    return {}, asked
  try:
    outcomes, unusable = called(grader, *asked, settings['name'], settings['score_range'])
    return {'outcomes': [vars(outcome) for outcome in outcomes], 'unusable': unusable}, grader
  except UserError as error:
    return {'user_error': str(error)}, grader
  except BaseException as error:  # Whatever it is costs a completion, not the process.
    return {'raised': described(error)}, grader


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
