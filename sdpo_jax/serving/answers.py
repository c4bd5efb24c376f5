"""What a feedback is answered with, as JSON: numbers of every token, metrics, guards and times."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from models.token_texts import TokenTexts
from sdpo_jax.serving.feedback_request import FeedbackRequest
from sdpo_jax.serving.guards import Canaries, Check
from sdpo_jax.serving.learning import Learned, Said
from sdpo_jax.serving.lessons import Prepared
from sdpo_jax.serving.losses import Loss, Sdpo
from sdpo_jax.serving.records import Version

_DIGITS = 7  # Behind the point, of numbers that were float32.
_LISTS = ('log_probs_before', 'log_probs_after', 'teacher_log_probs', 'advantages', 'divergence', 'entropy')


def number(value: float | None) -> float | None:
  """Return a number as JSON can hold it: None if it is not finite."""
  return None if value is None or not math.isfinite(value) else float(value) + 0.0  # No −0.


def numbers(values: np.ndarray) -> list[Any]:
  """Return an array as nested lists of what JSON can hold; what is not finite is None."""
  exact = np.round(np.asarray(values, np.float64), _DIGITS) + 0.0  # No −0.
  if np.isfinite(exact).all():
    return exact.tolist()
  return np.where(np.isfinite(exact), exact.astype(object), None).tolist()


def finite(value: Any) -> Any:
  """Return what is nested in dicts and lists with None for every number that is not finite."""
  if isinstance(value, Mapping):
    return {str(key): finite(each) for key, each in value.items()}
  if isinstance(value, (list, tuple)):
    return [finite(each) for each in value]
  if isinstance(value, (float, np.floating)):
    return number(value)
  return value.item() if isinstance(value, np.generic) else value


def of_item(prepared: Prepared, said: Said, texts: TokenTexts, *, detail: Collection[str], top: int) -> dict[str, Any]:
  """Return what is answered about one completion of T tokens.

  Args:
    prepared: its lesson.
    said: what student and teacher said of it.
    texts: of tokens.
    detail: the lists wanted, of `feedback_request.DETAILS`.
    top: tokens of the teacher that are named at every position.
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
    'mean_log_prob_before': number(float(np.mean(said.log_probs_before))),
    'mean_log_prob_after': number(float(np.mean(said.log_probs_after))),
    'per_token': per_token,
  }


def metrics(learned: Learned) -> dict[str, float | None]:
  """Return the metrics of the last step, as its programs computed them, by the names of the published interface.

  Beside them are means over the tokens: `mean_log_prob_change` by all steps, and, before them, `teacher_gap`, by which
  the teacher's log-probs are higher, and `entropy` of the student.
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
  """Return what a version keeps of how it was made: all of the answer but what is said of items, and the times."""
  reason = next((each.reason for each in checks if not each.passed), None)
  return finite(
    {
      'mode': request.mode,
      'accepted': reason is None,
      'reason': reason,
      'loss': loss_said(request.loss),
      'optimizer': dataclasses.asdict(request.optimizer),
      'num_steps': request.steps,
      'teacher': teacher,
      'warnings': list(learned.warnings),
      'samples': [each.sample.id for each in prepared if each.sample is not None],
      'metrics': metrics(learned),
      'steps': learned.steps,
      'guards': [dataclasses.asdict(each) for each in checks],
      'canary': None if canaries is None else canary(canaries),
      **(request.source or {}),
    }
  )


def loss_name(loss: Loss) -> str:
  """Return what requests call a loss."""
  return 'sdpo' if isinstance(loss, Sdpo) else 'jsd_pg'


def canary(canaries: Canaries) -> dict[str, Any]:
  """Return what was measured on canary prompts, without their completions."""
  found = dataclasses.asdict(canaries)
  return {name: value for name, value in found.items() if not name.endswith('completions')}


def first_loss(learned: Learned) -> float | None:
  """Return the loss before the first step."""
  return number(learned.steps[0]['loss'])


def make(
  adapter: str,
  before: int,
  after: int,
  known: Mapping[str, Any],
  items: Sequence[Mapping[str, Any]],
  timings: Mapping[str, float],
) -> dict[str, Any]:
  """Return the answer.

  Args:
    adapter: id of what learned.
    before: its version.
    after: its version now, the same if nothing was committed.
    known: of `details`.
    items: of `of_item`.
    timings: seconds from the beginning until each stage was through.
  """
  return {
    'adapter': adapter,
    'version_before': before,
    'version_after': after,
    **known,
    'items': list(items),
    'timings': {stage: round(seconds, 6) for stage, seconds in timings.items()},
  }


def loss_said(loss: Loss) -> dict[str, Any]:
  """Return a loss with its parameters."""
  return {'name': loss_name(loss), **dataclasses.asdict(loss)}


def recent_losses(versions: Sequence[Version], loss: Loss) -> list[float]:
  """Return the losses, before their first steps, of feedbacks that made these versions.

  Those with other parameters are left out: a KL is many times the Jensen-Shannon divergence of the same two.
  """
  told = finite(loss_said(loss))
  kept = [version.details for version in versions if version.reason == 'feedback']
  losses = [each['steps'][0]['loss'] for each in kept if each['loss'] == told]
  return [float(each) for each in losses if each is not None]
