"""The policy at the start of the run, to which the KL penalty is measured.

It is read from `model.path` at every start and is in no checkpoint, so a resume compares the weights there with those
of the start (`fingerprint`). It is separate from the teacher, which may be updated.
"""

from __future__ import annotations

import functools

import jax

from models.parameters import Table, in_compute_dtype, trainable
from sdpo_jax.types import Tree


def of_parameters(table: Table, parameters: Tree, dtype: str) -> Tree:
  """Return trainable parameters in compute dtype with their shardings; those computed in float32 stay float32.

  Args:
    table: parameter table of the policy.
    parameters: trainable parameters, as in the model directory.
    dtype: `model.dtype`.
  """
  shardings = jax.tree.map(lambda leaf: leaf.sharding, parameters)
  return jax.jit(functools.partial(_cast, table, dtype), out_shardings=shardings)(parameters)


def abstract(table: Table, parameters: Tree, dtype: str) -> Tree:
  """Return `of_parameters` as abstract arrays, from arrays or abstract arrays."""
  return jax.tree.map(
    lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
    jax.eval_shape(functools.partial(_cast, table, dtype), parameters),
    parameters,
  )


def _cast(table: Table, dtype: str, parameters: Tree) -> Tree:
  return in_compute_dtype(trainable(table), parameters, dtype)
