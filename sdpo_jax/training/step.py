"""The phases of a generation batch on the host: collect, teach, prepare, learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import time

import jax
import numpy as np

from sdpo_jax.data.grouping import first_of_same
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.distributed.mesh import put_rows
from sdpo_jax.environments.grading import Graders
from sdpo_jax.objective.advantages import grpo_advantages
from sdpo_jax.objective.importance import mismatch, rollout_is_weights
from sdpo_jax.rollout.grading_thread import GradingThread
from sdpo_jax.teacher.context import TeacherContext, build_teacher_context
from sdpo_jax.teacher.order import balanced_order
from sdpo_jax.training import batching
from sdpo_jax.training.session import Session, sampling_seed
from sdpo_jax.types import Example, Outcome, Rollouts, TrainState


@dataclasses.dataclass
class Collected:
  """A graded generation batch, in batch order."""

  examples: list[Example]  # G.
  prompts: list[list[int]]  # G.
  rollouts: Rollouts  # N.
  outcomes: list[Outcome]  # N.
  sample_ids: np.ndarray  # [N] number of each sample as drawn, before any reordering.
  graders_busy_s: float  # Seconds in which this process's graders were at work, while it sampled or afterwards.


def collect(
  session: Session, graders: Graders, state: TrainState, examples: list[Example], step: int, timer: Timer
) -> Collected:
  """Samples n completions for each question and grades them as they finish."""
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
  if config.data.group_duplicates:
    rollouts = dataclasses.replace(rollouts, group=first_of_same(examples)[rollouts.group])
  order = np.arange(len(rollouts))
  if config.trainer.batch_order == 'balanced':
    lengths = rollouts.completion_mask.sum(1) + rollouts.prompt_mask.sum(1)
    order = balanced_order(lengths, config.trainer.balance_partitions)
    rollouts, outcomes = rollouts.take(order), [outcomes[row] for row in order]
  return Collected(examples, prompts, rollouts, outcomes, sample_ids=order, graders_busy_s=grading.busy_s)


def teach(session: Session, collected: Collected, seed: int, step: int) -> TeacherContext | None:
  """The teacher's prompts for a graded batch; None for GRPO."""
  config = session.config
  if config.actor.policy_loss.loss_mode != 'sdpo':
    return None
  return build_teacher_context(
    [collected.examples[group].messages for group in collected.rollouts.group],
    collected.rollouts.group,
    collected.rollouts.text,
    collected.outcomes,
    config.actor.self_distillation,
    session.tokenizer,
    seed=seed,
    step=step,
    sample_ids=collected.sample_ids,
    enable_thinking=config.data.enable_thinking,
  )


def prepare(
  session: Session, state: TrainState, collected: Collected, context: TeacherContext | None, metrics: dict[str, float]
) -> batching.Samples:
  """Everything the update needs of a generation batch; scores the completions first where a ratio asks for it."""
  config, rollouts = session.config, collected.rollouts
  scores = np.array([outcome.score for outcome in collected.outcomes], np.float32)
  samples = batching.Samples(
    prompts=[collected.prompts[group] for group in rollouts.group],
    teacher_prompts=None if context is None else context.prompt_tokens,
    rollouts=rollouts,
    distill_mask=np.zeros(len(rollouts), np.float32) if context is None else context.mask,
    advantages=np.asarray(
      grpo_advantages(scores, rollouts.group, config.actor.policy_loss.norm_adv_by_std_in_grpo), np.float32
    ),
    old_log_probs=None,
    rollout_weights=None,
  )
  correction = config.algorithm.rollout_correction
  if not batching.scores_first(config):
    return samples
  old = score(session, state, samples)
  metrics.update(mismatch(old, rollouts.sampling_log_probs, rollouts.completion_mask))
  if correction.rollout_is is not None:
    samples.rollout_weights, measured = rollout_is_weights(
      old,
      rollouts.sampling_log_probs,
      rollouts.completion_mask.astype(np.float32),
      threshold=correction.rollout_is_threshold,
      batch_normalize=correction.rollout_is_batch_normalize,
    )
    samples.rollout_weights = np.asarray(samples.rollout_weights, np.float32)
    metrics.update({name: float(value) for name, value in measured.items()})
  if not batching.on_policy(config):
    samples.old_log_probs = old
  return samples


def score(session: Session, state: TrainState, samples: batching.Samples) -> np.ndarray:
  """[N, T] log-probs of all completions under the current policy, at the rollout temperature."""
  everything = dataclasses.replace(
    samples, teacher_prompts=None, distill_mask=np.zeros(len(samples), np.float32), advantages=np.ones(len(samples))
  )
  config = dataclasses.replace(
    session.config,
    actor=dataclasses.replace(
      session.config.actor, policy_loss=dataclasses.replace(session.config.actor.policy_loss, loss_mode='vanilla')
    ),
  )
  result = np.zeros(samples.rollouts.completion_tokens.shape, np.float32)
  for micro in batching.micro_batches(everything, np.arange(len(samples)), config, session.mesh.size):
    batch = put_rows(session.mesh, micro.batch)
    log_probs, _ = session.update.score(session.base, state.trainable, batch.student, batch.targets)
    micro.scatter(np.asarray(log_probs), result)
  return result * samples.rollouts.completion_mask


@dataclasses.dataclass
class Learned:
  """What an update reports."""

  loss: float  # mean over optimizer steps.
  grad_norm: float  # mean over optimizer steps, before clipping.
  learning_rate: float
  skipped: int  # optimizer steps with a gradient that was not finite.
  optimizer_steps: int
  token_values: dict[str, np.ndarray]  # [N, T] per-token quantities of the last epoch, NaN where not computed.
  trained_tokens: int  # tokens of student rows that went through forward and backward.
  teacher_tokens: int  # tokens of teacher rows that went through forward.


def learn(session: Session, state: TrainState, samples: batching.Samples) -> tuple[TrainState, Learned]:
  """All optimizer steps of a generation batch, then the teacher's."""
  config, update = session.config, session.update
  share = batching.shares_prompts(config, session.policy)
  losses, reports, values = [], [], {}
  trained = teacher_tokens = 0
  shape = samples.rollouts.completion_tokens.shape
  for _ in range(config.actor.ppo_epochs):
    for step_rows in batching.mini_batches(config):
      grads = update.zero(state.trainable)
      pending = []
      for micro in batching.micro_batches(samples, step_rows, config, session.mesh.size, share):
        batch = put_rows(session.mesh, micro.batch)
        grads, result = update.accumulate(session.base, state, grads, batch)
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
  state = update.finish(state, np.int32(sum(finite)))
  return state, Learned(
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
  """Seconds by phase; `on_phase` hears the name of each as it begins."""

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
