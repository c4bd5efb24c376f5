"""A run that trains a cartridge on a document, and what the model alone says behind all of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np

from sdpo_jax.config import CartridgeConfig, Config, MeshConfig, ModelConfig
from sdpo_jax.data.prompts import ChatFormat, chat_tokens
from sdpo_jax.environments.grading import Graders
from sdpo_jax.learning.update import place_state
from sdpo_jax.models import huggingface
from sdpo_jax.training import step
from sdpo_jax.training.documents import read_texts
from sdpo_jax.training.opening import load_tokenizer, make_session
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import Example
from tests import tiny

TEXT = 'The <|im_end|> of a turn is text here. Lorem ipsum dolor sit amet.\n'
QUESTIONS = ('What?', 'And who was it, then?')


def make_config(folder: pathlib.Path) -> Config:
  """Write a document, its questions and a model below `folder`, and return the settings of a run on them."""
  (folder / 'document.txt').write_text(TEXT)
  (folder / 'rows.jsonl').write_text('{"prompt": "What?"}\n{"prompt": "And who was it, then?"}\n')
  config = Config(name='cartridge')
  config.model.path = str(tiny.make_model(folder / 'model', initializer_range=0.3))
  config.model.dtype, config.model.remat = 'float32', 'none'
  config.model.cartridge = CartridgeConfig(tokens=16, document=str(folder / 'document.txt'))
  config.data.train_files, config.data.environment = (str(folder / 'rows.jsonl'),), 'none'
  config.data.train_batch_size = 2
  config.data.max_prompt_length, config.data.max_response_length = 64, 4
  config.data.prompt_buckets, config.data.response_buckets = (64,), (4,)
  config.rollout.n = 4
  config.actor.ppo_mini_batch_size, config.actor.ppo_micro_batch_size = 2, 8
  sd = config.actor.self_distillation
  sd.teacher_context, sd.teacher_regularization = 'prompt', 'base'
  sd.alpha, sd.distillation_topk = 0.0, None
  config.algorithm.rollout_correction.rollout_is = None
  config.optimizer.lr, config.optimizer.lr_warmup_steps = 0.05, 0
  config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.tensorboard = 2, 0, False
  config.mesh = MeshConfig(fsdp=4, tensor=2)
  return config.validate()


def changed(config: Config, mesh=None, **cartridge) -> Config:
  model = dataclasses.replace(config.model, cartridge=dataclasses.replace(config.model.cartridge, **cartridge))
  return dataclasses.replace(config, model=model, mesh=mesh or config.mesh)


def opened(config: Config, workdir):
  tokenizer = load_tokenizer(config)
  session, slots = make_session(config, workdir, tokenizer, texts=read_texts(config, tokenizer, teaches=True))
  return session, place_state(update_spec(config), slots, session.mesh, session.policy.parameter_table())


def generation_batch(session, state):
  """(graded rollouts, batch) of a step."""
  examples = [
    Example(str(i), [{'role': 'user', 'content': text}], 'none', None, 's') for i, text in enumerate(QUESTIONS)
  ]
  with Graders(session.config.environments) as graders:
    graded = step.rollout_and_grade(session, graders, state, examples, 1, step.Timer())
  context = step.build_teacher_prompts(session, graded, step.sampling_seed(state), 1)
  return graded, step.build_batch(session, state, graded, context, {})


def texts_of(config: Config) -> tuple[list[int], list[list[int]]]:
  """(tokens of the document, tokens of the questions behind it), from what the template writes of both together."""
  tokenizer = load_tokenizer(config)
  chat = ChatFormat()
  system = {'role': 'system', 'content': TEXT}
  whole = chat_tokens(tokenizer, [[system, {'role': 'user', 'content': text}] for text in QUESTIONS], chat)
  alone = chat_tokens(tokenizer, [[{'role': 'user', 'content': text}] for text in QUESTIONS], chat)
  document = whole[0][: len(whole[0]) - len(alone[0])]
  assert all(both == [*document, *behind] for both, behind in zip(whole, alone, strict=True))
  return document, alone


@functools.cache
def model_alone(path: str):
  """(policy, parameters, its compiled forward pass) of the model without slots."""
  policy, params = huggingface.load(path, ModelConfig(dtype='float32'))
  return policy, params, jax.jit(policy.apply)


def log_probs(config: Config, rows: list[list[int]], count: list[int]) -> list[np.ndarray]:
  """Log-probs float64 [tokens, V] of the last `count` tokens of rows, by the model alone."""
  _, params, apply = model_alone(config.model.path)
  width = 160
  segments = (np.arange(width) < np.array([[len(row)] for row in rows])).astype(np.int32)
  tokens = np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int32)
  hidden, unembedding, _ = apply({}, params, tokens, np.arange(width, dtype=np.int32) * segments, segments)
  scores = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64).T
  scores -= np.logaddexp.reduce(scores, axis=-1, keepdims=True)
  return [own[len(row) - last - 1 : len(row) - 1] for own, row, last in zip(scores, rows, count, strict=True)]


def lines(workdir) -> list[dict]:
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
