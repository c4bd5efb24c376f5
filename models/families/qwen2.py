"""Qwen2 and Qwen2.5 dense models: queries, keys and values have biases, whatever config.json says."""

from __future__ import annotations

from models.architecture import Architecture
from models.families import config_json, sliding
from models.families.family import Family, Json

DEFAULTS: Json = sliding.DEFAULTS | {'num_key_value_heads': 32, 'hidden_act': 'silu', 'rms_norm_eps': 1e-6}


def read(values: Json, source: str) -> Architecture:
  """See `Family.read`."""
  values = DEFAULTS | values
  fields = config_json.fields(values, source)
  return Architecture(
    'qwen2',
    **fields,
    ropes=(config_json.rope(values, source),),
    windows=sliding.read(values, fields['layers'], source),
    qkv_bias=True,
  )


def write(architecture: Architecture) -> Json:
  """See `Family.write`."""
  return {
    **config_json.written(architecture, 'qwen2', 'Qwen2ForCausalLM'),
    **config_json.rope_of_all_json(architecture),
    **sliding.write(architecture),
  }


FAMILY = Family('qwen2', ('qwen2',), read, write)
