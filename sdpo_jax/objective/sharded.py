"""The objective on a device mesh whose devices share the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sdpo_jax.objective.loss import Aux, ObjectiveConfig, objective
from sdpo_jax.types import TeacherSignal


def sharded_objective(
  mesh: Mesh,
  batch_axes: str | Sequence[str],
  student_hidden: jax.Array,
  student_unembedding: jax.Array,
  teacher: TeacherSignal | None,
  targets: jax.Array,
  mask: jax.Array,
  distill_coef: jax.Array | None,
  policy_coef: jax.Array | None = None,
  entropy_coef: jax.Array | None = None,
  old_log_probs: jax.Array | None = None,
  advantages: jax.Array | None = None,
  support: jax.Array | None = None,
  *,
  config: ObjectiveConfig,
) -> tuple[jax.Array, Aux]:
  """`objective`, each device walking through the tokens of its own rows only.

  Left to the automatic partitioner, `objective` is correct but every device computes every token, since which tokens
  count is known only at run time. Here rows stay where they are, the unembeddings are gathered, and the loss, its parts
  and the gradient by the unembedding are summed over the devices.

  Args:
    mesh: the devices.
    batch_axes: mesh axes over which B is split; B must be a multiple of their product.
    student_hidden: and all further arguments: as for `objective`, with global shapes.

  Returns:
    as `objective`; per-token arrays are split over `batch_axes`.
  """
  axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
  rows, everywhere = PartitionSpec(axes), PartitionSpec()
  arguments = {
    'student_hidden': student_hidden,
    'student_unembedding': student_unembedding,
    'teacher': teacher,
    'targets': targets,
    'mask': mask,
    'distill_coef': distill_coef,
    'policy_coef': policy_coef,
    'entropy_coef': entropy_coef,
    'old_log_probs': old_log_probs,
    'advantages': advantages,
    'support': support,
  }

  def local(arguments):
    loss, aux = objective(**arguments, config=config)
    total = lambda value: lax.psum(value, axes)
    return total(loss), {name: value if value.ndim else total(value) for name, value in aux.items()}

  names = lambda path: {getattr(entry, 'name', getattr(entry, 'key', None)) for entry in path}
  whole = {'student_unembedding', 'unembedding', 'mix_unembedding', 'mix_rate'}
  specs = jax.tree_util.tree_map_with_path(lambda path, _: everywhere if names(path) & whole else rows, arguments)
  _, aux = jax.eval_shape(lambda arguments: objective(**arguments, config=config), arguments)
  out = (everywhere, {name: rows if value.ndim else everywhere for name, value in aux.items()})
  return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False)(arguments)
