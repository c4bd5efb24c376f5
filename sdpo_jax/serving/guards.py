"""Guards, which reject a bad new version by limits on measurements, and the canary prompts for these measurements."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
import statistics
import threading
from typing import TYPE_CHECKING, Any
import zlib

import numpy as np

from sdpo_jax.config import GuardsConfig
from sdpo_jax.errors import short_repr
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import BASE

if TYPE_CHECKING:
  from sdpo_jax.serving.worker import Worker

# How many recent losses a new loss is compared with, at most and at least.
RECENT, LEAST_RECENT = 16, 4
# Nats: the least median, since ratios of losses near 0 are meaningless.
_SMALL_LOSS = 1e-3
ON_CANARIES = ('max_kl_to_base', 'min_entropy', 'max_self_similarity')  # Guards that need canary prompts.
_NGRAM = 3
_TINY = 1e-12  # Lower bound of a tail's probability, to absorb rounding of sums.
_KEPT = 1024  # The most canaries in the cache.


@dataclasses.dataclass(frozen=True)
class Guards:
  """The limits of the guards; None: the guard is off."""

  max_kl_to_base: float | None = None  # Nats per token.
  min_entropy: float | None = None  # Nats per token.
  max_loss_ratio: float | None = None
  max_self_similarity: float | None = None  # From 0 to 1.

  @classmethod
  def of(cls, defaults: GuardsConfig, *said: Mapping[str, Any] | None) -> Guards:
    """Return the limits in force.

    Args:
      defaults: the service's limits.
      *said: limits as JSON, of the adapter and then of the request; later ones take precedence. None as a value turns a
        guard off; None in place of a mapping changes nothing.

    Raises:
      InvalidRequest: a guard does not exist, or a limit is invalid.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    limits: dict[str, float | None] = {name: getattr(defaults, name) for name in names}
    for each in said:
      for name, limit in (each or {}).items():
        if name not in names:
          raise InvalidRequest(
            f'There is no guard {short_repr(name)}; there are {", ".join(names)}.', field=f'guards.{name}'
          )
        number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (number and 0 <= limit < math.inf):
          raise InvalidRequest(
            f'The guard {name} must be 0 or a positive number, or null to turn it off, not {short_repr(limit)}.',
            field=f'guards.{name}',
          )
        limits[name] = limit
    return cls(**limits)

  @property
  def on_canaries(self) -> bool:
    """Whether a guard that needs canary prompts is on."""
    return any(getattr(self, name) is not None for name in ON_CANARIES)


@dataclasses.dataclass(frozen=True)
class Measured:
  """The measurements that the guards check; None: not measured."""

  finite: bool  # Whether all gradients, and the version's arrays and scores, were finite.
  loss_ratio: float | None = None
  kl_to_base: float | None = None
  entropy: float | None = None
  self_similarity: float | None = None


@dataclasses.dataclass(frozen=True)
class Check:
  """The result of one guard."""

  guard: str
  value: float | None  # None: there was nothing to measure.
  limit: float | None  # None: it is off.
  passed: bool
  reason: str | None = None  # Why not, in one sentence.


def check(guards: Guards, measured: Measured) -> list[Check]:
  """Return the result of every guard; a value equal to its limit passes."""
  checks = [
    Check(
      'finite',
      float(measured.finite),
      1.0,
      measured.finite,
      None
      if measured.finite
      else 'A gradient, or what the new version is or says, is not finite: lower learning_rate.',
    )
  ]
  rules = (
    ('max_kl_to_base', measured.kl_to_base, 1, 'Divergence from the model without an adapter on the canary prompts'),
    ('min_entropy', measured.entropy, -1, 'Entropy on the canary prompts'),
    ('max_loss_ratio', measured.loss_ratio, 1, "Loss, as a multiple of the median of the adapter's recent ones,"),
    ('max_self_similarity', measured.self_similarity, 1, 'Overlap of completions of different canary prompts'),
  )
  for name, value, sign, words in rules:
    limit = getattr(guards, name)
    # NaN fails.
    passed = limit is None or value is None or sign * value <= sign * limit
    reason = None if passed else f'{words} would be {value:.4g}, and {name} is {limit:.4g}.'
    checks.append(Check(name, value, limit, passed, reason))
  return checks


def kl_to_base(base_log_probs: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
  """Return KL(new‖base) in nats, [T, K] twice -> [T], over K tokens and a tail bucket for the rest of the vocabulary.

  It is a lower bound of the divergence over the whole vocabulary.

  Args:
    base_log_probs: of the base; −inf: there are no more tokens.
    log_probs: of the new version, for the same tokens.
  """
  q, p = np.asarray(base_log_probs, np.float64), np.asarray(log_probs, np.float64)
  there = np.isfinite(q) & np.isfinite(p)
  q, p = np.where(there, q, 0.0), np.where(there, p, 0.0)
  named = np.where(there, np.exp(p) * (p - q), 0.0).sum(-1)
  p_left, q_left = (np.maximum(1.0 - np.where(there, np.exp(each), 0.0).sum(-1), _TINY) for each in (p, q))
  return np.maximum(named + p_left * (np.log(p_left) - np.log(q_left)), 0.0)


def self_similarity(completions: Sequence[Sequence[int]]) -> float | None:
  """Return how similar completions are, from 0 to 1: the mean share of common n-grams over all pairs.

  Args:
    completions: token ids of each, for different prompts; fewer than two give None.
  """
  if len(completions) < 2:
    return None
  grams = [_grams(tokens) for tokens in completions]
  return statistics.fmean(
    2 * (one & other).total() / (one.total() + other.total()) for one, other in itertools.combinations(grams, 2)
  )


def _grams(tokens: Sequence[int]) -> collections.Counter[tuple[int, ...]]:
  length = max(1, min(_NGRAM, len(tokens)))
  return collections.Counter(tuple(tokens[at : at + length]) for at in range(max(1, len(tokens) - length + 1)))


def loss_ratio(loss: float | None, recent: Sequence[float]) -> float | None:
  """Return |loss| divided by the median of recent |losses|; None: there are too few of these, or no loss."""
  if loss is None or len(recent) < LEAST_RECENT:
    return None
  return abs(loss) / max(statistics.median(map(abs, recent)), _SMALL_LOSS)


@dataclasses.dataclass(frozen=True)
class Canary:
  """A prompt with the base model's completion and scores of it, which never change."""

  prompt: tuple[int, ...]
  completion: tuple[int, ...]
  entropy: np.ndarray  # [T].
  top_ids: np.ndarray  # [T, K] int32.
  top_log_probs: np.ndarray  # [T, K].


@dataclasses.dataclass(frozen=True)
class Canaries:
  """The measurements of a version on canary prompts, beside those of the base."""

  prompts: int
  tokens: int
  kl_to_base: float
  entropy: float
  base_entropy: float
  self_similarity: float | None
  base_self_similarity: float | None
  # The completions of the base and of the version, one per prompt.
  base_completions: list[list[int]]
  completions: list[list[int]] | None  # None: self-similarity was not measured.


class CanaryMeter:
  """A meter of versions on canary prompts, which caches the base's completions and scores. Any thread may call."""

  def __init__(self, worker: Worker, *, tokens: int, topk: int):
    """Make a meter with an empty cache.

    Args:
      worker: samples and scores.
      tokens: length of a canary's completion.
      topk: K, the number of tokens over which divergences are computed.
    """
    self._worker, self._tokens, self._topk = worker, tokens, topk
    self._lock = threading.Lock()
    self._known: collections.OrderedDict[tuple[int, ...], Canary] = collections.OrderedDict()

  def of_base(self, prompts: Sequence[Sequence[int]], deadline: float | None = None) -> list[Canary]:
    """Return the canaries of prompts.

    They are the same after every start, since a seed depends on its prompt alone.
    """
    keys = [tuple(prompt) for prompt in prompts]
    with self._lock:
      known = {key: self._known[key] for key in keys if key in self._known}
      for key in known:
        self._known.move_to_end(key)
    missing = [key for key in dict.fromkeys(keys) if key not in known]
    if missing:
      completions = self._draw(BASE, missing, deadline)
      rows = list(zip(missing, completions, strict=True))
      said = self._worker.score(BASE, rows, topk=self._topk, deadline=deadline).result()
      for (key, completion), each in zip(rows, said, strict=True):
        known[key] = Canary(key, tuple(completion), each.entropy, each.top_ids, each.top_log_probs)
      with self._lock:
        self._known.update({key: known[key] for key in missing})
        while len(self._known) > _KEPT:
          self._known.popitem(last=False)
    return [known[key] for key in keys]

  def measure(
    self, version: str, prompts: Sequence[Sequence[int]], *, similarity: bool = True, deadline: float | None = None
  ) -> Canaries:
    """Return the measurements of a version on canary prompts, at least one.

    Args:
      version: its name in the engine.
      prompts: token ids.
      similarity: whether to draw completions from the version, to compare them with each other.
      deadline: on the monotonic clock.
    """
    canaries = self.of_base(prompts, deadline)
    rows = [(canary.prompt, canary.completion) for canary in canaries]
    scoring = self._worker.score(version, rows, topk=1, ids=[c.top_ids for c in canaries], deadline=deadline)
    drawn = self._draw(version, prompts, deadline) if similarity and len(canaries) > 1 else None
    said = scoring.result()
    divergence = [
      kl_to_base(np.where(canary.top_ids < 0, -np.inf, canary.top_log_probs), each.of_ids)
      for canary, each in zip(canaries, said, strict=True)
    ]
    answered = [list(canary.completion) for canary in canaries]
    return Canaries(
      prompts=len(canaries),
      tokens=sum(map(len, answered)),
      kl_to_base=float(np.concatenate(divergence).mean()),
      entropy=float(np.concatenate([each.entropy for each in said]).mean(dtype=np.float64)),
      base_entropy=float(np.concatenate([canary.entropy for canary in canaries]).mean(dtype=np.float64)),
      self_similarity=None if drawn is None else self_similarity(drawn),
      base_self_similarity=self_similarity(answered),
      base_completions=answered,
      completions=drawn,
    )

  def _draw(self, version: str, prompts: Sequence[Sequence[int]], deadline: float | None) -> list[list[int]]:
    """Return one completion of each prompt."""
    handles = [
      self._worker.sample(
        version, prompt, n=1, seed=_seed(prompt), step=0, max_tokens=self._tokens, temperature=1.0, deadline=deadline
      )
      for prompt in prompts
    ]
    try:
      return [handle.result()[0].tokens.tolist() for handle in handles]
    except BaseException:
      for handle in handles:
        self._worker.cancel(handle)
      raise


def _seed(prompt: Sequence[int]) -> int:
  """Return the seed for sampling from a prompt: with a shared seed, prompts would get similar completions."""
  return zlib.crc32(np.asarray(prompt, np.int32).tobytes())
