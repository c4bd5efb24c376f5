"""The start of a run: checks of its questions, a description in a few lines, and compilation of its programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import logging
import time
from typing import Any

import jax

from sdpo_jax import liveness
from sdpo_jax.command_lines import command_line
from sdpo_jax.config import Config
from sdpo_jax.config.conditions import unread_remarks
from sdpo_jax.distributed import programs
from sdpo_jax.distributed.stopping import NEVER, Stop
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError, first_line
from sdpo_jax.evaluation.known_metrics import check_best_metric
from sdpo_jax.models import parameters as parameter_tables
from sdpo_jax.models.adapters.kv_prefix import without_bank
from sdpo_jax.models.policy import Policy
from sdpo_jax.tables import counted
from sdpo_jax.training import feedback_writing, teacher_model
from sdpo_jax.training.opening import check_turn_end, template_remarks
from sdpo_jax.training.room import check_reprompts, check_room, check_writer
from sdpo_jax.training.run_programs import run_programs
from sdpo_jax.training.session import Session
from sdpo_jax.training.specs import objective_spec
from sdpo_jax.types import Example, TrainState


def check_questions(
  config: Config, tokenizer: Any, graders: Graders, training: Sequence[Example], held_out: Sequence[Example]
) -> None:
  """Raise UserError for problems with questions or metrics that would otherwise end the run later.

  Args:
    config: settings.
    tokenizer: tokenizer of the model.
    graders: graders of the run.
    training: questions of `data.train_files`, none longer than the limit.
    held_out: questions of evaluations.
  """
  tasks = {example.data_source for example in held_out}
  check_best_metric(config.trainer.best_metric, tasks, config.val_kwargs.n, config.alarms.epistemic_words)
  check_turn_end(config, tokenizer)
  unread = *unread_remarks(config), *graders.unread_remarks([*training, *held_out])
  for remark in (*template_remarks(config, tokenizer), *unread):
    logging.warning('%s', remark)
  spec = objective_spec(config)
  check_reprompts(tokenizer, training, config, spec)
  check_room(tokenizer, training, config, spec)
  check_writer(tokenizer, training, config, spec)
  graders.check_questions([*training, *held_out])


def describe(session: Session, trained: int, train_rows: int | None, held_out: int, first: int) -> list[str]:
  """Return the lines that describe a run at its start.

  Args:
    session: session of the run.
    trained: number of trained parameters.
    train_rows: number of training rows; None: a generator makes them.
    held_out: number of questions of an evaluation.
    first: step from which the run resumes; 0: it is new.
  """
  config, mesh, table = session.config, session.mesh, session.policy.parameter_table()
  devices = mesh.devices.ravel()
  kind = devices[0].device_kind
  platform = devices[0].platform + ('' if kind.lower() == devices[0].platform else f' ({kind})')
  axes = ', '.join(f'{name}={size}' for name, size in mesh.shape.items())
  processes = f' of {jax.process_count()} processes' if jax.process_count() > 1 else ''
  total = parameter_tables.count(without_bank(table))
  trains = '' if trained == total else f', {trained:,} of them trained'
  rows = 'generated' if train_rows is None else counted(train_rows, 'row')
  batch = f'{counted(config.data.train_batch_size, "question")} × {counted(config.rollout.n, "completion")} per step'
  held = f'{counted(held_out, "question")} × {counted(config.val_kwargs.n, "completion")}' if held_out else 'none'
  total_steps = config.trainer.total_training_steps
  if first < total_steps:
    steps = f'step {total_steps}' if first + 1 == total_steps else f'steps {first + 1} to {total_steps}'
  else:
    steps = 'no step left'
  return [
    f'{config.name}: {steps} in {session.workdir}',
    f'  devices    {len(devices)} × {platform}{processes}, mesh {axes}, jax {jax.__version__}',
    f'  model      {config.model.path}: {total:,} parameters{trains}, computed in {config.model.dtype}',
    *_other_teacher(session),
    *_cartridge(session),
    *_schedule(config),
    f'  training   {rows}, {batch}',
    *_packing(config, session.policy),
    f'  evaluation {held}',
  ]


def _other_teacher(session: Session) -> list[str]:
  """Return the line that names a separate teacher model, if there is one."""
  sd = session.config.actor.self_distillation
  if sd.teacher_endpoint.used:
    said = f'{counted(sd.teacher_endpoint.top_k, "token")} per position'
    return [f'  teacher    {sd.teacher_endpoint.model} at an endpoint ({sd.teacher_endpoint.dialect}), {said}']
  if not teacher_model.is_used(session.config):
    return []
  count = parameter_tables.count(session.teacher.policy.parameter_table())
  return [f'  teacher    {sd.teacher_model}: {count:,} parameters, all of them frozen']


def _cartridge(session: Session) -> list[str]:
  """Return the line about the cartridge of the student and the document of the teacher, if any."""
  prefix = session.policy.adapter if session.config.model.cartridge.used else None
  if prefix is None:
    return []
  read = f', beside up to {prefix.at_once} of {counted(prefix.members, "frozen cartridge")}' if prefix.members else ''
  if session.teacher is not None:
    teacher = session.teacher.policy.adapter
    chunks = '' if teacher.members is None else f' of a chunk, and {counted(teacher.members, "chunk")} are held'
    read += f'; the teacher reads {counted(teacher.slots or teacher.member_slots, "token")}{chunks}'
  return [f'  cartridge  {counted(prefix.slots, "slot")}, {prefix.frozen:,} of them frozen{read}']


def _schedule(config: Config) -> list[str]:
  """Return the lines about a hybrid objective, gathered updates, and the writer of feedback, if there are any."""
  algorithm, sd, lines = config.algorithm, config.actor.self_distillation, []
  if algorithm.mode == 'hybrid':
    terms = f'{algorithm.sdpo_coef:g} × divergence + {algorithm.policy_gradient_coef:g} × policy gradient'
    lines.append(f'  objective  {terms}')
  if algorithm.min_sdpo_examples:
    lines.append(f'  updates    when {counted(algorithm.min_sdpo_examples, "example")} have gathered')
  if feedback_writing.is_used(config):
    by = (
      'the model itself' if feedback_writing.writes_itself(config) else f'{sd.feedback_endpoint.model} at an endpoint'
    )
    lines.append(f'  feedback   on failures, written by {by}')
  return lines


def _packing(config: Config, policy: Policy) -> list[str]:
  """Return the line about packed samples, and why they do not share a teacher prompt, if they do not."""
  if not config.actor.pack_sequences:
    return []
  said = 'samples share a row, and a teacher prompt,'
  if not policy.shares_prefixes:
    reason = 'layers have windows' if policy.config.windows else 'it comes after slots'
    said = f'each sample has its own copy of the teacher prompt, as {reason}; samples share a row'
  return [f'  packing    {said} where that leaves less padding']


def compile_programs(
  session: Session, state: TrainState, held_out: int, announce: Callable[[str], None], stop: Stop = NEVER
) -> dict[str, programs.Program]:
  """Compile every program of the run, so that no step compiles any, and announce how long each took.

  Later calls of the jitted functions use the programs compiled for the same shapes, dtypes and shardings. All processes
  compile the same programs in the same order.

  Args:
    session: session of the run.
    state: state before the first step.
    held_out: number of questions of an evaluation.
    announce: receives the lines.
    stop: whether the run is to stop; checked after every program.

  Returns:
    The programs by name.

  Raises:
    UserError: a program does not fit into the memory of the devices.
    StoppedError: `stop` asked the run to stop.
  """
  found = run_programs(
    session.config,
    session.policy,
    session.base,
    state.trainable,
    session.mesh,
    stop_ids=session.sampler.stop_ids,
    teacher=session.teacher,
    held_out=held_out,
  )
  announce(f'  programs   {len(found)}, compiled before the first step')
  liveness.begin('compile')
  began = time.monotonic()
  start = began
  for number, (name, compiled) in enumerate(programs.compile_programs(found, found), 1):
    if isinstance(compiled, jax.errors.JaxRuntimeError):
      if 'RESOURCE_EXHAUSTED' not in str(compiled):
        raise compiled
      raise UserError(
        f'The program {name} does not fit into the memory of the devices ({first_line(compiled)}): lower '
        'rollout.max_batch_rows, actor.ppo_micro_batch_size or the largest lengths, or use more devices; '
        f'`{command_line("plan")}` shows how much memory each takes.'
      ) from compiled
    now = time.monotonic()
    liveness.progress()
    announce(f'  {number:>3}/{len(found)} {name}  {now - began:.1f} s')
    began = now
    stop.check()
  announce(f'  compiled all programs in {began - start:.1f} s')
  return found
