"""One training step on the host: sample and grade, build teacher prompts and the generation batch, run the update."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from sdpo_jax import liveness
from sdpo_jax.config import Config
from sdpo_jax.data.grouping import first_of_same
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.distributed.mesh import put_rows
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.environments.outcomes import check_graded, graded_of, scores_of
from sdpo_jax.learning import batching
from sdpo_jax.learning.update import MicroResult
from sdpo_jax.objective.advantages import grpo_advantages
from sdpo_jax.objective.importance import mismatch, rollout_is_weights
from sdpo_jax.rollout.grading_thread import GradingThread
from sdpo_jax.rollout.results import SamplingStats
from sdpo_jax.teacher.context import TeacherContext, build_teacher_context, same_context
from sdpo_jax.teacher.order import balanced_order
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training.graded import GradedRollouts, learned_from
from sdpo_jax.training.specs import batch_spec, chat_format, prompt_spec, teacher_spec
from sdpo_jax.types import Example, Outcome, Rollouts, TeacherSignal, TokenRows, TrainState, Tree

if TYPE_CHECKING:  # A session knows endpoints and samplers; a step need not.
  from sdpo_jax.environments.grading import Graders
  from sdpo_jax.training.ahead import SampledBatch
  from sdpo_jax.training.checkpoint.starting_state import StartingState
  from sdpo_jax.training.gathering import GatheredBatch
  from sdpo_jax.training.session import Session


# How far the host runs ahead of the devices: at least AHEAD micro-batches, so that the devices never wait for the host,
# or as many micro-batches as take AHEAD_S seconds, whichever is more.
AHEAD, AHEAD_S = 2, 0.5


class Hooks(Protocol):
  """Callbacks of `step`: sampling, gathering, an external teacher, recording; a run's are `around_step.AroundStep`."""

  def sample(self, state: TrainState, step: int, timer: Timer) -> tuple[list[GradedRollouts], SampledBatch]:
    """Sample and grade; return the batches sampled now, and the batch of the step."""

  def gather(self, own: SampledBatch, context: TeacherContext | None) -> GatheredBatch | None:
    """Return the completions that the update learns from; None: too few wait for one."""

  def ask(self, learned: GatheredBatch) -> TeacherSignal | None:
    """Return the signal of an external teacher, or the stored one; None: there is none."""

  def read(self, state: TrainState, batch: batching.GenerationBatch, step: int, timer: Timer) -> Any:
    """Return data about student and teacher before the update, to be written with the rollouts."""


@dataclasses.dataclass
class Taken:
  """The results of a step, from which its metrics and files are made."""

  sampled: list[GradedRollouts]  # The batches sampled during it.
  own: SampledBatch  # The batch of the step.
  context: TeacherContext | None  # The teacher's prompts for that batch.
  learned: GatheredBatch | None  # The completions of the update; None: there was no update.
  batch: batching.GenerationBatch | None  # The same, as arrays.
  report: UpdateReport
  metrics: dict[str, float]  # `rollout_corr/*`, of the importance weights.
  read: Any = None  # Result of `Hooks.read`.


def step(
  session: Session,
  state: TrainState,
  number: int,
  hooks: Hooks,
  starting: StartingState,
  timer: Timer,
  stop: Stop = NEVER,
) -> tuple[TrainState, Taken]:
  """Take one step: sample, grade, teach, update.

  Args:
    session: session of the run.
    state: state before the step; donated once the update begins.
    number: number of the step, from 1.
    hooks: callbacks before the update.
    starting: holder of the state, notified before the state is donated.
    timer: timer of the phases.
    stop: whether the run is to stop.

  Returns:
    The state after the step, and its results.

  Raises:
    StoppedError: the run was told to stop; the state is whole.
    UserError: the batch could not be graded.
  """
  sampled, own = hooks.sample(state, number, timer)
  with timer('teach'):
    context = build_teacher_prompts(session, own.graded, sampling_seed(state), number)
    learned = hooks.gather(own, context)
    signal = None if learned is None else hooks.ask(learned)
  metrics: dict[str, float] = {}
  if learned is None:
    with timer('train'):
      state, report = pass_over(session, state, starting)
    return state, Taken(sampled, own, context, None, None, report, metrics)
  with timer('train'):
    batch = build_batch(session, state, learned.graded, learned.context, metrics, stop, signal, own.step)
  read = hooks.read(state, batch, number, timer)
  with timer('train'):
    state, report = run_update(session, state, batch, starting, stop)
  return state, Taken(sampled, own, context, learned, batch, report, metrics, read)


def rollout_and_grade(
  session: Session,
  graders: Graders,
  state: TrainState,
  examples: list[Example],
  step: int,
  timer: Timer,
  stop: Stop = NEVER,
) -> GradedRollouts:
  """Sample n completions of each question and grade them as they finish.

  Raises:
    UserError: a grader cannot work, or too few completions could be graded (`environments.max_ungraded_fraction`). The
      state can still be saved, and every process of the run raises the error.
    StoppedError: `stop` asked the run to stop between chunks of sampling or before the graders were done. The state
      can still be saved, and every process raises the error.
  """
  config = session.config
  prompts = [prompt_tokens(session.tokenizer, example, prompt_spec(config)) for example in examples]
  members = session.writers_members(examples, step)  # First, as it may replace arrays of the teacher.
  sampler, base, trainable = session.writer(state.trainable)
  with GradingThread(graders, examples, config.rollout.n, stop) as grading:
    with timer('sample'):
      rollouts = sampler.sample(
        base,
        trainable,
        prompts,
        n=config.rollout.n,
        **config.rollout.method(),
        max_tokens=config.data.max_response_length,
        seed=sampling_seed(state),
        step=step,
        members=members,
        on_finished=grading.add,
        between=stop.check,
      )
    with timer('grade'):
      outcomes = grading.outcomes()
  return graded_batch(config, examples, prompts, rollouts, outcomes, grading.busy_s, sampler.stats)


def graded_batch(
  config: Config,
  examples: list[Example],
  prompts: list[list[int]],
  rollouts: Rollouts,
  outcomes: list[Outcome],
  busy_s: float,
  stats: SamplingStats,
  drawn_by: list[tuple[tuple[int, int], ...]] | None = None,
) -> GradedRollouts:
  """Return a graded batch whose completions, of the first question and so on, are put in batch order.

  Raises:
    UserError: too few completions could be graded.
  """
  check_graded(outcomes, config.environments.max_ungraded_fraction)
  if config.data.group_duplicates:
    rollouts = dataclasses.replace(rollouts, group=first_of_same(examples)[rollouts.group])
  ids = np.arange(len(rollouts))
  graded = GradedRollouts(examples, prompts, rollouts, outcomes, ids, busy_s, stats, drawn_by=drawn_by)
  return in_batch_order(config, graded)


def in_batch_order(config: Config, graded: GradedRollouts) -> GradedRollouts:
  """Return a graded batch, in the order of sampling until now, in that of `trainer.batch_order`."""
  if config.trainer.batch_order != 'balanced':
    return graded
  rollouts = graded.rollouts
  lengths = rollouts.completion_mask.sum(1) + rollouts.prompt_mask.sum(1)
  order = balanced_order(lengths, config.trainer.balance_partitions)
  outcomes = [graded.outcomes[sample] for sample in order]
  drawn_by = graded.drawn_by and [graded.drawn_by[sample] for sample in order]
  return dataclasses.replace(
    graded, rollouts=rollouts.take(order), outcomes=outcomes, sample_ids=order, drawn_by=drawn_by
  )


def sampling_seed(state: TrainState) -> int:
  """Return the seed for sampling rollouts and drawing demonstrations, derived from the state's random key."""
  return int(jax.random.bits(state.rng, dtype=np.uint32))


def build_teacher_prompts(session: Session, graded: GradedRollouts, seed: int, step: int) -> TeacherContext | None:
  """Return the teacher's prompts for a graded batch; None if the objective needs no teacher."""
  config, rollouts = session.config, graded.rollouts
  if not session.spec.needs_teacher:
    return None
  messages = [graded.examples[group].messages for group in rollouts.group]
  if not session.spec.reprompts:
    return same_context(messages, [graded.prompts[group] for group in rollouts.group])
  return build_teacher_context(
    messages,
    rollouts.group,
    rollouts.text,
    graded.outcomes,
    config.actor.self_distillation,
    session.tokenizer,
    seed=seed,
    step=step,
    sample_ids=graded.sample_ids,
    chat=chat_format(config),
  )


def build_batch(
  session: Session,
  state: TrainState,
  graded: GradedRollouts,
  context: TeacherContext | None,
  metrics: dict[str, float],
  stop: Stop = NEVER,
  signal: TeacherSignal | None = None,
  step: int = 0,
) -> batching.GenerationBatch:
  """Return the generation batch for the update, with the log-probs that the objective needs.

  Args:
    session: session of the run.
    state: state before the update.
    graded: completions with their outcomes.
    context: the teacher's prompts; None: there is no teacher.
    metrics: receives `rollout_corr/*` if log-probs are computed.
    stop: whether the run is to stop; checked before every micro-batch whose log-probs are fetched.
    signal: result of `Hooks.ask`; None: the teacher, if there is one, is on the devices.
    step: number of the generation batch, by which distractors are drawn.

  Raises:
    StoppedError: `stop` asked the run to stop; the state is intact.
  """
  config, rollouts, spec = session.config, graded.rollouts, session.spec
  shape = rollouts.completion_mask.shape
  graded_rows = learned_from(session.spec, graded)

  def per_token(values: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.asarray(values, np.float32)[:, None], shape)

  def per_sample(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else values[rollouts.group]

  batch = batching.GenerationBatch(
    prompts=[graded.prompts[group] for group in rollouts.group],
    teacher_prompts=None if context is None or signal is not None else context.prompt_tokens,
    signal=signal,
    rollouts=rollouts,
    graded=graded_rows,
    distill_mask=per_token(np.zeros(len(rollouts)) if context is None else context.mask),
    present=graded.present,
    members=per_sample(session.members(graded.examples)),
    mixtures=per_sample(session.mixtures(graded.examples, step)),
  )
  if config.rollout.sampled_by == 'data':  # The published loss is a mean over log-probs, not over tokens.
    entries = (signal.token_ids >= 0).sum(-1).astype(np.float32)
    batch.distill_mask, batch.distill_weights = batch.distill_mask * entries, 1 / np.maximum(entries, 1)
  if spec.needs_advantages:
    batch.scored = graded_of(graded.outcomes)
    batch.advantages = per_token(advantages_of(config, graded))
  if spec.weighs_in_update:
    batch.sampling_log_probs = rollouts.sampling_log_probs
  for name, reference in session.references.items():
    log_probs = PolicyLogProbs(session, reference, batch, np.flatnonzero(graded_rows))
    batch.references[name] = log_probs.fetch(stop=stop)
  if not spec.computes_log_probs:
    return batch
  log_probs = PolicyLogProbs(session, state.trainable, batch).fetch(stop=stop)
  weights, measured = rollout_correction(session, log_probs, batch)
  metrics.update(measured)
  if spec.rollout_weights:
    batch.distill_weights = batch.policy_weights = weights
  if spec.needs_old_log_probs:
    batch.old_log_probs = log_probs
  return batch


def advantages_of(config: Config, graded: GradedRollouts) -> np.ndarray:
  """Return each completion's advantage over the mean of its group, [N] float64; 0 for ungraded completions."""
  if graded.advantages is not None:
    return graded.advantages
  scores, norm_by_std = scores_of(graded.outcomes), config.actor.policy_loss.norm_adv_by_std_in_grpo
  return grpo_advantages(scores, graded.rollouts.group, norm_by_std, graded=graded_of(graded.outcomes))


def rollout_correction(
  session: Session, log_probs: np.ndarray, batch: batching.GenerationBatch
) -> tuple[np.ndarray | None, dict[str, float]]:
  """Return importance weights [N, T] that correct the sampler-trainer mismatch (None: no correction), and metrics.

  Args:
    session: session of the run.
    log_probs: [N, T] of the completions under the policy before the update, at the rollout temperature.
    batch: the generation batch of these completions; ungraded ones do not count in the weights.
  """
  rollouts, mask = batch.rollouts, batch.rollouts.completion_mask
  if session.config.rollout.sampled_by != 'student':
    return None, {}  # The difference would be between two models, not between two programs of one model.
  metrics = mismatch(log_probs, rollouts.sampling_log_probs, mask)
  if not session.spec.rollout_weights:
    return None, metrics
  if batch.graded is not None:
    mask = mask & batch.graded[:, None]
  correction = session.config.algorithm.rollout_correction
  weights, measured = rollout_is_weights(
    log_probs,
    rollouts.sampling_log_probs,
    mask.astype(np.float32),
    threshold=correction.rollout_is_threshold,
    batch_normalize=correction.rollout_is_batch_normalize,
  )
  return np.asarray(weights, np.float32), metrics | {name: float(value) for name, value in measured.items()}


class PolicyLogProbs:
  """Log-probs of completions under a policy at the rollout temperature, computed asynchronously on the devices."""

  def __init__(
    self, session: Session, trainable: Tree, batch: batching.GenerationBatch, samples: np.ndarray | None = None
  ):
    """Start to compute the log-probs of `samples` ([M] int; None: all) under the parameters `trainable`."""
    self._batch = batch
    self._pending = []
    for micro in batching.student_micro_batches(batch, batch_spec(session.config), session.mesh.size, samples):
      student, targets = put_rows(session.mesh, (micro.batch.student, micro.batch.targets))
      log_probs, _ = session.update.log_probs(session.base, trainable, student, targets)
      self._pending.append((micro.samples, log_probs))

  def fetch(self, result: np.ndarray | None = None, stop: Stop = NEVER) -> np.ndarray:
    """Wait for the log-probs and return them as [N, T].

    Args:
      result: array [N, T] to write to; None: zeros.
      stop: whether the run is to stop; checked before each micro-batch is waited for.

    Raises:
      StoppedError: `stop` asked the run to stop.
    """
    if result is None:
      result = np.zeros(self._batch.rollouts.completion_tokens.shape, np.float32)
    for _, log_probs in self._pending:
      log_probs.copy_to_host_async()
    for samples, log_probs in self._pending:
      stop.check()
      self._batch.scatter(samples, jax.device_get(log_probs), result)
    return result


@dataclasses.dataclass
class Filled:
  """Counts of the tokens and rows in micro-batches, with and without padding."""

  tokens: int = 0  # Without padding.
  token_room: int = 0  # With padding, i.e. of the compiled shapes.
  rows: int = 0  # Rows that hold a sample.
  row_room: int = 0  # All rows.
  samples: int = 0

  def add(self, micro: batching.MicroBatch, side: TokenRows) -> None:
    """Count a micro-batch's rows on one side, student or teacher."""
    self.tokens += micro.tokens(side)
    self.token_room += side.tokens.size
    self.rows += sum(map(bool, micro.samples))
    self.row_room += len(micro.samples)
    self.samples += sum(map(len, micro.samples))


@dataclasses.dataclass
class UpdateReport:
  """The losses, gradient norms and per-token values of an update."""

  loss: float  # Mean over optimizer steps.
  grad_norm: float  # Mean over optimizer steps, before clipping.
  learning_rate: float
  skipped: int  # Number of optimizer steps that were not taken: not finite, or empty.
  optimizer_steps: int
  token_values: dict[str, np.ndarray]  # [N, T] per-token quantities of the last epoch, NaN where not computed.
  student: Filled  # Rows of the student's forward and backward pass.
  teacher: Filled  # Rows of the teacher's forward pass.
  log_probs: np.ndarray | None = None  # [N, T] under the policy before the update; None if `build_batch` measured them.


class _Results:
  """Results of optimizer steps, which stay on the devices until they are fetched while a later step runs."""

  def __init__(self, batch: batching.GenerationBatch):
    self.losses: list[float] = []
    self.reports: list[dict[str, np.ndarray]] = []
    self.token_values: dict[str, np.ndarray] = {}
    self._batch = batch
    self._waiting: collections.deque[tuple[list[tuple[Any, MicroResult]], Any]] = collections.deque()

  def add(self, micros: list[tuple[Any, MicroResult]], report: Any) -> None:
    """Add the results of an optimizer step, and fetch those of the step before it.

    The devices thus have work during the fetch, and never hold the results of more than two steps.

    Args:
      micros: (samples of each row, result) of each micro-batch.
      report: report of the step.
    """
    self._waiting.append((micros, report))
    self.fetch(left=1)

  def taken(self) -> int:
    """Wait for all steps, and return the number of those that were taken."""
    left = jax.device_get([report['taken'] for _, report in self._waiting])
    return sum(int(report['taken']) for report in self.reports) + sum(map(int, left))

  def fetch(self, left: int = 0) -> None:
    """Fetch the results of all pending steps but the newest `left`, oldest first, each step's in one transfer."""
    shape = self._batch.rollouts.completion_tokens.shape
    while len(self._waiting) > left:
      micros, report = self._waiting.popleft()
      results, report = jax.device_get(([(result.loss, result.aux) for _, result in micros], report))
      self.reports.append(report)
      self.losses.append(sum(float(loss) for loss, _ in results))
      for (samples, _), (_, aux) in zip(micros, results, strict=True):
        for name, value in aux.items():
          target = self.token_values.setdefault(name, np.full(shape, np.nan, np.float32))
          self._batch.scatter(samples, value, target)


class DispatchLimit:
  """A limit on how far the host runs ahead of the devices: `AHEAD` micro-batches, or `AHEAD_S` seconds of them.

  Without it, the host would dispatch the whole batch at once, and could not take it back when the run is to stop.
  """

  def __init__(self):
    self._results: collections.deque[jax.Array] = collections.deque()
    self._allowed = AHEAD
    self._last: float | None = None  # When the last micro-batch was found to be done.

  def add(self, result: jax.Array) -> None:
    """Add the result of a micro-batch that has been dispatched."""
    self._results.append(result)

  def wait(self) -> None:
    """Block until another micro-batch may be dispatched."""
    while len(self._results) >= self._allowed:
      jax.block_until_ready(self._results.popleft())
      now = time.monotonic()
      if self._last is not None:
        self._allowed = max(AHEAD, int(AHEAD_S / max(now - self._last, 1e-3)))
      self._last = now


def run_update(
  session: Session,
  state: TrainState,
  batch: batching.GenerationBatch,
  starting: StartingState | None = None,
  stop: Stop = NEVER,
) -> tuple[TrainState, UpdateReport]:
  """Take all optimizer steps of a generation batch, then update the teacher.

  The host prepares a micro-batch while the devices process the previous ones.

  Args:
    session: session of the run.
    state: state before the batch; donated.
    batch: generation batch to learn from.
    starting: holder of the state, notified before the state is donated; None: no copy is kept.
    stop: whether the run is to stop; checked before every micro-batch and every optimizer step while the starting state
      exists. Once it is gone, the batch is finished, since stopping would lose it.

  Returns:
    The state after the batch, and a report of the update.

  Raises:
    StoppedError: `stop` asked the run to stop.
  """
  config, update, spec = session.config, session.update, batch_spec(session.config)
  teacher = session.teacher or Teacher(session.policy)
  share = batching.shares_prompts(spec, *teacher.readers(session.policy, teacher_spec(config)))
  scored = None
  if batch.sampling_log_probs is not None:
    # The update computes the log-probs of the samples it trains on; metrics need those of the other samples too.
    scored = PolicyLogProbs(session, state.trainable, batch, batching.left_out(batch, spec))
  results = _Results(batch)
  of_student, of_teacher = Filled(), Filled()
  ahead, dispatched = DispatchLimit(), 0
  steps = batching.mini_batches(spec, batch.present)

  def may_stop() -> bool:
    return dispatched == 0 if starting is None else starting.there

  for _ in range(config.actor.ppo_epochs):
    for samples in steps:
      grads = update.zero(state.trainable)
      micros = []
      for micro in batching.micro_batches(batch, samples, spec, session.mesh.size, share):
        if may_stop():
          ahead.wait()
          stop.check()
        arrays = put_rows(session.mesh, micro.batch)
        grads, result = update.accumulate(session.base, state, grads, arrays, teacher.base)
        micros.append((micro.samples, result))
        ahead.add(result.loss)
        liveness.progress()
        of_student.add(micro, micro.batch.student)
        if micro.batch.teacher is not None:
          of_teacher.add(micro, micro.batch.teacher)
      if may_stop():
        ahead.wait()
        stop.check()
      dispatched += 1
      if starting is not None:
        starting.donate(others_follow=dispatched < config.actor.ppo_epochs * len(steps))
      state, report = update.apply(state, grads)
      results.add(micros, report)
  taken = results.taken()
  state = update.advance_teacher(state, np.int32(taken))
  results.fetch()
  log_probs = None
  if scored is not None:
    seen = results.token_values.get('log_prob', np.zeros_like(batch.sampling_log_probs))
    log_probs = scored.fetch(np.where(batch.rollouts.completion_mask, seen, 0))
  losses, reports = results.losses, results.reports
  return state, UpdateReport(
    loss=float(np.mean(losses)),
    grad_norm=float(np.mean([report['grad_norm'] for report in reports])),
    learning_rate=float(reports[-1]['learning_rate']),
    skipped=len(reports) - taken,
    optimizer_steps=len(reports),
    token_values=results.token_values,
    student=of_student,
    teacher=of_teacher,
    log_probs=log_probs,
  )


def pass_over(session: Session, state: TrainState, starting: StartingState) -> tuple[TrainState, UpdateReport]:
  """End a generation batch without an update: the step counter advances, but no weight of the student changes.

  A teacher that restarts every few generation batches may also restart after this one.

  Args:
    session: session of the run.
    state: state before the batch; donated.
    starting: holder of the state, notified before the state is donated.
  """
  starting.donate(others_follow=False)
  restarts = session.config.actor.self_distillation.teacher_regularization == 'restart'
  state = session.update.advance_teacher(state, np.int32(restarts))
  return state, UpdateReport(math.nan, math.nan, math.nan, 0, 0, {}, Filled(), Filled())


class Timer:
  """A timer that sums the seconds spent in each phase, and calls `on_phase` with the name of a phase as it begins."""

  def __init__(self, on_phase: Callable[[str], None] = lambda name: None):
    self.seconds: dict[str, float] = {}
    self._on_phase = on_phase

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    self._on_phase(name)
    liveness.begin(name)
    start = time.monotonic()
    try:
      yield
    finally:
      liveness.begin(f'after {name}')
      self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
