"""JSON objects, and lines of them, that hold their own SHA-256, so that a reader notices if they were changed.

A line ends with its `line_digest`, two numbers of 32 hex digits: the digest of the line's own text, and one that also
covers the line before, by which a reader notices if lines were removed, moved, or put in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import hashlib
import json
import re
from typing import Any

from etils import epath

from sdpo_jax.errors import UserError, first_line
from sdpo_jax.files import json_object, read_bytes, read_json_object
from sdpo_jax.tables import spans

SEAL = 'sha256'  # Key of the SHA-256 of all other entries.
LINE_DIGEST = 'line_digest'  # Key of a line's digest.
# The results of `check_line`. A line is misplaced if the line before it is not the one that it was written after.
STATES = WHOLE, ALTERED, MISPLACED, UNSEALED = 'whole', 'altered', 'misplaced', 'unsealed'
# Either is found in an object that `seal` wrote, even if the other was changed.
_SEALED = re.compile(rb'\n "sha256"|\n "[^\n]*"[0-9a-f]{64}",?\n')
_DIGEST = rb'[0-9a-f]{32}-[0-9a-f]{32}'
_LINE = re.compile(rb'(.*), "line_digest": "(' + _DIGEST + rb')"\}', re.DOTALL)
_SEALED_LINE = re.compile(rb'"line_digest"|' + _DIGEST)


def seal(values: Mapping[str, Any]) -> str:
  """Return the text of a JSON object with these values and their seal."""
  values = {name: value for name, value in values.items() if name != SEAL}
  text = json.dumps(values, sort_keys=True)
  return json.dumps(values | {SEAL: hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True, indent=1) + '\n'


def unseal(content: bytes) -> dict[str, Any]:
  """Return the values of an object that `seal` wrote.

  Raises:
    ValueError: the content differs from what `seal` returned, even by one bit.
  """
  try:
    values = json.loads(content)
    whole = isinstance(values, dict) and seal(values).encode() == content
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error
  if not whole:
    raise ValueError(f'it does not agree with its {SEAL}' if content else 'it is empty')
  return values


def read_sealed(path: epath.PathLike, way_out: str) -> dict[str, Any]:
  """Return the values of an object in a file of a run, or of one without a seal, which an earlier version wrote.

  Arguments and errors as in `read_json_object`, or the file is not as it was written.
  """
  content = read_bytes(path, way_out)
  try:
    values = unseal(content)
  except ValueError as error:
    if is_sealed(content):
      raise UserError(
        f'{path} is not as it was written ({first_line(error)}): {way_out}; if the change is yours, remove its {SEAL}.'
      ) from error
    values = read_json_object(path, way_out)
  values.pop(SEAL, None)  # Another program may have written it anew, with the seal as a value.
  return values


def is_sealed(content: bytes) -> bool:
  """Return whether an object has a seal, be it whole or not."""
  return _SEALED.search(content) is not None


def line_digest(text: str | bytes, before: str) -> str:
  """Return the digest of a line without its `LINE_DIGEST`, after a line with the digest `before`."""
  own = hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]
  return f'{own}-{hashlib.sha256(f"{before} {own}".encode()).hexdigest()[:32]}'


def last_digest(lines: Iterable[Mapping[str, Any]]) -> str:
  """Return the digest of the last of some lines, of which the first ones may have none; '' without a line."""
  before = ''
  for line in lines:
    before = line[LINE_DIGEST] if LINE_DIGEST in line else line_digest(json.dumps(line), before)
  return before


def check_line(line: bytes, before: str) -> tuple[str, str]:
  """Return `WHOLE`, `ALTERED`, `MISPLACED` or `UNSEALED` for a line after one with the digest `before`; and its digest.

  A line without a digest is one of an earlier version; the digest of the line after it covers it.
  """
  match = _LINE.fullmatch(line)
  if match is None:
    return ALTERED if _SEALED_LINE.search(line[-90:]) else UNSEALED, line_digest(line, before)
  recorded, found = match[2].decode(), line_digest(match[1] + b'}', before)
  if recorded == found:
    return WHOLE, recorded
  return MISPLACED if recorded[:32] == found[:32] else ALTERED, recorded


def seal_lines(lines: Sequence[Mapping[str, Any]], name: str) -> str:
  """Return the text of a whole file of lines with their digests, the first of which covers the file's `name`."""
  texts, before = [], beginning(name, len(lines))
  for line in lines:
    before = line_digest(json.dumps(line, allow_nan=False), before)
    texts.append(json.dumps({**line, LINE_DIGEST: before}) + '\n')
  return ''.join(texts)


def result_fault(name: str, content: bytes) -> tuple[str | None, bool]:
  """Return what is wrong with the content of a file in `rollouts/` or `eval/`, None if nothing; and if it has a seal.

  Args:
    name: the file's name: a step, and `.json` for an object or `.jsonl` for lines of them.
    content: its content.
  """
  step = name.partition('.')[0]
  if name.endswith('.json'):
    values = json_object(content) or None  # No version has written an empty one.
    try:
      unseal(content)
    except ValueError as error:
      if is_sealed(content) or values is None:
        return f'is not as it was written ({first_line(error)})', True
    return None if str(values.get('step', step)) == step else 'is the file of another step', is_sealed(content)
  *parts, end = content.split(b'\n')
  if end or not parts:  # Every step has samples.
    return 'its end is missing', True
  before, states = beginning(step, len(parts)), {state: [] for state in STATES}
  for number, part in enumerate(parts, 1):
    state, before = check_line(part, before)
    states[state if json_object(part) else ALTERED].append(number)
  if altered := states[ALTERED]:
    return f'line {spans(altered)} is not as it was written', True
  if misplaced := states[MISPLACED]:
    return f'lines were removed, moved or altered before line {spans(misplaced)}', True
  return None, not states[UNSEALED]


def beginning(name: str, count: int) -> str:
  """Return what the digest of the first of `count` lines covers in a file that is written as a whole."""
  return f'{name} {count}'
