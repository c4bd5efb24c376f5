"""Progress display of a run: a live bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import collections
from collections.abc import Callable
import math
import statistics
import sys
import time

RECENT = 10  # Number of recent steps from which the remaining time is estimated.


class TimeLeft:
  """An estimator of a run's remaining time, from its most recent steps and evaluations."""

  def __init__(self, total: int, test_freq: int):
    """Make an estimator without an estimate yet.

    Args:
      total: number of steps of the run.
      test_freq: steps between evaluations, as in the settings; 0: there are none.
    """
    self._total, self._test_freq = total, test_freq
    self._steps: collections.deque[float] = collections.deque(maxlen=RECENT)
    self._evaluations: collections.deque[float] = collections.deque(maxlen=RECENT)
    self._compiling: float | None = None  # The shortest step that compiled something.

  def evaluated(self, seconds: float) -> None:
    """Record the duration of an evaluation."""
    self._evaluations.append(seconds)

  def step(self, seconds: float, compiled: int) -> None:
    """Record the duration of a step without its evaluation; steps that compile count only while there are no others."""
    if compiled:
      self._compiling = min(seconds, self._compiling or seconds)
    else:
      self._steps.append(seconds)

  def after(self, step: int) -> float | None:
    """Return the estimated seconds left after `step`; None before the first step."""
    if not self._steps and self._compiling is None:
      return None
    seconds = statistics.median(self._steps) if self._steps else self._compiling
    each = statistics.median(self._evaluations) if self._evaluations else 0.0
    return (self._total - step) * seconds + self._evaluations_after(step) * each

  def _evaluations_after(self, step: int) -> int:
    if not self._test_freq or step >= self._total:
      return 0
    last = self._total % self._test_freq != 0
    return self._total // self._test_freq - step // self._test_freq + last


class Progress:
  """A progress display: step, score, loss, tokens/s, time left; on a terminal also the current phase of the step."""

  def __init__(
    self,
    total: int,
    done: int = 0,
    *,
    test_freq: int = 0,
    shown: bool = True,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._shown, self._total, self._clock = shown, total, clock
    self._left = TimeLeft(total, test_freq)
    self._began = clock()  # When the current step began.
    self._bar = None
    if shown and sys.stderr.isatty():
      from rich.console import Console
      from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
      from rich.progress import Progress as Bar

      self._bar = Bar(
        TextColumn('{task.description}'),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn('{task.fields[numbers]}'),
        TextColumn('{task.fields[left]}'),
        console=Console(stderr=True),
      )
      self._task = self._bar.add_task('step', total=total, completed=done, numbers='', left='')
      self._bar.start()

  def phase(self, name: str) -> None:
    """Show the current phase of the step."""
    if self._bar is not None:
      self._bar.update(self._task, description=f'{name:<10}')

  def evaluated(self, seconds: float) -> None:
    """Record the duration of an evaluation, which is not part of the step."""
    self._left.evaluated(seconds)
    self._began += seconds

  def step(
    self, step: int, score: float, loss: float | None, tokens_per_second: float, note: str = '', *, compiled: int = 0
  ) -> None:
    """Show a finished step, during which `compiled` programs were compiled.

    A score of NaN is not shown; neither is the loss if there was no update.
    """
    now = self._clock()
    self._left.step(now - self._began, compiled)
    self._began = now
    left = self._left.after(step)
    ends = '' if left is None or step >= self._total else f'{clock_time(left)} left'
    scored = '' if math.isnan(score) else f'score {score:.3f}  '
    lost = '' if loss is None else f'loss {loss:.4f}  '
    numbers = f'{scored}{lost}{tokens_per_second:,.0f} tokens/s{note}'
    if self._bar is not None:
      self._bar.update(self._task, completed=step, numbers=numbers, left=ends)
    elif self._shown:
      print(f'step {step}/{self._total}  {numbers}  {ends}'.rstrip(), file=sys.stderr, flush=True)

  def close(self) -> None:
    """Stop the live bar, if there is one."""
    if self._bar is not None:
      self._bar.stop()


def clock_time(seconds: float) -> str:
  """Return seconds as m:ss or h:mm:ss."""
  minutes, seconds = divmod(int(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'
