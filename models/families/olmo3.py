"""Olmo 3 models, which normalise the outputs of attention and MLP, and queries and keys over all heads together.

Three of four layers have a window; only the others stretch positions (YaRN).
"""

from __future__ import annotations

from typing import Any

from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.families import config_json
from sdpo_jax.models.families.config_json import Json
from sdpo_jax.models.families.family import NAMES, POST_NORM_NAMES, Family

DEFAULTS: Json = {'hidden_act': 'silu', 'rms_norm_eps': 1e-5, 'sliding_window': 4096}
PERIOD, THETA = 4, 500000.0


def fields(values: Json, layers: int, source: str) -> dict[str, Any]:
  """See `Family.fields`."""
  kinds = config_json.layer_kinds(values, config_json.every(PERIOD, layers), source)
  theta = config_json.number(values, 'rope_theta', source, THETA)
  return {
    **config_json.ropes_by_kind(values, kinds, source, theta, theta),
    'windows': config_json.windows(values, kinds, source),
    'norm_placement': 'post',
    'query_key_norm': 'projection',
    **config_json.attention_biases(values, source),
  }


def entries(architecture: Architecture) -> Json:
  """See `Family.entries`."""
  return config_json.ropes_by_kind_json(architecture) | {'attention_bias': architecture.qkv_bias}


FAMILY = Family('olmo3', ('olmo3',), 'Olmo3ForCausalLM', DEFAULTS, fields, entries, NAMES | POST_NORM_NAMES)
