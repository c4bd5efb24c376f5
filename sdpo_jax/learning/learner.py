"""Learning from completions in several training slots at once: teacher scores, losses of requests, AdamW steps."""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.learning import batching, requests, signals, training_pool
from sdpo_jax.learning.requests import AdamW, Lesson, Task
from sdpo_jax.learning.scoring import CompiledSizes, Scored, Scorer, mesh_of, on_devices
from sdpo_jax.learning.signals import TeacherInputs
from sdpo_jax.learning.training_pool import ROUNDING, SlotState, StepSettings
from sdpo_jax.learning.update import UpdateSpec, layout, make_update
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.models.forward import forward
from sdpo_jax.objective import reported
from sdpo_jax.objective.log_probs import Scores, scores
from sdpo_jax.objective.loss import ObjectiveConfig
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.rollout.buckets import padded, smallest_bucket
from sdpo_jax.types import Batch, TokenRows, TrainState, Tree

_AHEAD = 2  # Pieces of learning that may wait for the devices, so that these are never idle.


@dataclasses.dataclass
class LessonScores:
  """The scores of student and teacher for the T tokens of one lesson, before the first step and after the last."""

  log_probs_before: np.ndarray  # [T] of the student.
  log_probs_after: np.ndarray  # [T].
  teacher_log_probs: np.ndarray  # [T].
  teacher_top_ids: np.ndarray  # [T, K] int32, the most likely first.
  teacher_top_log_probs: np.ndarray  # [T, K].
  advantages: np.ndarray  # [T].
  divergence: np.ndarray  # [T] before the first step.
  entropy: np.ndarray  # [T] of the student before the first step, in nats.
  # [T, K] of the student, of `teacher_top_ids`; None: `UpdateOptions.measured` is off.
  named_before: np.ndarray | None = None
  named_after: np.ndarray | None = None  # [T, K].


@dataclasses.dataclass
class Learned:
  """The result of one task: scores of its lessons, and metrics of its steps."""

  said: list[LessonScores]  # One per lesson.
  # One dict per step: `objective.reported.means` of the results, `grad_norm` before clipping, and `stepped`, whether
  # the step was taken.
  steps: list[dict[str, float]]
  warnings: tuple[str, ...] = ()  # One sentence for each thing that was not learned as requested.

  @property
  def stepped(self) -> bool:
    """Whether steps were taken and none was refused, as is one whose gradient is not finite."""
    return not self.unchanged and all(step['stepped'] or step['grad_norm'] <= ROUNDING for step in self.steps)

  @property
  def unchanged(self) -> bool:
    """Whether every gradient was 0 but for rounding, so that no bit has changed."""
    return all(step['grad_norm'] <= ROUNDING for step in self.steps)


@dataclasses.dataclass
class _Micro:
  """A micro-batch on the devices, with rows of any tasks, and its scores before the first step."""

  rows: np.ndarray  # [B] index of the lesson; −1: padding.
  mask: jax.Array  # [B, T].
  teacher_hidden: jax.Array  # [B, T, D].
  inputs: TeacherInputs
  before: Scores
  theirs: Scores
  floored: jax.Array  # [B, T] bool.
  batch: Batch  # The batch of the first step.
  named_before: jax.Array | None  # [B, T, K] of the student, of the teacher's tokens; None: no task wants them.


@dataclasses.dataclass(frozen=True)
class LearningFunctions:
  """The jitted functions of learning; all take the losses of rows as data, so that one program serves all losses."""

  states: Callable[..., Any]  # `sdpo_jax.models.forward.forward` without the policy.
  first: Callable[..., Any]  # `signals.first` with its static arguments bound.
  support: Callable[..., Any]  # `signals.support` with its static arguments bound.
  log_probs: Callable[..., Any]  # (hidden, unembedding, targets, mask) → the log-probs of `objective.log_probs.scores`.
  report: Callable[..., Any]  # `objective.reported.row_sums`.
  zero: Callable[..., Any]  # `update.UpdateFunctions.zero`.
  accumulate: Callable[..., Any]  # `update.UpdateFunctions.accumulate`.
  step: Callable[..., Any]  # `training_pool.step`; the buffers of the state are donated.


@functools.lru_cache(maxsize=16)
def learning_functions(policy: DecoderPolicy, topk: int, chunk_size: int) -> LearningFunctions:
  """Return the jitted functions of learning; equal arguments share them and their compiled programs.

  On a mesh, rows are divided over all devices, and factors keep the layout of `lora_pool.shardings`.
  """
  spec = UpdateSpec(
    terms=ObjectiveSpec(distillation=True, policy_gradient=True, on_policy=False),
    objective=ObjectiveConfig(distillation_topk=topk, chunk_size=chunk_size),
  )
  mesh = mesh_of(policy)
  rows, lies, stepped = None, None, None
  if mesh is not None:
    rows, whole = meshes.batch_sharding(mesh), meshes.replicated(mesh)
    stepped = training_pool.shardings(policy.parameter_table(), mesh), whole
    lies = as_train_state(stepped[0].trainable).replace(step=whole, optimizer_step=whole)
  update = make_update(policy, spec, lies)
  settings = dict(chunk_size=chunk_size, vocab_size=policy.vocab_size, layout=layout(mesh))

  def log_probs(hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    return scores(hidden, unembedding, targets, 1, mask=mask, **settings).log_prob

  def of_rows_alone(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, **more), out_shardings=rows)

  return LearningFunctions(
    states=jax.jit(functools.partial(forward, policy), compiler_options=meshes.compiler_options(mesh)),
    first=of_rows_alone(signals.first, k=topk, **settings),
    support=of_rows_alone(signals.support, k=topk, **settings),
    log_probs=of_rows_alone(log_probs),
    report=of_rows_alone(reported.row_sums),
    zero=update.zero,
    accumulate=update.accumulate,
    step=jax.jit(training_pool.step, donate_argnums=0, out_shardings=stepped),
  )


class Learner:
  """Takes the optimizer steps of requests, with programs compiled for fixed lengths.

  A learner holds no state: slots and teachers are passed in and returned.
  """

  def __init__(
    self,
    policy: DecoderPolicy,
    teacher_policy: DecoderPolicy,
    base: Tree,
    sizes: CompiledSizes,
    *,
    prompt_buckets: Sequence[int],
    teacher_buckets: Sequence[int],
    response_buckets: Sequence[int],
  ):
    """Create a learner for one model.

    Args:
      policy: the model with a `LoraPool` of the training slots.
      teacher_policy: the same model with the pool of teachers.
      base: frozen parameters of both.
      sizes: the other sizes.
      prompt_buckets: lengths to which students' prompts are padded.
      teacher_buckets: lengths to which teachers' prompts are padded.
      response_buckets: lengths to which completions are padded.
    """
    self._mesh, self._vocab_size, self._base = mesh_of(policy), policy.vocab_size, base
    self._topk, self._rows, self._union = sizes.topk, sizes.rows, sizes.union
    self._buckets = {'prompt': prompt_buckets, 'teacher': teacher_buckets, 'response': response_buckets}
    self._slots = policy.adapter.members
    functions = learning_functions(policy, sizes.topk, sizes.chunk_size)
    kept = {
      field.name: sizes.keep(field.name, getattr(functions, field.name)) for field in dataclasses.fields(functions)
    }
    self._functions = dataclasses.replace(functions, **kept)
    self._scorer = Scorer(
      teacher_policy, base, sizes, prompt_buckets=teacher_buckets, response_buckets=response_buckets
    )

  def learn(
    self, state: SlotState, teachers: Callable[[], Tree], tasks: Sequence[Task]
  ) -> Generator[float, None, tuple[SlotState, list[Learned]]]:
    """Take the steps of all tasks in pieces, each of one micro-batch; slots without a task keep every bit.

    Args:
      state: the training slots; its buffers are donated.
      teachers: returns the pool of the teachers' factors; between two pieces, members that no task names may change.
      tasks: tasks of different slots.

    Yields:
      After every piece, what part of all it is. At most `_AHEAD` pieces wait for the devices then.

    Returns:
      The new state, and the result of every task.

    Raises:
      UserError: as in `check`.
    """
    self.check(tasks)
    lessons = [(task, lesson) for task in tasks for lesson in task.lessons]
    starts, steps = range(0, len(lessons), self._rows), max(task.update.steps for task in tasks)
    share, micros, ahead = 1 / (len(starts) * (2 + steps)), [], collections.deque()
    for start in starts:
      micros.append(self._prepare(state, teachers(), lessons, range(start, min(start + self._rows, len(lessons)))))
      _wait_for(ahead, micros[-1].before)
      yield share
    optimizers = [AdamW()] * self._slots  # The defaults for slots without a task.
    for task in tasks:
      optimizers[task.slot] = task.update.optimizer
    names = [field.name for field in dataclasses.fields(AdamW)]
    settings = StepSettings(
      **{name: np.asarray([getattr(each, name) for each in optimizers], np.float32) for name in names}
    )
    done: list[dict[str, Any]] = []  # One per step, for all slots.
    sums: list[list[dict[str, Any]]] = []  # One per step and micro-batch, for all rows.
    per_token: list[dict[str, Any]] = []
    for number in range(steps):
      stepping = {task.slot for task in tasks if number < task.update.steps}
      grads, of_micros = self._functions.zero(state.trainable), []
      whole = as_train_state(state.trainable)
      for micro in micros:
        batch = micro.batch if number == 0 else self._renewed(state.trainable, micro)
        grads, result = self._functions.accumulate(self._base, whole, grads, batch)
        read = {name: result.aux[name] for name in reported.READ}
        of_micros.append(self._functions.report(batch.replace(student=None, signal=None), read, micro.floored))
        if number == 0:
          per_token.append(result.aux)
        _wait_for(ahead, of_micros[-1])
        yield share
      active = np.isin(np.arange(self._slots), list(stepping))
      state, step_said = self._functions.step(state, grads, settings, active)
      done.append(step_said)
      sums.append(of_micros)
    after = []  # The student's log-probs [B, T] of the completions, and [B, T, K] of the teacher's tokens, if wanted.
    for micro in micros:
      hidden, unembedding = self._functions.states(self._base, state.trainable, micro.batch.student)
      at_named = None
      if micro.named_before is not None:
        at_named = self._scorer.of_ids(hidden, unembedding, micro.theirs.top_ids, micro.mask)
      after.append((self._functions.log_probs(hidden, unembedding, micro.batch.targets, micro.mask), at_named))
      _wait_for(ahead, after[-1])
      yield share
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
    requests.check(tasks, self._buckets, self._topk, self._vocab_size, union=self._union)

  def _prepare(self, state: SlotState, teachers: Tree, lessons: list[tuple[Task, Lesson]], chosen: range) -> _Micro:
    """Return some lessons as a micro-batch, with the scores of student and teacher."""
    picked = [lessons[index] for index in chosen]
    picked += [picked[0]] * (self._rows - len(picked))  # Padding, in which every token is masked.
    live = np.arange(self._rows) < len(chosen)
    completions = [lesson.completion for _, lesson in picked]
    tokens, mask = padded(completions, self._room('response', completions))
    slots, teaching = ([getattr(task, name) for task, _ in picked] for name in ('slot', 'teacher'))
    student = self._token_rows('prompt', [lesson.prompt for _, lesson in picked], tokens, mask, slots)
    # The scores after this dummy prompt are not used: the lesson's own are given.
    read = [[0] if lesson.teacher_prompt is None else lesson.teacher_prompt for _, lesson in picked]
    teacher = self._token_rows('teacher', read, tokens, mask, teaching)
    batch, inputs, floored = requests.batch_of(picked, tokens, mask, live, self._topk, union=self._union)
    batch, shown = batch.replace(student=student), mask & live[:, None]
    batch, teacher, shown, floored, inputs = on_devices(self._mesh, (batch, teacher, shown, floored, inputs))
    hidden, unembedding = self._functions.states(self._base, state.trainable, batch.student)
    teacher_hidden, _ = self._scorer.states(teachers, teacher)
    before, theirs, teacher_hidden, signal, advantages, old_log_probs = self._functions.first(
      hidden, teacher_hidden, unembedding, batch.targets, shown, batch.old_log_probs, inputs
    )
    batch = batch.replace(old_log_probs=old_log_probs, advantages=advantages, signal=signal)
    rows = np.where(live, np.arange(self._rows) + chosen.start, -1)
    at_named = None
    if any(task.update.measured for task, _ in picked):
      at_named = self._scorer.of_ids(hidden, unembedding, theirs.top_ids, shown)
    return _Micro(rows, shown, teacher_hidden, inputs, before, theirs, floored, batch, at_named)

  def _renewed(self, trainable: Tree, micro: _Micro) -> Batch:
    """Return the batch of a later step: the student's support is taken again, the teacher's own scores stay."""
    batch = micro.batch
    hidden, unembedding = self._functions.states(self._base, trainable, batch.student)
    signal = self._functions.support(
      hidden, micro.teacher_hidden, unembedding, batch.targets, micro.mask, micro.theirs, micro.inputs
    )
    return batch.replace(signal=signal)

  def _token_rows(
    self, name: str, prompts: list[Sequence[int]], tokens: np.ndarray, mask: np.ndarray, members: list[int]
  ) -> TokenRows:
    rows = batching.token_rows(prompts, tokens, mask, self._room(name, prompts))
    return rows.replace(members=np.asarray(members, np.int32))

  def _room(self, name: str, sequences: Sequence[Sequence[int]]) -> int:
    return smallest_bucket(self._buckets[name], max(map(len, sequences)))

  def _learned(
    self,
    tasks: Sequence[Task],
    lessons: list[tuple[Task, Lesson]],
    micros: list[_Micro],
    per_token: list[dict[str, jax.Array]],
    after: list[tuple[jax.Array, jax.Array | None]],
    done: list[dict[str, jax.Array]],
    sums: list[list[dict[str, jax.Array]]],
  ) -> list[Learned]:
    said: dict[int, LessonScores] = {}
    # One transfer: the host must not wait for the devices before it has dispatched the last program.
    known = [(micro.before, micro.theirs, micro.batch.advantages, micro.named_before) for micro in micros]
    divergences = [aux['divergence'] for aux in per_token]
    known, divergences, after, done, sums = jax.device_get((known, divergences, after, done, sums))
    for micro, (before, theirs, advantages, at_named), divergence, (scored, at_named_after) in zip(
      micros, known, divergences, after, strict=True
    ):
      for row, lesson in enumerate(micro.rows.tolist()):
        if lesson < 0:
          continue
        length = len(lessons[lesson][1].completion)
        said[lesson] = LessonScores(
          log_probs_before=before.log_prob[row, :length],
          log_probs_after=scored[row, :length],
          teacher_log_probs=theirs.log_prob[row, :length],
          teacher_top_ids=theirs.top_ids[row, :length],
          teacher_top_log_probs=theirs.top_log_probs[row, :length],
          advantages=advantages[row, :length],
          divergence=divergence[row, :length],
          entropy=before.entropy[row, :length],
          named_before=None if at_named is None else at_named[row, :length],
          named_after=None if at_named_after is None else at_named_after[row, :length],
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
        for step, of_micros in zip(done[: task.update.steps], sums, strict=False)
      ]
      found.append(Learned([said[index] for index in own], steps, requests.warnings_of(task)))
    return found


def whole(pieces: Generator) -> Any:
  """Do all pieces at once, and return the result."""
  try:
    while True:
      next(pieces)
  except StopIteration as done:
    return done.value


def _wait_for(ahead: collections.deque, last: Any) -> None:
  """Note the results of the last piece, and wait until the devices have no more than `_AHEAD` pieces to do."""
  ahead.append(last)
  if len(ahead) > _AHEAD:
    jax.block_until_ready(ahead.popleft())


def as_train_state(trainable: Tree) -> TrainState:
  """Return the factors of slots as the `TrainState` that `learning.update.accumulate` reads."""
  zero = np.zeros((), np.int32)
  return TrainState(step=zero, optimizer_step=zero, trainable=trainable, opt_state={}, teacher={}, rng=None)
