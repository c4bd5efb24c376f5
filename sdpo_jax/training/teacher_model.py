"""A separate, frozen model as the teacher, on the run's mesh beside the student."""

from __future__ import annotations

import dataclasses

import jax

from sdpo_jax.config import CartridgeConfig, Config, LoraConfig, ModelConfig
from sdpo_jax.distributed.mesh import check_divides
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface, same_tokenizer
from sdpo_jax.models.decoder import DecoderPolicy
from sdpo_jax.teacher.signal import Teacher
from sdpo_jax.training.documents import context_length
from sdpo_jax.training.specs import longest_teacher_prompt, objective_spec

SETTING = 'actor.self_distillation.teacher_model'


def is_used(config: Config) -> bool:
  """Return whether the settings name a separate teacher model and the loss needs a teacher."""
  return bool(config.actor.self_distillation.teacher_model) and objective_spec(config).needs_teacher


def model_config(config: Config) -> ModelConfig:
  """Return the settings for loading the teacher: the student's, with the teacher's path and without adapters."""
  path = config.actor.self_distillation.teacher_model
  return dataclasses.replace(
    config.model, path=path, chat_template=None, lora=LoraConfig(), cartridge=CartridgeConfig()
  )


def check(config: Config) -> None:
  """Check a teacher's directory, except for its weights.

  Raises:
    UserError: it cannot be read, its token ids mean other tokens than the student's, its vocabulary is smaller, or it
      has fewer positions than the longest row.
  """
  same_tokenizer.check_teacher(config.model.path, config.actor.self_distillation.teacher_model, SETTING)
  read_policy(config)


def read_policy(config: Config) -> DecoderPolicy:
  """Return the policy of the teacher, as its config.json describes it.

  Raises:
    UserError: as in `check`, except for the tokenizer.
  """
  settings = model_config(config)
  policy = huggingface.read_policy(settings.path, settings)
  student = huggingface.read_policy(config.model.path, config.model)
  if policy.vocab_size < student.vocab_size:
    raise UserError(
      f'{SETTING}={settings.path} knows {policy.vocab_size} tokens and the student {student.vocab_size}, so that it '
      'cannot teach the others: name a teacher whose vocab_size (config.json) is at least as large.'
    )
  positions, prompt = context_length(settings.path), longest_teacher_prompt(config)
  longest = prompt + config.data.max_response_length
  if positions is not None and longest > positions:
    raise UserError(
      f'{SETTING}={settings.path} has {positions} positions (max_position_embeddings), but a prompt of {prompt} tokens '
      f'with a completion of {config.data.max_response_length} needs {longest}: lower the limits, or choose a teacher '
      'with a longer context.'
    )
  return policy


def load(config: Config, mesh: jax.sharding.Mesh) -> Teacher:
  """Return the teacher with its parameters, in `model.dtype`, on the mesh of the run.

  Args:
    config: settings with such a teacher.
    mesh: mesh of the run.

  Raises:
    UserError: the directory cannot be read, or the mesh does not divide the model.
  """
  policy = read_policy(config)
  check_divides(mesh, [(each.name, each.axes, each.shape) for each in policy.parameter_table()])
  return Teacher(*huggingface.load_frozen(config.actor.self_distillation.teacher_model, model_config(config), mesh))
