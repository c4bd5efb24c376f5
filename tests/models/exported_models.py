"""A small model with a config.json as published, and exports of an adapter for it."""

import pathlib

import jax

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import peft_files

CONFIG = {
  'architectures': ['Qwen3ForCausalLM'],
  'model_type': 'qwen3',
  'vocab_size': 40,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'initializer_range': 0.3,
  'rope_theta': 1e6,
  'tie_word_embeddings': False,
  'a key of the future': {'kept': True},
}


def export_adapter(output, model, mesh=None):
  """Write an adapter whose factors are not 0, and the model with it, beside `output`."""
  config = ModelConfig(dtype='float32', lora=LoraConfig(rank=4, alpha=4.0))
  policy, params = huggingface.load(model, config, mesh)
  _, factors = parameters.split(policy.parameter_table(), params)
  factors = jax.tree.map(lambda leaf: leaf + 0.05, factors)
  table = policy.base_policy().parameter_table()
  base = peft_files.AdapterBase('model', {'weights': {'values': '0'}}, policy.adapter, table)
  peft_files.save(f'{output}_adapter', base, factors, companions=pathlib.Path(model))
  huggingface.save_merged(f'{output}_merged', policy, factors, model)
