"""The update as pure functions: gradients of a micro-batch, the optimizer step, the end of a generation batch.

One generation batch is: for every mini-batch, `accumulate` over its micro-batches and one `apply_gradients`; then one
`finish_batch`, which moves the teacher (reference dp_actor.py:913-920) and the step counter. Coefficients in the
`Batch` carry all masks and denominators, so the micro-batch size never changes a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from models.policy import Policy
from sdpo_jax.config import Config
from sdpo_jax.distributed.mesh import TENSOR, replicated
from sdpo_jax.objective import chunked
from sdpo_jax.objective.loss import ObjectiveConfig, objective
from sdpo_jax.objective.sharded import Layout
from sdpo_jax.teacher import averaging
from sdpo_jax.training.optimizer import clip_by_global_norm, learning_rate, make_optimizer
from sdpo_jax.types import Batch, TeacherSignal, TokenRows, TrainState, Tree


def target_states(hidden: jax.Array, rows: TokenRows) -> jax.Array:
  """[B, S, D] → [B, T, D]: the state that predicts each completion token."""
  return jnp.take_along_axis(hidden, rows.target_index[:, :, None], axis=1)


def forward(policy: Policy, base: Tree, trainable: Tree, rows: TokenRows) -> tuple[jax.Array, jax.Array]:
  """States [B, T, D] that predict the completion tokens, and the unembedding [R, D], with rows that are no tokens."""
  row = rows.tokens, rows.positions, rows.segment_ids
  # A policy that shares no prefixes need not know of parents.
  more = {} if rows.parents is None else {'parents': rows.parents}
  hidden, unembedding, _ = policy.apply(base, trainable, *row, **more)
  return target_states(hidden, rows), unembedding


def layout(mesh: jax.sharding.Mesh | None) -> Layout | None:
  """Rows over all axes, the vocabulary over the tensor axis; None without a mesh."""
  return None if mesh is None else Layout(mesh, mesh.axis_names, TENSOR)


def token_log_probs(
  policy: Policy,
  config: Config,
  mesh: jax.sharding.Mesh | None,
  base: Tree,
  trainable: Tree,
  rows: TokenRows,
  targets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Log-probs and entropies [B, T] (nats) of the completion tokens at the rollout temperature; no gradient."""
  hidden, unembedding = forward(policy, base, trainable, rows)
  return chunked.token_log_probs(
    hidden,
    unembedding,
    targets,
    temperature=config.rollout.temperature,
    chunk_size=config.actor.logits_chunk_size,
    vocab_size=policy.vocab_size,
    layout=layout(mesh),
  )


def teacher_signal(
  policy: Policy, config: Config, base: Tree, trainable: Tree, teacher: Tree, rows: TokenRows
) -> TeacherSignal:
  """The teacher's view of the same completion tokens, from its own context; carries no gradient."""
  sd = config.actor.self_distillation
  own, mixed = averaging.signal_parameters(teacher, trainable, sd)
  hidden, unembedding = forward(policy, base, own, rows)
  signal = TeacherSignal(hidden=hidden, unembedding=unembedding)
  if mixed is not None:
    mix_hidden, mix_unembedding = forward(policy, base, mixed, rows)
    signal = signal.replace(mix_hidden=mix_hidden, mix_unembedding=mix_unembedding, mix_rate=sd.teacher_update_rate)
  return jax.lax.stop_gradient(signal)


def init_state(config: Config, trainable: Tree) -> TrainState:
  """The state before the first generation batch."""
  trainable = jax.tree.map(jnp.asarray, trainable)
  return TrainState(
    step=jnp.zeros([], jnp.int32),
    optimizer_step=jnp.zeros([], jnp.int32),
    trainable=trainable,
    opt_state=make_optimizer(config.optimizer).init(trainable),
    teacher=averaging.make(config.actor.self_distillation).init(trainable)
    if config.actor.policy_loss.loss_mode == 'sdpo'
    else {},
    rng=jax.random.key(config.seed),
  )


@dataclasses.dataclass
class MicroResult:
  """What one micro-batch leaves behind."""

  loss: jax.Array  # [] its share of the loss of the optimizer step.
  aux: dict[str, jax.Array]  # per-token [B, T] quantities of the objective.


jax.tree_util.register_dataclass(MicroResult, ['loss', 'aux'], [])


def accumulate(
  policy: Policy,
  config: Config,
  mesh: jax.sharding.Mesh | None,
  base: Tree,
  state: TrainState,
  grads: Tree,
  batch: Batch,
) -> tuple[Tree, MicroResult]:
  """Adds the gradients of one micro-batch to `grads`.

  Args:
    policy: the model.
    config: settings.
    mesh: devices that share the rows of the batch; None or one device: nothing is shared.
    base: frozen parameters.
    state: current state; only read.
    grads: float32 accumulator in the layout of `state.trainable`; donated by the jitted program.
    batch: rows whose coefficients already hold masks, weights and denominators.

  Returns:
    the accumulator and the micro-batch's loss and per-token quantities.
  """
  signal = None
  if batch.teacher is not None:
    signal = teacher_signal(policy, config, base, state.trainable, state.teacher, batch.teacher)

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
      old_log_probs=batch.old_log_probs,
      advantages=batch.advantages,
      config=ObjectiveConfig.from_config(config),
      vocab_size=policy.vocab_size,
      layout=layout(mesh),
    )

  (loss, aux), micro = jax.value_and_grad(loss_fn, has_aux=True)(state.trainable)
  return jax.tree.map(jnp.add, grads, micro), MicroResult(loss=loss, aux=aux)


def zero_gradients(trainable: Tree) -> Tree:
  """An empty accumulator."""
  return jax.tree.map(jnp.zeros_like, trainable)


def apply_gradients(config: Config, state: TrainState, grads: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimizer step; a gradient that is not finite leaves the state untouched (reference dp_actor.py:577-580).

  Returns:
    the state, and grad_norm (before clipping), learning_rate, finite (0 or 1).
  """
  optimizer = make_optimizer(config.optimizer)
  clipped, norm = clip_by_global_norm(grads, config.optimizer.grad_clip)
  finite = jnp.isfinite(norm)
  rate = learning_rate(config.optimizer, state.step)
  updates, opt_state = optimizer.update(clipped, state.opt_state, state.trainable)
  trainable = jax.tree.map(lambda p, u: p - (rate * u).astype(p.dtype), state.trainable, updates)
  keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
  state = state.replace(
    trainable=keep(trainable, state.trainable),
    opt_state=keep(opt_state, state.opt_state),
    optimizer_step=state.optimizer_step + finite.astype(jnp.int32),
  )
  return state, {'grad_norm': norm, 'learning_rate': rate, 'finite': finite.astype(jnp.int32)}


def finish_batch(config: Config, state: TrainState, applied: jax.Array) -> TrainState:
  """The end of a generation batch: the teacher moves once if at least one of its optimizer steps was applied.

  Args:
    config: settings.
    state: after the optimizer steps.
    applied: [] int32, how many of them were finite.
  """
  teacher = state.teacher
  if config.actor.policy_loss.loss_mode == 'sdpo':
    moved = averaging.make(config.actor.self_distillation).update(teacher, state.trainable, state.step)
    teacher = jax.tree.map(lambda new, old: jnp.where(applied > 0, new, old), moved, teacher)
  return state.replace(teacher=teacher, step=state.step + 1)


@dataclasses.dataclass(frozen=True)
class Update:
  """The jitted programs of the update for one policy and configuration."""

  policy: Policy
  config: Config
  score: Any
  zero: Any
  accumulate: Any
  apply: Any
  finish: Any


def state_shardings(state: TrainState, trainable: Tree, mesh: jax.sharding.Mesh) -> TrainState:
  """Where the leaves of a state live: copies of the trainable tree as that tree, everything else on every device.

  Args:
    state: arrays or abstract arrays.
    trainable: parameters with shardings.
    mesh: of the run.
  """
  shardings = {
    jax.tree_util.keystr(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(trainable)
  }

  def place(path: tuple[Any, ...], leaf: Any) -> jax.sharding.Sharding:
    name = jax.tree_util.keystr(path)
    matches = [sharding for key, sharding in shardings.items() if name.endswith(key)]
    return matches[0] if matches and leaf.ndim else replicated(mesh)

  return jax.tree_util.tree_map_with_path(place, state)


def make_update(policy: Policy, config: Config, shardings: TrainState | None = None) -> Update:
  """The update's programs; accumulators and states are donated where they are replaced.

  Args:
    policy: the model.
    config: settings.
    shardings: of the state (`state_shardings`), so that what a program returns lies as what it takes and nothing
      compiles twice; None leaves placement to the compiler.
  """
  trees = None if shardings is None else shardings.trainable
  whole = None if shardings is None else jax.tree.leaves(shardings.step)[0]
  mesh = None if shardings is None else whole.mesh
  return Update(
    policy=policy,
    config=config,
    score=jax.jit(
      functools.partial(token_log_probs, policy, config, mesh),
      out_shardings=whole,
    ),
    zero=jax.jit(zero_gradients, out_shardings=trees),
    accumulate=jax.jit(
      functools.partial(accumulate, policy, config, mesh),
      donate_argnums=2,
      out_shardings=(trees, whole),
    ),
    apply=jax.jit(functools.partial(apply_gradients, config), donate_argnums=0, out_shardings=(shardings, whole)),
    finish=jax.jit(functools.partial(finish_batch, config), donate_argnums=0, out_shardings=shardings),
  )


def place_state(config: Config, trainable: Tree, mesh: jax.sharding.Mesh) -> TrainState:
  """`init_state` on a mesh."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, trainable, mesh))
  return jax.jit(functools.partial(init_state, config), out_shardings=shardings)(trainable)


def abstract_state(config: Config, trainable: Tree, mesh: jax.sharding.Mesh) -> TrainState:
  """Shapes, dtypes and shardings of `place_state`, without its arrays."""
  shapes = jax.eval_shape(functools.partial(init_state, config), trainable)
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    shapes,
    state_shardings(shapes, trainable, mesh),
  )
