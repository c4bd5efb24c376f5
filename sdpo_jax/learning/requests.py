"""Learning requests: tasks of lessons with their losses and optimizer settings, checked and converted to arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math

import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.learning.losses import Loss, Sdpo, of_rows
from sdpo_jax.learning.scoring import check_ids
from sdpo_jax.learning.signals import TeacherInputs
from sdpo_jax.models.policy import NO_MEMBER
from sdpo_jax.objective import jsd_pg
from sdpo_jax.objective.jsd_pg import JsdPg
from sdpo_jax.rollout.buckets import smallest_bucket
from sdpo_jax.types import Batch


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
  """A completion to learn from, and the prompts that student and teacher read before it."""

  prompt: Sequence[int]  # The student's prompt.
  completion: Sequence[int]
  # The teacher's prompt before the same completion; None: `taught` already holds its scores.
  teacher_prompt: Sequence[int] | None
  # [T] log-probs at sampling time; None: the student before the first step drew it.
  sampling_log_probs: np.ndarray | None = None
  advantage: float = 0.0  # Of every token, for the policy gradient of `Sdpo`.
  # Scores of the completion by a teacher outside of the pool: another model, or one behind an endpoint.
  taught: Taught | None = None
  loss: Loss | None = None  # The loss of this lesson; None: that of the request.


def with_taught(lessons: Sequence[Lesson], taught: Sequence[Taught]) -> list[Lesson]:
  """Return lessons in which those without a teacher's scores have these, in order, in place of a prompt."""
  left = iter(taught)
  return [
    lesson if lesson.taught is not None else dataclasses.replace(lesson, teacher_prompt=None, taught=next(left))
    for lesson in lessons
  ]


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
  """How a request learns from its lessons."""

  loss: Loss = Sdpo()
  optimizer: AdamW = AdamW()
  steps: int = 1
  # Whether to return the student's log-probs of the teacher's top tokens, too, before and after the steps.
  measured: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
  """The lessons of one request, with the slot that learns from them and its teacher."""

  slot: int  # The slot of the adapter that learns.
  lessons: Sequence[Lesson]
  update: UpdateOptions = UpdateOptions()
  teacher: int = NO_MEMBER  # Index in the pool of teachers; NO_MEMBER: the model without an adapter.
  itself: bool = False  # The teacher has the factors of the slot, so that equal prompts give equal scores.


def check(
  tasks: Sequence[Task], buckets: Mapping[str, Sequence[int]], topk: int, vocab_size: int, *, union: bool
) -> None:
  """Check that tasks can be learned together.

  Args:
    tasks: tasks of different slots.
    buckets: the lengths that are compiled for a 'prompt', a 'teacher' prompt and a 'response'.
    topk: the K that is compiled.
    vocab_size: V.
    union: whether the union of two supports is compiled.

  Raises:
    UserError: a task has no lessons, a length or K beyond the compiled ones, or a loss that is not compiled.
  """
  slots = [task.slot for task in tasks]
  if len(set(slots)) < len(slots):
    raise ValueError('Two tasks of one slot cannot be learned at once: each has its own steps.')
  for task in tasks:
    if not task.lessons:
      raise UserError('There is nothing to learn from: a task needs at least one completion.')
    if not isinstance(task.update.steps, int) or task.update.steps < 1:
      raise UserError(f'num_steps must be at least 1, not {task.update.steps}.')
    if isinstance(task.update.loss, Sdpo) and task.update.loss.topk > topk:
      raise UserError(f'topk={task.update.loss.topk} is more than the {topk} that the engine is compiled for.')
    if task.update.loss.support == 'union' and not union:
      raise UserError(
        "support='union' doubles the tokens that every request is compiled for, which is off here "
        "(serve.union_support): set support='teacher'."
      )
    for lesson in task.lessons:
      check_lesson(lesson, buckets, topk, vocab_size)


def check_lesson(lesson: Lesson, buckets: Mapping[str, Sequence[int]], topk: int, vocab_size: int) -> None:
  """Raise UserError for a lesson that cannot be learned; the arguments are those of `check`."""
  if (lesson.teacher_prompt is None) == (lesson.taught is None):
    raise ValueError("A lesson has either a prompt for the teacher or a teacher's scores, not both or neither.")
  texts = {'prompt': ('The prompt', lesson.prompt), 'response': ('The completion', lesson.completion)}
  if lesson.teacher_prompt is not None:
    texts['teacher'] = "The teacher's prompt", lesson.teacher_prompt
  for name, (what, tokens) in texts.items():
    if not len(tokens):
      raise UserError(f'{what} is empty.')
    if smallest_bucket(buckets[name], len(tokens)) is None:
      raise UserError(f'{what} has {len(tokens)} tokens, but the engine takes at most {buckets[name][-1]}.')
    check_ids(what, tokens, vocab_size)
  length = len(lesson.completion)
  if not math.isfinite(lesson.advantage):
    raise UserError(f'The advantage of a lesson must be a finite number, not {lesson.advantage}.')
  if lesson.sampling_log_probs is not None and np.shape(lesson.sampling_log_probs) != (length,):
    raise UserError(
      f'There are {np.size(lesson.sampling_log_probs)} sampling log-probs for the {length} tokens of the completion.'
    )
  if lesson.sampling_log_probs is not None and not np.isfinite(lesson.sampling_log_probs).all():
    raise UserError('A sampling log-prob of the completion is not a finite number.')
  if lesson.taught is None:
    return
  shape = np.shape(lesson.taught.top_ids)
  if len(shape) != 2 or shape[0] != length or np.shape(lesson.taught.log_probs) != (length,):
    raise UserError(f'The teacher scored {shape[0] if shape else 0} tokens, but the completion has {length}.')
  if shape != np.shape(lesson.taught.top_log_probs) or shape[1] > topk:
    raise UserError(f'The teacher names {shape[1]} tokens per position, but the engine takes at most {topk}.')
  check_ids("The teacher's top_ids", np.maximum(lesson.taught.top_ids, 0).ravel(), vocab_size)
  named = np.asarray(lesson.taught.top_ids) >= 0
  if np.isnan(lesson.taught.log_probs).any() or np.isnan(np.where(named, lesson.taught.top_log_probs, 0)).any():
    raise UserError('A log-prob of the teacher is not a number.')


def batch_of(
  picked: Sequence[tuple[Task, Lesson]],
  tokens: np.ndarray,
  mask: np.ndarray,
  live: np.ndarray,
  topk: int,
  dtype: type[np.floating] = np.float32,
  *,
  union: bool = False,
) -> tuple[Batch, TeacherInputs, np.ndarray]:
  """Return the arrays of a micro-batch with a lesson of any task in each row.

  The loss of a task is a mean over the tokens of all its lessons, some of which may be in other micro-batches.

  Args:
    picked: B lessons with their tasks.
    tokens: [B, T] int32, their completions, padded.
    mask: [B, T] bool, the tokens that are not padding.
    live: [B] bool, rows that count; every token of the others is masked.
    topk: K of the compiled programs.
    dtype: dtype of all floats.
    union: whether they are compiled for the union of two supports.

  Returns:
    The batch without rows, signal and advantages; the inputs from which `signals.first` computes these; and [B, T]
    bool, the tokens for which the teacher gave no log-prob.
  """
  shown = mask & live[:, None]
  counts = [sum(len(each.completion) for each in task.lessons) for task, _ in picked]
  weights = shown / np.asarray(counts)[:, None]
  losses = [loss_of(task, lesson) for task, lesson in picked]
  policy_weights = [1.0 if isinstance(loss, JsdPg) else loss.policy_weight for loss in losses]
  divergence_weights = [loss.jsd_weight if isinstance(loss, JsdPg) else loss.divergence_weight for loss in losses]
  wide = *tokens.shape, topk
  old, has_old, given = np.zeros(tokens.shape, dtype), np.zeros(len(picked), bool), np.zeros(len(picked), bool)
  ids, log_probs, own = np.full(wide, -1, np.int32), np.zeros(wide, dtype), np.zeros(tokens.shape, dtype)
  floored = np.zeros(tokens.shape, bool)
  for row, (task, lesson) in enumerate(picked):
    length = len(lesson.completion)
    if lesson.sampling_log_probs is not None:
      old[row, :length], has_old[row] = lesson.sampling_log_probs, True
    if lesson.taught is not None:
      count = np.shape(lesson.taught.top_ids)[1]
      of_targets = np.asarray(lesson.taught.log_probs, dtype)
      floor = task.update.loss.floor if isinstance(task.update.loss, JsdPg) else JsdPg.floor
      given[row], floored[row, :length] = True, np.isneginf(of_targets)
      ids[row, :length, :count], log_probs[row, :length, :count] = lesson.taught.top_ids, lesson.taught.top_log_probs
      own[row, :length] = np.where(np.isneginf(of_targets), dtype(floor), of_targets)
  inputs = TeacherInputs(
    mixes=np.asarray([isinstance(loss, JsdPg) for loss in losses]),
    named=given | np.asarray([loss.support != 'student' for loss in losses]),
    both=np.asarray([loss.support == 'union' for loss in losses]) if union else None,
    mixture=np.asarray([loss.alpha for loss in losses], dtype),
    design=np.asarray([isinstance(loss, JsdPg) and loss.form == 'design' for loss in losses]),
    advantage=np.asarray([lesson.advantage for _, lesson in picked], dtype),
    # Student and teacher have the same factors and read the same prompt.
    same=np.asarray(
      [
        task.itself and lesson.teacher_prompt is not None and list(lesson.teacher_prompt) == list(lesson.prompt)
        for task, lesson in picked
      ]
    ),
    has_old=has_old,
    given=given,
    given_ids=ids,
    given_log_probs=log_probs,
    given_own=own,
  )
  batch = Batch(
    student=None,
    teacher=None,
    targets=tokens,
    mask=shown.astype(dtype),
    distill_coef=(weights * np.asarray(divergence_weights)[:, None]).astype(dtype),
    policy_coef=(weights * np.asarray(policy_weights)[:, None]).astype(dtype),
    entropy_coef=None,
    old_log_probs=old,
    advantages=None,
    numbers=of_rows(losses, topk, dtype),
  )
  return batch, inputs, floored


def loss_of(task: Task, lesson: Lesson) -> Loss:
  """Return the loss of a lesson, without the regulariser if its teacher named only a handful of tokens."""
  if lesson.loss is not None:
    return lesson.loss
  if lesson.taught is None or not isinstance(task.update.loss, JsdPg):
    return task.update.loss
  return jsd_pg.for_teacher(task.update.loss, np.shape(lesson.taught.top_ids)[1])


def warnings_of(task: Task) -> tuple[str, ...]:
  """Return a warning if a teacher names so few tokens per position that part of the loss is lost; else ()."""
  taught = [lesson.taught for lesson in task.lessons if lesson.loss is None and lesson.taught is not None]
  named = [np.shape(each.top_ids)[1] for each in taught]
  if not named or min(named) > jsd_pg.LITE:
    return ()
  begin = f'The teacher named {min(named)} tokens at a position'
  if isinstance(task.update.loss, Sdpo):
    lost = 'of all others the student learns only their total probability, not which of them the teacher prefers'
  elif task.update.loss.jsd_weight:
    lost = (
      'the regulariser over its tokens was left out, and the student learns from the tokens of the completion alone, '
      'not which others the teacher prefers'
    )
  else:
    return ()
  return (f'{begin}: {lost}. A teacher that names more, such as one with K = 100, teaches that, too.',)
