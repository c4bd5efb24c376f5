"""The look before a run: memory by hand, marked prompts, graders that err, settings that look odd, nothing compiled."""

import dataclasses
import json
import re

import jax
import jax.monitoring
import numpy as np
import pytest

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.configs import paper, quickstart
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.models import huggingface
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.planner import model as sizes
from sdpo_jax.planner import topology
from sdpo_jax.preflight import check, grader_trials, memory, prompt_lengths
from sdpo_jax.preflight.doubtful_settings import odd_settings
from sdpo_jax.training.opening import model_mesh
from sdpo_jax.types import Example, Outcome
from tests import tiny

# By hand, of tiny.make_model: embedding, two layers of attention, MLP and norms, the last norm.
PARAMETERS = 264 * 32 + 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 8) + 32


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """Return a model directory without weights."""
  folder = tiny.make_model(tmp_path_factory.mktemp('preflight') / 'model')
  (folder / 'model.safetensors').unlink()
  return folder


@pytest.fixture
def config(model):
  config = quickstart.get_config()
  config.model.path = str(model)
  config.data.max_prompt_length, config.data.prompt_buckets = 96, (96,)
  config.actor.self_distillation.max_reprompt_len, config.data.reprompt_buckets = 384, (384,)
  return config


def test_memory_is_that_of_a_count_by_hand(config):
  config.model.dtype, config.model.remat = 'bfloat16', 'full'
  config.actor.self_distillation.teacher_regularization = 'ema'
  config.rollout.max_batch_rows = 16
  policy = huggingface.read_policy(config.model.path, config.model)
  mesh = model_mesh(config, policy, jax.devices()[:1])
  found = memory.estimate(config, policy.on(mesh), mesh)
  assert found.held['parameters'] == found.held['teacher'] == found.update['gradients'] == 4 * PARAMETERS
  assert found.held['optimizer'] == pytest.approx(8 * PARAMETERS, rel=1e-3)  # And counters.
  norms = 2 * (2 * 32 + 2 * 8) + 32  # Stay float32.
  assert found.sampling['weights to sample with'] == 2 * (PARAMETERS - norms) + 4 * norms
  rows, slots, layers, kv_heads, head_dim = 16, 96 + 8, 2, 2, 8
  cache = 2 * layers * rows * slots * kv_heads * head_dim * 2
  assert found.sampling['KV cache'] == pytest.approx(cache, rel=0.01)
  assert found.update['logits'] == 3 * 512 * 264 * 4
  assert found.update['activations'] == 128 * (96 + 8) * layers * 32 * 2
  held = sum(found.held.values())
  assert found.peak == held + max(sum(found.sampling.values()), sum(found.update.values()))
  config.actor.self_distillation.teacher_regularization = 'live'
  config.actor.kl_loss_coef = 0.1
  found = memory.estimate(config, policy.on(mesh), mesh)
  assert found.held['teacher'] == 0 and found.held['initial policy'] == 2 * (PARAMETERS - norms) + 4 * norms


def test_memory_is_divided_over_the_devices(config):
  config.rollout.max_batch_rows = 16
  policy = huggingface.read_policy(config.model.path, config.model)
  config.mesh.tensor = 2
  mesh = model_mesh(config, policy)
  assert dict(mesh.shape) == {'fsdp': 4, 'tensor': 2}
  found = memory.estimate(config, policy.on(mesh), mesh)
  assert found.held['parameters'] == pytest.approx(4 * PARAMETERS / 8, rel=0.05)  # Small norms stay whole.
  assert found.sampling['weights to sample with'] == pytest.approx(4 * PARAMETERS / 2, rel=0.05)
  assert found.sampling['KV cache'] == pytest.approx(2 * 2 * 16 * 104 * 2 * 8 * 4 / 8, rel=0.01)


def test_memory_of_a_frozen_base_is_counted_once_where_the_sampler_reads_it_as_it_is(config):
  config.rollout.max_batch_rows = 16
  policy = huggingface.read_policy(config.model.path, config.model)
  deep = dataclasses.replace(policy, config=dataclasses.replace(policy.config, layers=9), frozen=('layers',))
  frozen = 9 * (PARAMETERS - 264 * 32 - 32) / 2
  mesh = model_mesh(config, deep, jax.devices()[:1])
  found = memory.estimate(config, deep.on(mesh), mesh)
  assert found.held['parameters'] == 4 * (frozen + 264 * 32 + 32) and 'base to sample with' not in found.held
  # Of a shallow model, layers are apart; on a mesh, matrices are gathered over `fsdp` and lie in halves.
  shallow = dataclasses.replace(policy, frozen=('layers',))
  assert memory.estimate(config, shallow.on(mesh), mesh).held['base to sample with'] == 4 * frozen / 9 * 2
  config.mesh.tensor = 2
  mesh = model_mesh(config, deep)
  found = memory.estimate(config, deep.on(mesh), mesh)
  assert found.held['base to sample with'] == pytest.approx(4 * frozen / 2, rel=0.05)
  assert found.sampling['weights to sample with'] == pytest.approx(4 * 264 * 32 / 2, rel=0.05)


@pytest.mark.tpu_compiler
def test_memory_is_about_what_the_compiler_says():
  """Of the paper's run on 64 chips: the table of docs/performance.md, whose numbers are the TPU compiler's."""
  config, slice_ = paper.get_config(task='chemistry'), topology.describe('v5e:8x8')
  policy, _ = sizes.read(config)
  mesh = model_mesh(config, policy, slice_.devices)
  found = memory.estimate(config, policy.on(mesh, config.model.attention), mesh)
  compiled = {'parameters': 0.48, 'optimizer': 0.96, 'teacher': 0.48, 'weights to sample with': 1.91, 'KV cache': 5.64}
  estimated = {**found.held, **found.sampling}
  assert {name: size / memory.GIB for name, size in estimated.items()} == pytest.approx(compiled, rel=0.02)
  assert found.peak / memory.GIB == pytest.approx(9.62, rel=0.03)


def test_memory_is_written_for_people():
  assert [memory.readable(size) for size in (5 * 2**10, 3 * 2**20, 2.5 * 2**30)] == ['5.0 KiB', '3.00 MiB', '2.50 GiB']


def test_a_special_token_is_told_from_text_that_looks_like_it(model):
  tokenizer = tokenizers.load(model)
  end = tokenizer.convert_tokens_to_ids('<|im_end|>')
  spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in '<|im_end|>']
  text = prompt_lengths.visible(tokenizer, [*spelled, end, *spelled])
  assert text == '<|im_end|>⟦<|im_end|>⟧<|im_end|>'


def test_a_histogram_counts_every_prompt_once():
  tokens = np.array([1, 10, 11, 20, 21, 79, 80, 81, 500])
  text = prompt_lengths.histogram(prompt_lengths.Lengths('data.train_files', tokens, 9, 80))
  assert 'max 500; limit 80' in text.splitlines()[0]
  counts = [int(line.split()[-1]) for line in text.splitlines()[1:]]
  assert counts == [2, 2, 1, 0, 0, 0, 0, 2, 2] and sum(counts) == len(tokens)


TRUTHS = [
  Example('choice', [], 'mcq', 'B', 'x'),
  Example('expert', [], 'gpqa', 'C', 'x'),
  Example('number', [], 'digits', '31704', 'x'),
  Example('calls', [], 'tooluse', '[{"Action": "find", "Action_Input": "{\\"q\\": 1}"}]', 'x'),
]


@pytest.mark.parametrize('profile', ['clean', 'reference'])
def test_ground_truths_are_written_as_their_graders_want_them(profile):
  with Graders(EnvironmentsConfig(profile=profile)) as graders:
    trials = grader_trials.attempt(graders, TRUTHS)
  assert [(trial.right.score, trial.empty.score) for trial in trials] == [(1.0, 0.0)] * len(TRUTHS)
  assert grader_trials.odd_trials(trials, 0.5) == []


@pytest.fixture(scope='module')
def erring():
  """Graders of one's own: one that calls everything right, one nothing, one that raises."""
  registry.register('preflight_right')(lambda examples, completions, *, truncated: [Outcome(1.0) for _ in examples])
  registry.register('preflight_wrong')(lambda examples, completions, *, truncated: [Outcome(0.0) for _ in examples])

  @registry.register('preflight_raises')
  def fail(examples, completions, *, truncated):
    raise RuntimeError('no')


@pytest.mark.parametrize(
  'name, truth, sentences',
  [
    ('preflight_right', 'x', ['empty answer to q the score 1, which counts as a success']),
    (
      'preflight_wrong',
      'x',
      ["ground truth of q the score 0, below the success_reward_threshold of 0.5, written as 'x'"],
    ),
    ('preflight_wrong', {'a': 1}, []),  # No answer can be made of it.
    (
      'preflight_raises',
      'x',
      ["cannot grade the ground truth of q: the grader 'preflight_raises' raised RuntimeError('no')"],
    ),
  ],
)
def test_a_grader_that_errs_is_named(erring, name, truth, sentences):
  with Graders(EnvironmentsConfig()) as graders:
    found = grader_trials.odd_trials(grader_trials.attempt(graders, [Example('q', [], name, truth, 'x')]), 0.5)
  assert len(found) == len(sentences)
  assert all(sentence in text and repr(name) in text for sentence, text in zip(sentences, found, strict=True))


@pytest.mark.parametrize(
  'changes, sentence',
  [
    ({'optimizer.lr': 0.0}, 'nothing is learned'),
    ({'optimizer.lr_warmup_steps': 300}, 'never reaches optimizer.lr'),
    ({'rollout.n': 1, 'actor.policy_loss.loss_mode': 'vanilla'}, 'that of a single one is its score, without'),
    ({'rollout.n': 1}, 'never its own demonstration'),
    (
      {
        'actor.self_distillation.include_demonstration': False,
        'actor.self_distillation.include_environment_feedback': False,
      },
      'nothing is distilled',
    ),
    ({'actor.self_distillation.success_reward_threshold': 1.5}, r'threshold=1.5 is outside \(0, 1\]'),
    (
      {'actor.self_distillation.teacher_regularization': 'ema', 'actor.self_distillation.teacher_update_rate': 1.0},
      "as teacher_regularization='live'",
    ),
    ({'rollout.top_p': 0.9}, 'nothing corrects for it'),
    ({'trainer.test_freq': 0}, 'never asked'),
    ({'trainer.test_freq': 301}, 'not evaluated between its steps'),
    ({'val_kwargs.temperature': 0.0}, 'are all the same'),
    ({'data.train_files': ('a.json',), 'data.val_files': ('a.json',)}, 'those of training'),
    ({'trainer.save_freq': 0}, 'starts again from nothing'),
    ({'environments.sandbox.allow_unsandboxed': True}, 'without confinement'),
    ({'actor.ppo_mini_batch_size': 1, 'data.train_batch_size': 1, 'rollout.n': 4}, 'has 4 sequences .* for 8 devices'),
    ({'actor.ppo_micro_batch_size': 12}, 'not a multiple of 8 devices'),
    ({'data.max_prompt_length': 96}, 'no room for a demonstration'),
    (
      {'actor.self_distillation.reprompt_truncation': 'error', 'data.max_response_length': 384},
      'the run ends at the first',
    ),
    ({'data.max_response_length': 4096}, 'made for max_position_embeddings=512'),
    ({'model.cartridge.tokens': 100}, 'tokens=100 is no multiple of 16: the published format'),
  ],
)
def test_a_setting_that_looks_odd_is_named(changes, sentence):
  config = quickstart.get_config()
  assert odd_settings(config, devices=8, positions=512) == []
  for name, value in changes.items():
    *sections, leaf = name.split('.')
    target = config
    for section in sections:
      target = getattr(target, section)
    setattr(target, leaf, value)
  [found] = odd_settings(config, devices=8, positions=512)
  with pytest.raises(UserError, match=sentence):
    raise UserError(found)


@pytest.mark.parametrize(
  'changes', [{'environment': 'mcq,0.5*math'}, {'environment': '2*mcq'}, {'reward_weights': {'f': 3}}]
)
def test_a_weighted_sum_may_reach_another_threshold(changes):
  config = quickstart.get_config()
  config.actor.self_distillation.success_reward_threshold = 1.5
  for section in (config.data, config.environments):
    for name, value in changes.items():
      if hasattr(section, name):
        setattr(section, name, value)
  assert odd_settings(config.validate(), devices=8, positions=512) == []
  config.data.environment, config.environments.reward_weights = 'mcq', {'f': 1}
  assert len(odd_settings(config, devices=8, positions=512)) == 1


def test_the_papers_runs_do_not_look_odd():
  for task in ('chemistry', 'tooluse'):
    for method in ('sdpo', 'grpo'):
      assert odd_settings(paper.get_config(task=task, method=method), devices=8, positions=40960) == []
  [found] = odd_settings(paper.get_config(task='livecodebench'), devices=64, positions=40960)
  assert 'An optimizer step has 8 sequences' in found


def test_nothing_is_compiled_and_nothing_looks_odd(config):
  compiled = []
  listener = lambda name, seconds, **_: compiled.append(name) if 'backend_compile' in name else None  # noqa: E731
  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    report = check.check(config)
    assert compiled == []
    jax.jit(lambda x: x + 12345)(np.float32(1))
    assert compiled, 'the listener hears nothing'
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
  text = report.text()
  assert report.odd == [] and text.endswith('Nothing looks odd.')
  assert f'{PARAMETERS:,} parameters' in text and '8 × cpu' in text and 'limit 96' in text
  assert text.count('── student') == text.count('a demonstration') == text.count('the feedback on an empty') == 3
  assert '⟦<|im_start|>⟧assistant\n' in text and 'The answer must be 5 digits' in text


def test_rows_are_looked_at(config, tmp_path):
  """A prompt over the limit, too few rows, a question that is also held out, and no room for a teacher's prompt."""
  row = {'dataset': 'sciknoweval', 'kind': 'sciknoweval', 'answer': 'B', 'system': None, 'tests': None}
  texts = ['Which of A, B?', 'Which of B, C? ' * 20]
  (tmp_path / 'train.jsonl').write_text(''.join(json.dumps(row | {'prompt': text}) + '\n' for text in texts))
  (tmp_path / 'test.jsonl').write_text(json.dumps(row | {'prompt': texts[0]}) + '\n')
  data = dataclasses.replace(
    config.data, train_files=(str(tmp_path / 'train.jsonl'),), val_files=(str(tmp_path / 'test.jsonl'),)
  )
  report = check.check(dataclasses.replace(config, data=data))
  long, few, shared, room = report.odd
  assert long.startswith('50.0% of the prompts of data.train_files are longer than data.max_prompt_length=96 tokens')
  assert few.startswith('data.train_files hold 2 rows, fewer than data.train_batch_size=16')
  assert shared.startswith('1 of 1 held-out questions are also asked in training')
  assert 'max_reprompt_len=384 leaves no room for a demonstration' in room
  assert 'train.jsonl, line 2 (environment' in report.text()
  data.source_weights = (1.0,)  # With which files are endless.
  assert few not in check.check(dataclasses.replace(config, data=data)).odd


def test_what_would_end_a_run_ends_the_look(config):
  with pytest.raises(UserError, match='does not exist'):
    check.check(dataclasses.replace(config, model=dataclasses.replace(config.model, path='/nowhere')))
  misspelt = dataclasses.replace(config.trainer, best_metric='eval/digits/mean@16')
  with pytest.raises(UserError, match='best_metric=eval/digits/mean@16 is not among the metrics'):
    check.check(dataclasses.replace(config, trainer=misspelt))
  with pytest.raises(UserError, match='none.json'):
    check.check(dataclasses.replace(config, data=dataclasses.replace(config.data, train_files=('none.json',))))


def test_a_base_that_teaches_needs_a_model_that_is_not_trained_whole(config):
  config.actor.self_distillation.teacher_regularization = 'base'
  with pytest.raises(UserError, match="teacher_regularization='base' needs a model with frozen parameters"):
    check.check(config)


def test_the_row_that_names_an_unknown_grader_is_named(config, tmp_path):
  rows = [{'prompt': 'What?', 'answer': '12345', 'environment': name} for name in ('digits', 'digit')]
  (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  config.data.train_files = (str(tmp_path / 'rows.jsonl'),)
  with pytest.raises(UserError, match="rows.jsonl, line 2: There is no environment 'digit': choose"):
    check.check(config)


def test_a_template_that_does_not_suit_ends_the_look_or_looks_odd(config, tmp_path):
  path = tmp_path / 'template.jinja'
  path.write_text(tiny.CHAT_TEMPLATE.replace('<|im_end|>', '<|endoftext|>'))
  model = dataclasses.replace(config.model, chat_template=str(path))
  with pytest.raises(UserError, match=r"ends an answer with '<\|endoftext\|>' \(token id 256\).* add 256 to rollout"):
    check.check(dataclasses.replace(config, model=model))
  for token in (-1, 264):
    with pytest.raises(
      UserError, match=rf'rollout\.stop_token_ids holds \[{token}\]: the token ids of .* go from 0 to 263'
    ):
      check.check(dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, stop_token_ids=(256, token))))
  rollout = dataclasses.replace(config.rollout, stop_token_ids=(256,))
  data = dataclasses.replace(config.data, enable_thinking=False)
  report = check.check(dataclasses.replace(config, model=model, rollout=rollout, data=data))
  assert report.odd == [
    'The chat template does not read data.apply_chat_template_kwargs.enable_thinking, which therefore has no effect.'
  ]
  assert '⟦<|endoftext|>⟧' in dict(report.sections)['Prompts']


def test_no_prompt_controls_the_terminal():
  text = check.CheckReport([('Prompts', 'a\x1b[2J\r\u202e b\n\tc\u200dd')], ['e\x07']).text()
  assert text == '━━ Prompts ━━\na\\x1b[2J\\r\\u202e b\n\tc\u200dd\n\n━━ What looks odd ━━\n• e\\x07'


def test_memory_that_does_not_suffice_looks_odd(config, monkeypatch):
  monkeypatch.setattr(memory, 'of_device', lambda device: 2.0**20)
  [found] = check.check(config).odd
  assert 'on each device, which has 1.00 MiB' in found


def test_a_grader_of_the_users_is_known_to_the_look(config, tmp_path):
  (tmp_path / 'shout.py').write_text(
    'from sdpo_jax.environments import registry\n'
    'from sdpo_jax.types import Outcome\n'
    "@registry.register('shout_at_a_look')\n"
    'def grade(examples, completions, *, truncated):\n'
    '  return [Outcome(score=float(text.isupper())) for text in completions]\n'
  )
  rows = [{'prompt': f'Shout {number}.', 'answer': 'LOUD'} for number in range(16)]
  (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  files = (str(tmp_path / 'rows.jsonl'),)
  data = dataclasses.replace(config.data, train_files=files, val_files=files, environment='shout_at_a_look')
  environments = dataclasses.replace(config.environments, modules=(str(tmp_path / 'shout.py'),))
  report = check.check(dataclasses.replace(config, data=data, environments=environments))
  assert len(re.findall(r'shout_at_a_look +1 +0$', report.text(), re.MULTILINE)) == 3
