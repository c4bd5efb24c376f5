"""Access to settings by dotted name and command-line text, and their comparison with those of a saved run."""

from __future__ import annotations

from collections.abc import Sequence
import copy
import dataclasses
from typing import Any
import urllib.parse

from sdpo_jax.config.conditions import DEFAULTS, unread
from sdpo_jax.config.fields import check_types, flatten, is_listed, parse, parse_entry, types_of, unknown_setting
from sdpo_jax.config.validated import Config
from sdpo_jax.errors import UserError

# Sections about servers that a run calls.
SERVERS = (
  'environments.http',
  'environments.judge',
  'actor.self_distillation.teacher_endpoint',
  'actor.self_distillation.feedback_endpoint',
)
# Settings that may differ when a run is resumed: they do not change what is learned, bit for bit.
RESUMABLE = (
  'name',
  'model.chat_template',  # Only the template's path; its content is compared with the tokenizer.
  'model.cartridge.document',  # Likewise for the paths of these texts.
  'model.cartridge.init_text',
  'model.cartridge.distractors',
  'model.cartridge.chunks_held',
  'val_kwargs',
  'data.val_files',
  'data.val_max_samples',
  'trainer.total_training_steps',
  'trainer.test_freq',
  'trainer.val_before_train',
  'trainer.test_divergence',
  'trainer.test_perplexity',
  'trainer.save_freq',
  'trainer.max_ckpt_to_keep',
  'trainer.max_skipped_steps',
  'trainer.preemption_grace_s',
  'trainer.keep_starting_state',
  'trainer.best_metric',
  'trainer.rollout_save_freq',
  'trainer.record_top_tokens',
  'trainer.sample_table_freq',
  'trainer.sample_table_rows',
  'trainer.tensorboard',
  'trainer.wandb_project',
  *(f'trainer.push_{name}' for name in ('url', 'freq', 'name', 'key_env')),
  'trainer.profile_steps',
  'trainer.accept_changes',
  'trainer.watchdog_report_s',
  'trainer.watchdog_limit_s',
  'alarms',
  'environments.max_ungraded_fraction',
  'environments.sandbox.workers',
  'environments.sandbox.allow_unsandboxed',
  # How a grader, a teacher or a writer of feedback is called, not how it judges.
  *(f'{server}.{name}' for server in SERVERS for name in ('timeout_s', 'retries', 'concurrency')),
  *(f'{server}.api_key_env' for server in SERVERS if server != 'environments.http'),
  'environments.http.authorization_env',
  'actor.self_distillation.teacher_endpoint.batch_timeout_s',
  'actor.self_distillation.teacher_endpoint.tokenizer',  # Compared with the student's at every start.
  'serve',
  'plan',
)

EXTENDED = 'Completions of the first steps after the old end are not drawn as far ahead as in an uninterrupted run'
# Settings that decide, with samples that carry over, which of them a step learns from: evaluations share their slots,
# and buckets and attention how often slots are filled again.
EVALUATION = ('trainer.test_freq', 'val_kwargs', 'data.val_max_samples')  # The questions are compared by content.
ORDERING = ('rollout.max_batch_rows', 'rollout.decode_chunk', 'mesh', 'data.prompt_buckets', 'model.attention')
ORDERING += EVALUATION
ROUNDING = 'From here on results may differ from those of an uninterrupted run in rounding'
# Further settings that may differ, but are announced if they do: the consequence of a change → the settings.
NAMED: dict[str, tuple[str, ...]] = {
  ROUNDING: (
    'data.prompt_buckets',
    'data.response_buckets',
    'data.reprompt_buckets',
    'rollout.max_batch_rows',
    'rollout.decode_chunk',
    'actor.ppo_micro_batch_size',
    'actor.logits_chunk_size',
    'actor.pack_sequences',
    'model.remat',
    'model.attention',
    'model.cartridge.divide_document',
    'mesh',
  ),
  'From here on other completions may go ungraded': ('environments.score_range', 'environments.grader_timeout_s'),
  'From here on programs run in another sandbox': ('environments.sandbox.mechanism',),
  'What is served there is taken to be the same environments.judge.model': ('environments.judge.base_url',),
  'What is served there is taken to be the same actor.self_distillation.teacher_endpoint.model': (
    'actor.self_distillation.teacher_endpoint.url',
  ),
  'What is served there is taken to be the same actor.self_distillation.feedback_endpoint.model': (
    'actor.self_distillation.feedback_endpoint.url',
  ),
}

# Entry of trainer.accept_changes (checks.CHANGES) → the settings that may then differ, besides the contents of the
# files that they name.
ACCEPTABLE: dict[str, tuple[str, ...]] = {
  'tokenizer': (),
  'model': (
    'model.path',
    'model.lora.path',
    'model.cartridge.path',
    'actor.self_distillation.teacher_model',
  ),
  'data': ('data.train_files', 'data.environment'),
  'graders': ('environments',),
  'evaluation': EVALUATION,
}

# Hints added to a refused setting whose name alone does not suggest a remedy.
HINTS = {
  'optimizer.lr_decay_steps': (
    ' (None means trainer.total_training_steps; set it to what it was, and steps that are added have the last rate)'
  )
}

# Values that reproduce the behaviour from before these settings existed, if they are not the defaults.
BEFORE = {
  'actor.self_distillation.thinking_rule': 'closed',
  'data.split_special_tokens': False,
  'optimizer.skip_empty_steps': False,
}


@dataclasses.dataclass(frozen=True)
class Differences:
  """The settings in which a resumed run differs from the saved one, with a phrase for each."""

  refused: list[str]  # Settings that change what is learned.
  accepted: list[str]  # Settings that change what is learned, but are accepted by trainer.accept_changes.
  named: dict[str, list[str]]  # Settings that may differ, by the consequence of a change, as in `NAMED`.
  ways_out: list[str]  # Entries of trainer.accept_changes that would accept all refused ones; empty: none would.


def differences(saved: dict[str, Any], config: Config) -> Differences:
  """Return how `config` differs from a saved run's JSON, except in `RESUMABLE` settings.

  Settings that did not exist when the run was saved have the values of `BEFORE`, or else their defaults. Those that
  neither of the two reads may differ, too. Parts of addresses that may contain a key are left out of the phrases.
  """
  known = flatten(saved, like=Config())
  old = _as_meant(flatten(Config()) | BEFORE | known)
  new = _as_meant(flatten(config))
  accepted = [setting for entry in config.trainer.accept_changes for setting in ACCEPTABLE[entry]]
  found = Differences([], [], {}, [])
  ways: list[str | None] = []
  total = 'trainer.total_training_steps'
  carries = bool(config.rollout.max_staleness)
  if (config.rollout.steps_off or carries) and old[total] < new[total]:
    found.named[EXTENDED] = [f'{total} was {old[total]} and is now {new[total]}']
  before, now = ({name for _, idle in unread(settings) for name in idle} for settings in (old, new))
  for key in sorted((old.keys() | new.keys()) - (before & now)):
    orders = carries and is_listed(key, ORDERING)
    if (is_listed(key, RESUMABLE) and not orders) or old.get(key, ...) == new.get(key, ...):
      continue
    phrase = f'{key} was {_shown(key, old)} and is now {_shown(key, new)}'
    meaning = next((meaning for meaning, settings in NAMED.items() if is_listed(key, settings)), None)
    if meaning is not None and not orders:
      found.named.setdefault(meaning, []).append(phrase)
    elif is_listed(key, accepted):
      found.accepted.append(phrase)
    else:
      hint = f' (newer than the run: --config.{key}={str(old[key]).lower()} goes on as before)'
      found.refused.append(phrase + (hint if key in BEFORE.keys() - known.keys() else HINTS.get(key, '')))
      ways.append(next((entry for entry, settings in ACCEPTABLE.items() if is_listed(key, settings)), None))
  found.ways_out.extend(() if None in ways else dict.fromkeys(ways))
  return found


# Setting → equivalent values: alias → canonical value.
ALIASES = {'actor.self_distillation.teacher_regularization': {'lora_ema': 'ema'}}


def _as_meant(settings: dict[str, Any]) -> dict[str, Any]:
  """Return settings by name, normalised so that settings that mean the same are equal.

  The number of steps over which a learning rate decays is filled in, and aliases of values are replaced.
  """
  settings = settings | {name: same.get(settings[name], settings[name]) for name, same in ALIASES.items()}
  decays = settings['optimizer.lr_scheduler_type'] != 'constant'
  if not decays or settings['optimizer.lr_decay_steps'] is not None:
    return settings
  return settings | {'optimizer.lr_decay_steps': settings['trainer.total_training_steps']}


def _shown(key: str, settings: dict[str, Any]) -> str:
  """Return a setting as quoted in a sentence: an address without user, password, query and fragment."""
  value = settings.get(key, 'not there')
  if key.rpartition('.')[2] not in ('url', 'base_url') or not isinstance(value, str):
    return repr(value)
  try:
    parts = urllib.parse.urlsplit(value)
  except ValueError:
    return 'another address'
  public = parts._replace(netloc=parts.netloc.rpartition('@')[2], query='', fragment='')
  hidden = ' (with parts that are not shown)' if public != parts else ''
  return repr(urllib.parse.urlunsplit(public)) + hidden


# Setting → a string that is a value of this setting, whereas it stands for None in others.
TEXTS = {'data.environment': 'none'}  # The grader of ungraded prompts; None itself is written None.


def override(config: Config, name: str, text: str) -> None:
  """Set the setting with dotted `name` from command-line text, e.g. ('optimizer.lr', '1e-6').

  The type of the setting decides how the text is read: as None, true or false, a number, a string, a list with commas,
  in brackets or not, or a JSON object. One key of an object is set by its name after the setting's:
  ('data.apply_chat_template_kwargs.enable_thinking', 'false').

  Raises:
    UserError: the setting is unknown (similar names are listed), or the text does not have its type.
  """
  target, leaf = _place(config, name)
  if isinstance(target, dict):
    target[leaf] = parse_entry(text)
    return
  hints = _hints(target)
  if leaf not in hints:
    raise unknown_setting(config, name)
  if dataclasses.is_dataclass(hints[leaf]):
    raise UserError(
      f'{name} is a section, not a setting: name one inside it, e.g. '
      f'--config.{name}.{dataclasses.fields(hints[leaf])[0].name}=…'
    )
  setattr(target, leaf, text if text == TEXTS.get(name) else parse(name, text, hints[leaf]))


def assign(config: Config, name: str, value: Any) -> None:
  """Set the setting with dotted `name` to a value; a text is parsed as in `override`.

  Raises:
    UserError: there is no such setting, or the text does not have its type.
  """
  if isinstance(value, str):
    override(config, name, value)
    return
  target, leaf = _place(config, name)
  if leaf not in _hints(target):
    raise unknown_setting(config, name)
  setattr(target, leaf, tuple(value) if isinstance(value, list) else value)


def reset_unread(config: Config) -> Config:
  """Return the settings after setting what a run does not read to its default; for a config that varies another."""
  for _, idle in unread(flatten(config)):
    for name in idle:
      assign(config, name, copy.deepcopy(DEFAULTS[name]))
  return config


def _place(config: Config, name: str) -> tuple[Any, str]:
  """Return the section or JSON object that holds the setting with dotted `name`, and its name in there."""
  target, leaf = config, name
  while '.' in leaf and not isinstance(target, dict):
    section, leaf = leaf.split('.', maxsplit=1)
    target = getattr(target, section, None)
  return target, leaf


def _hints(section: Any) -> dict[str, Any]:
  """Return the types in a section by name; none in anything else."""
  return types_of(type(section)) if dataclasses.is_dataclass(section) else {}


def with_limits(config: Config, prompt: int, buckets: Sequence[int], response: int, **rollout: Any) -> Config:
  """Return settings with other limits of prompts (and their buckets) and completions, and others of `rollout`."""
  data = dataclasses.replace(
    config.data,
    max_prompt_length=prompt,
    prompt_buckets=tuple(buckets),
    max_response_length=response,
    response_buckets=(response,),
  )
  return dataclasses.replace(config, data=data, rollout=dataclasses.replace(config.rollout, **rollout))


def from_dict(values: dict[str, Any]) -> Config:
  """Return the configuration with the JSON `values` (the `config.json` of a run).

  Missing settings are treated as in `differences`.

  Raises:
    UserError: a setting is unknown to this version, or its value has the wrong type.
  """
  config = Config()
  for name, value in (BEFORE | flatten(values, like=Config())).items():
    target, leaf = _place(config, name)
    if not dataclasses.is_dataclass(target) or not hasattr(target, leaf):
      raise UserError(
        f'config.json of the run holds {name!r}, which this version does not know: use the version that wrote it.'
      )
    setattr(target, leaf, tuple(value) if isinstance(value, list) else value)
  check_types(config)
  return config
