"""Preemption: a run that gets SIGTERM or Ctrl-C stops at a point common to all processes, saves, and ends in time.

A thread receives the signals, since Python runs a handler only when the main thread returns from what it waits for: a
program on the devices, a collective, a grader. The main thread checks for a stop at its stop points (`check`), leaves
at one that all processes agree on, and then saves the last whole state. If it does not reach such a point in time,
another thread saves that state, provided it is still on the devices (only in runs of one process; several processes
must save together). In any case the process ends after `trainer.preemption_grace_s`. A checkpoint that is only partly
written by then does not count.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, Literal

import jax
from jax.experimental import multihost_utils
import numpy as np

from sdpo_jax.distributed import cluster
from sdpo_jax.distributed.stopping import StoppedError
from sdpo_jax.environments.time_limit import OverranError, call_within
from sdpo_jax.errors import first_line

EXIT_PREEMPTED = 143  # 128 + SIGTERM; the run is saved and can be started again.
EXIT_STALLED = 70  # The run made no progress; it is saved if that was possible.
SIGNALS = (signal.SIGTERM, signal.SIGINT)
START_GRACE_S = 5.0  # The grace period while there is nothing to save.
REPEAT_S = 1.0  # A signal repeated within this time counts once: some senders signal a process and its group.
HELD_UP = 0.5  # Fraction of the grace period after which another thread saves instead of the main thread.
SAYING_S = 1.0  # Maximum time to wait for a message to be printed.
LISTING_S = 2.0  # Maximum time to wait for the list of checkpoints at the deadline.
# Codes in place of a signal number: another process was told to stop; the watchdog ends the run.
_BY_CLUSTER, _GIVEN_UP = 0, 255

# The part of a run in which a signal arrives: before there is anything to save; during the steps; after the last step.
Stage = Literal['start', 'steps', 'end']
_ANSWERS: dict[Stage, str] = {
  'start': 'stopping.',
  'steps': 'saving a checkpoint, then stopping.',
  'end': 'all steps are done; ending.',
}
_listening: list[Preemption] = []  # The last of these instances receives this process's signals.


class Preemption:
  """A context manager that receives the stop requests of a run, from signals or other processes; a `stopping.Stop`.

  Signals are received if the context is entered in the main thread. A second signal ends the process at once, as the
  deadline does.
  """

  def __init__(self, grace_s: float, on_disk: Callable[[], int]):
    """Make a context manager to be entered around a run.

    Args:
      grace_s: seconds from the signal to the end of the process, whatever it is doing then.
      on_disk: lists the checkpoints and returns the step of the last complete one; 0: there is none.
    """
    self.stage: Stage = 'start'
    self.deadline: float | None = None  # On the monotonic clock; set once the process is told to stop.
    self.given_up: str | None = None  # Why the run was ended; None: by a signal, or not at all.
    # Saves the last whole state; called from another thread if the main thread does not reach its next stop point.
    self.save: Callable[[], None] | None = None
    self._save_at: float | None = None
    self._grace_s, self._on_disk = grace_s, on_disk
    self.previous: dict[int, Any] = {}  # Signal → handler to restore.
    self.previous_fd = -1
    self._ear, self._mouth = socket.socketpair()
    self._thread = threading.Thread(target=self._listen, name='preemption', daemon=True)

  def __enter__(self) -> Preemption:
    cluster.start_alone()
    self._mouth.setblocking(False)
    if threading.current_thread() is threading.main_thread():
      _listening.append(self)
      self.previous_fd = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
      for number in SIGNALS:
        # The handler itself does nothing: Python writes the signal's number to the socket, whatever the thread does.
        self.previous[number] = signal.signal(number, lambda number, frame: None)
    self._thread.start()
    cluster.on_stop(functools.partial(self._say, _BY_CLUSTER))
    return self

  def __exit__(self, *_: object) -> None:
    cluster.on_stop(None)
    self.restore_handlers()
    self._mouth.close()  # This ends the thread.
    self._thread.join()
    self._ear.close()

  def asked(self) -> bool:
    """See `stopping.Stop`."""
    return cluster.stop_point().asked()

  def check(self) -> None:
    """See `stopping.Stop`."""
    if cluster.stop_point().reached() and (cluster.joined() or jax.process_count() == 1):
      raise StoppedError

  def check_over_devices(self) -> None:
    """Agree on a stop, as `check` does, in a run whose processes were not joined by `cluster.join`.

    Raises:
      StoppedError: a process was told to stop.
    """
    if cluster.joined() or jax.process_count() == 1:
      return
    if np.any(multihost_utils.process_allgather(np.array(self.asked()))):
      raise StoppedError

  def restore_handlers(self) -> None:
    """Restore the previous signal handlers."""
    if not self.previous:
      return
    later = _listening[_listening.index(self) + 1 :]
    if later:  # Runs need not end in the order in which they began.
      later[0].previous, later[0].previous_fd = self.previous, self.previous_fd
    else:
      signal.set_wakeup_fd(self.previous_fd)
      for number, handler in self.previous.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    self.previous = {}
    _listening.remove(self)

  def give_up(self, why: str) -> None:
    """End the run as a signal would, for the reason `why` and with exit code `EXIT_STALLED`; thread-safe."""
    self.given_up = why
    self._say(_GIVEN_UP)

  @property
  def exit_code(self) -> int:
    """The code with which the process ends after it has stopped."""
    return EXIT_PREEMPTED if self.given_up is None else EXIT_STALLED

  def _say(self, number: int) -> None:
    with contextlib.suppress(OSError):  # The run is over.
      self._mouth.send(bytes([number]))

  def _listen(self) -> None:
    """Wait for the first signal, then for the deadline."""
    first: float | None = None
    name = ''
    while True:
      self._ear.settimeout(self._pause())
      try:
        heard = self._ear.recv(64)
      except TimeoutError:
        if self._save_at is not None:
          self._save_at = None
          threading.Thread(target=self._save_meanwhile, name='save', daemon=True).start()
          continue
        self._end(self.exit_code, f'{name}: not done within {self._limit():g} s{self._setting()}, ending now.')
      if not heard:
        return
      now = time.monotonic()
      for number in heard:
        if number not in (_BY_CLUSTER, _GIVEN_UP, *SIGNALS):
          continue  # Another signal with a handler of Python's.
        if first is None:
          first, name = now, self._tell(number, now)
        elif number in SIGNALS and now - first > REPEAT_S:
          self._end(128 + number, f'{signal.Signals(number).name}, again: ending now.')

  def _pause(self) -> float | None:
    """Return the seconds until the next action is due; None if none is."""
    if self.deadline is None:
      return None
    at = self.deadline if self._save_at is None else self._save_at
    return max(at - time.monotonic(), 0.001)

  def _save_meanwhile(self) -> None:
    if self.save is None or self.stage != 'steps':
      return
    try:
      self.save()
    except Exception as error:  # The main thread may still save it, or reports why it cannot.
      logging.warning('The last finished step could not be saved while the run is busy: %s', first_line(error))

  def _tell(self, number: int, now: float) -> str:
    """Handle the first signal: set the deadline, tell the user and other processes; return the signal's name."""
    if number == _GIVEN_UP:
      name = str(self.given_up)
    else:
      name = 'Another process was told to stop' if number == _BY_CLUSTER else signal.Signals(number).name
    self.deadline = now + self._limit()
    self._save_at = now + HELD_UP * self._limit()
    if number != _BY_CLUSTER:
      cluster.ask_to_stop()
    with contextlib.suppress(OSError, ValueError, OverranError):  # The output may have no reader.
      call_within(lambda: print(f'\n{name}: {_ANSWERS[self.stage]}', file=sys.stderr, flush=True), SAYING_S, 'saying')
    return name

  def _limit(self) -> float:
    return min(self._grace_s, START_GRACE_S) if self.stage == 'start' else self._grace_s

  def _setting(self) -> str:
    return '' if self.stage == 'start' else ' (trainer.preemption_grace_s)'

  def _end(self, code: int, why: str) -> None:
    """End the process at once, whatever its other threads are doing."""
    sentence = f'{why} {what_is_there(self._on_disk)}'
    if sys.stderr.isatty():
      sentence = f'\x1b[?25h{sentence}'  # The progress bar has hidden the cursor.
    end_by(time.monotonic() + SAYING_S, code)
    cluster.fail(code, sentence)
    cluster.leave(sentence, code)


def what_is_there(on_disk: Callable[[], int]) -> str:
  """Return a sentence about the step from which the run would resume.

  Args:
    on_disk: lists the checkpoints and returns the step of the last complete one, or 0; it is given `LISTING_S` seconds.
  """
  try:
    step = call_within(on_disk, LISTING_S, 'listing')
  except Exception:  # Object stores raise many types of errors, and the process must end in any case.
    return 'The same command resumes from the last checkpoint.'
  if step:
    return f'The checkpoint of step {step} is on disk; the same command resumes from it.'
  return 'There is no checkpoint yet; the same command starts again.'


def end_by(deadline: float, code: int) -> None:
  """End the process with `code` at `deadline` (on the monotonic clock) unless it has ended before.

  A hanging thread of a grader may keep it from ending.
  """

  def wait() -> None:
    time.sleep(max(deadline - time.monotonic(), 0.0))
    os._exit(code)

  threading.Thread(target=wait, name='end', daemon=True).start()


def _leave_to_the_parent() -> None:
  """Restore the signal handlers in a forked child, as signals to it must not stop the run."""
  for run in _listening[::-1]:
    run.restore_handlers()


os.register_at_fork(after_in_child=_leave_to_the_parent)
