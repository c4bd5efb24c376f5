"""Tiny random models of every family: their settings, and the models of transformers with these."""

from __future__ import annotations

import types

import torch
import transformers

VOCABULARY, WINDOW = 64, 6
SIZES = dict(
  vocab_size=VOCABULARY,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=128,
  initializer_range=0.25,
  eos_token_id=None,
  bos_token_id=None,
  pad_token_id=0,
)
# Texts reach position 56, well beyond the 16 positions before stretching.
DEFAULT = dict(rope_type='default', rope_theta=300.0)
LINEAR = dict(rope_type='linear', rope_theta=1000.0, factor=8.0)
YARN = dict(rope_type='yarn', rope_theta=1000.0, factor=8.0, original_max_position_embeddings=16, beta_fast=4.0)
LLAMA3 = dict(
  rope_type='llama3',
  rope_theta=100.0,
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=16,
)
DEEP = 9  # More layers than are decoded one by one, so that their loop is compiled (`sdpo_jax.models.cache.SHALLOW`).
MODELS = {
  'qwen3': ('Qwen3', dict(head_dim=16, tie_word_embeddings=True, rope_parameters=DEFAULT)),
  'qwen2': (
    'Qwen2',
    dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, rope_parameters=YARN),
  ),
  'llama': ('Llama', dict(attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)),
  'mistral': ('Mistral', dict(head_dim=12, sliding_window=WINDOW, tie_word_embeddings=True, rope_parameters=LINEAR)),
  'olmo3': (
    'Olmo3',
    dict(
      num_hidden_layers=DEEP,
      sliding_window=WINDOW,
      attention_bias=True,
      rope_parameters=dict(full_attention=YARN, sliding_attention=DEFAULT),
    ),
  ),
  'gemma3': (
    'Gemma3Text',
    dict(
      num_key_value_heads=1,
      head_dim=16,
      sliding_window=WINDOW,
      sliding_window_pattern=2,
      query_pre_attn_scalar=24,
      rope_parameters=dict(full_attention=LINEAR, sliding_attention=DEFAULT),
    ),
  ),
}
# More settings of the families; most are only tested in campaigns.
MORE = {
  'qwen3, windows and biases': (
    'Qwen3',
    dict(
      num_hidden_layers=DEEP,
      num_key_value_heads=4,
      head_dim=8,
      attention_bias=True,
      use_sliding_window=True,
      sliding_window=WINDOW,
      max_window_layers=3,
      rms_norm_eps=1e-3,
      rope_parameters=LLAMA3,
    ),
  ),
  'qwen2, no windows': ('Qwen2', dict(num_hidden_layers=DEEP, tie_word_embeddings=True, rope_parameters=LINEAR)),
  'llama, no biases': ('Llama', dict(num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=DEFAULT)),
  'mistral, no windows': ('Mistral', dict(num_hidden_layers=DEEP, sliding_window=None, rope_parameters=YARN)),
  'mistral, tanh': ('Mistral', dict(hidden_act='gelu_pytorch_tanh', sliding_window=3, rope_parameters=DEFAULT)),
  'olmo3, shallow': (
    'Olmo3',
    dict(
      layer_types=['full_attention', 'sliding_attention'],
      sliding_window=WINDOW,
      tie_word_embeddings=True,
      rope_parameters=dict(full_attention=LLAMA3, sliding_attention=LINEAR),
    ),
  ),
  'gemma3, deep': (
    'Gemma3Text',
    dict(
      num_hidden_layers=DEEP,
      attention_bias=True,
      tie_word_embeddings=False,
      head_dim=8,
      sliding_window=WINDOW,
      hidden_activation='silu',
      rope_parameters=dict(full_attention=DEFAULT, sliding_attention=DEFAULT),
    ),
  ),
}
TOKENIZER = types.SimpleNamespace(decode=lambda tokens, **options: ' '.join(map(str, tokens)))


def reference(name):
  """Return a random model of transformers, whose norms and biases are random, too, so that they matter."""
  torch.manual_seed(0)
  family, settings = (MODELS | MORE)[name]
  model_class = transformers.AutoModelForCausalLM
  model = model_class.from_config(getattr(transformers, f'{family}Config')(**{**SIZES, **settings})).eval()
  with torch.no_grad():
    for parameter, weight in model.named_parameters():
      if 'norm' in parameter or 'bias' in parameter:
        weight.add_(0.3 * torch.randn_like(weight))
  return model


def reference_that_sees_images():
  """Return a Gemma 3 that reads images, with random weights."""
  text = SIZES | MODELS['gemma3'][1]
  vision = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
  )
  config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, eos_token_id=[5, 6])
  torch.manual_seed(1)
  return transformers.Gemma3ForConditionalGeneration(config).eval()
