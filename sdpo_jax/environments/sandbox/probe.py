"""What a sandbox must withstand before it is used: a few real attacks, run inside it when it starts.

Loaded by the zygote on its own; standard library only. The full suite is tests/test_sandbox_attacks.py.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import importlib
import os
import socket
import tempfile
import threading

LATE_MODULE = 'colorsys'  # Of the standard library, and loaded by nobody before.


def run(payload: dict) -> dict:
  """What works for a program in here.

  Args:
    payload: 'canary', a file outside; 'directory', its directory; 'port', on which the owner listens; 'owner' and
      'zygote', process ids; 'users', whether there are users beside root.

  Returns:
    'leaks': names of attacks that succeeded, 'broken': what a program may do and could not, with the error.
  """
  canary, owner = payload['canary'], payload['owner']
  attacks: dict[str, Callable[[], object]] = {
    'reads a file': lambda: open(canary).read(),
    'reads the list of users': lambda: open('/etc/passwd').read(),
    'writes a file': lambda: open(canary, 'a').write('x'),
    'makes a file': lambda: open(os.path.join(payload['directory'], 'made'), 'x'),
    'lists a directory': lambda: os.listdir(payload['directory']),
    'truncates a file': lambda: os.truncate(canary, 0),
    'changes a mode': lambda: os.chmod(canary, 0o777),
    'opens a socket': lambda: socket.create_connection(('127.0.0.1', payload['port']), 1),
    'signals another process': lambda: os.kill(owner, 0),
    'reads an environment': lambda: open(f'/proc/{owner}/environ').read(),
    "reads the zygote's memory": lambda: open(f'/proc/{payload["zygote"]}/mem', 'rb').read(0),
    'forks': _fork,
    'executes a program': lambda: os.posix_spawn('/bin/true', ['true'], {}),
    'traces a process': lambda: _checked(ctypes.CDLL(None, use_errno=True).ptrace(16, owner, None, None)),
    'leaves its process group': os.setsid,
    'has an environment': _environment,
    'is root': lambda: _root(payload['users']),
  }
  uses: dict[str, Callable[[], object]] = {
    f'importing {LATE_MODULE} from the Python installation': lambda: importlib.import_module(LATE_MODULE),
    'writing to the scratch directory': _write,
    'a thread': _thread,
  }
  leaks = [name for name, attack in attacks.items() if _error(attack) is None]
  broken = {name: error for name, use in uses.items() if (error := _error(use)) is not None}
  return {'leaks': leaks, 'broken': broken}


def _error(action: Callable[[], object]) -> str | None:
  try:
    action()
  except Exception as error:
    return f'{type(error).__name__}: {error}'
  return None


def _checked(result: int) -> None:
  if result:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _fork() -> None:
  pid = os.fork()
  if pid == 0:
    os._exit(0)
  os.waitpid(pid, 0)


def _environment() -> None:
  extra = set(os.environ) - {'HOME', 'TMPDIR', 'LANG'}
  if not extra:
    raise LookupError('nothing of the owner')


def _root(users: bool) -> None:
  if not users or 0 not in (*os.getresuid(), *os.getresgid()):
    raise PermissionError('somebody else')


def _write() -> None:
  with tempfile.NamedTemporaryFile(dir=os.environ['TMPDIR']) as file:
    file.write(b'x')
  os.mkdir('directory')


def _thread() -> None:
  thread = threading.Thread(target=int)
  thread.start()
  thread.join()
