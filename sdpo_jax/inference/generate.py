"""Text generation by a run or a model: answers to one prompt or to a file of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import logging
import time
from typing import Any, Literal, overload

from sdpo_jax.config import Config, SamplingConfig
from sdpo_jax.config.overrides import with_limits
from sdpo_jax.data.prompts import count_tokens, named_chat_tokens
from sdpo_jax.data.rows import RawRow, conversation, is_message
from sdpo_jax.data.sources import read_rows
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.files import jsonable
from sdpo_jax.inference.runs import RunOrModel, open_source, run_config
from sdpo_jax.rollout.results import Completion
from sdpo_jax.rollout.sampler import SamplingOptions
from sdpo_jax.training.opening import check_turn_end, make_sampler
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import chat_format
from sdpo_jax.types import Messages, Tree

_logger = logging.getLogger('sdpo_jax.sample')
PROGRESS_SECONDS = 5.0
PROMPT_BUCKETS = tuple(2**i for i in range(4, 24))  # Padded lengths of prompts.


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
  """Options of text generation; None means the settings of the run, or the defaults for a model."""

  sampling: SamplingConfig
  max_tokens: int
  seed: int = 0
  max_prompt_length: int | None = None
  max_batch_rows: int | None = None
  dtype: Literal['float32', 'bfloat16'] | None = None  # Compute dtype; None: for a model, float32.
  chat_template: str | None = None  # A file; None: for a model, its tokenizer's template.


@dataclasses.dataclass(frozen=True)
class TextGenerator:
  """Generates text from a run or a model, with fixed sampling options."""

  session: Session
  parameters: Tree
  options: GenerationOptions

  def prompt_tokens(self, messages: Messages, name: str, way_out: str = 'shorten it') -> list[int]:
    """Return the token ids of a conversation, up to where the answer begins.

    Args:
      messages: the conversation.
      name: its name in messages to the user.
      way_out: advice, besides a higher limit, if it is too long.

    Raises:
      UserError: the conversation is too long, or the chat template fails.
    """
    config = self.session.config
    limit = config.data.max_prompt_length
    [tokens] = named_chat_tokens(self.session.tokenizer, [messages], [name], limit, chat_format(config))
    if tokens is None or len(tokens) > limit:
      raise UserError(
        f'{name} has {count_tokens(tokens, limit)} with the chat template, the limit is {limit}: {way_out}, or start '
        'with a larger --max_prompt_length.'
      )
    return tokens

  def sampling_options(self, step: int = 0) -> SamplingOptions:
    """Return these options as arguments of `Sampler.sample` and `Sampler.stream`; each `step` has its own noise."""
    options = self.options
    return SamplingOptions(
      n=options.sampling.n, seed=options.seed, step=step, max_tokens=options.max_tokens, **options.sampling.method()
    )

  @overload
  def generate(self, prompt: str | Messages) -> list[str]: ...
  @overload
  def generate(self, prompt: Sequence[str]) -> list[list[str]]: ...
  def generate(self, prompt: str | Messages | Sequence[str]) -> list[str] | list[list[str]]:
    """Return the n completions of a prompt (a user's message or a conversation), or of each of several messages.

    Raises:
      UserError: a prompt is too long, or of another type.
    """
    several = isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, str) for one in prompt)
    names = [f'Prompt {number}' for number in range(1, len(prompt) + 1)] if several else ['The prompt']
    conversations = map(as_messages, prompt if several else [prompt])
    prompts = [self.prompt_tokens(messages, name) for messages, name in zip(conversations, names, strict=True)]
    options = self.sampling_options()
    texts = self.session.sampler.sample(self.session.base, self.parameters, prompts, **options).text
    n = options['n']
    return [texts[at : at + n] for at in range(0, len(texts), n)] if several else texts


def as_messages(prompt: str | Messages) -> Messages:
  """Return a prompt, which may be a user's message or a conversation, as a conversation.

  Raises:
    UserError: it is neither.
  """
  if isinstance(prompt, str):
    return [{'role': 'user', 'content': prompt}]
  if not isinstance(prompt, list | tuple) or not prompt or not all(map(is_message, prompt)):
    raise UserError(
      f'The prompt {short_repr(prompt)} must be a text or a list of messages, dicts with the texts role and content.'
    )
  return list(prompt)


def open_generator(source: RunOrModel, options: GenerationOptions) -> TextGenerator:
  """Open a run or a Hugging Face model to generate text.

  Raises:
    UserError: as `open_source`.
  """
  config = Config() if source.workdir is None else run_config(source.workdir)
  if source.workdir is None:
    config.model.dtype = 'float32'
  limit = options.max_prompt_length or config.data.max_prompt_length
  rows = options.max_batch_rows or config.rollout.max_batch_rows
  config = with_limits(config, limit, PROMPT_BUCKETS, options.max_tokens, max_batch_rows=rows)
  session, parameters = open_source(source, config, options.dtype, options.chat_template)
  try:
    check_turn_end(session.config, session.tokenizer)
  except UserError as error:  # Answers that run on to the limit are still readable.
    _logger.warning('%s', error)
  # Sized for the request, not for the largest possible one.
  sampler = make_sampler(session.config, session.policy, session.tokenizer, session.mesh)
  return TextGenerator(dataclasses.replace(session, sampler=sampler), parameters, options)


def with_system(messages: Messages, system: str | None) -> Messages:
  """Prepend a system message with this content, unless it is None or the conversation has one."""
  if system is None or any(message['role'] == 'system' for message in messages):
    return messages
  return [{'role': 'system', 'content': system}, *messages]


@dataclasses.dataclass(frozen=True)
class Question:
  """A row of a prompt file and its conversation."""

  row: RawRow
  messages: Messages


def read_questions(source: str, system: str | None) -> list[Question]:
  """Return the rows of --prompts, each `with_system`.

  Raises:
    UserError: the file does not exist, or a row has no prompt; the message names file and line.
  """
  return [Question(row, with_system(conversation(row), system)) for row in read_rows(source, '--prompts')]


def generate_all(
  generator: TextGenerator, questions: Sequence[Question], announce: Callable[[str], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yield (number, record) for each of the n answers to each question, in the order in which they finish.

  Args:
    generator: generates the answers.
    questions: at least one.
    announce: called with the progress every few seconds.

  Returns:
    Numbers are question · n + answer. A record has `row` (line or row number in the file), `id` (the row's `id` or
    `idx`, where it has one), `sample` (of 0 … n − 1), `prompt` (messages), `completion`, `finish_reason` ('stop' or
    'length'), `tokens` and `log_prob` (sum over the tokens, at temperature 1 and without truncation).

  Raises:
    UserError: a row is too long, or the chat template fails; raised before anything is sampled.
  """
  prompts = [generator.prompt_tokens(question.messages, question.row.origin) for question in questions]
  options, session = generator.sampling_options(), generator.session
  n = options['n']
  completions = session.sampler.stream(session.base, generator.parameters, prompts, **options)
  return _counted((_record(questions, n, done) for done in completions), len(prompts) * n, announce)


def _record(questions: Sequence[Question], n: int, done: Completion) -> tuple[int, dict[str, Any]]:
  question = questions[done.sample // n]
  named = [question.row.value[name] for name in ('id', 'idx') if name in question.row.value]
  return done.sample, {
    'row': question.row.number,
    **({'id': jsonable(named[0])} if named else {}),  # In a parquet file it may have any type.
    'sample': done.sample % n,
    'prompt': question.messages,
    'completion': done.text,
    'finish_reason': 'stop' if done.stopped else 'length',
    'tokens': len(done.tokens),
    'log_prob': float(done.model_log_probs.sum()),
  }


def _counted(
  numbered: Iterable[tuple[int, dict[str, Any]]], total: int, announce: Callable[[str], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
  start = said = time.monotonic()
  tokens = 0
  announce(f'Sampling {total} completions …')
  for count, (number, record) in enumerate(numbered, start=1):
    yield number, record
    tokens += record['tokens']
    now = time.monotonic()
    if now - said >= PROGRESS_SECONDS or count == total:
      said = now
      announce(f'{count} of {total} completions, {tokens / (now - start):,.0f} tokens/s')
