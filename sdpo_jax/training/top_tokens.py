"""The K most likely tokens of student and teacher at each of the T positions of N completions, for `rollouts/`."""

from __future__ import annotations

import functools

import jax
import numpy as np

from sdpo_jax.distributed.mesh import put_rows
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.learning import batching
from sdpo_jax.learning.readings import PolicyTopTokens, TopTokens, top_tokens_program
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import batch_spec, update_spec
from sdpo_jax.types import TrainState


def measure(
  session: Session, state: TrainState, batch: batching.GenerationBatch, k: int, stop: Stop = NEVER
) -> TopTokens:
  """Return the most likely tokens of student and teacher for all completions of a generation batch, on the host.

  For samples without a signal of the teacher, its ids are −1 and its log-probs NaN.

  Args:
    session: session of the run.
    state: state before the update; it is not donated.
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
    jax.tree.map(functools.partial(batch.scatter, micro.samples), said, found)
  if batch.signal is not None:
    return found.replace(teacher=of_signal(batch, k))
  if found.teacher is None:
    return found

  def if_taught(here: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    return np.where(batch.taught.reshape(-1, *[1] * (here.ndim - 1)), here, otherwise)

  return found.replace(teacher=jax.tree.map(if_taught, found.teacher, _nothing(shape, k)))


def _nothing(shape: tuple[int, int], k: int) -> PolicyTopTokens:
  """Return empty results: ids of −1 and log-probs of NaN, [N, T, …]."""
  return PolicyTopTokens(
    np.full((*shape, k), -1, np.int32), np.full((*shape, k), np.nan, np.float32), np.full(shape, np.nan, np.float32)
  )


def of_signal(batch: batching.GenerationBatch, k: int) -> PolicyTopTokens:
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
