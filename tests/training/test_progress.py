"""What a run says while it goes on: a line per step, and the time that is left by the steps that were."""

import math

import pytest

from sdpo_jax.training.progress import Progress, TimeLeft, clock_time


def test_a_line_per_step_without_a_terminal(capsys):
  times = iter([0.0, 90.0, 92.0, 94.0, 96.0, 98.0])
  progress = Progress(total=5, test_freq=4, clock=lambda: next(times))
  progress.phase('sample')
  progress.step(1, score=0.5, loss=0.25, tokens_per_second=1234.0, compiled=3)
  progress.step(2, 0.5, 0.25, 1234.0)
  progress.evaluated(1.5)
  progress.step(3, 0.5, 0.25, 1234.0, note='  rolled back')
  progress.step(5, 0.5, 0.25, 1234.0)
  progress.step(5, math.nan, 0.25, 1234.0)  # Nobody gives scores.
  progress.close()
  assert capsys.readouterr().err.splitlines() == [
    'step 1/5  score 0.500  loss 0.2500  1,234 tokens/s  6:00 left',
    'step 2/5  score 0.500  loss 0.2500  1,234 tokens/s  0:06 left',  # No longer by the step that compiled.
    'step 3/5  score 0.500  loss 0.2500  1,234 tokens/s  rolled back  0:05 left',  # Steps of 2 and 0.5 s, 2 × 1.5 s.
    'step 5/5  score 0.500  loss 0.2500  1,234 tokens/s',
    'step 5/5  loss 0.2500  1,234 tokens/s',
  ]


def test_nothing_is_said_by_other_processes(capsys):
  progress = Progress(total=5, shown=False)
  progress.step(1, 0.5, 0.25, 1234.0)
  assert capsys.readouterr().err == ''


def test_time_left_follows_recent_steps_and_every_evaluation_that_is_to_come():
  left = TimeLeft(total=100, test_freq=8)
  assert left.after(0) is None
  for _ in range(10):
    left.step(1.0, 0)
  left.evaluated(10.0)
  # After steps 48, 56 … 96, and at the end.
  assert left.after(40) == 60 + 8 * 10
  for _ in range(10):
    left.step(3.0, 0)
  assert left.after(99) == 3 + 10 and left.after(100) == 0
  left.step(500.0, 1)  # Not even now.
  assert left.after(99) == 13
  never = TimeLeft(total=10, test_freq=0)
  never.step(2.0, 0)
  assert never.after(4) == 12


@pytest.mark.parametrize('seconds, text', [(0, '0:00'), (59.9, '0:59'), (61, '1:01'), (3723, '1:02:03')])
def test_clock_time(seconds, text):
  assert clock_time(seconds) == text
