"""A tiny agent as a service: it proposes tool calls, a user allows or corrects them, and it learns from that at once.

  python -m launch.session --config=configs/session_quickstart.py

With this config, `launch.serve` runs the service alone, on http://127.0.0.1:8420; adapters of rank 16 are stored in
runs/sessions. `python -m launch.make_base` makes the model, `configs/session_model`, in a few CPU-minutes. It knows
some forty kinds of tasks, such as 'find where parse is used in src' or 'run the tests in app.py', and a few dozen
names: sdpo_jax/quickstart/tool_tasks.py lists them. It has a preferred way to do each, and understands corrections such
as 'use rg rather than grep -r'. docs/sessions.md explains the next steps.
"""

from sdpo_jax.config import Config, beside


def get_config() -> Config:
  """Return the settings of the service."""
  config = Config(name='session_quickstart')
  config.model.path = beside(__file__, 'session_model')
  config.model.dtype = 'float32'
  config.model.remat = 'none'
  config.model.lora.rank = 16
  config.model.lora.alpha = 16.0
  serve = config.serve
  serve.model_name = 'agent'
  # A session of ten tasks has about 450 tokens; the rest is room for results of tools.
  # The lesson of a first task fits the smallest.
  serve.prompt_buckets, serve.response_buckets, serve.teacher_buckets = (128, 256, 768), (48,), (192, 320, 896)
  serve.score_buckets = (320, 832)
  serve.rows, serve.training_rows = 8, 2
  serve.snapshots = serve.teachers = serve.slots = 4
  serve.topk = 20
  serve.memory_mb = 256
  serve.store.root = 'runs/sessions'
  serve.learning.learning_rate, serve.learning.steps = 1e-3, 3
  # With a teacher that follows the adapter, more of what was right is forgotten.
  serve.learning.teacher = 'base'
  return config
