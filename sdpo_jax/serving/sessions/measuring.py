"""The divergence of student and teacher on an answer, before and after a step, and the tokens that moved most."""

from __future__ import annotations

from collections.abc import Sequence
import logging

import numpy as np

from models.token_texts import TokenTexts
from sdpo_jax.errors import UserError
from sdpo_jax.learning.learner import LessonScores
from sdpo_jax.serving.answers import rounded
from sdpo_jax.serving.errors import ServiceError
from sdpo_jax.serving.feedback_request import MOST_TOP
from sdpo_jax.serving.sessions.records import MovedToken
from sdpo_jax.serving.targets import VersionTarget
from sdpo_jax.serving.tenant import Tenant

_logger = logging.getLogger('sdpo_jax.serving')
MOST_MOVED = 8
_LEAST = 1e-8  # Lower bound of the tail's probability.


def divergence(teacher: Sequence[np.ndarray], student: np.ndarray) -> float:
  """Return KL(teacher‖student), the mean over T positions, in nats.

  All tokens that the teacher does not name form one tail bucket, so that the result is a lower bound.

  Args:
    teacher: [T] arrays with the log-probs of the tokens named at each position, as from `named_by_teacher`.
    student: [T, M] log-probs of the same tokens; columns beyond the named ones are ignored.
  """
  per_token = []
  for theirs, own in zip(teacher, student, strict=True):
    ours = np.asarray(own[: len(theirs)], np.float64)
    rest = [np.log(max(1 - np.exp(each).sum(), _LEAST)) for each in (theirs, ours)]
    theirs, ours = np.append(theirs, rest[0]), np.append(ours, rest[1])
    per_token.append(float(np.sum(np.exp(theirs) * (theirs - ours))))
  return float(np.mean(per_token))


def named_by_teacher(scores: LessonScores) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Return ids and log-probs of the tokens that the teacher names at each position with a finite log-prob."""
  ids, log_probs = scores.teacher_top_ids[:, :MOST_TOP], rounded(scores.teacher_top_log_probs[:, :MOST_TOP])
  named = (ids >= 0) & np.isfinite(log_probs)
  return [row[own] for row, own in zip(ids, named, strict=True)], [
    row[own] for row, own in zip(log_probs, named, strict=True)
  ]


def measure(
  tenant: Tenant,
  targets: Sequence[VersionTarget],
  prompt: Sequence[int],
  tokens: Sequence[int],
  scores: LessonScores,
) -> list[float | None]:
  """Return the `divergence` of each version; None where it could not be measured.

  An error is logged: what was learned stands.

  Args:
    tenant: the owner.
    targets: the versions.
    prompt: tokens that the student reads.
    tokens: [T], the answer.
    scores: what the feedback on the answer has said of it.
  """
  named, teacher = named_by_teacher(scores)
  ids = np.zeros((len(tokens), max(map(len, named), default=0)), np.int32)
  if not ids.size:
    return [None] * len(targets)
  for row, each in zip(ids, named, strict=True):
    row[: len(each)] = each
  found: list[float | None] = []
  for target in targets:
    try:
      [scored] = tenant.score(target, [(list(prompt), list(tokens))], topk=0, ids=[ids])
      found.append(divergence(teacher, scored.of_ids))
    except (ServiceError, UserError) as error:
      _logger.warning('The divergence of %s from its teacher is not known: %s', target.engine_name, error)
      found.append(None)
  return found


def moved(tokens: Sequence[int], scores: LessonScores, texts: TokenTexts) -> tuple[MovedToken, ...]:
  """Return the tokens of an answer whose log-probs changed most, the largest change first."""
  before, after = rounded(scores.log_probs_before), rounded(scores.log_probs_after)
  both = np.isfinite(before) & np.isfinite(after)
  change = np.where(both, after, 0) - np.where(both, before, 0)
  most = [position for position in np.argsort(-abs(change), kind='stable')[:MOST_MOVED].tolist() if change[position]]
  return tuple(
    MovedToken(at, int(tokens[at]), texts.text_of(int(tokens[at])), float(before[at]), float(after[at])) for at in most
  )
