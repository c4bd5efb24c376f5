"""A completion that cannot be graded is as if it had not been sampled, and too many of them end a run, which is
saved.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading

import numpy as np
import pytest

from sdpo_jax.config import Config
from sdpo_jax.environments.outcomes import check_graded
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation import evaluate
from sdpo_jax.learning import batching
from sdpo_jax.objective_settings import AGGREGATIONS
from sdpo_jax.training import loop, step_records
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.training.specs import batch_spec
from sdpo_jax.types import Example, Outcome
from tests import tiny
from tests.generation_batches import make_config, make_samples
from tests.scored_rollouts import WORDS, example, rollouts
from tests.teacher.teacher_contexts import build

LATE = Outcome.ungraded('no complete answer within 30 s')


def test_an_outcome_has_a_score_or_a_reason():
  assert LATE == Outcome(None, None, {}, 'no complete answer within 30 s') and not LATE.graded
  assert Outcome(0.0).graded and Outcome(0.0).reason is None


# ———— In the batch ————


def without(samples: batching.GenerationBatch, rows: np.ndarray) -> batching.GenerationBatch:
  """Return the batch of these rows alone."""
  return dataclasses.replace(
    samples,
    prompts=[samples.prompts[row] for row in rows],
    teacher_prompts=[samples.teacher_prompts[row] for row in rows],
    rollouts=samples.rollouts.take(rows),
    distill_mask=samples.distill_mask[rows],
    advantages=samples.advantages[rows],
    graded=None,
  )


@pytest.mark.parametrize('group_size', [None, 1])
@pytest.mark.parametrize('mode', AGGREGATIONS)
def test_coefficients_are_those_of_the_batch_without_it(mode, group_size):
  config = make_config(loss_agg_mode=mode, loss_group_size=group_size, entropy_coeff=0.1)
  samples = make_samples(config)
  graded = np.array([1, 1, 0, 1, 1, 0, 1, 1], bool)
  rest = np.flatnonzero(graded)
  samples.graded = graded
  found = batching.coefficients(samples, np.arange(8), batch_spec(config))
  expected = batching.coefficients(without(samples, rest), np.arange(6), batch_spec(config))
  assert found.keys() == expected.keys() == {'distill_coef', 'entropy_coef'}
  for name, values in found.items():
    assert not values[~graded].any()
    np.testing.assert_array_equal(values[rest], expected[name])
  live = batching.has_signal(samples, found, np.arange(8))
  assert not live[~graded].any() and live[rest].any()


def test_a_policy_gradient_leaves_it_out_too():
  config = make_config(loss_group_size=1)
  config.actor.policy_loss.loss_mode = 'vanilla'
  samples = make_samples(config)
  samples.advantages = np.ones_like(samples.advantages)
  samples.graded = np.arange(8) != 3
  (coef,) = batching.coefficients(samples, np.arange(8), batch_spec(config)).values()
  np.testing.assert_allclose(coef.sum(1), [1 / 7] * 3 + [0] + [1 / 7] * 4, rtol=1e-6)


def test_nothing_graded_is_no_division_by_zero():
  config = make_config(loss_group_size=1)
  samples = make_samples(config)
  samples.graded = np.zeros(8, bool)
  assert not any(values.any() for values in batching.coefficients(samples, np.arange(8), batch_spec(config)).values())


def test_it_is_neither_taught_nor_a_demonstration_and_counts_in_no_fraction():
  built = build(['right', 'late', 'wrong'], [1, None, 0], ['', 'never read', 'Wrong.'])
  assert built.mask.tolist() == [0, 0, 1] and built.solutions == [None, None, 'right']
  assert built.feedback[1] is None
  assert built.metrics['self_distillation/reprompt_sample_fraction'] == 0.5
  assert built.metrics['self_distillation/success_group_fraction'] == 1.0
  alone = build(['late', 'wrong'], [None, 0])
  assert not alone.mask.any() and alone.metrics['self_distillation/success_group_fraction'] == 0.0


# ———— In evaluations ————


def test_an_evaluation_is_that_of_the_graded_samples():
  """Of three questions one lacks a sample and one has none; each metric is the mean over the two that are left."""
  outcomes = [Outcome(score, None, {'pred': pred, 'acc': score / 2}) for score, pred in [(1.0, 'a'), (0.0, 'b')] * 4]
  outcomes += [LATE] * 4
  outcomes[5] = LATE
  batch = rollouts(['t'] * 12, [0] * 4 + [1] * 4 + [2] * 4)
  found = evaluate.metrics_by_source([example(name, 'x') for name in 'abc'], batch, outcomes, 4, WORDS)['source_x']
  assert found['ungraded_fraction'] == 5 / 12 and found['questions'] == 3
  assert found['mean@4'] == pytest.approx((1 / 2 + 2 / 3) / 2, rel=1e-15)
  assert found['acc/mean@4'] == pytest.approx((1 / 4 + 1 / 3) / 2, rel=1e-15)
  assert found['std@4'] == pytest.approx((0.5 + (2 / 9) ** 0.5) / 2, rel=1e-12)
  for k in (2, 4):  # At least one of k draws with replacement is right: 1 − (1/2)^k and 1 − (1/3)^k.
    expected = ((1 - 0.5**k) + (1 - (1 / 3) ** k)) / 2
    assert found[f'best@{k}'] == pytest.approx(expected, abs=0.03)
    assert found[f'worst@{k}'] == pytest.approx((0.5**k + (2 / 3) ** k) / 2, abs=0.03)
  assert 0.5 < found['maj@4'] < 0.8 and 'acc/maj@2' in found


def test_where_everything_is_graded_the_numbers_are_the_reference_s_to_the_bit():
  """Against the formulas on a rectangular array, as before there were ungraded samples."""
  rng = np.random.default_rng(0)
  for n in (2, 3, 16):
    values = rng.random((7, n)) * (rng.random((7, n)) < 0.5)
    found = evaluate.summarize(list(values), n)
    assert found[f'mean@{n}'] == float(values.mean()) and found[f'std@{n}'] == float(values.std(axis=1).mean())
    for k in evaluate.reported_ks(n):
      draws = evaluate.bootstrap_draws(n, k)
      assert found[f'best@{k}'] == float(np.mean([row[draws].max(1).mean() for row in values]))


def test_a_source_without_a_graded_sample_has_no_mean_but_is_described():
  batch = rollouts(['t'] * 2, [0, 0])
  found = evaluate.metrics_by_source([example('a', 'x')], batch, [LATE] * 2, 2, WORDS)['source_x']
  assert np.isnan(found['mean@2']) and found['ungraded_fraction'] == 1.0 and found['truncated_fraction'] == 0.5
  assert not [name for name in found if '@' in name and name != 'mean@2']
  graded = GradedRollouts([example('a', 'x')], [[1]], batch, [LATE] * 2, np.arange(2), 0.0)
  metrics = step_records.rollout_metrics(graded, Config())
  assert np.isnan(metrics['rollout/score_mean']) and metrics['rollout/ungraded_fraction'] == 1.0


def test_a_batch_is_described_by_its_graded_samples():
  outcomes = [Outcome(1.0, '', {'acc': 1.0}), LATE, Outcome(0.0, '', {'acc': 0.5}), LATE]
  graded = GradedRollouts(
    [example('a', 'x'), example('b', 'x')],
    [[1], [1] * 9],
    rollouts(['t'] * 4, [0, 0, 0, 1]),
    outcomes,
    np.arange(4),
    0.0,
  )
  metrics = step_records.rollout_metrics(graded, Config())
  assert metrics['rollout/score_mean'] == metrics['rollout/success_rate'] == 0.5
  assert metrics['rollout/solved_group_fraction'] == 1.0 and metrics['rollout/acc_mean'] == 0.75
  assert metrics['rollout/ungraded_fraction'] == 0.5
  assert metrics['rollout/prompt_length_mean'] == (3 * 1 + 9) / 4
  rates = step_records.success_rates(graded, Config())
  assert step_records.gap_metrics(rates, {'eval/source_x/mean@4': 0.25}) == {'gap/source_x': 0.25}


# ———— Too many ————


def test_more_than_the_limit_ends_a_batch_with_the_most_frequent_reason():
  outcomes = [LATE, Outcome.ungraded('its answer is not JSON'), LATE, Outcome(1.0)]
  check_graded(outcomes, 0.75)
  check_graded([], 0.0)
  with pytest.raises(UserError) as raised:
    check_graded(outcomes, 0.7)
  assert str(raised.value).startswith(
    '3 of 4 completions could not be graded, more than the fraction environments.max_ungraded_fraction=0.7 of a batch, '
    'most often because (2 times): no complete answer within 30 s. '
  )


class Flaky:
  """Grades the sum of the bytes; questions named in `late` are ungraded."""

  def __init__(self):
    self.late: set[str] = set()

  def grade(self, examples, completions, *, truncated):
    scores = [float(sum(text.encode()) % 2) for text in completions]
    return [
      LATE if asked.id in self.late else Outcome(score, '' if score else 'It must be odd.', {'pred': text[:4]})
      for asked, score, text in zip(examples, scores, completions, strict=True)
    ]


@pytest.fixture
def flaky(registering):
  grader = Flaky()

  def questions(split, seed):
    def make(index):
      return Example(f'{split}-{index}', [{'role': 'user', 'content': f'{split} {index}'}], 'flaky', None, 'parity')

    return make

  def grade(*arguments, **options):
    return grader.grade(*arguments, **options)

  registering.register('flaky')(grade)
  registering.register_generator('flaky')(questions)
  return grader


def make_run(folder) -> Config:
  folder.mkdir()
  text = tiny.CONFIG[tiny.CONFIG.index('def get_config') :].replace('{model!r}', repr(str(tiny.make_model(folder))))
  namespace = {'Config': Config}
  exec(text.replace('generator:parity', 'generator:flaky'), namespace)
  config = namespace['get_config']()
  config.trainer.val_before_train, config.trainer.save_freq, config.trainer.test_freq = False, 0, 3
  return config


def lines_of(workdir) -> list[dict]:
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [
    {
      name: value
      for name, value in line.items()
      if not name.startswith(('time/', 'throughput/', 'fencing_epoch', 'line_digest'))
    }
    for line in lines
  ]


@pytest.mark.slow  # By default test_endings.py has runs that graders and errors end.
def test_a_run_that_ends_so_is_saved_and_repeats_the_batch_when_started_again(tmp_path, flaky):
  config = make_run(tmp_path / 'model')
  config.trainer.test_freq, config.trainer.total_training_steps = 0, 2
  flaky.late = {f'train-{i}' for i in range(2, 1000)}  # Questions come in their order: all but those of the first step.
  with pytest.raises(UserError, match='8 of 8 completions could not be graded.*most often because: no complete answer'):
    loop.train(config, tmp_path / 'run')
  assert [line['step'] for line in lines_of(tmp_path / 'run')] == [1]
  assert [path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()] == ['1']
  flaky.late = set()
  assert loop.train(config, tmp_path / 'run').step == 2
  samples = (tmp_path / 'run' / 'rollouts' / '2.jsonl').read_text().splitlines()
  assert {json.loads(line)['id'] for line in samples} == {'train-2', 'train-3'}
  # What was published is missed, wherever the loop's own checkpoints are looked for.
  (tmp_path / 'run' / 'checkpoints').rename(tmp_path / 'unmounted')
  with pytest.raises(UserError, match='no checkpoint to resume from, although that of step 2 was published'):
    loop.train(config, tmp_path / 'run')


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_does_not_wait_for_a_grader_that_hangs(tmp_path, flaky):
  config = make_run(tmp_path / 'model')
  config.trainer.test_freq = 0
  loop.train(config, tmp_path / 'whole')
  grade, go, waited = flaky.grade, threading.Event(), []

  def hang(examples, completions, *, truncated):
    if {example.id for example in examples} & {'train-2', 'train-3'}:
      os.kill(os.getpid(), signal.SIGTERM)
      waited.append(go.wait(600))
    return grade(examples, completions, truncated=truncated)

  flaky.grade = hang
  result = loop.train(config, tmp_path / 'stopped')
  assert result.preempted and result.step == 1 and not waited
  go.set()
  flaky.grade = grade
  assert not loop.train(config, tmp_path / 'stopped').preempted
  assert lines_of(tmp_path / 'stopped') == lines_of(tmp_path / 'whole')


@pytest.mark.slow
def test_the_repeated_batch_and_a_failed_evaluation_leave_the_run_that_was_not_interrupted(tmp_path, flaky):
  config = make_run(tmp_path / 'model')
  loop.train(config, tmp_path / 'whole')
  asked = [json.loads(line)['id'] for line in (tmp_path / 'whole' / 'rollouts' / '3.jsonl').read_text().splitlines()]

  flaky.late = set(asked)
  with pytest.raises(UserError, match='8 of 8 completions could not be graded.*most often because: no complete answer'):
    loop.train(config, tmp_path / 'broken')
  assert [line['step'] for line in lines_of(tmp_path / 'broken')] == [1, 2]
  assert [path.name for path in (tmp_path / 'broken' / 'checkpoints').iterdir()] == ['2']

  flaky.late = {'test-0', 'test-1'}  # The batch can be graded now, its evaluation cannot.
  with pytest.raises(UserError, match='4 of 4 completions could not be graded'):
    loop.train(config, tmp_path / 'broken')
  assert (tmp_path / 'broken' / 'checkpoints' / '3').exists()
  whole, broken = lines_of(tmp_path / 'whole'), lines_of(tmp_path / 'broken')
  assert broken == whole[:2]  # The line of a step is written once, when it is complete.

  flaky.late = set()  # Started again, though all steps are done, the run makes up for the evaluation.
  assert loop.train(config, tmp_path / 'broken').evaluations.keys() == {3}
  assert lines_of(tmp_path / 'broken') == whole

  flaky.late = {asked[0]}  # Half of a batch is not more than half.
  result = loop.train(config, tmp_path / 'half')
  assert result.step == 3
  last = [json.loads(line) for line in (tmp_path / 'half' / 'rollouts' / '3.jsonl').read_text().splitlines()]
  late = [line for line in last if line['id'] == asked[0]]
  assert len(late) == 4 and all(line['score'] is None and line['ungraded'] == LATE.reason for line in late)
  assert all(line['teacher_prompt'] is None and line['divergence'] is None for line in late)
  assert all(line['ungraded'] is None for line in last if line['id'] != asked[0])
  assert lines_of(tmp_path / 'half')[2]['rollout/ungraded_fraction'] == 0.5
