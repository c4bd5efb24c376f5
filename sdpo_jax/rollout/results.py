"""What a sampler hands back: samples under way and finished ones, and counts of what they took."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Draft:
  """A sample under way."""

  sample: int  # Its number: prompt · n + completion.
  tokens: np.ndarray  # [length] int32, drawn so far; no stop id, no whole stop string.


@dataclasses.dataclass(frozen=True)
class Completion:
  """A finished sample."""

  sample: int  # Its number: prompt · n + completion.
  tokens: np.ndarray  # [length] int32; the stop token, where one was drawn, is the last.
  sampling_log_probs: np.ndarray  # [length] float32, under the distribution drawn from.
  model_log_probs: np.ndarray  # [length] float32, under the plain model distribution.
  entropy: np.ndarray  # [length] float32, nats, of the plain model distribution.
  stopped: bool  # By a stop id or stop string, not by its length.
  text: str  # Without special tokens.
  reused: int = 0  # Tokens of the prompt whose keys and values were kept of an earlier one.


@dataclasses.dataclass
class SamplingStats:
  """Counts of what sampling a request took."""

  tokens: int = 0  # Drawn and kept.
  prompts: int = 0  # Prefilled; one that several shards need counts once for each.
  prefilled: int = 0  # Tokens of these that went through the model.
  reused: int = 0  # Tokens of these whose keys and values were kept of earlier prompts.
  dispatches: int = 0  # Calls of the decode loop.
  decode_steps: int = 0  # Of the decode loop; one draws a token in every slot.
  row_steps: int = 0  # Decode steps × slots, slots without a sample included.
  cache_bytes: int = 0  # Largest total of all caches, those of prompts whose samples wait included.
  live_bytes: int = 0  # Largest total of what live samples filled: the least that any cache could do with.
