"""A tiny model whose memory is added up by hand, and the programs of an engine of it."""

from __future__ import annotations

import jax
import numpy as np

from sdpo_jax.config import Config, MeshConfig
from sdpo_jax.distributed.mesh import make_mesh
from sdpo_jax.models import huggingface
from sdpo_jax.serving.engine_programs import engine_programs

# Two layers of 4 key-value heads of 16 numbers; a slot has a key and a value in each.
SIZES = {
  'model_type': 'qwen3',
  'vocab_size': 256,
  'hidden_size': 64,
  'intermediate_size': 128,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 4,
  'head_dim': 16,
  'tie_word_embeddings': True,
}
# Of the tiny model, by hand: the matrices of a layer are [64, 4, 16] three times, [4, 16, 64], and [64, 128] three
# times.
RANK = 4


def settings(**changes) -> Config:
  config = Config()
  config.model.path, config.model.dtype, config.model.lora.rank = 'model', 'bfloat16', RANK
  serve = config.serve
  serve.prompt_buckets, serve.teacher_buckets, serve.response_buckets = (16,), (32,), (8, 16)
  serve.rows, serve.training_rows, serve.topk, serve.decode_chunk = 8, 8, 8, 4
  serve.snapshots, serve.teachers, serve.slots = 3, 5, 2
  for name, value in changes.items():
    setattr(serve, name, value)
  return config


def leaves(arguments):
  flat, tree = jax.tree.flatten(arguments)
  return str(tree), tuple((np.shape(leaf), np.dtype(getattr(leaf, 'dtype', np.int32)).name) for leaf in flat)


def on_one_device(config):
  mesh = make_mesh(MeshConfig(1, 1), jax.devices()[:1])
  return engine_programs(config, huggingface.describe(SIZES, config.model).on(mesh), mesh)
