"""Several LoRA adapters of one shape beside one base: every row of a batch has one of them, or none.

Their factors are stacked behind the axis of the layers, [L, N, …], and what a row's matrix product gets beside x W is
the product with the factors of its own adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from models.adapters import lora
from models.parameters import Parameter, Table, map_table, trainable
from sdpo_jax.distributed.mesh import FSDP, parameter_sharding
from sdpo_jax.types import Tree

AXIS = 1  # Of the adapters, in every array of factors.
# How a row finds its factors: they are gathered row by row, or x is multiplied by those of all adapters at once, as one
# matrix of N · r columns, of which the row keeps its own.
Product = Literal['gather', 'masked']


@dataclasses.dataclass(frozen=True)
class LoraPool:
  """How many adapters of which shape there are; hashable, a part of the policy."""

  adapter: lora.Adapter
  members: int  # N.
  product: Product = 'gather'

  @property
  def by_name(self) -> Mapping[str, lora.Target]:
    return self.adapter.by_name

  def extended(self, table: Table, dtype: str) -> Table:
    """Return the table of a model with the pool; arguments as those of `lora.Adapter.extended`."""
    whole = self.adapter.extended(table, dtype)
    stacked = [
      dataclasses.replace(
        row,
        shape=(row.shape[0], self.members, *row.shape[1:]),
        axes=(row.axes[0], None, *row.axes[1:]),
        init='zeros',
      )
      for row in lora.factors(whole)
    ]
    return (*lora.without_factors(whole), *stacked)

  def arranged(self, layers: Tree) -> Tree:
    """Return parameters of layers in which factors lie as the product reads them.

    For the masked one those of all adapters are one matrix, [N · r, *in] and [N · r, *out] of a layer. Of stacked
    layers that has to be said before they are scanned: a TPU then multiplies by a layer's part where it lies, which it
    would copy otherwise, and the arrays themselves stay as they are, for its compiler lets the inputs of A lie along
    the lanes.

    Args:
      layers: stacked, or by index; factors [N, *in, r] and [N, r, *out] of a layer.
    """
    if self.product == 'gather':
      return layers
    axis = 0 if 0 in layers else AXIS

    def arrange(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
      name = path[-1].key
      if not name.endswith((f'_{lora.A}', f'_{lora.B}')):
        return leaf
      if name.endswith(lora.A):
        leaf = jnp.moveaxis(leaf, -1, axis + 1)
      return leaf.reshape(*leaf.shape[:axis], -1, *leaf.shape[axis + 2 :])

    return jax.tree_util.tree_map_with_path(arrange, layers)


def choose_product(setting: Literal['auto', 'gather', 'masked'], mesh: Mesh | None, *, decoding: bool) -> Product:
  """Return how rows find their factors, of `auto` what is faster on the devices of `mesh` (None: the default device).

  Per row of one token, gathering reads a row's factors and writes them for a product with a single vector; a TPU reads
  those of all adapters in less time. Over a sequence the gathered ones are read once for all of its tokens, and
  products with the factors of others are in vain.

  Args:
    setting: what was asked for.
    mesh: a TPU topology without its hardware counts as TPUs.
    decoding: rows have one token each, not a sequence.
  """
  if setting != 'auto':
    return setting
  platform = (mesh.devices.flat[0] if mesh is not None else jax.devices()[0]).platform
  return 'masked' if platform == 'tpu' and decoding else 'gather'


def part(
  pool: LoraPool, x: jax.Array, a: jax.Array, b: jax.Array, rows: jax.Array, scale: jax.Array | float, inputs: int
) -> jax.Array:
  """Return what the adapters of the rows add to a product, [B, S, *out] in the dtype of x; 0 where a row has none.

  Args:
    pool: of the adapters.
    x: [B, S, *in].
    a: [N, *in, r], or as the pool has arranged it.
    b: [N, r, *out], likewise.
    rows: [B] int32, the adapter of each row; negative: none.
    scale: what the product of two factors counts.
    inputs: how many axes `in` has.
  """
  product, first = (_gathered, 2) if pool.product == 'gather' else (_masked, 1)
  out = b.shape[first:]
  x = x.reshape(*x.shape[: x.ndim - inputs], -1)
  y = product(x, a, b.reshape(*b.shape[:first], -1), rows, scale, pool.members)
  y = jnp.where((rows >= 0)[:, None, None], y, jnp.zeros((), y.dtype))
  return y.reshape(*y.shape[:2], *out)


def _gathered(x, a, b, rows, scale, count):
  own = jnp.maximum(rows, 0)
  inner = _scaled(_product('bsi,bir->bsr', x, a.reshape(count, -1, a.shape[-1])[own]), scale)
  return _product('bsr,bro->bso', inner, b[own])


def _masked(x, a, b, rows, scale, count):
  inner = _scaled(_product('bsi,ki->bsk', x, a.reshape(a.shape[0], -1)), scale)
  # Zeros, not products with zeros: what another adapter's factors hold does not matter, as long as B is finite.
  whose = jnp.arange(a.shape[0], dtype=rows.dtype) // (a.shape[0] // count)
  inner = jnp.where((rows[:, None] == whose[None])[:, None], inner, jnp.zeros((), inner.dtype))
  return _product('bsk,ko->bso', inner, b)


def _scaled(inner: jax.Array, scale: jax.Array | float) -> jax.Array:
  return (inner.astype(jnp.float32) * scale).astype(inner.dtype)


def _product(axes: str, left: jax.Array, right: jax.Array) -> jax.Array:
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  return jnp.einsum(axes, left, right, precision=precision, preferred_element_type=left.dtype)


def empty(table: Table, mesh: Mesh | None = None, dtype: str = 'float32') -> Tree:
  """Return a pool of adapters that change nothing, all factors 0; nothing is compiled for it.

  Args:
    table: of a policy with a pool.
    mesh: on which it lies, see `shardings`; None: the default device.
    dtype: of the factors.
  """
  zeros = map_table(lambda row: np.zeros(row.shape, jnp.dtype(dtype)), trainable(table))
  return jax.device_put(zeros, None if mesh is None else shardings(table, mesh))


def shardings(table: Table, mesh: Mesh) -> Tree:
  """Return where the factors of a pool lie: divided over `tensor` as the matrices are, whole on all of `fsdp`.

  They are small, and gathering them for every row, turn and step would cost more than it saves.

  Args:
    table: of a policy with a pool.
    mesh: whose.
  """

  def place(row: Parameter) -> NamedSharding:
    own = parameter_sharding(mesh, row.axes, row.shape).spec
    return NamedSharding(mesh, PartitionSpec(*(None if axis == FSDP else axis for axis in own)))

  return map_table(place, trainable(table))


def member(pool: Tree, index: jax.Array | int) -> Tree:
  """Return the factors of one adapter of a pool, as a policy with that adapter alone has them."""
  return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, AXIS, keepdims=False), pool)


def with_member(pool: Tree, index: jax.Array | int, factors: Tree) -> Tree:
  """Return the pool in which one adapter has other factors."""

  def put(leaf: jax.Array, own: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(leaf, own.astype(leaf.dtype), index, AXIS)

  return jax.tree.map(put, pool, factors)
