"""The policy as it was when the run began, from which the KL penalty is measured.

It is read from `model.path` at every start and is in no checkpoint, so that a resume compares the weights there with
those of the start (`fingerprint`). It is a copy of its own, apart from the teacher, which may move.
"""

from __future__ import annotations

import functools

import jax

from models.parameters import Table, in_compute_dtype, trainable
from sdpo_jax.types import Tree


def of_parameters(table: Table, parameters: Tree, dtype: str) -> Tree:
  """Return trainable parameters in compute dtype, each where it lies; those that compute in float32 stay so.

  Args:
    table: of the policy.
    parameters: the trainable ones, as the model directory has them.
    dtype: `model.dtype`.
  """
  shardings = jax.tree.map(lambda leaf: leaf.sharding, parameters)
  return jax.jit(functools.partial(_cast, table, dtype), out_shardings=shardings)(parameters)


def abstract(table: Table, parameters: Tree, dtype: str) -> Tree:
  """Return shapes, dtypes and shardings of `of_parameters`, of arrays or abstract arrays."""
  return jax.tree.map(
    lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
    jax.eval_shape(functools.partial(_cast, table, dtype), parameters),
    parameters,
  )


def _cast(table: Table, dtype: str, parameters: Tree) -> Tree:
  return in_compute_dtype(trainable(table), parameters, dtype)
