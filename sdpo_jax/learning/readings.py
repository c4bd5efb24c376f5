"""Forward passes without training: the most likely tokens of student and teacher, and their divergence.

N completions of T tokens; K most likely tokens of a position; B rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.distributed.mesh import compiler_options, replicated
from sdpo_jax.learning.update import UpdateSpec, layout
from sdpo_jax.models.forward import forward
from sdpo_jax.models.policy import Policy
from sdpo_jax.objective import log_probs
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.objective.sharded import Layout
from sdpo_jax.teacher.signal import Teacher, teacher_signal
from sdpo_jax.types import Batch, TeacherSignal, TokenRows, TrainState, Tree


@flax.struct.dataclass
class PolicyTopTokens:
  """One policy's most likely tokens, with log-probs in nats at the rollout temperature; of B rows or N samples."""

  ids: jax.Array | np.ndarray  # [B, T, K] int32, the most likely tokens first; −1: no further token is known.
  log_probs: jax.Array | np.ndarray  # [B, T, K], the log-probs of `ids`.
  own: jax.Array | np.ndarray  # [B, T], the log-prob of the completion's token; NaN: unknown.


@flax.struct.dataclass
class TopTokens:
  """The most likely tokens of student and teacher."""

  student: PolicyTopTokens
  teacher: PolicyTopTokens | None  # None: there is no teacher.


def most_likely(
  policy: Policy,
  spec: UpdateSpec,
  layout: Layout | None,
  base: Tree,
  state: TrainState,
  batch: Batch,
  teacher_base: Tree | None = None,
  *,
  teacher: Teacher,
  k: int,
) -> TopTokens:
  """Return the most likely tokens of student and teacher for a micro-batch; no gradient flows.

  Args:
    policy: the model.
    spec: temperature, chunk size, and which parameters teach.
    layout: how the arguments are sharded over a mesh; None: one device.
    base: frozen parameters.
    state: state before the update; its trainable and teacher trees are read.
    batch: rows without coefficients.
    teacher_base: frozen parameters of the teacher, `Teacher.base`; None: `base`.
    teacher: the model that reads the teacher's rows, if the batch has any; its `base` is ignored.
    k: K.
  """

  def said(hidden: jax.Array, unembedding: jax.Array) -> PolicyTopTokens:
    found = log_probs.scores(
      hidden,
      unembedding,
      batch.targets,
      k,
      temperature=spec.objective.temperature,
      chunk_size=min(spec.objective.chunk_size, log_probs.CHUNK),
      mask=batch.mask,
      vocab_size=policy.vocab_size,
      layout=layout,
    )
    return PolicyTopTokens(found.top_ids, found.top_log_probs, found.log_prob)

  student = said(*forward(policy, base, state.trainable, batch.student))
  if batch.teacher is None:
    return TopTokens(student, None)
  asked = dataclasses.replace(teacher, base=teacher_base)
  signal = teacher_signal(asked, policy, base, state, batch.teacher, spec.teacher)
  return TopTokens(student, said(*_states_and_unembedding(signal)))


def top_tokens_program(
  policy: Policy, teacher: Teacher, spec: UpdateSpec, mesh: jax.sharding.Mesh
) -> Callable[..., TopTokens]:
  """Return the jitted `most_likely` from `base` on, with a static k; calls with the same arguments share it."""
  own = dataclasses.replace(teacher, base=None)
  return program_of(mesh, most_likely, policy, spec, layout(mesh), teacher=own, static_argnames='k')


@functools.lru_cache(maxsize=32)
def program_of(
  mesh: jax.sharding.Mesh, function: Callable[..., Any], *arguments: Any, static_argnames: str = '', **named: Any
) -> Callable[..., Any]:
  """Return a jitted function with its first arguments bound and results on all devices; equal calls share it."""
  return jax.jit(
    functools.partial(function, *arguments, **named),
    static_argnames=static_argnames or None,
    out_shardings=replicated(mesh),
    compiler_options=compiler_options(mesh),
  )


def _states_and_unembedding(signal: TeacherSignal) -> tuple[jax.Array, jax.Array]:
  """Return hidden states [B, T, D] and an unembedding [V, D] whose products are the teacher's logits.

  The logits of a trust region are (1 − rate)·teacher + rate·student: one product over both models' concatenated states.
  """
  if signal.mix_hidden is None:
    return signal.hidden, signal.unembedding
  rate = jnp.asarray(signal.mix_rate, jnp.float32)
  states = ((1 - rate) * signal.hidden.astype(jnp.float32), rate * signal.mix_hidden.astype(jnp.float32))
  matrices = (signal.unembedding.astype(jnp.float32), signal.mix_unembedding.astype(jnp.float32))
  return jnp.concatenate(states, -1), jnp.concatenate(matrices, -1)


def completion_divergences(
  student: Policy,
  teacher: Teacher,
  chunk_size: int,
  mesh: jax.sharding.Mesh,
  base: Tree,
  trainable: Tree,
  teacher_base: Tree | None,
  rows: TokenRows,
  targets: jax.Array,
  mask: jax.Array,
) -> jax.Array:
  """Return KL(teacher‖student) of completion tokens over the whole vocabulary, at temperature 1: nats, [B, T].

  Args:
    student: the student's policy.
    teacher: the model that reads the same rows after a context of its own; its `base` is ignored.
    chunk_size: number of tokens whose logits exist at one time.
    mesh: devices that share the rows.
    base: the student's frozen parameters.
    trainable: the student's trainable parameters.
    teacher_base: frozen parameters of the teacher, `Teacher.base`.
    rows: prompts with completions.
    targets: [B, T] int32, the completions.
    mask: [B, T] float32, 1 on completion tokens; elsewhere the result is 0.
  """
  hidden, unembedding = forward(student, base, trainable, rows)
  own = dataclasses.replace(teacher, base=teacher_base).whole_base(base)
  taught, of_teacher = forward(teacher.policy, own, {}, rows)
  _, aux = objective(
    hidden,
    unembedding,
    TeacherSignal(hidden=taught, unembedding=of_teacher),
    targets=targets,
    mask=mask,
    distill_coef=mask,
    config=ObjectiveConfig(alpha=0.0, distillation_topk=None, is_clip=None, chunk_size=chunk_size),
    vocab_size=student.vocab_size,
    layout=layout(mesh),
  )
  return aux['divergence']


def divergence_program(
  student: Policy, teacher: Teacher, chunk_size: int, mesh: jax.sharding.Mesh
) -> Callable[..., jax.Array]:
  """Return the jitted `completion_divergences` from `base` on; calls with the same arguments share it."""
  own = dataclasses.replace(teacher, base=None)
  return program_of(mesh, completion_divergences, student, own, chunk_size, mesh)
