"""SDPO on SciKnowEval chemistry with Qwen3-8B, as in the paper's Section 3; `configs/paper.py` has all experiments.

  python -m launch.prepare_data --source=sciknoweval --domain=chemistry --output=data/chemistry
  python -m launch.train --config=configs/qwen3_8b_chemistry.py

Paper, Table 3: mean@16 41.2 % before, 73.2 % within one hour, 80.9 % within five hours on 4 GH200 (about 150 steps).
"""

from sdpo_jax.config import Config
from sdpo_jax.configs import paper


def get_config() -> Config:
  """Return the experiment of `configs/paper.py`."""
  return paper.get_config(task='chemistry')
