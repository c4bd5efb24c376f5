"""The test of a sandbox before it is used: a few real attacks that run inside it when it starts.

Loaded by the zygote by path; standard library only. The full suite is tests/environments/sandbox/test_attacks.py.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import importlib
import mmap
import os
import socket
import tempfile
import threading

MOST_FILES = 4096  # Including the directory around them, more than a program may have (MAX_ENTRIES in zygote.py).
LEFT = 'left'  # Name that a program leaves in its scratch directory for the next one.
LATE_MODULE = 'colorsys'  # A standard library module that is not loaded yet.


def run(payload: dict) -> dict:
  """Try the attacks and return which of them succeed.

  Args:
    payload: 'canary', a file outside; 'directory', its directory; 'port', on which the owner listens; 'owner' and
      'zygote', process ids; 'users', whether there are users other than root; 'view', whether programs have views of
      their own; 'file_mb', the limit of files.

  Returns:
    'leaks': names of attacks that succeeded; 'broken': permitted actions that failed, with the error; 'channels': ways
      in which programs without views of their own could learn of one another.
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
    'writes beside its scratch directory': _write_beside,
    'finds what another program left': lambda: open(LEFT).close(),
  }
  uses: dict[str, Callable[[], object]] = {
    f'importing {LATE_MODULE} from the Python installation': lambda: importlib.import_module(LATE_MODULE),
    'writing to the scratch directory': _write,
    'a thread': _thread,
  }
  # Prevented only for programs with a view of their own.
  viewed: dict[str, Callable[[], object]] = {
    'learns that a file exists': lambda: os.stat(canary),
    'learns how many processes there are': _count_processes,
  }
  bounded: dict[str, Callable[[], object]] = {
    'has larger files than it may': lambda: _fill(payload['file_mb']),
    'has more files than it may': _make_files,
  }
  leaks = _successes(attacks)
  broken = {name: error for name, use in uses.items() if (error := _error(use)) is not None}
  channels = _successes(viewed)
  open(LEFT, 'w').close()
  if payload['view']:
    leaks, channels = [*leaks, *channels, *_successes(bounded)], []
  return {'leaks': leaks, 'broken': broken, 'channels': channels}


def _successes(attacks: dict[str, Callable[[], object]]) -> list[str]:
  return [name for name, attack in attacks.items() if _error(attack) is None]


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


def _write_beside() -> None:
  for directory in ('/', os.path.dirname(os.getcwd()), os.path.dirname(os.__file__)):
    if _error(lambda directory=directory: os.mkdir(os.path.join(directory, 'made'))) is None:
      return
  raise PermissionError('nowhere')


def _count_processes() -> None:
  if os.getpid() == 2:
    raise LookupError('every program has this one')


def _make_files() -> None:
  os.mkdir('many')
  for index in range(MOST_FILES):
    os.mkdir(f'many/{index}')


def _fill(file_mb: int) -> None:
  """Hold files without a name that are larger than the limit."""
  held = []
  for _ in range(file_mb + 1):
    with open('unnamed', 'w+b', 0) as file:
      os.unlink('unnamed')
      file.write(bytes(2**20))
      held.append(mmap.mmap(file.fileno(), 1))  # The mapping keeps it.
