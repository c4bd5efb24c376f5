"""The training loop: sample, grade, teach, train, evaluate, save.

A resume compares the settings with those of the run, restores the newest readable checkpoint (device state, data
iterator), drops later lines of `metrics.jsonl`, replays the state of the alarms from the remaining lines, and continues
as if the run had never stopped. No random draw depends on how often a run was started.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import logging
import math
from typing import Any

from etils import epath
import jax

from sdpo_jax import liveness
from sdpo_jax.config import Config
from sdpo_jax.distributed import programs
from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.distributed.collectives import agreed, gathered
from sdpo_jax.distributed.stopping import StoppedError
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.outcomes import reasons_of
from sdpo_jax.evaluation import alarms
from sdpo_jax.learning.update import abstract_state, place_state
from sdpo_jax.models.adapters.cartridge_files import Origin
from sdpo_jax.teacher.endpoint import Endpoint
from sdpo_jax.teacher.feedback_endpoint import FeedbackEndpoint
from sdpo_jax.training import (
  carry_over,
  cartridges,
  chunk_bank,
  endpoint_teacher,
  feedback_writing,
  gathering,
  reference_policies,
  resuming,
  skipped,
  startup,
  step_records,
  teacher_model,
)
from sdpo_jax.training.ahead import WAITING, Ahead
from sdpo_jax.training.alarm_watch import AlarmVerdict, AlarmWatch
from sdpo_jax.training.around_step import AroundStep, prepared_again
from sdpo_jax.training.boards import check_wandb
from sdpo_jax.training.carry_over import CarryOver
from sdpo_jax.training.checkpoint.checkpoints import ARRAYS, Checkpoints, abstract
from sdpo_jax.training.checkpoint.digests import leaf_digests, state_digest
from sdpo_jax.training.checkpoint.starting_state import StartingState
from sdpo_jax.training.checkpoint.unfinished import Unfinished
from sdpo_jax.training.directory import fingerprint, lost_checkpoints
from sdpo_jax.training.directory.lines import STATE_DIGEST, UNGRADED_REASON, history, read_lines
from sdpo_jax.training.directory.ownership import Ownership, sole_user
from sdpo_jax.training.directory.published_checkpoints import newest
from sdpo_jax.training.directory.workdir import check_workdir, write_settings
from sdpo_jax.training.documents import read_texts
from sdpo_jax.training.evaluations import Evaluations, evaluated
from sdpo_jax.training.gathering import GATHERED, Gathering
from sdpo_jax.training.joint_errors import JointErrors
from sdpo_jax.training.metrics import MetricsWriter
from sdpo_jax.training.opening import check_adapter, load_tokenizer, make_session
from sdpo_jax.training.preemption import Preemption
from sdpo_jax.training.progress import Progress
from sdpo_jax.training.pushing import Pushing
from sdpo_jax.training.questions import held_out_questions, training_questions
from sdpo_jax.training.resuming import UNFINISHED, written_before
from sdpo_jax.training.saving import Saving
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import objective_spec, update_spec
from sdpo_jax.training.step import Timer, sampling_seed
from sdpo_jax.training.step import step as take_step
from sdpo_jax.training.watchdog import Watchdog
from sdpo_jax.types import Example, TrainState

# Metric: the number of programs compiled during a step; 0 is expected, as all are compiled before the first step.
COMPILED_LATE = 'programs/compiled'
LOOKED_AT = 'on_step'  # The phase in which the caller handles a finished step.
EXIT_ALARM = 3  # Exit code of a run that an alarm stopped, after a checkpoint was saved.


@dataclasses.dataclass
class Result:
  """The result of a run, finished or stopped."""

  workdir: epath.Path
  step: int
  preempted: bool
  evaluations: dict[int, dict[str, float]]  # step → flat evaluation metrics.
  example_prompt: str  # A held-out question to try, if it is short; else '…'.
  stopped: str | None = None  # A sentence about the alarm that stopped the run; None: no alarm did.
  skipped: skipped.Skipped = skipped.Skipped()  # The last steps, if they changed nothing.
  deadline: float | None = None  # Time on the monotonic clock by which a process that was told to stop must end.
  exit_code: int = 0  # Exit code of a process that was told to stop or given up.


@dataclasses.dataclass(frozen=True)
class Stepped:
  """A finished step, as callers see it."""

  step: int  # Its number, from 1.
  metrics: Mapping[str, float]  # Its line of metrics.jsonl, whether this process writes that file or not.
  session: Session
  state: TrainState  # The state after the step, on the devices; the next step donates its buffers.


def train(
  config: Config,
  workdir: epath.PathLike,
  *,
  restart: bool = False,
  announce: Callable[[str], None] = lambda text: None,
  on_step: Callable[[Stepped], None] | None = None,
) -> Result:
  """Run or resume the training that `config` describes; arguments and errors as in `steps_of`.

  `on_step` is called after every step. If it raises, the run ends and its last whole state is saved.
  """
  return run_to_end(steps_of(config, workdir, restart=restart, announce=announce), on_step)


def run_to_end(steps: Generator[Any, None, Result], on_step: Callable[[Any], None] | None) -> Result:
  """Pass every step of `steps` to `on_step`, and return the result of the run; close `steps` if anything is raised."""
  with contextlib.closing(steps):
    while True:
      try:
        step = next(steps)
      except StopIteration as end:
        return end.value
      if on_step is not None:
        on_step(step)
      del step  # There may be no room for its state beside the next one.


def steps_of(
  config: Config,
  workdir: epath.PathLike,
  *,
  restart: bool = False,
  announce: Callable[[str], None] = lambda text: None,
) -> Generator[Stepped, None, Result]:
  """Run or resume the training that `config` describes; yield after every step, and return the result.

  If the generator is closed early, the last whole state is saved, and the run can be resumed.

  Args:
    config: settings.
    workdir: local or gs:// directory of the run.
    restart: whether to begin at step 0 if the run's checkpoints are lost; its other files are then moved away.
    announce: receives sentences for the user.

  Raises:
    UserError: anything the user can correct.
  """
  config.validate()
  if jax.process_index() == 0:
    check_wandb(config)
  alarms.rules(config.alarms.rules, evaluates=bool(config.trainer.test_freq))
  with Preemption(config.trainer.preemption_grace_s, functools.partial(newest, workdir)) as stop:
    try:
      with (
        Graders(config.environments) as graders,
        endpoint_teacher.opened(config) as endpoint,
        feedback_writing.opened(config) as writer,
      ):
        return (yield from _steps_of(config, workdir, graders, endpoint, writer, stop, restart, announce))
    except StoppedError:  # Stopped before the first step, when there was nothing to save.
      step = newest(workdir)
      return Result(epath.Path(workdir), step, True, {}, '…', deadline=stop.deadline, exit_code=stop.exit_code)


def _steps_of(
  config: Config,
  workdir: epath.PathLike,
  graders: Graders,
  endpoint: Endpoint | None,
  writer: FeedbackEndpoint | None,
  stop: Preemption,
  restart: bool,
  announce: Callable[[str], None],
) -> Generator[Stepped, None, Result]:
  tokenizer = load_tokenizer(config)
  iterator = training_questions(config, tokenizer)
  held_out = held_out_questions(config, tokenizer) if config.trainer.test_freq else []
  graders.prepare(iterator.environments | {example.environment for example in held_out})
  startup.check_questions(config, tokenizer, graders, iterator.questions, held_out)
  teaches = objective_spec(config).reads_teacher
  texts = read_texts(config, tokenizer, teaches=teaches) if config.model.cartridge.used else None
  chunks = chunk_bank.check(config, tokenizer, iterator.questions, held_out)
  if teacher_model.is_used(config):
    teacher_model.check(config)
  if endpoint is not None:
    endpoint_teacher.check(endpoint, config, tokenizer)
  workdir = check_workdir(config, workdir, restart=restart)
  parts = fingerprint.take(config, tokenizer, iterator, held_out, graders, texts)
  continuation = fingerprint.compare(workdir, config, parts)
  # For messages that are the same on every process: only process 0 announces them.
  say = announce if jax.process_index() == 0 else lambda text: None
  with sole_user(workdir, say) as ownership:  # Before the weights are read, which may take minutes.
    if ownership is not None:
      lost_checkpoints.settle(workdir, ownership, restart=restart, say=say)
    say(f'Loading {config.model.path} …')
    stop.check()
    if continuation.step == 0:
      check_adapter(config)
    session, parameters = make_session(config, workdir, tokenizer, texts=texts, chunks=chunks, teaches=True)
    session.endpoint, session.feedback_endpoint = endpoint, writer
    stop.check()
    table = session.policy.parameter_table()
    session.references = reference_policies.of_parameters(session.spec, table, parameters, config.model.dtype)
    like = abstract_state(update_spec(config), parameters, session.mesh, table)
    evaluated = len(held_out) * config.val_kwargs.n
    parked = carry_over.abstract_parked(session, evaluated)
    with (
      Watchdog(config.trainer, workdir, announce, stop.give_up),
      resuming.opened(config, workdir, ownership, like, say, parked) as (checkpoints, resumed),
    ):
      step = 0 if resumed is None else resumed.step
      continuation = fingerprint.start(workdir, config, continuation, step, ownership, resumed.lost if resumed else ())
      for line in continuation.lines:
        say(line)
      waiting = Gathering(config) if config.algorithm.min_sdpo_examples else None
      if resumed is None:
        state, unfinished = place_state(update_spec(config), parameters, session.mesh, table), None
      else:
        state, unfinished = resumed.state, resumed.unfinished
      ahead = Ahead(config, iterator, tokenizer)
      if config.rollout.max_staleness:
        ahead = CarryOver(session, graders, iterator, sampling_seed(state), stop, evaluated)
      if resumed is not None:
        other_rows, lost = 'data' in config.trainer.accept_changes, []
        if waiting is not None:
          again = functools.partial(prepared_again, session, sampling_seed(state))
          lost.append(waiting.restore(resumed.host, ahead, again, other_rows=other_rows))
        lost.append(ahead.restore(resumed.host, other_rows=other_rows))
        announce(f'Resuming {workdir} at {resumed}.')
        for sentence in filter(None, lost):
          say(sentence)
      write_settings(config, workdir)
      del parameters, resumed
      trained = sum(leaf.size for leaf in jax.tree.leaves(state.trainable))
      for line in (*startup.describe(session, trained, iterator.rows, len(held_out), step), *graders.describe()):
        say(line)
      stop.check()
      run = _Run(session, graders, ahead, held_out, checkpoints, ownership, stop, announce, waiting)
      run.recall(step, unfinished)
      if unfinished is not None or (step < config.trainer.total_training_steps and not run.over):
        startup.compile_programs(session, state, len(held_out), say, stop)
      return (yield from run(state, unfinished))


class _Run:
  """The loop over generation batches. Its methods take and return the training state; attributes are bookkeeping."""

  def __init__(
    self,
    session: Session,
    graders: Graders,
    ahead: Ahead,
    held_out: Sequence[Example],
    checkpoints: Checkpoints,
    ownership: Ownership | None,
    preemption: Preemption,
    announce: Any,
    gathering: Gathering | None = None,
  ):
    self.session, self.checkpoints, self.ownership = session, checkpoints, ownership
    self.preemption, self.announce = preemption, announce
    self.joint_errors = JointErrors()
    self.around = AroundStep(session, graders, ahead, gathering, self.joint_errors, preemption)
    sampler = ahead if isinstance(ahead, CarryOver) else session.sampler
    self.evaluations = Evaluations(session, sampler, graders, held_out, ownership, self.joint_errors, preemption)
    self.alarms = AlarmWatch(session.config, checkpoints, None if ownership is None else announce)
    self.skipped = skipped.Skipped()  # The consecutive skipped steps up to now.
    self.compiled: Callable[[], list[str]] = list  # Returns the programs compiled since its last call.
    self.saving = Saving(session.workdir, checkpoints, ownership, self.joint_errors, self.sync_lines, announce)
    self.writer: MetricsWriter | None = None
    config = session.config
    self.pushing: Pushing | None = None  # Only process 0 sends.
    if config.trainer.push_url and jax.process_index() == 0:
      self.pushing = Pushing(config, Origin.of(config.model.path, session.policy.config))
    self.line: Mapping[str, float] = {}  # Metrics of the last step.
    self.progress: Progress

  def __call__(self, state: TrainState, unfinished: Unfinished | None = None) -> Generator[Stepped, None, Result]:
    """Run the remaining steps from `state`, after finishing its `unfinished` step if any; yield after every step.

    However the run ends, the last whole state is saved before.
    """
    self.hold(int(state.step), state, unfinished)
    self.preemption.stage = 'steps'
    if jax.process_count() == 1:
      self.preemption.save = self.saving.save_meanwhile
    try:
      return (yield from self.run(state, unfinished))
    except BaseException as error:
      if isinstance(error, FileNotFoundError) and self.ownership is not None:
        # The file may have been removed by another process that has taken over the directory.
        with contextlib.suppress(OSError):
          self.ownership.check()
      self.saving.rescue(error)
      raise
    finally:
      self.around.ahead.close()
      if self.pushing is not None:  # Last, since the service may not answer.
        self.pushing.close()

  def hold(
    self,
    step: int,
    state: TrainState,
    unfinished: Unfinished | None = None,
    metrics: Mapping[str, float] | None = None,
    leaves: Mapping[str, str] | None = None,
  ) -> None:
    """Record `state` as the last whole state, from which the run can continue.

    Args:
      step: number of generation batches that the state has seen.
      state: the state, on the devices.
      unfinished: outstanding part of its step; None: nothing is outstanding.
      metrics: metrics of its step, once finished; metrics undone by a rollback never rank a checkpoint.
      leaves: digests of its arrays; None: they are computed if the state is saved.
    """
    outstanding = {} if unfinished is None else {UNFINISHED: unfinished.to_json()}
    (position, waiting), parked = self.around.ahead.saved(), self.around.ahead.parked
    gathered = () if self.around.gathering is None else self.around.gathering.saved()

    def host() -> dict[str, Any]:
      drawn = {WAITING: [batch.to_json() for batch in waiting]} if waiting else {}
      learned = {GATHERED: gathering.to_json(gathered)} if gathered else {}
      arrays = {} if parked is None else {ARRAYS: parked}
      return {'iterator': position, **drawn, **learned, **outstanding, **arrays}

    keep = self.session.config.trainer.keep_starting_state
    self.saving.hold(step, state, host, metrics or {}, leaves, keep=keep)

  def sync_lines(self) -> str:
    """Block until the metrics lines written so far are on disk, and return the digest of the last; '' without any."""
    return '' if self.writer is None else self.writer.sync()

  def run(self, state: TrainState, unfinished: Unfinished | None) -> Generator[Stepped, None, Result]:
    """Run the remaining steps, save, and wait until everything is written; yield after every step."""
    config = self.session.config
    first, total = int(state.step), config.trainer.total_training_steps
    if self.ownership is not None:
      written = written_before(first, unfinished)
      self.writer = MetricsWriter(self.session.workdir, config, resume_step=written, ownership=self.ownership)
    self.progress = Progress(total, first, test_freq=config.trainer.test_freq, shown=self.writer is not None)
    preempted = False
    try:
      self.warm_up(state)
      with programs.noted_compilations() as self.compiled:
        yield from self.steps(state, unfinished)
    except StoppedError:
      preempted = True
    finally:
      self.progress.close()
    if preempted:
      self.saving.save()
    else:
      self.preemption.stage = 'end'
    self.saving.wait()
    found = {}
    if self.writer is not None:
      self.writer.close()
      lines = read_lines(self.session.workdir).kept
      found = {line['step']: values for line in lines if (values := evaluated(line))}
    step = self.saving.whole.step
    if skipped.too_many(self.skipped, config.trainer) and not self.alarms.stopped and not preempted:
      raise skipped.SkippedError(skipped.complaint(self.skipped, step, config.trainer))
    prompt = short_prompt(self.evaluations.questions)
    return Result(
      self.session.workdir,
      step,
      preempted,
      found,
      prompt,
      self.alarms.stopped,
      self.skipped,
      deadline=self.preemption.deadline,
      exit_code=self.preemption.exit_code if preempted else 0,
    )

  def steps(self, state: TrainState, unfinished: Unfinished | None) -> Iterator[Stepped]:
    """Run the remaining steps; yield after each.

    Raises:
      StoppedError: the run was told to stop.
    """
    first, trainer = int(state.step), self.session.config.trainer
    if unfinished is not None:
      state = self.finish(state, first, unfinished)
      yield from self.show(first, state)
    if first == 0 and trainer.val_before_train and self.evaluations.questions:
      self.evaluate_first(state)
    for step in range(first + 1, trainer.total_training_steps + 1):
      if self.over:
        break
      self.preemption.check_over_devices()
      self.preemption.check()
      state = self.step(state, step)
      yield from self.show(step, state)

  def show(self, step: int, state: TrainState) -> Iterator[Stepped]:
    """Yield a finished step to the caller; programs that the caller compiles are not counted."""
    self.progress.phase(LOOKED_AT)
    liveness.begin(LOOKED_AT)
    yield Stepped(step, self.line, self.session, state)
    liveness.progress()
    self.compiled()

  @property
  def over(self) -> bool:
    """Whether the run ends before its last step: an alarm stopped it, or too many steps were skipped."""
    return self.alarms.stopped is not None or skipped.too_many(self.skipped, self.session.config.trainer)

  def warm_up(self, state: TrainState) -> None:
    """Call helpers that compile small programs of their own, so that no step has to compile them."""
    sampling_seed(state)
    if self.session.config.trainer.keep_starting_state:
      jax.random.key_data(state.rng)
    agreed(0)
    gathered(None, 'the first step')
    self.preemption.check_over_devices()

  # ———— The parts of a step ————

  def evaluate_first(self, state: TrainState) -> None:
    """Evaluate the initial model and write its metrics line, that of step 0."""
    self.progress.phase('evaluate')
    if self.writer is not None:
      self.announce(f'Evaluating {len(self.evaluations.questions)} questions before the first step …')
    timer = Timer()
    with timer('evaluate'):
      values = self.evaluations.run(state, 0)
    self.progress.evaluated(timer.seconds['evaluate'])
    self.alarms.begin(values)
    compiled = len(self.name_compiled(0))
    with self.joint_errors.alone():
      if self.writer is not None:
        self.writer.write(0, values | {COMPILED_LATE: compiled})
    self.joint_errors.meet('writing the line of step 0')

  def name_compiled(self, step: int) -> list[str]:
    """Return and log the programs compiled since the last call; none are expected during a step."""
    names = self.compiled()
    if names and jax.process_index() == 0:
      logging.info('Compiled at step %d: %s', step, ', '.join(names))
    return names

  def recall(self, step: int, unfinished: Unfinished | None = None) -> None:
    """Restore the alarms, evaluations and skipped-step count up to `step` from metrics.jsonl.

    A run that was stopped by an alarm, or by too many skipped steps, stays stopped. The line of an unfinished step is
    left out.
    """
    lines = history(self.session.workdir, written_before(step, unfinished)).kept
    self.skipped = skipped.in_a_row(lines)
    self.alarms.replay(step, lines)
    for line in lines:
      self.evaluations.recall(line)
      if line.get(alarms.ROLLBACK) is not None:
        self.evaluations.forget(int(line[alarms.ROLLBACK]))

  def step(self, state: TrainState, step: int) -> TrainState:
    """Run one step: sample, grade, train, evaluate, write its metrics line and, if due, a checkpoint.

    Returns:
      The state after it.

    Raises:
      StoppedError: the run was told to stop.
      UserError: the batch, or the evaluation, could not be graded.
    """
    session, stop = self.session, self.preemption
    timer = Timer(self.progress.phase)
    folder = session.workdir / 'profile' / str(step)
    profiled = step in session.config.trainer.profile_steps
    with jax.profiler.trace(str(folder)) if profiled else contextlib.nullcontext():
      state, taken = take_step(session, state, step, self.around, self.saving.whole.starting, timer, stop)
    draws = bool(session.config.rollout.max_staleness) and self.evaluations.due(step)
    self.hold(step, state, Unfinished(draws=draws))
    gathering = self.around.gathering
    line = step_records.step_metrics(session, step, taken, gathering, timer.seconds)
    unfinished = Unfinished(line, step_records.success_rates(taken.own.graded, session.config), draws=draws)
    if skipped.cause(line) == skipped.UNGRADED:
      unfinished.reason = reasons_of(taken.own.graded.outcomes)[0][0]
    self.hold(step, state, unfinished)
    with self.joint_errors.alone():
      if profiled:
        self.announce(f'Profile of step {step}: {folder}')
      if self.writer is not None:
        self.writer.check()
        step_records.write_step(session, step, taken, gathering, self.writer, self.announce)
    return self.finish(state, step, unfinished)

  def finish(self, state: TrainState, step: int, unfinished: Unfinished) -> TrainState:
    """Finish a step whose generation batch has trained: its evaluation, alarms, metrics line and checkpoint.

    It is repeated after a resume if the run was interrupted before the line was written; the metrics are the same as
    without the interruption.

    Returns:
      The state; after a rollback, that of the restored checkpoint.
    """
    config, trainer = self.session.config, self.session.config.trainer
    timer = Timer(self.progress.phase)
    line = dict(unfinished.line)
    due = self.evaluations.due(step)
    if due:
      with timer('evaluate'):
        line.update(self.evaluations.run(state, step))
      self.progress.evaluated(timer.seconds['evaluate'])
    if self.evaluations.newest is not None:
      line.update(step_records.gap_metrics(unfinished.success, self.evaluations.newest))
    metrics = {name: value for name, value in line.items() if not name.startswith('time/')}
    line.update({f'time/{name}_s': value for name, value in timer.seconds.items()})
    line[COMPILED_LATE] = len(self.name_compiled(step))
    if unfinished.reason:
      line[UNGRADED_REASON] = unfinished.reason
    before, self.skipped = self.skipped, skipped.after(self.skipped, {'step': step} | line)
    if self.writer is not None and skipped.warns(before, self.skipped, trainer):
      logging.getLogger('sdpo_jax.training').warning('%s', skipped.complaint(self.skipped, step, trainer))
    verdict = self.alarms.after(step, line, metrics, whole=due or not self.evaluations.questions)
    note = skipped.note(line)
    if verdict.back_to is not None:
      note += f'  rolled back to step {verdict.back_to}'
      state = self.go_back(state, verdict.back_to)
      metrics = {}  # They were measured with other weights than those that are saved now.
    leaves = leaf_digests(state)
    line[STATE_DIGEST] = state_digest(leaves)
    with self.joint_errors.alone():
      # The state may have been saved before it was evaluated.
      if self.joint_errors.failure is None and metrics and step in self.checkpoints.steps():
        self.checkpoints.measured(step, metrics)
      if self.writer is not None and self.joint_errors.failure is None:
        self.writer.write(step, line)
    self.joint_errors.meet(f'writing the metrics of step {step}')
    self.hold(step, state, metrics=metrics, leaves=leaves)
    self.line = line
    self.progress.step(
      step,
      line.get('rollout/score_mean', math.nan),
      line.get('train/loss'),
      line.get('throughput/tokens_per_s', math.nan),
      note,
      compiled=int(line[COMPILED_LATE]),
    )
    if trainer.push_url and step % trainer.push_freq == 0:
      newest = cartridges.of_session(self.session, state.trainable)  # All processes.
      self.compiled()  # Discard what joins the slots, once.
      if self.pushing is not None:
        self.pushing.send(newest, step)
    saves = step == trainer.total_training_steps or (trainer.save_freq and step % trainer.save_freq == 0)
    if saves or verdict != AlarmVerdict() or skipped.too_many(self.skipped, config.trainer):
      self.saving.save()
      self.compiled()  # Discard what Orbax compiles, once, to copy arrays from several devices.
    return state

  def go_back(self, state: TrainState, step: int) -> TrainState:
    """Return the state with the weights of a checkpoint, and forget what the discarded weights sampled and measured."""
    state = roll_back(state, step, self.checkpoints, self.saving.whole.starting)
    self.alarms.monitor.roll_back(step)
    self.evaluations.forget(step)
    self.around.start_again()
    self.skipped = skipped.Skipped()
    return state


def roll_back(state: TrainState, step: int, checkpoints: Checkpoints, starting: StartingState) -> TrainState:
  """Return the state with the student, teacher and optimizer state of a checkpoint; counters and random key stay."""
  barrier(f'the rollback to step {step}')
  like = abstract(state)
  starting.donate(others_follow=False)  # During the restore, only checkpoints can be resumed from.
  for leaf in jax.tree.leaves((state.trainable, state.opt_state, state.teacher)):
    leaf.delete()  # There may be no room for both.
  saved = checkpoints.restore_step(step, like)
  return saved.replace(step=state.step, optimizer_step=state.optimizer_step, rng=state.rng)


def short_prompt(examples: Sequence[Example]) -> str:
  """Return the first question that fits on a command line, one line of at most 200 characters; '…' if none does."""
  asked = (example.messages[-1]['content'] for example in examples)
  return next((content for content in asked if 0 < len(content) <= 200 and '\n' not in content), '…')
