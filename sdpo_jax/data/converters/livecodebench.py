"""LiveCodeBench (Jain et al. 2024), `code_generation_lite`: programs that must pass unit tests.

The reference trains on half of the unit tests of each question and evaluates on all of them
(its data/utils/livecodebench.py and data/split_tests.py).
"""

from __future__ import annotations

import base64
import binascii
import datetime
import io
import json
import pickle
from typing import Any
import zlib

import numpy as np

from sdpo_jax.data import ground_truth
from sdpo_jax.data.converters.raw import ConversionOptions, Parts, Splits, described, field, make_row
from sdpo_jax.data.rows import RawRow
from sdpo_jax.errors import UserError, short_repr

PROMPT = (
  'You are a coding expert. You will be given a coding problem, and you need to write a correct Python program that '
  'matches the specification and passes all tests. The time limit is 1 second. You may start by outlining your thought '
  'process. In the end, please provide the complete code in a code block enclosed with ``` ```.\n\n{problem}'
)
SIGNATURE = '\n\nYour solution should have the following signature: ```python\n{signature}\n```'
TIME_LIMIT = 6  # Seconds per test.
TRAIN_TESTS, SEED = 0.5, 0
LARGEST = 2**30  # Maximum size of one question's tests, in bytes.
_PICKLE_ERRORS = (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError, TypeError)


def convert(parts: Parts, options: ConversionOptions) -> Splits:
  """Return the questions of contests within [since, until): 'test' with all private tests, 'train' with half of them.

  Raises:
    UserError: a row is not in the source's schema, or there is no question of that time.
  """
  picked = [row for row in parts['test'] if options.since <= _date(row) < options.until]
  if not picked:
    raise UserError(f'There is no contest from {options.since} until {options.until} in this source.')
  test = [_row(row, idx, _tests(row)) for idx, row in enumerate(picked)]
  rng = np.random.RandomState(SEED)  # The same stream as np.random.seed(0), from which the reference draws.
  return {'train': [_reduced(row, rng) for row in test], 'test': test}


def kept_tests(rng: np.random.RandomState, count: int) -> np.ndarray:
  """Return the sorted indices of a question's tests for training: half of `count`, rounded down, at least one."""
  return np.sort(rng.choice(count, size=max(1, int(TRAIN_TESTS * count)), replace=False))


def _reduced(row: RawRow, rng: np.random.RandomState) -> RawRow:
  tests = json.loads(row.value['tests'])
  kept = kept_tests(rng, len(tests['inputs']))
  tests |= {key: [tests[key][at] for at in kept] for key in ('inputs', 'outputs')}
  return RawRow(row.origin, row.number, row.value | {'tests': json.dumps(tests, ensure_ascii=False)})


def _row(row: RawRow, idx: int, tests: dict[str, Any]) -> RawRow:
  problem, starter = field(row, 'question_content'), field(row, 'starter_code')
  if starter.strip():
    if 'def ' not in starter:
      raise UserError(f"{row.origin}: field 'starter_code' defines no function: {short_repr(starter)}.")
    # A class around the function is left out, and so is the text that a contest's site adds below it.
    signature = 'def ' + starter.split('def ')[1].split('Input\n')[0].strip()
    problem += SIGNATURE.format(signature=signature)
  return make_row(
    row,
    idx,
    kind='code',
    dataset='livecodebench',
    prompt=PROMPT.format(problem=problem),
    description=described(problem, 'code'),
    tests=json.dumps(tests, ensure_ascii=False),
  )


def _tests(row: RawRow) -> dict[str, Any]:
  cases = _cases(row, field(row, 'private_test_cases'))
  good = isinstance(cases, list) and all(
    isinstance(case, dict) and case.keys() >= {'input', 'output', 'testtype'} for case in cases
  )
  if not good or not cases:
    raise UserError(
      f"{row.origin}: field 'private_test_cases' must hold tests with input, output and testtype, not "
      f'{short_repr(cases)}.'
    )
  metadata = field(row, 'metadata')
  try:
    found = ground_truth.parse_json(metadata) if metadata.strip() else {}
  except ground_truth.InvalidJson as error:
    raise UserError(f"{row.origin}: field 'metadata' is not JSON: {error}.") from error
  return {
    'inputs': [case['input'] for case in cases],
    'outputs': [case['output'] for case in cases],
    'testtype': cases[0]['testtype'],
    'fn_name': (found.get('func_name') or '') if isinstance(found, dict) else '',
    'time_limit': TIME_LIMIT,
  }


def _cases(row: RawRow, text: str) -> Any:
  """Return tests stored as JSON, or as base64 of deflated, pickled JSON text."""
  try:
    return ground_truth.parse_json(text if text.lstrip().startswith('[') else _unpacked(text))
  except (ValueError, binascii.Error, zlib.error, *_PICKLE_ERRORS) as error:
    raise UserError(f"{row.origin}: field 'private_test_cases' cannot be read: {error}.") from error


def _unpacked(text: str) -> str:
  inflate = zlib.decompressobj()
  content = inflate.decompress(base64.b64decode(text, validate=True), LARGEST)
  if inflate.unconsumed_tail:
    raise ValueError(f'it is larger than {LARGEST} bytes')
  value = _Strings(io.BytesIO(content)).load()
  if not isinstance(value, str):
    raise ValueError(f'it is pickled {type(value).__name__} instead of text')
  return value


class _Strings(pickle.Unpickler):
  """An unpickler for text and plain containers only; it refuses whatever would import or call something."""

  def find_class(self, module: str, name: str) -> Any:
    raise pickle.UnpicklingError(f'it wants to load {module}.{name}')

  def persistent_load(self, pid: Any) -> Any:
    raise pickle.UnpicklingError('it refers to something outside')


def _date(row: RawRow) -> datetime.date:
  value = field(row, 'contest_date', kind=(str, datetime.datetime))
  if isinstance(value, datetime.datetime):
    return value.date()
  try:
    return datetime.datetime.fromisoformat(value).date()
  except ValueError as error:
    raise UserError(f"{row.origin}: field 'contest_date' is not a date: {short_repr(value)}.") from error
