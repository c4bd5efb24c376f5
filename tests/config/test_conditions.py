"""Every setting is read, or a sentence says that it is not: each of them is changed in runs of several kinds."""

import copy
import dataclasses
import functools
import json
import random
from typing import Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import pytest
import transformers

import sdpo_jax
from sdpo_jax.config import Config
from sdpo_jax.config.conditions import DEFAULTS, unread_remarks
from sdpo_jax.config.fields import flatten, is_listed, settings, takes_none
from sdpo_jax.config.overrides import Differences, assign, differences, reset_unread
from sdpo_jax.configs import (
  cartridge,
  cartridge_quickstart,
  facts,
  livecodebench_schedule,
  lora,
  models,
  paper,
  quickstart,
  quickstart_grpo,
  quickstart_lora,
  serve_quickstart,
  session_quickstart,
)
from sdpo_jax.errors import UserError, short_repr
from sdpo_jax.objective.loss import objective
from sdpo_jax.preflight.doubtful_settings import odd_settings
from sdpo_jax.teacher.context import build_teacher_context
from sdpo_jax.training import specs
from sdpo_jax.types import Outcome, TeacherSignal
from tests import tiny
from tests.config.valid_config import valid
from tests.user_graders import odd

SD = 'actor.self_distillation'
KINDS = {  # Runs of several kinds, by what they change.
  'sdpo': {f'{SD}.include_failed_attempt': True},
  'vanilla': {'actor.policy_loss.loss_mode': 'vanilla', 'actor.ppo_mini_batch_size': 8, 'actor.kl_loss_coef': 0.1},
  'mixed': {
    'algorithm.mode': 'hybrid',
    'algorithm.rollout_correction.rollout_is': None,
    f'{SD}.teacher_regularization': 'trust-region',
    f'{SD}.include_environment_feedback': False,
    'actor.loss_agg_mode': 'seq-mean-token-sum-norm',
    'actor.entropy_coeff': 0.1,
    'actor.ppo_epochs': 2,
  },
  'restarted': {
    f'{SD}.teacher_regularization': 'restart',
    f'{SD}.include_demonstration': False,
    f'{SD}.teacher_restart_interval': 5,
    f'{SD}.distillation_topk': None,
    'optimizer.name': 'muon',
    'optimizer.lr_scheduler_type': 'cosine',
    'trainer.batch_order': 'balanced',
  },
  'sampled token': {
    f'{SD}.full_logit_distillation': False,
    f'{SD}.alpha': 1.0,
    'optimizer.name': 'sgd',
    'trainer.test_freq': 0,
    'val_kwargs.temperature': 0.0,
  },
  'endpoints': {
    f'{SD}.teacher_endpoint.url': 'http://localhost:9/v1',
    f'{SD}.teacher_endpoint.model': 'm',
    f'{SD}.teacher_endpoint.tokenizer': 't',
    f'{SD}.teacher_regularization': 'base',
    f'{SD}.feedback_model': 'endpoint',
    f'{SD}.feedback_endpoint.url': 'http://localhost:9/v1',
    f'{SD}.feedback_endpoint.model': 'm',
    'environments.http.url': 'http://localhost:9',
    'environments.judge.base_url': 'http://localhost:9/v1',
  },
  'adapter': {
    'model.lora.rank': 4,
    f'{SD}.feedback_model': 'self',
    'optimizer.weight_decay': 0.0,
    'alarms.rules': ('rollout/entropy < 0.02',),
    'trainer.sample_table_freq': 1,
  },
  'cartridge': {
    'model.cartridge.tokens': 4,
    'model.cartridge.document': 'd.txt',
    f'{SD}.teacher_context': 'prompt',
    f'{SD}.teacher_regularization': 'base',
  },
  'stored answers': {
    'model.cartridge.tokens': 4,
    'model.cartridge.initializer': 'text',
    'model.cartridge.init_text': 't.txt',
    'rollout.sampled_by': 'data',
    'rollout.n': 1,
    'algorithm.rollout_correction.rollout_is': None,
    f'{SD}.alpha': 0.0,
    f'{SD}.teacher_context': 'prompt',
    f'{SD}.teacher_regularization': 'base',
  },
  'slots without a teacher': {
    'model.cartridge.tokens': 4,
    'model.cartridge.initializer': 'text',
    'model.cartridge.init_text': 't.txt',
    'algorithm.mode': 'hybrid',
    'algorithm.sdpo_coef': 0.0,
  },
}
# Settings and sections that are read in every run, though `built` does not have them, and where.
ALWAYS = {
  'name': 'the directory of the run',
  'model.path': 'the model and its tokenizer',
  'model.chat_template': 'the tokenizer',
  **dict.fromkeys((f'model.{name}' for name in ('dtype', 'vocab_multiple', 'remat', 'attention')), 'the programs'),
  **dict.fromkeys((f'data.{name}' for name in ('train_files', 'source_weights')), 'the questions'),
  'data.val_files': 'the questions of launch.evaluate; launch.check says that a run without test_freq asks none',
  **dict.fromkeys(
    ('data.val_max_samples', 'val_kwargs.n', 'val_kwargs.temperature'), 'launch.evaluate, which any run may follow'
  ),
  'data.environment': 'rows that name no grader, which are known when they are read',
  f'{SD}.success_reward_threshold': 'rollout/success_rate',
  **{
    f'rollout.{name}': 'the sampler, which draws the completions of every run'
    for name in (
      *('sampled_by', 'steps_off', 'max_staleness', 'stop', 'stop_token_ids', 'max_batch_rows'),
      *('decode_chunk', 'cache_dtype'),
    )
  },
  'actor.ppo_epochs': 'the loop over optimizer steps',
  'algorithm.min_sdpo_examples': 'the gathering of batches',
  **{
    f'trainer.{name}': 'the loop, its checkpoints and its logs'
    for name in (
      *('total_training_steps', 'test_freq', 'save_freq', 'max_skipped_steps', 'watchdog_report_s'),
      *('watchdog_limit_s', 'accept_changes', 'max_ckpt_to_keep', 'best_metric', 'preemption_grace_s'),
      *('keep_starting_state', 'rollout_save_freq', 'sample_table_freq', 'tensorboard', 'wandb_project'),
      'profile_steps',
    )
  },
  'alarms.rules': 'the alarms after every step',
  'alarms.epistemic_words': 'the metrics of completions',
  **{
    f'environments.{name}': 'the graders that rows name, which are known when they are read (Graders.unread_remarks)'
    for name in (
      *('profile', 'modules', 'reward_weights', 'reveal_answer', 'max_ungraded_fraction', 'score_range'),
      *('grader_timeout_s', 'sandbox'),
    )
  },
  'mesh': 'the devices',
  'serve': 'launch.serve alone',
  'plan': 'launch.plan alone',
}
CHANGED = {  # Other values than those that `changed` finds.
  'model.lora.rank_pattern': {'mlp': 2},
  'model.lora.alpha_pattern': {'mlp': 2.0},
  f'{SD}.teacher_regularization': 'live',
  'environments.score_range': (-1.0, 1.0),
  'optimizer.betas': (0.8, 0.9),
}
# With one optimizer step per batch, these are constants of the program that change no number: see the runs below.
OF_RATIOS = (f'{SD}.is_clip', *(f'actor.policy_loss.clip_ratio_{which}' for which in ('low', 'high', 'c')))


MOVES = (  # Settings that make a difference within two steps of the runs below, wherever they are read.
  *('seed', 'optimizer.lr', 'optimizer.lr_warmup_steps', 'optimizer.weight_decay', 'optimizer.eps'),
  *('actor.loss_agg_mode', 'actor.entropy_coeff', 'actor.policy_loss.loss_mode'),
  *(
    'actor.policy_loss.norm_adv_by_std_in_grpo',
    f'{SD}.alpha',
    f'{SD}.distillation_add_tail',
    f'{SD}.distillation_topk',
  ),
  *(f'{SD}.reprompt_template', f'{SD}.solution_template', f'{SD}.feedback_template', f'{SD}.include_demonstration'),
)


def of_kind(kind: str) -> Config:
  """Return the settings of a run, and that nothing is said about them."""
  config = valid()
  for name, value in KINDS[kind].items():
    assign(config, name, value)
  assert unread_remarks(config.validate()) == []
  return config


def changed(config: Config, name: str, value, hint, field) -> Config:
  """Return the settings with another value of one of them, within its range."""
  kind = next(kind for kind in (get_args(hint) if takes_none(hint) else (hint,)) if kind is not type(None))
  origin, allowed = get_origin(kind), field.metadata['range']
  if name in CHANGED:
    other = CHANGED[name]
  elif origin is Literal:
    other = next(one for one in (*get_args(kind), None) if one != value)
  elif kind is bool:
    other = not value
  elif kind in (int, float):
    numbers = map(kind, (8, 4, 2, 1, 0.5) if value is None else (value * 2, value + 1, value / 2, 5, 0.3))
    other = next(number for number in numbers if number != value and (allowed is None or allowed.holds(number)))
  elif origin is tuple:
    other = (*(value or ()), {str: 'x', int: 2, float: 2.0}[get_args(kind)[0]])
  elif origin is dict:
    other = {'x': 2.0}
  else:
    other = 'http://localhost:7/v1' if name.endswith('url') else f'{value or ""}x'
  result = copy.deepcopy(config)
  assign(result, name, other)
  assert flatten(result)[name] != flatten(config)[name], name
  return result


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  tiny.make_tokenizer(folder)
  return transformers.AutoTokenizer.from_pretrained(folder)


def teacher_prompts(config: Config, tokenizer) -> object:
  """Return what the teacher reads in groups with and without successes, failures, thinking and long texts."""
  sd = config.actor.self_distillation
  right, wrong = '<think>a</think>right', '<think>b</think>wrong'
  texts = [right, 'c</think>right, too', wrong, wrong, wrong, right, 'd</think>wrong', wrong, right * 30, wrong * 30]
  scores = [1.0, 0.6, 0.0, 0.0, 0.0, 1.0, 0.0, None, 1.0, 0.0]
  written = 'written' if sd.feedback_model else None
  outcomes = [
    Outcome(score, f'said {number}' * (1 + 99 * (number > 8)), written=written) for number, score in enumerate(scores)
  ]
  found = build_teacher_context(
    [[{'role': 'user', 'content': 'Q'}]] * len(texts),
    [0, 0, 0, 1, 1, 2, 2, 3, 4, 4],
    texts,
    outcomes,
    dataclasses.replace(sd, max_reprompt_len=sd.max_reprompt_len // 50),
    tokenizer,
    seed=3,
    step=1,
    chat=specs.chat_format(config),
  )
  return found.prompt_tokens, found.mask.tolist()


@functools.cache
def traced(terms, settings, own_support: bool) -> str:
  """Return the program of the loss and its gradients."""
  rows, hidden, size = jnp.ones((2, 3)), jnp.ones((2, 3, 8)), 128
  unembedding, ids = jnp.ones((size, 8)), jnp.ones((2, 3), jnp.int32)
  signal = None
  if terms.external_support is not None:
    named = (2, 3, terms.external_support)
    signal = TeacherSignal(token_ids=jnp.ones(named, jnp.int32), log_probs=-jnp.ones(named))
  elif terms.needs_teacher:
    signal = TeacherSignal(hidden=hidden, unembedding=unembedding)
  inputs = {
    'old_log_probs': rows if terms.needs_old_log_probs else None,
    'advantages': rows if terms.needs_advantages else None,
    'sampling_log_probs': rows if terms.weighs_in_update else None,
    'initial_log_probs': rows if terms.kl_penalty else None,
    'support': jnp.ones((2, 3, 4), jnp.int32) if own_support and terms.reads_teacher else None,
    **dict.fromkeys(terms.coefficients, rows),
  }
  distilled = inputs.pop('distill_coef', None)

  def loss(hidden, unembedding):
    return objective(hidden, unembedding, signal, ids, rows, distilled, config=settings, **inputs)

  return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1), has_aux=True))(hidden, unembedding))


# Parts of an update's spec that `built` takes apart; `traced` has the last.
APART = ('terms', 'objective', 'optimizer', 'teacher', 'teachers_support')


def built(config: Config, prompts) -> list:
  """Return what a run with these settings is built from."""
  terms, sd = specs.objective_spec(config), config.actor.self_distillation
  batches, optimizer = specs.batch_spec(config), specs.optimizer_spec(config.optimizer, 100)
  correction, objective = config.algorithm.rollout_correction, specs.objective_config(config)
  batches = dataclasses.replace(
    batches,
    terms=terms.trains_all,
    # Lengths and divisors that nothing has.
    buckets=batches.buckets if terms.reprompts else (batches.buckets.prompt, batches.buckets.response),
    scale=batches.scale if batches.aggregation.endswith('norm') else None,
  )
  slots = config.model.cartridge
  evaluates, averages = config.trainer.test_freq > 0, sd.teacher_regularization in ('ema', 'lora_ema', 'trust-region')
  greedy = {} if config.val_kwargs.temperature else {'method': None}
  parts = {
    'loss': traced(terms, objective, sd.distillation_topk_of == 'teacher'),
    'chunks': objective.chunk_size,
    'batches': batches,
    'optimizer': optimizer if optimizer.weight_decay else dataclasses.replace(optimizer, weight_decay_exclude=()),
    'teacher': terms.reads_teacher and (sd.teacher_regularization, sd.teacher_restart_interval),
    'averaging': terms.reads_teacher and averages and sd.teacher_update_rate,
    'update': {name: value for name, value in vars(specs.update_spec(config)).items() if name not in APART},
    'prompts': specs.prompt_spec(config),
    'evaluations': evaluates and dataclasses.replace(specs.evaluation_spec(config), **greedy),
    'held-out questions': evaluates and (config.data.val_max_samples, config.trainer.val_before_train),
    'divergences': evaluates and config.trainer.test_divergence,
    'perplexities': evaluates and config.trainer.test_perplexity,
    'weights of rollouts': terms.rollout_weights and correction,
    'truncation': config.rollout.sampled_by != 'data' and config.rollout.method(),
    'advantages': terms.needs_advantages and config.actor.policy_loss.norm_adv_by_std_in_grpo,
    'groups': (terms.needs_advantages or terms.reprompts) and config.data.group_duplicates,
    "the teacher's prompts": terms.reprompts and prompts(config),
    'a teacher on a server': terms.needs_teacher and sd.teacher_endpoint.used and sd.teacher_endpoint,
    'another teacher': terms.needs_teacher and sd.teacher_model,
    'a writer': terms.reprompts
    and sd.feedback_model
    and [value for name, value in vars(sd).items() if 'feedback_' in name and name != 'feedback_endpoint'],
    'a writer on a server': terms.reprompts and sd.feedback_model == 'endpoint' and sd.feedback_endpoint,
    'an adapter': config.model.lora.used and config.model.lora,
    'a cartridge': slots.used and dataclasses.replace(slots, document='', divide_document=None),
    'its document': (terms.reads_teacher or slots.initializer == 'document') and slots.document,
    "the document's place": terms.reads_teacher and slots.divide_document,
    'alarms': config.alarms.rules and config.alarms.action,
    'rollbacks': config.alarms.rules and config.alarms.action == 'rollback' and config.alarms.max_rollbacks,
    'partitions': config.trainer.batch_order == 'balanced' and config.trainer.balance_partitions,
    'order': config.trainer.batch_order,
    'a service': config.trainer.push_url and [getattr(config.trainer, f'push_{name}') for name in PUSHING],
    'tables': config.trainer.sample_table_freq and config.trainer.sample_table_rows,
    'top tokens': config.trainer.rollout_save_freq and config.trainer.record_top_tokens,
    'graders': config.environments.http.url and config.environments.http,
    'judges': config.environments.judge.base_url and config.environments.judge,
  }
  return [value or None for value in parts.values()]


PUSHING = 'url', 'freq', 'name', 'key_env'


def said(config: Config, name: str) -> str | None:
  """Return whether a sentence says that a setting has no 'effect', or is 'refused' beside others; None: neither."""
  try:
    remarks = unread_remarks(config.validate())
  except UserError as error:
    assert any(part in str(error) for part in name.rpartition('.')[::2]), error
    return 'refused'
  return 'effect' if any(f'{name}=' in text.partition(' no effect ')[0] for text in remarks) else None


@pytest.mark.parametrize(
  'kind', [kind if kind == 'sdpo' else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_every_setting_changes_what_a_run_is_built_from_or_a_sentence_says_that_it_does_not(kind, tokenizer):
  known = {}

  def prompts(config: Config) -> object:
    key = repr((config.actor.self_distillation, specs.chat_format(config)))
    return known[key] if key in known else known.setdefault(key, teacher_prompts(config, tokenizer))

  config, wrong = of_kind(kind), {}
  before = built(config, prompts)
  for name, value, hint, field in settings(config):
    other = changed(config, name, value, hint, field)
    spoken, always = said(other, name), is_listed(name, ALWAYS)
    assert not (always and spoken == 'effect'), name
    if not always and spoken != 'refused' and (spoken is None) != (built(other, prompts) != before):
      if spoken is None or name not in OF_RATIOS:
        wrong[name] = 'changes nothing in silence' if spoken is None else 'changes the run, but is said not to'
  assert wrong == {}


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    (
      {f'{SD}.teacher_regularization': 'frozen', f'{SD}.teacher_update_rate': 0.1},
      f"{SD}.teacher_update_rate=0.1 has no effect with {SD}.teacher_regularization='frozen': set that to 'ema' or "
      "'lora_ema' or 'trust-region', or leave it at 0.05.",
    ),
    (
      {'actor.policy_loss.loss_mode': 'vanilla', f'{SD}.is_clip': 3.0, f'{SD}.alpha': 1.0},
      f"{SD}.alpha=1.0 and {SD}.is_clip=3.0 have no effect with actor.policy_loss.loss_mode='vanilla', which has no "
      "teacher: set that to 'sdpo', or leave them at their defaults.",
    ),
    (
      {f'{SD}.distillation_topk': None, f'{SD}.distillation_add_tail': False},
      f'{SD}.distillation_add_tail=False has no effect as there is no top K: set {SD}.distillation_topk and '
      'full_logit_distillation=True, or leave it at True.',
    ),
    (
      {'actor.kl_loss_type': 'k2'},
      "actor.kl_loss_type='k2' has no effect with actor.kl_loss_coef=0.0: change that, or leave it at 'k3'.",
    ),
    (
      {f'{SD}.attempt_template': '{attempt}'},
      f"{SD}.attempt_template='{{attempt}}' has no effect with {SD}.include_failed_attempt=False: change that, or "
      f'leave it at {DEFAULTS[f"{SD}.attempt_template"]!r}.',
    ),
    (
      {f'{SD}.teacher_context': 'prompt', f'{SD}.reprompt_template': '{prompt}'},
      f"{SD}.reprompt_template='{{prompt}}' has no effect with {SD}.teacher_context='prompt': set that to 'reprompt', "
      f'or leave it at {short_repr(DEFAULTS[f"{SD}.reprompt_template"])}.',
    ),
    (
      {'environments.judge.model': 'm'},
      "environments.judge.model='m' has no effect with environments.judge.base_url='': change that, or leave it at ''.",
    ),
    (
      KINDS['stored answers'] | {'model.cartridge.document': 'd.txt'},
      "model.cartridge.document='d.txt' has no effect with rollout.sampled_by='data', whose log-probs are stored: set "
      "that to 'student' or 'teacher', or leave it at ''.",
    ),
  ],
)
def test_what_is_said_of_a_setting_that_is_not_read(changes, sentence):
  config = valid()
  for name, value in changes.items():
    assign(config, name, value)
  assert unread_remarks(config.validate()) == [sentence]
  assert unread_remarks(reset_unread(config)) == []
  last = next(reversed(changes))
  assert flatten(config)[last] == DEFAULTS[last]


def test_an_address_is_not_quoted():
  config = valid()
  config.actor.policy_loss.loss_mode = 'vanilla'
  config.actor.self_distillation.teacher_endpoint.url = 'http://localhost:9/v1?key=secret'
  with pytest.raises(UserError, match=r'teacher_endpoint\.url has no effect') as raised:
    config.validate()
  assert 'secret' not in str(raised.value)


def test_a_resumed_run_may_differ_in_what_neither_it_nor_the_saved_one_reads():
  saved, config = of_kind('vanilla'), of_kind('vanilla')
  saved.actor.self_distillation.distillation_topk = 20
  assert differences(json.loads(saved.to_json()), config) == Differences([], [], {}, [])
  for run in (saved, config):
    run.actor.policy_loss.loss_mode = 'sdpo'
  [refused] = differences(json.loads(saved.to_json()), config).refused
  assert refused == f'{SD}.distillation_topk was 20 and is now 100'


def test_shipped_configs_set_nothing_that_they_do_not_read():
  single = (quickstart, quickstart_grpo, quickstart_lora, cartridge_quickstart, facts, serve_quickstart)
  configs = [module.get_config() for module in (*single, session_quickstart, livecodebench_schedule)]
  configs += [paper.get_config(**arguments) for arguments in paper.experiments()]
  configs += [module.get_config(method=method) for module in (models, lora) for method in get_args(paper.Method)]
  configs += [cartridge.get_config(questions=questions) for questions in ('', 'q.json')]
  assert [unread_remarks(config) for config in configs] == [[]] * len(configs)


@pytest.mark.parametrize('late', ['steps_off', 'max_staleness'])
@pytest.mark.parametrize(('changes', 'flagged'), [({}, False), ({'actor.policy_loss.loss_mode': 'vanilla'}, True)])
def test_a_policy_gradient_of_older_completions_without_weights_looks_odd(changes, flagged, late):
  config = valid()
  for name, value in {**changes, f'rollout.{late}': 1, 'algorithm.rollout_correction.rollout_is': None}.items():
    assign(config, name, value)
  found = [text for text in odd_settings(config.validate(), 8, None) if f'rollout.{late}=1' in text]
  assert len(found) == flagged
  config.algorithm.rollout_correction.rollout_is = 'token'
  assert not any(late in text for text in odd_settings(config.validate(), 8, None))


@pytest.mark.slow
def test_ten_drawn_settings_change_what_two_steps_learn_or_are_said_to_have_no_effect(tmp_path):
  """Half of them are announced as unread, and half are not; of the latter those that matter in such a short run."""
  config = Config()
  for name, value in {
    'model.path': str(tiny.make_model(tmp_path / 'model', num_hidden_layers=1)),
    'model.dtype': 'float32',
    'data.train_batch_size': 2,
    'data.max_prompt_length': 32,
    'data.prompt_buckets': (32,),
    'data.max_response_length': 4,
    'data.response_buckets': (4,),
    'data.reprompt_buckets': (256,),
    'rollout.n': 4,
    'actor.ppo_mini_batch_size': 2,
    f'{SD}.max_reprompt_len': 256,
    f'{SD}.distillation_topk': 8,
    'optimizer.lr': 1e-2,
    'optimizer.lr_warmup_steps': 0,
    'trainer.total_training_steps': 2,
    'trainer.test_freq': 0,
    'trainer.save_freq': 0,
    'trainer.rollout_save_freq': 0,
    'trainer.tensorboard': False,
  }.items():
    assign(config, name, value)
  rows = [{'prompt': f'Q{number}', 'answer': number % 2} for number in range(6)]

  def digest(config: Config) -> str:
    workdir = tmp_path / str(len(list(tmp_path.iterdir())))
    sdpo_jax.train(config, workdir, rows=rows, grader=odd)
    return sdpo_jax.read_metrics(workdir)[-1]['state_digest']

  valid_rows = dataclasses.replace(config.data, train_files=('rows.jsonl',))
  idle, read = [], []
  for setting in settings(config):
    if is_listed(setting[0], ('seed', 'actor', 'algorithm', 'optimizer', 'val_kwargs')):
      other = changed(config, *setting)
      check = dataclasses.replace(other, data=valid_rows)
      spoken = said(check, setting[0])
      if spoken == 'effect' or (spoken is None and setting[0] in MOVES):
        (read if spoken is None else idle).append((setting[0], other))
  draw = random.Random(30)
  before = digest(config)
  for chosen, same in ((draw.sample(idle, 5), True), (draw.sample(read, 5), False)):
    assert {name: digest(other) == before for name, other in chosen} == {name: same for name, _ in chosen}
