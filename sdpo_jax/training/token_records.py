"""The per-token fields of `rollouts/<step>.jsonl`: texts, advantages, and the most likely tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from sdpo_jax.files import jsonable
from sdpo_jax.learning.readings import PolicyTopTokens, TopTokens
from sdpo_jax.models.token_texts import TokenTexts
from sdpo_jax.types import Rollouts


@dataclasses.dataclass
class TokenRecords:
  """The tokens of N completions, with their texts, advantages and most likely alternatives."""

  texts: TokenTexts
  rollouts: Rollouts
  advantages: np.ndarray | None  # [N, T]; None: no term reads them.
  top: TopTokens | None  # None: the most likely tokens are not recorded.

  def of(self, row: int) -> dict[str, Any]:
    """Return the per-token fields of completion `row`, which has L tokens.

    `tokens` are the L texts, whose concatenation is the completion with its special tokens. `advantages` are L numbers.
    `top_tokens` holds `student` and `teacher` (null if unknown), each with `ids` [L][≤ K], most likely first, their
    `log_probs`, and the log-probs `own` [L] of the completion's tokens; and `texts`, the texts of all these ids.
    """
    length = int(self.rollouts.completion_mask[row].sum())
    tokens = self.rollouts.completion_tokens[row, :length].tolist()
    fields: dict[str, Any] = {'tokens': [self.texts.text_of(token) for token in tokens]}
    if self.advantages is not None:
      fields['advantages'] = _rounded(self.advantages[row, :length])
    if self.top is not None:
      sides = {'student': self.top.student, 'teacher': self.top.teacher}
      found = {name: None if side is None else _top_fields(side, row, length) for name, side in sides.items()}
      ids = {token for side in found.values() if side for position in side['ids'] for token in position}
      fields['top_tokens'] = found | {'texts': {token: self.texts.text_of(token) for token in sorted(ids)}}
    return fields


def _top_fields(top: PolicyTopTokens, row: int, length: int) -> dict[str, Any] | None:
  """Return the fields about a policy's most likely tokens in a completion; None if none are known."""
  ids, log_probs, own = top.ids[row, :length], top.log_probs[row, :length], top.own[row, :length]
  named = ids >= 0
  if not named.any():
    return None
  return {
    'ids': [position[there].tolist() for position, there in zip(ids, named, strict=True)],
    'log_probs': [_rounded(position[there]) for position, there in zip(log_probs, named, strict=True)],
    'own': _rounded(own),
  }


def _rounded(values: np.ndarray) -> list[float | None]:
  """Return values rounded to four decimals; non-finite ones become None, JSON's null."""
  return jsonable(np.round(values.astype(np.float64), 4))
