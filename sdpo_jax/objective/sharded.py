"""The objective on a device mesh: rows of the batch are split over all devices, the vocabulary over one axis.

A row is one of the batch; an entry is one of the vocabulary, a row of the unembedding.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math

import chex
import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from sdpo_jax.types import Tree


@dataclasses.dataclass(frozen=True)
class VocabShard:
  """The split of the vocabulary over `parts` devices along mesh axis `axis`, in order, R entries each.

  Entries from `vocab_size` on, on the last devices, are padding. In a group of devices that differ only in `axis`, each
  device owns c tokens of a chunk of C = parts·c and computes its part of the vocabulary for all C. Without an axis,
  methods that exchange data return their argument unchanged.
  """

  vocab_size: int  # V.
  axis: str | None = None
  parts: int = 1

  def offset(self, entries: int) -> jax.Array | int:
    """Return the vocabulary index of this device's first entry, if each device has R entries."""
    return 0 if self.axis is None else lax.axis_index(self.axis) * entries

  def limit(self, entries: int) -> jax.Array | None:
    """Return how many of this device's R entries are not padding, []; None if no device has padding."""
    if entries * self.parts == self.vocab_size:
      return None
    return jnp.clip(self.vocab_size - self.offset(entries), 0, entries)

  def gather(self, own: jax.Array) -> jax.Array:
    """Return the group's tokens [C, …] from each device's own [c, …]."""
    return own if self.axis is None else lax.all_gather(own, self.axis, tiled=True)

  def own(self, everyone: jax.Array) -> jax.Array:
    """Return this device's own tokens [c, …] of the group's [C, …]."""
    if self.axis is None:
      return everyone
    count = everyone.shape[0] // self.parts
    return lax.dynamic_slice_in_dim(everyone, lax.axis_index(self.axis) * count, count)

  def total(self, part: jax.Array) -> jax.Array:
    """Return a partial result summed over the devices that share the vocabulary."""
    return part if self.axis is None else lax.psum(part, self.axis)

  def own_total(self, part: jax.Array) -> jax.Array:
    """Return a partial result [C, …] summed over these devices, for this device's own tokens [c, …]."""
    if self.axis is None:
      return part
    # Untiled: on large slices the TPU compiler turns a tiled one into an all-reduce and a slice.
    return lax.psum_scatter(part.reshape(self.parts, -1, *part.shape[1:]), self.axis, scatter_dimension=0)

  def candidates(self, part: jax.Array) -> jax.Array:
    """Return [c, parts·K] of all parts, in their order, for own tokens, from [C, K] of each part."""
    if self.axis is None:
      return part
    parts = part.reshape(self.parts, -1, part.shape[1])
    parts = lax.all_to_all(parts, self.axis, split_axis=0, concat_axis=0)
    return parts.transpose(1, 0, 2).reshape(parts.shape[1], -1)


@dataclasses.dataclass(frozen=True)
class Layout:
  """How the objective's arguments are sharded.

  The B rows of a batch are split over `batch_axes`; B must be a multiple of their size. Unembeddings [R, D] are split
  by entries over `vocab_axis`, one of the batch axes; a further split of D is gathered. None: every device needs them
  whole.
  """

  mesh: Mesh
  batch_axes: tuple[str, ...]
  vocab_axis: str | None = None

  @property
  def token_spec(self) -> PartitionSpec:
    """The split of arrays with a leading axis of tokens."""
    return PartitionSpec(self.batch_axes)

  @property
  def platform(self) -> str:
    """The kind of the mesh's devices, such as 'tpu'."""
    return self.mesh.devices.flat[0].platform

  @property
  def parts(self) -> int:
    """Number of parts into which the vocabulary is split."""
    return 1 if self.vocab_axis is None else self.mesh.shape[self.vocab_axis]

  def shard(self, vocab_size: int) -> VocabShard:
    """Return the split of unembeddings whose first `vocab_size` entries are tokens."""
    return VocabShard(vocab_size) if self.parts == 1 else VocabShard(vocab_size, self.vocab_axis, self.parts)

  def padded(self, unembedding: jax.Array) -> jax.Array:
    """Return [R, D] padded with zeros to a multiple of the parts; parameters that are padded already save the copy."""
    chex.assert_rank(unembedding, 2)
    missing = -unembedding.shape[0] % self.parts
    return jnp.pad(unembedding, ((0, missing), (0, 0))) if missing else unembedding


@flax.struct.dataclass
class DeviceResult:
  """Results of one device for its own tokens."""

  sums: Tree  # Numbers [], to be added up over the devices.
  per_token: Tree  # Arrays [n, …] of the device's own tokens.
  by_unembedding: jax.Array | None = None  # [R, D] gradient by its entries, from its tokens, in at least float32.


def over_devices(
  layout: Layout,
  shard: VocabShard,
  local: Callable[[jax.Array, jax.Array, Tree, Tree], DeviceResult],
  hidden: jax.Array,
  unembedding: jax.Array,
  tokens: Tree,
  shared: Tree,
) -> DeviceResult:
  """Run `local` on every device with its own tokens and its own part of the vocabulary.

  Left to the automatic partitioner, the objective is correct but every device computes every token, since which tokens
  count is known only at run time. Sums and the gradient by the unembedding are added up here, in at least float32.

  Args:
    layout: sharding of the arguments, which are global arrays.
    shard: split of the vocabulary.
    local: (hidden, unembedding, tokens, shared) -> results of one device.
    hidden: [N, D].
    unembedding: [R, D].
    tokens: arrays [N, …].
    shared: arrays [R, D] and numbers [].

  Returns:
    results of all tokens.
  """
  chex.assert_rank([hidden, unembedding], 2)
  chex.assert_tree_shape_prefix(tokens, hidden.shape[:1])
  of_vocabulary, everywhere = PartitionSpec(shard.axis), PartitionSpec()
  other_axes = tuple(axis for axis in layout.batch_axes if axis != shard.axis)
  spread = _spread_axis(layout, other_axes, unembedding.shape[1])

  def part(hidden, unembedding, tokens, shared):
    result = local(hidden, unembedding, tokens, shared)
    sums = jax.tree.map(lambda value: lax.psum(value, layout.batch_axes), result.sums)
    by_unembedding = result.by_unembedding
    if by_unembedding is not None:
      by_unembedding = _reduced(by_unembedding, other_axes, spread, layout.mesh)
    return DeviceResult(sums, result.per_token, by_unembedding)

  return jax.shard_map(
    part,
    mesh=layout.mesh,
    in_specs=(
      layout.token_spec,
      of_vocabulary,
      layout.token_spec,
      jax.tree.map(lambda value: of_vocabulary if jnp.ndim(value) == 2 else everywhere, shared),
    ),
    out_specs=DeviceResult(everywhere, layout.token_spec, PartitionSpec(shard.axis, spread)),
    check_vma=False,
  )(hidden, unembedding, tokens, shared)


def _spread_axis(layout: Layout, other_axes: tuple[str, ...], width: int) -> str | None:
  """Return the axis over which D of the unembedding's gradient comes out split; None if D is not divisible."""
  if len(other_axes) == 1 and width % layout.mesh.shape[other_axes[0]] == 0:
    return other_axes[0]
  return None


def _reduced(gradient: jax.Array, other_axes: tuple[str, ...], spread: str | None, mesh: Mesh) -> jax.Array:
  """Return the sum of [R, D] over `other_axes`; with `spread`, only this device's columns of it."""
  if not other_axes or math.prod(mesh.shape[axis] for axis in other_axes) == 1:
    return gradient
  if spread is None:
    return lax.psum(gradient, other_axes)
  # Along an untiled leading axis, as in `VocabShard.own_total`.
  columns = gradient.reshape(gradient.shape[0], mesh.shape[spread], -1).swapaxes(0, 1)
  return lax.psum_scatter(columns, spread, scatter_dimension=0)
