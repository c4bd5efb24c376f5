"""SDPO with rich feedback on LiveCodeBench v6 with Qwen3-8B, as the paper's Section 4.

  python -m launch.train --config=configs/qwen3_8b_livecodebench.py --config.model.path=PATH_OF_QWEN3_8B

Paper: score/mean@4 27.9 % before, 48.8 % after 80 steps (GRPO 41.2 %).
Needs the code environment; see the table in the README for what is there today.
"""

from configs import paper
from sdpo_jax.config import Config


def get_config() -> Config:
  return paper.rich_feedback(
    'qwen3_8b_livecodebench', 'Qwen3-8B', 'data/livecodebench_v6/train.json', 'data/livecodebench_v6/test.json'
  )
