"""Golden updates: whole generation batches through the real training step, on the toy model."""

from __future__ import annotations

from collections.abc import Callable
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sdpo_jax.config import Config
from sdpo_jax.learning import batching, update
from sdpo_jax.objective.aggregation import loss_coefficients
from sdpo_jax.training.specs import update_spec
from sdpo_jax.types import Batch, TokenRows
from tests.golden.compiling import quick
from tests.golden.report import Report, load
from tests.golden.toy_policy import ToyPolicy

TOLERANCES = {'float64': 1e-9, 'float32': 1e-5}


def check(directory: Path, dtypes: tuple[str, ...] = tuple(TOLERANCES)) -> Report:
  """Trains every case in `directory`/*.npz in each of `dtypes`; compares weights and metrics after each call."""
  report = Report('e2e')
  for path in sorted(directory.glob('*.npz')):
    report.cases += 1
    case = load(path)
    for dtype in dtypes:
      with jax.enable_x64(dtype == 'float64'):
        _check_case(report, path.stem, case, dtype)
  return report


def make_config(facts: dict) -> Config:
  """Our settings for the reference's; its denominators are per micro-batch, so that is the loss group."""
  config = Config()
  config.data.train_batch_size = facts['B']
  config.rollout.n = 1
  config.rollout.temperature = facts['temperature']
  actor, distillation = config.actor, config.actor.self_distillation
  actor.policy_loss.loss_mode = facts['loss_mode']

  actor.loss_agg_mode = facts['loss_agg_mode']
  actor.ppo_mini_batch_size = facts['ppo_mini_batch_size']
  actor.ppo_epochs = facts['ppo_epochs']
  actor.ppo_micro_batch_size = actor.loss_group_size = facts['ppo_micro_batch_size_per_gpu']
  actor.logits_chunk_size = 5
  distillation.full_logit_distillation = facts['full_logit_distillation']
  distillation.alpha = facts['alpha']
  distillation.distillation_topk = facts['distillation_topk'] or None
  distillation.distillation_add_tail = facts['distillation_add_tail']
  distillation.is_clip = facts['is_clip']
  distillation.teacher_regularization = facts['teacher_regularization']
  distillation.teacher_update_rate = facts['teacher_update_rate']
  optimizer = config.optimizer
  optimizer.name, optimizer.lr, optimizer.lr_warmup_steps = facts['optimizer'], facts['lr'], 0
  optimizer.grad_clip, optimizer.skip_empty_steps = facts['grad_clip'], False
  for name, value in (facts['adamw'] or {}).items():
    setattr(optimizer, name, tuple(value) if name == 'betas' else value)
  return config


def _rows(data: dict, prefix: str) -> TokenRows:
  """Left-padded prompt and right-padded response, laid out as the training loop lays them out."""
  responses, mask = data['responses'], data['response_mask'] > 0
  ids, attended = data[f'{prefix}input_ids'], data[f'{prefix}attention_mask'] > 0
  room = ids.shape[1] - responses.shape[1]
  lengths = mask.sum(1)
  contiguous = np.all(mask == (np.arange(mask.shape[1])[None] < lengths[:, None]))
  if contiguous and np.all(attended[:, room:] == mask) and np.all(attended[:, :room].any(1)):
    prompts = [ids[i, :room][attended[i, :room]].tolist() for i in range(len(ids))]
    return batching.token_rows(prompts, responses, mask, room)
  states = np.arange(room - 1, ids.shape[1] - 1, dtype=np.int32)
  return TokenRows(
    tokens=ids,
    positions=data[f'{prefix}position_ids'],
    segment_ids=attended.astype(np.int32),
    target_index=np.broadcast_to(states, responses.shape),
  )


def _batch(config: Config, data: dict, facts: dict, rows: slice, dtype: str) -> Batch:
  """Return the rows of one mini-batch with coefficients over all of it."""
  sdpo = config.actor.policy_loss.loss_mode == 'sdpo'
  part = {name: value[rows] for name, value in data.items()}
  mask = part['response_mask'].astype(dtype)
  distilled = mask * part['self_distillation_mask'].astype(dtype)[:, None] if sdpo else mask
  coefficients = loss_coefficients(distilled, config.actor.loss_agg_mode, group_size=config.actor.loss_group_size)
  weights = part.get('rollout_is_weights', np.ones_like(mask)).astype(dtype)
  nothing = np.zeros_like(mask)
  return Batch(
    student=_rows(part, ''),
    teacher=_rows(part, 'teacher_') if sdpo else None,
    targets=np.where(mask > 0, part['responses'], 0),
    mask=mask,
    distill_coef=coefficients * weights if sdpo else nothing,
    policy_coef=nothing if sdpo else coefficients * weights,
    entropy_coef=nothing,
    old_log_probs=None if facts['on_policy'] else part['old_log_probs'].astype(dtype),
    advantages=part['advantages'].astype(dtype),
  )


_COMPILED: dict[tuple, Callable] = {}


def _programs(policy: ToyPolicy, spec: update.UpdateSpec):
  """Return the three programs of an update; cases share those that depend on the same part of their specs."""

  def compiled(function, *settings):
    return _COMPILED.setdefault((function.func, *settings), jax.jit(function, compiler_options=quick()))

  objective = spec.terms, spec.objective, spec.teacher, spec.teachers_support
  return (
    compiled(functools.partial(update.accumulate, policy, spec, None), policy, *objective),
    compiled(functools.partial(update.apply_gradients, spec), spec.optimizer),
    compiled(functools.partial(update.advance_teacher, spec), spec.terms, spec.teacher),
  )


def _check_case(report: Report, case: str, data: dict, dtype: str) -> None:
  facts = data['config_json']
  config = make_config(facts)
  config.optimizer.mu_dtype = dtype

  def tree(prefix):
    return {name: jnp.asarray(data[f'{prefix}_{name}'], dtype) for name in 'EPW'}

  accumulate, apply, finish = _programs(ToyPolicy(facts['V']), update_spec(config))
  state = update.init_state(update_spec(config), tree('init_student'))
  if config.actor.policy_loss.loss_mode == 'sdpo':
    state = state.replace(teacher=tree('init_teacher'))
  mini, micro = config.actor.ppo_mini_batch_size, config.actor.ppo_micro_batch_size
  for call in range(facts['steps']):
    prefix = f'step{call}_'
    given = {name.removeprefix(prefix): value for name, value in data.items() if name.startswith(prefix)}
    metrics: dict[str, list[float]] = {}

    def note(name, value, metrics=metrics):
      return metrics.setdefault(name, []).append(float(value))

    applied = 0
    for start in [start for _ in range(facts['ppo_epochs']) for start in range(0, facts['B'], mini)]:
      batch = _batch(config, given, facts, slice(start, start + mini), dtype)
      grads = update.zero_gradients(state.trainable)
      for first in range(0, mini, micro):
        part = jax.tree.map(lambda x, first=first: jnp.asarray(x[first : first + micro]), batch)
        grads, result = accumulate({}, state, grads, part)
        note('actor/pg_loss', result.loss)

        def mean(name, part=part, aux=result.aux):
          return (aux[name] * part.mask).sum() / part.mask.sum()

        for name, ours in (('pg_clipfrac', 'clipped'), ('pg_clipfrac_lower', 'clipped_lower'), ('ppo_kl', 'kl')):
          note(f'actor/{name}', mean(f'ppo_{ours}'))
        note('self_distillation/empty_target_batch', not np.any(part.distill_coef))
      state, outcome = apply(state, grads)
      applied += int(outcome['taken'])
      note('actor/grad_norm', outcome['grad_norm'])
    state = finish(state, np.int32(applied))
    exact = {'float64': dtype == 'float64'}
    for who, ours in (('student', state.trainable), ('teacher', state.teacher)):
      for name, value in ours.items():
        theirs = data[f'exp_step{call}_{who}_{name}_f64']
        report.compare(case, f'{who} {name} after call {call} ({dtype})', value, theirs, TOLERANCES[dtype], **exact)
    for name, theirs in data['exp_metrics_json']['f64'][call].items():
      if name == 'actor/kl_loss':
        continue  # No such term: the reference reports its zero.
      ours = [sum(metrics[name])] if name == 'actor/pg_loss' else metrics[name]
      if 'clipfrac' in name:
        ours = np.float32(ours)  # The reference counts in float32 throughout.
      theirs = np.atleast_1d(np.asarray([np.nan if v is None else v for v in np.atleast_1d(theirs)], np.float64))
      report.compare(case, f'{name} of call {call} ({dtype})', ours, theirs, TOLERANCES[dtype], **exact)
