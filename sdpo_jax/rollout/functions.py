"""The compiled functions of a sampler, on one device or with their rows spread over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from sdpo_jax.distributed.mesh import FSDP, RULES, TENSOR
from sdpo_jax.models import cache as kv_cache
from sdpo_jax.models.cache import KVCache
from sdpo_jax.models.policy import NO_MEMBER, Policy
from sdpo_jax.rollout import decode
from sdpo_jax.rollout.weights import BasePreparation, base_preparation, preparing_trainable
from sdpo_jax.types import Tree

Keep = Callable[[str, Any], Callable[..., Any]]  # (name, jitted function) → the function to call instead.


@dataclasses.dataclass(frozen=True)
class SamplerFunctions:
  """The functions that the engine calls; each compiles once per set of argument shapes.

  On a mesh, S shards have the same number of rows each, one after the other. Row indices count within a shard, so no
  row ever moves to another shard.
  """

  prepare: Callable[[Tree], Tree]  # Prepares the trainable tree, once per batch of rollouts.
  prepare_base: Callable[[Tree], BasePreparation]  # Returns how to prepare a base; called once per run.
  prefill: Callable[..., KVCache]  # `decode.prefill` without the policy: (…, *, slots).
  # `decode.extend` without the policy, on copies of rows of a cache: (base, trainable, cache, source [rows], tokens
  # [rows, P], held [rows], new [rows], members, *, piece); a row begins with the first `held` tokens of its source.
  extend: Callable[..., KVCache]
  empty: Callable[..., KVCache]  # (*, rows, slots), rows of all shards.
  # `sdpo_jax.models.cache.copy_rows` in each shard: source and target [rows], count [S]; donates the first cache.
  copy: Callable[..., KVCache]
  # (cache, source [rows], *, slots): a new cache of these rows, with `slots` slots each.
  resize: Callable[..., KVCache]
  # `sdpo_jax.models.cache.compact` in each shard: (stores, lengths, source [rows]); donates the stores.
  compact: Callable[..., KVCache]
  clear: Callable[..., KVCache]  # `sdpo_jax.models.cache.clear`; donates the stores.
  # `decode.advance` without the policy; donates the cache.
  advance: Callable[..., tuple[KVCache, decode.Drawn]]
  put: Callable[[Tree], Tree]  # Moves host arrays of rows to the devices.
  fetch: Callable[[Tree], Tree]  # Returns host arrays, complete on every process.
  shards: int
  # Whether the cache is allocated at its largest size and keeps it: unfilled slots are not read, and resizing would
  # need the memory of a second cache. `compact` moves live rows to the front.
  keeps_size: bool
  pooled: bool  # Whether rows use members, see `Policy.apply`;
  members_at_once: int | None  # and how many, K: `members` are [rows, K]. None: one, [rows].
  rows_alike: int | None  # See `Policy.rows_alike`.

  def no_members(self, rows: int) -> np.ndarray:
    """Return the `members` of rows that use none."""
    return np.full((rows,) if self.members_at_once is None else (rows, self.members_at_once), NO_MEMBER, np.int32)

  def copied(self, into: KVCache, rows: KVCache, moves: Iterable[tuple[int, int, int]], most: int) -> KVCache:
    """Return a cache with copies of the rows of another; the first cache is donated.

    Args:
      into: cache to copy into.
      rows: cache to copy from.
      moves: (shard, row to copy, row to copy it to), counted within the shard.
      most: maximum number of moves of a shard.
    """
    source, target = (np.zeros((self.shards, most), np.int32) for _ in range(2))
    count = np.zeros(self.shards, np.int32)
    for shard, row, to in moves:
      source[shard, count[shard]], target[shard, count[shard]] = row, to
      count[shard] += 1
    return self.copy(into, rows, *self.put((source.reshape(-1), target.reshape(-1), count)))

  def kept(self, keep: Keep) -> SamplerFunctions:
    """Return the same functions, with `keep` applied to every jitted one, for example to cache compiled programs."""

    def prepare_base(base: Tree) -> BasePreparation:
      made = self.prepare_base(base)
      return dataclasses.replace(made, program=made.program and keep('prepare_base', made.program))

    names = 'prepare', 'prefill', 'extend', 'empty', 'copy', 'resize', 'compact', 'clear', 'advance'
    jitted = {name: keep(name, getattr(self, name)) for name in names}
    return dataclasses.replace(self, **jitted, prepare_base=prepare_base)


@functools.cache
def sampler_functions(policy: Policy, mesh: Mesh | None, quantized: bool = False) -> SamplerFunctions:
  """Return the compiled functions for sampling from a policy, shared by all samplers with the same arguments.

  On a mesh, rows are sharded over its `fsdp` axis, and parameters are gathered over that axis before the loop, the base
  once per run and the trainable tree once per batch (they stay sharded over `tensor`): a loop that gathered them at
  every step would do little else.

  Args:
    policy: the language model.
    mesh: mesh to run on; None: the default device.
    quantized: whether the cache holds int8 instead of the compute dtype.
  """
  divided = mesh is not None and mesh.size > 1
  sharded = divided and 1 < mesh.shape[TENSOR] and policy.config.padded_vocab_size % mesh.shape[TENSOR] == 0
  reading = policy.in_any_order()  # Of prompts.
  local = functools.partial(_in_each_shard, mesh) if divided else lambda function: function

  @local
  def copy(into: KVCache, rows: KVCache, source: jax.Array, target: jax.Array, count: jax.Array) -> KVCache:
    return kv_cache.copy_rows(into, rows, source, target, count[0])

  shards = mesh.shape[FSDP] if divided else 1

  def resize(cache: KVCache, source: jax.Array, slots: int) -> KVCache:
    rows = source.shape[0]
    target = jnp.arange(rows, dtype=jnp.int32) % (rows // shards)
    count = jnp.full((shards,), rows // shards, jnp.int32)
    return copy(policy.init_cache(rows, slots, quantized), cache, source, target, count)

  def extend(
    base: Tree,
    trainable: Tree,
    cache: KVCache,
    source: jax.Array,
    tokens: jax.Array,
    held: jax.Array,
    new: jax.Array,
    members: jax.Array | None = None,
    *,
    piece: int,
  ) -> KVCache:
    slots = kv_cache.slots(cache)
    # The last piece of a row may extend beyond its last token.
    rows = resize(cache, source, slots + piece).replace(lengths=held)
    grown = decode.extend(
      reading, base, trainable, rows, tokens, new, members, piece=piece, commit=local(kv_cache.commit)
    )
    return kv_cache.with_slots(grown, slots)

  # Lengths are a separate argument, since fewer of them need another buffer.
  def compact(stores: kv_cache.Stores, lengths: jax.Array, source: jax.Array) -> KVCache:
    return local(kv_cache.compact)(KVCache(stores, lengths), source)

  def empty(rows: int, slots: int) -> KVCache:
    return policy.init_cache(rows, slots, quantized)

  placed, result, put = None, None, lambda tree: tree
  if mesh is not None:
    # Also on one device: programs compiled for a mesh take arrays that lie on it.
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(FSDP))
    placed = cache_shardings(mesh, jax.eval_shape(lambda: policy.init_cache(shards, 1, quantized)))
    result = placed, whole
  if divided:
    put = functools.partial(jax.tree.map, lambda leaf: _put(np.asarray(leaf), rows, whole))
  return SamplerFunctions(
    prepare=preparing_trainable(policy, mesh),
    prepare_base=functools.partial(base_preparation, policy, mesh),
    prefill=jax.jit(
      functools.partial(decode.prefill, reading, quantized=quantized), static_argnames='slots', out_shardings=placed
    ),
    extend=jax.jit(extend, static_argnames='piece', out_shardings=placed),
    empty=jax.jit(empty, static_argnames=('rows', 'slots'), out_shardings=placed),
    copy=jax.jit(copy, donate_argnums=0, out_shardings=placed),
    resize=jax.jit(resize, static_argnames='slots', out_shardings=placed),
    compact=jax.jit(compact, donate_argnums=0, out_shardings=placed),
    clear=jax.jit(kv_cache.clear, donate_argnums=0, out_shardings=placed),
    advance=jax.jit(
      functools.partial(decode.advance, policy, commit=local(kv_cache.commit), mesh=mesh if sharded else None),
      static_argnames='steps',
      donate_argnames='cache',
      out_shardings=result,
    ),
    put=put,
    fetch=jax.device_get,
    shards=shards,
    keeps_size=policy.reads_filled,
    pooled=policy.pooled,
    members_at_once=policy.members_at_once,
    rows_alike=policy.rows_alike,
  )


def cache_shardings(mesh: Mesh, cache: KVCache) -> KVCache:
  """Return the shardings of a cache's arrays: rows over `fsdp`, heads over `tensor` if it divides them."""

  def place(leaf: Any, axes: tuple[str | None, ...]) -> NamedSharding:
    names = [FSDP if axis == 'rows' else RULES.get(axis) for axis in axes]
    fits = [
      name if name and size % mesh.shape[name] == 0 else None for name, size in zip(names, leaf.shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*fits))

  return jax.tree.map(place, cache, kv_cache.axes(cache))


def _in_each_shard(mesh: Mesh, function: Callable[..., KVCache]) -> Callable[..., KVCache]:
  """Return a version of a function (cache, caches or arrays of rows …) → cache that runs on each shard's own rows.

  The sharding of heads over `tensor` is left to the compiler.
  """

  def specs(argument: Any) -> Any:
    if not isinstance(argument, KVCache):
      return PartitionSpec(FSDP)
    return jax.tree.map(
      lambda leaf, axes: PartitionSpec(*(FSDP if axis == 'rows' else None for axis in axes)),
      argument,
      kv_cache.axes(argument),
    )

  @functools.wraps(function)
  def run(cache: KVCache, *arguments: Any) -> KVCache:
    places = tuple(map(specs, (cache, *arguments)))
    shared = jax.shard_map(
      function,
      mesh=mesh,
      in_specs=places,
      out_specs=places[0].replace(recent=None),
      axis_names={FSDP},
      check_vma=False,
    )
    return shared(cache, *arguments)

  return run


def _put(leaf: np.ndarray, rows: NamedSharding, whole: NamedSharding) -> jax.Array:
  return jax.make_array_from_callback(leaf.shape, rows if leaf.ndim else whole, lambda index: leaf[index])
