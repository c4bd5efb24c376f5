"""Processes of a run find each other, and end together with one sentence whatever ends one of them. Real processes."""

import concurrent.futures
import contextlib
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

# One process of a run: joins, then does as told, with a collective after another where it is told nothing.
PROGRAM = """
import sys, threading
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


command.run(main)
"""


def free_port() -> int:
  with socket.create_server(('', 0)) as server:
    return server.getsockname()[1]


class Run:
  """Several processes of one run on this machine, the n-th told `acts[n]`; None is not started."""

  def __init__(self, acts, *flags):
    self.port, self.count, self.flags = free_port(), len(acts), flags
    self.processes: dict[int, subprocess.Popen] = {}
    for index, act in enumerate(acts):
      if act is not None:
        self.start(index, act)

  def start(self, index: int, act: str, process_id: int | None = None) -> None:
    """Starts one more; `index` is what the test calls it."""
    self.processes[index] = subprocess.Popen(
      [
        *(sys.executable, '-c', PROGRAM, f'--act={act}', f'--coordinator_address=localhost:{self.port}'),
        *(f'--num_processes={self.count}', f'--process_id={index if process_id is None else process_id}', *self.flags),
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=tiny.REPOSITORY,
      env=tiny.environment(quick=True),
    )

  def joined(self) -> None:
    for process in self.processes.values():
      assert process.stdout.readline() == 'joined\n', process.stderr.read()

  def end(self, *indices: int) -> list[tuple[int, str]]:
    """(exit code, sentences) of these processes. A run that hangs fails here, far beyond any limit that it has."""
    ends = []
    for index in indices:
      _, err = self.processes[index].communicate(timeout=120)
      lines = [line for line in err.splitlines() if line and not line.startswith('[Gloo]')]
      ends.append((self.processes[index].returncode, '\n'.join(lines)))
    return ends

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes.values():
      process.kill()
      process.communicate()


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
  assert ends == [(cluster.EXIT_LOST, sentence)] * 3


def test_processes_that_never_come_are_named_to_those_that_wait():
  with Run(['', None, '', None], '--join_timeout_s=10') as run:
    ends = run.end(0, 2)
  assert [code for code, _ in ends] == [cluster.EXIT_LOST] * 2
  for _, sentence in ends:
    assert sentence.startswith('Processes 1, 3 of 4 did not start within 10 seconds (here: 0 (')


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
    cluster.join(cluster.Place('localhost', 2, 0))


def test_only_errors_of_collectives_wait_for_a_verdict():
  assert cluster._of_a_collective(ValueError('UNKNOWN: Gloo AllGather failed: Connection reset by peer'))
  wrapped = UserError('A checkpoint could not be written.')
  wrapped.__cause__ = RuntimeError('DEADLINE_EXCEEDED: Barrier timed out.')
  assert cluster._of_a_collective(wrapped)
  assert not cluster._of_a_collective(RuntimeError('RESOURCE_EXHAUSTED: Out of memory.'))
  assert not cluster._of_a_collective(UserError('Row 7 is bad.'))


def test_the_place_on_a_slice_is_what_jax_finds_out(monkeypatch):
  def find(*_):
    return ('worker-0:8482', 16, 5, None)

  monkeypatch.setattr(clusters.ClusterEnv, 'auto_detect_unset_distributed_params', find)
  assert cluster.slice_place(1.0) == cluster.Place('worker-0:8482', 16, 5)
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
  """The hub and the spokes of a run of `count` processes, all in this one."""
  timeouts = cluster.Timeouts(join=60, heartbeat=60, barrier=60)
  places = [cluster.Place(f'localhost:{port}', count, index) for port in [free_port()] for index in range(count)]
  made = [(cluster._Spoke if place.index else cluster._Hub)(place, timeouts) for place in places]
  run_all([member.meet for member in made])
  try:
    yield made
  finally:  # Without it the others would end this process.
    run_all([lambda member=member: member.exchange_notes(cluster.ENDS, '', None) for member in made])


def run_all(functions) -> list:
  """What they return, each called in a thread of its own."""
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
