"""Gemma 3 models; of those that read images, the text part.

Inputs and outputs of attention and MLP are normalised, weights of norms are offsets from 1, embeddings are scaled, and
five of six layers have a window and another rotary embedding.
"""

from __future__ import annotations

import re
from typing import Any

from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.models.architecture import Architecture
from sdpo_jax.models.families import config_json
from sdpo_jax.models.families.config_json import Json
from sdpo_jax.models.families.family import NAMES, POST_NORM_NAMES, Family

WHOLE, TEXT = 'gemma3', 'gemma3_text'
# Defaults of transformers for a text_config; published ones have few entries.
DEFAULTS: Json = {
  'vocab_size': 262208,
  'hidden_size': 2304,
  'intermediate_size': 9216,
  'num_hidden_layers': 26,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 256,
  'hidden_activation': 'gelu_pytorch_tanh',
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': True,
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'sliding_window_pattern': 6,
}
FULL_THETA, SLIDING_THETA = 1e6, 10000.0
# Prefixes of tensors in models that read images, in transformers 4 and 5.
_PARTS_FOR_IMAGES = re.compile(r'(model\.)?(vision_tower|multi_modal_projector)\.')
_PREFIXES = re.compile(r'(language_model\.(?=lm_head\.)|language_model\.model\.|model\.language_model\.)')
# Entries outside of text_config that apply to the text part of a model that reads images.
_OF_WHOLE = ('bos_token_id', 'eos_token_id', 'pad_token_id', 'tie_word_embeddings', 'torch_dtype', 'dtype')


def fields(values: Json, layers: int, source: str) -> dict[str, Any]:
  """See `Family.fields`."""
  period = config_json.size(values, 'sliding_window_pattern', source)
  kinds = config_json.layer_kinds(values, config_json.every(period, layers), source)
  return {
    **config_json.ropes_by_kind(
      values,
      kinds,
      source,
      config_json.number(values, 'rope_theta', source, FULL_THETA),
      config_json.number(values, 'rope_local_base_freq', source, SLIDING_THETA),
    ),
    'windows': config_json.windows(values, kinds, source),
    'norm_placement': 'both',
    'norm_offset': 1.0,
    'query_key_norm': 'head',
    'query_pre_attn_scalar': config_json.size(values, 'query_pre_attn_scalar', source),
    'embedding_scale': values['hidden_size'] ** 0.5,
    **config_json.attention_biases(values, source),
  }


def text(values: Json, source: str) -> Json:
  """See `Family.text`."""
  config_json.refuse(values, source)
  return text_values(values, source)


def text_values(values: Json, source: str = 'config.json') -> Json:
  """Return the contents of a config.json for the text part of a model.

  Raises:
    UserError: a model that reads images has no text_config.
  """
  if values.get('model_type') != WHOLE:
    return values
  if not isinstance(values.get('text_config'), dict):
    raise UserError(f'{source}: text_config must be a JSON object, not {short_repr(values.get("text_config"))}.')
  return values['text_config'] | {key: values[key] for key in _OF_WHOLE if key in values}


def entries(architecture: Architecture) -> Json:
  """See `Family.entries`."""
  return {
    **config_json.ropes_by_kind_json(architecture),
    'attention_bias': architecture.qkv_bias,
    'query_pre_attn_scalar': architecture.query_pre_attn_scalar,
  }


def exported(values: Json) -> Json:
  """See `Family.exported`; the export is a text model."""
  if values.get('model_type') != WHOLE:
    return values
  return text_values(values) | {'architectures': ['Gemma3ForCausalLM'], 'model_type': TEXT}


def known_name(name: str) -> str | None:
  """See `Family.known_name`."""
  if _PARTS_FOR_IMAGES.match(name):
    return None
  prefix = _PREFIXES.match(name)
  if prefix is None:
    return name
  rest = name[prefix.end() :]
  return rest if rest.startswith('lm_head.') else f'model.{rest}'


def module_prefix(values: Json) -> str:
  """See `Family.module_prefix`."""
  return 'model.language_model.' if values.get('model_type') == WHOLE else 'model.'


# Files from which transformers builds an image processor; useless in an export without a vision tower.
_FILES_FOR_IMAGES = ('preprocessor_config.json', 'processor_config.json')
FAMILY = Family(
  'gemma3',
  (WHOLE, TEXT),
  'Gemma3ForCausalLM',
  DEFAULTS,
  fields,
  entries,
  NAMES | POST_NORM_NAMES,
  'hidden_activation',
  text,
  known_name,
  exported,
  module_prefix,
  _FILES_FOR_IMAGES,
)
