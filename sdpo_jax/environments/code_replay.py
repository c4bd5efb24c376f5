"""Test programs that run apart from the program they test.

A test of type `code` is a Python program that calls the model's functions and asserts. If both ran in one process, the
model's program could read what is expected, or report success itself. So the test runs in a process of its own, in
which stand-ins take the place of the model's functions and classes. A stand-in that is called in a way not seen before
ends that process; a fresh process of the model's program answers this one call with plain data; then the test starts
again and finds the answer. Arguments are copies, but for those of a call that is a statement. Objects of the model's
classes stay on its side: every use of one replays what was done before.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from sdpo_jax.environments.helper_process import HelperPool, RequestOverranError
from sdpo_jax.environments.sandbox.sandbox import Job, Limits, Report, Sandbox

MAX_CALLS = 1000  # Of a test; each costs two processes.
# Of a test over all its starts, since what the model's program answers makes each of them longer: times `cpu_s`, not
# counting what a process takes in any case; and characters of answers, which this process writes anew for each.
MAX_REPLAY, START_S, MAX_SENT = 10.0, 0.02, 2**26
CALLED_CHARACTERS = 200  # Of the last call, as shown.


@dataclasses.dataclass(frozen=True)
class Trial:
  """A test program and the model's program that it tests."""

  code: str  # The model's.
  context: str  # Runs before either.
  test: str
  in_place: bool  # What the model's functions do to their arguments counts in every call, not only in statements.
  # Of every process; `cpu_s` also of all the model's together, and `MAX_REPLAY` times as much of all the test's.
  # `result_bytes` is that of one answer of the model's program, and of the test `output_mb`, as of all answers
  # together.
  limits: Limits


@dataclasses.dataclass(frozen=True)
class Ended:
  """What became of a test: the report of the process that ended it, and what there is to say."""

  report: Report
  result: dict[str, Any]  # {'finished': True} if the test ran to its end, else {'error': …, 'called': …} or nothing.


@dataclasses.dataclass
class _State:
  answers: dict[str, Any] = dataclasses.field(default_factory=dict)  # By the JSON of what was asked.
  characters: int = 0  # Of all answers.
  sent: int = 0  # Characters of answers, in all starts of the test.
  cpu_s: float = 0.0  # Of the model's program.
  test_cpu_s: float = 0.0


def run(sandbox: Sandbox, helpers: HelperPool, trials: Sequence[Trial]) -> list[Ended]:
  """Return what became of each test.

  Args:
    sandbox: where the tests and the model's programs run.
    helpers: processes of code_verdicts.py, which read the answers of the model's programs.
    trials: the tests.
  """
  ended: list[Ended | None] = [None] * len(trials)
  states = [_State() for _ in trials]
  pending = list(range(len(trials)))
  while pending:
    asked = _asked(sandbox, trials, states, pending, ended)
    _answer(sandbox, helpers, trials, states, asked, ended)
    pending = [number for number, _ in asked if ended[number] is None]
  return ended


def _asked(
  sandbox: Sandbox,
  trials: Sequence[Trial],
  states: Sequence[_State],
  pending: Sequence[int],
  ended: list[Ended | None],
) -> list[tuple[int, list[Any]]]:
  """Run tests with what is known; (test, operations) of those that need to know more, the others' ends filled in."""
  jobs = []
  for number in pending:
    limits = dataclasses.replace(trials[number].limits, result_bytes=None)
    job = _job(
      trials[number],
      'replay',
      test=trials[number].test,
      answers=states[number].answers,
      in_place=trials[number].in_place,
    )
    jobs.append(dataclasses.replace(job, limits=limits))
  asked = []
  for number, report in zip(pending, sandbox.run(jobs), strict=True):
    # Written by the harness alone, in a process that never held the model's program: texts in a frame of few objects.
    result = report.result if report.status == 'ended' and isinstance(report.result, dict) else {}
    state = states[number]
    state.test_cpu_s += max(0.0, report.cpu_s - START_S)
    state.sent += state.characters
    if 'need' not in result:
      ended[number] = Ended(report, result)
    elif state.test_cpu_s > MAX_REPLAY * trials[number].limits.cpu_s:
      ended[number] = Ended(dataclasses.replace(report, status='timeout'), {})
    elif state.sent > MAX_SENT:
      ended[number] = Ended(dataclasses.replace(report, status='output'), {})
    elif len(states[number].answers) >= MAX_CALLS:
      said = f'ProcessError: the test calls the program more than {MAX_CALLS} times'
      ended[number] = Ended(report, {'error': said})
    else:
      asked.append((number, result['need']))
  return asked


def _answer(
  sandbox: Sandbox,
  helpers: HelperPool,
  trials: Sequence[Trial],
  states: Sequence[_State],
  asked: Sequence[tuple[int, list[Any]]],
  ended: list[Ended | None],
) -> None:
  """Asks the model's programs; one that ends without an answer, or has used up its time, ends its test."""
  jobs = [_job(trials[number], 'operations', code=trials[number].code, operations=need) for number, need in asked]
  for (number, need), report in zip(asked, sandbox.run(jobs), strict=True):
    state, limits = states[number], trials[number].limits
    state.cpu_s += report.cpu_s
    if report.status != 'ended' or not report.result_bytes.startswith(b'{'):
      ended[number] = Ended(report, {})
    elif state.cpu_s > limits.cpu_s:
      ended[number] = Ended(dataclasses.replace(report, status='timeout'), {})
    else:
      try:
        found = helpers.ask({}, report.result_bytes, b'', b'')
      except RequestOverranError:
        found = {'raised': 'TypeError', 'message': 'the answer of the program cannot be read'}
      state.characters += sum(len(part) for part in found.values() if isinstance(part, str))
      if state.characters > limits.output_mb * 2**20:
        ended[number] = Ended(dataclasses.replace(report, status='output'), {})
      state.answers[key(need)] = found


def _job(trial: Trial, kind: str, **more: Any) -> Job:
  return Job({'profile': 'clean', 'testtype': kind, 'context': trial.context, **more}, '', trial.limits)


def key(operations: Sequence[Any]) -> str:
  """Return what the harness looks an answer up by."""
  return json.dumps(operations, sort_keys=True)
