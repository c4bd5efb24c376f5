"""Olmo 3 models: outputs of attention and MLP are normalised, as are queries and keys, over all heads together.

Three of four layers have a window, without the stretching of positions that the others have.
"""

from __future__ import annotations

from models.architecture import Architecture
from models.families import config_json
from models.families.family import NAMES, POST_NORM_NAMES, Family, Json

DEFAULTS: Json = {'hidden_act': 'silu', 'rms_norm_eps': 1e-5, 'sliding_window': 4096}
PERIOD, THETA = 4, 500000.0


def read(values: Json, source: str) -> Architecture:
  """See `Family.read`."""
  values = DEFAULTS | values
  fields = config_json.fields(values, source)
  kinds = config_json.layer_kinds(values, config_json.every(PERIOD, fields['layers']), source)
  theta = config_json.number(values, 'rope_theta', source, THETA)
  bias = config_json.flag(values, 'attention_bias', source)
  return Architecture(
    'olmo3',
    **fields,
    **config_json.ropes_by_kind(values, kinds, source, theta, theta),
    windows=config_json.windows(values, kinds, source),
    norm_placement='post',
    query_key_norm='projection',
    qkv_bias=bias,
    output_bias=bias,
  )


def write(architecture: Architecture) -> Json:
  """See `Family.write`."""
  return {
    **config_json.written(architecture, 'olmo3', 'Olmo3ForCausalLM'),
    **config_json.ropes_by_kind_json(architecture),
    'attention_bias': architecture.qkv_bias,
  }


FAMILY = Family('olmo3', ('olmo3',), read, write, NAMES | POST_NORM_NAMES)
