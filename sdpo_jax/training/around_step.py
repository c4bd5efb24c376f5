"""The hooks of a training step: sampling ahead, gathering completions, asking an external teacher, recording."""

from __future__ import annotations

import dataclasses

import numpy as np

from sdpo_jax.environments.grading import Graders
from sdpo_jax.learning.batching import GenerationBatch
from sdpo_jax.learning.readings import TopTokens
from sdpo_jax.teacher.context import TeacherContext
from sdpo_jax.training import endpoint_teacher, feedback_writing, stored_answers, top_tokens
from sdpo_jax.training.ahead import Ahead, SampledBatch
from sdpo_jax.training.carry_over import CarryOver
from sdpo_jax.training.gathering import GatheredBatch, Gathering
from sdpo_jax.training.graded import GradedRollouts, learned_from
from sdpo_jax.training.joint_errors import JointErrors
from sdpo_jax.training.preemption import Preemption
from sdpo_jax.training.session import Session
from sdpo_jax.training.step import Timer, advantages_of, build_teacher_prompts, rollout_and_grade, sampling_seed
from sdpo_jax.types import TeacherSignal, TrainState


@dataclasses.dataclass(frozen=True)
class AroundStep:
  """The hooks of `training.step.step` in a run, with the batches and completions that wait between steps."""

  session: Session
  graders: Graders
  ahead: Ahead
  gathering: Gathering | None  # None: every generation batch has an update of its own.
  joint_errors: JointErrors
  preemption: Preemption

  def sample(self, state: TrainState, step: int, timer: Timer) -> tuple[list[GradedRollouts], SampledBatch]:
    """Sample and grade the batches that must exist before the update of `step`.

    Returns:
      Those batches, and the batch of `step`, which may have been sampled before, or read from the data.

    Raises:
      StoppedError: the run was told to stop.
      UserError: a batch could not be graded.
    """
    if isinstance(self.ahead, CarryOver):
      own = self.ahead.draw(state, step, timer)
      self._write_feedback(own.graded, state, step, timer)
      return [own.graded], own
    drawn = [self._draw(state, step, later, timer) for later in self.ahead.missing(step)]
    return [] if self.session.config.rollout.sampled_by == 'data' else drawn, self.ahead.take(step)

  def _draw(self, state: TrainState, step: int, later: int, timer: Timer) -> GradedRollouts:
    with self.joint_errors.alone():
      position, examples = self.ahead.ask()
    self.joint_errors.meet(f'the questions of step {later}')
    session, stop = self.session, self.preemption
    if session.config.rollout.sampled_by == 'data':
      graded = stored_answers.read(session, examples)
    else:
      graded = rollout_and_grade(session, self.graders, state, examples, later, timer, stop)
    self._write_feedback(graded, state, later, timer)
    self.ahead.add(SampledBatch(later, step, position, graded))
    return graded

  def _write_feedback(self, graded: GradedRollouts, state: TrainState, step: int, timer: Timer) -> None:
    if feedback_writing.is_used(self.session.config):
      with timer('feedback'):
        feedback_writing.write(self.session, graded, state, sampling_seed(state), step, self.preemption)
    self.preemption.check()

  def gather(self, own: SampledBatch, context: TeacherContext | None) -> GatheredBatch | None:
    """Return the completions that the update learns from, the step's own or gathered ones; None if too few wait."""
    if self.gathering is None:
      count = len(own.graded.rollouts)
      return GatheredBatch(own.graded, context, np.full(count, own.step), np.arange(count))
    self.gathering.add(own, context, advantages_for(self.session, own.graded))
    return self.gathering.take()

  def ask(self, learned: GatheredBatch) -> TeacherSignal | None:
    """Return the scores of an external teacher, or the stored ones; None if a teacher is on the mesh, or there is none.

    Raises:
      UserError: the teacher could not score a completion; the state is intact.
      StoppedError: the run was told to stop; the state is intact.
    """
    endpoint, spec, context = self.session.endpoint, self.session.spec, learned.context
    if self.session.config.rollout.sampled_by == 'data':
      return stored_answers.signal(learned.graded, spec.external_support)
    if endpoint is None:
      return None
    wanted = (context.mask > 0) & learned_from(spec, learned.graded)
    rollouts = learned.graded.rollouts
    return endpoint_teacher.signal(endpoint, context.prompt_tokens, rollouts, wanted, spec, self.preemption)

  def read(self, state: TrainState, batch: GenerationBatch, step: int, timer: Timer) -> TopTokens | None:
    """Return the most likely tokens of student and teacher before the update, if this step's rollouts are recorded."""
    trainer = self.session.config.trainer
    if not (trainer.records_top_tokens and trainer.writes_rollouts(step)):
      return None
    with timer('record'):
      return top_tokens.measure(self.session, state, batch, trainer.record_top_tokens, self.preemption)

  def start_again(self) -> None:
    """Drop the batches that were sampled with weights that a rollback has undone."""
    self.ahead.ask_again()
    if self.gathering is not None:
      self.gathering.clear()


def advantages_for(session: Session, graded: GradedRollouts) -> np.ndarray | None:
  """Return the advantages [N] of a generation batch; None if no term of the loss reads them."""
  return advantages_of(session.config, graded) if session.spec.needs_advantages else None


def prepared_again(session: Session, seed: int, drawn: SampledBatch) -> tuple[TeacherContext, np.ndarray | None]:
  """Rebuild the teacher's prompts and the advantages of a generation batch, as they were when it was sampled."""
  context = build_teacher_prompts(session, drawn.graded, seed, drawn.step)
  return context, advantages_for(session, drawn.graded)
