"""What a program in the sandbox can tell the next one, or one that runs beside it: a sender, a message, a receiver.

    pytest tests/environments/sandbox/test_channels.py

A receiver returns what it observes. A channel is closed if that is the same whether there was a message or not. Most
are also run where they are open, without a view of one's own or without a sandbox, to show that the receiver would
notice. docs/sandbox.md names those that stay open everywhere.
"""

# ruff: noqa: E501 (a program is one line)

import dataclasses
import os
import pathlib
import random
import secrets
import signal
import struct
import textwrap
import threading

import pytest

from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox import bubblewrap, confinement
from sdpo_jax.environments.sandbox import sandbox as implementation
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob
from sdpo_jax.errors import UserError
from tests.environments.sandbox.helper_process import pids

HARNESS = pathlib.Path(__file__).with_name('sandbox_harness.py')
LIMITS = Limits(wall_s=60, cpu_s=10, memory_mb=256, file_mb=4, output_mb=1)
LARGE = dataclasses.replace(LIMITS, output_mb=128)
PRELUDE = """
import ctypes, fcntl, mmap, os, signal, struct, sys, tempfile, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = libc.mmap.restype = ctypes.c_long
def call(x86_64, aarch64, *arguments):
  number = {'x86_64': x86_64, 'aarch64': aarch64}[os.uname().machine]
  result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
  return result if result >= 0 else -ctypes.get_errno()
def attempt(action):
  try:
    return action()
  except OSError as error:
    return type(error).__name__
def thread_ids(count=3):
  found = []
  for _ in range(count):
    thread = threading.Thread(target=lambda: found.append(threading.get_native_id()))
    thread.start(); thread.join()
  return found
def shared_page():
  return libc.mmap(None, ctypes.c_size_t(4096), 1, 1, os.open(library, os.O_RDONLY), ctypes.c_long(0))
"""


@dataclasses.dataclass(frozen=True)
class Channel:
  """Two programs; both know `library`, a file that they may read, and the sender also whether there is a `message`."""

  send: str
  receive: str
  together: bool = False  # The sender is there while the receiver runs; else it has ended before.
  # Where it is open: 'shared', without a view of one's own, or 'none', without a sandbox. Not tried where it is None.
  open_in: str | None = None


CHANNELS = {
  'a file beside': Channel(
    """
    for place in ('/', '/own', '/scratch', '/tmp', '/dev', '/dev/shm', '..', os.path.dirname(library)):
      if message: attempt(lambda: open(f'{place}/message', 'w').close())""",
    """
    result = [attempt(lambda: os.stat(f'{place}/message').st_size)
              for place in ('/', '/own', '/scratch', '/tmp', '/dev', '/dev/shm', '..', os.path.dirname(library))]""",
  ),
  'a file in its place': Channel(
    "if message: open('message', 'w').close(); os.mkdir('directory')",
    "result = [os.listdir(), os.stat('.').st_nlink, os.stat('.').st_size, os.stat('.').st_ino, os.getcwd()]",
  ),
  'its input': Channel(
    """
    if message: attempt(lambda: os.rename('/own/stdin', '/own/gone')), attempt(lambda: open('/own/stdin', 'w').write('x'))""",
    "result = [sys.stdin.read(), open('/dev/stdin').read()]",
  ),
  'the access time of a file': Channel(
    "if message: open(library, 'rb').read()", 'result = os.stat(library).st_atime_ns', open_in='shared'
  ),
  'the access time of a directory': Channel(
    'if message: os.listdir(os.path.dirname(library))',
    'result = os.stat(os.path.dirname(library)).st_atime_ns',
    open_in='shared',
  ),
  'process ids': Channel(
    'if message: thread_ids(40)', 'result = [os.getpid(), os.getppid(), thread_ids()]', open_in='shared'
  ),
  'inode numbers': Channel(
    "for index in range(2000 if message else 1): open(str(index), 'w').close()",
    "open('x', 'w').close(); result = [os.stat(name).st_ino for name in ('.', 'x')] + [os.fstat(0).st_ino]",
    open_in='shared',
  ),
  # The inode number of what is printed to comes from the counter that pipes advance, and so does everybody else's.
  'pipes': Channel('', 'result = [attempt(os.pipe), attempt(lambda: os.pipe2(0)), call(284, 19, 0)]', open_in='none'),
  'the memory of the machine': Channel(
    'held = bytearray(200 << 20 if message else 1); time.sleep(60)',
    'info = ctypes.create_string_buffer(256); result = [call(99, 179, ctypes.addressof(info)), info.raw.hex()]',
    together=True,
    open_in='none',
  ),
  'the space on a disk': Channel(
    "open('large', 'wb').write(bytes(3 << 20 if message else 0)); time.sleep(60)",
    "result = [attempt(lambda: os.statvfs(place)[:6]) for place in ('/', '.', library)]",
    together=True,
    open_in='none',
  ),
  'the space that is left': Channel(
    "open('large', 'wb').write(bytes(4 << 20 if message else 0)); time.sleep(60)",
    "result = attempt(lambda: open('mine', 'wb').write(bytes(4 << 20)))",
    together=True,
  ),
  'a lock': Channel(
    """
    if message: attempt(lambda: fcntl.flock(os.open(library, os.O_RDONLY), fcntl.LOCK_EX))
    time.sleep(60)""",
    'result = attempt(lambda: fcntl.flock(os.open(library, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB))',
    together=True,
    open_in='none',
  ),
  'a futex in a library': Channel(
    """
    def wake(address):
      while True: call(202, 98, address, 1, 10, 0, 0, 0), time.sleep(0.001)
    if message: threading.Thread(target=wake, args=(shared_page(),)).start()
    time.sleep(60)""",
    """
    timeout = ctypes.create_string_buffer(struct.pack('qq', 0, 300_000_000))
    address = shared_page()
    value = ctypes.c_int.from_address(address).value
    result = call(202, 98, address, 0, value, ctypes.addressof(timeout), 0, 0)""",
    together=True,
    open_in='none',
  ),
  'queued signals': Channel(
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [40])
    for _ in range(64 if message else 0): attempt(lambda: os.kill(os.getpid(), 40))
    time.sleep(60)""",
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [40])
    result = [attempt(lambda: os.kill(os.getpid(), 40)) for _ in range(40)]
    while signal.sigtimedwait([40], 0): result.append('came')""",
    together=True,
  ),
  'processes that are there': Channel(
    'if message: [threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(30)]\ntime.sleep(60)',
    """
    result = [pid for pid in range(3, 9999) if os.path.exists(f'/proc/{pid}')]
    result += [pid for pid in range(3, 9999) if attempt(lambda: os.sched_getaffinity(pid)) == 'ProcessLookupError']""",
    together=True,
  ),
  'what is in memory of a file': Channel(
    '', 'result = call(27, 232, shared_page(), 4096, ctypes.addressof(ctypes.create_string_buffer(8)))', open_in='none'
  ),
}


@pytest.fixture(scope='module')
def library(tmp_path_factory):
  """Return a file of a package, with an old access time."""
  path = tmp_path_factory.mktemp('package') / 'library.py'
  path.write_text('x' * 9999)
  path.parent.chmod(0o755)
  return path


@pytest.fixture(scope='module', params=['landlock', 'bubblewrap', 'bubblewrap, no Landlock'])
def sandbox(request, library, tmp_path_factory):
  mechanism = request.param.partition(',')[0]
  try:
    if mechanism == 'bubblewrap':
      bubblewrap.find()
    with pytest.MonkeyPatch.context() as patch:
      if mechanism != request.param:
        patch.setattr(implementation, 'HERE', without_landlock(tmp_path_factory.mktemp('none')))
      value = started(library, mechanism, view=True)
  except confinement.Unsupported as error:
    pytest.skip(str(error))
  except UserError as error:
    if not any(missing in str(error) for missing in ('not allowed here', 'bwrap: ')):
      raise
    pytest.skip(str(error))
  with value:
    yield value


@pytest.fixture(scope='module')
def weak(library):
  """Sandboxes in which some channels are open."""
  values = {'shared': started(library, 'landlock', view=False), 'none': started(library, 'none', view=False)}
  yield values
  for value in values.values():
    value.close()


def without_landlock(directory):
  """Return a copy of the sandbox's files for a kernel that has none."""
  for path in implementation.HERE.glob('*.py'):
    (directory / path.name).write_bytes(path.read_bytes())
  with open(directory / 'confinement.py', 'a') as file:
    file.write("\n\ndef landlock_version():\n  raise Unsupported('the kernel has no Landlock')\n")
  return directory


def started(library, mechanism, view):
  readable, packages = implementation.installation()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(implementation, 'installation', lambda: ([*readable, str(library.parent)], packages))
    patch.setattr(implementation, 'ATTEMPTS', () if mechanism == 'none' else ((mechanism, view),))
    return Sandbox(SandboxConfig(workers=2, allow_unsandboxed=mechanism == 'none'), HARNESS)


def job(code, **given):
  return SandboxJob({'code': PRELUDE + textwrap.dedent(code), 'given': given}, 'input', LIMITS)


def observed(sandbox, channel, library, message):
  """Return what the receiver returns."""
  os.utime(library, (1e9, 2e9))
  os.utime(library.parent, (1e9, 2e9))
  send, receive = job(channel.send, library=str(library), message=message), job(channel.receive, library=str(library))
  if not channel.together:
    (sent,) = sandbox.run([send])
    assert sent.exit_code == 0, sent
    (report,) = sandbox.run([receive])
  else:
    ended = []
    thread = threading.Thread(target=lambda: ended.extend(sandbox.run([send])))
    thread.start()
    while not (sending := [pid for helper in pids(sandbox) for pid in descendants(helper) if sleeps(pid)]):
      assert not ended, ended
    (report,) = sandbox.run([receive])
    os.kill(sending[0], signal.SIGKILL)
    thread.join()
  assert report.exit_code == 0, report
  return report.result


def descendants(pid):
  parents = {}
  for name in filter(str.isdigit, os.listdir('/proc')):
    try:
      parents[int(name)] = int(pathlib.Path(f'/proc/{name}/stat').read_text().rpartition(')')[2].split()[1])
    except OSError:
      continue
  found = [pid]
  for each in found:
    found += [child for child, parent in parents.items() if parent == each]
  return found


def sleeps(pid):
  try:
    return 'nanosleep' in pathlib.Path(f'/proc/{pid}/wchan').read_text()
  except OSError:
    return False


@pytest.mark.skipif(os.geteuid() != 0, reason='only root sees where another process waits')
@pytest.mark.parametrize('name', CHANNELS)
def test_a_program_learns_nothing_of_another(sandbox, library, name):
  channel = CHANNELS[name]
  assert observed(sandbox, channel, library, True) == observed(sandbox, channel, library, False)


@pytest.mark.skipif(os.geteuid() != 0, reason='only root sees where another process waits')
@pytest.mark.parametrize('name', [name for name, channel in CHANNELS.items() if channel.open_in])
def test_a_receiver_would_notice(weak, library, name):
  channel = CHANNELS[name]
  place = weak[channel.open_in]
  quiet = observed(place, channel, library, False)
  if channel.send:
    assert observed(place, channel, library, True) != quiet
  else:
    assert not str(quiet).count('PermissionError') and -1 not in [quiet]


# Returns all memory that lies without a gap around objects, heap, stack and what the C library keeps.
DUMP = """
file = os.open('page', os.O_RDWR | os.O_CREAT)
libc.sbrk.restype = libc.pthread_self.restype = ctypes.c_long
starts = [id(value) for value in (planted, int, [], {}, 1e9 * len(planted), *(bytes(size) for size in range(0, 512, 16)))]
starts += [libc.sbrk(0) - 1, libc.pthread_self(), ctypes.c_long.in_dll(libc, 'environ').value]
seen = set()
for start in starts:
  for step in (4096, -4096):
    at = start & -4096 if step > 0 else (start & -4096) - 4096
    while at not in seen and os.lseek(file, 0, 0) == 0 and libc.write(file, ctypes.c_void_p(at), 4096) == 4096:
      seen.add(at)
      libc.write(4, ctypes.c_void_p(at), 4096)
      at += step
os._exit(0)
"""


def remembers_nothing(sandbox):
  """Whether the memory of a program holds what became of others is known from their times, which only a report
  tells.
  """
  message, planted = 'print("what the others are asked"); os._exit(77)', 'what this program is asked'
  ended = sandbox.run([job(message)] * 4)
  assert [report.exit_code for report in ended] == [77] * 4
  (report,) = sandbox.run([dataclasses.replace(job(DUMP, planted=planted), limits=LARGE)])
  assert report.exit_code == 0 and planted.encode() in report.result_bytes, report.stderr
  times = [struct.pack('=d', value) for other in ended for value in (other.cpu_s, other.wall_s)]
  return not any(value in report.result_bytes for value in (*times, message.encode()))


def test_no_program_finds_in_memory_what_became_of_another(sandbox):
  assert remembers_nothing(sandbox)


@pytest.mark.parametrize('place', ['shared', 'none'])
def test_memory_tells_nothing_with_weaker_mechanisms_either(weak, place):
  assert remembers_nothing(weak[place])


LOOK_UP = """
for index, bit in enumerate(bits):
  if bit: attempt(lambda: os.stat(f'{os.path.dirname(os.__file__)}/{tag}{index}'))
"""
TIME_OF_LOOK_UPS = """
names = [f'{os.path.dirname(os.__file__)}/{tag}{index}'.encode() for index in range(-50, count)]
status, clock, result = ctypes.create_string_buffer(256), time.perf_counter_ns, []
for name in names:
  before = clock(); libc.stat(name, status); result.append(clock() - before)
del result[:50]  # Until the processor knows what is to come.
"""


@pytest.mark.slow
@pytest.mark.parametrize('packages', [None, ()], ids=['disk', 'memory'])
def test_a_name_that_another_has_looked_up_is_found_as_fast_as_any_in_memory(packages):
  """Bits that arrive, of 512; by chance alone more than 332 of them do so once in ten billion times.

  What else the machine does may carry some of them now and then, or drown a channel: one of three tries counts.
  """
  draw = random.Random(3)
  with Sandbox(SandboxConfig(workers=1, packages=packages), HARNESS) as sandbox:
    if not any('own tmpfs' in layer for layer in sandbox.layers):
      pytest.skip('there are no views here')
    for _ in range(3):
      arrived = bits_that_arrive(sandbox, draw) > 332
      if arrived == (packages is None):
        break
  assert arrived == (packages is None)


def bits_that_arrive(sandbox, draw, count=64):
  right = 0
  for tag in range(8):
    bits = [draw.randrange(2) for _ in range(count)]
    tag = f'{secrets.token_hex(8)} {tag} '  # The kernel remembers names from run to run.
    reports = sandbox.run([job(LOOK_UP, bits=bits, tag=tag), job(TIME_OF_LOOK_UPS, tag=tag, count=count)])
    assert [report.exit_code for report in reports] == [0, 0], reports
    times = reports[1].result
    middle = sorted(times)[sum(bits)]  # As many are called fast as there are.
    right += sum((time < middle) == bool(bit) for time, bit in zip(times, bits, strict=True))
  return right


@pytest.mark.skipif(os.geteuid() != 0, reason='only root sees where another process waits')
def test_programs_of_one_user_do_not_count_one_anothers_signals(library, tmp_path, monkeypatch):
  """As where a user namespace has no users but nobody, or training runs as an ordinary one."""
  for path in implementation.HERE.glob('*.py'):
    (tmp_path / path.name).write_bytes(path.read_bytes())
  source = (tmp_path / 'zygote.py').read_text()
  (tmp_path / 'zygote.py').write_text(
    source.replace('  first = UID_BASE', '  return range(65534, 65535)\n  first = UID_BASE')
  )
  monkeypatch.setattr(implementation, 'HERE', tmp_path)
  channel = Channel(
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    threads = [threading.Thread(target=time.sleep, args=(60,)) for _ in range(20)]
    for thread in threads:
      thread.start()
      for number in range(20 if message else 0):
        if number not in (0, signal.SIGKILL, signal.SIGSTOP): signal.pthread_kill(thread.ident, number)
    time.sleep(60)""",
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    result = [os.getuid(), signal.sigtimedwait([signal.SIGUSR1], 1).si_pid == os.getpid()]""",
    together=True,
  )
  with started(library, 'landlock', view=False) as sandbox:
    for message in (False, True):
      assert observed(sandbox, channel, library, message) == [65534, True]
