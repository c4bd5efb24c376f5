"""A limit on metric names: each name that a grader reports becomes a curve, a column and a line of every report."""

from __future__ import annotations

import dataclasses
import logging
import threading

from sdpo_jax.errors import short_repr
from sdpo_jax.types import Outcome

MAX_NAMES = 200  # Per grader, run and process.


class MetricNames:
  """The names that a grader has reported so far; thread-safe."""

  def __init__(self, grader: str):
    self._grader = grader
    self._names: set[str] = set()
    self._dropped = 0  # Number of dropped values.
    self._lock = threading.Lock()

  def kept(self, outcome: Outcome) -> Outcome:
    """Return the outcome with metrics of the first `MAX_NAMES` names only; logs the first time it drops one."""
    with self._lock:
      for name in outcome.metrics:
        if len(self._names) < MAX_NAMES:
          self._names.add(name)
      further = [name for name in outcome.metrics if name not in self._names]
      if further and not self._dropped:
        logging.warning(
          'The grader %r has given metrics of more than %d names; further ones, such as %s, are dropped.',
          self._grader,
          MAX_NAMES,
          short_repr(further[0]),
        )
      self._dropped += len(further)
    if not further:
      return outcome
    metrics = {name: value for name, value in outcome.metrics.items() if name in self._names}
    return dataclasses.replace(outcome, metrics=metrics)

  def end(self) -> None:
    """Log how many values were dropped, at the end of a run."""
    with self._lock:
      dropped, self._dropped = self._dropped, 0
    if dropped:
      logging.warning(
        'The grader %r gave %d metrics under more names than the %d that a run keeps: they were dropped.',
        self._grader,
        dropped,
        MAX_NAMES,
      )
