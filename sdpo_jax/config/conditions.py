"""When settings are read: one that is changed from its default and not read is refused, or announced.

A setting in neither table is read by every run, or by the service (`serve`) or the planner (`plan`). A new one that is
read on a condition is another name in a line; `tests/config/test_conditions.py` finds one that is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import itertools
from typing import Any, NamedTuple

from sdpo_jax.config.fields import flatten, is_listed
from sdpo_jax.config.optimizers import READS
from sdpo_jax.config.schema import Sections
from sdpo_jax.errors import UserError, short_repr

Values = Mapping[str, Any]  # All settings by name, as `flatten` returns them.


class Condition(NamedTuple):
  """What must hold for settings to be read."""

  holds: Callable[[Values], bool]
  otherwise: str  # Why they have no effect where it does not hold, and a remedy.
  of: str = ''  # The setting that decides, whose value is quoted before.


Table = Sequence[tuple[Condition, str]]  # Conditions, and the settings and sections that need them.
_SD = 'actor.self_distillation'
_SECTIONS = vars(Sections()).keys()


def _full(names: str) -> list[str]:
  """Return the names in a text, in which those of `actor.self_distillation` are written without it."""
  return [name if name.partition('.')[0] in _SECTIONS else f'{_SD}.{name}' for name in names.split()]


def _of(section: str, names: str) -> str:
  return ' '.join(f'{section}.{name}' for name in names.split())


def _set(name: str, *wanted: Any, note: str = '') -> Condition:
  """Return the condition that a setting has one of the wanted values or, if none are given, is on: not empty or 0."""
  [of] = _full(name)
  remedy = f'set that to {" or ".join(map(repr, wanted))}' if wanted else 'change that'
  return Condition(lambda v: v[of] in wanted if wanted else _is_on(v[of]), f'{note}: {remedy}', of)


def _is_on(value: Any) -> bool:
  return bool(value.strip() if isinstance(value, str) else value)


def _off(name: str, note: str) -> Condition:
  """Return the condition that a setting is empty or 0."""
  [of] = _full(name)
  return Condition(lambda v: not _is_on(v[of]), f', {note}: empty that', of)


def _any(*conditions: Condition, otherwise: str) -> Condition:
  return Condition(lambda v: any(condition.holds(v) for condition in conditions), otherwise)


def _all(*conditions: Condition, otherwise: str = '') -> Condition:
  return Condition(lambda v: all(condition.holds(v) for condition in conditions), otherwise)


_SDPO = _set('actor.policy_loss.loss_mode', 'sdpo', note=', which has no teacher')
_HYBRID = _set('algorithm.mode', 'hybrid')
_ZERO = 'with algorithm.sdpo_coef=0, which leaves no teacher: raise sdpo_coef'
_TAUGHT = _any(_set('algorithm.mode', 'pure_sdpo'), _set('algorithm.sdpo_coef'), otherwise=_ZERO)
_REPROMPTED = _set('teacher_context', 'reprompt')
_GRADIENT = _any(
  _set('actor.policy_loss.loss_mode', 'vanilla'),
  _all(_HYBRID, _set('algorithm.policy_gradient_coef')),
  otherwise="without a policy gradient: set actor.policy_loss.loss_mode to 'vanilla', or algorithm.mode to 'hybrid'",
)
_FULL = _set('full_logit_distillation')
_NO_TOPK = f'as there is no top K: set {_SD}.distillation_topk and full_logit_distillation=True'
_TOPK = _all(_FULL, _set('distillation_topk'), otherwise=_NO_TOPK)
_ENDPOINT, _WRITTEN = _set('teacher_endpoint.url'), _set('feedback_model', 'endpoint')
_NO_ENDPOINT = _off('teacher_endpoint.url', "whose answers name the teacher's tokens (teacher_endpoint.top_k)")
_WRITES = _set('feedback_model', 'self', 'endpoint', note=', as nobody writes feedback')
_ADAPTER = _any(_set('model.lora.rank'), _set('model.lora.path'), otherwise='without an adapter: set model.lora.rank')
_SLOTS = _set('model.cartridge.tokens'), _set('model.cartridge.path')
_CARTRIDGE = _any(*_SLOTS, otherwise='without a cartridge: set model.cartridge.tokens')
_SHOWN, _FAILED = _set('include_demonstration'), _set('include_failed_attempt')
_SAID = _set('include_environment_feedback')
_ASKED = _set('rollout.sampled_by', 'student', 'teacher', note=', whose log-probs are stored')
_TEACHES = _SDPO, _TAUGHT, _ASKED
_BEGINS = _all(_set('model.cartridge.initializer', 'document'), _off('model.cartridge.path', ''))
_STEP = 'actor.ppo_mini_batch_size'
_ONE_STEP = 'with one optimizer step per generation batch, in which the ratio is 1: lower actor.ppo_mini_batch_size'
_SEVERAL = Condition(lambda v: v[_STEP] != v['data.train_batch_size'] or v['actor.ppo_epochs'] > 1, _ONE_STEP)
_NO_GROUPS = 'as nothing compares the completions of a question: take another objective'
_CLIPS = _of('actor.policy_loss', 'clip_ratio_low clip_ratio_high clip_ratio_c')

_DATABASE = 'serve.store.database'

# What no command reads is an error.
REFUSED: Table = (
  (_ADAPTER, 'model.lora'),
  (
    _off('model.lora.path', 'which determines rank, alpha and matrices of the adapter'),
    _of('model.lora', 'rank alpha use_rslora target_modules exclude_modules rank_pattern alpha_pattern'),
  ),
  (_CARTRIDGE, 'model.cartridge plan.document_tokens trainer.push_url'),
  (_set('trainer.push_url'), _of('trainer', 'push_freq push_name push_key_env')),
  (_set('rollout.max_staleness'), 'rollout.carried_cache'),
  (
    _off('model.cartridge.path', 'which determines slots and windows of the cartridge'),
    _of('model.cartridge', 'tokens num_frozen_tokens initializer init_text init_turn_end sliding_window'),
  ),
  (_set('model.cartridge.initializer', 'text'), 'model.cartridge.init_text'),
  (_set('model.cartridge.initializer', 'document', 'text'), 'model.cartridge.init_turn_end'),
  (_set('model.cartridge.document'), _of('model.cartridge', 'divide_document teacher_scope')),
  (_set('model.cartridge.distractors'), 'model.cartridge.max_distractors'),
  (_set('model.cartridge.path'), 'model.cartridge.positions'),
  (_set('model.cartridge.teacher_scope', 'chunk'), _of('model.cartridge', 'max_chunk chunks_held')),
  (_SDPO, 'teacher_model teacher_endpoint.url feedback_model algorithm.mode algorithm.min_sdpo_examples'),
  (_TAUGHT, 'teacher_model teacher_endpoint.url feedback_model trainer.test_divergence rollout.sampled_by'),
  (_TAUGHT, 'algorithm.min_sdpo_examples'),
  (_REPROMPTED, 'feedback_model algorithm.min_sdpo_examples'),
  (_HYBRID, 'algorithm.sdpo_coef algorithm.policy_gradient_coef'),
  (_TOPK, 'distillation_topk_of'),
  (_NO_ENDPOINT, 'distillation_topk_of'),
  (_ASKED, 'distillation_topk_of trainer.test_divergence'),
  (_ENDPOINT, _of('teacher_endpoint', 'dialect model tokenizer top_k api_key_env')),
  (_WRITTEN, _of('feedback_endpoint', 'url model api_key_env')),
  (_WRITES, 'feedback_max_prompt_len feedback_max_tokens feedback_temperature feedback_keeps_output'),
  (_set('teacher_regularization', 'restart'), 'teacher_restart_interval'),
  *(
    (_set('optimizer.name', *(optimizer for optimizer in READS if name in READS[optimizer])), f'optimizer.{name}')
    for name in dict.fromkeys(itertools.chain(*READS.values()))
  ),
  (_set('optimizer.lr_scheduler_type', 'cosine', 'linear'), 'optimizer.lr_decay_steps optimizer.min_lr_ratio'),
  (_set('serve.limits.tokens_per_minute'), 'serve.limits.burst_tokens'),
  (_set('serve.cartridges'), 'serve.cartridge_slots serve.cartridge_window serve.cartridge_sources'),
  (
    Condition(lambda v: (v[_DATABASE] or '').startswith('postgresql://'), ', without replicas: change that', _DATABASE),
    'serve.http.url',
  ),
)
# What another command or objective may read, and configs inherit, is said when a run starts.
ANNOUNCED: Table = (
  *((condition, f'{_SD} data.reprompt_buckets') for condition in (_SDPO, _TAUGHT)),
  (
    _REPROMPTED,
    'max_reprompt_len reprompt_truncation teach_successes dont_reprompt_on_self_success demonstration thinking_rule '
    'remove_thinking_from_demonstration include_demonstration include_failed_attempt include_environment_feedback '
    'environment_feedback_only_without_solution reprompt_template solution_template feedback_template '
    'attempt_template data.reprompt_buckets',
  ),
  (_SHOWN, 'dont_reprompt_on_self_success demonstration solution_template environment_feedback_only_without_solution'),
  (
    _any(_SHOWN, _FAILED, otherwise=f'as no attempt is shown: set {_SD}.include_demonstration'),
    'remove_thinking_from_demonstration thinking_rule',
  ),
  (
    _any(_SAID, _WRITES, otherwise=f'as no feedback is shown: set {_SD}.include_environment_feedback'),
    'feedback_template environment_feedback_only_without_solution',
  ),
  (_FAILED, 'attempt_template'),
  (_WRITES, 'feedback_prompt_template'),
  (_SAID, 'feedback_keeps_output'),
  (_ENDPOINT, 'teacher_endpoint'),
  (_WRITTEN, 'feedback_endpoint'),
  (_NO_ENDPOINT, 'distillation_topk topk_method'),
  (_ASKED, 'topk_method distillation_add_tail rollout.top_p rollout.top_k rollout.min_p'),
  (_FULL, 'distillation_topk teacher_endpoint.top_k'),
  (_TOPK, 'topk_method'),
  (_any(_TOPK, _all(_FULL, _ENDPOINT), otherwise=_NO_TOPK), 'distillation_add_tail'),
  (_set('teacher_regularization', 'ema', 'lora_ema', 'trust-region'), 'teacher_update_rate'),
  (_any(_SEVERAL, Condition(lambda v: (v[f'{_SD}.is_clip'] or 1) < 1, ''), otherwise=_ONE_STEP), 'is_clip'),
  (_GRADIENT, _CLIPS + ' actor.policy_loss.norm_adv_by_std_in_grpo'),
  # A gradient at a bound of 0 is another one than inside it.
  (_any(_SEVERAL, *(_set(name, 0) for name in _CLIPS.split()), otherwise=_ONE_STEP), _CLIPS),
  *((each._replace(holds=_any(each, _BEGINS, otherwise='').holds), 'model.cartridge.document') for each in _TEACHES),
  *((each, _of('model.cartridge', 'divide_document teacher_scope max_chunk chunks_held')) for each in _TEACHES),
  (_set('actor.kl_loss_coef'), 'actor.kl_loss_type'),
  (_set('actor.loss_agg_mode', 'seq-mean-token-sum-norm'), 'actor.loss_scale_factor'),
  (_set('algorithm.rollout_correction.rollout_is', 'token'), 'algorithm.rollout_correction'),
  (_set('optimizer.weight_decay'), 'optimizer.weight_decay_exclude'),
  (
    _set('trainer.test_freq'),
    'trainer.val_before_train trainer.test_divergence trainer.test_perplexity',
  ),
  (_set('val_kwargs.temperature', note=', which is greedy'), _of('val_kwargs', 'top_p top_k min_p')),
  (_set('trainer.batch_order', 'balanced'), 'trainer.balance_partitions'),
  (_set('trainer.sample_table_freq'), 'trainer.sample_table_rows'),
  (_set('trainer.rollout_save_freq'), 'trainer.record_top_tokens'),
  (_set('alarms.rules'), 'alarms.action alarms.max_rollbacks'),
  (_set('alarms.action', 'rollback'), 'alarms.max_rollbacks'),
  (_set('environments.http.url'), 'environments.http'),
  (_set('environments.judge.base_url'), 'environments.judge'),
  (_any(_GRADIENT, _all(_SDPO, _TAUGHT, _REPROMPTED), otherwise=_NO_GROUPS), 'data.group_duplicates'),
)
# Of sections above; metrics of completions and the switches themselves are in every run.
_READ = (f'{_SD}.success_reward_threshold', 'algorithm.rollout_correction.rollout_is')
DEFAULTS = flatten(Sections())


def unread(values: Values, table: Table = (*REFUSED, *ANNOUNCED)) -> Iterator[tuple[Condition, list[str]]]:
  """Yield each condition that does not hold, with the settings that are not read because of it; a setting only once."""
  seen = set(_READ)
  for condition, names in table:
    if not condition.holds(values):
      yield condition, [name for name in _listed(names) if name not in seen]
      seen.update(_listed(names))


@functools.cache
def _listed(names: str) -> list[str]:
  """Return the settings that a row of a table lists, by itself or with their section."""
  return [name for name in DEFAULTS if is_listed(name, _full(names))]


def _sentences(values: Values, table: Table) -> Iterator[str]:
  # Addresses are not quoted, since they can contain a key.
  quoted = {name: '' if values[name] and name.endswith('url') else f'={short_repr(values[name])}' for name in DEFAULTS}
  for condition, idle in unread(values, table):
    names = [name for name in idle if values[name] != DEFAULTS[name]]
    said, decides = ' and '.join(name + quoted[name] for name in names), condition.of
    if names:
      left = f'it at {short_repr(DEFAULTS[names[0]])}' if len(names) == 1 else 'them at their defaults'
      why = f'{decides and "with "}{decides}{quoted.get(decides, "")}{condition.otherwise}'
      yield f'{said} {"has" if len(names) == 1 else "have"} no effect {why}, or leave {left}.'


def refuse_unread(config: Sections) -> None:
  """Raise UserError if a setting of `REFUSED` is changed and not read."""
  for sentence in _sentences(flatten(config), REFUSED):
    raise UserError(sentence)


def unread_remarks(config: Sections) -> list[str]:
  """Return a sentence for each condition of `ANNOUNCED` that does not hold, if settings that need it are changed."""
  return list(_sentences(flatten(config), ANNOUNCED))
