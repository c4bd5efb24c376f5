"""`configs/lora.py`: the recipes of `configs/models.py` with an adapter."""

from typing import get_args

import pytest

from sdpo_jax.config.fields import flatten
from sdpo_jax.configs import lora, models, paper
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, parameters, published


@pytest.mark.parametrize('model', lora.MAX_BATCH_ROWS)
def test_every_model_with_every_recipe_trains_the_factors_of_all_its_matrices(model):
  names = set()
  for task in get_args(paper.Task):
    for method in get_args(paper.Method):
      config = lora.get_config(model, task, method).validate()
      names.add(config.name)
      assert config.data.train_files == (f'data/{task}/train.json',)
  assert len(names) == len(get_args(paper.Task)) * len(get_args(paper.Method))
  assert f' {model}' in lora.__doc__
  policy = huggingface.describe(published.config_json(config.model.path), config.model)
  sizes = policy.config
  # By hand: of a matrix [in, out] the factors hold 16 · (in + out); seven matrices in a layer, none elsewhere.
  hidden, heads, kv = sizes.hidden_size, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
  pairs = [(hidden, heads), (hidden, kv), (hidden, kv), (heads, hidden), *[(hidden, sizes.intermediate_size)] * 3]
  table = policy.parameter_table()
  assert parameters.count(parameters.trainable(table)) == sizes.layers * 16 * sum(a + b for a, b in pairs)
  assert 3e9 <= parameters.count(parameters.frozen(table)) < 8.5e9
  assert {p.dtype for p in parameters.frozen(table) if p.compute} == {'bfloat16'}
  assert {parameter.dtype for parameter in parameters.trainable(table)} == {'float32'}


@pytest.mark.parametrize(('task', 'method'), [('chemistry', 'sdpo'), ('livecodebench', 'sdpo'), ('tooluse', 'grpo')])
def test_what_differs_from_the_recipe_that_trains_all_parameters(task, method):
  ours = flatten(lora.get_config('llama3_1_8b', task, method))
  theirs = flatten(models.get_config('llama3_1_8b', task, method))
  different = {name: ours[name] for name in ours if ours[name] != theirs[name]}
  assert different == {
    'name': f'{theirs["name"]}_lora',
    'model.lora.rank': 16,
    'optimizer.lr': {1e-5: 1e-4, 1e-6: 1e-5}[theirs['optimizer.lr']],
    'actor.ppo_micro_batch_size': 1,
    'rollout.max_batch_rows': 32,
  }


@pytest.mark.parametrize('arguments', [{'model': 'qwen3_14b'}, {'task': 'alchemy'}, {'method': 'ppo'}])
def test_other_arguments_are_refused_by_name(arguments):
  (name, value), *_ = arguments.items()
  with pytest.raises(UserError, match=f'configs/lora.py: {name}={value!r} is none of'):
    lora.get_config(**arguments)
