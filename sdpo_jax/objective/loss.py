"""The one loss: distillation, policy gradient and entropy bonus, as a sum over tokens with coefficients as data."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.config import TOPK_METHODS, Config
from sdpo_jax.divergence_settings import check_divergence, known_number
from sdpo_jax.objective import chunked, divergences, importance, policy_gradient, vocabulary
from sdpo_jax.objective.sharded import Layout, VocabShard, over_devices
from sdpo_jax.objective.top_k import top_k
from sdpo_jax.types import TeacherSignal

Aux = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """What of the objective is fixed when it is compiled. Names as in `sdpo_jax.config`.

  The numbers (alpha between 0 and 1, is_clip, temperature, clip ratios) may also be traced scalars.

  Raises:
    ValueError: a number out of its range, or distillation of the sampled token with alpha other than 1.
  """

  full_logit_distillation: bool = True
  alpha: float = 0.5
  distillation_topk: int | None = 100
  distillation_add_tail: bool = True
  is_clip: float | None = 2.0
  temperature: float = 1.0
  clip_ratio_low: float = 0.2
  clip_ratio_high: float = 0.28
  clip_ratio_c: float = 3.0
  topk_method: str = 'exact'  # Or 'approx': `top_k.top_k`.
  chunk_size: int = 1024  # Tokens of a device whose logits exist at one time.
  vocab_block: int | None = None  # Vocabulary entries handled at one time within a chunk; None: by the platform.

  def __post_init__(self):
    check_divergence(self.alpha, self.distillation_topk, self.full_logit_distillation)
    if self.topk_method not in TOPK_METHODS:
      raise ValueError(f'topk_method must be one of {", ".join(TOPK_METHODS)}, not {self.topk_method!r}.')
    for name in ('is_clip', 'temperature', 'chunk_size', 'vocab_block'):
      value = known_number(getattr(self, name))
      if value is not None and value <= 0:
        raise ValueError(f'{name} must be positive, not {getattr(self, name)}.')

  @classmethod
  def from_config(cls, config: Config) -> ObjectiveConfig:
    """The fixed part of a run's settings."""
    distillation, loss = config.actor.self_distillation, config.actor.policy_loss
    return cls(
      full_logit_distillation=distillation.full_logit_distillation,
      alpha=float(distillation.alpha),
      distillation_topk=distillation.distillation_topk,
      distillation_add_tail=distillation.distillation_add_tail,
      is_clip=distillation.is_clip,
      temperature=float(config.rollout.temperature),
      clip_ratio_low=loss.clip_ratio_low,
      clip_ratio_high=loss.clip_ratio_high,
      clip_ratio_c=loss.clip_ratio_c,
      topk_method=distillation.topk_method,
      chunk_size=config.actor.logits_chunk_size,
    )


def objective(
  student_hidden: jax.Array,
  student_unembedding: jax.Array,
  teacher: TeacherSignal | None,
  targets: jax.Array,
  mask: jax.Array,
  distill_coef: jax.Array | None,
  policy_coef: jax.Array | None = None,
  entropy_coef: jax.Array | None = None,
  old_log_probs: jax.Array | None = None,
  advantages: jax.Array | None = None,
  config: ObjectiveConfig = ObjectiveConfig(),
  support: jax.Array | None = None,
  *,
  vocab_size: int | None = None,
  layout: Layout | None = None,
) -> tuple[jax.Array, Aux]:
  """Σ distill_coef·ratio·D + Σ policy_coef·ℓ_ppo − Σ entropy_coef·H over the tokens whose mask is not 0.

  D is the divergence of teacher and student: over the student's top K with a bucket for the rest or renormalised,
  over the whole vocabulary (distillation_topk None), over an external teacher's tokens, or the sampled token's
  stopgrad(s − t)·s. ratio = min(exp(log π − log π_old), is_clip), without gradient, where π_old is
  π without old log-probs; 1 with is_clip None. All distributions are of the logits divided by the temperature; the trust region's logits are mixed
  before that, in at least float32. Source: core_algos.py:1085-1188, dp_actor.py:51-64, 341-386, 523-560; paper §2-3.

  Logits exist for `chunk_size` tokens at a time, never [B, T, V], and the gradient is computed in the forward pass,
  chunk by chunk. Where the unembedding is not trained, and in blocks smaller than the vocabulary, not even [C, V]
  exists: the rows of the unembedding are averaged with the probabilities while the normaliser grows. On a mesh with
  the vocabulary split over S devices, a chunk has `chunk_size` tokens of each, and each device computes its part of
  the vocabulary for all of them. Equal entries at the boundary of the top K are taken by their index. The gradient flows to the student's hidden states and unembedding, whichever of them is being differentiated
  (an unembedding under `stop_gradient` saves its matrix product and its memory), never to the teacher or to the
  auxiliary results. Reverse mode only.

  Finite where the reference is not: a −inf logit counts as a log-probability of the smallest normal number
  (`divergences.log_floor`), and whatever stands at masked tokens, NaN included, has no effect.

  Args:
    student_hidden: [B, T, D] final hidden states that predict the targets.
    student_unembedding: [R, D], logits = hidden @ unembedding.T.
    teacher: own or in-mesh (hidden states and unembedding, with mix_* for the trust region) or external (token_ids
      [B, T, K], negative = none, and log_probs); None leaves the divergence out. With an external teacher and the
      sampled token, a target that is not among its token_ids has no divergence.
    targets: [B, T] int32, the completion.
    mask: [B, T], 0 on tokens that are not to be computed at all.
    distill_coef: [B, T] weight of the divergence; None with teacher None.
    policy_coef: [B, T] weight of the policy-gradient loss; None: none.
    entropy_coef: [B, T] weight of the entropy bonus; None: none.
    old_log_probs: [B, T] of the policy before the update; None: the current ones, without gradient.
    advantages: [B, T]; required with policy_coef.
    config: the fixed part.
    support: [B, T, K] int32, token ids to use in place of the student's top K.
    vocab_size: V, rows of all unembeddings that are tokens, the first ones; the others count for nothing and receive
      no gradient. None: all.
    layout: where the arguments lie on a mesh, then global arrays; None: one device.

  Returns:
    the loss (scalar, at least float32) and a dict without gradient: scalars `distillation_loss`, `policy_loss`,
    `entropy_bonus` (their sum over the tokens, with coefficients) and per token [B, T], 0 where masked:
    `log_prob` and `entropy` of the student (nats, at the temperature); with a teacher `divergence` (before the
    ratio), `ratio`, `ratio_clipped`, `student_tail` and `teacher_tail` (probability outside the support),
    `teacher_coverage` (inside it), `teacher_top1_in_support`, `teacher_entropy`, `teacher_log_prob` of the target
    (in-mesh teachers); with policy_coef `ppo_ratio`, `ppo_clipped`, `ppo_clipped_lower`, `ppo_kl`.

  Raises:
    ValueError: a missing or contradictory argument.
  """
  operands = _operands(
    teacher, targets, mask, distill_coef, policy_coef, entropy_coef, old_log_probs, advantages, support
  )
  rows = student_unembedding.shape[0]
  if vocab_size is not None and not 0 < vocab_size <= rows:
    raise ValueError(f'vocab_size={vocab_size} is not among the {rows} rows of the unembedding.')
  shard = VocabShard(vocab_size or rows)
  if layout is not None:
    shard, student_unembedding = layout.shard(vocab_size or rows), layout.padded(student_unembedding)
    pad = lambda value: layout.padded(value) if value.ndim == 2 else value
    operands['matrices'] = jax.tree.map(pad, operands['matrices'])
  static, numbers = _split(config, shard, layout)
  loss, aux = _objective(
    static, student_hidden.reshape(-1, student_hidden.shape[-1]), student_unembedding, (numbers, operands)
  )
  return loss, _unflatten(aux, targets.shape)


def objective_from_logits(
  student_logits: jax.Array,
  teacher_logits: jax.Array | None,
  targets: jax.Array,
  mask: jax.Array,
  distill_coef: jax.Array | None,
  policy_coef: jax.Array | None = None,
  entropy_coef: jax.Array | None = None,
  old_log_probs: jax.Array | None = None,
  advantages: jax.Array | None = None,
  config: ObjectiveConfig = ObjectiveConfig(),
  support: jax.Array | None = None,
  mix_logits: jax.Array | None = None,
  mix_rate: float | jax.Array | None = None,
) -> tuple[jax.Array, Aux]:
  """`objective` from logits [B, T, V] at once, differentiated by JAX: for small vocabularies and as its check.

  `mix_logits` [B, T, V] and `mix_rate` make the trust region's teacher: (1 − rate)·teacher + rate·mix.
  """
  teacher = None
  if teacher_logits is not None:
    teacher = TeacherSignal(hidden=teacher_logits, unembedding=teacher_logits)  # Presence is all that is read.
  operands = _operands(
    teacher, targets, mask, distill_coef, policy_coef, entropy_coef, old_log_probs, advantages, support
  )
  data = operands['data']
  static, numbers = _split(config, VocabShard(student_logits.shape[-1]), None)
  active = data['mask'] != 0
  prepare = lambda logits: jnp.where(active[:, None], logits.reshape(-1, logits.shape[-1]), 0).astype(
    vocabulary.logits_dtype(logits)
  )
  raw = prepare(student_logits)
  numbers = {name: jnp.asarray(value, raw.dtype) for name, value in numbers.items()}
  alpha = numbers['alpha'] if static.endpoint is None else static.endpoint
  logits = raw / numbers['temperature']
  log_probs = jax.nn.log_softmax(logits)
  small = {
    'log_prob': divergences.floored(jnp.take_along_axis(log_probs, data['targets'][:, None], axis=1)[:, 0]),
    'entropy': -(jnp.exp(log_probs) * divergences.floored(log_probs)).sum(-1),
  }
  given: Aux = {}
  if teacher is not None:
    other = lax.stop_gradient(prepare(teacher_logits))
    if mix_logits is not None:
      other = _lerp(other, lax.stop_gradient(prepare(mix_logits)), jnp.asarray(mix_rate, other.dtype))
    other = jax.nn.log_softmax(other / numbers['temperature'])
    given['teacher_entropy'] = -(jnp.exp(other) * divergences.floored(other)).sum(-1)
    given['teacher_log_prob'] = divergences.floored(jnp.take_along_axis(other, data['targets'][:, None], axis=1)[:, 0])
    if static.kind == 'full':
      small['divergence'] = divergences.divergence(log_probs, other, alpha)
      given |= _whole_support(given['teacher_entropy'])
    elif static.kind == 'topk':
      ids = data.get('support')
      if ids is None:
        ids = lax.top_k(lax.stop_gradient(logits), min(static.topk, logits.shape[-1]))[1]
      small['support'] = jnp.take_along_axis(log_probs, ids, axis=1)
      given['teacher_support'] = jnp.take_along_axis(other, ids, axis=1)
      given['teacher_top1_in_support'] = (given['teacher_support'].max(-1) >= other.max(-1)).astype(raw.dtype)
  loss, aux = _token_terms(static, numbers, small, given, data, active)
  return loss, _unflatten(jax.tree.map(lax.stop_gradient, aux), targets.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Static:
  """The hashable part of the configuration."""

  kind: str  # 'full', 'topk', 'sampled'.
  endpoint: float | None  # 0.0 or 1.0 where alpha is exactly that.
  topk: int | None
  add_tail: bool
  ratio: bool
  topk_method: str
  chunk_size: int
  vocab_block: int
  shard: VocabShard
  layout: Layout | None


def _split(config: ObjectiveConfig, shard: VocabShard, layout: Layout | None) -> tuple[_Static, dict[str, Any]]:
  if not config.full_logit_distillation:
    kind = 'sampled'
  else:
    kind = 'full' if config.distillation_topk is None else 'topk'
  static = _Static(
    kind,
    divergences.exact_endpoint(config.alpha),
    config.distillation_topk,
    config.distillation_add_tail,
    config.is_clip is not None,
    config.topk_method,
    config.chunk_size,
    config.vocab_block or vocabulary.default_block(None if layout is None else layout.platform),
    shard,
    layout,
  )
  numbers = {
    'alpha': config.alpha,
    'is_clip': math.inf if config.is_clip is None else config.is_clip,
    'temperature': config.temperature,
    'clip_ratio_low': config.clip_ratio_low,
    'clip_ratio_high': config.clip_ratio_high,
    'clip_ratio_c': config.clip_ratio_c,
  }
  return static, numbers


def _operands(teacher, targets, mask, distill_coef, policy_coef, entropy_coef, old_log_probs, advantages, support):
  """Arguments by name, tokens flattened, absent ones left out."""
  if teacher is not None:
    external = teacher.token_ids is not None
    if external == (teacher.hidden is not None):
      raise ValueError('A teacher signal is either hidden states and unembedding, or token_ids and log_probs.')
    if external != (teacher.log_probs is not None) or external == (teacher.unembedding is not None):
      raise ValueError('A teacher signal is either hidden states and unembedding, or token_ids and log_probs.')
    mix = [value is None for value in (teacher.mix_hidden, teacher.mix_unembedding, teacher.mix_rate)]
    if any(mix) and not all(mix):
      raise ValueError('A trust-region teacher needs mix_hidden, mix_unembedding and mix_rate together.')
    if external and (not all(mix) or support is not None):
      raise ValueError('An external teacher brings its own support: mix_* and support do not go with it.')
    if distill_coef is None:
      raise ValueError('distill_coef is required with a teacher.')
  elif distill_coef is not None and support is not None:
    raise ValueError('support is of no use without a teacher.')
  if policy_coef is not None and advantages is None:
    raise ValueError('advantages are required with policy_coef.')
  data = {
    'targets': targets,
    'mask': mask,
    'distill_coef': distill_coef if teacher is not None else None,
    'policy_coef': policy_coef,
    'entropy_coef': entropy_coef,
    'old_log_probs': old_log_probs,
    'advantages': advantages if policy_coef is not None else None,
    'support': support,
  }
  matrices = {}
  if teacher is not None:
    data |= {
      'teacher_hidden': teacher.hidden,
      'mix_hidden': teacher.mix_hidden,
      'token_ids': teacher.token_ids,
      'teacher_log_probs': teacher.log_probs,
    }
    matrices = {
      'teacher_unembedding': teacher.unembedding,
      'mix_unembedding': teacher.mix_unembedding,
      'mix_rate': teacher.mix_rate,
    }
  axes = targets.ndim
  flat = lambda name, x: lax.stop_gradient(x.reshape(-1, *x.shape[axes:]))
  return {
    'data': {name: flat(name, jnp.asarray(x)) for name, x in data.items() if x is not None},
    'matrices': {name: lax.stop_gradient(jnp.asarray(x)) for name, x in matrices.items() if x is not None},
  }


def _unflatten(aux: Aux, shape: tuple[int, ...]) -> Aux:
  return {name: value.reshape(shape) if value.ndim else value for name, value in aux.items()}


def _lerp(a: jax.Array, b: jax.Array, rate: jax.Array) -> jax.Array:
  """(1 − rate)·a + rate·b, exact at both ends."""
  return jnp.where(rate < 0.5, a + rate * (b - a), b - (1.0 - rate) * (b - a))


# ---------------------------------------------------------------------------------------------------------------------
# One token's terms, from the few numbers that the vocabulary has been reduced to
# ---------------------------------------------------------------------------------------------------------------------


def _on_support(static: _Static, log_probs: jax.Array) -> jax.Array:
  return divergences.with_tail(log_probs) if static.add_tail else divergences.renormalised(log_probs)


def _whole_support(like: jax.Array) -> Aux:
  zeros = jnp.zeros_like(like)
  return {
    'student_tail': zeros,
    'teacher_tail': zeros,
    'teacher_coverage': zeros + 1,
    'teacher_top1_in_support': zeros + 1,
  }


def _token_terms(
  static: _Static, numbers: dict[str, Any], small: Aux, given: Aux, data: Aux, active: jax.Array
) -> tuple[jax.Array, Aux]:
  """Sum of the loss over tokens [C], differentiable by `small`, and what is known of each token.

  Args:
    static: fixed part.
    numbers: scalars.
    small: `log_prob`, `entropy` [C], and `support` [C, K] or `divergence` [C] where the divergence is over one.
    given: what the teacher says: `teacher_support` [C, K], `teacher_log_prob` [C], and metrics to pass on.
    data: per-token arguments.
    active: [C] bool; other tokens have no part in the loss.
  """
  log_prob, entropy = small['log_prob'], small['entropy']
  dtype = log_prob.dtype
  coefficient = lambda name: jnp.where(active, data[name], 0).astype(dtype)
  old = lax.stop_gradient(log_prob)
  if 'old_log_probs' in data:
    old = jnp.where(active, data['old_log_probs'], 0).astype(dtype)
  aux = {'log_prob': log_prob, 'entropy': entropy}
  loss = jnp.zeros((), dtype)
  if 'distill_coef' in data:
    alpha = numbers['alpha'] if static.endpoint is None else static.endpoint
    aux |= {name: value for name, value in given.items() if name != 'teacher_support'}
    if static.kind == 'sampled':
      per_token = lax.stop_gradient(log_prob - given['teacher_log_prob']) * log_prob
      if 'teacher_known' in given:
        per_token = jnp.where(given['teacher_known'] > 0, per_token, 0.0)
      aux |= _whole_support(log_prob)
    elif 'support' in small:
      student, teacher = small['support'], given['teacher_support']
      per_token = divergences.divergence(_on_support(static, student), _on_support(static, teacher), alpha)
      coverage = jnp.exp(teacher).sum(-1)
      aux['student_tail'] = jnp.maximum(1.0 - jnp.exp(student).sum(-1), 0.0)
      aux['teacher_tail'] = jnp.maximum(1.0 - coverage, 0.0)
      aux['teacher_coverage'] = jnp.minimum(coverage, 1.0)
    else:
      per_token = small['divergence']
    ratio = jnp.ones_like(log_prob)
    if static.ratio:
      unclipped = importance.importance_ratio(log_prob, old, None)
      ratio = jnp.minimum(unclipped, numbers['is_clip'])
      aux['ratio_clipped'] = (unclipped > numbers['is_clip']).astype(dtype)
    else:
      aux['ratio_clipped'] = jnp.zeros_like(log_prob)
    aux |= {'divergence': per_token, 'ratio': ratio}
    aux['distillation_loss'] = (coefficient('distill_coef') * ratio * jnp.where(active, per_token, 0)).sum()
    loss += aux['distillation_loss']
  if 'policy_coef' in data:
    per_token, metrics = policy_gradient.dual_clip_ppo(
      log_prob,
      old,
      jnp.where(active, data['advantages'], 0).astype(dtype),
      numbers['clip_ratio_low'],
      numbers['clip_ratio_high'],
      numbers['clip_ratio_c'],
    )
    aux |= {
      'ppo_ratio': metrics['ratio'],
      'ppo_clipped': metrics['clipped'],
      'ppo_clipped_lower': metrics['clipped_lower'],
      'ppo_kl': metrics['approx_kl'],
    }
    aux['policy_loss'] = (coefficient('policy_coef') * per_token).sum()
    loss += aux['policy_loss']
  if 'entropy_coef' in data:
    aux['entropy_bonus'] = (coefficient('entropy_coef') * entropy).sum()
    loss -= aux['entropy_bonus']
  aux = {name: jnp.where(active, value, 0) if value.ndim else value for name, value in aux.items()}
  return loss, aux


# ---------------------------------------------------------------------------------------------------------------------
# From hidden states, in chunks
# ---------------------------------------------------------------------------------------------------------------------


def _teacher_view(static: _Static, numbers, matrices, data, ids, dtype, valid):
  """What the teacher says: (given of own tokens, log-probs [C, R] of the group's tokens where they are wanted).

  `ids` [C, K + 1] are of the group's tokens: the support, where there is one, and the target.
  """
  shard = static.shard
  hidden = shard.gather(jnp.where(valid[:, None], data['teacher_hidden'], 0))
  mix_hidden = shard.gather(jnp.where(valid[:, None], data['mix_hidden'], 0)) if 'mix_hidden' in data else None

  def logits_of(start, size):
    logits = vocabulary.project(hidden, vocabulary.take_entries(matrices['teacher_unembedding'], start, size))
    logits = logits.astype(dtype)
    if mix_hidden is not None:
      mix = vocabulary.project(mix_hidden, vocabulary.take_entries(matrices['mix_unembedding'], start, size))
      logits = _lerp(logits, mix.astype(dtype), matrices['mix_rate'].astype(dtype))
    return logits / numbers['temperature']

  rows = matrices['teacher_unembedding'].shape[0]
  dense = static.kind == 'full'
  view = vocabulary.scan_vocabulary(
    shard, logits_of, len(ids), rows, static.vocab_block, dtype, ids=ids, keep_logits=dense
  )
  log_normaliser, maximum = shard.own(view.statistics.log_normaliser), shard.own(view.statistics.maximum)
  found = shard.own_total(view.gathered)
  given = {
    'teacher_log_prob': divergences.floored(found[:, -1] - log_normaliser),
    'teacher_entropy': shard.own(view.statistics.entropy),
  }
  if ids.shape[1] > 1:
    given['teacher_support'] = found[:, :-1] - log_normaliser[:, None]
    # Up to rounding: compilers may compute the two in different ways.
    threshold = maximum - 1e-5 * (1.0 + jnp.abs(maximum))
    given['teacher_top1_in_support'] = (found[:, :-1].max(-1) >= threshold).astype(dtype)
  if not dense:
    return given, None
  return given | _whole_support(log_normaliser), view.logits - view.statistics.log_normaliser[:, None]


def _external_view(static: _Static, data, dtype, valid):
  """What an external teacher says of own tokens."""
  known = jnp.where(data['token_ids'] < 0, -jnp.inf, data['teacher_log_probs'].astype(dtype))
  known = jnp.where(valid[:, None], known, -math.log(known.shape[1] + 1))  # Anything finite at masked tokens.
  at_target = data['token_ids'] == data['targets'][:, None]
  distribution = divergences.floored(divergences.with_tail(known))
  given = {
    'teacher_support': known,
    'teacher_entropy': -(jnp.exp(distribution) * distribution).sum(-1),
    'teacher_top1_in_support': jnp.ones(known.shape[:1], dtype),
  }
  if static.kind == 'sampled':
    given['teacher_log_prob'] = jnp.where(at_target, divergences.floored(known), 0).sum(-1)
    given['teacher_known'] = at_target.any(-1).astype(dtype)
  return given


def _chunk(static, numbers, matrices, unembedding, wants, accumulator, hidden, data, valid):
  """Loss, per-token results, gradient by the hidden states and the accumulated one by the unembedding of one chunk.

  What a token's terms are made of belongs to the device that owns it; what touches the vocabulary is computed for all
  tokens of the group.
  """
  shard, block = static.shard, static.vocab_block
  rows = unembedding.shape[0]
  dtype = vocabulary.logits_dtype(hidden)
  temperature = numbers['temperature']
  hidden = shard.gather(jnp.where(valid[:, None], hidden, 0))
  tokens = hidden.shape[0]
  logits_of = lambda start, size: (
    vocabulary.project(hidden, vocabulary.take_entries(unembedding, start, size)) / temperature
  )
  external, has_teacher = 'token_ids' in data, 'distill_coef' in data
  dense = has_teacher and not external and static.kind == 'full'
  alpha = numbers['alpha'] if static.endpoint is None else static.endpoint

  # The support, unless it is the student's own top K, and the targets.
  ids = data['targets'][:, None]
  chosen = has_teacher and not external and static.kind == 'topk' and 'support' not in data
  if has_teacher and not chosen and static.kind != 'sampled' and not dense:
    ids = jnp.concatenate([data['token_ids'] if external else data['support'], ids], axis=1)
  keep = dense or (any(wants) and (wants[1] or 'entropy_coef' in data or vocabulary.blocks(rows, block)[0] == 1))
  view = vocabulary.scan_vocabulary(
    shard,
    logits_of,
    tokens,
    rows,
    block,
    dtype,
    ids=shard.gather(jnp.clip(ids, 0, shard.vocab_size - 1)),
    keep_logits=keep,
    topk=min(static.topk, shard.vocab_size) if chosen else None,
    topk_method=static.topk_method,
    averaged=unembedding if wants[0] and not keep else None,
  )
  log_normaliser, entropy = view.statistics.log_normaliser, view.statistics.entropy
  own_normaliser = shard.own(log_normaliser)[:, None]
  found = shard.own_total(view.gathered)
  target_log_prob = found[:, -1] - own_normaliser[:, 0]
  small = {'log_prob': divergences.floored(target_log_prob), 'entropy': shard.own(entropy)}
  if chosen:
    values, places = (shard.candidates(part) for part in view.largest)
    if shard.axis is not None:
      values, order = top_k(values, min(static.topk, shard.vocab_size))
      places = jnp.take_along_axis(places, order, axis=1)
    small['support'] = values - own_normaliser
    ids = jnp.concatenate([places, ids], axis=1)
  elif ids.shape[1] > 1:
    small['support'] = jnp.where(ids[:, :-1] < 0, -jnp.inf, found[:, :-1] - own_normaliser)
  everyones_ids = shard.gather(ids)
  given: Aux = {}
  if has_teacher and external:
    given = _external_view(static, data, dtype, valid)
  elif has_teacher:
    given, teacher = _teacher_view(static, numbers, matrices, data, everyones_ids, dtype, valid)

  def dense_parts(start, size):
    """Student's and teacher's log-probs of a block [C, size]."""
    part = lambda matrix: lax.dynamic_slice_in_dim(matrix, start, size, axis=1)
    return part(view.logits) - log_normaliser[:, None], part(teacher)

  if dense:

    def add(carry, index, start, size, fresh):
      pair = dense_parts(start, size)
      here = divergences.divergence_terms(*pair, alpha), divergences.divergence_slopes(*pair, alpha)
      if fresh is not None:
        here = tuple(jnp.where(fresh[None, :], value, 0) for value in here)
      return tuple(total + value.sum(-1) for total, value in zip(carry, here, strict=True))

    zeros = jnp.zeros((tokens,), dtype)
    divergence, slope_sum = vocabulary.fold_blocks(rows, block, shard.limit(rows), (zeros, zeros), add)
    small['divergence'] = shard.own_total(divergence)
  terms = functools.partial(_token_terms, static, numbers, given=given, data=data, active=valid)
  if not any(wants):
    loss, aux = terms(small)
    return loss, aux, None, accumulator
  (loss, aux), slope = jax.value_and_grad(terms, has_aux=True)(small)

  # By the chain rule through log-softmax: Σ_i slope_i·(1[v = i] − p_v), and −p·(log p + H) for the entropy.
  what = jnp.where(jnp.isneginf(target_log_prob), 0.0, slope['log_prob'])[:, None]
  if 'support' in slope:
    what = jnp.concatenate([slope['support'], what], axis=1)
  what = shard.gather(what)
  ids = everyones_ids - shard.offset(rows)
  factor = what.sum(-1)
  if not keep:
    by_hidden = vocabulary.weighted_entries(unembedding, ids, what) - factor[:, None] * view.mean_entry
    return loss, aux, shard.own_total(by_hidden / temperature), accumulator
  if dense:
    divergence_slope = shard.gather(slope['divergence'])
    factor = factor + divergence_slope * shard.total(slope_sum)
  entropy_slope = shard.gather(slope['entropy']) if 'entropy_coef' in data else None

  def gradients_of(start, size):
    log_probs = lax.dynamic_slice_in_dim(view.logits, start, size, axis=1) - log_normaliser[:, None]
    total = factor[:, None]
    if entropy_slope is not None:
      total = total + entropy_slope[:, None] * (jnp.maximum(log_probs, -1e30) + entropy[:, None])
    gradients = -jnp.exp(log_probs) * total
    if dense:
      slopes = divergences.divergence_slopes(*dense_parts(start, size), alpha)
      gradients = gradients + slopes * divergence_slope[:, None]
    return vocabulary.scatter_add(gradients, ids - start, what) / temperature

  by_hidden, accumulator = vocabulary.pull_back(
    gradients_of, hidden, unembedding, block, shard.limit(rows), wants[0], accumulator
  )
  return loss, aux, None if by_hidden is None else shard.own_total(by_hidden), accumulator


def _run(static: _Static, wants: tuple[bool, bool], hidden, unembedding, operands):
  """Loss, auxiliary results and the wanted gradients by (hidden, unembedding), None where not wanted."""
  run = functools.partial(_run_here, static, wants)
  if static.layout is None:
    loss, aux, gradients = run(hidden, unembedding, operands)
  else:
    alone = dataclasses.replace(static, shard=VocabShard(static.shard.vocab_size), layout=None)
    whole = functools.partial(_run_here, alone, wants)
    loss, aux, gradients = over_devices(static.layout, static.shard, run, whole, hidden, unembedding, operands)
  by_unembedding = None if gradients[1] is None else gradients[1].astype(unembedding.dtype)
  return loss, aux, (gradients[0], by_unembedding)


def _run_here(static: _Static, wants: tuple[bool, bool], hidden, unembedding, operands):
  """`_run` of one device's tokens; the gradient by its part of the unembedding in at least float32."""
  numbers, tree = operands
  data, matrices = tree['data'], tree['matrices']
  dtype = vocabulary.logits_dtype(hidden)
  numbers = {name: jnp.asarray(value, dtype) for name, value in numbers.items()}
  chunk = functools.partial(_chunk, static, numbers, matrices, unembedding, wants)
  accumulator = jnp.zeros(unembedding.shape, dtype) if wants[1] else None
  tokens = min(static.chunk_size, hidden.shape[0])
  sample = jax.tree.map(lambda x: jax.ShapeDtypeStruct((tokens, *x.shape[1:]), x.dtype), (hidden, data))
  valid = jax.ShapeDtypeStruct((tokens,), bool)
  _, aux, _, _ = jax.eval_shape(chunk, accumulator, *sample, valid)
  sums = {name: jnp.zeros((), dtype) for name, value in aux.items() if not value.ndim}
  outputs = {name: jnp.zeros(hidden.shape[:1], dtype) for name, value in aux.items() if value.ndim}
  by_hidden = jnp.zeros(hidden.shape, hidden.dtype) if wants[0] else None

  def body(carry, operands, valid):
    loss, sums, accumulator = carry
    part, aux, by_hidden, accumulator = chunk(accumulator, *operands, valid)
    sums = {name: total + aux[name] for name, total in sums.items()}
    return (loss + part, sums, accumulator), ({name: aux[name] for name in outputs}, by_hidden)

  (loss, sums, accumulator), (outputs, by_hidden) = chunked.over_active_tokens(
    data['mask'],
    static.chunk_size,
    (hidden, data),
    (outputs, by_hidden),
    (jnp.zeros((), dtype), sums, accumulator),
    body,
    static.layout.batch_axes if static.layout is not None else (),
  )
  return loss, sums | outputs, (by_hidden, accumulator)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _objective(static: _Static, hidden, unembedding, operands):
  loss, aux, _ = _run(static, (False, False), hidden, unembedding, operands)
  return loss, aux


def _objective_fwd(static: _Static, hidden, unembedding, operands):
  wants = (hidden.perturbed, unembedding.perturbed)
  operands = jax.tree.map(lambda x: x.value, operands)
  loss, aux, gradients = _run(static, wants, hidden.value, unembedding.value, operands)
  return (loss, aux), gradients


def _objective_bwd(static: _Static, gradients, cotangents):
  cotangent = cotangents[0]
  scale = lambda gradient: None if gradient is None else (cotangent * gradient).astype(gradient.dtype)
  if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
    scale = lambda gradient: None
  return scale(gradients[0]), scale(gradients[1]), None


_objective.defvjp(_objective_fwd, _objective_bwd, symbolic_zeros=True)
