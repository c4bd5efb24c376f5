"""Qwen3 dense models: what their config.json says, and the tensors that their files hold."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from models import parameters
from sdpo_jax.errors import UserError

MODEL_TYPE = 'qwen3'


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
  """Sizes and constants of a Qwen3 dense model."""

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  rope_theta: float
  norm_eps: float
  tied: bool
  attention_bias: bool = False
  initializer_range: float = 0.02
  windows: tuple[int, ...] | None = None  # Per layer, number of positions seen (0: all); None: all layers see all.
  vocab_multiple: int = 1  # The embedding and the unembedding have entries of zeros up to a multiple of this.

  @property
  def padded_vocab_size(self) -> int:
    """Entries of the embedding and the unembedding, those that stand for no token included."""
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

  @classmethod
  def from_json(cls, values: dict[str, Any], source: str = 'config.json') -> Qwen3Config:
    """Reads the contents of a Hugging Face config.json; defaults are transformers' own.

    Raises:
      UserError: naming `source` and the key: a missing or impossible size, a rope type or an activation that is not
        supported.
    """
    sizes = {}
    for field, key in (
      ('vocab_size', 'vocab_size'),
      ('hidden_size', 'hidden_size'),
      ('intermediate_size', 'intermediate_size'),
      ('layers', 'num_hidden_layers'),
      ('heads', 'num_attention_heads'),
    ):
      sizes[field] = _size(values, key, source)
    sizes['kv_heads'] = (
      _size(values, 'num_key_value_heads', source) if values.get('num_key_value_heads') else sizes['heads']
    )
    sizes['head_dim'] = _size(values, 'head_dim', source) if 'head_dim' in values else 128
    if sizes['heads'] % sizes['kv_heads']:
      raise UserError(
        f'{source}: num_attention_heads={sizes["heads"]} is not a multiple of num_key_value_heads={sizes["kv_heads"]}.'
      )
    if sizes['head_dim'] % 2:
      raise UserError(f'{source}: head_dim={sizes["head_dim"]} is odd; rotary embeddings need an even one.')
    if values.get('hidden_act', 'silu') != 'silu':
      raise UserError(f"{source}: hidden_act {values['hidden_act']!r} is not supported; supported: 'silu'.")
    return cls(
      **sizes,
      rope_theta=_rope_theta(values, source),
      norm_eps=float(values.get('rms_norm_eps', 1e-6)),
      tied=bool(values.get('tie_word_embeddings', False)),
      attention_bias=bool(values.get('attention_bias', False)),
      initializer_range=float(values.get('initializer_range', 0.02)),
      windows=_windows(values, sizes['layers'], source),
    )

  def to_json(self) -> dict[str, Any]:
    """Returns the contents of a config.json from which transformers (4.51 or newer) builds the same model."""
    values = {
      'architectures': ['Qwen3ForCausalLM'],
      'model_type': MODEL_TYPE,
      'vocab_size': self.vocab_size,
      'hidden_size': self.hidden_size,
      'intermediate_size': self.intermediate_size,
      'num_hidden_layers': self.layers,
      'num_attention_heads': self.heads,
      'num_key_value_heads': self.kv_heads,
      'head_dim': self.head_dim,
      'hidden_act': 'silu',
      'rope_theta': self.rope_theta,
      'rms_norm_eps': self.norm_eps,
      'tie_word_embeddings': self.tied,
      'attention_bias': self.attention_bias,
      'initializer_range': self.initializer_range,
    }
    if self.windows is not None:
      values['use_sliding_window'] = True
      values['sliding_window'] = max(self.windows)
      values['layer_types'] = ['sliding_attention' if window else 'full_attention' for window in self.windows]
    return values

  def parameter_table(self) -> parameters.Table:
    """Returns every parameter of the model, in the order in which its files hold them."""
    return _table(self)


def _size(values: dict[str, Any], key: str, source: str) -> int:
  value = values.get(key)
  if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
    raise UserError(f'{source}: {key} must be a positive integer, not {value!r}.')
  return value


def _rope_theta(values: dict[str, Any], source: str) -> float:
  """Returns the base of the rotary embedding: top-level (transformers 4) or in rope_parameters (transformers 5)."""
  scaling = values.get('rope_parameters') or values.get('rope_scaling') or {}
  kind = scaling.get('rope_type', scaling.get('type', 'default'))
  if kind != 'default':
    raise UserError(f"{source}: rope type {kind!r} is not supported; supported: 'default'.")
  theta = scaling.get('rope_theta', values.get('rope_theta', 10000.0))
  if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
    raise UserError(f'{source}: rope_theta must be a positive number, not {theta!r}.')
  return float(theta)


def _windows(values: dict[str, Any], layers: int, source: str) -> tuple[int, ...] | None:
  window = values.get('sliding_window') if values.get('use_sliding_window', False) else None
  kinds = values.get('layer_types')
  if kinds is None:
    first = values.get('max_window_layers', 28)
    kinds = ['sliding_attention' if window and i >= first else 'full_attention' for i in range(layers)]
  unknown = set(kinds) - {'full_attention', 'sliding_attention'}
  if unknown or len(kinds) != layers:
    raise UserError(
      f"{source}: layer_types must name 'full_attention' or 'sliding_attention' for each of the {layers} layers, "
      f'not {kinds!r}.'
    )
  if 'sliding_attention' not in kinds:
    return None
  if not isinstance(window, int) or window <= 0:
    raise UserError(
      f'{source}: layer_types asks for sliding_attention, which needs use_sliding_window=true and a positive '
      f'sliding_window (it is {values.get("sliding_window")!r}).'
    )
  return tuple(window if kind == 'sliding_attention' else 0 for kind in kinds)


@functools.cache
def _table(config: Qwen3Config) -> parameters.Table:
  width, layers, head_dim = config.hidden_size, config.layers, config.head_dim
  entries = []

  def add(path, shape, axes, init, name, matrix=None, **more):
    stacked = axes[0] == 'layers'
    matrix = matrix or (shape[1:] if stacked else shape)
    entries.append(parameters.Parameter(tuple(path.split('.')), shape, axes, init, name, matrix, **more))

  vocabulary = dict(shape=(config.padded_vocab_size, width), axes=('vocab', 'embed'), init='normal')
  add('embedding', name='model.embed_tokens.weight', matrix=(config.vocab_size, width), **vocabulary)
  layer = 'model.layers.{layer}.'

  def norm(path, size, axis, name):
    add(path, (layers, size), ('layers', axis), 'ones', layer + name, compute=False)

  norm('layers.attention_norm', width, None, 'input_layernorm.weight')
  for name, heads, axis in (
    ('q', config.heads, 'heads'),
    ('k', config.kv_heads, 'kv_heads'),
    ('v', config.kv_heads, 'kv_heads'),
  ):
    path = f'layers.attention.{dict(q="query", k="key", v="value")[name]}'
    add(
      path,
      (layers, width, heads, head_dim),
      ('layers', 'embed', axis, 'head_dim'),
      'normal',
      f'{layer}self_attn.{name}_proj.weight',
      (heads * head_dim, width),
      transpose=True,
    )
    if config.attention_bias:
      add(
        f'{path}_bias',
        (layers, heads, head_dim),
        ('layers', axis, 'head_dim'),
        'zeros',
        f'{layer}self_attn.{name}_proj.bias',
        (heads * head_dim,),
      )
  add(
    'layers.attention.output',
    (layers, config.heads, head_dim, width),
    ('layers', 'heads', 'head_dim', 'embed'),
    'normal',
    f'{layer}self_attn.o_proj.weight',
    (width, config.heads * head_dim),
    transpose=True,
  )
  if config.attention_bias:
    add('layers.attention.output_bias', (layers, width), ('layers', None), 'zeros', f'{layer}self_attn.o_proj.bias')
  norm('layers.attention.query_norm', head_dim, 'head_dim', 'self_attn.q_norm.weight')
  norm('layers.attention.key_norm', head_dim, 'head_dim', 'self_attn.k_norm.weight')
  norm('layers.mlp_norm', width, None, 'post_attention_layernorm.weight')
  for name in ('gate', 'up'):
    add(
      f'layers.mlp.{name}',
      (layers, width, config.intermediate_size),
      ('layers', 'embed', 'mlp'),
      'normal',
      f'{layer}mlp.{name}_proj.weight',
      (config.intermediate_size, width),
      transpose=True,
    )
  add(
    'layers.mlp.down',
    (layers, config.intermediate_size, width),
    ('layers', 'mlp', 'embed'),
    'normal',
    f'{layer}mlp.down_proj.weight',
    (width, config.intermediate_size),
    transpose=True,
  )
  add('final_norm', (width,), (None,), 'ones', 'model.norm.weight', compute=False)
  if not config.tied:
    add('unembedding', name='lm_head.weight', matrix=(config.vocab_size, width), **vocabulary)
  return tuple(entries)
