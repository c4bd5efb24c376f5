"""SDPO with rich feedback on LiveCodeBench v6 with Qwen3-8B, as in the paper's Section 4.

  python -m launch.prepare_data --source=livecodebench --output=data/livecodebench
  python -m launch.train --config=configs/qwen3_8b_livecodebench.py

Paper: score/mean@4 27.9 % before, 48.8 % after 80 steps (GRPO 41.2 %), on 4 GH200.
"""

from sdpo_jax.config import Config
from sdpo_jax.configs import paper


def get_config() -> Config:
  """Return the experiment of `configs/paper.py`."""
  return paper.get_config(task='livecodebench')
