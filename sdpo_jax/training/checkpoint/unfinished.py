"""A step whose update is done, but whose evaluation or line of metrics.jsonl is outstanding."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any


@dataclasses.dataclass
class Unfinished:
  """What a resumed run needs to finish a step whose update is done; stored in a checkpoint beside the state.

  The step's line of metrics.jsonl is written once, when it is complete.
  """

  line: dict[str, float] = dataclasses.field(default_factory=dict)  # The metrics of the step so far.
  success: dict[str, float] = dataclasses.field(default_factory=dict)  # Success rates by data source.
  reason: str = ''  # Why all completions are ungraded, most often; '' if some are graded.
  # Whether the outstanding evaluation draws further tokens of samples that carry over, which the checkpoint lacks: then
  # a resume repeats it even if the line was written after all.
  draws: bool = False

  def to_json(self) -> dict[str, Any]:
    """Return the contents as JSON values."""
    return {'line': _finite(self.line), 'success': _finite(self.success), 'reason': self.reason, 'draws': self.draws}

  @classmethod
  def from_json(cls, saved: Mapping[str, Any]) -> Unfinished:
    """Return the object that `to_json` encoded."""
    return cls(_numbers(saved['line']), _numbers(saved['success']), saved.get('reason', ''), saved.get('draws', False))


def _finite(values: Mapping[str, float]) -> dict[str, float | str]:
  """Return values with non-finite ones as strings, since JSON has no numbers for them."""
  return {name: float(value) if math.isfinite(value) else str(float(value)) for name, value in values.items()}


def _numbers(values: Mapping[str, float | str]) -> dict[str, float]:
  return {name: float(value) for name, value in values.items()}
