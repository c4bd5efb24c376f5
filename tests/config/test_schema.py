"""Settings: what is refused, with which sentence; what the command line may say; the paper's presets."""

import dataclasses
import json
import re

from absl.testing import parameterized
import pytest

from sdpo_jax.config import Config, OptimizerConfig
from sdpo_jax.config.checks import CHANGES
from sdpo_jax.config.fields import flatten, settings
from sdpo_jax.config.help import settings_help
from sdpo_jax.config.overrides import ACCEPTABLE, ROUNDING, Differences, differences, from_dict, override
from sdpo_jax.config.ranges import check_ranges
from sdpo_jax.configs import qwen3_8b_chemistry, qwen3_8b_chemistry_grpo, qwen3_8b_livecodebench
from sdpo_jax.errors import UserError
from tests.config.valid_config import valid


def documented():
  """Return the documentation of every setting by name."""
  return {name: field.metadata['doc'] for name, _, _, field in settings(Config())}


class Validation(parameterized.TestCase):
  @parameterized.parameters(
    ('actor.self_distillation.alpha', 1.5, r'alpha must lie in \[0, 1\], not 1.5'),
    ('actor.self_distillation.alpha', float('nan'), 'alpha=nan is not float'),
    ('actor.self_distillation.full_logit_distillation', False, 'alpha=1.0'),
    ('actor.self_distillation.distillation_topk', 0, 'positive or None'),
    ('actor.self_distillation.teacher_update_rate', -0.1, 'teacher_update_rate'),
    ('actor.self_distillation.teacher_regularization', 'restart', 'teacher_restart_interval must be at least 1'),
    (
      'actor.self_distillation.teacher_restart_interval',
      5,
      "restart_interval=5 has no effect .*='ema': set that to 'restart', or leave it at None",
    ),
    ('actor.self_distillation.is_clip', 0.0, 'is_clip'),
    ('actor.self_distillation.reprompt_template', '{question}', 'not a valid template'),
    ('actor.self_distillation.solution_template', '{', 'not a valid template'),
    ('actor.loss_agg_mode', 'mean', "'token-mean' or"),
    ('actor.loss_group_size', 7, 'does not divide the 256 sequences'),
    ('actor.ppo_mini_batch_size', 5, 'do not split into mini-batches'),
    ('actor.policy_loss.clip_ratio_c', 1.0, 'above 1'),
    ('rollout.temperature', 0.0, 'rollout.temperature must be positive, not 0.0: the objective divides'),
    ('rollout.top_p', 0.0, 'rollout.top_p'),
    ('val_kwargs.top_k', 0, 'val_kwargs.top_k'),
    ('optimizer.betas', (0.9,), 'two numbers'),
    ('optimizer.grad_clip', 0.0, 'grad_clip'),
    ('optimizer.lr', '1e-5', "lr='1e-5' is not float"),
    ('data.train_files', 'a.csv', r"train_files='a.csv' is not a list of str: write \['a.csv'\]\.$"),
    ('trainer.total_training_steps', True, 'not int'),
    ('data.val_files', (), 'trainer.test_freq asks for evaluation'),
    ('data.train_files', (), 'data.train_files is empty'),
    ('model.path', '', 'model.path is empty'),
    ('mesh.fsdp', 0, 'mesh.fsdp must be positive or -1'),
    ('plan.mean_completion', 0.0, 'plan.mean_completion must be positive or None'),
    ('plan.evaluation_questions', -1, 'plan.evaluation_questions must be positive or None'),
    ('plan.trained_fraction', 1.5, r'plan.trained_fraction must lie in \(0, 1\], not 1.5'),
    ('optimizer.learning_rate', 1e-5, "no setting 'optimizer.learning_rate'"),
    ('actor.self_distillation.feedback_template', 'wrong', 'does not hold {feedback_raw}'),
    ('data.val_max_samples', 0, 'val_max_samples must be positive'),
    ('data.prompt_buckets', (64, 4096), r'prompt_buckets holds \[4096\]'),
    ('seed', 2**70, r'seed must lie in \[0, '),
    ('serve.http.port', 70000, r'serve.http.port must lie in \[0, 65535\], not 70000'),
    ('serve.http.keys', '', 'keys is empty: name a file'),
    ('serve.http.allowed_origins', ('example.org',), 'write them as browsers do'),
    ('serve.store.root', 'gs://bucket/root', 'database is None: name a local file, or postgresql://'),
    ('serve.store.database', 's3://bucket/db', 'must be a local file'),
    ('serve.store.database', 'postgresql://host/db', 'root=runs/service is a local folder: name a bucket'),
    ('serve.store.database', 'postgres://u:secret@host/db', r'or postgresql://…, not postgres://…: name one'),
    ('serve.http.keys', 'mysql://host/db', r'http.keys must be a local file or postgresql://…, not mysql://'),
    ('serve.learning.topk', 101, 'more than serve.topk=100'),
    ('serve.learning.steps', 17, 'more than serve.limits.max_steps=16'),
    ('serve.learning.teacher', 'endpoint', 'needs actor.self_distillation.teacher_endpoint.url'),
    ('serve.guards.max_self_similarity', 1.5, r'must lie in \(0, 1\] or None, not 1.5'),
    ('rollout.top_k', 10**20, r'rollout.top_k must be below 2\^31, not 1'),
    ('trainer.watchdog_limit_s', 1e20, r'watchdog_limit_s must be below 2\^31'),
  )
  def test_a_wrong_setting_is_named_with_the_way_out(self, name, value, sentence):
    config = valid().validate()
    *sections, leaf = name.split('.')
    target = config
    for section in sections:
      target = getattr(target, section)
    setattr(target, leaf, value)
    with self.assertRaisesRegex(UserError, sentence):
      config.validate()

  def test_only_one_mesh_axis_may_be_the_rest(self):
    config = valid()
    config.mesh.tensor = -1
    with self.assertRaisesRegex(UserError, 'Only one of'):
      config.validate()


def test_only_a_run_needs_data():
  config = valid()
  config.data.train_files = config.data.val_files = ()
  config.validate(trains=False)
  with pytest.raises(UserError, match='data.train_files is empty'):
    config.validate()


def test_a_teacher_restarts_at_an_interval_of_at_least_one_batch():
  config = valid()
  sd = config.actor.self_distillation
  sd.teacher_regularization, sd.teacher_restart_interval = 'restart', 1
  config.validate()
  sd.teacher_restart_interval = 0
  with pytest.raises(UserError, match='at least 1 .* not 0'):
    config.validate()


def test_the_teachers_top_k_is_refused_where_there_is_none():
  for changes, said in (
    (dict(distillation_topk=None), 'there is no top K'),
    (dict(full_logit_distillation=False, alpha=1.0), 'there is no top K'),
    (dict(teacher_regularization='trust-region'), 'mixes logits of two models'),
  ):
    config = valid()
    sd = config.actor.self_distillation
    sd.distillation_topk_of = 'teacher'
    for setting, value in changes.items():
      setattr(sd, setting, value)
    with pytest.raises(UserError, match=said):
      config.validate()


def test_lora_ema_is_another_name_of_ema_for_runs_with_an_adapter():
  config, other = valid(), valid()
  config.actor.self_distillation.teacher_regularization = 'lora_ema'
  with pytest.raises(
    UserError,
    match="'lora_ema' is the average of an adapter's factors, .* set model.lora.rank or model.lora.path, or 'ema'",
  ):
    config.validate()
  config.model.lora.path = 'adapter'
  config.validate()
  config.model.lora.path, config.model.lora.rank, other.model.lora.rank = '', 8, 8
  config.validate()
  assert from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config
  for saved, resumed in ((config, other), (other, config)):
    found = differences(json.loads(json.dumps(dataclasses.asdict(saved))), resumed)
    assert not (found.refused or found.accepted or found.named)
  other.actor.self_distillation.teacher_regularization = 'frozen'
  (said,) = differences(json.loads(json.dumps(dataclasses.asdict(config))), other).refused
  assert said.startswith('actor.self_distillation.teacher_regularization was')


class Overrides(parameterized.TestCase):
  @parameterized.parameters(
    ('optimizer.lr', '1e-6', 1e-6),
    ('optimizer.lr', '1', 1.0),
    ('actor.self_distillation.distillation_topk', 'None', None),
    ('actor.self_distillation.distillation_topk', '20', 20),
    ('actor.self_distillation.teacher_regularization', 'trust_region', 'trust-region'),
    ('optimizer.betas', '0.8,0.9', (0.8, 0.9)),
    ('optimizer.betas', '[0.8, 0.9]', (0.8, 0.9)),
    ('data.train_files', 'a.json,b.json', ('a.json', 'b.json')),
    ('data.train_files', 'generator:x?size=3', ('generator:x?size=3',)),
    ('trainer.profile_steps', '', ()),
    ('model.lora.target_modules', '(query|value)', ('query|value',)),
    ('model.lora.target_modules', 'layers.(0|1)', ('layers.(0|1)',)),
    ('model.lora.target_modules', '(a|b).(c|d),e', ('(a|b).(c|d)', 'e')),
    ('model.lora.target_modules', '[qv]_proj,down', ('[qv]_proj', 'down')),
    ('model.lora.target_modules', '["[qv]_proj"]', ('[qv]_proj',)),
    ('rollout.stop', 'print(),)', ('print()', ')')),
    ('trainer.tensorboard', 'false', False),
    ('data.enable_thinking', 'none', None),
    ('data.environment', 'none', 'none'),
    ('data.environment', 'None', None),
    ('actor.self_distillation.solution_template', '{successful_previous_attempt}', '{successful_previous_attempt}'),
  )
  def test_text_becomes_a_value_of_the_settings_type(self, name, text, expected):
    config = valid()
    override(config, name, text)
    value = flatten(config)[name]
    assert value == (list(expected) if isinstance(expected, tuple) else expected)
    assert type(value) is (list if isinstance(expected, tuple) else type(expected))

  @parameterized.parameters(
    ('optimizer.learning_rate', '1', "no setting 'optimizer.learning_rate'"),
    ('actor.alpha', '1', 'did you mean .*actor.self_distillation.alpha'),
    ('optimizer', '1', 'is a section'),
    ('optimizer.lr.x', '1', 'There is no setting'),
    ('optimizer.lr', 'fast', "'fast' is not float"),
    ('trainer.total_training_steps', '1.5', 'is not int'),
    ('trainer.total_training_steps', '9' * 400, 'is not int'),
    ('trainer.tensorboard', 'yes!', r'is not bool\.$'),
    ('optimizer.name', 'ADAM', "'muon'; did you mean 'adamw'\\?$"),
    ('optimizer.name', 'gradient', r"'muon'\.$"),
    ('actor.self_distillation.teacher_regularization', 'emma', "did you mean 'ema'\\?$"),
    ('model.dtype', 'bf16', "is not 'float32' or 'bfloat16'; did you mean 'bfloat16'\\?$"),
    ('optimizer.betas', '[0.1', 'is not a list of float'),
    ('model.lora.target_modules', '[q_proj, v_proj]', r'Expecting value.*; write a,b or \["a", "b"\]'),
  )
  def test_unknown_names_and_wrong_types_are_refused(self, name, text, sentence):
    with self.assertRaisesRegex(UserError, sentence):
      override(valid(), name, text)


def test_none_is_none_for_every_setting_that_may_be_none():
  takes_none = re.findall(r'--config\.(\S+)=.*\n *\[.*or None\]', settings_help(Config(), ''))
  assert {'model.chat_template', 'data.environment', 'environments.sandbox.packages'} <= {*takes_none}
  for name in takes_none:
    config = valid()
    override(config, name, 'None')
    assert flatten(config)[name] is None, name


def test_every_setting_is_documented():
  for name, doc in documented().items():
    assert re.search(r'[.:;]', doc) and len(doc) > 10, name


def test_json_round_trip():
  config = valid()
  override(config, 'optimizer.betas', '0.5,0.6')
  assert from_dict(json.loads(config.to_json())) == config


def test_unknown_setting_in_a_saved_config_is_named():
  with pytest.raises(UserError, match='actor.new_thing'):
    from_dict({'actor': {'new_thing': 1}})


def test_a_run_saved_before_a_setting_existed_had_its_default():
  config = Config()
  saved = json.loads(config.to_json())
  del saved['actor']['self_distillation']['teacher_update_rate']
  assert differences(saved, config).refused == []
  config.actor.self_distillation.teacher_update_rate = 0.5
  assert differences(saved, config).refused == ['actor.self_distillation.teacher_update_rate was 0.05 and is now 0.5']


def test_the_file_of_a_chat_template_may_be_another_one():
  """What it says is part of the tokenizer, which is compared."""
  saved, config = json.loads(Config().to_json()), Config()
  config.model.chat_template = 'moved.jinja'
  assert differences(saved, config) == Differences([], [], {}, [])
  with pytest.raises(UserError, match=r'model\.chat_template is empty: name a file'):
    dataclasses.replace(valid(), model=dataclasses.replace(valid().model, chat_template='')).validate()


def test_a_run_saved_before_messages_were_text_goes_on_as_it_began():
  saved = json.loads(Config().to_json())
  del saved['data']['split_special_tokens'], saved['actor']['self_distillation']['thinking_rule']
  del saved['optimizer']['skip_empty_steps']
  config, rule = Config(), 'actor.self_distillation.thinking_rule'
  assert differences(saved, config).refused == [
    f"{rule} was 'closed' and is now 'all' (newer than the run: --config.{rule}=closed goes on as before)",
    *(
      f'{name} was False and is now True (newer than the run: --config.{name}=false goes on as before)'
      for name in ('data.split_special_tokens', 'optimizer.skip_empty_steps')
    ),
  ]
  known = json.loads(Config().to_json())
  known['optimizer']['skip_empty_steps'] = False  # Then it is no newer than the run.
  assert differences(known, config).refused == ['optimizer.skip_empty_steps was False and is now True']
  assert not from_dict(saved).data.split_special_tokens  # What reads the run does as the run does.
  config.data.split_special_tokens, config.actor.self_distillation.thinking_rule = False, 'closed'
  config.optimizer.skip_empty_steps = False
  assert differences(saved, config).refused == [] and from_dict(saved) == config


def test_differences_name_what_changes_learning_and_only_that():
  saved = json.loads(valid().to_json())
  config = valid()
  override(config, 'trainer.total_training_steps', '7')
  override(config, 'val_kwargs.n', '2')
  assert differences(saved, config) == Differences([], [], {}, [])
  override(config, 'mesh.fsdp', '4')
  assert differences(saved, config) == Differences([], [], {ROUNDING: ['mesh.fsdp was -1 and is now 4']}, [])
  override(config, 'optimizer.lr', '0.5')
  override(config, 'actor.self_distillation.teacher_update_rate', '0.1')
  found = differences(saved, config)
  assert found.refused == [
    'actor.self_distillation.teacher_update_rate was 0.05 and is now 0.1',
    'optimizer.lr was 1e-05 and is now 0.5',
  ]
  assert found.ways_out == []


@pytest.mark.parametrize(
  'name, value, where',
  [
    ('environments.http.url', 'http://localhost:9/grade', 'graders'),
    ('environments.http.timeout_s', '1', None),
    ('environments.http.retries', '1', None),
    ('environments.http.concurrency', '1', None),
    ('environments.http.authorization_env', 'KEY', None),
    ('environments.judge.base_url', 'http://localhost:9/v1', 'named'),
    ('environments.judge.model', 'another', 'graders'),
    ('environments.judge.template', '{completion}', 'graders'),
    ('environments.judge.temperature', '1', 'graders'),
    ('environments.judge.timeout_s', '1', None),
    ('environments.sandbox.memory_mb', '64', 'graders'),
    ('environments.sandbox.file_mb', '64', 'graders'),
    ('environments.sandbox.output_mb', '64', 'graders'),
    ('environments.sandbox.mechanism', 'landlock', 'named'),
    ('environments.sandbox.workers', '1', None),
    ('environments.modules', 'other.py', 'graders'),
    ('environments.profile', 'reference', 'graders'),
    ('data.train_files', 'other.jsonl', 'data'),
    ('model.path', 'other', 'model'),
    ('data.response_buckets', '64', 'named'),
    ('data.max_response_length', '64', 'refused'),
    ('seed', '1', 'refused'),
  ],
)
def test_a_resume_may_change_what_decides_neither_the_reward_nor_the_data_and_the_rest_if_accepted(name, value, where):
  config = valid()
  config.environments.judge.base_url = 'http://localhost:8/v1'  # What nobody reads may differ in any case.
  saved = json.loads(config.to_json())
  override(config, name, value)
  found = differences(saved, config)
  whole = [*found.refused, *found.accepted, *sum(found.named.values(), [])]
  assert [phrase.startswith(f'{name} was ') for phrase in whole] == [True] * (where is not None)
  assert bool(found.named) == (where == 'named') and found.accepted == []
  assert found.ways_out == ([where] if where in ACCEPTABLE else [])
  if where in ACCEPTABLE:
    override(config, 'trainer.accept_changes', where)
    config.validate()
    assert differences(saved, config) == Differences([], found.refused, {}, [])
    override(config, 'seed', '7')  # What cannot be accepted is not offered to be.
    override(config, 'trainer.accept_changes', '')
    assert differences(saved, config).ways_out == []


def test_a_value_of_python_is_not_one_of_the_allowed_and_the_nearest_is_named():
  for value, end in (('muom', r"; did you mean 'muon'\?"), (['muon'], r'\.')):
    config = valid()
    config.optimizer.name = value
    with pytest.raises(UserError, match=rf"optimizer\.name=.* is not 'adamw' or .* or 'muon'{end}$"):
      config.validate()


def test_only_what_there_is_can_be_accepted():
  assert tuple(ACCEPTABLE) == CHANGES
  config = valid()
  config.trainer.accept_changes = ('grader',)
  with pytest.raises(UserError, match=r"did you mean 'graders'\?$"):
    config.validate()
  config.trainer.accept_changes = ('graders', 'optimizer.lr')
  with pytest.raises(
    UserError, match=r"accept_changes: \['optimizer.lr'\] cannot be accepted: name any of tokenizer, "
  ):
    config.validate()


def test_a_key_in_an_address_is_not_quoted():
  saved, config = json.loads(valid().to_json()), valid()
  saved['environments']['http']['url'] = 'http://me:word@host:1/grade?key=hidden'
  config.environments.http.url = 'http://[broken'
  assert differences(saved, config).refused == [
    "environments.http.url was 'http://host:1/grade' (with parts that are not shown) and is now another address"
  ]


def test_presets_are_the_papers():
  chemistry, code = qwen3_8b_chemistry.get_config().validate(), qwen3_8b_livecodebench.get_config().validate()
  grpo = qwen3_8b_chemistry_grpo.get_config().validate()
  sd = chemistry.actor.self_distillation
  assert (sd.alpha, sd.distillation_topk, sd.distillation_add_tail, sd.teacher_update_rate) == (0.5, 100, True, 0.05)
  assert not sd.include_environment_feedback
  assert (chemistry.optimizer.lr, chemistry.optimizer.lr_warmup_steps) == (1e-5, 10)
  assert chemistry.actor.loss_group_size == 1
  sd = code.actor.self_distillation
  assert (sd.alpha, sd.distillation_topk, sd.teacher_update_rate) == (1.0, 20, 0.01)
  assert sd.include_environment_feedback
  assert code.data.train_batch_size // code.actor.ppo_mini_batch_size == 32
  loss = grpo.actor.policy_loss
  assert (loss.loss_mode, loss.clip_ratio_low, loss.clip_ratio_high, loss.clip_ratio_c) == ('vanilla', 0.2, 0.28, 3.0)
  assert not loss.norm_adv_by_std_in_grpo


def test_variables_of_the_chat_template_are_a_json_object_or_set_by_name():
  name, config = 'data.apply_chat_template_kwargs', valid()
  override(config, name, '{"enable_thinking": true, "controls": {"length": "long"}, "tags": ["a", 1]}')
  override(config, f'{name}.enable_thinking', 'false')
  override(config, f'{name}.effort', 'high')
  override(config, f'{name}.budget', '7')
  given = {'enable_thinking': False, 'controls': {'length': 'long'}, 'tags': ['a', 1], 'effort': 'high', 'budget': 7}
  assert config.validate().data.apply_chat_template_kwargs == given
  assert from_dict(json.loads(config.to_json())) == config
  assert differences(json.loads(config.to_json()), config) == Differences([], [], {}, [])
  assert differences(json.loads(valid().to_json()), config).refused == [f'{name} was {{}} and is now {given}']
  assert valid().data.apply_chat_template_kwargs == {}
  with pytest.raises(UserError, match=f"{name}='false' is not a JSON object"):
    override(config, name, 'false')


@pytest.mark.parametrize(
  ('variables', 'thinking', 'sentence'),
  [
    ({'enable_thinking': True}, False, 'data.enable_thinking=False and .*enable_thinking=True contradict each other'),
    ({'tokenize': False}, None, r"data.apply_chat_template_kwargs: \['tokenize'\] cannot be set: name variables"),
    ({'chat_template': '{{ messages }}'}, None, 'name variables of the chat template'),
    ({'a.b': 1}, None, 'name variables of the chat template'),
    ({'a': (1, 2)}, None, 'is not a JSON object'),
    ({1: 2}, None, 'is not a JSON object'),
    ({'a': float('nan')}, None, 'is not a JSON object'),
    ({'enable_thinking': False}, False, None),
    ({'tools': [{'name': 'f'}]}, True, None),
  ],
)
def test_template_variables_that_cannot_be_are_refused(variables, thinking, sentence):
  config = valid()
  config.data.apply_chat_template_kwargs, config.data.enable_thinking = variables, thinking
  if sentence is None:
    config.validate()
  else:
    with pytest.raises(UserError, match=sentence):
      config.validate()


@pytest.mark.parametrize(
  'part, names',
  [
    ('optimizer', [field.name for field in dataclasses.fields(OptimizerConfig)]),
    ('optimizer.lr', ['lr']),
    ('optimizer.l', ['lr', 'lr_warmup_steps', 'lr_scheduler_type', 'lr_decay_steps']),
    ('Global gradient NORM', ['grad_clip']),
    ('landlock', ['mechanism']),
  ],
)
def test_settings_are_found_by_section_beginning_word_or_value(part, names):
  shown = settings_help(Config(), part).splitlines()
  assert [line.split('=')[0].split('.')[-1] for line in shown if line.startswith('--config.')] == names


@pytest.mark.parametrize(
  'name, described',
  [
    ('data.max_prompt_length', '[int, positive (tokens)]'),
    ('rollout.top_p', '[float, in (0, 1]]'),
    ('rollout.top_k', '[int, positive or -1 (tokens)]'),
    ('optimizer.betas', '[a list of float, in [0, 1)]'),
    ('model.dtype', "['float32' or 'bfloat16']"),
    ('actor.loss_group_size', '[int, positive (sequences), or None]'),
    ('environments.http.timeout_s', '[float, positive (seconds)]'),
    ('seed', '[int, in [0, 2^63)]'),
    ('trainer.tensorboard', '[bool]'),
  ],
)
def test_a_setting_is_shown_with_default_type_values_unit_and_meaning(name, described):
  shown = settings_help(Config(), name).splitlines()
  value, doc = flatten(Config())[name], documented()[name]
  assert shown[0].startswith(f'--config.{name}=') and repr(value).strip('[]') in shown[0]
  assert shown[1].strip() == described and ' '.join(' '.join(shown[2:]).split()) == doc
  assert max(map(len, shown)) <= 120


@pytest.mark.parametrize(
  'name, taken, refused',
  [
    ('seed', (0, 2**63 - 1), (-1, 2**63)),
    ('data.max_prompt_length', (1,), (0, -1)),
    ('rollout.temperature', (1e-3,), (0.0, -1.0)),
    ('val_kwargs.temperature', (0.0,), (-0.1,)),
    ('rollout.top_p', (1e-3, 1.0), (0.0, 1.001)),
    ('rollout.min_p', (0.0, 0.999), (-0.1, 1.0)),
    ('rollout.top_k', (-1, 1), (0, -2)),
    ('actor.self_distillation.alpha', (0.0, 1.0), (-0.1, 1.1)),
    ('actor.self_distillation.distillation_topk', (None, 1), (0,)),
    ('actor.policy_loss.clip_ratio_c', (1.001,), (1.0,)),
    ('optimizer.betas', ((0.0, 0.999),), ((0.9, 1.0), (-0.1, 0.9))),
    ('optimizer.lr', (0.0,), (-1e-9,)),
    ('trainer.test_freq', (0, 1), (-1,)),
    ('environments.sandbox.workers', (None, 1), (0,)),
    ('mesh.tensor', (None, -1, 1), (0, -2)),
    ('serve.http.drain_s', (0.0,), (-1.0,)),
    ('serve.learning.jsd_alpha', (0.5,), (0.0, 1.0)),
    ('serve.limits.tokens_per_minute', (None, 1), (0,)),
  ],
)
def test_a_range_is_checked_at_its_bounds(name, taken, refused):
  for value in (*taken, *refused):
    config = valid()
    *sections, leaf = name.split('.')
    target = config
    for section in sections:
      target = getattr(target, section)
    setattr(target, leaf, value)
    if value in taken:
      check_ranges(config)
    else:
      with pytest.raises(UserError, match=f'^{re.escape(name)} must (be|lie) .*, not '):
        check_ranges(config)


def test_every_number_has_a_range():
  ranged = {name for name, _, _, field in settings(Config()) if field.metadata['range'] is not None}
  values = flatten(Config())
  numbers = {name for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)}
  assert numbers - ranged <= {'actor.self_distillation.success_reward_threshold', 'actor.entropy_coeff'}
