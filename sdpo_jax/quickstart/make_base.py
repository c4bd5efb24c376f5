"""The quickstart's base model, made from scratch: a tokenizer and a tiny decoder that misreads its instructions.

It is trained with supervision on two kinds of lessons about the digit task. For a plain question it is unsure and
mostly wrong: it confuses the instructions of a pair (`BELIEFS`), so that its greedy answer is wrong. For a re-prompted
question it uses what it reads: it copies a demonstration, and infers right digits from feedback on an attempt like its
own; for digits that the feedback does not mention, it reads the instruction correctly more often than not. Without this
second skill it could not be a self-teacher. No lesson uses a list of digits of the test split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import os
import pathlib
import random
import tempfile
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import Config, ModelConfig, SelfDistillationConfig
from sdpo_jax.data.prompts import DEFAULT_FORMAT, chat_tokens
from sdpo_jax.environments import digits
from sdpo_jax.models import exporting, huggingface, model_files
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.quickstart import small_tokenizer, supervised
from sdpo_jax.quickstart.supervised import TinyRecipe
from sdpo_jax.rollout.buckets import padded
from sdpo_jax.teacher.context import reprompt
from sdpo_jax.types import Example, Messages, Tree

Kind = Literal['plain', 'demonstration', 'feedback']

# Instruction → the instruction that the base mistakes it for.
BELIEFS = {
  instruction: belief
  for pair in (
    ('reverse', 'swap'),
    ('ascending', 'descending'),
    ('left', 'right'),
    ('add_one', 'add_two'),
    ('subtract_one', 'complement'),
  )
  for instruction, belief in (pair, pair[::-1])
}
_ROUND = 8  # Rows are padded to a multiple of this many tokens, to limit the number of compiled programs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitRecipe(TinyRecipe):
  """Hyperparameters of the base; probabilities are per lesson or per digit, as stated."""

  start: str | None = None  # Model directory to continue from; None: a new tokenizer and model.
  steps: int = 2000
  warmup_steps: int = 100
  rows: tuple[tuple[Kind, int], ...] = (('plain', 32), ('demonstration', 8), ('feedback', 32))  # Lessons per step.
  right: float = 0.33  # Probability that a digit of an attempt at a plain question follows the instruction …
  noise: float = 0.06  # … or is drawn at random; otherwise it follows the belief.
  # Instructions that are misread in the plain context; the others get right answers there.
  misread: tuple[str, ...] = tuple(digits.INSTRUCTIONS)
  literal: float = 0.75  # Probability that a re-prompted question means its own instruction; otherwise it means any.
  improved: float = 0.5  # Probability that digits of the attempt in the feedback were corrected, as later in training.
  stumble: float = 0.5  # Probability that the answer to a re-prompted question follows wrong digits of the base's own.
  vocab_size: int = 512
  hidden_size: int = 64
  intermediate_size: int = 128
  layers: int = 3
  head_dim: int = 16


def make_base(
  config: Config,
  output: str | os.PathLike,
  recipe: DigitRecipe = DigitRecipe(),
  announce: Callable[[str], None] = lambda text: None,
) -> None:
  """Write the base model to the directory `output`, which must be empty or absent.

  Args:
    config: settings with the re-prompting templates that the base learns to read.
    output: Hugging Face model directory to make.
    recipe: hyperparameters; by default the committed model's.
    announce: called with lines of progress.

  Raises:
    UserError: `output` is not empty.
  """
  exporting.check_target(output)
  distillation = config.actor.self_distillation
  with tempfile.TemporaryDirectory() as scratch:
    if recipe.start is None:
      source = pathlib.Path(scratch)
      policy, params = _begin(source, recipe, distillation)
    else:
      source = model_files.resolve(recipe.start)
      policy, params = huggingface.load(source, ModelConfig(dtype='float32'))
    params = train(recipe, policy, params, tokenizers.load(source), distillation, announce)
    huggingface.save(output, policy, params, source=source, dtype='float32')


def attempt(rng: random.Random, recipe: DigitRecipe, instruction: str, numbers: list[int]) -> str:
  """Return an answer in the base's style in the plain context: each digit independently right, misled or random."""
  right, misled = digits.answer(instruction, numbers), digits.answer(BELIEFS[instruction], numbers)
  out = ''
  for i in range(len(right)):
    draw = rng.random()
    if draw < recipe.noise:
      out += str(rng.randrange(10))
    else:
      out += right[i] if draw < recipe.noise + recipe.right else misled[i]
  return out


@dataclasses.dataclass(frozen=True)
class DigitLesson:
  """A conversation, the digits that precede each digit of the answer as input, and the answer to learn."""

  messages: Messages
  prefix: str
  answer: str


def lesson(rng: random.Random, kind: Kind, recipe: DigitRecipe, distillation: SelfDistillationConfig) -> DigitLesson:
  """Return a random lesson: a plain question, or one re-prompted with a demonstration or feedback."""
  instruction, numbers = _draw(rng)
  plain = [{'role': 'user', 'content': digits.question(instruction, numbers)}]
  if kind == 'plain':
    misread = instruction in recipe.misread
    answer = attempt(rng, recipe, instruction, numbers) if misread else digits.answer(instruction, numbers)
    return DigitLesson(plain, answer, answer)
  meant = instruction if rng.random() < recipe.literal else rng.choice(list(digits.INSTRUCTIONS))
  answer = digits.answer(meant, numbers)
  prefix = attempt(rng, recipe, instruction, numbers) if rng.random() < recipe.stumble else answer
  if kind == 'demonstration':
    return DigitLesson(reprompt(plain, answer, None, distillation), prefix, answer)
  example = Example('', plain, digits.NAME, answer, digits.NAME)
  while True:
    tried = attempt(rng, recipe, instruction, numbers)
    if rng.random() < recipe.improved:
      share = rng.random()
      tried = ''.join(a if rng.random() < share else t for a, t in zip(answer, tried, strict=True))
    (outcome,) = digits.grade([example], [tried], truncated=[False])
    if outcome.feedback:
      return DigitLesson(reprompt(plain, None, outcome.feedback, distillation), prefix, answer)


def _begin(
  source: pathlib.Path, recipe: DigitRecipe, distillation: SelfDistillationConfig
) -> tuple[DecoderPolicy, Tree]:
  """Write a tokenizer and a model's config to `source`, and return the model with random parameters."""
  vocabulary = small_tokenizer.train(corpus(recipe, distillation), recipe.vocab_size)
  small_tokenizer.save(vocabulary, source)
  values = supervised.qwen3_json(recipe, vocabulary.get_vocab_size(), vocabulary.token_to_id(small_tokenizer.END))
  supervised.write_description(source, values)
  return huggingface.init(values, jax.random.key(recipe.seed))


def train(
  recipe: DigitRecipe,
  policy: DecoderPolicy,
  params: Tree,
  tokenizer: Any,
  distillation: SelfDistillationConfig,
  announce: Callable[[str], None] = lambda text: None,
) -> Tree:
  """Train on `recipe.steps` batches of lessons and return the parameters.

  The loss is the sum over kinds of lessons of the mean cross-entropy of the answers.
  """

  def measure(params: Tree, batches: tuple[Rows, ...]) -> tuple[jax.Array, jax.Array]:
    losses = jnp.stack([_cross_entropy(policy, params, rows) for rows in batches])
    return losses.sum(), losses

  rng = random.Random(recipe.seed)

  def batches_of(number: int) -> tuple[Rows, ...]:
    return tuple(
      collate([lesson(rng, kind, recipe, distillation) for _ in range(count)], tokenizer) for kind, count in recipe.rows
    )

  def say(_: jax.Array, losses: jax.Array) -> str:
    parts = ', '.join(f'{kind} {float(value):.3f}' for (kind, _), value in zip(recipe.rows, losses, strict=True))
    return f'cross-entropy {parts} nats a token'

  return supervised.train(params, measure, batches_of, recipe, say, announce)


# tokens [B, S], positions [B, S], segment_ids [B, S] (0 = padding), indices of the states that predict the answer [B,
# T], answer with its end-of-turn token [B, T]; all int32.
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def collate(lessons: list[DigitLesson], tokenizer: Any) -> Rows:
  """Convert lessons to arrays: each row is the chat-templated prompt and the prefix, right-padded."""
  prompts = chat_tokens(tokenizer, [item.messages for item in lessons], DEFAULT_FORMAT)
  prefixes = tokenizer([item.prefix for item in lessons], add_special_tokens=False)['input_ids']
  answers = tokenizer([item.answer for item in lessons], add_special_tokens=False)['input_ids']
  answers = np.asarray([[*ids, tokenizer.eos_token_id] for ids in answers], np.int32)
  rows = [[*prompt, *prefix] for prompt, prefix in zip(prompts, prefixes, strict=True)]
  tokens, mask = padded(rows, -(-max(map(len, rows)) // _ROUND) * _ROUND)
  positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
  starts = np.asarray([len(prompt) - 1 for prompt in prompts], np.int32)
  index = starts[:, None] + np.arange(answers.shape[1], dtype=np.int32)[None, :]
  return tokens, positions, mask.astype(np.int32), index, answers


def _cross_entropy(policy: DecoderPolicy, params: Tree, rows: Rows) -> jax.Array:
  tokens, positions, segment_ids, index, answers = rows
  hidden, unembedding, _ = policy.apply({}, params, tokens, positions, segment_ids)
  states = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
  log_probs = jax.nn.log_softmax(jnp.einsum('btd,vd->btv', states, unembedding).astype(jnp.float32))
  return -jnp.take_along_axis(log_probs, answers[:, :, None], axis=2).mean()


def _draw(rng: random.Random) -> tuple[str, list[int]]:
  instruction = rng.choice(list(digits.INSTRUCTIONS))
  while True:
    numbers = [rng.randrange(10) for _ in range(digits.LENGTH)]
    if digits.split_of(numbers) == 'train':
      return instruction, numbers


def corpus(recipe: DigitRecipe, distillation: SelfDistillationConfig) -> Iterator[str]:
  """Yield conversations as text with all words for the tokenizer, including a system turn and the grader's."""
  rng = random.Random(recipe.seed)
  yield from ['The answer must be 5 digits and nothing else. The answer was cut off before its end: the answer'] * 100
  for i in range(3000):
    item = lesson(rng, ('plain', 'demonstration', 'feedback')[i % 3], recipe, distillation)
    turns = [{'role': 'system', 'content': 'You are a helpful assistant.'}, *item.messages]
    turns.append({'role': 'assistant', 'content': item.answer})
    for turn in turns:  # Without special tokens, which never merge.
      yield f'{turn["role"]}\n'
      yield turn['content']
