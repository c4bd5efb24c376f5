"""The settings shared by the paper's runs (arXiv 2601.20802v2, Tables 12 and 13; lasgroup/SDPO 0e6d510 scripts).

The reference's own quirks are kept here and only here: the demonstration is the first success in length-balanced batch
order, over-long teacher prompts are cut from the right, and every sequence has its own denominator.
"""

from sdpo_jax.config import Config


def base(name: str, model: str) -> Config:
  """What all four recipes have in common."""
  config = Config(name=name)
  config.model.path = model
  config.data.train_batch_size = 32
  config.data.max_prompt_length = 2048
  config.data.max_response_length = 8192
  config.data.filter_overlong_prompts = True
  config.data.enable_thinking = False
  # 2 × 3 × 2 declared lengths: a micro-batch is padded to the smallest that hold it.
  config.data.prompt_buckets = (512, 2048)
  config.data.response_buckets = (1024, 4096, 8192)
  config.data.reprompt_buckets = (2560, 10240)
  config.rollout.n = 8
  config.rollout.temperature = 1.0
  config.val_kwargs.temperature = 0.6
  config.val_kwargs.top_p = 0.95
  config.actor.loss_agg_mode = 'token-mean'
  config.actor.loss_group_size = 1
  config.algorithm.rollout_correction.rollout_is = 'token'
  config.algorithm.rollout_correction.rollout_is_threshold = 2.0
  config.optimizer.betas = (0.9, 0.999)
  config.optimizer.weight_decay = 0.01
  config.optimizer.grad_clip = 1.0
  config.trainer.test_freq = 5
  config.trainer.batch_order = 'balanced'
  config.trainer.balance_partitions = 4
  sd = config.actor.self_distillation
  sd.demonstration = 'first'
  sd.reprompt_truncation = 'right'
  sd.max_reprompt_len = 10240
  sd.is_clip = 2.0
  sd.success_reward_threshold = 0.5
  return config


def generalization(name: str, model: str, train: str, val: str) -> Config:
  """SDPO of Section 3 (science and tool use): JSD, top-100 with tail, EMA 0.05, no feedback, one step a batch."""
  config = base(name, model)
  config.data.train_files, config.data.val_files = (train,), (val,)
  config.val_kwargs.n = 16
  config.actor.ppo_mini_batch_size = 32
  config.optimizer.lr = 1e-5
  config.optimizer.lr_warmup_steps = 10
  config.trainer.total_training_steps = 150
  config.trainer.val_before_train = False
  sd = config.actor.self_distillation
  sd.alpha = 0.5
  sd.distillation_topk = 100
  sd.teacher_update_rate = 0.05
  sd.include_environment_feedback = False
  return config


def rich_feedback(name: str, model: str, train: str, val: str) -> Config:
  """SDPO of Section 4 (LiveCodeBench v6): reverse KL, top-20, EMA 0.01, feedback, 32 optimizer steps a batch."""
  config = base(name, model)
  config.data.train_files, config.data.val_files = (train,), (val,)
  config.val_kwargs.n = 4
  config.actor.ppo_mini_batch_size = 1
  config.optimizer.lr = 1e-6
  config.optimizer.lr_warmup_steps = 0
  config.trainer.total_training_steps = 80
  config.trainer.val_before_train = False
  sd = config.actor.self_distillation
  sd.alpha = 1.0
  sd.distillation_topk = 20
  sd.teacher_update_rate = 0.01
  sd.include_environment_feedback = True
  return config


def grpo(config: Config, *, mini_batch: int, lr: float) -> Config:
  """The paper's GRPO baseline with the data and evaluation of `config`: dual-clip PPO, advantages without std."""
  config.name += '_grpo'
  config.actor.policy_loss.loss_mode = 'vanilla'
  config.actor.policy_loss.clip_ratio_low = 0.2
  config.actor.policy_loss.clip_ratio_high = 0.28
  config.actor.policy_loss.clip_ratio_c = 3.0
  config.actor.policy_loss.norm_adv_by_std_in_grpo = False
  config.actor.ppo_mini_batch_size = mini_batch
  config.optimizer.lr = lr
  config.trainer.val_before_train = True
  return config
