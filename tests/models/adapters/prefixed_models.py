"""Random models of every family with a key-value prefix, and a document to read into it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import ModelConfig
from sdpo_jax.distributed.mesh import parameter_sharding
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import kv_prefix
from tests.models.family_models import MODELS, MORE, SIZES, VOCABULARY

DOCUMENT = np.random.default_rng(1).integers(1, VOCABULARY, 21).tolist()
TYPES = {'gemma3': 'gemma3_text'}


def model(name, dtype='float32'):
  """Return (policy, parameters) of a random model of a family."""
  kind = name.split(',')[0]
  values = SIZES | {**MODELS, **MORE}[name][1] | {'model_type': TYPES.get(kind, kind)}
  return huggingface.init(values, jax.random.key(0), ModelConfig(dtype=dtype))


def with_prefix(policy, params, prefix, keys, values, mesh=None):
  """Return (policy, base, trainable) of a model with slots that have these keys and values."""
  policy = dataclasses.replace(policy, adapter=prefix).on(mesh)
  frozen, trained = kv_prefix.slots(prefix, keys, values, policy.dtype)
  table = policy.parameter_table()

  def place(parameter, leaf):
    leaf = jnp.asarray(leaf, parameter.dtype)
    return leaf if mesh is None else jax.device_put(leaf, parameter_sharding(mesh, parameter.axes, parameter.shape))

  base = parameters.map_tree(place, parameters.frozen(table), parameters.merge(params, frozen))
  return policy, base, parameters.map_tree(place, parameters.trainable(table), trained)


def rows(seed=2, count=8, width=12):
  """Return (tokens, positions, segment ids) of rows of random lengths, each one segment."""
  draw = np.random.default_rng(seed)
  lengths = draw.integers(3, width + 1, count)
  segments = (np.arange(width) < lengths[:, None]).astype(np.int32)
  positions = np.arange(width, dtype=np.int32) * segments
  return draw.integers(1, VOCABULARY, (count, width)).astype(np.int32) * segments, positions, segments


def logits(policy, base, trainable, row):
  """Return the float32 logits [B, S, V] of rows."""
  hidden, unembedding, _ = policy.apply(base, trainable, *row)
  return np.asarray((hidden @ unembedding.T).astype(jnp.float32))


def after_document(policy, params, row):
  """Return the logits of rows that begin with the document, at the tokens after it."""
  tokens, _, segments = row
  count = len(tokens)
  before = np.tile(np.array(DOCUMENT, np.int32), (count, 1))
  tokens = np.concatenate([before, tokens], axis=1)
  segments = np.concatenate([np.ones_like(before), segments], axis=1)
  positions = np.arange(tokens.shape[1], dtype=np.int32) * segments
  return logits(policy, {}, params, (tokens, positions, segments))[:, len(DOCUMENT) :]
