"""The reference profile against the reference's rules: odd white space, unicode, null and missing fields.

The rules of the graders without programs are written down here once more, from the specification; a seeded fuzz
compares the two. Verdicts on programs were measured with the reference's own code (lasgroup/SDPO 0e6d510, Python 3.11).
"""

# ruff: noqa: E501 (a program and its verdict are one line)

from __future__ import annotations

from collections import Counter
import json
import re

import numpy as np
import pytest

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.data import ground_truth
from sdpo_jax.environments import multiple_choice, tool_use
from sdpo_jax.environments.grading import Graders
from sdpo_jax.types import Example

# ———— Rules ————


def mcq(text: str, truth: str) -> dict:
  """Return what follows the last opening tag, up to the closing one; `incorrect_format` is inverted."""
  start = text.rfind('<answer>')
  inside = text[start + len('<answer>') :] if start >= 0 else text
  end = inside.find('</answer>')
  pred = (inside[:end] if end >= 0 else inside).strip()
  body = text[:-1] if text.endswith('\n') else text
  opened = body.rfind('<answer>')
  letter = body[opened + len('<answer>') : -len('</answer>')].strip() if body.endswith('</answer>') else ''
  return verdict(pred, truth, opened >= 0 and letter in ('A', 'B', 'C', 'D'))


def gpqa(text: str, truth: str) -> dict:
  """Return the last of the words A to D in capitals; without one all of the text, without full stops and slashes around
  it.
  """
  words = [word for word in re.split(r'\W+', text.upper()) if word in ('A', 'B', 'C', 'D')]
  if words:
    return verdict(words[-1], truth, False)
  pred = text.strip().strip('.')
  while pred.endswith('.'):
    pred = pred[:-1]
  while pred.endswith('/'):
    pred = pred[:-1]
  return verdict(pred, truth, True)


def mmlu_pro(text: str, truth: str) -> dict:
  """Return the letter after 'answer is', after 'answer:', or the last single one; only a capital is of the right
  form.
  """
  for pattern in (r'(?i)answer is \(?([A-J])', r'(?i)answer:\s*([A-J])'):
    if found := re.search(pattern, text):
      return verdict(found[1], truth, found[1] not in 'ABCDEFGHIJ')
  single = [word for word in re.split(r'\W+', text) if len(word) == 1 and word in 'ABCDEFGHIJ']
  return verdict(single[-1] if single else '', truth, not single)


def tooluse(text: str, truth: str) -> dict:
  """Return the multiset of names and the merger of all inputs; an input ends at the first closing brace."""
  calls = json.loads(truth)
  names, inputs = [call['Action'] for call in calls], {}
  for call in calls:
    given = call.get('Action_Input')
    if isinstance(given, str):
      try:
        given = json.loads(given)
      except json.JSONDecodeError:
        given = {}
    inputs.update(given or {})
  said, got = re.findall(r'Action:\s*(\w+)', text), {}
  for found in re.findall(r'(?s)Action Input:\s*(\{.*?\})', text):
    try:
      got.update(json.loads(found))
    except json.JSONDecodeError:
      pass
  wrong = []
  if Counter(said) != Counter(names):
    wrong.append(f'Actions mismatch: predicted {said}, expected {names}')
  if got != inputs:
    wrong.append(f'Action inputs mismatch: predicted {got}, expected {inputs}')
  formed = '\nAction Input:' in text.partition('Action:')[2]
  return {
    'score': float(not wrong),
    'acc': float(not wrong),
    'pred': f'Actions: {said}, Inputs: {got}',
    'incorrect_format': int(not formed),
    'feedback': '; '.join(wrong),
  }


def verdict(pred: str, truth: str, incorrect: bool) -> dict:
  score = float(pred == truth)
  return {'score': score, 'acc': score, 'pred': pred, 'incorrect_format': int(incorrect)}


CHOICE = [
  *('A B b c D J i I x x/ . .. / ./ ( ) _ - é İ ß Ｂ Α \\boxed{').split(),
  *('<answer>', '</answer>', '<answer', 'answer is ', 'Answer: ', 'ANSWER IS (', 'answer:\n'),
  *(' ', '\n', '\r', '\r\n', '\t', '\u00a0', '\u2028', '\u3000', '\x0b', '\x00', '\ud800'),
]
CALLS = [
  *('Action: ', 'Action:\u00a0', '\nAction Input: ', 'Action Input:', '\n', '\r\n', ' ', 'get', 'é', '-'),
  *('{"a": 1}', '{"a": null}', '{"b": {"c": 1}}', '{}', '{', '}', 'null', '\u2028'),
]
INPUTS = ['{"a": 1}', '{}', 'null', '[]', '0', 'x', '', None, {}, {'a': 1}, '{"a": null}']


def make_truth(rng: np.random.Generator) -> str:
  calls = []
  for _ in range(rng.integers(3)):
    call = {'Action': [None, 1, 'get', 'get', 'é'][rng.integers(5)]}
    if rng.random() < 0.85:
      call['Action_Input'] = INPUTS[rng.integers(len(INPUTS))]
    calls.append(call)
  return json.dumps(calls)


@pytest.mark.parametrize(
  'rule, ours',
  [
    (mcq, multiple_choice.reference_mcq),
    (gpqa, multiple_choice.reference_gpqa),
    (mmlu_pro, multiple_choice.reference_mmlu_pro),
    (tooluse, tool_use.reference_tooluse),
  ],
)
def test_rules_agree_whatever_is_written(rule, ours):
  rng = np.random.default_rng(0)
  seen = Counter()
  for _ in range(3000):
    atoms = CALLS if rule is tooluse else CHOICE
    text = ''.join(atoms[i] for i in rng.integers(len(atoms), size=rng.integers(9)))
    truth = make_truth(rng) if rule is tooluse else ['A', 'B', 'x', '', 'i'][rng.integers(5)]
    expected = rule(text, truth)
    found = ours(Example('q', [], 'any', truth, 'any'), text, False)
    found = {**found.metrics, 'score': found.score, 'feedback': found.feedback}
    assert {name: found[name] for name in expected} == expected, (text, truth)
    seen[expected['score']] += 1
  assert min(seen[0.0], seen[1.0]) > 50


@pytest.mark.parametrize(
  'text, pred', [('x/', 'x'), ('.x', 'x'), (' x/. ', 'x'), ('x./', 'x.'), ('x//', 'x'), ('\u00a0x\u2028', 'x')]
)
def test_an_answer_that_is_no_letter_loses_full_stops_and_slashes(text, pred):
  found = multiple_choice.reference_gpqa(Example('q', [], 'gpqa', 'x', 'gpqa'), text, False)
  assert (found.metrics['pred'], found.score, found.metrics['incorrect_format']) == (pred, float(pred == 'x'), 1)


# ———— Programs ————

# What it shows: program; test type, input, expected output, other fields; score; incorrect_format,
# error_in_test_cases and timed_out; pred; feedback.
VERDICTS = {
  'carriage returns count for nothing': ('print("a\\r\\nb\\r")', ('stdin', '', 'a\r\nb', {}), 1.0, '000', "['a\\r\\nb']", ''),
  'nor in the expected output alone': ('print("a b")', ('stdin', '', 'a\r\nb\r\n', {}), 1.0, '000', "['a b']", ''),
  'a null time limit is one second': ('print(1)', ('stdin', '', '1', {'time_limit': None}), 1.0, '000', "['1']", ''),
  'a null expected output': ('print(1)', ('stdin', 'x', None, {}), 0.0, '010', '["Error: AttributeError: \'NoneType\' object has no attribute \'strip\'"]', "Runtime Error\nAttributeError: 'NoneType' object has no attribute 'strip'\n\nLast Executed Input\nx"),
  'a null input': ('print(input())', ('stdin', None, '1', {}), 0.0, '010', "['Error: EOFError: EOF when reading a line\\nLine 2 in <module> (Solution.py)']", 'Runtime Error\nEOFError: EOF when reading a line\nLine 2 in <module> (Solution.py)\n\nLast Executed Input'),
  'a null name of the function': ('def g(x): return x', ('functional', '1', '1', {'fn_name': None}), 1.0, '000', '[1]', ''),
  'a null context': ('print(1)', ('stdin', '', '1', {'context': None}), 0.0, '010', "['Process Error: EOFError: ']", 'Test Case 1: Wrong Answer\n\nInput\n\nOutput\nProcess Error: EOFError: \n\nExpected\n1'),
  'a context that fails': ('print(1)', ('stdin', 'a', '1', {'context': 'import os'}), 0.0, '010', "['Process Error: EOFError: ']", 'Test Case 1: Wrong Answer\n\nInput\na\n\nOutput\nProcess Error: EOFError: \n\nExpected\n1'),
  'a context for a whole program': ('print(K)', ('stdin', '', '7', {'context': 'K = 7'}), 1.0, '000', "['7']", ''),
  'an expected value that is no text': ('def f(x): return x', ('functional', '1', 1, {}), 0.0, '010', "['Error: the JSON object must be str, bytes or bytearray, not int']", 'Runtime Error\nthe JSON object must be str, bytes or bytearray, not int\n\nLast Executed Input\n1'),
  'an expected value that is no JSON': ('def f(x): return x', ('functional', '1', 'nope', {}), 0.0, '010', "['Error: Expecting value: line 1 column 1 (char 0)']", 'Runtime Error\nExpecting value: line 1 column 1 (char 0)\n\nLast Executed Input\n1'),
  'a null expected value': ('def f(x): return None', ('functional', '1', None, {}), 0.0, '010', "['Error: the JSON object must be str, bytes or bytearray, not NoneType']", 'Runtime Error\nthe JSON object must be str, bytes or bytearray, not NoneType\n\nLast Executed Input\n1'),
  'keys that are numbers': ('def f(x): return {x: [x]}', ('functional', '1', '{"1": [1]}', {}), 1.0, '000', '[{1: [1]}]', ''),
  'keys that are no JSON': ('def f(x): return {(x, None): x}', ('functional', '1', '{"(1, None)": 1}', {}), 1.0, '000', '[{(1, None): 1}]', ''),
  'a set in a list': ('def f(x): return [{x}]', ('functional', '1', '[1]', {}), 0.0, '010', "['Error: Non-serializable result type: set']", 'Runtime Error\nNon-serializable result type: set\n\nLast Executed Input\n1'),
  'a result that cannot be sent': ('from collections import defaultdict\ndef f(x): return defaultdict(lambda: 0, a=x)', ('functional', '1', '{"a": 1}', {}), 0.0, '010', '["ERROR: UnboundLocalError: cannot access local variable \'e\' where it is not associated with a value"]', 'Test Case 1: Wrong Answer\n\nInput\n1\n\nOutput\nERROR: UnboundLocalError: cannot access local variable \'e\' where it is not associated with a value\n\nExpected\n{"a": 1}'),
  'an undefined annotation of a function': ('def f(x: Undefined) -> Undefined: return x', ('functional', '1', '1', {}), 1.0, '000', '[1]', ''),
  'and of a whole program': ('def f(x: Undefined): return x\nprint(1)', ('stdin', '', '1', {}), 0.0, '010', '["Error: NameError: name \'Undefined\' is not defined\\nLine 2 in <module> (Solution.py)"]', "Runtime Error\nNameError: name 'Undefined' is not defined\nLine 2 in <module> (Solution.py)\n\nLast Executed Input"),
  'a name of typing that is not given': ('print(NamedTuple)', ('stdin', '', '1', {}), 0.0, '010', '["Error: NameError: name \'NamedTuple\' is not defined\\nLine 2 in <module> (Solution.py)"]', "Runtime Error\nNameError: name 'NamedTuple' is not defined\nLine 2 in <module> (Solution.py)\n\nLast Executed Input"),
  'an error that is the right output': ('print("Error: x")', ('stdin', 'q', 'Error: x', {}), 1.0, '000', "['Error: x']", 'Runtime Error\nx\n\nLast Executed Input\nq'),
  'the word for a time-out': ('print("Time out")', ('stdin', 'q', '1', {}), 0.0, '001', "['Time out']", 'Time Limit Exceeded\n\nLast Executed Input\nq'),
  'the word for a missing block': ('print("Incorrect format")', ('stdin', 'q', '1', {}), 0.0, '100', "['Incorrect format']", 'Incorrect Format: Put your code inside a ```python ... ``` block.'),
  'an error in the middle of an output': ('print("no Error: x")', ('stdin', 'q', '1', {}), 0.0, '010', "['no Error: x']", 'Test Case 1: Wrong Answer\n\nInput\nq\n\nOutput\nno Error: x\n\nExpected\n1'),
  'lines of an input': ('print(2)', ('stdin', '\n\n1\r2\x0b3\u20284\n\n5\n6\n', '1', {}), 0.0, '000', "['2']", 'Test Case 1: Wrong Answer\n\nInput\n\n\n1\n2\n3\n4\n\n5\n... (1 more lines)\n\nOutput\n2\n\nExpected\n1'),
  'no input': ('print(2)', ('stdin', '', '1', {}), 0.0, '000', "['2']", 'Test Case 1: Wrong Answer\n\nInput\n\nOutput\n2\n\nExpected\n1'),
  'debug output beside an error': ('debug_print("d")\nprint(1//0)', ('stdin', 'x', '1', {}), 0.0, '010', "['Error: ZeroDivisionError: integer division or modulo by zero\\nLine 3 in <module> (Solution.py)']", 'Runtime Error\nZeroDivisionError: integer division or modulo by zero\nLine 3 in <module> (Solution.py)\n\nLast Executed Input\nx\n\nDebug Output\nd'),
  'many lines of debug output': ('for i in range(12): debug_print(i)\nprint(2)', ('stdin', 'x', '1', {}), 0.0, '000', "['2']", 'Test Case 1: Wrong Answer\n\nInput\nx\n\nOutput\n2\n\nExpected\n1\n\nDebug Output\n0\n1\n2\n3\n4\n5\n6\n7\n8\n9\n... (2 more lines)'),
  'white space that is not ASCII': ('print("\\u00a01\\u2028")', ('stdin', '', '1', {}), 1.0, '000', "['1']", ''),
  'arguments at any white space': ('def f(a, b): return a + b', ('functional', '1\xa02\r\n', '3', {}), 1.0, '000', '[3]', ''),
}  # fmt: skip


def unit_tests(kind: str, given: object, expected: object, more: dict) -> str:
  fields = {'inputs': [given], 'outputs': [expected], 'testtype': kind, 'fn_name': 'f', 'time_limit': 1}
  return json.dumps(fields | more)


@pytest.fixture(scope='module')
def outcomes():
  """Of all programs, which run side by side."""
  with Graders(EnvironmentsConfig(profile='reference')) as graders:
    examples = [
      Example(name, [], 'code', unit_tests(*test), 'code', {'split': 'train'})
      for name, (_, test, *_) in VERDICTS.items()
    ]
    texts = [f'```python\n{program}\n```' for program, *_ in VERDICTS.values()]
    graded = graders.grade(examples, texts, truncated=[False] * len(texts))
  return dict(zip(VERDICTS, graded, strict=True))


@pytest.mark.parametrize('name', VERDICTS)
def test_programs_get_the_verdict_of_the_reference(outcomes, name):
  _, _, score, flags, pred, feedback = VERDICTS[name]
  metrics = outcomes[name].metrics
  found = ''.join(str(metrics[key]) for key in ('incorrect_format', 'error_in_test_cases', 'timed_out'))
  assert (outcomes[name].score, found, metrics['pred'], outcomes[name].feedback) == (score, flags, pred, feedback)


@pytest.mark.parametrize(
  'text, tests, raises',
  [
    ('no program', '{}', None),  # Tests are read when there is something to test.
    ('no program', 'null', None),
    ('```\n1\n```', '{}', KeyError),
    ('```\n1\n```', 'null', TypeError),
    ('```\n1\n```', '{"inputs": ["", ""], "outputs": [""], "testtype": "stdin", "time_limit": 1}', IndexError),
    (
      '```\n1\n```',
      '{"inputs": [""], "outputs": [""], "testtype": "stdin", "fn_name": "", "time_limit": []}',
      TypeError,
    ),
    ('```\n1\n```', 'nope', 'Failed to parse ground truth test cases.'),
  ],
)
def test_fields_are_missed_when_they_are_needed(text, tests, raises):
  with Graders(EnvironmentsConfig(profile='reference')) as graders:
    asked = [Example('q', [], 'code', tests, 'code', {'split': 'train'})], [text]
    if isinstance(raises, type):
      with pytest.raises(raises):
        graders.get('code')(*asked, truncated=[True])
      return
    (found,) = graders.get('code')(*asked, truncated=[True])
  assert found.score == 0.0 and found.metrics['truncated'] == found.metrics['truncated_and_missing_answer'] == 1
  assert found.feedback.startswith(raises or 'Truncated Attempt: ')


def test_a_null_time_limit_is_a_second_in_both_profiles_and_in_the_data():
  tests = unit_tests('stdin', '', '1', {'time_limit': None})
  assert ground_truth.check('code', tests) is None
  assert 'positive number of seconds' in ground_truth.check('code', unit_tests('stdin', '', '1', {'time_limit': 0}))
  with Graders(EnvironmentsConfig()) as graders:
    asked = Example('q', [], 'code', tests, 'code', {'split': 'train'})
    assert graders.grade([asked], ['```python\nprint(1)\n```'], truncated=[False])[0].score == 1.0


def test_an_empty_box_equals_an_empty_answer():
  texts = ['\\boxed{}', '\\boxed{1', 'nothing', '\\boxed{1}']
  with Graders(EnvironmentsConfig(profile='reference')) as graders:
    examples = [Example('q', [], 'math', '', 'math', {'split': 'train'})] * 4
    found = graders.grade(examples, texts, truncated=[False] * 4)
  assert [outcome.score for outcome in found] == [1.0, 1.0, 0.0, 0.0]
