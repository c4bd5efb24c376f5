"""The sizes of published models give the number of parameters that the hub states."""

import pytest

from sdpo_jax.config import ModelConfig
from sdpo_jax.models import huggingface, parameters, published

# Parameters as the hub counts them in the model's files, but for what is there twice (a tied unembedding) and for
# Gemma 3's vision tower.
STATED = {
  'Qwen/Qwen3-0.6B': 596_049_920,
  'Qwen/Qwen3-1.7B': 1_720_574_976,
  'Qwen/Qwen3-4B': 4_022_468_096,
  'Qwen/Qwen3-8B': 8_190_735_360,
  'Qwen/Qwen3-14B': 14_768_307_200,
  'Qwen/Qwen3-32B': 32_762_123_264,
  'Qwen/Qwen2.5-0.5B-Instruct': 494_032_768,
  'Qwen/Qwen2.5-1.5B-Instruct': 1_543_714_304,
  'Qwen/Qwen2.5-3B-Instruct': 3_085_938_688,
  'Qwen/Qwen2.5-7B-Instruct': 7_615_616_512,
  'Qwen/Qwen2.5-14B-Instruct': 14_770_033_664,
  'Qwen/Qwen2.5-32B-Instruct': 32_763_876_352,
  'Qwen/Qwen2.5-72B-Instruct': 72_706_203_648,
  'meta-llama/Llama-3.2-1B-Instruct': 1_235_814_400,
  'meta-llama/Llama-3.2-3B-Instruct': 3_212_749_824,
  'meta-llama/Llama-3.1-8B-Instruct': 8_030_261_248,
  'meta-llama/Llama-3.3-70B-Instruct': 70_553_706_496,
  'mistralai/Mistral-7B-Instruct-v0.3': 7_248_023_552,
  'allenai/Olmo-3-7B-Instruct': 7_298_011_136,
  'allenai/Olmo-3-32B-Think': 32_233_522_176,
  'google/gemma-3-1b-it': 999_885_952,
  'google/gemma-3-4b-it': 3_880_263_168,
  'google/gemma-3-12b-it': 11_766_034_176,
  'google/gemma-3-27b-it': 27_009_346_304,
}


@pytest.mark.parametrize('name', published.names())
def test_as_many_parameters_as_stated(name):
  policy = huggingface.describe(published.config_json(name), ModelConfig(vocab_multiple=1))
  assert parameters.count(policy.parameter_table()) == STATED[name]


def test_other_models_are_not_known_and_what_is_returned_may_be_changed():
  assert published.config_json('Qwen/Qwen3-8B-FP8') is None
  published.config_json('Qwen/Qwen3-8B')['vocab_size'] = 1
  assert published.config_json('Qwen/Qwen3-8B')['vocab_size'] == 151936
