"""Sliding windows from some layer on, as in Qwen's config.json files."""

from __future__ import annotations

from models.architecture import Architecture
from models.families import config_json
from models.families.config_json import Json
from sdpo_jax.errors import UserError, short_repr

DEFAULTS: Json = {'use_sliding_window': False, 'sliding_window': 4096, 'max_window_layers': 28}
SWITCH = 'use_sliding_window'


def read(values: Json, layers: int, source: str) -> tuple[int, ...] | None:
  """Return `windows` of an architecture: by layer_types, or else from layer max_window_layers on.

  Raises:
    UserError: layer_types is malformed, or sliding layers have no window; the message names `source`.
  """
  slides = config_json.flag(values, SWITCH, source) and values.get('sliding_window') is not None
  first = values['max_window_layers']
  if slides and (isinstance(first, bool) or not isinstance(first, int)):
    raise UserError(f'{source}: max_window_layers must be an integer, not {short_repr(first)}.')
  default = [config_json.SLIDING if slides and layer >= first else config_json.FULL for layer in range(layers)]
  return config_json.windows(values, config_json.layer_kinds(values, default, source), source, SWITCH)


def write(architecture: Architecture) -> Json:
  """Return the entries of a config.json for the windows."""
  if architecture.windows is None:
    return {}
  kinds = list(config_json.kinds_of(architecture))
  return {SWITCH: True, 'sliding_window': max(architecture.windows), 'layer_types': kinds}
