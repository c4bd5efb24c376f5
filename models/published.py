"""Architecture entries of the config.json files of published models, so that runs can be planned without a network.

The values are those of the files on the Hugging Face hub. The number of parameters that follows from each is compared
with the number stated there (tests/models/test_published.py).
"""

from __future__ import annotations

from collections.abc import Mapping
import copy
from typing import Any

Values = dict[str, Any]


def config_json(name: str) -> Values | None:
  """Return the architecture entries of a published model's config.json; None if it is not listed.

  Args:
    name: the model on the hub, e.g. 'Qwen/Qwen3-8B'.
  """
  return copy.deepcopy(_PUBLISHED.get(name))


def names() -> tuple[str, ...]:
  """Return the names of the listed models on the hub."""
  return tuple(_PUBLISHED)


# model_type → entries that its models have in common.
_COMMON: Mapping[str, Values] = {
  'qwen3': {'vocab_size': 151936, 'head_dim': 128, 'rms_norm_eps': 1e-6, 'rope_theta': 1e6},
  'qwen2': {'vocab_size': 151936, 'rms_norm_eps': 1e-6, 'rope_theta': 1e6, 'use_sliding_window': False},
  'llama': {'vocab_size': 128256, 'max_position_embeddings': 131072, 'rms_norm_eps': 1e-5, 'rope_theta': 500000.0},
  'mistral': {
    'vocab_size': 32768,
    'head_dim': 128,
    'max_position_embeddings': 32768,
    'rms_norm_eps': 1e-5,
    'rope_theta': 1e6,
    'sliding_window': None,
  },
  'olmo3': {
    'vocab_size': 100278,
    'max_position_embeddings': 65536,
    'rms_norm_eps': 1e-6,
    'rope_theta': 500000.0,
    'rope_scaling': {  # Of the layers that see all positions.
      'rope_type': 'yarn',
      'factor': 8.0,
      'original_max_position_embeddings': 8192,
      'attention_factor': 1.2079441541679836,
      'beta_fast': 32.0,
      'beta_slow': 1.0,
    },
    'sliding_window': 4096,
  },
  'gemma3_text': {
    'vocab_size': 262208,
    'head_dim': 256,
    'query_pre_attn_scalar': 256,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e6,
    'rope_local_base_freq': 1e4,
    'sliding_window': 1024,
    'sliding_window_pattern': 6,
  },
}


def _model(model_type: str, *sizes: int, tied: bool = False, **others: Any) -> Values:
  names = 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads'
  own = dict(zip(names, sizes, strict=True)) | {'tie_word_embeddings': tied} | others
  return {'model_type': model_type} | _COMMON[model_type] | own


def _llama(*sizes: int, head_dim: int = 128, tied: bool = False, factor: float = 8.0) -> Values:
  scaling = {
    'rope_type': 'llama3',
    'factor': factor,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
  }
  return _model('llama', *sizes, tied=tied, head_dim=head_dim, rope_scaling=scaling)


def _olmo3(*sizes: int) -> Values:
  kinds = ['full_attention' if layer % 4 == 3 else 'sliding_attention' for layer in range(sizes[2])]
  return _model('olmo3', *sizes, layer_types=kinds)


def _gemma3(*sizes: int, **others: Any) -> Values:
  scaling = {'rope_type': 'linear', 'factor': 8.0}
  text = _model('gemma3_text', *sizes, tied=True, rope_scaling=scaling, **others)
  return {'model_type': 'gemma3', 'text_config': text}


# hidden_size, intermediate_size, layers, heads, key-value heads. Base and instruct models share these entries.
_PUBLISHED = {
  'Qwen/Qwen3-0.6B': _model('qwen3', 1024, 3072, 28, 16, 8, tied=True),
  'Qwen/Qwen3-1.7B': _model('qwen3', 2048, 6144, 28, 16, 8, tied=True),
  'Qwen/Qwen3-4B': _model('qwen3', 2560, 9728, 36, 32, 8, tied=True),
  'Qwen/Qwen3-8B': _model('qwen3', 4096, 12288, 36, 32, 8),
  'Qwen/Qwen3-14B': _model('qwen3', 5120, 17408, 40, 40, 8),
  'Qwen/Qwen3-32B': _model('qwen3', 5120, 25600, 64, 64, 8),
  'Qwen/Qwen2.5-0.5B-Instruct': _model('qwen2', 896, 4864, 24, 14, 2, tied=True),
  'Qwen/Qwen2.5-1.5B-Instruct': _model('qwen2', 1536, 8960, 28, 12, 2, tied=True),
  'Qwen/Qwen2.5-3B-Instruct': _model('qwen2', 2048, 11008, 36, 16, 2, tied=True),
  'Qwen/Qwen2.5-7B-Instruct': _model('qwen2', 3584, 18944, 28, 28, 4, vocab_size=152064),
  'Qwen/Qwen2.5-14B-Instruct': _model('qwen2', 5120, 13824, 48, 40, 8, vocab_size=152064),
  'Qwen/Qwen2.5-32B-Instruct': _model('qwen2', 5120, 27648, 64, 40, 8, vocab_size=152064),
  'Qwen/Qwen2.5-72B-Instruct': _model('qwen2', 8192, 29568, 80, 64, 8, vocab_size=152064),
  'meta-llama/Llama-3.2-1B-Instruct': _llama(2048, 8192, 16, 32, 8, head_dim=64, tied=True, factor=32.0),
  'meta-llama/Llama-3.2-3B-Instruct': _llama(3072, 8192, 28, 24, 8, tied=True, factor=32.0),
  'meta-llama/Llama-3.1-8B-Instruct': _llama(4096, 14336, 32, 32, 8),
  'meta-llama/Llama-3.3-70B-Instruct': _llama(8192, 28672, 80, 64, 8),
  'mistralai/Mistral-7B-Instruct-v0.3': _model('mistral', 4096, 14336, 32, 32, 8),
  'allenai/Olmo-3-7B-Instruct': _olmo3(4096, 11008, 32, 32, 32),
  'allenai/Olmo-3-32B-Think': _olmo3(5120, 27648, 64, 40, 8),
  'google/gemma-3-1b-it': _model('gemma3_text', 1152, 6912, 26, 4, 1, tied=True, sliding_window=512, vocab_size=262144),
  'google/gemma-3-4b-it': _gemma3(2560, 10240, 34, 8, 4),
  'google/gemma-3-12b-it': _gemma3(3840, 15360, 48, 16, 8),
  'google/gemma-3-27b-it': _gemma3(5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
}
