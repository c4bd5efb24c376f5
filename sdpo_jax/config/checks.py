"""Checks of settings; each error message names the setting and a remedy.

Types are checked first and ranges (`ranges`) next, so that all other checks can rely on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import fractions
import math
import re

from sdpo_jax.config.addresses import check_address, is_loopback
from sdpo_jax.config.conditions import refuse_unread
from sdpo_jax.config.fields import MALFORMED_PATTERN, check_types, did_you_mean, fields_of, is_number
from sdpo_jax.config.locations import paths
from sdpo_jax.config.ranges import check_ranges
import sdpo_jax.config.rewards as rewards
import sdpo_jax.config.schema as schema
from sdpo_jax.errors import UserError
from sdpo_jax.objective_settings import check_divergence

TEMPLATE_FIELDS = {
  'reprompt_template': ('prompt', 'solution', 'feedback'),
  'solution_template': ('successful_previous_attempt',),
  'feedback_template': ('feedback_raw',),
  'attempt_template': ('attempt',),
}
# Arguments of the function that applies a chat template, which are not variables of the template.
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
FEEDBACK_FIELDS = ('attempt', 'prompt', 'output')
FIREWORKS_MOST = 5  # Maximum number of log-probs per position.
JUDGE_FIELDS = ('completion', 'question', 'ground_truth', 'score')
# Changes a resumed run may accept, see overrides.ACCEPTABLE.
CHANGES = ('tokenizer', 'model', 'data', 'graders', 'evaluation')
LONGEST_ROUND = 10**6  # Maximum number of turns in a round, in which every source has exactly its share.
_DISTILLATION = 'actor.self_distillation'


def check(config: schema.Sections, *, trains: bool = True) -> None:
  """Raise UserError for the first setting that is out of range or contradicts another.

  Args:
    config: settings.
    trains: whether they are for a training run, which needs data.
  """
  check_types(config)
  check_ranges(config)
  refuse_unread(config)
  _check_model(config.model)
  _check_cartridge(config, trains)
  _check_writer(config)
  _check_staleness(config)
  _check_measured_divergence(config)
  _check_data(config, trains)
  _check_teacher(config)
  _check_algorithm(config)
  _check_written_feedback(config)
  _check_gathering(config)
  _check_batches(config)
  _check_optimizer(config.optimizer)
  _check_trainer(config, trains)
  _check_environments(config.environments)
  _check_alarms(config)
  _check_mesh(config.mesh)
  _check_serve(config)


def _check_model(model: schema.ModelConfig) -> None:
  _require(bool(model.path), 'model.path is empty: set it to a Hugging Face model directory.')
  _require(
    model.chat_template != '',
    "model.chat_template is empty: name a file with a chat template, or leave it at None for the tokenizer's own.",
  )
  lora = model.lora
  _require(
    bool(lora.target_modules), 'model.lora.target_modules is empty: name the matrices with factors, or all-linear.'
  )
  for setting in ('target_modules', 'exclude_modules'):
    _require(
      all(getattr(lora, setting)),
      f'model.lora.{setting} holds an empty pattern, which is found in every name: remove it.',
    )
  for setting, kind, what in (
    ('rank_pattern', int, 'a whole number of at least 1'),
    ('alpha_pattern', float, 'positive'),
  ):
    for pattern, value in getattr(lora, setting).items():
      number = isinstance(value, (int, kind)) and is_number(value) and value > 0
      _require(number and bool(pattern), f'model.lora.{setting}: {pattern!r}: {value!r} must be {what}.')


def _check_cartridge(config: schema.Sections, trains: bool) -> None:
  cartridge, sd = config.model.cartridge, config.actor.self_distillation
  tokens, documents = cartridge.tokens, paths(cartridge.document)
  if not cartridge.used:
    return
  _require(
    not config.model.lora.used,
    'model.cartridge and model.lora are both set, and a run trains one of them: leave the other out.',
  )
  _require(
    tokens is None or cartridge.num_frozen_tokens < tokens,
    f'model.cartridge.num_frozen_tokens={cartridge.num_frozen_tokens} leaves none of model.cartridge.tokens={tokens} '
    'slots to train: freeze fewer, or raise the number of slots.',
  )
  for name, initializer in (('document', 'document'), ('init_text', 'text')):
    _require(
      bool(cartridge.path) or cartridge.initializer != initializer or bool(getattr(cartridge, name)),
      f'model.cartridge.{name} is empty, and initializer={initializer!r} begins with its first tokens: name a text '
      'file, or another initializer.',
    )
  _require(
    not trains or len(paths(cartridge.path)) == 1,
    f'model.cartridge.path={cartridge.path} names several cartridges, and a run trains one: name one there, and the '
    'others in model.cartridge.distractors.',
  )
  _require(
    not cartridge.distractors or not config.trainer.test_divergence,
    'trainer.test_divergence=true with model.cartridge.distractors: measure the cartridge without them, with '
    'launch.evaluate.',
  )
  _require(
    not cartridge.distractors or len(cartridge.distractors) >= len(documents) - 1,
    'model.cartridge.distractors must begin with a cartridge for each document of model.cartridge.document but the '
    'first.',
  )
  _require(
    not config.data.group_duplicates or not (cartridge.teacher_scope == 'chunk' or cartridge.distractors),
    "data.group_duplicates=true with model.cartridge.teacher_scope='chunk' or distractors, which equal questions may "
    'read different ones of: set it to false.',
  )
  held, asked = cartridge.chunks_held, config.data.train_batch_size
  _require(
    held is None or held >= asked,
    f'model.cartridge.chunks_held={held} is fewer than data.train_batch_size={asked}, and each question may ask about '
    'another chunk: raise it, or leave it at None.',
  )
  _require(
    not cartridge.teacher_scope == 'chunk' or sd.teacher_context == 'prompt' or not cartridge.document,
    f"model.cartridge.teacher_scope='chunk' with {_DISTILLATION}.teacher_context={sd.teacher_context!r}: set "
    "teacher_context to 'prompt'.",
  )
  _require(
    cartridge.teacher_scope == 'chunk' or len(documents) == 1,
    f'model.cartridge.document={cartridge.document} names several files, and the teacher reads one of them only with '
    "teacher_scope='chunk': set it, or join the files.",
  )
  _require(
    config.actor.policy_loss.loss_mode != 'sdpo' or not cartridge.document or sd.teacher_regularization == 'base',
    f'{_DISTILLATION}.teacher_regularization={sd.teacher_regularization!r} with model.cartridge.document: the teacher '
    "is the frozen model that reads the document; set it to 'base'.",
  )


def _check_writer(config: schema.Sections) -> None:
  """Raise UserError if the student does not sample the completions and another setting requires that it does."""
  writer = config.rollout.sampled_by
  if writer == 'student':
    return
  actor, sd, written = config.actor, config.actor.self_distillation, f'rollout.sampled_by={writer!r}'
  _require(
    config.model.cartridge.used,
    f"{written} is only for cartridges: set model.cartridge.tokens, or leave sampled_by at 'student'.",
  )
  _require(
    actor.policy_loss.loss_mode == 'sdpo',
    f'{written} with actor.policy_loss.loss_mode={actor.policy_loss.loss_mode!r}, which has no teacher and learns from '
    "what the student has drawn: set loss_mode to 'sdpo', or sampled_by to 'student'.",
  )
  _require(
    sd.teacher_context == 'prompt' and sd.teacher_regularization == 'base',
    f"{written} {'holds log-probs of' if writer == 'data' else 'needs'} a teacher that reads the student's prompts and "
    f"stays as it is: set {_DISTILLATION}.teacher_context to 'prompt' and teacher_regularization to 'base'.",
  )
  _require(
    config.algorithm.rollout_correction.rollout_is is None,
    f'{written} with algorithm.rollout_correction.rollout_is: these weights correct for rounding in the sampler of '
    'the student, which does not draw the tokens; set rollout_is to None.',
  )
  _require(
    not actor.kl_loss_coef,
    f'{written} with actor.kl_loss_coef={actor.kl_loss_coef}: the penalty is estimated from what the student draws; '
    'set the coefficient to 0.',
  )
  for name in ('steps_off', 'max_staleness'):
    value = getattr(config.rollout, name)
    _require(
      not value,
      f'{written} with rollout.{name}={value}: only what the student samples depends on the step; set {name} to 0.',
    )
  several = actor.ppo_mini_batch_size != config.data.train_batch_size or actor.ppo_epochs > 1
  _require(
    sd.is_clip is None or not several,
    f'{written} with {_DISTILLATION}.is_clip={sd.is_clip} and several optimizer steps per generation batch: the ratio '
    'assumes that the student drew the tokens; set is_clip to None.',
  )
  for holds, fault in (
    (sd.alpha == 0, f'{_DISTILLATION}.alpha={sd.alpha}: others need more than stored log-probs; set it to 0'),
    (sd.distillation_topk, f'{_DISTILLATION}.distillation_topk=None: set it to the most that a token has, e.g. 20'),
    (config.rollout.temperature == 1, 'another rollout.temperature than that of the stored log-probs; set it to 1'),
    (config.rollout.n == 1, f'rollout.n={config.rollout.n}: every answer is stored once; set it to 1'),
  ):
    _require(writer != 'data' or bool(holds), f'{written} with {fault}.')


def _check_staleness(config: schema.Sections) -> None:
  rollout = config.rollout
  if not rollout.max_staleness:
    return
  carried = f'rollout.max_staleness={rollout.max_staleness}'
  _require(
    not rollout.steps_off,
    f'{carried} with rollout.steps_off={rollout.steps_off}, which rehearses such a schedule batch by batch: set one of '
    'them to 0.',
  )
  _require(
    not config.model.cartridge.distractors,
    f'{carried} with model.cartridge.distractors, which are drawn anew for each batch: set max_staleness to 0.',
  )


def _check_measured_divergence(config: schema.Sections) -> None:
  sd, asked = config.actor.self_distillation, 'trainer.test_divergence=true'
  if not config.trainer.test_divergence:
    return
  _require(
    config.model.cartridge.used and bool(config.model.cartridge.document),
    f'{asked} compares a cartridge with the model that reads the document: set model.cartridge.document and the slots, '
    'or leave test_divergence at false.',
  )
  _require(
    config.actor.policy_loss.loss_mode == 'sdpo' and sd.teacher_context == 'prompt',
    f"{asked} needs a teacher that reads the document before the student's prompts: set actor.policy_loss.loss_mode "
    f"to 'sdpo' and {_DISTILLATION}.teacher_context to 'prompt'.",
  )


def _check_data(config: schema.Sections, trains: bool) -> None:
  data = config.data
  _require(bool(data.train_files) or not trains, 'data.train_files is empty: name at least one file or generator.')
  _check_source_weights(data)
  _check_template_variables(data)
  if data.environment is not None:
    _check_rewards('data.environment', rewards.parse, data.environment)
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
    f'data.apply_chat_template_kwargs: {wrong} cannot be set: name variables of the chat template, such as '
    'enable_thinking.',
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
    f'data.source_weights has {len(weights)} numbers for {len(data.train_files)} data.train_files: give one for each, '
    'or none.',
  )
  _require(
    not weights or sum(round_shares(weights)) <= LONGEST_ROUND,
    f'data.source_weights={weights} have too many digits: write them with fewer, e.g. 7,3.',
  )


def round_shares(weights: Sequence[float]) -> list[int]:
  """Return the smallest integers in the ratio of positive weights: [1, 3] for (0.5, 1.5).

  Weights are read as decimals, so that 0.1 is exactly a tenth.
  """
  exact = [fractions.Fraction(str(weight)) for weight in weights]
  common = math.lcm(*(weight.denominator for weight in exact))
  whole = [int(weight * common) for weight in exact]
  return [share // math.gcd(*whole) for share in whole]


def _check_teacher(config: schema.Sections) -> None:
  sd = config.actor.self_distillation
  try:
    check_divergence(sd.alpha, sd.distillation_topk, sd.full_logit_distillation, f'{_DISTILLATION}.')
  except ValueError as error:
    raise UserError(str(error)) from error
  _require(
    sd.teacher_regularization != 'lora_ema' or config.model.lora.used,
    f"{_DISTILLATION}.teacher_regularization='lora_ema' is the average of an adapter's factors, and there is no "
    "adapter: set model.lora.rank or model.lora.path, or 'ema' for the average of all parameters.",
  )
  _require(
    sd.teacher_context != 'prompt' or sd.teacher_regularization != 'live',
    f"{_DISTILLATION}.teacher_context='prompt' with teacher_regularization='live': the student would read its own "
    "prompt again and learn nothing; set teacher_context to 'reprompt', or name another teacher.",
  )
  _check_other_teacher(config)
  _require(
    sd.teacher_regularization != 'restart' or sd.teacher_restart_interval is not None,
    f"{_DISTILLATION}.teacher_restart_interval must be at least 1 for teacher_regularization='restart', not None: set "
    'it to the generation batches between two restarts.',
  )
  for key, fields in TEMPLATE_FIELDS.items():
    _check_template(f'{_DISTILLATION}.{key}', getattr(sd, key), fields)


def _check_other_teacher(config: schema.Sections) -> None:
  sd = config.actor.self_distillation
  _require(
    sd.distillation_topk_of != 'teacher' or sd.teacher_regularization != 'trust-region',
    f"{_DISTILLATION}.distillation_topk_of='teacher' with teacher_regularization='trust-region', which mixes logits of "
    "two models at every token: take another teacher, or the top K of the 'student'.",
  )
  _check_endpoint(config)
  if not sd.teacher_model:
    return
  named = f'{_DISTILLATION}.teacher_model={sd.teacher_model}'
  _require(
    sd.teacher_regularization == 'base',
    f'{named} with teacher_regularization={sd.teacher_regularization!r}: the teacher is that model as it is; set '
    "teacher_regularization to 'base'.",
  )
  _require(
    not config.model.cartridge.used,
    f'{named} with model.cartridge: the teacher of a cartridge is its own model that reads the document; leave one of '
    'the two out.',
  )


def _check_endpoint(config: schema.Sections) -> None:
  """Raise UserError if a teacher at an endpoint cannot be used, or another setting needs one on the devices."""
  sd, endpoint = config.actor.self_distillation, config.actor.self_distillation.teacher_endpoint
  section = f'{_DISTILLATION}.teacher_endpoint'
  if not endpoint.used:
    return
  check_address(endpoint.url, f'{section}.url', f'{section}.api_key_env')
  for name, what in (
    ('model', "the name of the teacher's model on the server"),
    ('tokenizer', 'a directory with its tokenizer'),
  ):
    _require(bool(getattr(endpoint, name).strip()), f'{section}.{name} is empty: set it to {what}.')
  _require(
    endpoint.dialect != 'fireworks' or endpoint.top_k <= FIREWORKS_MOST,
    f"{section}.top_k={endpoint.top_k} with dialect='fireworks', which gives {FIREWORKS_MOST} log-probs at a position "
    'at most: lower it, or ask a vLLM server.',
  )
  _require(
    sd.teacher_regularization == 'base',
    f'{section}.url with teacher_regularization={sd.teacher_regularization!r}: the teacher is the model of the server; '
    "set teacher_regularization to 'base'.",
  )
  _require(
    config.rollout.temperature == 1,
    f'{section}.url with rollout.temperature={config.rollout.temperature}: servers give log-probs at temperature 1, '
    'but the divergence is between distributions at rollout.temperature; set it to 1.',
  )
  _require(
    not sd.teacher_model and not config.model.cartridge.used,
    f'{section}.url with {f"{_DISTILLATION}.teacher_model" if sd.teacher_model else "model.cartridge"}, which has '
    'another teacher: leave one of the two out.',
  )


def _check_algorithm(config: schema.Sections) -> None:
  algorithm = config.algorithm
  if algorithm.mode != 'hybrid':
    return
  _require(
    algorithm.sdpo_coef > 0 or algorithm.policy_gradient_coef > 0,
    'algorithm.sdpo_coef and algorithm.policy_gradient_coef are both 0, so that nothing is minimised: raise one of '
    'them.',
  )
  _require(
    config.rollout.sampled_by == 'student' or algorithm.policy_gradient_coef == 0,
    f"algorithm.mode='hybrid' with rollout.sampled_by={config.rollout.sampled_by!r}: a policy gradient learns from "
    "what the student has drawn; set sampled_by to 'student', or algorithm.mode to 'pure_sdpo'.",
  )


def _check_written_feedback(config: schema.Sections) -> None:
  sd = config.actor.self_distillation
  endpoint, section = sd.feedback_endpoint, f'{_DISTILLATION}.feedback_endpoint'
  if not sd.feedback_model:
    return
  _check_template(f'{_DISTILLATION}.feedback_prompt_template', sd.feedback_prompt_template, FEEDBACK_FIELDS, 'writer')
  if sd.feedback_model == 'endpoint':
    _require(bool(endpoint.url.strip()), f"{section}.url is empty: name an endpoint, or set feedback_model to 'self'.")
    check_address(endpoint.url, f'{section}.url', f'{section}.api_key_env')
    _require(bool(endpoint.model.strip()), f'{section}.model is empty: set it to the name of the model on the server.')


def _check_gathering(config: schema.Sections) -> None:
  least = config.algorithm.min_sdpo_examples
  if not least:
    return
  asked, rows = f'algorithm.min_sdpo_examples={least}', config.data.train_batch_size * config.rollout.n
  _require(
    least <= rows,
    f'{asked} is more than the {rows} completions that an update holds (data.train_batch_size × rollout.n): lower the '
    'minimum, or raise the size of a batch.',
  )
  _require(
    config.trainer.batch_order == 'sampled',
    f'{asked} with trainer.batch_order={config.trainer.batch_order!r}, which is the order of one generation batch: set '
    "batch_order to 'sampled'.",
  )
  _require(
    not config.trainer.record_top_tokens,
    f'{asked} with trainer.record_top_tokens={config.trainer.record_top_tokens}, which records the tokens of one '
    'generation batch when it is learned from: set record_top_tokens to 0.',
  )


def _check_batches(config: schema.Sections) -> None:
  actor, data, sequences = config.actor, config.data, _sequences(config)
  _require(
    data.train_batch_size % actor.ppo_mini_batch_size == 0,
    f'data.train_batch_size={data.train_batch_size} questions do not split into mini-batches of '
    f'actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}: choose a divisor of {data.train_batch_size}.',
  )
  _require(
    actor.loss_group_size is None or sequences % actor.loss_group_size == 0,
    f'actor.loss_group_size={actor.loss_group_size} does not divide the {sequences} sequences of an optimizer step '
    '(actor.ppo_mini_batch_size × rollout.n): choose a divisor, or None for the whole batch.',
  )


def _check_optimizer(optimizer: schema.OptimizerConfig) -> None:
  steps, warmup = optimizer.lr_decay_steps, optimizer.lr_warmup_steps
  _require(len(optimizer.betas) == 2, f'optimizer.betas must be two numbers in [0, 1), not {optimizer.betas}.')
  _require(
    steps is None or steps > warmup,
    f'optimizer.lr_decay_steps={steps} counts the warm-up and must be above optimizer.lr_warmup_steps={warmup}: raise '
    'it or shorten the warm-up.',
  )
  for pattern in optimizer.weight_decay_exclude:
    _require(
      bool(pattern),
      'optimizer.weight_decay_exclude holds an empty pattern, which is found in every name: remove it, or set '
      'optimizer.weight_decay=0 if nothing is to decay.',
    )
    try:
      re.compile(pattern)
    except MALFORMED_PATTERN as error:
      raise UserError(
        f'optimizer.weight_decay_exclude: {pattern!r} is not a regular expression ({error}): correct it.'
      ) from error


def _check_trainer(config: schema.Sections, trains: bool) -> None:
  trainer, sequences = config.trainer, _sequences(config)
  unknown = [entry for entry in trainer.accept_changes if entry not in CHANGES]
  near = did_you_mean(unknown and unknown[0], CHANGES)
  _require(not unknown, f'trainer.accept_changes: {unknown} cannot be accepted: name any of {", ".join(CHANGES)}{near}')
  check_address(trainer.push_url, 'trainer.push_url', 'trainer.push_key_env')
  _require(
    not trains or trainer.test_freq == 0 or bool(config.data.val_files),
    'trainer.test_freq asks for evaluation but data.val_files is empty: name held-out rows or set trainer.test_freq=0.',
  )
  _require(
    trainer.batch_order != 'balanced' or sequences % trainer.balance_partitions == 0,
    f'trainer.balance_partitions={trainer.balance_partitions} does not divide the {sequences} sequences of an '
    'optimizer step (actor.ppo_mini_batch_size × rollout.n): choose a divisor.',
  )


def _check_rewards(name: str, read: Callable[..., object], *values: object) -> None:
  try:
    read(*values)
  except rewards.UnreadableRewards as error:
    raise UserError(f'{name} {error}.') from error


def _check_environments(environments: schema.EnvironmentsConfig) -> None:
  for name, weight in environments.reward_weights.items():
    _check_rewards('environments.reward_weights', rewards.weight_of, name, weight)
  scores = environments.score_range
  _require(
    len(scores) == 2 and scores[0] < scores[1],
    f'environments.score_range must be two numbers, the smaller one first, not {scores}.',
  )
  check_address(environments.http.url, 'environments.http.url', 'environments.http.authorization_env')
  check_address(environments.judge.base_url, 'environments.judge.base_url', 'environments.judge.api_key_env')
  _check_template('environments.judge.template', environments.judge.template, JUDGE_FIELDS, reader='judge')


def _check_alarms(config: schema.Sections) -> None:
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


def _check_serve(config: schema.Sections) -> None:
  serve, endpoint = config.serve, config.actor.self_distillation.teacher_endpoint
  http, store, learning, limits = serve.http, serve.store, serve.learning, serve.limits
  _require(bool(http.host), 'serve.http.host is empty: name an address, 127.0.0.1 for this machine alone.')
  _require(http.keys != '', 'serve.http.keys is empty: name a file, or leave it at None for a service without keys.')
  for name in ('allowed_hosts', 'allowed_origins'):
    _require(all(getattr(http, name)), f'serve.http.{name} holds an empty name: remove it.')
  odd = [origin for origin in http.allowed_origins if not re.fullmatch(r'https?://[^/\s]+', origin)]
  _require(
    not odd, f'serve.http.allowed_origins holds {odd}: write them as browsers do, https://HOST or http://HOST:PORT.'
  )
  alone = is_loopback(http.host) and not http.allowed_hosts
  _require(
    not serve.tokasaurus_tenant or (alone and (http.keys is not None or serve.tokasaurus_tenant == 'local')),
    'serve.tokasaurus_tenant asks for no key: set serve.http.host=127.0.0.1, leave serve.http.allowed_hosts empty, '
    "and name 'local' unless there are serve.http.keys, whose owners have what they upload.",
  )
  _require(bool(store.root), 'serve.store.root is empty: name a folder, s3://… or gs://….')
  odd = [place for place in serve.cartridge_sources if not re.match(r'[/~]|\w+://[^/]|hub$', place)]
  _require(not odd, f"serve.cartridge_sources holds {odd}: name whole paths of folders, s3://…, gs://… or 'hub'.")
  _require(
    store.database != '', 'serve.store.database is empty: name a file, or leave it at None for one in serve.store.root.'
  )
  _require(
    '://' not in store.root or store.database is not None,
    f'serve.store.root={store.root} is no local folder, and serve.store.database is None: name a local file, or '
    'postgresql://….',
  )
  shared = (store.database or '').startswith('postgresql://')
  for name, place in (('store.database', store.database), ('http.keys', http.keys)):
    _require(
      '://' not in (place or '') or place.startswith('postgresql://'),
      f'serve.{name} must be a local file or postgresql://…, not {(place or "").partition("://")[0]}://…: name one.',
    )
  _require(
    not shared or '://' in store.root,
    f'serve.store.database is for replicas, and serve.store.root={store.root} is a local folder: name a bucket.',
  )
  _require(
    not shared or re.fullmatch(r'https?://[^/\s]+/?', http.url or '') is not None,
    f'serve.http.url={http.url} must be where other replicas reach this one, since serve.store.database is for '
    'replicas: name http://HOST:PORT.',
  )
  _require(
    learning.topk is None or learning.topk <= serve.topk,
    f'serve.learning.topk={learning.topk} is more than serve.topk={serve.topk}, for which the engine is compiled: '
    'lower the former or raise the latter.',
  )
  _require(
    learning.steps <= limits.max_steps,
    f'serve.learning.steps={learning.steps} is more than serve.limits.max_steps={limits.max_steps}: lower the '
    'former or raise the latter.',
  )
  _require(
    learning.teacher != 'endpoint' or endpoint.used,
    f"serve.learning.teacher='endpoint' needs {_DISTILLATION}.teacher_endpoint.url: name the teacher's address.",
  )
  _require(len(learning.betas) == 2, f'serve.learning.betas must be two numbers, not {learning.betas}.')


def _check_template(name: str, template: str, fields: tuple[str, ...], reader: str = 'teacher') -> None:
  try:
    template.format(**dict.fromkeys(fields, ''))
  except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
    raise UserError(
      f'{name} is not a valid template ({error!r}): it may use {", ".join("{" + f + "}" for f in fields)}, and a '
      'literal brace is written {{ or }}.'
    ) from error
  _require(fields[0] in fields_of(template), f'{name} does not hold {{{fields[0]}}}: the {reader} would never see it.')


def _sequences(config: schema.Sections) -> int:
  """Return the number of sequences of an optimizer step."""
  return config.actor.ppo_mini_batch_size * config.rollout.n


def _require(condition: bool, sentence: str) -> None:
  if not condition:
    raise UserError(sentence)
