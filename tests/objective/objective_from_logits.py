"""The objective from whole logits, differentiated by JAX: the oracle of the fused one."""

from __future__ import annotations

import chex
import jax
from jax import lax
import jax.numpy as jnp

from sdpo_jax.objective import divergences, vocabulary
from sdpo_jax.objective.fused import lerp
from sdpo_jax.objective.loss import Aux, ObjectiveConfig, fixed_terms, token_inputs, token_numbers, unflattened
from sdpo_jax.objective.row_numbers import first_entries
from sdpo_jax.objective.terms import StudentView, TeacherView, TokenInputs, alpha_of, loss_terms
from sdpo_jax.types import RowNumbers, TeacherSignal

DEFAULTS = ObjectiveConfig()


def objective_from_logits(
  student_logits: jax.Array,
  teacher_logits: jax.Array | None,
  targets: jax.Array,
  mask: jax.Array,
  distill_coef: jax.Array | None,
  config: ObjectiveConfig = DEFAULTS,
  mix_logits: jax.Array | None = None,
  mix_rate: float | jax.Array | None = None,
  numbers: RowNumbers | None = None,
  **inputs: jax.Array | None,
) -> tuple[jax.Array, Aux]:
  """Return `objective` from logits [B, T, V] at once, for small vocabularies.

  `mix_logits` [B, T, V] and `mix_rate` make the trust region's teacher: (1 − rate)·teacher + rate·mix.
  """
  all_logits = [logits for logits in (student_logits, teacher_logits, mix_logits) if logits is not None]
  chex.assert_shape(all_logits, (*targets.shape, student_logits.shape[-1]))
  chex.assert_type(all_logits, float)
  signal = None if teacher_logits is None else TeacherSignal()
  tokens = token_inputs(
    signal,
    TokenInputs(
      targets=targets,
      mask=mask,
      distill_coef=distill_coef,
      **inputs,
      numbers=token_numbers(numbers, config, targets.shape),
    ),
  )
  active = tokens.mask != 0

  def flattened(logits: jax.Array) -> jax.Array:
    logits = jnp.where(active[:, None], logits.reshape(-1, logits.shape[-1]), 0)
    return logits.astype(vocabulary.logits_dtype(logits))

  def of_targets(log_probs: jax.Array) -> jax.Array:
    return divergences.floored(jnp.take_along_axis(log_probs, tokens.targets[:, None], axis=1)[:, 0])

  def entropy(log_probs: jax.Array) -> jax.Array:
    return -(jnp.exp(log_probs) * divergences.floored(log_probs)).sum(-1)

  def each(number: jax.Array | float) -> jax.Array | float:
    return number[:, None] if jnp.ndim(number) else number

  logits = flattened(student_logits)
  # 1 is among the values of every number, whatever stands at tokens that do not count.
  tokens = tokens.replace(numbers=jax.tree.map(lambda own: jnp.where(active, own, 1), tokens.numbers))
  settings, scalars = fixed_terms(config, numbers), config.term_scalars.of_type(logits.dtype)
  own_scalars = scalars.with_own(tokens.numbers)
  logits = logits / each(own_scalars.temperature)
  log_probs = jax.nn.log_softmax(logits)
  student = StudentView(log_prob=of_targets(log_probs), entropy=entropy(log_probs))
  teacher = None
  if teacher_logits is not None:
    theirs = lax.stop_gradient(flattened(teacher_logits))
    if mix_logits is not None:
      theirs = lerp(theirs, lax.stop_gradient(flattened(mix_logits)), jnp.asarray(mix_rate, theirs.dtype))
    theirs = jax.nn.log_softmax(theirs / each(own_scalars.temperature))
    teacher = TeacherView(entropy=entropy(theirs), log_prob=of_targets(theirs))
    if settings.kind == 'full':
      divergence = divergences.divergence(log_probs, theirs, alpha_of(settings, own_scalars))
      student = student.replace(divergence=divergence)
    elif settings.kind == 'topk':
      ids = tokens.support
      if ids is None:
        ids = lax.top_k(lax.stop_gradient(logits), min(config.distillation_topk, logits.shape[-1]))[1]
        if tokens.numbers is not None and tokens.numbers.topk is not None:
          ids = first_entries(ids, tokens.numbers.topk)

      def at_ids(log_probs: jax.Array) -> jax.Array:
        return jnp.where(ids < 0, -jnp.inf, jnp.take_along_axis(log_probs, jnp.maximum(ids, 0), axis=1))

      student, on_support = student.replace(support=at_ids(log_probs)), at_ids(theirs)
      top1_in_support = (on_support.max(-1) >= theirs.max(-1)).astype(logits.dtype)
      teacher = teacher.replace(support=on_support, top1_in_support=top1_in_support)
  loss, aux = loss_terms(settings, scalars, student, teacher, tokens, active)
  return loss, unflattened(lax.stop_gradient(aux), targets.shape)
