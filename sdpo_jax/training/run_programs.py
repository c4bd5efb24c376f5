"""The programs of a training run, registered: those of the update, and those of the sampler in training and evaluation.

Names of the update's: `score/P×T` (log-probs before the update, of all completions or of those that it leaves out),
`update/P×R×T` (prompt, teacher prompt and completion buckets), `zero`, `apply`, `finish`. Names of the sampler's: `prepare` (its copy of the parameters), `prefill/P×T`,
`admit/P×T` (a prompt's cache into the rows of its samples), `decode/P×T` and, for a cache with fewer slots C than
prompt and completion may need, `decode/P×T@C`; `resize/P×T` from the largest of these to the one before. Where the
cache keeps its size instead, `decode/P×T#R` with fewer rows R of it; `compact/P×T` from all rows to half of them.
Evaluation has its own number of rows: `evaluation/…`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from models import parameters as parameter_tables
from models.policy import Policy
from sdpo_jax import programs
from sdpo_jax.config import Config
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.objective.spec import COEFFICIENTS, ObjectiveSpec
from sdpo_jax.programs import EVALUATION, Program, Run
from sdpo_jax.rollout import decode, functions, slots
from sdpo_jax.rollout.buckets import Buckets
from sdpo_jax.rollout.sampling import SamplingParams
from sdpo_jax.teacher.signal import Teacher, check_base
from sdpo_jax.training import batching
from sdpo_jax.training.checkpoints import abstract
from sdpo_jax.training.update import abstract_state, make_update
from sdpo_jax.types import Batch, TokenRows, Tree


def run_programs(
  config: Config,
  policy: Policy,
  base: Tree,
  trainable: Tree,
  mesh: jax.sharding.Mesh,
  stop_ids: int = 1,
  teacher: Teacher | None = None,
) -> dict[str, Program]:
  """Return every registered program of a run by name, for all its declared buckets.

  Args:
    config: settings.
    policy: the model.
    base: frozen parameters; abstract arrays will do.
    trainable: trainable parameters; abstract arrays will do.
    mesh: where it runs.
    stop_ids: how many token ids end a completion.
    teacher: who reads the teacher's prompts; None: the policy itself.

  Raises:
    UserError: the settings ask the base to teach, and there is none.
  """
  if teacher is None and ObjectiveSpec.from_config(config).needs_teacher:
    check_base(config.actor.self_distillation, base)
  teacher = teacher or Teacher(policy)
  teacher = dataclasses.replace(teacher, base=abstract(teacher.base))
  run = Run(config, policy, abstract(base), abstract(trainable), mesh, stop_ids, teacher)
  return programs.registered_programs(run)


def abstract_parameters(policy: Policy, mesh: jax.sharding.Mesh) -> tuple[Tree, Tree]:
  """Return shapes, dtypes and shardings of a model's base and trainable parameters, from its table."""

  def describe(parameter: parameter_tables.Parameter) -> jax.ShapeDtypeStruct:
    sharding = meshes.parameter_sharding(mesh, parameter.axes, parameter.shape)
    return jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(parameter.dtype), sharding=sharding)

  table = policy.parameter_table()
  return parameter_tables.split(table, parameter_tables.map_table(describe, table))


@programs.register
def update_programs(run: Run) -> dict[str, Program]:
  """Return the programs of the update, for every bucket of its micro-batches."""
  config, base, trainable, mesh = run.config, run.base, run.trainable, run.mesh
  spec = ObjectiveSpec.from_config(config)
  state = abstract_state(config, trainable, mesh)
  update = make_update(run.policy, config, jax.tree.map(lambda leaf: leaf.sharding, state), run.teacher.policy)
  rows = -(-config.actor.ppo_micro_batch_size // mesh.size) * mesh.size
  found = {
    'zero': Program('zero', update.zero, (trainable,), holds=('parameters',)),
    'apply': Program('apply', update.apply, (state, trainable), holds=('state', 'gradients')),
    'finish': Program(
      'finish', update.advance_teacher, (state, jax.ShapeDtypeStruct((), jnp.int32)), holds=('state', 'batch')
    ),
  }
  batch_of = functools.partial(abstract_batch, rows, spec=spec, mesh=mesh)
  trained = Buckets.of_update(config)
  share = batching.shares_prompts(config, *run.teacher.readers(run.policy, config.actor.self_distillation))
  for response in trained.response:
    for prompt in trained.prompt:
      if spec.computes_log_probs or spec.weighs_in_update:
        batch = batch_of(prompt, None, response)
        found[f'score/{prompt}×{response}'] = Program(
          'score',
          update.log_probs,
          (base, trainable, batch.student, batch.targets),
          holds=('base', 'parameters', 'batch', 'batch'),
          buckets=(prompt, response),
          rows=rows,
        )
      for reprompt in trained.reprompt if spec.needs_teacher else (None,):
        lengths = (prompt, response) if reprompt is None else (prompt, reprompt, response)
        found[_named('update', lengths)] = Program(
          'update',
          update.accumulate,
          (base, state, trainable, batch_of(prompt, reprompt, response, share=share), run.teacher.base),
          holds=('base', 'state', 'gradients', 'batch', 'teacher base'),
          buckets=lengths,
          rows=rows,
        )
  return found


def abstract_batch(
  rows: int,
  prompt: int,
  reprompt: int | None,
  response: int,
  *,
  spec: ObjectiveSpec,
  mesh: jax.sharding.Mesh,
  share: bool = False,
) -> Batch:
  """Return shapes and shardings of a micro-batch.

  Args:
    rows: B.
    prompt: bucket of prompts.
    reprompt: bucket of teacher prompts; None: no teacher reads the batch.
    response: bucket of completions, T.
    spec: terms of the loss, and whether they read old log-probs or those of the sampler.
    mesh: where it lies.
    share: from `batching.shares_prompts`.
  """
  sharding = meshes.batch_sharding(mesh)

  def array(width: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, width), dtype, sharding=sharding)

  def side(room: int, share: bool = False) -> TokenRows:
    tokens = array(room + response, jnp.int32)
    return TokenRows(tokens, tokens, tokens, array(response, jnp.int32), tokens if share else None)

  per_token = array(response, jnp.float32)
  return Batch(
    student=side(prompt),
    teacher=None if reprompt is None else side(reprompt, share),
    targets=array(response, jnp.int32),
    mask=per_token,
    **{name: per_token if name in spec.coefficients else None for name in COEFFICIENTS},
    old_log_probs=per_token if spec.needs_old_log_probs else None,
    advantages=per_token if spec.needs_advantages else None,
    sampling_log_probs=per_token if spec.weighs_in_update else None,
  )


@programs.register
def sampling_programs(run: Run) -> dict[str, Program]:
  """Return the sampler's programs in training, and in evaluation where it has another number of rows."""
  config, mesh = run.config, run.mesh
  engine = functions.sampler_functions(run.policy, mesh, config.rollout.cache_dtype == 'int8')
  limit = config.rollout.max_batch_rows

  def rows_of(prompts: int, n: int) -> tuple[int, int]:
    return slots.shard_rows(prompts * n, limit, engine.shards), n

  calls = {False: rows_of(config.data.train_batch_size, config.rollout.n)}
  if config.trainer.test_freq:
    # How many held-out questions there are is known from their files only: without a limit, enough to fill all slots.
    held_out = rows_of(config.data.val_max_samples or limit, config.val_kwargs.n)
    if held_out != calls[False]:
      calls[True] = held_out
  parameters = jax.eval_shape(engine.prepare, run.base, run.trainable)
  found = {'prepare': Program('prepare', engine.prepare, (run.base, run.trainable), holds=('base', 'parameters'))}
  declared = Buckets.of(config)
  for prompt in declared.prompt:
    for evaluation, (rows, n) in calls.items():
      found |= _sampling(run, engine, parameters, prompt, declared.response[-1], rows, n, evaluation)
  return found


def _sampling(
  run: Run,
  engine: functions.SamplerFunctions,
  parameters: tuple[Tree, Tree],
  prompt: int,
  response: int,
  rows: int,
  n: int,
  evaluation: bool,
) -> dict[str, Program]:
  """Return the sampler's programs for one bucket of prompts, `rows` slots on each shard and `n` samples per prompt."""
  config, mesh, shards = run.config, run.mesh, engine.shards
  total, lengths = rows * shards, (prompt, response)
  scalar = jax.ShapeDtypeStruct((), jnp.int32)
  prepared = {0: ('prepare', 0), 1: ('prepare', 1)}
  found: dict[str, Program] = {}

  def of_rows(rows: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return _of_rows(mesh, (rows,), dtype)

  def cache(rows: int, length: int) -> Any:
    shape = jax.eval_shape(functools.partial(engine.empty, rows=rows, slots=length))
    if shards == mesh.size == 1:
      return shape
    return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
      shape,
      functions.cache_shardings(mesh, shape),
    )

  def add(
    kind: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    holds: Sequence[str],
    *,
    capacity: int,
    rows: int = total,
    suffix: str = '',
    **more: Any,
  ) -> None:
    found[_named(kind, lengths, evaluation) + suffix] = Program(
      kind,
      function,
      tuple(arguments),
      holds=tuple(holds),
      buckets=lengths,
      capacity=capacity,
      rows=rows,
      evaluation=evaluation,
      **more,
    )

  # The most prompts of a shard that are prefilled together: those that fill its slots at first.
  prompts = shards * slots.pieces(-(-rows // n))[0]
  add(
    'prefill',
    engine.prefill,
    (*parameters, _of_rows(mesh, (prompts, prompt), jnp.int32), of_rows(prompts)),
    ('parameters', 'parameters', 'batch', 'batch'),
    capacity=prompt,
    rows=prompts,
    inherits=prepared,
  )
  capacities = slots.cache_capacities(prompt + response + config.rollout.decode_chunk, engine.keeps_size)
  index = of_rows(total)
  whole = cache(total, capacities[-1])
  add(
    'admit',
    engine.copy,
    (whole, cache(prompts, prompt), index, index, of_rows(shards)),
    ('cache', 'cache', 'batch', 'batch', 'batch'),
    capacity=capacities[-1],
  )

  def add_decode(held: Any, capacity: int, suffix: str) -> None:
    left = held.lengths.shape[0]
    newest = of_rows(left)
    state = decode.DecodeState(_sampling_params(mesh, left, run.stop_ids), newest, newest, of_rows(left, jnp.bool_))
    add(
      'decode',
      engine.advance,
      (*parameters, held, state, scalar),
      ('parameters', 'parameters', 'cache', 'batch', 'batch'),
      capacity=capacity,
      rows=left,
      suffix=suffix,
      static=dict(steps=config.rollout.decode_chunk),
      inherits=prepared,
    )

  for length in capacities[:-1]:
    add_decode(cache(total, length), length, f'@{length}')
  add_decode(whole, capacities[-1], '')
  fewer = [shards * size for size in slots.row_counts(rows, few=True)[:-1]] if engine.keeps_size else []
  for left in fewer:
    add_decode(whole.replace(lengths=of_rows(left)), capacities[-1], f'#{left}')
  if fewer:
    add(
      'compact',
      engine.compact,
      (whole.stores, whole.lengths, of_rows(fewer[-1])),
      ('cache', 'cache', 'batch'),
      capacity=capacities[-1],
    )
  if len(capacities) > 1:
    add(
      'resize',
      engine.resize,
      (cache(total, capacities[-2]), index),
      ('cache', 'batch'),
      capacity=capacities[-1],
      static=dict(slots=capacities[-1]),
    )
  return found


def _named(kind: str, lengths: Sequence[int], evaluation: bool = False) -> str:
  return f'{EVALUATION if evaluation else ""}{kind}/{"×".join(map(str, lengths))}'


def _of_rows(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(meshes.FSDP))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding if shape else meshes.replicated(mesh))


def _sampling_params(mesh: jax.sharding.Mesh, rows: int, stop_ids: int) -> SamplingParams:
  array = functools.partial(_of_rows, mesh)
  return SamplingParams(
    temperature=array((rows,), jnp.float32),
    top_p=array((rows,), jnp.float32),
    top_k=array((rows,), jnp.int32),
    min_p=array((rows,), jnp.float32),
    seed=array((rows,), jnp.uint32),
    sample_id=array((rows,), jnp.int32),
    step=array((), jnp.int32),
    max_tokens=array((rows,), jnp.int32),
    stop_ids=array((rows, stop_ids), jnp.int32),
  )
