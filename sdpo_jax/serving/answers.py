"""The response to a feedback, as JSON: scores of every token, metrics, guards and timings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from models.token_texts import TokenTexts
from sdpo_jax.learning.learner import Learned, LessonScores
from sdpo_jax.learning.losses import Loss, Sdpo
from sdpo_jax.serving.feedback_request import FeedbackRequest
from sdpo_jax.serving.guards import Canaries, Check
from sdpo_jax.serving.lessons import Prepared
from sdpo_jax.serving.records import Version

_DIGITS = 7  # Decimal places of numbers that were float32.
_LISTS = ('log_probs_before', 'log_probs_after', 'teacher_log_probs', 'advantages', 'divergence', 'entropy')


def rounded(values: np.ndarray) -> np.ndarray:
  """Return an array as float64, rounded as in responses."""
  return np.round(np.asarray(values, np.float64), _DIGITS) + 0.0  # No −0.


def numbers(values: np.ndarray) -> list[Any]:
  """Return an array as nested lists of rounded numbers, with None where a value is not finite."""
  exact = rounded(values)
  if np.isfinite(exact).all():
    return exact.tolist()
  return np.where(np.isfinite(exact), exact.astype(object), None).tolist()


def finite(value: Any) -> Any:
  """Return nested dicts and lists, or a number, with None in place of every number that is not finite."""
  if isinstance(value, Mapping):
    return {str(key): finite(each) for key, each in value.items()}
  if isinstance(value, (list, tuple)):
    return [finite(each) for each in value]
  if isinstance(value, (float, np.floating)):
    return float(value) + 0.0 if math.isfinite(value) else None  # No −0.
  return value.item() if isinstance(value, np.generic) else value


def of_item(
  prepared: Prepared, said: LessonScores, texts: TokenTexts, *, detail: Collection[str], top: int
) -> dict[str, Any]:
  """Return the part of the response about one completion of T tokens.

  Args:
    prepared: its lesson.
    said: the scores of student and teacher.
    texts: the texts of tokens.
    detail: the lists to include, from `feedback_request.DETAILS`.
    top: how many of the teacher's tokens to list at every position.
  """
  tokens = [int(token) for token in prepared.lesson.completion]
  sample = prepared.sample
  per_token: dict[str, list[Any]] = {}
  if 'token_ids' in detail:
    per_token['token_ids'] = tokens
  if 'tokens' in detail:
    per_token['tokens'] = [texts.text_of(token) for token in tokens]
  per_token |= {name: numbers(getattr(said, name)) for name in _LISTS if name in detail}
  if 'top' in detail and top:
    rows = zip(said.teacher_top_ids[:, :top].tolist(), numbers(said.teacher_top_log_probs[:, :top]), strict=True)
    per_token['top'] = [
      [
        {'token_id': token, 'token': texts.text_of(token), 'log_prob': value}
        for token, value in zip(ids, values, strict=True)
        if token >= 0
      ]
      for ids, values in rows
    ]
  return {
    'sample_id': None if sample is None else sample.id,
    'sample_version': None if sample is None else sample.version,
    'context': list(prepared.context),
    'truncated': prepared.truncated,
    'teacher_prompt_tokens': len(prepared.lesson.teacher_prompt or ()),
    'num_tokens': len(tokens),
    'mean_log_prob_before': finite(float(np.mean(said.log_probs_before))),
    'mean_log_prob_after': finite(float(np.mean(said.log_probs_after))),
    'per_token': per_token,
  }


def metrics(learned: Learned) -> dict[str, float | None]:
  """Return the metrics of the last step, as its programs computed them, under their published names.

  Means over the tokens are added: `mean_log_prob_change`, over all steps; `teacher_gap`, the teacher's log-probs minus
  the student's before the steps; and `entropy` of the student before the steps.
  """
  found = {name: value for name, value in learned.steps[-1].items() if name != 'stepped'}
  before, after, theirs, entropy = (
    np.concatenate([getattr(each, name) for each in learned.said]).astype(np.float64)
    for name in ('log_probs_before', 'log_probs_after', 'teacher_log_probs', 'entropy')
  )
  found |= {
    'mean_log_prob_change': (after - before).mean(),
    'teacher_gap': (theirs - before).mean(),
    'entropy': entropy.mean(),
  }
  return finite(found)


def details(
  request: FeedbackRequest,
  teacher: str,
  prepared: Sequence[Prepared],
  learned: Learned,
  checks: Sequence[Check],
  canaries: Canaries | None,
) -> dict[str, Any]:
  """Return the details that a new version stores: the response without the items and the timings."""
  reason = next((each.reason for each in checks if not each.passed), None)
  return finite(
    {
      'mode': request.mode,
      'accepted': reason is None,
      'reason': reason,
      'loss': loss_said(request.update.loss),
      'optimizer': dataclasses.asdict(request.update.optimizer),
      'num_steps': request.update.steps,
      'teacher': 'ema' if teacher == 'average' else teacher,  # As in requests, or a version by its name.
      'warnings': list(learned.warnings),
      'samples': [each.sample.id for each in prepared if each.sample is not None],
      'metrics': metrics(learned),
      'steps': learned.steps,
      'guards': [dataclasses.asdict(each) for each in checks],
      'canary': None if canaries is None else canary(canaries),
      **(request.source or {}),
    }
  )


def canary(canaries: Canaries) -> dict[str, Any]:
  """Return the measurements on canary prompts without the completions."""
  found = dataclasses.asdict(canaries)
  return {name: value for name, value in found.items() if not name.endswith('completions')}


def loss_said(loss: Loss) -> dict[str, Any]:
  """Return a loss with its name and parameters, as JSON."""
  return {'name': 'sdpo' if isinstance(loss, Sdpo) else 'jsd_pg', **dataclasses.asdict(loss)}


def recent_losses(versions: Sequence[Version], loss: Loss) -> list[float]:
  """Return the losses before the first step of the feedbacks that made these versions.

  Feedbacks with other loss parameters are left out: a KL is many times the Jensen-Shannon divergence of the same two
  distributions.
  """
  told = finite(loss_said(loss))
  kept = [version.details for version in versions if version.reason == 'feedback']
  losses = [each['steps'][0]['loss'] for each in kept if each['loss'] == told]
  return [float(each) for each in losses if each is not None]
