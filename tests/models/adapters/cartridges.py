"""Random cartridges, and readers of published ones as in other programs."""

import numpy as np
import torch
import transformers

from sdpo_jax.config import ModelConfig
from sdpo_jax.models import huggingface
from sdpo_jax.models.adapters import cartridge_files
from sdpo_jax.models.adapters.cartridge import Cartridge
from tests import tiny

GOLDEN = tiny.REPOSITORY / 'tests' / 'golden' / 'data' / 'cartridges'


def make(layers=2, kv_heads=2, slots=16, head_dim=8, frozen=1, **settings):
  """Return a cartridge of random numbers."""
  keys, values = np.random.default_rng(0).standard_normal((2, layers, kv_heads, slots, head_dim), np.float32)
  return Cartridge(keys, values, frozen, **settings)


def config_of(model):
  """Return the architecture of a model directory."""
  return huggingface.read_policy(model, ModelConfig()).config


def origin_of(model):
  """Return the origin of a cartridge for a model directory."""
  return cartridge_files.Origin.of(model, config_of(model))


def assert_equal(left, right):
  """Check that two cartridges have the same slots, bit for bit."""
  np.testing.assert_array_equal(left.keys, right.keys)
  np.testing.assert_array_equal(left.values, right.values)
  assert left.prefix == right.prefix
  assert left.keys.dtype == left.values.dtype == np.float32


def past_of(file):
  """Return the slots of a published file as `past_key_values` of transformers."""
  past = transformers.DynamicCache()
  for layer, (keys, values) in enumerate(zip(*loaded_as_published(file), strict=True)):
    past.update(keys[None], values[None], layer)
  return past


def loaded_as_published(file):
  """Return keys and values as the second version of the published class loads them, including its mistake."""
  content = torch.load(file, weights_only=False)
  frozen, trainable = content['frozen_keys'], content['trainable_keys']
  assert len(frozen) == len(trainable)
  count = frozen[0].size(1)  # Its mistake: the axis of heads instead of that of tokens.
  keys, values = (
    torch.stack(
      [torch.cat(pair, 2) for pair in zip(content[f'frozen_{what}'], content[f'trainable_{what}'], strict=True)]
    )
    for what in ('keys', 'values')
  )
  assert keys.shape[3] - count > 0
  return keys[:, 0], values[:, 0]
