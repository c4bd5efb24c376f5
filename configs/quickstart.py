"""SDPO on a CPU in a few minutes: from feedback, a tiny model learns to follow instructions that it misreads.

  python -m launch.train --config=configs/quickstart.py

The base model (`configs/quickstart_model`, made by `python -m launch.make_base`) misreads its instructions about
digits, so that only a few per cent of its sampled answers are right. When it is shown the grader's feedback on an
attempt, or a successful one, it answers far better; SDPO distils that into the plain context. docs/method.md has the
expected curves.
"""

from sdpo_jax.config import Config, beside


def get_config() -> Config:
  """Return the run that trains all parameters of the tiny model."""
  config = Config(name='quickstart')
  config.model.path = beside(__file__, 'quickstart_model')
  config.model.dtype = 'float32'
  config.model.remat = 'none'
  config.data.train_files = ('generator:digits',)
  config.data.val_files = ('generator:digits',)
  config.data.val_max_samples = 128
  config.data.train_batch_size = 16
  config.data.max_prompt_length = 32
  config.data.max_response_length = 8
  # One length of each kind, so that the run compiles one program of each kind.
  config.data.prompt_buckets = (32,)
  config.data.response_buckets = (8,)
  config.data.reprompt_buckets = (96,)
  config.rollout.n = 8
  config.rollout.max_batch_rows = 128  # As many as a step has, so that evaluations use the same programs.
  # Held-out accuracy is measured with unmodified sampling, as in training.
  config.val_kwargs.n = 4
  config.val_kwargs.temperature = 1.0
  config.val_kwargs.top_p = 1.0
  config.actor.ppo_mini_batch_size = 16
  config.actor.ppo_micro_batch_size = 128
  sd = config.actor.self_distillation
  sd.distillation_topk = 20
  sd.max_reprompt_len = 96
  # A teacher that follows the student would lose the skill of using its context, which only the base was trained for.
  sd.teacher_regularization = 'frozen'
  # Sampler and trainer compute the same here: weights would be 1 up to rounding, but cost a forward pass.
  config.algorithm.rollout_correction.rollout_is = None
  config.optimizer.lr = 1e-3
  config.optimizer.lr_warmup_steps = 0
  config.trainer.total_training_steps = 300
  config.trainer.test_freq = 20
  config.trainer.save_freq = 50
  config.trainer.rollout_save_freq = 10
  return config
