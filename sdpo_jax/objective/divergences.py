"""Divergences between two distributions over the same support, and the distributions that a top K is turned into.

Letters: K entries of the support. All log-probabilities are natural logarithms.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.objective_settings import known_number

TAIL_CLAMP = -1e-7  # Largest log-mass of the support: keeps at least 1e-7 in the tail (core_algos.py:1124-1131).


def _assert_log_probs(log_probs: jax.Array) -> None:
  """Check that there is a distribution over the last axis."""
  chex.assert_type(log_probs, float)
  chex.assert_axis_dimension_gteq(log_probs, -1, 1)


def _assert_pair(student: jax.Array, teacher: jax.Array, alpha: float | jax.Array) -> None:
  """Check that two arrays of log-probs have the same shape [..., K], and that alpha is [] or [..., 1]."""
  chex.assert_equal_shape([student, teacher])
  chex.assert_type([student, teacher], float)
  if jnp.ndim(alpha):
    chex.assert_shape(alpha, (*student.shape[:-1], 1))


def log_floor(dtype: jnp.dtype) -> float:
  """Return the log of the smallest normal number, which replaces log-probabilities of exactly −inf."""
  return math.log(float(jnp.finfo(dtype).tiny))


def floored(log_probs: jax.Array) -> jax.Array:
  """Return `log_probs` [...] with exact −inf replaced by `log_floor`; no gradient flows into replaced entries."""
  chex.assert_type(log_probs, float)
  return jnp.where(jnp.isneginf(log_probs), log_floor(log_probs.dtype), log_probs)


def with_tail(log_probs: jax.Array) -> jax.Array:
  """Append a tail bucket, the log-mass of the vocabulary outside the support: [..., K] -> [..., K + 1].

  The support's mass is capped at exp(−1e-7), so the tail holds at least 1e-7 and has no gradient where it is capped.
  Source: lasgroup/SDPO 0e6d510, core_algos.py:1124-1131.
  """
  _assert_log_probs(log_probs)
  mass = jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1, keepdims=True), TAIL_CLAMP)
  return jnp.concatenate([log_probs, jnp.log(-jnp.expm1(mass))], axis=-1)


def renormalised(log_probs: jax.Array) -> jax.Array:
  """Return the distribution conditioned on its support: [..., K] -> [..., K]."""
  _assert_log_probs(log_probs)
  return log_probs - jax.nn.logsumexp(log_probs, axis=-1, keepdims=True)


def log_ratios_to_mixture(
  student_log_probs: jax.Array, teacher_log_probs: jax.Array, alpha: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Return s − m and t − m for m = log((1 − α)·exp(s) + α·exp(t)), elementwise for 0 < α < 1: both [..., K].

  Neither is the difference of a log-prob and a rounded m, which is mostly rounding error where s and t are close: there
  s − m = −log1p(α·expm1(t − s)), elsewhere it is −softplus of the teacher's log-odds, shifted by log(1 − α). Equal
  log-probs give exactly 0. `alpha` is [] or [..., 1].
  """
  _assert_pair(student_log_probs, teacher_log_probs, alpha)
  alpha = jnp.asarray(alpha, student_log_probs.dtype)
  difference = teacher_log_probs - student_log_probs
  close = jnp.abs(difference) <= 1.0
  log_odds = difference + jnp.log(alpha) - jnp.log1p(-alpha)
  # What is not selected must be finite, or its zero gradient becomes NaN.
  ratio = alpha * jnp.expm1(jnp.where(close, difference, 0.0))
  shared = jnp.log1p(jnp.where(close, ratio, jnp.exp(-jnp.abs(log_odds))))
  return (
    jnp.where(close, 0.0, -jnp.log1p(-alpha) - jnp.maximum(log_odds, 0.0)) - shared,
    jnp.where(close, difference, -jnp.log(alpha) + jnp.minimum(log_odds, 0.0)) - shared,
  )


def _known(alpha: float | jax.Array) -> float | None:
  """Return alpha if it is a scalar known at trace time; None if it is traced or an array."""
  return None if jnp.ndim(alpha) else known_number(alpha)


def exact_endpoint(alpha: float | jax.Array, dtype: jnp.dtype) -> float | None:
  """Return 0.0 or 1.0 if `alpha`, rounded to `dtype`, is known at trace time to be exactly that, else None.

  Subnormal numbers count as 0: some devices flush them to 0.
  """
  known = _known(alpha)
  if known is None:
    return None
  if abs(known) < jnp.finfo(dtype).tiny:
    return 0.0
  return 1.0 if np.asarray(known, dtype) == 1.0 else None


def _by_alpha(
  alpha: float | jax.Array,
  at_zero: Callable[[], jax.Array],
  at_one: Callable[[], jax.Array],
  between: Callable[[jax.Array], jax.Array],
  dtype: jnp.dtype,
) -> jax.Array:
  """Return the value [...] for `alpha`, selected at trace time if alpha is known then, else at run time.

  Args:
    alpha: [] or [..., 1], rounded to `dtype` before it is compared with the ends.
    at_zero: gives the value where alpha is 0.
    at_one: gives the value where alpha is 1.
    between: gives the value for an alpha that is neither.
    dtype: dtype of the values.
  """
  end = exact_endpoint(alpha, dtype)
  if end is not None:
    return at_one() if end else at_zero()
  known, alpha = _known(alpha), jnp.asarray(alpha, dtype)
  if known is not None:
    return between(alpha)
  is_zero, is_one = jnp.abs(alpha) < jnp.finfo(dtype).tiny, alpha == 1.0
  # The values that are not selected must be finite too, or their zero gradients become NaN.
  inner = between(jnp.where(is_zero | is_one, 0.5, alpha))
  return jnp.where(is_zero, at_zero(), jnp.where(is_one, at_one(), inner))


def divergence_terms(student: jax.Array, teacher: jax.Array, alpha: float | jax.Array) -> jax.Array:
  """Return the summands of `divergence`: [..., K] and an alpha [] or [..., 1] -> [..., K]."""
  _assert_pair(student, teacher, alpha)
  student, teacher = floored(student), floored(teacher)

  def between(alpha: jax.Array) -> jax.Array:
    student_ratio, teacher_ratio = log_ratios_to_mixture(student, teacher, alpha)
    summands = (1.0 - alpha) * jnp.exp(student) * student_ratio + alpha * jnp.exp(teacher) * teacher_ratio
    return jnp.maximum(summands, 0.0)  # They are not negative, by the convexity of x·log(x): less is rounding error.

  return _by_alpha(
    alpha,
    lambda: jnp.exp(teacher) * (teacher - student),
    lambda: jnp.exp(student) * (student - teacher),
    between,
    student.dtype,
  )


def divergence_slopes(student: jax.Array, teacher: jax.Array, alpha: float | jax.Array) -> jax.Array:
  """Return the derivative of each summand by its student log-probability, in closed form: [..., K] -> [..., K].

  For 0 < α < 1 it is (1 − α)·exp(s)·(s − m): the terms through the mixture m cancel. It is 0 where the student's
  log-probability is −inf.
  """
  _assert_pair(student, teacher, alpha)
  dead = jnp.isneginf(student)
  student, teacher = floored(student), floored(teacher)
  slopes = _by_alpha(
    alpha,
    lambda: -jnp.exp(teacher),
    lambda: jnp.exp(student) * (student - teacher + 1.0),
    lambda alpha: (1.0 - alpha) * jnp.exp(student) * log_ratios_to_mixture(student, teacher, alpha)[0],
    student.dtype,
  )
  return jnp.where(dead, 0.0, slopes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence_at(known: float | None, student: jax.Array, teacher: jax.Array, alpha: jax.Array) -> jax.Array:
  return divergence_terms(student, teacher, alpha if known is None else known).sum(-1)


def _divergence_at_fwd(known, student, teacher, alpha):
  slopes = divergence_slopes(student, teacher, alpha if known is None else known)
  return _divergence_at(known, student, teacher, alpha), slopes


_divergence_at.defvjp(_divergence_at_fwd, lambda known, slopes, cotangent: (cotangent[..., None] * slopes, None, None))


def divergence(student_log_probs: jax.Array, teacher_log_probs: jax.Array, alpha: float | jax.Array) -> jax.Array:
  """Return the divergence of two distributions over the last axis: two arrays [..., K] -> [...], in nats.

  α is one number, or [...] one for each pair of distributions. α exactly 0: KL(teacher‖student). α exactly 1:
  KL(student‖teacher) (paper Eq. 1). Between: (1 − α)·KL(student‖m) + α·KL(teacher‖m) with m = (1 − α)·student +
  α·teacher, which tends to 0, not to the KLs, at both ends. α is first rounded to the dtype of the log-probabilities;
  a traced α, or one in an array, is compared with the ends at run time. The teacher and α receive no gradient. A
  log-probability of exactly −inf counts as the log of the smallest normal number (the reference gives NaN), so the
  result is finite.
  Source: core_algos.py:1133-1152.
  """
  _assert_log_probs(student_log_probs)
  if jnp.ndim(alpha):
    chex.assert_shape(alpha, student_log_probs.shape[:-1])
    alpha = alpha[..., None]
  _assert_pair(student_log_probs, teacher_log_probs, alpha)
  teacher_log_probs = jax.lax.stop_gradient(teacher_log_probs)
  dtype = student_log_probs.dtype
  if exact_endpoint(alpha, dtype) is not None:
    return divergence_terms(student_log_probs, teacher_log_probs, alpha).sum(-1)
  return _divergence_at(_known(alpha), student_log_probs, teacher_log_probs, jnp.asarray(alpha, dtype))
