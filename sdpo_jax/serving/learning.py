"""Learning from completions in several training slots at once: teacher scores, the losses of requests, and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.decoder import DecoderPolicy
from models.forward import forward
from models.policy import NO_MEMBER
from sdpo_jax.config import Config
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.errors import UserError
from sdpo_jax.objective import jsd_pg, reported
from sdpo_jax.objective.jsd_pg import JsdPg
from sdpo_jax.objective.log_probs import Scores, log_probs_of_ids, scores
from sdpo_jax.rollout.buckets import smallest_bucket
from sdpo_jax.rollout.functions import Keep
from sdpo_jax.serving import training_pool
from sdpo_jax.serving.losses import Loss, Sdpo, of_rows
from sdpo_jax.serving.scoring import Scored, Scorer, check_ids, mesh_of, on_devices, padded
from sdpo_jax.serving.training_pool import SlotState, StepSettings
from sdpo_jax.training import batching
from sdpo_jax.training.specs import update_spec
from sdpo_jax.training.update import layout, make_update
from sdpo_jax.types import Batch, TeacherSignal, TokenRows, TrainState, Tree


@dataclasses.dataclass(frozen=True)
class AdamW:
  """The optimizer settings of a request.

  Raises:
    UserError: a number is not allowed.
  """

  learning_rate: float = 3e-5
  beta1: float = 0.9
  beta2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.01
  max_grad_norm: float = 1.0  # Infinity: gradients are not clipped.

  def __post_init__(self):
    for name, (allowed, is_allowed) in _ALLOWED.items():
      if not is_allowed(getattr(self, name)):
        raise UserError(f'{name} must be {allowed}, not {getattr(self, name)}.')


_ALLOWED: Mapping[str, tuple[str, Callable[[float], bool]]] = {
  'learning_rate': ('0 or a positive number', lambda value: 0 <= value < math.inf),
  'beta1': ('0 or more and less than 1', lambda value: 0 <= value < 1),
  'beta2': ('0 or more and less than 1', lambda value: 0 <= value < 1),
  'eps': ('a positive number', lambda value: 0 < value < math.inf),
  'weight_decay': ('0 or a positive number', lambda value: 0 <= value < math.inf),
  'max_grad_norm': ('positive, or infinity for gradients that are not clipped', lambda value: value > 0),
}


@dataclasses.dataclass(frozen=True)
class Taught:
  """The scores of T tokens by a teacher outside of the pool.

  The divergence is taken over the tokens that the teacher named, plus a tail bucket for `Sdpo`.
  """

  top_ids: np.ndarray  # [T, K'] int32, negative: none; each token once.
  top_log_probs: np.ndarray  # [T, K'].
  log_probs: np.ndarray  # [T] of the completion's tokens; −inf: not reported, and the loss's floor is used.


@dataclasses.dataclass(frozen=True)
class Lesson:
  """A completion to learn from."""

  prompt: Sequence[int]  # The student's prompt.
  completion: Sequence[int]
  # The teacher's prompt before the same completion; None: `taught` already holds its scores.
  teacher_prompt: Sequence[int] | None
  # [T] log-probs at sampling time; None: the student before the first step drew it.
  sampling_log_probs: np.ndarray | None = None
  advantage: float = 0.0  # Of every token, for the policy gradient of `Sdpo`.
  # Scores of the completion by a teacher outside of the pool: another model, or one behind an endpoint.
  taught: Taught | None = None


@dataclasses.dataclass(frozen=True)
class Task:
  """The lessons of one request."""

  slot: int  # The slot of the adapter that learns.
  lessons: Sequence[Lesson]
  teacher: int = NO_MEMBER  # Index in the pool of teachers; NO_MEMBER: the model without an adapter.
  loss: Loss = Sdpo()
  optimizer: AdamW = AdamW()
  steps: int = 1
  itself: bool = False  # The teacher has the factors of the slot, so that equal prompts give equal scores.


@dataclasses.dataclass
class Said:
  """The scores of student and teacher for the T tokens of one lesson, before the first step and after the last."""

  log_probs_before: np.ndarray  # [T] of the student.
  log_probs_after: np.ndarray  # [T].
  teacher_log_probs: np.ndarray  # [T].
  teacher_top_ids: np.ndarray  # [T, K] int32, the most likely first.
  teacher_top_log_probs: np.ndarray  # [T, K].
  advantages: np.ndarray  # [T].
  divergence: np.ndarray  # [T] before the first step.
  entropy: np.ndarray  # [T] of the student before the first step, in nats.


@dataclasses.dataclass
class Learned:
  """The result of one task."""

  said: list[Said]  # One per lesson.
  # One dict per step: `objective.reported.means` of its own programs' results, `grad_norm` before clipping, and
  # `stepped`, whether the step was taken.
  steps: list[dict[str, float]]
  warnings: tuple[str, ...] = ()  # One sentence for each thing that was not learned as requested.

  @property
  def stepped(self) -> bool:
    """Whether all steps were taken; a step whose gradient is not finite is skipped."""
    return all(step['stepped'] for step in self.steps)


@dataclasses.dataclass
class _Micro:
  """A micro-batch with rows of any tasks, on the devices, and its scores before the first step."""

  rows: np.ndarray  # [B] index of the lesson; −1: padding.
  student: TokenRows
  mask: jax.Array  # [B, T].
  targets: jax.Array  # [B, T].
  teacher_hidden: jax.Array  # [B, T, D].
  named: jax.Array  # [B] bool, the support is the tokens that the teacher named.
  given: jax.Array  # [B] bool, the teacher's scores are given: `Taught`.
  before: Scores
  theirs: Scores
  floored: jax.Array  # [B, T] bool.
  batch: Batch  # The batch of the first step.


@dataclasses.dataclass(frozen=True)
class LearningFunctions:
  """The jitted functions of learning; the losses of the rows of a micro-batch are data to all of them."""

  states: Callable[..., Any]  # `models.forward.forward` without the policy.
  first: Callable[..., Any]  # `_first` with its static arguments bound; so is the next.
  support: Callable[..., Any]  # `_support`.
  log_probs: Callable[..., Any]  # (hidden, unembedding, targets, mask) → the log-probs of `objective.log_probs.scores`.
  report: Callable[..., Any]  # `objective.reported.row_sums`.
  zero: Callable[..., Any]  # From `training.update.Update`; so is the next.
  accumulate: Callable[..., Any]
  step: Callable[..., Any]  # `training_pool.step`; the buffers of the state are donated.


@functools.lru_cache(maxsize=16)
def learning_functions(policy: DecoderPolicy, topk: int, chunk_size: int) -> LearningFunctions:
  """Return the functions, which learners of equal models and sizes share together with their compiled programs.

  On a mesh, rows are divided over all devices, and factors keep the layout of `lora_pool.shardings`.
  """
  config = Config()
  config.actor.self_distillation.distillation_topk = topk
  config.actor.self_distillation.teacher_regularization = 'live'
  config.actor.logits_chunk_size = chunk_size
  config.algorithm.rollout_correction.rollout_is = None
  mesh = mesh_of(policy)
  rows, lies, stepped = None, None, None
  if mesh is not None:
    rows, whole = meshes.batch_sharding(mesh), meshes.replicated(mesh)
    stepped = training_pool.shardings(policy.parameter_table(), mesh), whole
    lies = as_train_state(stepped[0].trainable).replace(step=whole, optimizer_step=whole)
  update = make_update(policy, update_spec(config), lies)
  settings = dict(chunk_size=chunk_size, vocab_size=policy.vocab_size, layout=layout(mesh))

  def log_probs(hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    return scores(hidden, unembedding, targets, 1, mask=mask, **settings).log_prob

  def of_rows_alone(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, **more), out_shardings=rows)

  return LearningFunctions(
    states=jax.jit(functools.partial(forward, policy), compiler_options=meshes.compiler_options(mesh)),
    first=of_rows_alone(_first, k=topk, **settings),
    support=of_rows_alone(_support, k=topk, **settings),
    log_probs=of_rows_alone(log_probs),
    report=of_rows_alone(reported.row_sums),
    zero=update.zero,
    accumulate=update.accumulate,
    step=jax.jit(training_pool.step, donate_argnums=0, out_shardings=stepped),
  )


class Learner:
  """The compiled programs of learning for one model, and the lengths for which they are compiled.

  A learner holds no state: slots and teachers are passed in and returned.
  """

  def __init__(
    self,
    policy: DecoderPolicy,
    teacher_policy: DecoderPolicy,
    base: Tree,
    *,
    topk: int,
    rows: int,
    prompt_buckets: Sequence[int],
    teacher_buckets: Sequence[int],
    response_buckets: Sequence[int],
    chunk_size: int = 256,
    keep: Keep = lambda _, function: function,
  ):
    """Make a learner.

    Args:
      policy: the model with a `LoraPool` of the training slots.
      teacher_policy: the same model with the pool of teachers.
      base: frozen parameters of both.
      topk: K, the most tokens of a support.
      rows: number of rows of a micro-batch.
      prompt_buckets: lengths to which students' prompts are padded.
      teacher_buckets: lengths to which teachers' prompts are padded.
      response_buckets: lengths to which completions are padded.
      chunk_size: number of tokens whose logits exist at one time.
      keep: maps (name, jitted function) to the function to call in its place.
    """
    self._policy, self._base = policy, base
    self._topk, self._rows = topk, rows
    self._buckets = {'prompt': prompt_buckets, 'teacher': teacher_buckets, 'response': response_buckets}
    self._slots = policy.adapter.members
    functions = learning_functions(policy, topk, chunk_size)
    names = [field.name for field in dataclasses.fields(functions)]
    self._functions = dataclasses.replace(functions, **{name: keep(name, getattr(functions, name)) for name in names})
    self._scorer = Scorer(
      teacher_policy,
      base,
      topk=topk,
      rows=rows,
      prompt_buckets=teacher_buckets,
      response_buckets=response_buckets,
      chunk_size=chunk_size,
      keep=keep,
    )

  def learn(self, state: SlotState, teachers: Tree, tasks: Sequence[Task]) -> tuple[SlotState, list[Learned]]:
    """Take the steps of all tasks; slots without a task keep every bit.

    Args:
      state: the training slots; its buffers are donated.
      teachers: pool of the teachers' factors.
      tasks: tasks of different slots.

    Returns:
      The new state, and the result of every task.

    Raises:
      UserError: a task has no lessons, a length or K beyond the compiled ones, or a loss that is not supported.
    """
    self.check(tasks)
    lessons = [(task, lesson) for task in tasks for lesson in task.lessons]
    micros = [
      self._prepare(state, teachers, lessons, range(start, min(start + self._rows, len(lessons))))
      for start in range(0, len(lessons), self._rows)
    ]
    settings = self._settings(tasks)
    done: list[dict[str, Any]] = []  # One per step, for all slots.
    sums: list[list[dict[str, Any]]] = []  # One per step and micro-batch, for all rows.
    per_token: list[dict[str, Any]] = []
    for number in range(max(task.steps for task in tasks)):
      stepping = {task.slot for task in tasks if number < task.steps}
      grads, of_micros = self._functions.zero(state.trainable), []
      whole = as_train_state(state.trainable)
      for micro in micros:
        batch = micro.batch if number == 0 else self._renewed(state.trainable, micro)
        grads, result = self._functions.accumulate(self._base, whole, grads, batch)
        of_micros.append(self._reported(batch, result.aux, micro.floored))
        if number == 0:
          per_token.append(result.aux)
      active = np.isin(np.arange(self._slots), list(stepping))
      state, step_said = self._functions.step(state, grads, settings, active)
      done.append(step_said)
      sums.append(of_micros)
    after = [self._score(state.trainable, micro) for micro in micros]
    return state, self._learned(tasks, lessons, micros, per_token, after, done, sums)

  def score(
    self,
    pool: Tree,
    member: int,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    ids: Sequence[np.ndarray] | None = None,
  ) -> list[Scored]:
    """Return one teacher's scores of given tokens; see `Scorer.score`."""
    return self._scorer.score(pool, rows, member=member, ids=ids)

  def check(self, tasks: Sequence[Task]) -> None:
    """Raise UserError for a task that `learn` cannot do; no device is touched."""
    slots = [task.slot for task in tasks]
    if len(set(slots)) < len(slots):
      raise ValueError('Two tasks of one slot cannot be learned at once: each has its own steps.')
    for task in tasks:
      if not task.lessons:
        raise UserError('There is nothing to learn from: a task needs at least one completion.')
      if not isinstance(task.steps, int) or task.steps < 1:
        raise UserError(f'num_steps must be at least 1, not {task.steps}.')
      if isinstance(task.loss, Sdpo) and task.loss.topk > self._topk:
        raise UserError(f'topk={task.loss.topk} is more than the {self._topk} that the engine is compiled for.')
      if isinstance(task.loss, JsdPg) and task.loss.support == 'union':
        raise UserError(
          "support='union' would double the tokens that every request is compiled for, and is not computed here: set "
          "support='teacher'."
        )
      for lesson in task.lessons:
        self._check(lesson, isinstance(task.loss, JsdPg))

  def _check(self, lesson: Lesson, mixes: bool) -> None:
    """Raise UserError for a lesson that cannot be learned."""
    if (lesson.teacher_prompt is None) == (lesson.taught is None):
      raise ValueError('A lesson has either a prompt of the teacher, or what a teacher said.')
    texts = {'prompt': ('The prompt', lesson.prompt), 'response': ('The completion', lesson.completion)}
    if lesson.teacher_prompt is not None:
      texts['teacher'] = "The teacher's prompt", lesson.teacher_prompt
    for name, (what, tokens) in texts.items():
      if not len(tokens):
        raise UserError(f'{what} is empty.')
      if smallest_bucket(self._buckets[name], len(tokens)) is None:
        raise UserError(f'{what} has {len(tokens)} tokens, and the engine takes {self._buckets[name][-1]} at most.')
      check_ids(what, tokens, self._policy.vocab_size)
    length = len(lesson.completion)
    if not math.isfinite(lesson.advantage):
      raise UserError(f'The advantage of a lesson must be a finite number, not {lesson.advantage}.')
    if lesson.sampling_log_probs is not None and np.shape(lesson.sampling_log_probs) != (length,):
      raise UserError(
        f'There are {np.size(lesson.sampling_log_probs)} log-probs of sampling for the {length} tokens of the '
        'completion.'
      )
    if lesson.sampling_log_probs is not None and not np.isfinite(lesson.sampling_log_probs).all():
      raise UserError('A log-prob of sampling is not a finite number.')
    if lesson.taught is None:
      return
    shape = np.shape(lesson.taught.top_ids)
    if len(shape) != 2 or shape[0] != length or np.shape(lesson.taught.log_probs) != (length,):
      raise UserError(
        f'What the teacher said is of {shape[0] if shape else 0} tokens, and the completion has {length}.'
      )
    if shape != np.shape(lesson.taught.top_log_probs) or shape[1] > self._topk:
      raise UserError(f'The teacher names {shape[1]} tokens, and the engine takes {self._topk} at most.')
    check_ids('What the teacher names', np.maximum(lesson.taught.top_ids, 0).ravel(), self._policy.vocab_size)
    named = np.asarray(lesson.taught.top_ids) >= 0
    if np.isnan(lesson.taught.log_probs).any() or np.isnan(np.where(named, lesson.taught.top_log_probs, 0)).any():
      raise UserError('A log-prob of the teacher is not a number.')

  def _prepare(self, state: SlotState, teachers: Tree, lessons: list[tuple[Task, Lesson]], chosen: range) -> _Micro:
    """Return some lessons as a micro-batch, with the scores of student and teacher."""
    picked = [lessons[index] for index in chosen]
    picked += [picked[0]] * (self._rows - len(picked))  # Padding, in which every token is masked.
    live = np.arange(self._rows) < len(chosen)
    tokens, mask = padded(
      [lesson.completion for _, lesson in picked], self._room('response', [lesson.completion for _, lesson in picked])
    )
    old, has_old = np.zeros(tokens.shape, np.float32), np.zeros(self._rows, bool)
    for row, (_, lesson) in enumerate(picked):
      if lesson.sampling_log_probs is not None:
        old[row, : len(lesson.completion)], has_old[row] = lesson.sampling_log_probs, True
    slots, teaching = ([getattr(task, name) for task, _ in picked] for name in ('slot', 'teacher'))
    student = self._token_rows('prompt', [lesson.prompt for _, lesson in picked], tokens, mask, slots)
    # The scores after this dummy prompt are not used: the lesson's own are given.
    read = [[0] if lesson.teacher_prompt is None else lesson.teacher_prompt for _, lesson in picked]
    teacher = self._token_rows('teacher', read, tokens, mask, teaching)
    weights = (
      mask
      * live[:, None]
      / np.asarray([sum(len(each.completion) for each in task.lessons) for task, _ in picked])[:, None]
    )
    losses = [_loss(task, lesson) for task, lesson in picked]
    policy_weight = [1.0 if isinstance(loss, JsdPg) else loss.policy_weight for loss in losses]
    divergence_weight = [loss.jsd_weight if isinstance(loss, JsdPg) else loss.divergence_weight for loss in losses]
    taught, floored = self._taught(picked, tokens.shape)
    asked = Asked(
      mixes=np.asarray([isinstance(loss, JsdPg) for loss in losses]),
      mixture=np.asarray([loss.alpha for loss in losses], np.float32),
      design=np.asarray([isinstance(loss, JsdPg) and loss.form == 'design' for loss in losses]),
      advantage=np.asarray([lesson.advantage for _, lesson in picked], np.float32),
      same=np.asarray([_same(task, lesson) for task, lesson in picked]),
      has_old=has_old,
      **taught,
    )
    shown = mask & live[:, None]
    batch = Batch(
      student=student,
      teacher=None,
      targets=tokens,
      mask=shown.astype(np.float32),
      distill_coef=(weights * np.asarray(divergence_weight)[:, None]).astype(np.float32),
      policy_coef=(weights * np.asarray(policy_weight)[:, None]).astype(np.float32),
      entropy_coef=None,
      old_log_probs=old,
      advantages=None,
      numbers=of_rows(losses, self._topk),
    )
    batch, teacher, shown, floored, asked, named = on_devices(
      self._policy, (batch, teacher, shown, floored, asked, asked.mixes | asked.given)
    )
    student, tokens = batch.student, batch.targets
    hidden, unembedding = self._functions.states(self._base, state.trainable, student)
    teacher_hidden, _ = self._scorer.states(teachers, teacher)
    before, theirs, teacher_hidden, signal, advantages, old_log_probs = self._functions.first(
      hidden, teacher_hidden, unembedding, tokens, shown, batch.old_log_probs, asked
    )
    batch = batch.replace(old_log_probs=old_log_probs, advantages=advantages, signal=signal)
    rows = np.where(live, np.arange(self._rows) + chosen.start, -1)
    return _Micro(rows, student, shown, tokens, teacher_hidden, named, asked.given, before, theirs, floored, batch)

  def _renewed(self, trainable: Tree, micro: _Micro) -> Batch:
    """Return the batch of a later step: the student's support is taken again, the teacher's own scores stay."""
    hidden, unembedding = self._functions.states(self._base, trainable, micro.student)
    signal = self._functions.support(
      hidden, micro.teacher_hidden, unembedding, micro.targets, micro.mask, micro.theirs, micro.named, micro.given
    )
    return micro.batch.replace(signal=signal)

  def _reported(self, batch: Batch, per_token: Mapping[str, jax.Array], floored: jax.Array) -> dict[str, jax.Array]:
    """Return the sums to report for each row of a step, [B] each; see `reported.row_sums`."""
    read = {name: per_token[name] for name in reported.READ}
    return self._functions.report(batch.replace(student=None, signal=None), read, floored)

  def _score(self, trainable: Tree, micro: _Micro) -> jax.Array:
    """Return the student's log-probs [B, T] of the completions."""
    hidden, unembedding = self._functions.states(self._base, trainable, micro.student)
    return self._functions.log_probs(hidden, unembedding, micro.targets, micro.mask)

  def _taught(
    self, picked: Sequence[tuple[Task, Lesson]], shape: tuple[int, int]
  ) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the scores of teachers outside of the pool as fields of `Asked`, and where floors apply, [B, T] bool."""
    given = {
      'given': np.zeros(len(picked), bool),
      'given_ids': np.full((*shape, self._topk), -1, np.int32),
      'given_log_probs': np.zeros((*shape, self._topk), np.float32),
      'given_own': np.zeros(shape, np.float32),
    }
    floored = np.zeros(shape, bool)
    for row, (task, lesson) in enumerate(picked):
      if lesson.taught is not None:
        length, count = np.shape(lesson.taught.top_ids)
        own = np.asarray(lesson.taught.log_probs, np.float32)
        floor = task.loss.floor if isinstance(task.loss, JsdPg) else JsdPg.floor
        given['given'][row] = True
        given['given_ids'][row, :length, :count] = lesson.taught.top_ids
        given['given_log_probs'][row, :length, :count] = lesson.taught.top_log_probs
        floored[row, :length] = np.isneginf(own)
        given['given_own'][row, :length] = np.where(np.isneginf(own), np.float32(floor), own)
    return given, floored

  def _token_rows(
    self, name: str, prompts: list[Sequence[int]], tokens: np.ndarray, mask: np.ndarray, members: list[int]
  ) -> TokenRows:
    rows = batching.token_rows(prompts, tokens, mask, self._room(name, prompts))
    return rows.replace(members=np.asarray(members, np.int32))

  def _room(self, name: str, sequences: Sequence[Sequence[int]]) -> int:
    return smallest_bucket(self._buckets[name], max(map(len, sequences)))

  def _settings(self, tasks: Sequence[Task]) -> StepSettings:
    """Return the optimizer settings of all slots, with defaults for slots without a task."""
    own = [AdamW()] * self._slots
    for task in tasks:
      own[task.slot] = task.optimizer
    names = [field.name for field in dataclasses.fields(AdamW)]
    return StepSettings(**{name: np.asarray([getattr(each, name) for each in own], np.float32) for name in names})

  def _learned(
    self,
    tasks: Sequence[Task],
    lessons: list[tuple[Task, Lesson]],
    micros: list[_Micro],
    per_token: list[dict[str, jax.Array]],
    after: list[jax.Array],
    done: list[dict[str, jax.Array]],
    sums: list[list[dict[str, jax.Array]]],
  ) -> list[Learned]:
    said: dict[int, Said] = {}
    # One transfer: the host must not wait for the devices before it has dispatched the last program.
    known = [(micro.before, micro.theirs, micro.batch.advantages) for micro in micros]
    divergences = [aux['divergence'] for aux in per_token]
    known, divergences, after, done, sums = jax.device_get((known, divergences, after, done, sums))
    for micro, (before, theirs, advantages), divergence, scored in zip(micros, known, divergences, after, strict=True):
      for row, lesson in enumerate(micro.rows.tolist()):
        if lesson < 0:
          continue
        length = len(lessons[lesson][1].completion)
        said[lesson] = Said(
          log_probs_before=before.log_prob[row, :length],
          log_probs_after=scored[row, :length],
          teacher_log_probs=theirs.log_prob[row, :length],
          teacher_top_ids=theirs.top_ids[row, :length],
          teacher_top_log_probs=theirs.top_log_probs[row, :length],
          advantages=advantages[row, :length],
          divergence=divergence[row, :length],
          entropy=before.entropy[row, :length],
        )
    found = []
    for task in tasks:
      own = [index for index, (of, _) in enumerate(lessons) if of is task]
      rows = [np.isin(micro.rows, own) for micro in micros]
      steps = [
        {
          **reported.means(
            {
              name: np.concatenate([each[name][mine] for each, mine in zip(of_micros, rows, strict=True)])
              for name in of_micros[0]
            }
          ),
          'grad_norm': float(step['grad_norm'][task.slot]),
          'stepped': bool(step['stepped'][task.slot]),
        }
        for step, of_micros in zip(done[: task.steps], sums, strict=False)
      ]
      found.append(Learned([said[index] for index in own], steps, _warnings(task)))
    return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asked:
  """The inputs of the losses of B rows that concern the teacher, as arrays."""

  mixes: Any  # [B] bool, the loss is `jsd_pg`: support and advantages come from the teacher.
  mixture: Any  # [B] float32, alpha of the `jsd_pg` rows.
  design: Any  # [B] bool, `form='design'`.
  same: Any  # [B] bool, the teacher has the student's factors and reads the same prompt.
  advantage: Any  # [B] float32, of the rows that are not `jsd_pg`.
  has_old: Any  # [B] bool, the log-probs of the policy that drew the completion are known.
  given: Any  # [B] bool, the teacher's scores are given: `Taught`.
  given_ids: Any  # [B, T, K] int32.
  given_log_probs: Any  # [B, T, K].
  given_own: Any  # [B, T] log-probs of the targets.


def _first(
  hidden: jax.Array,
  teacher_hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  old: jax.Array,
  asked: Asked,
  *,
  k: int,
  **settings: Any,
) -> tuple[Scores, Scores, jax.Array, TeacherSignal, jax.Array, jax.Array]:
  """Return what a micro-batch needs before its first step.

  This is the student's and the teacher's scores, the teacher's states [B, T, D] and signal, advantages [B, T], and
  log-probs [B, T] of the policy that drew the completions.
  """
  # The two programs that compute states may pad prompts to different lengths, and so round differently.
  teacher_hidden = jnp.where(asked.same[:, None, None], hidden, teacher_hidden)
  theirs = scores(teacher_hidden, unembedding, targets, k, mask=mask, **settings)
  rows, wide = asked.given[:, None], asked.given[:, None, None]
  theirs = theirs.replace(
    log_prob=jnp.where(rows, asked.given_own, theirs.log_prob),
    top_ids=jnp.where(wide, asked.given_ids, theirs.top_ids),
    top_log_probs=jnp.where(wide, asked.given_log_probs, theirs.top_log_probs),
  )
  own = scores(hidden, unembedding, targets, k, mask=mask, **settings)
  agreed = _agreed(hidden, teacher_hidden) & ~rows
  theirs = theirs.replace(log_prob=jnp.where(agreed, own.log_prob, theirs.log_prob))
  named = asked.mixes | asked.given
  signal = _signal(own, theirs, teacher_hidden, unembedding, mask, named, agreed, **settings)
  mixed, design = (
    jsd_pg.advantages(own.log_prob, theirs.log_prob, asked.mixture, form) for form in ('mixture', 'design')
  )
  by_teacher = jnp.where(asked.design[:, None], design, mixed)
  advantages = jnp.where(asked.mixes[:, None], by_teacher, asked.advantage[:, None])
  old = jnp.where(asked.has_old[:, None], old, own.log_prob)
  return own, theirs, teacher_hidden, signal, jnp.where(mask, advantages, 0), old


def _support(
  hidden: jax.Array,
  teacher_hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  mask: jax.Array,
  theirs: Scores,
  named: jax.Array,
  given: jax.Array,
  *,
  k: int,
  **settings: Any,
) -> TeacherSignal:
  """Return the teacher's signal on the student's present support."""
  own = scores(hidden, unembedding, targets, k, mask=mask, **settings)
  agreed = _agreed(hidden, teacher_hidden) & ~given[:, None]
  return _signal(own, theirs, teacher_hidden, unembedding, mask, named, agreed, **settings)


def _agreed(hidden: jax.Array, teacher_hidden: jax.Array) -> jax.Array:
  """Return where the states of student and teacher are equal bit by bit, [B, T] bool; their scores are equal there."""
  return (hidden == teacher_hidden).all(-1)


def _signal(
  own: Scores,
  theirs: Scores,
  teacher_hidden: jax.Array,
  unembedding: jax.Array,
  mask: jax.Array,
  named: jax.Array,
  agreed: jax.Array,
  **settings: Any,
) -> TeacherSignal:
  """Return the teacher's log-probs on the student's top K or, for `named` rows, on its own.

  Where the two agree the signal names no token, so that the divergence and its gradient are exactly 0: the loss
  computes the student's scores in a separate program, which rounds differently.
  """
  at_own = log_probs_of_ids(teacher_hidden, unembedding, own.top_ids, mask=mask, **settings)
  wanted = named[:, None, None]
  return TeacherSignal(
    token_ids=jnp.where(agreed[..., None], -1, jnp.where(wanted, theirs.top_ids, own.top_ids)),
    log_probs=jnp.where(wanted, theirs.top_log_probs, at_own),
  )


def _loss(task: Task, lesson: Lesson) -> Loss:
  """Return the loss of a lesson, without the regularizer if its teacher named only a handful of tokens."""
  if lesson.taught is None or not isinstance(task.loss, JsdPg):
    return task.loss
  return jsd_pg.for_teacher(task.loss, np.shape(lesson.taught.top_ids)[1])


def _warnings(task: Task) -> tuple[str, ...]:
  """Return a warning about the lessons that a teacher who names only a handful of tokens cannot give."""
  named = [np.shape(lesson.taught.top_ids)[1] for lesson in task.lessons if lesson.taught is not None]
  if not named or min(named) > jsd_pg.LITE:
    return ()
  begin = f'The teacher named {min(named)} tokens at a position'
  if isinstance(task.loss, Sdpo):
    lost = 'of all others the student learns how likely they are together, and not which of them the teacher prefers'
  elif task.loss.jsd_weight:
    lost = (
      'the regulariser over its tokens was left out, and the student learns from the tokens of the completion alone, '
      'not which others the teacher prefers'
    )
  else:
    return ()
  return (f'{begin}: {lost}. A teacher that names more, such as one with K = 100, teaches that, too.',)


def _same(task: Task, lesson: Lesson) -> bool:
  """Return whether student and teacher have the same factors and read the same prompt."""
  return task.itself and lesson.teacher_prompt is not None and list(lesson.teacher_prompt) == list(lesson.prompt)


def as_train_state(trainable: Tree) -> TrainState:
  """Return the factors of slots as the `TrainState` that `training.update.accumulate` reads."""
  zero = np.zeros((), np.int32)
  return TrainState(step=zero, optimizer_step=zero, trainable=trainable, opt_state={}, teacher={}, rng=None)
