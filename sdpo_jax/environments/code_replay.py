"""Test programs that run apart from the program they test.

A test of type `code` is a Python program that calls the model's functions and asserts. If both ran in one process, the
model's program could read what is expected, or report success itself. So the test runs in a process of its own, in which
stand-ins take the place of the model's functions and classes. A stand-in that is called in a way not seen before ends
that process; a fresh process of the model's program answers this one call with plain data; then the test starts again
and finds the answer. Objects of the model's classes stay on its side: every use of one replays what was done before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import json
from typing import Any

from sdpo_jax.environments.sandbox import Job, Limits, Report, Sandbox

MAX_CALLS = 1000  # Of a test; each costs two processes.
CALLED_CHARACTERS = 200  # Of the last call, as shown.
LITERAL_CHARACTERS = 1_000_000  # Of a value that is read back; parsing takes a hundred times its memory.


@dataclasses.dataclass(frozen=True)
class Trial:
  """A test program and the model's program that it tests."""

  code: str  # The model's.
  context: str  # Runs before either.
  test: str
  limits: Limits  # Of every process; `cpu_s` also of all the model's together.


@dataclasses.dataclass
class _State:
  answers: dict[str, Any] = dataclasses.field(default_factory=dict)  # By the JSON of what was asked.
  cpu_s: float = 0.0


def run(sandbox: Sandbox, trials: Sequence[Trial]) -> list[Report]:
  """What became of each test: `result` is {'finished': True} if it ran to its end, else {'error': …} or none.

  A report of another status is that of the process that ended so.
  """
  reports: list[Report | None] = [None] * len(trials)
  states = [_State() for _ in trials]
  pending = list(range(len(trials)))
  while pending:
    asked = _asked(sandbox, trials, states, pending, reports)
    _answer(sandbox, trials, states, asked, reports)
    pending = [number for number, _ in asked if reports[number] is None]
  return reports


def _asked(
  sandbox: Sandbox,
  trials: Sequence[Trial],
  states: Sequence[_State],
  pending: Sequence[int],
  reports: list[Report | None],
) -> list[tuple[int, list[Any]]]:
  """Runs tests with what is known; (test, operations) of those that need to know more, the others' reports filled in."""
  jobs = [_job(trials[n], 'replay', test=trials[n].test, answers=states[n].answers) for n in pending]
  asked = []
  for number, report in zip(pending, sandbox.run(jobs), strict=True):
    result = report.result if isinstance(report.result, dict) else {}
    if report.status != 'ended' or 'need' not in result:
      reports[number] = report
    elif len(states[number].answers) >= MAX_CALLS:
      said = f'ProcessError: the test calls the program more than {MAX_CALLS} times'
      reports[number] = dataclasses.replace(report, result={'error': said})
    else:
      asked.append((number, result['need']))
  return asked


def _answer(
  sandbox: Sandbox,
  trials: Sequence[Trial],
  states: Sequence[_State],
  asked: Sequence[tuple[int, list[Any]]],
  reports: list[Report | None],
) -> None:
  """Asks the model's programs; one that ends without an answer, or has used up its time, ends its test."""
  jobs = [_job(trials[number], 'operations', code=trials[number].code, operations=need) for number, need in asked]
  for (number, need), report in zip(asked, sandbox.run(jobs), strict=True):
    state, limits = states[number], trials[number].limits
    state.cpu_s += report.cpu_s
    if report.status != 'ended' or not isinstance(report.result, dict):
      reports[number] = dataclasses.replace(report, result=None)
    elif state.cpu_s > limits.cpu_s:
      reports[number] = dataclasses.replace(report, status='timeout', result=None)
    else:
      state.answers[key(need)] = _texts(report.result)


def _job(trial: Trial, kind: str, **more: Any) -> Job:
  return Job({'profile': 'clean', 'testtype': kind, 'context': trial.context, **more}, '', trial.limits)


def key(operations: Sequence[Any]) -> str:
  """What the harness looks an answer up by."""
  return json.dumps(operations, sort_keys=True)


def _is_short(value: Any) -> bool:
  return isinstance(value, str) and len(value) <= LITERAL_CHARACTERS


def _texts(result: dict[Any, Any]) -> dict[str, Any]:
  """Of an answer, which is whatever the program wrote, what the stand-ins understand."""
  kinds: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(('repr', 'arguments', 'raised', 'error', 'message'), _is_short),
    'object': lambda value: value is True,
    'method': lambda value: value is True,
  }
  found = {name: result[name] for name, fits in kinds.items() if name in result and fits(result[name])}
  return found or {'raised': 'TypeError', 'message': 'the program gave no answer'}
