"""Training slots: adapters of one shape that are trained side by side, each as if it were alone.

The gradients of a micro-batch whose rows belong to different slots are one tree (`learning.update.accumulate` with a
policy of a `LoraPool`, in which a row contributes to its own adapter alone); the optimizer step is taken slot by slot,
under a mask.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
import numpy as np
import optax

from sdpo_jax.distributed.mesh import replicated
from sdpo_jax.learning.optimizer import take_step
from sdpo_jax.models.adapters import lora_pool
from sdpo_jax.models.parameters import Table
from sdpo_jax.types import Tree


@flax.struct.dataclass
class SlotState:
  """The trained state of N slots."""

  trainable: Tree  # [L, N, …] float32, factors.
  moments: optax.ScaleByAdamState  # AdamW's moments: count [N] int32, mu and nu [L, N, …] float32.


@flax.struct.dataclass
class StepSettings:
  """AdamW settings of N slots; all are data, so that one program serves all requests."""

  learning_rate: jax.Array  # [N] float32.
  beta1: jax.Array  # [N] float32.
  beta2: jax.Array  # [N] float32.
  eps: jax.Array  # [N] float32.
  weight_decay: jax.Array  # [N] float32, decoupled: times the learning rate.
  max_grad_norm: jax.Array  # [N] float32, of all factors of a slot; infinity: gradients are not clipped.


# The largest norm of a gradient that is 0 but for rounding, as of a divergence from an equal distribution.
ROUNDING = 1e-6
LARGEST = 1e30  # Upper bound of the numbers of an adapter, safe in bfloat16, too.
# The axis of the slots in each part of the state.
_MOMENTS = optax.ScaleByAdamState(count=0, mu=lora_pool.AXIS, nu=lora_pool.AXIS)
_STATE = SlotState(trainable=lora_pool.AXIS, moments=_MOMENTS)


def fits(values: np.ndarray | jax.Array) -> jax.Array:
  """Return whether all numbers of an array are finite and small enough for every compute dtype, [] bool."""
  return (abs(values) < LARGEST).all()  # Comparisons with NaN are false.


def fresh(trainable: Tree) -> SlotState:
  """Return untrained slots with given factors, on the same devices, without compiling anything.

  Args:
    trainable: [L, N, …] float32, factors.
  """

  def zeros() -> Tree:
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), _place(leaf)), trainable)

  leaf = jax.tree.leaves(trainable)[0]
  place = _place(leaf)
  whole = replicated(place.mesh) if isinstance(place, NamedSharding) else place
  count = jax.device_put(np.zeros(leaf.shape[lora_pool.AXIS], np.int32), whole)
  return SlotState(trainable, optax.ScaleByAdamState(count, zeros(), zeros()))


def shardings(table: Table, mesh: Mesh) -> SlotState:
  """Return the shardings of slots on a mesh: moments as the factors, counts replicated.

  Args:
    table: parameter table of a policy with a pool.
    mesh: the mesh.
  """
  factors = lora_pool.shardings(table, mesh)
  return SlotState(factors, optax.ScaleByAdamState(count=replicated(mesh), mu=factors, nu=factors))


def _place(leaf: jax.Array) -> Sharding | None:
  """Return the sharding of a committed array; None: the array may be moved."""
  return leaf.sharding if leaf.committed else None


def slot_of(state: SlotState, slot: jax.Array | int) -> SlotState:
  """Return one slot of a state, without the axis of slots."""
  count, mu, nu = state.moments
  mu, nu, trainable = (lora_pool.member(tree, slot) for tree in (mu, nu, state.trainable))
  return SlotState(trainable, optax.ScaleByAdamState(count[slot], mu, nu))


def with_slot(state: SlotState, slot: jax.Array | int, own: SlotState) -> SlotState:
  """Return the state with one slot replaced by `own`, which has no axis of slots."""
  count, mu, nu = state.moments
  mu, nu, trainable = (
    lora_pool.with_member(tree, slot, new)
    for tree, new in ((mu, own.moments.mu), (nu, own.moments.nu), (state.trainable, own.trainable))
  )
  return SlotState(trainable, optax.ScaleByAdamState(count.at[slot].set(own.moments.count), mu, nu))


def step(
  state: SlotState, grads: Tree, settings: StepSettings, active: jax.Array
) -> tuple[SlotState, dict[str, jax.Array]]:
  """Take one AdamW step in the active slots; no bit of the others changes.

  A slot whose gradient is 0 but for rounding, or not finite, is left unchanged (`learning.optimizer.take_step`). So is
  a slot in which the step would produce a value that is not finite or too large for a compute dtype, since it could
  reach the rows of other slots.

  Args:
    state: state before the step.
    grads: [L, N, …], gradients of the trainable tree.
    settings: settings of every slot.
    active: [N] bool, the slots that take a step.

  Returns:
    The state, and [N] each `grad_norm` (before clipping) and `stepped` (bool).
  """

  def one(
    state: SlotState, grads: Tree, settings: StepSettings, active: jax.Array
  ) -> tuple[SlotState, dict[str, jax.Array]]:
    adam = optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.eps)
    optimizer = optax.chain(adam, optax.add_decayed_weights(settings.weight_decay))
    (trainable, (moments, _)), norm, stepped = take_step(
      optimizer,
      settings.learning_rate,
      settings.max_grad_norm,
      state.trainable,
      (state.moments, optax.EmptyState()),
      grads,
      lambda moved: active & jnp.stack([fits(leaf) for leaf in jax.tree.leaves(moved)]).all(),
      smallest=ROUNDING,
    )
    return SlotState(trainable, moments), {'grad_norm': norm, 'stepped': stepped}

  return jax.vmap(one, in_axes=(_STATE, lora_pool.AXIS, 0, 0), out_axes=(_STATE, 0))(state, grads, settings, active)
