"""Runs that are killed, resumed and compared, by their lines and by the log-probs of what they drew."""

from __future__ import annotations

import copy
import functools
import json

import jax
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.learning import batching
from sdpo_jax.models.forward import forward


def changed(config: Config, **changes) -> Config:
  """Return a copy with other values, by names with `__` for dots."""
  config = copy.deepcopy(config)
  for name, value in changes.items():
    *sections, leaf = name.split('__')
    setattr(functools.reduce(getattr, sections, config), leaf, value)
  return config.validate()


class Killed(BaseException):
  """Ends a run as if from outside."""


def lines(workdir) -> list[dict]:
  """Return what a run has measured, without what depends on the clock or on how often it was started."""
  found = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  clock = 'time/', 'throughput/', 'programs/', 'fencing_epoch', 'line_digest'
  return [{name: value for name, value in line.items() if not name.startswith(clock)} for line in found]


read = jax.jit(forward, static_argnums=0)


def log_probs(session, trainable, prompts, rollouts) -> np.ndarray:
  """Log-probs of completions, float64, by one pass over prompt and completion: [N, T]."""
  rows = batching.token_rows(prompts, rollouts.completion_tokens, rollouts.completion_mask, 32)
  hidden, unembedding = read(session.policy, session.base, trainable, rows)
  scores = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64)[: session.policy.vocab_size].T
  scores -= np.logaddexp.reduce(scores, axis=-1, keepdims=True)
  taken = np.take_along_axis(scores, rollouts.completion_tokens[..., None], axis=-1)[..., 0]
  return np.where(rollouts.completion_mask, taken, 0)
