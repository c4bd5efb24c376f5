"""Guards, which reject a new version if a measurement exceeds its limit, and measurements on canary prompts."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import statistics
import threading
from typing import TYPE_CHECKING, Any
import zlib

import numpy as np

from sdpo_jax.config import GuardsConfig
from sdpo_jax.config.fields import is_number
from sdpo_jax.errors import short_repr
from sdpo_jax.serving.call import Call
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.records import BASE

if TYPE_CHECKING:
  from sdpo_jax.serving.worker import Worker

# The most and the fewest recent losses that a new loss is compared with.
RECENT, LEAST_RECENT = 16, 4
# The smallest median in nats: whoever has learned all that was asked has losses near 0, and a new question tenths.
_SMALL_LOSS = 0.1
ON_CANARIES = ('max_kl_to_base', 'min_entropy', 'max_self_similarity')  # Guards measured on canary prompts.
_NGRAM = 3
_TINY = 1e-12  # Lower bound of the probability of a tail, which absorbs rounding errors.
_KEPT = 1024  # The most canaries that are cached.


@dataclasses.dataclass(frozen=True)
class Guards:
  """The limits of the guards; None: the guard is off."""

  max_kl_to_base: float | None = None  # Nats per token.
  min_entropy: float | None = None  # Nats per token.
  max_loss_ratio: float | None = None  # A multiple of the median of recent losses.
  max_self_similarity: float | None = None  # From 0 to 1.
  max_rejected_rise: float | None = None  # Nats, of the log-prob of an answer that a person has rejected.
  max_ability_loss: float | None = None  # Nats per token.

  @classmethod
  def of(cls, defaults: GuardsConfig, *said: Mapping[str, Any] | None) -> Guards:
    """Return the limits that apply to a feedback.

    Args:
      defaults: the limits of the service.
      *said: limits as JSON, of the adapter and then of the request; later ones take precedence. The value None turns a
        guard off; None in place of a mapping changes nothing.

    Raises:
      InvalidRequest: a guard does not exist, or its limit is invalid.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    limits: dict[str, float | None] = {name: getattr(defaults, name) for name in names}
    for each in said:
      for name, limit in (each or {}).items():
        if name not in names:
          raise InvalidRequest(
            f'There is no guard {short_repr(name)}, only {", ".join(names)}.', field=f'guards.{name}'
          )
        if limit is not None and not (is_number(limit) and limit >= 0):
          raise InvalidRequest(
            f'The guard {name} must be a number of at least 0, or null to turn it off, not {short_repr(limit)}.',
            field=f'guards.{name}',
          )
        limits[name] = limit
    return cls(**limits)

  @property
  def on_canaries(self) -> bool:
    """Whether any guard that is measured on canary prompts is on."""
    return any(getattr(self, name) is not None for name in ON_CANARIES)


@dataclasses.dataclass(frozen=True)
class Measured:
  """The measurements that the guards check; None: not measured."""

  finite: bool  # Whether all gradients, and the arrays and scores of the version, are finite.
  loss_ratio: float | None = None
  kl_to_base: float | None = None
  entropy: float | None = None
  self_similarity: float | None = None
  rejected_rise: float | None = None  # The largest of the rejected answers.
  ability_loss: float | None = None  # See `CanaryMeter.ability_loss`.


@dataclasses.dataclass(frozen=True)
class Check:
  """The result of checking one guard."""

  guard: str
  value: float | None  # None: not measured.
  limit: float | None  # None: the guard is off.
  passed: bool
  reason: str | None = None  # A sentence about why it failed; None: it passed.


def check(guards: Guards, measured: Measured) -> list[Check]:
  """Return the result of every guard; a value equal to its limit passes."""
  reason = None if measured.finite else 'A gradient, weight or log-prob is not finite: lower learning_rate.'
  checks = [Check('finite', float(measured.finite), 1.0, measured.finite, reason)]
  rules = (
    ('max_kl_to_base', measured.kl_to_base, 1, 'The KL to the model without an adapter on the canary prompts'),
    ('min_entropy', measured.entropy, -1, 'The entropy on the canary prompts'),
    ('max_loss_ratio', measured.loss_ratio, 1, "The loss, relative to the median of the adapter's recent ones,"),
    ('max_self_similarity', measured.self_similarity, 1, 'The similarity of completions of different canary prompts'),
    ('max_rejected_rise', measured.rejected_rise, 1, 'The rise of the log-prob of the rejected answer'),
    ('max_ability_loss', measured.ability_loss, 1, "The fall of the log-prob of the service's own answers"),
  )
  for name, value, sign, words in rules:
    limit = getattr(guards, name)
    # NaN does not pass.
    passed = limit is None or value is None or sign * value <= sign * limit
    reason = None if passed else f'{words} would be {value:.4g}, and {name} is {limit:.4g}.'
    checks.append(Check(name, value, limit, passed, reason))
  return checks


def kl_over_support(q_log_probs: np.ndarray, p_log_probs: np.ndarray, *, least: float = _TINY) -> np.ndarray:
  """Return KL(p‖q) in nats over K tokens and one tail bucket for the rest of the vocabulary: [T, K] -> [T].

  This is a lower bound of the KL over the whole vocabulary.

  Args:
    q_log_probs: [T, K] log-probs of one model, such as the base; −inf: there are fewer than K tokens.
    p_log_probs: [T, K] log-probs of the other one, such as a new version, for the same tokens; likewise.
    least: the lower bound of the probability of a tail.
  """
  q, p = np.asarray(q_log_probs, np.float64), np.asarray(p_log_probs, np.float64)
  there = np.isfinite(q) & np.isfinite(p)
  q, p = np.where(there, q, 0.0), np.where(there, p, 0.0)
  named = np.where(there, np.exp(p) * (p - q), 0.0).sum(-1)
  p_left, q_left = (np.maximum(1.0 - np.where(there, np.exp(each), 0.0).sum(-1), least) for each in (p, q))
  return np.maximum(named + p_left * (np.log(p_left) - np.log(q_left)), 0.0)


def self_similarity(completions: Sequence[Sequence[int]]) -> float | None:
  """Return the mean share of common n-grams over all pairs of completions, from 0 to 1.

  Args:
    completions: the token ids of completions of different prompts; the result is None for fewer than two.
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
  """Return |loss| divided by the median of recent |losses|, or 0.1 nats if that is less; None: too few are known."""
  if loss is None or len(recent) < LEAST_RECENT:
    return None
  return abs(loss) / max(statistics.median(map(abs, recent)), _SMALL_LOSS)


@dataclasses.dataclass(frozen=True)
class Canary:
  """A canary prompt with the base model's completion and its scores, which never change."""

  prompt: tuple[int, ...]
  completion: tuple[int, ...]
  entropy: np.ndarray  # [T] in nats.
  top_ids: np.ndarray  # [T, K] int32; −1: there are fewer than K tokens.
  top_log_probs: np.ndarray  # [T, K].


@dataclasses.dataclass(frozen=True)
class Canaries:
  """Measurements of a version on canary prompts, with those of the base for comparison."""

  prompts: int  # The number of prompts.
  tokens: int  # The number of tokens in the base's completions.
  kl_to_base: float  # KL(version‖base), the mean over the tokens, in nats.
  entropy: float  # The mean over the tokens, in nats.
  base_entropy: float
  self_similarity: float | None  # None: not measured.
  base_self_similarity: float | None


class CanaryMeter:
  """Measures versions on canary prompts; caches completions and scores of the base. Any thread may call."""

  def __init__(self, worker: Worker, *, tokens: int, topk: int):
    """Make a meter with an empty cache.

    Args:
      worker: the worker, which samples and scores.
      tokens: the most tokens of a canary's completion.
      topk: K, the number of tokens per position over which the KL is computed.
    """
    self._worker, self._tokens, self._topk = worker, tokens, topk
    self._lock = threading.Lock()
    self._known: collections.OrderedDict[tuple[int, ...], Canary] = collections.OrderedDict()

  def of_base(self, prompts: Sequence[Sequence[int]], call: Call) -> list[Canary]:
    """Return the canaries of prompts, in order; after a restart they are the same.

    Args:
      prompts: token ids.
      call: the request that asks.
    """
    keys = [tuple(prompt) for prompt in prompts]
    with self._lock:
      known = {key: self._known[key] for key in keys if key in self._known}
      for key in known:
        self._known.move_to_end(key)
    missing = [key for key in dict.fromkeys(keys) if key not in known]
    if missing:
      completions = self._draw(BASE, missing, call)
      rows = list(zip(missing, completions, strict=True))
      said = self._worker.score(BASE, rows, topk=self._topk, **call.work).result()
      for (key, completion), each in zip(rows, said, strict=True):
        known[key] = Canary(key, tuple(completion), each.entropy, each.top_ids, each.top_log_probs)
      with self._lock:
        self._known.update({key: known[key] for key in missing})
        while len(self._known) > _KEPT:
          self._known.popitem(last=False)
    return [known[key] for key in keys]

  def measure(self, version: str, prompts: Sequence[Sequence[int]], *, call: Call, similarity: bool = True) -> Canaries:
    """Measure a version on one or more canary prompts.

    Args:
      version: the name of the version in the engine.
      prompts: token ids.
      call: the request that asks.
      similarity: whether to sample completions from the version, to measure their similarity.
    """
    canaries = self.of_base(prompts, call)
    rows = [(canary.prompt, canary.completion) for canary in canaries]
    scoring = self._worker.score(version, rows, topk=1, ids=[c.top_ids for c in canaries], **call.work)
    drawn = self._draw(version, prompts, call) if similarity and len(canaries) > 1 else None
    said = scoring.result()
    divergence = [
      kl_over_support(np.where(canary.top_ids < 0, -np.inf, canary.top_log_probs), each.of_ids)
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
    )

  def ability_loss(self, version: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]], call: Call) -> float:
    """Return by how much the mean log-prob of given answers is below that of the base, in nats per token.

    Args:
      version: the name of the version in the engine.
      rows: one or more prompts, each with its answer, as token ids.
      call: the request.
    """
    scoring = [self._worker.score(name, rows, topk=0, **call.work) for name in (BASE, version)]
    base, own = (np.concatenate([row.log_probs for row in each.result()]).astype(np.float64) for each in scoring)
    return float((base - own).mean())

  def _draw(self, version: str, prompts: Sequence[Sequence[int]], call: Call) -> list[list[int]]:
    """Sample one completion of each prompt."""
    handles = [
      self._worker.sample(
        version, prompt, n=1, seed=_seed(prompt), step=0, max_tokens=self._tokens, temperature=1.0, **call.work
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
  """Return a seed that depends on the prompt; with a shared seed, completions of different prompts would be similar."""
  return zlib.crc32(np.asarray(prompt, np.int32).tobytes())
