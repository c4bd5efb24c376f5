"""The quickstart's task with answers of log-normal lengths: the model says "um" so many times before the digits.

A config for `launch.train`, and the base model for it: one that answers digits as the quickstart's does, after pauses
whose number is log-normal with sigma 1 and mean `MEAN`, at most `MOST`. The grader passes over them.
"""

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
from sdpo_jax.configs import quickstart
from sdpo_jax.data.prompts import DEFAULT_FORMAT, chat_tokens
from sdpo_jax.environments import digits, registry
from sdpo_jax.models import exporting, huggingface
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.quickstart import make_base, small_tokenizer, supervised
from sdpo_jax.rollout.buckets import padded
from sdpo_jax.types import Example, Outcome

NAME, PAUSE = 'paused_digits', 'um '
MEAN, MOST = 10, 40
ROOM = MOST + 8  # Tokens of an answer with its end.
RECIPE = make_base.DigitRecipe(steps=1500, rows=(('plain', 24), ('demonstration', 8), ('feedback', 24)))
WIDTHS = {'plain': 88, 'demonstration': 208, 'feedback': 152}  # Tokens of a lesson.


@registry.register(NAME)
def grade(examples: Sequence[Example], completions: Sequence[str], *, truncated: Sequence[bool]) -> list[Outcome]:
  """Grade the digits after the pauses, as the quickstart does."""
  return digits.grade(examples, [re.sub(f'^({PAUSE})*', '', text) for text in completions], truncated=truncated)


@registry.register_generator(NAME)
def generate(split: str, seed: int) -> Callable[[int], Example]:
  """Make the questions of the quickstart."""
  question = digits.generate(split, seed)
  return lambda index: dataclasses.replace(question(index), environment=NAME, data_source=NAME)


def get_config() -> Config:
  """Return the quickstart with room for pauses."""
  config = quickstart.get_config()
  config.name = NAME
  config.data.train_files = config.data.val_files = (f'generator:{NAME}',)
  config.data.train_batch_size = config.actor.ppo_mini_batch_size = 16
  config.data.max_response_length, config.data.response_buckets = ROOM, (ROOM,)
  config.data.val_max_samples = 512
  config.data.reprompt_buckets, config.actor.self_distillation.max_reprompt_len = (160,), 160
  config.rollout.max_batch_rows, config.rollout.decode_chunk = 256, 8  # Slots for the samples of two batches.
  config.actor.ppo_micro_batch_size, config.actor.pack_sequences = 8, True
  config.trainer.total_training_steps, config.trainer.test_freq = 300, 100
  return config


def pauses(rng: random.Random) -> str:
  """Return a random number of pauses."""
  return PAUSE * min(MOST, round(rng.lognormvariate(np.log(MEAN) - 0.5, 1.0)))


def make_model(output: str | os.PathLike, announce: Callable[[str], None] = lambda text: None) -> None:
  """Write the base model to the directory `output`, which must be empty or absent."""
  exporting.check_target(output)
  distillation, rng = get_config().actor.self_distillation, random.Random(RECIPE.seed)
  with tempfile.TemporaryDirectory() as scratch:
    source = pathlib.Path(scratch)
    vocabulary = small_tokenizer.train(_corpus(distillation), RECIPE.vocab_size)
    small_tokenizer.save(vocabulary, source)
    end = vocabulary.token_to_id(small_tokenizer.END)
    values = supervised.qwen3_json(RECIPE, vocabulary.get_vocab_size(), end)
    supervised.write_description(source, values)
    policy, params = huggingface.init(values, jax.random.key(RECIPE.seed))
    tokenizer = tokenizers.load(source)

    def measure(params: Any, batches: Any) -> tuple[jax.Array, jax.Array]:
      losses = jnp.stack([_cross_entropy(policy, params, *rows) for rows in batches])
      return losses.sum(), losses

    def batches_of(number: int) -> Any:
      del number
      return [rows(rng, kind, count, tokenizer, distillation) for kind, count in RECIPE.rows]

    def say(_: jax.Array, losses: jax.Array) -> str:
      return f'cross-entropy {", ".join(f"{float(value):.3f}" for value in losses)} nats a token'

    params = supervised.train(params, measure, batches_of, RECIPE, say, announce)
    huggingface.save(output, policy, params, source=source, dtype='float32')


def rows(
  rng: random.Random, kind: make_base.Kind, count: int, tokenizer: Any, distillation: SelfDistillationConfig
) -> tuple[np.ndarray, ...]:
  """Return lessons as arrays: tokens and their mask [B, S], and targets [B, S], 0 where there is none."""
  prompts, inputs, targets = [], [], []
  for _ in range(count):
    lesson, before = make_base.lesson(rng, kind, RECIPE, distillation), pauses(rng)
    shown = pauses(rng) + lesson.answer
    messages = [
      {**turn, 'content': turn['content'].replace(lesson.answer, shown) if kind == 'demonstration' else turn['content']}
      for turn in lesson.messages
    ]
    prompts += chat_tokens(tokenizer, [messages], DEFAULT_FORMAT)
    inputs.append(tokenizer(before + lesson.prefix, add_special_tokens=False)['input_ids'])
    targets.append(tokenizer(before + lesson.answer, add_special_tokens=False)['input_ids'])
  whole = [[*prompt, *own] for prompt, own in zip(prompts, inputs, strict=True)]
  wanted = [
    [*[0] * (len(prompt) - 1), *own, tokenizer.eos_token_id] for prompt, own in zip(prompts, targets, strict=True)
  ]
  return *padded(whole, WIDTHS[kind]), padded(wanted, WIDTHS[kind])[0]


def _cross_entropy(policy: Any, params: Any, tokens: jax.Array, mask: jax.Array, targets: jax.Array) -> jax.Array:
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  hidden, unembedding, _ = policy.apply({}, params, tokens, positions, mask.astype(jnp.int32))
  log_probs = jax.nn.log_softmax(jnp.einsum('bsd,vd->bsv', hidden, unembedding).astype(jnp.float32))
  found = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
  return -jnp.sum(jnp.where(targets > 0, found, 0.0)) / jnp.sum(targets > 0)


def _corpus(distillation: SelfDistillationConfig) -> Iterator[str]:
  """Yield texts with all words of the task for the tokenizer."""
  yield from [PAUSE * 20] * 100
  yield from make_base.corpus(RECIPE, distillation)
