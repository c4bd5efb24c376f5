"""Programs and mathematics in the clean profile: what passes, what is told, and which cheats do not pay.

The reference profile's scores and texts are checked against the reference's own in tests/golden (kind `reward`).
"""

# ruff: noqa: E501 (a program is one line)

import json

import pytest

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import code, code_replay, code_verdicts
from sdpo_jax.environments.grading import Graders
from sdpo_jax.types import Example


@pytest.fixture(scope='module')
def graders():
  with Graders(EnvironmentsConfig()) as graders:
    yield graders


@pytest.fixture(scope='module')
def revealing():
  with Graders(EnvironmentsConfig(reveal_answer=True)) as graders:
    yield graders


def question(truth, environment='code', **extra):
  return Example('q', [{'role': 'user', 'content': 'Q'}], environment, truth, environment, {'split': 'train', **extra})


def unit_tests(inputs, outputs, testtype='functional', fn_name='f', time_limit=2, **more):
  return json.dumps(
    {'inputs': inputs, 'outputs': outputs, 'testtype': testtype, 'fn_name': fn_name, 'time_limit': time_limit, **more}
  )


def fenced(program):
  return f'I think so.\n```python\n{program}\n```\nDone.'


def run(graders, truth, program):
  (outcome,) = graders.grade([question(truth)], [fenced(program)], truncated=[False])
  assert outcome.graded
  return outcome


SQUARE = unit_tests(['2', '-3'], ['4', '9'])
SUM = unit_tests(['1 2\n', '3 4\n'], ['3', '7\n'], 'stdin')


PASSING = {
  'function': (SQUARE, 'def f(n):\n  return n * n'),
  'method of class Solution': (SQUARE, 'class Solution:\n  def f(self, n: int) -> List[int]:\n    return n * n'),
  'exceptions': (SQUARE, 'def f(n):\n  try:\n    raise ValueError\n  except Exception:\n    return n * n'),
  'standard library': (
    SQUARE,
    'import copy, enum, os, functools, dataclasses\nfrom collections import namedtuple\nP = namedtuple("P", "x")\n'
    '@dataclasses.dataclass\nclass D:\n  x: int\ndef f(n):\n  return D(copy.deepcopy(P(n * n)).x).x',
  ),
  'builtins': (SQUARE, 'def f(n):\n  return divmod(int(bin(n * n), 2), 1)[0] if type(n) is int else getattr(n, "x")'),
  'float for an integer': (SQUARE, 'def f(n):\n  return float(n * n)'),
  'tuple for a list': (unit_tests(['1'], ['[1, 1]']), 'def f(n):\n  return (n, n)'),
  'text with spaces': (unit_tests(['"a b"\n[1, 2]'], ['"a b3"']), 'def f(s, xs):\n  return s + str(sum(xs))'),
  'arguments by name': (unit_tests([{'a': 5, 'b': 3}], ['2']), 'def f(a, b):\n  return a - b'),
  'numpy result': (unit_tests(['3'], ['[0, 1, 2]']), 'import numpy as np\ndef f(n):\n  return np.arange(n)'),
  'context': (unit_tests(['2'], ['4'], context='def helper(x):\n  return x * x'), 'def f(n):\n  return helper(n)'),
  'tolerance': (unit_tests(['1'], ['0.3'], tolerance=1e-6), 'def f(n):\n  return 0.1 + 0.2'),
  'stdin': (SUM, 'a, b = map(int, input().split())\nprint(a + b)'),
  'buffer': (SUM, 'import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))'),
  'open(0)': (SUM, 'print(sum(map(int, open(0).read().split())))'),
  'sys.exit': (SUM, 'import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)'),
  'exit': (SUM, 'print(sum(map(int, input().split())))\nexit()'),
  'main guard': (SUM, 'def main():\n  print(sum(map(int, input().split())))\nif __name__ == "__main__":\n  main()'),
  'trailing space': (SUM, 'print(sum(map(int, input().split())), " \\n\\n")'),
  'number spelled otherwise': (SUM, 'print(float(sum(map(int, input().split()))))'),
  'thread': (SUM, 'import threading\nt = threading.Thread(target=lambda: print(sum(map(int, input().split()))))\nt.start()\nt.join()'),
  'assertions': (unit_tests(['assert f(2) == 4\nassert f(-3) == 9', 'assert isinstance(f(1), int)'], [None] * 2, 'code'), 'def f(n):\n  return n * n'),
  'a test that is a program': (
    unit_tests(['def check(g):\n  for n in range(5):\n    assert g(n) == n * n, n\ncheck(f)'], [None], 'code'),
    'def f(n):\n  return n * n',
  ),
  'a Counter for a dict': (unit_tests(['assert f("aab") == {"a": 2, "b": 1}'], [None], 'code'), 'from collections import Counter as f'),
  'a defaultdict in a test that is a program': (
    unit_tests(['d = f("aa")\nassert d == {"a": 2}'], [None], 'code'),
    'from collections import defaultdict\ndef f(s):\n  d = defaultdict(int)\n  for c in s:\n    d[c] += 1\n  return d',
  ),
  'a named tuple for a tuple': (
    unit_tests(['assert f(1) == (1, 2)'], [None], 'code'),
    'from collections import namedtuple\nP = namedtuple("P", "a b")\ndef f(n):\n  return P(n, 2)',
  ),
  'a frozenset for a set': (unit_tests(['assert f(1) == {1}'], [None], 'code'), 'def f(n):\n  return frozenset([n])'),
  'a number of numpy': (unit_tests(['assert f(1) == 3'], [None], 'code'), 'import numpy as np\ndef f(n):\n  return np.arange(3).sum()'),
}  # fmt: skip


@pytest.mark.parametrize('name', PASSING)
def test_right_programs_pass(graders, name):
  outcome = run(graders, *PASSING[name])
  assert (outcome.score, outcome.metrics['acc'], outcome.feedback) == (1.0, 1.0, '')


ALWAYS = 'class Always(int):\n  def __eq__(self, other): return True\n  def __ne__(self, other): return False\n  __hash__ = None\n'
ASSERTS = unit_tests(['assert f(2) == 4'], [None], 'code')
PROGRAM = unit_tests(['def check(g):\n  assert g(2) == 4\ncheck(f)'], [None], 'code')
CHEATS = {
  'exit 0': (SQUARE, 'import os\nos._exit(0)'),
  'exit 0 when called': (SQUARE, 'import os\ndef f(n):\n  os._exit(0)'),
  'exit 0 on stdin': (SUM, 'import os\nos._exit(0)'),
  'exit 0 in an assertion': (ASSERTS, 'import os\ndef f(n):\n  os._exit(0)'),
  'exit 0 in a test program': (PROGRAM, 'import os\ndef f(n):\n  os._exit(0)'),
  'SystemExit': (PROGRAM, 'def f(n):\n  raise SystemExit(0)'),
  'equals everything': (SQUARE, ALWAYS + 'def f(n):\n  return Always(7)'),
  'equals everything in an assertion': (ASSERTS, ALWAYS + 'def f(n):\n  return Always(7)'),
  'equals everything in a test program': (PROGRAM, ALWAYS + 'def f(n):\n  return Always(7)'),
  'report on stdout': (SQUARE, 'print(\'{"json": "4", "output": "4", "repr": "4"}\')\ndef f(n):\n  return 0'),
  'report to every descriptor': (
    SQUARE,
    'import os\nfor d in range(3, 64):\n  try:\n    os.write(d, b\'{"json": "4", "output": "4", "repr": "4"}\\n\')\n'
    '  except OSError:\n    pass\ndef f(n):\n  return 0',
  ),
  'reads the tests': (
    SQUARE,
    'import glob\ntext = ""\nfor path in glob.glob("/**/*.json", recursive=False) + glob.glob("*"):\n  text += '
    'open(path).read()\ndef f(n):\n  return 4 if "4" in text else 0',
  ),
  'searches its own memory': (
    unit_tests(['2'], ['"needle-4711"']),
    'import gc, sys\ndef f(n):\n  frame, seen = sys._getframe(), []\n  while frame:\n    seen += [repr(v) for v in '
    'frame.f_locals.values()]\n    frame = frame.f_back\n  seen += [repr(o) for o in gc.get_objects() if isinstance(o, '
    '(dict, list))][:20000]\n  text = "".join(seen)\n  i = text.find("needle-47")\n  return text[i:i + 11] if i >= 0 '
    'else "none"',
  ),
  'patches json': (SQUARE, 'import json\njson.dumps = lambda *a, **k: "4"\ndef f(n):\n  return 0'),
}  # fmt: skip


@pytest.mark.parametrize('name', CHEATS)
def test_cheats_do_not_pass(graders, name):
  outcome = run(graders, *CHEATS[name])
  assert outcome.score == 0.0 and outcome.feedback


FAILING = {
  'wrong': (SQUARE, 'def f(n):\n  return n + n', 0.5, 'Test Case 2: Wrong Answer\n\nInput\n-3\n\nOutput\n-6'),
  'error': (SQUARE, 'def f(n):\n  return [1][n]', 0.0, 'Runtime Error\nIndexError: list index out of range\n  return [1][n]\nLine 2 in f (Solution.py)\n\nLast Executed Input\n2'),
  'syntax': (SQUARE, 'def f(n)\n  return n', 0.0, "Runtime Error\nSyntaxError: expected ':'"),
  'no such function': (SQUARE, 'def g(n):\n  return n', 0.0, "NameError: there is no function 'f'"),
  'true is not one': (unit_tests(['1'], ['1']), 'def f(n):\n  return True', 0.0, 'Wrong Answer'),
  'no data': (SQUARE, 'def f(n):\n  return {n}', 0.0, 'set is not data that JSON can hold'),
  'slow': (unit_tests(['1', '2'], ['1', '2'], time_limit=1), 'def f(n):\n  while n == 2:\n    pass\n  return n', 0.5, 'Time Limit Exceeded\n\nLast Executed Input\n2'),
  'exit code': (SUM, 'import sys\nprint(sum(map(int, input().split())))\nsys.exit(1)', 0.0, 'Runtime Error\nSystemExit: 1'),
  'memory': (SQUARE, 'def f(n):\n  return len([0] * 10**9)', 0.0, 'MemoryError'),
  'debug': (SUM, 'import sys\nprint("here", file=sys.stderr)\nprint(0)', 0.0, 'Debug Output\nhere'),
  'assertion': (ASSERTS, 'def f(n):\n  return 5', 0.0, 'AssertionError: a check of the test fails; f(2) gave 5'),
  'unknown kind': (unit_tests(['1'], ['1'], 'weird'), 'x = 1', 0.0, 'Invalid test type: weird'),
}  # fmt: skip


@pytest.mark.parametrize('name', FAILING)
def test_wrong_programs_are_told_why(graders, name):
  truth, program, acc, said = FAILING[name]
  outcome = run(graders, truth, program)
  assert (outcome.score, outcome.metrics['acc']) == (0.0, acc)
  assert said in outcome.feedback


def test_expected_outputs_are_shown_only_when_asked(graders, revealing):
  secret = unit_tests(['1'], ['"xyzzy-4711"'])
  asserted = unit_tests(['assert f(1) == "xyzzy-4711"'], [None], 'code')
  for truth in (secret, asserted):
    assert 'xyzzy' not in run(graders, truth, 'def f(n):\n  return n').feedback
  for test in (
    'assert math.isclose(f(1), 4711.5)',
    'x = f(1)\nassert x == 4711.5, f"4711.5, not {x}"',
    'import unittest\nunittest.TestCase().assertEqual(f(1), 4711.5)',
  ):
    said = run(graders, unit_tests([test], [None], 'code'), 'def f(n):\n  return n').feedback
    assert '4711' not in said and 'a check of the test' in said
  own = run(graders, PROGRAM, 'def f(n):\n  assert n < 0, "my own assertion"').feedback
  assert 'my own assertion' in own
  assert 'Expected\n"xyzzy-4711"' in run(revealing, secret, 'def f(n):\n  return n').feedback
  assert 'xyzzy' in run(revealing, asserted, 'def f(n):\n  return n').feedback


def test_the_last_python_block_after_thinking_counts():
  text = '<think>\n```python\nlong = "long long long"\n```\n</think>\n```python\nx = 1\n```\n```text\nlonger than both of them\n```'
  assert code.last_python_block(text) == 'x = 1\n'
  assert code.last_python_block('```py\r\nx = 1\r\n```') == 'x = 1\n'
  assert code.last_python_block('no code') is None


@pytest.mark.parametrize(
  'text',
  ['```python \nx\n```', '``` python\nx\n```', '```py title="a b"\nx\n```', '```c++\ny\n```\nThen\n```python\nx\n```'],
)
def test_what_follows_the_language_of_a_block_does_not_hide_it(text):
  assert code.last_python_block(text) == 'x\n'


REPORTS = [
  '[1]',
  '"x"',
  '1',
  '[' * 900 + ']' * 900,
  '{"error": [1], "json": [1], "output": [1], "repr": [1], "debug": [1]}',
]
REPORTS.append('{"error": ' + '[' * 960 + ']' * 960 + '}')


@pytest.mark.parametrize('profile', ['clean', pytest.param('reference', marks=pytest.mark.slow)])
def test_a_forged_report_of_any_shape_costs_its_own_program_alone(profile):
  """Nothing raises: the grader would then be asked again for the whole batch, one by one."""
  write = (
    'import json\nos = json.codecs.sys.modules["os"]\nfor number in range(3, 64):\n  try:\n    os.write(number, {!r})\n'
  )
  end = '  except OSError:\n    pass\nos._exit(0)'
  programs = [write.format(text.encode()) + end for text in REPORTS]
  with Graders(EnvironmentsConfig(profile=profile)) as graders:
    for truth in (SQUARE, SUM, ASSERTS):
      outcomes = graders.grade(
        [question(truth)] * len(programs), [fenced(program) for program in programs], truncated=[False] * len(programs)
      )
      assert all(outcome.score == 0.0 for outcome in outcomes)


def test_half_a_character_that_a_program_makes_reaches_no_tokenizer(graders):
  """It does not come as one: the program makes it of an escape."""
  programs = ['def f(n):\n  return "\\ud800"', 'def f(n):\n  raise ValueError("\\ud800")']
  for program in programs:
    outcome = run(graders, SQUARE, program)
    assert outcome.score == 0.0 and outcome.feedback.encode() and outcome.metrics['pred'].encode() is not None


def test_long_outputs_are_not_kept_and_the_shortest_are_still_the_ones_shown(graders, monkeypatch):
  truth = unit_tests(['1', '2', '3'], ['0'] * 3, 'stdin')
  program = 'print("x" * (1_000_000 - int(input())))'
  said = run(graders, truth, program).feedback
  assert 'Test Case 3' in said and 'Test Case 2' in said and 'Test Case 1' not in said
  sandbox, kept = graders.get('code').sandbox, []
  run_jobs = sandbox.run

  def keeping(jobs, then):
    records = run_jobs(jobs, then)
    kept.extend(records)
    return records

  monkeypatch.setattr(sandbox, 'run', keeping)
  run(graders, truth, program)
  assert len(kept) == 3 and all(len(record.actual) + len(record.written) < 10_000 for record in kept)


def test_missing_and_truncated_code(graders):
  outcomes = graders.grade([question(SQUARE)] * 2, ['I think', 'I think'], truncated=[False, True])
  assert [outcome.metrics['incorrect_format'] for outcome in outcomes] == [1, 1]
  assert [outcome.metrics['truncated_and_missing_answer'] for outcome in outcomes] == [0, 1]
  assert outcomes[0].feedback.startswith('Incorrect Format') and outcomes[1].feedback.startswith('Truncated Attempt')


def test_a_program_that_is_always_slow_is_not_run_on_all_tests(graders):
  truth = unit_tests([str(i) for i in range(40)], [str(i) for i in range(40)], time_limit=0.2)
  outcome = run(graders, truth, 'while True:\n  pass')
  assert outcome.metrics['timed_out'] == 1 and outcome.metrics['acc'] == 0.0
  assert outcome.metrics['pred'].count('Time out') == 40


def checking(*sources):
  return unit_tests(list(sources), [None] * len(sources), 'code')


STACK = 'class Stack:\n  def __init__(self, items=()):\n    self.items = list(items)\n  def push(self, x):\n    self.items.append(x)\n  def pop(self):\n    return self.items.pop()\n  def __len__(self):\n    return len(self.items)\n'
APART = {
  'expressions around calls': ('assert sorted(f(3)) == [0, 1, 2] and len(f(2)) == 2', 'def f(n):\n  return set(range(n))'),
  'truth': ('assert f(4)\nassert not f(5)\nassert f(4) is True', 'def f(n):\n  return n % 2 == 0'),
  'tolerance of its own': ('import math\nassert math.isclose(f(2), 1.41421356, rel_tol=1e-6)', 'def f(n):\n  return n ** 0.5'),
  'exceptions': ('try:\n  f(-1)\n  assert False\nexcept ValueError as e:\n  assert "low" in str(e)', 'def f(n):\n  if n < 0:\n    raise ValueError("too low")'),
  'arguments changed in place': ('xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]', 'def f(xs):\n  xs.sort()'),
  'functions as arguments of the test': ('def check(g):\n  for n in range(30):\n    assert g(n) == n * n\ncheck(f)', 'def f(n):\n  return n * n'),
  'no literal': ('assert f(1) == (float("inf"), set(), {1: -2.5})', 'def f(n):\n  return (float("inf"), set(), {n: -2.5})'),
  'not a number': ('x = f()\nassert x != x', 'def f():\n  return float("nan")'),
  'objects': ('s = Stack()\ns.push(1)\ns.push([2])\nassert len(s) == 2 and s.pop() == [2]\nassert s.items == [1]\nt = Stack("ab")\nassert t.pop() == "b" and s.pop() == 1', STACK),
  'objects with links': ('node, seen = f([1, 2]), []\nwhile node:\n  seen.append(node.value)\n  node = node.next\nassert seen == [1, 2] and not Stack() and Stack([1])', STACK + 'class Node:\n  pass\ndef f(xs):\n  last = None\n  for x in reversed(xs):\n    node = Node()\n    node.value, node.next = x, last\n    last = node\n  return last'),
  'objects that raise': ('s = Stack([1])\ns.pop()\ntry:\n  s.pop()\n  assert False\nexcept IndexError:\n  s.push(7)\nassert s.pop() == 7', STACK),
  'arguments changed by a method': ('def check(g, xs):\n  g(xs)\n  assert xs == [1, 2, 3]\ncheck(Sorter().run, [3, 1, 2])', 'class Sorter:\n  def run(self, xs):\n    xs.sort()'),
  'an exception with a message of its own': ('try:\n  f(1)\n  assert False\nexcept UnicodeDecodeError:\n  assert False\nexcept RuntimeError as e:\n  assert "UnicodeDecodeError" in str(e)', 'def f(n):\n  return bytes([255]).decode()'),
  'context': ('assert f(helper(2)) == 4', 'def f(n):\n  return n'),
}  # fmt: skip


@pytest.mark.parametrize('name', APART)
def test_test_programs_run_apart_from_the_program_they_test(graders, name):
  test, program = APART[name]
  truth = json.dumps(json.loads(checking(test)) | {'context': 'def helper(x):\n  return x * x'})
  outcome = run(graders, truth, program)
  assert (outcome.score, outcome.feedback) == (1.0, '')


FORGED = (
  'import os\nfor d in range(3, 64):\n  try:\n    os.write(d, b\'{"finished": true}\')\n  except OSError:\n    pass\n'
)
SWALLOWING = {
  'all': 'assert all(map(f, [1, 2]))',
  'zip': 'for got, wanted in zip(map(f, [1, 2]), [5, 6]):\n  assert got == wanted',
  'next': 'assert next(map(lambda x: f(x) == 5, [1, 2]), True)',
  'sum': 'assert sum(map(lambda x: f(x) != 5, [1, 2])) == 0',
  'a list': 'assert not [x for x in map(f, [1, 2]) if x != 5]',
  'a generator': 'assert all(f(x) == 5 for x in [1, 2])',
}
OTHERS = (
  'StopIteration(5)',
  'StopAsyncIteration',
  'GeneratorExit',
  'KeyboardInterrupt',
  'SystemExit(0)',
  'Own',
  'RecursionError',
  'AssertionError',
)
APART_CHEATS = {
  'reports success': ('x = f(1)\nassert x == 5', FORGED + 'os._exit(0)'),
  'reports success when called': ('x = f(1)\nassert x == 5', 'def f(n):\n  ' + FORGED.replace('\n', '\n  ') + 'os._exit(0)'),
  'redefines bool': ('assert f(1)', 'def bool(x):\n  return True\ndef f(n):\n  return False'),
  'redefines isinstance': ('assert isinstance(f(1), int)', 'def isinstance(*x):\n  return True\ndef f(n):\n  return "1"'),
  'redefines sorted': ('assert sorted(f(1)) == [1, 2]', 'def sorted(x):\n  return [1, 2]\ndef f(n):\n  return []'),
  'equals everything': ('assert f(1) == 5', ALWAYS + 'def f(n):\n  return Always(7)'),
  'an object that equals everything': ('assert F() == 5', 'class F:\n  def __eq__(self, other):\n    return True'),
  'writes code for data': ('assert f(1) == 5', 'class R(list):\n  pass\nimport builtins\nbuiltins.repr = lambda x: "__import__(\'os\')._exit(0)"\ndef f(n):\n  return [n]'),
  'reads the test': ('assert f(1) == "needle-4711"', 'import gc, sys\ndef f(n):\n  text = "".join(repr(o) for o in gc.get_objects() if isinstance(o, (dict, list)))\n  i = text.find("needle-47")\n  return text[i:i + 11] if i >= 0 else "none"'),
  'skips by exception': ('assert f(1) == 5', 'class Quiet(BaseException):\n  pass\ndef f(n):\n  raise Quiet'),
  **{f'{name} in {form}': (test, f'class Own(BaseException):\n  def __str__(self):\n    raise StopIteration\nclass Mute(StopIteration):\n  __class__ = ValueError\ndef f(n):\n  raise {name}')
     for form, test in SWALLOWING.items()
     for name in ('StopIteration', 'Mute(5)', *OTHERS * (form == 'all'))},
  'the end of a sequence on the descriptor of the result': ('assert all(map(f, [1, 2]))', 'import os\ndef f(n):\n  os.write(4, b\'{"raised": "StopIteration"}\')\n  os._exit(0)'),
  'empties its argument': ('xs = [3, 1, 2]\nassert f(xs) == sorted(xs)', 'def f(xs):\n  xs.clear()\n  return []'),
  'empties its argument first': ('xs = [3, 1, 2]\ngot = f(xs)\nassert got == sorted(xs)', 'def f(xs):\n  xs.clear()\n  return []'),
  'empties the items of its argument': ('xs = [[3], [1]]\nassert f(xs) == sum(map(sum, xs))', 'def f(xs):\n  for x in xs:\n    x.clear()\n  return 0'),
  'empties the argument of a method': ('xs = {1: 2}\nassert F().f(xs) == sum(xs.values())', 'class F:\n  def f(self, xs):\n    xs.clear()\n    return 0'),
  'says that all is done': ('assert f(1) == 5', 'def f(n):\n  raise SystemExit(0)'),
}  # fmt: skip


@pytest.mark.parametrize('name', APART_CHEATS)
def test_cheating_a_test_program_does_not_pass(graders, name):
  test, program = APART_CHEATS[name]
  outcome = run(graders, checking(test), program)
  assert outcome.score == 0.0 and outcome.feedback and 'needle-4711' not in outcome.feedback


def test_calls_change_arguments_within_expressions_where_the_tests_say_so(graders):
  test = 'xs = [1, 1, 2]\nk = f(xs)\nassert k == 2 and xs[:k] == [1, 2]'
  program = 'def f(xs):\n  xs[:] = sorted(set(xs))\n  return len(xs)'
  assert run(graders, checking(test), program).score == 0.0
  assert run(graders, json.dumps(json.loads(checking(test)) | {'in_place': True}), program).score == 1.0


def test_a_test_may_not_call_for_ever_and_its_calls_share_the_time_limit(graders, monkeypatch):
  monkeypatch.setattr(code_replay, 'MAX_CALLS', 5)
  outcome = run(graders, checking('n = 0\nwhile True:\n  n = f(n)'), 'def f(n):\n  return n + 1')
  assert 'calls the program more than 5 times' in outcome.feedback
  slow = 'import time\ndef f(n):\n  end = time.process_time() + 0.2\n  while time.process_time() < end:\n    pass\n  return n'
  truth = json.dumps(json.loads(checking('for n in range(4):\n  assert f(n) == n')) | {'time_limit': 0.5})
  assert run(graders, truth, slow).metrics['timed_out'] == 1


def test_long_answers_do_not_make_a_test_start_for_ever(graders, monkeypatch):
  truth = checking('for n in range(20):\n  assert len(f(n)) > 0')
  monkeypatch.setattr(code_replay, 'MAX_SENT', 10**6)
  assert run(graders, truth, 'def f(n):\n  return "x" * 100').score == 1.0
  assert 'too much' in run(graders, truth, 'def f(n):\n  return "x" * 100_000').feedback
  monkeypatch.setattr(code_replay, 'MAX_SENT', 2**30)
  monkeypatch.setattr(code_replay, 'MAX_REPLAY', 0.1)
  truth = json.dumps(json.loads(truth) | {'time_limit': 1})
  assert run(graders, truth, 'def f(n):\n  return [n]').score == 1.0
  assert run(graders, truth, 'def f(n):\n  return [n] * 10_000').metrics['timed_out'] == 1


@pytest.mark.parametrize(
  'left, right, tolerance, same',
  [
    ('1 2\n3', '1 2 \n3\n\n', 0, True),
    ('1 2 3', '1 2\n3', 0, False),
    ('1.50', '1.5', 0, True),
    ('0.30000000000000004', '0.3', 0, False),
    ('0.30000000000000004', '0.3', 1e-9, True),
    ('yes', 'YES', 0, False),
    ('nan', 'nan', 0, True),
    ('1e9999999', '1', 0, False),
  ],
)
def test_standard_output_is_compared_line_by_line_as_numbers_where_there_are_any(left, right, tolerance, same):
  assert code_verdicts.same_stdout(left, right, tolerance) == same


def test_tests_that_cannot_be_read_fail_their_completions_and_no_other(graders):
  truths = ['not json', '[1]', '{"inputs": []}', '[' * 100_000, SQUARE]
  outcomes = graders.grade(
    [question(truth) for truth in truths], [fenced('def f(n):\n  return n * n')] * 5, truncated=[False] * 5
  )
  assert [outcome.score for outcome in outcomes] == [None, None, None, None, 1]


PROGRAM_BOMBS = {
  'ten megabytes': 'x = "' + 'a' * 10_000_000 + '"',
  'open fences': '```python\n' * 200_000,
  'deep source': 'x = ' + '(' * 50_000,
  'surrogates': 'x = "\ud800"',
  'null': 'x = 1\x00',
  'deep result': 'def f(n):\n  x = []\n  for _ in range(100000):\n    x = [x]\n  return x',
  'huge result': 'def f(n):\n  return "x" * (64 << 20)',
  'huge number': 'def f(n):\n  return 10 ** 100000',
  'endless output': 'while True:\n  print("x" * 1000)',
}


@pytest.mark.parametrize('bomb', PROGRAM_BOMBS)
def test_no_program_hangs_or_ends_a_run(graders, bomb):
  outcomes = graders.grade(
    [question(SQUARE)] * 2, [fenced(PROGRAM_BOMBS[bomb]), fenced('def f(n):\n  return n * n')], truncated=[False] * 2
  )
  assert [outcome.score for outcome in outcomes] == [0.0, 1.0]


MATHS = [
  ('1/2', '\\frac{1}{2}', True),
  ('0.5', '\\frac{1}{2}', True),
  ('x^2+2x+1', '(x+1)^2', True),
  ('\\sqrt{8}', '2\\sqrt{2}', True),
  ('2', '2\\sqrt{2}', False),  # The reference takes these two for equal, and the next pair.
  ('5\\sqrt{3}', '5\\sqrt{7}', False),
  ('\\text{Yes}', 'yes', True),
  ('\\{1,2\\}', '\\{2,1\\}', True),
  ('50\\%', '0.5', True),
  ('1,000', '1000', True),
  ('42.', '42', True),
  ('[0,1)', '[0,1]', False),
  ('2^{10}', '1024', True),
  ('42.0001', '42', False),
  ('1,2', '12', False),
  ('12', '1,2', False),
  ('1e99999999999999999999999', '5', False),
  # White space groups no digits.
  *(
    (spaced, '12', False)
    for spaced in ('1 2', '1  2', '1\n2', '1\u00a02', '1\\ 2', '1\\,2', '-1 2', '$1$ $2$', 'x = 1 2')
  ),
  *((spaced, '1000', False) for spaced in ('1 000', '1\\ 000', '1, 000', '10 00', '1 000.0')),
  *((spaced, '3.14', False) for spaced in ('3. 14', '3 .14', '3.1 4')),
  ('1 2', '3', False),  # Which math-verify takes for a sum.
  ('1 2', '1 2', True),
  ('1\\,000', '1000', True),
  ('10,\\!000', '10000', True),
  (' 12 ', '12', True),
  ('- 5', '-5', True),
  ('(1, 2)', '(1,2)', True),
  ('\\frac 1 2', '\\frac{1}{2}', True),
  ('5 \\text{ cm}', '5\\text{cm}', True),
  # Of equations math-verify compares the right side.
  ('6 = 5', '5', False),
  ('x = 6 = 5', '5', False),
  ('6 = 5 .', '5', False),
  ('5 - 5 = 0', '0', True),
  ('\\sin(\\pi) = 0', '0', True),
  ('\\gcd(10,15) = 5', '5', True),
  ('\\sin 30^\\circ = 0.5', '0.5', True),
  ('\\log_2 32', '5', True),
  ('2^3 3^2 5', '360', True),
  ('1000', '1 000', True),
  ('1 000', '1000', False),
  ('x=6=5;', '5', False),
  ('2 + 3 = 5.', '5', True),
  ('6.1 = 5.0', '5', False),
  ('2 + 3 = 5', '5', True),
  ('x = 5', '5', True),
  ('\\pi = 3.14', '3.14', True),
  ('6 = 5', '6 = 5', True),
]


def test_mathematical_answers(graders):
  examples = [question(truth, 'math') for _, truth, _ in MATHS]
  completions = [f'So the answer is \\boxed{{{answer}}}.' for answer, _, _ in MATHS]
  outcomes = graders.grade(examples, completions, truncated=[False] * len(MATHS))
  wrong = [pair for pair, outcome in zip(MATHS, outcomes, strict=True) if outcome.score != float(pair[2])]
  assert not wrong
  assert all(bool(outcome.feedback) == (not right) for outcome, (_, _, right) in zip(outcomes, MATHS, strict=True))


def test_the_boxed_answer_is_found_wherever_it_is_and_numbers_have_a_tolerance_where_the_row_says_so(graders):
  far = '\\boxed{42}' + ' and so on' * 100
  examples = [question('42', 'math'), question('42', 'math'), question('42', 'math', tolerance=1e-3)]
  completions = [far, '<think>\\boxed{42}</think> no idea', '\\boxed{42.0001}']
  outcomes = graders.grade(examples, completions, truncated=[False] * 3)
  assert [outcome.score for outcome in outcomes] == [1.0, 0.0, 1.0]
  assert outcomes[1].metrics['format_valid'] == 0.0 and 'boxed' in outcomes[1].feedback


def test_maths_feedback_shows_the_answer_only_when_asked(graders, revealing):
  def ask(them):
    return them.grade([question('4711', 'math')], ['\\boxed{12}'], truncated=[False])[0].feedback

  assert '4711' not in ask(graders) and '4711' in ask(revealing)


MATH_BOMBS = [
  '\\boxed{' * 200_000,
  '\\boxed{' + '{' * 200_000 + '}' * 200_001,
  '\\boxed{9^{9^{9^{9^9}}}}',
  '\\boxed{' + '9' * 1_000_000 + '}',
  '\\boxed{1e999999999}',
  '\\boxed{\\frac{' * 300 + '1' + '}{2}}' * 300,
  '\\boxed{__import__("os").system("false")}',
  '\\boxed{\ud800}',
]


def test_no_formula_hangs_or_ends_a_run(graders):
  completions = [*MATH_BOMBS, '\\boxed{42}']
  outcomes = graders.grade(
    [question('42', 'math')] * len(completions), completions, truncated=[False] * len(completions)
  )
  assert [outcome.score for outcome in outcomes] == [0.0] * len(MATH_BOMBS) + [1.0]
  assert all(outcome.graded for outcome in outcomes)
