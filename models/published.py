"""The architecture entries of published models' config.json files, so that runs can be planned without a network.

The values are those of the files on the Hugging Face hub. The number of parameters computed from each is compared with
the number stated on the hub (tests/models/test_published.py).
"""

from __future__ import annotations

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
  """Return the names that `config_json` knows."""
  return tuple(_PUBLISHED)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> Values:
  return {
    'model_type': 'qwen3',
    'vocab_size': 151936,
    **_sizes(hidden, intermediate, layers, heads, 8),
    'head_dim': 128,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e6,
    'tie_word_embeddings': tied,
  }


def _qwen2(*sizes: int, tied: bool) -> Values:
  return {
    'model_type': 'qwen2',
    'vocab_size': 151936 if tied else 152064,
    **_sizes(*sizes),
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e6,
    'use_sliding_window': False,
    'tie_word_embeddings': tied,
  }


def _llama(*sizes: int, head_dim: int, tied: bool, factor: float) -> Values:
  return {
    'model_type': 'llama',
    'vocab_size': 128256,
    **_sizes(*sizes),
    'head_dim': head_dim,
    'max_position_embeddings': 131072,
    'rms_norm_eps': 1e-5,
    'rope_theta': 500000.0,
    'rope_scaling': {
      'rope_type': 'llama3',
      'factor': factor,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 8192,
    },
    'tie_word_embeddings': tied,
  }


def _mistral(*sizes: int) -> Values:
  return {
    'model_type': 'mistral',
    'vocab_size': 32768,
    **_sizes(*sizes),
    'head_dim': 128,
    'max_position_embeddings': 32768,
    'rms_norm_eps': 1e-5,
    'rope_theta': 1e6,
    'sliding_window': None,
    'tie_word_embeddings': False,
  }


def _olmo3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> Values:
  return {
    'model_type': 'olmo3',
    'vocab_size': 100278,
    **_sizes(hidden, intermediate, layers, heads, kv_heads),
    'max_position_embeddings': 65536,
    'rms_norm_eps': 1e-6,
    'rope_theta': 500000.0,
    'rope_scaling': {  # For the layers that see all positions.
      'rope_type': 'yarn',
      'factor': 8.0,
      'original_max_position_embeddings': 8192,
      'attention_factor': 1.2079441541679836,
      'beta_fast': 32.0,
      'beta_slow': 1.0,
    },
    'sliding_window': 4096,
    'layer_types': ['full_attention' if layer % 4 == 3 else 'sliding_attention' for layer in range(layers)],
    'tie_word_embeddings': False,
  }


def _gemma3_text(*sizes: int, head_dim: int, query_scalar: int, window: int, vocab_size: int = 262208) -> Values:
  return {
    'model_type': 'gemma3_text',
    'vocab_size': vocab_size,
    **_sizes(*sizes),
    'head_dim': head_dim,
    'query_pre_attn_scalar': query_scalar,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e6,
    'rope_local_base_freq': 1e4,
    'sliding_window': window,
    'sliding_window_pattern': 6,
    'tie_word_embeddings': True,
  }


def _gemma3(*sizes: int, head_dim: int = 256, query_scalar: int = 256) -> Values:
  text = _gemma3_text(*sizes, head_dim=head_dim, query_scalar=query_scalar, window=1024)
  return {'model_type': 'gemma3', 'text_config': text | {'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}}}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> Values:
  return {
    'hidden_size': hidden,
    'intermediate_size': intermediate,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': kv_heads,
  }


# hidden_size, intermediate_size, layers, heads, key-value heads. Base and instruct models share these entries.
_PUBLISHED = {
  'Qwen/Qwen3-0.6B': _qwen3(1024, 3072, 28, 16, tied=True),
  'Qwen/Qwen3-1.7B': _qwen3(2048, 6144, 28, 16, tied=True),
  'Qwen/Qwen3-4B': _qwen3(2560, 9728, 36, 32, tied=True),
  'Qwen/Qwen3-8B': _qwen3(4096, 12288, 36, 32, tied=False),
  'Qwen/Qwen3-14B': _qwen3(5120, 17408, 40, 40, tied=False),
  'Qwen/Qwen3-32B': _qwen3(5120, 25600, 64, 64, tied=False),
  'Qwen/Qwen2.5-0.5B-Instruct': _qwen2(896, 4864, 24, 14, 2, tied=True),
  'Qwen/Qwen2.5-1.5B-Instruct': _qwen2(1536, 8960, 28, 12, 2, tied=True),
  'Qwen/Qwen2.5-3B-Instruct': _qwen2(2048, 11008, 36, 16, 2, tied=True),
  'Qwen/Qwen2.5-7B-Instruct': _qwen2(3584, 18944, 28, 28, 4, tied=False),
  'Qwen/Qwen2.5-14B-Instruct': _qwen2(5120, 13824, 48, 40, 8, tied=False),
  'Qwen/Qwen2.5-32B-Instruct': _qwen2(5120, 27648, 64, 40, 8, tied=False),
  'Qwen/Qwen2.5-72B-Instruct': _qwen2(8192, 29568, 80, 64, 8, tied=False),
  'meta-llama/Llama-3.2-1B-Instruct': _llama(2048, 8192, 16, 32, 8, head_dim=64, tied=True, factor=32.0),
  'meta-llama/Llama-3.2-3B-Instruct': _llama(3072, 8192, 28, 24, 8, head_dim=128, tied=True, factor=32.0),
  'meta-llama/Llama-3.1-8B-Instruct': _llama(4096, 14336, 32, 32, 8, head_dim=128, tied=False, factor=8.0),
  'meta-llama/Llama-3.3-70B-Instruct': _llama(8192, 28672, 80, 64, 8, head_dim=128, tied=False, factor=8.0),
  'mistralai/Mistral-7B-Instruct-v0.3': _mistral(4096, 14336, 32, 32, 8),
  'allenai/Olmo-3-7B-Instruct': _olmo3(4096, 11008, 32, 32, 32),
  'allenai/Olmo-3-32B-Think': _olmo3(5120, 27648, 64, 40, 8),
  'google/gemma-3-1b-it': _gemma3_text(
    1152, 6912, 26, 4, 1, head_dim=256, query_scalar=256, window=512, vocab_size=262144
  ),
  'google/gemma-3-4b-it': _gemma3(2560, 10240, 34, 8, 4),
  'google/gemma-3-12b-it': _gemma3(3840, 15360, 48, 16, 8),
  'google/gemma-3-27b-it': _gemma3(5376, 21504, 62, 32, 16, head_dim=128, query_scalar=168),
}
