"""Settings with short rows, and a batch of random samples for them."""

import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.learning import batching
from sdpo_jax.types import Rollouts

# What a session without chunks and distractors says of the rows of questions.
NO_MEMBERS = dict.fromkeys(('members', 'mixtures', 'writers_members'), lambda *_: None)


def make_config(**actor) -> Config:
  config = Config()
  config.model.path = 'model'
  config.data.train_files = config.data.val_files = ('rows.jsonl',)
  config.data.train_batch_size = 4
  config.data.max_prompt_length = 8
  config.data.max_response_length = 6
  config.rollout.n = 2
  config.actor.ppo_mini_batch_size = 4
  config.actor.ppo_micro_batch_size = 3
  config.actor.self_distillation.max_reprompt_len = 16
  for name, value in actor.items():
    setattr(config.actor, name, value)
  return config.validate()


def per_token(values) -> np.ndarray:
  """[N] values of samples as [N, T]."""
  return np.repeat(np.asarray(values, np.float32)[:, None], 6, axis=1)


def make_samples(config: Config, seed: int = 0) -> batching.GenerationBatch:
  rng = np.random.default_rng(seed)
  rows, width = config.data.train_batch_size * config.rollout.n, 6
  lengths = rng.integers(1, width + 1, rows)
  mask = np.arange(width) < lengths[:, None]
  tokens = rng.integers(1, 50, (rows, width)).astype(np.int32) * mask

  def prompt(low, high):
    return [rng.integers(1, 50, rng.integers(low, high)).tolist() for _ in range(rows)]

  rollouts = Rollouts(
    group=np.repeat(np.arange(rows // 2), 2),
    prompt_tokens=np.zeros((rows, 1), np.int32),
    prompt_mask=np.ones((rows, 1), bool),
    completion_tokens=tokens,
    completion_mask=mask,
    sampling_log_probs=-rng.random((rows, width)).astype(np.float32),
    model_log_probs=-rng.random((rows, width)).astype(np.float32),
    entropy=np.zeros((rows, width), np.float32),
    finish_reason=['stop'] * rows,
    text=[''] * rows,
  )
  return batching.GenerationBatch(
    prompts=prompt(2, 9),
    teacher_prompts=prompt(4, 17),
    rollouts=rollouts,
    distill_mask=per_token([1, 0, 1, 1, 0, 1, 0, 0]),
    advantages=per_token(np.zeros(rows)),
  )
