"""Detection of equal questions in a batch."""

from __future__ import annotations

from collections.abc import Sequence
import json

import numpy as np

from sdpo_jax.types import Example


def first_of_same(examples: Sequence[Example]) -> np.ndarray:
  """Return, for each example, the index of the first with equal messages, environment and ground truth, [G] int32."""
  first: dict[str, int] = {}
  for index, example in enumerate(examples):
    first.setdefault(_key(example), index)
  return np.array([first[_key(example)] for example in examples], np.int32)


def _key(example: Example) -> str:
  return json.dumps([example.messages, example.environment, example.ground_truth], sort_keys=True, default=repr)
