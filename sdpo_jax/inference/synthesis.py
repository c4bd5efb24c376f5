"""Prompts about a document, written by the model itself or behind an endpoint, for a run that trains a cartridge.

Each is drawn from a prompt with a random window of the document and a random request (`sdpo_jax.data.self_study`).
Windows and requests depend only on the seed, so a pool can be continued and repeated.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
import math
import os
import re
from typing import Any, Protocol

import jax
import numpy as np

from sdpo_jax.config import CartridgeConfig, Config, LoraConfig
from sdpo_jax.config.fields import did_you_mean, flatten
from sdpo_jax.config.overrides import with_limits
from sdpo_jax.data import self_study
from sdpo_jax.data.prompts import ChatFormat, Tokenizer, bounded_chat_tokens, chat_tokens
from sdpo_jax.data.self_study import Document
from sdpo_jax.distributed.collectives import gathered
from sdpo_jax.environments.thinking import without_thinking
from sdpo_jax.errors import UserError
from sdpo_jax.files import jsonable, read_text
from sdpo_jax.inference.prompt_pools import PoolFile, Round, Row
from sdpo_jax.models import chat_template, huggingface, identity
from sdpo_jax.rollout.sampler import Sampler
from sdpo_jax.tables import counted
from sdpo_jax.training.documents import context_length
from sdpo_jax.training.opening import check_turn_end, load_tokenizer, make_sampler, model_mesh, template_remarks
from sdpo_jax.training.specs import chat_format
from sdpo_jax.types import Messages, Tree

ROUND = 512  # Messages drawn between writes of kept messages.
GIVE_UP = 4  # A pool ends incomplete after this multiple of the requested messages was drawn.
BUCKETS = (64, 128, 256, 512)  # Padded lengths of prompts in tokens; after the last one, its multiples.


@dataclasses.dataclass(frozen=True)
class SynthesisOptions:
  """Options of a pool, named as the flags of its command."""

  count: int  # Number of messages in the pool.
  seed: int = 0
  seed_types: tuple[str, ...] = self_study.DEFAULT_TYPES  # Keys of `self_study.REQUESTS`.
  seed_weights: tuple[float, ...] = ()  # Relative frequencies of the types; empty: equal.
  min_window: int = 512  # Tokens of the document.
  max_window: int = 4096
  windows: int | None = None  # Number of different windows, evenly spaced; None: each is drawn.
  per_window: int = 4  # Messages per window and request, which share the prompt's prefill.
  temperature: float = 0.6
  max_tokens: int = 512  # Per message.

  @property
  def round_size(self) -> int:
    """Return the maximum number of windows in a round."""
    return math.ceil(min(ROUND, self.count) / self.per_window)

  def check(self) -> None:
    """Raise UserError if options contradict each other."""
    if unknown := [kind for kind in self.seed_types if kind not in self_study.REQUESTS]:
      near = did_you_mean(unknown[0], self_study.REQUESTS)
      raise UserError(f'--seed_types: {unknown[0]!r} must be one of {", ".join(self_study.REQUESTS)}{near}')
    if not self.seed_types or len(set(self.seed_types)) < len(self.seed_types):
      raise UserError(f'--seed_types={",".join(self.seed_types)} must name at least one type, and none twice.')
    if self.seed_weights and len(self.seed_weights) != len(self.seed_types):
      raise UserError(
        f'--seed_weights has {len(self.seed_weights)} numbers for {len(self.seed_types)} seed types '
        f'({", ".join(self.seed_types)}): give one for each, or leave it out.'
      )
    if not all(math.isfinite(weight) and weight > 0 for weight in self.seed_weights):
      raise UserError('--seed_weights must be positive numbers: to exclude a type, leave it out of --seed_types.')
    if self.seed_weights and not math.isfinite(sum(self.seed_weights)):
      raise UserError(
        f'--seed_weights={",".join(f"{weight:g}" for weight in self.seed_weights)} have no finite sum: lower them.'
      )
    if not math.isfinite(self.temperature):
      raise UserError(f'--temperature={self.temperature:g} must be a finite number.')
    if self.per_window > ROUND:
      raise UserError(
        f'--per_window={self.per_window} is more than the {ROUND} messages that are drawn at once: lower it.'
      )
    if self.windows is not None and self.min_window != SynthesisOptions.min_window:
      raise UserError(f'--min_window={self.min_window} has no effect with --windows of --max_window tokens: omit it.')
    if self.windows is None and self.min_window > self.max_window:
      raise UserError(f'--min_window={self.min_window} is more than --max_window={self.max_window}: lower it.')


@dataclasses.dataclass(frozen=True)
class Ask:
  """A window of the document and a request about it."""

  seed_type: str
  window: tuple[int, int]  # Its first token in the document, and its end.
  messages: Messages  # The prompt,
  tokens: list[int]  # and its tokens.


@dataclasses.dataclass(frozen=True)
class WrittenMessage:
  """A message that the model has written, before it is checked."""

  text: str
  stopped: bool  # Whether it ended its turn, instead of reaching the limit.
  refused: str = ''  # How an endpoint has refused to write it, in words.


class Writer(Protocol):
  """A model that writes messages in place of the config's own."""

  model: str

  def draw(self, asks: Sequence[Ask], round_number: int) -> list[WrittenMessage]:
    """Return the messages that answer the requests, the same number for each, in order."""


class Asker:
  """Builds the prompts that ask the model for messages about a document."""

  def __init__(
    self, document: Document, tokenizer: Tokenizer, chat: ChatFormat, options: SynthesisOptions, positions: int | None
  ):
    """Compute the token limit of a prompt.

    Args:
      document: the document to ask about.
      tokenizer: the model's tokenizer, with a chat template.
      chat: converts messages to tokens.
      options: options of the pool.
      positions: the model's maximum positions; None: unknown.

    Raises:
      UserError: a window, a request and a message together exceed the model's positions.
    """
    self._document, self._tokenizer, self._chat, self._options = document, tokenizer, chat, options
    self._system = self_study.writes_system(tokenizer, chat)
    requests = self_study.longest_requests(options.seed_types)
    frames = chat_tokens(tokenizer, [self._conversation('', request) for request in requests], chat)
    frame, window = max(map(len, frames)), min(options.max_window, len(document))
    self.limit = frame + window + self_study.SPARE  # Tokens of a prompt.
    if positions is not None and self.limit + options.max_tokens > positions:
      raise UserError(
        f'--max_window={options.max_window} and --max_tokens={options.max_tokens}: a passage of {window} tokens, a '
        f'request about it ({frame + self_study.SPARE}) and the message are more than the {positions} positions '
        '(max_position_embeddings) of the model: lower one of them.'
      )

  def _conversation(self, passage: str, request: str) -> list[dict[str, str]]:
    return self_study.conversation(passage, request, system=self._system)

  def ask(self, round_number: int, number: int) -> Ask:
    """Return the request with this number in a round; it depends on the options and the document alone."""
    options, document = self._options, self._document
    draw = np.random.default_rng([options.seed, round_number, number])
    weights = options.seed_weights or (1.0,) * len(options.seed_types)
    kind, request = self_study.draw_request(draw, options.seed_types, weights)
    if options.windows is None:
      start, end = document.draw_window(draw, options.min_window, options.max_window)
    else:
      start, end = document.spaced_window(int(draw.integers(options.windows)), options.windows, options.max_window)
    while True:
      messages = self._conversation(document.passage((start, end)), request)
      [tokens] = chat_tokens(self._tokenizer, [messages], self._chat)
      excess = len(tokens) - self.limit
      if excess <= 0 or end - start == 1:
        return Ask(kind, (start, end), messages, tokens)
      end = max(end - excess, start + 1)


class Pool:
  """The messages that have been kept so far, and the number of dropped ones by reason."""

  def __init__(self, is_short: Callable[[str], bool], document: str, digest: str):
    """Make an empty pool of messages about a file with a digest; `is_short` tells whether a message fits a prompt."""
    self._is_short, self._document, self._digest = is_short, document, digest
    self._seen: set[str] = set()
    self.rows: list[Row] = []
    self.drawn = 0
    self.dropped: collections.Counter[str] = collections.Counter()

  def extend(self, result: Round) -> None:
    """Add the rows and counts of a round to the pool."""
    self._seen.update(_plain(row['prompt'][0]['content']) for row in result.rows)
    self.rows += result.rows
    self.drawn += result.drawn
    self.dropped.update(result.dropped)

  def kept(self, round_number: int, asks: Sequence[Ask], messages: Sequence[WrittenMessage]) -> Round:
    """Return the round that messages would add to the pool, without adding it.

    Args:
      round_number: index of the round, from 0.
      asks: requests of the round.
      messages: the same number for each request, in order.
    """
    each = len(messages) // len(asks)
    rows, dropped, seen = [], collections.Counter(), set(self._seen)
    for number, message in enumerate(messages):
      text = without_thinking(message.text).strip()
      reason = message.refused or self._reason(text, message.stopped, seen)
      if reason is not None:
        dropped[reason] += 1
        continue
      seen.add(_plain(text))
      ask = asks[number // each]
      rows.append(
        {
          'prompt': [{'role': 'user', 'content': text}],
          'environment': 'none',
          'dataset': ask.seed_type,
          'id': f'{round_number}-{number}',
          'window_start': ask.window[0],
          'window_end': ask.window[1],
          'document': self._document,  # For runs on several.
          'window_digest': self._digest,
        }
      )
    return Round(rows, len(messages), dict(dropped))

  def _reason(self, text: str, stopped: bool, seen: set[str]) -> str | None:
    if not stopped:
      return 'cut off by --max_tokens'
    if not text:
      return 'empty'
    if _plain(text) in seen:
      return 'the same as another'
    return None if self._is_short(text) else 'longer than data.max_prompt_length'


def _plain(text: str) -> str:
  """Normalise a text for the comparison of messages."""
  return re.sub(r'\s+', ' ', text).strip().casefold()


Draw = Callable[[Sequence[Ask], int], list[WrittenMessage]]  # As `Writer.draw`.


def fill(
  pool: Pool,
  first_round: int,
  options: SynthesisOptions,
  ask: Callable[[int, int], Ask],
  draw: Draw,
  keep: Callable[[int, Round], None],
  announce: Callable[[str], None],
) -> list[Row]:
  """Draw messages until a pool has enough, or too few are usable; return at most `options.count` rows.

  Args:
    pool: may hold rounds before `first_round`.
    first_round: index of the next round.
    options: options of the pool.
    ask: like `Asker.ask`.
    draw: writes `options.per_window` messages for each prompt.
    keep: called with each round.
    announce: called with the progress.
  """
  number = first_round
  while len(pool.rows) < options.count and pool.drawn < GIVE_UP * options.count:
    of_use = max(len(pool.rows) / pool.drawn, 1 / GIVE_UP) if pool.drawn else 1.0
    missing = math.ceil((options.count - len(pool.rows)) / of_use)
    asks = [ask(number, at) for at in range(min(options.round_size, math.ceil(missing / options.per_window)))]
    messages = draw(asks, number)
    result = pool.kept(number, asks, messages)
    keep(number, result)
    pool.extend(result)
    number += 1
    announce(f'Round {number}: {min(len(pool.rows), options.count)} of {options.count} messages.')
  return pool.rows[: options.count]


def outcome(pool: Pool, rows: Sequence[Row], options: SynthesisOptions, output: str) -> str:
  """Return a sentence about the result: how many messages were kept, drawn, and left out for each reason."""
  beyond = len(pool.rows) - len(rows)
  dropped = pool.dropped | ({'beyond --count': beyond} if beyond else {})
  reasons = ', '.join(f'{count} {reason}' for reason, count in sorted(dropped.items()))
  left_out = f', of which {sum(dropped.values())} were left out ({reasons})' if dropped else ''
  kinds = collections.Counter(row['dataset'] for row in rows)
  told = ', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))
  said = f'{output}: {counted(len(rows), "prompt")} ({told}); {pool.drawn} messages were drawn{left_out}.'
  if len(rows) == options.count:
    return said
  return (
    f'{said} The pool is smaller than --count={options.count}, because {GIVE_UP} times as many messages were drawn and '
    'too few of them were usable: raise --temperature for more variety, raise --max_tokens if many are cut off, or '
    'lower --count.'
  )


def synthesize(
  config: Config,
  options: SynthesisOptions,
  *,
  document: str,
  output: str,
  max_batch_rows: int | None = None,
  writer: Writer | None = None,
  overwrite: bool = False,
  announce: Callable[[str], None] = lambda text: None,
) -> None:
  """Write a pool of prompts about a document; an interrupted command resumes where it stopped.

  In a run of several processes, all call this and process 0 writes.

  Args:
    config: the model, its mesh and chat template, and the limit of prompts. An adapter or a cartridge is ignored.
    options: options of the pool.
    document: text file, local or gs://….
    output: file to write, JSON lines or parquet, local or gs://….
    max_batch_rows: messages to draw at once; None: as many as fit in the memory that the run itself needs for sampling.
    writer: writes the messages; then only the tokenizer of the config's model is read. None: that model writes.
    overwrite: whether to replace an existing output, or the rounds of an interrupted command with other settings.
    announce: called with sentences about the progress and the result.

  Raises:
    UserError: the options are contradictory, the document or model cannot be read or do not fit together, the output
      exists or cannot be written, or no message is usable.
  """
  options.check()
  as_asked, slots = chat_format(config), config.model.cartridge.used  # As the run will have them.
  config = _plain_model(config)
  main = jax.process_index() == 0
  text = read_text(document, 'name a text file in --document')
  tokenizer = load_tokenizer(config)
  if writer is None:
    check_turn_end(config, tokenizer)
  passages = Document(text, tokenizer)
  if not text.strip() or not len(passages):
    raise UserError(f'{document} is empty: name a file with text in --document.')
  positions = None if writer else context_length(config.model.path)  # A server refuses what is too long for its model.
  asker = Asker(passages, tokenizer, thinking_off(tokenizer, as_asked), options, positions)
  file = PoolFile(output, _settings(config, options, text, asker.limit, tokenizer) | _identity(config, writer))
  left: list[Round] = []
  if main:
    file.check(overwrite)
    left = file.rounds(overwrite)
  left = gathered(left, 'what is left of an interrupted command')[0]
  is_short = functools.partial(_fits, tokenizer, limit=config.data.max_prompt_length, chat=as_asked)
  pool = Pool(is_short, os.path.basename(document), passages.digest)
  for result in left:
    pool.extend(result)
  if left:
    announce(f'Continuing with the {len(pool.rows)} messages in {file.folder}.')

  def keep(number: int, result: Round) -> None:
    if main:
      file.add(number, result)

  for remark in template_remarks(config, tokenizer):
    announce(remark)
  announce(f'{document} has {len(passages)} tokens without a template, and a prompt about it at most {asker.limit}.')
  # Bounded by the memory that the run takes for its cache and, with a cartridge, for the document.
  most = rows_at_once(config, asker.limit + options.max_tokens, len(passages) if slots else 0)
  draw = writer.draw if writer else _drawing(config, tokenizer, options, asker.limit, max_batch_rows or most)
  rows = fill(pool, len(left), options, asker.ask, draw, keep, announce)
  if not rows:
    if main:
      file.discard()
    raise UserError(
      f'None of {pool.drawn} messages is usable '
      f'({", ".join(f"{n} {reason}" for reason, n in sorted(pool.dropped.items()))}): raise --max_tokens or '
      'data.max_prompt_length, or name a model that follows instructions.'
    )
  if main:
    file.finish(rows)
  announce(outcome(pool, rows, options, output))


def _plain_model(config: Config) -> Config:
  """Return the settings with the plain model, stored in compute dtype.

  The cartridge's slot, which is never made, keeps the model frozen: float32 parameters, twice as large, are only needed
  for training.
  """
  slot = CartridgeConfig(tokens=1, num_frozen_tokens=0)
  return dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig(), cartridge=slot))


def thinking_off(tokenizer: Tokenizer, chat: ChatFormat) -> ChatFormat:
  """Return the chat format with thinking turned off, if the template has a switch for it."""
  switch = 'enable_thinking'
  off = {} if chat_template.unread(tokenizer, [switch]) else {switch: False}
  return dataclasses.replace(chat, variables={**chat.variables, **off}, behind_document=False)


def _fits(tokenizer: Tokenizer, text: str, limit: int, chat: ChatFormat) -> bool:
  """Return whether a message makes a prompt of at most `limit` tokens."""
  [tokens] = bounded_chat_tokens(tokenizer, [[{'role': 'user', 'content': text}]], limit, chat)
  return tokens is not None and len(tokens) <= limit


# Settings that determine the draw.
_DECIDING = (
  'data.apply_chat_template_kwargs',
  'data.enable_thinking',
  'data.max_prompt_length',
  'data.split_special_tokens',
  'rollout.cache_dtype',
  'rollout.stop',
  'rollout.stop_token_ids',
)


def _settings(config: Config, options: SynthesisOptions, text: str, limit: int, tokenizer: Tokenizer) -> dict[str, Any]:
  """Return everything but the model that determines the draw, as JSON values."""
  return {
    **{f'--{name}': value for name, value in jsonable(dataclasses.asdict(options)).items()},
    'the document': hashlib.sha256(text.encode()).hexdigest()[:16],
    **{f'{name} of the tokenizer': said for name, said in identity.of_tokenizer(config.model.path, tokenizer).items()},
    **{name: jsonable(value) for name, value in flatten(config).items() if name in _DECIDING},
    'tokens of a prompt': limit,
  }


def _identity(config: Config, writer: Writer | None) -> dict[str, str]:
  """Return what identifies the model that draws, as `_settings` does the rest; an endpoint may move."""
  if writer:
    return {'--endpoint_model': writer.model}
  return {'the model': identity.of_weights(config.model.path)['values'], 'model.dtype': config.model.dtype}


def rows_at_once(config: Config, length: int, document: int) -> int:
  """Return how many messages to draw at once so that their cache fits in the memory that the run itself would use.

  Args:
    config: the run's settings.
    length: tokens of a prompt and its message.
    document: tokens of the document whose keys and values the run holds beside its cache.
  """
  own = config.data.max_prompt_length + config.data.max_response_length
  rows = config.rollout.max_batch_rows
  return max(min((rows * own + document) // length, rows), 1)


def _drawing(config: Config, tokenizer: Tokenizer, options: SynthesisOptions, limit: int, rows: int) -> Draw:
  """Return the function that samples the model's replies to prompts; the model is loaded when the first are drawn."""

  @functools.cache
  def loaded() -> tuple[Sampler, Tree]:
    mesh = model_mesh(config, huggingface.read_policy(config.model.path, config.model), refit=True)
    policy, parameters = huggingface.load(config.model.path, config.model, mesh=mesh)
    buckets = (*BUCKETS, *range(2 * BUCKETS[-1], limit, BUCKETS[-1]))
    sized = with_limits(config, limit, buckets, options.max_tokens, max_batch_rows=rows)
    least = options.round_size * options.per_window
    return make_sampler(sized, policy.base_policy(), tokenizer, mesh, least=least), parameters

  def draw(asks: Sequence[Ask], round_number: int) -> list[WrittenMessage]:
    sampler, parameters = loaded()
    drawn = sampler.sample(
      parameters,
      {},
      [ask.tokens for ask in asks],
      n=options.per_window,
      seed=options.seed,
      step=round_number,
      max_tokens=options.max_tokens,
      temperature=options.temperature,
    )
    return [
      WrittenMessage(text, reason == 'stop') for text, reason in zip(drawn.text, drawn.finish_reason, strict=True)
    ]

  return draw
