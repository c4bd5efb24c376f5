"""What the check of one kind of golden file found."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Report:
  """The outcome of all files of one kind; it prints as one line."""

  kind: str
  cases: int = 0
  failed: int = 0
  worst: float = 0.0  # Largest error seen, in the measure of the kind.
  messages: list[str] = dataclasses.field(default_factory=list)

  def __str__(self) -> str:
    return f'{self.kind}: {self.cases} cases, {self.failed} failed, worst {self.worst:.1e}'
