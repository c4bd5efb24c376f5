"""Every experiment of the paper: built, validated, and one of each kind run for two steps with a tiny random model."""

import dataclasses
import json
import pathlib

import pytest

from sdpo_jax.configs import paper
from sdpo_jax.errors import UserError
from sdpo_jax.training import loop
from tests import tiny

EXPERIMENTS = paper.experiments()


def name_of(arguments):
  return '-'.join(arguments.values())


def test_the_paper_has_thirty_eight_experiments():
  # 5 tasks × 2 models × 3 methods, LiveCodeBench twice, three other teachers, three other contexts.
  assert len(EXPERIMENTS) == len({name_of(arguments) for arguments in EXPERIMENTS}) == 30 + 2 + 3 + 3


@pytest.mark.parametrize('arguments', EXPERIMENTS, ids=name_of)
def test_every_experiment_is_valid_and_judges_as_the_reference(arguments):
  config = paper.get_config(**arguments).validate()
  assert config.environments.profile == 'reference'
  shows = (
    arguments.get('method', 'sdpo') == 'sdpo' and arguments.get('shown') != 'feedback'
  )  # What is not read is usual.
  assert config.actor.self_distillation.thinking_rule == ('closed' if shows else 'all')
  assert not config.data.split_special_tokens
  assert config.data.train_files == (f'data/{arguments["task"]}/train.json',)
  assert config.model.path == paper.MODELS[arguments.get('model', 'qwen3_8b')]


def test_names_and_so_default_run_directories_differ():
  assert len({paper.get_config(**arguments).name for arguments in EXPERIMENTS}) == len(EXPERIMENTS)


def test_the_two_recipes():
  science, code = paper.get_config(task='physics'), paper.get_config(task='livecodebench')

  def recipe(config):
    return (
      config.actor.self_distillation.alpha,
      config.actor.self_distillation.distillation_topk,
      config.actor.self_distillation.teacher_update_rate,
      config.optimizer.lr,
      config.optimizer.lr_warmup_steps,
      config.data.train_batch_size // config.actor.ppo_mini_batch_size,
      config.actor.self_distillation.include_environment_feedback,
      config.val_kwargs.n,
    )

  assert recipe(science) == (0.5, 100, 0.05, 1e-5, 10, 1, False, 16)
  assert recipe(code) == (1.0, 20, 0.01, 1e-6, 0, 32, True, 4)


def test_the_grpo_variants():
  default = paper.get_config(task='biology', method='grpo')
  on_policy = paper.get_config(task='biology', method='grpo_on_policy')

  def steps(config):
    return (config.data.train_batch_size // config.actor.ppo_mini_batch_size, config.optimizer.lr)

  assert steps(default) == (4, 1e-6) and steps(on_policy) == (1, 1e-5)
  assert default.trainer.val_before_train and not paper.get_config(task='biology').trainer.val_before_train


def test_the_planner_is_told_the_papers_lengths():
  """Table 8: SDPO answers in 255.8 tokens where GRPO takes 820.8, and Olmo 3 in 343.9 and 1095.4."""
  for model, method, mean in (
    ('qwen3_8b', 'sdpo', 255.8),
    ('qwen3_8b', 'grpo', 820.8),
    ('olmo3_7b', 'sdpo', 343.9),
    ('olmo3_7b', 'grpo_on_policy', 1095.4),
  ):
    plan = paper.get_config(task='chemistry', model=model, method=method).plan
    assert plan.mean_completion == mean and plan.evaluation_questions == 210


def test_the_ablations_change_one_thing_each():
  usual = paper.get_config(task='livecodebench').actor.self_distillation

  def changes(**arguments):
    other = paper.get_config(task='livecodebench', **arguments).actor.self_distillation
    pairs = {
      field.name: (getattr(usual, field.name), getattr(other, field.name)) for field in dataclasses.fields(usual)
    }
    return {name: new for name, (old, new) in pairs.items() if old != new}

  unread = {'teacher_update_rate': 0.05}
  assert changes(teacher='frozen') == {'teacher_regularization': 'frozen'} | unread
  assert changes(teacher='live') == {'teacher_regularization': 'live'} | unread
  assert changes(teacher='trust_region') == {'teacher_regularization': 'trust-region'}
  assert changes(shown='solution') == {'include_environment_feedback': False}
  unread = {'thinking_rule': 'all', 'demonstration': 'random'}
  assert changes(shown='feedback') == {'include_demonstration': False} | unread
  assert changes(shown='attempt') == {'include_failed_attempt': True}


@pytest.mark.parametrize(
  'arguments, named',
  [
    ({'task': 'alchemy'}, "task='alchemy'"),
    ({'model': 'gpt2'}, "model='gpt2'"),
    ({'teacher': 'frozen'}, 'Tables 4 and 6'),
    ({'task': 'livecodebench', 'method': 'grpo', 'shown': 'feedback'}, 'Tables 4 and 6'),
    ({'task': 'livecodebench', 'method': 'grpo_on_policy'}, 'no on-policy GRPO'),
  ],
)
def test_what_the_paper_does_not_have_is_refused_with_its_name(arguments, named):
  with pytest.raises(UserError, match=named.replace('(', r'\(')):
    paper.get_config(**arguments)


def test_the_documented_table_is_the_one_of_the_code():
  assert (tiny.REPOSITORY / 'docs' / 'experiments.md').read_text() == paper.markdown()


SYSTEM = 'Answer with the letter of the right option between <answer> and </answer>.'
TOOL_TRUTH = json.dumps([{'Action': 'lookUp', 'Action_Input': json.dumps({'word': 'jar'})}])
TESTS = json.dumps(
  {'inputs': ['1 2\n', '5 6\n'], 'outputs': ['3', '11'], 'testtype': 'stdin', 'fn_name': '', 'time_limit': 1}
)
# A row like those of each data set, of our own making.
ROWS = {
  'chemistry': {
    'kind': 'mcq',
    'dataset': 'sciknoweval',
    'answer': 'B',
    'prompt': 'Which is a salt?\n\nA: H2O\nB: NaCl',
    'system': SYSTEM,
  },
  'tooluse': {
    'kind': 'tooluse',
    'dataset': 'tooluse',
    'answer': TOOL_TRUTH,
    'prompt': 'Tools: lookUp(word)\nBegin!\nQuestion: what is a jar?',
  },
  'livecodebench': {
    'kind': 'code',
    'dataset': 'livecodebench',
    'answer': None,
    'tests': TESTS,
    'prompt': 'Add two numbers.',
    'description': 'Add.',
  },
}


def shrink(config, folder: pathlib.Path, model: pathlib.Path):
  """Return the experiment at a size that a test can run: a random model, few and short completions, two steps."""
  task = pathlib.Path(config.data.train_files[0]).parent.name
  rows = [{'idx': index, 'elo': None, **ROWS[task]} for index in range(4)]
  for split in ('train', 'test'):
    path = folder / f'{split}.json'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows[: 4 if split == 'train' else 1]))
    setattr(config.data, f'{"val" if split == "test" else split}_files', (str(path),))
  config.model.path, config.model.dtype, config.model.remat = str(model), 'float32', 'none'
  steps = config.data.train_batch_size // config.actor.ppo_mini_batch_size
  config.data.train_batch_size, config.actor.ppo_mini_batch_size = 2, 1 if steps > 1 else 2
  config.data.max_prompt_length, config.data.prompt_buckets = 256, (256,)
  config.data.max_response_length, config.data.response_buckets = 8, (8,)
  config.actor.self_distillation.max_reprompt_len, config.data.reprompt_buckets = 512, (512,)
  config.actor.self_distillation.distillation_topk = 8
  config.rollout.n, config.val_kwargs.n = 4, 2
  config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.tensorboard = 2, 2, False
  return config.validate()


# Every task and method; what is left combines them otherwise.
KINDS = [
  ({'task': 'chemistry'}, pytest.mark.slow),
  ({'task': 'livecodebench', 'method': 'grpo'}, pytest.mark.slow),
  ({'task': 'tooluse', 'method': 'grpo_on_policy'}, pytest.mark.slow),
  ({'task': 'livecodebench', 'teacher': 'trust_region'}, pytest.mark.slow),
  ({'task': 'livecodebench', 'shown': 'attempt'}, pytest.mark.slow),
  ({'task': 'chemistry', 'method': 'grpo'}, pytest.mark.campaign),
  ({'task': 'tooluse'}, pytest.mark.campaign),
  ({'task': 'livecodebench'}, pytest.mark.campaign),
]


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.make_model(tmp_path_factory.mktemp('experiments') / 'model', max_position_embeddings=1024)


@pytest.mark.parametrize('arguments', [pytest.param(kind, marks=marks) for kind, marks in KINDS], ids=name_of)
def test_one_of_each_kind_runs_two_steps(arguments, model, tmp_path):
  config = shrink(paper.get_config(**arguments), tmp_path, model)
  result = loop.train(config, tmp_path / 'run')
  lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
  assert result.step == 2 and [line['step'] for line in lines if 'train/loss' in line] == [1, 2]
  last = lines[-1]
  assert f'eval/{ROWS[arguments["task"]]["dataset"]}/mean@2' in last
  assert last['rollout/ungraded_fraction'] == 0.0
  assert 0 < last['rollout_corr/log_prob_difference_mean'] < 0.1
  if arguments['task'] == 'livecodebench' and 'method' not in arguments:
    # A random model writes no program, and is told so: every completion has feedback to learn from.
    assert last['self_distillation/feedback_used_fraction'] == 1.0 and last['train/loss'] != 0.0
