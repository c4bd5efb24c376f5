"""Programs judged by unit tests, each run in a process of its own in the sandbox (LiveCodeBench and its like).

The ground truth is JSON: {"inputs", "outputs", "testtype": "functional" | "stdin" | "code", "fn_name", "time_limit"
[, "context", "tolerance"]}. Expected outputs stay here; the sandbox gets the program and one input, and what it reports
is compared here as plain data.

The reference profile gives the scores and feedback of lasgroup/SDPO verl/utils/reward_score/feedback/code.py, quirks
included: the longest code block counts, of any language; 41 built-in functions and no exceptions; arguments split at
any white space; 1 and 1.0 differ; SystemExit is an error. (There all tests of a program start together and share one
clock; here each test has its own.) The clean profile takes the last Python block, gives it Python as it is, finds
methods of a class Solution, and compares numbers as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import decimal
import functools
import json
import math
import pathlib
import re
from typing import Any

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import code_replay
from sdpo_jax.environments.code_feedback import ERROR, NO_CODE, TIME_OUT, Record, format_test_feedback
from sdpo_jax.environments.judging import after_thinking
from sdpo_jax.environments.registry import register_factory
from sdpo_jax.environments.sandbox import Job, Limits, Report, Sandbox
from sdpo_jax.types import Example, Outcome

HARNESS = pathlib.Path(__file__).with_name('code_harness.py')
PRELOAD = (
  'numpy',
  'sortedcontainers',
  'statistics',
  'heapq',
  'bisect',
  'itertools',
  'fractions',
  'decimal',
  'datetime',
)
PRED_CHARACTERS = 5000
SHOWN_CHARACTERS = 4000  # Of an output that are kept: more than feedback can show.
DEBUG_CHARACTERS = 1_000_000  # The same of the standard error, of which feedback shows the first lines.
FIRST_TESTS = 4  # A program all of whose first tests time out is not run on the others (clean profile).
_IN = '(Solution.py)'  # In an error's text: where in the program it was raised.

_BLOCK = re.compile(r'```(\w*)\n(.*?)```', re.DOTALL)
# Any word for the language, and whatever follows it on its line: a block in "c++" or with a title is one, too.
_FENCED = re.compile(r'```[ \t]*([^\s`]*)(?:[ \t][^\n`]*)?\n(.*?)```', re.DOTALL)
_PYTHON = ('python', 'python3', 'py', '')


DEFAULT_TIME_LIMIT = 1.0  # Seconds, where the tests have null.
DIED = 'Process Error: EOFError: '  # What the reference's parent reads of a process that died.
# What it reads of one whose result could not be sent: the handler has a fault of its own.
UNSENT = "ERROR: UnboundLocalError: cannot access local variable 'e' where it is not associated with a value"


class InvalidTests(ValueError):
  """The ground truth is not a set of tests."""


@dataclasses.dataclass(frozen=True)
class Tests:
  """The unit tests of a question."""

  inputs: tuple[Any, ...]
  outputs: tuple[Any, ...]
  testtype: str
  time_limit: float  # Seconds.
  fn_name: str | None = ''
  context: str = ''
  tolerance: float = 0.0  # Relative and absolute difference that numbers of a right answer may have.
  dies: bool = False  # The reference's process dies over these tests before it runs one.


def extract_code(completion: str) -> str | None:
  """The longest fenced block of any language (the first of equally long ones); None without one: the reference's rule."""
  blocks = [match.group(2) for match in _BLOCK.finditer(completion)]
  return max(blocks, key=len) if blocks else None


def last_python_block(completion: str) -> str | None:
  """The last fenced block of Python or of no language after any thinking; None without one."""
  text = after_thinking(completion).replace('\r\n', '\n')
  blocks = [match.group(2) for match in _FENCED.finditer(text) if match.group(1).lower() in _PYTHON]
  return blocks[-1] if blocks else None


def read_tests(ground_truth: Any) -> Tests:
  """The tests of a ground truth, a JSON string or the object itself.

  Raises:
    InvalidTests: it is not JSON.
    KeyError: inputs, outputs, testtype or time_limit is missing.
  """
  ground_truth = _parsed(ground_truth)
  if not isinstance(ground_truth, Mapping):
    raise InvalidTests(f'The tests of a code question must be a JSON object, not {type(ground_truth).__name__}.')
  limit = ground_truth['time_limit']
  inputs, outputs = tuple(ground_truth['inputs']), tuple(ground_truth['outputs'])
  return Tests(
    inputs,
    outputs,
    ground_truth['testtype'],
    DEFAULT_TIME_LIMIT if limit is None else float(limit),
    ground_truth.get('fn_name') or '',
    ground_truth.get('context') or '',
    float(ground_truth.get('tolerance') or 0.0),
  )


def read_tests_reference(tests: Any) -> Tests:
  """The tests of a parsed ground truth as the reference takes them, which looks at a field when it needs it.

  Raises:
    KeyError, TypeError, IndexError, ValueError: where the reference raises.
  """
  inputs, limit = tests['inputs'], tests['time_limit']
  context = tests.get('context', '')
  dies = 'testtype' not in tests or 'fn_name' not in tests or not isinstance(context, str)
  return Tests(
    inputs=tuple(inputs),
    outputs=tuple(tests['outputs'][i] for i in range(len(inputs))),
    testtype=tests.get('testtype', ''),
    time_limit=DEFAULT_TIME_LIMIT if limit is None else float(limit),
    fn_name=tests.get('fn_name'),
    context=context if isinstance(context, str) else '',
    dies=dies,
  )


def _parsed(ground_truth: Any) -> Any:
  if not isinstance(ground_truth, str):
    return ground_truth
  try:
    return json.loads(ground_truth)
  except (ValueError, RecursionError) as error:
    raise InvalidTests(f'The tests of a code question are not JSON: {error}.') from error


# ———— Comparing ————


def same_stdout_reference(actual: str, expected: str) -> bool:
  """Equality after stripping, with spaces for newlines and without carriage returns."""
  left, right = (text.strip().replace('\n', ' ').replace('\r', '') for text in (actual, expected))
  return left == right


def same_stdout(actual: str, expected: str, tolerance: float = 0.0) -> bool:
  """Line by line, trailing space and blank last lines aside: equal text, or equal numbers (within `tolerance`)."""
  left, right = ([line.rstrip() for line in text.strip().split('\n')] for text in (actual, expected))
  return len(left) == len(right) and all(
    a == b or _same_words(a.split(), b.split(), tolerance) for a, b in zip(left, right, strict=True)
  )


def _same_words(left: Sequence[str], right: Sequence[str], tolerance: float) -> bool:
  return len(left) == len(right) and all(
    a == b or _same_numbers(a, b, tolerance) for a, b in zip(left, right, strict=True)
  )


def _same_numbers(left: str, right: str, tolerance: float) -> bool:
  try:
    if tolerance:
      return _close(float(left), float(right), tolerance)
    return decimal.Decimal(left) == decimal.Decimal(right)
  except (ValueError, decimal.InvalidOperation):
    return False


def _close(left: float, right: float, tolerance: float) -> bool:
  return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(left) and math.isnan(right))


def same_value(actual: Any, expected: Any, tolerance: float = 0.0) -> bool:
  """Equality of data: tuples are lists, 1 is 1.0, true is not 1, NaN is NaN; numbers within `tolerance`."""
  if isinstance(actual, bool) or isinstance(expected, bool):
    return actual is expected
  if isinstance(actual, int | float) and isinstance(expected, int | float):
    if isinstance(actual, int) and isinstance(expected, int) and not tolerance:
      return actual == expected
    try:
      return _close(float(actual), float(expected), tolerance)
    except OverflowError:  # An integer beyond the floats.
      return actual == expected
  if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
    return len(actual) == len(expected) and all(
      same_value(a, b, tolerance) for a, b in zip(actual, expected, strict=True)
    )
  if isinstance(actual, dict) and isinstance(expected, dict):
    return actual.keys() == expected.keys() and all(
      same_value(value, expected[key], tolerance) for key, value in actual.items()
    )
  return type(actual) is type(expected) and actual == expected


# ———— From programs to outcomes ————


@dataclasses.dataclass
class _Program:
  """A completion with its tests, and what became of each."""

  code: str | None
  tests: Tests | None  # None: they cannot be read, or need not be.
  truncated: bool
  records: list[Record | None]


class CodeGrader:
  """Grades programs in a sandbox, whose processes it holds."""

  limits_itself = True  # Every program has its own limit, and a batch as many as it likes.

  def __init__(self, settings: EnvironmentsConfig):
    """Starts the sandbox.

    Raises:
      UserError: no sandbox works here and `environments.sandbox.allow_unsandboxed` is off.
    """
    self._settings = settings
    self._reference = settings.profile == 'reference'
    self._sandbox = Sandbox(settings.sandbox, HARNESS, preload=PRELOAD)

  def close(self) -> None:
    """Ends the sandbox."""
    self._sandbox.close()

  def __call__(self, examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
    """1 iff the program passes all tests; `acc` is the fraction that it passes.

    Raises:
      InvalidTests: tests that are not JSON (clean profile; the reference scores 0).
      KeyError: tests without one of their fields.
    """
    # A group's completions share tests of megabytes.
    read = functools.lru_cache(maxsize=None)(_parsed if self._reference else read_tests)
    make = self._reference_program if self._reference else self._program
    programs = [make(read, *parts) for parts in zip(examples, completions, truncated, strict=True)]
    running = [program for program in programs if program.tests is not None and program.code is not None]
    first = None if self._reference else FIRST_TESTS
    self._run(running, slice(0, first))
    if first is not None:

      def slow(program: _Program) -> bool:
        return all(record.actual == TIME_OUT for record in program.records[:first])

      for program in running:
        if slow(program):
          program.records[first:] = [
            self._record(program, i, _TIMED_OUT) for i in range(min(first, len(program.records)), len(program.records))
          ]
      self._run([program for program in running if not slow(program)], slice(first, None))
    return [_outcome(program, self._reference) for program in programs]

  def _program(self, read: Any, example: Example, completion: str, truncated: bool) -> _Program:
    truth = example.ground_truth
    tests = read(truth) if isinstance(truth, str) else read_tests(truth)
    code = last_python_block(completion)
    return _Program(code, tests, truncated, [_NO_CODE] if code is None else [None] * len(tests.inputs))

  def _reference_program(self, read: Any, example: Example, completion: str, truncated: bool) -> _Program:
    truth = example.ground_truth
    _ = example.extra['split']  # The reference cannot judge a row without one.
    code = extract_code(completion)
    try:
      parsed = read(truth) if isinstance(truth, str) else truth
    except InvalidTests:
      return _Program(code, None, truncated, [])
    if code is None:
      return _Program(None, None, truncated, [_NO_CODE])
    tests = read_tests_reference(parsed)
    records = [_dead(tests, index) if tests.dies else None for index in range(len(tests.inputs))]
    return _Program(code, tests, truncated, records)

  def _run(self, programs: Sequence[_Program], part: slice) -> None:
    """Runs the tests numbered `part` of all programs and records what came of them."""
    places = [(program, i) for program in programs for i in range(len(program.records))[part]]
    apart = [place for place in places if place[0].tests.testtype == 'code' and not self._reference]
    for place, report in zip(
      apart, code_replay.run(self._sandbox, [self._trial(*place) for place in apart]), strict=True
    ):
      place[0].records[place[1]] = self._record(*place, report)
    places = [(program, i) for program, i in places if program.records[i] is None]
    records = self._sandbox.run(
      [self._job(program, i) for program, i in places], lambda number, report: self._record(*places[number], report)
    )
    for (program, i), found in zip(places, records, strict=True):
      program.records[i] = found

  def _job(self, program: _Program, index: int) -> Job:
    tests, value = program.tests, program.tests.inputs[index]
    payload = {
      'profile': self._settings.profile,
      'testtype': tests.testtype,
      'code': '' if self._reference and _has_no_strip(tests, index) else program.code,
      'input': value,
      'fn_name': tests.fn_name,
      'context': tests.context,
    }
    # In the reference profile the payload holds it, too, whatever it is.
    given = tests.testtype == 'stdin' and not self._reference
    return Job(payload, value if given else '', self._limits(tests))

  def _trial(self, program: _Program, index: int) -> code_replay.Trial:
    tests = program.tests
    return code_replay.Trial(program.code, tests.context, tests.inputs[index], self._limits(tests))

  def _limits(self, tests: Tests) -> Limits:
    sandbox = self._settings.sandbox
    # The reference waits a second longer than the limit. A clean run counts the program's own seconds.
    wall = tests.time_limit + 1 if self._reference else 2 * tests.time_limit + 1
    cpu = wall if self._reference else tests.time_limit
    return Limits(wall, cpu, sandbox.memory_mb, sandbox.file_mb, sandbox.output_mb)

  def _record(self, program: _Program, index: int, report: Report) -> Record:
    tests = program.tests
    judge = _judge_reference if self._reference else _judge
    value, expected = tests.inputs[index], tests.outputs[index]
    if report.status == 'timeout':
      return Record(index, value, None if expected is None else str(expected), TIME_OUT, False, written=repr(TIME_OUT))
    # Whatever the program wrote on the descriptor of its result, only an object of texts is one.
    result = report.result if isinstance(report.result, dict) else {}
    result = {key: said for key, said in result.items() if key == 'finished' or isinstance(said, str)}
    hidden = not self._reference and not self._settings.reveal_answer
    if (
      hidden
      and tests.testtype == 'code'
      and result.get('error', '').startswith('AssertionError')
      and _IN not in result['error']
    ):
      # What the check itself says may hold the expected value.
      called = result.get('called', '')[: code_replay.CALLED_CHARACTERS]
      result['error'] = f'AssertionError: a check of the test fails{"; " * bool(called)}{called}'
    actual, written, passed, expected = judge(tests, value, expected, dataclasses.replace(report, result=result))
    if hidden and tests.testtype == 'code':
      value = ''  # The test holds the expected value.
    debug = result.get('debug', '') if self._reference else report.stderr
    # Copies of what can be shown or counts, so that a batch does not keep all that its programs printed.
    return Record(
      index,
      value,
      None if hidden else expected,
      actual[:SHOWN_CHARACTERS],
      passed,
      debug[:DEBUG_CHARACTERS],
      written[-PRED_CHARACTERS:],
      # What is no text, a list for example, is no error either.
      ERROR in actual and (tests.testtype != 'functional' or actual.startswith(ERROR) or written[:1] in ('"', "'")),
      len(actual),
    )


_NO_CODE = Record(0, None, None, NO_CODE, False, written=repr(NO_CODE))


def _has_no_strip(tests: Tests, index: int) -> bool:
  """Whether the reference fails over an expected output that is no text, before it runs the program."""
  return tests.testtype == 'stdin' and not isinstance(tests.outputs[index], str)


def _dead(tests: Tests, index: int) -> Record:
  expected = tests.outputs[index]
  shown = None if expected is None else str(expected)
  return Record(index, tests.inputs[index], shown, DIED, False, written=repr(DIED), mentions_error=True)


_TIMED_OUT = Report('timeout', None, None, None, '', '', 0.0, 0.0)


def _judge_reference(tests: Tests, value: Any, expected: Any, report: Report) -> tuple[str, str, bool, str | None]:
  """(what came out, its spelling, passed, the expected output as shown)."""
  result, shown = report.result, None if expected is None else str(expected)

  def wrong(actual: str) -> tuple[str, str, bool, str | None]:
    return actual, repr(actual), False, shown

  if 'error' not in result and 'output' not in result:
    return wrong(DIED)
  if tests.testtype == 'stdin' and not isinstance(expected, str):
    return wrong(f"{ERROR}AttributeError: {type(expected).__name__!r} object has no attribute 'strip'")
  if 'error' in result:
    return wrong(f'{ERROR}{result["error"]}')
  output, spelling = result['output'], result.get('repr', '')
  if tests.testtype == 'stdin':
    actual, wanted = output.strip(), expected.strip()
    wanted = wanted[:-1].rstrip() if wanted.endswith('-') else wanted
    return actual, repr(actual), same_stdout_reference(actual, wanted), wanted
  if tests.testtype == 'code':
    return output, spelling, True, shown
  try:  # Also of values that are not JSON as text: they are no answers there.
    wanted = json.dumps(json.loads(expected), sort_keys=True)
  except (ValueError, TypeError, RecursionError) as error:
    return wrong(f'{ERROR}{error}')
  return wrong(UNSENT) if 'unsent' in result else (output, spelling, result.get('json') == wanted, shown)


def _judge(tests: Tests, value: Any, expected: Any, report: Report) -> tuple[str, str, bool, str | None]:
  """The same for the clean profile, which believes of a report only what it can compare."""
  result, shown = report.result, None if expected is None else str(expected)
  if report.status == 'output':
    return _error('OutputError: the program printed too much', shown)
  if result.get('error'):
    return _error(result['error'], shown)
  if tests.testtype == 'stdin':
    if report.status != 'ended' or report.exit_code != 0:
      return _error(_ending(report), shown)
    actual = report.stdout.strip()
    return actual, repr(actual), same_stdout(report.stdout, str(expected), tests.tolerance), str(expected).strip()
  if tests.testtype == 'functional':
    if 'json' not in result:
      return _error(_ending(report), shown)
    passed = _same_json(result['json'], expected, tests.tolerance)
    return result.get('output', ''), result.get('repr', ''), passed, shown
  if tests.testtype == 'code':
    return _judge_code(result, report)
  return _error(f'ValueError: Invalid test type: {tests.testtype}', shown)


def _judge_code(result: Mapping[str, Any], report: Report) -> tuple[str, str, bool, None]:
  if result.get('finished') is not True or report.status != 'ended':
    return _error(_ending(report), None)
  return 'All tests pass', repr('All tests pass'), True, None


def _same_json(text: str, expected: Any, tolerance: float) -> bool:
  try:
    wanted = json.loads(expected) if isinstance(expected, str) else expected
    return same_value(json.loads(text), wanted, tolerance)
  except (ValueError, RecursionError):
    return False


def _ending(report: Report) -> str:
  if report.status == 'killed':
    return f'ProcessError: the program was killed by signal {report.signal} (out of memory, or a forbidden call)'
  return f'ProcessError: the program ended with exit code {report.exit_code} before its test was done'


def _error(text: str, shown: str | None) -> tuple[str, str, bool, str | None]:
  return ERROR + text, repr(ERROR + text), False, shown


def _outcome(program: _Program, reference: bool) -> Outcome:
  cut = int(program.truncated)
  if program.tests is None and not program.records:  # Tests that cannot be read, in the reference profile.
    metrics = {'incorrect_format': 0, 'error_in_test_cases': 1, 'timed_out': 0, 'truncated': cut}
    metrics |= {'truncated_and_missing_answer': cut, 'acc': 0.0, 'pred': ''}
    metrics['format_valid'] = float(program.code is not None)
    return Outcome(0.0, 'Failed to parse ground truth test cases.', metrics)
  records, missing = program.records, program.code is None
  if reference:  # A program that prints what stands for a fault has it.
    failed = [record for record in records if not record.passed]
    incorrect = len(records) == len(failed) == 1 and failed[0].actual == NO_CODE
    errors, late = any(record.mentions_error for record in failed), any(r.actual == TIME_OUT for r in failed)
  else:
    incorrect = missing
    errors = any(record.actual.startswith(ERROR) for record in records)
    late = any(record.actual == TIME_OUT for record in records)
  passed = [record.passed for record in records]
  # The reference takes the mean of no tests, which is not a number; its comparison with 1 then fails.
  acc = sum(passed) / len(passed) if passed else (math.nan if reference else 0.0)
  pred = '[' + ', '.join(record.written for record in records) + ']'
  metrics = {
    'acc': acc,
    'pred': pred[-PRED_CHARACTERS:],
    'incorrect_format': int(incorrect),
    'error_in_test_cases': int(errors),
    'timed_out': int(not records or late),
    'truncated': cut,
    'truncated_and_missing_answer': int(program.truncated and incorrect),
    'format_valid': float(not missing),
  }
  return Outcome(
    float(bool(passed) and all(passed)), format_test_feedback(records, truncated=program.truncated), metrics
  )


@register_factory('code')
def make(settings: EnvironmentsConfig) -> CodeGrader:
  """Programs in the profile of the settings; raises UserError where no sandbox works."""
  return CodeGrader(settings)
