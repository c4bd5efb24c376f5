"""The update as pure functions: gradients of a micro-batch, the optimizer step, the teacher's move.

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

from models import parameters as parameter_tables
from models.adapters.slot_names import is_slots
from models.forward import forward
from models.parameters import Table
from models.policy import Policy
from sdpo_jax.distributed.mesh import TENSOR, compiler_options, replicated
from sdpo_jax.objective import log_probs
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.objective.sharded import Layout
from sdpo_jax.objective.spec import ObjectiveSpec
from sdpo_jax.teacher import averaging
from sdpo_jax.teacher.averaging import TeacherSpec
from sdpo_jax.teacher.signal import Teacher, teacher_signal
from sdpo_jax.training.optimizer import OptimizerSpec, clip_by_global_norm, learning_rate, make_optimizer
from sdpo_jax.types import Batch, TeacherSignal, TokenRows, TrainState, Tree


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
  """All that is fixed of an update when it is compiled; runs with equal ones share its programs."""

  terms: ObjectiveSpec
  objective: ObjectiveConfig
  optimizer: OptimizerSpec
  teacher: TeacherSpec
  teachers_support: bool = False  # Divergences are over the teacher's top K, not the student's.
  packs: bool = False  # A row holds several samples.
  seed: int = dataclasses.field(default=0, compare=False)  # Of a run's key; read by `init_state` alone.


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
  """Return the state before the first generation batch; see `make_optimizer` for who needs the parameter table."""
  trainable = jax.tree.map(jnp.asarray, trainable)
  return TrainState(
    step=jnp.zeros([], jnp.int32),
    optimizer_step=jnp.zeros([], jnp.int32),
    trainable=trainable,
    opt_state=make_optimizer(spec.optimizer, table).init(trainable),
    teacher=averaging.make(spec.teacher).init(trainable) if spec.terms.needs_teacher else {},
    rng=jax.random.key(spec.seed),
  )


# The per-token quantities of the objective that leave the devices, where there are such: metrics and files read them.
PER_TOKEN = (
  'log_prob',
  'entropy',
  'divergence',
  'ratio',
  'ratio_clipped',
  'student_tail',
  'teacher_entropy',
  'teacher_tail',
  'teacher_coverage',
  'teacher_top1_in_support',
  'ppo_ratio',
  'ppo_clipped',
  'ppo_clipped_lower',
  'ppo_kl',
  'initial_kl',
)


@dataclasses.dataclass
class MicroResult:
  """What one micro-batch leaves behind."""

  loss: jax.Array  # [] its share of the loss of the optimizer step.
  aux: dict[str, jax.Array]  # [B, T] each, those of `PER_TOKEN` that the objective has.


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
    spec: terms of the loss, and what is fixed of them.
    mesh: devices that share the rows of the batch; None or one device: nothing is shared.
    base: frozen parameters.
    state: current state; only read.
    grads: float32 accumulator in the layout of `state.trainable`; donated by the jitted program.
    batch: rows whose coefficients already hold masks, weights and denominators, with what the teacher reads or with the
      signal of an external teacher.
    teacher_base: frozen parameters of the teacher, `Teacher.base`; None: `base`.
    teacher: who reads the teacher's prompts, whose base is not looked at; None: the model itself.

  Returns:
    The accumulator, and the micro-batch's loss and per-token quantities.
  """
  signal = batch.signal
  if batch.teacher is not None:
    asked = dataclasses.replace(teacher or Teacher(policy), base=teacher_base)
    signal = teacher_signal(asked, policy, base, state, batch.teacher, spec.teacher)
    if spec.teachers_support:
      signal = _named(signal, policy, spec.objective, mesh, batch)

  def loss_fn(trainable: Tree) -> tuple[jax.Array, dict[str, jax.Array]]:
    hidden, unembedding = forward(policy, base, trainable, batch.student)
    return objective(
      hidden,
      unembedding,
      signal,
      targets=batch.targets,
      mask=batch.mask,
      distill_coef=batch.distill_coef,
      policy_coef=batch.policy_coef,
      entropy_coef=batch.entropy_coef,
      kl_coef=batch.kl_coef,
      old_log_probs=batch.old_log_probs,
      advantages=batch.advantages,
      sampling_log_probs=batch.sampling_log_probs,
      initial_log_probs=batch.initial_log_probs,
      config=spec.objective,
      vocab_size=policy.vocab_size,
      layout=layout(mesh),
      numbers=batch.numbers,
    )

  (loss, aux), micro = jax.value_and_grad(loss_fn, has_aux=True)(state.trainable)
  per_token = {name: aux[name] for name in PER_TOKEN if name in aux}
  return jax.tree.map(jnp.add, grads, micro), MicroResult(loss=loss, aux=per_token)


def _named(
  signal: TeacherSignal, policy: Policy, config: ObjectiveConfig, mesh: jax.sharding.Mesh | None, batch: Batch
) -> TeacherSignal:
  """Return a teacher's signal on its own top K [B, T, K], as one elsewhere would give it."""
  said = log_probs.scores(
    signal.hidden,
    signal.unembedding,
    batch.targets,
    config.distillation_topk,
    temperature=config.temperature,
    chunk_size=min(config.chunk_size, log_probs.CHUNK),
    mask=batch.mask,
    topk_method=config.topk_method,
    vocab_size=policy.vocab_size,
    layout=layout(mesh),
  )
  return TeacherSignal(token_ids=said.top_ids, log_probs=said.top_log_probs)


def zero_gradients(trainable: Tree) -> Tree:
  """Return an empty accumulator."""
  return jax.tree.map(jnp.zeros_like, trainable)


def apply_gradients(
  spec: UpdateSpec, state: TrainState, grads: Tree, *, table: Table = ()
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Take one optimizer step; a gradient that is not finite leaves the state as it is (reference dp_actor.py:577-580).

  Args:
    spec: with the optimizer.
    state: before the step.
    grads: summed over the micro-batches of the step.
    table: of the policy; see `make_optimizer` for who needs it.

  Returns:
    The state, and grad_norm (before clipping), learning_rate, finite (0 or 1).
  """
  optimizer = make_optimizer(spec.optimizer, table)
  clipped, norm = clip_by_global_norm(grads, spec.optimizer.grad_clip)
  finite = jnp.isfinite(norm)
  rate = learning_rate(spec.optimizer, state.step)
  updates, opt_state = optimizer.update(clipped, state.opt_state, state.trainable)
  trainable = jax.tree.map(lambda p, u: p - (rate * u).astype(p.dtype), state.trainable, updates)

  def keep(new: Tree, old: Tree) -> Tree:
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

  state = state.replace(
    trainable=keep(trainable, state.trainable),
    opt_state=keep(opt_state, state.opt_state),
    optimizer_step=state.optimizer_step + finite.astype(jnp.int32),
  )
  return state, {'grad_norm': norm, 'learning_rate': rate, 'finite': finite.astype(jnp.int32)}


def advance_teacher(spec: UpdateSpec, state: TrainState, applied: jax.Array) -> TrainState:
  """End a generation batch: the teacher moves once if at least one of its optimizer steps was applied.

  Args:
    spec: whether there is a teacher, and how it moves.
    state: after the optimizer steps.
    applied: [] int32, how many of them were finite.
  """
  teacher = state.teacher
  if spec.terms.needs_teacher:
    moved = averaging.make(spec.teacher).update(teacher, state.trainable, state.step)
    teacher = jax.tree.map(lambda new, old: jnp.where(applied > 0, new, old), moved, teacher)
  return state.replace(teacher=teacher, step=state.step + 1)


@dataclasses.dataclass(frozen=True)
class Update:
  """The jitted functions of the update."""

  log_probs: Callable[..., Any]  # `completion_log_probs` from `base` on.
  zero: Callable[..., Any]  # `zero_gradients`.
  accumulate: Callable[..., Any]  # `accumulate` from `base` on.
  apply: Callable[..., Any]  # `apply_gradients` from `state` on.
  advance_teacher: Callable[..., Any]  # `advance_teacher` from `state` on.


def state_shardings(state: TrainState, trainable: Tree, mesh: jax.sharding.Mesh) -> TrainState:
  """Return where the leaves of a state live.

  A tree in it that has the structure of the trainable tree lies as that tree does, leaf by leaf where the shapes agree
  (moments, the teacher); whatever has another shape, such as the factors of a factored second moment, and everything
  else has a copy on every device.

  Args:
    state: arrays or abstract arrays.
    trainable: parameters with shardings.
    mesh: of the run.
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

  optax leaves a node without arrays in the place of a parameter, or of several, that it masks.
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
) -> Update:
  """Make the functions of the update; accumulators and states are donated where they are replaced.

  Calls with the same model, teacher, spec and placement share their functions, and so what is compiled.

  Args:
    policy: the model.
    spec: what is fixed of the update.
    shardings: of the state (`state_shardings`), so that what a function returns lies as what it takes and nothing
      compiles twice; None leaves placement to the compiler.
    teacher: who reads the teacher's prompts; None: the model itself. Its base is not looked at: if it has one of its
      own, that is an argument of `Update.accumulate`.

  Raises:
    ValueError: the teacher knows fewer tokens than the student, or rows are to be packed and stand behind trained
      slots. Where the teacher knows more tokens, as models of a family whose vocabularies are padded differently do,
      the others are left out of its distribution.
  """
  teacher = Teacher(policy) if teacher is None else dataclasses.replace(teacher, base=None)
  if teacher.policy.vocab_size < policy.vocab_size:
    raise ValueError(
      f'A teacher with {teacher.policy.vocab_size} tokens cannot teach a student with {policy.vocab_size}: it must '
      'have a probability for each of them.'
    )
  if spec.packs and any(map(is_slots, parameter_tables.trainable(policy.parameter_table()))):
    # Its kernels show the slots to the first segment of a row only.
    raise ValueError('Packed rows have several segments, and trained slots stand before rows of one.')
  leaves, structure = jax.tree.flatten(shardings)
  return _make_update(policy, teacher, spec, tuple(leaves), structure)


@functools.lru_cache(maxsize=16)
def _make_update(policy: Policy, teacher: Teacher, spec: UpdateSpec, leaves: tuple[Any, ...], structure: Any) -> Update:
  shardings = jax.tree.unflatten(structure, leaves)
  trees = None if shardings is None else shardings.trainable
  whole = None if shardings is None else jax.tree.leaves(shardings.step)[0]
  mesh = None if shardings is None else whole.mesh
  options = compiler_options(mesh)
  return Update(
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
  """Return `init_state` on a mesh."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(spec, trainable, mesh, table))
  return jax.jit(functools.partial(init_state, spec, table=table), out_shardings=shardings)(trainable)


def abstract_state(spec: UpdateSpec, trainable: Tree, mesh: jax.sharding.Mesh, table: Table = ()) -> TrainState:
  """Return shapes, dtypes and shardings of `place_state`, without its arrays."""
  shapes = jax.eval_shape(functools.partial(init_state, spec, table=table), trainable)
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    shapes,
    state_shardings(shapes, trainable, mesh),
  )
