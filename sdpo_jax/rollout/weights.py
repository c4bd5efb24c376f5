"""Parameters prepared for a sampler: cast to compute dtype, and gathered once instead of at every step."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import threading
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sdpo_jax.distributed.mesh import FSDP
from sdpo_jax.models.adapters.slot_names import names_slots
from sdpo_jax.models.policy import Policy
from sdpo_jax.types import Tree


@dataclasses.dataclass(frozen=True)
class Placed:
  """A jitted function that is built for the shardings of its argument, and is called and lowered like any other."""

  make: Callable[[Tree], Any]

  def __call__(self, tree: Tree) -> Tree:
    return self.make(tree)(tree)

  def lower(self, tree: Tree) -> jax.stages.Lowered:
    """Lower the function for a tree, as `jax.jit(…).lower` does."""
    return self.make(tree).lower(tree)


@dataclasses.dataclass(frozen=True)
class BasePreparation:
  """The preparation of a base for a sampler: which arrays are used unchanged, and a program that makes the others."""

  # base → the prepared tree with None in place of every array that is used unchanged; None: all are.
  program: Callable[[Tree], Tree] | None
  form: Any  # The structure of the prepared tree.
  stays: tuple[int | None, ...]  # Per leaf of the prepared tree, the leaf of the base that it is; None: it is made.

  def run(self, base: Tree) -> Tree:
    """Return the prepared tree; an array that is used unchanged is the base's own, not a copy."""
    return self._complete(base, self.program)

  def describe(self, base: Tree) -> Tree:
    """Return the prepared tree as abstract arrays; the compiler chooses the shardings of those that are made."""
    return self._complete(base, self.program and functools.partial(jax.eval_shape, self.program))

  def kinds(self, stays: str, made: str) -> tuple[str, ...]:
    """Return, per leaf of the prepared tree, `stays` if it is the base's own array, else `made`."""
    return tuple(made if stay is None else stays for stay in self.stays)

  def _complete(self, base: Tree, program: Callable[[Tree], Tree] | None) -> Tree:
    own = jax.tree.leaves(base)
    made = [None] * len(self.stays) if program is None else self.form.flatten_up_to(program(base))
    pairs = zip(self.stays, made, strict=True)
    return self.form.unflatten([other if stay is None else own[stay] for stay, other in pairs])


class PreparedBase:
  """A cache of one prepared base: a base is prepared when it is first seen, and kept.

  A base with other arrays replaces it. A base with arrays that can change in place, such as NumPy's, is prepared every
  time.
  """

  def __init__(self, prepare: Callable[[Tree], BasePreparation]):
    self._prepare = prepare
    self._lock = threading.Lock()  # Two requests at once must not make two copies.
    self._own: tuple[Any, list[Any]] | None = None  # Structure and arrays of the base that was prepared.
    self._prepared: Tree = {}

  def __call__(self, base: Tree) -> Tree:
    """Return the prepared base, from the cache if it was prepared before."""
    leaves, form = jax.tree.flatten(base)
    with self._lock:
      if self._own is not None and self._is_own(leaves, form):
        return self._prepared
      self._own, self._prepared = None, {}  # Dropped before the next is made, so that there are never two.
      prepared = self._prepare(base).run(base)
      if all(isinstance(leaf, jax.Array) for leaf in leaves):
        self._own, self._prepared = (form, leaves), prepared
      return prepared

  def _is_own(self, leaves: list[Any], form: Any) -> bool:
    own_form, own = self._own
    return form == own_form and all(one is other for one, other in zip(leaves, own, strict=True))


def preparing_trainable(policy: Policy, mesh: Mesh | None) -> Callable[[Tree], Tree]:
  """Return the program that casts and gathers the trainable tree, once per batch of rollouts."""

  def cast(trainable: Tree) -> Tree:
    return policy.cast({}, trainable)[1]

  return _gathering(cast, mesh) if _is_divided(mesh) else jax.jit(cast)


def base_preparation(policy: Policy, mesh: Mesh | None, base: Tree) -> BasePreparation:
  """Return the preparation that casts and gathers a base, which may consist of abstract arrays.

  An array is used unchanged if casting does not change it and it is not sharded over `fsdp`.
  """
  leaves, form = jax.tree.flatten(base)
  traced, shape = jax.make_jaxpr(lambda tree: policy.cast(tree, {})[0], return_shape=True)(base)
  places = {id(variable): place for place, variable in enumerate(traced.jaxpr.invars)}
  specs = _without_fsdp(base)

  def is_there(leaf: Any, spec: PartitionSpec) -> bool:
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
      return False
    if not _is_divided(mesh):
      return True
    return leaf.sharding is not None and leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)

  stays = tuple(
    place if place is not None and is_there(leaves[place], specs[place]) else None
    for place in (places.get(id(variable)) for variable in traced.jaxpr.outvars)
  )
  program = _making_base(policy, mesh, stays) if None in stays else None
  return BasePreparation(program, jax.tree.structure(shape), stays)


@functools.cache
def _making_base(policy: Policy, mesh: Mesh | None, stays: tuple[int | None, ...]) -> Callable[[Tree], Tree]:
  def make(base: Tree) -> Tree:
    leaves, form = jax.tree.flatten(policy.cast(base, {})[0])
    pairs = zip(leaves, stays, strict=True)
    return form.unflatten([leaf if stay is None else None for leaf, stay in pairs])

  return _gathering(make, mesh) if _is_divided(mesh) else jax.jit(make)


def _gathering(function: Callable[[Tree], Tree], mesh: Mesh) -> Placed:
  """Return a program that gathers a tree over `fsdp` and calls the function with it."""

  def gather(tree: Tree, specs: tuple[PartitionSpec, ...]) -> Tree:
    leaves, form = jax.tree.flatten(tree)
    placed = [
      lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return function(form.unflatten(placed))

  @functools.cache
  def gather_as(specs: tuple[PartitionSpec, ...]) -> Callable[[Tree], Tree]:
    return jax.jit(functools.partial(gather, specs=specs))

  return Placed(lambda tree: gather_as(_without_fsdp(tree)))


def _is_divided(mesh: Mesh | None) -> bool:
  return mesh is not None and mesh.size > 1


def _without_fsdp(parameters: Tree) -> tuple[PartitionSpec, ...]:
  """Return each parameter's partition spec without `fsdp`; slots of a prefix keep their own."""

  def drop(entry: Any) -> Any:
    names = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name not in (FSDP, None))
    return names or None

  def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    sharding = getattr(leaf, 'sharding', None)
    if not isinstance(sharding, NamedSharding):
      return PartitionSpec()
    stays = names_slots(tuple(entry.key for entry in path))
    return sharding.spec if stays else PartitionSpec(*map(drop, sharding.spec))

  return tuple(spec(path, leaf) for path, leaf in jax.tree.leaves_with_path(parameters))
