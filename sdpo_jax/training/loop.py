"""The run, top to bottom: sample, grade, teach, train, evaluate, save; and again.

Order of a resume: settings are compared with those of the run, the newest readable checkpoint is restored (device
state, data iterator), lines of `metrics.jsonl` after it are dropped, what the alarms have seen is read from those that
stay, and the loop goes on as if it had never stopped. Nothing random depends on how often a run was started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import logging
import signal
import sys
import threading
from typing import Any

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

from sdpo_jax import programs
from sdpo_jax.config import Config
from sdpo_jax.data import pipeline
from sdpo_jax.distributed.cluster import barrier
from sdpo_jax.distributed.collectives import agreed, gathered
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation import alarms
from sdpo_jax.evaluation.evaluate import evaluate
from sdpo_jax.evaluation.names import nearest
from sdpo_jax.rollout.grading_thread import StoppedError
from sdpo_jax.training import fingerprint, records, remains, samples, skipped, startup
from sdpo_jax.training.boards import check_wandb
from sdpo_jax.training.checkpoints import Checkpoints, abstract
from sdpo_jax.training.digests import leaf_digests, state_digest
from sdpo_jax.training.metrics import STATE_DIGEST, MetricsWriter, check_digest, history
from sdpo_jax.training.ownership import Ownership, sole_user
from sdpo_jax.training.progress import Progress
from sdpo_jax.training.session import Session, load_tokenizer, make_session
from sdpo_jax.training.step import (
  Timer,
  build_batch,
  build_teacher_prompts,
  rollout_and_grade,
  run_update,
  sampling_seed,
)
from sdpo_jax.training.update import abstract_state, place_state
from sdpo_jax.training.workdir import check_workdir, open_workdir
from sdpo_jax.types import Example, TrainState

EXIT_PREEMPTED = 143  # 128 + SIGTERM: saved, to be started again.
# Metric: programs that were not compiled before the first step, as they should have been.
COMPILED_LATE = 'programs/compiled'
EXIT_ALARM = 3  # Stopped by an alarm: saved, to be looked at.


@dataclasses.dataclass
class Result:
  """How a run ended."""

  workdir: epath.Path
  step: int
  preempted: bool
  evaluations: dict[int, dict[str, float]]  # step → flat evaluation metrics.
  example_prompt: str  # A held-out question to try, where it is short.
  stopped: str | None = None  # By which alarm, in a sentence.
  skipped: int = 0  # Steps at the end that taught nothing: their gradients were not finite.


class Preemption:
  """Remembers a SIGTERM (or Ctrl-C) so that the run can save before it ends; a second one ends it at once."""

  def __init__(self):
    self._received = threading.Event()
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> Preemption:
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_: Any) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame: Any) -> None:
    if self._received.is_set():
      signal.signal(number, signal.SIG_DFL)
      signal.raise_signal(number)
    self._received.set()
    print(f'\n{signal.Signals(number).name}: saving a checkpoint, then stopping.', file=sys.stderr, flush=True)

  def received(self) -> bool:
    """Whether this process was told to stop."""
    return self._received.is_set()

  def agreed(self) -> bool:
    """Whether any process was told to stop; all processes get the same answer at the same place of the loop."""
    if jax.process_count() == 1:
      return self._received.is_set()
    flags = multihost_utils.process_allgather(np.array(self._received.is_set()))
    return bool(np.any(flags))


def train(
  config: Config, workdir: epath.PathLike, *, restart: bool = False, announce: Any = lambda text: None
) -> Result:
  """Runs, or resumes, the training that `config` describes.

  Args:
    config: settings.
    workdir: local or gs:// directory of the run.
    restart: whether to begin at step 0 where the checkpoints of the run are gone; what there is of it is moved away.
    announce: receives sentences for the user.

  Raises:
    UserError: anything the user can mend.
  """
  config.validate()
  if jax.process_index() == 0:
    check_wandb(config)
  alarms.rules(config)
  with Graders(config.environments) as graders:
    return _train(config, workdir, graders, restart, announce)


def _train(config: Config, workdir: epath.PathLike, graders: Graders, restart: bool, announce: Any) -> Result:
  tokenizer = load_tokenizer(config)
  iterator = pipeline.TrainIterator(config, tokenizer, registry)
  held_out = pipeline.evaluation_examples(config, tokenizer, registry) if config.trainer.test_freq else []
  graders.prepare(iterator.environments | {example.environment for example in held_out})
  startup.check_questions(config, tokenizer, graders, iterator.questions, held_out)
  workdir = check_workdir(config, workdir, restart=restart)
  parts = fingerprint.take(config, tokenizer, iterator, held_out, graders)
  continuation = fingerprint.compare(workdir, config, parts)
  # What every process would say alike.
  say = announce if jax.process_index() == 0 else lambda text: None
  say(f'Loading {config.model.path} …')
  session, parameters = make_session(config, workdir, tokenizer)
  with sole_user(workdir, say) as ownership:
    if ownership is not None:
      remains.settle(workdir, ownership, restart=restart, say=say)
    open_workdir(config, workdir)
    barrier('the start of the run')  # Weights are read by now, and the directory is there.
    checkpoints = Checkpoints(
      workdir, keep=config.trainer.max_ckpt_to_keep, best_metric=config.trainer.best_metric, ownership=ownership
    )
    restored = checkpoints.restore(abstract_state(config, parameters, session.mesh))
    if ownership is not None:
      if restored is None:
        remains.refuse_loss(workdir, ownership.record())
      ownership.resumed(restored[0] if restored else 0)
    continuation = fingerprint.start(workdir, config, continuation, restored[0] if restored else 0)
    for line in continuation.lines:
      say(line)
    if restored is None:
      state = place_state(config, parameters, session.mesh)
    else:
      step, state, host = restored
      digest = checkpoints.state_digest(step)
      recorded = check_digest(workdir, step, digest)
      iterator.set_state(host['iterator'], other_rows='data' in config.trainer.accept_changes)
      announce(f'Resuming {workdir} at step {step} (state {digest[:16]}{", as in metrics.jsonl" if recorded else ""}).')
    del parameters, restored
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.trainable))
    for line in startup.describe(session, trained, iterator.rows, len(held_out), int(state.step)):
      say(line)
    run = _Run(session, graders, iterator, held_out, checkpoints, ownership, announce)
    try:
      run.recall(int(state.step))
      if int(state.step) < config.trainer.total_training_steps and not run.over:
        startup.compile_programs(session, state, len(held_out), say)
      return run(state)
    finally:
      checkpoints.close()


@dataclasses.dataclass
class Verdict:
  """What the alarms ask for at the end of a step; nothing where neither field is set."""

  stop: str | None = None  # The run ends, for this reason.
  back_to: int | None = None  # The weights of this step's checkpoint are restored.


class _Run:
  """The loop over generation batches; state is passed through, what lies here is bookkeeping."""

  def __init__(
    self,
    session: Session,
    graders: Graders,
    iterator: pipeline.TrainIterator,
    held_out: Sequence[Example],
    checkpoints: Checkpoints,
    ownership: Ownership | None,
    announce: Any,
  ):
    self.session, self.graders, self.iterator, self.held_out = session, graders, iterator, held_out
    self.checkpoints, self.ownership, self.announce = checkpoints, ownership, announce
    self.last_metrics: dict[str, float] = {}  # Of the step before, for a checkpoint on being told to stop.
    self.watch = alarms.AlarmMonitor(alarms.rules(session.config))
    self.evaluations: dict[int, dict[str, float]] = {}  # Step → metrics; without those of steps that were undone.
    self.stopped: str | None = None  # By which alarm.
    self.checked_rules = False  # Whether rules that fit nothing were named.
    self.checked_best = False  # Whether a best metric that nobody measures was named.
    self.skipped = 0  # Steps in a row, up to now, that taught nothing.
    self.compiled: Callable[[], list[str]] = list  # What was compiled since it was last called.
    self.writer: MetricsWriter | None = None  # On the process that writes.

  def __call__(self, state: TrainState) -> Result:
    config = self.session.config
    first, total = int(state.step), config.trainer.total_training_steps
    writer = None
    if self.ownership is not None:
      writer = MetricsWriter(self.session.workdir, config, resume_step=first, ownership=self.ownership)
    self.writer = writer
    self.warm_up(state)
    preempted = False
    progress = Progress(total, first, test_freq=config.trainer.test_freq, shown=writer is not None)
    try:
      with Preemption() as preemption, programs.noted_compilations() as self.compiled:
        if first == 0 and config.trainer.val_before_train and self.held_out:
          self.evaluate_first(state, writer, progress)
        for step in range(first + 1, total + 1):
          if self.over:
            break
          before = self.host_state()
          advanced = self.step(state, before, step, writer, progress, preemption)
          if advanced is None:
            preempted = True
            self.save(step - 1, state, before, self.last_metrics)
            break
          state = advanced
    finally:
      progress.close()
    self.checkpoints.wait()
    evaluations = {}
    if writer is not None:
      for line in writer.lines:
        found = {key: value for key, value in line.items() if key.startswith('eval/')}
        if found:
          evaluations[line['step']] = found
      writer.close()
    if skipped.too_many(self.skipped, config.trainer) and not self.stopped:
      raise UserError(skipped.complaint(self.skipped, int(state.step), config.trainer))
    prompt = _short_prompt(self.held_out)
    return Result(self.session.workdir, int(state.step), preempted, evaluations, prompt, self.stopped, self.skipped)

  @property
  def over(self) -> bool:
    """Whether no step follows, however many are left: an alarm has stopped the run, or it learns nothing."""
    return self.stopped is not None or skipped.too_many(self.skipped, self.session.config.trainer)

  def warm_up(self, state: TrainState) -> None:
    """Call what has small programs of its own, the same in every step, so that no step compiles them."""
    sampling_seed(state)
    agreed(0)
    gathered(None, 'the first step')
    Preemption().agreed()

  def evaluate_first(self, state: TrainState, writer: MetricsWriter | None, progress: Progress) -> None:
    """Evaluate before the first step."""
    progress.phase('evaluate')
    if writer is not None:
      self.announce(f'Evaluating {len(self.held_out)} questions before the first step …')
    timer = Timer()
    with timer('evaluate'):
      values = self.evaluate(state, 0)
    progress.evaluated(timer.seconds['evaluate'])
    self.watch.observe(0, values)
    self.name_missing_best(values)
    if writer is not None:
      writer.write(0, values | {COMPILED_LATE: len(self.name_compiled(0))})

  def name_compiled(self, step: int) -> list[str]:
    """Return what was compiled since this was last asked; announce it, for all programs were compiled before."""
    names = self.compiled()
    if names and jax.process_index() == 0:
      logging.info('Compiled at step %d: %s', step, ', '.join(names))
    return names

  def recall(self, step: int) -> None:
    """Restore what alarms and evaluations had seen up to `step`, from metrics.jsonl; a run that they stopped stays so.

    So does one that learned nothing for too long.
    """
    lines = history(self.session.workdir, step)
    lost = remains.lost_lines(self.session.workdir, step, lines)
    if lost and self.ownership is not None:
      self.announce(lost)
    self.skipped = skipped.in_a_row(lines)
    raised = self.watch.replay(lines)
    for line in lines:
      found = {name: value for name, value in line.items() if name.startswith('eval/')}
      if found:
        self.evaluations[line['step']] = found
      if line.get(alarms.ROLLBACK) is not None:
        self.forget(int(line[alarms.ROLLBACK]))
    # Started again with the same rules it stays where it is; otherwise whoever restarts it would train the wreck on.
    if lines and lines[-1].get(alarms.STOP):
      self.stopped = self.judge(step, raised).stop

  def forget(self, after: int) -> None:
    self.evaluations = {step: found for step, found in self.evaluations.items() if step <= after}

  def host_state(self) -> dict[str, Any]:
    return {'iterator': self.iterator.get_state()}

  def save(self, step: int, state: TrainState, host: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    if step > 0:
      if self.writer is not None:
        self.writer.sync()  # What a checkpoint continues is on the disk before it.
      barrier(f'the checkpoint of step {step}')
      self.checkpoints.save(step, state, host, metrics)
      self.compiled()  # What Orbax compiles, once, to copy arrays from several devices is no program of the run.

  def step(
    self,
    state: TrainState,
    before: Mapping[str, Any],
    step: int,
    writer: MetricsWriter | None,
    progress: Progress,
    preemption: Preemption,
  ) -> TrainState | None:
    """Run one generation batch, with its evaluation, log line and checkpoint; `before` is the host's state.

    Returns:
      the state after it; None if the run was told to stop before the update began, when `state` is still whole.

    Raises:
      UserError: the batch, or the evaluation, could not be graded; what there is of the run is saved.
    """
    session, config, trainer = self.session, self.session.config, self.session.config.trainer
    timer = Timer(progress.phase)
    if preemption.agreed():
      return None
    folder = session.workdir / 'profile' / str(step)
    profiled = step in trainer.profile_steps
    metrics: dict[str, float] = {}
    with jax.profiler.trace(str(folder)) if profiled else contextlib.nullcontext():
      try:
        graded = rollout_and_grade(session, self.graders, state, next(self.iterator), step, timer, preemption.received)
      except StoppedError:
        return None
      except UserError:  # Started again, the run repeats this batch.
        self.save(step - 1, state, before, self.last_metrics)
        self.checkpoints.wait()
        raise
      if preemption.agreed():
        return None
      with timer('teach'):
        context = build_teacher_prompts(session, graded, sampling_seed(state), step)
      with timer('train'):
        batch = build_batch(session, state, graded, context, metrics)
        state, report = run_update(session, state, batch)
    if profiled:
      self.announce(f'Profile of step {step}: {folder}')
    metrics.update(records.rollout_metrics(graded, config))
    metrics.update(records.update_metrics(report, batch, session))
    metrics.update(records.throughput_metrics(session, graded, report, timer.seconds))
    if context is not None:
      metrics.update(context.metrics)
    note = f'  {report.skipped} step(s) skipped: gradient not finite' if report.skipped else ''
    evaluated = bool(self.held_out) and (
      step == trainer.total_training_steps or bool(trainer.test_freq and step % trainer.test_freq == 0)
    )
    unevaluated: UserError | None = None
    if evaluated:
      with timer('evaluate'):
        try:
          metrics.update(self.evaluate(state, step))
        except UserError as error:
          unevaluated = error  # To be raised once the step is written and saved.
      progress.evaluated(timer.seconds['evaluate'])
    if self.evaluations:
      metrics.update(records.gap_metrics(graded, self.evaluations[max(self.evaluations)], config))
    line = {
      **metrics,
      **{f'time/{name}_s': value for name, value in timer.seconds.items()},
      'time/graders_busy_s': graded.graders_busy_s,  # Beside the phases, which do not add up with it.
      COMPILED_LATE: len(self.name_compiled(step)),
    }
    self.skipped = self.skipped + 1 if skipped.taught_nothing(line) else 0
    raised, fired = self.watch.observe(step, line)
    line.update(fired)
    if evaluated or not self.held_out:
      self.name_idle_rules()
      self.name_missing_best(metrics)
    verdict = self.judge(step, raised)
    if verdict.stop is not None:
      line[alarms.STOP] = 1.0
      self.stopped = verdict.stop
    elif verdict.back_to is not None:
      line[alarms.ROLLBACK] = verdict.back_to
      note += f'  rolled back to step {verdict.back_to}'
      state = self.roll_back(state, verdict.back_to)
      metrics = {}  # They were measured with other weights than those that are now saved.
    line[STATE_DIGEST] = state_digest(leaf_digests(state))
    if writer is not None:
      writer.check()
      self.say(step, raised, verdict)
      if trainer.rollout_save_freq and step % trainer.rollout_save_freq == 0:
        records.write_rollouts(session, step, graded, context, report)
      if trainer.sample_table_freq and step % trainer.sample_table_freq == 0:
        picked = samples.pick(graded, trainer.sample_table_rows)
        self.announce(samples.as_text(step, picked))
        writer.write_samples(step, picked)
      writer.write(step, line)
    compiled, speed = int(line[COMPILED_LATE]), line['throughput/tokens_per_s']
    progress.step(step, line['rollout/score_mean'], report.loss, speed, note, compiled=compiled)
    due = step == trainer.total_training_steps or (trainer.save_freq and step % trainer.save_freq == 0)
    if due or verdict != Verdict() or unevaluated is not None or skipped.too_many(self.skipped, trainer):
      self.save(step, state, self.host_state(), metrics)
    if unevaluated is not None:
      self.checkpoints.wait()
      raise unevaluated
    self.last_metrics = metrics
    return state

  def judge(self, step: int, raised: Sequence[alarms.Alarm]) -> Verdict:
    """Decide what to do about the alarms of a step, by `alarms.action`; every process decides the same."""
    config, settings = self.session.config, self.session.config.alarms
    if settings.action == 'warn' or not self.watch.rules or not agreed(len(raised)):
      return Verdict()
    reasons = '; '.join(map(str, raised))
    best = agreed(self.checkpoints.best(before=step) or 0) if config.trainer.best_metric else 0
    if settings.action == 'rollback' and best and self.watch.rollbacks < settings.max_rollbacks:
      return Verdict(back_to=best)
    if settings.action == 'rollback' and best:
      reasons += f'; alarms.max_rollbacks={settings.max_rollbacks} rollbacks were made'
    elif settings.action == 'rollback':
      reasons += f'; there is no checkpoint with {config.trainer.best_metric} to go back to'
    return Verdict(stop=reasons + (f'. The best checkpoint is that of step {best}.' if best else '.'))

  def say(self, step: int, raised: Sequence[alarms.Alarm], verdict: Verdict) -> None:
    """Announce alarms to the user as they begin, and those that are acted upon."""
    for alarm in raised:
      if alarm.begins or verdict != Verdict():
        self.announce(f'Alarm at step {step}: {alarm}.')
    if verdict.back_to is not None:
      self.announce(f'Going back to the weights of step {verdict.back_to}; step {step + 1} has new questions.')

  def name_idle_rules(self) -> None:
    """Announce, once, the rules that match no metric, for example because a name is misspelt."""
    if not self.checked_rules and jax.process_index() == 0:
      for text in self.watch.unmatched():
        self.announce(f'alarms.rules: {text!r} fits none of the metrics measured so far; see metrics.jsonl for names.')
    self.checked_rules = True

  def name_missing_best(self, metrics: Mapping[str, float]) -> None:
    """Announce, once, that graders do not report what `trainer.best_metric` names."""
    best = self.session.config.trainer.best_metric
    if best is None or self.checked_best or not (best.startswith('eval/') or 'train/loss' in metrics):
      return
    if best not in metrics and jax.process_index() == 0:
      self.announce(
        f'trainer.best_metric={best} was not measured; until it is, no checkpoint counts as the best. Measured were '
        f'{", ".join(nearest(best, metrics))} and others; see metrics.jsonl for names.'
      )
    self.checked_best = True

  def roll_back(self, state: TrainState, step: int) -> TrainState:
    """Restore student, teacher and optimizer state from a step's checkpoint; counters and randomness go on as they are."""
    barrier(f'the way back to step {step}')
    like = abstract(state)
    for leaf in jax.tree.leaves((state.trainable, state.opt_state, state.teacher)):
      leaf.delete()  # There may be no room for both.
    saved = self.checkpoints.restore_step(step, like)
    self.watch.roll_back(step)
    self.forget(step)
    self.skipped = 0
    return saved.replace(step=state.step, optimizer_step=state.optimizer_step, rng=state.rng)

  def evaluate(self, state: TrainState, step: int) -> dict[str, float]:
    session = self.session
    evaluation = evaluate(
      session.sampler,
      session.base,
      state.trainable,
      self.held_out,
      session.config,
      session.tokenizer,
      self.graders,
      seed=session.config.seed,
    )
    if self.ownership is not None:
      self.ownership.check()
      records.write_evaluation(session.workdir, step, evaluation)
    logging.info('Evaluation at step %d: %s', step, evaluation.metrics)
    self.evaluations[step] = evaluation.flat()
    return self.evaluations[step]


def _short_prompt(examples: Sequence[Example]) -> str:
  content = examples[0].messages[-1]['content'] if examples else ''
  return content if 0 < len(content) <= 200 and not set(content) & set('"\n$`\\') else '…'
