"""Random policies with a few layers, of which any part may be frozen."""

import dataclasses

import jax

from sdpo_jax.config import ModelConfig
from sdpo_jax.distributed.mesh import parameter_sharding
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models import huggingface, parameters

CONFIG = dict(
  model_type='qwen3',
  vocab_size=61,
  hidden_size=32,
  intermediate_size=48,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=16,
  initializer_range=0.3,
)
DEPTHS = {'shallow': 2, 'deep': kv_cache.SHALLOW + 1}


def make(layers, frozen, mesh=None, dtype='float32'):
  """Return (policy, base, trainable) of a random model with some parameters frozen; `frozen` () is full fine-tuning."""
  config = CONFIG | {'num_hidden_layers': layers}
  policy, params = huggingface.init(config, jax.random.key(0), ModelConfig(dtype=dtype, remat='full'))
  policy = dataclasses.replace(policy.on(mesh), frozen=frozen)
  table = policy.parameter_table()

  def place(parameter, leaf):
    return leaf if mesh is None else jax.device_put(leaf, parameter_sharding(mesh, parameter.axes, parameter.shape))

  parts = parameters.frozen(table), parameters.trainable(table)
  return policy, *(parameters.map_tree(place, part, params) for part in parts)


class NoText:
  """A tokenizer for samplers whose texts are not used."""

  def decode(self, token_ids, **_):
    """Return no text."""
    return ''
