"""Processes of a run find each other, and end together with one sentence whatever ends one of them. Real processes."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

from jax._src import clusters
import pytest

from sdpo_jax.distributed import cluster
from sdpo_jax.errors import UserError
from tests import tiny
from tests.local_server import free_port

# One process of a run: joins, then does as told, with a collective after another where it is told nothing. Each is a
# fork of one that has the imports done, and is waited for by another fork, which writes down its number and how it
# ended.
PROGRAMS = """
import json, os, sys, threading
from absl import flags
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from sdpo_jax import command
from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.errors import UserError

flags.DEFINE_string('act', '', '')
command.define_cluster()


def main():
  command.join_cluster()
  barrier('the start')
  print('joined', flush=True)
  act = flags.FLAGS.act
  if act == 'wait':
    threading.Event().wait()
  if act == 'user error':
    raise UserError('Row 7 is bad.')
  if act == 'bug':
    raise ZeroDivisionError('of mine')
  if act == 'finish':
    assert multihost_utils.process_allgather(np.array(1)).sum() == flags.FLAGS.num_processes
    return 0
  if act == 'barrier':
    barrier('the far end')
  while True:
    multihost_utils.process_allgather(np.array(1))


def note(name, number):
  with open(f'{name}.partial', 'w') as file:
    file.write(str(number))
  os.rename(f'{name}.partial', name)


for line in sys.stdin:
  folder, arguments = json.loads(line)
  if os.fork() == 0:
    process = os.fork()
    if process == 0:
      for descriptor, name in ((1, 'out'), (2, 'err')):
        os.dup2(os.open(f'{folder}/{name}', os.O_CREAT | os.O_WRONLY), descriptor)
      os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
      sys.argv[1:] = arguments
      command.run(main)
    note(f'{folder}/pid', process)
    note(f'{folder}/code', os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    os._exit(0)
"""


class Process:
  """A process of a run, which writes to files in a folder of its own."""

  def __init__(self, programs: subprocess.Popen, folder: pathlib.Path, arguments: list[str]):
    self._folder = folder
    print(json.dumps([str(folder), arguments]), file=programs.stdin, flush=True)

  def read(self, name: str) -> str | None:
    path = self._folder / name
    return path.read_text() if path.exists() else None

  def wait(self, condition) -> None:
    """Return once a condition is true. A run that hangs fails here, far beyond any limit that it has."""
    deadline = time.monotonic() + 120
    while not condition():
      assert time.monotonic() < deadline
      time.sleep(0.005)

  def poll(self) -> int | None:
    """How it ended; None: it has not."""
    code = self.read('code')
    return None if code is None else int(code)

  def send_signal(self, number: int) -> None:
    self.wait(lambda: self.read('pid'))
    if self.poll() is None:
      os.kill(int(self.read('pid')), number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)


class Run:
  """Several processes of one run on this machine, the n-th told `acts[n]`; None is not started."""

  programs: subprocess.Popen  # As long as the tests of this file run.
  folder: pathlib.Path
  started = itertools.count()

  def __init__(self, acts, *flags):
    self.port, self.count, self.flags = free_port(), len(acts), flags
    self.processes: dict[int, Process] = {}
    for index, act in enumerate(acts):
      if act is not None:
        self.start(index, act)

  def start(self, index: int, act: str, process_id: int | None = None) -> None:
    """Start one more; `index` is what the test calls it."""
    folder = self.folder / str(next(self.started))
    folder.mkdir()
    place = [f'--coordinator_address=localhost:{self.port}', f'--num_processes={self.count}']
    place.append(f'--process_id={index if process_id is None else process_id}')
    self.processes[index] = Process(self.programs, folder, [f'--act={act}', *place, *self.flags])

  def joined(self) -> None:
    for process in self.processes.values():
      process.wait(lambda process=process: 'joined\n' in (process.read('out') or '') or process.poll() is not None)
      assert process.poll() is None, process.read('err')

  def end(self, *indices: int) -> list[tuple[int, str]]:
    """(exit code, sentences) of these processes."""
    ends = []
    for process in (self.processes[index] for index in indices):
      process.wait(lambda process=process: process.poll() is not None)
      lines = [line for line in process.read('err').splitlines() if line and not line.startswith('[Gloo]')]
      ends.append((process.poll(), '\n'.join(lines)))
    return ends

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes.values():
      process.kill()


@pytest.fixture(scope='module', autouse=True)
def programs(tmp_path_factory):
  Run.folder = tmp_path_factory.mktemp('cluster')
  line = [sys.executable, '-c', PROGRAMS]
  environment = tiny.environment(quick=True)
  with subprocess.Popen(line, stdin=subprocess.PIPE, text=True, cwd=tiny.REPOSITORY, env=environment) as Run.programs:
    yield


def test_processes_that_did_their_work_end_well():
  with Run(['finish'] * 3) as run:
    assert run.end(0, 1, 2) == [(0, '')] * 3


@pytest.mark.parametrize('victim', [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_others_with_a_sentence_that_names_it(victim):
  with Run([''] * 3) as run:
    run.joined()
    run.processes[victim].kill()
    survivors = run.end(*{0, 1, 2} - {victim})
  sentence = (
    f'Process {victim} ({socket.gethostname()}) is gone: the run ends here; the same command resumes from its last '
    'checkpoint.'
  )
  assert survivors == [(cluster.EXIT_LOST, sentence)] * 2


@pytest.mark.parametrize('victim', [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_hangs_ends_the_other_which_waits_for_it_in_a_collective(victim):
  with Run([''] * 2, '--heartbeat_timeout_s=1.5') as run:
    run.joined()
    run.processes[victim].send_signal(signal.SIGSTOP)
    [(code, sentence)] = run.end(1 - victim)
  assert code == cluster.EXIT_LOST
  assert sentence.startswith(f'Process {victim} ({socket.gethostname()}) has given no sign of life for 1.5 seconds: ')


def test_a_process_that_lives_and_does_not_come_to_a_barrier_is_named():
  with Run(['barrier', 'wait', 'barrier'], '--straggler_timeout_s=1', '--heartbeat_timeout_s=2') as run:
    run.joined()
    ends = run.end(0, 1, 2)
  sentence = (
    f'Process 1 ({socket.gethostname()}) did not reach the far end within 1 seconds of the others: the run ends here; '
    'the same command resumes from its last checkpoint.'
  )
  assert [ends[0], ends[2]] == [(cluster.EXIT_LOST, sentence)] * 2
  # It may hear first that process 0, which has ended because of it, is gone.
  code, said = ends[1]
  assert code == cluster.EXIT_LOST and said.startswith((sentence, f'Process 0 ({socket.gethostname()}) is gone: '))


@pytest.mark.slow
def test_processes_that_never_come_are_named_to_those_that_wait():
  with Run(['', None, '', None], '--join_timeout_s=4') as run:
    ends = run.end(0, 2)
  assert [code for code, _ in ends] == [cluster.EXIT_LOST] * 2
  for _, sentence in ends:
    assert sentence.startswith('Processes 1, 3 of 4 did not start within 4 seconds (here: 0 (')


def test_without_process_0_the_others_say_that_they_cannot_reach_it():
  with Run([None, ''], '--join_timeout_s=1') as run:
    [(code, sentence)] = run.end(1)
  assert code == cluster.EXIT_LOST
  assert sentence.startswith('Process 1 could not reach process 0 at localhost:')


def test_bad_input_of_one_process_is_the_sentence_and_the_exit_code_of_all():
  with Run(['', 'user error']) as run:
    ends = run.end(0, 1)
  assert ends == [(2, f'Process 1 ({socket.gethostname()}) ended: Row 7 is bad.'), (2, 'Row 7 is bad.')]


def test_an_error_of_one_process_ends_the_others_and_its_log_has_the_traceback():
  with Run(['bug', '']) as run:
    (code, log), (other_code, sentence) = run.end(0, 1)
  assert code == other_code == 1
  assert 'Traceback' in log and 'of mine' in log
  assert (
    sentence == f'Process 0 ({socket.gethostname()}) ended: ZeroDivisionError: of mine (its log has the traceback).'
  )


def test_contradictory_places_are_named():
  with Run(['', '', None]) as run:
    run.start(2, '', process_id=1)
    ends = run.end(0, 1, 2)
  assert [code for code, _ in ends] == [2, 2, 2]
  assert all(sentence.startswith('Two processes were started with --process_id=1 ') for _, sentence in ends)


def test_a_stranger_on_the_port_does_not_disturb_the_run():
  with Run(['finish', None]) as run:
    while run.processes[0].poll() is None:
      with contextlib.suppress(ConnectionRefusedError), socket.create_connection(('localhost', run.port)) as stranger:
        stranger.sendall(b'GET / HTTP/1.1\r\n\r\n')
        assert stranger.recv(1) == b''
        break
    run.start(1, 'finish')
    assert run.end(0, 1) == [(0, '')] * 2


def test_an_address_that_is_none_is_refused():
  with pytest.raises(UserError, match='is not host:port'):
    cluster.join(cluster.ProcessPlace('localhost', 2, 0))


def test_only_errors_of_collectives_wait_for_a_verdict():
  assert cluster.is_of_a_collective(ValueError('UNKNOWN: Gloo AllGather failed: Connection reset by peer'))
  wrapped = UserError('A checkpoint could not be written.')
  wrapped.__cause__ = RuntimeError('DEADLINE_EXCEEDED: Barrier timed out.')
  assert cluster.is_of_a_collective(wrapped)
  assert not cluster.is_of_a_collective(RuntimeError('RESOURCE_EXHAUSTED: Out of memory.'))
  assert not cluster.is_of_a_collective(UserError('Row 7 is bad.'))


def test_the_place_on_a_slice_is_what_jax_finds_out(monkeypatch):
  def find(*_):
    return ('worker-0:8482', 16, 5, None)

  monkeypatch.setattr(clusters.ClusterEnv, 'auto_detect_unset_distributed_params', find)
  assert cluster.slice_place(1.0) == cluster.ProcessPlace('worker-0:8482', 16, 5)
  monkeypatch.setattr(clusters.ClusterEnv, 'auto_detect_unset_distributed_params', lambda *_: (None,) * 4)
  assert cluster.slice_place(1.0) is None  # No TPU here.


@pytest.mark.parametrize('error', [OSError('no metadata server'), TypeError('takes 5 arguments')])
def test_a_slice_that_cannot_be_found_is_not_taken_for_a_single_host(monkeypatch, error):
  def find(*_):
    raise error

  monkeypatch.setattr(clusters.ClusterEnv, 'auto_detect_unset_distributed_params', find)
  with pytest.raises(UserError, match=rf'cannot be found \({error}\): give --coordinator_address'):
    cluster.slice_place(1.0)


@contextlib.contextmanager
def members(count: int):
  """Yield the hub and the spokes of a run of `count` processes, all in this one."""
  timeouts = cluster.Timeouts(join=60, heartbeat=60, barrier=60)
  places = [cluster.ProcessPlace(f'localhost:{port}', count, index) for port in [free_port()] for index in range(count)]
  made = [(cluster.Spoke if place.index else cluster.Hub)(place, timeouts) for place in places]
  run_all([member.meet for member in made])
  try:
    yield made
  finally:  # Without it the others would end this process.
    run_all([lambda member=member: member.exchange_notes(cluster.ENDS, '', None) for member in made])


def run_all(functions) -> list:
  """Call each function in a thread of its own, and return their results."""
  with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
    return [future.result(60) for future in [pool.submit(function) for function in functions]]


def test_notes_that_are_not_empty_are_heard_by_all():
  with members(3) as made:
    for notes in (['', 'ENOSPC', ''], ['', '', ''], ['a', 'b', 'c']):
      functions = [
        lambda member=member, note=note: member.exchange_notes('the line', note, None)
        for member, note in zip(made, notes, strict=True)
      ]
      assert run_all(functions) == [{index: note for index, note in enumerate(notes) if note}] * 3


def test_who_waits_for_a_time_only_goes_on_without_the_others():
  with members(2) as made:
    assert made[1].exchange_notes('the end by an error', '', 0.05) is None
    assert made[0].exchange_notes('the end by an error', '', 60) == {}


@pytest.mark.parametrize('told', [0, 2])
def test_whoever_is_told_to_stop_all_leave_at_the_same_point(told):
  rng = random.Random(told)
  with members(3) as made:
    heard = [threading.Event() for _ in made]
    for member, event in zip(made, heard, strict=True):
      member.listener = event.set

    def work(member) -> int:
      passed = 0
      while not member.stop_point.reached():
        passed += 1
        if passed == 20 and member.place.index == told:
          member.ask_to_stop()
        time.sleep(rng.random() / 500)
      return passed

    counts = run_all([lambda member=member: work(member) for member in made])
    assert len(set(counts)) == 1 and counts[0] >= 20
    assert all(event.wait(60) for event in heard)
