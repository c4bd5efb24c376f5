"""Models and arguments as the compiler of a described TPU slice takes them, and the kernels that it made."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sdpo_jax.config import MeshConfig
from sdpo_jax.distributed.mesh import make_mesh, parameter_sharding
from sdpo_jax.models import parameters
from sdpo_jax.rollout.functions import cache_shardings

SMALL = dict(
  model_type='qwen3',
  vocab_size=512,
  hidden_size=256,
  intermediate_size=512,
  num_hidden_layers=9,
  num_attention_heads=8,
  num_key_value_heads=2,
  head_dim=128,
)
FORWARD, BACKWARD = ['splash_mha_fwd'], ['splash_mha_dkv', 'splash_mha_dq']
PREFIXED = SMALL | dict(num_attention_heads=24, num_key_value_heads=8)


def slice_mesh(name, fsdp, tensor):
  from sdpo_jax.planner import topology

  return make_mesh(MeshConfig(fsdp, tensor), topology.describe(name).devices)


def abstract_parameters(policy, mesh):
  def place(p):
    return parameter_sharding(mesh, p.axes, p.shape)

  return parameters.map_table(
    lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype), sharding=place(p)), policy.parameter_table()
  )


def over_rows(mesh, shape, dtype):
  sharding = NamedSharding(mesh, PartitionSpec('fsdp')) if shape else None
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def abstract_cache(functions, mesh, rows, slots):
  cache = jax.eval_shape(functools.partial(functions.empty, rows=rows, slots=slots))

  def place(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(place, cache, cache_shardings(mesh, cache))


def kernels(text):
  return re.findall(r'%(splash_mha_[a-z]+|cache_attention)[\w.]* = [^\n]*custom_call_target="tpu_custom_call"', text)
