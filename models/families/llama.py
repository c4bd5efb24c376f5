"""Llama 2 and 3 models, and others in the same format."""

from __future__ import annotations

from models.architecture import Architecture
from models.families import config_json
from models.families.family import Family, Json

DEFAULTS: Json = {'hidden_act': 'silu', 'rms_norm_eps': 1e-6}


def read(values: Json, source: str) -> Architecture:
  """See `Family.read`."""
  values = DEFAULTS | values
  bias = config_json.flag(values, 'attention_bias', source)
  return Architecture(
    'llama',
    **config_json.fields(values, source),
    ropes=(config_json.rope(values, source),),
    qkv_bias=bias,
    output_bias=bias,
    mlp_bias=config_json.flag(values, 'mlp_bias', source),
  )


def write(architecture: Architecture) -> Json:
  """See `Family.write`."""
  return {
    **config_json.written(architecture, 'llama', 'LlamaForCausalLM'),
    **config_json.rope_of_all_json(architecture),
    'attention_bias': architecture.qkv_bias,
    'mlp_bias': architecture.mlp_bias,
  }


FAMILY = Family('llama', ('llama',), read, write)
