"""Which other cartridges are placed beside the one that is trained: other random ones for every prompt."""

from __future__ import annotations

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.models.policy import NO_MEMBER


def mixtures(config: Config, step: int, questions: int) -> np.ndarray | None:
  """Return the distractors [G, K] of each question of a generation batch, random in number and order, if there are any.

  Args:
    config: settings.
    step: number of the generation batch.
    questions: G.
  """
  count = len(config.model.cartridge.distractors)
  if not count:
    return None
  draw, most = np.random.default_rng([config.seed, step]), min(config.model.cartridge.max_distractors, count)
  orders = draw.permuted(np.tile(np.arange(count, dtype=np.int32), (questions, 1)), axis=1)[:, :most]
  return np.where(np.arange(most) < draw.integers(most + 1, size=(questions, 1)), orders, NO_MEMBER)
