"""The batch of a request's first step, made as the service makes it, from the states of student and teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdpo_jax.learning import requests, signals
from sdpo_jax.learning.requests import Task
from sdpo_jax.rollout.buckets import padded
from sdpo_jax.types import Batch


def first_batch(
  task: Task,
  hidden: Any,
  teacher_hidden: Any,
  unembedding: Any,
  *,
  topk: int,
  vocab_size: int,
  chunk_size: int = 256,
  dtype: type[np.floating] = np.float32,
  union: bool = False,
) -> tuple[Batch, np.ndarray]:
  """Return the batch of all lessons of a task, and [B, T] bool, the tokens for which the teacher gave no log-prob.

  Args:
    task: the task; other rows are padding.
    hidden: [B, T, D] states of the student.
    teacher_hidden: [B, T, D] of the teacher, not read for lessons that are taught already.
    unembedding: [V, D].
    topk: K.
    vocab_size: V.
    chunk_size: number of tokens whose logits exist at one time.
    dtype: of all numbers.
    union: whether the signal has room for the union of two supports.
  """
  rows, room = hidden.shape[:2]
  picked: Sequence[Any] = [(task, lesson) for lesson in task.lessons]
  live = np.arange(rows) < len(picked)
  picked = [*picked, *[picked[0]] * (rows - len(picked))]
  tokens, mask = padded([lesson.completion for _, lesson in picked], room)
  batch, inputs, floored = requests.batch_of(picked, tokens, mask, live, topk, dtype, union=union)
  _, _, _, signal, advantages, old = signals.first(
    hidden,
    teacher_hidden,
    unembedding,
    tokens,
    mask & live[:, None],
    batch.old_log_probs,
    inputs,
    k=topk,
    chunk_size=chunk_size,
    vocab_size=vocab_size,
    layout=None,
  )
  return batch.replace(signal=signal, advantages=advantages, old_log_probs=old), floored
