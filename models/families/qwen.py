"""Qwen2, Qwen2.5 and Qwen3 dense models, whose later layers may have a window."""

from __future__ import annotations

from typing import Any

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.families import config_json
from sdpo_jax.models.families.config_json import Json
from sdpo_jax.models.families.family import Family

SWITCH = 'use_sliding_window'
DEFAULTS: Json = {
  'num_key_value_heads': 32,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
  SWITCH: False,
  'sliding_window': 4096,
  'max_window_layers': 28,
}


def _fields(values: Json, layers: int, source: str) -> dict[str, Any]:
  """Return rotary embeddings and windows, the latter by layer_types or else from layer max_window_layers on."""
  slides = config_json.flag(values, SWITCH, source) and values.get('sliding_window') is not None
  first = values['max_window_layers']
  if slides and (isinstance(first, bool) or not isinstance(first, int)):
    raise UserError(f'{source}: max_window_layers must be an integer, not {short_repr(first)}.')
  default = [config_json.SLIDING if slides and layer >= first else config_json.FULL for layer in range(layers)]
  return {
    'ropes': (config_json.rope(values, source),),
    'windows': config_json.windows(values, config_json.layer_kinds(values, default, source), source, SWITCH),
  }


def _window_entries(architecture: Architecture) -> Json:
  if architecture.windows is None:
    return {}
  kinds = list(config_json.kinds_of(architecture))
  return {SWITCH: True, 'sliding_window': max(architecture.windows), 'layer_types': kinds}


def _fields_of_2(values: Json, layers: int, source: str) -> dict[str, Any]:
  """Return the fields of Qwen2, whose queries, keys and values have biases, whatever config.json says."""
  return _fields(values, layers, source) | {'qkv_bias': True}


def _entries_of_2(architecture: Architecture) -> Json:
  return config_json.rope_of_all_json(architecture) | _window_entries(architecture)


def _fields_of_3(values: Json, layers: int, source: str) -> dict[str, Any]:
  """Return the fields of Qwen3, which normalises queries and keys over each head."""
  biases = config_json.attention_biases(values, source)
  return _fields(values, layers, source) | {'query_key_norm': 'head', **biases}


def _entries_of_3(architecture: Architecture) -> Json:
  """Return the entries of Qwen3, which transformers reads from version 4.51 on."""
  return {
    **config_json.rope_of_all_json(architecture),
    'attention_bias': architecture.qkv_bias,
    **_window_entries(architecture),
  }


QWEN2 = Family('qwen2', ('qwen2',), 'Qwen2ForCausalLM', DEFAULTS, _fields_of_2, _entries_of_2)
QWEN3 = Family('qwen3', ('qwen3',), 'Qwen3ForCausalLM', DEFAULTS | {'head_dim': 128}, _fields_of_3, _entries_of_3)
