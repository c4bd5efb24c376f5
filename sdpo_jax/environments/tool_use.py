"""Tool use (ToolAlpaca): compares the calls that a completion writes as `Action: NAME` and `Action Input: {JSON}`.

The ground truth is a JSON list of {"Action", "Action_Input"}, the input being JSON or a string of JSON.

The reference profile reproduces the scores and feedback of lasgroup/SDPO
verl/utils/reward_score/feedback/tooluse.py, with its quirks: inputs end at the first closing brace, those of all calls
are merged into one, and feedback shows the expected calls. The clean profile compares call by call, as JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
import itertools
import json
import re
from typing import Any

from sdpo_jax.environments.judging import TRUNCATED, after_thinking, by_profile, outcome
from sdpo_jax.environments.registry import register_factory
from sdpo_jax.errors import short_repr
from sdpo_jax.types import Example, Outcome

INPUT = 'Action Input:'
MAX_FAULTS = 10  # Sentences of feedback, and unknown arguments per sentence: a completion can hold thousands.
MAX_NAME = 100  # Characters of a name in feedback.
_NAME = re.compile(r'Action:\s*(\w+)')
_LINE = re.compile(r'^[ \t>*#-]*Action:[ \t*]*(?:\n[ \t]*)?([^\n]*)', re.MULTILINE)
_SPACE = re.compile(r'\s*')
_DECODER = json.JSONDecoder()

Call = tuple[str, Any]  # Name of the function and its arguments as a JSON value (None if they cannot be read).


def reference_tooluse(example: Example, completion: str, truncated: bool) -> Outcome:
  """Score 1 iff the multiset of names and the merger of all inputs equal those of the ground truth.

  Raises:
    TypeError, KeyError: the ground truth is not a string of JSON, or a call has no name, as in the reference.
  """
  try:
    truth = json.loads(example.ground_truth)
  except json.JSONDecodeError:
    return outcome(False, '', False, 'Failed to parse ground truth JSON')
  expected, expected_inputs = [], {}
  for call in truth:
    expected.append(call['Action'])
    expected_inputs.update(_reference_input(call.get('Action_Input')) or {})
  names, inputs = _NAME.findall(completion), {}
  for found in _reference_inputs(completion):
    inputs.update(found)
  wrong = []
  if Counter(names) != Counter(expected):
    wrong.append(f'Actions mismatch: predicted {names}, expected {expected}')
  if inputs != expected_inputs:
    wrong.append(f'Action inputs mismatch: predicted {inputs}, expected {expected_inputs}')
  start = completion.find('Action:')
  valid = start >= 0 and completion.find('\n' + INPUT, start + len('Action:')) >= 0
  return outcome(not wrong, f'Actions: {names}, Inputs: {inputs}', valid, '; '.join(wrong))


def _reference_input(value: Any) -> Any:
  if not isinstance(value, str):
    return value
  try:
    return json.loads(value)
  except json.JSONDecodeError:
    return {}


def _reference_inputs(text: str) -> Iterator[dict[str, Any]]:
  """Yield the matches of `Action Input:\\s*({.*?})` that are JSON, in linear time."""
  position = 0
  while (position := text.find(INPUT, position)) >= 0:
    position += len(INPUT)
    start = _SPACE.match(text, position).end()
    if text[start : start + 1] != '{':
      continue
    end = text.find('}', start)
    if end < 0:
      return
    try:
      yield json.loads(text[start : end + 1])
    except (ValueError, RecursionError):  # The reference raises on JSON nested too deeply or a number too long.
      pass
    position = end + 1


def calls_of(text: str) -> list[Call]:
  """Return the calls in a completion, in order, ignoring code fences and text around them."""
  lines = list(_LINE.finditer(text))
  calls = []
  for line, following in itertools.zip_longest(lines, lines[1:]):
    name, _, inline = line.group(1).partition(INPUT)
    end = following.start() if following else len(text)
    start = line.start(1) + len(name) if inline or INPUT in line.group(1) else text.find(INPUT, line.end(), end)
    calls.append((name.strip(' \t`*"\''), _object(text, start + len(INPUT), end) if start >= 0 else None))
  return calls


def _object(text: str, start: int, end: int) -> Any:
  """Return the JSON object that begins at the first brace of text[start:end], or None."""
  brace = text.find('{', start, end)
  if brace < 0:
    return None
  try:
    # Parse a substring: an error counts the lines before it, which would be quadratic over many calls.
    value = _DECODER.raw_decode(text[brace:end])[0]
    json.dumps(value)  # JSON nested too deeply to be written is not accepted either.
    return value
  except (ValueError, RecursionError):  # Includes numbers with more digits than Python reads.
    return None


def truth_of(ground_truth: Any) -> list[Call]:
  """Parse the calls of a ground truth.

  Raises:
    ValueError: the ground truth is not a list of calls.
  """
  calls = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
  if not isinstance(calls, list) or not all(isinstance(call, dict) and 'Action' in call for call in calls):
    raise ValueError('The ground truth of a tool-use question must be a JSON list of objects with an "Action".')
  inputs = (call.get('Action_Input') or {} for call in calls)
  inputs = [json.loads(value) if isinstance(value, str) else value for value in inputs]
  return [(str(call['Action']), value) for call, value in zip(calls, inputs, strict=True)]


def same(left: Any, right: Any) -> bool:
  """Return whether two JSON values are equal: 3 equals 3.0, but true does not equal 1."""
  if isinstance(left, bool) or isinstance(right, bool):
    return left is right
  if isinstance(left, dict) and isinstance(right, dict):
    return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
  if isinstance(left, list) and isinstance(right, list):
    return len(left) == len(right) and all(map(same, left, right))
  return left == right


def clean_tooluse(example: Example, completion: str, truncated: bool, reveal_answer: bool) -> Outcome:
  """Score 1 iff the calls are those of the ground truth, in any order, each with its own arguments."""
  expected, got = truth_of(example.ground_truth), calls_of(after_thinking(completion))
  missing = list(expected)
  wrong = []  # Calls that are not expected.
  for number, call in enumerate(got, 1):
    match = next((i for i, (name, value) in enumerate(missing) if name == call[0] and same(value, call[1])), None)
    if match is None:
      wrong.append((number, call))
    else:
      missing.pop(match)
  said = ' '.join(itertools.islice(_faults(wrong, missing, len(got), truncated), MAX_FAULTS))
  if said and reveal_answer:
    said += ' Expected: ' + '; '.join(f'{name} {json.dumps(value, ensure_ascii=False)}' for name, value in expected)
  pred = json.dumps(sorted(got, key=repr), ensure_ascii=False, sort_keys=True)
  valid = bool(got) and all(name and isinstance(value, dict) for name, value in got)
  return outcome(not said, pred, valid or (not got and not expected), said)


def _faults(wrong: list[tuple[int, Call]], missing: list[Call], made: int, truncated: bool) -> Iterator[str]:
  """Yield sentences on what is wrong, without expected names or values."""
  if not wrong and not missing:
    return
  if truncated:
    yield f'{TRUNCATED}.'
  if not made:
    yield f'You called no function: write "Action: NAME", and on the next line "{INPUT} " with a JSON object.'
    return
  left = list(missing)
  for number, (name, value) in wrong:
    twin = next((i for i, (other, _) in enumerate(left) if other == name), None)
    name = name if len(name) <= MAX_NAME else name[:MAX_NAME] + '…'
    if value is None:
      yield f'Call {number} ({name}) has no readable arguments: write "{INPUT} " with a JSON object after the action.'
    elif twin is None:
      yield f'Call {number}: {name!r} is not to be called here, or not so often.'
    else:
      yield f'Call {number} ({name}): ' + _argument_faults(value, left[twin][1])
    if twin is not None:
      left.pop(twin)
  if len(missing) > len(wrong):
    yield 'A call is missing.'


def _argument_faults(got: Any, expected: Any) -> str:
  if not isinstance(got, dict) or not isinstance(expected, dict):
    return 'the arguments are wrong.'
  known = [key for key in got if key in expected and not same(got[key], expected[key])]
  faults = [f'the value of {short_repr(key, MAX_NAME)} is wrong' for key in known]
  unknown = (key for key in got if key not in expected)
  faults += [f'{short_repr(key, MAX_NAME)} is not to be given' for key in itertools.islice(unknown, MAX_FAULTS)]
  faults += ['an argument is missing'] * bool(expected.keys() - got.keys())
  return ', '.join(faults) + '.'


register_factory('tooluse')(by_profile(reference_tooluse, clean_tooluse))
