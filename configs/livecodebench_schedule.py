"""A schedule for a coding benchmark: written feedback on failures, successes as demonstrations, gathered updates.

  python -m launch.prepare_data --source=livecodebench --output=data/livecodebench
  python -m launch.train --config=configs/livecodebench_schedule.py
  python -m launch.train --config=configs/livecodebench_schedule.py:model=qwen3_4b,mode=hybrid,weights=adapter
  python -m launch.plan --config=configs/livecodebench_schedule.py:weights=adapter --topology=v5e:4x4

model     one of configs/models.py; with weights=adapter, one of configs/lora.py
mode      pure_sdpo; hybrid (the divergence on failures, and GRPO's policy gradient on all graded completions)
feedback  self (the trained model writes it); endpoint (a server writes it, see below); none
weights   full; adapter (rank 16)
task      livecodebench; chemistry, physics, biology, materials, tooluse
data      folder with <task>/train.json and <task>/test.json; `python -m launch.prepare_data` makes them

In each step, four completions of each of 16 questions are graded in the sandbox, and a model writes feedback on
failures. For a failure, the teacher reads a solution of the same group if there is one, or else the feedback of grader
and model. Successes are demonstrations and are not taught themselves. As soon as 8 failures with a signal have
gathered, there is an update: one optimizer step over at most 64 completions. Sizes are those of published runs of
continual learning on code, which were not repeated with this implementation, so that there is no number to expect.

With feedback=endpoint, any OpenAI-compatible server writes the feedback:

  --config.actor.self_distillation.feedback_endpoint.url=https://api.example.com/v1
  --config.actor.self_distillation.feedback_endpoint.model=NAME
  --config.actor.self_distillation.feedback_endpoint.api_key_env=VARIABLE
"""

from typing import get_args

from sdpo_jax.config import Config
from sdpo_jax.configs import lora, models, paper

QUESTIONS, COMPLETIONS, EXAMPLES = 16, 4, 8
STEPS = 160  # Number of generation batches.


def get_config(
  model: str = 'qwen3_8b',
  mode: str = 'pure_sdpo',
  feedback: str = 'self',
  weights: str = 'full',
  task: str = 'livecodebench',
  data: str = 'data',
) -> Config:
  """Return the schedule of a task; the module's docstring lists the values of the arguments.

  Raises:
    UserError: an argument has a value that is not allowed.
  """
  paper.check_arguments(
    'configs/livecodebench_schedule.py',
    model=(model, models.MODELS if weights == 'full' else lora.MAX_BATCH_ROWS),
    mode=(mode, ('pure_sdpo', 'hybrid')),
    feedback=(feedback, ('self', 'endpoint', 'none')),
    weights=(weights, ('full', 'adapter')),
    task=(task, get_args(paper.Task)),
  )
  config = (models if weights == 'full' else lora).get_config(model, task, 'sdpo', data)
  config.name += f'_schedule_{mode}'
  config.data.train_batch_size = config.actor.ppo_mini_batch_size = QUESTIONS
  config.rollout.n = COMPLETIONS
  config.trainer.total_training_steps = STEPS
  config.algorithm.mode = mode
  config.algorithm.min_sdpo_examples = EXAMPLES
  sd = config.actor.self_distillation
  sd.teach_successes = False
  if feedback != 'none':
    sd.feedback_model = feedback
    sd.feedback_max_prompt_len = 4096
  return config
