"""One generation batch on the host: roll out and grade, build teacher prompts, build the batch, run the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

import jax
import numpy as np

from sdpo_jax.data.grouping import first_of_same
from sdpo_jax.data.prompts import ChatFormat, prompt_tokens
from sdpo_jax.distributed.mesh import put_rows
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.outcomes import check_graded, graded_of, scores_of
from sdpo_jax.objective.advantages import grpo_advantages
from sdpo_jax.objective.importance import mismatch, rollout_is_weights
from sdpo_jax.rollout.grading_thread import GradingThread
from sdpo_jax.teacher.context import TeacherContext, build_teacher_context
from sdpo_jax.teacher.order import balanced_order
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training import batching
from sdpo_jax.types import Example, Outcome, Rollouts, TrainState

if TYPE_CHECKING:  # A session knows how to load models; a step need not.
  from sdpo_jax.training.session import Session


@dataclasses.dataclass
class GradedRollouts:
  """A graded generation batch, in batch order."""

  examples: list[Example]  # G.
  prompts: list[list[int]]  # G.
  rollouts: Rollouts  # N.
  outcomes: list[Outcome]  # N.
  sample_ids: np.ndarray  # [N] number of each sample as drawn, before any reordering.
  graders_busy_s: float  # Seconds in which this process's graders were at work, while it sampled or afterwards.


def rollout_and_grade(
  session: Session, graders: Graders, state: TrainState, examples: list[Example], step: int, timer: Timer
) -> GradedRollouts:
  """Sample n completions of each question and grade them as they finish.

  Raises:
    UserError: a grader cannot work, or too few could be graded (`environments.max_ungraded_fraction`). The state can
      still be saved, and every process of the run raises it.
  """
  config = session.config
  prompts = [prompt_tokens(session.tokenizer, example, config) for example in examples]
  with GradingThread(graders, examples, config.rollout.n) as grading:
    with timer('sample'):
      rollouts = session.sampler.sample(
        session.base,
        state.trainable,
        prompts,
        n=config.rollout.n,
        **config.rollout.method(),
        max_tokens=config.data.max_response_length,
        seed=sampling_seed(state),
        step=step,
        on_finished=grading.add,
      )
    with timer('grade'):
      outcomes = grading.outcomes()
  check_graded(outcomes, config.environments.max_ungraded_fraction)
  if config.data.group_duplicates:
    rollouts = dataclasses.replace(rollouts, group=first_of_same(examples)[rollouts.group])
  order = np.arange(len(rollouts))
  if config.trainer.batch_order == 'balanced':
    lengths = rollouts.completion_mask.sum(1) + rollouts.prompt_mask.sum(1)
    order = balanced_order(lengths, config.trainer.balance_partitions)
    rollouts, outcomes = rollouts.take(order), [outcomes[sample] for sample in order]
  return GradedRollouts(examples, prompts, rollouts, outcomes, sample_ids=order, graders_busy_s=grading.busy_s)


def sampling_seed(state: TrainState) -> int:
  """Return the seed of a run's rollouts and demonstration draws, from the state's key."""
  return int(jax.random.bits(state.rng, dtype=np.uint32))


def build_teacher_prompts(session: Session, graded: GradedRollouts, seed: int, step: int) -> TeacherContext | None:
  """Return the teacher's prompts for a graded batch; None where the objective needs no teacher."""
  config = session.config
  if not session.spec.needs_teacher:
    return None
  return build_teacher_context(
    [graded.examples[group].messages for group in graded.rollouts.group],
    graded.rollouts.group,
    graded.rollouts.text,
    graded.outcomes,
    config.actor.self_distillation,
    session.tokenizer,
    seed=seed,
    step=step,
    sample_ids=graded.sample_ids,
    chat=ChatFormat.of(config.data),
  )


def build_batch(
  session: Session,
  state: TrainState,
  graded: GradedRollouts,
  context: TeacherContext | None,
  metrics: dict[str, float],
) -> batching.GenerationBatch:
  """Return all that the update needs of a generation batch, with the trainer's log-probs where the objective asks.

  Args:
    session: of the run.
    state: before the update.
    graded: completions with their outcomes.
    context: the teacher's prompts; None: there is no teacher.
    metrics: gets `rollout_corr/*` where log-probs are computed.
  """
  config, rollouts, spec = session.config, graded.rollouts, session.spec
  shape = rollouts.completion_mask.shape
  graded_rows = graded_of(graded.outcomes)

  def per_token(values: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.asarray(values, np.float32)[:, None], shape)

  batch = batching.GenerationBatch(
    prompts=[graded.prompts[group] for group in rollouts.group],
    teacher_prompts=None if context is None else context.prompt_tokens,
    rollouts=rollouts,
    graded=graded_rows,
    distill_mask=per_token(np.zeros(len(rollouts)) if context is None else context.mask),
  )
  if spec.needs_advantages:
    norm_by_std = config.actor.policy_loss.norm_adv_by_std_in_grpo
    advantages = grpo_advantages(scores_of(graded.outcomes), rollouts.group, norm_by_std, graded=graded_rows)
    batch.advantages = per_token(advantages)
  if not spec.computes_log_probs:
    return batch
  log_probs = policy_log_probs(session, state, batch)
  metrics.update(mismatch(log_probs, rollouts.sampling_log_probs, rollouts.completion_mask))
  if spec.rollout_weights:
    correction = config.algorithm.rollout_correction
    weights, measured = rollout_is_weights(
      log_probs,
      rollouts.sampling_log_probs,
      (rollouts.completion_mask & graded_rows[:, None]).astype(np.float32),
      threshold=correction.rollout_is_threshold,
      batch_normalize=correction.rollout_is_batch_normalize,
    )
    batch.distill_weights = batch.policy_weights = np.asarray(weights, np.float32)
    metrics.update({name: float(value) for name, value in measured.items()})
  if spec.needs_old_log_probs:
    batch.old_log_probs = log_probs
  return batch


def policy_log_probs(session: Session, state: TrainState, batch: batching.GenerationBatch) -> np.ndarray:
  """Return log-probs [N, T] of all completions under the current policy, at the rollout temperature."""
  result = np.zeros(batch.rollouts.completion_tokens.shape, np.float32)
  for micro in batching.student_micro_batches(batch, session.config, session.mesh.size):
    student, targets = put_rows(session.mesh, (micro.batch.student, micro.batch.targets))
    log_probs, _ = session.update.log_probs(session.base, state.trainable, student, targets)
    micro.scatter(np.asarray(log_probs), result)
  return result * batch.rollouts.completion_mask


@dataclasses.dataclass
class UpdateReport:
  """What an update did."""

  loss: float  # mean over optimizer steps.
  grad_norm: float  # mean over optimizer steps, before clipping.
  learning_rate: float
  skipped: int  # optimizer steps with a gradient that was not finite.
  optimizer_steps: int
  token_values: dict[str, np.ndarray]  # [N, T] per-token quantities of the last epoch, NaN where not computed.
  trained_tokens: int  # tokens of student rows that went through forward and backward.
  teacher_tokens: int  # tokens of teacher rows that went through forward.


def run_update(session: Session, state: TrainState, batch: batching.GenerationBatch) -> tuple[TrainState, UpdateReport]:
  """Take all optimizer steps of a generation batch, then move the teacher."""
  config, update = session.config, session.update
  teacher = session.teacher or Teacher(session.policy)
  share = batching.shares_prompts(config, *teacher.readers(session.policy, config.actor.self_distillation))
  losses, reports, values = [], [], {}
  trained = teacher_tokens = 0
  shape = batch.rollouts.completion_tokens.shape
  for _ in range(config.actor.ppo_epochs):
    for samples in batching.mini_batches(config):
      grads = update.zero(state.trainable)
      pending = []
      for micro in batching.micro_batches(batch, samples, config, session.mesh.size, share):
        arrays = put_rows(session.mesh, micro.batch)
        grads, result = update.accumulate(session.base, state, grads, arrays, teacher.base)
        pending.append((micro, result))
        trained += micro.tokens(micro.batch.student)
        if micro.batch.teacher is not None:
          teacher_tokens += micro.tokens(micro.batch.teacher)
      state, report = update.apply(state, grads)
      losses.append(sum(float(result.loss) for _, result in pending))
      reports.append(jax.device_get(report))
      for micro, result in pending:
        for name, value in jax.device_get(result.aux).items():
          if value.ndim == 0:  # Parts of the loss, which is logged as a whole.
            continue
          micro.scatter(value, values.setdefault(name, np.full(shape, np.nan, np.float32)))
  finite = [int(report['finite']) for report in reports]
  state = update.advance_teacher(state, np.int32(sum(finite)))
  return state, UpdateReport(
    loss=float(np.mean(losses)),
    grad_norm=float(np.mean([report['grad_norm'] for report in reports])),
    learning_rate=float(reports[-1]['learning_rate']),
    skipped=len(finite) - sum(finite),
    optimizer_steps=len(finite),
    token_values=values,
    trained_tokens=trained,
    teacher_tokens=teacher_tokens,
  )


class Timer:
  """Measures seconds by phase; `on_phase` hears the name of each as it begins."""

  def __init__(self, on_phase: Callable[[str], None] = lambda name: None):
    self.seconds: dict[str, float] = {}
    self._on_phase = on_phase

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    self._on_phase(name)
    start = time.monotonic()
    try:
      yield
    finally:
      self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
