"""The programs of an engine with abstract arguments, from which their cost is estimated without running them.

For the buckets P, Q and T of prompts, teachers' prompts and completions: the resident sampler's programs
(`rollout.sampler_programs`); `student/P×T` and `teacher/Q×T` (states that predict the completion), `first/T` and
`support/T` (inputs of the losses from these states), `accumulate/P×T` (gradients of a micro-batch), `report/T` (sums to
report), `log probs/T` (after the last step), `scores/T` and `ids/T` (for requests for scores). For the score buckets S:
`text/1×S`, `text scores/S` and `text ids/S` (the same for whole texts). If another model can teach, `model/Q×T` and
`model scores/T`. And `zero`, `step`, `put slot`, `get slot`, `put snapshot`, `put teacher`, and with a bank of
cartridges `put cartridge`.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sdpo_jax.config import Config
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed.programs import Program
from sdpo_jax.learning.learner import as_train_state, learning_functions
from sdpo_jax.learning.losses import Sdpo, of_rows
from sdpo_jax.learning.scoring import scoring_functions
from sdpo_jax.learning.signals import TeacherInputs
from sdpo_jax.learning.training_pool import SlotState, StepSettings
from sdpo_jax.models import parameters
from sdpo_jax.models.adapters import lora_pool
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.objective import reported
from sdpo_jax.rollout.sampler_programs import SamplerSpec, sampler_programs
from sdpo_jax.serving.engine import EngineSettings, pool_functions, pooled_policies
from sdpo_jax.serving.engine_settings import engine_settings
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training.run_programs import abstract_parameters
from sdpo_jax.types import Batch, TokenRows, Tree


def engine_programs(
  config: Config, policy: DecoderPolicy, mesh: jax.sharding.Mesh, model: Teacher | None = None
) -> dict[str, Program]:
  """Return every program of an engine by name, for all its declared buckets.

  Args:
    config: settings; `serve` has the sizes.
    policy: the model with a LoRA adapter, on the mesh.
    mesh: the mesh to run on.
    model: another model that can teach, with abstract parameters; None: there is none.
  """
  settings = engine_settings(config)
  base, _ = abstract_parameters(policy, mesh)
  sampled, taught, trained = pooled_policies(policy, settings)
  snapshots, teachers, slots = (
    _abstract_pool(pooled, dtype)
    for pooled, dtype in ((sampled, policy.dtype), (taught, 'float32'), (trained, 'float32'))
  )
  sizes = SamplerSpec(
    prompts=settings.prompt_buckets,
    response=settings.response_buckets[-1],
    max_rows=settings.rows,
    least=settings.rows,
    chunk=settings.decode_chunk,
    stop_ids=settings.stop_ids,
  )
  found = sampler_programs(
    sampled,
    mesh,
    base,
    snapshots,
    sizes,
    [(settings.rows, False)],
    resized=False,
    kept_prefixes=settings.kept_prefixes,
  )
  return (
    found
    | _of_learning(settings, (taught, teachers), (trained, slots), base, mesh, model)
    | _of_pools(policy, (sampled, trained), snapshots, teachers, slots, mesh)
  )


def _abstract_pool(policy: DecoderPolicy, dtype: str) -> Tree:
  table = policy.parameter_table()
  return jax.tree.map(
    lambda place, row: jax.ShapeDtypeStruct(row.shape, jnp.dtype(dtype if row.compute else row.dtype), sharding=place),
    lora_pool.shardings(table, policy.backend.mesh),
    parameters.map_table(lambda row: row, parameters.trainable(table)),
  )


def _of_learning(
  settings: EngineSettings,
  teacher: tuple[DecoderPolicy, Tree],
  student: tuple[DecoderPolicy, Tree],
  base: Tree,
  mesh: jax.sharding.Mesh,
  model: Teacher | None,
) -> dict[str, Program]:
  """Return the programs of scoring and learning.

  Args:
    settings: the sizes of the engine.
    teacher: the policy and the pool of the teachers.
    student: the policy and the pool of the training slots.
    base: the frozen parameters.
    mesh: the mesh to run on.
    model: another model that can teach; None: there is none.
  """
  policy, slots = student
  learning = learning_functions(policy, settings.topk, settings.logits_chunk_size)
  scoring = scoring_functions(teacher[0], settings.topk, settings.logits_chunk_size, policy.vocab_size)
  rows, options = settings.training_rows, meshes.compiler_options(mesh)
  found: dict[str, Program] = {}
  array = functools.partial(_of_rows, mesh)
  state = _abstract_slots(slots, mesh)

  def add(kind: str, function: Callable[..., Any], arguments: Any, holds: Any, buckets: Any = (), **more: Any) -> None:
    name = f'{kind}/{"×".join(map(str, buckets))}' if buckets else kind
    found[name] = Program(
      kind, function, tuple(arguments), holds=tuple(holds), buckets=tuple(buckets), rows=rows, **more
    )

  def token_rows(prompt: int, response: int) -> TokenRows:
    tokens = array((rows, prompt + response), jnp.int32)
    return TokenRows(tokens, tokens, tokens, array((rows, response), jnp.int32), members=array((rows,), jnp.int32))

  def of_states(kind: str, function: Callable[..., Any], tree: Tree, held: str, prompt: int, response: int) -> None:
    arguments = base, tree, token_rows(prompt, response)
    add(kind, function, arguments, ('base', held, 'batch'), (prompt, response), options=options)

  def of_tokens(
    kind: str, function: Callable[..., Any], reads: str, length: int, *each: int, base: str = 'base'
  ) -> None:
    """Add a program that scores the last `length` tokens, or ids for each, from what the program `reads` returns."""
    hidden, unembedding = jax.eval_shape(found[reads].function, *found[reads].arguments)
    asked, shown = array((rows, length, *each), jnp.int32), array((rows, length), bool)
    holds, inherits = ('states', base, 'batch', 'batch'), {0: (reads, 0), 1: (reads, 1)}
    add(kind, function, (hidden, unembedding, asked, shown), holds, (length,), inherits=inherits)

  for response in settings.response_buckets:
    for prompt in settings.prompt_buckets:
      of_states('student', learning.states, slots, 'slots', prompt, response)
    for prompt in settings.teacher_buckets:
      of_states('teacher', scoring.states, teacher[1], 'teachers', prompt, response)
    reads = f'student/{settings.prompt_buckets[-1]}×{response}'
    heard = f'teacher/{settings.teacher_buckets[-1]}×{response}'
    hidden, unembedding = jax.eval_shape(found[reads].function, *found[reads].arguments)
    per_token = array((rows, response), jnp.float32)
    targets, shown = array((rows, response), jnp.int32), array((rows, response), bool)
    many = (rows, response, settings.topk)
    asked = TeacherInputs(
      **{name: array((rows,), bool) for name in ('mixes', 'named', 'design', 'same', 'has_old', 'given')},
      both=array((rows,), bool) if settings.union_support else None,
      **{name: array((rows,), jnp.float32) for name in ('mixture', 'advantage')},
      given_ids=array(many, jnp.int32),
      given_log_probs=array(many, jnp.float32),
      given_own=per_token,
    )
    first = hidden, hidden, unembedding, targets, shown, per_token, asked
    states = {0: (reads, 0), 1: (heard, 0), 2: (reads, 1)}
    add('first', learning.first, first, ('states', 'states', 'base', *['batch'] * 4), (response,), inherits=states)
    _, theirs, _, signal, advantages, old = jax.tree.map(
      lambda leaf: array(leaf.shape, leaf.dtype), jax.eval_shape(learning.first, *first)
    )
    add(
      'support',
      learning.support,
      (hidden, hidden, unembedding, targets, shown, theirs, asked),
      ('states', 'states', 'base', *['batch'] * 4),
      (response,),
      inherits=states | {1: (f'first/{response}', 2)},
    )
    of_tokens('log probs', learning.log_probs, reads, response)
    of_tokens('scores', scoring.scores, heard, response)
    of_tokens('ids', scoring.of_ids, heard, response, settings.topk)
    numbers = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), of_rows([Sdpo(topk=settings.topk)] * rows))
    batch = Batch(
      student=None,
      teacher=None,
      targets=targets,
      mask=per_token,
      distill_coef=per_token,
      policy_coef=per_token,
      entropy_coef=None,
      old_log_probs=old,
      advantages=advantages,
      numbers=numbers,
    )
    read = dict.fromkeys(reported.READ, per_token)
    add('report', learning.report, (batch, read, shown), ['batch'] * 3, (response,))
    for prompt in settings.prompt_buckets:
      batch = batch.replace(student=token_rows(prompt, response), signal=signal)
      arguments = base, jax.eval_shape(as_train_state, slots).replace(trainable=slots), slots, batch
      add(
        'accumulate',
        learning.accumulate,
        arguments,
        ('base', 'slots', 'gradients', 'batch'),
        (prompt, response),
        options=options,
      )
  if model is not None:
    other = scoring_functions(model.policy, settings.topk, settings.logits_chunk_size, policy.vocab_size)
    for response in settings.response_buckets:
      for prompt in settings.teacher_buckets:
        arguments = model.base, {}, token_rows(prompt, response).replace(members=None)
        holds, buckets = ('teacher base', 'batch', 'batch'), (prompt, response)
        add('model', other.states, arguments, holds, buckets, options=options)
      reads = f'model/{settings.teacher_buckets[-1]}×{response}'
      of_tokens('model scores', other.scores, reads, response, base='teacher base')
  for length in settings.score_buckets:
    of_states('text', scoring.states, teacher[1], 'teachers', 1, length)
    of_tokens('text scores', scoring.scores, f'text/1×{length}', length)
    of_tokens('text ids', scoring.of_ids, f'text/1×{length}', length, settings.topk)
  add('zero', learning.zero, (slots,), ('slots',))
  step_settings = StepSettings(*[np.zeros(settings.slots, np.float32)] * 6)
  stepped = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), step_settings)
  active = jax.ShapeDtypeStruct((settings.slots,), bool)
  add('step', learning.step, (state, slots, stepped, active), (_slot_parts(state), 'gradients', 'batch', 'batch'))
  return found


def _of_pools(
  policy: DecoderPolicy,
  pooled: tuple[DecoderPolicy, DecoderPolicy],
  snapshots: Tree,
  teachers: Tree,
  slots: Tree,
  mesh: jax.sharding.Mesh,
) -> dict[str, Program]:
  """Return the programs that copy versions from the host into pools, and from slots back."""
  own = parameters.map_table(
    lambda row: jax.ShapeDtypeStruct(row.shape, jnp.float32), parameters.trainable(policy.parameter_table())
  )
  count, index = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
  version, state = SlotState(own, optax.ScaleByAdamState(count, own, own)), _abstract_slots(slots, mesh)
  functions, parts = pool_functions(*pooled), _slot_parts(state)
  put, put_teacher, put_slot, get_slot = functions.values()
  found = {
    'put snapshot': Program('put snapshot', put, (snapshots, index, own), holds=('snapshots', 'batch', 'batch')),
    'put teacher': Program('put teacher', put_teacher, (teachers, index, own), holds=('teachers', 'batch', 'batch')),
    'put slot': Program('put slot', put_slot, (state, index, version), holds=(parts, 'batch', 'batch')),
    'get slot': Program('get slot', get_slot, (state, index), holds=(parts, 'batch')),
  }
  bank = pooled[0].adapter.cartridges
  if bank is not None:
    rows = bank.rows(policy.base_policy().parameter_table(), policy.dtype)
    slots = parameters.map_table(lambda row: jax.ShapeDtypeStruct((row.layers, *row.shape[2:]), jnp.float32), rows)
    found['put cartridge'] = Program(
      'put cartridge', put, (snapshots, index, slots), holds=('snapshots', 'batch', 'batch')
    )
  return found


def _abstract_slots(slots: Tree, mesh: jax.sharding.Mesh) -> SlotState:
  members = jax.tree.leaves(slots)[0].shape[lora_pool.AXIS]
  count = jax.ShapeDtypeStruct((members,), jnp.int32, sharding=meshes.replicated(mesh))
  return SlotState(slots, optax.ScaleByAdamState(count, slots, slots))


def _slot_parts(state: SlotState) -> tuple[str, ...]:
  """Return the kind of each leaf of the slots: 'slots' or 'moments'."""
  marked = SlotState(jax.tree.map(lambda _: 'slots', state.trainable), jax.tree.map(lambda _: 'moments', state.moments))
  return tuple(jax.tree.leaves(marked))


def _of_rows(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  if mesh.size == 1:  # Arguments come from the host without a sharding.
    return jax.ShapeDtypeStruct(shape, dtype)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=meshes.batch_sharding(mesh))
