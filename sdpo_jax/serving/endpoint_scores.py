"""Lessons are given the scores of a teacher behind an endpoint before they are learned.

This needs neither a device nor an engine, so that other requests do not wait for an answer over the network.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.learning.requests import Lesson, Taught
from sdpo_jax.teacher.endpoint import Endpoint, EndpointQuery


def taught(endpoint: Endpoint, lessons: Sequence[Lesson], topk: int, stop: Stop = NEVER) -> list[Lesson]:
  """Return lessons with the scores of an external teacher, for `teacher='given'`. Any thread may call.

  Args:
    endpoint: the teacher.
    lessons: lessons with the prompt that the teacher reads before each completion.
    topk: how many of the tokens that the teacher names to take, the likeliest first; at most the engine's K.
    stop: says when to stop waiting.

  Raises:
    ValueError: a lesson has no prompt for the teacher.
    UserError: the teacher returns nothing usable for a lesson.
    StoppedError: as `stop` said.
  """
  if any(lesson.teacher_prompt is None for lesson in lessons):
    raise ValueError('A lesson that a teacher elsewhere is asked about has a prompt for it.')
  said = endpoint.score([EndpointQuery(lesson.teacher_prompt, lesson.completion) for lesson in lessons], stop)
  return [
    dataclasses.replace(
      lesson,
      teacher_prompt=None,
      taught=Taught(each.token_ids[:, :topk], each.log_probs[:, :topk], each.target_log_probs),
    )
    for lesson, each in zip(lessons, said, strict=True)
  ]
