"""The numbers that each setting may have, and their units: one table for checks and descriptions."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from sdpo_jax.config.fields import flatten, flatten_hints, takes_none
from sdpo_jax.errors import UserError
from sdpo_jax.objective_settings import ALPHA


@dataclasses.dataclass(frozen=True)
class Range:
  """A range of numbers; for a list, of each entry. None is always allowed if the type allows it."""

  at_least: float | None = None
  above: float | None = None
  at_most: float | None = None
  below: float | None = None
  also: tuple[float, ...] = ()  # Further values with a special meaning.
  unit: str = ''
  why: str = ''  # The reason, or the remedy, if the error message needs one.

  def holds(self, value: float) -> bool:
    """Return whether a number is within the range."""
    return value in self.also or (
      (self.at_least is None or value >= self.at_least)
      and (self.above is None or value > self.above)
      and (self.at_most is None or value <= self.at_most)
      and (self.below is None or value < self.below)
    )

  def __str__(self) -> str:
    low, high = (self.at_least, self.above), (self.at_most, self.below)
    if low != (None, None) and high != (None, None):
      opening, closing = '(['[self.above is None], ')]'[self.below is None]
      bounds = f'in {opening}{_written(_one(low))}, {_written(_one(high))}{closing}'
    elif self.above is not None:
      bounds = 'positive' if self.above == 0 else f'above {self.above:g}'
    else:
      bounds = f'at least {self.at_least:g}' if self.at_least is not None else ''
    return ' or '.join(part for part in (bounds, *map(str, self.also)) if part)


def _written(bound: float) -> str:
  return '2^63' if bound == 2**63 else f'{bound:g}'


def _one(pair: tuple[float | None, float | None]) -> float:
  return next(value for value in pair if value is not None)


POSITIVE, NOT_NEGATIVE = Range(above=0), Range(at_least=0)
TOKENS, BATCHES, SECONDS, MIB, BYTES, VERSIONS, REQUESTS = (
  Range(above=0, unit=unit)
  for unit in ('tokens', 'generation batches', 'seconds', 'MiB', 'bytes', 'versions', 'requests')
)
EVERY = Range(at_least=0, unit='generation batches')  # 0 stands for never or none.

_SAMPLING: Mapping[str, Range] = {
  'n': Range(above=0, unit='completions'),
  'temperature': NOT_NEGATIVE,
  'top_p': Range(above=0, at_most=1),
  'top_k': Range(above=0, also=(-1,), unit='tokens'),
  'min_p': Range(at_least=0, below=1),
}
_ASKED: Mapping[str, Range] = {
  'timeout_s': SECONDS,
  'concurrency': Range(above=0, unit='requests'),
  'retries': Range(at_least=0, unit='requests'),
}


def _in(section: str, ranges: Mapping[str, Range]) -> dict[str, Range]:
  return {f'{section}.{name}': found for name, found in ranges.items()}


# Setting → range. Conditions that depend on another setting are in `checks`.
RANGES: Mapping[str, Range] = {
  'seed': Range(at_least=0, below=2**63),
  'model.vocab_multiple': Range(above=0, unit='rows'),
  'model.lora.rank': Range(at_least=1, why='None trains all parameters'),
  'model.lora.alpha': POSITIVE,
  'model.cartridge.tokens': Range(at_least=1, unit='slots', why='None trains no cartridge'),
  'model.cartridge.num_frozen_tokens': Range(at_least=0, unit='slots'),
  'data.source_weights': Range(above=0, why='leave a source that is not wanted out of data.train_files'),
  'data.train_batch_size': Range(above=0, unit='questions'),
  'data.max_prompt_length': TOKENS,
  'data.max_response_length': TOKENS,
  'data.val_max_samples': Range(above=0, unit='rows'),
  'data.prompt_buckets': TOKENS,
  'data.response_buckets': TOKENS,
  'data.reprompt_buckets': TOKENS,
  **_in('rollout', _SAMPLING),
  'rollout.temperature': Range(above=0, why='the objective divides logits by it'),
  'rollout.steps_off': Range(at_least=0, at_most=8, unit='generation batches'),
  'rollout.max_batch_rows': Range(above=0, unit='completions'),
  'rollout.decode_chunk': TOKENS,
  **_in('val_kwargs', _SAMPLING),
  'actor.self_distillation.alpha': Range(at_least=ALPHA[0], at_most=ALPHA[1]),
  'actor.self_distillation.distillation_topk': TOKENS,
  'actor.self_distillation.is_clip': POSITIVE,
  'actor.self_distillation.teacher_update_rate': Range(at_least=0, at_most=1),
  'actor.self_distillation.teacher_restart_interval': Range(at_least=1, unit='generation batches'),
  'actor.self_distillation.max_reprompt_len': TOKENS,
  **_in('actor.self_distillation.teacher_endpoint', _ASKED),
  'actor.self_distillation.teacher_endpoint.top_k': Range(at_least=1, unit='tokens'),
  'actor.self_distillation.teacher_endpoint.batch_timeout_s': SECONDS,
  **_in('actor.self_distillation.feedback_endpoint', _ASKED),
  'actor.self_distillation.feedback_max_prompt_len': TOKENS,
  'actor.self_distillation.feedback_max_tokens': TOKENS,
  'actor.self_distillation.feedback_temperature': NOT_NEGATIVE,
  'actor.policy_loss.clip_ratio_low': NOT_NEGATIVE,
  'actor.policy_loss.clip_ratio_high': NOT_NEGATIVE,
  'actor.policy_loss.clip_ratio_c': Range(above=1),
  'actor.kl_loss_coef': NOT_NEGATIVE,
  'actor.loss_group_size': Range(above=0, unit='sequences'),
  'actor.loss_scale_factor': POSITIVE,
  'actor.ppo_mini_batch_size': Range(above=0, unit='questions'),
  'actor.ppo_micro_batch_size': Range(above=0, unit='sequences'),
  'actor.ppo_epochs': POSITIVE,
  'actor.logits_chunk_size': TOKENS,
  'algorithm.min_sdpo_examples': Range(at_least=0, unit='completions'),
  'algorithm.sdpo_coef': NOT_NEGATIVE,
  'algorithm.policy_gradient_coef': NOT_NEGATIVE,
  'algorithm.rollout_correction.rollout_is_threshold': POSITIVE,
  'optimizer.lr': NOT_NEGATIVE,
  'optimizer.lr_warmup_steps': EVERY,
  'optimizer.lr_decay_steps': BATCHES,
  'optimizer.min_lr_ratio': Range(at_least=0, at_most=1),
  'optimizer.betas': Range(at_least=0, below=1),
  'optimizer.eps': POSITIVE,
  'optimizer.momentum': Range(at_least=0, below=1),
  'optimizer.weight_decay': NOT_NEGATIVE,
  'optimizer.grad_clip': POSITIVE,
  'trainer.total_training_steps': BATCHES,
  'trainer.test_freq': EVERY,
  'trainer.save_freq': EVERY,
  'trainer.preemption_grace_s': SECONDS,
  'trainer.rollout_save_freq': EVERY,
  'trainer.record_top_tokens': Range(at_least=0, unit='tokens'),
  'trainer.sample_table_freq': EVERY,
  'trainer.sample_table_rows': Range(above=0, unit='samples'),
  'trainer.max_skipped_steps': EVERY,
  'trainer.watchdog_report_s': SECONDS,
  'trainer.watchdog_limit_s': SECONDS,
  'trainer.max_ckpt_to_keep': Range(above=0, unit='checkpoints'),
  'trainer.balance_partitions': POSITIVE,
  'alarms.max_rollbacks': NOT_NEGATIVE,
  'environments.max_ungraded_fraction': Range(at_least=0, at_most=1),
  'environments.grader_timeout_s': SECONDS,
  **_in('environments.http', _ASKED),
  **_in('environments.judge', _ASKED),
  'environments.judge.temperature': NOT_NEGATIVE,
  'environments.judge.max_tokens': TOKENS,
  'environments.sandbox.workers': Range(above=0, unit='processes'),
  'environments.sandbox.memory_mb': MIB,
  'environments.sandbox.file_mb': MIB,
  'environments.sandbox.output_mb': MIB,
  'serve.prompt_buckets': TOKENS,
  'serve.teacher_buckets': TOKENS,
  'serve.response_buckets': TOKENS,
  'serve.score_buckets': TOKENS,
  'serve.rows': Range(above=0, unit='completions'),
  'serve.training_rows': Range(above=0, unit='completions'),
  'serve.snapshots': VERSIONS,
  'serve.teachers': VERSIONS,
  'serve.slots': VERSIONS,
  'serve.topk': Range(above=0, at_most=256, unit='tokens'),
  'serve.decode_chunk': TOKENS,
  'serve.stop_ids': TOKENS,
  'serve.kept_prefixes': Range(at_least=0, unit='prompts'),
  'serve.logits_chunk_size': TOKENS,
  'serve.memory_mb': MIB,
  'serve.http.port': Range(at_least=0, at_most=65535),
  'serve.http.max_body_mb': MIB,
  'serve.http.deadline_s': SECONDS,
  'serve.http.read_timeout_s': SECONDS,
  'serve.http.max_requests': REQUESTS,
  'serve.http.idle_shutdown_s': SECONDS,
  'serve.http.drain_s': Range(at_least=0, unit='seconds'),
  'serve.store.keep_versions': Range(at_least=0, unit='versions'),
  'serve.store.sample_ttl_s': SECONDS,
  'serve.store.request_ttl_s': SECONDS,
  'serve.limits.tokens_per_minute': TOKENS,
  'serve.limits.burst_tokens': TOKENS,
  'serve.limits.max_waiting': REQUESTS,
  'serve.limits.max_adapters_per_owner': Range(above=0, unit='adapters'),
  'serve.limits.max_items': Range(above=0, unit='completions'),
  'serve.limits.max_steps': Range(above=0, unit='steps'),
  'serve.limits.max_samples': Range(above=0, unit='completions'),
  'serve.limits.max_logprobs': Range(at_least=0, unit='tokens'),
  'serve.limits.max_sessions_per_adapter': Range(above=0, unit='sessions'),
  'serve.limits.max_turns_per_session': Range(above=0, unit='turns'),
  'serve.limits.max_message_bytes': BYTES,
  'serve.limits.max_tools_bytes': BYTES,
  'serve.learning.learning_rate': POSITIVE,
  'serve.learning.steps': Range(above=0, unit='steps'),
  'serve.learning.alpha': Range(at_least=ALPHA[0], at_most=ALPHA[1]),
  'serve.learning.topk': TOKENS,
  'serve.learning.is_clip': POSITIVE,
  'serve.learning.jsd_alpha': Range(above=0, below=1),
  'serve.learning.clip_eps': Range(above=0, below=1),
  'serve.learning.jsd_weight': NOT_NEGATIVE,
  'serve.learning.betas': Range(at_least=0, below=1),
  'serve.learning.weight_decay': NOT_NEGATIVE,
  'serve.learning.max_grad_norm': POSITIVE,
  'serve.learning.average_rate': Range(at_least=0, at_most=1),
  'serve.learning.lag': VERSIONS,
  'serve.guards.max_kl_to_base': POSITIVE,
  'serve.guards.min_entropy': NOT_NEGATIVE,
  'serve.guards.max_loss_ratio': POSITIVE,
  'serve.guards.max_self_similarity': Range(above=0, at_most=1),
  'serve.guards.canary_tokens': TOKENS,
  # Independent of the length limits: a length that only the planner reads must not stop a run.
  'plan.mean_prompt': TOKENS,
  'plan.mean_completion': TOKENS,
  'plan.longest_completion': TOKENS,
  'plan.mean_reprompt': TOKENS,
  'plan.document_tokens': TOKENS,
  'plan.trained_fraction': Range(above=0, at_most=1),
  'plan.evaluation_questions': Range(above=0, unit='questions'),
  'plan.price_per_chip_hour': Range(at_least=0, unit='US dollars'),
  'mesh.fsdp': Range(above=0, also=(-1,), unit='devices'),
  'mesh.tensor': Range(above=0, also=(-1,), unit='devices'),
}


def check_ranges(config: Any) -> None:
  """Raise UserError for the first setting with a number outside its range; types must have been checked."""
  hints = flatten_hints(config)
  for name, value in flatten(config).items():
    allowed = RANGES.get(name)
    if allowed is None:
      continue
    for number in value if isinstance(value, list) else [value]:
      if number is not None and not allowed.holds(number):
        lie = 'lie' if str(allowed).startswith('in ') else 'be'
        none = ' or None' if takes_none(hints[name]) else ''
        why = f': {allowed.why}' if allowed.why else ''
        raise UserError(f'{name} must {lie} {allowed}{none}, not {number}{why}.')
