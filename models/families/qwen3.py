"""Qwen3 dense models: queries and keys are normalised head by head."""

from __future__ import annotations

from models.architecture import Architecture
from models.families import config_json, sliding
from models.families.family import Family, Json

DEFAULTS: Json = sliding.DEFAULTS | {
  'num_key_value_heads': 32,
  'head_dim': 128,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
}


def read(values: Json, source: str) -> Architecture:
  """See `Family.read`."""
  values = DEFAULTS | values
  fields = config_json.fields(values, source)
  bias = config_json.flag(values, 'attention_bias', source)
  return Architecture(
    'qwen3',
    **fields,
    ropes=(config_json.rope(values, source),),
    windows=sliding.read(values, fields['layers'], source),
    query_key_norm='head',
    qkv_bias=bias,
    output_bias=bias,
  )


def write(architecture: Architecture) -> Json:
  """See `Family.write`; transformers from 4.51 on reads it."""
  return {
    **config_json.written(architecture, 'qwen3', 'Qwen3ForCausalLM'),
    **config_json.rope_of_all_json(architecture),
    'attention_bias': architecture.qkv_bias,
    **sliding.write(architecture),
  }


FAMILY = Family('qwen3', ('qwen3',), read, write)
