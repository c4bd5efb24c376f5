"""What programs make is read and compared in a process of its own, which nothing that they make can hold up."""

# ruff: noqa: E501 (a program is one line)

import concurrent.futures
import json
import os
import pathlib
import signal

import pytest

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import code, code_verdicts
from sdpo_jax.environments.grading import Graders
from sdpo_jax.environments.helper_process import HelperPool, RequestOverranError
from sdpo_jax.types import Example

# The loop of the real process around other answers.
SCRIPT = """
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location('code_verdicts', {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules['code_verdicts'] = module
spec.loader.exec_module(module)
module.CPU_S = 0.2

def respond(question, *parts):
  exec(question['code'])
  return {{'pid': os.getpid(), 'sizes': [len(part) for part in parts], 'environment': dict(os.environ)}}

module.respond = respond
module.resource.setrlimit(module.resource.RLIMIT_AS, (2**28, 2**28))
signal.signal(signal.SIGPROF, signal.SIG_DFL)
module.serve(module.Connection(int(sys.argv[1])))
"""


@pytest.fixture
def helpers(tmp_path):
  script = tmp_path / 'script.py'
  script.write_text(SCRIPT.format(path=code_verdicts.__file__))
  pool = HelperPool(script, 1)
  yield pool
  pool.close()


def ask(helpers, code='', *parts):
  return helpers.ask({'code': code}, *(parts or (b'', b'', b'')))


def test_a_helper_answers_and_has_nothing_of_its_owner(helpers, monkeypatch):
  first = ask(helpers, '', b'a' * 3_000_000, b'', b'bc')
  assert first['sizes'] == [3_000_000, 0, 2] and not set(first['environment']) - {'LC_CTYPE'}
  assert ask(helpers)['pid'] == first['pid'] != os.getpid()


@pytest.mark.parametrize(
  'code', ['while True: pass', 'int("9" * 4000) ** 4000000', 'bytearray(2**29)', 'os.abort()', 'respond(question)']
)
def test_a_request_that_takes_too_much_costs_itself_alone(helpers, code):
  with pytest.raises(RequestOverranError):
    ask(helpers, code)
  assert ask(helpers)['sizes'] == [0, 0, 0]


def test_a_helper_that_something_else_ended_is_replaced_once_for_a_request(helpers, tmp_path):
  killed = ask(helpers)['pid']
  os.kill(killed, signal.SIGKILL)
  assert ask(helpers)['pid'] != killed
  with pytest.raises(RuntimeError, match='process that compares results ended'):
    ask(helpers, 'os.kill(os.getpid(), 9)')
  assert ask(helpers)['sizes'] == [0, 0, 0]


def test_a_fault_of_the_helper_is_said(helpers):
  with pytest.raises(RuntimeError, match='has a fault: ZeroDivisionError: division by zero'):
    ask(helpers, '1 / 0')


def test_helpers_end_with_their_pool_and_those_that_cannot_start_are_told_of(helpers, tmp_path):
  pid = ask(helpers)['pid']
  helpers.close()
  helpers.close()
  with pytest.raises(RuntimeError, match='closed'):
    ask(helpers)
  assert not pathlib.Path(f'/proc/{pid}').exists()
  (tmp_path / 'broken.py').write_text('import no_such_module')
  with pytest.raises(RuntimeError, match="cannot be started: ModuleNotFoundError: No module named 'no_such_module'"):
    HelperPool(tmp_path / 'broken.py', 1)


class InterruptedAtWork(BaseException):
  pass


def test_nobody_reads_the_answer_to_an_interrupted_request(helpers):
  def interrupt(number, frame):
    raise InterruptedAtWork

  interrupted = ask(helpers)['pid']
  before = signal.signal(signal.SIGALRM, interrupt)
  try:
    with pytest.raises(InterruptedAtWork):  # By the helper itself, before it answers.
      ask(helpers, 'os.kill(os.getppid(), signal.SIGALRM)', b'abc', b'', b'')
  finally:
    signal.signal(signal.SIGALRM, before)
  answer = ask(helpers)
  assert answer['sizes'] == [0, 0, 0] and answer['pid'] != interrupted
  assert not pathlib.Path(f'/proc/{interrupted}').exists()


def test_a_request_is_not_blamed_for_an_earlier_one_after_which_no_helper_could_start(helpers, tmp_path):
  script = tmp_path / 'script.py'
  whole = script.read_text()
  script.write_text('import no_such_module')
  with pytest.raises(RequestOverranError):
    ask(helpers, 'os.abort()')
  with pytest.raises(RuntimeError, match='cannot be started'):
    ask(helpers)
  script.write_text(whole)
  assert ask(helpers)['sizes'] == [0, 0, 0]


def test_a_helper_that_starts_while_its_pool_is_closed_ends_with_it(helpers, tmp_path):
  script, pipe, killed = tmp_path / 'script.py', tmp_path / 'pipe', str(tmp_path / 'killed')
  os.mkfifo(pipe)
  script.write_text(f'import os\nopen({str(pipe)!r}, "w").write(str(os.getpid()))\n{script.read_text()}')
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    thread.submit(ask, helpers, f'os.path.exists({killed!r}) or os.mkdir({killed!r}) or os.kill(os.getpid(), 9)')
    pid = pipe.read_text()  # The second process is being started.
    helpers.close()
  assert not pathlib.Path(f'/proc/{pid}').exists()


# ———— Programs ————


def question(inputs, outputs, testtype='functional', **more):
  truth = {'inputs': inputs, 'outputs': outputs, 'testtype': testtype, 'fn_name': 'f', 'time_limit': 5, **more}
  return Example('q', [{'role': 'user', 'content': 'Q'}], 'code', json.dumps(truth), 'code', {'split': 'train'})


def run(graders, example, *programs):
  return graders.grade(
    [example] * len(programs), [f'```python\n{p}\n```' for p in programs], truncated=[False] * len(programs)
  )


WRITE = 'import json\nos = json.codecs.sys.modules["os"]\ndef say(data):\n  while data:\n    data = data[os.write(4, data):]\n'
PROFILES = ['clean', pytest.param('reference', marks=pytest.mark.slow)]
BOMBS = {
  'lists': WRITE + 'say(b"[" + b"[]," * 2700000 + b"[]]")\nos._exit(0)',
  'objects': WRITE + 'say(b\'{"whole": "[\' + b"{}," * 2700000 + b\'{}]"}\')\nos._exit(0)',
  'a list of lists': 'def f(n):\n  return [[]] * 2000000',
  'numbers': 'def f(n):\n  return [1.5] * 1000000',
  'no end': WRITE + 'while True:\n  say(b"[" * 65536)',
  'a text': 'def f(n):\n  return "x" * 8000000',
  'printed': 'print("1 " * 4000000)\ndef f(n):\n  return 5',
}
# What a right answer to SQUARE looks like, and then more than may come.
FORGED = (
  WRITE
  + 'say(b\'{"output": "4", "characters": 1, "mentions": false, "repr": "4", "whole": "4"\' + b" " * 9000000 + b"}")\nos._exit(0)'
)
SQUARE = question(['2'], ['4'])
SUM = question(['1 2\n'], ['3'], 'stdin')
CHECK = question(['assert f(2) == 4'], [None], 'code')


@pytest.mark.parametrize('profile', PROFILES)
def test_large_results_are_wrong_and_the_trainer_reads_none_of_them(profile, monkeypatch):
  read, sent = json.loads, []

  def loads(text, **options):
    sent.append(len(text))
    return read(text, **options)

  with Graders(EnvironmentsConfig(profile=profile)) as graders:
    run(graders, SQUARE, 'def f(n):\n  return n')
    monkeypatch.setattr(json, 'loads', loads)
    for example, names in ((SQUARE, BOMBS), (SUM, ('printed', 'lists')), (CHECK, ('lists', 'a text'))):
      outcomes = run(graders, example, *(BOMBS[name] for name in names), FORGED)
      assert [outcome.score for outcome in outcomes] == [0.0] * len(outcomes)
  assert sent and max(sent) < 2**16


@pytest.mark.parametrize('profile', PROFILES)
def test_long_right_answers_pass_and_wrong_ones_are_shown(profile):
  """Of megabytes, with characters that take a dozen bytes as an escape."""
  numbers = list(range(200_000))
  programs = 'def f(n):\n  return list(range(n))', 'def f(n):\n  return list(range(n - 1)) + [0]'
  text = 'def f(n):\n  return "中\U0001f914" * n'
  lines = 'for i in range(int(input())):\n  print(i)'
  with Graders(EnvironmentsConfig(profile=profile, reveal_answer=True)) as graders:
    right, wrong = run(graders, question(['200000'], [json.dumps(numbers)]), *programs)
    assert (right.score, wrong.score) == (1.0, 0.0)
    assert 'Wrong Answer' in wrong.feedback and 'Output\n[0, 1, 2,' in wrong.feedback
    (right,) = run(graders, question(['50000'], [json.dumps('中\U0001f914' * 50_000, ensure_ascii=False)]), text)
    (printed,) = run(graders, question(['200000'], ['\n'.join(map(str, numbers))], 'stdin'), lines)
    assert (right.score, printed.score) == (1.0, 1.0)


def test_numbers_may_be_spelled_at_length():
  floats = '\n'.join(['0'] * 50_000)
  program = 'n = int(input())\nprint("\\n".join(["0.00000000000"] * n))'
  with Graders(EnvironmentsConfig()) as graders:
    (outcome,) = run(graders, question(['50000'], [floats], 'stdin'), program)
  assert outcome.score == 1.0


def test_a_value_that_is_larger_than_any_right_one_is_shown_as_wrong_not_as_an_error():
  with Graders(EnvironmentsConfig()) as graders:
    (outcome,) = run(graders, SQUARE, 'def f(n):\n  return "é" * 5_000_000')
  assert 'Wrong Answer' in outcome.feedback and 'Output\n' + 'é' * 250 + '...' in outcome.feedback
  assert len(outcome.metrics['pred']) == code.PRED_CHARACTERS and outcome.metrics['error_in_test_cases'] == 0


def test_the_bound_leaves_room_for_every_spelling_of_a_right_answer():
  for value in ('中' * 1000, [0] * 1000, {'"': '\\' * 500}):
    expected = json.dumps(value, ensure_ascii=False)
    assert len(json.dumps({'whole': json.dumps(value)})) < code.bound(expected)
  assert code.bound(None) == code.bound('None') < 2**19


def test_standard_error_counts_its_lines_though_few_are_kept():
  program = 'import sys\nfor i in range(4000):\n  print("line", i, file=sys.stderr)\nprint(0)'
  with Graders(EnvironmentsConfig()) as graders:
    (outcome,) = run(graders, SUM, program)
  assert 'line 9\n... (3990 more lines)' in outcome.feedback
