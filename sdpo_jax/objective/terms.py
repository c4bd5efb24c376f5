"""The terms of the loss per token, computed from a few numbers of each token's distribution.

C tokens, K entries of a support. Only `loss_terms` sums over tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import chex
import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective import divergences
from sdpo_jax.objective.importance import importance_ratio
from sdpo_jax.objective.policy_gradient import dual_clip_ppo, kl_penalty
from sdpo_jax.types import RowNumbers

Metrics = dict[str, jax.Array]

# Metric → per-token quantity of the objective, averaged over the distilled tokens.
TEACHER_METRICS = {
  'teacher/divergence': 'divergence',
  'teacher/entropy': 'teacher_entropy',
  'teacher/tail_mass': 'teacher_tail',
  'teacher/topk_coverage': 'teacher_coverage',
  'teacher/top1_in_support': 'teacher_top1_in_support',
  'teacher/student_tail_mass': 'student_tail',
  'train/ratio': 'ratio',
  'train/ratio_clipped_fraction': 'ratio_clipped',
}
# The same over all completion tokens: for the policy gradient those with an advantage, for the KL penalty all.
POLICY_METRICS = {
  'train/ppo_ratio': 'ppo_ratio',
  'train/ppo_clipped_fraction': 'ppo_clipped',
  'train/ppo_clipped_lower_fraction': 'ppo_clipped_lower',
  'train/ppo_kl': 'ppo_kl',
  'train/kl_loss': 'initial_kl',  # Without its coefficient.
}


@dataclasses.dataclass(frozen=True)
class TermSettings:
  """Settings of the terms that are fixed at compile time."""

  kind: Literal['full', 'topk', 'sampled']  # Domain of the divergence: the vocabulary, K tokens, the sampled one.
  known_alpha: float | None  # Alpha if it is known at compile time; None: it is `TermScalars.alpha`.
  add_tail: bool | None  # A tail bucket holds the probability outside the support; False: renormalised; None: neither.
  use_ratio: bool  # Whether the divergence is weighted by the importance ratio.
  kl_kind: str = 'k3'  # Estimate of the KL divergence from the initial policy, see `kl_penalty`.


@flax.struct.dataclass
class TermScalars:
  """Scalars of the terms, which may be traced: arrays [] or Python numbers, or [C] where tokens have their own."""

  alpha: jax.Array | float
  is_clip: jax.Array | float
  rollout_is_threshold: jax.Array | float
  temperature: jax.Array | float
  clip_ratio_low: jax.Array | float
  clip_ratio_high: jax.Array | float
  clip_ratio_c: jax.Array | float

  def of_type(self, dtype: jnp.dtype) -> TermScalars:
    """Return the same numbers as arrays of `dtype`."""
    return jax.tree.map(lambda value: jnp.asarray(value, dtype), self)

  def with_own(self, numbers: RowNumbers | None) -> TermScalars:
    """Return the scalars with the tokens' own numbers [C] in their place, in the dtype of the shared ones."""
    if numbers is None:
      return self
    own = {field.name: getattr(numbers, field.name) for field in dataclasses.fields(self)}
    return self.replace(
      **{name: value.astype(getattr(self, name).dtype) for name, value in own.items() if value is not None}
    )


def alpha_of(settings: TermSettings, scalars: TermScalars) -> jax.Array | float:
  """Return alpha: a Python number if it is known at compile time, else an array [] or [C]."""
  return scalars.alpha if settings.known_alpha is None else settings.known_alpha


@flax.struct.dataclass
class TokenInputs:
  """Per-token arguments of the caller, without gradient; a term whose coefficient is None is left out.

  [N], or [B, T] as `objective` receives them.
  """

  targets: jax.Array  # [N] int32, the completion.
  mask: jax.Array  # [N], 0 on tokens that are not computed.
  distill_coef: jax.Array | None = None  # [N] weight of the divergence.
  policy_coef: jax.Array | None = None  # [N] weight of the policy-gradient loss.
  entropy_coef: jax.Array | None = None  # [N] weight of the entropy bonus.
  kl_coef: jax.Array | None = None  # [N] weight of the KL divergence from the initial policy.
  # [N] of the policy before the update; None: the current ones, without gradient.
  old_log_probs: jax.Array | None = None
  # [N] under the distribution that the targets were drawn from, for weights w of tokens; None: w is 1.
  sampling_log_probs: jax.Array | None = None
  advantages: jax.Array | None = None  # [N], required with `policy_coef`.
  # [N] of the targets under the initial policy, at the temperature; required with `kl_coef`.
  initial_log_probs: jax.Array | None = None
  support: jax.Array | None = None  # [N, K] int32, token ids in place of the student's top K; negative = none.
  teacher_hidden: jax.Array | None = None  # [N, D] of an in-mesh teacher.
  mix_hidden: jax.Array | None = None  # [N, D] of the student in the teacher's context, for the trust region.
  token_ids: jax.Array | None = None  # [N, K] int32 of an external teacher, negative = none.
  teacher_log_probs: jax.Array | None = None  # [N, K] of an external teacher.
  numbers: RowNumbers | None = None  # [N] each, those of a token's row.


@flax.struct.dataclass
class StudentView:
  """The numbers that the loss reads of the student's distribution, per token; the loss is differentiated by them."""

  log_prob: jax.Array  # [C] of the target.
  entropy: jax.Array  # [C].
  support: jax.Array | None = None  # [C, K] log-probs of the support, if the divergence has one.
  divergence: jax.Array | None = None  # [C] the divergence, if it is over the whole vocabulary.


@flax.struct.dataclass
class TeacherView:
  """The numbers that the loss reads of the teacher's distribution, per token, without gradient."""

  entropy: jax.Array  # [C].
  log_prob: jax.Array | None = None  # [C] of the target; None if it was not computed (external teachers).
  knows_target: jax.Array | None = None  # [C] 1 where an external teacher's tokens include the target, else 0.
  support: jax.Array | None = None  # [C, K] log-probs of the support.
  top1_in_support: jax.Array | None = None  # [C] 1 where the teacher's most likely token is in the support, else 0.


@flax.struct.dataclass
class Auxiliary:
  """Auxiliary results of the loss for metrics, without gradient."""

  sums: Metrics  # [] the terms, summed over tokens with their coefficients.
  per_token: Metrics  # [C], 0 where a token is not active.


def support_divergence(
  student: jax.Array, teacher: jax.Array, alpha: jax.Array | float, add_tail: bool | None, tail: jax.Array | None = None
) -> jax.Array:
  """Return the divergence [C] between log-probs [C, K] on one support, as `TermSettings.add_tail` says.

  With `add_tail`, tokens whose `tail` [C] is 0 still have no tail bucket; None: all tokens have one.
  """
  chex.assert_rank([student, teacher], 2)
  if not add_tail:
    made = jnp.asarray if add_tail is None else divergences.renormalised
    return divergences.divergence(made(student), made(teacher), alpha)
  student, teacher = divergences.with_tail(student), divergences.with_tail(teacher)
  if tail is not None:
    chex.assert_shape(tail, student.shape[:1])
    # A probability of 0 on both sides contributes 0, without gradient.
    left_out = (tail == 0)[:, None] & (jnp.arange(student.shape[1]) == student.shape[1] - 1)[None, :]
    student, teacher = (jnp.where(left_out, -jnp.inf, log_probs) for log_probs in (student, teacher))
  return divergences.divergence(student, teacher, alpha)


def sampled_token_divergence(
  log_prob: jax.Array, teacher_log_prob: jax.Array, knows_target: jax.Array | None = None
) -> jax.Array:
  """Return stopgrad(s − t)·s of the sampled token, [C]; 0 where the teacher does not name it.

  The value is not a divergence; its gradient estimates that of KL(student‖teacher) from one sample.
  Source: core_algos.py, the last branch of `compute_self_distillation_loss`.
  """
  chex.assert_rank([log_prob, teacher_log_prob], 1)
  chex.assert_equal_shape([log_prob, teacher_log_prob])
  chex.assert_type([log_prob, teacher_log_prob], float)
  per_token = lax.stop_gradient(log_prob - teacher_log_prob) * log_prob
  return per_token if knows_target is None else jnp.where(knows_target > 0, per_token, 0.0)


def distillation_term(
  settings: TermSettings,
  scalars: TermScalars,
  student: StudentView,
  teacher: TeacherView,
  tail: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """Return the divergence [C] of the settings' kind, and its metrics; `tail` as in `support_divergence`."""
  chex.assert_equal_shape([student.log_prob, teacher.entropy])
  if settings.kind == 'sampled':
    divergence = sampled_token_divergence(student.log_prob, teacher.log_prob, teacher.knows_target)
  elif student.support is not None:
    alpha = alpha_of(settings, scalars)
    divergence = support_divergence(student.support, teacher.support, alpha, settings.add_tail, tail)
  else:
    divergence = student.divergence
  metrics = {'divergence': divergence, 'teacher_entropy': teacher.entropy}
  if teacher.log_prob is not None:
    metrics['teacher_log_prob'] = teacher.log_prob
  if teacher.knows_target is not None:
    metrics['teacher_known'] = teacher.knows_target
  if student.support is None:
    student_tail = teacher_tail = jnp.zeros_like(student.log_prob)
    coverage = top1_in_support = jnp.ones_like(student.log_prob)
  else:
    coverage = jnp.exp(teacher.support).sum(-1)
    student_tail = jnp.maximum(1.0 - jnp.exp(student.support).sum(-1), 0.0)
    teacher_tail = jnp.maximum(1.0 - coverage, 0.0)
    coverage, top1_in_support = jnp.minimum(coverage, 1.0), teacher.top1_in_support
  return divergence, metrics | {
    'student_tail': student_tail,
    'teacher_tail': teacher_tail,
    'teacher_coverage': coverage,
    'teacher_top1_in_support': top1_in_support,
  }


def clipped_ratio(
  settings: TermSettings, scalars: TermScalars, log_prob: jax.Array, old_log_prob: jax.Array
) -> tuple[jax.Array, Metrics]:
  """Return the weight [C] of the divergence, min(exp(log π − log π_old), is_clip) or 1, and where it is clipped.

  The weight is also 1 where a token's own `is_clip` is 0.
  """
  chex.assert_rank([log_prob, old_log_prob], 1)
  chex.assert_equal_shape([log_prob, old_log_prob])
  ratio, clipped = jnp.ones_like(log_prob), jnp.zeros_like(log_prob)
  if settings.use_ratio:
    unclipped = importance_ratio(log_prob, old_log_prob)
    ratio = jnp.minimum(unclipped, scalars.is_clip)
    clipped = (unclipped > scalars.is_clip).astype(log_prob.dtype)
    if jnp.ndim(scalars.is_clip):
      weighted = scalars.is_clip > 0
      ratio, clipped = jnp.where(weighted, ratio, 1.0), jnp.where(weighted, clipped, 0.0)
  return ratio, {'ratio': ratio, 'ratio_clipped': clipped}


def rollout_weight(scalars: TermScalars, log_prob: jax.Array, sampling_log_prob: jax.Array) -> jax.Array:
  """Return the weight [C] that corrects tokens for the difference between sampler and trainer, without gradient.

  It is min(exp(log π − log π_sampler), rollout_is_threshold), as `importance.rollout_is_weights` gives if π_old is π.
  """
  chex.assert_rank([log_prob, sampling_log_prob], 1)
  return jnp.minimum(importance_ratio(log_prob, sampling_log_prob), scalars.rollout_is_threshold)


def policy_term(
  scalars: TermScalars, log_prob: jax.Array, old_log_prob: jax.Array, advantages: jax.Array
) -> tuple[jax.Array, Metrics]:
  """Return the PPO loss [C] and its metrics."""
  chex.assert_rank([log_prob, old_log_prob, advantages], 1)
  per_token, metrics = dual_clip_ppo(
    log_prob, old_log_prob, advantages, scalars.clip_ratio_low, scalars.clip_ratio_high, scalars.clip_ratio_c
  )
  return per_token, {
    'ppo_ratio': metrics['ratio'],
    'ppo_clipped': metrics['clipped'],
    'ppo_clipped_lower': metrics['clipped_lower'],
    'ppo_kl': metrics['approx_kl'],
  }


def loss_terms(
  settings: TermSettings,
  scalars: TermScalars,
  student: StudentView,
  teacher: TeacherView | None,
  tokens: TokenInputs,
  active: jax.Array,
) -> tuple[jax.Array, Auxiliary]:
  """Return the loss [] of C tokens, differentiable by `student`, and its auxiliary results.

  Args:
    settings: compile-time settings.
    scalars: scalars, in the dtype of the student's log-probs.
    student: the student's view of these tokens.
    teacher: the teacher's view of these tokens; None without `distill_coef`.
    tokens: per-token arguments; their coefficients decide which terms the loss has.
    active: [C] bool; other tokens have no part in the loss, whatever they hold.
  """
  chex.assert_rank(student.log_prob, 1)
  chex.assert_equal_shape([student.log_prob, student.entropy, active])
  chex.assert_type([student.log_prob, student.entropy, active], [float, float, bool])
  chex.assert_tree_shape_prefix((teacher, tokens), active.shape)
  log_prob = student.log_prob
  dtype = log_prob.dtype
  scalars = scalars.with_own(tokens.numbers)

  def of_active(values: jax.Array) -> jax.Array:
    return jnp.where(active, values, 0).astype(dtype)

  old_log_prob = lax.stop_gradient(log_prob) if tokens.old_log_probs is None else of_active(tokens.old_log_probs)
  per_token = {'log_prob': log_prob, 'entropy': student.entropy}
  weight = None
  if tokens.sampling_log_probs is not None:
    weight = rollout_weight(scalars, log_prob, of_active(tokens.sampling_log_probs))

  def weighted(coefficients: jax.Array) -> jax.Array:
    coefficients = of_active(coefficients)
    return coefficients if weight is None else coefficients * weight

  sums = {}
  loss = jnp.zeros((), dtype)
  if tokens.distill_coef is not None:
    tail = None if tokens.numbers is None else tokens.numbers.tail
    divergence, distillation_metrics = distillation_term(settings, scalars, student, teacher, tail)
    ratio, ratio_metrics = clipped_ratio(settings, scalars, log_prob, old_log_prob)
    per_token |= distillation_metrics | ratio_metrics
    sums['distillation_loss'] = (weighted(tokens.distill_coef) * ratio * jnp.where(active, divergence, 0)).sum()
    loss += sums['distillation_loss']
  if tokens.policy_coef is not None:
    policy_loss, policy_metrics = policy_term(scalars, log_prob, old_log_prob, of_active(tokens.advantages))
    per_token |= policy_metrics
    sums['policy_loss'] = (weighted(tokens.policy_coef) * policy_loss).sum()
    loss += sums['policy_loss']
  if tokens.entropy_coef is not None:
    sums['entropy_bonus'] = (of_active(tokens.entropy_coef) * student.entropy).sum()
    loss -= sums['entropy_bonus']
  if tokens.kl_coef is not None:
    per_token['initial_kl'] = kl_penalty(log_prob, of_active(tokens.initial_log_probs), settings.kl_kind)
    # Inactive tokens may be far from the 0 that stands for the initial policy there.
    sums['kl_loss'] = (of_active(tokens.kl_coef) * jnp.where(active, per_token['initial_kl'], 0)).sum()
    loss += sums['kl_loss']
  return loss, Auxiliary(sums, {name: jnp.where(active, value, 0) for name, value in per_token.items()})
