"""Being told to stop: where processes leave, and what a signal does to a process that does not."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading

import pytest

from sdpo_jax.distributed import cluster
from sdpo_jax.distributed.stopping import StopPoint
from tests import tiny


def together(points: list[StopPoint]) -> None:
  """Do what the connections of a run do when a process is told to stop."""
  at = max(point.freeze() for point in points) + 1
  for point in points:
    point.settle(at)


@pytest.mark.parametrize('seed', range(20))
def test_all_leave_at_the_first_point_that_none_had_passed(seed):
  rng = random.Random(seed)
  points = [StopPoint() for _ in range(4)]
  before = [rng.randrange(5) for _ in points]
  for point, count in zip(points, before, strict=True):
    assert [point.reached() for _ in range(count)] == [False] * count
  together(points)
  for point, count in zip(points, before, strict=True):
    assert [point.reached() for _ in range(7 - count)] == [number > max(before) for number in range(count + 1, 8)]


def test_a_process_waits_at_its_next_point_until_it_is_known_where_all_leave():
  point, left = StopPoint(), []
  assert not point.reached() and not point.asked()
  assert point.freeze() == 1 and point.asked()
  waiting = threading.Thread(target=lambda: left.append(point.reached()))
  waiting.start()
  waiting.join(0.05)
  assert waiting.is_alive()
  point.settle(3)
  waiting.join(60)
  assert left == [False] and point.reached()


def test_alone_it_is_the_next_point():
  cluster.start_alone()
  assert not cluster.stop_point().reached()
  cluster.ask_to_stop()
  assert cluster.stop_point().reached()
  cluster.start_alone()
  assert not cluster.stop_point().reached()


# Runs each scenario in a fork of its own, in whose main thread it is told to stop; prints exit codes and what was said.
PROGRAM = """
import json, multiprocessing, os, pathlib, signal, sys, tempfile, threading, time
from sdpo_jax.distributed.stopping import StoppedError
from sdpo_jax.training.preemption import Preemption


def told(*numbers, after=0.0):
  for number in numbers:
    os.kill(os.getpid(), number)
    time.sleep(after)


def until_it_is_heard(stop):
  while not stop.asked():
    time.sleep(0.001)


def at_the_next_point():
  with Preemption(60.0, lambda: 7) as stop:
    stop.stage = 'steps'
    stop.check()
    told(signal.SIGTERM)
    until_it_is_heard(stop)
    try:
      stop.check()
    except StoppedError:
      left = stop.deadline - time.monotonic()
      assert 50 < left <= 60, left
      return 5


def stuck():
  # The main thread is in C and holds no lock of Python's: a handler of Python's would never be called.
  with Preemption(0.3, lambda: 7) as stop:
    stop.stage = 'steps'
    threading.Timer(0.1, told, [signal.SIGTERM]).start()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def given_up():
  with Preemption(60.0, lambda: 7) as stop:
    stop.stage = 'steps'
    stop.check()
    threading.Thread(target=stop.give_up, args=['No progress']).start()
    until_it_is_heard(stop)
    try:
      stop.check()
    except StoppedError:
      return 9 if stop.exit_code == 70 else 1


def given_up_and_stuck():
  with Preemption(0.3, lambda: 7) as stop:
    stop.stage = 'steps'
    threading.Timer(0.1, stop.give_up, ['No progress']).start()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def stuck_at_the_start():
  import sdpo_jax.training.preemption as preemption
  preemption.START_GRACE_S = 0.2
  with Preemption(60.0, lambda: 0):
    told(signal.SIGINT)
    time.sleep(60)


def listing_hangs():
  import sdpo_jax.training.preemption as preemption
  preemption.LISTING_S = 0.1
  with Preemption(0.1, lambda: time.sleep(60)) as stop:
    stop.stage = 'steps'
    told(signal.SIGTERM)
    time.sleep(60)


def listing_fails():
  def fail():
    raise RuntimeError('503: no answer from the store')

  with Preemption(0.1, fail) as stop:
    stop.stage = 'steps'
    told(signal.SIGTERM)
    time.sleep(3)
    return 9


def twice_at_once():
  # As `timeout` sends it: to the process, then to its group.
  with Preemption(60.0, lambda: 7) as stop:
    stop.stage = 'steps'
    told(signal.SIGTERM, signal.SIGTERM)
    until_it_is_heard(stop)
    time.sleep(0.2)
    return 6


def once_more():
  import sdpo_jax.training.preemption as preemption
  preemption.REPEAT_S = 0.1
  with Preemption(60.0, lambda: 7) as stop:
    stop.stage = 'steps'
    told(signal.SIGTERM, signal.SIGINT, after=0.3)
    time.sleep(60)


def a_child_is_told():
  # By a grader that forks in its thread, and ends a process that takes too long.
  def fork():
    child = os.fork()
    if child == 0:
      time.sleep(60)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

  ends = []
  with Preemption(60.0, lambda: 7) as stop:
    fork()
    grading = threading.Thread(target=fork)
    grading.start()
    grading.join()
    time.sleep(0.1)
    assert ends == [-signal.SIGTERM] * 2 and not stop.asked(), ends
    return 8


def nobody_reads():
  # What is printed goes to a pipe that is full.
  _, full = os.pipe()
  os.set_blocking(full, False)
  try:
    while os.write(full, bytes(4096)):
      pass
  except BlockingIOError:
    os.set_blocking(full, True)
  os.dup2(full, 2)
  with Preemption(0.3, lambda: 7) as stop:
    stop.stage = 'steps'
    told(signal.SIGTERM)
    time.sleep(60)


def nobody_is_there():
  there, gone = os.pipe()
  os.close(there)
  os.dup2(gone, 2)
  return at_the_next_point()


def afterwards():
  before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  with Preemption(60.0, lambda: 7):
    pass
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
  assert signal.set_wakeup_fd(-1) == -1
  told(signal.SIGTERM)


results = {}
for scenario in (at_the_next_point, stuck, stuck_at_the_start, listing_hangs, listing_fails, twice_at_once, once_more,
                 a_child_is_told, nobody_reads, nobody_is_there, afterwards, given_up, given_up_and_stuck):
  with tempfile.TemporaryFile() as said:
    child = os.fork()
    if child == 0:
      os.dup2(said.fileno(), 2)
      os._exit(scenario() or 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said.seek(0)
    results[scenario.__name__] = code, said.read().decode().split('\\n\\n')
print(json.dumps(results))
"""


@pytest.mark.slow
def test_a_signal_is_heard_whatever_the_main_thread_does():
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM],
    capture_output=True,
    text=True,
    check=False,
    cwd=tiny.REPOSITORY,
    env=tiny.environment(quick=True),
    timeout=100,
  )
  assert done.returncode == 0, done.stderr
  results = json.loads(done.stdout)
  told, there = 'SIGTERM: saving a checkpoint, then stopping.', 'The checkpoint of step 7 is on disk; the same command'
  expected = {
    'at_the_next_point': (5, told),
    'stuck': (143, f'{told} SIGTERM: not done within 0.3 s (trainer.preemption_grace_s), ending now. {there} resumes'),
    'stuck_at_the_start': (
      143,
      'SIGINT: stopping. SIGINT: not done within 0.2 s, ending now. There is no checkpoint yet; the same command '
      'starts',
    ),
    'listing_hangs': (143, f'{told} SIGTERM: not done within 0.1 s (trainer.preemption_grace_s), ending now. The same'),
    'listing_fails': (143, f'{told} SIGTERM: not done within 0.1 s (trainer.preemption_grace_s), ending now. The same'),
    'twice_at_once': (6, told),
    'once_more': (130, f'{told} SIGINT, again: ending now. {there}'),
    'a_child_is_told': (8, ''),
    'given_up': (9, 'No progress: saving a checkpoint, then stopping.'),
    'given_up_and_stuck': (
      70,
      'No progress: saving a checkpoint, then stopping. No progress: not done within 0.3 s '
      f'(trainer.preemption_grace_s), ending now. {there} resumes',
    ),
    'nobody_reads': (143, ''),
    'nobody_is_there': (5, ''),
    'afterwards': (-15, ''),
  }
  assert results.keys() == expected.keys()
  for name, (code, said) in expected.items():
    found = ' '.join(' '.join(results[name][1]).split())
    assert (results[name][0], found[: len(said)]) == (code, said), (name, results[name])
    assert (found == said) == (code in (5, 6, 8, 9, -15) or not said), found
