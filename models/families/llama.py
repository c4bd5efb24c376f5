"""Llama 2 and 3 models, and others in the same format."""

from __future__ import annotations

from typing import Any

from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.families import config_json
from sdpo_jax.models.families.config_json import Json
from sdpo_jax.models.families.family import Family

DEFAULTS: Json = {'hidden_act': 'silu', 'rms_norm_eps': 1e-6}


def fields(values: Json, layers: int, source: str) -> dict[str, Any]:
  """See `Family.fields`."""
  del layers
  return {
    'ropes': (config_json.rope(values, source),),
    'mlp_bias': config_json.flag(values, 'mlp_bias', source),
    **config_json.attention_biases(values, source),
  }


def entries(architecture: Architecture) -> Json:
  """See `Family.entries`."""
  return {
    **config_json.rope_of_all_json(architecture),
    'attention_bias': architecture.qkv_bias,
    'mlp_bias': architecture.mlp_bias,
  }


FAMILY = Family('llama', ('llama',), 'LlamaForCausalLM', DEFAULTS, fields, entries)
