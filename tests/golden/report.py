"""What the check of one kind of golden file found, and how errors are measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass
class Report:
  """The outcome of all files of one kind; it prints as one line."""

  kind: str
  cases: int = 0
  failed: int = 0
  worst: float = 0.0  # Largest error in the measure of the kind (float64 runs), of the cases that can fail.
  messages: list[str] = dataclasses.field(default_factory=list)  # What failed, case first.
  notes: list[str] = dataclasses.field(default_factory=list)  # What cannot fail: informational, not comparable.
  _failed_cases: set[str] = dataclasses.field(default_factory=set)

  def __str__(self) -> str:
    return f'{self.kind}: {self.cases} cases, {self.failed} failed, worst {self.worst:.1e}'

  def fail(self, case: str, message: str) -> None:
    """Record that `case` failed; a case may fail in several ways and counts once."""
    self.failed += case not in self._failed_cases
    self._failed_cases.add(case)
    self.messages.append(f'{case}: {message}')

  def note(self, case: str, message: str) -> None:
    """Record something that cannot fail."""
    self.notes.append(f'{case}: {message}')

  def compare(
    self, case: str, what: str, ours: Any, theirs: Any, tolerance: float, *, float64: bool, informational: bool = False
  ) -> None:
    """Compare by `error`; informational values fail only where ours are not finite and theirs are."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
      self.fail(case, f'{what} has shape {ours.shape}, expected {theirs.shape}')
      return
    expected = np.isfinite(theirs)
    if not np.all(np.isfinite(ours) | ~expected):
      self.fail(case, f'{what} is not finite where the reference is')
      return
    worst = error(ours[expected], theirs[expected])
    if informational:
      self.note(case, f'{what} is informational, error {worst:.1e}')
      return
    if not np.all(expected):
      self.note(case, f'{what}: {np.sum(~expected)} values of the reference are not finite')
    if float64:
      self.worst = max(self.worst, worst)
    if worst > tolerance:
      self.fail(case, f'{what} differs by {worst:.2e}, allowed {tolerance:.1e}')


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
  """max |ours − theirs| / (1 + |theirs|), 0 for nothing."""
  if not theirs.size:
    return 0.0
  return float(np.max(np.abs(ours - theirs) / (1.0 + np.abs(theirs))))


def load(path: Path) -> dict[str, Any]:
  """Return an npz file as a dict; keys that end in `json` are parsed."""
  with np.load(path, allow_pickle=False) as archive:
    return {key: json.loads(str(archive[key])) if key.endswith('json') else archive[key] for key in archive}
