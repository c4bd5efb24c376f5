"""A run that makes no progress says so once, with the stacks of its threads, and ends where a limit is set."""

import re
import subprocess
import sys
import threading

from etils import epath
import pytest

from sdpo_jax import liveness
from sdpo_jax.config import TrainerConfig
from sdpo_jax.training import watchdog
from tests import tiny


class Watched:
  """A watchdog whose clock is moved by hand."""

  def __init__(self, folder, report, limit):
    self.said, self.ended, self.now = [], [], liveness.last().at
    settings = TrainerConfig(watchdog_report_s=report, watchdog_limit_s=limit)
    self.dog = watchdog.Watchdog(
      settings, epath.Path(folder), self.said.append, self.ended.append, clock=lambda: self.now
    )

  def after(self, seconds):
    """Look so many seconds after the last sign of life."""
    self.now = liveness.last().at + seconds
    self.dog.look()


def stall_files(folder):
  return sorted((folder / 'stalls').glob('*.txt'))


def test_silence_is_reported_once_with_its_phase_and_where_threads_stand(tmp_path):
  watched = Watched(tmp_path, report=60.0, limit=None)
  liveness.begin('grade')
  watched.after(59.9)
  assert watched.said == [] and not (tmp_path / 'stalls').exists()
  release = threading.Event()
  waiting = threading.Thread(target=lambda: release.wait(60), name='a-grader-that-waits')
  waiting.start()
  watched.after(3600)
  watched.after(7200)
  release.set()
  waiting.join()
  silence, stands = watched.said
  assert silence.startswith("No progress for 3,600 s in the phase 'grade': graders do not answer")
  [file] = stall_files(tmp_path)
  assert str(file) in stands
  text = file.read_text()
  assert text.index('Thread MainThread') < text.index('Thread a-grader-that-waits')
  assert 'release.wait(60)' in text and 'test_silence_is_reported_once' in text
  assert watched.ended == []


def test_progress_after_a_report_is_said_and_the_next_silence_is_another(tmp_path):
  watched = Watched(tmp_path, report=0.001, limit=None)
  watched.after(1)
  liveness.progress()
  watched.after(0)
  assert re.match(r'There is progress again, after [\d.]+ s without', watched.said[2])
  watched.after(1)
  assert len(watched.said) == 5 and watched.said[3].startswith('No progress')


@pytest.mark.parametrize('note', [liveness.progress, lambda: liveness.begin('train')])
def test_any_progress_puts_the_limit_off_and_silence_ends_the_run_once(tmp_path, note):
  watched = Watched(tmp_path, report=None, limit=100.0)
  liveness.begin('sample')
  before = liveness.last().at
  note()
  assert liveness.last().at > before
  watched.after(99)
  assert watched.ended == []
  watched.after(101)
  watched.after(500)
  [reason] = watched.ended
  assert reason.startswith('No progress for 101 s in the phase') and reason.endswith(
    '. That is longer than trainer.watchdog_limit_s=100'
  )
  assert watched.said == []


def test_progress_leaves_the_phase_and_when_it_began():
  liveness.begin('sample')
  began = liveness.last().began
  liveness.progress()
  assert liveness.last()[:2] == ('sample', began) and liveness.last().at > began


def test_a_folder_that_cannot_be_written_leaves_the_stacks_in_the_log(tmp_path, caplog):
  (tmp_path / 'stalls').write_text('')
  watched = Watched(tmp_path, report=1.0, limit=None)
  watched.after(2)
  assert 'in the log' in watched.said[1] and 'Thread MainThread' in caplog.text


# Code that keeps the interpreter to itself: no other thread of Python runs meanwhile.
FROZEN = """
import ctypes
from etils import epath
from sdpo_jax.config import TrainerConfig
from sdpo_jax.training.watchdog import Watchdog

for report, limit, seconds in ((0.4, None, 1), (None, 0.4, 20)):
  settings = TrainerConfig(watchdog_report_s=report, watchdog_limit_s=limit)
  with Watchdog(settings, epath.Path({folder!r}), print, print):
    ctypes.PyDLL(None).sleep(seconds)
  print('went on', flush=True)
"""


def test_an_interpreter_that_is_kept_is_reported_and_with_a_limit_ended_from_outside(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', FROZEN.format(folder=str(tmp_path))],
    capture_output=True,
    text=True,
    cwd=tiny.REPOSITORY,
    env=tiny.environment(),
  )
  assert done.returncode == 1 and done.stdout.count('went on') == 1, done.stderr
  assert done.stderr.count('Timeout') == done.stderr.count('File "<string>", line 10') == 2
