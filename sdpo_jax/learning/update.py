"""The update as pure functions: gradients of a micro-batch, the optimizer step, the teacher update.

One generation batch is: for every mini-batch, `accumulate` over its micro-batches and one `apply_gradients`; then one
`advance_teacher`, which also advances the step counter (reference dp_actor.py:913-920). Coefficients in the `Batch`
carry all masks and denominators, so the micro-batch size never changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sdpo_jax.distributed.mesh import TENSOR, abstract, compiler_options, replicated
from sdpo_jax.learning.optimizer import OptimizerSpec, learning_rate, make_optimizer, take_step
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models.forward import forward
from sdpo_jax.models.parameters import Table
from sdpo_jax.models.policy import Policy
from sdpo_jax.objective import log_probs
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.objective.sharded import Layout
from sdpo_jax.objective.terms import POLICY_METRICS, TEACHER_METRICS
from sdpo_jax.teacher import averaging
from sdpo_jax.teacher.averaging import TeacherSpec
from sdpo_jax.teacher.signal import Teacher, on_own_top_k, teacher_signal
from sdpo_jax.types import NUMBERS, Batch, TokenRows, TrainState, Tree


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
  """The compile-time constants of an update; runs with equal specs share compiled programs."""

  terms: ObjectiveSpec
  objective: ObjectiveConfig
  optimizer: OptimizerSpec | None = None  # None: the gradients are applied by someone else.
  teacher: TeacherSpec = TeacherSpec('live', 0.0, None)
  teachers_support: bool = False  # Whether divergences are over the teacher's top K, not the student's.
  seed: int = dataclasses.field(default=0, compare=False)  # Seed of the run's random key; only `init_state` reads it.


def layout(mesh: jax.sharding.Mesh | None) -> Layout | None:
  """Return the objective's layout: rows over all axes, the vocabulary over the tensor axis; None without a mesh."""
  return None if mesh is None else Layout(mesh, mesh.axis_names, TENSOR)


def completion_log_probs(
  policy: Policy,
  spec: UpdateSpec,
  mesh: jax.sharding.Mesh | None,
  base: Tree,
  trainable: Tree,
  rows: TokenRows,
  targets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Return log-probs and entropies [B, T] (nats) of completion tokens at the rollout temperature; no gradient flows."""
  hidden, unembedding = forward(policy, base, trainable, rows)
  return log_probs.token_log_probs(
    hidden,
    unembedding,
    targets,
    temperature=spec.objective.temperature,
    chunk_size=spec.objective.chunk_size,
    vocab_size=policy.vocab_size,
    layout=layout(mesh),
  )


def init_state(spec: UpdateSpec, trainable: Tree, table: Table = ()) -> TrainState:
  """Return the state before the first generation batch; see `make_optimizer` for when `table` is needed."""
  trainable = jax.tree.map(jnp.asarray, trainable)
  return TrainState(
    step=jnp.zeros([], jnp.int32),
    optimizer_step=jnp.zeros([], jnp.int32),
    trainable=trainable,
    opt_state=make_optimizer(spec.optimizer, table).init(trainable),
    teacher=averaging.make(spec.teacher).init(trainable) if spec.terms.needs_teacher else {},
    rng=jax.random.key(spec.seed),
  )


# The objective's per-token quantities that are fetched from the devices, if it computes them, for metrics and files.
PER_TOKEN = ('log_prob', 'entropy', *TEACHER_METRICS.values(), *POLICY_METRICS.values())


@dataclasses.dataclass
class MicroResult:
  """The loss and per-token quantities of one micro-batch."""

  loss: jax.Array  # [], its share of the optimizer step's loss.
  aux: dict[str, jax.Array]  # [B, T] each: those of `PER_TOKEN` that the objective computes.


jax.tree_util.register_dataclass(MicroResult, ['loss', 'aux'], [])


def accumulate(
  policy: Policy,
  spec: UpdateSpec,
  mesh: jax.sharding.Mesh | None,
  base: Tree,
  state: TrainState,
  grads: Tree,
  batch: Batch,
  teacher_base: Tree | None = None,
  *,
  teacher: Teacher | None = None,
) -> tuple[Tree, MicroResult]:
  """Add the gradients of one micro-batch to `grads`.

  Args:
    policy: the model.
    spec: terms of the loss and their settings.
    mesh: devices over which the rows of the batch are sharded; None or one device: no sharding.
    base: frozen parameters.
    state: current state; only read.
    grads: float32 accumulator in the layout of `state.trainable`; donated by the jitted program.
    batch: rows whose coefficients already hold masks, weights and denominators, with the teacher's rows or the signal
      of an external teacher.
    teacher_base: frozen parameters of the teacher, `Teacher.base`; None: `base`.
    teacher: the model that reads the teacher's prompts; its `base` is ignored; None: the student model itself.

  Returns:
    The accumulator, and the micro-batch's loss and per-token quantities.
  """
  signal = batch.signal
  if batch.teacher is not None:
    asked = dataclasses.replace(teacher or Teacher(policy), base=teacher_base)
    signal = teacher_signal(asked, policy, base, state, batch.teacher, spec.teacher)
    if spec.teachers_support:
      signal = on_own_top_k(signal, batch, spec.objective, policy.vocab_size, layout(mesh))

  def loss_fn(trainable: Tree) -> tuple[jax.Array, dict[str, jax.Array]]:
    hidden, unembedding = forward(policy, base, trainable, batch.student)
    return objective(
      hidden,
      unembedding,
      signal,
      targets=batch.targets,
      mask=batch.mask,
      **{name: getattr(batch, name) for name in NUMBERS},
      config=spec.objective,
      vocab_size=policy.vocab_size,
      layout=layout(mesh),
      numbers=batch.numbers,
    )

  (loss, aux), micro = jax.value_and_grad(loss_fn, has_aux=True)(state.trainable)
  per_token = {name: aux[name] for name in PER_TOKEN if name in aux}
  return jax.tree.map(jnp.add, grads, micro), MicroResult(loss=loss, aux=per_token)


def zero_gradients(trainable: Tree) -> Tree:
  """Return a zero-filled gradient accumulator."""
  return jax.tree.map(jnp.zeros_like, trainable)


def apply_gradients(
  spec: UpdateSpec, state: TrainState, grads: Tree, *, table: Table = ()
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Take one optimizer step; a gradient that is not finite leaves the state as it is (reference dp_actor.py:577-580).

  So does a gradient of zeros, if the optimizer skips empty steps: no token of the step had anything to learn.

  Args:
    spec: settings, with those of the optimizer.
    state: state before the step.
    grads: gradients summed over the micro-batches of the step.
    table: parameter table of the policy; see `make_optimizer` for when it is needed.

  Returns:
    The state, and grad_norm (before clipping), learning_rate, taken (0 or 1).
  """
  rate = learning_rate(spec.optimizer, state.step)
  (trainable, opt_state), norm, taken = take_step(
    make_optimizer(spec.optimizer, table),
    rate,
    spec.optimizer.grad_clip,
    state.trainable,
    state.opt_state,
    grads,
    smallest=0.0 if spec.optimizer.skip_empty_steps else None,
  )
  count = taken.astype(jnp.int32)
  state = state.replace(trainable=trainable, opt_state=opt_state, optimizer_step=state.optimizer_step + count)
  return state, {'grad_norm': norm, 'learning_rate': rate, 'taken': count}


def advance_teacher(spec: UpdateSpec, state: TrainState, applied: jax.Array) -> TrainState:
  """End a generation batch: update the teacher once if at least one optimizer step was applied, and count the step.

  Args:
    spec: whether there is a teacher, and how it moves.
    state: state after the optimizer steps.
    applied: [] int32, the number of optimizer steps that were taken.
  """
  teacher = state.teacher
  if spec.terms.needs_teacher:
    moved = averaging.make(spec.teacher).update(teacher, state.trainable, state.step)
    teacher = jax.tree.map(lambda new, old: jnp.where(applied > 0, new, old), moved, teacher)
  return state.replace(teacher=teacher, step=state.step + 1)


@dataclasses.dataclass(frozen=True)
class UpdateFunctions:
  """The jitted functions of the update."""

  log_probs: Callable[..., Any]  # `completion_log_probs` from `base` on.
  zero: Callable[..., Any]  # `zero_gradients`.
  accumulate: Callable[..., Any]  # `accumulate` from `base` on.
  apply: Callable[..., Any]  # `apply_gradients` from `state` on.
  advance_teacher: Callable[..., Any]  # `advance_teacher` from `state` on.


def state_shardings(state: TrainState, trainable: Tree, mesh: jax.sharding.Mesh) -> TrainState:
  """Return the shardings of a train state's leaves.

  A subtree with the structure of the trainable tree (moments, the teacher) takes the shardings of the trainable tree,
  leaf by leaf, where the shapes agree. Leaves of other shapes, such as the factors of a factored second moment, and all
  other subtrees are replicated.

  Args:
    state: arrays or abstract arrays.
    trainable: parameters with shardings.
    mesh: mesh of the run.
  """
  whole = replicated(mesh)

  def alike(node: Any) -> bool:
    return not isinstance(node, optax.MaskedNode) and _is_like(node, trainable)

  def place(node: Any, parameters: Any) -> Any:
    if isinstance(node, dict):
      return {name: place(child, parameters[name]) for name, child in node.items()}
    if isinstance(node, optax.MaskedNode):
      return node
    return parameters.sharding if node.ndim and node.shape == parameters.shape else whole

  return jax.tree.map(lambda node: place(node, trainable) if alike(node) else whole, state, is_leaf=alike)


def _is_like(node: Any, parameters: Any) -> bool:
  """Return whether a node has the structure of nested dicts of parameters.

  For parameters that it masks, optax leaves a node without arrays in place of one parameter or of several.
  """
  if isinstance(node, optax.MaskedNode):
    return True
  if isinstance(node, dict) != isinstance(parameters, dict):
    return False
  if not isinstance(node, dict):
    return hasattr(node, 'shape')
  return node.keys() == parameters.keys() and all(_is_like(node[name], parameters[name]) for name in node)


def make_update(
  policy: Policy, spec: UpdateSpec, shardings: TrainState | None = None, teacher: Teacher | None = None
) -> UpdateFunctions:
  """Return the jitted functions of the update; accumulators and states are donated when they are replaced.

  Calls with the same model, teacher, spec and shardings share functions, and thus compiled programs.

  Args:
    policy: the model.
    spec: settings of the update.
    shardings: shardings of the state (`state_shardings`), so that outputs are sharded like inputs and nothing is
      compiled twice; None leaves placement to the compiler.
    teacher: the model that reads the teacher's prompts; None: the student model itself. Its `base` is ignored: a base
      of its own is an argument of `UpdateFunctions.accumulate`.

  Raises:
    ValueError: the teacher's vocabulary is smaller than the student's. If it is larger, as in families whose models pad
      vocabularies differently, its additional tokens are left out of its distribution.
  """
  teacher = Teacher(policy) if teacher is None else dataclasses.replace(teacher, base=None)
  if teacher.policy.vocab_size < policy.vocab_size:
    raise ValueError(
      f'A teacher with {teacher.policy.vocab_size} tokens cannot teach a student with {policy.vocab_size}: it must '
      'have a probability for each of them.'
    )
  leaves, structure = jax.tree.flatten(shardings)
  return _make_update(policy, teacher, spec, tuple(leaves), structure)


@functools.lru_cache(maxsize=16)
def _make_update(
  policy: Policy, teacher: Teacher, spec: UpdateSpec, leaves: tuple[Any, ...], structure: Any
) -> UpdateFunctions:
  shardings = jax.tree.unflatten(structure, leaves)
  trees = None if shardings is None else shardings.trainable
  whole = None if shardings is None else jax.tree.leaves(shardings.step)[0]
  mesh = None if shardings is None else whole.mesh
  options = compiler_options(mesh)
  return UpdateFunctions(
    log_probs=jax.jit(
      functools.partial(completion_log_probs, policy, spec, mesh), out_shardings=whole, compiler_options=options
    ),
    zero=jax.jit(zero_gradients, out_shardings=trees),
    accumulate=jax.jit(
      functools.partial(accumulate, policy, spec, mesh, teacher=teacher),
      donate_argnums=2,
      out_shardings=(trees, whole),
      compiler_options=options,
    ),
    apply=jax.jit(
      functools.partial(apply_gradients, spec, table=parameter_tables.trainable(policy.parameter_table())),
      donate_argnums=0,
      out_shardings=(shardings, whole),
    ),
    advance_teacher=jax.jit(functools.partial(advance_teacher, spec), donate_argnums=0, out_shardings=shardings),
  )


def place_state(spec: UpdateSpec, trainable: Tree, mesh: jax.sharding.Mesh, table: Table = ()) -> TrainState:
  """Return `init_state` sharded over a mesh."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(spec, trainable, mesh, table))
  return jax.jit(functools.partial(init_state, spec, table=table), out_shardings=shardings)(trainable)


def abstract_state(spec: UpdateSpec, trainable: Tree, mesh: jax.sharding.Mesh, table: Table = ()) -> TrainState:
  """Return the shapes, dtypes and shardings of `place_state` as abstract arrays."""
  shapes = jax.eval_shape(functools.partial(init_state, spec, table=table), trainable)
  return abstract(shapes, state_shardings(shapes, trainable, mesh))
