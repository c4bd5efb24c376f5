"""Random adapters of one base, alone and in a pool."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import lora_pool
from sdpo_jax.models.adapters.lora_pool import LoraPool
from tests.models.small_policies import CONFIG

MEMBERS, ROWS, LENGTH = 3, 5, 7


def make_pool(layers, targets=('all-linear',)):
  """Return (policy with one adapter, its base, the factors of every member of a pool)."""
  config = ModelConfig(dtype='float32', lora=LoraConfig(rank=4, alpha=8.0, target_modules=targets))
  policy = huggingface.describe(CONFIG | {'num_hidden_layers': layers}, config).on(None)
  table = policy.parameter_table()
  base = parameters.initialise(parameters.frozen(table), jax.random.key(0), 0.3)
  draw = np.random.default_rng(1)

  def factors():
    return parameters.map_table(
      lambda row: jnp.asarray(0.3 * draw.standard_normal(row.shape), jnp.float32), parameters.trainable(table)
    )

  return policy, base, [factors() for _ in range(MEMBERS)]


def pooled(policy, product='gather'):
  """Return the policy with a pool of such adapters."""
  return dataclasses.replace(policy, adapter=LoraPool(policy.adapter, MEMBERS, product))


def stacked(policy, factors):
  """Return a pool that holds the given factors."""
  pool = lora_pool.empty(pooled(policy).parameter_table())
  for index, own in enumerate(factors):
    pool = lora_pool.with_member(pool, index, own)
  return pool
