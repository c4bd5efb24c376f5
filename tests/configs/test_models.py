"""`configs/models.py`: the paper's recipes with every listed model."""

import dataclasses

import pytest

from sdpo_jax import config as config_lib
from sdpo_jax.configs import models, paper
from sdpo_jax.errors import UserError
from sdpo_jax.models import published


@pytest.mark.parametrize('model', models.MODELS)
def test_every_model_with_every_recipe_is_valid_and_can_be_planned_without_a_network(model):
  for task, method in (('chemistry', 'sdpo'), ('livecodebench', 'grpo'), ('tooluse', 'grpo_on_policy')):
    config = models.get_config(model, task, method).validate()
    assert config.name.startswith(f'{model}_{task}') and config.data.train_files == (f'data/{task}/train.json',)
    assert published.config_json(config.model.path) is not None
  assert f' {model}' in models.__doc__


def test_the_recipe_is_the_papers_without_what_only_the_references_code_does():
  def settings(node, prefix=''):
    for field in dataclasses.fields(node):
      value = getattr(node, field.name)
      if dataclasses.is_dataclass(value):
        yield from settings(value, f'{prefix}{field.name}.')
      else:
        yield prefix + field.name, value

  ours = dict(settings(models.get_config('qwen3_8b', 'livecodebench')))
  papers = dict(settings(paper.get_config('livecodebench')))
  defaults = dict(settings(config_lib.Config()))
  different = {name for name in ours if ours[name] != papers[name]}
  assert different == {
    'data.split_special_tokens',
    'actor.loss_group_size',
    'optimizer.skip_empty_steps',
    'trainer.batch_order',
    'trainer.balance_partitions',
    'environments.profile',
    'actor.self_distillation.demonstration',
    'actor.self_distillation.thinking_rule',
    'actor.self_distillation.reprompt_truncation',
  }
  assert all(ours[name] == defaults[name] for name in different)


@pytest.mark.parametrize('arguments', [{'model': 'gemma2_9b'}, {'task': 'alchemy'}, {'method': 'ppo'}])
def test_other_arguments_are_refused_by_name(arguments):
  (name, value), *_ = arguments.items()
  with pytest.raises(UserError, match=f'configs/models.py: {name}={value!r} is none of'):
    models.get_config(**arguments)


def test_an_argument_that_is_nearly_another_is_suggested():
  with pytest.raises(UserError, match="task='chemistri' is none of .*; did you mean 'chemistry'"):
    models.get_config(task='chemistri')
