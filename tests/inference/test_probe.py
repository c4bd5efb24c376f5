"""The probe: its numbers with a scripted model, its independence from how completions were chosen, its advice, its
command.
"""

import dataclasses
import json
import re

import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.environments.grading import Graders
from sdpo_jax.errors import UserError
from sdpo_jax.inference import probe as probing
from sdpo_jax.inference import probe_report
from sdpo_jax.inference.probe import contexts, mean_and_error, probe, probe_to_file
from sdpo_jax.models import tokenizer as tokenizers
from sdpo_jax.training.opening import make_session
from sdpo_jax.types import Example, Rollouts
from tests import tiny

FEEDBACK, DEMONSTRATION = 'unsuccessful earlier attempt', 'Correct solution:'


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  tiny.make_tokenizer(folder)
  return tokenizers.load(folder)


class Scripted:
  """Stands for the sampler: `say(prompt, step, sample)` is the answer."""

  def __init__(self, tokenizer, say):
    self._tokenizer, self._say = tokenizer, say
    self.calls, self.said = [], []

  def sample(self, base, params, prompts, *, n, step, max_tokens, on_finished, **_):
    texts = [self._say(self._tokenizer.decode(tokens), step, i) for tokens in prompts for i in range(n)]
    self.calls.append((step, len(texts)))
    lengths = np.array([len(text) for text in texts])
    mask = np.arange(max_tokens)[None] < lengths[:, None]
    zeros = np.zeros(mask.shape, np.float32)
    group = np.repeat(np.arange(len(prompts), dtype=np.int32), n)
    unread = np.zeros((len(texts), 1), np.int32)
    reasons = ['length' if length >= max_tokens else 'stop' for length in lengths]
    drawn = Rollouts(group, unread, unread > 0, zeros.astype(np.int32), mask, zeros, zeros, zeros, reasons, texts)
    for completion in tiny.completions(drawn):
      on_finished(completion)
    return drawn


def settings(**changes):
  config = Config()
  config.rollout.n, config.data.max_response_length = 4, 8
  config.actor.self_distillation = dataclasses.replace(config.actor.self_distillation, **changes)
  return config


def examples(count):
  """Digit questions whose answer is their own number."""
  return [Example(f'q{i}', [{'role': 'user', 'content': f'Q{i}.'}], 'digits', str(i), 'digits') for i in range(count)]


def measure(tokenizer, say, count=3, **changes):
  config = settings(**changes)
  sampler = Scripted(tokenizer, say)
  with Graders(config.environments) as graders:
    return probe(config, sampler, {}, {}, tokenizer, graders, examples(count), sampler.said.append), sampler


def question_of(prompt):
  return prompt.partition('Q')[2].partition('.')[0]


def scripted(prompt, step, sample):
  """Question 0 is always answered right, 1 by half of the samples, 2 never; a demonstration helps, feedback does
  not.
  """
  question = question_of(prompt)
  if DEMONSTRATION in prompt and FEEDBACK in prompt:
    return 'x'
  if DEMONSTRATION in prompt:
    return question
  if FEEDBACK in prompt:
    return '12345678'  # Wrong, and as long as the limit.
  return question if question == '0' or (question == '1' and sample % 2) else '9'


def test_the_numbers_of_a_scripted_model(tokenizer):
  numbers, sampler = measure(tokenizer, scripted)

  def near(name, value):
    return numbers[name] == pytest.approx(value)

  assert numbers['questions'] == 3 and numbers['completions'] == 12
  assert near('student/sampled', 0.5) and near('student/greedy', 1 / 3) and near('student/best@4', 2 / 3)
  assert near('student/groups_with_success', 2 / 3)
  assert near('signal/grpo_questions', 1 / 3) and near('signal/all_right', 1 / 3) and near('signal/all_wrong', 1 / 3)
  # Demonstrations: all of questions 0 and 1. Feedback: the six that are wrong. Both: the two wrong ones of question 1.
  assert near('signal/sdpo_questions', 1.0) and near('teacher/signal', 1.0)
  assert [numbers[f'context/{name}/completions'] for name in ('solution', 'feedback', 'both')] == [8, 6, 2]
  assert near('context/solution/accuracy', 1.0) and near('context/solution/plain_accuracy', 0.75)
  assert near('context/solution/gap', 0.25)
  assert near('context/feedback/accuracy', 0.0) and near('context/feedback/plain_accuracy', 1 / 6)
  assert near('context/both/accuracy', 0.0) and near('context/both/plain_accuracy', 0.5)
  common = [numbers[f'common/{name}'] for name in ('completions', 'plain_accuracy', 'solution', 'feedback', 'both')]
  assert common == [2, 0.5, 1.0, 0.0, 0.0]
  # As configured: a demonstration where there is one, else feedback (question 2).
  assert near('teacher/accuracy', 2 / 3) and near('teacher/plain_accuracy', 0.5) and near('teacher/gap', 1 / 6)
  assert near('teacher/demonstration_accuracy', 1.0) and near('teacher/feedback_accuracy', 0.0)
  assert near('teacher/truncated', 1 / 3)
  assert (
    near('rule/feedback/gain', -1 / 12)
    and near('rule/feedback_without_solution/gain', 1 / 6)
    and near('rule/solution/gain', 1 / 6)
  )
  assert near('rule/both/gain', 1 / 6 - 2 / 12) and near('rule/both/over_configured', -1 / 6)
  # Student, greedy, fresh, configured, and of the other contexts only the prompts not answered yet: the feedback and
  # the pairs of the two wrong answers to question 1.
  assert sampler.calls == [(0, 12), (0, 3), (2, 12), (1, 12), (3, 4)]


@pytest.mark.parametrize(
  'changes, rule',
  [
    ({'include_environment_feedback': False}, 'solution'),
    ({'include_demonstration': False}, 'feedback'),
    ({}, 'feedback_without_solution'),
    ({'environment_feedback_only_without_solution': False}, 'both'),
  ],
)
def test_the_configured_rule_is_the_rule_of_that_name(tokenizer, changes, rule):
  numbers, _ = measure(tokenizer, scripted, **changes)
  assert probe_report.configured_rule(settings(**changes)) == rule
  assert numbers[f'rule/{rule}/over_configured'] == 0.0
  assert numbers[f'rule/{rule}/gain'] == pytest.approx(numbers['teacher/signal'] * numbers['teacher/gap'])


def test_a_context_that_does_nothing_has_no_gap_though_it_follows_failures(tokenizer):
  """Answers are right by chance, with and without context: beside the failed completions any teacher looks better."""
  rng = np.random.default_rng(0)

  def chance(prompt, step, sample):
    return question_of(prompt) if rng.random() < 0.5 else 'no'

  numbers, _ = measure(tokenizer, chance, count=64)
  assert numbers['context/feedback/completions'] > 64
  assert abs(numbers['context/feedback/gap']) < 3 * numbers['context/feedback/gap_se'] < 0.25
  assert abs(numbers['context/solution/gap']) < 3 * numbers['context/solution/gap_se']
  assert numbers['context/feedback/accuracy'] > 0.35  # Against 0 of the very completions that got feedback.


def test_nothing_to_teach(tokenizer):
  numbers, sampler = measure(tokenizer, lambda *_: 'no', include_environment_feedback=False)
  assert numbers['teacher/signal'] == numbers['signal/sdpo_questions'] == 0.0
  assert not any(name.startswith(('context/', 'teacher/gap', 'rule/')) for name in numbers)
  advice = probe_report.recommend(numbers, settings(include_environment_feedback=False))
  assert advice[0].startswith('Do not start this run as it is. The teacher knows more than the student at only 0.0 %')
  assert 'rollout.n' in advice[0]
  assert '3 questions, 12 completions' in probe_report.summary(numbers, advice)


def test_questions_that_are_the_same_share_successes_where_training_lets_them(tokenizer):
  config = settings(include_environment_feedback=False)
  twice = [examples(1)[0], dataclasses.replace(examples(1)[0], id='again')]
  for shared, fraction in ((False, 3 / 8), (True, 7 / 8)):
    config.data.group_duplicates = shared
    with Graders(config.environments) as graders:
      drawn = iter(['0'])  # The first of all samples is right, no other one.

      def say(prompt, *_, drawn=drawn):
        return '0' if DEMONSTRATION in prompt else next(drawn, '9')

      numbers = probe(config, Scripted(tokenizer, say), {}, {}, tokenizer, graders, twice)
    assert numbers['teacher/signal'] == pytest.approx(fraction)


def test_lengths_are_measured_before_shortening(tokenizer):
  full, _ = measure(tokenizer, scripted, max_reprompt_len=10_000)
  limit = int(full['reprompt/tokens_max']) - 5
  short, _ = measure(tokenizer, scripted, max_reprompt_len=limit)
  assert full['reprompt/truncated'] == 0.0 < short['reprompt/truncated'] < 1.0
  assert short['reprompt/tokens_max'] == full['reprompt/tokens_max']


def test_other_contexts_do_not_end_the_probe_where_the_configured_one_fits(tokenizer):
  only_solutions = dict(include_environment_feedback=False)
  full, _ = measure(tokenizer, scripted, **only_solutions)
  limit = int(full['reprompt/tokens_max'])
  for truncation, measured in (
    ('right', {'solution', 'feedback', 'both'}),
    ('content', {'solution'}),
    ('error', {'solution'}),
  ):
    changes = dict(reprompt_truncation=truncation, max_reprompt_len=limit, **only_solutions)
    numbers, sampler = measure(tokenizer, scripted, **changes)
    assert {name for name in ('solution', 'feedback', 'both') if f'context/{name}/gap' in numbers} == measured
    assert numbers['teacher/accuracy'] == full['teacher/accuracy']
    assert numbers['rule/solution/over_configured'] == 0.0
    assert ('rule/both/gain' in numbers) == ('both' in measured)
    # What cannot be measured is said, with the setting.
    assert sum('is not measured. actor.self_distillation.max_reprompt_len' in text for text in sampler.said) == 3 - len(
      measured
    )
    assert probe_report.recommend({**GOOD, **numbers}, settings(**changes))
  assert {made.reprompt_truncation for made in contexts(settings(**changes).actor.self_distillation).values()} == {
    'content'
  }


def test_errors_count_questions_not_completions():
  values, group = np.array([1.0, 1.0, 0.0, 0.0, 0.5, 0.5]), np.array([0, 0, 1, 1, 2, 2])
  mean, error = mean_and_error(values, group)
  assert mean == 0.5 and error == pytest.approx(np.std([1.0, 0.0, 0.5], ddof=1) / np.sqrt(3))
  assert mean_and_error(np.repeat(values, 10), np.repeat(group, 10)) == (0.5, pytest.approx(error))
  assert mean_and_error(values[:2], group[:2]) == (1.0, None)


GOOD = {
  'questions': 100,
  'completions': 800,
  'student/sampled': 0.3,
  'signal/sdpo_questions': 0.8,
  'signal/grpo_questions': 0.6,
  'signal/all_right': 0.1,
  'signal/all_wrong': 0.2,
  'teacher/signal': 0.7,
  'teacher/accuracy': 0.6,
  'teacher/plain_accuracy': 0.35,
  'teacher/gap': 0.25,
  'teacher/gap_se': 0.03,
  'teacher/truncated': 0.0,
  'rule/solution/gain': 0.1,
  'rule/solution/over_configured': -0.075,
  'rule/solution/over_configured_se': 0.02,
  'rule/feedback/gain': 0.12,
  'rule/feedback/over_configured': -0.055,
  'rule/feedback/over_configured_se': 0.02,
  'rule/feedback_without_solution/gain': 0.175,
  'rule/feedback_without_solution/over_configured': 0.0,
  'rule/feedback_without_solution/over_configured_se': 0.0,
  'rule/both/gain': 0.16,
  'rule/both/over_configured': -0.015,
  'rule/both/over_configured_se': 0.02,
  'prompt/over_limit': 0.0,
  'prompt/tokens_max': 900.0,
  'completion/truncated': 0.01,
  'completion/ungraded': 0.0,
  'completion/format_valid': 0.95,
  'reprompt/truncated': 0.0,
  'reprompt/tokens_max': 2000.0,
}
BETTER = {'rule/both/gain': 0.3, 'rule/both/over_configured': 0.125}


def advise(changes, **settings_changes):
  config = Config()
  config.actor.policy_loss.loss_mode = settings_changes.pop('loss_mode', 'sdpo')
  config.data.filter_overlong_prompts = settings_changes.pop('filter_overlong_prompts', False)
  return probe_report.recommend({**GOOD, **changes}, config)


def test_a_good_run_is_recommended_with_its_gap():
  verdict, *notes = advise({})
  assert verdict.startswith('Worth a run.') and '+25.0 ± 3.0 points' in verdict and '2605.30070' in verdict
  assert 'expectation, not a promise' in verdict
  assert len(notes) == 2 and 'The configured one is the best of these.' in notes[0] and 'GRPO' in notes[1]


@pytest.mark.parametrize(
  'changes, sentence',
  [
    ({'signal/sdpo_questions': 0.04}, 'knows more than the student at only 4.0 % of the questions'),
    ({'signal/sdpo_questions': 0.04}, 'Use easier questions'),
    ({'signal/sdpo_questions': 0.04, 'signal/all_right': 0.9}, 'use harder ones'),
    ({'teacher/gap': -0.1}, 'does not measurably help: with it the same model is right -10.0 ± 3.0 points'),
    ({'teacher/gap': 0.05}, 'does not measurably help'),  # Less than two standard errors.
    ({'student/sampled': 0.97}, 'right with 97.0 % of its samples already'),
    ({'completion/ungraded': 0.5}, 'The grader could not grade 50.0 % of the completions: fix it first'),
  ],
)
def test_runs_that_should_not_be_started(changes, sentence):
  verdict = advise(changes)[0]
  assert verdict.startswith('Do not start this run as it is.') and sentence in verdict


@pytest.mark.parametrize(
  'changes, settings_changes, sentence',
  [
    ({'teacher/gap': 0.02, 'teacher/gap_se': 0.005}, {}, 'This gap is small'),
    ({'signal/sdpo_questions': 0.2}, {}, 'progress will be slow'),
    (
      BETTER | {'rule/both/over_configured_se': 0.02},
      {},
      'consider actor.self_distillation.include_demonstration=true, '
      'actor.self_distillation.include_environment_feedback=true, '
      'actor.self_distillation.environment_feedback_only_without_solution=false',
    ),
    (BETTER | {'rule/both/over_configured_se': 0.1}, {}, 'None of these is measurably better'),
    ({'prompt/over_limit': 0.1}, {}, 'which ends the run: raise it to 900'),
    ({'prompt/over_limit': 0.1}, {'filter_overlong_prompts': True}, '10.0 % of the prompts .* are left out'),
    ({'completion/truncated': 0.2}, {}, 'data.max_response_length=8192: raise it'),
    ({'teacher/truncated': 0.2}, {}, 'the gap is larger than measured'),
    ({'reprompt/truncated': 0.2}, {}, r'max_reprompt_len=10240 \(the longest has 2000 tokens\): raise it'),
    ({'completion/ungraded': 0.05}, {}, 'The grader could not grade 5.0 % of the completions, which are left out'),
    ({'completion/format_valid': 0.5}, {}, 'Only 50.0 % of the completions have the format'),
    ({}, {'loss_mode': 'vanilla'}, 'Worth a run. Scores differ within the group of 60.0 %'),
    ({'signal/grpo_questions': 0.01}, {'loss_mode': 'vanilla'}, 'Do not start .* GRPO learns from no others'),
    ({'signal/grpo_questions': 0.1}, {'loss_mode': 'vanilla'}, 'Only 10.0 % of the questions carry a signal'),
  ],
)
def test_advice(changes, settings_changes, sentence):
  found = '\n'.join(advise(changes, **settings_changes))
  assert re.search(sentence, found) or sentence in found, found
  plain = '\n'.join(advise({}))
  assert not re.search(sentence, plain) and sentence not in plain  # Without a reason it is not said.


def test_a_single_question_proves_nothing():
  numbers = {name: value for name, value in GOOD.items() if not name.endswith('_se')}
  assert probe_report.recommend(numbers, Config())[0].startswith('Do not start')


def test_settings_without_questions_and_outputs_that_cannot_be(tmp_path):
  config = Config()
  with pytest.raises(UserError, match='data.val_files of the config is empty'):
    probe_to_file(config)
  with pytest.raises(UserError, match='is a directory: name a file'):
    probe_to_file(config, output=str(tmp_path))
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot be written'):
    probe_to_file(config, output=str(tmp_path / 'file' / 'probe.json'))


def test_the_probe_stops_where_a_run_does_and_takes_the_teachers_prompts(tmp_path, monkeypatch):
  config = settings(max_reprompt_len=4096)
  config.model.path, config.model.dtype = str(tiny.make_model(tmp_path / 'model')), 'float32'
  config.data.val_files, config.data.val_max_samples = ('generator:digits',), 2
  config.rollout.stop_token_ids = (65, 7)
  samplers = []
  monkeypatch.setattr(probing, 'probe', lambda config, sampler, *_: samplers.append(sampler) or {})
  probing.probe_model(config)
  [sampler] = samplers
  session, _ = make_session(config, tmp_path)
  options = dict(n=1, seed=0, step=0, max_tokens=1)
  for each, longest in ((session.sampler, 2048), (sampler, 4096)):
    [samples] = each.request([[1] * longest], **options).samples
    assert samples.stop_ids.tolist() == [7, 65, 258]
    with pytest.raises(UserError, match=f'more than data.max_prompt_length={longest}'):
      each.request([[1] * (longest + 1)], **options)


@pytest.mark.slow
def test_the_command_prints_and_writes_what_it_found(tmp_path):
  config = tiny.make_experiment(tmp_path)
  row = {'prompt': 'Q', 'dataset': 'parity', 'kind': 'parity', 'answer': '1', 'environment': 'parity'}
  texts = ['Q1', 'Q2', 'Q3', 'Q4', 'x' * 40]
  (tmp_path / 'rows.jsonl').write_text('\n'.join(json.dumps(row | {'prompt': text}) for text in texts))
  done = tiny.launch(
    'probe',
    f'--config={config}',
    f'--config.data.val_files={tmp_path}/rows.jsonl',
    '--config.data.val_max_samples=None',
    '--max_questions=3',
    f'--output={tmp_path}/new/probe.json',
    quick=True,
  )
  assert done.returncode == 0, done.stderr
  numbers = json.loads((tmp_path / 'new' / 'probe.json').read_text())
  assert numbers['questions'] == 3 and numbers['completions'] == 12 and numbers['prompt/rows'] == 5
  assert numbers['prompt/over_limit'] == pytest.approx(0.2) and numbers['prompt/tokens_max'] > 40
  assert numbers['completion/truncated'] > 0.5 and 0 < numbers['teacher/signal'] <= 1
  assert any('data.max_prompt_length=32, which ends the run' in sentence for sentence in numbers['recommendation'])
  assert '3 questions, 12 completions' in done.stdout
  assert all(sentence in done.stdout for sentence in numbers['recommendation'])
  assert 'Sampling 12 completions' in done.stderr
