"""Results of a sampler: unfinished and finished samples, and statistics of the work."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Draft:
  """An unfinished sample, as far as it has been drawn."""

  sample: int  # Its number: prompt · n + completion.
  tokens: np.ndarray  # [length] int32, drawn so far; no stop id, no whole stop string.


@dataclasses.dataclass(frozen=True)
class Completion:
  """A finished sample, with its text and statistics per token."""

  sample: int  # Its number: prompt · n + completion.
  tokens: np.ndarray  # [length] int32; the stop token, where one was drawn, is the last.
  sampling_log_probs: np.ndarray  # [length] float32, under the distribution drawn from.
  model_log_probs: np.ndarray  # [length] float32, under the plain model distribution.
  entropy: np.ndarray  # [length] float32, nats, of the plain model distribution.
  stopped: bool  # Whether a stop id or stop string ended it, and not its length.
  text: str  # Without special tokens.
  reused: int = 0  # Tokens of the prompt whose keys and values were reused from an earlier one.


@dataclasses.dataclass
class SamplingStats:
  """Counts of the work done to sample a request."""

  tokens: int = 0  # Tokens drawn and kept.
  prompts: int = 0  # Prompts prefilled; one that several shards need counts once for each.
  prefilled: int = 0  # Tokens of prompts that went through the model.
  reused: int = 0  # Tokens of prompts whose keys and values were reused from earlier prompts.
  recomputed: int = 0  # Tokens of unfinished samples that went through the model again, under new weights.
  dispatches: int = 0  # Calls of the decode loop.
  decode_steps: int = 0  # Steps of the decode loop, each of which draws a token in every slot.
  row_steps: int = 0  # Decode steps × slots, including slots without a sample.
  live_row_steps: int = 0  # Tokens drawn, including those after a stop string.
  cache_bytes: int = 0  # Largest total of all caches, including those of prompts whose samples wait.
  live_bytes: int = 0  # Largest total filled by live samples: a lower bound for any cache.
