"""What a run relies on of anybody's grader: finite scores in range, readable metrics, an end to every call."""

from __future__ import annotations

import decimal
import fractions
import json
import math
import re
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from sdpo_jax.config import Config, EnvironmentsConfig
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.outcomes import checked
from sdpo_jax.errors import UserError
from sdpo_jax.evaluation import completions
from sdpo_jax.types import Example, Outcome

RANGE = (-1000.0, 1000.0)
WAIT_S = 60.0  # Far beyond what anything here takes: a wait that ends so is a failure.


@pytest.mark.parametrize(
  'score, expected',
  [
    (1, 1.0),
    (True, 1.0),
    (np.True_, 1.0),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.int64(-3), -3.0),
    (np.array(0.5), 0.5),
    (jnp.asarray(0.25), 0.25),
    (decimal.Decimal('0.125'), 0.125),
    (fractions.Fraction(1, 4), 0.25),
    (1000.0, 1000.0),
    (-1000, -1000.0),
  ],
)
def test_every_real_number_in_range_is_a_score(score, expected):
  found = checked(Outcome(score), RANGE)
  assert found.score == expected and type(found.score) is float and found.reason is None


@pytest.mark.parametrize(
  'score, reason',
  [
    (math.nan, 'not a finite number'),
    (-math.inf, 'not a finite number'),
    (np.float16('inf'), 'not a finite number'),
    (decimal.Decimal('sNaN'), 'not a finite number'),
    (10**400, 'not a finite number'),
    ('1', "not a finite number: '1'"),
    (1j, 'not a finite number'),
    (np.array([1.0]), 'not a finite number'),
    ([], 'not a finite number'),
    (1e300, 'the score 1e+300 is outside environments.score_range=-1000,1000'),
    (1000.0001, 'is outside environments.score_range'),
    (None, 'the grader gave no score'),
  ],
)
def test_anything_else_is_ungraded_and_says_why(score, reason):
  found = checked(Outcome(score, 'Feedback.', {'acc': 1.0}), RANGE)
  assert not found.graded and reason in found.reason
  assert found.feedback is None and found.metrics == {}


def test_reasons_are_kept_but_not_endless():
  assert checked(Outcome.ungraded('Half a \ud800.'), RANGE).reason == 'Half a ?.'
  assert len(checked(Outcome.ungraded('x' * 10**6), RANGE).reason) == 500
  assert checked(Outcome.ungraded('  '), RANGE).reason == 'the grader gave no score'


def test_metrics_of_any_kind_are_averaged_or_left_out():
  metrics = {
    'acc': np.float32(0.5),
    3: 1,
    None: True,
    ('a', 1): decimal.Decimal('0.5'),
    'zero-dimensional': np.array(2.0),
    'nan': math.nan,
    'huge': 10**400,
    'pred': 'Half a \udfff.',
    'null': None,
    'many': [1, 2],
    'array': np.ones(3),
    'object': object(),
  }
  found = checked(Outcome(1.0, None, metrics), RANGE)
  assert found.metrics.pop('nan') != 0
  assert found.metrics == {
    'acc': 0.5,
    '3': 1,
    'None': True,
    "('a', 1)": 0.5,
    'zero-dimensional': 2.0,
    'huge': math.inf,
    'pred': 'Half a ?.',
    'null': None,
  }
  names = completions.metric_names([found, found])
  assert names == ["('a', 1)", '3', 'None', 'acc', 'huge', 'zero-dimensional']
  json.dumps(found.metrics)


def question(name: str, i: int = 0) -> Example:
  return Example(f'q{i}', [{'role': 'user', 'content': 'Q'}], name, None, 'test')


class Moody:
  """Hangs at a text that says so, raises at others, until `go`; keeps the sizes of its calls."""

  def __init__(self):
    self.calls, self.threads, self.go = [], [], threading.Event()
    self.closed = False

  def __call__(self, examples, texts, *, truncated):
    self.calls.append(len(texts))
    self.threads.append(threading.current_thread())
    for text in texts:
      if text == 'hang':
        self.go.wait(WAIT_S)
      elif text == 'exit':
        raise SystemExit(3)
      elif text == 'interrupt':
        raise KeyboardInterrupt
      elif text == 'user error':
        raise UserError('Mend it.')
    return [Outcome(1.0) for _ in texts]

  def end_batch(self):
    if self.calls == [1]:
      raise ZeroDivisionError('in end_batch')

  def close(self):
    self.closed = True
    raise OSError('in close')


@pytest.fixture
def moody(registering):
  grader = registering.register('moody')(Moody())
  yield grader
  grader.go.set()


def grade(graders: Graders, *texts: str) -> list[float | None]:
  outcomes = graders.grade([question('moody', i) for i in range(len(texts))], texts, truncated=[False] * len(texts))
  grade.reasons = [outcome.reason for outcome in outcomes]
  return [outcome.score for outcome in outcomes]


def test_a_grader_that_hangs_is_abandoned_and_the_next_call_works(moody, caplog):
  with Graders(EnvironmentsConfig(grader_timeout_s=0.1)) as graders:
    assert grade(graders, 'a', 'hang', 'b') == [1.0, None, 1.0]
    assert grade.reasons[1] == "the grader 'moody' gave no answer within 0.1 s (environments.grader_timeout_s)"
    assert moody.calls == [3, 1, 1, 1]  # All of them, then one by one.
    assert grade(graders, 'c', 'd') == [1.0, 1.0]
  assert all(thread.daemon for thread in moody.threads)  # Whatever it does, the process can end.
  said = (
    "The grader 'moody' could not grade 1 of 3 completions; the first: the grader 'moody' gave no answer within 0.1 s"
  )
  assert said in caplog.text


def test_a_grader_that_hangs_for_ever_costs_three_time_limits_a_call(moody):
  with Graders(EnvironmentsConfig(grader_timeout_s=0.05)) as graders:
    assert grade(graders, 'a', *['hang'] * 5, 'b') == [1.0, *[None] * 6]
  assert moody.calls == [7, 1, 1, 1]
  assert grade.reasons[-1] == (
    "the grader 'moody' gave no answer within 0.05 s (environments.grader_timeout_s) for 2 others, and was abandoned"
  )


def test_a_grader_that_limits_itself_is_waited_for(moody):
  moody.limits_itself = True
  threading.Timer(0.3, moody.go.set).start()
  with Graders(EnvironmentsConfig(grader_timeout_s=0.01)) as graders:
    assert grade(graders, 'hang') == [1.0]


def test_what_would_end_the_process_costs_a_completion(moody):
  with Graders(EnvironmentsConfig()) as graders:
    assert grade(graders, 'exit', 'a', 'interrupt') == [None, 1.0, None]
    assert re.fullmatch(r"the grader 'moody' raised SystemExit\(3\) in test_outcomes\.py, line \d+", grade.reasons[0])
    assert 'KeyboardInterrupt' in grade.reasons[2]
    with pytest.raises(UserError, match='Mend it'):  # A grader's own way to end the run.
      grade(graders, 'a', 'user error')


def test_what_fails_at_the_end_of_a_batch_or_of_a_run_costs_nothing(moody, registering, caplog):
  other = registering.register('other')(Moody())
  with Graders(EnvironmentsConfig()) as graders:
    graders.prepare(['other'])
    assert grade(graders, 'a') == [1.0]
  assert moody.closed and other.closed
  assert 'ZeroDivisionError' in caplog.text and caplog.text.count('in close') == 2


def test_a_close_that_hangs_or_exits_does_not_keep_a_run_from_ending(moody, registering, caplog):
  def leave():
    raise SystemExit(0)

  last = registering.register('last')(Moody())
  moody.close, last.close = lambda: moody.go.wait(WAIT_S), leave
  with Graders(EnvironmentsConfig(grader_timeout_s=0.05)) as graders:
    graders.prepare(['moody'])
    graders.prepare(['last'])
  assert 'no answer within 0.05 s' in caplog.text and 'SystemExit(0)' in caplog.text


@pytest.mark.parametrize('error', [SystemExit(0), ImportError('No module named x')], ids=['exit', 'import'])
def test_a_grader_that_cannot_be_made_is_named(registering, error):
  @registering.register_factory('late')
  def factory(settings):
    raise error

  with (
    Graders(EnvironmentsConfig()) as graders,
    pytest.raises(UserError, match=f"The grader 'late' cannot be made: {type(error).__name__}: {error}."),
  ):
    graders.prepare(['late'])


@pytest.mark.parametrize('name', ['code', 'math', 'http', 'judge'])
def test_the_graders_that_take_long_by_design_limit_themselves(name):
  settings = EnvironmentsConfig()
  settings.http.url = settings.judge.base_url = 'http://localhost:1/v1'
  settings.judge.model = 'model'
  settings.sandbox.allow_unsandboxed = True
  with Graders(settings) as graders:
    assert graders.get(name).limits_itself


@pytest.mark.parametrize(
  'key, value, sentence',
  [
    ('max_ungraded_fraction', 1.5, r'max_ungraded_fraction must lie in \[0, 1\], not 1.5'),
    ('score_range', (1.0, 0.0), 'score_range must be two numbers, the smaller one first'),
    ('score_range', (1.0,), 'score_range must be two numbers, the smaller one first'),
    ('grader_timeout_s', 0.0, 'grader_timeout_s must be positive'),
  ],
)
def test_limits_are_validated(key, value, sentence):
  config = Config()
  config.model.path, config.data.train_files, config.trainer.test_freq = 'model', ('rows.json',), 0
  setattr(config.environments, key, value)
  with pytest.raises(UserError, match=f'environments.{sentence}'):
    config.validate()
