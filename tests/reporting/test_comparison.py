"""A comparison of runs: arms, settings, curves, and whether seeds say that a difference is more than noise."""

import itertools
import json
import re

import numpy as np
import pytest
from scipy import stats

from sdpo_jax.errors import UserError
from sdpo_jax.reporting import comparison, seed_noise
from tests.reporting import report_runs
from tests.reporting.report_runs import config, metrics

MEAN = 'eval/t/mean@4'


def run(folder, *, values, seed=0, steps=None, **settings):
  """Write a run with evaluations at some steps, and return its directory."""
  made = config(seed=seed, name=folder.name, **settings)
  steps = range(len(values)) if steps is None else steps
  lines = [metrics(step) | {MEAN: value, 'eval/t/questions': 9.0} for step, value in zip(steps, values, strict=True)]
  made.trainer.total_training_steps = max(steps)
  return str(report_runs.write(folder, lines, settings=made))


def arms(tmp_path, *groups):
  """Write runs with these last values, an arm with a learning rate of its own for each group."""
  return [
    run(tmp_path / f'{arm}_{seed}', values=[0.0, value], seed=seed, optimizer__lr=10.0**-arm)
    for arm, group in enumerate(groups, start=1)
    for seed, value in enumerate(group)
  ]


GROUPS = [
  ((0.1, 0.2, 0.4), (0.5, 0.9)),
  ((1.0, 1.5, 0.7, 1.2), (0.2, 0.3, 0.1, 0.4)),
  ((1.0, 2.0, 3.0), (1.5, 2.5, 2.0)),
]


@pytest.mark.parametrize('a, b', GROUPS)
def test_the_tests_are_those_of_scipy(a, b):
  found = seed_noise.compare_groups(a, b)
  welch = stats.ttest_ind(a, b, equal_var=False)
  assert found.interval == pytest.approx(tuple(welch.confidence_interval(0.95)))
  exact = stats.permutation_test(
    (a, b), lambda x, y: abs(np.mean(x) - np.mean(y)), n_resamples=np.inf, alternative='greater'
  )
  assert found.p == pytest.approx(exact.pvalue)


@pytest.mark.parametrize(
  'sizes, least', [((2, 2), 1 / 3), ((3, 3), 0.1), ((4, 4), 2 / 70), ((3, 4), 1 / 35), ((2, 5), 1 / 21)]
)
def test_the_smallest_p_is_reached_by_groups_that_lie_apart(sizes, least):
  """With two sides: of equal groups the mirror image is as extreme."""
  a, b = np.arange(sizes[0]) + 0.1 * np.arange(sizes[0]) ** 2, 100 + np.arange(sizes[1])
  found = seed_noise.compare_groups(a, b)
  assert found.p == pytest.approx(least) and found.least_p == pytest.approx(least)
  assert (found.test, found.real) == ('permutation' if least <= 0.05 else 'Welch', True)


def test_where_seeds_say_nothing_nothing_is_said():
  for a, b in (((1.0,), (2.0,)), ((1.0,), (2.0, 2.1, 2.2))):
    found = seed_noise.compare_groups(a, b)
    assert (found.interval, found.p, found.test, found.real) == (None,) * 4
  found = seed_noise.compare_groups((1.0, 1.0), (2.0, 2.0))  # No scatter to judge by, and too few to permute.
  assert (found.interval, found.test, found.real) == (None, None, None)
  assert (
    seed_noise.compare_groups((1.0,) * 4, (2.0,) * 4).real
    and not seed_noise.compare_groups((1.0,) * 4, (1.0,) * 4).real
  )
  many = seed_noise.compare_groups(np.arange(12.0), np.arange(12.0) + 0.1)
  assert (many.p, many.least_p, many.test, many.real) == (None, None, 'Welch', False)


def test_noise_alone_is_seldom_called_a_difference():
  generator = np.random.default_rng(0)
  for size in (3, 4):
    found = [seed_noise.compare_groups(*generator.normal(size=(2, size))).real for _ in range(600)]
    assert np.mean(found) < 0.07  # 0.05, and two standard errors of the share.


def test_settings_that_differ_and_seeds_of_an_arm(tmp_path):
  found = comparison.compare(arms(tmp_path, (0.1, 0.2), (0.5, 0.7)))
  assert found['settings'] == {'optimizer.lr': [0.1, 0.01]}
  assert [arm['runs'] for arm in found['arms'].values()] == [
    {str(seed): str(tmp_path / f'{arm}_{seed}') for seed in (0, 1)} for arm in (1, 2)
  ]
  assert found['metrics'][MEAN]['values'] == {'arm 1': [0.1, 0.2], 'arm 2': [0.5, 0.7]}
  text = comparison.text(found)
  assert re.search(r'optimizer.lr +0.1 +0.01\n', text) and 'adamw' not in text
  assert re.search(rf'{MEAN}, arm 1 − arm 2 +2 and 2 +-0.4500 .* +0.33 +0.33 +no, Welch', text), text
  assert found['remarks'] == []


def test_rows_that_were_handed_over_are_the_same_rows_in_every_run(tmp_path):
  digest = '0123456789abcdef'
  runs = [
    run(tmp_path / name, values=[0.1, 0.2], seed=seed, data__train_files=(f'{tmp_path}/{name}/rows/{of}/train.jsonl',))
    for seed, (name, of) in enumerate((('a', digest), ('b', digest), ('c', digest[::-1])))
  ]
  assert [len(arm['runs']) for arm in comparison.compare(runs)['arms'].values()] == [2, 1]


def test_the_step_is_the_last_that_all_runs_have(tmp_path):
  runs = [
    run(tmp_path / 'a', values=[0.0, 0.2, 0.4, 0.8], steps=[0, 5, 10, 15]),
    run(tmp_path / 'b', values=[0.1, 0.3, 0.5], steps=[0, 10, 12], optimizer__lr=1.0),
  ]
  found = comparison.compare(runs)
  assert found['metrics'][MEAN]['step'] == 10 and found['metrics'][MEAN]['values'] == {'arm 1': [0.4], 'arm 2': [0.3]}
  lines = comparison.text(found).splitlines()
  at = lines.index(f'━━ {MEAN} at step 10 ━━')
  assert [line[-5:] for line in lines[at + 3 : at + 5]] == ['▁▃▅ █', '▂ ▄▅ ']
  assert lines[at + 1].endswith('steps 0 to 15') and not found['remarks'][2:]
  runs.append(run(tmp_path / 'c', values=[0.0, 0.1], steps=[0, 4], seed=1))
  assert comparison.compare(runs)['remarks'][-1].startswith(f'{MEAN}: before training, as step 0 is the last')


def test_a_single_seed_is_said_to_prove_nothing(tmp_path):
  text = comparison.text(comparison.compare(arms(tmp_path, (0.1,), (0.9,))))
  assert 'unknown' in text and 'Nothing can be concluded about an arm with a single seed' in text
  assert 'with 4 per arm the permutation test can decide' in text and 'permutation test of' not in text


def test_remarks_name_what_makes_numbers_incomparable(tmp_path):
  one = run(tmp_path / 'a', values=[0.1, 0.2])
  other = run(tmp_path / 'b', values=[0.1, 0.2], steps=[7, 8], seed=1, val_kwargs__temperature=0.0)
  text = comparison.text(comparison.compare([one, other]))
  assert 'val_kwargs.temperature differs' in text and f'{MEAN} is not compared: there is no step' in text
  open(f'{one}/metrics.jsonl', 'w').close()
  assert 'a has not ended: step 0 of 1.' in comparison.compare([one])['remarks']


def test_metrics_may_be_named_and_runs_without_evaluations_have_their_scores(tmp_path):
  runs = arms(tmp_path, (0.1, 0.2), (0.5, 0.7))
  found = comparison.compare(runs, ['train/*', MEAN])
  assert set(found['metrics']) == {'train/loss', MEAN} and len(found['pairs']) == 2
  with pytest.raises(
    UserError, match='--metric=eval/t/mean@8: no run has such a metric; the most similar are eval/t/mean@4'
  ):
    comparison.compare(runs, ['eval/t/mean@8'])
  bare = str(report_runs.write(tmp_path / 'bare', [metrics(1, score=0.25)]))
  assert list(comparison.compare([bare])['metrics']) == ['rollout/score_mean']


def test_the_same_run_is_not_two_seeds(tmp_path):
  one = run(tmp_path / 'a', values=[0.1, 0.2])
  copy = run(tmp_path / 'b', values=[0.1, 0.2])
  for named in ([one, one], [one, f'{one}/'], [one, copy]):
    with pytest.raises(UserError, match=f'^{one} and .* differ in no setting .*: name one for each seed'):
      comparison.compare(named)
  with pytest.raises(UserError, match='^Name the directories of the runs to compare'):
    comparison.compare([])


def test_folders_that_make_an_arm_are_named(tmp_path):
  runs = [run(tmp_path / name, values=[0.1], model__path=f'/{name}/base') for name in 'ab']
  found = comparison.compare(runs)
  assert len(found['arms']) == 2 and found['settings'] == {}
  assert 'Runs whose model.path is in another folder are arms of their own.' in found['remarks']


def test_no_name_controls_the_terminal(tmp_path):
  one = run(tmp_path / 'a\x1b[31m', values=[0.1, 0.2])
  text = comparison.text(comparison.compare([one]))
  assert 'a\\x1b[31m' in text and '\x1b' not in text and text.startswith('━━ Arms ━━\narm 1')


def test_the_file_holds_what_is_printed(tmp_path):
  runs = arms(tmp_path, (0.1, 0.2), (0.5, 0.7), (0.3,))
  text = comparison.write_comparison(runs, [], str(tmp_path / 'new' / 'c.json'))
  found = json.loads((tmp_path / 'new' / 'c.json').read_text())
  pairs = [tuple(pair['arms']) for pair in found['pairs']]
  assert pairs == list(itertools.combinations(('arm 1', 'arm 2', 'arm 3'), 2))
  assert found['pairs'][0]['difference'] == pytest.approx(-0.45) and found['pairs'][1]['interval'] is None
  assert found['metrics'][MEAN]['curves']['arm 3'] == {'0': 0.0, '1': 0.3} and 'arm 3' in text
  comparison.write_comparison(runs, [], str(tmp_path / 'new' / 'c.json'))
  with pytest.raises(UserError, match='config.json exists and is not a comparison: name another file'):
    comparison.write_comparison(runs, [], f'{runs[0]}/config.json')
