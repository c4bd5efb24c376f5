"""A prefix of keys and values beside a frozen model: slots that every token attends to in every layer (arXiv
2506.06266).

Slots stand at the positions 0 … P − 1, and tokens go on from P. The first F are frozen, as attention sinks; the others
are trained. All of them are rows of the parameter table, stacked over the layers like the layers' matrices. A prefix
whose slots are all frozen is a document that was read once; of a long one each device of a mesh may hold a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from models import cache as kv_cache
from models.adapters.slot_names import FROZEN_KEY, FROZEN_VALUE, KEY, VALUE
from models.attention.splash import block_size
from models.parameters import Parameter, Table, frozen_in, get, map_table, nest, split
from models.policy import Policy
from sdpo_jax.distributed.mesh import FSDP, parameter_sharding
from sdpo_jax.types import Tree

AXES = ('layers', 'kv_heads', None, 'head_dim')  # Of keys and values, [L, KV, P, head_dim].
DIVIDED_AXES = ('layers', 'kv_heads', 'slots', 'head_dim')
# Tokens of a text that are read at once: so many that the matrices of a layer are not fetched for a few of them.
PART = 2048


@dataclasses.dataclass(frozen=True)
class KVPrefix:
  """How many slots there are; hashable, a part of the policy."""

  slots: int  # P.
  frozen: int  # F, the first of them.
  # Whether layers with windows see a slot only from positions within their window, as they see a token there; else they
  # see all slots.
  within_windows: bool = False
  # Over how many devices, the `fsdp` axis of the mesh, a head's slots are divided, and stay so: queries travel to them.
  # None: they are not, and every device gets what its queries attend to.
  parts: int | None = None
  # Whether the slots are being filled: tokens stand at the positions of slots, counted from P, and see those before
  # theirs.
  filling: bool = False

  def __post_init__(self):
    if not 0 <= self.frozen <= self.slots or not self.slots:
      raise ValueError(f'A prefix of {self.slots} slots cannot have {self.frozen} frozen ones.')
    if self.parts is not None and self.trained:
      raise ValueError('A prefix with slots to train is not divided: each device computes their gradient for its rows.')

  @property
  def room(self) -> int:
    """Slots that are stored: of divided ones as many in each part, in whole blocks of the kernels; the last are
    empty.
    """
    if self.parts is None:
      return self.slots
    each = -(-self.slots // self.parts)
    return self.parts * (each + -each % block_size(each))

  @property
  def axes(self) -> tuple[str | None, ...]:
    """Logical axes of keys and values [L, KV, room, head_dim]."""
    return AXES if self.parts is None else DIVIDED_AXES

  @property
  def trained(self) -> bool:
    """Whether there are slots to train."""
    return self.frozen < self.slots

  def extended(self, table: Table, dtype: str) -> Table:
    """Return the table of a model with the prefix: its parameters and the frozen slots, frozen, and the other slots.

    Args:
      table: of the model.
      dtype: in which the model computes, and in which what is frozen is therefore kept.
    """
    return (*frozen_in(table, dtype), *self.rows(table, dtype))

  def rows(self, table: Table, dtype: str) -> Table:
    """Return the parameters that hold the slots; arguments as those of `extended`."""
    keys = next(parameter for parameter in table if parameter.name == 'layers.attention.key')
    layers, _, kv_heads, head_dim = keys.shape
    parts = [
      ((FROZEN_KEY, FROZEN_VALUE), self.frozen + self.room - self.slots, dict(frozen=True, dtype=dtype)),
      ((KEY, VALUE), self.slots - self.frozen, {}),
    ]
    return tuple(
      Parameter(
        path=('layers', *name.split('.')),
        shape=(layers, kv_heads, count, head_dim),
        axes=self.axes,
        init='zeros',
        huggingface=f'layers.{{layer}}.{name}',
        huggingface_shape=(kv_heads, count, head_dim),
        **more,
      )
      for names, count, more in parts
      for name in names
      if count
    )


def read_text(policy: Policy, base: Tree, tokens: Sequence[int]) -> tuple[jax.Array, jax.Array]:
  """Return what a model keeps of a text: keys, rotated by their positions 0 … N − 1, and values, [L, KV, N, head_dim].

  Arguments are those of `read_slots`.
  """
  held = read_slots(policy, base, tokens)
  return get(held, ('layers', *FROZEN_KEY.split('.'))), get(held, ('layers', *FROZEN_VALUE.split('.')))


def read_slots(policy: Policy, base: Tree, tokens: Sequence[int], parts: int | None = None) -> Tree:
  """Return a text as frozen slots [L, KV, room, head_dim], in compute dtype, as the parameter table nests them.

  The text is read part by part, each of which attends to those before it, by one program: what is computed between
  the layers exists of a part only. Slots lie as the mesh of the policy divides them.

  Args:
    policy: the model without a prefix.
    base: its parameters, or what a sampler's preparation makes of them; where these are divided over `fsdp`, they are
      gathered for every part.
    tokens: of the text.
    parts: as in `KVPrefix`; None: room is N.
  """
  text, prefix = np.asarray(tokens, np.int32)[None], filling(len(tokens), parts)
  part, starts = schedule(prefix)
  read, held = reader(dataclasses.replace(policy, adapter=prefix)), empty_slots(policy, prefix)
  for start in starts:
    held = read(base, held, text[:, start : start + part], np.int32(start))
  return held


def schedule(prefix: KVPrefix) -> tuple[int, list[int]]:
  """Return how many tokens of a text are read at once, and at which of them each part begins.

  Args:
    prefix: of the text, from `filling`.
  """
  length = prefix.slots
  part = min(PART, length, prefix.room // (prefix.parts or 1))
  # The last part begins with tokens that were read before: what is kept of them is the same.
  return part, [*range(0, length - part, part), length - part]


def filling(length: int, parts: int | None = None) -> KVPrefix:
  """Return the prefix of a text that is being read."""
  return KVPrefix(length, length, within_windows=True, parts=parts, filling=True)


def _placed(policy: Policy, prefix: KVPrefix) -> Tree | None:
  """Return where the slots of a prefix lie; None: on the default device."""
  mesh = policy.backend.mesh
  if mesh is None:
    return None
  table = prefix.rows(policy.base_policy().parameter_table(), policy.dtype)
  return map_table(lambda row: parameter_sharding(mesh, row.axes, row.shape), table)


def empty_slots(policy: Policy, prefix: KVPrefix) -> Tree:
  """Return slots that are to be filled, where they lie."""
  table = prefix.rows(policy.base_policy().parameter_table(), policy.dtype)

  def make() -> Tree:
    return map_table(lambda row: jnp.zeros(row.shape, row.dtype), table)

  return jax.jit(make, out_shardings=_placed(policy, prefix))()


@functools.lru_cache(maxsize=4)
def reader(policy: Policy) -> Callable[[Tree, Tree, jax.Array, jax.Array], Tree]:
  """Return the program that reads a part of a text: (base, slots, tokens [1, S], first position []) → slots.

  It takes over the buffers of the slots. All S positions must be slots, and S at most what a part of them holds.

  Args:
    policy: with slots to be filled.
  """
  prefix, backend = policy.adapter, policy.backend
  sizes = policy.config
  _, heads = backend.axes(1, sizes.kv_heads, sampling=True)
  part = FSDP if prefix.parts is not None and backend.divided else None
  lie, come = (None, heads, part, None), (None, heads, None, None)
  write = backend.shard(functools.partial(_written, part), (lie, come, ()), lie)

  def read(base: Tree, held: Tree, tokens: jax.Array, start: jax.Array) -> Tree:
    count = tokens.shape[1]
    positions = start - prefix.slots + jnp.arange(count, dtype=jnp.int32)[None]
    cache = policy.init_cache(1, count)
    cache = policy.apply(base, held, tokens, positions, jnp.ones_like(tokens), cache)[2]
    layers = [kv_cache.layer_of(cache.stores, layer) for layer in range(sizes.layers)]
    # A head may have more room in the cache than it has numbers.
    keys, values = (
      jnp.stack([getattr(layer, name)[0, :, :, : sizes.head_dim] for layer in layers]) for name in ('keys', 'values')
    )
    new = nest([(('layers', *FROZEN_KEY.split('.')), keys), (('layers', *FROZEN_VALUE.split('.')), values)])
    return jax.tree.map(lambda into, new: write(into, new, start), held, new)

  return jax.jit(read, donate_argnums=1, out_shardings=_placed(policy, prefix))


def _written(axis: str | None, into: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Return the slots [L, KV, C, head_dim] of a device with the new ones [L, KV, S, head_dim], the first of which is
  number `start` [] of those of all devices, as far as they are its own."""
  here, count = into.shape[2], new.shape[2]
  start = start - (0 if axis is None else lax.axis_index(axis) * here)
  at = jnp.clip(start, 0, here - count)  # S slots here, among which are all of the new ones that come here.
  moved = at - start  # The first of them is this one of the new ones.
  own = moved + jnp.arange(count, dtype=jnp.int32)
  before = lax.dynamic_slice_in_dim(into, at, count, axis=2)
  mixed = jnp.where(((own >= 0) & (own < count))[None, None, :, None], jnp.roll(new, -moved, axis=2), before)
  return lax.dynamic_update_slice_in_dim(into, mixed.astype(into.dtype), at, axis=2)


def slots(prefix: KVPrefix, keys: jax.Array, values: jax.Array, dtype: str) -> tuple[Tree, Tree]:
  """Return the frozen slots in `dtype` and the trained ones in float32, as the parameter table nests them.

  Args:
    prefix: how many there are of each.
    keys: [L, KV, P, head_dim], of a divided prefix [L, KV, room, head_dim].
    values: likewise.
    dtype: in which the model computes.
  """
  frozen = prefix.frozen + prefix.room - prefix.slots
  kinds = (
    (slice(None, frozen), dtype, FROZEN_KEY, FROZEN_VALUE),
    (slice(frozen, None), 'float32', KEY, VALUE),
  )

  def part(cut: slice, kind: str, *names: str) -> Tree:
    arrays = [array[:, :, cut].astype(kind) for array in (keys, values)]
    named = zip(names, arrays, strict=True) if arrays[0].shape[2] else ()
    return nest((('layers', *name.split('.')), array) for name, array in named)

  frozen, trained = (part(*kind) for kind in kinds)
  return frozen, trained


def joined(prefix: KVPrefix, base: Tree, trained: Tree) -> tuple[jax.Array, jax.Array]:
  """Return keys and values [L, KV, P, head_dim] of all slots in float32: the inverse of `slots`.

  Args:
    prefix: how many there are of each.
    base: parameters that hold the frozen slots.
    trained: the others.
  """

  def whole(frozen: str, name: str) -> jax.Array:
    held = [(base, frozen)] * bool(prefix.frozen) + [(trained, name)] * prefix.trained
    parts = [get(tree, ('layers', *path.split('.'))).astype(jnp.float32) for tree, path in held]
    return jnp.concatenate(parts, axis=2)

  return whole(FROZEN_KEY, KEY), whole(FROZEN_VALUE, VALUE)


def place(policy: Policy, prefix: KVPrefix, keys: jax.Array, values: jax.Array) -> tuple[Tree, Tree]:
  """Return `slots` where the parameters of a policy lie; arguments as there."""
  table, mesh = prefix.rows(policy.base_policy().parameter_table(), policy.dtype), policy.backend.mesh
  placed = None
  if mesh is not None:
    rows = map_table(lambda row: parameter_sharding(mesh, row.axes, row.shape), table)
    placed = split(table, rows)
  make = functools.partial(slots, prefix, dtype=policy.dtype)
  return jax.jit(make, out_shardings=placed)(keys, values)
