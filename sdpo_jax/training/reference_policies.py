"""The fixed policies with which a run's loss compares the student, `ObjectiveSpec.references`.

'initial', for the KL penalty, is the policy at the start of the run. It is read from `model.path` at every start and is
not part of checkpoints, so a resume compares the weights there with those of the start (`fingerprint`). It is separate
from the teacher, which may be updated.
"""

from __future__ import annotations

import functools

import jax

from sdpo_jax.distributed import mesh
from sdpo_jax.models.parameters import Table, in_compute_dtype, trainable
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.types import Tree


def of_parameters(spec: ObjectiveSpec, table: Table, parameters: Tree, dtype: str) -> dict[str, Tree]:
  """Return the trainable parameters of each reference policy in compute dtype, with the shardings of the student's.

  Parameters that are used in float32, such as norm weights, stay float32.

  Args:
    spec: terms of the loss.
    table: parameter table of the policy.
    parameters: trainable parameters, as in the model directory.
    dtype: `model.dtype`.
  """
  shardings = jax.tree.map(lambda leaf: leaf.sharding, parameters)
  copy = jax.jit(functools.partial(_cast, table, dtype), out_shardings=shardings)
  return {name: copy(parameters) for name in spec.references}


def abstract(spec: ObjectiveSpec, table: Table, parameters: Tree, dtype: str) -> dict[str, Tree]:
  """Return `of_parameters` as abstract arrays, from arrays or abstract arrays."""
  shapes = jax.eval_shape(functools.partial(_cast, table, dtype), parameters)
  return dict.fromkeys(spec.references, mesh.abstract(shapes, jax.tree.map(lambda leaf: leaf.sharding, parameters)))


def _cast(table: Table, dtype: str, parameters: Tree) -> Tree:
  return in_compute_dtype(trainable(table), parameters, dtype)
