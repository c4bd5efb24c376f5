"""The divergence of student and teacher on an answer, before and after a step, and the tokens that moved most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from sdpo_jax.errors import UserError
from sdpo_jax.serving.errors import ServiceError
from sdpo_jax.serving.sessions.records import MovedToken

if TYPE_CHECKING:
  from sdpo_jax.serving.account import Account
  from sdpo_jax.serving.targets import VersionTarget

_logger = logging.getLogger('sdpo_jax.serving')
# Per-token lists of the feedback's response.
DETAIL = ('token_ids', 'tokens', 'log_probs_before', 'log_probs_after', 'top')
MOST_MOVED = 8
_LEAST = 1e-8  # Lower bound of the tail's probability.


def divergence(teacher: Sequence[Sequence[Mapping[str, Any]]], student: np.ndarray) -> float:
  """Return KL(teacher‖student), the mean over T positions, in nats.

  All tokens that the teacher does not name form one tail bucket, so that the result is a lower bound.

  Args:
    teacher: [T] lists of the tokens named at each position, as in `top` of `answers.of_item`.
    student: [T, M] log-probs of the same tokens; columns beyond the named ones are ignored.
  """
  per_token = []
  for named, own in zip(teacher, student, strict=True):
    theirs = np.asarray([each['log_prob'] for each in named], np.float64)
    ours = np.asarray(own[: len(named)], np.float64)
    rest = [np.log(max(1 - np.exp(each).sum(), _LEAST)) for each in (theirs, ours)]
    theirs, ours = np.append(theirs, rest[0]), np.append(ours, rest[1])
    per_token.append(float(np.sum(np.exp(theirs) * (theirs - ours))))
  return float(np.mean(per_token))


def measure(
  account: Account,
  targets: Sequence[VersionTarget],
  prompt: Sequence[int],
  tokens: Sequence[int],
  teacher: Sequence[Sequence[Mapping[str, Any]]],
) -> list[float | None]:
  """Return the `divergence` of each version; None where it could not be measured.

  An error is logged: what was learned stands.

  Args:
    account: of the owner.
    targets: the versions.
    prompt: tokens that the student reads.
    tokens: [T], the answer.
    teacher: see `divergence`.
  """
  named = max(map(len, teacher), default=0)
  if not named:
    return [None] * len(targets)
  ids = np.zeros((len(tokens), named), np.int32)
  for row, each in zip(ids, teacher, strict=True):
    row[: len(each)] = [one['token_id'] for one in each]
  found: list[float | None] = []
  for target in targets:
    try:
      [scored] = account.score(target, [(list(prompt), list(tokens))], topk=0, ids=[ids])
      found.append(divergence(teacher, scored.of_ids))
    except (ServiceError, UserError) as error:
      _logger.warning('The divergence of %s from its teacher is not known: %s', target.engine_name, error)
      found.append(None)
  return found


def named_by_teacher(per_token: Mapping[str, Sequence[Any]]) -> list[list[Mapping[str, Any]]]:
  """Return the tokens that the teacher names at each position of an answer with a finite log-prob."""
  return [[each for each in row if each['log_prob'] is not None] for row in per_token['top']]


def moved(per_token: Mapping[str, Sequence[Any]]) -> tuple[MovedToken, ...]:
  """Return the tokens of an answer whose log-probs changed most, the largest change first.

  Args:
    per_token: lists as in `answers.of_item`.
  """
  rows = zip(*(per_token[name] for name in DETAIL[:4]), strict=True)
  found = [
    MovedToken(position, token, text, before, after)
    for position, (token, text, before, after) in enumerate(rows)
    if before is not None and after is not None and before != after
  ]
  return tuple(sorted(found, key=lambda each: -abs(each.after - each.before))[:MOST_MOVED])
