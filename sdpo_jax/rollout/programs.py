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
  result: Callable[[decode.DecodeState], decode.DecodeResult]
  put: Callable[[Tree], Tree]  # Host arrays of rows to the devices.
  fetch: Callable[[Tree], Tree]  # Host arrays, the whole on every process.
  shards: int  # The rows of a call are divided into so many parts.


@functools.cache
def programs(policy: Policy, mesh: Mesh | None) -> Programs:
  """The programs of a policy; samplers of the same policy on the same mesh share them.

  On a mesh, rows are divided over its `fsdp` axis, and parameters are gathered over that axis once a batch of rollouts
  (they stay divided over `tensor`): a loop that gathered them at every step would do little else.
  """
  return _on_one_device(policy) if mesh is None or mesh.size == 1 else _on_mesh(policy, mesh)


def _on_one_device(policy: Policy) -> Programs:
  return Programs(
    prepare=jax.jit(functools.partial(decode.for_decoding, policy)),
    prefill=jax.jit(functools.partial(decode.prefill, policy), static_argnames=('n', 'max_new_tokens')),
    advance=jax.jit(functools.partial(decode.advance, policy), donate_argnames='state'),
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
  ) -> decode.DecodeState:
    state = decode.prefill(policy, base, trainable, prompts, lengths, params, n=n, max_new_tokens=max_new_tokens)
    axes = _row_axes(policy, base, trainable, prompts, params, n, max_new_tokens)
    place = lambda leaf, axis: lax.with_sharding_constraint(leaf, _row_sharding(mesh, leaf.ndim, axis))
    return jax.tree.map(place, state, axes)

  @functools.cache
  def advance_as(tree: Any, shardings: tuple[Sharding, ...]) -> Callable[..., decode.DecodeState]:
    # What comes out lies as what went in, so that it can go in again without another compilation.
    return jax.jit(
      functools.partial(decode.advance, policy), donate_argnames='state', out_shardings=tree.unflatten(shardings)
    )

  def advance(base: Tree, trainable: Tree, params: SamplingParams, state: decode.DecodeState, limit: np.int32):
    leaves, tree = jax.tree.flatten(state)
    return advance_as(tree, tuple(leaf.sharding for leaf in leaves))(base, trainable, params, state, limit)

  def put(leaf: np.ndarray) -> jax.Array:
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, rows if leaf.ndim else whole, lambda index: leaf[index])

  gather = jax.jit(gather, static_argnames='specs')
  replicate = jax.jit(lambda tree: tree, out_shardings=whole)
  return Programs(
    prepare=lambda base, trainable: gather(base, trainable, specs=_without_fsdp((base, trainable))),
    prefill=jax.jit(prefill, static_argnames=('n', 'max_new_tokens')),
    advance=advance,
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


def _row_axes(
  policy: Policy, base: Tree, trainable: Tree, prompts: jax.Array, params: SamplingParams, n: int, max_new_tokens: int
) -> decode.DecodeState:
  """For every array of the state the axis that grows with the number of prompts, -1 for none."""

  def shapes(groups: int) -> decode.DecodeState:
    resize = lambda leaf, rows: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) if leaf.ndim else leaf
    return jax.eval_shape(
      functools.partial(decode.prefill, policy, n=n, max_new_tokens=max_new_tokens),
      base,
      trainable,
      resize(prompts, groups),
      jax.ShapeDtypeStruct((groups,), np.int32),
      jax.tree.map(lambda leaf: resize(leaf, groups * n), params),
    )

  def axis(one: Any, two: Any) -> int:
    return next((i for i, sizes in enumerate(zip(one.shape, two.shape, strict=True)) if sizes[0] != sizes[1]), -1)

  return jax.tree.map(axis, shapes(1), shapes(2))


def _row_sharding(mesh: Mesh, ndim: int, axis: int) -> NamedSharding:
  """Rows over `fsdp`; how heads lie over `tensor` is left to the compiler."""
  other = PartitionSpec.UNCONSTRAINED if mesh.shape[TENSOR] > 1 and ndim > 2 else None
  return NamedSharding(mesh, PartitionSpec(*(FSDP if i == axis else other for i in range(ndim))))
