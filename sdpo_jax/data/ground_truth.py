"""Checks of ground truths, before a run starts, for the graders of code, tool calls, choices and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import json
import re
from typing import Any

from sdpo_jax.errors import short_repr

TEST_TYPES = ('functional', 'stdin', 'code')
_LONGEST = 1e9  # Largest time limit, in seconds: 30 years.


class InvalidJson(ValueError):
  """A text is not valid JSON; the message says why."""


def parse_json(text: str) -> Any:
  """Parse JSON text; whatever is wrong with it raises InvalidJson.

  Raises:
    InvalidJson: the text is not JSON, is nested too deeply, or has a number too long to read.
  """
  try:
    return json.loads(text)
  except json.JSONDecodeError as error:
    raise InvalidJson(f'{error.msg} at line {error.lineno}, column {error.colno}') from error
  except RecursionError as error:
    raise InvalidJson('it is nested too deeply') from error
  except ValueError as error:  # An integer of more digits than Python converts.
    raise InvalidJson(str(error).partition(';')[0]) from error


def is_checked(environment: str) -> bool:
  """Return whether `check` can check the ground truths of this grader."""
  return environment in _CHECKS


def check(environment: str, truth: Any) -> str | None:
  """Return what is wrong with the ground truth of a question of `environment`, or None.

  The result is a phrase that follows the name of the field: 'must be a non-empty string, not 3'.
  """
  return _CHECKS[environment](truth) if environment in _CHECKS else None


def _text(truth: Any) -> str | None:
  return None if isinstance(truth, str) and truth.strip() else f'must be a non-empty string, not {short_repr(truth)}'


def _letter(truth: Any) -> str | None:
  if isinstance(truth, str) and re.fullmatch('[A-Z]', truth):
    return None
  return f'must be the letter of the right choice, such as "A", not {short_repr(truth)}'


def _tests(truth: Any) -> str | None:
  """Check unit tests: JSON with inputs, outputs, testtype, … (reference data/utils/livecodebench.py)."""
  tests, wrong = _json(truth)
  if wrong:
    return wrong
  if not isinstance(tests, Mapping):
    return f'must be a JSON object of unit tests, not {short_repr(tests)}'
  if missing := [key for key in ('inputs', 'outputs', 'testtype', 'time_limit') if key not in tests]:
    return f'lacks {" and ".join(map(repr, missing))}: unit tests have inputs, outputs, testtype and time_limit'
  inputs, outputs, limit = tests['inputs'], tests['outputs'], tests['time_limit']
  for key in ('inputs', 'outputs'):
    if not isinstance(tests[key], list):
      return f'must have a list as {key!r}, not {short_repr(tests[key])}'
  if not inputs or len(inputs) != len(outputs):
    return f'must have as many outputs as inputs and at least one, not {len(inputs)} inputs and {len(outputs)} outputs'
  if tests['testtype'] not in TEST_TYPES:
    return f"must have a 'testtype' of {', '.join(TEST_TYPES)}, not {short_repr(tests['testtype'])}"
  name = tests.get('fn_name')
  if tests['testtype'] == 'functional' and not (isinstance(name, str) and name.strip()):
    return f"must name the function to call in 'fn_name' for functional tests, not {short_repr(name)}"
  number = isinstance(limit, int | float) and not isinstance(limit, bool)
  if limit is not None and not (number and 0 < limit <= _LONGEST):
    return f"must have null or a positive number of seconds as 'time_limit', not {short_repr(limit)}"
  return None


def _calls(truth: Any) -> str | None:
  """Check a list of tool calls, each {"Action", "Action_Input"}, the input being an object or JSON of one."""
  calls, wrong = _json(truth)
  if wrong:
    return wrong
  if not isinstance(calls, list) or not calls:
    return f'must be a non-empty JSON list of calls, not {short_repr(calls)}'
  for call in calls:
    if not isinstance(call, Mapping) or not isinstance(call.get('Action'), str) or 'Action_Input' not in call:
      return f"must hold calls with 'Action' and 'Action_Input', not {short_repr(call)}"
    given = call['Action_Input']
    if isinstance(given, str):
      given, wrong = _json(given)
      if wrong:
        return f"has a call of {call['Action']!r} whose 'Action_Input' {wrong}"
    if not isinstance(given, Mapping):
      return f"has a call of {call['Action']!r} whose 'Action_Input' must be a JSON object, not {short_repr(given)}"
  return None


def _json(truth: Any) -> tuple[Any, str | None]:
  if not isinstance(truth, str):
    return None, f'must be a string of JSON, not {short_repr(truth)}'
  try:
    return parse_json(truth), None
  except InvalidJson as error:
    return None, f'is not JSON: {error}'


_CHECKS: dict[str, Callable[[Any], str | None]] = {
  'code': _tests,
  'tooluse': _calls,
  'mcq': _letter,
  'gpqa': _letter,
  'mmlu_pro': _letter,
  'math': _text,
  'longhealth': _text,
  'chrf': _text,
}
