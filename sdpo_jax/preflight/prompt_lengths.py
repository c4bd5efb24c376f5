"""A run's prompts as the model reads them: their lengths, and a few of them with special tokens marked."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import sys

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.data import pipeline, sources
from sdpo_jax.data.prompts import Tokenizer, name, named_chat_tokens
from sdpo_jax.environments import registry
from sdpo_jax.errors import short_repr
from sdpo_jax.training.questions import file_reader
from sdpo_jax.training.specs import chat_format
from sdpo_jax.types import Example

MEASURED = 2000  # Prompts per setting whose length is measured, spread over its rows.
DRAWN = 200  # Questions drawn from a generator.
BINS, BAR = 8, 40
OPEN, CLOSE = '⟦', '⟧'  # Mark a special token, as opposed to text that looks like one.


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Prompt lengths of one setting in tokens, with the chat template."""

  setting: str  # data.train_files or data.val_files.
  tokens: np.ndarray  # [M], of the measured prompts.
  rows: int  # All rows; for generators, the drawn ones.
  limit: int  # data.max_prompt_length.

  @property
  def over(self) -> float:
    """Return the fraction of the measured prompts that exceed the limit."""
    return float(np.mean(self.tokens > self.limit))


def training_questions(config: Config) -> list[Example]:
  """Return questions of `data.train_files` of any length: all rows of files, and the first `DRAWN` of generators.

  Raises:
    UserError: a source cannot be read, a row is malformed, or it names an unknown grader.
  """
  found: list[Example] = []
  reader, setting, environment = file_reader(config), 'data.train_files', config.data.environment
  for source in config.data.train_files:
    if sources.is_generator(source):
      generate = sources.make_generator(source, 'train', config.seed, registry)
      found += [generate(index) for index in range(DRAWN)]
    else:
      found += reader(source, setting) if reader else pipeline.examples_of_file(source, 'train', environment, setting)
  pipeline.check_environments(found, registry)
  return found


def student_tokens(tokenizer: Tokenizer, examples: Sequence[Example], config: Config) -> list[list[int]]:
  """Return the token ids of the student's prompts, of any length; raises UserError if the chat template fails."""
  conversations, names = [example.messages for example in examples], list(map(name, examples))
  return named_chat_tokens(tokenizer, conversations, names, sys.maxsize, chat_format(config))


def measure(tokenizer: Tokenizer, examples: Sequence[Example], config: Config, setting: str) -> Lengths:
  """Measure prompt lengths; of more than `MEASURED` prompts, an evenly spaced selection."""
  chosen = spread(examples, MEASURED)
  tokens = np.array([len(ids) for ids in student_tokens(tokenizer, chosen, config)])
  return Lengths(setting, tokens, len(examples), config.data.max_prompt_length)


def spread(examples: Sequence[Example], count: int) -> list[Example]:
  """Return at most `count` examples, evenly spaced."""
  places = np.linspace(0, len(examples), min(count, len(examples)), endpoint=False).astype(int)
  return [examples[place] for place in places]


def histogram(lengths: Lengths) -> str:
  """Return the distribution of lengths as lines of text: equal bins up to the limit, and one line beyond it."""
  tokens, limit = lengths.tokens, lengths.limit
  p50, p95 = np.percentile(tokens, [50, 95])
  numbers = f'mean {tokens.mean():,.0f}  p50 {p50:,.0f}  p95 {p95:,.0f}  max {tokens.max():,.0f}'
  measured = f'{len(tokens)} of {lengths.rows} questions' if len(tokens) < lengths.rows else f'{lengths.rows} questions'
  edges = np.unique(np.linspace(0, limit, min(BINS, limit) + 1).astype(int))
  counts = [int(((tokens > low) & (tokens <= high)).sum()) for low, high in zip(edges, edges[1:], strict=False)]
  titles = [f'{low + 1:,}–{high:,}' for low, high in zip(edges, edges[1:], strict=False)]
  counts, titles = [*counts, int((tokens > limit).sum())], [*titles, f'over {limit:,}']
  width, most = max(map(len, titles)), max(counts)
  lines = [
    f'  {title:>{width}}  {"█" * -(-BAR * count // most)} {count}'.rstrip()
    for title, count in zip(titles, counts, strict=True)
  ]
  return '\n'.join([f'{lengths.setting}: {measured}, tokens: {numbers}; limit {limit:,}', *lines])


def visible(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
  """Decode tokens with every special token between ⟦ and ⟧."""
  special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
  parts: list[str] = []
  text: list[int] = []
  before: list[int] = []  # The special token before the text; some tokenizers drop a leading space.

  def decoded() -> str:
    return tokenizer.decode([*before, *text]).removeprefix(tokenizer.decode(before))

  for token in tokens:
    if token not in special:
      text.append(token)
      continue
    parts += [decoded(), f'{OPEN}{tokenizer.convert_ids_to_tokens(token)}{CLOSE}']
    before, text = [token], []
  return ''.join([*parts, decoded()])


def title(example: Example) -> str:
  """Return a title for a question, with its source, graders and ground truth."""
  return f'{name(example)} (environment {example.environment!r}, ground truth {short_repr(example.ground_truth)})'
