"""Evaluations on held-out questions during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import logging
from typing import Any

from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.environments.grading import Graders
from sdpo_jax.evaluation.evaluate import Evaluation, evaluate
from sdpo_jax.training import divergence, perplexity, step_records
from sdpo_jax.training.directory.ownership import Ownership
from sdpo_jax.training.joint_errors import JointErrors
from sdpo_jax.training.preemption import Preemption
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import evaluation_spec
from sdpo_jax.types import Example, TrainState, Tree


@dataclasses.dataclass
class Evaluations:
  """The evaluations of a run: it runs them, and keeps their metrics by step, without those that a rollback undid."""

  session: Session
  sampler: Any  # The session's, or what draws as it does, `evaluate.evaluate`.
  graders: Graders
  questions: Sequence[Example]  # Held-out ones.
  ownership: Ownership | None  # Of the process that writes the files; None on all others.
  joint_errors: JointErrors
  preemption: Preemption
  by_step: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict, init=False)

  @property
  def newest(self) -> Mapping[str, float] | None:
    """The metrics of the latest evaluation; None before the first."""
    return self.by_step[max(self.by_step)] if self.by_step else None

  def due(self, step: int) -> bool:
    """Return whether a step ends with an evaluation."""
    trainer = self.session.config.trainer
    at_interval = bool(trainer.test_freq and step % trainer.test_freq == 0)
    return bool(self.questions) and (step == trainer.total_training_steps or at_interval)

  def recall(self, line: Mapping[str, Any]) -> None:
    """Restore the metrics of an evaluation from a line of metrics.jsonl, if it has any."""
    if found := evaluated(line):
      self.by_step[line['step']] = found

  def forget(self, after: int) -> None:
    """Drop the evaluations of steps later than `after`, which a rollback has undone."""
    self.by_step = {step: found for step, found in self.by_step.items() if step <= after}

  def run(self, state: TrainState, step: int) -> dict[str, float]:
    """Evaluate the student after a step, and return its metrics."""
    evaluation = evaluate_session(
      self.session, state.trainable, self.questions, self.graders, self.preemption, self.sampler
    )
    with self.joint_errors.alone():
      if self.ownership is not None:
        self.ownership.check()
        step_records.write_evaluation(self.session.workdir, step, evaluation)
    logging.info('Evaluation at step %d: %s', step, evaluation.metrics)
    self.by_step[step] = evaluation.flat()
    return self.by_step[step]


def evaluate_session(
  session: Session,
  parameters: Tree,
  questions: Sequence[Example],
  graders: Graders,
  stop: Stop = NEVER,
  sampler: Any = None,
) -> Evaluation:
  """Return the evaluation of parameters on held-out questions, with what else the session's settings ask for.

  Arguments and errors are those of `evaluate.evaluate`; without a sampler, the session's draws.
  """
  settings = session.config
  evaluation = evaluate(
    sampler or session.sampler,
    session.base,
    parameters,
    questions,
    evaluation_spec(settings),
    session.tokenizer,
    graders,
    seed=settings.seed,
    stop=stop,
  )
  if settings.trainer.test_perplexity:
    evaluation = evaluation.with_metrics(perplexity.measure(session, parameters, questions, stop))
  if settings.trainer.test_divergence:
    more = divergence.measure(session, parameters, questions, seed=settings.seed, stop=stop)
    evaluation = evaluation.with_metrics(more)
  return evaluation


def evaluated(line: Mapping[str, Any]) -> dict[str, float]:
  """Return the metrics of evaluations in a line of metrics.jsonl."""
  return {name: value for name, value in line.items() if name.startswith('eval/')}
