"""Mistral models, which have no biases, and a window in all layers or in none."""

from __future__ import annotations

from typing import Any

from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.families import config_json
from sdpo_jax.models.families.config_json import Json
from sdpo_jax.models.families.family import Family

DEFAULTS: Json = {'num_key_value_heads': 8, 'hidden_act': 'silu', 'rms_norm_eps': 1e-6, 'sliding_window': 4096}


def fields(values: Json, layers: int, source: str) -> dict[str, Any]:
  """See `Family.fields`."""
  window = None if values['sliding_window'] is None else config_json.size(values, 'sliding_window', source)
  return {
    'ropes': (config_json.rope(values, source),),
    'windows': None if window is None else (window,) * layers,
  }


def entries(architecture: Architecture) -> Json:
  """See `Family.entries`."""
  return {
    **config_json.rope_of_all_json(architecture),
    'sliding_window': None if architecture.windows is None else architecture.windows[0],
  }


FAMILY = Family('mistral', ('mistral',), 'MistralForCausalLM', DEFAULTS, fields, entries)
