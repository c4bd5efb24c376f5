"""Shared code of the tiny base models: config.json, and a supervised training loop."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import optax

from sdpo_jax.types import Tree

ADAMW = functools.partial(optax.adamw, b2=0.98, weight_decay=0.01)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyRecipe:
  """Training hyperparameters and sizes of a tiny model."""

  steps: int
  warmup_steps: int
  learning_rate: float = 3e-3  # Peak rate, between a linear warm-up and a cosine decay to 2 % of it.
  seed: int = 0
  hidden_size: int
  intermediate_size: int
  layers: int
  heads: int = 4
  kv_heads: int = 2
  head_dim: int


def config_json(
  recipe: TinyRecipe, model_type: str, vocab_size: int, eos_token_id: int, *, rope_theta: float, **own: Any
) -> dict[str, Any]:
  """Return the config.json of a float32 Qwen model with padding token 0; `own` adds fields of its family."""
  return {
    'architectures': [f'{model_type.title()}ForCausalLM'],
    'model_type': model_type,
    'vocab_size': vocab_size,
    'hidden_size': recipe.hidden_size,
    'intermediate_size': recipe.intermediate_size,
    'num_hidden_layers': recipe.layers,
    'num_attention_heads': recipe.heads,
    'num_key_value_heads': recipe.kv_heads,
    'head_dim': recipe.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': 1024,
    'rope_theta': rope_theta,
    'rms_norm_eps': 1e-6,
    **own,
    'use_cache': True,
    'bos_token_id': None,
    'eos_token_id': eos_token_id,
    'pad_token_id': 0,
    'dtype': 'float32',
  }


def qwen3_json(recipe: TinyRecipe, vocab_size: int, eos_token_id: int) -> dict[str, Any]:
  """Return the config.json of a Qwen3 model with tied embeddings."""
  return config_json(
    recipe,
    'qwen3',
    vocab_size,
    eos_token_id,
    rope_theta=10000.0,
    attention_bias=False,
    attention_dropout=0.0,
    tie_word_embeddings=True,
    initializer_range=0.05,  # A narrow model learns several times faster with 0.05 than with the usual 0.02.
  )


def write_description(directory: pathlib.Path, values: dict[str, Any]) -> None:
  """Write config.json with these values, and a matching generation_config.json."""
  generation = {'eos_token_id': values['eos_token_id'], 'pad_token_id': values['pad_token_id'], 'do_sample': True}
  for name, content in (('config.json', values), ('generation_config.json', generation)):
    (directory / name).write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def train(
  params: Tree,
  measure: Callable[[Tree, Any], tuple[jax.Array, ...]],
  batch_of: Callable[[int], Any],
  recipe: TinyRecipe,
  say: Callable[..., str],
  announce: Callable[[str], None],
  *,
  every: int = 100,
  method: Callable[[optax.Schedule], optax.GradientTransformation] = ADAMW,
) -> Tree:
  """Train for `recipe.steps` steps, with gradients clipped to norm 1, and return the parameters.

  Args:
    params: initial parameters.
    measure: returns, for parameters and a batch, the loss and then further metrics; compiled.
    batch_of: returns the arrays of a step by its index from 0, called in order.
    recipe: number and size of the steps.
    say: formats the metrics as a sentence.
    announce: called with the step and that sentence.
    every: steps between announcements; the last step is always announced.
    method: makes the optimizer from a learning-rate schedule.
  """
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, recipe.learning_rate, min(recipe.warmup_steps, recipe.steps), recipe.steps + 1, 0.02 * recipe.learning_rate
  )
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), method(schedule))

  def loss(params: Tree, batch: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    found = measure(params, batch)
    return found[0], found

  @jax.jit
  def step(params, state, batch):
    grads, found = jax.grad(loss, has_aux=True)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, found

  state = optimizer.init(params)
  for number in range(recipe.steps):
    params, state, found = step(params, state, batch_of(number))
    if (number + 1) % every == 0 or number + 1 == recipe.steps:
      announce(f'step {number + 1}/{recipe.steps}: {say(*found)}')
  return params
