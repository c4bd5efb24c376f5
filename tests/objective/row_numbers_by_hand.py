"""Numbers of three rows, and the loss with them row by row."""

import math

import numpy as np

from sdpo_jax.objective.loss import ObjectiveConfig
from sdpo_jax.types import RowNumbers
from tests.objective.numpy_loss import B, numpy_loss

# Of three rows: both ends and the middle of alpha, no ratio and two clips of it, no dual clip and two of these.
SHARED = dict(
  alpha=[0.0, 1.0, 0.5],
  is_clip=[0.0, 0.8, 2.0],
  temperature=[0.7, 1.0, 1.6],
  clip_ratio_low=[0.1, 0.2, 0.3],
  clip_ratio_high=[0.1, 0.28, 0.0],
  clip_ratio_c=[math.inf, 1.5, 3.0],
)
KINDS = {
  'topk': (dict(distillation_topk=6, chunk_size=4, vocab_block=17), dict(topk=[6, 1, 3])),
  'full': (dict(distillation_topk=None, chunk_size=7, vocab_block=9), {}),
}


def of_rows(values, dtype):
  return RowNumbers(**{name: np.asarray(v, np.int32 if name == 'topk' else dtype) for name, v in values.items()})


def by_hand(kind, x, values):
  """Return the loss [] and divergences [B, T], each row with its own settings."""
  total, divergence = 0.0, 0.0
  for row in range(B):
    own = {name: value[row] for name, value in values.items()}
    own['is_clip'] = own['is_clip'] or None
    if 'topk' in own:
      own['distillation_topk'] = own.pop('topk')
    mask = np.where(np.arange(B)[:, None] == row, x['mask'], 0)
    part = numpy_loss(x | dict(mask=mask), ObjectiveConfig(**KINDS[kind][0] | own))
    total, divergence = total + part[0], divergence + part[1]
  return total, divergence
