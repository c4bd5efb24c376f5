"""Which other cartridges are placed beside the one that is trained: other random ones for every prompt."""

from __future__ import annotations

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.models.policy import NO_MEMBER


def mixtures(config: Config, step: int, about: np.ndarray) -> np.ndarray | None:
  """Return the distractors [G, K] of each question of a generation batch, random in number and order, if there are any.

  Args:
    config: settings.
    step: number of the generation batch.
    about: [G] int, the document of each question; those of the second one and so on need the first distractor and so
      on, which comes first.
  """
  count = len(config.model.cartridge.distractors)
  if not count:
    return None
  draw, most = np.random.default_rng([config.seed, step]), min(config.model.cartridge.max_distractors, count)
  ranks = draw.random((len(about), count))
  needed = about > 0
  ranks[needed, about[needed] - 1] = -1.0
  orders = np.argsort(ranks, axis=1)[:, :most].astype(np.int32)
  numbers = np.maximum(draw.integers(most + 1, size=len(about)), needed)
  return np.where(np.arange(most) < numbers[:, None], orders, np.int32(NO_MEMBER))
