"""Lessons from users' feedback on completions, and what the response says of each.

A lesson has the prompts of student and teacher, and the advantage; the response has the scores of every token, as JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import math
import statistics
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.learning.learner import LessonScores
from sdpo_jax.learning.requests import Lesson, Taught
from sdpo_jax.models.token_texts import TokenTexts
from sdpo_jax.rollout.stops import to_text
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback_request import Item
from sdpo_jax.serving.records import AdapterRecord, SampleRecord
from sdpo_jax.serving.request_prompts import check_tokens
from sdpo_jax.teacher import context
from sdpo_jax.teacher.endpoint import Endpoint, EndpointQuery

if TYPE_CHECKING:
  from sdpo_jax.serving.store.store import Store

_DIGITS = 7  # Decimal places of numbers that were float32.
_LISTS = ('log_probs_before', 'log_probs_after', 'teacher_log_probs', 'advantages', 'divergence', 'entropy')
_SETTING = 'serve.teacher_buckets'  # The setting that limits the teacher's prompt, for error messages.


@dataclasses.dataclass(frozen=True)
class Reprompting:
  """The templates and the tokenizer that turn texts into the teacher's prompt."""

  config: SelfDistillationConfig  # Templates; `max_reprompt_len` is the largest bucket of teachers' prompts.
  tokenizer: Any  # A transformers tokenizer.
  chat: ChatFormat
  lock: Any = dataclasses.field(default_factory=threading.Lock)  # A context manager, held while texts become tokens.


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A lesson and its origin."""

  lesson: Lesson
  sample: SampleRecord | None  # None: the item has its own tokens.
  context: tuple[str, ...]  # The fields of `Item` that the teacher reads beyond the prompt.
  truncated: bool  # Whether texts were shortened to fit into the teacher's prompt.


def prepare(
  items: Sequence[Item], adapter: AdapterRecord, store: Store, reprompting: Reprompting, vocab_size: int
) -> list[Prepared]:
  """Return the lessons of a feedback, in order.

  The templates of training runs show `feedback` and `environment` to the teacher as feedback, and `correction` and
  `demonstration` as a correct solution; both may appear together. For an item without any of them the teacher reads the
  student's prompt. The advantage of an item is its reward, minus the mean if several items have one, and 0 without a
  reward.

  Args:
    items: of the feedback.
    adapter: the adapter that learns.
    store: holds the owner's samples.
    reprompting: templates and tokenizer.
    vocab_size: number of tokens in the model's vocabulary.

  Raises:
    NotFound: a sample does not exist or belongs to somebody else.
    Gone: a sample has expired.
    InvalidRequest: a sample is of another adapter, a token id is not in the vocabulary, or a text has nothing to show.
    UserError: a prompt leaves no room for the feedback.
  """
  rewards = [item.reward for item in items if item.reward is not None]
  mean = statistics.fmean(rewards) if len(rewards) > 1 else 0.0
  prepared = []
  for number, item in enumerate(items):
    sample = None if item.sample_id is None else store.sample(adapter.owner, item.sample_id)
    if sample is not None and sample.adapter not in (None, adapter.id):
      raise InvalidRequest(
        f'items[{number}]: the sample {sample.id} is of another adapter; to learn from it, give its prompt_tokens and '
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
    prepared.append(Prepared(lesson, sample, tuple(shown), truncated))
  return prepared


def _texts(item: Item, number: int, config: SelfDistillationConfig) -> dict[str, str]:
  """Return the texts to show to the teacher, by the fields that they come from."""
  shown: dict[str, str] = {}
  for name in ('correction', 'demonstration', 'feedback', 'environment'):
    text = getattr(item, name)
    if text is None or not text.strip():
      continue
    if name in ('correction', 'demonstration'):
      text = context.shown_text(text, config)
      if not text:
        raise InvalidRequest(
          f'items[{number}]: {name} is nothing but thinking, of which the teacher is shown nothing: add the answer.',
          field=f'items[{number}].{name}',
        )
    shown[name] = text
  return shown


def _reprompted(
  source: Item | SampleRecord, shown: Mapping[str, str], reprompting: Reprompting
) -> tuple[list[int], bool]:
  """Return the teacher's prompt with texts from `_texts`, and whether they were shortened."""
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


def taught(endpoint: Endpoint, lessons: Sequence[Lesson], topk: int, stop: Stop = NEVER) -> list[Lesson]:
  """Return lessons with the scores of an external teacher, for `teacher='given'`. Any thread may call.

  This needs neither a device nor an engine, so that other requests do not wait for an answer over the network.

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


# The response.


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
