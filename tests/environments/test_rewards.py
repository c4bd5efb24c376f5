"""Several graders for one question: how rows name them, what their weighted sum is, and what is reported of each."""

from __future__ import annotations

import json
import types

from etils import epath
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sdpo_jax.config import Config, EnvironmentsConfig, HttpGraderConfig, rewards
from sdpo_jax.config.fields import flatten
from sdpo_jax.config.overrides import differences, override
from sdpo_jax.data import rows, sources
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders, weighted_sum
from sdpo_jax.environments.outcomes import scores_of
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation import evaluate
from sdpo_jax.preflight import grader_trials as preflight
from sdpo_jax.training import step_records
from sdpo_jax.training.graded import GradedRollouts
from sdpo_jax.types import Example, Outcome
from tests.local_server import Answer, Server
from tests.scored_rollouts import WORDS, rollouts

SCORES = (-10.0, 10.0)

# ———— How they are named ————


@pytest.mark.parametrize(
  'value, text',
  [
    ('math', 'math'),
    (' exact , 0.2*format', 'exact,0.2*format'),
    (['exact', '-.5 * length'], 'exact,-0.5*length'),
    (('exact',), 'exact'),
    ({'exact': 1, 'format': 0.2, 'other': None}, '1.0*exact,0.2*format'),
    ({'exact': None}, None),
    ({}, None),
    ([], None),
    ('', None),
    (None, None),
  ],
)
def test_all_spellings_mean_the_same(value, text):
  assert rewards.written(value) == text
  assert text is None or rewards.written(text) == text


def test_a_text_is_read_in_its_order_with_the_weights_that_it_states():
  found = [(reward.name, reward.weight) for reward in rewards.parse('b, 1e-3*a,0*c')]
  assert found == [('b', None), ('a', 0.001), ('c', 0.0)]


@pytest.mark.parametrize(
  'value, why',
  [
    (3, 'be the name of a grader, a list of names, or an object of weights by name, not 3'),
    (['a', 3], 'a list of names'),
    ('a,,b', "and not '' for one"),
    ('2*', "and not '2\\*' for one"),
    ('a,b,a', "name the grader 'a' once"),
    ('x*a', "finite numbers before a '\\*', such as 0.2\\*a, not 'x\\*a'"),
    ('2*3*a', 'finite numbers'),
    ('nan*a', 'finite numbers'),
    ({'a': 'much'}, "give 'a' a finite number as its weight, not 'much'"),
    ({'a': True}, 'finite number'),
    ({'a': float('inf')}, 'finite number'),
    ({'a': 10**400}, 'finite number'),
    ({'a,b': 1.0}, "and not 'a,b' for one"),
  ],
)
def test_a_row_that_names_them_wrongly_is_named(value, why):
  row = rows.RawRow('rows.jsonl, line 3', 3, {'prompt': 'Q', 'environment': value})
  with pytest.raises(UserError, match=f"^rows.jsonl, line 3: field 'environment' must .*{why}"):
    rows.example(row, 'train')


def test_rows_of_a_table_name_only_those_that_they_weigh(tmp_path):
  """Parquet gives every row all names that some row has, and null for those that it lacks."""
  table = [
    {'prompt': 'Q', 'environment': {'exact': 1.0, 'format': 0.5}},
    {'prompt': 'Q', 'environment': {'exact': 2.0}},
  ]
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / 'rows.parquet')
  listed = [{'prompt': 'Q', 'environment': ['exact', 'format']}, {'prompt': 'Q', 'environment': None}]
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed), tmp_path / 'lists.parquet')
  (tmp_path / 'rows.csv').write_text('prompt,environment\nQ,"exact,0.5*format"\n')

  def environments(name):
    read = sources.read_rows(str(tmp_path / name), 'data.train_files')
    return [rows.example(row, 'train', default_environment='a , b').environment for row in read]

  assert environments('rows.parquet') == ['1.0*exact,0.5*format', '2.0*exact']
  assert environments('lists.parquet') == ['exact,format', 'a,b']
  assert environments('rows.csv') == ['exact,0.5*format']


def test_preprocessed_rows_name_them_too_and_every_grader_needs_its_ground_truth():
  ready = {
    'data_source': 'own',
    'prompt': [{'role': 'user', 'content': 'Q'}],
    'reward_model': {'style': 'rule', 'ground_truth': 'B'},
    'extra_info': {'environment': ['mcq', '0.1*format']},
  }
  assert rows.example(rows.RawRow('r', 1, ready), 'train').environment == 'mcq,0.1*format'
  ready['reward_model'] = {'ground_truth': 'BB'}
  with pytest.raises(UserError, match="'reward_model.ground_truth', which 'mcq' grades by, must be the letter"):
    rows.example(rows.RawRow('r', 1, ready), 'train')
  raw = rows.RawRow('r', 1, {'prompt': 'Q', 'environment': 'format,code'})
  with pytest.raises(UserError, match="field 'tests' is missing or empty, but the row is graded by it"):
    rows.example(raw, 'train')


@pytest.mark.parametrize('name', ['a,b', '2*a', ' a', ''])
def test_no_grader_has_a_name_that_rows_could_not_say(name):
  with pytest.raises(ValueError, match='cannot be called'):
    registry.register(name)(lambda examples, completions, truncated: [])


# ———— The sum ————


@pytest.fixture
def functions(registering):
  """Register reward functions of fixed rewards: {name: [reward of completion '0', of '1', …]}."""

  def register(**given):
    for name, values in given.items():

      def function(completions, values=values):
        found = [values[int(text)] for text in completions]
        if any(isinstance(value, Exception) for value in found):
          raise next(value for value in found if isinstance(value, Exception))
        return found

      registering.register_reward_function(name)(function)

  return register


def grade(environment, count, **settings):
  examples = [Example(f'q{i}', [], environment, None, 'x', columns={'prompt': 'Q'}) for i in range(count)]
  with Graders(EnvironmentsConfig(**settings)) as graders:
    graders.prepare({environment})
    return graders.grade(examples, list(map(str, range(count))), truncated=[False] * count)


def test_scores_are_those_of_trl(functions):
  """GRPOTrainer: (rewards_per_func · reward_weights).nansum over functions, NaN where one returned None."""
  rng = np.random.default_rng(0)
  given = rng.normal(size=(40, 3))
  given[rng.random((40, 3)) < 0.4] = np.nan
  weights = np.array([1.0, -0.25, 0.5])
  columns = [[None if np.isnan(value) else value for value in column] for column in given.T]
  functions(f=columns[0], g=columns[1], h=columns[2])
  outcomes = grade('f,-0.25*g,h', 40, reward_weights={'h': 0.5, 'g': 7.0})  # What the row states goes first.
  known = ~np.isnan(given).all(1)
  assert 0 < known.sum() < 40
  np.testing.assert_allclose(scores_of(outcomes)[known], np.nansum(given * weights, 1)[known], rtol=1e-14)
  # A completion to which nothing applies would score 0 there; here it is ungraded.
  assert [outcome.graded for outcome in outcomes] == known.tolist()
  assert {outcome.reason for outcome in outcomes if not outcome.graded} == {'none of its rewards applies (f, g, h)'}
  for at, name in enumerate('fgh'):
    found = [outcome.rewards.get(name, np.nan) for outcome in outcomes]
    np.testing.assert_array_equal(found, given[:, at])  # Before their weights, as TRL logs them.


def test_the_sum_is_rounded_once_so_that_full_marks_are_a_success(functions):
  functions(f=[1.0], g=[1.0], h=[1.0])
  assert 0.7 + 0.2 + 0.1 < 1.0
  assert grade('0.7*f,0.2*g,0.1*h', 1)[0].score == 1.0


def test_one_that_cannot_grade_makes_the_sum_unknown_unless_it_counts_for_nothing(functions):
  functions(f=[1.0, 1.0, 1.0], g=[0.5, ValueError('no'), float('nan')])
  for environment, scores in (('f,g', [1.5, None, None]), ('f,0*g', [1.0, 1.0, 1.0])):
    outcomes = grade(environment, 3)
    assert [outcome.score for outcome in outcomes] == scores
  first, raised, nan = grade('f,g', 3)
  assert first.applicable and raised.applicable and not raised.rewards
  assert raised.reason.startswith("g: the grader 'g' raised ValueError") and 'not a finite number: nan' in nan.reason
  assert [dict(outcome.rewards) for outcome in grade('f,0*g', 3)] == [{'f': 1.0, 'g': 0.5}, {'f': 1.0}, {'f': 1.0}]


def test_one_that_counts_must_apply(functions):
  functions(f=[None, 2.0], g=[1.0, 1.0])
  assert [outcome.score for outcome in grade('f,0*g', 2)] == [None, 2.0]


def test_the_range_of_scores_is_that_of_each_and_of_the_sum(functions):
  functions(f=[6.0, 6.0, 11.0], g=[5.0, 1.0, 0.0])
  outcomes = grade('f,g', 3, score_range=SCORES)
  assert [outcome.score for outcome in outcomes] == [None, 7.0, None]
  assert outcomes[0].reason == 'the score 11 is outside environments.score_range=-10,10' and not outcomes[0].rewards
  assert outcomes[2].reason == 'f: the score 11 is outside environments.score_range=-10,10'
  huge = {name: Outcome(1e300) for name in 'fg'}
  total = weighted_sum({'f': 1e300, 'g': -1e300}, huge, SCORES)
  assert total.reason == 'the score is not a finite number: nan'


def test_one_grader_of_weight_one_is_left_as_it_is(functions):
  outcome = Outcome(0.25, 'F', {'acc': 1.0, 'length': 3})
  assert weighted_sum({'f': 1.0}, {'f': outcome}, SCORES) is outcome
  functions(f=[0.5])
  assert grade('f', 1)[0] == Outcome(0.5)
  found = grade('f', 1, reward_weights={'f': 3})[0]
  assert found.score == 1.5 and found.rewards == {'f': 0.5}
  assert weighted_sum({'f': 2.0}, {'f': outcome}, SCORES) == Outcome(0.5, 'F', outcome.metrics, rewards={'f': 0.25})


def test_feedback_is_that_of_all_in_their_order_and_metrics_have_the_names_of_their_graders():
  outcomes = {
    'a': Outcome(1.0, 'First.', {'length': 3}),
    'b': Outcome(0.0, ' ', {'acc': 0.5, 'pred': 'x', 'length': 4}),
    'c': Outcome(0.0, 'Then.', {'acc': 1.0}),
    'd': Outcome(0.0, 'First.'),
    'e': Outcome.not_applicable('no'),
  }
  found = weighted_sum(dict.fromkeys(outcomes, 1.0), outcomes, SCORES)
  assert found.score == 1.0 and found.feedback == 'First.\n\nThen.'
  named = {'a/length': 3, 'b/length': 4, 'b/acc': 0.5, 'b/pred': 'x', 'c/acc': 1.0}
  assert found.metrics == named | {'acc': 0.5, 'pred': 'x'}
  assert weighted_sum({'b': 1.0, 'd': 0.0}, {'b': outcomes['b'], 'd': Outcome(1.0)}, SCORES).feedback is None
  explained = weighted_sum({'b': 1.0, 'c': 0.0}, outcomes, SCORES)  # One scores, the other explains.
  assert (explained.score, explained.feedback, explained.rewards) == (0.0, 'Then.', {'b': 0.0, 'c': 0.0})


def test_a_server_is_one_of_several_and_each_is_asked_once(functions):
  functions(f=[1.0, 0.0])
  with Server(lambda body: Answer({'score': 0.5, 'feedback': f'Of {body["completion"]}.'})) as server:
    found = grade('f,0.5*http', 2, http=HttpGraderConfig(url=server.url))
    assert len(server.bodies) == 2
  assert [(outcome.score, outcome.feedback) for outcome in found] == [(1.25, 'Of 0.'), (0.25, 'Of 1.')]


# ———— What is wrong with settings ————


@pytest.mark.parametrize(
  'name, value, sentence',
  [
    ('data.environment', 'a,a', "^data.environment must name the grader 'a' once"),
    ('data.environment', 'a,', "^data.environment must hold names of graders, separated by commas, and not '' for one"),
    ('environments.reward_weights.f', 'x', "^environments.reward_weights must give 'f' a finite number .* not 'x'"),
    ('environments.reward_weights', '{"f": true}', "must give 'f' a finite number as its weight, not True"),
    ('environments.reward_weights', '1,2', 'environments.reward_weights=.1,2. is not a JSON object'),
  ],
)
def test_a_setting_that_is_wrong_is_named(name, value, sentence):
  config = Config()
  config.model.path, config.data.train_files, config.trainer.test_freq = 'model', ('rows.jsonl',), 0
  with pytest.raises(UserError, match=sentence):
    override(config, name, value)
    config.validate()


def test_settings_of_graders_that_no_question_names_are_announced(functions):
  functions(f=[1.0], g=[1.0])
  changed = EnvironmentsConfig(reward_weights={'f': 2.0, 'g': 3.0}, http=HttpGraderConfig('http://localhost:9'))
  changed.sandbox.memory_mb = 512
  with Graders(changed) as graders:
    for environment, idle in (('f', ['reward_weights.g', 'http.url', 'sandbox.memory_mb']), ('g,f,code,http', [])):
      said = graders.unread_remarks([Example('q', [], environment, None, 'x')])
      wanted = [f'environments.{name} has no effect: no question of this run names a grader' for name in idle]
      assert len(said) == len(wanted) and all(map(str.startswith, said, wanted))


def test_weights_of_graders_that_there_are_not_and_of_nothing_are_refused(functions):
  functions(f=[1.0], g=[1.0])
  with pytest.raises(UserError, match="^environments.reward_weights: There is no environment 'formt': choose from"):
    Graders(EnvironmentsConfig(reward_weights={'formt': 1.0}))
  with pytest.raises(UserError, match="^All graders of 'f,0\\*g' have the weight 0.*environments.reward_weights"):
    grade('f,0*g', 1, reward_weights={'f': 0})
  with pytest.raises(UserError, match="^The environment 'f,,g' of a question must hold names"):
    grade('f,,g', 1)


def test_a_resume_with_other_weights_is_refused_unless_accepted():
  config, other = Config(), Config()
  saved = json.loads(json.dumps(flatten(config)))
  override(other, 'environments.reward_weights.f', '0.5')
  found = differences(saved, other)
  assert found.refused == ["environments.reward_weights was {} and is now {'f': 0.5}"] and found.ways_out == ['graders']
  other.trainer.accept_changes = ('graders',)
  assert not differences(saved, other).refused


# ———— What is reported ————


def batch_of(outcomes):
  examples = [Example(name, [{'role': 'user', 'content': 'Q'}], 'f,g', None, 'x') for name in 'ab']
  made = rollouts(['t'] * 4, [0, 0, 1, 1])
  return GradedRollouts(examples, [[1], [1]], made, outcomes, np.arange(4), 0.0)


OUTCOMES = [
  Outcome(1.25, None, {}, rewards={'f': 1.0, 'g': 1.0}),
  Outcome(0.25, None, {}, rewards={'f': 0.0, 'g': 1.0}),
  Outcome(1.0, None, {}, rewards={'f': 1.0}),
  Outcome.ungraded('late'),
]


def test_each_is_a_metric_over_the_completions_to_which_it_applies():
  metrics = step_records.rollout_metrics(batch_of(OUTCOMES), Config())
  assert metrics['rollout/score_mean'] == 2.5 / 3 and metrics['rollout/success_rate'] == 2 / 3  # Of the sum.
  assert metrics['rollout/reward/f'] == pytest.approx(2 / 3, rel=1e-15) and metrics['rollout/reward/g'] == 1.0
  assert metrics['rollout/reward_std/f'] == pytest.approx(np.std([1, 0, 1]), rel=1e-15)
  single = [Outcome(1.0)] * 4
  assert not [name for name in step_records.rollout_metrics(batch_of(single), Config()) if 'reward' in name]


def test_evaluations_measure_each_and_write_it_with_the_sample():
  batch = batch_of(OUTCOMES)
  found = evaluate.metrics_by_source(batch.examples, batch.rollouts, OUTCOMES, 2, WORDS)['x']
  assert found['mean@2'] == 0.875  # Of (1.25 + 0.25) / 2 and of 1.
  assert found['reward/f/mean@2'] == 0.75 and found['reward/g/mean@2'] == 1.0  # The latter of question a alone.
  assert {'reward/f/best@2', 'reward/f/worst@2', 'reward/g/std@2'} <= found.keys() and 'reward/f/maj@2' not in found
  samples = evaluate.written(batch.examples, batch.rollouts, OUTCOMES)
  assert [sample.get('rewards') for sample in samples] == [{'f': 1.0, 'g': 1.0}, {'f': 0.0, 'g': 1.0}, {'f': 1.0}, None]


def test_rollouts_hold_each(tmp_path):
  session = types.SimpleNamespace(workdir=epath.Path(tmp_path))
  step_records.write_rollouts(session, 1, batch_of(OUTCOMES), None, types.SimpleNamespace(token_values={}))
  lines = [json.loads(line) for line in (tmp_path / 'rollouts' / '1.jsonl').read_text().splitlines()]
  assert [(line['score'], line.get('rewards')) for line in lines] == [
    (1.25, {'f': 1.0, 'g': 1.0}),
    (0.25, {'f': 0.0, 'g': 1.0}),
    (1.0, {'f': 1.0}),
    (None, None),
  ]


def test_the_check_before_a_run_tries_the_forms_of_all_graders():
  example = Example('q', [], 'mcq,0.5*math', 'B', 'x')
  assert preflight.answers(example) == ['<answer>B</answer>', 'The answer is \\boxed{B}.', '\\boxed{B}']
