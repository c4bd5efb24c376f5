"""The paper's GRPO baseline on SciKnowEval chemistry with Qwen3-8B (Table 3: 65.9 % / 74.5 % after 1 h / 5 h).

python -m launch.train --config=configs/qwen3_8b_chemistry_grpo.py --config.model.path=PATH_OF_QWEN3_8B
"""

from configs import paper, qwen3_8b_chemistry
from sdpo_jax.config import Config


def get_config() -> Config:
  return paper.grpo(qwen3_8b_chemistry.get_config(), mini_batch=8, lr=1e-6)
