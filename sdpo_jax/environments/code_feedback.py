"""What the code environment says of a program's tests, in the reference's layout.

Source: lasgroup/SDPO verl/utils/reward_score/feedback/code.py:604-745, whose wording and limits these are, to the letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

MAX_CHARACTERS = 2000
INPUT_LINES, DEBUG_LINES = 8, 10
VALUE_CHARACTERS, DEBUG_CHARACTERS = 250, 300
SHOWN = 2  # Wrong answers that are shown.

ERROR, TIME_OUT, NO_CODE = 'Error: ', 'Time out', 'Incorrect format'


@dataclasses.dataclass(frozen=True)
class Record:
  """One test of one program."""

  test_idx: int  # From 0, as the tests are listed.
  input: Any  # Text, or the arguments by name; None: no test was run.
  expected: str | None  # None: not shown.
  actual: str  # What came out, ERROR + the exception, TIME_OUT or NO_CODE.
  passed: bool
  debug: str = ''  # What the program wrote to standard error.
  written: str = ''  # The end of Python's spelling (repr) of what came out.
  characters: int | None = None  # Of `actual` before it was cut to what feedback can show; None: it was not.


def format_test_feedback(records: Sequence[Record], *, truncated: bool = False) -> str:
  """'' if all tests pass; else the first error, the first time-out, the missing code, or the shortest wrong answers.

  Args:
    records: of all tests, in order.
    truncated: the completion ended at its token limit.
  """
  if not records:
    return 'No test execution information available.'
  if all(record.passed for record in records):
    return ''
  return '\n\n'.join(_blocks(records, truncated)).strip()[:MAX_CHARACTERS]


def _blocks(records: Sequence[Record], truncated: bool) -> Iterator[str]:
  failed = next((record for record in records if record.actual.startswith(ERROR)), None)
  if failed:
    yield f'Runtime Error\n{failed.actual.removeprefix(ERROR)}'
    yield _section('Last Executed Input', _input(failed))
    return
  slow = next((record for record in records if record.actual == TIME_OUT), None)
  if slow:
    yield 'Time Limit Exceeded'
    yield _section('Last Executed Input', _input(slow))
    return
  if any(record.actual == NO_CODE for record in records):
    if truncated:
      yield (
        'Truncated Attempt: Your previous response was too long and truncated because it reached the maximum '
        'response length. Try again with a shorter response.'
      )
    else:
      yield 'Incorrect Format: Put your code inside a ```python ... ``` block.'
    return
  wrong = [record for record in records if not record.passed]
  for record in sorted(wrong, key=_characters)[:SHOWN]:
    yield f'Test Case {record.test_idx + 1}: Wrong Answer'
    yield _section('Input', _input(record))
    yield _section('Output', _cut(record.actual, VALUE_CHARACTERS))
    if record.expected is not None:
      yield _section('Expected', _cut(record.expected, VALUE_CHARACTERS))
    if record.debug:
      yield _section('Debug Output', _lines(record.debug, DEBUG_LINES, DEBUG_CHARACTERS, count_rest=False))


def _characters(record: Record) -> int:
  return len(str(record.input)) + (len(record.actual) if record.characters is None else record.characters)


def _section(title: str, text: str | None) -> str:
  return title if text is None else f'{title}\n{text}'


def _input(record: Record) -> str | None:
  value = record.input
  if value is None:
    return None
  if isinstance(value, dict):
    return '\n'.join(f'{name} = {_cut(str(argument), VALUE_CHARACTERS)}' for name, argument in value.items())
  return _lines(str(value), INPUT_LINES, VALUE_CHARACTERS, count_rest=True)


def _lines(text: str, limit: int, width: int, *, count_rest: bool) -> str:
  lines = text.strip().split('\n')
  shown = [_cut(line, width) for line in lines[:limit]]
  if count_rest and len(lines) > limit:
    shown.append(f'... ({len(lines) - limit} more lines)')
  return '\n'.join(shown)


def _cut(text: str, limit: int) -> str:
  return text if len(text) <= limit else text[:limit] + '...'
