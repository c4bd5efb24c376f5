"""The most likely tokens of student and teacher at every position of a completion, for the files of a run.

N completions of T tokens; K most likely tokens of a position; B rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from models.forward import forward
from models.policy import Policy
from sdpo_jax.distributed.mesh import compiler_options, put_rows, replicated
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import UpdateSpec, layout
from sdpo_jax.objective import log_probs
from sdpo_jax.objective.sharded import Layout
from sdpo_jax.teacher.signal import Teacher, teacher_signal
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import batch_spec, update_spec
from sdpo_jax.types import Batch, TeacherSignal, TrainState, Tree


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
  return _top_tokens_program(policy, dataclasses.replace(teacher, base=None), spec, mesh)


@functools.lru_cache(maxsize=16)
def _top_tokens_program(
  policy: Policy, teacher: Teacher, spec: UpdateSpec, mesh: jax.sharding.Mesh
) -> Callable[..., TopTokens]:
  return jax.jit(
    functools.partial(most_likely, policy, spec, layout(mesh), teacher=teacher),
    static_argnames='k',
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


def measure(
  session: Session, state: TrainState, batch: batching.GenerationBatch, k: int, stop: Stop = NEVER
) -> TopTokens:
  """Return the most likely tokens of student and teacher for all completions of a generation batch, on the host.

  For samples that the teacher does not teach, its ids are −1 and its log-probs NaN.

  Args:
    session: session of the run.
    state: state before the update; only read.
    batch: the generation batch, with the signal of an external teacher if there is one.
    k: K; for an external teacher at most the K of its signal.
    stop: whether the run is to stop; checked before every micro-batch.

  Raises:
    StoppedError: `stop` asked the run to stop; the state is intact.
  """
  config = session.config
  teacher, spec = session.teacher or Teacher(session.policy), update_spec(config)
  share = batching.shares_prompts(batch_spec(config), *teacher.readers(session.policy, spec.teacher))
  most = top_tokens_program(session.policy, teacher, spec, session.mesh)
  shape = batch.rollouts.completion_mask.shape
  found = TopTokens(_nothing(shape, k), None if batch.teacher_prompts is None else _nothing(shape, k))
  for micro in batching.reading_micro_batches(batch, batch_spec(config), session.mesh.size, share):
    stop.check()
    arrays = put_rows(session.mesh, micro.batch)
    said = jax.device_get(most(session.base, state, arrays, teacher.base, k=k))
    jax.tree.map(lambda values, target, micro=micro: micro.scatter(values, target), said, found)
  if batch.signal is not None:
    return found.replace(teacher=_of_signal(batch, k))
  if found.teacher is None:
    return found
  return found.replace(teacher=_only(found.teacher, batch.taught))


def _nothing(shape: tuple[int, int], k: int) -> PolicyTopTokens:
  """Return empty results: ids of −1 and log-probs of NaN, [N, T, …]."""
  return PolicyTopTokens(
    np.full((*shape, k), -1, np.int32), np.full((*shape, k), np.nan, np.float32), np.full(shape, np.nan, np.float32)
  )


def _only(said: PolicyTopTokens, samples: np.ndarray) -> PolicyTopTokens:
  """Return the results of `samples` [N] bool, with those of the others emptied."""
  nothing = _nothing(said.own.shape, said.ids.shape[-1])
  return jax.tree.map(
    lambda here, none: np.where(samples.reshape(-1, *[1] * (here.ndim - 1)), here, none), said, nothing
  )


def _of_signal(batch: batching.GenerationBatch, k: int) -> PolicyTopTokens:
  """Return an external teacher's most likely tokens, among those in its signal."""
  ids, given = batch.signal.token_ids, batch.signal.log_probs.astype(np.float32)
  given = np.where(ids < 0, -np.inf, given)
  order = np.argsort(-given, axis=-1, kind='stable')[..., :k]
  ids, given = np.take_along_axis(ids, order, -1), np.take_along_axis(given, order, -1)
  at_token = (batch.signal.token_ids == batch.rollouts.completion_tokens[..., None]) & (batch.signal.token_ids >= 0)
  own = np.where(at_token, batch.signal.log_probs, -np.inf).max(-1)
  return PolicyTopTokens(
    ids, np.where(ids < 0, np.nan, given), np.where(at_token.any(-1), own, np.nan).astype(np.float32)
  )
