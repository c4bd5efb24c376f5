"""Stopping: agreement of all processes of a run on the point at which they stop when one is told to."""

from __future__ import annotations

import threading
from typing import Protocol


class StoppedError(Exception):
  """The run was told to stop; raised at the same point on every process."""


class Stop(Protocol):
  """A request to stop a run; long computations check for it between their parts."""

  def asked(self) -> bool:
    """Return whether a process was told to stop, as far as this one knows; processes may differ for a moment."""

  def check(self) -> None:
    """Pass a point that every process of the run passes in the same order.

    Raises:
      StoppedError: all processes leave at this point.
    """


class Never:
  """A `Stop` that never asks to stop."""

  def asked(self) -> bool:
    """See `Stop`."""
    return False

  def check(self) -> None:
    """See `Stop`."""


NEVER = Never()


class StopPoint:
  """The points that a process passes, and the one at which all processes leave.

  The processes of a run pass the same points in the same order, because they run one program, but not at the same time.
  When one is told to stop, `freeze` is called on each: it returns how many points the process has passed. The process
  then waits at its next point until `settle` sets where all leave: the first point that none had passed. So no process
  leaves while another goes on, and in a run that is not told to stop a point costs neither a message nor a device
  transfer.
  """

  def __init__(self):
    self._changed = threading.Condition()
    self._passed = 0
    self._frozen = False
    self._at: int | None = None

  def freeze(self) -> int:
    """Return how many points were passed; this process passes another one only after `settle`."""
    with self._changed:
      self._frozen = True
      return self._passed

  def settle(self, at: int) -> None:
    """Make the process leave at point number `at`, counted from 1."""
    with self._changed:
      self._at = at
      self._changed.notify_all()

  def asked(self) -> bool:
    """Return whether `freeze` was called."""
    return self._frozen

  def reached(self) -> bool:
    """Pass a point; return whether all processes leave at this point, or at an earlier one."""
    with self._changed:
      self._changed.wait_for(lambda: not self._frozen or self._at is not None)
      self._passed += 1
      return self._at is not None and self._passed >= self._at
