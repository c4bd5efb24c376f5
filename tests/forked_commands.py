"""Commands in forks of a process that has the imports done and has started no thread of JAX yet."""

from __future__ import annotations

import atexit
import multiprocessing.process
import os
import runpy
import sys
import threading
import traceback
from typing import NoReturn


def run_as_command(module: str, arguments: list[str]) -> NoReturn:
  """Run a module such as launch.train as `python -m` does, and end this process, a fork, with its exit code.

  The fork waits for its threads and runs what is registered for the exit, but does not take the imported modules apart,
  which takes longer than many a command.
  """
  multiprocessing.process._children.clear()  # noqa: SLF001 (A process ends those of its own; these are its parent's.)
  code = 1
  try:
    sys.argv = [f'{module.replace(".", "/")}.py', *arguments]
    runpy.run_module(module, run_name='__main__', alter_sys=True)
    code = 0
  except SystemExit as ended:
    if isinstance(ended.code, int | None):
      code = ended.code or 0
    else:
      traceback.print_exc()
  except BaseException:
    traceback.print_exc()
  threading._shutdown()  # noqa: SLF001 (As Python ends a process.)
  atexit._run_exitfuncs()  # noqa: SLF001
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
