"""An experiment whose questions, answers and feedback have many lengths."""

from sdpo_jax.config import Config
from sdpo_jax.environments import registry
from sdpo_jax.types import Example, Outcome
from tests import tiny


@registry.register('startup')
def grade(examples, completions, *, truncated):
  return [Outcome(float(sum(text.encode()) % 2), 'x' * (sum(text.encode()) % 90)) for text in completions]


@registry.register_generator('startup')
def questions(split, seed):
  return lambda index: Example(
    f'{split}-{index}', [{'role': 'user', 'content': 'Q' * (1 + index * 37 % 60)}], 'startup', None, 'startup'
  )


def experiment(folder, **changes) -> Config:
  """Questions, answers and feedback of many lengths, through few slots."""
  config = Config(name='startup')
  config.model.path = str(tiny.make_model(folder / 'model'))
  config.model.dtype, config.model.remat = 'float32', 'none'
  config.data.train_files = config.data.val_files = ('generator:startup',)
  config.data.val_max_samples, config.data.train_batch_size = 11, 4
  config.data.max_prompt_length, config.data.max_response_length = 100, 64
  config.data.response_buckets = (64,)
  config.data.reprompt_buckets = (256,)
  config.rollout.n, config.val_kwargs.n = 6, 2
  config.rollout.max_batch_rows, config.rollout.decode_chunk = 16, 8
  config.rollout.stop_token_ids = tuple(range(0, 256, 16))  # Completions of 16 tokens on average.
  config.actor.ppo_mini_batch_size, config.actor.ppo_micro_batch_size = 2, 8
  config.actor.self_distillation.max_reprompt_len = 256
  config.actor.self_distillation.distillation_topk = 8
  config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.save_freq = 3, 2, 2
  config.trainer.tensorboard = False
  for name, value in changes.items():
    *sections, leaf = name.split('__')
    target = config
    for section in sections:
      target = getattr(target, section)
    setattr(target, leaf, value)
  return config
