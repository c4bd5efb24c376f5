"""Reading and writing of the config.json entries that families share: sizes, windows and rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
import sys
from typing import Any

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models.architecture import Activation, Architecture
from sdpo_jax.models.reading_child import LARGEST_COUNT
from sdpo_jax.models.rope import Rope

Json = dict[str, Any]
FULL, SLIDING = 'full_attention', 'sliding_attention'
ACTIVATIONS: Mapping[str, Activation] = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}
ROPE_KINDS = ('default', 'linear', 'llama3', 'yarn')
# Keys that, unless null or false, describe models that the decoder does not support.
REFUSED: Mapping[str, str] = {
  'attn_logit_softcapping': 'soft-capped attention scores',
  'final_logit_softcapping': 'soft-capped logits',
  'use_bidirectional_attention': 'attention to later tokens',
  'quantization_config': 'quantised weights',
}
# Field of `Architecture` → key of config.json; the last two have defaults.
_SIZES = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'hidden_size',
  'intermediate_size': 'intermediate_size',
  'layers': 'num_hidden_layers',
  'heads': 'num_attention_heads',
  'kv_heads': 'num_key_value_heads',
  'head_dim': 'head_dim',
}


def refuse(values: Json, source: str) -> None:
  """Check that a config.json has none of the `REFUSED` keys.

  Raises:
    UserError: it has; the message names `source` and the key.
  """
  for key, what in REFUSED.items():
    if values.get(key) not in (None, False):
      shown = '{…}' if isinstance(values[key], dict) else short_repr(values[key])
      raise UserError(f'{source}: {key}={shown} ({what}) is not supported; supported: models without it.')


def fields(values: Json, source: str, activation_key: str = 'hidden_act') -> dict[str, Any]:
  """Return the fields of `Architecture` that are read in the same way for all families.

  Args:
    values: contents of a config.json, merged over the defaults of the family.
    source: name of the file, for error messages.
    activation_key: key of the MLP's activation.

  Raises:
    UserError: a size is missing or impossible, the activation is not supported, or `refuse` raises; the message names
      `source` and the key.
  """
  refuse(values, source)
  sizes = {field: size(values, key, source) for field, key in list(_SIZES.items())[:-2]}
  heads, width = sizes['heads'], sizes['hidden_size']
  if sizes['layers'] > LARGEST_COUNT:  # Lists of that many are made.
    raise UserError(
      f'{source}: num_hidden_layers={short_repr(sizes["layers"])} is too many; supported: up to {LARGEST_COUNT}.'
    )
  sizes['kv_heads'] = size(values, 'num_key_value_heads', source) if values.get('num_key_value_heads') else heads
  if heads % sizes['kv_heads']:
    raise UserError(
      f'{source}: num_attention_heads={heads} is not a multiple of num_key_value_heads={sizes["kv_heads"]}.'
    )
  if values.get('head_dim') is not None:
    sizes['head_dim'] = size(values, 'head_dim', source)
  elif width % heads:
    raise UserError(
      f'{source}: hidden_size={width} is not a multiple of num_attention_heads={heads}, so head_dim must be given.'
    )
  else:
    sizes['head_dim'] = width // heads
  if sizes['head_dim'] % 2:
    raise UserError(f'{source}: head_dim={sizes["head_dim"]} is odd; rotary embeddings need an even one.')
  activation = values.get(activation_key)
  if activation not in list(ACTIVATIONS):  # Which may be unhashable.
    raise UserError(
      f'{source}: {activation_key} {short_repr(activation)} is not supported; supported: '
      f'{", ".join(map(repr, ACTIVATIONS))}.'
    )
  return {
    **sizes,
    'norm_eps': number(values, 'rms_norm_eps', source),
    'tied': flag(values, 'tie_word_embeddings', source),
    'activation': ACTIVATIONS[activation],
    'initializer_range': 0.0
    if values.get('initializer_range') == 0
    else number(values, 'initializer_range', source, 0.02),
  }


def attention_biases(values: Json, source: str) -> dict[str, bool]:
  """Return `qkv_bias` and `output_bias` of an architecture whose attention projections all have biases, or none has.

  Raises:
    UserError: attention_bias is not a boolean.
  """
  return dict.fromkeys(('qkv_bias', 'output_bias'), flag(values, 'attention_bias', source))


def size(values: Json, key: str, source: str) -> int:
  """Return the positive integer under a key.

  Raises:
    UserError: it is missing or something else; the message names `source` and the key.
  """
  value = values.get(key)
  if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
    raise UserError(f'{source}: {key} must be a positive integer, not {short_repr(value)}.')
  return value


def flag(values: Json, key: str, source: str, default: bool = False) -> bool:
  """Return the boolean under a key, or `default` if the key is missing or null.

  Raises:
    UserError: it is something else (a string such as 'false' would count as true); the message names `source` and the
      key.
  """
  value = default if values.get(key) is None else values[key]
  if not isinstance(value, bool):
    raise UserError(f'{source}: {key} must be true or false, not {short_repr(value)}.')
  return value


def number(values: Json, key: str, source: str, default: float | None = None) -> float:
  """Return the positive number under a key, or `default` if the key is missing or null.

  Raises:
    UserError: it is something else; the message names `source` and the key.
  """
  value = default if values.get(key) is None else values[key]
  if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
    raise UserError(f'{source}: {key} must be a positive number, not {short_repr(value)}.')
  return float(value)


def layer_kinds(values: Json, default: Sequence[str], source: str) -> tuple[str, ...]:
  """Return the kind of every layer, FULL or SLIDING: layer_types, or else `default`.

  Raises:
    UserError: layer_types has another length or other names; the message names `source`.
  """
  kinds = default if values.get('layer_types') is None else values['layer_types']
  known = isinstance(kinds, Sequence) and all(kind in (FULL, SLIDING) for kind in kinds)
  if not known or len(kinds) != len(default):
    raise UserError(
      f"{source}: layer_types must name 'full_attention' or 'sliding_attention' for each of the {len(default)} layers, "
      f'not {short_repr(kinds)}.'
    )
  return tuple(kinds)


def windows(values: Json, kinds: Sequence[str], source: str, switch: str | None = None) -> tuple[int, ...] | None:
  """Return the number of positions that each layer sees (0: all); None: all layers see all.

  Args:
    values: contents of a config.json.
    kinds: FULL or SLIDING for every layer.
    source: name of the file, for error messages.
    switch: a key that must be true for sliding_window to apply.

  Raises:
    UserError: a layer is SLIDING, but there is no window.
  """
  if SLIDING not in kinds:
    return None
  window = values.get('sliding_window')
  usable = isinstance(window, int) and not isinstance(window, bool) and window > 0
  if not usable or (switch is not None and not flag(values, switch, source)):
    needed = f'{switch}=true and a positive sliding_window' if switch else 'a positive sliding_window'
    raise UserError(
      f'{source}: layer_types asks for sliding_attention, which needs {needed} (sliding_window is '
      f'{short_repr(values.get("sliding_window"))}).'
    )
  return tuple(window if kind == SLIDING else 0 for kind in kinds)


def rope(values: Json, source: str, theta: float = 10000.0) -> Rope:
  """Return the rotary embedding of all layers, from rope_scaling (transformers 4) or rope_parameters (5).

  Args:
    values: contents of a config.json.
    source: name of the file, for error messages.
    theta: default of rope_theta.

  Raises:
    UserError: a type or a number is not supported; the message names `source` and the key.
  """
  given = _mapping(values, 'rope_scaling', source) or _mapping(values, 'rope_parameters', source)
  nested = [key for key in given if key in (FULL, SLIDING)]
  if nested:
    raise UserError(
      f'{source}: rope_parameters of layer types ({", ".join(nested)}) are not supported for model_type '
      f'{values.get("model_type")!r}; supported: the same for all layers.'
    )
  return _rope(values, given, number(values, 'rope_theta', source, theta), source)


def ropes_by_kind(
  values: Json, kinds: Sequence[str], source: str, full_theta: float, sliding_theta: float
) -> dict[str, Any]:
  """Return `ropes` and `layer_ropes` of an architecture whose rotary embedding depends on the kind of layer.

  rope_parameters has an entry for each kind (transformers 5); rope_scaling (transformers 4) is for FULL layers.

  Args:
    values: contents of a config.json.
    kinds: FULL or SLIDING for every layer.
    source: name of the file, for error messages.
    full_theta: default of rope_theta for FULL layers.
    sliding_theta: default of rope_theta for SLIDING layers.

  Raises:
    UserError: a type or a number is not supported; the message names `source` and the key.
  """
  nested = _mapping(values, 'rope_parameters', source)
  if nested and not set(nested) <= {FULL, SLIDING}:
    raise UserError(
      f'{source}: rope_parameters of model_type {values.get("model_type")!r} must have the entries {FULL!r} and '
      f'{SLIDING!r}, not {short_repr(list(nested))}.'
    )
  full = _mapping(nested, FULL, source) | _mapping(values, 'rope_scaling', source)
  by_kind = {
    FULL: _rope(values, full, full_theta, source),
    SLIDING: _rope(values, _mapping(nested, SLIDING, source), sliding_theta, source),
  }
  ropes = tuple(dict.fromkeys(by_kind[kind] for kind in kinds))
  places = tuple(ropes.index(by_kind[kind]) for kind in kinds)
  return {'ropes': ropes, 'layer_ropes': places if len(ropes) > 1 else None}


def _mapping(values: Json, key: str, source: str) -> Json:
  value = values.get(key)
  if value is not None and not isinstance(value, dict):
    raise UserError(f'{source}: {key} must be a JSON object, not {short_repr(value)}.')
  return value or {}


def _rope(values: Json, given: Json, theta: float, source: str) -> Rope:
  kind = given.get('rope_type') or given.get('type') or 'default'
  if kind not in ROPE_KINDS:
    raise UserError(
      f'{source}: rope type {short_repr(kind)} is not supported; supported: {", ".join(map(repr, ROPE_KINDS))}.'
    )
  for holder in (given, values):
    if holder.get('partial_rotary_factor') not in (None, 1):
      raise UserError(
        f'{source}: partial_rotary_factor={short_repr(holder["partial_rotary_factor"])} is not supported; supported: '
        '1, heads that are rotated whole.'
      )
  theta = number(given, 'rope_theta', source, theta)
  if kind == 'default':
    return Rope(theta)
  if kind == 'linear':
    return Rope(theta, kind, number(given, 'factor', source))
  longest = values.get('max_position_embeddings')
  original = values.get('original_max_position_embeddings') or given.get('original_max_position_embeddings') or longest
  original = number({'original_max_position_embeddings': original}, 'original_max_position_embeddings', source)
  if kind == 'llama3':
    low, high = number(given, 'low_freq_factor', source), number(given, 'high_freq_factor', source)
    if low >= high:
      raise UserError(f'{source}: low_freq_factor={low} must be smaller than high_freq_factor={high}.')
    return Rope(theta, kind, number(given, 'factor', source), original, low, high)
  if theta <= 1:
    raise UserError(f"{source}: rope_theta={theta} must be greater than 1 for rope type 'yarn'.")
  stretch = None if longest is None else number(values, 'max_position_embeddings', source) / original
  factor = number(given, 'factor', source, stretch)
  return Rope(
    theta,
    kind,
    factor,
    original,
    beta_fast=number(given, 'beta_fast', source, 32.0),
    beta_slow=number(given, 'beta_slow', source, 1.0),
    truncate=flag(given, 'truncate', source, True),
    attention_factor=number(given, 'attention_factor', source, _attention_factor(given, factor, source)),
  )


def _attention_factor(given: Json, factor: float, source: str) -> float:
  """Return YaRN's default factor of cosines and sines."""

  def grown(scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

  if not given.get('mscale') or not given.get('mscale_all_dim'):
    return grown(1.0)
  return grown(number(given, 'mscale', source)) / grown(number(given, 'mscale_all_dim', source))


def rope_json(rope: Rope) -> Json:
  """Return the entry of rope_parameters for a rotary embedding."""
  values: Json = {'rope_type': rope.kind, 'rope_theta': rope.theta}
  if rope.kind != 'default':
    values['factor'] = rope.factor
  if rope.kind in ('llama3', 'yarn'):
    values['original_max_position_embeddings'] = int(rope.original_max_position_embeddings)
  if rope.kind == 'llama3':
    values |= {'low_freq_factor': rope.low_freq_factor, 'high_freq_factor': rope.high_freq_factor}
  if rope.kind == 'yarn':
    values |= {'beta_fast': rope.beta_fast, 'beta_slow': rope.beta_slow, 'attention_factor': rope.attention_factor}
    values |= {} if rope.truncate else {'truncate': False}
  return values


def written(architecture: Architecture, model_type: str, writer: str, activation_key: str = 'hidden_act') -> Json:
  """Return the entries of a config.json that are written in the same way for all families.

  Args:
    architecture: the model.
    model_type: model_type of its family.
    writer: class of transformers that builds the model.
    activation_key: key of the MLP's activation.
  """
  a = architecture
  return {
    'architectures': [writer],
    'model_type': model_type,
    **{key: getattr(a, field) for field, key in _SIZES.items()},
    activation_key: next(name for name, activation in ACTIVATIONS.items() if activation == a.activation),
    'rms_norm_eps': a.norm_eps,
    'tie_word_embeddings': a.tied,
    'initializer_range': a.initializer_range,
  }


def rope_of_all_json(architecture: Architecture) -> Json:
  """Return the entries of a config.json for a rotary embedding that all layers share.

  They are in the format of transformers 4, which 5 reads, too.
  """
  (only,) = architecture.ropes
  scaling = rope_json(only)
  theta = scaling.pop('rope_theta')
  return {'rope_theta': theta} | ({} if only.kind == 'default' else {'rope_scaling': scaling})


def ropes_by_kind_json(architecture: Architecture) -> Json:
  """Return the entries of a config.json for layer types, windows and rotary embeddings, in transformers 5's format."""
  a = architecture
  kinds = kinds_of(a)
  places = a.layer_ropes or (0,) * a.layers
  values: Json = {
    'layer_types': list(kinds),
    'rope_parameters': {kind: rope_json(a.ropes[place]) for kind, place in zip(kinds, places, strict=True)},
  }
  return values | ({} if a.windows is None else {'sliding_window': max(a.windows)})


def kinds_of(architecture: Architecture) -> tuple[str, ...]:
  """Return FULL or SLIDING for every layer."""
  return tuple(SLIDING if window else FULL for window in architecture.windows or (0,) * architecture.layers)


def every(period: int, layers: int) -> list[str]:
  """Return the kinds of `layers` layers, of which every `period`-th is FULL and the others are SLIDING."""
  return [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]
