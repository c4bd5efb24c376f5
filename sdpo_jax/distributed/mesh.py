"""The device mesh, the table that maps logical axes to mesh axes, and shardings that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from sdpo_jax.distributed import accelerators
from sdpo_jax.errors import UserError

FSDP, TENSOR = 'fsdp', 'tensor'

# Logical axis of a parameter → mesh axis. Parameters are sharded over both mesh axes; FSDP gathers `embed`.
RULES: Mapping[str, str | None] = {
  'vocab': TENSOR,
  'embed': FSDP,
  'heads': TENSOR,
  'kv_heads': TENSOR,
  'slots': FSDP,
  'mlp': TENSOR,
  'head_dim': None,
  'layers': None,
}


WEIGHTS_SHARE = 1 / 6  # The share of a chip's memory for weights; the rest is for the cache and the trainer.

# (name, logical axes, shape) of a parameter.
Described = tuple[str, Sequence[str | None], Sequence[int]]


class MeshSizes(Protocol):
  """Sizes of the mesh's axes, the settings `mesh.…`; -1 stands for the remaining devices."""

  fsdp: int
  tensor: int | None  # None: chosen by `sampling_group`.


def sampling_group(devices: Sequence[jax.Device], parameters: Iterable[Described]) -> int:
  """Return the number of devices that sample together if `mesh.tensor` is None.

  This is the smallest power of two that divides the number of devices and every split axis, and for which a bfloat16
  copy of the weights takes at most a sixth of a chip's memory; if none is enough, the largest that divides them.
  """
  chip = accelerators.find(devices[0].device_kind)
  if chip is None or chip.memory_gib is None:
    return 1
  parameters = list(parameters)
  split = [
    size for _, axes, shape in parameters for axis, size in zip(axes, shape, strict=True) if RULES.get(axis) == TENSOR
  ]
  weights = 2 * sum(math.prod(shape) for _, _, shape in parameters) / 2**30
  groups = [size for size in (2**i for i in range(9)) if not any(value % size for value in [len(devices), *split])]
  return next((size for size in groups if weights / size <= chip.memory_gib * WEIGHTS_SHARE), groups[-1])


def make_mesh(
  config: MeshSizes, devices: Sequence[jax.Device] | None = None, parameters: Iterable[Described] = ()
) -> Mesh:
  """Return a (fsdp, tensor) mesh over `devices` (default: all); -1 in the settings stands for the remaining devices.

  Devices stay in JAX's order. On a TPU slice that order goes host by host, with four chips in a square each, so that
  the devices that sample together form a rectangle, around which a ring closes; a row of a slice without wraparound
  would not close.

  Args:
    config: sizes of the mesh's axes.
    devices: devices of the mesh.
    parameters: parameters of the model, from which `sampling_group` chooses `mesh.tensor` if it is None.

  Raises:
    UserError: an axis does not divide the number of devices, or their product is not that number, or there are none.
  """
  devices = list(accelerators.devices() if devices is None else devices)
  count = len(devices)
  asked = {FSDP: config.fsdp, TENSOR: config.tensor}
  for name, size in asked.items():
    if size not in (None, -1) and count % size:
      raise UserError(f'mesh.{name}={size} does not divide the {count} devices here: {_divisors(count)} do.')
  sizes = {name: size for name, size in asked.items() if size not in (None, -1)}
  if config.tensor is None and config.fsdp == -1:
    sizes[TENSOR] = sampling_group(devices, parameters)
  for name in asked:
    sizes.setdefault(name, count // math.prod(sizes.values()))
  if math.prod(sizes.values()) != count:
    raise UserError(
      f'mesh.fsdp={sizes[FSDP]} × mesh.tensor={sizes[TENSOR]} does not make up the {count} devices here: '
      'set one of them to -1 (the rest) or make the product equal.'
    )
  return Mesh(np.array(devices).reshape(sizes[FSDP], sizes[TENSOR]), (FSDP, TENSOR))


def _divisors(count: int) -> str:
  return ', '.join(str(size) for size in range(1, count + 1) if count % size == 0)


# Axis that must be split → remedy if the mesh does not divide it; other axes stay whole, which only costs memory.
REMEDIES: Mapping[str, str] = {
  'vocab': 'set model.vocab_multiple to a multiple of mesh.tensor, or choose another mesh.tensor',
  'heads': 'choose a mesh.tensor that divides the heads',
  'kv_heads': 'choose a mesh.tensor that divides the key-value heads',
  'mlp': 'choose a mesh.tensor that divides the width of the MLP',
}


def check_divides(mesh: Mesh, parameters: Iterable[Described]) -> None:
  """Check that the mesh divides the model's vocabulary, heads and MLP.

  Args:
    mesh: mesh of the run.
    parameters: parameters of the model.

  Raises:
    UserError: it does not divide one; the message names the setting to change.
  """
  for name, logical_axes, shape in parameters:
    for axis, size in zip(logical_axes, shape, strict=True):
      if axis in REMEDIES and RULES[axis] is not None and size % mesh.shape[RULES[axis]]:
        raise UserError(
          f'mesh.{RULES[axis]}={mesh.shape[RULES[axis]]} does not divide the {size} entries of axis {axis!r} of the '
          f'parameter {name}: {REMEDIES[axis]}.'
        )


def parameter_sharding(mesh: Mesh, logical_axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
  """Return the sharding of a parameter with these logical axes; axes that the mesh does not divide stay whole."""
  axes = [None if name is None else RULES[name] for name in logical_axes]
  spec = [axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, shape, strict=True)]
  return NamedSharding(mesh, PartitionSpec(*spec))


def gathered_by_layer(mesh: Mesh, logical_axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
  """Return the sharding of a stacked parameter in a loop that gathers one layer after the other.

  The parameter is split over the whole mesh along the first axis that its sharding splits, if the mesh divides that
  axis: the parts of a gathered matrix are then contiguous in memory, whereas parts of rows and of columns would have to
  be copied into place, layer by layer. Resharding takes one exchange along one mesh axis for all layers.
  """
  spec = list(parameter_sharding(mesh, logical_axes, shape).spec)
  split = [index for index, axis in enumerate(spec) if axis is not None]
  if not split or shape[split[0]] % mesh.size:
    return NamedSharding(mesh, PartitionSpec(*spec))
  first = spec[split[0]]
  others = [axis for axis in mesh.axis_names if axis != first]
  return NamedSharding(mesh, PartitionSpec(*[None] * split[0], (first, *others)))


# For programs that gather the weights of a layer before its products. Over up to 32 chips the TPU compiler would split
# such a product into one per chip, passing parts of the weights round (a windowed einsum), if the operand has at least
# this many MiB. Each part reads and writes all results once more: by the compiler's own estimate that takes longer than
# the gathering that it hides, by 2/3 on 8 chips and several times on 32 (tests/distributed/test_mesh_tpu.py).
_WHOLE_PRODUCTS = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': 2**20}


def compiler_options(mesh: Mesh | None) -> dict[str, int]:
  """Return the compiler options, as `jax.jit` takes them, for programs that gather weights layer by layer."""
  on_tpus = mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == 'tpu'
  return dict(_WHOLE_PRODUCTS) if on_tpus else {}


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Return the sharding of rows over both mesh axes."""
  return NamedSharding(mesh, PartitionSpec((FSDP, TENSOR)))


def replicated(mesh: Mesh) -> NamedSharding:
  """Return the sharding with a whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def abstract(tree: Any, shardings: Any) -> Any:
  """Return the shapes and dtypes of a tree's arrays with other shardings, as abstract arrays."""
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
  )


def put_rows(mesh: Mesh, tree: Any) -> Any:
  """Return host arrays of rows as sharded arrays; every process holds the whole value and contributes its part."""
  sharding, whole = batch_sharding(mesh), replicated(mesh)

  def put(value: np.ndarray) -> jax.Array:
    target = sharding if value.ndim and value.shape[0] % mesh.size == 0 else whole
    return jax.make_array_from_callback(value.shape, target, lambda index: value[index])

  return jax.tree.map(lambda leaf: put(np.asarray(leaf)), tree)
