"""Programs judged by unit tests, each run in its own process in the sandbox (LiveCodeBench and similar tasks).

The ground truth is JSON: {"inputs", "outputs", "testtype": "functional" | "stdin" | "code", "fn_name", "time_limit"
[, "context", "tolerance", "in_place"]}. Expected outputs stay out of the sandbox, which gets the program and one input;
the program's output arrives as bytes, which a helper process parses and compares as plain data (code_verdicts.py).

The reference profile reproduces the scores and feedback of lasgroup/SDPO verl/utils/reward_score/feedback/code.py, with
its quirks: the longest code block counts, in any language; there are 41 built-in functions and no exceptions; arguments
are split at any white space; 1 and 1.0 differ; SystemExit is an error. (There all tests of a program start together and
share one clock; here each test has its own.) The clean profile takes the last Python block, runs it with all of
Python's built-ins, finds methods of a class Solution, and compares numbers as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import math
import pathlib
import re
from typing import Any

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.environments import code_replay, code_verdicts
from sdpo_jax.environments.code_feedback import ERROR, NO_CODE, TIME_OUT, Record, format_test_feedback
from sdpo_jax.environments.code_verdicts import DIED, PRED_CHARACTERS
from sdpo_jax.environments.helper_process import HelperPool, RequestOverranError
from sdpo_jax.environments.judging import after_thinking
from sdpo_jax.environments.registry import register_factory
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob, SandboxReport
from sdpo_jax.types import Example, Outcome

HARNESS = pathlib.Path(__file__).with_name('code_harness.py')
PRELOAD = 'numpy sortedcontainers statistics heapq bisect itertools fractions decimal datetime'.split()
HELPERS = 2  # Number of processes that compare results; a comparison takes a twentieth of the time of a program.
# Limits of a result that can be right: expected numbers may be written at length, characters as escapes.
RESULT_BYTES, RESULT_PER_CHARACTER = 2**18, 16
DEBUG_BYTES = 2**16  # Bytes of standard error that are kept; feedback shows the first lines.
FIRST_TESTS = 4  # If all of these time out, the program's other tests are not run (clean profile).
_IN = '(Solution.py)'  # Marks a line of the program in an error message.

_BLOCK = re.compile(r'```(\w*)\n(.*?)```', re.DOTALL)
# Any language name, followed by anything on its line: "c++" and titles open a block, too.
_FENCED = re.compile(r'```([^\n`]*)\n(.*?)```', re.DOTALL)
_PYTHON = (['python'], ['python3'], ['py'], [])


DEFAULT_TIME_LIMIT = 1.0  # Seconds; used where the tests have null.


class InvalidTests(ValueError):
  """The ground truth is not a valid set of tests."""


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
  in_place: bool = False  # Type `code`: calls within expressions may change the arguments, too, not only statements.
  dies: bool = False  # Whether the reference's process dies on these tests before it runs one.


def extract_code(completion: str) -> str | None:
  """Return the first of the longest fenced blocks, of any language, as the reference does; None without one."""
  blocks = [match.group(2) for match in _BLOCK.finditer(completion)]
  return max(blocks, key=len) if blocks else None


def last_python_block(completion: str) -> str | None:
  """Return the last fenced block that is Python or names no language, after any thinking; None without one."""
  text = after_thinking(completion).replace('\r\n', '\n')
  # The language is the first word of the line that opens the block.
  blocks = [block for title, block in _FENCED.findall(text) if title.lower().split()[:1] in _PYTHON]
  return blocks[-1] if blocks else None


def read_tests(ground_truth: Any) -> Tests:
  """Parse a ground truth, a JSON string or the object itself.

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
    ground_truth.get('in_place') is True,
  )


def read_tests_reference(tests: Any) -> Tests:
  """Read a parsed ground truth as the reference does, which accesses a field only when it needs it.

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


# ———— From programs to outcomes ————


@dataclasses.dataclass
class _Program:
  """A completion's program with its tests and their records."""

  code: str | None
  tests: Tests | None  # None if they cannot be read or are not needed.
  truncated: bool
  records: list[Record | None]
  failed: str = ''  # Why the sandbox could not run it, which is not the program's fault; empty if it could.


@register_factory('code')
class CodeGrader:
  """Grades programs in a sandbox, in the settings' profile; owns the sandbox's processes until `close()`."""

  limits_itself = True  # Every program has its own limit; a batch may take as long as its programs need.

  def __init__(self, settings: EnvironmentsConfig):
    """Start the sandbox.

    Raises:
      UserError: no sandbox works here and `environments.sandbox.allow_unsandboxed` is off.
    """
    self._settings = settings
    self._reference = settings.profile == 'reference'
    self.sandbox = Sandbox(settings.sandbox, HARNESS, preload=PRELOAD)
    self.layers = self.sandbox.layers  # Descriptions of the layers that confine the programs.
    self._helpers = HelperPool(pathlib.Path(code_verdicts.__file__), HELPERS)

  def close(self) -> None:
    """Close the sandbox."""
    self.sandbox.close()
    self._helpers.close()

  def __call__(self, examples: list[Example], completions: list[str], *, truncated: list[bool]) -> list[Outcome]:
    """Return score 1 iff the program passes all tests; the metric `acc` is the fraction of tests that it passes.

    Raises:
      InvalidTests: the tests are not JSON (clean profile; the reference scores 0).
      KeyError: the tests lack one of their fields.
    """
    # The completions of a group share tests that may take megabytes.
    read = functools.lru_cache(maxsize=None)(_parsed if self._reference else read_tests)
    make = self._reference_program if self._reference else self._program
    programs = [make(read, *parts) for parts in zip(examples, completions, truncated, strict=True)]
    running = [program for program in programs if program.tests is not None and program.code is not None]
    first = None if self._reference else FIRST_TESTS
    self._run(running, slice(0, first))
    if first is not None:
      for program in running:
        if all(record.actual == TIME_OUT for record in program.records[:first]):
          rest = range(len(program.records))[first:]
          program.records[first:] = [_unfinished(program.tests, i, TIME_OUT) for i in rest]
      self._run(running, slice(first, None))
    return [
      Outcome.ungraded(program.failed) if program.failed else _outcome(program, self._reference) for program in programs
    ]

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
    records = [_unfinished(tests, index, DIED) if tests.dies else None for index in range(len(tests.inputs))]
    return _Program(code, tests, truncated, records)

  def _run(self, programs: Sequence[_Program], part: slice) -> None:
    """Run the tests in the slice `part` of all programs that have no record yet, and record their results."""
    places = [(program, i) for program in programs for i in range(len(program.records))[part]]
    places = [(program, i) for program, i in places if program.records[i] is None]
    apart = [place for place in places if place[0].tests.testtype == 'code' and not self._reference]
    found = code_replay.run(self.sandbox, self._helpers, [self._trial(*place) for place in apart])
    for place, ended in zip(apart, found, strict=True):
      place[0].records[place[1]] = self._record_apart(*place, ended)
    places = [(program, i) for program, i in places if program.records[i] is None]
    records = self.sandbox.run(
      [self._job(program, i) for program, i in places], lambda number, report: self._record(*places[number], report)
    )
    for (program, i), found in zip(places, records, strict=True):
      program.records[i] = found

  def _job(self, program: _Program, index: int) -> SandboxJob:
    tests, value = program.tests, program.tests.inputs[index]
    # The reference fails before it runs the program if the expected output is not a string.
    fails = self._reference and tests.testtype == 'stdin' and not isinstance(tests.outputs[index], str)
    payload = {
      'profile': self._settings.profile,
      'testtype': tests.testtype,
      'code': '' if fails else program.code,
      'input': value,
      'fn_name': tests.fn_name,
      'context': tests.context,
    }
    # In the reference profile the payload holds the field even where it is not of the right type.
    given = tests.testtype == 'stdin' and not self._reference
    limits = dataclasses.replace(
      self._limits(tests),
      # A function's result comes separately, so what it prints is ignored.
      stdout_bytes=bound(tests.outputs[index]) if given else 0,
      stderr_bytes=0 if self._reference else DEBUG_BYTES,
      result_bytes=bound(tests.outputs[index]),
    )
    return SandboxJob(payload, value if given else '', limits)

  def _trial(self, program: _Program, index: int) -> code_replay.CodeTrial:
    tests = program.tests
    limits = dataclasses.replace(self._limits(tests), stderr_bytes=DEBUG_BYTES, result_bytes=bound(tests.inputs[index]))
    return code_replay.CodeTrial(program.code, tests.context, tests.inputs[index], tests.in_place, limits)

  def _limits(self, tests: Tests) -> Limits:
    sandbox = self._settings.sandbox
    # The reference waits a second longer than the limit. The clean profile counts the program's own CPU seconds.
    wall = tests.time_limit + 1 if self._reference else 2 * tests.time_limit + 1
    cpu = wall if self._reference else tests.time_limit
    return Limits(wall, cpu, sandbox.memory_mb, sandbox.file_mb, sandbox.output_mb)

  def _record(self, program: _Program, index: int, report: SandboxReport) -> Record:
    tests = program.tests
    value, expected = tests.inputs[index], tests.outputs[index]
    hidden = not self._reference and not self._settings.reveal_answer
    if report.status == 'failed':
      program.failed = f'The sandbox could not run the program: {report.reason}.'
    if report.status in ('timeout', 'failed'):
      return _unfinished(tests, index, TIME_OUT)
    question = {
      'profile': self._settings.profile,
      'testtype': tests.testtype,
      'expected': expected,
      'tolerance': tests.tolerance,
      'status': report.status,
      'exit_code': report.exit_code,
      'signal': report.signal,
      'dropped': report.dropped,
    }
    try:
      said = self._helpers.ask(question, report.result_bytes, report.stdout_bytes, report.stderr_bytes)
    except RequestOverranError:  # A right answer never takes so long to compare.
      text = f'{ERROR}OutputError: what the program made cannot be compared with what is expected'
      return Record(index, value, None, text, False, written=repr(text), mentions_error=True)
    expected = said.pop('expected')
    return Record(index, value, None if hidden else expected, **said)

  def _record_apart(self, program: _Program, index: int, ended: code_replay.Ended) -> Record:
    """Return the record of a test program that ran apart from the program under test."""
    if ended.report.status == 'failed':
      program.failed = f'The sandbox could not run the program: {ended.report.reason}.'
    if ended.report.status in ('timeout', 'failed'):
      return _unfinished(program.tests, index, TIME_OUT)
    hidden = not self._settings.reveal_answer
    error, called = ended.result.get('error', ''), ended.result.get('called', '')[: code_replay.CALLED_CHARACTERS]
    if hidden and error.startswith('AssertionError') and _IN not in error:
      # The assertion's own message may hold the expected value.
      error = f'AssertionError: a check of the test fails{"; " * bool(called)}{called}'
    passed = not error and ended.result.get('finished') is True and ended.report.status == 'ended'
    if ended.report.status == 'output' or not passed and not error:
      error = code_verdicts.ending(dataclasses.asdict(ended.report))
    actual = 'All tests pass' if passed else ERROR + error
    return Record(
      index,
      '' if hidden else program.tests.inputs[index],  # The test holds the expected value.
      None,
      actual[: code_verdicts.SHOWN_CHARACTERS],
      passed,
      ended.report.stderr,
      repr(actual)[-PRED_CHARACTERS:],
      not passed,
    )


def bound(expected: Any) -> int:
  """Return the maximum size of a right result in bytes; a longer result is wrong and is not read."""
  return RESULT_BYTES + RESULT_PER_CHARACTER * len(expected if isinstance(expected, str) else str(expected))


def _unfinished(tests: Tests, index: int, actual: str) -> Record:
  """Return the record of a test without a result: TIME_OUT or DIED."""
  value, expected = tests.inputs[index], tests.outputs[index]
  shown = None if expected is None else str(expected)
  return Record(index, value, shown, actual, False, written=repr(actual), mentions_error=actual == DIED)


_NO_CODE = Record(0, None, None, NO_CODE, False, written=repr(NO_CODE))


def _outcome(program: _Program, reference: bool) -> Outcome:
  cut = int(program.truncated)
  if program.tests is None and not program.records:  # Reference profile: the tests cannot be read.
    metrics = {'incorrect_format': 0, 'error_in_test_cases': 1, 'timed_out': 0, 'truncated': cut}
    metrics |= {'truncated_and_missing_answer': cut, 'acc': 0.0, 'pred': ''}
    metrics['format_valid'] = float(program.code is not None)
    return Outcome(0.0, 'Failed to parse ground truth test cases.', metrics)
  records, missing = program.records, program.code is None
  if reference:  # A program that prints the text of a fault counts as having that fault.
    failed = [record for record in records if not record.passed]
    incorrect = len(records) == len(failed) == 1 and failed[0].actual == NO_CODE
    errors, late = any(record.mentions_error for record in failed), any(r.actual == TIME_OUT for r in failed)
  else:
    incorrect = missing
    errors = any(record.actual.startswith(ERROR) for record in records)
    late = any(record.actual == TIME_OUT for record in records)
  passed = [record.passed for record in records]
  # The reference takes the mean of no tests, NaN, and its comparison with 1 then fails.
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
