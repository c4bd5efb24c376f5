"""Rollouts that say given texts, and the words that alarms look for in them."""

from __future__ import annotations

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.types import Example, Rollouts

WORDS = Config().alarms.epistemic_words


def rollouts(texts: list[str], group: list[int], lengths: list[int] | None = None) -> Rollouts:
  rows = len(texts)
  lengths = lengths or [3] * rows
  width = max(lengths)
  return Rollouts(
    group=np.array(group),
    prompt_tokens=np.zeros((rows, 1), np.int32),
    prompt_mask=np.ones((rows, 1), bool),
    completion_tokens=np.zeros((rows, width), np.int32),
    completion_mask=np.arange(width)[None] < np.array(lengths)[:, None],
    sampling_log_probs=np.zeros((rows, width)),
    model_log_probs=np.zeros((rows, width)),
    entropy=np.full((rows, width), 0.5),
    finish_reason=(['stop', 'length'] * rows)[:rows],
    text=texts,
  )


def example(name: str, environment: str) -> Example:
  return Example(name, [{'role': 'user', 'content': name}], environment, 'yes', 'source_' + environment)
