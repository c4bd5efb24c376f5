"""A tiny agent, made from scratch, that proposes tool calls, has favourites, and understands corrections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import os
import pathlib
import random
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import Config, SelfDistillationConfig
from sdpo_jax.environments.workspace.tools import DENIED
from sdpo_jax.models import exporting, huggingface
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.quickstart import session_lessons as lessons
from sdpo_jax.quickstart import session_tokenizer, supervised, tool_tasks
from sdpo_jax.quickstart import small_tokenizer as chatml
from sdpo_jax.quickstart.copying import with_copying
from sdpo_jax.quickstart.session_lessons import SessionLesson
from sdpo_jax.quickstart.supervised import TinyRecipe
from sdpo_jax.types import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionRecipe(TinyRecipe):
  """Hyperparameters of the tiny agent and of its training."""

  steps: int = 1400
  warmup_steps: int = 30
  rows: int = 4  # Rows per step; a row holds several conversations.
  length: int = 384  # Tokens per row.
  tasks: int = 7  # Maximum number of tasks per conversation.
  short: float = 0.5  # Fraction of steps with only one-task conversations without a system turn; then they are half.
  reprompted: float = 0.6  # Fraction of conversations that end with a re-prompt.
  hidden_size: int = 128
  intermediate_size: int = 256
  layers: int = 3
  head_dim: int = 32


def make_session_base(
  config: Config,
  output: str | os.PathLike,
  recipe: SessionRecipe = SessionRecipe(),
  announce: Callable[[str], None] = lambda text: None,
) -> None:
  """Write the model to the directory `output`, which must be empty or absent.

  Args:
    config: settings with the re-prompting templates that it learns to read.
    output: Hugging Face model directory to make.
    recipe: hyperparameters; by default the committed model's.
    announce: called with lines of progress.

  Raises:
    UserError: `output` is not empty.
  """
  exporting.check_target(output)
  distillation = config.actor.self_distillation
  with tempfile.TemporaryDirectory() as scratch:
    source = pathlib.Path(scratch)
    vocabulary = session_tokenizer.make(_corpus(distillation), sentences(distillation))
    chatml.save(vocabulary, source, session_tokenizer.CHAT_TEMPLATE)
    values = supervised.qwen3_json(recipe, vocabulary.get_vocab_size(), vocabulary.token_to_id(chatml.END))
    supervised.write_description(source, values)
    policy, params = train(recipe, values, tokenizers.load(source), distillation, announce)
    huggingface.save(output, policy, params, source=source, dtype='float32')


def train(
  recipe: SessionRecipe,
  values: dict[str, Any],
  tokenizer: Any,
  distillation: SelfDistillationConfig,
  announce: Callable[[str], None] = lambda text: None,
) -> tuple[DecoderPolicy, Tree]:
  """Train a policy on random conversations; return it with its parameters. The loss is per token of the assistant."""
  policy, params = huggingface.init(values, jax.random.key(recipe.seed))
  params = jax.tree.map(jnp.asarray, with_copying(params, policy.config, _alike(tokenizer), recipe.seed))
  rng = random.Random(recipe.seed)
  short, mixed = (_written(rng, recipe, share, tokenizer, distillation) for share in (1.0, 0.5))

  def rows_of(number: int) -> Rows:
    return pack(short if number < recipe.short * recipe.steps else mixed, recipe.rows, recipe.length)

  def measure(params: Tree, rows: Rows) -> tuple[jax.Array]:
    return (cross_entropy(policy, params, rows),)

  def say(loss: jax.Array) -> str:
    return f'cross-entropy {float(loss):.3f} nats a token'

  return policy, supervised.train(params, measure, rows_of, recipe, say, announce)


# Token ids of a conversation, and the weight of each prediction.
Written = tuple[list[int], list[float]]
# tokens, positions, segment_ids (0 = padding) [B, S] int32; weights [B, S] float32 of the next-token predictions.
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def write(items: Sequence[SessionLesson], tokenizer: Any) -> list[Written]:
  """Return the tokens of conversations, each with weight 1 if it is learned and 0 otherwise."""
  pieces = [segments(item) for item in items]
  ids = iter(tokenizer([text for own in pieces for text, _ in own], add_special_tokens=False)['input_ids'])
  rather = iter(
    tokenizer([item.rather for item in items if item.rather] or [''], add_special_tokens=False)['input_ids']
  )
  written = []
  for item, parts in zip(items, pieces, strict=True):
    tokens: list[int] = []
    weights: list[float] = []
    for _, learned in parts:
      own = next(ids)
      tokens += own
      weights += [float(learned)] * len(own)
    if item.rather is not None:  # Where the call departs from the wanted one.
      wanted, start = next(rather), len(tokens) - len(own)
      departure = next(at for at, (a, b) in enumerate(zip(wanted, own, strict=False)) if a != b)
      weights[start + departure] = 0.0
    written.append((tokens, weights))
  return written


def segments(item: SessionLesson) -> list[tuple[str, bool]]:
  """Split a conversation into pieces that are tokenised separately, and tell whether each is learned.

  The last piece is the last answer and its end of turn, without the line break after it.
  """
  messages, pieces = list(item.messages), []
  told = messages[0]['content'] if messages[0]['role'] == 'system' else ''
  names = ' '.join(schema['function']['name'] for schema in lessons.SCHEMAS) if item.tools else ''
  if told or names:
    listed = f'{"" if not told else chr(10)}Tools: {names}' if names else ''
    pieces.append((f'{chatml.START}system\n{told}{listed}{chatml.END}\n', False))
  for number, message in enumerate(messages):
    if message['role'] == 'system':
      continue
    header, content = f'{chatml.START}{message["role"]}\n', f'{message["content"]}{chatml.END}'
    if message['role'] == 'assistant':  # Its header belongs to the prompt.
      pieces += [(header, False), (content, number in item.learned)]
    else:
      pieces.append((header + content, False))
    if number < len(messages) - 1:
      pieces.append(('\n', False))
  return pieces


def pack(conversations: Iterator[Written], rows: int, length: int) -> Rows:
  """Pack the next conversations into rows [rows, length], leaving out those longer than a row."""
  tokens = np.zeros((rows, length), np.int32)
  positions, segment_ids, weights = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros(tokens.shape, np.float32)
  row, start, segment = 0, 0, 1
  while row < rows:
    ids, learned = next(conversations)
    if len(ids) > length:
      continue
    if start + len(ids) > length:
      row, start, segment = row + 1, 0, 1
      if row == rows:
        break
    span = slice(start, start + len(ids))
    tokens[row, span], positions[row, span], segment_ids[row, span] = ids, np.arange(len(ids)), segment
    weights[row, start : start + len(ids) - 1] = learned[1:]
    start, segment = start + len(ids), segment + 1
  return tokens, positions, segment_ids, weights


def cross_entropy(policy: DecoderPolicy, params: Tree, rows: Rows) -> jax.Array:
  """Return the mean cross-entropy over the learned tokens."""
  tokens, positions, segment_ids, weights = rows
  hidden, unembedding, _ = policy.apply({}, params, tokens, positions, segment_ids)
  logits = jnp.einsum('bsd,vd->bsv', hidden[:, :-1], unembedding).astype(jnp.float32)
  log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
  return -(log_probs * weights[:, :-1]).sum() / weights.sum()


def _written(
  rng: random.Random, recipe: SessionRecipe, short: float, tokenizer: Any, distillation: SelfDistillationConfig
) -> Iterator[Written]:
  """Yield tokenised conversations; a fraction `short` has one task and no system turn."""
  while True:
    items = []
    for _ in range(64):
      most = 0 if rng.random() < short else recipe.tasks
      again = rng.random() < recipe.reprompted
      items.append(lessons.reprompted(rng, distillation, most) if again else lessons.proposals(rng, most))
    yield from write(items, tokenizer)


def _alike(tokenizer: Any) -> list[list[int]]:
  """Return groups of token ids with similar uses: names of each kind, programs and tools, and digits."""
  ways = [way for kind in tool_tasks.KINDS.values() for way in kind.ways]
  used = sorted({way.program or way.tool for way in ways})
  names = (tool_tasks.SYMBOLS, tool_tasks.FILES, tool_tasks.FOLDERS, tool_tasks.PACKAGES, tool_tasks.BRANCHES, used)
  encoded = [[tokenizer.encode(name, add_special_tokens=False) for name in group] for group in (*names, '0123456789')]
  return [[ids[0] for ids in group if len(ids) == 1] for group in encoded]


def sentences(config: SelfDistillationConfig) -> list[str]:
  """Return the fixed text of the re-prompting templates, and of results of denied calls."""
  templates = (config.reprompt_template, config.solution_template, config.feedback_template, config.attempt_template)
  templates += (DENIED,)
  parts = [part.strip() for template in templates for part in re.split(r'\{\w*\}', template)]
  return [part for part in parts if part]


def _corpus(distillation: SelfDistillationConfig) -> Iterator[str]:
  """Yield text with all pieces that occur in lessons."""
  rng = random.Random(0)
  for number in range(6000):
    item = lessons.reprompted(rng, distillation, 4) if number % 2 else lessons.proposals(rng, 4)
    for text, _ in segments(item):
      # Split at, and without, the markers of turns and calls.
      for tag in (chatml.START, chatml.END, session_tokenizer.OPEN, session_tokenizer.CLOSE):
        text = text.replace(tag, '\0')
      yield from text.split('\0')
