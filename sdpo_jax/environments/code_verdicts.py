"""Comparison of a program's output with the expected output of its test, in a process of its own.

    python -I -X utf8 code_verdicts.py DESCRIPTOR

A program may return and print anything, and parsing can take up to a hundred times its size in memory. So this file
runs beside the training process, with limits, and answers the requests that arrive on the socket DESCRIPTOR
(helper_process.py). It never runs a program. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import decimal
import gc
import json
import math
from multiprocessing.connection import Connection
import resource
import signal
import sys
from typing import Any

CPU_S = 5.0  # Per request; a result within the size limit takes less than a tenth of it.
MEMORY = 2**30  # Bytes of address space.

ERROR = 'Error: '  # As in code_feedback.py.
SHOWN_CHARACTERS = 4000  # Characters of an output that are kept: more than feedback can show.
PRED_CHARACTERS = 5000
DEBUG_LINES, DEBUG_CHARACTERS = 10, 301  # Limits of standard error in feedback, plus one character.
LITERAL_CHARACTERS = 1_000_000  # Limit of a value the harness reads back; parsing takes a hundred times its memory.

DIED = 'Process Error: EOFError: '  # What the reference's parent process reports for a process that died.
# What it reports if the result cannot be sent: there the error handler itself fails.
UNSENT = "ERROR: UnboundLocalError: cannot access local variable 'e' where it is not associated with a value"


# ———— Comparing ————


def same_stdout_reference(actual: str, expected: str) -> bool:
  """Return whether outputs are equal after stripping, with spaces for newlines and without carriage returns."""
  left, right = (text.strip().replace('\n', ' ').replace('\r', '') for text in (actual, expected))
  return left == right


def same_stdout(actual: str, expected: str, tolerance: float = 0.0) -> bool:
  """Compare line by line, ignoring trailing space and blank last lines: equal text, or numbers within `tolerance`."""
  left, right = ([line.rstrip() for line in text.strip().split('\n')] for text in (actual, expected))
  return _all_same(_same_line, left, right, tolerance)


def _all_same(same: Callable[[Any, Any, float], bool], left: Sequence, right: Sequence, tolerance: float) -> bool:
  return len(left) == len(right) and all(same(a, b, tolerance) for a, b in zip(left, right, strict=True))


def _same_line(left: str, right: str, tolerance: float) -> bool:
  return left == right or _all_same(_same_word, left.split(), right.split(), tolerance)


def _same_word(left: str, right: str, tolerance: float) -> bool:
  try:
    if tolerance and left != right:
      return _close(float(left), float(right), tolerance)
    return left == right or decimal.Decimal(left) == decimal.Decimal(right)
  except (ValueError, decimal.InvalidOperation):
    return False


def _close(left: float, right: float, tolerance: float) -> bool:
  return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(left) and math.isnan(right))


def same_value(actual: Any, expected: Any, tolerance: float = 0.0) -> bool:
  """Return whether data are equal: tuple = list, 1 = 1.0, true ≠ 1, NaN = NaN, and numbers within `tolerance`."""
  if isinstance(actual, bool) or isinstance(expected, bool):
    return actual is expected
  if isinstance(actual, int | float) and isinstance(expected, int | float):
    if isinstance(actual, int) and isinstance(expected, int) and not tolerance:
      return actual == expected
    try:
      return _close(float(actual), float(expected), tolerance)
    except OverflowError:  # An integer too large for a float.
      return actual == expected
  if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
    return _all_same(same_value, actual, expected, tolerance)
  if isinstance(actual, dict) and isinstance(expected, dict):
    return actual.keys() == expected.keys() and all(
      same_value(value, expected[key], tolerance) for key, value in actual.items()
    )
  return type(actual) is type(expected) and actual == expected


# ———— Verdicts ————


def verdict(question: dict, result: bytes, stdout: bytes, stderr: bytes) -> dict:
  """Return the result of one test.

  Args:
    question: profile, testtype, expected, tolerance; status, exit_code, signal and dropped of the report (sandbox.py).
    result: what the harness returned, as JSON; b'' if it returned nothing.
    stdout: the part of the program's standard output that was kept.
    stderr: the same for its standard error.

  Returns:
    'passed'; 'actual', 'characters' and 'written': the output, its length and the end of its repr(); 'expected' as
    shown; 'mentions_error'; 'debug' and 'debug_lines': the first lines of standard error and their number.
  """
  said = parts_of(result, 'result' in question['dropped'])
  if question['profile'] == 'reference':
    found = _reference(question, said)
    debug = said.get('debug', '')[: DEBUG_LINES * (DEBUG_CHARACTERS + 1)]
    return found | {'debug': debug, 'debug_lines': said.get('debug_lines', 0)}
  return _clean(question, said, stdout) | _debug(stderr.decode(errors='replace'))


def parts_of(result: bytes, cut: bool) -> dict[str, Any]:
  """Return the valid fields of the harness's result; {} if there are none.

  A program may have forged the result, so only fields of the right type are returned. If the result was `cut` off,
  these are the fields before the value itself, which comes last.
  """
  said = _parsed(result)
  if said is None and cut:
    said = _parsed(result[: result.find(b', "whole": ')] + b'}')
  if not isinstance(said, dict):
    return {}
  kinds = dict.fromkeys(('output', 'repr', 'error', 'whole', 'debug', 'unsent'), str)
  kinds |= {'characters': int, 'debug_lines': int, 'mentions': bool}
  return {name: said[name] for name, kind in kinds.items() if type(said.get(name)) is kind}


def _parsed(text: bytes) -> Any:
  """Parse JSON; return None if it is invalid or nested too deeply."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return None


def _clean(question: dict, said: dict, stdout: bytes) -> dict:
  kind, expected, tolerance = question['testtype'], question['expected'], question['tolerance']
  shown = None if expected is None else str(expected)
  if question['status'] == 'output' and 'result' not in question['dropped']:
    return _error(ending(question), shown)
  if said.get('error'):
    return _error(said['error'], shown)
  if kind == 'stdin':
    if question['status'] != 'ended' or question['exit_code'] != 0:
      return _error(ending(question), shown)
    text = stdout.decode(errors='replace')
    passed = 'stdout' not in question['dropped'] and same_stdout(text, str(expected), tolerance)
    actual = text.strip()
    found = _shown(actual, repr(actual), passed, str(expected).strip())
    return found | {'characters': found['characters'] + question['dropped'].get('stdout', 0)}
  if kind != 'functional':
    return _error(f'ValueError: Invalid test type: {kind}', shown)
  cut = 'result' in question['dropped'] and 'output' in said
  if 'whole' not in said and not cut:
    return _error(ending(question), shown)
  passed = not cut and _same_json(said['whole'], expected, tolerance)
  return _made(said, passed, shown)


def _reference(question: dict, said: dict) -> dict:
  kind, expected = question['testtype'], question['expected']
  shown = None if expected is None else str(expected)

  def wrong(actual: str) -> dict:
    return _shown(actual, repr(actual), False, shown, kind)

  if 'error' not in said and 'output' not in said:
    return wrong(DIED)
  if kind == 'stdin' and not isinstance(expected, str):
    return wrong(f"{ERROR}AttributeError: {type(expected).__name__!r} object has no attribute 'strip'")
  if 'error' in said:
    return wrong(f'{ERROR}{said["error"]}')
  if kind == 'stdin':
    wanted = expected.strip()
    wanted = wanted[:-1].rstrip() if wanted.endswith('-') else wanted
    return _made(said, 'whole' in said and same_stdout_reference(said['whole'], wanted), wanted)
  if kind == 'code':
    return _made(said, 'result' not in question['dropped'], shown)
  try:  # As in the reference, an expected value that is not JSON is an error, whatever the answer.
    wanted = json.dumps(json.loads(expected), sort_keys=True)
  except (ValueError, TypeError, RecursionError) as error:
    return wrong(f'{ERROR}{error}')
  return wrong(UNSENT) if 'unsent' in said else _made(said, said.get('whole') == wanted, shown)


def _made(said: dict, passed: bool, shown: str | None) -> dict:
  """Return the verdict on a value that the harness describes."""
  found = _shown(said.get('output', ''), said.get('repr', ''), passed, shown)
  return found | {'characters': said.get('characters', 0), 'mentions_error': said.get('mentions', False)}


def _error(text: str, shown: str | None) -> dict:
  return _shown(ERROR + text, repr(ERROR + text), False, shown)


def _shown(actual: str, written: str, passed: bool, shown: str | None, kind: str = 'stdin') -> dict:
  # A value that is not a string, such as a list, is no error either.
  mentions = ERROR in actual and (kind != 'functional' or actual.startswith(ERROR) or written[:1] in ('"', "'"))
  return {
    'actual': actual[:SHOWN_CHARACTERS],
    'characters': len(actual),
    'written': written[-PRED_CHARACTERS:],
    'passed': passed,
    'expected': None if shown is None else shown[:SHOWN_CHARACTERS],
    'mentions_error': mentions,
  }


def _debug(text: str) -> dict:
  lines = text.strip().split('\n')
  return {'debug': '\n'.join(line[:DEBUG_CHARACTERS] for line in lines[:DEBUG_LINES]), 'debug_lines': len(lines)}


def _same_json(text: str, expected: Any, tolerance: float) -> bool:
  try:
    wanted = json.loads(expected) if isinstance(expected, str) else expected
    return same_value(json.loads(text), wanted, tolerance)
  except (ValueError, RecursionError):
    return False


def ending(question: dict) -> str:
  """Describe how a program ended that has not finished its test."""
  if question['status'] == 'output':
    return 'OutputError: the program printed or returned too much'
  if question['status'] == 'killed':
    return f'ProcessError: the program was killed by signal {question["signal"]} (out of memory, or a forbidden call)'
  return f'ProcessError: the program ended with exit code {question["exit_code"]} before its test was done'


def answer_of(result: bytes) -> dict:
  """Return the valid fields of a model program's answer, for the stand-ins of a test program (code_replay.py)."""
  said = _parsed(result)

  def is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LITERAL_CHARACTERS

  kinds = dict.fromkeys(('repr', 'arguments', 'raised', 'error', 'message'), is_short)
  kinds |= dict.fromkeys(('object', 'method'), lambda value: value is True)
  said = said if isinstance(said, dict) else {}
  found = {name: said[name] for name, fits in kinds.items() if name in said and fits(said[name])}
  return found or {'raised': 'TypeError', 'message': 'the program gave no answer'}


# ———— The process ————


def respond(question: dict, *parts: bytes) -> dict:
  """Return the answer to a request; a question without a profile asks for `answer_of`."""
  return verdict(question, *parts) if 'profile' in question else answer_of(parts[0])


def serve(connection: Connection) -> None:
  """Answer requests until the other side closes the connection."""
  connection.send_bytes(b'')
  while True:
    try:
      question, *parts = (connection.recv_bytes() for _ in range(4))
    except EOFError:
      return
    # The signal's default action ends this process, even inside a C function.
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
      said = respond(json.loads(question), *parts)
    except (MemoryError, RecursionError):
      said = {'overran': True}
    except Exception as error:  # A fault of this file, reported by the other side.
      said = {'fault': f'{type(error).__name__}: {error}'}
    answer = json.dumps(said).encode()
    signal.setitimer(signal.ITIMER_PROF, 0)
    connection.send_bytes(answer)


if __name__ == '__main__':
  signal.signal(signal.SIGPROF, signal.SIG_DFL)  # The owner may ignore it, and children inherit that.
  signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
  gc.disable()  # Nothing here makes cycles, and collections take most of the time of parsing.
  resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  serve(Connection(int(sys.argv[1])))
