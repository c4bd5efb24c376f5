"""The compiled programs of a sampler, on one device or with their rows spread over a mesh."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
import numpy as np

from models.policy import Policy
from sdpo_jax.mesh import FSDP, TENSOR
from sdpo_jax.rollout import decode
from sdpo_jax.rollout.sampling import SamplingParams

Tree = Any


@dataclasses.dataclass(frozen=True)
class Programs:
  """What the engine runs; each compiles once for its shapes."""

  prepare: Callable[[Tree, Tree], tuple[Tree, Tree]]  # (base, trainable), once a batch of rollouts.
  prefill: Callable[..., decode.DecodeState]  # `decode.prefill` without the policy.
  advance: Callable[..., decode.DecodeState]  # `decode.advance` without the policy; takes over the state's buffers.
  grow: Callable[..., decode.DecodeState]  # (state, *, n, slots): slots of the prompt and after each stage so far.
  result: Callable[[decode.DecodeState], decode.DecodeResult]
  put: Callable[[Tree], Tree]  # Host arrays of rows to the devices.
  fetch: Callable[[Tree], Tree]  # Host arrays, the whole on every process.
  shards: int  # The rows of a call are divided into so many parts.


@dataclasses.dataclass(frozen=True)
class Placed:
  """A jitted function that is made for the shardings of its arguments; it is called and lowered as any other."""

  make: Callable[..., Any]

  def __call__(self, *arguments: Any) -> Any:
    return self.make(*arguments)(*arguments)

  def lower(self, *arguments: Any) -> jax.stages.Lowered:
    return self.make(*arguments).lower(*arguments)


@functools.cache
def programs(policy: Policy, mesh: Mesh | None) -> Programs:
  """The programs of a policy; samplers of the same policy on the same mesh share them.

  On a mesh, rows are divided over its `fsdp` axis, and parameters are gathered over that axis once a batch of rollouts
  (they stay divided over `tensor`): a loop that gathered them at every step would do little else.
  """
  return _on_one_device(policy) if mesh is None or mesh.size == 1 else _on_mesh(policy, mesh)


def _on_one_device(policy: Policy) -> Programs:
  def grow(state: decode.DecodeState, n: int, slots: tuple[int, ...]) -> decode.DecodeState:
    del n
    return decode.grow(policy, state, slots[-1])

  return Programs(
    prepare=jax.jit(functools.partial(decode.for_decoding, policy)),
    prefill=jax.jit(functools.partial(decode.prefill, policy), static_argnames=('n', 'max_new_tokens', 'slots')),
    advance=jax.jit(functools.partial(decode.advance, policy), donate_argnames='state'),
    grow=jax.jit(grow, static_argnames=('n', 'slots'), donate_argnames='state'),
    result=jax.jit(decode.result),
    put=lambda tree: tree,
    fetch=jax.device_get,
    shards=1,
  )


def _on_mesh(policy: Policy, mesh: Mesh) -> Programs:
  rows, whole = NamedSharding(mesh, PartitionSpec(FSDP)), NamedSharding(mesh, PartitionSpec())
  shards = mesh.shape[FSDP]

  def gather(base: Tree, trainable: Tree, specs: tuple[PartitionSpec, ...]) -> tuple[Tree, Tree]:
    leaves, tree = jax.tree.flatten((base, trainable))
    placed = [
      lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return decode.for_decoding(policy, *tree.unflatten(placed))

  def prefill(
    base: Tree,
    trainable: Tree,
    prompts: jax.Array,
    lengths: jax.Array,
    params: SamplingParams,
    *,
    n: int,
    max_new_tokens: int,
    slots: int,
  ) -> decode.DecodeState:
    state = decode.prefill(
      policy, base, trainable, prompts, lengths, params, n=n, max_new_tokens=max_new_tokens, slots=slots
    )
    width = prompts.shape[1]
    return _spread(mesh, state, _row_axes(policy, n, (width, width + slots)))

  def grow(state: decode.DecodeState, n: int, slots: tuple[int, ...]) -> decode.DecodeState:
    return _spread(mesh, decode.grow(policy, state, slots[-1]), _row_axes(policy, n, slots))

  @functools.cache
  def advance_as(tree: Any, shardings: tuple[Sharding, ...]) -> Callable[..., decode.DecodeState]:
    # What comes out lies as what went in, so that it can go in again without another compilation.
    return jax.jit(
      functools.partial(decode.advance, policy), donate_argnames='state', out_shardings=tree.unflatten(shardings)
    )

  def advance(
    base: Tree, trainable: Tree, params: SamplingParams, state: decode.DecodeState, limit: np.int32
  ) -> Callable[..., decode.DecodeState]:
    del base, trainable, params, limit
    leaves, tree = jax.tree.flatten(state)
    return advance_as(tree, tuple(leaf.sharding for leaf in leaves))

  @functools.cache
  def gather_as(specs: tuple[PartitionSpec, ...]) -> Callable[..., tuple[Tree, Tree]]:
    return jax.jit(functools.partial(gather, specs=specs))

  def put(leaf: np.ndarray) -> jax.Array:
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, rows if leaf.ndim else whole, lambda index: leaf[index])

  replicate = jax.jit(lambda tree: tree, out_shardings=whole)
  return Programs(
    prepare=Placed(lambda base, trainable: gather_as(_without_fsdp((base, trainable)))),
    prefill=jax.jit(prefill, static_argnames=('n', 'max_new_tokens', 'slots')),
    advance=Placed(advance),
    grow=jax.jit(grow, static_argnames=('n', 'slots'), donate_argnames='state'),
    result=jax.jit(decode.result, out_shardings=whole),
    put=functools.partial(jax.tree.map, put),
    fetch=lambda tree: jax.device_get(replicate(tree)),
    shards=shards,
  )


def _without_fsdp(parameters: Tree) -> tuple[PartitionSpec, ...]:
  """How each parameter is divided over the other axes."""

  def drop(entry: Any) -> Any:
    names = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name not in (FSDP, None))
    return names or None

  def spec(leaf: Any) -> PartitionSpec:
    sharding = getattr(leaf, 'sharding', None)
    return PartitionSpec(*map(drop, sharding.spec)) if isinstance(sharding, NamedSharding) else PartitionSpec()

  return tuple(spec(leaf) for leaf in jax.tree.leaves(parameters))


def _row_axes(policy: Policy, n: int, slots: tuple[int, ...]) -> Tree:
  """For every array of the cache the axis that grows with the number of prompts, -1 for none."""

  def shapes(prompts: int) -> Tree:
    first = jax.eval_shape(lambda: policy.repeat_cache(policy.init_cache(prompts, slots[0]), n, slots[1]))
    longer = lambda cache, length: jax.eval_shape(lambda cache: policy.repeat_cache(cache, 1, length), cache)
    return functools.reduce(longer, slots[2:], first)

  def axis(one: Any, two: Any) -> int:
    return next((i for i, sizes in enumerate(zip(one.shape, two.shape, strict=True)) if sizes[0] != sizes[1]), -1)

  return jax.tree.map(axis, shapes(1), shapes(2))


def _spread(mesh: Mesh, state: decode.DecodeState, cache_axes: Tree) -> decode.DecodeState:
  """The state with its rows over `fsdp`; how heads lie over `tensor` is left to the compiler."""

  def place(leaf: jax.Array, axis: int) -> jax.Array:
    other = PartitionSpec.UNCONSTRAINED if mesh.shape[TENSOR] > 1 and leaf.ndim > 2 else None
    spec = PartitionSpec(*(FSDP if i == axis else other for i in range(leaf.ndim)))
    return lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

  cache = jax.tree.map(place, state.cache, cache_axes)
  # Beside the cache: rows [B], records [T, B] and one counter.
  return jax.tree.map(lambda leaf: place(leaf, leaf.ndim - 1), state.replace(cache=None)).replace(cache=cache)
