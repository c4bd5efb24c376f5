"""Reading of config.json by the families: published sizes in the forms of transformers 4 and 5, and refusals."""

import json

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sdpo_jax.errors import UserError
from sdpo_jax.models import published
from sdpo_jax.models.families import known_families
from sdpo_jax.models.families.table import parameter_table
from sdpo_jax.models.rope import frequencies

ONE_EACH = (
  'Qwen/Qwen3-0.6B',
  'Qwen/Qwen2.5-7B-Instruct',
  'meta-llama/Llama-3.1-8B-Instruct',
  'mistralai/Mistral-7B-Instruct-v0.3',
  'allenai/Olmo-3-7B-Instruct',
  'google/gemma-3-1b-it',
  'google/gemma-3-27b-it',
)


def in_transformers(values):
  """Return the configuration of the part that reads text, as transformers reads a config.json."""
  return transformers.AutoConfig.for_model(**json.loads(json.dumps(values))).get_text_config()


@pytest.mark.parametrize('name', ONE_EACH)
def test_published_models_are_read_as_transformers_reads_them(name):
  """Tensors and their shapes, windows and angles of every layer, from the file of either version of transformers."""
  values = published.config_json(name)
  config = in_transformers(values)
  read = known_families.read(values)
  assert known_families.read(json.loads(json.dumps(config.to_dict()))) == read
  with torch.device('meta'):
    tensors = transformers.AutoModelForCausalLM.from_config(config).state_dict()
  if read.tied:
    del tensors['lm_head.weight']
  expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
  table = parameter_table(read)
  found = {p.huggingface_name(layer): p.huggingface_shape for p in table for layer in range(p.layers)}
  assert found == expected
  kinds = getattr(config, 'layer_types', None) or ['full_attention'] * config.num_hidden_layers
  window = getattr(config, 'sliding_window', None)
  windows = [window if kind == 'sliding_attention' else 0 for kind in kinds]
  assert list(read.windows or [0] * read.layers) == windows
  by_kind = {kind: angles(config, kind) for kind in set(kinds)}
  for layer, kind in enumerate(kinds):
    rope = read.ropes[(read.layer_ropes or [0] * read.layers)[layer]]
    expected_frequencies, attention_factor = by_kind[kind]
    np.testing.assert_allclose(frequencies(rope, read.head_dim), expected_frequencies, rtol=3e-7)
    assert rope.attention_factor == pytest.approx(attention_factor)
  assert read.norm_eps == config.rms_norm_eps
  assert read.query_scale == pytest.approx(getattr(config, 'query_pre_attn_scalar', read.head_dim) ** -0.5)


def angles(config, kind):
  """Return (frequencies, attention factor) of transformers for a kind of layers."""
  nested = 'full_attention' in config.rope_parameters
  given = config.rope_parameters[kind] if nested else config.rope_parameters
  if given['rope_type'] != 'default':
    found, factor = ROPE_INIT_FUNCTIONS[given['rope_type']](config, 'cpu', layer_type=kind if nested else None)
    return found.numpy(), factor
  head_dim = getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads
  return 1 / given['rope_theta'] ** (np.arange(0, head_dim, 2) / head_dim), 1.0


@pytest.mark.parametrize('name', published.names())
def test_what_is_written_of_a_published_model_is_read_as_the_same(name):
  read = known_families.read(published.config_json(name))
  written = json.loads(json.dumps(known_families.family_of(read).write(read)))
  assert known_families.read(written) == read
  assert known_families.read(json.loads(json.dumps(in_transformers(written).to_dict()))) == read


def test_a_text_config_that_says_next_to_nothing_is_completed_as_transformers_does():
  """The keys are those of gemma-3-4b-it."""
  text = {
    'hidden_size': 2560,
    'intermediate_size': 10240,
    'model_type': 'gemma3_text',
    'num_hidden_layers': 34,
    'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
    'sliding_window': 1024,
  }
  whole = {'model_type': 'gemma3', 'text_config': text, 'vision_config': {'model_type': 'siglip_vision_model'}}
  read = known_families.read(whole)
  assert read == known_families.read(published.config_json('google/gemma-3-4b-it'))
  assert known_families.read(json.loads(json.dumps(in_transformers(whole).to_dict()))) == read


MISSING = {  # Keys that older files lack, and what they mean then.
  'qwen2': (dict(num_key_value_heads=4), dict(kv_heads=4, head_dim=16, qkv_bias=True, output_bias=False, windows=None)),
  'qwen3': (dict(num_key_value_heads=4), dict(head_dim=128, qkv_bias=False, windows=None)),
  'llama': (dict(), dict(kv_heads=4, head_dim=16, qkv_bias=False, mlp_bias=False, norm_eps=1e-6)),
  'mistral': (dict(num_key_value_heads=2, head_dim=None), dict(kv_heads=2, head_dim=16, windows=(4096,) * 4)),
  'olmo3': (dict(), dict(kv_heads=4, head_dim=16, windows=(4096, 4096, 4096, 0), norm_eps=1e-5, layer_ropes=None)),
  'gemma3_text': (
    dict(num_attention_heads=4, sliding_window_pattern=2),
    dict(kv_heads=4, head_dim=256, windows=(4096, 0, 4096, 0), tied=True, layer_ropes=(0, 1, 0, 1)),
  ),
}
SMALL = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4)


@pytest.mark.parametrize('model_type', MISSING)
def test_missing_keys_mean_what_they_mean_to_transformers(model_type):
  given, expected = MISSING[model_type]
  values = SMALL | {'model_type': model_type} | given
  read = known_families.read(values)
  assert {name: getattr(read, name) for name in expected} == expected
  assert known_families.read(json.loads(json.dumps(in_transformers(values).to_dict()))) == read


YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=64)
REFUSED = {
  'Gemma 2': (
    dict(model_type='gemma2'),
    r"model_type 'gemma2' is not supported \(its logits are soft-capped\); supported: 'qw",
  ),
  'mixture of experts': (
    dict(model_type='mixtral'),
    r"model_type 'mixtral' is not supported \(a mixture of experts\); supported: 'qwen3', 'qwen2",
  ),
  'vision': (
    dict(model_type='qwen2_vl'),
    "model_type 'qwen2_vl' is not supported; supported: 'qwen3', 'qwen2', 'llama'",
  ),
  'unhashable': (dict(model_type=['llama']), r"model_type \['llama'\] is not supported"),
  'soft-capped logits': (
    dict(model_type='gemma3_text', final_logit_softcapping=30.0),
    r'final_logit_softcapping=30.0 \(soft-capped logits\) is not supported; supported: models without it',
  ),
  'soft-capped scores': (
    dict(model_type='gemma3', text_config=SMALL | dict(attn_logit_softcapping=50.0)),
    r'attn_logit_softcapping=50.0 \(soft-capped attention scores\) is not supported',
  ),
  'quantised': (
    dict(model_type='llama', quantization_config={'quant_method': 'awq', 'bits': 4}),
    r'quantization_config={…} \(quantised weights\) is not supported',
  ),
  'quantised, whole': (
    dict(model_type='gemma3', text_config=SMALL, quantization_config={'quant_method': 'gptq'}),
    'quantization_config={…}',
  ),
  'both directions': (
    dict(model_type='gemma3_text', use_bidirectional_attention=True),
    r'use_bidirectional_attention=True \(attention to later tokens\) is not supported',
  ),
  'activation': (
    dict(model_type='gemma3_text', hidden_activation='gelu'),
    "hidden_activation 'gelu' is not supported; supported: 'silu', 'gelu_pytorch_tanh'",
  ),
  'activation of a list': (dict(model_type='llama', hidden_act=['silu']), r"hidden_act \['silu'\] is not supported"),
  'no text': (dict(model_type='gemma3'), 'text_config must be a JSON object, not None'),
  'window': (
    dict(model_type='mistral', sliding_window=0, num_key_value_heads=4),
    'sliding_window must be a positive integer, not 0',
  ),
  'no window': (
    dict(model_type='olmo3', sliding_window=None),
    r'layer_types asks for sliding_attention, which needs a positive sliding_window \(sliding_window is None\)',
  ),
  'layer types': (dict(model_type='olmo3', layer_types=['full_attention']), 'layer_types must name .* of the 4 layers'),
  'layer types, a number': (dict(model_type='gemma3_text', layer_types=7), 'layer_types must name .*, not 7'),
  'flat rope': (
    dict(model_type='gemma3_text', rope_parameters=dict(rope_type='default', rope_theta=1e4)),
    "rope_parameters of model_type 'gemma3_text' must have the entries 'full_attention' and 'sliding_attention'",
  ),
  'heads': (dict(model_type='llama', hidden_size=62), 'hidden_size=62 is not a multiple of num_attention_heads=4, so'),
  'false as a string': (
    dict(model_type='llama', tie_word_embeddings='false'),
    "tie_word_embeddings must be true or false, not 'false'",
  ),
  'a bias of 1': (dict(model_type='olmo3', attention_bias=1), 'attention_bias must be true or false, not 1'),
  'first window': (
    dict(model_type='qwen2', num_key_value_heads=4, use_sliding_window=True, max_window_layers=None),
    'max_window_layers must be an integer, not None',
  ),
  'longest': (
    dict(model_type='llama', max_position_embeddings='x', rope_scaling=YARN),
    "max_position_embeddings must be a positive number, not 'x'",
  ),
  'mscale': (
    dict(model_type='llama', rope_scaling=YARN | dict(mscale='x', mscale_all_dim=1.0)),
    "mscale must be a positive number, not 'x'",
  ),
  'no float': (dict(model_type='llama', rope_theta=10**400), 'rope_theta must be a positive number, not 1000000'),
  'infinite': (dict(model_type='llama', rms_norm_eps=float('nan')), 'rms_norm_eps must be a positive number, not nan'),
}


@pytest.mark.parametrize(('changes', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_name(changes, message):
  with pytest.raises(UserError, match=f'^model/config.json: {message}'):
    known_families.read(SMALL | changes, 'model/config.json')
