"""Questions and completions of small groups, for graders beside the sampler."""

import numpy as np

from sdpo_jax.rollout.results import Completion
from sdpo_jax.types import Example

G, N = 3, 4


def questions(*environments: str) -> list[Example]:
  return [
    Example(f'q{i}', [{'role': 'user', 'content': f'Q{i}?'}], name, None, 'source')
    for i, name in enumerate(environments)
  ]


def completion(sample: int, stopped: bool = True) -> Completion:
  none = np.zeros(0, np.float32)
  return Completion(sample, none.astype(np.int32), none, none, none, stopped=stopped, text=f'answer {sample}')
