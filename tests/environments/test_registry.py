"""The registry, and the quickstart's digit task: grading, feedback, determinism, disjoint splits."""

import itertools
import subprocess
import sys

import pytest

from sdpo_jax.environments import digits, registry
from sdpo_jax.errors import UserError
from tests import tiny


def grade_one(example, completion, truncated=False):
  (outcome,) = registry.get('digits')([example], [completion], truncated=[truncated])
  return outcome


@pytest.fixture
def example():
  """Return a question whose answer is 31704."""
  make = registry.get_generator('digits')('train', 0)
  one = make(0)
  return type(one)(one.id, one.messages, one.environment, '31704', one.data_source)


def test_registry_finds_what_was_registered_and_lists_it_otherwise():
  assert registry.get('digits') is digits.grade
  assert registry.get_generator('digits') is digits.generate
  assert 'digits' in registry.names()
  with pytest.raises(UserError, match=r"no environment 'digit': choose from .*tooluse; did you mean 'digits'\?$"):
    registry.get('digit')
  with pytest.raises(UserError, match="no generator 'nothing': choose from .*digits"):
    registry.get_generator('nothing')


def test_a_name_is_registered_once():
  with pytest.raises(ValueError, match='already registered'):
    registry.register('digits')(lambda examples, completions, *, truncated: [])


@pytest.mark.parametrize(
  'instruction, expected',
  [
    ('reverse', '31704'),
    ('swap', '04173'),
    ('ascending', '01347'),
    ('descending', '74310'),
    ('left', '07134'),
    ('right', '34071'),
    ('add_one', '51824'),
    ('add_two', '62935'),
    ('subtract_one', '39602'),
    ('complement', '59286'),
  ],
)
def test_answers_of_every_instruction(instruction, expected):
  assert digits.answer(instruction, [4, 0, 7, 1, 3]) == expected


def test_the_right_answer_scores_one_and_has_no_feedback(example):
  outcome = grade_one(example, ' 31704\n')
  assert outcome.score == 1.0 and outcome.feedback == ''
  assert outcome.metrics == {'acc': 1.0, 'pred': '31704', 'incorrect_format': 0.0, 'format_valid': 1.0}


def test_feedback_names_the_first_wrong_digits_and_what_was_expected(example):
  outcome = grade_one(example, '31205')
  assert outcome.score == 0.0 and outcome.metrics['acc'] == pytest.approx(0.6)
  assert outcome.feedback == 'Digit 3 is wrong: expected 7, got 2.\nDigit 5 is wrong: expected 4, got 5.'
  assert len(grade_one(example, '99999').feedback.splitlines()) == digits.SHOWN


@pytest.mark.parametrize(
  'completion', ['', '3170', '317044', '3 1 7 0 4', 'The answer is 31704', '３１７０４', '3170x']
)
def test_ill_formatted_answers_are_told_the_format(example, completion):
  outcome = grade_one(example, completion)
  assert outcome.score == 0.0
  assert outcome.metrics['incorrect_format'] == 1.0 and outcome.metrics['format_valid'] == 0.0
  assert outcome.feedback == 'The answer must be 5 digits and nothing else.'


def test_a_truncated_answer_is_told_so_even_if_it_would_be_right(example):
  outcome = grade_one(example, '31704', truncated=True)
  assert outcome.score == 0.0
  assert outcome.metrics['incorrect_format'] == 1.0 and outcome.metrics['format_valid'] == 0.0
  assert 'cut off' in outcome.feedback


def test_questions_depend_on_split_seed_and_index_only():
  make = registry.get_generator('digits')
  assert make('train', 3)(17) == make('train', 3)(17)

  def contents(split, seed):
    return [make(split, seed)(i).messages[-1]['content'] for i in range(20)]

  assert contents('train', 3) != contents('train', 4) != contents('test', 4)


def test_the_ground_truth_answers_the_question():
  make = registry.get_generator('digits')('test', 0)
  for i in range(50):
    example = make(i)
    numbers = [int(digit) for digit in example.messages[-1]['content'].split(': ')[1]]
    assert example.ground_truth == digits.answer(example.extra['instruction'], numbers)
    assert grade_one(example, example.ground_truth).score == 1.0


def test_no_list_of_digits_is_in_both_splits():
  drawn = {
    split: {make(i).messages[-1]['content'].split(': ')[1] for i in range(2000)}
    for split, make in ((split, registry.get_generator('digits')(split, 0, length=3)) for split in ('train', 'test'))
  }
  assert not drawn['train'] & drawn['test']
  # By construction: every list belongs to exactly one split, and a fifth of them to the test split.
  every = [digits.split_of(numbers) for numbers in itertools.product(range(10), repeat=3)]
  assert every.count('test') == 200 and every.count('train') == 800


def test_wrong_options_of_the_generator():
  make = registry.get_generator('digits')
  assert len(make('train', 0, length='7')(0).ground_truth) == 7
  with pytest.raises(UserError, match='length=many'):
    make('train', 0, length='many')
  with pytest.raises(UserError, match="'validation'"):
    make('validation', 0)


def in_a_new_process(code):
  """Run code where no built-in grader is imported yet; return what it prints."""
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=tiny.REPOSITORY)
  assert not done.returncode, done.stderr
  return done.stdout.splitlines()


BROKEN = """
import importlib.abc
import importlib.util
import sys
from sdpo_jax.environments import registry

class Half(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  def find_spec(self, name, path, target=None):
    return importlib.util.spec_from_loader(name, self) if name == 'sdpo_jax.environments.multiple_choice' else None

  def exec_module(self, module):
    registry.register_factory('mcq')(None)
    raise ImportError('half of it is missing')

sys.meta_path.insert(0, Half())
for _ in range(2):
  try:
    registry.require('gpqa')
  except ImportError as error:
    print(error)
del sys.meta_path[0]
print(*(type(registry.get(name)).__name__ for name in ('gpqa', 'mcq', 'mmlu_pro')))
"""


def test_a_built_in_grader_that_cannot_be_imported_leaves_no_trace():
  """The cause is raised again at the next attempt, and the grader is there once it is mended."""
  *raised, found = in_a_new_process(BROKEN)
  assert raised == ['half of it is missing'] * 2
  assert found.split() == [type(registry.get(name)).__name__ for name in ('gpqa', 'mcq', 'mmlu_pro')]


EARLY = """
import sys
from sdpo_jax.environments import registry
assert 'sdpo_jax.environments.mathematics' not in sys.modules
try:
  registry.register('math')(None)
except ValueError as error:
  print(error)
"""


def test_a_built_in_name_is_taken_before_its_module_is_imported():
  assert in_a_new_process(EARLY) == ["The grader 'math' is already registered."]
