"""The divergence of a student from its teacher on held-out questions: KL(teacher‖student) of every next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools

import jax
import numpy as np

from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.distributed.mesh import put_rows
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation.completions import samples_by_source
from sdpo_jax.learning import batching
from sdpo_jax.learning.readings import divergence_program
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import batch_spec, prompt_spec
from sdpo_jax.types import Example, Rollouts, TokenRows, Tree

# Metrics of an evaluation: the divergence on the student's completions, and on the teacher's.
ON_STUDENT, ON_TEACHER = 'kl_on_student', 'kl_on_teacher'


def measure(
  session: Session, trainable: Tree, examples: Sequence[Example], *, seed: int, stop: Stop = NEVER
) -> dict[str, dict[str, float]]:
  """Return the mean divergence, nats per token, on completions of the student and of the teacher, by data source.

  Each of the two samples `val_kwargs.n` completions of each question from its unmodified distribution (temperature 1,
  no truncation). The mean is over all of their tokens, including the one that ends a completion.

  Args:
    session: session with a teacher that reads a document.
    trainable: trainable parameters of the student.
    examples: held-out questions.
    seed: seed of the sampling noise.
    stop: whether the run is to stop; checked during sampling and before each micro-batch.

  Returns:
    `ON_STUDENT` and `ON_TEACHER` of each data source.

  Raises:
    UserError: the session has no such teacher.
    StoppedError: `stop` asked the run to stop.
  """
  config = session.config
  if session.teachers_sampler is None:
    raise UserError(
      'trainer.test_divergence=true compares a cartridge with the model that reads its document, but there is no '
      'cartridge here: set trainer.test_divergence=false.'
    )
  prompts = [prompt_tokens(session.tokenizer, example, prompt_spec(config)) for example in examples]
  members = session.members(examples)
  writers = {
    ON_STUDENT: (session.sampler, session.base, trainable),
    ON_TEACHER: session.teacher_writer,
  }
  program = divergence_program(session.policy, session.teacher, config.actor.logits_chunk_size, session.mesh)
  score = functools.partial(program, session.base, trainable, session.teacher.base)
  metrics: dict[str, dict[str, float]] = {}
  for name, (sampler, base, tree) in writers.items():
    rollouts = sampler.sample(
      base,
      tree,
      prompts,
      n=config.val_kwargs.n,
      max_tokens=config.data.max_response_length,
      seed=seed,
      step=0,
      members=members,
      between=stop.check,
    )
    values = values_of_tokens(session, prompts, rollouts, score, stop, members)
    for source, samples in samples_by_source(examples, rollouts.group).items():
      mean = float(values[samples][rollouts.completion_mask[samples]].astype(np.float64).mean())
      metrics.setdefault(source, {})[name] = mean
  return metrics


def values_of_tokens(
  session: Session,
  prompts: Sequence[list[int]],
  rollouts: Rollouts,
  score: Callable[[TokenRows, jax.Array, jax.Array], jax.Array],
  stop: Stop,
  members: np.ndarray | None = None,
) -> np.ndarray:
  """Return a value of each token of completions, [N, T] float32; 0 after their ends.

  Args:
    session: session of the run.
    prompts: G student prompts.
    rollouts: N completions.
    score: maps (rows, targets, mask) of a micro-batch to the values of its tokens, [B, T].
    stop: whether the run is to stop; checked before each micro-batch.
    members: [G] from `Session.members`, if `score` reads them.
  """
  batch = batching.GenerationBatch(
    prompts=[prompts[group] for group in rollouts.group],
    teacher_prompts=None,
    rollouts=rollouts,
    distill_mask=np.zeros(rollouts.completion_mask.shape, np.float32),
    members=None if members is None else members[rollouts.group],
  )
  found = np.zeros(rollouts.completion_mask.shape, np.float32)
  for micro in batching.student_micro_batches(batch, batch_spec(session.config), session.mesh.size):
    stop.check()
    arrays = put_rows(session.mesh, (micro.batch.student, micro.batch.targets, micro.batch.mask))
    batch.scatter(micro.samples, jax.device_get(score(*arrays)), found)
  return found
