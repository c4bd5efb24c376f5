"""The losses of requests as per-row numbers, so that one compiled program serves all of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.objective import row_numbers
from sdpo_jax.objective.jsd_pg import JsdPg
from sdpo_jax.types import RowNumbers


@dataclasses.dataclass(frozen=True)
class Sdpo:
  """SDPO's divergence over a top K and a tail bucket, optionally with a policy gradient (hybrid).

  The advantages of the policy gradient are given with the lessons.

  Raises:
    UserError: a number is not allowed.
  """

  alpha: float = 0.5
  topk: int = 100
  is_clip: float | None = 2.0  # None: the divergence is not weighted by the ratio.
  divergence_weight: float = 1.0
  policy_weight: float = 0.0  # Weight of the policy gradient.
  clip_ratio_low: float = 0.2
  clip_ratio_high: float = 0.28
  clip_ratio_c: float = 3.0  # Bound of the dual clip; infinity: none.
  # Whose top K; of a teacher outside of the pool it is always the teacher's.
  support: Literal['student', 'teacher'] = 'student'

  def __post_init__(self):
    if self.support not in ('student', 'teacher'):
      raise UserError(f'support of sdpo must be one of student, teacher, not {self.support!r}.')
    for name in ('divergence_weight', 'policy_weight'):
      if not 0 <= getattr(self, name) < math.inf:
        raise UserError(f'{name} must be 0 or a positive number, not {getattr(self, name)}.')
    if self.is_clip is not None and not 0 < self.is_clip < math.inf:
      raise UserError(f'is_clip must be positive, or None for no ratio, not {self.is_clip}.')
    row_numbers.check(of_rows([self]))


Loss = Sdpo | JsdPg


def of_rows(losses: list[Loss], topk: int | None = None, dtype: type[np.floating] = np.float32) -> RowNumbers:
  """Return the loss numbers of rows, [B] each, from one loss per row.

  Args:
    losses: one per row.
    topk: the K that the program is compiled for, which limits a regulariser over the teacher's tokens; None: no limit.
    dtype: dtype of all numbers except K.
  """
  largest = topk or max((loss.topk for loss in losses if isinstance(loss, Sdpo)), default=1)

  def of_row(loss: Loss) -> dict[str, float]:
    if isinstance(loss, JsdPg):
      # The mirrored alpha, one clip on both sides, and no dual clip.
      return {
        'alpha': 1.0 - loss.alpha,
        'is_clip': 0.0,
        'topk': 2 * largest,
        'tail': float(loss.tail or loss.support == 'union'),
        'clip_ratio_low': loss.clip_eps,
        'clip_ratio_high': loss.clip_eps,
        'clip_ratio_c': math.inf,
      }
    same = ('alpha', 'topk', 'clip_ratio_low', 'clip_ratio_high', 'clip_ratio_c')
    return {name: getattr(loss, name) for name in same} | {'is_clip': loss.is_clip or 0.0, 'tail': 1.0}

  rows = [of_row(loss) for loss in losses]
  return RowNumbers(
    **{name: np.asarray([row[name] for row in rows], np.int32 if name == 'topk' else dtype) for name in rows[0]}
  )
