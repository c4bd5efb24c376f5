"""The baseline of the quickstart: GRPO with the same base model, questions and number of completions.

python -m launch.train --config=configs/quickstart_grpo.py
"""

from sdpo_jax.config import Config
from sdpo_jax.config.overrides import reset_unread
from sdpo_jax.configs import quickstart


def get_config() -> Config:
  """Return the quickstart's run with the GRPO loss."""
  config = quickstart.get_config()
  config.name = 'quickstart_grpo'
  config.actor.policy_loss.loss_mode = 'vanilla'
  return reset_unread(config)
