"""Random policies with an adapter, and the products of its factors in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import LoraConfig, ModelConfig
from sdpo_jax.distributed.mesh import parameter_sharding
from sdpo_jax.models import huggingface, parameters
from sdpo_jax.models.adapters import lora
from tests.models.small_policies import CONFIG


def make(layers=3, mesh=None, dtype='float32', seed=1, **settings):
  """Return (policy, base, factors) of a random model; factors that are initialised to zeros are random, too."""
  values, key = CONFIG | {'num_hidden_layers': layers}, jax.random.key(0)
  config = ModelConfig(dtype=dtype, remat='full', lora=LoraConfig(**({'rank': 4, 'alpha': 6.0} | settings)))
  policy = huggingface.describe(values, config).on(mesh)
  _, params = huggingface.init(values, key, ModelConfig(dtype=dtype))
  table = policy.parameter_table()
  draw = np.random.default_rng(seed)

  def place(parameter, leaf):
    leaf = jnp.asarray(leaf, parameter.dtype)
    return leaf if mesh is None else jax.device_put(leaf, parameter_sharding(mesh, parameter.axes, parameter.shape))

  factors = parameters.map_table(
    lambda p: place(p, 0.3 * draw.standard_normal(p.shape, np.float32)), lora.factors(table)
  )
  return policy, parameters.map_tree(place, parameters.frozen(table), params), factors


def deltas(policy, factors):
  """Return scale · A · B of every target in float64, by path and in the shape of its matrix."""
  found = {}
  table = {parameter.name: parameter for parameter in policy.parameter_table()}
  for target in policy.adapter.targets:
    path, shape = table[target.name].path, table[target.name].shape
    a, b = (np.asarray(parameters.get(factors, (*path[:-1], f'{path[-1]}_lora_{x}')), np.float64) for x in 'ab')
    a, b = a.reshape(shape[0], -1, target.rank), b.reshape(shape[0], target.rank, -1)
    found[path] = (np.asarray(target.scales)[:, None, None] * (a @ b)).reshape(shape)
  return found


def merged(policy, base, factors):
  """Return the base with the factors merged into its matrices."""
  changes = deltas(policy, factors)
  table = parameters.frozen(policy.parameter_table())
  return parameters.map_tree(
    lambda p, leaf: jnp.asarray(np.asarray(leaf, np.float64) + changes.get(p.path, 0), jnp.float32), table, base
  )
