"""The sandbox: what programs get, what is reported of them, limits, faults of the helper process, no leaks."""

import contextlib
import errno
import functools
import io
import itertools
import json
import logging
import os
import pathlib
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from sdpo_jax.config import Config, DataConfig, EnvironmentsConfig, ModelConfig, SandboxConfig
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.sandbox import bubblewrap, confinement, leftovers, scratch, zygote
from sdpo_jax.environments.sandbox import sandbox as implementation
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example
from tests import tiny
from tests.environments.sandbox.helper_process import pids, scratch_of

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason='needs root')
HARNESS = pathlib.Path(__file__).with_name('sandbox_harness.py')
LIMITS = Limits(wall_s=20, cpu_s=10, memory_mb=256, file_mb=4, output_mb=1)


@pytest.fixture(scope='module')
def sandbox():
  with Sandbox(SandboxConfig(workers=2), HARNESS, preload=('math', 'numpy.random', 'no_such_module')) as value:
    yield value


@contextlib.contextmanager
def only(mechanism, view):
  """Within it, a sandbox is of this kind or none."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(implementation, 'ATTEMPTS', ((mechanism, view),))
    yield


@pytest.fixture(scope='module')
def shared():
  """Yield a sandbox as it is where no namespaces are allowed."""
  with only('landlock', view=False):
    value = Sandbox(SandboxConfig(workers=2), HARNESS)
  with value:
    yield value


@pytest.fixture(scope='module')
def viewed():
  """Yield a sandbox whose programs have views of their own, if there can be one."""
  try:
    with only('landlock', view=True):
      value = Sandbox(SandboxConfig(workers=2), HARNESS)
  except UserError as error:
    if 'not allowed here' not in str(error):
      raise
    pytest.skip(str(error))
  with value:
    yield value


def until(condition):
  """Wait for what another process does."""
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline, 'it does not'
    os.sched_yield()


def job(code, stdin='', limits=LIMITS, **given):
  return SandboxJob({'code': code, 'given': given}, stdin, limits)


def run(sandbox, code, stdin='', limits=LIMITS, **given):
  return sandbox.run([job(code, stdin, limits, **given)])[0]


# ———— What a program gets and what comes back ————


def test_a_program_gets_its_payload_and_input_and_what_it_makes_comes_back(sandbox):
  report = run(
    sandbox, 'import sys; print(input()); print("bad", file=sys.stderr); result = {"a": [x, None]}', 'in', x=3
  )
  assert report.status == 'ended' and report.exit_code == 0 and report.signal is None
  assert (report.result, report.stdout, report.stderr) == ({'a': [3, None]}, 'in\n', 'bad\n')
  assert report.cpu_s > 0 and report.wall_s > 0


def test_reports_come_in_the_order_of_the_jobs(sandbox):
  jobs = [job(f'import time; time.sleep(0.01 * ({index} % 3)); result = {index}') for index in range(12)]
  assert [report.result for report in sandbox.run(jobs)] == list(range(12))


@pytest.mark.parametrize(
  'code, exit_code, stderr',
  [
    ('', 0, ''),
    ('import os; os._exit(3)', 3, ''),
    ('import sys; sys.exit(4)', 4, ''),
    ('import sys; sys.exit()', 0, ''),
    ('import sys; sys.exit("why")', 1, 'why'),
    ('1 / 0', 1, 'ZeroDivisionError'),
    ('raise KeyboardInterrupt', 1, 'KeyboardInterrupt'),
    ('import sys; print(1); sys.stdout.close(); import os; os.close(1)', 0, ''),
  ],
)
def test_exit_codes(sandbox, code, exit_code, stderr):
  report = run(sandbox, code)
  assert (report.status, report.exit_code) == ('ended', exit_code) and stderr in report.stderr


@pytest.mark.parametrize('code, number', [('os.abort()', 'SIGABRT'), ('os.kill(os.getpid(), 9)', 'SIGKILL')])
def test_a_signal_that_is_not_the_sandboxs_is_reported(sandbox, code, number):
  report = run(sandbox, f'import os; {code}')
  assert (report.status, report.exit_code, report.signal) == ('killed', None, getattr(signal, number))


def test_a_crash_of_the_interpreter_is_a_signal(sandbox):
  assert run(sandbox, 'import ctypes; ctypes.string_at(0)').signal == signal.SIGSEGV


def test_standard_input_is_a_file_of_its_own(sandbox):
  text = 'line\n' * 100_000
  code = 'import sys; first = sys.stdin.read(); sys.stdin.seek(0); result = [first == sys.stdin.read(), len(first)]'
  assert run(sandbox, code, text).result == [True, len(text)]
  assert run(sandbox, 'result = [open("/dev/stdin").read(), open(0).read()]', 'a\nb').result == ['a\nb', 'a\nb']
  assert run(sandbox, 'import os; os.write(0, b"x")', 'text').exit_code == 1, 'it cannot be written to'
  assert run(sandbox, 'input()').stderr.endswith('EOFError: EOF when reading a line\n')


def test_text_that_is_not_unicode_passes_both_ways(sandbox):
  assert run(sandbox, 'import os; os.write(1, b"a\\xff\\xfeb"); os.write(2, b"\\xc3")').stdout == 'a\ufffd\ufffdb'
  report = run(sandbox, 'import sys; result = [x, sys.stdin.buffer.read().hex()]', '\ud800', x='\udfff')
  assert report.result == ['\udfff', 'eda080']


def test_a_program_ends_as_under_python_itself(sandbox):
  code = """
import atexit, sys, threading, time
atexit.register(lambda: sys.__stdout__.write('last'))
threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()
print('main')
"""
  assert run(sandbox, code).stdout == 'main\nthread\nlast'


def test_the_c_library_knows_the_first_thread_of_a_program(sandbox):
  """Which the system call by which programs are made does not tell it."""
  code = """
import signal, threading
main = threading.get_ident()
signal.signal(signal.SIGUSR1, lambda number, frame: found.append(threading.get_ident() == main))
found = []
thread = threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGUSR1))
thread.start(); thread.join()
result = found
"""
  report = run(sandbox, code)
  assert report.result == [True] and report.stderr == ''


def test_python_and_its_packages_can_be_imported_late(sandbox):
  assert run(sandbox, 'import colorsys, numpy; result = int(numpy.linalg.det(numpy.eye(3)))').result == 1
  assert run(sandbox, 'import sqlite3, ssl, bz2, lzma, decimal, hashlib, ctypes').exit_code == 0
  assert 'ModuleNotFoundError' in run(sandbox, 'import sdpo_jax').stderr


def test_the_scratch_directory_is_empty_and_its_own(sandbox):
  code = """
import os, tempfile
result = [os.listdir(), os.getcwd()]
with tempfile.TemporaryFile('w+') as file, open('kept', 'w') as kept:
  file.write('x'); kept.write('x')
os.makedirs('a/b'); os.rename('kept', 'renamed'); os.unlink('renamed')
open(os.path.join(tempfile.gettempdir(), 'left'), 'w')
"""
  first, second = run(sandbox, code), run(sandbox, code)
  assert first.exit_code == second.exit_code == 0, first.stderr
  assert first.result[0] == second.result[0] == []
  assert not os.path.exists(first.result[1])


def test_nothing_of_one_program_is_in_the_next(sandbox):
  run(sandbox, 'import builtins, sys, os, math; builtins.left = sys.left = math.pi = 3; os.environ["LEFT"] = "x"')
  code = 'import builtins, sys, os, math; result = [hasattr(builtins, "left"), hasattr(sys, "left"), math.pi > 3]'
  code += '; result.append(dict(os.environ))'
  *state, environment = run(sandbox, code).result
  assert state == [False, False, True] and set(environment) == {'HOME', 'TMPDIR', 'LANG'}


def test_no_object_tells_of_other_programs(sandbox):
  code = """
    import gc, sys
    result = [repr(value) for value in gc.get_objects() if type(value).__name__ == 'Process']
    frame = sys._getframe()
    while frame:
      result += [name for name in ('process', 'init') if frame.f_locals.get(name) is not None]
      keeper = frame.f_locals.get('self')
      result += [name for name in ('processes', 'inits', 'garbage') if getattr(keeper, name, None)]
      frame = frame.f_back
  """
  busy = job('import time; time.sleep(0.2)')
  late = Limits(wall_s=0.1, cpu_s=0.1)
  reports = sandbox.run([job('while True: pass', limits=late), busy, job(textwrap.dedent(code))])
  assert [report.status for report in reports] == ['timeout', 'ended', 'ended'] and reports[2].result == [], reports[2]


def test_programs_draw_different_random_numbers(sandbox):
  jobs = [job('import random, numpy; result = [random.random(), numpy.random.rand()]')] * 2
  (one, two), (three, four) = (report.result for report in sandbox.run(jobs))
  assert one != three and two != four


# ———— Results that are not believed ————


def test_a_program_that_leaves_early_has_no_result(sandbox):
  report = run(sandbox, 'print("all tests passed"); import os, sys; sys.stdout.flush(); os._exit(0)')
  assert report.result is None and report.exit_code == 0


def test_an_object_that_equals_everything_is_no_result(sandbox):
  code = """
class Equal:
  def __eq__(self, other): return True
result = Equal()
"""
  report = run(sandbox, code)
  assert report.result is None and report.exit_code == 1


@pytest.mark.parametrize(
  'written',
  [
    '"[" * 10_000 + "]" * 10_000',
    '"[" * 900_000',
    '\'{"a":\' * 100_000',
    '"1" * 900_000',
    '"\\xff\\xfe"',
    '"[1"',
    '"1 2"',
    '""',
  ],
)
def test_what_is_not_json_or_too_deep_is_no_result(sandbox, written):
  code = f'import os\ntext = ({written}).encode("latin1")\nwhile text: text = text[os.write(4, text):]\nos._exit(0)'
  report = run(sandbox, code)
  assert report.result is None and report.status == 'ended' and report.exit_code == 0


def test_a_result_that_is_nested_too_deeply_is_an_error_of_the_program(sandbox):
  report = run(sandbox, 'result = []\nfor _ in range(10_000): result = [result]')
  assert report.result is None and report.exit_code == 1 and 'RecursionError' in report.stderr


# ———— Limits ————


def test_time_is_limited_by_the_wall_and_by_the_processor(sandbox):
  assert run(sandbox, 'import time; time.sleep(60)', limits=Limits(0.2, 10)).status == 'timeout'
  busy = run(sandbox, 'while True: pass', limits=Limits(60, 0.2))
  assert busy.status == 'timeout' and 0.2 <= busy.cpu_s < 2


def test_memory_is_limited_beyond_what_the_zygote_has_loaded(sandbox):
  assert run(sandbox, 'x = bytearray(100 << 20)').exit_code == 0
  report = run(sandbox, 'x = bytearray(300 << 20)')
  assert report.exit_code == 1 and 'MemoryError' in report.stderr


def test_output_is_cut_off_and_ends_the_program(sandbox):
  report = run(sandbox, 'while True: print("x" * 1000)')
  assert report.status == 'output' and len(report.stdout) == 1 << 20
  whole = run(sandbox, 'import sys; sys.stdout.write("x" * (1 << 20))')
  assert whole.status == 'ended' and len(whole.stdout) == 1 << 20, 'the limit itself is allowed'
  assert run(sandbox, 'result = "x" * (2 << 20)').status == 'output'


def test_less_can_be_kept_than_may_be_printed_and_read_than_is_returned(sandbox):
  limits = Limits(20, 10, 256, 4, 1, stdout_bytes=3, stderr_bytes=0, result_bytes=6)
  code = 'import sys; print("12345"); print("bad", file=sys.stderr); result = x'
  report = run(sandbox, code, limits=limits, x='four')
  assert (report.status, report.stdout, report.stderr, report.result) == ('ended', '123', '', 'four')
  assert report.dropped == {'stdout': 3, 'stderr': 4}
  longer = run(sandbox, code, limits=limits, x='fives')
  assert (longer.status, longer.result_bytes, longer.dropped['result']) == ('output', b'"fives', 1)


def test_output_that_comes_byte_by_byte_costs_its_reader_little(sandbox, monkeypatch):
  reads, read = [], os.read
  monkeypatch.setattr(os, 'read', lambda fd, size: reads.append(fd) or read(fd, size))
  drip = 'import os, time\nfor _ in range(2000):\n  os.write(1, b"x")\n  time.sleep(5e-5)'
  report = run(sandbox, drip)
  assert report.stdout == 'x' * 2000 and len(reads) < 200


def test_what_was_printed_before_a_time_out_is_reported(sandbox):
  report = run(sandbox, 'import time; print("before", flush=True); time.sleep(60)', limits=Limits(0.5, 10))
  assert (report.status, report.stdout) == ('timeout', 'before\n')


def test_nobody_else_waits_for_a_disk_that_a_program_would_flush(sandbox):
  code = """
    import ctypes, os
    # Of no open file, so that the kernel would refuse it if it looked.
    result = [ctypes.CDLL(None, use_errno=True).fsync(63), ctypes.CDLL(None, use_errno=True).fdatasync(63)]
    with open('file', 'w') as file:
      os.fsync(file.fileno())
  """
  report = run(sandbox, textwrap.dedent(code))
  assert report.exit_code == 0 and report.result == [0, 0], report.stderr


def test_files_are_limited(sandbox):
  report = run(sandbox, 'open("large", "wb").write(bytes(5 << 20))')
  assert report.exit_code == 1 and 'File too large' in report.stderr


def test_all_files_together_are_limited(viewed, shared):
  code = 'import time\nfor i in range(9000): open(str(i), "wb").write(bytes(1 << 20)); time.sleep(0.01)'
  assert run(shared, code).status == 'output'
  code = 'import os\nfor i in range(9000): open("x", "wb", 0).write(bytes(1 << 20)); os.rename("x", str(i))'
  report = run(viewed, code)
  assert report.exit_code == 1 and 'No space left on device' in report.stderr
  code = 'import os\ntry:\n  for i in range(9000): os.mkdir(str(i))\nexcept OSError as error: result = [i, error.errno]'
  assert run(viewed, code).result == [zygote.MAX_ENTRIES, errno.ENOSPC]


def test_threads_are_few(sandbox):
  code = 'import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=(0.3,)).start()\n'
  assert run(sandbox, code.format(20)).exit_code == 0
  report = run(sandbox, 'import threading; threading.stack_size(65536)\n' + code.format(500))
  assert report.status == 'killed' or "can't start new thread" in report.stderr


COUNTED = """
import threading, time
threading.stack_size(65536)
result = 1
try:
  for _ in range(200):
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    result += 1
except RuntimeError:
  pass
"""


@pytest.mark.slow
@pytest.mark.parametrize('view', [True, False])
def test_a_bubblewrap_has_as_many_threads_as_are_documented(view):
  try:
    with only('bubblewrap', view):
      value = Sandbox(SandboxConfig(workers=2), HARNESS)
  except UserError as error:
    pytest.skip(str(error))
  with value:
    if not any(layer.startswith('cgroup') and 'pids' in layer for layer in value.layers):
      pytest.skip('there is no control group')
    assert [run(value, COUNTED).result for _ in range(4)] == [64] * 4


def test_scratch_directories_are_removed_whatever_is_in_them(shared):
  code = """
import os
start = os.getcwd()
for mode in (0, 0o300, 0o500):
  os.mkdir(f'm{mode}', 0o700); os.mkdir(f'm{mode}/inner', mode)
os.umask(0o777); open('unreadable', 'w'); os.umask(0o022)
print(start, flush=True)
for _ in range(600): os.mkdir('d' * 200); os.chdir('d' * 200)
"""
  report = run(shared, code)
  directory = report.stdout.strip()
  assert directory.startswith(scratch_of(shared)), report
  until(lambda: not os.path.exists(directory))


def survey(directory, limit=1 << 30, max_entries=10_000, pid=None):
  """Return what the zygote finds of a program's files."""
  proc = os.open('/proc', os.O_PATH)
  work = scratch.survey(str(directory), pid or os.getpid(), proc, limit, max_entries)
  try:
    while True:
      next(work)
  except StopIteration as end:
    return end.value
  finally:
    os.close(proc)


def test_a_deep_tree_counts_as_too_much_before_it_takes_seconds_to_remove(tmp_path):
  deepest = tmp_path
  for _ in range(scratch.MAX_DEPTH):
    deepest = deepest / 'd'
  deepest.mkdir(parents=True)
  assert not survey(tmp_path)
  (deepest / 'd').mkdir()
  assert survey(tmp_path)


HOLDERS = {
  'open': 'file = open(path, "wb", 0); os.unlink(path); file.write(bytes(1 << 20))',
  'mapped': """
libc = ctypes.CDLL(None)  # The module mmap keeps the descriptor.
for _ in range(2):
  file = open(path, "w+b", 0); file.write(bytes(1 << 20)); os.unlink(path)
  libc.mmap(None, ctypes.c_size_t(1), 1, 1, file.fileno(), ctypes.c_long(0)); file.close()""",
  'held by a thread whose parent has ended': """
file = open(path, "wb", 0); os.unlink(path); file.write(bytes(1 << 20))
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True); ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)""",
}


@pytest.mark.parametrize('code', HOLDERS.values(), ids=HOLDERS)
def test_files_without_a_name_count(tmp_path, code):
  program = f'import ctypes, os, sys, threading, time\npath = sys.argv[1]\n{code}\nprint(flush=True); sys.stdin.read()'
  command = [sys.executable, '-c', program, str(tmp_path / 'file')]
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    status = pathlib.Path(f'/proc/{process.pid}/status')
    if 'ended' in code or 'syscall' in code:
      until(lambda: 'State:\tZ' in status.read_text())
    assert os.listdir(tmp_path) == []
    assert survey(tmp_path, (1 << 20) - 1, pid=process.pid)
    # Nothing tells how large a file is that is only mapped: as large as any may be.
    assert survey(tmp_path, 1 << 21, pid=process.pid) == ('mmap' in code)
    assert survey(tmp_path, 1 << 30, 0, pid=process.pid), 'it is one file'
    process.kill()


def test_work_goes_on_where_it_was_and_never_for_long(monkeypatch):
  def work():
    for _ in range(3):
      yield
    return True

  under_way = work()
  monkeypatch.setattr(zygote.time, 'monotonic', iter(range(99)).__next__)
  monkeypatch.setattr(zygote, 'SLICE_S', 2.5)  # Of seconds that pass between any two looks at the clock.
  assert [zygote.advance(under_way) for _ in range(2)] == [None, True]
  assert zygote.advance(itertools.repeat(None)) is None


def test_a_tree_is_removed_without_following_links(tmp_path):
  outside = tmp_path / 'outside'
  outside.mkdir()
  (outside / 'kept').write_text('x')
  tree = tmp_path / 'tree'
  (tree / 'a' / 'b').mkdir(parents=True)
  (tree / 'a' / 'link').symlink_to(outside)
  (tree / 'a' / 'b' / 'file').write_text('x')
  (tree / 'a' / 'b').chmod(0)
  scratch.remove(str(tree))
  assert not tree.exists() and (outside / 'kept').read_text() == 'x'


# ———— Many programs ————


def open_files():
  """Return (descriptor, what it is of) of what this process has open: a number may be used again for another file."""
  found = set()
  for descriptor in os.listdir('/proc/self/fd'):
    with contextlib.suppress(FileNotFoundError):  # The descriptor of this list itself.
      found.add((descriptor, os.readlink(f'/proc/self/fd/{descriptor}')))
  return found


def test_many_programs_leave_nothing_behind(sandbox):
  run(sandbox, '')
  zygote = pids(sandbox)[0]
  open_here, open_there = open_files(), len(os.listdir(f'/proc/{zygote}/fd'))
  reports = sandbox.run([job('result = 1')] * 300)
  assert sum(report.result for report in reports) == 300
  assert open_files() <= open_here and pids(sandbox)[0] == zygote
  # The zygote closes its end after the last report, and then ends the namespace.
  until(lambda: len(os.listdir(f'/proc/{zygote}/fd')) <= open_there and programs(zygote) == [])


def test_threads_share_the_workers(sandbox):
  results = {}

  def caller(number):
    reports = sandbox.run([job(f'result = [{number}, {index}]') for index in range(10)])
    results[number] = [report.result for report in reports]

  callers = [threading.Thread(target=caller, args=(number,)) for number in range(6)]
  for thread in callers:
    thread.start()
  for thread in callers:
    thread.join()
  assert results == {number: [[number, index] for index in range(10)] for number in range(6)}


def children(pid):
  found = []
  for name in filter(str.isdigit, os.listdir('/proc')):
    try:
      fields = pathlib.Path(f'/proc/{name}/stat').read_text().rpartition(')')[2].split()
    except OSError:
      continue
    if int(fields[1]) == pid:
      found.append(int(name))
  return found


def programs(zygote):
  """Children of a zygote beside the seed, which is there before them."""
  return sorted(children(zygote), key=started_at)[1:]


def started_at(pid):
  """Clock ticks, and the process id for those that start together."""
  try:
    return int(pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]), pid
  except OSError:
    return sys.maxsize, pid


# ———— Faults of the helper process ————


def test_a_zygote_that_dies_is_started_anew_and_the_program_rerun():
  with Sandbox(SandboxConfig(workers=2), HARNESS) as sandbox:
    first = pids(sandbox)[0]
    os.kill(first, signal.SIGKILL)
    assert [report.result for report in sandbox.run([job('result = 5')] * 4)] == [5] * 4
    assert pids(sandbox)[0] != first


def test_without_its_seed_a_zygote_is_started_anew():
  with Sandbox(SandboxConfig(workers=2), HARNESS) as sandbox:
    assert run(sandbox, 'result = 1').result == 1
    first = pids(sandbox)[0]
    until(lambda: not programs(first))
    (seed,), zygote = children(first), os.pidfd_open(first)
    os.kill(seed, signal.SIGKILL)
    assert gone(zygote)
    assert run(sandbox, 'result = 5').result == 5 and pids(sandbox)[0] != first


def test_a_program_under_which_the_zygote_dies_twice_fails_and_the_next_runs(monkeypatch):
  send = socket.send_fds

  def deadly(control, *arguments):
    send(control, *arguments)
    os.kill(pids(sandbox)[0], signal.SIGKILL)

  with Sandbox(SandboxConfig(workers=1), HARNESS) as sandbox:
    with monkeypatch.context() as patch:
      patch.setattr(socket, 'send_fds', deadly)
      report = run(sandbox, 'import time; time.sleep(5)')
    assert report.status == 'failed' and 'ended twice' in report.reason
    assert run(sandbox, 'result = 1').result == 1


def test_programs_end_with_the_zygote(sandbox):
  with Sandbox(SandboxConfig(workers=1), HARNESS) as own:
    reader, thread = watched(own)
    os.kill(pids(own)[0], signal.SIGKILL)
    assert gone(reader), 'the program has ended with it'
    own.close()
    thread.join()


def watched(sandbox):
  """Return a descriptor that becomes readable when the program ends which a thread now runs, and the thread."""
  zygote = pids(sandbox)[0]

  def waiting():
    try:
      run(sandbox, 'import time; time.sleep(15)')
    except RuntimeError:
      pass

  thread = threading.Thread(target=waiting)
  thread.start()
  while thread.is_alive():
    for running in programs(zygote):
      with contextlib.suppress(ProcessLookupError):  # It began and ended between two looks.
        return os.pidfd_open(running), thread
    os.sched_yield()
  raise AssertionError('The program has ended before it was found.')


def gone(descriptor):
  ready, _, _ = select.select([descriptor], [], [], 10)
  os.close(descriptor)
  return bool(ready)


OWNER = """
import sys, threading
from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob
from tests.environments.sandbox.helper_process import pids, scratch_of
import pathlib
sandbox = Sandbox(SandboxConfig(workers=1), pathlib.Path(sys.argv[1]))
code = 'import os; print(os.getppid(), flush=True); os.write(4, b"x" * (2 << 20))'
limits = Limits(60, 60)
sleeping = SandboxJob({'code': 'import time; time.sleep(60)'}, '', limits)
threading.Thread(target=sandbox.run, args=([sleeping],), daemon=True).start()
print(*pids(sandbox), scratch_of(sandbox), flush=True)
sys.stdin.read()
"""


def test_everything_ends_when_the_owner_is_killed():
  command = [sys.executable, '-c', OWNER, str(HARNESS)]
  root = str(tiny.REPOSITORY)
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as owner:
    zygote, directory = owner.stdout.readline().split()
    descriptor = os.pidfd_open(int(zygote))
    while not (running := programs(int(zygote))):
      os.sched_yield()
    program = os.pidfd_open(running[0])
    owner.kill()
    assert gone(descriptor) and gone(program)
  assert not os.path.exists(directory)


LEAVER = """
import os, sys, tempfile
from sdpo_jax.environments.sandbox import sandbox
from tests.environments.sandbox.helper_process import group_of, pids, scratch_of
import pathlib
tempfile.tempdir = sys.argv[2]
sandbox.ATTEMPTS = (('landlock', False),)
value = sandbox.Sandbox(sandbox.SandboxConfig(workers=1), pathlib.Path(sys.argv[1]))
os.kill(*pids(value), 9)
group = group_of(value)
print(scratch_of(value), *(group.directories if group else ()), flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_is_left_where_everything_is_killed_is_removed_at_the_next_start(monkeypatch, tmp_path):
  root = str(tiny.REPOSITORY)
  tmp_path.chmod(0o755)
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  others = tmp_path / 'sandbox-of-somebody'
  others.mkdir()
  link = tmp_path / f'{leftovers.PREFIX}link'
  link.symlink_to(others)

  def killed():
    command = [sys.executable, '-c', LEAVER, str(HARNESS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.split()

  left = killed()
  os.makedirs(f'{left[0]}/program/inner')
  with only('landlock', view=False), Sandbox(SandboxConfig(workers=1), HARNESS) as live:
    assert os.path.exists(left[0]), 'it is younger than its lock may be'
    assert left[1:] == [path for path in left[1:] if os.path.exists(path)]
    until(lambda: not any(pathlib.Path(path, 'cgroup.procs').read_text() for path in left[1:]))
    monkeypatch.setattr(leftovers, 'STALE_S', -1.0)
    with Sandbox(SandboxConfig(workers=1), HARNESS):
      assert not any(map(os.path.exists, left))
    assert run(live, 'result = 1').result == 1, 'one that lives is left alone'
    os.kill(pids(live)[0], signal.SIGKILL)
    assert run(live, 'result = 2').result == 2
    with Sandbox(SandboxConfig(workers=1), HARNESS):
      assert run(live, 'result = 3').result == 3, 'also one that has started another zygote'
  assert sorted(os.listdir(tmp_path)) == sorted([link.name, others.name])


def test_closing_ends_programs_and_removes_directories():
  sandbox = Sandbox(SandboxConfig(workers=1), HARNESS)
  [zygote], directory = pids(sandbox), scratch_of(sandbox)
  program, thread = watched(sandbox)
  sandbox.close()
  sandbox.close()
  thread.join()
  assert gone(program) and not os.path.exists(f'/proc/{zygote}') and not os.path.exists(directory)
  with pytest.raises(RuntimeError):
    run(sandbox, '')


# ———— Faults of the machine ————


def test_a_program_that_the_machine_has_no_room_for_is_tried_again(sandbox, monkeypatch):
  attempts, socketpair = [], socket.socketpair

  def short_of_memory(*arguments):
    attempts.append(arguments)
    if len(attempts) <= 2:
      raise OSError(errno.ENOMEM, 'Cannot allocate memory')
    return socketpair(*arguments)

  monkeypatch.setattr(socket, 'socketpair', short_of_memory)
  monkeypatch.setattr(implementation, 'PAUSES_S', (0.0, 0.0))
  assert run(sandbox, 'result = 3').result == 3
  attempts.clear()
  monkeypatch.setattr(implementation, 'PAUSES_S', (0.0,))
  report = run(sandbox, 'result = 3')
  assert (report.status, report.result) == ('failed', None) and 'Cannot allocate memory' in report.reason


def test_a_process_without_descriptors_fails_programs_and_nothing_else(sandbox, monkeypatch):
  monkeypatch.setattr(implementation, 'PAUSES_S', (0.0,))
  run(sandbox, '')
  limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
  try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 20, limits[1]))
    with contextlib.suppress(OSError):
      while True:
        held.append(os.dup(0))
    report = run(sandbox, 'result = 1')
    assert report.status == 'failed' and 'Too many open files' in report.reason
  finally:
    for fd in held:
      os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
  assert run(sandbox, 'result = 1').result == 1


@functools.cache
def namespaces_are_allowed(user):
  """Whether a process of this user can have namespaces of its own here, and mount in them."""
  code = f"""
import os
from sdpo_jax.environments.sandbox import zygote
os.setresuid({user}, {user}, {user})
zygote.confinement.call('prctl', zygote.confinement.PR_SET_DUMPABLE, 1, 0, 0, 0)
zygote.view.separate()
zygote.view.mount('none', '/tmp', 'tmpfs', 0)"""
  return not subprocess.run([sys.executable, '-c', code], capture_output=True, cwd=tiny.REPOSITORY).returncode


@ROOT
def test_a_full_disk_fails_programs_and_nothing_else(monkeypatch, tmp_path):
  monkeypatch.setattr(implementation, 'PAUSES_S', (0.0,))
  mount = ['mount', '-t', 'tmpfs', '-o', 'nr_inodes=8', 'none', str(tmp_path)]
  if subprocess.run(mount, capture_output=True).returncode:
    pytest.skip('this root may not mount')
  try:
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    with only('landlock', view=False):
      monkeypatch.setattr(implementation, '_probe', lambda host: [])  # It would need more room than there is.
      sandbox = Sandbox(SandboxConfig(workers=1), HARNESS)
    with sandbox:
      assert run(sandbox, 'result = 1').result == 1
      until(lambda: os.listdir(scratch_of(sandbox)) == [])
      with contextlib.suppress(OSError):
        for index in range(8):
          (tmp_path / f'filler{index}').touch()
      report = run(sandbox, 'result = 1')
      assert report.status == 'failed' and 'No space left on device' in report.reason
      (tmp_path / 'filler0').unlink()
      assert run(sandbox, 'result = 1').result == 1
  finally:
    subprocess.run(['umount', str(tmp_path)], check=True)


@pytest.mark.parametrize('environment', ['code', 'math'])
def test_a_program_that_could_not_be_run_is_ungraded(monkeypatch, environment):
  def nowhere(*arguments):
    raise OSError(errno.ENOMEM, 'there is no memory')

  tests = {'inputs': ['1'], 'outputs': ['1'], 'testtype': 'stdin', 'fn_name': '', 'time_limit': 1}
  truth, said = {
    'code': (json.dumps(tests), '```python\nprint(input())\n```'),
    'math': ('\\sin(x)', '\\boxed{\\cos(\\pi/2-x)}'),
  }[environment]
  example = Example('1', [], environment, truth, 'here')
  with Graders(EnvironmentsConfig()) as graders:
    graders.prepare([environment])
    (line,) = graders.describe()
    assert line.startswith(f'  sandbox    {environment}: ') and 'seccomp' in line
    with monkeypatch.context() as patch:
      patch.setattr(implementation, 'PAUSES_S', ())
      patch.setattr(socket, 'socketpair', nowhere)
      (outcome,) = graders.grade([example], [said], truncated=[False])
    assert outcome.score is None and 'there is no memory' in outcome.reason
    (outcome,) = graders.grade([example], [said], truncated=[False])
    assert outcome.score == 1


def test_a_helper_that_cannot_be_started_again_fails_programs_until_it_can(monkeypatch):
  monkeypatch.setattr(implementation, 'PAUSES_S', (0.0,))

  def no_process(*arguments, **options):
    raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')

  with Sandbox(SandboxConfig(workers=1), HARNESS) as sandbox:
    os.kill(pids(sandbox)[0], signal.SIGKILL)
    with monkeypatch.context() as patch:
      patch.setattr(subprocess, 'Popen', no_process)
      report = run(sandbox, 'result = 1')
      assert report.status == 'failed' and 'Resource temporarily unavailable' in report.reason
    assert run(sandbox, 'result = 1').result == 1


# ———— What programs see of the machine ————

VIEW = """
import json, os, sys
from sdpo_jax.environments.sandbox import zygote
view, (inside, alias, at) = zygote.view, sys.argv[1:]
view.separate()
view.build([inside], {alias: inside}, at)
found = {'root': sorted(os.listdir('/')), 'file': open(f'{alias}/deep/file').read(), 'there': os.path.exists(at)}
for name, path in {'root': '/new', 'inside': f'{inside}/new'}.items():
  try:
    open(path, 'w')
  except OSError as error:
    found[f'write to {name}'] = error.errno
print(json.dumps(found))
"""


@ROOT
def test_a_view_holds_what_was_asked_for_under_all_its_names(tmp_path):
  if not namespaces_are_allowed(0):
    pytest.skip('namespaces are not allowed here')
  inside, alias, at = tmp_path / 'inside', tmp_path / 'other' / 'alias', tmp_path / 'at'
  (inside / 'deep').mkdir(parents=True)
  (inside / 'deep' / 'file').write_text('text')
  at.mkdir()
  command = [sys.executable, '-c', VIEW, str(inside), str(alias), str(at)]
  done = subprocess.run(command, capture_output=True, text=True, cwd=tiny.REPOSITORY)
  found = json.loads(done.stdout or done.stderr)
  assert found.pop('root') == sorted(['dev', 'init', 'own', inside.parts[1]])
  assert found == {'file': 'text', 'there': False, 'write to root': errno.EROFS, 'write to inside': errno.EROFS}
  assert not at.exists() and (inside / 'deep' / 'file').read_text() == 'text'


def test_the_first_process_reads_and_exits_on_both_machines():
  """Instructions by the formulas of the manuals: MOVZ Xd, #imm; ADD X1, SP, #0; SVC #0."""

  def movz(register, value):
    return 0xD2800000 | value << 5 | register

  read, exit = 63, 93  # asm-generic/unistd.h.
  supervisor_call, stack = 0xD4000001, 0x91000000 | 31 << 5 | 1
  expected = [movz(0, 0), stack, movz(2, 1), movz(8, read), supervisor_call]
  expected += [movz(0, 0), movz(8, exit), supervisor_call]
  for column, machine in enumerate((62, 183)):
    file = zygote.view.executable(column)
    assert file[:6] == b'\x7fELF\x02\x01' and struct.unpack_from('<H', file, 18) == (machine,)
    (entry,) = struct.unpack_from('<Q', file, 24)
    kind, flags, offset, address, _, size, in_memory, _ = struct.unpack_from('<IIQQQQQQ', file, 64)
    assert (kind, flags, offset, size, in_memory) == (1, 5, 0, len(file), len(file))
    code = file[entry - address :]
    assert code == zygote.view.CODE[column]
    if machine == 183:
      assert list(struct.unpack(f'<{len(code) // 4}I', code)) == expected


# ———— The choice of a mechanism ————


def broken_copy(directory, module, text):
  """Return the sandbox's files with something added to the end of one."""
  for path in implementation.HERE.glob('*.py'):
    shutil.copy(path, directory)
  with open(directory / f'{module}.py', 'a') as file:
    file.write(f'\n\n{text}\n')
  return directory


NO_CALLS = 'def restrict_calls(*arguments): pass'
NO_SIZE = """
with_size = mount
def mount(source, target, kind, flags, data=''):
  with_size(source, target, kind, flags, ','.join(part for part in data.split(',') if not part.startswith('{}=')))"""


@pytest.mark.parametrize(
  'view, module, text, leak',
  [
    (False, 'confinement', 'def restrict_files(*arguments): pass', 'reads the list of users'),
    (False, 'confinement', NO_CALLS, 'forks'),
    pytest.param(
      False, 'confinement', 'def drop_privileges(uid): call("prctl", 38, 1, 0, 0, 0)', 'is root', marks=ROOT
    ),
    (False, 'confinement', 'def restrict_files(*arguments): raise OSError(1, "it fails")', 'it fails'),
    (False, 'confinement', 'def landlock_version(): raise Unsupported("there is no Landlock")', 'there is no Landlock'),
    (True, 'confinement', NO_CALLS, 'forks'),
    (True, 'view', 'def separate(): raise confinement.Unsupported("not allowed here")', 'not allowed here'),
    (True, 'view', 'def make_read_only(path): pass', "it can be written to: '/'"),
    (True, 'view', NO_SIZE.format('size'), 'has larger files than it may'),
    (True, 'view', NO_SIZE.format('nr_inodes'), 'has more files than it may'),
    (True, 'view', 'SCRATCH = OWN', 'program cannot be confined'),
  ],
)
def test_a_mechanism_that_does_not_hold_is_refused(monkeypatch, tmp_path, view, module, text, leak):
  code, temporary = tmp_path / 'code', tmp_path / 'temporary'
  code.mkdir()
  temporary.mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(temporary))
  monkeypatch.setattr(implementation, 'HERE', broken_copy(code, module, text))
  with only('landlock', view), pytest.raises(UserError, match=leak) as error:
    Sandbox(SandboxConfig(mechanism='landlock'), HARNESS)
  assert os.listdir(temporary) == []
  assert 'environments.sandbox.allow_unsandboxed' in str(error.value) and 'bubblewrap' in str(error.value)


def test_the_next_best_mechanism_is_used_and_said(monkeypatch, tmp_path, caplog):
  text = 'def separate(): raise confinement.Unsupported("not allowed here")'
  monkeypatch.setattr(implementation, 'HERE', broken_copy(tmp_path, 'view', text))
  monkeypatch.setattr(bubblewrap.shutil, 'which', lambda name: None)
  with Sandbox(SandboxConfig(workers=1), HARNESS) as sandbox, caplog.at_level(logging.WARNING):
    assert run(sandbox, 'result = 1').result == 1
    assert 'but a program learns that a file exists' in sandbox.layers[-1] and 'seccomp' in sandbox.layers
  assert 'landlock with a view of its own for every program: not allowed here' in caplog.text


def test_without_a_mechanism_code_runs_only_where_it_is_allowed(monkeypatch, caplog):
  def nothing():
    raise confinement.Unsupported('bwrap is not installed')

  monkeypatch.setattr(bubblewrap, 'find', nothing)
  with pytest.raises(UserError, match='bwrap is not installed'):
    Sandbox(SandboxConfig(mechanism='bubblewrap'), HARNESS)
  with caplog.at_level(logging.WARNING):
    sandbox = Sandbox(SandboxConfig(mechanism='bubblewrap', allow_unsandboxed=True, workers=1), HARNESS)
  assert [record.message for record in caplog.records if 'WITHOUT A SANDBOX' in record.message]
  with sandbox:
    assert sandbox.mechanism == 'none'
    code = """
import os, subprocess
result = [os.getcwd(), dict(os.environ), subprocess.Popen(['sleep', '1000'], start_new_session=True).pid]
if os.fork() == 0:
  if os.fork() == 0:
    os.setsid()
    while True: pass
  os._exit(0)
os.wait()
"""
    report = run(sandbox, code)
    directory, environment, daemon = report.result
    assert set(environment) == {'HOME', 'TMPDIR', 'LANG'}
    until(lambda: not os.path.exists(directory))
    assert not os.path.exists(f'/proc/{daemon}') and programs(pids(sandbox)[0]) == []
    assert 'MemoryError' in run(sandbox, 'x = bytearray(400 << 20)').stderr


def test_a_bubblewrap_has_an_empty_environment_and_nothing_of_the_machine():
  files = [pathlib.Path('/code/zygote.py'), pathlib.Path('/code/harness.py')]
  command = bubblewrap.arguments('/usr/bin/bwrap', ['/lib/python'], files, {'A': '1'}, 4096, 7, proc=False)
  inner = command.index('--')
  flags = command[:inner]
  assert {'--unshare-all', '--clearenv', '--die-with-parent', '--new-session'} <= set(flags)
  assert flags[flags.index('--cap-drop') + 1] == 'ALL'
  at = flags.index('--tmpfs')
  assert flags[at - 2 :][:6] == ['--size', '4096', '--tmpfs', bubblewrap.SCRATCH, '--remount-ro', '/']
  assert flags[flags.index('--setenv') :][:3] == ['--setenv', 'A', '1'] and flags.count('--setenv') == 1
  assert '--bind' not in flags and '--proc' not in flags and '--share-net' not in flags
  bound = {flags[index + 1] for index, flag in enumerate(flags) if flag == '--ro-bind'}
  assert bound == {os.path.realpath(sys.executable), '/lib/python', *map(str, files)}
  assert command[inner + 1 :] == [os.path.realpath(sys.executable), '-I', '-X', 'utf8', '/code/zygote.py', '7']


def test_bubblewrap_is_missing_in_one_sentence(monkeypatch):
  monkeypatch.setattr(bubblewrap.shutil, 'which', lambda name: None)
  with pytest.raises(confinement.Unsupported, match='bwrap is not installed'):
    bubblewrap.find()


def test_why_a_bubblewrap_does_not_start_is_in_the_message(monkeypatch, tmp_path):
  (tmp_path / 'bwrap').write_text('#!/bin/sh\necho "bwrap: no namespaces for you" >&2\nexit 1\n')
  (tmp_path / 'bwrap').chmod(0o755)
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  with pytest.raises(UserError, match='bwrap: no namespaces for you'):
    Sandbox(SandboxConfig(workers=1, mechanism='bubblewrap'), HARNESS)


def test_a_harness_that_does_not_load_is_named(tmp_path):
  (tmp_path / 'wrong.py').write_text('import no_such_thing')
  with pytest.raises(UserError, match="cannot load its harness.*No module named 'no_such_thing'"):
    Sandbox(SandboxConfig(), tmp_path / 'wrong.py')


@pytest.mark.parametrize('name', ['workers', 'memory_mb', 'file_mb', 'output_mb'])
def test_a_setting_out_of_range_is_named(name):
  config = Config(model=ModelConfig(path='model'), data=DataConfig(train_files=('a.json',), val_files=('b.json',)))
  config.validate()
  setattr(config.environments.sandbox, name, 0)
  with pytest.raises(UserError, match=f'environments.sandbox.{name} must be positive( or None)?, not 0'):
    config.validate()


# ———— As another user ————

UNPRIVILEGED = """
import ctypes, os, pathlib, sys
from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox import bubblewrap, confinement, sandbox, zygote
python = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
zygote.view.reach([*sandbox.installation()[0], python, os.getcwd()])
if sys.argv[2] == 'forbidden':
  # In a user namespace with all users of this one, in which there can be no further ones.
  ready, go = os.pipe(), os.pipe()
  child = os.fork()
  if child:
    os.read(ready[0], 1)
    for name in ('uid_map', 'gid_map'): pathlib.Path(f'/proc/{child}/{name}').write_text('0 0 65536')
    os.write(go[1], b'x')
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
  zygote.confinement.call('unshare', zygote.view.CLONE_NEWUSER)
  os.write(ready[1], b'x'); os.read(go[0], 1)
  pathlib.Path('/proc/sys/user/max_user_namespaces').write_text('0')
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
bubblewrap.shutil.which = lambda name: None
with sandbox.Sandbox(SandboxConfig(workers=1), pathlib.Path(sys.argv[1])) as value:
  code = 'import os; result = [os.getuid(), os.getpid() == 2, os.path.exists("/etc/passwd")]'
  job = sandbox.SandboxJob({'code': code}, '', sandbox.Limits(20, 10))
  print(value.mechanism, *value.run([job])[0].result, *value.layers, sep='|')
"""


@pytest.mark.parametrize(
  'uid_map, users',
  [
    ('         0          0 4294967295\n', range(2_000_000_000 + 99 * 1024, 2_000_000_000 + 100 * 1024)),
    ('0 1000 1\n1 100000 65536\n', range(65534, 65535)),
    ('0 1000 1\n', range(0)),
  ],
)
def test_root_becomes_a_user_that_its_namespace_has(monkeypatch, uid_map, users):
  monkeypatch.setattr(zygote, 'open', lambda path: io.StringIO(uid_map), raising=False)
  monkeypatch.setattr(zygote.os, 'getpid', lambda: 65536 + 99)
  assert zygote.user_ids() == users


def for_all(path: pathlib.Path) -> bool:
  """Whether users other than its owner reach a path."""
  return all(parent.stat().st_mode & 0o001 for parent in path.absolute().parents)


@ROOT
@pytest.mark.skipif(
  not all(map(for_all, (HARNESS, pathlib.Path(sys.executable)))),
  reason='other users do not reach this checkout or this Python',
)
@pytest.mark.parametrize(
  'namespaces, own_view, layers',
  [
    ('allowed', 'True|False', ['namespaces of mount, user', 'own tmpfs', 'seccomp']),
    ('forbidden', 'False|True', ['seccomp', 'but a program learns that a file exists']),
  ],
)
def test_an_ordinary_user_has_a_sandbox_too(namespaces, own_view, layers):
  if not namespaces_are_allowed(65534):
    pytest.skip('an ordinary user may have no namespaces here')
  with tempfile.TemporaryDirectory() as directory:
    os.chmod(directory, 0o755)
    harness = shutil.copy(HARNESS, directory)
    command = [sys.executable, '-c', UNPRIVILEGED, harness, namespaces]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny.REPOSITORY)
  if 'other users cannot enter' in done.stderr:
    pytest.skip('this root cannot open a way to Python for others')
  assert done.stdout.startswith(f'landlock|65534|{own_view}|'), done
  assert all(layer in done.stdout for layer in layers), done


@ROOT
def test_root_is_dropped(sandbox):
  code = 'import os; result = [os.getresuid(), os.getresgid(), os.getgroups()]'
  users, groups, more = run(sandbox, code).result
  assert len({*users, *groups}) == 1 and users[0] >= 65534 and more == []


# ———— The filter of system calls, read as the kernel reads it ————

ARCHITECTURES = {'x86_64': (0, 0xC000003E), 'aarch64': (1, 0xC00000B7)}
# linux/unistd.h of both machines; None where there is no such call.
DANGEROUS = {
  'socket': (41, 198),
  'socketpair': (53, 199),
  'connect': (42, 203),
  'bind': (49, 200),
  'sendto': (44, 206),
  'ptrace': (101, 117),
  'process_vm_readv': (310, 270),
  'process_vm_writev': (311, 271),
  'fork': (57, None),
  'vfork': (58, None),
  'execve': (59, 221),
  'execveat': (322, 281),
  'setsid': (112, 157),
  'setpgid': (109, 154),
  'tkill': (200, 130),
  'rt_sigqueueinfo': (129, 138),
  'rt_tgsigqueueinfo': (297, 240),
  'mount': (165, 40),
  'umount2': (166, 39),
  'pivot_root': (155, 41),
  'chroot': (161, 51),
  'unshare': (272, 97),
  'setns': (308, 268),
  'bpf': (321, 280),
  'userfaultfd': (323, 282),
  'perf_event_open': (298, 241),
  'keyctl': (250, 219),
  'add_key': (248, 217),
  'request_key': (249, 218),
  'personality': (135, 92),
  'open_by_handle_at': (304, 265),
  'name_to_handle_at': (303, 264),
  'memfd_create': (319, 279),
  'setuid': (105, 146),
  'setresuid': (117, 147),
  'capset': (126, 91),
  'chmod': (90, None),
  'fchmod': (91, 52),
  'fchmodat': (268, 53),
  'chown': (92, None),
  'fchownat': (260, 54),
  'truncate': (76, 45),
  'utimensat': (280, 88),
  'setxattr': (188, 5),
  'mknodat': (259, 33),
  'symlinkat': (266, 36),
  'linkat': (265, 37),
  'fallocate': (285, 47),
  'inotify_add_watch': (254, 27),
  'fanotify_init': (300, 262),
  'shmget': (29, 194),
  'mq_open': (240, 180),
  'sysinfo': (99, 179),
  'statfs': (137, 43),
  'fstatfs': (138, 44),
  'mincore': (27, 232),
  'preadv2': (327, 286),
  'pipe': (22, None),
  'pipe2': (293, 59),
  'flock': (73, 32),
  'getpriority': (140, 141),
  'setpriority': (141, 140),
  'sched_setaffinity': (203, 122),
  'kcmp': (312, 272),
  'init_module': (175, 105),
  'reboot': (169, 142),
  'seccomp': (317, 277),
  'io_uring_setup': (425, 425),
  'pidfd_open': (434, 434),
  'pidfd_send_signal': (424, 424),
  'pidfd_getfd': (438, 438),
  'clone3': (435, 435),
  'openat2': (437, 437),
  'process_madvise': (440, 440),
  'landlock_create_ruleset': (444, 444),
}
PID = 4321


def decide(program, architecture, number, *arguments):
  """Return what the filter returns for a call."""
  values = [value & 0xFFFFFFFFFFFFFFFF for value in (*arguments, *[0] * (6 - len(arguments)))]
  data = struct.pack('=IIQ6Q', number, architecture, 0, *values)
  code = [struct.unpack_from('=HBBI', program, offset) for offset in range(0, len(program), 8)]
  at = accumulator = 0
  while True:
    operation, if_true, if_false, operand = code[at]
    at += 1
    if operation == 0x20:
      (accumulator,) = struct.unpack_from('=I', data, operand)
    elif operation == 0x54:
      accumulator &= operand
    elif operation == 0x06:
      return operand
    else:
      holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[operation]
      at += if_true if holds else if_false


@pytest.fixture(params=ARCHITECTURES)
def judge(request):
  """Decides on a call by name: the name of the error, or 'allowed'; None for calls that the machine does not have."""
  column, architecture = ARCHITECTURES[request.param]
  program = confinement.filter_program(PID, column)

  def of(name, *arguments):
    tables = {**DANGEROUS, **confinement.ALLOWED, **confinement.CHECKED}
    number = tables[name][column]
    if number is None:
      return None
    answer = decide(program, architecture, number, *arguments)
    return 'allowed' if answer == 0x7FFF0000 else errno.errorcode[answer & 0xFFFF]

  of.program, of.architecture = program, architecture
  return of


@pytest.mark.parametrize('name', DANGEROUS)
def test_dangerous_calls_fail(judge, name):
  newer = all(number >= 424 for number in DANGEROUS[name]) if None not in DANGEROUS[name] else False
  assert judge(name) in (None, 'ENOSYS' if newer else 'EPERM')


@pytest.mark.parametrize('name', ['read', 'openat', 'mmap', 'futex', 'exit_group', 'getrandom', 'close_range'])
def test_calls_that_every_program_makes_are_allowed(judge, name):
  assert judge(name) == 'allowed'


def test_calls_depend_on_their_arguments(judge):
  trunc, write, temporary = 0o1000, 0o1, 0o20000000
  assert judge('openat', -100, 0, write | trunc) == judge('openat', -100, 0, 0) == 'allowed'
  assert judge('openat', -100, 0, trunc) == 'EPERM' and judge('openat', -100, 0, temporary | write) == 'ENOTSUP'
  assert judge('open', 0, trunc) in (None, 'EPERM') and judge('open', 0, write | trunc) in (None, 'allowed')
  assert judge('kill', PID, 9) == judge('tgkill', PID, PID, 6) == 'allowed'
  for other in (0, -1, 1, -PID, PID + 1):
    assert judge('kill', other, 9) == judge('tgkill', other, other, 9) == 'EPERM'
  assert judge('kill', PID, 34) == judge('tgkill', PID, PID, 64) == 'EPERM'
  assert judge('clone', 0x3D0F00) == 'allowed' and judge('clone', 17) == judge('clone', 0x10000011) == 'EPERM'
  assert judge('clone', 0x3D0F00 & ~0x400) == 'EPERM', 'a thread with descriptors of its own'
  assert judge('close_range', 3, 9, 0) == 'allowed' and judge('close_range', 3, 9, 2) == 'EPERM'
  private, wake, wait, wait_bitset = 128, 1, 0, 9
  assert (
    judge('futex', 0, wake | private) == judge('futex', 0, wait) == judge('futex', 0, wait_bitset | 256) == 'allowed'
  )
  assert all(judge('futex', 0, call) == 'EPERM' for call in (wake, 3, 4, 5, 6, 7, 10))
  assert judge('madvise', 0, 0, 4) == 'allowed' and judge('madvise', 0, 0, 21) == 'EPERM'
  assert judge('sched_getaffinity', 0) == 'allowed' and judge('sched_getaffinity', 1) == 'EPERM'
  assert judge('fcntl', 1, 3) == 'allowed' and judge('fcntl', 1, 8) == judge('fcntl', 1, 10) == 'EPERM'
  assert judge('ioctl', 0, 0x5401) == 'allowed' and judge('ioctl', 0, 0x5412) == 'EPERM'
  assert judge('prlimit64', 0) == 'allowed' and judge('prlimit64', 1) == 'EPERM'
  assert judge('prctl', 15) == 'allowed' and judge('prctl', 1) == judge('prctl', 36) == 'EPERM'
  assert judge('clock_gettime', 1) == 'allowed' and judge('clock_gettime', -35) == 'EPERM'


def test_only_the_machines_own_calls_are_known(judge):
  other = 0x40000003  # i386
  assert decide(judge.program, other, 0) & 0xFFFF == errno.ENOSYS
  assert decide(judge.program, judge.architecture, 0x40000000) & 0xFFFF == errno.ENOSYS
  allowed = [number for number in range(600) if decide(judge.program, judge.architecture, number) == 0x7FFF0000]
  assert len(allowed) < 130 and max(allowed) <= 439


def test_limits_come_from_the_settings_by_default():
  limits, settings = Limits(1, 1), SandboxConfig()
  assert (limits.memory_mb, limits.file_mb, limits.output_mb) == (
    settings.memory_mb,
    settings.file_mb,
    settings.output_mb,
  )
  assert json.dumps(settings.workers) == 'null'
