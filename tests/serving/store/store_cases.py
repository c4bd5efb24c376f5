"""What tests of the store share: a base of a tiny model, arrays of its adapters, and what a store holds."""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.models import huggingface
from sdpo_jax.serving.records import FROZEN, KEYS, VALUES, WINDOWED
from sdpo_jax.serving.store.store import Store
from sdpo_jax.serving.store.versions import Base
from tests.serving.store import places

SIZES = {
  'model_type': 'qwen3',
  'vocab_size': 32,
  'hidden_size': 8,
  'intermediate_size': 12,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 4,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-6,
  'rope_theta': 1e4,
  'tie_word_embeddings': True,
}
FINGERPRINT = {'weights': {'model': 'one'}, 'architecture': {'hidden_size': '8'}}


@functools.cache
def tiny_base(rank=2, targets=('attention.query', 'layers.1.mlp.down'), **sizes) -> Base:
  """Return the base of a tiny model; one of its matrices has factors in one of two layers only."""
  config = ModelConfig(dtype='float32', lora=LoraConfig(rank=rank, alpha=4.0, target_modules=targets))
  policy = huggingface.describe(SIZES | sizes, config)
  return Base('tiny/base', FINGERPRINT, policy.adapter, policy.base_policy().parameter_table())


@functools.cache
def arrays(seed: int, rank: int = 2) -> dict[str, np.ndarray]:
  """Factors of a version, random in all layers that have them."""
  draw = np.random.default_rng(seed)
  found = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in tiny_base(rank).shapes.items()}
  for name in found:
    if 'layers.mlp.down' in name:
      found[name][0] = 0
  return found


@functools.cache
def slots(seed: int) -> dict[str, np.ndarray]:
  """Return a cartridge, random."""
  draw = np.random.default_rng([seed, 2])
  found = {name: draw.standard_normal((2, 1, 3, 4)).astype(np.float32) for name in (KEYS, VALUES)}
  return found | {FROZEN: np.asarray(1, np.int32), WINDOWED: np.asarray(0, np.int32)}


@functools.cache
def state(seed: int, average: bool = True) -> dict[str, np.ndarray]:
  """Return an optimizer state, all random."""
  draw = np.random.default_rng([seed, 1])
  kinds = ('mu', 'nu', 'average')[: 2 + average]
  shapes = {f'{kind}/{name.partition("/")[2]}': shape for kind in kinds for name, shape in tiny_base().shapes.items()}
  found = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
  return found | {'count': np.asarray(seed, np.int32)}


def assert_same(one, other) -> None:
  """Two versions have the same arrays, to the bit."""
  assert one.keys() == other.keys()
  for name in one:
    assert one[name].dtype == other[name].dtype and one[name].shape == other[name].shape, name
    assert one[name].tobytes() == other[name].tobytes(), name


def open_store(folder: pathlib.Path, **options) -> Store:
  """Return the store of a folder."""
  root, database = places.places(folder)
  return Store.open(root, database, base=tiny_base(), **options)
