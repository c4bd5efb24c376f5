"""The divergence of student and teacher on an answer, before and after a step, and the tokens that moved most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.token_texts import TokenTexts
from sdpo_jax.learning.learner import LessonScores
from sdpo_jax.serving.answers import rounded
from sdpo_jax.serving.feedback_request import MOST_TOP
from sdpo_jax.serving.sessions.session_records import MovedToken

MOST_MOVED = 8
_LEAST = 1e-8  # Lower bound of the tail's probability.


def divergence(teacher: Sequence[np.ndarray], student: Sequence[np.ndarray]) -> float:
  """Return KL(teacher‖student), the mean over T positions, in nats.

  All tokens that the teacher does not name form one tail bucket, so that the result is a lower bound.

  Args:
    teacher: T arrays with the log-probs of the tokens that are named at a position.
    student: T arrays with its log-probs of the same tokens.
  """
  per_token = []
  for theirs, own in zip(teacher, student, strict=True):
    ours = np.asarray(own, np.float64)
    rest = [np.log(max(1 - np.exp(each).sum(), _LEAST)) for each in (theirs, ours)]
    theirs, ours = np.append(theirs, rest[0]), np.append(ours, rest[1])
    per_token.append(float(np.sum(np.exp(theirs) * (theirs - ours))))
  return float(np.mean(per_token))


def divergences(scores: LessonScores) -> tuple[float | None, float | None]:
  """Return the `divergence` before and after the steps of a measured feedback; None where the teacher names nothing."""
  ids, log_probs = scores.teacher_top_ids[:, :MOST_TOP], rounded(scores.teacher_top_log_probs[:, :MOST_TOP])
  named = (ids >= 0) & np.isfinite(log_probs)
  if not named.any():
    return None, None
  teacher, *students = (
    [row[own] for row, own in zip(rows[:, :MOST_TOP], named, strict=True)]
    for rows in (log_probs, scores.named_before, scores.named_after)
  )
  before, after = (divergence(teacher, student) for student in students)
  return before, after


def moved(tokens: Sequence[int], scores: LessonScores, texts: TokenTexts) -> tuple[MovedToken, ...]:
  """Return the tokens of an answer whose log-probs changed most, the largest change first."""
  before, after = rounded(scores.log_probs_before), rounded(scores.log_probs_after)
  both = np.isfinite(before) & np.isfinite(after)
  change = np.where(both, after, 0) - np.where(both, before, 0)
  most = [position for position in np.argsort(-abs(change), kind='stable')[:MOST_MOVED].tolist() if change[position]]
  return tuple(
    MovedToken(at, int(tokens[at]), texts.text_of(int(tokens[at])), float(before[at]), float(after[at])) for at in most
  )
