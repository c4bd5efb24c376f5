"""The programs of a training run: of the update, and of the samplers in training and evaluation.

Programs of the update, with buckets of prompts P, teacher prompts R and completions T: `score/P×T` (log-probs before
the update, of all completions or of those that the update leaves out), `initial/P×T` (those of all completions under
the initial policy), `top/P×R×T` (the most likely tokens, if `rollouts/` records them), `update/P×R×T`, `zero`, `apply`,
`finish` and `digest` (of the state, for metrics.jsonl and checkpoints). `rollout.sampler_programs` names those of the
samplers. Programs that only evaluations use are named `evaluation/…`; if these measure the divergence, they include
`divergence/P×T` and the teacher's sampler, `teacher/…`; if the perplexity of answers, `perplexity/P×T`. `feedback/…`
belong to the sampler with which the student writes feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from sdpo_jax.config import Config
from sdpo_jax.distributed import mesh as meshes
from sdpo_jax.distributed.programs import FEEDBACK, Program
from sdpo_jax.learning import batching
from sdpo_jax.learning.readings import divergence_program, top_tokens_program
from sdpo_jax.learning.update import abstract_state, make_update
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models.policy import Policy
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.rollout.sampler_programs import SamplerSpec, named, sampler_programs
from sdpo_jax.teacher.signal import Teacher, check_base, self_teacher
from sdpo_jax.training import feedback_writing, reference_policies, teacher_model
from sdpo_jax.training.carry_over import most_samples
from sdpo_jax.training.checkpoint import digests
from sdpo_jax.training.checkpoint.checkpoints import abstract
from sdpo_jax.training.perplexity import perplexity_program
from sdpo_jax.training.specs import batch_spec, declared_buckets, objective_spec, teacher_spec, update_spec
from sdpo_jax.types import COEFFICIENTS, NUMBERS, Batch, TeacherSignal, TokenRows, Tree


@dataclasses.dataclass(frozen=True)
class Run:
  """The models, mesh and settings of the run whose programs are described."""

  config: Config
  policy: Policy
  base: Tree  # Abstract arrays with shardings, as are those of `trainable`.
  trainable: Tree
  mesh: jax.sharding.Mesh
  stop_ids: int  # Number of token ids that end a completion.
  teacher: Teacher  # The model that reads the teacher's prompts, its base as abstract arrays.
  held_out: int | None = None  # Number of evaluation questions; None: not known.


def run_programs(
  config: Config,
  policy: Policy,
  base: Tree,
  trainable: Tree,
  mesh: jax.sharding.Mesh,
  stop_ids: int = 1,
  teacher: Teacher | None = None,
  held_out: int | None = None,
) -> dict[str, Program]:
  """Return every program of a run by name, for all its declared buckets.

  Args:
    config: settings.
    policy: the model.
    base: frozen parameters; may be abstract arrays.
    trainable: trainable parameters; may be abstract arrays.
    mesh: mesh of the run.
    stop_ids: number of token ids that end a completion.
    teacher: the model that reads the teacher's prompts; None: the student, or the model that the settings name.
    held_out: number of questions of an evaluation; None: unknown.

  Raises:
    UserError: the settings name a model that cannot teach, or the base as the teacher although nothing is frozen.
  """
  if teacher is None and teacher_model.is_used(config):
    teacher = abstract_teacher(config, mesh)
  if teacher is None and objective_spec(config).reads_teacher:
    check_base(teacher_spec(config), base)
  teacher = teacher or self_teacher(policy, teacher_spec(config))
  teacher = dataclasses.replace(teacher, base=abstract(teacher.base))
  run = Run(config, policy, abstract(base), abstract(trainable), mesh, stop_ids, teacher, held_out)
  return update_programs(run) | sampling_programs(run) | feedback_programs(run) | measuring_programs(run)


def abstract_parameters(policy: Policy, mesh: jax.sharding.Mesh) -> tuple[Tree, Tree]:
  """Return the base and trainable parameters of a model as abstract arrays, from its parameter table."""
  table = policy.parameter_table()
  return parameter_tables.split(table, abstract_table(table, mesh))


def abstract_teacher(config: Config, mesh: jax.sharding.Mesh) -> Teacher:
  """Return the separate teacher model that the settings name, with abstract arrays for its parameters.

  Args:
    config: settings with such a teacher.
    mesh: mesh of the run.

  Raises:
    UserError: the model cannot teach, or the mesh does not divide it.
  """
  policy = teacher_model.read_policy(config).on(mesh, config.model.attention)
  table = parameter_tables.frozen_in(policy.parameter_table(), policy.dtype)
  meshes.check_divides(mesh, [(each.name, each.axes, each.shape) for each in table])
  return Teacher(policy, abstract_table(table, mesh))


def abstract_table(table: parameter_tables.Table, mesh: jax.sharding.Mesh) -> Tree:
  """Return the parameters of a table as abstract arrays with shardings."""

  def describe(parameter: parameter_tables.Parameter) -> jax.ShapeDtypeStruct:
    sharding = meshes.parameter_sharding(mesh, parameter.axes, parameter.shape)
    return jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(parameter.dtype), sharding=sharding)

  return parameter_tables.map_table(describe, table)


def update_programs(run: Run) -> dict[str, Program]:
  """Return the programs of the update, for every bucket of its micro-batches."""
  config, base, trainable, mesh = run.config, run.base, run.trainable, run.mesh
  spec = objective_spec(config)
  state = abstract_state(update_spec(config), trainable, mesh, run.policy.parameter_table())
  update = make_update(run.policy, update_spec(config), jax.tree.map(lambda leaf: leaf.sharding, state), run.teacher)
  leaves = jax.tree.leaves(state)
  scored = {}  # Kind → parameters under which completions are scored, and what those are called in `holds`.
  if spec.computes_log_probs or spec.weighs_in_update:
    scored['score'] = trainable, 'parameters'
  references = reference_policies.abstract(spec, run.policy.parameter_table(), trainable, config.model.dtype)
  scored |= {name: (reference, f'{name} policy') for name, reference in references.items()}
  found = {
    'zero': Program('zero', update.zero, (trainable,), holds=('parameters',)),
    'apply': Program('apply', update.apply, (state, trainable), holds=('state', 'gradients')),
    'finish': Program(
      'finish', update.advance_teacher, (state, jax.ShapeDtypeStruct((), jnp.int32)), holds=('state', 'batch')
    ),
    'digest': Program('digest', digests.program(leaves), (leaves,), holds=('state',)),
  }
  batch_of = functools.partial(abstract_batch, _rows(run), spec=spec, mesh=mesh, members=_members(run))
  trained = declared_buckets(config)
  share = batching.shares_prompts(batch_spec(config), *run.teacher.readers(run.policy, teacher_spec(config)))
  for response in trained.response:
    for kind, (parameters, held) in scored.items():
      for prompt in trained.prompt:
        batch = batch_of(prompt, None, response)
        arguments, holds = (base, parameters, batch.student, batch.targets), ('base', held, 'batch', 'batch')
        found |= _of_micro_batch(run, kind, (prompt, response), update.log_probs, arguments, holds)
    prompts = trained.prompts if spec.reads_teacher else tuple((prompt, None) for prompt in trained.prompt)
    for prompt, reprompt in prompts:
      lengths = (prompt, response) if reprompt is None else (prompt, reprompt, response)
      batch = batch_of(prompt, reprompt, response, share=share)
      arguments = base, state, trainable, batch, run.teacher.base
      holds = 'base', 'state', 'gradients', 'batch', 'teacher base'
      found |= _of_micro_batch(run, 'update', lengths, update.accumulate, arguments, holds)
      if config.trainer.records_top_tokens:
        most = top_tokens_program(run.policy, run.teacher, update_spec(config), mesh)
        # Without coefficients, as `batching.reading_micro_batches` makes it.
        batch = batch.replace(**dict.fromkeys((*NUMBERS, 'signal')))
        arguments = base, state, batch, run.teacher.base
        holds, static = ('base', 'state', 'batch', 'teacher base'), {'k': config.trainer.record_top_tokens}
        found |= _of_micro_batch(run, 'top', lengths, most, arguments, holds, static=static)
  return found


def _rows(run: Run) -> int:
  """Return the rows of a micro-batch."""
  return batching.micro_batch_rows(batch_spec(run.config), run.mesh.size)


def _members(run: Run) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
  """Return the shapes of the `members` of rows of student and teacher in a generation batch; None: they have none."""
  teacher = () if run.teacher.policy.pooled else None
  return (run.policy.members_at_once,) if run.policy.pooled else teacher, teacher


def _of_micro_batch(
  run: Run,
  kind: str,
  lengths: tuple[int, ...],
  function: Callable[..., Any],
  arguments: tuple[Any, ...],
  holds: tuple[str, ...],
  **more: Any,
) -> dict[str, Program]:
  """Return a program that processes the rows of a micro-batch, by its name; arguments as in `Program`."""
  options = meshes.compiler_options(run.mesh)
  program = Program(kind, function, arguments, holds=holds, buckets=lengths, rows=_rows(run), options=options, **more)
  return {named(kind, lengths, program.evaluation): program}


def abstract_batch(
  rows: int,
  prompt: int,
  reprompt: int | None,
  response: int,
  *,
  spec: ObjectiveSpec,
  mesh: jax.sharding.Mesh,
  share: bool = False,
  members: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None),
) -> Batch:
  """Return a micro-batch as abstract arrays with shardings.

  Args:
    rows: B.
    prompt: bucket of prompts.
    reprompt: bucket of teacher prompts; None: no teacher reads the batch.
    response: bucket of completions, T.
    spec: terms of the loss, which determine the fields of the batch.
    mesh: mesh of the run.
    share: result of `batching.shares_prompts`.
    members: shapes of the `members` of a row of the student and of the teacher; None: there are none.
  """
  sharding = meshes.batch_sharding(mesh)

  def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding)

  def side(room: int, shape: tuple[int, ...] | None, share: bool = False) -> TokenRows:
    tokens = array(jnp.int32, room + response)
    own = None if shape is None else array(jnp.int32, *shape)
    return TokenRows(tokens, tokens, tokens, array(jnp.int32, response), tokens if share else None, own)

  per_token, signal = array(jnp.float32, response), None
  if spec.external_support is not None:
    ids, log_probs = (array(dtype, response, spec.external_support) for dtype in (jnp.int32, jnp.float32))
    signal = TeacherSignal(token_ids=ids, log_probs=log_probs)
  return Batch(
    student=side(prompt, members[0]),
    teacher=None if reprompt is None else side(reprompt, members[1], share),
    targets=array(jnp.int32, response),
    mask=per_token,
    **{name: per_token if name in spec.coefficients else None for name in COEFFICIENTS},
    old_log_probs=per_token if spec.needs_old_log_probs else None,
    advantages=per_token if spec.needs_advantages else None,
    sampling_log_probs=per_token if spec.weighs_in_update else None,
    **{f'{name}_log_probs': per_token for name in spec.references},
    signal=signal,
  )


def sampling_programs(run: Run) -> dict[str, Program]:
  """Return the sampler's programs in training, and those that evaluations need in addition.

  If the teacher samples the training completions, there are two samplers, which share no programs; if they are stored,
  only evaluations sample.
  """
  config, evaluated = run.config, _evaluated(run)
  student = run.policy, run.base, run.trainable
  samples = config.data.train_batch_size * config.rollout.n
  if config.rollout.max_staleness:  # Evaluations decode in the same slots.
    samples, evaluated = most_samples(config, evaluated), 0
  training = [(samples, False)] if config.rollout.sampled_by != 'data' else []
  evaluation = [(evaluated, True)] if evaluated else []
  if config.rollout.sampled_by != 'teacher':
    return _of_sampler(run, *student, training + evaluation) if training + evaluation else {}
  found = _of_sampler(run, *_teacher(run), training)
  return found | _of_sampler(run, *student, evaluation) if evaluation else found


def feedback_programs(run: Run) -> dict[str, Program]:
  """Return the programs of the sampler with which the student writes feedback on failures."""
  config = run.config
  if not feedback_writing.writes_itself(config):
    return {}
  run = dataclasses.replace(run, config=feedback_writing.sampler_settings(config))
  samples = config.data.train_batch_size * config.rollout.n  # The maximum number of failures.
  return _of_sampler(run, run.policy, run.base, run.trainable, [(samples, False)], FEEDBACK)


def measuring_programs(run: Run) -> dict[str, Program]:
  """Return the additional programs of evaluations that measure the divergence, or the perplexity of answers.

  The former are the teacher's sampler, and a scorer as the latter have.
  """
  config, mesh, evaluated = run.config, run.mesh, _evaluated(run)
  trainer, spec, found = config.trainer, objective_spec(config), {}
  if not evaluated:
    return {}
  if trainer.test_divergence:
    found = _of_sampler(run, *_teacher(run), [(evaluated, True)], 'teacher/')
    divergence = divergence_program(run.policy, run.teacher, config.actor.logits_chunk_size, mesh)
  declared = declared_buckets(config)
  for lengths in itertools.product(declared.prompt, declared.response):
    batch_of = functools.partial(abstract_batch, _rows(run), lengths[0], None, lengths[1], spec=spec, mesh=mesh)
    of_micro_batch = functools.partial(_of_micro_batch, run, lengths=lengths, evaluation=True)
    if trainer.test_divergence:
      batch = batch_of(members=_members(run))
      arguments = run.base, run.trainable, run.teacher.base, batch.student, batch.targets, batch.mask
      holds = 'base', 'parameters', 'teacher base', 'batch', 'batch', 'batch'
      found |= of_micro_batch('divergence', function=divergence, arguments=arguments, holds=holds)
    if trainer.test_perplexity:
      batch = batch_of()
      score = perplexity_program(run.policy, update_spec(config), mesh)
      arguments = run.base, run.trainable, batch.student, batch.targets
      holds = 'base', 'parameters', 'batch', 'batch'
      found |= of_micro_batch('perplexity', function=score, arguments=arguments, holds=holds)
  return found


def _teacher(run: Run) -> tuple[Policy, Tree, Tree]:
  """Return policy, base and trainable tree of a teacher that samples; nothing of it is trainable."""
  return run.teacher.policy, run.teacher.whole_base(run.base), {}


def _evaluated(run: Run) -> int:
  """Return the number of completions that an evaluation samples; 0 if there are no evaluations."""
  config = run.config
  if not config.trainer.test_freq:
    return 0
  # Only the data tell how many held-out questions there are; otherwise assume enough to fill all slots.
  unknown = config.data.val_max_samples or config.rollout.max_batch_rows
  return (unknown if run.held_out is None else run.held_out) * config.val_kwargs.n


def _of_sampler(
  run: Run, policy: Policy, base: Tree, trainable: Tree, requests: Sequence[tuple[int, bool]], whose: str = ''
) -> dict[str, Program]:
  """Return the programs of one sampler of the run; see `sampler_programs`."""
  config, declared = run.config, declared_buckets(run.config)
  spec = SamplerSpec(
    prompts=declared.prompt,
    response=declared.response[-1],
    max_rows=config.rollout.max_batch_rows,
    least=config.data.train_batch_size * config.rollout.n,
    chunk=config.rollout.decode_chunk,
    stop_ids=run.stop_ids,
    int8_cache=config.rollout.cache_dtype == 'int8',
    carries=config.rollout.carried_cache if config.rollout.max_staleness and not whose else '',
  )
  return sampler_programs(policy, run.mesh, base, trainable, spec, requests, whose, students_base=run.base)
