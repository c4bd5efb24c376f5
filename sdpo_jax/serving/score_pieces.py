"""Long texts in pieces: a text that no score bucket holds, but a teacher's prompt with a completion does.

Each piece is as many tokens as a completion may have, behind all tokens before them, so that no further program is
compiled. A text of N tokens with completions of R takes N / R forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from sdpo_jax.learning.scoring import Scored
from sdpo_jax.serving.engine import EngineSettings

Row = tuple[Sequence[int], Sequence[int]]  # A prompt, and the tokens after it.


def longest(sizes: EngineSettings) -> int:
  """Return the most tokens of a text to score, prompt and completion together."""
  return max(sizes.score_buckets[-1] + 1 if sizes.score_buckets else 0, _room(sizes))


def split(row: Row, ids: np.ndarray | None, sizes: EngineSettings) -> list[tuple[Row, np.ndarray | None]]:
  """Return a row in pieces that the engine can score, in order; one that it can score, or never can, is returned whole.

  Args:
    row: P tokens, and T tokens to score after them.
    ids: [T, M] further tokens to score; None: none.
    sizes: the sizes of the engine.
  """
  prompt, tokens = row
  length = len(prompt) + len(tokens)
  fits = len(prompt) <= sizes.teacher_buckets[-1] and len(tokens) <= sizes.response_buckets[-1]
  if fits or (sizes.score_buckets and length <= sizes.score_buckets[-1] + 1) or length > _room(sizes):
    return [(row, ids)]
  whole, found, end = [*prompt, *tokens], [], length
  if ids is not None:
    ids = np.concatenate([np.full((len(prompt), ids.shape[1]), -1, ids.dtype), ids])
  while end > len(prompt):
    begin = max(1, end - sizes.response_buckets[-1])
    found.append(((whole[:begin], whole[begin:end]), None if ids is None else ids[begin:end]))
    end = begin
  return found[::-1]


def joined(pieces: Sequence[Scored], count: int) -> Scored:
  """Return the scores of pieces as those of one row, whose last `count` tokens were to be scored."""
  parts = [[getattr(piece, field.name) for piece in pieces] for field in dataclasses.fields(Scored)]
  return Scored(*(None if part[0] is None else np.concatenate(part)[-count:] for part in parts))


def _room(sizes: EngineSettings) -> int:
  return sizes.teacher_buckets[-1] + sizes.response_buckets[-1]
