"""Commands in forks of a process that has the imports done and has started no thread of JAX yet.

To import JAX, Transformers and Orbax takes longer than many a command. So `start` and `run` ask a process that has done
it, one for all tests of this process, for a fork that becomes the command: it has the environment, the folder, the
streams and the number of a process of its own. What a test says about the start of a process, its imports or its first
moments needs a real one.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
import contextlib
import functools
import gc
import json
import multiprocessing.process
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from typing import IO, NoReturn

REPOSITORY = pathlib.Path(__file__).parent.parent
CACHE = 'JAX_COMPILATION_CACHE_DIR'
# Variables that packages read when they are imported: processes in which these differ are forks of different ones.
READ_BY_IMPORTS = ('JAX_', 'HF_', 'TRANSFORMERS_', 'OPENBLAS_', 'LD_')


def run_as_process(line: list[str]) -> NoReturn:
  """Do what `python LINE` does, `-m MODULE …`, `-c CODE …` or `FILE …`, and end this process, a fork, as it ends.

  The fork waits for its threads and runs what is registered for the exit, but does not take the imported modules apart,
  which takes longer than many a command.
  """
  multiprocessing.process._children.clear()  # noqa: SLF001 (A process ends those of its own; these are its parent's.)
  code = 1
  try:
    _execute(line)
    code = 0
  except SystemExit as ended:
    if isinstance(ended.code, int | None):
      code = ended.code or 0
    else:
      print(ended.code, file=sys.stderr)
  except BaseException:
    traceback.print_exc()
  threading._shutdown()  # noqa: SLF001 (As Python ends a process.)
  atexit._run_exitfuncs()  # noqa: SLF001
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def _execute(line: list[str]) -> None:
  if line[0] == '-m':
    sys.argv = [f'{line[1].replace(".", "/")}.py', *line[2:]]
    runpy.run_module(line[1], run_name='__main__', alter_sys=True)
  elif line[0] == '-c':
    sys.argv = ['-c', *line[2:]]
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    exec(compile(line[1], '<string>', 'exec'), main.__dict__)
  else:
    sys.argv = line
    runpy.run_path(line[0], run_name='__main__')


class Forked:
  """A process that does what `python LINE` does; it has what is used of `subprocess.Popen`."""

  def __init__(
    self,
    line: list[str],
    environment: Mapping[str, str],
    folder: pathlib.Path = REPOSITORY,
    stdout: IO | None = None,
    stderr: IO | None = None,
  ):
    """Start it; a stream that is not given is that of this process, and there is nothing to read."""
    status, theirs = os.pipe()
    with tempfile.TemporaryFile('w') as request, open(os.devnull) as nothing, open(theirs, 'wb') as written:
      json.dump([line, dict(environment), str(folder)], request)
      request.flush()
      files = [request, nothing, stdout or 1, stderr or 2, written]
      descriptors = [file if isinstance(file, int) else file.fileno() for file in files]
      socket.send_fds(_server(environment), [b'.'], descriptors)
    self._status = open(status)
    self.pid = int(self._status.readline())
    self.returncode: int | None = None

  def poll(self) -> int | None:
    return self._ended(0)

  def wait(self, timeout: float | None = None) -> int:
    code = self._ended(timeout)
    if code is None:
      raise subprocess.TimeoutExpired(str(self.pid), timeout)
    return code

  def _ended(self, timeout: float | None) -> int | None:
    if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
      self.returncode = int(self._status.readline())
      self._status.close()
    return self.returncode

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)


def run(
  line: list[str], environment: Mapping[str, str], folder: pathlib.Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
  """Do what `python LINE` does to its end, and return how it ended and what it wrote."""
  [done] = run_together([line], environment, folder)
  return done


def run_together(
  lines: list[list[str]], environment: Mapping[str, str], folder: pathlib.Path = REPOSITORY
) -> list[subprocess.CompletedProcess[str]]:
  """Do what several `python LINE` do at the same time."""
  with contextlib.ExitStack() as stack:
    started = []
    for line in lines:
      out, err = (stack.enter_context(tempfile.TemporaryFile('w+')) for _ in range(2))
      started.append((line, Forked(line, environment, folder, out, err), out, err))
    return [
      subprocess.CompletedProcess(line, process.wait(), _all(out), _all(err)) for line, process, out, err in started
    ]


def _all(file: IO[str]) -> str:
  file.seek(0)
  return file.read()


def _server(environment: Mapping[str, str]) -> socket.socket:
  """Return the connection to the process whose forks can have these variables; it is started if there is none."""
  fixed = {name for name in environment if name.startswith(READ_BY_IMPORTS)} - {CACHE}
  return _start(frozenset((name, environment[name]) for name in fixed))


@functools.cache
def _start(fixed: frozenset[tuple[str, str]]) -> socket.socket:
  ours, theirs = socket.socketpair()
  variables = {name: value for name, value in os.environ.items() if not name.startswith(READ_BY_IMPORTS)} | dict(fixed)
  with theirs:
    number = theirs.fileno()
    command = [sys.executable, '-m', 'tests.forked_commands', str(number)]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdin=subprocess.DEVNULL, pass_fds=[number])
  atexit.register(process.wait)
  atexit.register(ours.close)  # First: then it ends.
  return ours


def serve(asked: socket.socket) -> None:
  """Import what the commands import, then make forks until nobody can ask for one."""
  from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

  from sdpo_jax import command, interface  # noqa: F401
  from sdpo_jax.inference import runs  # noqa: F401
  from sdpo_jax.training import closing_text, loop  # noqa: F401

  gc.collect()
  gc.freeze()  # What the garbage collector leaves alone is not copied for a fork.
  woken, wakes = socket.socketpair()
  wakes.setblocking(False)
  signal.set_wakeup_fd(wakes.fileno())
  signal.signal(signal.SIGCHLD, lambda number, frame: None)
  waiting: dict[int, int] = {}  # Process → where to write how it ends.
  while True:
    ready, _, _ = select.select([asked, woken], [], [])
    if woken in ready:
      woken.recv(4096)
      _report(waiting)
    if asked in ready:
      descriptors = socket.recv_fds(asked, 1, 5)[1]
      if not descriptors:
        return _report(waiting)
      *given, status = descriptors
      child = os.fork()
      if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (asked, woken, wakes):
          end.close()
        for descriptor in (status, *waiting.values()):
          os.close(descriptor)
        _become(*given)
      waiting[child] = status
      os.write(status, f'{child}\n'.encode())
      for descriptor in given:
        os.close(descriptor)


def _report(waiting: dict[int, int]) -> None:
  """Write how the forks that have ended did."""
  with contextlib.suppress(ChildProcessError):
    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
      status = waiting.pop(ended[0])
      with contextlib.suppress(BrokenPipeError):  # Nobody waits for it any more.
        os.write(status, f'{os.waitstatus_to_exitcode(ended[1])}\n'.encode())
      os.close(status)


def _become(request: int, *streams: int) -> NoReturn:
  """Be the command that a file names, with these streams."""
  import jax

  line, variables, folder = json.loads(os.pread(request, os.fstat(request).st_size, 0))
  for number, descriptor in enumerate(streams):
    os.dup2(descriptor, number)
  for descriptor in (request, *streams):
    os.close(descriptor)
  os.environ.clear()
  os.environ.update(variables)
  os.chdir(folder)
  if CACHE in variables:
    jax.config.update(CACHE.lower(), variables[CACHE])
  sys.path[0] = {'-m': folder, '-c': ''}.get(line[0], os.path.dirname(line[0]))
  sys.path[1:1] = filter(None, variables.get('PYTHONPATH', '').split(os.pathsep))
  run_as_process(line)


if __name__ == '__main__':
  with socket.socket(fileno=int(sys.argv[1])) as connection:
    serve(connection)
