"""The loss `jsd_pg`, a policy gradient towards a mixture of teacher and student, as inputs of the one loss.

With the student π, a teacher q and the policy π_old that sampled the text, per completion token t:

- the advantage A = −(log π − log M) of the sampled token, M = α·π + (1 − α)·q, 0 < α < 1, computed once, before the
  first step, and without gradient;
- −min(r·A, clip(r, 1 − ε, 1 + ε)·A) with r = exp(log π − log π_old): the policy term with one ε on both sides and
  without a dual clip;
- jsd_weight times Σ_{v∈S} α·π·(log π − log M) + (1 − α)·q·(log q − log M) over the teacher's top K, neither with a tail
  nor renormalised: the divergence with the mirrored alpha 1 − α.

Both terms are means over the tokens. B rows, T completion tokens, K tokens for which a teacher gives log-probs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from sdpo_jax.errors import UserError
from sdpo_jax.types import TeacherSignal

FORMS = ('mixture', 'design')
LITE = 5  # The regulariser is left out for teachers that name at most this many tokens.
SUPPORTS = ('teacher', 'union')


@dataclasses.dataclass(frozen=True)
class JsdPg:
  """The settings of `jsd_pg` for one request.

  Raises:
    UserError: a setting is not allowed.
  """

  alpha: float = 0.5  # The student's share of the mixture: 1 − α of `ObjectiveConfig.alpha`, never the same field.
  clip_eps: float = 0.2  # ε of the ratio's clip.
  jsd_weight: float = 0.5  # Weight of the regulariser; 0 leaves it out, as for teachers that name a handful of tokens.
  floor: float = -20.0  # log q of a sampled token that the teacher does not name.
  # 'design': A = (1 − 2α)·(log π − log q), the published form for α other than ½; at ½ it is 0 everywhere.
  form: Literal['mixture', 'design'] = 'mixture'
  # 'union': the regulariser also covers the student's top K; the remaining probability is spread over the other tokens.
  support: Literal['teacher', 'union'] = 'teacher'
  tail: bool = False  # Whether a tail bucket holds the probability outside the support; with 'union' always.

  def __post_init__(self):
    for name, allowed in (('form', FORMS), ('support', SUPPORTS)):
      if getattr(self, name) not in allowed:
        raise UserError(f'{name} must be one of {", ".join(allowed)}, not {getattr(self, name)!r}.')
    if not 0 < self.alpha < 1:
      raise UserError(f'alpha of jsd_pg must lie between 0 and 1, without the ends, not {self.alpha}.')
    if self.form == 'design' and self.alpha < 0.5:
      raise UserError(
        f"alpha={self.alpha} with form='design' would reinforce what the teacher dislikes: set alpha to ½ or more, or "
        "form='mixture'."
      )
    if not 0 < self.clip_eps <= 1:
      raise UserError(f'clip_eps must be greater than 0 and at most 1, not {self.clip_eps}.')
    if not 0 <= self.jsd_weight < math.inf:
      raise UserError(f'jsd_weight must be 0 or a positive number, not {self.jsd_weight}.')
    if not -math.inf < self.floor < 0:
      raise UserError(f'floor is a log-probability and must be negative, not {self.floor}.')


def for_teacher(settings: JsdPg, named: int) -> JsdPg:
  """Return the settings for a teacher that names `named` tokens: without the regulariser if at most `LITE`."""
  return dataclasses.replace(settings, jsd_weight=0.0) if named <= LITE else settings


def advantages(
  log_probs: jax.Array, teacher_log_probs: jax.Array, alpha: float | jax.Array, form: str = 'mixture'
) -> jax.Array:
  """Return the advantages of sampled tokens, without gradient: [B, T] twice -> [B, T].

  Exactly 0 where student and teacher agree; at least log α ('mixture'), and unbounded above.

  Args:
    log_probs: [B, T] of the sampled tokens under the student before the first step.
    teacher_log_probs: [B, T] of the sampled tokens under the teacher.
    alpha: the student's share of the mixture, [] or [B].
    form: one of `FORMS`.
  """
  chex.assert_rank([log_probs, teacher_log_probs], 2)
  chex.assert_equal_shape([log_probs, teacher_log_probs])
  chex.assert_type([log_probs, teacher_log_probs], float)
  difference = jax.lax.stop_gradient(teacher_log_probs - log_probs)
  alpha = jnp.asarray(alpha, difference.dtype)
  if alpha.ndim:
    chex.assert_shape(alpha, log_probs.shape[:1])
    alpha = alpha[:, None]
  if form == 'design':
    return (2.0 * alpha - 1.0) * difference
  # log(α + (1 − α)·exp(d)) with the larger of the two summands taken out, so that no exponential overflows.
  smaller = jnp.expm1(-jnp.abs(difference))
  return jnp.where(difference > 0, difference + jnp.log1p(alpha * smaller), jnp.log1p((1.0 - alpha) * smaller))


def union(
  signal: TeacherSignal,
  student_ids: jax.Array,
  vocab_size: int,
  teacher_at_student: jax.Array | None = None,
  external: jax.Array | None = None,
) -> TeacherSignal:
  """Return a teacher's signal on its own and the student's tokens [B, T, K + K'], each token once.

  Args:
    signal: token_ids and log_probs [B, T, K] of the teacher's top K.
    student_ids: [B, T, K'] int32, the student's top K'; negative: none.
    vocab_size: V.
    teacher_at_student: [B, T, K'] the teacher's log-probs of these; None: all teachers are external.
    external: [B] bool, rows with an external teacher, whose remaining probability is spread evenly over the tokens that
      it does not name; None: no row, if `teacher_at_student` is given.
  """
  chex.assert_rank([signal.token_ids, student_ids], 3)
  chex.assert_equal_shape_prefix([signal.token_ids, student_ids], 2)
  chex.assert_type([signal.token_ids, student_ids], int)
  named = signal.token_ids >= 0
  # One at a time: [B, T, K', K] at once takes a hundred times the memory.
  of_both = jax.lax.map(lambda ids: (ids[..., None] == signal.token_ids).any(-1), jnp.moveaxis(student_ids, -1, 0))
  new_ids = jnp.where(jnp.moveaxis(of_both, 0, -1), -1, student_ids)
  if teacher_at_student is None or external is not None:
    left = 1.0 - jnp.where(named, jnp.exp(signal.log_probs), 0).sum(-1)
    others = jnp.maximum(vocab_size - named.sum(-1), 1)
    share = jnp.log(jnp.maximum(left, jnp.finfo(left.dtype).tiny) / others)
    spread = jnp.broadcast_to(share[..., None], student_ids.shape)
    known = spread if teacher_at_student is None else teacher_at_student
    teacher_at_student = known if external is None else jnp.where(external[:, None, None], spread, known)
  chex.assert_equal_shape([student_ids, teacher_at_student])
  return signal.replace(
    token_ids=jnp.concatenate([signal.token_ids, new_ids], axis=-1),
    log_probs=jnp.concatenate([signal.log_probs, teacher_at_student.astype(signal.log_probs.dtype)], axis=-1),
  )
