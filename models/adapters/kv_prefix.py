"""Key-value prefixes of a frozen model: slots to which every token attends in every layer (arXiv 2506.06266).

Slots have the positions 0 … P − 1, and tokens continue at P. The first F are frozen, as attention sinks; the others are
trained. All of them are rows of the parameter table, stacked over the layers like the layers' matrices. A prefix whose
slots are all frozen holds a document that was read once; a long one may be sharded over the devices of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.distributed.mesh import FSDP, parameter_sharding
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models.adapters.slot_names import BANK_KEY, BANK_VALUE, FILLED, FROZEN_KEY, FROZEN_VALUE, KEY, VALUE
from sdpo_jax.models.attention.splash import block_size
from sdpo_jax.models.parameters import Parameter, Table, frozen_in, get, map_table, map_tree, nest, split
from sdpo_jax.models.policy import Policy
from sdpo_jax.types import Tree

AXES = ('layers', 'kv_heads', None, 'head_dim')  # Logical axes of keys and values, [L, KV, P, head_dim].
DIVIDED_AXES = ('layers', 'kv_heads', 'slots', 'head_dim')
# Number of tokens of a text that are read at once, enough to amortise fetching the matrices of a layer.
PART = 2048


@dataclasses.dataclass(frozen=True)
class KVPrefix:
  """The slots of a prefix; hashable, a part of the policy."""

  slots: int  # P.
  frozen: int  # F, the first of them.
  # Whether layers with windows see only the slots within the window, as if these were tokens; else they see all.
  within_windows: bool = False
  # Number of devices, along the `fsdp` axis of the mesh, over which a head's slots are sharded; queries are sent to
  # them. None: slots are not sharded, and every device has those that its queries attend to.
  parts: int | None = None
  # Whether the slots are being filled: tokens have the positions of slots, less P, and see earlier slots.
  filling: bool = False
  # N: number of frozen prefixes, of at most `member_slots` each, in a bank. After the slots that all rows read, every
  # row reads one of them or none, or with `at_once` up to as many, all of them of `member_slots` (`members` of
  # `Policy.apply`). Its tokens continue at the number of slots that it reads. None: there is no bank.
  members: int | None = None
  member_slots: int = 0
  at_once: int | None = None
  # Number of consecutive rows that read the same prefix of the bank, or none, when a token is decoded in each.
  rows_alike: int = 1

  def __post_init__(self):
    if not self.slots and self.members:
      return
    if not 0 <= self.frozen <= self.slots or not self.slots:
      raise ValueError(f'A prefix of {self.slots} slots cannot have {self.frozen} frozen ones.')
    if self.parts is not None and self.trained:
      raise ValueError('A prefix with trained slots cannot be sharded: each device needs them all for its gradient.')

  @property
  def without_bank(self) -> KVPrefix:
    """The slots that all rows read."""
    return dataclasses.replace(self, members=None, member_slots=0, at_once=None)

  @property
  def bank_alone(self) -> KVPrefix:
    """The bank without the slots that all rows read."""
    return dataclasses.replace(self, slots=0, frozen=0)

  @property
  def room(self) -> int:
    """Number of stored slots; if they are sharded, the parts are padded to equal numbers of whole kernel blocks."""
    return self._room(self.slots)

  def _room(self, slots: int) -> int:
    if self.parts is None or not slots:
      return slots
    each = -(-slots // self.parts)
    return self.parts * (each + -each % block_size(each))

  @property
  def axes(self) -> tuple[str | None, ...]:
    """Logical axes of keys and values [L, KV, room, head_dim]."""
    return AXES if self.parts is None else DIVIDED_AXES

  @property
  def trained(self) -> bool:
    """Whether any slot is trained."""
    return self.frozen < self.slots

  def extended(self, table: Table, dtype: str) -> Table:
    """Return the parameter table of a model with the prefix; everything but the trained slots is frozen.

    Args:
      table: table of the model.
      dtype: compute dtype of the model, in which frozen parameters are kept.
    """
    return (*frozen_in(table, dtype), *self.rows(table, dtype))

  def rows(self, table: Table, dtype: str) -> Table:
    """Return the parameters that hold the slots; arguments as in `extended`."""
    keys = next(parameter for parameter in table if parameter.name == 'layers.attention.key')
    layers, _, kv_heads, head_dim = keys.shape
    parts = [
      ((FROZEN_KEY, FROZEN_VALUE), self.frozen + self.room - self.slots, dict(frozen=True, dtype=dtype)),
      ((KEY, VALUE), self.slots - self.frozen, {}),
    ]

    def row(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **more: Any) -> Parameter:
      return Parameter(
        path=('layers', *name.split('.')),
        shape=(layers, *shape),
        axes=('layers', *axes),
        init='zeros',
        huggingface=f'layers.{{layer}}.{name}',
        huggingface_shape=shape,
        **more,
      )

    own = tuple(
      row(name, (kv_heads, count, head_dim), self.axes[1:], **more)
      for names, count, more in parts
      for name in names
      if count
    )
    if self.members is None:
      return own
    shape, frozen = (self.members, kv_heads, self._room(self.member_slots), head_dim), dict(frozen=True, dtype=dtype)
    bank = (row(name, shape, (None, *self.axes[1:]), **frozen) for name in (BANK_KEY, BANK_VALUE))
    return (*own, *bank, row(FILLED, (self.members,), (None,), frozen=True, compute=False))


def without_bank(table: Table) -> Table:
  """Return the parameters of a model and its own slots, without those that a bank holds."""
  return tuple(row for row in table if row.name.removeprefix('layers.') not in (BANK_KEY, BANK_VALUE, FILLED))


def read_text(policy: Policy, base: Tree, tokens: Sequence[int]) -> tuple[jax.Array, jax.Array]:
  """Return the keys, rotated by positions 0 … N − 1, and values of a text, [L, KV, N, head_dim] each.

  Arguments are as in `read_slots`.
  """
  held = read_slots(policy, base, tokens)
  return get(held, ('layers', *FROZEN_KEY.split('.'))), get(held, ('layers', *FROZEN_VALUE.split('.')))


def read_slots(policy: Policy, base: Tree, tokens: Sequence[int], parts: int | None = None) -> Tree:
  """Return a text as frozen slots [L, KV, room, head_dim] in compute dtype, nested as in the parameter table.

  One program reads the text part by part, each attending to those before it, so that activations exist for one part
  only. Slots are sharded over the mesh of the policy.

  Args:
    policy: the model without a prefix.
    base: its parameters, as they are or prepared for a sampler; those sharded over `fsdp` are gathered for every part.
    tokens: tokens of the text.
    parts: as in `KVPrefix`; None: room is N.
  """
  text, prefix = np.asarray(tokens, np.int32)[None], filling(len(tokens), parts)
  part, starts = schedule(prefix)
  read, held = reader(dataclasses.replace(policy, adapter=prefix)), empty_slots(policy, prefix)
  for start in starts:
    held = read(base, held, text[:, start : start + part], np.int32(start))
  return held


def schedule(prefix: KVPrefix) -> tuple[int, list[int]]:
  """Return the number of tokens of a text that are read at once, and the first token of each part.

  Args:
    prefix: prefix of the text, from `filling`.
  """
  length = prefix.slots
  part = min(PART, length, prefix.room // (prefix.parts or 1))
  # The last part begins with tokens that were read before, whose keys and values are the same.
  return part, [*range(0, length - part, part), length - part]


def filling(length: int, parts: int | None = None) -> KVPrefix:
  """Return the prefix of a text that is being read."""
  return KVPrefix(length, length, within_windows=True, parts=parts, filling=True)


def _rows(policy: Policy, prefix: KVPrefix) -> Table:
  return prefix.rows(policy.base_policy().parameter_table(), policy.dtype)


def _placed(policy: Policy, prefix: KVPrefix) -> Tree | None:
  """Return the shardings of a prefix's slots; None without a mesh."""
  mesh = policy.backend.mesh
  if mesh is None:
    return None
  return map_table(lambda row: parameter_sharding(mesh, row.axes, row.shape), _rows(policy, prefix))


def empty_slots(policy: Policy, prefix: KVPrefix) -> Tree:
  """Return slots of zeros, to be filled, on their devices."""
  return _maker(policy, prefix)()


@functools.lru_cache(maxsize=4)
def _maker(policy: Policy, prefix: KVPrefix) -> Callable[[], Tree]:
  def make() -> Tree:
    return map_table(lambda row: jnp.zeros(row.shape, row.dtype), _rows(policy, prefix))

  return jax.jit(make, out_shardings=_placed(policy, prefix))


@functools.lru_cache(maxsize=4)
def reader(policy: Policy) -> Callable[[Tree, Tree, jax.Array, jax.Array], Tree]:
  """Return the program that reads a part of a text: (base, slots, tokens [1, S], first position []) → slots.

  The slots are donated. All S positions must be slots, and S must not exceed the number of slots per device.

  Args:
    policy: policy with slots to be filled.
  """
  prefix, backend = policy.adapter, policy.backend
  sizes = policy.config
  _, heads = backend.axes(1, sizes.kv_heads, sampling=True)
  part = FSDP if prefix.parts is not None and backend.divided else None
  old, new = (None, heads, part, None), (None, heads, None, None)
  write = backend.shard(functools.partial(_written, part), (old, new, ()), old)

  def read(base: Tree, held: Tree, tokens: jax.Array, start: jax.Array) -> Tree:
    count = tokens.shape[1]
    positions = start - prefix.slots + jnp.arange(count, dtype=jnp.int32)[None]
    cache = policy.init_cache(1, count)
    cache = policy.apply(base, held, tokens, positions, jnp.ones_like(tokens), cache)[2]
    layers = [kv_cache.layer_of(cache.stores, layer) for layer in range(sizes.layers)]
    # The cache may pad the heads.
    keys, values = (
      jnp.stack([getattr(layer, name)[0, :, :, : sizes.head_dim] for layer in layers]) for name in ('keys', 'values')
    )
    new = nest([(('layers', *FROZEN_KEY.split('.')), keys), (('layers', *FROZEN_VALUE.split('.')), values)])
    return jax.tree.map(lambda into, new: write(into, new, start), held, new)

  return jax.jit(read, donate_argnums=1, out_shardings=_placed(policy, prefix))


def _written(axis: str | None, into: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Return a device's slots [L, KV, C, head_dim] updated with those of the new slots [L, KV, S, head_dim] it holds.

  The first new slot has the index `start` [] among the slots of all devices.
  """
  here, count = into.shape[2], new.shape[2]
  start = start - (0 if axis is None else lax.axis_index(axis) * here)
  at = jnp.clip(start, 0, here - count)  # First of S slots here that include all new ones for this device.
  moved = at - start  # Index of that slot among the new ones.
  own = moved + jnp.arange(count, dtype=jnp.int32)
  before = lax.dynamic_slice_in_dim(into, at, count, axis=2)
  mixed = jnp.where(((own >= 0) & (own < count))[None, None, :, None], jnp.roll(new, -moved, axis=2), before)
  return lax.dynamic_update_slice_in_dim(into, mixed.astype(into.dtype), at, axis=2)


@functools.lru_cache(maxsize=4)
def bank_writer(policy: Policy) -> Callable[[Tree, Tree, jax.Array, jax.Array], Tree]:
  """Return the program that puts a text into a bank: (bank, slots, member [], number of slots filled []) → bank.

  The bank is donated.

  Args:
    policy: policy with a bank; slots are as `read_slots` returns them.
  """

  def put(bank: Tree, text: Tree, member: jax.Array, filled: jax.Array) -> Tree:
    names = {BANK_KEY: FROZEN_KEY, BANK_VALUE: FROZEN_VALUE}
    new = {into: get(text, ('layers', *name.split('.'))) for into, name in names.items()}
    new[FILLED] = jnp.full((policy.config.layers,), filled)

    def update(row: Parameter, into: jax.Array) -> jax.Array:
      return lax.dynamic_update_index_in_dim(into, new[row.name.removeprefix('layers.')].astype(into.dtype), member, 1)

    return map_tree(update, _rows(policy, policy.adapter), bank)

  return jax.jit(put, donate_argnums=0, out_shardings=_placed(policy, policy.adapter))


def slots(prefix: KVPrefix, keys: jax.Array, values: jax.Array, dtype: str) -> tuple[Tree, Tree]:
  """Return the frozen slots in `dtype` and the trained ones in float32, nested as in the parameter table.

  Args:
    prefix: the numbers of slots.
    keys: [L, KV, P, head_dim]; for a sharded prefix [L, KV, room, head_dim].
    values: likewise.
    dtype: compute dtype of the model.
  """

  def part(cut: slice, kind: str, *names: str) -> Tree:
    arrays = [array[:, :, cut].astype(kind) for array in (keys, values)]
    named = zip(names, arrays, strict=True) if arrays[0].shape[2] else ()
    return nest((('layers', *name.split('.')), array) for name, array in named)

  frozen = prefix.frozen + prefix.room - prefix.slots
  return part(slice(None, frozen), dtype, FROZEN_KEY, FROZEN_VALUE), part(slice(frozen, None), 'float32', KEY, VALUE)


def joined(prefix: KVPrefix, base: Tree, trained: Tree) -> tuple[jax.Array, jax.Array]:
  """Return keys and values [L, KV, P, head_dim] of all slots in float32: the inverse of `slots`.

  Args:
    prefix: the numbers of slots.
    base: parameters that hold the frozen slots.
    trained: parameters that hold the trained slots.
  """

  def whole(frozen: str, name: str) -> jax.Array:
    held = [(base, frozen)] * bool(prefix.frozen) + [(trained, name)] * prefix.trained
    parts = [get(tree, ('layers', *path.split('.'))).astype(jnp.float32) for tree, path in held]
    return jnp.concatenate(parts, axis=2)

  return whole(FROZEN_KEY, KEY), whole(FROZEN_VALUE, VALUE)


def place(policy: Policy, prefix: KVPrefix, keys: jax.Array, values: jax.Array) -> tuple[Tree, Tree]:
  """Return the result of `slots` on the devices of a policy's parameters; arguments as there."""
  placed = _placed(policy, prefix)
  shardings = None if placed is None else split(_rows(policy, prefix), placed)
  make = functools.partial(slots, prefix, dtype=policy.dtype)
  return jax.jit(make, out_shardings=shardings)(keys, values)
