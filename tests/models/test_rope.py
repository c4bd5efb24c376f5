"""Frequencies of rotary embeddings against transformers, at the sizes of real models, and their config.json entries."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sdpo_jax.errors import UserError
from sdpo_jax.models.families import config_json
from sdpo_jax.models.rope import Rope, frequencies, rotation

LLAMA3 = dict(
  rope_type='llama3',
  rope_theta=500000.0,
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=8192,
)
YARN = dict(rope_type='yarn', rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)
CASES = {
  'linear': dict(rope_type='linear', rope_theta=1e6, factor=8.0),
  'llama3': LLAMA3,
  'llama3, other bounds': LLAMA3 | dict(factor=32.0, high_freq_factor=16.0, original_max_position_embeddings=4096),
  'yarn': YARN,
  'yarn, its own attention factor': YARN | dict(attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1),
  'yarn, attention factors of two scales': YARN | dict(mscale=0.707, mscale_all_dim=1.0),
  'yarn, a ramp between fractions': YARN | dict(beta_fast=20.0, beta_slow=3.0, truncate=False),
  'yarn, stretched as its lengths are': YARN | dict(factor=None),
  'yarn, a short original': YARN | dict(original_max_position_embeddings=16, rope_theta=300.0),
}


@pytest.mark.parametrize('given', CASES.values(), ids=CASES)
@pytest.mark.parametrize('head_dim', [128, 12])
def test_frequencies_and_attention_factors_are_those_of_transformers(given, head_dim):
  # A Llama config does not check that a factor is given.
  config = transformers.LlamaConfig(
    hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=dict(given)
  )
  expected, attention_factor = ROPE_INIT_FUNCTIONS[given['rope_type']](config, 'cpu')
  rope = config_json.rope({'rope_parameters': given, 'max_position_embeddings': 131072}, 'config.json')
  np.testing.assert_allclose(frequencies(rope, head_dim), expected.numpy(), rtol=3e-7)
  assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
  # What is written means the same, in the words of transformers 4, too.
  for written in (config_json.rope_json(rope), {**config_json.rope_json(rope), 'type': given['rope_type']}):
    values = {'rope_scaling': json.loads(json.dumps(written))}
    assert config_json.rope(values, 'config.json') == rope


def test_rotations_far_from_the_start_are_those_of_transformers():
  config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(YARN))
  module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
  positions = np.array([[0, 1, 40000, 131071]], np.int32)
  cosine, sine = module(torch.zeros(1), torch.tensor(positions))
  matrices = rotation(jnp.asarray(positions), 128, config_json.rope({'rope_parameters': YARN}, 'config.json'))
  for (row, column), expected in {(0, 0): cosine, (0, 1): -sine, (1, 0): sine, (1, 1): cosine}.items():
    # An angle of 1e5 has seven digits.
    np.testing.assert_allclose(matrices[:, :, row, column], expected[..., :64], atol=0.02)
    np.testing.assert_allclose(matrices[:, :2, row, column], expected[:, :2, :64], atol=2e-7)


REFUSED = {
  'type': (
    dict(rope_scaling=dict(type='longrope')),
    "rope type 'longrope' is not supported; supported: 'default', 'li",
  ),
  'dynamic': (dict(rope_scaling=dict(rope_type='dynamic', factor=2.0)), "rope type 'dynamic' is not supported"),
  'proportional': (dict(rope_parameters=dict(rope_type='proportional')), "rope type 'proportional' is not supported"),
  'unhashable': (dict(rope_scaling=dict(rope_type=['yarn'])), "rope type \\['yarn'\\] is not supported"),
  'factor': (dict(rope_scaling=dict(rope_type='linear')), 'factor must be a positive number, not None'),
  'infinite': (dict(rope_scaling=dict(rope_type='linear', factor=float('inf'))), 'factor must be a positive number'),
  'original': (
    dict(rope_scaling=dict(rope_type='llama3', factor=8.0)),
    'original_max_position_embeddings must be a positive number, not None',
  ),
  'bounds': (
    dict(rope_scaling=LLAMA3 | dict(low_freq_factor=4.0)),
    'low_freq_factor=4.0 must be smaller than high_freq_factor=4.0',
  ),
  'base of a ramp': (dict(rope_scaling=YARN | dict(rope_theta=1.0)), 'rope_theta=1.0 must be greater than 1'),
  'part of a head': (dict(partial_rotary_factor=0.5), 'partial_rotary_factor=0.5 is not supported; supported: 1'),
  'part of a head, transformers 5': (
    dict(rope_parameters=dict(rope_type='default', partial_rotary_factor=0.25)),
    'partial_rotary_factor=0.25 is not supported',
  ),
  'not an object': (dict(rope_scaling='yarn'), "rope_scaling must be a JSON object, not 'yarn'"),
  'of layer types': (
    dict(model_type='qwen3', rope_parameters=dict(full_attention=YARN, sliding_attention=YARN)),
    r"rope_parameters of layer types \(full_attention, sliding_attention\) are not supported for model_type 'qwen3'",
  ),
}


@pytest.mark.parametrize(('values', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_named_with_its_file(values, message):
  with pytest.raises(UserError, match=f'^some/config.json: {message}'):
    config_json.rope(values, 'some/config.json')


def test_no_entry_means_the_default():
  assert config_json.rope({}, 'config.json', theta=7.0) == Rope(7.0)
  assert config_json.rope({'rope_scaling': None, 'rope_theta': 5, 'partial_rotary_factor': 1.0}, '') == Rope(5.0)
