"""Qwen2 and Qwen2.5 dense models: queries, keys and values have biases, whatever config.json says."""

from __future__ import annotations

from typing import Any

from models.architecture import Architecture
from models.families import config_json, sliding
from models.families.config_json import Json
from models.families.family import Family

DEFAULTS: Json = sliding.DEFAULTS | {'num_key_value_heads': 32, 'hidden_act': 'silu', 'rms_norm_eps': 1e-6}


def fields(values: Json, layers: int, source: str) -> dict[str, Any]:
  """See `Family.fields`."""
  return {
    'ropes': (config_json.rope(values, source),),
    'windows': sliding.read(values, layers, source),
    'qkv_bias': True,
  }


def entries(architecture: Architecture) -> Json:
  """See `Family.entries`."""
  return config_json.rope_of_all_json(architecture) | sliding.write(architecture)


FAMILY = Family('qwen2', ('qwen2',), 'Qwen2ForCausalLM', DEFAULTS, fields, entries)
