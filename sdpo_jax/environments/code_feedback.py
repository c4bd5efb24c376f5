"""Feedback of the code environment on a program's tests, in the reference's layout.

Source: lasgroup/SDPO verl/utils/reward_score/feedback/code.py:604-745; wording and limits are exactly the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

MAX_CHARACTERS = 2000
INPUT_LINES, DEBUG_LINES = 8, 10
VALUE_CHARACTERS, DEBUG_CHARACTERS = 250, 300
SHOWN = 2  # Wrong answers that feedback shows.

TRUNCATED = (
  'Truncated Attempt: Your previous response was too long and truncated because it reached the maximum response '
  'length. Try again with a shorter response.'
)
ERROR, TIME_OUT, NO_CODE = 'Error: ', 'Time out', 'Incorrect format'


@dataclasses.dataclass(frozen=True)
class Record:
  """The result of one test of one program."""

  test_idx: int  # Index of the test in the ground truth, from 0.
  input: Any  # Text, or the arguments by name; None: no test was run.
  expected: str | None  # None if it must not be shown.
  actual: str  # The program's output, ERROR + the exception, TIME_OUT or NO_CODE.
  passed: bool
  debug: str = ''  # The program's standard error, at least the lines that can be shown.
  written: str = ''  # The end of the result's repr().
  mentions_error: bool = False  # ERROR occurs anywhere in `actual`, which is a string.
  characters: int | None = None  # Length of `actual` before it was cut to what feedback shows; None if it was not cut.
  debug_lines: int | None = None  # Number of lines of `debug` before it was cut; None if it was not cut.


def format_test_feedback(records: Sequence[Record], *, truncated: bool = False) -> str:
  """Describe the first error, the first time-out, the missing code, or the shortest wrong answers; '' if all passed.

  Args:
    records: the records of all tests, in order.
    truncated: whether the completion ended at its token limit.
  """
  if not records:
    return 'No test execution information available.'
  lines = [line for record in _chosen(records) for line in (*_lines_of(record, truncated), '')]
  return '\n'.join(lines).rstrip()[:MAX_CHARACTERS]


def _chosen(records: Sequence[Record]) -> Sequence[Record]:
  # Checks all records: the reference takes an output that begins like an error for one, even if it was expected.
  for chosen in (_is_error, lambda record: record.actual == TIME_OUT, lambda record: record.actual == NO_CODE):
    found = next(filter(chosen, records), None)
    if found:
      return [found]
  return sorted((record for record in records if not record.passed), key=_characters)[:SHOWN]


def _is_error(record: Record) -> bool:
  return record.actual.startswith(ERROR)


def _lines_of(record: Record, truncated: bool) -> Iterator[str]:
  if record.actual == NO_CODE:
    yield TRUNCATED if truncated else 'Incorrect Format: Put your code inside a ```python ... ``` block.'
    return
  if _is_error(record):
    yield from ('Runtime Error', record.actual.removeprefix(ERROR), '')
    yield from _input('Last Executed Input', record.input)
  elif record.actual == TIME_OUT:
    yield from ('Time Limit Exceeded', '')
    yield from _input('Last Executed Input', record.input)
  else:
    yield from (f'Test Case {record.test_idx + 1}: Wrong Answer', '')
    yield from _input('Input', record.input)
    yield from ('', 'Output', _cut(record.actual, VALUE_CHARACTERS))
    if record.expected is not None:
      yield from ('', 'Expected', _cut(record.expected, VALUE_CHARACTERS))
  if debug := record.debug.strip():
    yield from ('', 'Debug Output', *_first(debug.split('\n'), DEBUG_LINES, DEBUG_CHARACTERS, record.debug_lines))


def _characters(record: Record) -> int:
  return len(str(record.input)) + (len(record.actual) if record.characters is None else record.characters)


def _input(title: str, value: Any) -> Iterator[str]:
  yield title
  if isinstance(value, dict):
    yield from (f'{name} = {_cut(str(argument), VALUE_CHARACTERS)}' for name, argument in value.items())
  elif value is not None:
    yield from _first(str(value).splitlines(), INPUT_LINES, VALUE_CHARACTERS)


def _first(lines: Sequence[str], limit: int, width: int, count: int | None = None) -> Iterator[str]:
  """Yield the first of `count` lines (None: all lines are given), then how many more there are."""
  yield from (_cut(line, width) for line in lines[:limit])
  count = len(lines) if count is None else count
  if count > limit:
    yield f'... ({count - limit} more lines)'


def _cut(text: str, limit: int) -> str:
  return text if len(text) <= limit else text[:limit] + '...'
