"""Divergences between two distributions over the same support, and what makes a support of a top-K.

Letters: K entries of the support. All log-probabilities are natural logarithms.
"""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp

from sdpo_jax.config.divergence import known_number

TAIL_CLAMP = -1e-7  # Largest log-mass of the support: keeps at least 1e-7 in the tail (core_algos.py:1124-1131).


def _assert_log_probs(log_probs: jax.Array) -> None:
  """Check that there is a distribution over the last axis."""
  chex.assert_type(log_probs, float)
  chex.assert_axis_dimension_gteq(log_probs, -1, 1)


def _assert_pair(student: jax.Array, teacher: jax.Array, alpha: float | jax.Array) -> None:
  """Check that two arrays of log-probabilities stand for the same entries, and that alpha is a number."""
  chex.assert_equal_shape([student, teacher])
  chex.assert_type([student, teacher], float)
  chex.assert_rank(alpha, 0)


def log_floor(dtype: jnp.dtype) -> float:
  """Return the logarithm of the smallest normal number: what an exact −inf log-probability counts as."""
  return math.log(float(jnp.finfo(dtype).tiny))


def floored(log_probs: jax.Array) -> jax.Array:
  """Return `log_probs` [...] with exact −inf replaced by `log_floor`; no gradient flows into replaced entries."""
  chex.assert_type(log_probs, float)
  return jnp.where(jnp.isneginf(log_probs), log_floor(log_probs.dtype), log_probs)


def with_tail(log_probs: jax.Array) -> jax.Array:
  """Append the log-mass that the support leaves to the rest of the vocabulary: [..., K] -> [..., K + 1].

  The mass of the support is taken as at most exp(−1e-7), so the tail holds at least 1e-7 and has no gradient there.
  Source: lasgroup/SDPO 0e6d510, core_algos.py:1124-1131.
  """
  _assert_log_probs(log_probs)
  mass = jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1, keepdims=True), TAIL_CLAMP)
  return jnp.concatenate([log_probs, jnp.log(-jnp.expm1(mass))], axis=-1)


def renormalised(log_probs: jax.Array) -> jax.Array:
  """Return the distribution conditioned on its support: [..., K] -> [..., K]."""
  _assert_log_probs(log_probs)
  return log_probs - jax.nn.logsumexp(log_probs, axis=-1, keepdims=True)


def log_mixture(student_log_probs: jax.Array, teacher_log_probs: jax.Array, alpha: float | jax.Array) -> jax.Array:
  """Return log((1 − α)·exp(s) + α·exp(t)) elementwise, for 0 < α < 1."""
  _assert_pair(student_log_probs, teacher_log_probs, alpha)
  alpha = jnp.asarray(alpha, student_log_probs.dtype)
  return jnp.logaddexp(student_log_probs + jnp.log1p(-alpha), teacher_log_probs + jnp.log(alpha))


def exact_endpoint(alpha: float | jax.Array) -> float | None:
  """Return 0.0 or 1.0 where `alpha` is known, when tracing, to be exactly that; None for all others.

  A traced alpha counts as lying between the ends, whatever its value.
  """
  known = known_number(alpha)
  return known if known in (0.0, 1.0) else None


def divergence_terms(student: jax.Array, teacher: jax.Array, alpha: float | jax.Array) -> jax.Array:
  """Return the summands of `divergence`: [...] -> [...]."""
  _assert_pair(student, teacher, alpha)
  student, teacher = floored(student), floored(teacher)
  endpoint = exact_endpoint(alpha)
  if endpoint == 0.0:
    return jnp.exp(teacher) * (teacher - student)
  if endpoint == 1.0:
    return jnp.exp(student) * (student - teacher)
  mixture = log_mixture(student, teacher, alpha)
  return (1.0 - alpha) * jnp.exp(student) * (student - mixture) + alpha * jnp.exp(teacher) * (teacher - mixture)


def divergence_slopes(student: jax.Array, teacher: jax.Array, alpha: float | jax.Array) -> jax.Array:
  """Return the derivative of each summand by its student log-probability, in closed form: [...] -> [...].

  For 0 < α < 1 it is (1 − α)·exp(s)·(s − m): what comes through the mixture m cancels. Zero where the student's
  log-probability is −inf.
  """
  _assert_pair(student, teacher, alpha)
  dead = jnp.isneginf(student)
  student, teacher = floored(student), floored(teacher)
  endpoint = exact_endpoint(alpha)
  if endpoint == 0.0:
    slopes = -jnp.exp(teacher)
  elif endpoint == 1.0:
    slopes = jnp.exp(student) * (student - teacher + 1.0)
  else:
    slopes = (1.0 - alpha) * jnp.exp(student) * (student - log_mixture(student, teacher, alpha))
  return jnp.where(dead, 0.0, slopes)


@jax.custom_vjp
def _divergence_between(student: jax.Array, teacher: jax.Array, alpha: jax.Array) -> jax.Array:
  return divergence_terms(student, teacher, alpha).sum(-1)


def _between_fwd(student, teacher, alpha):
  return _divergence_between(student, teacher, alpha), divergence_slopes(student, teacher, alpha)


_divergence_between.defvjp(_between_fwd, lambda slopes, cotangent: (cotangent[..., None] * slopes, None, None))


def divergence(student_log_probs: jax.Array, teacher_log_probs: jax.Array, alpha: float | jax.Array) -> jax.Array:
  """Return the divergence of two distributions over the last axis: two arrays [..., K] -> [...], in nats.

  α exactly 0: KL(teacher‖student). α exactly 1: KL(student‖teacher) (paper Eq. 1). Between:
  (1 − α)·KL(student‖m) + α·KL(teacher‖m) with m = (1 − α)·student + α·teacher, which tends to 0, not to the KLs, at
  both ends. The teacher receives no gradient. An exact −inf counts as the logarithm of the smallest normal number
  (the reference gives NaN), so the result is finite. Source: core_algos.py:1133-1152.
  """
  _assert_pair(student_log_probs, teacher_log_probs, alpha)
  _assert_log_probs(student_log_probs)
  teacher_log_probs = jax.lax.stop_gradient(teacher_log_probs)
  if exact_endpoint(alpha) is not None:
    return divergence_terms(student_log_probs, teacher_log_probs, alpha).sum(-1)
  return _divergence_between(student_log_probs, teacher_log_probs, jnp.asarray(alpha, student_log_probs.dtype))
