"""SDPO on SciKnowEval chemistry with Qwen3-8B, as the paper's Section 3.

  python -m launch.train --config=configs/qwen3_8b_chemistry.py --config.model.path=PATH_OF_QWEN3_8B \
      --config.data.train_files=chemistry/train.json --config.data.val_files=chemistry/test.json

Paper, Table 3: mean@16 41.2 % before, 73.2 % after one hour, 80.9 % within five hours on 4 GH200 (about 150 steps).
Needs the multiple-choice environment; see the table in the README for what is there today.
"""

from configs import paper
from sdpo_jax.config import Config


def get_config() -> Config:
  return paper.generalization(
    'qwen3_8b_chemistry', 'Qwen3-8B', 'data/sciknoweval/chemistry/train.json', 'data/sciknoweval/chemistry/test.json'
  )
