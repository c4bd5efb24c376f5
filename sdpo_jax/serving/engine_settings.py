"""The sizes of an engine, from the settings of a run."""

from __future__ import annotations

import copy
import dataclasses

from sdpo_jax.config import Config
from sdpo_jax.serving.engine import EngineSettings
from sdpo_jax.training.specs import declared_buckets


def engine_settings(config: Config) -> EngineSettings:
  """Return the sizes of an engine from the settings in `serve`; buckets that these lack are those of training."""
  serve, trained = config.serve, declared_buckets(config)

  def lengths(declared: tuple[int, ...], otherwise: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(declared or otherwise)))

  prompts, responses = lengths(serve.prompt_buckets, trained.prompt), lengths(serve.response_buckets, trained.response)
  names = {field.name for field in dataclasses.fields(EngineSettings)}
  given = {field.name: getattr(serve, field.name) for field in dataclasses.fields(serve) if field.name in names}
  given |= {
    'prompt_buckets': prompts,
    'teacher_buckets': lengths(serve.teacher_buckets, trained.reprompt),
    'response_buckets': responses,
    'score_buckets': lengths(serve.score_buckets, (prompts[-1] + responses[-1],)),
  }
  return EngineSettings(**given, memory_bytes=None if serve.memory_mb is None else serve.memory_mb * 2**20)


def as_run(config: Config) -> Config:
  """Return settings of a training run with the sizes of the engine, for code that expects settings of runs."""
  settings, run = engine_settings(config), copy.deepcopy(config)
  data, rollout, distillation = run.data, run.rollout, run.actor.self_distillation
  data.train_batch_size = run.actor.ppo_mini_batch_size = settings.rows
  rollout.n, rollout.max_batch_rows, rollout.decode_chunk = 1, settings.rows, settings.decode_chunk
  rollout.cache_dtype = 'auto'
  data.prompt_buckets, data.max_prompt_length = settings.prompt_buckets, settings.prompt_buckets[-1]
  data.response_buckets, data.max_response_length = settings.response_buckets, settings.response_buckets[-1]
  data.reprompt_buckets, distillation.max_reprompt_len = settings.teacher_buckets, settings.teacher_buckets[-1]
  distillation.teacher_context = 'reprompt'
  run.trainer.test_freq = 0
  return run
