"""mean@n, best@k, worst@k, maj@k against closed forms and the reference's recipe; per data source; every sample
written.
"""

from __future__ import annotations

import dataclasses
import json
import types

from etils import epath
import numpy as np
import pytest

from sdpo_jax.config import Config, EnvironmentsConfig
from sdpo_jax.environments.grading import Graders
from sdpo_jax.evaluation import completions, evaluate, known_metrics
from sdpo_jax.inference import runs
from sdpo_jax.training import closing_text, step_records
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.types import Example, Outcome, Rollouts
from tests.scored_rollouts import WORDS, example, rollouts


def test_budget():
  assert evaluate.reported_ks(1) == []
  assert evaluate.reported_ks(4) == [2, 4]
  assert evaluate.reported_ks(16) == [2, 4, 8, 16]
  assert evaluate.reported_ks(6) == [2, 4, 6]


def reference_recipe(values: list[float], predictions: list[str], k: int) -> tuple[float, float, float]:
  """best, worst and majority of one question, one draw at a time in float64, as the reference describes it."""
  np.random.seed(42)
  best, worst, majority = [], [], []
  for _ in range(1000):
    drawn = np.random.choice(len(values), size=k, replace=True)
    best.append(max(values[i] for i in drawn))
    worst.append(min(values[i] for i in drawn))
    ballots: dict[str, list[float]] = {}
    for i in drawn:
      ballots.setdefault(predictions[i], []).append(values[i])
    majority.append(max(ballots.values(), key=len)[0])
  return float(np.mean(best)), float(np.mean(worst)), float(np.mean(majority))


@pytest.mark.parametrize('n', [2, 4, 6, 16])
def test_the_same_samples_give_the_numbers_of_the_reference(n):
  rng = np.random.default_rng(n)
  scores = rng.random((3, n)) * (rng.random((3, n)) < 0.5)
  predictions = [[f'answer {rng.integers(3)}' for _ in range(n)] for _ in range(3)]
  summary = evaluate.summarize(scores, n, evaluate.majority_samples(predictions, n))
  assert summary[f'mean@{n}'] == pytest.approx(scores.mean(), rel=1e-14)
  assert summary[f'std@{n}'] == pytest.approx(np.mean([row.std() for row in scores]), rel=1e-14)
  for k in evaluate.reported_ks(n):
    expected = np.mean(
      [reference_recipe(row.tolist(), preds, k) for row, preds in zip(scores, predictions, strict=True)], axis=0
    )
    measured = [summary[f'{name}@{k}'] for name in ('best', 'worst', 'maj')]
    np.testing.assert_allclose(measured, expected, rtol=1e-12)


def test_best_and_worst_at_k_are_the_chance_that_one_or_all_of_k_draws_succeed():
  scores = np.array([[1.0, 0.0, 0.0, 0.0]])
  for k in (1, 2, 4):
    assert evaluate.best_at_k(scores, k) == pytest.approx(1 - 0.75**k, abs=0.05)
    assert evaluate.worst_at_k(scores, k) == pytest.approx(0.25**k, abs=0.05)
    assert not np.signbit(evaluate.worst_at_k(np.zeros((1, 4)), k))  # Not -0.0, which a file would show.


def test_maj_at_k_scores_the_most_frequent_answer():
  # Three of five say 'b' (wrong): the more draws, the surer the majority is wrong.
  scores, answers = np.array([[1.0, 1.0, 0.0, 0.0, 0.0]]), ['a', 'a', 'b', 'b', 'b']

  def maj(answers, k):
    return evaluate.maj_at_k(scores, evaluate.majority_sample(answers, k)[None])

  values = [maj(answers, k) for k in (1, 5, 51)]
  assert values[0] == pytest.approx(0.4, abs=0.05)
  assert values[0] > values[1] > values[2]
  assert values[2] < 0.15
  # The same number of right samples that agree less loses the vote; that agree more, wins it.
  assert maj(['a', 'a', 'b', 'c', 'd'], 51) > 0.85


def test_summary_names():
  scores = np.array([[1.0, 0.0], [1.0, 1.0]])
  summary = evaluate.summarize(scores, 2, evaluate.majority_samples([['x', 'y'], ['z', 'z']], 2))
  assert set(summary) == {'mean@2', 'std@2', 'best@2', 'worst@2', 'maj@2'}
  assert summary['mean@2'] == 0.75 and summary['std@2'] == 0.25
  assert summary['best@2'] == pytest.approx((0.75 + 1) / 2, abs=0.03)
  assert set(evaluate.summarize(scores, 2)) == {'mean@2', 'std@2', 'best@2', 'worst@2'}
  assert evaluate.summarize(np.array([[1.0], [0.0]]), 1) == {'mean@1': 0.5}


def test_each_completion_is_graded_by_its_own_environment(registering):
  def grader(label):
    def grade(examples, completions, *, truncated):
      return [
        Outcome(float(text == e.ground_truth), f'{label}:{text}:{cut}', {'pred': text})
        for e, text, cut in zip(examples, completions, truncated, strict=True)
      ]

    return grade

  for label in ('one', 'two'):
    registering.register(label)(grader(label))
  examples = [example('a', 'one'), example('b', 'two')]
  batch = rollouts(['yes', 'no', 'yes', 'yes'], [0, 0, 1, 1])
  asked = [examples[group] for group in batch.group]
  truncated = [reason == 'length' for reason in batch.finish_reason]
  outcomes = Graders(EnvironmentsConfig()).grade(asked, batch.text, truncated=truncated)
  assert [outcome.score for outcome in outcomes] == [1, 0, 1, 1]
  assert [outcome.feedback for outcome in outcomes] == [
    'one:yes:False',
    'one:no:True',
    'two:yes:False',
    'two:yes:True',
  ]
  metrics = evaluate.metrics_by_source(examples, batch, outcomes, 2, WORDS)
  assert metrics['source_one']['mean@2'] == 0.5
  assert metrics['source_two']['mean@2'] == 1.0
  assert metrics['source_two']['maj@2'] == 1.0
  assert metrics['source_one']['truncated_fraction'] == 0.5


def code_outcomes() -> list[Outcome]:
  """Two questions of two completions: tests passed beside all-or-nothing scores, as code graders report."""
  return [
    Outcome(1.0, None, {'acc': 1.0, 'pred': 'a', 'format_valid': 1.0, 'tests': 4}),
    Outcome(0.0, None, {'acc': 0.75, 'pred': 'b', 'format_valid': 1.0, 'tests': 4}),
    Outcome(0.0, None, {'acc': 0.5, 'pred': 'b', 'format_valid': np.float32(0), 'tests': 4, 'seen': True}),
    Outcome(0.0, None, {'acc': np.float64(0.25), 'pred': 'c', 'format_valid': False, 'tests': 4}),
  ]


def test_score_and_acc_are_kept_apart_and_every_number_is_reported():
  metrics = evaluate.metrics_by_source(
    [example('a', 'x')] * 2, rollouts(['t'] * 4, [0, 0, 1, 1]), code_outcomes(), 2, WORDS
  )
  found = metrics['source_x']
  assert found['mean@2'] == 0.25 and found['acc/mean@2'] == 0.625
  assert found['acc/std@2'] == 0.125
  assert found['acc/best@2'] == pytest.approx((1 - 0.25 * 0.25 + 0.5 - 0.25 * 0.25) / 2, abs=0.02)
  assert found['acc/worst@2'] < found['acc/mean@2'] < found['acc/best@2']
  assert {'maj@2', 'acc/maj@2', 'tests/mean@2'} <= set(found)
  assert found['tests/mean@2'] == 4.0
  assert found['format_valid_fraction'] == 0.5
  assert found['questions'] == 2
  assert not [name for name in found if name.startswith(('pred', 'seen', 'format_valid/'))]


def test_the_inverted_incorrect_format_of_the_reference_is_not_read():
  inverted = {'incorrect_format': 1.0, 'format_valid': 1.0}
  batch = rollouts(['t'] * 2, [0, 0])
  found = evaluate.metrics_by_source([example('a', 'x')], batch, [Outcome(1.0, '', inverted)] * 2, 2, WORDS)['source_x']
  assert found['format_valid_fraction'] == 1.0
  silent = evaluate.metrics_by_source(
    [example('a', 'x')], batch, [Outcome(1.0, '', {'incorrect_format': 0.0})] * 2, 2, WORDS
  )
  assert 'format_valid_fraction' not in silent['source_x']


def test_an_ungraded_sample_is_counted_and_hides_no_metric():
  broken = Outcome.ungraded('No.')
  outcomes = [*code_outcomes()[:3], broken]
  found = evaluate.metrics_by_source([example('a', 'x')] * 2, rollouts(['t'] * 4, [0, 0, 1, 1]), outcomes, 2, WORDS)
  assert found['source_x']['ungraded_fraction'] == 0.25
  assert found['source_x']['tests/mean@2'] == 4.0
  assert found['source_x']['format_valid_fraction'] == pytest.approx(2 / 3)
  alone = evaluate.metrics_by_source([example('a', 'x')], rollouts(['t'] * 2, [0, 0]), [broken] * 2, 2, WORDS)[
    'source_x'
  ]
  assert np.isnan(alone['mean@2']) and alone['ungraded_fraction'] == 1.0
  assert 'format_valid_fraction' not in alone


def test_lengths_entropy_and_words_of_doubt():
  texts = ['Wait, maybe not. WAIT.', 'awaiting mightily', 'Hmm?', '']
  batch = rollouts(texts, [0, 0, 0, 0], lengths=[10, 20, 30, 100])
  found = completions.describe(batch, [Outcome(0.0)] * 4, np.arange(4), WORDS)
  assert found['completion_length_mean'] == 40.0
  assert found['completion_length_p50'] == 25.0
  assert found['completion_length_p95'] == pytest.approx(30 + 0.85 * 70)
  assert found['completion_length_max'] == 100.0
  assert found['epistemic_words_mean'] == 1.0
  assert found['truncated_fraction'] == 0.5
  assert found['entropy'] == 0.5
  assert 'epistemic_words_mean' not in completions.describe(batch, [Outcome(0.0)] * 4, np.arange(4), ())
  assert completions.count_words('let me check, let me', ('let me check', 'let me')) == 2


def graded(examples: list[Example], batch: Rollouts, outcomes: list[Outcome]) -> GradedRollouts:
  return GradedRollouts(examples, [[1]] * len(examples), batch, outcomes, np.arange(len(batch)), 0.0)


def test_a_batch_of_several_sources_is_described_as_a_whole_and_by_source():
  examples, batch = [example('a', 'x'), example('b', 'y')], rollouts(['t'] * 4, [0, 1, 1, 0])
  found = step_records.rollout_metrics(graded(examples, batch, code_outcomes()), Config())
  assert found['rollout/success_rate'] == 0.25 and found['rollout/solved_group_fraction'] == 0.5
  assert found['rollout/source_x/success_rate'] == 0.5 and found['rollout/source_y/success_rate'] == 0.0
  assert found['rollout/source_x/acc_mean'] == 0.625 and found['rollout/acc_mean'] == 0.625
  assert found['rollout/source_y/format_valid_fraction'] == 0.5
  one = step_records.rollout_metrics(graded([example('a', 'x')] * 2, batch, code_outcomes()), Config())
  assert not [name for name in one if 'source_x' in name]
  assert {name.removeprefix('rollout/source_x/') for name in found if 'source_x' in name} == {
    name.removeprefix('rollout/') for name in one
  }


def test_the_divergence_of_a_batch_of_several_sources_is_logged_by_source():
  mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]], bool)
  batch = rollouts(['t'] * 4, [0, 1, 1, 0])
  batch.completion_mask = mask
  taught = np.broadcast_to(np.array([[1], [1], [1], [0]], np.float32), mask.shape)  # The last sample has no teacher.
  generation = types.SimpleNamespace(rollouts=batch, distill_mask=taught)
  divergence = np.array([[1, 2, 90], [4, 90, 90], [5, 6, np.nan], [90, 90, 90]], np.float32)
  measured = types.SimpleNamespace(token_values={'divergence': divergence})
  drawn = graded([example('a', 'x'), example('b', 'y')], batch, code_outcomes())
  found = step_records.divergence_metrics(measured, generation, drawn)
  assert found == {'teacher/source_x/divergence': 1.5, 'teacher/source_y/divergence': 5.0}
  one = graded([example('a', 'x')] * 2, batch, code_outcomes())
  assert step_records.divergence_metrics(measured, generation, one) == {}
  without = types.SimpleNamespace(token_values={})  # A policy gradient has none.
  assert step_records.divergence_metrics(without, generation, drawn) == {}


def test_the_gap_is_success_in_training_minus_held_out_mean():
  examples, batch = [example('a', 'x'), example('b', 'y')], rollouts(['t'] * 4, [0, 1, 1, 0])
  evaluated = {'eval/source_x/mean@4': 0.125, 'eval/source_x/acc/mean@4': 0.9, 'eval/other/mean@4': 1.0}
  rates = step_records.success_rates(graded(examples, batch, code_outcomes()), Config())
  assert step_records.gap_metrics(rates, evaluated) == {'gap/source_x': 0.375}
  assert step_records.gap_metrics(rates, {}) == {}


def is_excerpt(written: str, text: str) -> bool:
  """Whether a text of 10,000,000 characters is written with its ends and its length, in about 65,536 characters."""
  begins, ends = written.startswith(text[:32_000]), written.endswith(text[-32_000:])
  return begins and ends and len(written) < 66_000 and f' of {len(text):,} characters left out' in written


def test_rollouts_are_written_with_excerpts_of_long_texts(tmp_path):
  long, whole = ''.join(map(str, range(1_500_000))), 'y' * 65_536
  asked = dataclasses.replace(example('a', 'x'), messages=[{'role': 'user', 'content': long}])
  batch = rollouts([long, whole], [0, 0])
  session = types.SimpleNamespace(workdir=epath.Path(tmp_path))
  context = types.SimpleNamespace(mask=[1, 0], messages=[asked.messages, asked.messages])
  batch = graded([asked], batch, [Outcome(1.0, long), Outcome(0.0, None)])
  step_records.write_rollouts(session, 3, batch, context, types.SimpleNamespace(token_values={}))
  first, second = map(json.loads, (tmp_path / 'rollouts' / '3.jsonl').read_text().splitlines())
  written = (
    first['completion'],
    first['feedback'],
    first['prompt'][0]['content'],
    first['teacher_prompt'][0]['content'],
  )
  assert all(is_excerpt(text, long) for text in written)
  assert (second['completion'], second['feedback'], second['teacher_prompt']) == (whole, None, None)


def test_evaluations_with_huge_strange_and_infinite_content_are_written_and_read_back(tmp_path):
  huge, broken = 'x' * 10_000_000, 'lone surrogate \ud83d and \x00'
  outcomes = [
    Outcome(np.float32(0.5), broken, {'pred': huge, 'acc': np.float32(0.5), 'loss': float('inf'), 'score': 7}),
    Outcome(0.0, None, {'pred': broken, 'acc': 0, 'loss': np.float64('nan'), 'id': 'other', 'many': [1, 2]}),
  ]
  examples, batch = [example('a', 'x')], rollouts([huge, broken], [0, 0])
  measured = evaluate.Evaluation(
    evaluate.metrics_by_source(examples, batch, outcomes, 2, WORDS), evaluate.written(examples, batch, outcomes)
  )
  step_records.write_evaluation(epath.Path(tmp_path), 7, measured)
  content = json.loads((tmp_path / 'eval' / '7.json').read_text(), parse_constant=pytest.fail)
  assert content['step'] == 7
  assert content['metrics']['source_x']['mean@2'] == 0.25
  assert content['metrics']['source_x']['loss/mean@2'] is None
  first, second = content['samples']
  assert first['feedback'] == broken and is_excerpt(first['completion'], huge) and is_excerpt(first['pred'], huge)
  assert first['score'] == 0.5 and first['loss'] is None and first['tokens'] == 3
  assert second['completion'] == broken and second['id'] == 'a' and 'many' not in second


def test_the_table_has_a_row_a_source_and_leaves_out_what_no_source_has():
  metrics = evaluate.metrics_by_source(
    [example('a', 'x')] * 2, rollouts(['t'] * 4, [0, 0, 1, 1]), code_outcomes(), 2, WORDS
  )
  plain = {'source_y': {'mean@2': 0.5, 'best@2': 0.75, 'questions': 1000.0, 'truncated_fraction': 0.125}}
  header, _, first, second = closing_text.evaluation_table(evaluate.Evaluation(metrics | plain, []), 2).splitlines()
  assert header.split('  ')[0] == 'held-out' and 'acc/mean@2' in header and 'format valid' in header
  assert first.split()[:2] == ['source_x', '25.0%'] and '62.5%' in first
  assert second.split()[:4] == ['source_y', '50.0%', '75.0%', '–'] and second.split()[-1] == '1,000'
  assert '12.5%' in second
  header = closing_text.evaluation_table(evaluate.Evaluation(plain, []), 2).splitlines()[0]
  assert 'maj@2' not in header and 'format valid' not in header and 'ungraded' not in header
  plain['source_y']['ungraded_fraction'] = 0.25
  header, _, line = closing_text.evaluation_table(evaluate.Evaluation(plain, []), 2).splitlines()
  assert 'ungraded' in header and '25.0%' in line


def test_the_summary_of_a_run_shows_score_and_mean_acc_whatever_the_task_is_called():
  names = ('mean@2', 'std@2', 'best@2', 'worst@2', 'maj@2', 'acc/mean@2', 'acc/best@2', 'tests/mean@2', 'questions')
  flat = [f'eval/{task}/{name}' for task in ('a/b', 'a') for name in names]
  assert [name for name in known_metrics.headlines(flat) if name.startswith('eval/a/b/')] == [
    f'eval/a/b/{name}' for name in ('mean@2', 'best@2', 'maj@2', 'acc/mean@2')
  ]
  assert len(known_metrics.headlines(flat)) == 8


def test_settings_that_make_an_evaluation_another_one_are_named():
  trained, config = Config(), Config()
  config.optimizer.lr, config.environments.sandbox.workers = 1.0, 3
  assert runs.measured_otherwise(trained, config) == []
  config.environments.profile, config.val_kwargs.n = 'reference', 16
  assert runs.measured_otherwise(trained, config) == [
    "environments.profile is 'clean' there and 'reference' here",
    'val_kwargs.n is 4 there and 16 here',
  ]
