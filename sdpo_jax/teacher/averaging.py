"""The teacher's parameters as a transformation of parameter trees, in the style of optax.

A teacher is a pair of pure functions: `init(params)` makes the teacher's tree before the first generation batch, and
`update(teacher, params, step)` moves it once at the end of every generation batch, not once per optimizer step
(reference dp_actor.py:913-920). Trees have the structure of `trainable`, so the teacher of an adapter is an average of
its factors and as small. Teacher trees hold at least float32; averaging in bfloat16 would round small rates away.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.types import Tree

T = TypeVar('T', jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class TeacherSpec:
  """The teacher's parameters: the settings `actor.self_distillation.teacher_…` with the names of these fields."""

  regularization: str
  update_rate: float  # Rate of the moving average, or mixing weight of the trust region.
  restart_interval: int | None  # Generation batches; None: it does not restart.


class TeacherTransform(NamedTuple):
  """How the teacher's weights are initialised and updated."""

  init: Callable[[Tree], Tree]  # params -> teacher.
  update: Callable[[Tree, Tree, jax.Array | int], Tree]  # teacher, params, step -> teacher.


def live() -> TeacherTransform:
  """Return a teacher that is the current student (q_θ, paper Table 4: diverges); its tree is an empty dict."""
  return TeacherTransform(init=lambda params: {}, update=lambda teacher, params, step: teacher)


def frozen() -> TeacherTransform:
  """Return a teacher that keeps the initial weights (q_θref, paper Table 4)."""
  return TeacherTransform(init=_copy, update=lambda teacher, params, step: teacher)


def ema(rate: float) -> TeacherTransform:
  """Return an EMA teacher: teacher ← (1 − rate)·teacher + rate·params (reference dp_actor.py:132-151).

  Rate 0 leaves the teacher unchanged, even an empty one; rate 1 copies the student exactly. `update` raises ValueError
  if the teacher has no tree of its own: an empty tree, or the student's own tree or arrays.
  """

  def update(teacher: Tree, params: Tree, step: jax.Array | int) -> Tree:
    del step
    if rate == 0:
      return teacher
    _check_own(teacher, params)
    if rate == 1:
      return jax.tree.map(lambda t, p: jnp.asarray(p, t.dtype, copy=True), teacher, params)
    return jax.tree.map(lambda t, p: average(t, jnp.asarray(p, t.dtype), rate), teacher, params)

  return TeacherTransform(init=_copy, update=update)


def average(teacher: T, parameter: T, rate: float | np.floating) -> T:
  """Return (1 − rate)·teacher + rate·parameter, of arrays of one dtype in JAX or NumPy."""
  return teacher * (1 - rate) + parameter * rate


def scaled_ema_rate(rate: float, batch_ratio: float) -> float:
  """Return the EMA rate for a batch that is `batch_ratio` times as large: 1 − (1 − rate)^batch_ratio.

  One update with a batch κ times as large replaces κ updates, in which the teacher would have kept ρ^κ of itself,
  ρ = 1 − rate (Busbridge et al. 2023, "How to Scale Your EMA", arXiv 2307.13813). The result is accurate to the last
  bit but one, even for rates far below the rounding of 1. The learning rate has a scaling rule of its own.

  Args:
    rate: EMA rate at the old batch size, in [0, 1].
    batch_ratio: κ, new size ÷ old size; positive, below 1 for a smaller batch.

  Raises:
    ValueError: an argument is out of range.
  """
  if not 0 <= rate <= 1:
    raise ValueError(f'An EMA rate lies in [0, 1]; {rate} does not.')
  if not 0 < batch_ratio < math.inf:
    raise ValueError(f'The ratio of batch sizes must be positive and finite, not {batch_ratio}.')
  return 1.0 if rate == 1 else -math.expm1(batch_ratio * math.log1p(-rate))


def restart(every: int) -> TeacherTransform:
  """Return a teacher that is the student at the last multiple of `every` generation batches (≥ 1).

  `step` counts generation batches from 0, so the batch with `step = every − 1` is the first to replace the teacher.
  """
  if every < 1:
    raise ValueError(f'A teacher must restart every 1 or more generation batches, not {every}.')

  def update(teacher: Tree, params: Tree, step: jax.Array | int) -> Tree:
    _check_own(teacher, params)
    now = (jnp.asarray(step) + 1) % every == 0
    return jax.tree.map(lambda t, p: jnp.where(now, jnp.asarray(p, t.dtype), t), teacher, params)

  return TeacherTransform(init=_copy, update=update)


def make(spec: TeacherSpec) -> TeacherTransform:
  """Return the transformation for `TeacherSpec.regularization`."""
  return {
    'live': live,
    'base': live,  # The frozen base without the trainable part, so the teacher has no tree.
    'frozen': frozen,
    'ema': lambda: ema(spec.update_rate),
    'lora_ema': lambda: ema(spec.update_rate),
    'restart': lambda: restart(spec.restart_interval),
    'trust-region': frozen,  # Its logits are mixed with the student's (paper Eq. 16).
  }[spec.regularization]()


def signal_parameters(teacher: Tree, params: Tree, spec: TeacherSpec) -> tuple[Tree, Tree | None]:
  """Return the parameters of the policies that read the teacher's context.

  Args:
    teacher: the teacher's tree; an empty dict for a live teacher and for the base alone.
    params: the student's trainable tree.
    spec: which parameters the teacher has.

  Returns:
    (own, mixed): `own` are the teacher's; `mixed` is None, or for the trust region the student's parameters, whose
    logits in the same context are mixed in with weight `update_rate` (reference dp_actor.py:51-64).
  """
  if spec.regularization == 'live':
    return params, None
  if spec.regularization == 'base':
    return {}, None
  return teacher, params if spec.regularization == 'trust-region' else None


def _copy(params: Tree) -> Tree:
  # A copy, because the student's buffers are donated by the next update.
  return jax.tree.map(lambda p: jnp.array(p, jnp.promote_types(p.dtype, jnp.float32), copy=True), params)


def _check_own(teacher: Tree, params: Tree) -> None:
  teacher_leaves, leaves = jax.tree.leaves(teacher), jax.tree.leaves(params)
  shared = any(t is p for t, p in zip(teacher_leaves, leaves, strict=False))
  if shared or (leaves and not teacher_leaves):
    found = 'the student' if shared else 'empty'
    raise ValueError(f'An averaged teacher needs a tree of its own, and the teacher is {found}: make it with `init`.')
