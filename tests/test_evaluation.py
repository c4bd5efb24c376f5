"""mean@k, best@k and maj@k against closed forms; completions graded by the environment that their example names."""

import numpy as np
import pytest

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.training import evaluation
from sdpo_jax.types import Example, Outcome, Rollouts


def test_budget():
  assert evaluation.budget(1) == []
  assert evaluation.budget(4) == [2, 4]
  assert evaluation.budget(16) == [2, 4, 8, 16]
  assert evaluation.budget(6) == [2, 4, 6]


def test_best_at_k_is_the_chance_that_one_of_k_draws_succeeds():
  rng = np.random.default_rng(0)
  scores = np.array([1.0, 0.0, 0.0, 0.0])
  for k in (1, 2, 4):
    assert evaluation.best_at_k(scores, k, rng) == pytest.approx(1 - 0.75**k, abs=0.05)


def test_maj_at_k_scores_the_most_frequent_answer():
  rng = np.random.default_rng(0)
  # Three of five say 'b' (wrong): the more draws, the surer the majority is wrong.
  scores, answers = np.array([1.0, 1.0, 0.0, 0.0, 0.0]), ['a', 'a', 'b', 'b', 'b']
  values = [evaluation.maj_at_k(scores, answers, k, rng) for k in (1, 5, 51)]
  assert values[0] == pytest.approx(0.4, abs=0.05)
  assert values[0] > values[1] > values[2]
  assert values[2] < 0.15
  # The same number of right samples that agree less loses the vote; that agree more, wins it.
  assert evaluation.maj_at_k(scores, ['a', 'a', 'b', 'c', 'd'], 51, rng) > 0.85


def test_summary_names_and_mean():
  scores = np.array([[1.0, 0.0], [1.0, 1.0]])
  summary = evaluation.summarize(scores, [['x', 'y'], ['z', 'z']])
  assert set(summary) == {'mean@2', 'best@2', 'maj@2'}
  assert summary['mean@2'] == 0.75
  assert summary['best@2'] == pytest.approx((0.75 + 1) / 2, abs=0.03)
  assert set(evaluation.summarize(scores, None)) == {'mean@2', 'best@2'}


def rollouts(texts: list[str], group: list[int]) -> Rollouts:
  rows = len(texts)
  return Rollouts(
    group=np.array(group),
    prompt_tokens=np.zeros((rows, 1), np.int32),
    prompt_mask=np.ones((rows, 1), bool),
    completion_tokens=np.zeros((rows, 3), np.int32),
    completion_mask=np.ones((rows, 3), bool),
    sampling_log_probs=np.zeros((rows, 3)),
    model_log_probs=np.zeros((rows, 3)),
    entropy=np.zeros((rows, 3)),
    finish_reason=['stop', 'length'] * (rows // 2),
    text=texts,
  )


def example(name: str, environment: str) -> Example:
  return Example(name, [{'role': 'user', 'content': name}], environment, 'yes', 'source_' + environment)


def test_each_completion_is_graded_by_its_own_environment(monkeypatch):
  def grader(label):
    def grade(examples, completions, *, truncated):
      return [
        Outcome(float(text == e.ground_truth), f'{label}:{text}:{cut}', {'pred': text})
        for e, text, cut in zip(examples, completions, truncated, strict=True)
      ]

    return grade

  monkeypatch.setitem(registry._MAKERS, 'one', lambda settings: grader('one'))
  monkeypatch.setitem(registry._MAKERS, 'two', lambda settings: grader('two'))
  examples = [example('a', 'one'), example('b', 'two')]
  batch = rollouts(['yes', 'no', 'yes', 'yes'], [0, 0, 1, 1])
  outcomes = evaluation.grade(Graders(EnvironmentsConfig()), examples, batch)
  assert [outcome.score for outcome in outcomes] == [1, 0, 1, 1]
  assert [outcome.feedback for outcome in outcomes] == [
    'one:yes:False',
    'one:no:True',
    'two:yes:False',
    'two:yes:True',
  ]
  metrics = evaluation._by_source(examples, batch, outcomes, n=2)
  assert metrics['source_one']['mean@2'] == 0.5
  assert metrics['source_two']['mean@2'] == 1.0
  assert metrics['source_two']['maj@2'] == 1.0
  assert metrics['source_one']['truncated_fraction'] == 0.5
