"""A watchdog thread, which reports when a run makes no progress, and ends the run if a limit is set.

Progress is a program compiled, a parameter read, tokens sampled, a completion graded, a micro-batch trained, or a phase
begun (`liveness`). A grader, a program on the devices, a collective that another process never joins, or a file system
may hang; the stacks of all threads, written to `stalls/` in the run directory, show where.

Code that never releases the interpreter, such as an endless regular expression in a grader, stops this thread, too.
Python's faulthandler, which does not need the interpreter, then writes the stacks to stderr; if a limit is set, it ends
the process with its own exit code, 1.
"""

from __future__ import annotations

from collections.abc import Callable
import datetime
import faulthandler
import logging
import sys
import threading
import time
import traceback

from etils import epath
import jax

from sdpo_jax import liveness
from sdpo_jax.config import TrainerConfig
from sdpo_jax.environments.time_limit import OverranError, call_within
from sdpo_jax.errors import first_line
from sdpo_jax.files import make_directory, write_atomically

FOLDER = 'stalls'
LOOKS = 20  # Number of checks within the shorter of the two limits.
LONGEST_PAUSE_S = 10.0  # Maximum time between two checks.
WRITING_S = 10.0  # Maximum time to wait for the file with the stacks to be written.
# The likely cause of a stall, by phase.
HINTS = {
  'sample': 'a program on the devices, or another process of the run, does not end',
  'grade': 'graders do not answer (their time limits are settings of environments)',
  'train': 'a program on the devices, or another process of the run, does not end',
  'compile': 'a program takes long to compile',
  'on_step': 'the code that is called after every step (on_step) does not return',
  'save': 'the file system of the run does not answer',
  'restore': 'the file system of the run does not answer',
}


class Watchdog:
  """A context manager in which the watchdog runs."""

  def __init__(
    self,
    settings: TrainerConfig,
    workdir: epath.Path,
    announce: Callable[[str], None],
    end: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    """Make a watchdog that is not running yet.

    Args:
      settings: `watchdog_report_s` and `watchdog_limit_s`.
      workdir: directory of the run.
      announce: receives sentences for the user, from another thread.
      end: ends the run for the given reason, from another thread.
      clock: returns monotonic seconds.
    """
    self._report_s, self._limit_s = settings.watchdog_report_s, settings.watchdog_limit_s
    self._workdir, self._announce, self._end, self._clock = workdir, announce, end, clock
    self._reported: liveness.Sign | None = None  # The last sign of life before the stall that was reported.
    self._ended = False
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)

  def __enter__(self) -> Watchdog:
    liveness.begin('start')
    if self._times():
      self._await_interpreter()
      self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._over.set()
    if self._times():
      self._thread.join()
      faulthandler.cancel_dump_traceback_later()

  def _times(self) -> list[float]:
    return [seconds for seconds in (self._report_s, self._limit_s) if seconds is not None]

  def _watch(self) -> None:
    while not self._over.wait(self._pause()):
      self._await_interpreter()
      self.look()

  def _pause(self) -> float:
    return min(min(self._times()) / LOOKS, LONGEST_PAUSE_S)

  def _await_interpreter(self) -> None:
    """Schedule a dump of the stacks unless this thread comes back in time to postpone it."""
    ends = self._limit_s is not None
    seconds = self._limit_s if ends else self._report_s
    try:
      faulthandler.dump_traceback_later(seconds + self._pause(), exit=ends, file=sys.__stderr__)
    except (RuntimeError, ValueError, OSError, AttributeError):  # There is no stderr to write to.
      return

  def look(self) -> None:
    """Check how old the last sign of life is; report a stall or its end, or end the run."""
    sign = liveness.last()
    silent = self._clock() - sign.at
    if self._reported is not None and sign.at > self._reported.at:
      self._announce(f'There is progress again, after {sign.at - self._reported.at:,.0f} s without.')
      self._reported = None
    if self._report_s is not None and silent >= self._report_s and self._reported is None:
      self._reported = sign
      self._announce(f'{describe(sign, silent)}.')
      self._announce(f'The stacks of all threads of this process are in {self._write_stacks(sign, silent)}.')
    if self._limit_s is not None and silent >= self._limit_s and not self._ended:
      self._ended = True
      self._end(f'{describe(sign, silent)}. That is longer than trainer.watchdog_limit_s={self._limit_s:g}')

  def _write_stacks(self, sign: liveness.Sign, silent: float) -> str:
    """Write the stacks of all threads, and return where they were written."""
    now = datetime.datetime.now(datetime.UTC)
    path = self._workdir / FOLDER / f'{now:%Y-%m-%dT%H-%M-%S}-process{jax.process_index()}.txt'
    text = f'{now.isoformat(timespec="seconds")}  {describe(sign, silent)}.\n\n{stacks()}'

    def write() -> None:
      make_directory(path.parent)
      write_atomically(path, text)

    try:
      call_within(write, WRITING_S, 'stalls')
    except (OSError, OverranError) as error:  # This may be the file system that hangs.
      logging.error('%s', text)
      return f'the log ({path} cannot be written: {first_line(error)})'
    return str(path)


def describe(sign: liveness.Sign, silent: float) -> str:
  """Return the sentence for the user about a process without progress for `silent` seconds."""
  process = f' on process {jax.process_index()}' if jax.process_count() > 1 else ''
  hint = HINTS.get(sign.phase)
  return f'No progress for {silent:,.0f} s in the phase {sign.phase!r}{process}' + (f': {hint}' if hint else '')


def stacks() -> str:
  """Return the Python stacks of all threads of this process, the main thread's first."""
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  main = threading.main_thread().ident
  standing = sys._current_frames()  # noqa: SLF001 (Documented by Python, which has no public alternative.)
  frames = sorted(standing.items(), key=lambda item: item[0] != main)
  return '\n'.join(
    f'Thread {names.get(ident, "of another library")}:\n{"".join(traceback.format_stack(frame))}'
    for ident, frame in frames
  )
