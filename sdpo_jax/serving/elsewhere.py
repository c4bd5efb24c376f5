"""What a teacher behind an endpoint says of lessons, before they are learned: no device is touched, and nothing of an
engine is needed, so that nobody else waits for an answer over the network.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.serving.learning import Lesson, Taught
from sdpo_jax.teacher.endpoint import Asked, Endpoint


def taught(endpoint: Endpoint, lessons: Sequence[Lesson], topk: int, stop: Stop = NEVER) -> list[Lesson]:
  """Return lessons with what a teacher says of them, to be learned with `teacher='endpoint'`; from any thread.

  Args:
    endpoint: the teacher.
    lessons: with what the teacher reads before each completion.
    topk: tokens that are taken of what it names, the likeliest first; at most those that an engine is compiled for.
    stop: whether to wait no longer.

  Raises:
    ValueError: a lesson has nothing for the teacher to read.
    UserError: there is one of which it says nothing that can be used.
    StoppedError: as `stop` said.
  """
  if any(lesson.teacher_prompt is None for lesson in lessons):
    raise ValueError('A lesson that a teacher elsewhere is asked about has a prompt for it.')
  said = endpoint.score([Asked(lesson.teacher_prompt, lesson.completion) for lesson in lessons], stop)
  return [
    dataclasses.replace(
      lesson,
      teacher_prompt=None,
      taught=Taught(each.token_ids[:, :topk], each.log_probs[:, :topk], each.target_log_probs),
    )
    for lesson, each in zip(lessons, said, strict=True)
  ]
