"""The run, top to bottom: sample, grade, teach, train, evaluate, save; and again.

Order of a resume: settings are compared with those of the run, the newest readable checkpoint is restored (device
state, data iterator, history), lines of `metrics.jsonl` after it are dropped, and the loop goes on as if it had never
stopped. Nothing random depends on how often a run was started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
import logging
import signal
import sys
import threading
import time
from typing import Any

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

from models import huggingface
from models import tokenizer as tokenizers
from models.policy import Policy
from sdpo_jax.config import Config, differences
from sdpo_jax.data import pipeline
from sdpo_jax.data.prompts import prompt_tokens
from sdpo_jax.errors import UserError
from sdpo_jax.mesh import make_mesh, put_rows
from sdpo_jax.objective.advantages import grpo_advantages
from sdpo_jax.objective.weights import rollout_is_weights
from sdpo_jax.rollout.engine import Sampler
from sdpo_jax.teacher.context import TeacherContext, build_teacher_context
from sdpo_jax.teacher.order import balanced_order
from sdpo_jax.training import batching, flops
from sdpo_jax.training.checkpoints import Checkpoints
from sdpo_jax.training.evaluation import Evaluation, evaluate, grade
from sdpo_jax.training.metrics import MetricsWriter, Progress, check_wandb
from sdpo_jax.training.step import Update, init_state, make_update
from sdpo_jax.types import Example, Outcome, Rollouts, TrainState, Tree

EXIT_PREEMPTED = 143  # 128 + SIGTERM: saved, to be started again.


@dataclasses.dataclass
class Session:
  """Everything a run holds beside its state."""

  config: Config
  workdir: epath.Path
  tokenizer: Any
  policy: Policy
  base: Tree
  mesh: jax.sharding.Mesh
  sampler: Sampler
  update: Update
  flops_per_token: float  # of one forward pass.


@dataclasses.dataclass
class Result:
  """How a run ended."""

  workdir: epath.Path
  step: int
  preempted: bool
  evaluations: dict[int, dict[str, float]]  # step → flat evaluation metrics.


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


def open_workdir(config: Config, workdir: epath.PathLike) -> epath.Path:
  """The run's directory, new or of the same run.

  Raises:
    UserError: it holds another run: the settings that differ are named.
  """
  workdir = epath.Path(workdir)
  saved = workdir / 'config.json'
  if saved.exists():
    try:
      old = json.loads(saved.read_text())
    except json.JSONDecodeError as error:
      raise UserError(f'{saved} is not JSON ({error}): restore it or choose another --workdir.') from error
    changed = differences(old, config)
    if changed:
      raise UserError(
        f'{workdir} holds a run with other settings: {"; ".join(changed)}. Use the settings of that run, or another --workdir.'
      )
  elif workdir.exists() and any(path.name == 'checkpoints' for path in workdir.iterdir()):
    raise UserError(f'{workdir} has checkpoints but no config.json: restore that file or choose another --workdir.')
  else:
    try:
      workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise UserError(f'The run directory {workdir} cannot be made ({error}): choose another --workdir.') from error
  if jax.process_index() == 0:
    saved.write_text(config.to_json() + '\n')
  return workdir


def make_session(config: Config, workdir: epath.PathLike) -> tuple[Session, Tree]:
  """Loads tokenizer and model; returns the session and the trainable parameters of the model directory."""
  tokenizer = tokenizers.load(config.model.path)
  mesh = make_mesh(config.mesh)
  policy, parameters = huggingface.load(config.model.path, config.model, mesh=mesh)
  buckets = batching.Buckets.of(config)
  sampler = Sampler(
    policy,
    tokenizer,
    prompt_buckets=buckets.prompt,
    response_buckets=buckets.response,
    max_batch_rows=config.rollout.max_batch_rows,
    stop=config.rollout.stop,
    stop_token_ids=tuple(
      sorted({*config.rollout.stop_token_ids, *tokenizers.stop_token_ids(config.model.path, tokenizer)})
    ),
    mesh=mesh,
  )
  session = Session(
    config=config,
    workdir=epath.Path(workdir),
    tokenizer=tokenizer,
    policy=policy,
    base={},
    mesh=mesh,
    sampler=sampler,
    update=make_update(policy, config),
    flops_per_token=flops.forward_flops_per_token(parameters),
  )
  return session, parameters


def sampling_seed(state: TrainState) -> int:
  """The seed of a run's rollouts and demonstration draws, from the state's key."""
  return int(jax.random.bits(state.rng, dtype=np.uint32))


@dataclasses.dataclass
class Collected:
  """A graded generation batch, in batch order."""

  examples: list[Example]  # G.
  prompts: list[list[int]]  # G.
  rollouts: Rollouts  # N.
  outcomes: list[Outcome]  # N.


def collect(session: Session, state: TrainState, examples: list[Example], step: int, timer: Timer) -> Collected:
  """Samples n completions for each question and grades them."""
  config = session.config
  prompts = [prompt_tokens(session.tokenizer, example, config) for example in examples]
  with timer('sample'):
    rollouts = session.sampler.sample(
      session.base,
      state.trainable,
      prompts,
      n=config.rollout.n,
      temperature=config.rollout.temperature,
      top_p=config.rollout.top_p,
      top_k=config.rollout.top_k,
      min_p=config.rollout.min_p,
      max_tokens=config.data.max_response_length,
      seed=sampling_seed(state),
      step=step,
    )
  with timer('grade'):
    outcomes = grade(examples, rollouts)
  if config.trainer.batch_order == 'balanced':
    lengths = rollouts.completion_mask.sum(1) + rollouts.prompt_mask.sum(1)
    order = balanced_order(lengths, config.trainer.balance_partitions)
    rollouts, outcomes = rollouts.take(order), [outcomes[row] for row in order]
  return Collected(examples, prompts, rollouts, outcomes)


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
  on_policy = config.actor.ppo_mini_batch_size == config.data.train_batch_size and config.actor.ppo_epochs == 1
  if on_policy and correction.rollout_is is None:
    return samples
  old = score(session, state, samples)
  if correction.rollout_is is not None:
    samples.rollout_weights, measured = rollout_is_weights(
      old,
      rollouts.sampling_log_probs,
      rollouts.completion_mask.astype(np.float32),
      threshold=correction.rollout_is_threshold,
      batch_normalize=correction.rollout_is_batch_normalize,
    )
    samples.rollout_weights = np.asarray(samples.rollout_weights, np.float32)
    metrics.update({f'rollout_corr/{name}': float(value) for name, value in measured.items()})
  if not on_policy:
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
    width = min(result.shape[1], log_probs.shape[1])
    result[micro.rows, :width] = np.asarray(log_probs)[: len(micro.rows), :width]
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
  size = config.actor.ppo_mini_batch_size * config.rollout.n
  losses, reports, values = [], [], {}
  trained = teacher_tokens = 0
  shape = samples.rollouts.completion_tokens.shape
  for _ in range(config.actor.ppo_epochs):
    for start in range(0, len(samples), size):
      grads = update.zero(state.trainable)
      pending = []
      for micro in batching.micro_batches(samples, np.arange(start, start + size), config, session.mesh.size):
        batch = put_rows(session.mesh, micro.batch)
        grads, result = update.accumulate(session.base, state, grads, batch)
        pending.append((micro.rows, result))
        trained += int(micro.batch.student.segment_ids[: len(micro.rows)].sum())
        if micro.batch.teacher is not None:
          teacher_tokens += int(micro.batch.teacher.segment_ids[: len(micro.rows)].sum())
      state, report = update.apply(state, grads)
      losses.append(sum(float(result.loss) for _, result in pending))
      reports.append(jax.device_get(report))
      for rows, result in pending:
        for name, value in jax.device_get(result.aux).items():
          target = values.setdefault(name, np.full(shape, np.nan, np.float32))
          width = min(shape[1], value.shape[1])
          target[rows, :width] = value[: len(rows), :width]
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
  """Seconds by phase; tells the progress bar what is going on."""

  def __init__(self, progress: Progress):
    self.seconds: dict[str, float] = {}
    self._progress = progress
    self._name, self._start = '', 0.0

  def __call__(self, name: str) -> Timer:
    self._name = name
    self._progress.phase(name)
    return self

  def __enter__(self) -> None:
    self._start = time.monotonic()

  def __exit__(self, *_: Any) -> None:
    self.seconds[self._name] = self.seconds.get(self._name, 0.0) + time.monotonic() - self._start


def token_mean(values: Mapping[str, np.ndarray], name: str, mask: np.ndarray) -> float:
  """Mean of a per-token quantity over the tokens for which it was computed; NaN when there are none."""
  picked = values[name][mask & np.isfinite(values[name])] if name in values else np.array([])
  return float(picked.mean()) if len(picked) else float('nan')


def rollout_metrics(collected: Collected, threshold: float) -> dict[str, float]:
  """What the sampled and graded batch looks like."""
  rollouts, outcomes = collected.rollouts, collected.outcomes
  scores = np.array([outcome.score for outcome in outcomes])
  mask = rollouts.completion_mask
  solved = np.zeros(len(collected.examples), bool)
  np.logical_or.at(solved, rollouts.group, scores >= threshold)
  return {
    'rollout/score_mean': scores.mean(),
    'rollout/success_rate': (scores >= threshold).mean(),
    'rollout/solved_group_fraction': solved.mean(),
    'rollout/completion_length_mean': mask.sum(1).mean(),
    'rollout/truncated_fraction': np.mean([reason == 'length' for reason in rollouts.finish_reason]),
    'rollout/entropy': rollouts.entropy[mask].mean(),
  }


def update_metrics(learned: Learned, samples: batching.Samples) -> dict[str, float]:
  """What the update did; names of the `teacher/*` quantities are those of the objective's per-token outputs."""
  mask = samples.rollouts.completion_mask & (samples.distill_mask > 0)[:, None]
  return {
    'train/loss': learned.loss,
    'train/grad_norm': learned.grad_norm,
    'train/learning_rate': learned.learning_rate,
    'train/optimizer_steps': learned.optimizer_steps,
    'train/skipped_steps': learned.skipped,
    **{
      f'teacher/{name}': token_mean(learned.token_values, name, mask)
      for name in learned.token_values
      if samples.teacher_prompts is not None
    },
  }


def throughput_metrics(
  session: Session, collected: Collected, learned: Learned, seconds: Mapping[str, float]
) -> dict[str, float]:
  """Tokens per second and, where the peak of the device is known, model FLOPs utilisation (no remat counted)."""
  sampled = int(collected.rollouts.completion_mask.sum())
  prefilled = sum(map(len, collected.prompts))
  whole = sum(seconds.values())
  devices = jax.device_count()
  metrics = {
    'throughput/tokens_per_s': sampled / whole,
    'throughput/tokens_per_s_per_device': sampled / whole / devices,
    'throughput/sampled_tokens_per_s': sampled / max(seconds.get('sample', 0.0), 1e-9),
    'throughput/trained_tokens_per_s': learned.trained_tokens / max(seconds.get('train', 0.0), 1e-9),
  }
  peak = flops.peak_flops(jax.devices()[0])
  if peak:
    done = session.flops_per_token * (sampled + prefilled + 3 * learned.trained_tokens + learned.teacher_tokens)
    metrics['throughput/mfu'] = done / (whole * devices * peak)
  return metrics


def write_rollouts(
  session: Session, step: int, collected: Collected, context: TeacherContext | None, learned: Learned
) -> None:
  """`rollouts/<step>.jsonl`: one line a sample with prompt, completion, score, feedback, teacher prompt, divergences."""
  folder = session.workdir / 'rollouts'
  folder.mkdir(parents=True, exist_ok=True)
  divergence = learned.token_values.get('divergence')
  lines = []
  for row, group in enumerate(collected.rollouts.group):
    length = int(collected.rollouts.completion_mask[row].sum())
    taught = context is not None and context.mask[row] > 0
    lines.append(
      {
        'step': step,
        'id': collected.examples[group].id,
        'group': int(group),
        'prompt': collected.examples[group].messages,
        'completion': collected.rollouts.text[row],
        'finish_reason': collected.rollouts.finish_reason[row],
        'score': float(collected.outcomes[row].score),
        'feedback': collected.outcomes[row].feedback,
        'teacher_prompt': context.messages[row] if taught else None,
        'divergence': [round(float(value), 6) for value in divergence[row, :length]]
        if taught and divergence is not None
        else None,
      }
    )
  (folder / f'{step}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


def write_evaluation(workdir: epath.Path, step: int, evaluation: Evaluation) -> None:
  """`eval/<step>.json` with the metrics and every sample."""
  folder = workdir / 'eval'
  folder.mkdir(parents=True, exist_ok=True)
  (folder / f'{step}.json').write_text(
    json.dumps({'step': step, 'metrics': evaluation.metrics, 'samples': evaluation.samples}, indent=1)
  )


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
  tokenizer = tokenizers.load(config.model.path)
  iterator = pipeline.TrainIterator(config, tokenizer)
  held_out = pipeline.evaluation_examples(config, tokenizer) if config.trainer.test_freq else []
  workdir = open_workdir(config, workdir)
  session, parameters = make_session(config, workdir)
  state = init_state(config, parameters)
  checkpoints = Checkpoints(workdir, keep=config.trainer.max_ckpt_to_keep, best_metric=config.trainer.best_metric)
  restored = checkpoints.restore(state)
  if restored is not None:
    step, state, host = restored
    iterator.set_state(host['iterator'])
    announce(f'Resuming {workdir} at step {step}.')
  del parameters, restored
  run = _Run(session, iterator, held_out, checkpoints, announce)
  try:
    return run(state)
  finally:
    checkpoints.close()


class _Run:
  """The loop over generation batches; state is passed through, what lies here is bookkeeping."""

  def __init__(
    self,
    session: Session,
    iterator: pipeline.TrainIterator,
    held_out: Sequence[Example],
    checkpoints: Checkpoints,
    announce: Any,
  ):
    self.session, self.iterator, self.held_out = session, iterator, held_out
    self.checkpoints, self.announce = checkpoints, announce

  def __call__(self, state: TrainState) -> Result:
    config = self.session.config
    first, total = int(state.step), config.trainer.total_training_steps
    writer = MetricsWriter(self.session.workdir, config, resume_step=first) if jax.process_index() == 0 else None
    progress = Progress(total, first)
    preempted = False
    try:
      with Preemption() as preemption:
        if first == 0 and config.trainer.val_before_train and self.held_out and (writer is None or not writer.lines):
          progress.phase('evaluate')
          values = self.evaluate(state, 0)
          if writer is not None:
            writer.write(0, values)
        for step in range(first + 1, total + 1):
          before = self.host_state()
          advanced = self.step(state, step, writer, progress, preemption)
          if advanced is None:
            preempted = True
            self.save(step - 1, state, before, {})
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
    return Result(self.session.workdir, int(state.step), preempted, evaluations)

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
    timer = Timer(progress)
    if preemption.agreed():
      return None
    profile = step in trainer.profile_steps
    if profile:
      jax.profiler.start_trace(str(session.workdir / 'profile' / str(step)))
    metrics: dict[str, float] = {}
    collected = collect(session, state, next(self.iterator), step, timer)
    if preemption.agreed():
      return None
    with timer('teach'):
      context = teach(session, collected, sampling_seed(state), step)
    with timer('train'):
      samples = prepare(session, state, collected, context, metrics)
      state, learned = learn(session, state, samples)
    if profile:
      jax.profiler.stop_trace()
      self.announce(f'Profile of step {step}: {session.workdir / "profile" / str(step)}')
    metrics.update(rollout_metrics(collected, config.actor.self_distillation.success_reward_threshold))
    metrics.update(update_metrics(learned, samples))
    metrics.update(throughput_metrics(session, collected, learned, timer.seconds))
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
        write_rollouts(session, step, collected, context, learned)
      writer.write(step, {**metrics, **{f'time/{name}_s': value for name, value in timer.seconds.items()}})
    progress.step(step, metrics['rollout/score_mean'], learned.loss, metrics['throughput/tokens_per_s'], note)
    if step == trainer.total_training_steps or (trainer.save_freq and step % trainer.save_freq == 0):
      self.save(step, state, self.host_state(), metrics)
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
      seed=session.config.seed,
    )
    if jax.process_index() == 0:
      write_evaluation(session.workdir, step, evaluation)
    logging.info('Evaluation at step %d: %s', step, evaluation.metrics)
    return evaluation.flat()
