"""Tables of a few samples of a generation batch, for those who watch a run: prompt, completion, score, feedback."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from sdpo_jax.errors import printable
from sdpo_jax.teacher.context import shorten_middle
from sdpo_jax.training.graded import GradedRollouts

COLUMNS = ('prompt', 'completion', 'score', 'feedback')
UNGRADED = 'ungraded'
LONGEST_SHOWN = 500  # Maximum number of characters of a text on a terminal.


@dataclasses.dataclass(frozen=True)
class Sample:
  """One completion as shown in a table."""

  prompt: str  # The last message of it.
  completion: str
  score: float | None  # None: ungraded.
  feedback: str | None

  def cells(self, longest: int) -> tuple[str, ...]:
    """Return the text of each of `COLUMNS`, shortened to about `longest` characters."""
    score = UNGRADED if self.score is None else f'{self.score:g}'
    return tuple(shorten(text, longest) for text in (self.prompt, self.completion, score, self.feedback or ''))


def pick(graded: GradedRollouts, count: int) -> list[Sample]:
  """Return at most `count` samples of a batch, evenly spread over it."""
  rows = np.linspace(0, len(graded.rollouts), min(count, len(graded.rollouts)), endpoint=False).astype(int)
  return [
    Sample(
      prompt=graded.examples[graded.rollouts.group[row]].messages[-1]['content'],
      completion=graded.rollouts.text[row],
      score=graded.outcomes[row].score,
      feedback=graded.outcomes[row].feedback,
    )
    for row in rows
  ]


def as_text(step: int, samples: Sequence[Sample]) -> str:
  """Return samples as text for a terminal, with control characters escaped."""
  width = max(map(len, COLUMNS))
  lines = []
  for number, sample in enumerate(samples, start=1):
    lines.append(f'── step {step}, sample {number} of {len(samples)} ──')
    for name, text in zip(COLUMNS, sample.cells(LONGEST_SHOWN), strict=True):
      first, *rest = printable(text, None, keep='\n').split('\n')
      lines.append(f'{name:<{width}}  {first}'.rstrip())
      lines += [f'{"":<{width}}  {line}'.rstrip() for line in rest]
  return '\n'.join(lines)


def shorten(text: str, longest: int) -> str:
  """Return a text, with its middle left out if it has more than `longest` characters."""
  return shorten_middle(text, longest, ' … ')
