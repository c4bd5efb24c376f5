"""LoRA: the recipes of `configs/models.py` with a small adapter on a frozen model of 3B to 8B parameters.

  python -m launch.prepare_data --source=sciknoweval --domain=chemistry --output=data/chemistry
  python -m launch.train --config=configs/lora.py:model=qwen3_8b,task=chemistry
  python -m launch.plan --config=configs/lora.py:model=qwen3_8b,task=chemistry --topology=v5e:2x4

model     qwen3_4b, qwen3_8b; qwen2_5_3b, qwen2_5_7b; llama3_2_3b, llama3_1_8b; mistral_7b; olmo3_7b; gemma3_4b
task      chemistry, physics, biology, materials, tooluse; livecodebench
method    sdpo; grpo (mini-batches of 8 questions); grpo_on_policy (one optimizer step per batch)
data      folder with <task>/train.json and <task>/test.json; `python -m launch.prepare_data` makes them

Every matrix of the layers has factors of rank 16 (`model.lora`), scaled by alpha / rank = 2. The teacher is the moving
average of the factors, so that no second model is needed. The paper trains all parameters and has no numbers for these
runs: rank and alpha are common values, and learning rates are ten times those of the full recipe, the ratio that
Schulman et al. ("LoRA Without Regret", Thinking Machines Lab, 2025) found for both supervised and reinforcement
learning. They are starting points. `rollout.max_batch_rows` is the largest value for the smallest slice of v5e
(docs/performance.md, *LoRA*); raise it with more chips.
"""

from typing import get_args

from sdpo_jax.config import Config
from sdpo_jax.configs import models, paper

MODELS = (
  'qwen3_4b', 'qwen3_8b', 'qwen2_5_3b', 'qwen2_5_7b', 'llama3_2_3b', 'llama3_1_8b', 'mistral_7b', 'olmo3_7b',
  'gemma3_4b',
)  # fmt: skip
# Model → number of completions decoded at once on its smallest slice of v5e.
MAX_BATCH_ROWS = dict.fromkeys(MODELS, 32) | {'olmo3_7b': 16}
RANK, ALPHA = 16, 32.0
LEARNING_RATE = 10  # Multiple of the learning rate for training all parameters.


def get_config(model: str = 'qwen3_8b', task: str = 'chemistry', method: str = 'sdpo', data: str = 'data') -> Config:
  """Return the recipe of a task with an adapter; the module's docstring lists the values of the arguments.

  Raises:
    UserError: an argument has a value that is not allowed.
  """
  tasks, methods = get_args(paper.Task), get_args(paper.Method)
  paper.check_arguments('configs/lora.py', model=(model, MAX_BATCH_ROWS), task=(task, tasks), method=(method, methods))
  config = models.get_config(model, task, method, data)
  config.name += '_lora'
  config.model.lora.rank, config.model.lora.alpha = RANK, ALPHA
  config.optimizer.lr = round(LEARNING_RATE * config.optimizer.lr, 12)  # 1e-05, not 9.999999999999999e-06.
  config.actor.ppo_micro_batch_size = 1  # With several chips, one sequence each.
  config.rollout.max_batch_rows = MAX_BATCH_ROWS[model]
  return config
