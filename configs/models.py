"""The paper's recipes (`configs/paper.py`) with other models, for which the paper has no numbers.

  python -m launch.prepare_data --source=sciknoweval --domain=chemistry --output=data/chemistry
  python -m launch.train --config=configs/models.py:model=llama3_1_8b,task=chemistry
  python -m launch.plan --config=configs/models.py:model=gemma3_4b,task=chemistry --topology=v5e:4x4

model     qwen3_0_6b, qwen3_1_7b, qwen3_4b, qwen3_8b, qwen3_14b; qwen2_5_0_5b, qwen2_5_1_5b, qwen2_5_3b, qwen2_5_7b,
          qwen2_5_14b;
          llama3_2_1b, llama3_2_3b, llama3_1_8b; mistral_7b; olmo3_7b; gemma3_1b, gemma3_4b, gemma3_12b
task      chemistry, physics, biology, materials, tooluse; livecodebench
method    sdpo; grpo (mini-batches of 8 questions); grpo_on_policy (one optimizer step per batch)
data      folder with <task>/train.json and <task>/test.json; `python -m launch.prepare_data` makes them

Behaviour of the reference's code that is not in the paper is left out: these runs use the defaults of this project
(docs/experiments.md). Learning rates are those of the paper for Qwen3-8B and Olmo-3-7B; smaller models may need larger
ones. The planner assumes the lengths that the paper measured with Qwen3-8B.
"""

from typing import get_args

from sdpo_jax.config import Config
from sdpo_jax.config.overrides import reset_unread
from sdpo_jax.configs import paper

MODELS = {
  'qwen3_0_6b': 'Qwen/Qwen3-0.6B',
  'qwen3_1_7b': 'Qwen/Qwen3-1.7B',
  'qwen3_4b': 'Qwen/Qwen3-4B',
  'qwen3_8b': 'Qwen/Qwen3-8B',
  'qwen3_14b': 'Qwen/Qwen3-14B',
  'qwen2_5_0_5b': 'Qwen/Qwen2.5-0.5B-Instruct',
  'qwen2_5_1_5b': 'Qwen/Qwen2.5-1.5B-Instruct',
  'qwen2_5_3b': 'Qwen/Qwen2.5-3B-Instruct',
  'qwen2_5_7b': 'Qwen/Qwen2.5-7B-Instruct',
  'qwen2_5_14b': 'Qwen/Qwen2.5-14B-Instruct',
  'llama3_2_1b': 'meta-llama/Llama-3.2-1B-Instruct',
  'llama3_2_3b': 'meta-llama/Llama-3.2-3B-Instruct',
  'llama3_1_8b': 'meta-llama/Llama-3.1-8B-Instruct',
  'mistral_7b': 'mistralai/Mistral-7B-Instruct-v0.3',
  'olmo3_7b': 'allenai/Olmo-3-7B-Instruct',
  'gemma3_1b': 'google/gemma-3-1b-it',
  'gemma3_4b': 'google/gemma-3-4b-it',
  'gemma3_12b': 'google/gemma-3-12b-it',
}


def get_config(model: str = 'llama3_1_8b', task: str = 'chemistry', method: str = 'sdpo', data: str = 'data') -> Config:
  """Return the recipe of a task with a model; the module's docstring lists the values of the arguments.

  Raises:
    UserError: an argument has a value that is not allowed.
  """
  tasks, methods = get_args(paper.Task), get_args(paper.Method)
  paper.check_arguments('configs/models.py', model=(model, MODELS), task=(task, tasks), method=(method, methods))
  config = paper.recipe(f'{model}_{task}', MODELS[model], task, data, method)
  choose(config, model)
  paper.plan_lengths(config, task, paper.PAPER_LENGTHS['qwen3_8b', method == 'sdpo'])
  return reset_unread(config)


def choose(config: Config, model: str) -> None:
  """Set the path of a model in `MODELS`, and the settings that its chat template needs."""
  config.model.path = MODELS[model]
  if model.startswith('qwen3_'):
    config.data.enable_thinking = False  # Other templates have no such variable.
  if model.startswith('llama3_'):
    config.data.apply_chat_template_kwargs = {'date_string': '26 Jul 2024'}  # The default is the current date.
