"""An engine of a random model and random adapters, and lessons for it."""

import dataclasses

import jax
import numpy as np

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.learning.losses import Sdpo
from sdpo_jax.learning.requests import AdamW, Lesson, UpdateOptions
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.serving.engine import Engine, EngineSettings, Feedback
from sdpo_jax.serving.records import FROZEN, KEYS, VALUES, WINDOWED, optimizer_name
from tests.letters import CONFIG, TOKENIZER

SETTINGS = EngineSettings(
  prompt_buckets=(8,),
  teacher_buckets=(16,),
  response_buckets=(8,),
  rows=4,
  training_rows=2,
  snapshots=3,
  teachers=3,
  slots=2,
  topk=8,
  decode_chunk=3,
  kept_prefixes=0,
)
ADAPTERS = 5
OPTIMIZER = AdamW(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.1)


def make_model():
  """(policy, base) of a random model with an adapter."""
  config = ModelConfig(dtype='float32', lora=LoraConfig(rank=2, alpha=4.0))
  policy = huggingface.describe(CONFIG, config).on(None)
  return policy, parameters.initialise(parameters.frozen(policy.parameter_table()), jax.random.key(1), 0.3)


def random_factors(policy, seed):
  draw = np.random.default_rng(seed)
  return parameters.map_table(
    lambda row: np.float32(0.3 * draw.standard_normal(row.shape)), parameters.trainable(policy.parameter_table())
  )


def cartridge(slots, seed, **changes):
  """Return the arrays of a random cartridge of the model."""
  draw, sizes = np.random.default_rng(seed), CONFIG | changes
  shape = sizes['num_hidden_layers'], sizes['num_key_value_heads'], slots, sizes['head_dim']
  slots = {name: np.float32(0.5 * draw.standard_normal(shape)) for name in (KEYS, VALUES)}
  return slots | {FROZEN: np.int32(0), WINDOWED: np.int32(0)}


def start(model, folder, adapters=ADAPTERS, **changes):
  policy, base = model
  engine = Engine(policy, base, TOKENIZER, dataclasses.replace(SETTINGS, **changes), folder, stop_token_ids=(30,))
  for index in range(adapters):
    engine.put(f'{index}@0', random_factors(policy, index))
  return engine


def lesson(seed):
  draw = np.random.default_rng(seed)
  prompt, completion, more = (draw.integers(1, 29, size).tolist() for size in (5, 6, 4))
  return Lesson(prompt, completion, [*prompt, *more])


def feedback(version, new, seed=0, **changes):
  return Feedback(version, new, [lesson(seed)], UpdateOptions(Sdpo(topk=8), OPTIMIZER), **changes)


def put(worker, version, arrays):
  """Give the engine of a worker a version that only it has, as one has it that was just learned."""
  for name, each in ((version, arrays), (optimizer_name(version), {})):
    worker._engine.restore(name, each)  # noqa: SLF001 (Requests only make versions by learning.)
    worker._own.add(name)  # noqa: SLF001
