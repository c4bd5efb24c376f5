"""The paper's GRPO baseline on SciKnowEval chemistry with Qwen3-8B; `configs/paper.py` has all its experiments.

  python -m launch.train --config=configs/qwen3_8b_chemistry_grpo.py

Paper, Table 3: mean@16 41.2 % before, 65.9 % within one hour, 74.5 % within five hours on 4 GH200.
"""

from sdpo_jax.config import Config
from sdpo_jax.configs import paper


def get_config() -> Config:
  """Return the experiment of `configs/paper.py`."""
  return paper.get_config(task='chemistry', method='grpo')
