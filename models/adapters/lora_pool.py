"""A pool of LoRA adapters of one shape for one base: every row of a batch uses one of them, or none.

Their factors are stacked after the layers axis, [L, N, …]. To each row's product x W, the product with the factors of
its adapter is added. Beside the adapters there may be a bank of cartridges, of which every row reads one, or none.
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

from sdpo_jax.distributed.mesh import FSDP, parameter_sharding
from sdpo_jax.models.adapters import lora
from sdpo_jax.models.adapters.kv_prefix import KVPrefix
from sdpo_jax.models.adapters.slot_names import BANK_KEY, BANK_VALUE, FILLED
from sdpo_jax.models.parameters import Parameter, Table, map_table, nest, trainable
from sdpo_jax.types import Tree

AXIS = 1  # Axis of the adapters in every array of factors.
# 'gather': the factors of each row's adapter are gathered. 'masked': x is multiplied by the factors of all adapters at
# once, as one matrix with N · r columns, of which each row keeps those of its adapter.
Product = Literal['gather', 'masked']


@dataclasses.dataclass(frozen=True)
class LoraPool:
  """A pool of N adapters of one shape; hashable, a part of the policy."""

  adapter: lora.Adapter
  members: int  # N.
  product: Product = 'gather'
  # The bank; then `members` of `Policy.apply` are [B, 2], the adapter and the cartridge of each row. None: there is no
  # bank.
  cartridges: KVPrefix | None = None

  @property
  def by_name(self) -> Mapping[str, lora.Target]:
    """The targets of every adapter by the names of their matrices."""
    return self.adapter.by_name

  def extended(self, table: Table, dtype: str) -> Table:
    """Return the table of a model with the pool; arguments as in `lora.Adapter.extended`."""
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
    bank = () if self.cartridges is None else self.cartridges.rows(table, dtype)
    return (*lora.without_factors(whole), *stacked, *(dataclasses.replace(row, frozen=False) for row in bank))

  def arranged(self, layers: Tree) -> Tree:
    """Return the parameters of layers with factors in the layout that the product needs.

    For the masked product, the factors of all adapters form one matrix, [N · r, *in] and [N · r, *out] per layer.
    Stacked layers must be arranged before they are scanned: a TPU then multiplies by a layer's factors in place, which
    it would copy otherwise; and arranging moves no data, because its compiler puts the inputs of A along the lanes.

    Args:
      layers: stacked, or by index; factors [N, *in, r] and [N, r, *out] per layer.
    """
    if self.product == 'gather':
      return layers
    axis = 0 if 0 in layers else AXIS

    def arrange(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
      name = path[-1].key
      if not lora.is_factor(name):
        return leaf
      if name.endswith(lora.A):
        leaf = jnp.moveaxis(leaf, -1, axis + 1)
      return leaf.reshape(*leaf.shape[:axis], -1, *leaf.shape[axis + 2 :])

    return jax.tree_util.tree_map_with_path(arrange, layers)


def choose_product(setting: Literal['auto', 'gather', 'masked'], mesh: Mesh | None, *, decoding: bool) -> Product:
  """Return the product to use; for `auto`, the faster one on the devices of `mesh` (None: the default device).

  With one token per row, gathering copies a row's factors for a product with a single vector; a TPU reads the factors
  of all adapters in less time. With a sequence per row, gathered factors are read once for all its tokens, and products
  with other adapters' factors would be wasted.

  Args:
    setting: the configured product.
    mesh: mesh of the devices; a TPU topology without its hardware counts as TPUs.
    decoding: whether rows have one token each instead of a sequence.
  """
  if setting != 'auto':
    return setting
  platform = (mesh.devices.flat[0] if mesh is not None else jax.devices()[0]).platform
  return 'masked' if platform == 'tpu' and decoding else 'gather'


def part(
  pool: LoraPool, x: jax.Array, a: jax.Array, b: jax.Array, rows: jax.Array, scale: jax.Array | float, inputs: int
) -> jax.Array:
  """Return the term [B, S, *out] that each row's adapter adds to x W, in the dtype of x; 0 for rows without adapter.

  Args:
    pool: the pool of the adapters.
    x: [B, S, *in].
    a: [N, *in, r], or as `LoraPool.arranged`.
    b: [N, r, *out], likewise.
    rows: [B] int32, the adapter of each row; negative: none.
    scale: scale of the product of the two factors.
    inputs: number of axes of `in`.
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
  # Select zeros instead of multiplying by them: values of other adapters then do not matter, as long as B is finite.
  whose = jnp.arange(a.shape[0], dtype=rows.dtype) // (a.shape[0] // count)
  inner = jnp.where((rows[:, None] == whose[None])[:, None], inner, jnp.zeros((), inner.dtype))
  return _product('bsk,ko->bso', inner, b)


def _scaled(inner: jax.Array, scale: jax.Array | float) -> jax.Array:
  return (inner.astype(jnp.float32) * scale).astype(inner.dtype)


def _product(axes: str, left: jax.Array, right: jax.Array) -> jax.Array:
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  return jnp.einsum(axes, left, right, precision=precision, preferred_element_type=left.dtype)


def empty(table: Table, mesh: Mesh | None = None, dtype: str = 'float32') -> Tree:
  """Return a pool whose factors are all 0 and whose cartridges have no slots, without effect; nothing is compiled.

  Args:
    table: table of a policy with a pool.
    mesh: mesh to place it on, see `shardings`; None: the default device.
    dtype: dtype of the factors and cartridges.
  """

  def make(row: Parameter) -> np.ndarray:
    return np.zeros(row.shape, jnp.dtype(dtype if row.compute else row.dtype))

  zeros = map_table(make, trainable(table))
  return jax.device_put(zeros, None if mesh is None else shardings(table, mesh))


def shardings(table: Table, mesh: Mesh) -> Tree:
  """Return the shardings of a pool's factors: over `tensor` like the matrices, replicated over `fsdp`.

  Factors are small: gathering them at every use would cost more time than the memory is worth.

  Args:
    table: table of a policy with a pool.
    mesh: the mesh.
  """

  def place(row: Parameter) -> NamedSharding:
    own = parameter_sharding(mesh, row.axes, row.shape).spec
    return NamedSharding(mesh, PartitionSpec(*(None if axis == FSDP else axis for axis in own)))

  return map_table(place, trainable(table))


def member(pool: Tree, index: jax.Array | int) -> Tree:
  """Return the factors of one adapter of a pool, as a policy with that adapter alone has them."""
  return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, AXIS, keepdims=False), pool)


def with_member(pool: Tree, index: jax.Array | int, own: Tree) -> Tree:
  """Return the pool with the factors of the adapter, or the slots of the cartridge, at `index` replaced by `own`."""
  new = dict(jax.tree.leaves_with_path(own))

  def put(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    if path not in new:
      return leaf
    return lax.dynamic_update_index_in_dim(leaf, new[path].astype(leaf.dtype), index, AXIS)

  return jax.tree_util.tree_map_with_path(put, pool)


def cartridge(bank: KVPrefix, keys: np.ndarray, values: np.ndarray) -> Tree:
  """Return a cartridge as `with_member` takes it.

  Args:
    bank: the bank of the pool.
    keys: rotated keys [L, KV, P, head_dim], at most as many slots as the bank has for one.
    values: likewise.
  """
  padding = [(0, 0), (0, 0), (0, bank.member_slots - keys.shape[2]), (0, 0)]
  filled = np.full(len(keys), keys.shape[2], np.float32)
  slots = {BANK_KEY: np.pad(keys, padding), BANK_VALUE: np.pad(values, padding), FILLED: filled}
  return nest((('layers', *name.split('.')), array) for name, array in slots.items())
