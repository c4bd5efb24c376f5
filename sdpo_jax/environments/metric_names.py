"""The names of metrics that a grader may give a run: each becomes a curve, a column and a line of every report."""

from __future__ import annotations

import dataclasses
import logging
import threading

from sdpo_jax.errors import short_repr
from sdpo_jax.types import Outcome

MAX_NAMES = 200  # Of a grader in a run, by each process.


class MetricNames:
  """Those that a grader has given so far; thread-safe."""

  def __init__(self, grader: str):
    self._grader = grader
    self._names: set[str] = set()
    self._dropped = 0  # Values.
    self._lock = threading.Lock()

  def kept(self, outcome: Outcome) -> Outcome:
    """Return the outcome without metrics beyond the first `MAX_NAMES` names; says so the first time."""
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
    """Says at the end of a run how much was dropped."""
    with self._lock:
      dropped, self._dropped = self._dropped, 0
    if dropped:
      logging.warning(
        'The grader %r gave %d metrics under more names than the %d that a run keeps: they were dropped.',
        self._grader,
        dropped,
        MAX_NAMES,
      )
