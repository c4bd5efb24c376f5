"""The run, top to bottom: sample, grade, teach, train, evaluate, save; and again.

Order of a resume: settings are compared with those of the run, the newest readable checkpoint is restored (device
state, data iterator, history), lines of `metrics.jsonl` after it are dropped, and the loop goes on as if it had never
stopped. Nothing random depends on how often a run was started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import logging
import signal
import sys
import threading
from typing import Any

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

from sdpo_jax.config import Config, differences
from sdpo_jax.data import pipeline
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.files import write_atomically
from sdpo_jax.training import phases, records
from sdpo_jax.training.checkpoints import Checkpoints
from sdpo_jax.training.evaluation import evaluate
from sdpo_jax.training.metrics import MetricsWriter, Progress, check_wandb
from sdpo_jax.training.session import Session, load_tokenizer, make_session, sampling_seed
from sdpo_jax.training.step import abstract_state, place_state
from sdpo_jax.types import Example, TrainState

EXIT_PREEMPTED = 143  # 128 + SIGTERM: saved, to be started again.


@dataclasses.dataclass
class Result:
  """How a run ended."""

  workdir: epath.Path
  step: int
  preempted: bool
  evaluations: dict[int, dict[str, float]]  # step → flat evaluation metrics.
  example_prompt: str  # A held-out question to try, where it is short.


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

  def agreed(self) -> bool:
    """Whether any process was told to stop; all processes get the same answer at the same place of the loop."""
    if jax.process_count() == 1:
      return self._received.is_set()
    flags = multihost_utils.process_allgather(np.array(self._received.is_set()))
    return bool(np.any(flags))


def check_workdir(config: Config, workdir: epath.PathLike) -> epath.Path:
  """The run's directory, which is new, or holds nothing trained, or the same run; nothing is written.

  Raises:
    UserError: it holds another run (the settings that differ are named), or what it holds cannot be read.
  """
  try:
    workdir = epath.Path(workdir)
    has = lambda name: (workdir / name).exists()
    trained = has('checkpoints') and any((workdir / 'checkpoints').iterdir())
    if not trained and not has('metrics.jsonl'):
      return workdir
    if not has('config.json'):
      raise UserError(f'{workdir} has a run but no config.json: restore that file or choose another --workdir.')
    old = json.loads((workdir / 'config.json').read_text())
  except json.JSONDecodeError as error:
    raise UserError(f'{workdir}/config.json is not JSON ({error}): restore it or choose another --workdir.') from error
  except ImportError as error:
    raise UserError(f'--workdir={workdir} needs a package that is not installed: {error}.') from error
  changed = differences(old, config)
  if changed:
    raise UserError(
      f'{workdir} holds a run with other settings: {"; ".join(changed)}. '
      'Use the settings of that run, or another --workdir.'
    )
  return workdir


def open_workdir(config: Config, workdir: epath.Path) -> None:
  """Makes the run's directory and writes `config.json` there.

  Raises:
    UserError: it cannot be made.
  """
  if jax.process_index() != 0:
    return
  path, text = workdir / 'config.json', config.to_json() + '\n'
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
      write_atomically(path, text)
  except OSError as error:
    raise UserError(f'The run directory {workdir} cannot be written ({error}): choose another --workdir.') from error


def train(config: Config, workdir: epath.PathLike, *, announce: Any = lambda text: None) -> Result:
  """Runs, or resumes, the training that `config` describes.

  Args:
    config: settings.
    workdir: local or gs:// directory of the run.
    announce: receives sentences for the user.

  Raises:
    UserError: anything the user can mend.
  """
  config.validate()
  check_wandb(config)
  with Graders(config.environments) as graders:
    return _train(config, workdir, graders, announce)


def _train(config: Config, workdir: epath.PathLike, graders: Graders, announce: Any) -> Result:
  tokenizer = load_tokenizer(config)
  iterator = pipeline.TrainIterator(config, tokenizer, registry)
  held_out = pipeline.evaluation_examples(config, tokenizer, registry) if config.trainer.test_freq else []
  graders.prepare(iterator.environments | {example.environment for example in held_out})
  workdir = check_workdir(config, workdir)
  session, parameters = make_session(config, workdir, tokenizer)
  open_workdir(config, workdir)
  checkpoints = Checkpoints(workdir, keep=config.trainer.max_ckpt_to_keep, best_metric=config.trainer.best_metric)
  restored = checkpoints.restore(abstract_state(config, parameters, session.mesh))
  if restored is None:
    state = place_state(config, parameters, session.mesh)
  else:
    step, state, host = restored
    iterator.set_state(host['iterator'])
    announce(f'Resuming {workdir} at step {step}.')
  del parameters, restored
  run = _Run(session, graders, iterator, held_out, checkpoints, announce)
  try:
    return run(state)
  finally:
    checkpoints.close()


class _Run:
  """The loop over generation batches; state is passed through, what lies here is bookkeeping."""

  def __init__(
    self,
    session: Session,
    graders: Graders,
    iterator: pipeline.TrainIterator,
    held_out: Sequence[Example],
    checkpoints: Checkpoints,
    announce: Any,
  ):
    self.session, self.graders, self.iterator, self.held_out = session, graders, iterator, held_out
    self.checkpoints, self.announce = checkpoints, announce
    self.last_metrics: dict[str, float] = {}  # Of the step before, for a checkpoint on being told to stop.

  def __call__(self, state: TrainState) -> Result:
    config = self.session.config
    first, total = int(state.step), config.trainer.total_training_steps
    writer = MetricsWriter(self.session.workdir, config, resume_step=first) if jax.process_index() == 0 else None
    progress = Progress(total, first, shown=writer is not None)
    preempted = False
    try:
      with Preemption() as preemption:
        if first == 0 and config.trainer.val_before_train and self.held_out:
          progress.phase('evaluate')
          values = self.evaluate(state, 0)
          if writer is not None:
            writer.write(0, values)
        for step in range(first + 1, total + 1):
          before = self.host_state()
          advanced = self.step(state, step, writer, progress, preemption)
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
    return Result(self.session.workdir, int(state.step), preempted, evaluations, _short_prompt(self.held_out))

  def host_state(self) -> dict[str, Any]:
    return {'iterator': self.iterator.get_state()}

  def save(self, step: int, state: TrainState, host: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    if step > 0:
      self.checkpoints.save(step, state, host, metrics)

  def step(
    self, state: TrainState, step: int, writer: MetricsWriter | None, progress: Progress, preemption: Preemption
  ) -> TrainState | None:
    """One generation batch, with its evaluation, log line and checkpoint.

    Returns:
      the state after it; None if the run was told to stop before the update began, when `state` is still whole.
    """
    session, config, trainer = self.session, self.session.config, self.session.config.trainer
    timer = phases.Timer(progress.phase)
    if preemption.agreed():
      return None
    folder = session.workdir / 'profile' / str(step)
    profiled = step in trainer.profile_steps
    metrics: dict[str, float] = {}
    with jax.profiler.trace(str(folder)) if profiled else contextlib.nullcontext():
      collected = phases.collect(session, self.graders, state, next(self.iterator), step, timer)
      if preemption.agreed():
        return None
      with timer('teach'):
        context = phases.teach(session, collected, sampling_seed(state), step)
      with timer('train'):
        samples = phases.prepare(session, state, collected, context, metrics)
        state, learned = phases.learn(session, state, samples)
    if profiled:
      self.announce(f'Profile of step {step}: {folder}')
    metrics.update(records.rollout_metrics(collected, config))
    metrics.update(records.update_metrics(learned, samples))
    metrics.update(records.throughput_metrics(session, collected, learned, timer.seconds))
    if context is not None:
      metrics.update(context.metrics)
    note = f'  {learned.skipped} step(s) skipped: gradient not finite' if learned.skipped else ''
    if self.held_out and (
      step == trainer.total_training_steps or (trainer.test_freq and step % trainer.test_freq == 0)
    ):
      with timer('evaluate'):
        metrics.update(self.evaluate(state, step))
    if writer is not None:
      if trainer.rollout_save_freq and step % trainer.rollout_save_freq == 0:
        records.write_rollouts(session, step, collected, context, learned)
      writer.write(step, {**metrics, **{f'time/{name}_s': value for name, value in timer.seconds.items()}})
    progress.step(step, metrics['rollout/score_mean'], learned.loss, metrics['throughput/tokens_per_s'], note)
    if step == trainer.total_training_steps or (trainer.save_freq and step % trainer.save_freq == 0):
      self.save(step, state, self.host_state(), metrics)
    self.last_metrics = metrics
    return state

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
    if jax.process_index() == 0:
      records.write_evaluation(session.workdir, step, evaluation)
    logging.info('Evaluation at step %d: %s', step, evaluation.metrics)
    return evaluation.flat()


def _short_prompt(examples: Sequence[Example]) -> str:
  content = examples[0].messages[-1]['content'] if examples else ''
  return content if 0 < len(content) <= 200 and not set(content) & set('"\n$`\\') else '…'
