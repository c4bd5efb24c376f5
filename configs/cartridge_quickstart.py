"""A cartridge on a CPU in two minutes: 16 slots learn to replace a whole document of 193 tokens.

  python -m launch.train --config=configs/cartridge_quickstart.py
  python -m launch.train --config=configs/cartridge_quickstart.py:document=FILE

document  text file written by `python -m launch.make_base --task=document --seed=…
          --config=configs/facts.py --output=FILE`

The model (`configs/facts_model`) answers questions about facts in its context. The shipped document,
`configs/facts_document.txt`, has 48 facts, and there is a question about each. Sampled at temperature 1, the model is
right on 8 % of the questions with the first 16 tokens of the document, on 90 % after 200 steps and on 96 % after 1000;
the teacher is the model itself with the whole document. Reference answers are not trained on; they only grade the
evaluations.
"""

from sdpo_jax.config import Config, beside
from sdpo_jax.configs import facts


def get_config(document: str = beside(__file__, 'facts_document.txt')) -> Config:
  """Return the run that trains 16 slots on a document."""
  config = facts.get_config()
  config.name = 'cartridge_quickstart'
  config.model.cartridge.tokens = 16
  config.model.cartridge.document = document
  config.data.train_files = (f'generator:facts?document={document}&shown=no',)
  config.data.val_files = config.data.train_files
  config.data.val_max_samples = 48
  config.data.train_batch_size = 48
  config.data.max_prompt_length = 8
  config.data.max_response_length = 3
  config.data.prompt_buckets = (8,)
  config.data.response_buckets = (3,)
  config.rollout.n = 1
  config.val_kwargs.n = 4
  config.actor.ppo_mini_batch_size = 48
  config.actor.ppo_micro_batch_size = 48
  sd = config.actor.self_distillation
  sd.teacher_context = 'prompt'
  sd.teacher_regularization = 'base'
  sd.alpha = 0.0  # KL(teacher‖student): from slots that know little, other divergences hardly learn.
  sd.distillation_topk = None
  config.algorithm.rollout_correction.rollout_is = None
  config.optimizer.lr = 0.2
  config.optimizer.betas = (0.9, 0.99)  # 0.999 is worse at every learning rate that was tried.
  config.optimizer.lr_warmup_steps = 20
  config.optimizer.lr_scheduler_type = 'cosine'
  config.trainer.total_training_steps = 1000
  config.trainer.test_freq = 100
  config.trainer.save_freq = 500
  config.trainer.rollout_save_freq = 250
  return config
