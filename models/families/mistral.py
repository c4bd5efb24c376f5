"""Mistral models: no biases, and either every layer has a window or none."""

from __future__ import annotations

from models.architecture import Architecture
from models.families import config_json
from models.families.family import Family, Json

DEFAULTS: Json = {'num_key_value_heads': 8, 'hidden_act': 'silu', 'rms_norm_eps': 1e-6, 'sliding_window': 4096}


def read(values: Json, source: str) -> Architecture:
  """See `Family.read`."""
  values = DEFAULTS | values
  fields = config_json.fields(values, source)
  window = None if values['sliding_window'] is None else config_json.size(values, 'sliding_window', source)
  return Architecture(
    'mistral',
    **fields,
    ropes=(config_json.rope(values, source),),
    windows=None if window is None else (window,) * fields['layers'],
  )


def write(architecture: Architecture) -> Json:
  """See `Family.write`."""
  return {
    **config_json.written(architecture, 'mistral', 'MistralForCausalLM'),
    **config_json.rope_of_all_json(architecture),
    'sliding_window': None if architecture.windows is None else architecture.windows[0],
  }


FAMILY = Family('mistral', ('mistral',), read, write)
