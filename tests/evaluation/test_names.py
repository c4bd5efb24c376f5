"""The names that an evaluation will have are those that it has; a setting that names none of them is refused."""

import numpy as np
import pytest

from sdpo_jax.errors import UserError
from sdpo_jax.evaluation import evaluate, known_metrics
from sdpo_jax.types import Example, Outcome, Rollouts


def measured(tasks, n, words):
  """Names of an evaluation of one question a task whose grader reports all that has a meaning, and `steps`."""
  examples = [Example(task, [], 'e', None, task) for task in tasks]
  count = len(tasks) * n
  ones = np.ones((count, 2), np.float32)
  rollouts = Rollouts(
    group=np.repeat(np.arange(len(tasks)), n),
    prompt_tokens=ones.astype(np.int32),
    prompt_mask=ones.astype(bool),
    completion_tokens=ones.astype(np.int32),
    completion_mask=ones.astype(bool),
    sampling_log_probs=ones,
    model_log_probs=ones,
    entropy=ones,
    finish_reason=['stop'] * count,
    text=['perhaps'] * count,
  )
  outcomes = [Outcome(1.0, None, {'pred': 'a', 'format_valid': 1.0, 'steps': 2.0})] * count
  found = evaluate.metrics_by_source(examples, rollouts, outcomes, n, words)
  return set(evaluate.Evaluation(found, []).flat())


@pytest.mark.parametrize('n', [1, 2, 6])
@pytest.mark.parametrize('words', [(), ('perhaps',)])
def test_all_that_an_evaluation_measures_was_known_but_for_what_graders_add(n, words):
  tasks = ['math', 'me/rows']
  found = measured(tasks, n, words)
  known = set(known_metrics.evaluation_names(tasks, n, words))
  assert {name for name in found if '/steps/' not in name} == known
  for name in found:
    known_metrics.check_best_metric(name, tasks, n, words)


@pytest.mark.parametrize(
  'name, sentence',
  [
    ('eval/maths/mean@4', 'evaluation of math, me/rows with val_kwargs.n=4; the most similar are eval/math/mean@4'),
    ('eval/math/mean@16', 'the most similar are .*eval/math/mean@4'),
    ('eval/math/mean', 'the most similar are .*eval/math/mean@4'),
    ('eval/math/acc/mean@8', 'is not among'),
    ('eval/rows/mean@4', 'the most similar are .*eval/me/rows/mean@4'),
    ('eval/math/epistemic_words_mean', 'is not among'),  # No words are counted.
    ('math/mean@4', r'is not a metric: those of evaluations are eval/<task>/…, e\.g\. eval/<task>/mean@4'),
    ('rollout_score', 'is not a metric'),
  ],
)
def test_a_metric_that_nothing_measures_is_refused_with_the_nearest(name, sentence):
  with pytest.raises(UserError, match=f'^trainer.best_metric={name} .*{sentence}'):
    known_metrics.check_best_metric(name, ['math', 'me/rows'], 4, ())


@pytest.mark.parametrize('name', [None, 'rollout/score_mean', 'eval/math/acc/mean@4', 'eval/me/rows/a/b/best@2'])
def test_what_may_be_measured_is_taken(name):
  known_metrics.check_best_metric(name, ['math', 'me/rows'], 4, ())


def test_a_metric_of_evaluations_needs_one():
  with pytest.raises(UserError, match='but there are none: set data.val_files and trainer.test_freq'):
    known_metrics.check_best_metric('eval/math/mean@4', [], 4, ())
  known_metrics.check_best_metric('train/loss', [], 4, ())
