"""Lessons from feedback on completions, and the part of the response about each.

A lesson has the prompts of student and teacher and an advantage; the response has scores of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import dataclasses
import statistics
import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable
from sdpo_jax.learning.learner import LessonScores
from sdpo_jax.learning.losses import Sdpo
from sdpo_jax.learning.requests import Lesson, Taught, with_taught
from sdpo_jax.learning.scoring import Scored
from sdpo_jax.models.token_texts import TokenTexts
from sdpo_jax.rollout.stops import to_text
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback_request import NUMBERS, Item
from sdpo_jax.serving.records import AdapterRecord, SampleRecord
from sdpo_jax.serving.request_prompts import check_tokens
from sdpo_jax.teacher import context
from sdpo_jax.teacher.dialects import EndpointScores
from sdpo_jax.teacher.endpoint import EndpointQuery

if TYPE_CHECKING:
  from sdpo_jax.serving.store.store import Store

# The losses of `Item.learned`: against a teacher that is sure of every token, the divergence is the cross-entropy.
_LOSSES = {
  'as wanted': Sdpo(alpha=0.0, topk=1, is_clip=None),
  'as unwanted': Sdpo(alpha=0.0, topk=1, is_clip=None, divergence_weight=0.0, policy_weight=1.0),
}
_DIGITS = 7  # Decimal places of float32 numbers in responses.
_SETTING = 'serve.teacher_buckets'  # Limits the teacher's prompt; named in error messages.


Rows = Sequence[tuple[Sequence[int], Sequence[int]]]  # Prompts with answers.


@dataclasses.dataclass(frozen=True)
class Reprompting:
  """The templates and the tokenizer with which the teacher's prompt is rendered."""

  config: SelfDistillationConfig  # Has the templates; `max_reprompt_len` is the largest teacher bucket.
  tokenizer: Any  # A transformers tokenizer.
  chat: ChatFormat
  lock: Any = dataclasses.field(default_factory=threading.Lock)  # A context manager, held while tokenizing.


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A lesson, with its origin for the response."""

  lesson: Lesson
  sample: SampleRecord | None  # The sample that the item refers to; None: it has its own tokens.
  context: tuple[str, ...]  # The fields of `Item` that the teacher reads besides the prompt.
  truncated: bool  # Whether texts were shortened to fit the teacher's prompt.


@dataclasses.dataclass(frozen=True)
class AnswersMoved:
  """The log-probs of two answers on the student's prompt, before and after learning; None: not measured."""

  rejected: tuple[float | None, float | None] | None = None  # Of the answer that a person has rejected.
  wanted: tuple[float | None, float | None] | None = None  # Of the answer that they want instead.

  @property
  def rise(self) -> float | None:
    """By how much the log-prob of the rejected answer has risen, in nats."""
    return None if self.rejected is None or None in self.rejected else self.rejected[1] - self.rejected[0]


def prepare(
  items: Sequence[Item], adapter: AdapterRecord, store: Store, reprompting: Reprompting, vocab_size: int
) -> list[Prepared]:
  """Make the lessons of a feedback, in the order of its items.

  With the templates of training runs, the teacher reads `feedback` and `environment` as feedback, and `correction` and
  `demonstration` as a correct solution; for an item without any of these it reads the student's prompt. The advantage
  of an item is its reward, minus the mean if several items have one; without a reward it is 0. What is not
  learned `from teacher` has a loss of its own.

  Args:
    items: the items of the feedback.
    adapter: the adapter that learns.
    store: the store, which has the owner's samples.
    reprompting: the templates and the tokenizer.
    vocab_size: the number of tokens in the vocabulary of the model.

  Raises:
    NotFound: a sample does not exist or belongs to another owner.
    Gone: a sample has expired.
    InvalidRequest: a sample is of another adapter, a token id is out of range, or a text consists of thinking only.
    UserError: a prompt leaves no room for the feedback.
  """
  rewards = [item.reward for item in items if item.reward is not None]
  mean = statistics.fmean(rewards) if len(rewards) > 1 else 0.0
  prepared = []
  for number, item in enumerate(items):
    sample = None if item.sample_id is None else store.sample(adapter.owner, item.sample_id)
    if sample is not None and sample.adapter not in (None, adapter.id):
      raise InvalidRequest(
        f'items[{number}]: the sample {sample.id} is of another adapter: to learn from it, send its prompt_tokens and '
        'tokens instead.',
        field=f'items[{number}].sample_id',
      )
    if sample is None:
      for name in ('prompt_tokens', 'tokens'):
        check_tokens(getattr(item, name), vocab_size, f'items[{number}].{name}')
    source = item if sample is None else sample
    shown = _texts(item, number, reprompting.config)
    teacher_prompt, truncated = source.prompt_tokens, False
    if item.teacher_prompt is not None:
      teacher_prompt = item.teacher_prompt
    elif shown:
      with reprompting.lock:
        teacher_prompt, truncated = _reprompted(source, shown, reprompting)
    lesson = Lesson(
      prompt=source.prompt_tokens,
      completion=source.tokens,
      teacher_prompt=teacher_prompt,
      sampling_log_probs=None if source.log_probs is None else np.asarray(source.log_probs, np.float32),
      advantage=0.0 if item.reward is None else item.reward - mean,
    )
    if item.learned != 'from teacher':
      sure = np.zeros(len(source.tokens), np.float32)
      taught = Taught(np.asarray(source.tokens, np.int32)[:, None], sure[:, None], sure)
      advantage = -1.0 if item.learned == 'as unwanted' else 0.0
      lesson = Lesson(source.prompt_tokens, source.tokens, None, None, advantage, taught, _LOSSES[item.learned])
    prepared.append(Prepared(lesson, sample, tuple(shown), truncated))
  return prepared


def _texts(item: Item, number: int, config: SelfDistillationConfig) -> dict[str, str]:
  """Return the texts that the teacher reads, by the fields of the item."""
  shown: dict[str, str] = {}
  for name in ('correction', 'demonstration', 'feedback', 'environment'):
    text = getattr(item, name)
    if text is None or not text.strip():
      continue
    if name in ('correction', 'demonstration'):
      text = context.shown_text(text, config)
      if not text:
        raise InvalidRequest(
          f'items[{number}]: {name} consists of thinking only, which the teacher does not read: add the answer.',
          field=f'items[{number}].{name}',
        )
    shown[name] = text
  return shown


def _reprompted(
  source: Item | SampleRecord, shown: Mapping[str, str], reprompting: Reprompting
) -> tuple[list[int], bool]:
  """Return the teacher's prompt with the texts of `_texts`, and whether these were shortened."""
  solution, feedback = (
    '\n\n'.join(shown[name] for name in names if name in shown) or None
    for names in (('correction', 'demonstration'), ('feedback', 'environment'))
  )
  config, tokenizer, chat = reprompting.config, reprompting.tokenizer, reprompting.chat
  attempt = None
  if config.include_failed_attempt:
    text = source.text if isinstance(source, SampleRecord) else to_text(tokenizer, source.tokens)
    attempt = context.shown_text(text, config)
  if source.messages:
    messages = [dict(message) for message in source.messages]
    return context.reprompted(messages, solution, feedback, config, tokenizer, chat, attempt, setting=_SETTING)
  prompt = source.prompt_tokens
  return context.reprompted_behind(prompt, solution, feedback, config, tokenizer, chat, attempt, setting=_SETTING)


class ScoresTexts(Protocol):
  """An external teacher: an `Endpoint`, or a `Sidecar` around one."""

  def score(self, asked: Sequence[EndpointQuery], stop: Stop) -> list[EndpointScores]:
    """Return the teacher's scores of completions, in order."""


def taught(endpoint: ScoresTexts, lessons: Sequence[Lesson], topk: int, stop: Stop = NEVER) -> list[Lesson]:
  """Return lessons with log-probs of an external teacher, for `teacher='given'`. Any thread may call.

  Neither a device nor the engine is used, so that other requests do not wait for the network.

  Args:
    endpoint: the teacher.
    lessons: the lessons, with the teacher's prompts; those that are `taught` already are returned unchanged.
    topk: how many of the most likely tokens that the teacher returns to use, at most the engine's K.
    stop: tells when to stop waiting.

  Raises:
    ValueError: a lesson has no prompt for the teacher.
    ServiceError, UserError: the teacher returns nothing usable for a lesson.
    StoppedError: `stop` was set.
  """
  asked = [lesson for lesson in lessons if lesson.taught is None]
  if any(lesson.teacher_prompt is None for lesson in asked):
    raise ValueError('Lessons for an external teacher must have a teacher_prompt.')
  queries = [EndpointQuery(lesson.teacher_prompt, lesson.completion) for lesson in asked]
  said = endpoint.score(queries, stop) if queries else []
  scores = [Taught(each.token_ids[:, :topk], each.log_probs[:, :topk], each.target_log_probs) for each in said]
  return with_taught(lessons, scores)


def answers_moved(
  items: Sequence[Item], said: Sequence[LessonScores], score: Callable[[Rows], Sequence[Sequence[Scored]]]
) -> list[AnswersMoved]:
  """Return how the log-probs of what a person has rejected, and of what they want instead, have moved.

  Args:
    items: the items of the feedback.
    said: the scores of their completions.
    score: scores rows of a prompt and an answer, before and after learning; raises UserError if one is too long.
  """
  found, rows = [{} for _ in items], []
  for item, own, scores in zip(items, found, said, strict=True):
    for name in ('rejected', 'wanted'):
      tokens = getattr(item, name)
      if tokens is not None and list(tokens) == list(item.tokens):
        own[name] = tuple(jsonable(float(each.sum())) for each in (scores.log_probs_before, scores.log_probs_after))
      elif tokens is not None:
        rows.append((own, name, (item.prompt_tokens, tokens)))
  with contextlib.suppress(UserError):  # The measurement is not worth the lesson.
    for (own, name, _), *both in zip(rows, *score([row for *_, row in rows]), strict=True) if rows else ():
      own[name] = tuple(jsonable(float(each.log_probs.sum())) for each in both)
  return [AnswersMoved(**own) for own in found]


# The response.


def of_item(
  prepared: Prepared, said: LessonScores, texts: TokenTexts, *, detail: Collection[str], top: int
) -> dict[str, Any]:
  """Return the part of the response about one completion of T tokens.

  Args:
    prepared: the lesson.
    said: its scores by student and teacher.
    texts: the texts of tokens.
    detail: the lists to include, among `feedback_request.DETAILS`.
    top: how many of the teacher's tokens to list at every position.
  """
  tokens = [int(token) for token in prepared.lesson.completion]
  sample = prepared.sample
  per_token: dict[str, list[Any]] = {}
  if 'token_ids' in detail:
    per_token['token_ids'] = tokens
  if 'tokens' in detail:
    per_token['tokens'] = [texts.text_of(token) for token in tokens]
  per_token |= {name: numbers(getattr(said, name)) for name in NUMBERS if name in detail}
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
    'mean_log_prob_before': jsonable(float(np.mean(said.log_probs_before))),
    'mean_log_prob_after': jsonable(float(np.mean(said.log_probs_after))),
    'per_token': per_token,
  }


def rounded(values: np.ndarray) -> np.ndarray:
  """Return an array as float64, rounded to the decimal places of responses."""
  return np.round(np.asarray(values, np.float64), _DIGITS) + 0.0  # No −0.


def numbers(values: np.ndarray) -> list[Any]:
  """Return an array as nested lists of rounded numbers; values that are not finite become None."""
  exact = rounded(values)
  if np.isfinite(exact).all():
    return exact.tolist()
  return np.where(np.isfinite(exact), exact.astype(object), None).tolist()
