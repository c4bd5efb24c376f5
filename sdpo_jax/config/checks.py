"""Which values of the settings are refused, and with which sentence.

A check names the setting and the way out. Types are checked first and ranges (`ranges`) next, so that every other check
may rely on them.
"""

from __future__ import annotations

from collections.abc import Sequence
import fractions
import itertools
import math
import re
from typing import TYPE_CHECKING

from sdpo_jax.config.addresses import check_address
from sdpo_jax.config.divergence import check_divergence
from sdpo_jax.config.fields import check_types
from sdpo_jax.config.optimizers import READS
from sdpo_jax.config.ranges import check_ranges
from sdpo_jax.errors import UserError

if TYPE_CHECKING:  # `Config.validate` calls this module.
  from sdpo_jax.config import schema

TEMPLATE_FIELDS = {
  'reprompt_template': ('prompt', 'solution', 'feedback'),
  'solution_template': ('successful_previous_attempt',),
  'feedback_template': ('feedback_raw',),
  'attempt_template': ('attempt',),
}
# Arguments of the function that applies a chat template, which are no variables of it.
TEMPLATE_ARGUMENTS = (
  'add_generation_prompt',
  'chat_template',
  'continue_final_message',
  'conversation',
  'max_length',
  'messages',
  'padding',
  'return_assistant_tokens_mask',
  'return_dict',
  'return_tensors',
  'sanitize_control_tokens',
  'tokenize',
  'tokenizer_kwargs',
  'truncation',
)
JUDGE_FIELDS = ('completion', 'question', 'ground_truth')
CHANGES = ('tokenizer', 'model', 'data', 'graders')  # What a resumed run may accept, see overrides.ACCEPTABLE.
LONGEST_ROUND = 10**6  # Turns, in which every source of train_files has exactly its share.
_DISTILLATION = 'actor.self_distillation'


def check(config: schema.Config) -> None:
  """Raise UserError for the first setting that is out of range or contradicts another."""
  check_types(config)
  check_ranges(config)
  _check_model(config.model)
  _check_data(config)
  _check_divergence(config.actor.self_distillation)
  _check_teacher(config.actor.self_distillation)
  _check_reprompting(config.actor.self_distillation)
  _check_batches(config)
  _check_optimizer(config.optimizer)
  _check_trainer(config)
  _check_environments(config.environments)
  _check_alarms(config)
  _check_mesh(config.mesh)


def _check_model(model: schema.ModelConfig) -> None:
  _require(bool(model.path), 'model.path is empty: set it to a Hugging Face model directory.')
  _require(
    model.chat_template != '',
    "model.chat_template is empty: name a file with a chat template, or leave it at None for the tokenizer's own.",
  )


def _check_data(config: schema.Config) -> None:
  data = config.data
  _require(bool(data.train_files), 'data.train_files is empty: name at least one file or generator.')
  _check_source_weights(data)
  _check_template_variables(data)
  limits = {
    'prompt_buckets': data.max_prompt_length,
    'response_buckets': data.max_response_length,
    'reprompt_buckets': config.actor.self_distillation.max_reprompt_len,
  }
  for key, limit in limits.items():
    wrong = [size for size in getattr(data, key) if size > limit]
    _require(not wrong, f'data.{key} holds {wrong}: lengths must not exceed the limit, {limit}.')


def _check_template_variables(data: schema.DataConfig) -> None:
  given = data.apply_chat_template_kwargs
  wrong = [key for key in given if not key.isidentifier() or key in TEMPLATE_ARGUMENTS]
  _require(
    not wrong,
    f'data.apply_chat_template_kwargs: {wrong} cannot be set: name variables of the chat template, such as enable_thinking.',
  )
  thinking = given.get('enable_thinking', data.enable_thinking)
  _require(
    data.enable_thinking in (None, thinking),
    f'data.enable_thinking={data.enable_thinking} and data.apply_chat_template_kwargs.enable_thinking={thinking} '
    'contradict each other: set one of them.',
  )


def _check_source_weights(data: schema.DataConfig) -> None:
  weights = data.source_weights
  _require(
    not weights or len(weights) == len(data.train_files),
    f'data.source_weights has {len(weights)} numbers for {len(data.train_files)} data.train_files: give one for each, or '
    'none.',
  )
  _require(
    not weights or sum(round_shares(weights)) <= LONGEST_ROUND,
    f'data.source_weights={weights} differ too finely: write them with fewer digits, e.g. 7,3.',
  )


def round_shares(weights: Sequence[float]) -> list[int]:
  """Return the smallest whole numbers in the ratio of positive weights: [1, 3] for (0.5, 1.5).

  The weights are read as the decimals they are written as.
  """
  exact = [fractions.Fraction(str(weight)) for weight in weights]
  common = math.lcm(*(weight.denominator for weight in exact))
  whole = [int(weight * common) for weight in exact]
  return [share // math.gcd(*whole) for share in whole]


def _check_divergence(sd: schema.SelfDistillationConfig) -> None:
  try:
    check_divergence(sd.alpha, sd.distillation_topk, sd.full_logit_distillation, f'{_DISTILLATION}.')
  except ValueError as error:
    raise UserError(str(error)) from error


def _check_teacher(sd: schema.SelfDistillationConfig) -> None:
  interval, restarts = sd.teacher_restart_interval, sd.teacher_regularization == 'restart'
  _require(
    not restarts or interval is not None,
    f"{_DISTILLATION}.teacher_restart_interval must be at least 1 for teacher_regularization='restart', not {interval}: "
    'set it to the generation batches between two restarts.',
  )
  _require(
    restarts or interval is None,
    f'{_DISTILLATION}.teacher_restart_interval={interval} has no effect on '
    f"teacher_regularization='{sd.teacher_regularization}': set that to 'restart', or leave the interval at None.",
  )


def _check_reprompting(sd: schema.SelfDistillationConfig) -> None:
  for key, fields in TEMPLATE_FIELDS.items():
    _check_template(f'{_DISTILLATION}.{key}', getattr(sd, key), fields)


def _check_batches(config: schema.Config) -> None:
  actor, data, sequences = config.actor, config.data, _sequences(config)
  _require(
    data.train_batch_size % actor.ppo_mini_batch_size == 0,
    f'data.train_batch_size={data.train_batch_size} questions do not split into mini-batches of '
    f'actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}: make one a multiple of the other.',
  )
  _require(
    actor.loss_group_size is None or sequences % actor.loss_group_size == 0,
    f'actor.loss_group_size={actor.loss_group_size} does not divide the {sequences} sequences of an optimizer step '
    '(actor.ppo_mini_batch_size × rollout.n): choose a divisor, or None for the whole batch.',
  )


def _check_optimizer(optimizer: schema.OptimizerConfig) -> None:
  _require(
    len(optimizer.betas) == 2,
    f'optimizer.betas must be two numbers in [0, 1), not {optimizer.betas}.',
  )
  _check_schedule(optimizer)
  default = type(optimizer)()
  for name in dict.fromkeys(itertools.chain(*READS.values())):
    value = getattr(optimizer, name)
    _require(
      name in READS[optimizer.name] or _same(value, getattr(default, name)),
      f'optimizer.{name}={value} has no effect on optimizer.name={optimizer.name!r}: leave it at '
      f'{getattr(default, name)}, or choose one of {", ".join(o for o, read in READS.items() if name in read)}.',
    )
  for pattern in optimizer.weight_decay_exclude:
    _require(
      bool(pattern),
      'optimizer.weight_decay_exclude holds an empty pattern, which is found in every name: remove it, or set '
      'optimizer.weight_decay=0 if nothing is to decay.',
    )
    try:
      re.compile(pattern)
    except re.error as error:
      raise UserError(
        f'optimizer.weight_decay_exclude: {pattern!r} is not a regular expression ({error}): correct it.'
      ) from error


def _check_schedule(optimizer: schema.OptimizerConfig) -> None:
  steps, warmup = optimizer.lr_decay_steps, optimizer.lr_warmup_steps
  for name, unset in (('lr_decay_steps', None), ('min_lr_ratio', 0)):
    _require(
      optimizer.lr_scheduler_type != 'constant' or getattr(optimizer, name) == unset,
      f"optimizer.{name}={getattr(optimizer, name)} has no effect on optimizer.lr_scheduler_type='constant': set that to "
      f"'cosine' or 'linear', or leave {name} at {unset}.",
    )
  _require(
    steps is None or steps > warmup,
    f'optimizer.lr_decay_steps={steps} counts the warm-up and must be above optimizer.lr_warmup_steps={warmup}: raise it '
    'or shorten the warm-up.',
  )


def _same(value: object, other: object) -> bool:
  """Return whether two values of a setting are the same, lists and tuples alike."""
  listed = (tuple, list)
  return value == other or (isinstance(value, listed) and isinstance(other, listed) and list(value) == list(other))


def _check_trainer(config: schema.Config) -> None:
  trainer, sequences = config.trainer, _sequences(config)
  unknown = [entry for entry in trainer.accept_changes if entry not in CHANGES]
  _require(not unknown, f'trainer.accept_changes: {unknown} cannot be accepted: name any of {", ".join(CHANGES)}.')
  _require(
    trainer.test_freq == 0 or bool(config.data.val_files),
    'trainer.test_freq asks for evaluation but data.val_files is empty: name held-out rows or set trainer.test_freq=0.',
  )
  _require(
    trainer.batch_order != 'balanced' or sequences % trainer.balance_partitions == 0,
    f'trainer.balance_partitions={trainer.balance_partitions} does not divide the {sequences} sequences of an '
    'optimizer step (actor.ppo_mini_batch_size × rollout.n): choose a divisor.',
  )


def _check_environments(environments: schema.EnvironmentsConfig) -> None:
  scores = environments.score_range
  _require(
    len(scores) == 2 and scores[0] < scores[1],
    f'environments.score_range must be two numbers, the smaller one first, not {scores}.',
  )
  http, judge = 'environments.http', 'environments.judge'
  check_address(environments.http.url, f'{http}.url', f'{http}.authorization_env')
  check_address(environments.judge.base_url, f'{judge}.base_url', f'{judge}.api_key_env')
  _check_template('environments.judge.template', environments.judge.template, JUDGE_FIELDS, reader='judge')


def _check_alarms(config: schema.Config) -> None:
  alarms, trainer = config.alarms, config.trainer
  _require(
    all(word.strip() for word in alarms.epistemic_words), 'alarms.epistemic_words holds an empty word: remove it.'
  )
  if alarms.action != 'rollback':
    return
  best = trainer.best_metric
  _require(
    best is not None,
    "alarms.action='rollback' goes back to the best checkpoint: say which that is with trainer.best_metric, e.g. "
    f'eval/<task>/mean@{config.val_kwargs.n}.',
  )
  _require(trainer.save_freq > 0, "alarms.action='rollback' needs checkpoints to go back to: set trainer.save_freq.")
  _require(
    not best.startswith('eval/') or (trainer.test_freq > 0 and trainer.test_freq % trainer.save_freq == 0),
    f"alarms.action='rollback' needs a checkpoint of every evaluation: make trainer.test_freq={trainer.test_freq} a "
    f'multiple of trainer.save_freq={trainer.save_freq}.',
  )


def _check_mesh(mesh: schema.MeshConfig) -> None:
  _require(mesh.fsdp != -1 or mesh.tensor != -1, 'Only one of mesh.fsdp and mesh.tensor can be -1 (the rest).')


def _check_template(name: str, template: str, fields: tuple[str, ...], reader: str = 'teacher') -> None:
  try:
    template.format(**dict.fromkeys(fields, ''))
  except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
    raise UserError(
      f'{name} is not a valid template ({error!r}): it may use {", ".join("{" + f + "}" for f in fields)}, and a literal '
      'brace is written {{ or }}.'
    ) from error
  _require(f'{{{fields[0]}}}' in template, f'{name} does not hold {{{fields[0]}}}: the {reader} would never see it.')


def _sequences(config: schema.Config) -> int:
  """Sequences of an optimizer step."""
  return config.actor.ppo_mini_batch_size * config.rollout.n


def _require(condition: bool, sentence: str) -> None:
  if not condition:
    raise UserError(sentence)
