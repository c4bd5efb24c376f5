"""Reward functions in TRL's form grade as they are: arguments, what they may return, feedback, and what they lack."""

from __future__ import annotations

import json
import re
import threading

import numpy as np
import pytest

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.data import rows
from sdpo_jax.environments import registry
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.reward_functions import RewardGrader, is_reward_function
from sdpo_jax.errors import UserError
from sdpo_jax.types import Example
from tests.environments.documented_code import block

# Of the forms in TRL's documentation: by a column, by the messages, where it applies, a coroutine.
MODULE = """
import asyncio
import re


def boxed_reward(completions, ground_truth, **kwargs):
  found = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
  return [1.0 if match and match.group(1) == truth else 0.0 for match, truth in zip(found, ground_truth)]


def format_reward(completions, **kwargs):
  contents = [completion[0]["content"] for completion in completions]
  return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) else 0.0 for content in contents]


def task_reward(prompts, completions, task, **kwargs):
  rows = zip(prompts, completions, task)
  return [float(prompt in completion) if kind == "echo" else None for prompt, completion, kind in rows]


async def slow_reward(prompts, completions, **kwargs):
  await asyncio.sleep(0.001)
  return [1.0 if completion else 0.0 for completion in completions]


class Criticism:
  last_feedback = None

  def __call__(self, completions, solution):
    self.last_feedback = [None if text == right else f"It is {right}." for text, right in zip(completions, solution)]
    return [float(text == right) for text, right in zip(completions, solution)]


criticism = Criticism()


def with_dicts(completions, solution, trainer_state):
  assert trainer_state is None
  rows = zip(completions, solution)
  return [{"score": float(t == s), "feedback": "No." if t != s else None, "length": len(t)} for t, s in rows]


def _helper(completions):
  raise AssertionError("A name with an underscore is no environment.")
"""


@pytest.fixture(scope='module')
def graders(tmp_path_factory):
  path = tmp_path_factory.mktemp('rewards') / 'my_rewards.py'
  path.write_text(MODULE)
  with Graders(EnvironmentsConfig(modules=(str(path),))) as made:
    yield made


def read(number: int, **fields) -> Example:
  """Return a row as it comes from a file."""
  fields = {'dataset': 'sums', 'kind': 'math', 'answer': '4', 'prompt': '2+2?', **fields}
  return rows.example(rows.RawRow(f'rows.jsonl:{number}', number, fields), 'train')


def grade(graders: Graders, name: str, texts: list[str], **fields) -> list:
  examples = [
    read(i, environment=name, **{key: values[i] for key, values in fields.items()}) for i in range(len(texts))
  ]
  return graders.grade(examples, texts, truncated=[False] * len(texts))


def test_a_column_is_a_keyword_and_a_text_stays_a_text(graders):
  found = grade(graders, 'boxed_reward', [r'\boxed{2}', r'It is \boxed{6}.', 'no'], ground_truth=['2', '5', '1'])
  assert [outcome.score for outcome in found] == [1.0, 0.0, 0.0]


def test_the_ground_truth_is_a_column_where_the_row_has_none_of_that_name(graders):
  assert grade(graders, 'boxed_reward', [r'\boxed{4}'])[0].score == 1.0


def test_completions_of_conversations_are_messages(graders):
  ready = {'data_source': 'sums', 'prompt': [{'role': 'user', 'content': 'Q'}], 'environment': 'format_reward'}
  row = rows.RawRow('rows.jsonl:1', 1, ready | {'reward_model': {'ground_truth': '4'}})
  example = rows.example(row, 'train')
  texts = ['<think>So.</think><answer>4</answer>', '4']
  found = graders.grade([example] * 2, texts, truncated=[False] * 2)
  assert [outcome.score for outcome in found] == [1.0, 0.0]


def test_questions_that_are_no_rows_are_conversations():
  seen = {}

  def keep(prompts, completions, **columns):
    seen.update(prompts=prompts, completions=completions, **columns)
    return [0.0]

  messages = [{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'Q'}]
  RewardGrader(keep, 'keep')([Example('q', messages, 'keep', 'truth', 'x')], ['A'], truncated=[False])
  assert seen == {
    'prompts': [messages],
    'completions': [[{'role': 'assistant', 'content': 'A'}]],
    'ground_truth': ['truth'],
    'trainer_state': None,
  }


def test_none_is_ungraded_and_columns_that_a_row_lacks_are_none(graders):
  examples = [read(0, environment='task_reward', task='echo'), read(1, environment='task_reward')]
  found = graders.grade(examples, ['2+2? 4', '2+2?'], truncated=[False] * 2)
  assert [outcome.score for outcome in found] == [1.0, None]
  assert found[1].reason == 'the reward function returned None'


def test_coroutines_are_awaited(graders):
  assert [outcome.score for outcome in grade(graders, 'slow_reward', ['a', ''])] == [1.0, 0.0]


@pytest.mark.parametrize('name, said', [('criticism', 'It is 4.'), ('with_dicts', 'No.')])
def test_feedback_comes_from_dicts_or_from_the_last_call(graders, name, said):
  right, wrong = grade(graders, name, ['4', '5'], solution=['4', '4'])
  assert (right.score, right.feedback, wrong.score, wrong.feedback) == (1.0, None, 0.0, said)
  assert right.metrics == ({'length': 1} if name == 'with_dicts' else {})


@pytest.mark.parametrize('rewards', [np.array([1.0, 0.5]), (1, 0.5), [np.float32(1), {'score': 0.5}], [True, 0.5]])
def test_rewards_may_come_as_any_sequence(rewards, registering):
  example = Example('q', [], 'any', None, 'x')
  registering.register_reward_function('any')(lambda completions: rewards)
  with Graders(EnvironmentsConfig()) as graders:
    found = graders.grade([example] * 2, ['a', 'b'], truncated=[False] * 2)
  assert [outcome.score for outcome in found] == [1.0, 0.5]


class Forgetful:
  last_feedback = ('one',)

  def __call__(self, completions):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
  'function, sentence',
  [
    (lambda completions, task: [0.0], "'f' needs 'task', but the rows have ground_truth, answer: give it a default"),
    (lambda completions, completion_ids: [0.0], "'f' needs 'completion_ids', but graders get no token ids"),
    (lambda completions: [0.0], r"'f' must return a list with a reward for each completion, 2 here, not \[0.0\]"),
    (lambda completions: 1.0, "'f' must return a list with a reward for each completion, 2 here, not 1.0"),
    (lambda completions: [{'reward': 1}] * 2, "'f' must give its dicts a 'score', not {'reward': 1}"),
    (Forgetful(), "'f' must have in `last_feedback` a text or None for each completion, 2 here"),
  ],
)
def test_what_a_function_lacks_is_said(function, sentence):
  examples = [Example('q', [], 'f', 'truth', 'x', columns={'answer': 'a', 'prompt': 'Q'})] * 2
  with pytest.raises(UserError, match=sentence):
    RewardGrader(function, 'f')(examples, ['a', 'b'], truncated=[False] * 2)


def test_only_functions_of_completions_are_reward_functions(graders):
  assert {'boxed_reward', 'criticism', 'slow_reward'} <= set(registry.names())
  assert not {'_helper', 'Criticism', 're', 'asyncio'} & set(registry.names())
  assert not any(map(is_reward_function, (len, re.match, RewardGrader, registry.get('digits'), None, json)))


def test_a_function_can_have_another_name_and_none_that_is_taken(tmp_path):
  named = 'from sdpo_jax.environments import registry\n\n\n@registry.register_reward_function({!r})\n'
  function = 'def {}(completions, **kwargs):\n  return [0.5 for _ in completions]\n'
  (tmp_path / 'named.py').write_text(named.format('half') + function.format('judge_me'))
  with Graders(EnvironmentsConfig(modules=(str(tmp_path / 'named.py'),))) as graders:
    example = Example('q', [], 'half', None, 'x')
    assert graders.grade([example], ['a'], truncated=[False])[0].score == 0.5
  assert 'judge_me' not in registry.names()
  (tmp_path / 'taken.py').write_text(function.format('math'))
  with pytest.raises(
    UserError, match="reward function 'math' of .*taken.py. has the name of another grader: rename it"
  ):
    Graders(EnvironmentsConfig(modules=(str(tmp_path / 'taken.py'),)))


def test_the_documented_reward_functions_grade_the_documented_rows(tmp_path):
  (tmp_path / 'my_rewards.py').write_text(block('my_rewards.py'))
  *asked, both = [
    rows.example(rows.RawRow('sums.jsonl:1', i, json.loads(line)), 'train')
    for i, line in enumerate(block('sums.jsonl').splitlines(), 1)
  ]
  with Graders(EnvironmentsConfig(modules=(str(tmp_path / 'my_rewards.py'),))) as graders:
    graders.prepare({example.environment for example in asked})
    right = graders.grade(asked, ['It is 4.', '7'], truncated=[False] * 2)
    wrong = graders.grade(asked, ['5', '7!'], truncated=[False] * 2)
  assert [outcome.score for outcome in (*right, *wrong)] == [1.0, 1.0, 0.0, 0.0]
  assert [outcome.feedback for outcome in (*right, *wrong)] == [None, None, 'State the number.', None]
  with Graders(EnvironmentsConfig(modules=(str(tmp_path / 'my_rewards.py'),))) as graders:
    found = graders.grade([both] * 3, ['6', 'It is 6.', '5'], truncated=[False] * 3)
  assert [(outcome.score, outcome.feedback) for outcome in found] == [
    (1.5, None),
    (0.5, None),
    (0.0, 'State the number.'),
  ]


class Late:
  """Sets its feedback at the end of a call; the call for 'hang' waits until it is told to go on."""

  def __init__(self):
    self.called, self.go, self.done = threading.Event(), threading.Event(), threading.Event()
    self.last_feedback = None

  def __call__(self, completions):
    return self.grade(self, completions)

  def grade(self, target, completions):
    text = completions[0][0]['content']
    if text == 'hang':
      self.called.set()
      assert self.go.wait(20)
    target.last_feedback = [f'It was {text}.']
    if text == 'hang':
      self.done.set()
    else:  # Between its setting the feedback and its end the other call comes to its end.
      self.go.set()
      assert self.done.wait(20)
    return [0.0]


@pytest.mark.parametrize('kind', ['object', 'function'])
def test_a_call_that_hung_and_ends_late_does_not_change_the_feedback_of_a_later_one(kind, caplog):
  late = Late()

  def function(completions):
    return late.grade(function, completions)

  grader = RewardGrader(late if kind == 'object' else function, 'late')
  question = [Example('q', [], 'late', None, 'x')]
  hanging = threading.Thread(target=grader, args=(question, ['hang']), kwargs={'truncated': [False]})
  hanging.start()
  assert late.called.wait(60)
  found = grader(question, ['b'], truncated=[False])
  hanging.join(60)
  # A function has one place for it only: what cannot be known is left out, and said.
  assert found[0].feedback == ('It was b.' if kind == 'object' else None)
  assert ('last_feedback is not read' in caplog.text) == (kind == 'function')
  assert grader(question, ['c'], truncated=[False])[0].feedback == 'It was c.'


def test_what_no_row_has_is_said_before_a_run_and_what_some_lack_is_none_in_any_batch():
  def strict(completions, hint, source):
    return [float(source == [None] * len(completions)) + 2 * float(hint == ['x'] * len(completions))]

  rich = Example('1', [], 'strict', 'A', 's', columns={'hint': 'x', 'source': 'book'})
  poor = Example('2', [], 'strict', 'B', 's', columns={'hint': 'x'})
  grader = RewardGrader(strict, 'strict')
  with pytest.raises(
    UserError, match="'strict' needs 'source', but the rows have ground_truth, hint: give it a default"
  ):
    grader.check_questions([poor])
  grader.check_questions([rich, poor])
  assert grader([poor], ['text'], truncated=[False])[0].score == 3.0
