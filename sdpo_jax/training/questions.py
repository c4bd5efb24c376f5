"""The training and held-out questions that a run's settings name."""

from __future__ import annotations

import dataclasses
import sys

from sdpo_jax.config import Config
from sdpo_jax.data import pipeline, sources
from sdpo_jax.data.conversations import ConversationReader
from sdpo_jax.data.prompts import Tokenizer
from sdpo_jax.environments import registry
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.training.specs import prompt_spec
from sdpo_jax.types import Example


def training_questions(config: Config, tokenizer: Tokenizer) -> pipeline.TrainIterator:
  """Return the endless iterator over a run's batches of questions; errors as in `TrainIterator`."""
  reader = file_reader(config)
  return pipeline.TrainIterator(config.data, prompt_spec(config), config.seed, tokenizer, registry, reader=reader)


def file_reader(config: Config) -> ConversationReader | None:
  """Return the reader of files of conversations if the run trains on their answers; else None.

  Raises:
    UserError: it does, and `data.train_files` names a generator.
  """
  if config.rollout.sampled_by != 'data':
    return None
  if any(map(sources.is_generator, config.data.train_files)):
    raise UserError("data.train_files holds a generator: name files of conversations for rollout.sampled_by='data'.")
  sd, policy = config.actor.self_distillation, huggingface.read_policy(config.model.path, config.model)
  return ConversationReader(policy.vocab_size, config.data.max_response_length, sd.distillation_topk)


def held_out_questions(config: Config, tokenizer: Tokenizer, *, any_length: bool = False) -> list[Example]:
  """Return the questions of an evaluation; errors as in `pipeline.evaluation_examples`.

  Args:
    config: settings.
    tokenizer: tokenizer of the model.
    any_length: whether to include questions whose prompts are longer than the limit.
  """
  spec = prompt_spec(config)
  if any_length:
    spec = dataclasses.replace(spec, limit=sys.maxsize)
  return pipeline.evaluation_examples(config.data, spec, tokenizer, registry)
