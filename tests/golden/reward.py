"""Checks the golden files of kind `reward`: scores, metrics and feedback of every grader in the reference profile.

Code feedback quotes the messages of CPython 3.11. On another version the texts that quote one are not compared, but
everything else is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import json
import math
import pathlib
import sys
from typing import Any

from sdpo_jax.config import EnvironmentsConfig
from sdpo_jax.data.rows import ENVIRONMENTS
from sdpo_jax.environments import code, code_feedback
from sdpo_jax.environments.grading import Graders
from sdpo_jax.types import Example, Outcome
from tests.golden.report import Report

KIND = 'reward'
SETTINGS = EnvironmentsConfig(profile='reference')
QUOTING = (3, 11)  # The Python whose messages the files quote.
GRADED = ('mcq', 'gpqa', 'mmlu_pro', 'tooluse', 'math', 'code')


def check(directory: pathlib.Path | str) -> Report:
  """Every case of every file of this kind in `directory`; files may be missing."""
  directory = pathlib.Path(directory)
  report = Report(KIND)
  with Graders(SETTINGS) as graders:

    def grade(name, case):
      return _grade(graders, name, case)

    for name in GRADED:
      for case in _cases(directory / f'{name}.json'):
        with _case(report, f'{name}.json {case["name"]}'):
          _compare(name, lambda name=name, case=case: grade(name, case), case)
    for case in _cases(directory / 'dispatch.json'):
      with _case(report, f'dispatch.json {case["name"]}'):
        full = {'solution_str': '\\boxed{1}', 'ground_truth': '1', 'extra_info': {'split': 'test'}, **case}
        _compare('dispatch', lambda full=full: grade(ENVIRONMENTS[full['data_source']], full), full)
  for case in _cases(directory / 'code_feedback_format.json'):
    with _case(report, f'code_feedback_format.json {case["name"]}'):
      records = [_record(record) for record in case['records']]
      truncated = case['kwargs'].get('was_truncated', False)
      _same('feedback', code_feedback.format_test_feedback(records, truncated=truncated), case['expected'])
  for index, case in enumerate(_cases(directory / 'code_extract.json')):
    with _case(report, f'code_extract.json {index}'):
      _same('code', code.extract_code(case['input']), case['expected'])
  return report


def _cases(path: pathlib.Path) -> list[dict[str, Any]]:
  return json.loads(path.read_text(encoding='utf-8'))['cases'] if path.exists() else []


@contextlib.contextmanager
def _case(report: Report, name: str) -> Iterator[None]:
  report.cases += 1
  try:
    yield
  except Exception as error:  # Whatever goes wrong is this case's failure; the others still run.
    report.fail(name, f'{type(error).__name__}: {error}')


def _grade(graders: Graders, name: str, case: dict[str, Any]) -> Outcome:
  """One completion by the grader itself, so that what it raises is seen."""
  source = case.get('data_source', name)
  extra = case.get('extra_info')
  example = Example('golden', [], name, case['ground_truth'], source, extra)
  truncated = bool((extra or {}).get('truncated', False))
  return graders.get(name)([example], [case['solution_str']], truncated=[truncated])[0]


def _compare(name: str, grade: Callable[[], Outcome], case: dict[str, Any]) -> None:
  expected = case['expected']
  if '__exception__' in expected:
    try:
      outcome = grade()
    except Exception:  # That it raises is checked, not the wording.
      return
    raise AssertionError(f'{outcome} and nothing was raised, the reference raises {expected["__exception__"]}')
  outcome = grade()
  ours = {**outcome.metrics, 'score': outcome.score, 'feedback': outcome.feedback}
  quotes = name == 'code' and expected['error_in_test_cases'] and sys.version_info[:2] != QUOTING
  for key, value in expected.items():
    if not (quotes and key in ('pred', 'feedback')):
      _same(key, ours[key], value)
  if 'expected_dense' in case:  # The score of its other mode is the fraction of tests passed.
    _same('dense score', outcome.metrics['acc'], case['expected_dense']['score'])


def _record(values: dict[str, Any]) -> code_feedback.Record:
  return code_feedback.Record(
    test_idx=values['test_idx'],
    input=values['input'],
    expected=values['expected'],
    actual=str(values['actual']),
    passed=values['passed'],
    debug=values['debug'],
  )


def _same(name: str, ours: Any, expected: Any) -> None:
  both_nan = isinstance(ours, float) and isinstance(expected, float) and math.isnan(ours) and math.isnan(expected)
  if ours != expected and not both_nan:
    raise AssertionError(f'{name}: {ours!r}, expected {expected!r}')
