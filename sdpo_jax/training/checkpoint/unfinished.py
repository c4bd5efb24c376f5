"""A step that has trained and is not written down: its evaluation, or its line of metrics.jsonl, is outstanding."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any


@dataclasses.dataclass
class Unfinished:
  """What the rest of a step needs of its generation batch, so that it can be made after a resume as well.

  A checkpoint holds it beside the state. The step's line is written once, when it is complete.
  """

  line: dict[str, float] = dataclasses.field(default_factory=dict)  # What the step has measured so far.
  success: dict[str, float] = dataclasses.field(default_factory=dict)  # Success rates by data source.

  def to_json(self) -> dict[str, Any]:
    """Return it as values that JSON holds."""
    return {'line': _finite(self.line), 'success': _finite(self.success)}

  @classmethod
  def from_json(cls, saved: Mapping[str, Any]) -> Unfinished:
    """Return what `to_json` was made of."""
    return cls(_numbers(saved['line']), _numbers(saved['success']))


def _finite(values: Mapping[str, float]) -> dict[str, float | str]:
  """Write what is not finite as a text, since JSON has no number for it."""
  return {name: float(value) if math.isfinite(value) else str(float(value)) for name, value in values.items()}


def _numbers(values: Mapping[str, float | str]) -> dict[str, float]:
  return {name: float(value) for name, value in values.items()}
