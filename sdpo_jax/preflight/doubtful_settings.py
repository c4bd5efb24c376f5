"""Warnings about valid settings that look like mistakes, each with the consequence and a remedy."""

from __future__ import annotations

from collections.abc import Iterator

from sdpo_jax.config import Config, rewards
from sdpo_jax.data import sources
from sdpo_jax.models.adapters.published_cartridges import PAGE
from sdpo_jax.training.specs import objective_spec


def odd_settings(config: Config, devices: int, positions: int | None) -> list[str]:
  """Return a sentence for every setting, or pair of settings, that is contradictory or looks odd.

  Args:
    config: settings that pass `Config.validate`.
    devices: number of the run's devices.
    positions: the model's max_position_embeddings, a limit on a row's tokens; None: unknown.
  """
  checks = (_learning, _signal, _sampling, _evaluation, _cartridge, _safety)
  found = [sentence for check in checks for sentence in check(config)]
  return [*found, *_batches(config, devices), *_lengths(config, positions)]


def _learning(config: Config) -> Iterator[str]:
  optimizer, steps = config.optimizer, config.trainer.total_training_steps
  if optimizer.lr == 0:
    yield 'optimizer.lr=0: nothing is learned.'
  if steps <= optimizer.lr_warmup_steps:
    yield (
      f'optimizer.lr_warmup_steps={optimizer.lr_warmup_steps} is not below trainer.total_training_steps={steps}: the '
      'learning rate never reaches optimizer.lr.'
    )


def _signal(config: Config) -> Iterator[str]:
  """Yield findings about the learning signal."""
  sd, n = config.actor.self_distillation, config.rollout.n
  if config.actor.kl_loss_coef and config.actor.kl_loss_type == 'k1':
    yield (
      "actor.kl_loss_type='k1': the gradient of this estimate is zero on average, so it adds noise and does not "
      "regularise; set 'k2' or 'k3'."
    )
  if objective_spec(config).needs_advantages and n == 1 and not config.data.group_duplicates:
    yield (
      'rollout.n=1: advantages compare the completions of a question; that of a single one is its score, without a '
      'baseline; raise rollout.n.'
    )
  if not objective_spec(config).needs_teacher:
    return
  if sd.teacher_regularization in ('ema', 'lora_ema') and sd.teacher_update_rate in (0, 1):
    same = {0: 'frozen', 1: 'live'}[int(sd.teacher_update_rate)]
    yield (
      f'actor.self_distillation.teacher_update_rate={sd.teacher_update_rate:g}: this is the '
      f"same as teacher_regularization='{same}', which needs no memory of its own; set that, or a rate between 0 and 1."
    )
  if not objective_spec(config).reprompts:
    return
  if not sd.include_demonstration and not sd.include_environment_feedback:
    yield (
      'actor.self_distillation.include_demonstration and include_environment_feedback are both off: the teacher knows '
      'no more than the student, and nothing is distilled.'
    )
  alone = n == 1 and sd.dont_reprompt_on_self_success and not config.data.group_duplicates
  if alone and sd.include_demonstration:
    yield (
      'rollout.n=1 with actor.self_distillation.dont_reprompt_on_self_success: a completion is never its own '
      'demonstration and there is no other, so that feedback alone teaches; raise rollout.n.'
    )
  if not 0 < sd.success_reward_threshold <= 1 and not _weighs(config):
    yield (
      f'actor.self_distillation.success_reward_threshold={sd.success_reward_threshold} is outside (0, 1], in which '
      'the built-in graders score: everything or nothing is a success.'
    )


def _weighs(config: Config) -> bool:
  """Return whether scores are weighted sums, whose range differs from that of their terms."""
  given = config.data.environment
  several = given is not None and rewards.written(given) not in rewards.names([given])
  return several or any(weight != 1 for weight in config.environments.reward_weights.values())


def _sampling(config: Config) -> Iterator[str]:
  rollout, correction = config.rollout, config.algorithm.rollout_correction
  truncated = [name for name, off in (('top_p', 1.0), ('top_k', -1), ('min_p', 0.0)) if getattr(rollout, name) != off]
  if truncated and correction.rollout_is is None:
    yield (
      f'rollout.{truncated[0]}={getattr(rollout, truncated[0])} with algorithm.rollout_correction.rollout_is=None: '
      'completions are drawn from a different distribution than the one that is trained, and nothing corrects for it.'
    )
  late = next((name for name in ('steps_off', 'max_staleness') if getattr(rollout, name)), None)
  if late and objective_spec(config).policy_gradient and correction.rollout_is is None:
    yield (
      f'rollout.{late}={getattr(rollout, late)} with algorithm.rollout_correction.rollout_is=None: the policy gradient '
      "takes completions of older weights for the model's own, and nothing corrects for it; set rollout_is to 'token'."
    )


def _evaluation(config: Config) -> Iterator[str]:
  trainer, kwargs, data = config.trainer, config.val_kwargs, config.data
  if data.val_files and trainer.test_freq == 0:
    yield 'trainer.test_freq=0: data.val_files are never asked, not even at the end.'
  if trainer.test_freq > trainer.total_training_steps:
    yield (
      f'trainer.test_freq={trainer.test_freq} is more than '
      f'trainer.total_training_steps={trainer.total_training_steps}: the run is not evaluated between its steps.'
    )
  if kwargs.n > 1 and kwargs.temperature == 0:
    yield f'val_kwargs.n={kwargs.n} with val_kwargs.temperature=0: greedy completions of a question are all the same.'
  shared = [source for source in data.train_files if source in data.val_files and not sources.is_generator(source)]
  # A cartridge must know its document: questions about it may recur, since no answer was trained on.
  if shared and not config.model.cartridge.used:
    yield f'{shared[0]!r} is in data.train_files and in data.val_files: held-out numbers will be those of training.'


def _cartridge(config: Config) -> Iterator[str]:
  slots = config.model.cartridge.tokens
  if slots is not None and slots % PAGE:
    yield (
      f'model.cartridge.tokens={slots} is no multiple of {PAGE}: the published format (--format=cartridge_pt) cannot '
      'hold such a cartridge, this project can.'
    )


def _safety(config: Config) -> Iterator[str]:
  trainer = config.trainer
  if trainer.save_freq == 0 and trainer.total_training_steps > 100:
    yield 'trainer.save_freq=0: a run that is killed starts again from nothing.'
  if config.environments.sandbox.allow_unsandboxed:
    yield 'environments.sandbox.allow_unsandboxed: programs that the model writes may run without confinement.'


def _batches(config: Config, devices: int) -> Iterator[str]:
  actor = config.actor
  sequences = actor.ppo_mini_batch_size * config.rollout.n
  micro = actor.ppo_micro_batch_size
  if sequences < devices:
    yield (
      f'An optimizer step has {sequences} sequences (actor.ppo_mini_batch_size × rollout.n) for {devices} devices: '
      'some of them compute padding; raise actor.ppo_mini_batch_size.'
    )
  elif micro % devices:
    yield f'actor.ppo_micro_batch_size={micro} is not a multiple of {devices} devices: some of its rows are padding.'


def _lengths(config: Config, positions: int | None) -> Iterator[str]:
  data, sd = config.data, config.actor.self_distillation
  taught = objective_spec(config).reprompts
  if taught and sd.max_reprompt_len <= data.max_prompt_length:
    yield (
      f'actor.self_distillation.max_reprompt_len={sd.max_reprompt_len} is not above data.max_prompt_length='
      f'{data.max_prompt_length}: the longest questions leave no room for a demonstration or feedback.'
    )
  if taught and sd.reprompt_truncation == 'error' and sd.include_demonstration:
    needed = data.max_prompt_length + data.max_response_length
    if sd.max_reprompt_len <= needed:
      yield (
        "actor.self_distillation.reprompt_truncation='error': a question and a demonstration may have "
        f'{needed} tokens (data.max_prompt_length and data.max_response_length), more than max_reprompt_len='
        f"{sd.max_reprompt_len}: the run ends at the first that have; raise that, or set reprompt_truncation='content'."
      )
  longest = max(data.max_prompt_length, sd.max_reprompt_len if taught else 0) + data.max_response_length
  if positions is not None and longest > positions:
    yield (
      f'A row may have {longest} tokens (a prompt and data.max_response_length), and the model was made for '
      f'max_position_embeddings={positions}: lower the limits.'
    )
