"""Lessons from users' feedback on completions: the prompts of student and teacher, and the advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import statistics
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from sdpo_jax.config import SelfDistillationConfig
from sdpo_jax.data.prompts import ChatFormat
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.learning.requests import Lesson, Taught
from sdpo_jax.rollout.stops import to_text
from sdpo_jax.serving.errors import InvalidRequest
from sdpo_jax.serving.feedback_request import Item
from sdpo_jax.serving.records import AdapterRecord, SampleRecord
from sdpo_jax.serving.request_prompts import check_tokens
from sdpo_jax.teacher import context
from sdpo_jax.teacher.endpoint import Endpoint, EndpointQuery

if TYPE_CHECKING:
  from sdpo_jax.serving.store.store import Store

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
