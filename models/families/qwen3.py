"""Qwen3 dense models: queries and keys are normalised head by head."""

from __future__ import annotations

from typing import Any

from models.architecture import Architecture
from models.families import config_json, sliding
from models.families.config_json import Json
from models.families.family import Family

DEFAULTS: Json = sliding.DEFAULTS | {
  'num_key_value_heads': 32,
  'head_dim': 128,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
}


def fields(values: Json, layers: int, source: str) -> dict[str, Any]:
  """See `Family.fields`."""
  return {
    'ropes': (config_json.rope(values, source),),
    'windows': sliding.read(values, layers, source),
    'query_key_norm': 'head',
    **config_json.attention_biases(values, source),
  }


def entries(architecture: Architecture) -> Json:
  """See `Family.entries`; transformers from 4.51 on reads them."""
  return {
    **config_json.rope_of_all_json(architecture),
    'attention_bias': architecture.qkv_bias,
    **sliding.write(architecture),
  }


FAMILY = Family('qwen3', ('qwen3',), 'Qwen3ForCausalLM', DEFAULTS, fields, entries)
