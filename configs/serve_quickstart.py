"""The tiny model of the quickstart as a service on a CPU; its only storage is a SQLite file and a folder.

  python -m launch.serve --config=configs/serve_quickstart.py

It listens on http://127.0.0.1:8420, and is ready after about a minute the first time and about ten seconds later on.
Adapters of rank 16 are stored in runs/service. docs/serving.md explains the next steps.
"""

from sdpo_jax.config import Config
from sdpo_jax.configs import quickstart_lora


def get_config() -> Config:
  """Return the settings of the service."""
  config = quickstart_lora.get_config()
  config.name = 'serve_quickstart'
  config.model.lora.rank = 16
  config.model.lora.alpha = 16.0
  serve = config.serve
  serve.model_name = 'quickstart'
  # One length of each kind, so that the first start compiles few programs.
  serve.prompt_buckets, serve.response_buckets, serve.teacher_buckets = (64,), (32,), (192,)
  serve.rows, serve.training_rows = 8, 2
  serve.snapshots = serve.teachers = serve.slots = 4
  serve.topk = 20
  serve.memory_mb = 256
  serve.learning.learning_rate = 2e-3
  return config
