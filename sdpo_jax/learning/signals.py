"""The teacher's signal in requests: its log-probs of the student's top K, of its own, or as given.

In a run, the update itself computes the teacher's hidden states, which are the signal (`teacher.signal`). In a request,
the teacher scores the completions once, before the first step, and the signal is its log-probs of K tokens.
B rows, T completion tokens, K tokens of a support, D numbers of a hidden state.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sdpo_jax.objective import jsd_pg
from sdpo_jax.objective.log_probs import Scores, log_probs_of_ids, scores
from sdpo_jax.types import TeacherSignal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TeacherInputs:
  """The inputs of the losses of B rows that concern the teacher, as arrays."""

  mixes: Any  # [B] bool, whether the loss is `jsd_pg`, whose advantages come from the teacher.
  named: Any  # [B] bool, whether the support has the tokens that the teacher names; else the student's.
  # [B] bool, whether the support has the student's tokens as well; None: in no row, so that the signal has K entries.
  both: Any
  mixture: Any  # [B] float32, alpha of the `jsd_pg` rows.
  design: Any  # [B] bool, whether `form='design'`.
  same: Any  # [B] bool, whether the teacher has the student's factors and reads the same prompt.
  advantage: Any  # [B] float32, of the rows that are not `jsd_pg`.
  has_old: Any  # [B] bool, whether the log-probs of the policy that drew the completion are known.
  given: Any  # [B] bool, whether the lesson brings the teacher's scores (`Taught`).
  given_ids: Any  # [B, T, K] int32, the tokens of these scores.
  given_log_probs: Any  # [B, T, K], their log-probs.
  given_own: Any  # [B, T], the log-probs of the targets.


def first(
  hidden: jax.Array,
  teacher_hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  old: jax.Array,
  inputs: TeacherInputs,
  *,
  k: int,
  **settings: Any,
) -> tuple[Scores, Scores, jax.Array, TeacherSignal, jax.Array, jax.Array]:
  """Score a micro-batch under student and teacher, before any step.

  Returns:
    The student's and the teacher's scores, the teacher's states [B, T, D] and its signal, the advantages [B, T], and
    the log-probs [B, T] of the policy that drew the completions.
  """
  # The two programs that compute states may pad prompts to different lengths, and so round differently.
  teacher_hidden = jnp.where(inputs.same[:, None, None], hidden, teacher_hidden)
  theirs = scores(teacher_hidden, unembedding, targets, k, mask=mask, **settings)
  rows, wide = inputs.given[:, None], inputs.given[:, None, None]
  theirs = theirs.replace(
    log_prob=jnp.where(rows, inputs.given_own, theirs.log_prob),
    top_ids=jnp.where(wide, inputs.given_ids, theirs.top_ids),
    top_log_probs=jnp.where(wide, inputs.given_log_probs, theirs.top_log_probs),
  )
  own = scores(hidden, unembedding, targets, k, mask=mask, **settings)
  agreed = _agreed(hidden, teacher_hidden) & ~rows
  theirs = theirs.replace(log_prob=jnp.where(agreed, own.log_prob, theirs.log_prob))
  signal = _signal(own, theirs, teacher_hidden, unembedding, mask, inputs, agreed, **settings)
  mixed, design = (
    jsd_pg.advantages(own.log_prob, theirs.log_prob, inputs.mixture, form) for form in ('mixture', 'design')
  )
  by_teacher = jnp.where(inputs.design[:, None], design, mixed)
  advantages = jnp.where(inputs.mixes[:, None], by_teacher, inputs.advantage[:, None])
  old = jnp.where(inputs.has_old[:, None], old, own.log_prob)
  return own, theirs, teacher_hidden, signal, jnp.where(mask, advantages, 0), old


def support(
  hidden: jax.Array,
  teacher_hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  theirs: Scores,
  inputs: TeacherInputs,
  *,
  k: int,
  **settings: Any,
) -> TeacherSignal:
  """Return the teacher's signal after a step, with the student's new top K in place of the old one."""
  own = scores(hidden, unembedding, targets, k, mask=mask, **settings)
  agreed = _agreed(hidden, teacher_hidden) & ~inputs.given[:, None]
  return _signal(own, theirs, teacher_hidden, unembedding, mask, inputs, agreed, **settings)


def _agreed(hidden: jax.Array, teacher_hidden: jax.Array) -> jax.Array:
  """Return where the states of student and teacher are equal bit by bit, [B, T] bool; their scores are equal there."""
  return (hidden == teacher_hidden).all(-1)


def _signal(
  own: Scores,
  theirs: Scores,
  teacher_hidden: jax.Array,
  unembedding: jax.Array,
  mask: jax.Array,
  inputs: TeacherInputs,
  agreed: jax.Array,
  *,
  vocab_size: int,
  **settings: Any,
) -> TeacherSignal:
  """Return the teacher's log-probs on the student's top K or, for `named` rows, on its own, or on `both`.

  Where the two agree the signal names no token, so that the divergence and its gradient are exactly 0: the loss
  computes the student's scores in a separate program, which rounds differently.
  """
  at_own = log_probs_of_ids(teacher_hidden, unembedding, own.top_ids, mask=mask, vocab_size=vocab_size, **settings)
  wanted = inputs.named[:, None, None]
  signal = TeacherSignal(
    token_ids=jnp.where(wanted, theirs.top_ids, own.top_ids),
    log_probs=jnp.where(wanted, theirs.top_log_probs, at_own),
  )
  if inputs.both is not None:
    more = jnp.where(inputs.both[:, None, None], own.top_ids, -1)
    signal = jsd_pg.union(signal, more, vocab_size, at_own, inputs.given)
  return signal.replace(token_ids=jnp.where(agreed[..., None], -1, signal.token_ids))
