"""Questions about a document in the context, for the tiny model in `configs/facts_model`.

  python -m launch.evaluate --config=configs/facts.py --model=configs/facts_model --output=facts.json

The model, made by `python -m launch.make_base --task=facts --config=configs/facts.py`, answers nearly all of them. It
is the base model for cartridges: a document has 193 tokens with 48 facts, which no weights contain.
"""

from sdpo_jax.config import Config, beside


def get_config() -> Config:
  """Return the settings that evaluate the tiny model on questions about documents."""
  config = Config(name='facts')
  config.model.path = beside(__file__, 'facts_model')
  config.model.dtype = 'float32'
  config.model.remat = 'none'
  config.data.train_files = ('generator:facts',)
  config.data.val_files = ('generator:facts',)
  config.data.val_max_samples = 480  # All facts of ten documents.
  config.data.max_prompt_length = 200
  config.data.max_response_length = 4
  config.data.prompt_buckets = (200,)
  config.data.response_buckets = (4,)
  config.val_kwargs.n = 1
  config.val_kwargs.temperature = 1.0
  config.val_kwargs.top_p = 1.0
  return config
