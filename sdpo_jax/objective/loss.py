"""The one loss: distillation, policy gradient, entropy bonus and KL penalty, summed with per-token coefficients."""

from __future__ import annotations

import dataclasses
import functools
import math

import chex
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective.fused import FusedSettings, SharedInputs, fused_loss
from sdpo_jax.objective.row_numbers import first_entries, of_tokens
from sdpo_jax.objective.sharded import Layout
from sdpo_jax.objective.terms import Auxiliary, TermScalars, TermSettings, TokenInputs
from sdpo_jax.objective_settings import TOPK_METHODS, check_divergence, known_number
from sdpo_jax.types import NUMBERS, READS, RowNumbers, TeacherSignal

Aux = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """Settings of the objective that are fixed at compile time. Names as in `sdpo_jax.config`.

  The numbers (alpha, is_clip, rollout_is_threshold, temperature, clip ratios) may also be traced scalars.

  Raises:
    ValueError: a number out of its range, or distillation of the sampled token with alpha other than 1.
  """

  full_logit_distillation: bool = True
  alpha: float = 0.5
  distillation_topk: int | None = 100
  distillation_add_tail: bool | None = True  # None: neither a tail bucket nor renormalised.
  is_clip: float | None = 2.0
  rollout_is_threshold: float = 2.0
  temperature: float = 1.0
  clip_ratio_low: float = 0.2
  clip_ratio_high: float = 0.28
  clip_ratio_c: float = 3.0
  kl_kind: str = 'k3'  # See `policy_gradient.kl_penalty`.
  topk_method: str = 'exact'  # Or 'approx': `top_k.top_k`.
  chunk_size: int = 1024  # Tokens per device whose logits exist at one time.
  vocab_block: int | None = None  # Vocabulary entries handled at one time within a chunk; None: by the platform.

  def __post_init__(self):
    chex.assert_rank(jax.tree.leaves(self.term_scalars), 0)  # Per-row numbers go into `RowNumbers`.
    check_divergence(self.alpha, self.distillation_topk, self.full_logit_distillation)
    if self.topk_method not in TOPK_METHODS:
      raise ValueError(f'topk_method must be one of {", ".join(TOPK_METHODS)}, not {self.topk_method!r}.')
    for name in ('is_clip', 'rollout_is_threshold', 'temperature', 'chunk_size', 'vocab_block'):
      value = known_number(getattr(self, name))
      if value is not None and value <= 0:
        raise ValueError(f'{name} must be positive, not {getattr(self, name)}.')

  @property
  def term_settings(self) -> TermSettings:
    """The compile-time settings of the terms."""
    kind = 'full' if self.distillation_topk is None else 'topk'
    return TermSettings(
      kind=kind if self.full_logit_distillation else 'sampled',
      known_alpha=known_number(self.alpha),
      add_tail=self.distillation_add_tail,
      use_ratio=self.is_clip is not None,
      kl_kind=self.kl_kind,
    )

  @property
  def term_scalars(self) -> TermScalars:
    """The scalars of the terms."""
    own = {field.name: getattr(self, field.name) for field in dataclasses.fields(TermScalars)}
    return TermScalars(**own | {'is_clip': math.inf if self.is_clip is None else self.is_clip})


def objective(
  student_hidden: jax.Array,
  student_unembedding: jax.Array,
  teacher: TeacherSignal | None,
  targets: jax.Array,
  mask: jax.Array,
  distill_coef: jax.Array | None,
  *,
  config: ObjectiveConfig = ObjectiveConfig(),
  vocab_size: int | None = None,
  layout: Layout | None = None,
  numbers: RowNumbers | None = None,
  **inputs: jax.Array | None,
) -> tuple[jax.Array, Aux]:
  """Return Σ distill_coef·w·ratio·D + Σ policy_coef·w·ℓ_ppo − Σ entropy_coef·H + Σ kl_coef·k, over unmasked tokens.

  D is the divergence of teacher and student: over the student's top K with a tail bucket, renormalised or neither,
  over the whole vocabulary (distillation_topk None), over an external teacher's tokens, or the sampled token's
  stopgrad(s − t)·s. ratio = min(exp(log π − log π_old), is_clip), without gradient, where π_old is π without old
  log-probs; 1 with is_clip None. w = min(exp(log π − log π_sampler), rollout_is_threshold), without gradient; 1 without
  the sampler's log-probs. k estimates the KL divergence from the initial policy (`policy_gradient.kl_penalty`), and its
  gradient is that of the estimate. All distributions are of the logits divided by the temperature; the trust region's
  logits are mixed before that, in at least float32. Source: core_algos.py:1085-1188, dp_actor.py:51-64, 341-386,
  523-560; paper §2-3.

  Logits exist for `chunk_size` tokens at a time, never [B, T, V], and the gradient is computed in the forward pass,
  chunk by chunk. Where the unembedding is not trained, and in blocks smaller than the vocabulary, not even [C, V]
  exists: the entries of the unembedding are averaged with the probabilities while the normaliser grows. On a mesh with
  the vocabulary split over S devices, a chunk has `chunk_size` tokens of each, and each device computes its part of
  the vocabulary for all of them. Ties at the boundary of the top K are broken by index. The gradient
  flows to the student's hidden states and unembedding, whichever of them is being differentiated (an unembedding under
  `stop_gradient` saves its matrix product and its memory), never to the teacher or to the auxiliary results. Reverse
  mode only.

  Finite where the reference is not: a −inf logit counts as a log-probability of the smallest normal number
  (`divergences.log_floor`), and values at masked tokens, NaN included, have no effect.

  Args:
    student_hidden: [B, T, D] final hidden states that predict the targets.
    student_unembedding: [R, D], logits = hidden @ unembedding.T.
    teacher: own or in-mesh (hidden states and unembedding, with mix_* for the trust region) or external (token_ids
      [B, T, K], negative = none, and log_probs); None leaves the divergence out. With an external teacher and the
      sampled token, a target that is not among its token_ids has no divergence.
    targets: [B, T] int32, the completion.
    mask: [B, T], 0 on tokens that are not computed at all.
    distill_coef: [B, T] weight of the divergence; None with teacher None.
    config: compile-time settings.
    vocab_size: V, the number of leading entries of all unembeddings that are tokens; the others are ignored and
      receive no gradient. None: all.
    layout: how the arguments, then global arrays, are sharded over a mesh; None: one device.
    numbers: [B] each, replacing those of `config`; None: all rows use `config`. `topk` is the number of leading entries
      that count, of any support, at most its K.
    **inputs: the other fields of `TokenInputs` that callers give, [B, T] or [B, T, K]: `policy_coef`, `entropy_coef`
      and `kl_coef`, the weights of further terms; what these read; and `support`. Absent or None: none.

  Returns:
    the loss (scalar, at least float32) and a dict without gradient: scalars `distillation_loss`, `policy_loss`,
    `entropy_bonus`, `kl_loss` (their sum over the tokens, with coefficients) and per token [B, T], 0 where masked:
    `log_prob` and `entropy` of the student (nats, at the temperature); with a teacher `divergence` (before the
    ratio), `ratio`, `ratio_clipped`, `student_tail` and `teacher_tail` (probability outside the support),
    `teacher_coverage` (inside it), `teacher_top1_in_support`, `teacher_entropy`, `teacher_log_prob` of the target
    (in-mesh teachers, and external ones with the sampled token, then also `teacher_known`: whether the target is among
    the token_ids); with policy_coef `ppo_ratio`, `ppo_clipped`, `ppo_clipped_lower`, `ppo_kl`; with
    kl_coef `initial_kl`.

  Raises:
    ValueError: a missing or contradictory argument.
  """
  _assert_states(targets, student_hidden, student_unembedding)
  if teacher is not None:
    _assert_tokens(targets, mask, [], [teacher.token_ids])
    _assert_states(targets, teacher.hidden, teacher.unembedding)
    _assert_states(targets, teacher.mix_hidden, teacher.mix_unembedding)
    _check_signal(teacher, inputs.get('support'))
  tokens = token_inputs(
    teacher,
    TokenInputs(
      targets=targets,
      mask=mask,
      distill_coef=distill_coef,
      numbers=token_numbers(numbers, config, targets.shape),
      **inputs,
    ),
  )
  entries = student_unembedding.shape[0]
  if vocab_size is not None and not 0 < vocab_size <= entries:
    raise ValueError(f'vocab_size={vocab_size} is not among the {entries} rows of the unembedding.')
  settings = FusedSettings.of(
    vocab_size or entries,
    layout,
    config.vocab_block,
    chunk_size=config.chunk_size,
    topk=config.distillation_topk,
    topk_method=config.topk_method,
    terms=fixed_terms(config, numbers),
  )
  shared = SharedInputs(config.term_scalars)
  if teacher is not None:
    matrices = teacher.unembedding, teacher.mix_unembedding
    if config.term_settings.kind == 'full':
      # The divergence meets student and teacher entry by entry, and models pad their vocabularies differently.
      matrices = jax.tree.map(functools.partial(_of_entries, entries), matrices)
    matrices = jax.tree.map(settings.padded, matrices)
    teacher_unembedding, mix_unembedding, mix_rate = _detached((*matrices, teacher.mix_rate))
    shared = shared.replace(teacher_unembedding=teacher_unembedding, mix_unembedding=mix_unembedding, mix_rate=mix_rate)
  student_unembedding = settings.padded(student_unembedding)
  hidden = student_hidden.reshape(-1, student_hidden.shape[-1])
  loss, aux = fused_loss(settings, hidden, student_unembedding, tokens, shared)
  return loss, unflattened(aux, targets.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments and results
# ---------------------------------------------------------------------------------------------------------------------


def _assert_tokens(
  targets: jax.Array, mask: jax.Array, numbers: list[jax.Array | None], ids: list[jax.Array | None]
) -> None:
  """Check that targets and mask are [B, T], `numbers` [B, T] float and `ids` [B, T, K] int, if given."""
  numbers = [value for value in numbers if value is not None]
  ids = [value for value in ids if value is not None]
  chex.assert_rank(targets, 2)
  chex.assert_equal_shape([targets, mask, *numbers])
  chex.assert_type([targets, *ids], int)
  chex.assert_type(numbers, float)
  chex.assert_shape(ids, (*targets.shape, None))


def _assert_states(targets: jax.Array, hidden: jax.Array | None, unembedding: jax.Array | None) -> None:
  """Check that hidden states are [B, T, D] float and the unembedding [R, D] float, if given."""
  if hidden is not None:
    chex.assert_shape(hidden, (*targets.shape, None))
    chex.assert_type(hidden, float)
  if unembedding is not None:
    chex.assert_rank(unembedding, 2)
    chex.assert_type(unembedding, float)
  if hidden is not None and unembedding is not None:
    chex.assert_equal_shape_suffix([hidden, unembedding], 1)


def _check_signal(teacher: TeacherSignal, support: jax.Array | None) -> None:
  """Check that a teacher's signal is complete and free of contradictions.

  Raises:
    ValueError: it is not.
  """
  if teacher.token_ids is not None and teacher.log_probs is not None:
    chex.assert_equal_shape([teacher.token_ids, teacher.log_probs])
    chex.assert_type(teacher.log_probs, float)
  if teacher.mix_rate is not None:
    chex.assert_rank(teacher.mix_rate, 0)
  external = teacher.token_ids is not None, teacher.log_probs is not None
  in_mesh = teacher.hidden is not None, teacher.unembedding is not None
  if any(external) != all(external) or any(in_mesh) != all(in_mesh) or any(external) == any(in_mesh):
    raise ValueError('A teacher signal is either hidden states and unembedding, or token_ids and log_probs.')
  mix = [value is not None for value in (teacher.mix_hidden, teacher.mix_unembedding, teacher.mix_rate)]
  if any(mix) != all(mix):
    raise ValueError('A trust-region teacher needs mix_hidden, mix_unembedding and mix_rate together.')
  if all(external) and (any(mix) or support is not None):
    raise ValueError('An external teacher brings its own support: mix_* and support do not go with it.')


def _of_entries(entries: int, unembedding: jax.Array) -> jax.Array:
  """Return an unembedding [R, D] as [entries, D]: cut, or padded with zeros, at its end."""
  missing = entries - unembedding.shape[0]
  if missing > 0:
    return jnp.pad(unembedding, ((0, missing), (0, 0)))
  return unembedding[:entries] if missing else unembedding


def _detached(arrays):
  """Return a tree's values as arrays without gradient; None stays None."""
  return jax.tree.map(lambda value: lax.stop_gradient(jnp.asarray(value)), arrays)


def token_inputs(teacher: TeacherSignal | None, given: TokenInputs) -> TokenInputs:
  """Return the per-token arguments [B, T, …] as [B·T, …], without gradient and without those that no term reads.

  Raises:
    ValueError: an argument that a term needs is missing, or one that no term reads is there.
  """
  _assert_tokens(given.targets, given.mask, [getattr(given, name) for name in NUMBERS], [given.support])
  if teacher is not None and given.distill_coef is None:
    raise ValueError('distill_coef is required with a teacher.')
  if teacher is None and given.distill_coef is not None and given.support is not None:
    raise ValueError('support is of no use without a teacher.')
  for coefficient, read in READS.items():
    if getattr(given, coefficient) is not None and getattr(given, read) is None:
      raise ValueError(f'{read} are required with {coefficient}.')
  if given.numbers is not None and given.numbers.topk is not None:
    support, token_ids = (
      None if ids is None else first_entries(ids, given.numbers.topk)
      for ids in (given.support, None if teacher is None else teacher.token_ids)
    )
    given = given.replace(support=support)
    teacher = None if teacher is None else teacher.replace(token_ids=token_ids)
  tokens = given.replace(
    distill_coef=given.distill_coef if teacher is not None else None,
    **{read: None for coefficient, read in READS.items() if getattr(given, coefficient) is None},
  )
  if teacher is not None:
    tokens = tokens.replace(
      teacher_hidden=teacher.hidden,
      mix_hidden=teacher.mix_hidden,
      token_ids=teacher.token_ids,
      teacher_log_probs=teacher.log_probs,
    )
  return jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), _detached(tokens))


def token_numbers(numbers: RowNumbers | None, config: ObjectiveConfig, shape: tuple[int, int]) -> RowNumbers | None:
  """Return per-row numbers [B] as per-token numbers [B, T].

  Raises:
    ValueError: a number that the divergence of `config` does not read.
  """
  if numbers is None:
    return None
  kind = config.term_settings.kind
  if kind == 'sampled' and numbers.alpha is not None:
    raise ValueError('alpha of rows is of no use with full_logit_distillation=False, which is reverse KL only.')
  if kind != 'topk' and (numbers.topk is not None or numbers.tail is not None):
    raise ValueError('topk and tail of rows are of a divergence over a support: set distillation_topk.')
  if numbers.tail is not None and not config.distillation_add_tail:
    raise ValueError('tail of rows needs distillation_add_tail=True.')
  return of_tokens(numbers, shape)


def fixed_terms(config: ObjectiveConfig, numbers: RowNumbers | None) -> TermSettings:
  """Return the compile-time settings of the terms; numbers given per row are not fixed at compile time."""
  settings = config.term_settings
  if numbers is not None and numbers.alpha is not None:
    settings = dataclasses.replace(settings, known_alpha=None)
  if numbers is not None and numbers.is_clip is not None:
    settings = dataclasses.replace(settings, use_ratio=True)
  return settings


def unflattened(aux: Auxiliary, shape: tuple[int, int]) -> Aux:
  """Return the auxiliary results by name, per-token results [B·T] as [B, T]."""
  return aux.sums | {name: value.reshape(shape) for name, value in aux.per_token.items()}
