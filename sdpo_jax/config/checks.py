"""Which values of the settings are refused, and with which sentence.

A check names the setting and the way out. Types are checked first, so that every other check may rely on them.
"""

from __future__ import annotations

from collections.abc import Sequence
import fractions
import math
from typing import TYPE_CHECKING, Any

from sdpo_jax.config.divergence import check_divergence
from sdpo_jax.config.fields import check_types
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
LONGEST_ROUND = 10**6  # Turns, in which every source of train_files has exactly its share.
_DISTILLATION = 'actor.self_distillation'


def check(config: schema.Config) -> None:
  """Raise UserError for the first setting that is out of range or contradicts another."""
  check_types(config)
  _check_model(config.model)
  _check_data(config)
  _require(0 <= config.seed < 2**63, f'seed must lie between 0 and 2^63, not {config.seed}.')
  _check_sampling('rollout', config.rollout)
  _check_sampling('val_kwargs', config.val_kwargs)
  _check_rollout(config.rollout)
  _check_divergence(config.actor.self_distillation)
  _check_teacher(config.actor.self_distillation)
  _check_reprompting(config.actor.self_distillation)
  _check_batches(config)
  _check_policy_loss(config)
  _check_optimizer(config.optimizer)
  _check_trainer(config)
  _check_environments(config.environments)
  _check_alarms(config)
  _check_mesh(config.mesh)


def _check_model(model: schema.ModelConfig) -> None:
  _require(
    model.vocab_multiple is None or model.vocab_multiple > 0,
    f'model.vocab_multiple must be positive or None, not {model.vocab_multiple}.',
  )
  _require(bool(model.path), 'model.path is empty: set it to a Hugging Face model directory.')


def _check_data(config: schema.Config) -> None:
  data = config.data
  _require(bool(data.train_files), 'data.train_files is empty: name at least one file or generator.')
  _check_source_weights(data)
  _require_positive('data', data, 'train_batch_size', 'max_prompt_length', 'max_response_length')
  _require(
    data.val_max_samples is None or data.val_max_samples > 0,
    f'data.val_max_samples must be positive or None (all rows), not {data.val_max_samples}.',
  )
  _check_template_variables(data)
  limits = {
    'prompt_buckets': data.max_prompt_length,
    'response_buckets': data.max_response_length,
    'reprompt_buckets': config.actor.self_distillation.max_reprompt_len,
  }
  for key, limit in limits.items():
    wrong = [size for size in getattr(data, key) if not 0 < size <= limit]
    _require(not wrong, f'data.{key} holds {wrong}: lengths must lie between 1 and the limit, {limit}.')


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
    all(weight > 0 for weight in weights),
    f'data.source_weights must be positive, not {weights}: leave a source that is not wanted out of data.train_files.',
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


def _check_sampling(name: str, sampling: schema.SamplingConfig) -> None:
  _require_positive(name, sampling, 'n')
  _require(sampling.temperature >= 0, f'{name}.temperature must not be negative ({sampling.temperature}).')
  _require(0 < sampling.top_p <= 1, f'{name}.top_p must lie in (0, 1], not {sampling.top_p}.')
  _require(0 <= sampling.min_p < 1, f'{name}.min_p must lie in [0, 1), not {sampling.min_p}.')
  _require(sampling.top_k == -1 or sampling.top_k > 0, f'{name}.top_k must be -1 or positive, not {sampling.top_k}.')


def _check_rollout(rollout: schema.RolloutConfig) -> None:
  _require(
    rollout.temperature > 0,
    'rollout.temperature must be positive for training: the objective divides logits by it.',
  )
  _require(rollout.max_batch_rows >= 1, 'rollout.max_batch_rows must be at least 1.')
  _require(rollout.decode_chunk >= 1, 'rollout.decode_chunk must be at least 1.')


def _check_divergence(sd: schema.SelfDistillationConfig) -> None:
  try:
    check_divergence(sd.alpha, sd.distillation_topk, sd.full_logit_distillation, f'{_DISTILLATION}.')
  except ValueError as error:
    raise UserError(str(error)) from error
  _require(sd.is_clip is None or sd.is_clip > 0, f'{_DISTILLATION}.is_clip must be positive or None, not {sd.is_clip}.')


def _check_teacher(sd: schema.SelfDistillationConfig) -> None:
  _require(
    0 <= sd.teacher_update_rate <= 1,
    f'{_DISTILLATION}.teacher_update_rate must lie in [0, 1], not {sd.teacher_update_rate}.',
  )
  interval, restarts = sd.teacher_restart_interval, sd.teacher_regularization == 'restart'
  _require(
    not restarts or (interval is not None and interval >= 1),
    f"{_DISTILLATION}.teacher_restart_interval must be at least 1 for teacher_regularization='restart', not {interval}: "
    'set it to the generation batches between two restarts.',
  )
  _require(
    restarts or interval is None,
    f'{_DISTILLATION}.teacher_restart_interval={interval} has no effect on '
    f"teacher_regularization='{sd.teacher_regularization}': set that to 'restart', or leave the interval at None.",
  )


def _check_reprompting(sd: schema.SelfDistillationConfig) -> None:
  _require_positive(_DISTILLATION, sd, 'max_reprompt_len')
  for key, fields in TEMPLATE_FIELDS.items():
    _check_template(f'{_DISTILLATION}.{key}', getattr(sd, key), fields)


def _check_batches(config: schema.Config) -> None:
  actor, data, sequences = config.actor, config.data, _sequences(config)
  _require_positive('actor', actor, 'ppo_mini_batch_size', 'ppo_micro_batch_size', 'ppo_epochs', 'logits_chunk_size')
  _require(
    data.train_batch_size % actor.ppo_mini_batch_size == 0,
    f'data.train_batch_size={data.train_batch_size} questions do not split into mini-batches of '
    f'actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}: make one a multiple of the other.',
  )
  _require(
    actor.loss_group_size is None or (actor.loss_group_size > 0 and sequences % actor.loss_group_size == 0),
    f'actor.loss_group_size={actor.loss_group_size} does not divide the {sequences} sequences of an optimizer step '
    '(actor.ppo_mini_batch_size × rollout.n): choose a divisor, or None for the whole batch.',
  )
  _require(actor.loss_scale_factor is None or actor.loss_scale_factor > 0, 'actor.loss_scale_factor must be positive.')


def _check_policy_loss(config: schema.Config) -> None:
  policy_loss = config.actor.policy_loss
  _require(
    policy_loss.clip_ratio_c > 1.0, f'actor.policy_loss.clip_ratio_c must be above 1, not {policy_loss.clip_ratio_c}.'
  )
  for key in ('clip_ratio_low', 'clip_ratio_high'):
    _require(getattr(policy_loss, key) >= 0, f'actor.policy_loss.{key} must not be negative.')
  _require(
    config.algorithm.rollout_correction.rollout_is_threshold > 0,
    'algorithm.rollout_correction.rollout_is_threshold must be positive.',
  )


def _check_optimizer(optimizer: schema.OptimizerConfig) -> None:
  _require(
    len(optimizer.betas) == 2 and all(0 <= beta < 1 for beta in optimizer.betas),
    f'optimizer.betas must be two numbers in [0, 1), not {optimizer.betas}.',
  )
  for key in ('lr', 'lr_warmup_steps', 'weight_decay'):
    value = getattr(optimizer, key)
    _require(value >= 0, f'optimizer.{key} must not be negative ({value}).')
  _require_positive('optimizer', optimizer, 'eps', 'grad_clip')


def _check_trainer(config: schema.Config) -> None:
  trainer, sequences = config.trainer, _sequences(config)
  _require_positive(
    'trainer', trainer, 'total_training_steps', 'max_ckpt_to_keep', 'balance_partitions', 'sample_table_rows'
  )
  for key in ('test_freq', 'save_freq', 'rollout_save_freq', 'sample_table_freq', 'max_skipped_steps'):
    _require(getattr(trainer, key) >= 0, f'trainer.{key} must not be negative.')
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
  _require(
    0 <= environments.max_ungraded_fraction <= 1,
    f'environments.max_ungraded_fraction must lie in [0, 1], not {environments.max_ungraded_fraction}.',
  )
  scores = environments.score_range
  _require(
    len(scores) == 2 and scores[0] < scores[1],
    f'environments.score_range must be two numbers, the smaller one first, not {scores}.',
  )
  _require_positive('environments', environments, 'grader_timeout_s')
  for section in ('http', 'judge'):
    asked = getattr(environments, section)
    _require_positive(f'environments.{section}', asked, 'timeout_s', 'concurrency')
    _require(asked.retries >= 0, f'environments.{section}.retries must not be negative ({asked.retries}).')
  sandbox, judge = environments.sandbox, environments.judge
  for key in ('workers', 'memory_mb', 'file_mb', 'output_mb'):
    value = getattr(sandbox, key)
    _require(value is None or value > 0, f'environments.sandbox.{key} must be positive, not {value}.')
  _require(judge.temperature >= 0, f'environments.judge.temperature must not be negative ({judge.temperature}).')
  _require(judge.max_tokens > 0, f'environments.judge.max_tokens must be positive, not {judge.max_tokens}.')
  _check_template('environments.judge.template', judge.template, JUDGE_FIELDS, reader='judge')


def _check_alarms(config: schema.Config) -> None:
  alarms, trainer = config.alarms, config.trainer
  _require(alarms.max_rollbacks >= 0, f'alarms.max_rollbacks must not be negative ({alarms.max_rollbacks}).')
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
  for key in ('fsdp', 'tensor'):
    value = getattr(mesh, key)
    _require(value in (-1, None) or value > 0, f'mesh.{key} must be positive or -1 (the rest).')
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


def _require_positive(name: str, section: Any, *keys: str) -> None:
  for key in keys:
    value = getattr(section, key)
    _require(value > 0, f'{name}.{key} must be positive, not {value}.')
