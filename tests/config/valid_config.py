"""The least settings that are valid."""

from sdpo_jax.config import Config


def valid() -> Config:
  config = Config()
  config.model.path = 'model'
  config.data.train_files = config.data.val_files = ('rows.jsonl',)
  return config
