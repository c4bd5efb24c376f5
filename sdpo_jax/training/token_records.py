"""The tokens of completions as `rollouts/<step>.jsonl` has them: their texts, what weighs them, what else was
likely.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from models.token_texts import TokenTexts
from sdpo_jax.files import jsonable
from sdpo_jax.training.top_tokens import Said, TopTokens
from sdpo_jax.types import Rollouts


@dataclasses.dataclass
class TokenRecords:
  """What is recorded of the tokens of N completions."""

  texts: TokenTexts
  rollouts: Rollouts
  advantages: np.ndarray | None  # [N, T]; None: no term reads them.
  top: TopTokens | None  # None: the most likely tokens are not recorded.

  def of(self, row: int) -> dict[str, Any]:
    """Return the fields of a completion of L tokens.

    `tokens` are the L texts; put together they are the completion with its special tokens. `advantages` are L numbers.
    `top_tokens` holds `student` and `teacher` (null where it says nothing), each with `ids` [L][≤ K], most likely
    first, their `log_probs` and those of the tokens themselves, `own` [L]; and the `texts` of all these ids.
    """
    length = int(self.rollouts.completion_mask[row].sum())
    tokens = self.rollouts.completion_tokens[row, :length].tolist()
    fields: dict[str, Any] = {'tokens': [self.texts.text_of(token) for token in tokens]}
    if self.advantages is not None:
      fields['advantages'] = _rounded(self.advantages[row, :length])
    if self.top is not None:
      sides = {'student': self.top.student, 'teacher': self.top.teacher}
      found = {name: None if side is None else _said(side, row, length) for name, side in sides.items()}
      ids = {token for side in found.values() if side for position in side['ids'] for token in position}
      fields['top_tokens'] = found | {'texts': {token: self.texts.text_of(token) for token in sorted(ids)}}
    return fields


def _said(said: Said, row: int, length: int) -> dict[str, Any] | None:
  """Return what a policy says of a completion; None where it says nothing at all."""
  ids, log_probs, own = said.ids[row, :length], said.log_probs[row, :length], said.own[row, :length]
  named = ids >= 0
  if not named.any():
    return None
  return {
    'ids': [position[there].tolist() for position, there in zip(ids, named, strict=True)],
    'log_probs': [_rounded(position[there]) for position, there in zip(log_probs, named, strict=True)],
    'own': _rounded(own),
  }


def _rounded(values: np.ndarray) -> list[float | None]:
  """Return numbers with four digits behind the point; those that are not finite are null."""
  return jsonable(np.round(values.astype(np.float64), 4))
