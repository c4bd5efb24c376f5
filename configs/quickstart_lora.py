"""The quickstart with LoRA: the same base model, questions and number of completions, but a trained adapter.

  python -m launch.train --config=configs/quickstart_lora.py

Held-out accuracy goes from 2 % to 95 % in 300 steps (mean over 3 seeds); full fine-tuning ends at 93 %. The frozen
teacher of the quickstart is here the initial adapter, which computes the same as the base; with an average of the
factors (lora_ema) training collapses. docs/lora.md has the curves and other ranks. Rank 32 is large for matrices of
64 × 64; for large models see `configs/lora.py`.
"""

from sdpo_jax.config import Config
from sdpo_jax.configs import quickstart


def get_config() -> Config:
  """Return the quickstart's run with an adapter of rank 32."""
  config = quickstart.get_config()
  config.name = 'quickstart_lora'
  config.model.lora.rank = 32
  config.model.lora.alpha = 32.0
  config.optimizer.lr = 2e-3  # Twice that of the quickstart.
  return config
