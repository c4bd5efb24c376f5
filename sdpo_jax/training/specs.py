"""Specs of objective, teacher, optimizer, update, batches and prompts, derived from a run's settings."""

from __future__ import annotations

import dataclasses
from typing import Any

from sdpo_jax.config import Config, OptimizerConfig
from sdpo_jax.data.prompts import ChatFormat, PromptSpec
from sdpo_jax.evaluation.evaluation_spec import EvaluationSpec
from sdpo_jax.learning.batching import BatchSpec
from sdpo_jax.learning.optimizer import OptimizerSpec
from sdpo_jax.learning.update import UpdateSpec
from sdpo_jax.objective.loss import ObjectiveConfig
from sdpo_jax.objective.objective_spec import ObjectiveSpec
from sdpo_jax.rollout.buckets import RESPONSES, Buckets, bucket_lengths
from sdpo_jax.teacher.averaging import TeacherSpec


def objective_spec(config: Config) -> ObjectiveSpec:
  """Return the terms that the loss of a run has."""
  actor = config.actor
  algorithm = config.algorithm
  sdpo, hybrid = actor.policy_loss.loss_mode == 'sdpo', algorithm.mode == 'hybrid'
  distillation = sdpo and not (hybrid and algorithm.sdpo_coef == 0)
  correction = algorithm.rollout_correction
  sampled, endpoint = not actor.self_distillation.full_logit_distillation, actor.self_distillation.teacher_endpoint
  stored = config.rollout.sampled_by == 'data'
  external = distillation and (endpoint.used or stored)
  support = actor.self_distillation.distillation_topk if stored else endpoint.top_k
  return ObjectiveSpec(
    distillation=distillation,
    policy_gradient=algorithm.policy_gradient_coef > 0 if sdpo and hybrid else not sdpo,
    entropy_bonus=bool(actor.entropy_coeff),
    kl_penalty=bool(actor.kl_loss_coef),
    on_policy=actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1,
    rollout_weights=correction.rollout_is is not None,
    reprompts=distillation and actor.self_distillation.teacher_context == 'reprompt',
    external_support=(1 if sampled else support) if external else None,
    samples_divergence=sampled,
    normalised_weights=correction.rollout_is_batch_normalize,
  )


def objective_config(config: Config) -> ObjectiveConfig:
  """Return the settings of the objective's terms."""
  sd = config.actor.self_distillation
  named = _named(ObjectiveConfig, sd, config.actor.policy_loss, config.algorithm.rollout_correction)
  tail = None if config.rollout.sampled_by == 'data' else sd.distillation_add_tail  # Stored log-probs stay as they are.
  return ObjectiveConfig(
    **named | {'alpha': float(sd.alpha), 'distillation_add_tail': tail},
    temperature=float(config.rollout.temperature),
    kl_kind=config.actor.kl_loss_type,
    chunk_size=config.actor.logits_chunk_size,
  )


def teacher_spec(config: Config) -> TeacherSpec:
  """Return which parameters an on-mesh teacher has, and how they follow the student."""
  sd = config.actor.self_distillation
  return TeacherSpec(sd.teacher_regularization, _plain(sd.teacher_update_rate), sd.teacher_restart_interval)


def optimizer_spec(config: OptimizerConfig, total_training_steps: int) -> OptimizerSpec:
  """Return the optimizer's settings; by default a decaying learning rate decays over all steps of the run."""
  decays = config.lr_scheduler_type != 'constant'
  return OptimizerSpec(
    **_named(OptimizerSpec, config),
    decay_steps=config.decay_steps(total_training_steps) if decays else None,
  )


def declared_buckets(config: Config) -> Buckets:
  """Return the length buckets that the settings declare, or else a few fractions of the length limits."""
  data, sd = config.data, config.actor.self_distillation
  prompt = bucket_lengths(data.prompt_buckets, data.max_prompt_length)
  own = sd.teacher_context == 'prompt'
  return Buckets(
    prompt=prompt,
    response=bucket_lengths(data.response_buckets, data.max_response_length, RESPONSES),
    reprompt=prompt if own else bucket_lengths(data.reprompt_buckets, sd.max_reprompt_len),
    paired=own or (not data.prompt_buckets and not data.reprompt_buckets),
  )


def longest_teacher_prompt(config: Config) -> int:
  """Return the largest bucket of the teacher's prompts, in tokens; the student's prompts if it is not re-prompted."""
  declared = declared_buckets(config)
  return (declared.reprompt if objective_spec(config).reprompts else declared.prompt)[-1]


def batch_spec(config: Config) -> BatchSpec:
  """Return how generation batches are divided into optimizer steps and micro-batches."""
  actor, algorithm, n = config.actor, config.algorithm, config.rollout.n
  return BatchSpec(
    terms=objective_spec(config),
    buckets=declared_buckets(config),
    samples=config.data.train_batch_size * n,
    step_samples=actor.ppo_mini_batch_size * n,
    rows=actor.ppo_micro_batch_size,
    partitions=config.trainer.balance_partitions if config.trainer.batch_order == 'balanced' else 1,
    packs=actor.pack_sequences,
    aggregation=actor.loss_agg_mode,
    group_size=actor.loss_group_size,
    scale=actor.loss_scale_factor or config.data.max_response_length,
    weights=(algorithm.sdpo_coef, algorithm.policy_gradient_coef, actor.entropy_coeff, actor.kl_loss_coef),
  )


def update_spec(config: Config) -> UpdateSpec:
  """Return the compile-time constants of a run's update."""
  return UpdateSpec(
    terms=objective_spec(config),
    objective=objective_config(config),
    optimizer=optimizer_spec(config.optimizer, config.trainer.total_training_steps),
    teacher=teacher_spec(config),
    teachers_support=config.actor.self_distillation.distillation_topk_of == 'teacher',
    seed=config.seed,
  )


def chat_format(config: Config) -> ChatFormat:
  """Return how messages are formatted and tokenised."""
  data = config.data
  thinking = {} if data.enable_thinking is None else {'enable_thinking': data.enable_thinking}
  variables = {**data.apply_chat_template_kwargs, **thinking}
  return ChatFormat(variables, data.split_special_tokens, config.model.cartridge.used)


def prompt_spec(config: Config) -> PromptSpec:
  """Return how the student's prompts are made from questions."""
  return PromptSpec(chat_format(config), config.data.max_prompt_length, config.data.filter_overlong_prompts)


def evaluation_spec(config: Config) -> EvaluationSpec:
  """Return how held-out questions are sampled and measured."""
  return EvaluationSpec(
    prompt_spec(config),
    config.val_kwargs.n,
    config.val_kwargs.method(),
    config.data.max_response_length,
    config.environments.max_ungraded_fraction,
    config.alarms.epistemic_words,
  )


def _named(spec: type, *sections: Any) -> dict[str, Any]:
  """Return the settings in these sections that have the names of a spec's fields."""
  names = {field.name for field in dataclasses.fields(spec)}
  return {name: _plain(value) for section in sections for name, value in vars(section).items() if name in names}


def _plain(value: Any) -> Any:
  """Return a hashable value: a NumPy or JAX scalar as Python's, a list as a tuple, anything else unchanged."""
  if isinstance(value, list | tuple):
    return tuple(map(_plain, value))
  return value.item() if hasattr(value, 'item') else value
